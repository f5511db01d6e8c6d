"""What every test shares: no network, no workdir but the test's own, and engines that may not be missing in CI."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("no-clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine fails no test
settings.load_profile("no-clock")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ.pop("MLFLOW_RUN_ID", None)
# The files that take minutes, the longest first: begun last, one of them would be waited for by a single worker.
LONG = ("test_commands.py", "test_wrong_input.py", "test_dry_run.py", "test_pipeline.py", "test_interruption.py", "test_formats.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take long first; the others stay in their order."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A workdir of the test's own; base models stay in the user's cache, since converting one takes half a minute."""
    for name in ("TUNELINE_STORE", "TUNELINE_STATE", "TUNELINE_EVENTS", "TUNELINE_RUN_PID", "MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TUNELINE_WORKDIR", str(tmp_path / "workdir"))
