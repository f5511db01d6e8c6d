"""Evaluation tasks: one module per task kind with its settings, items and scoring; task_registry.py lists the kinds."""
