"""The version at build time, from the last tag `v*` of the checkout. An installation reads its metadata instead."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

WITHOUT_TAGS = "0.1.0"


def build_version(description: str) -> str:
    """Return the version for the output of `git describe --long`: v1.2.0-0-g5f3a is 1.2.0, v1.2.0-4-g5f3a is 1.2.0.post4+g5f3a."""
    match = re.fullmatch(r"v(\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?)-(\d+)-(g[0-9a-f]+)", description)
    if not match:
        return WITHOUT_TAGS
    tag, commits, commit = match.groups()
    return tag if commits == "0" else f"{tag}.post{commits}+{commit}"


def read_version() -> str:
    """Return the version of the checkout that contains this file; that of a tree without tags or without git is fixed."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return WITHOUT_TAGS
    command = ["git", "describe", "--tags", "--long", "--match", "v[0-9]*"]
    try:
        process = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return WITHOUT_TAGS
    return build_version(process.stdout.strip())


__version__ = read_version()
