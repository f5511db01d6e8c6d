"""The command line. Results go to standard output (one JSON object with --json), everything else to standard error.

A command imports its dependencies when it runs, so that `tuneline --help` does not wait for torch.
"""
