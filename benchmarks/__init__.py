"""Benchmarks that compare tuneline with its peers in one run."""
