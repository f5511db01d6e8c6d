"""A publisher process for the tests: `python publish_once.py DATASET WORKDIR`, which prints the tag."""

import sys
from pathlib import Path

from components.common import artifacts
from components.common.progress import Silent
from components.data_versioning.config import DataVersioningConfig
from components.data_versioning.stage import publish

if __name__ == "__main__":
    version = publish(artifacts.read(Path(sys.argv[1])), DataVersioningConfig(), workdir=Path(sys.argv[2]), reporter=Silent())
    print(version.tag)
