"""Metrics of answers: text similarity, numeric answers, JSON answers and repetition. Tasks of the evaluation and rewards use them."""
