"""What every test shares: no network, no workdir but the test's own, and engines that may not be missing in CI."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

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
    os.environ.pop("MLFLOW_TRACKING_URI", None)
