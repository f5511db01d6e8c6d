"""Evaluation stage: score the candidate, its base and the incumbent on the same items, and apply the promotion gate."""
