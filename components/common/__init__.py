"""Code shared by the stages: artifacts, workdir, models, launchers, personal data, reporting and process handling.

Imports between its packages point one way; import-linter enforces the order.
"""
