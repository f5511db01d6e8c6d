"""Benchmark of shared storage: `tuneline storage benchmark`.

Every host runs the same phases in a private folder below the benchmarked path. A phase starts rank processes, which
read and write at the same time; their measurements are gathered through files in that folder.
"""
