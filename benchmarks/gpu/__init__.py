"""Benchmark of training, evaluation and serving on one NVIDIA GPU; see `benchmarks.gpu.__main__`."""
