"""Training on an existing Ray cluster: the launcher, the entry point of a Ray job, and the preStop hook of its pods."""
