"""Comparison of the texts of rows, for the duplicates of a curation and for evaluated rows that a model was trained on."""
