"""Reports of a run: progress and events, HTML report elements, and MLflow tracking."""
