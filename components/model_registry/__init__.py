"""Model registry stage: register models as versions in MLflow, move their aliases, and keep a history of every move."""
