"""Provenance of registered models: lineage, reproduction, artifact and environment diffs, and erasure searches."""
