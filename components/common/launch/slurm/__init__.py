"""Training as a batch job of Slurm: one task a node, which runs torchrun; queued anew and resumed when its time is over."""
