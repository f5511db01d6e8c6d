"""What commands share: the screen is given back before a result or an error is printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.common import progress
from components.common.errors import UsageError
from components.common.progress import Silent
from pipelines.cli import app


class Held(Silent):
    """A reporter that holds the screen."""

    held = True

    def close(self) -> None:
        self.held = False


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Held:
    held = Held()
    monkeypatch.setattr(progress, "console", lambda **_: held)
    monkeypatch.setenv("TUNELINE_WORKDIR", "before")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///before.db")
    return held


def test_the_screen_is_held_during_a_command_and_given_back_after_it(screen: Held, tmp_path: Path) -> None:
    with app.working("curate", False, tmp_path) as (reporter, work):
        assert reporter is screen
        assert screen.held
        assert work.root == tmp_path
    assert not screen.held


def test_the_screen_is_given_back_before_an_error_is_told(screen: Held, tmp_path: Path) -> None:
    with pytest.raises(UsageError), app.working("curate", False, tmp_path):
        raise UsageError("wrong")
    assert not screen.held


def test_a_command_tracks_to_the_server_it_was_given_and_makes_only_what_it_writes(screen: Held, tmp_path: Path) -> None:
    workdir = tmp_path / "wd"
    with app.working("lineage", False, workdir, "sqlite:///given.db") as (_, work):
        app.track(work, write=False)
        assert work.tracking_uri == "sqlite:///given.db"
        assert not workdir.exists()
        app.track(work, write=True)
        assert workdir.is_dir()
