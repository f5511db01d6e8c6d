"""Deployment of a package: install its files, replace the version in a running Triton, and smoke-test it."""
