"""Publisher process for tests: `python publish_once.py DATASET WORKDIR` publishes the dataset and prints its tag."""

import sys
from pathlib import Path

from components.common.artifacts import artifact_folder
from components.common.runtime.reporters import SilentReporter
from components.data_versioning.config import DataVersioningConfig
from components.data_versioning.stage import publish

if __name__ == "__main__":
    version = publish(
        artifact_folder.read(Path(sys.argv[1])),
        DataVersioningConfig(),
        workdir=Path(sys.argv[2]),
        reporter=SilentReporter(),
    )
    print(version.tag)
