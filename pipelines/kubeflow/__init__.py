"""Runs on Kubeflow Pipelines.

`submission` starts and follows a run; `preflight` checks a cluster before a run.
"""
