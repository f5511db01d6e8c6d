"""Data versioning stage: publish a dataset as a revision of a git repository with a DVC remote, and read revisions."""
