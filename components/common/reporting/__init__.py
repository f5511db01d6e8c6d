"""Reports of a run: progress and events, HTML report elements, MLflow tracking, and the cost of a stage."""
