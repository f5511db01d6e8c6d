"""Local runs: execution through kfp.local, run folders with their lock, status and logs, and the summary of a run."""
