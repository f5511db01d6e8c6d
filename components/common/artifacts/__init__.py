"""Artifacts: folders with a manifest.

`artifact_folder` publishes and verifies artifacts. `hashing` and `code_digest` compute digests. `object_storage` moves
objects to and from S3. `output_paths` checks output paths given on the command line.
"""
