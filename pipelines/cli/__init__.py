"""The command line. Results go to standard output (one JSON object under --json), everything else to standard error.

Only what parses the command line is imported before a command runs: `tuneline --help` must not wait for torch.
"""
