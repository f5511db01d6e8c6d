"""Metrics of answers: text similarity, numeric answers and JSON answers."""
