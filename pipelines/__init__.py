"""The pipeline built from the stages: command line, configuration, Kubeflow pipelines, local runs and operations.

Its packages import one another in one direction only; import-linter enforces the order.
"""
