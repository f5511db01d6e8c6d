"""Preflight checks of a cluster for a platform.yaml: the findings of `tuneline doctor -p platform.yaml`."""
