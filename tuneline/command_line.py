"""The console script `tuneline`. Importing the package checks the import path before the command line is imported."""

from __future__ import annotations


def main() -> None:
    """Run the command line; see `pipelines.cli.main`."""
    from pipelines.cli.main import main as run_command

    run_command()
