"""What every test shares: no network, no workdir but the test's own, and engines that may not be missing in CI."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

settings.register_profile("no-clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine fails no test
settings.load_profile("no-clock")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ.pop("MLFLOW_RUN_ID", None)


# Files that take minutes are begun first, so that no worker is left with one of them at the end.
LONG = (
    "docs/test_commands.py",
    "pipelines/test_wrong_input.py",
    "pipelines/test_dry_run.py",
    "pipelines/test_pipeline.py",
    "pipelines/test_interruption.py",
    "pipelines/test_formats.py",
    "fine_tuning/test_distributed.py",
    "fine_tuning/test_resume.py",
)

# Files whose tests share what takes a minute to make, a whole run or a proven package: one worker runs them, and makes it once.
TOGETHER = {
    "tests/pipelines/test_pipeline.py": "run", "tests/pipelines/test_dry_run.py": "run", "tests/pipelines/test_report.py": "run",
    "tests/pipelines/test_pods.py": "run",
    "tests/triton_packaging/test_server.py": "package", "tests/triton_packaging/test_streaming.py": "package",
    "tests/triton_packaging/test_overload.py": "package", "tests/triton_packaging/test_metrics.py": "package",
}  # fmt: skip


class ByFile(LoadFileScheduling):
    """A file's tests run in one worker, and so do those of files that share something."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return TOGETHER.get(file, file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    """With several workers (--dist loadfile)."""
    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; the others as they were."""
    items.sort(key=lambda item: next((place for place, name in enumerate(LONG) if str(item.path).endswith(name)), len(LONG)))


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A workdir of the test's own; base models stay in the user's cache, since converting one takes half a minute.

    MLflow keeps the server it was pointed at for the whole process, and in its environment: the next test begins without.
    """
    for name in ("TUNELINE_STORE", "TUNELINE_STATE", "TUNELINE_EVENTS", "TUNELINE_RUN_PID", "MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TUNELINE_WORKDIR", str(tmp_path / "workdir"))
    yield
    if "mlflow" in sys.modules:
        sys.modules["mlflow"].set_tracking_uri(None)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        os.environ.pop(name, None)
