"""Comparison of rows: duplicate detection, and split assignment that keeps similar rows in one split."""
