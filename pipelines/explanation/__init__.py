"""Explanations of single answers: the words of the prompt and the training rows that pushed towards the answer."""
