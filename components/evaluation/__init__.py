"""Evaluation stage: score the candidate, its base model and the incumbent on the same items, and apply the promotion gate."""
