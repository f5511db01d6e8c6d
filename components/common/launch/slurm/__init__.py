"""Training as a Slurm batch job with one torchrun task per node; requeued and resumed at its time limit."""
