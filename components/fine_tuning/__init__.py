"""Fine-tuning stage: train a model on a dataset, with checkpoints, exact resume and sweeps of recipes."""
