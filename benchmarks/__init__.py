"""Benchmarks against peers, side by side, in one run each."""
