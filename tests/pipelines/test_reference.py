"""The written configuration says what the models say."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from components.common.errors import OutputOccupiedError
from pipelines import platform, reference
from pipelines.config import Customization, load
from pipelines.platform import Platform
from tests.pipelines.command import ROOT, answer, refusal


def test_the_written_file_is_the_defaults_and_names_every_key(tmp_path: Path) -> None:
    path, _ = reference.write(tmp_path / "project")
    assert load(path).model_dump() == Customization().model_dump()
    text = path.read_text()
    for section in Customization.model_fields:
        assert f"\n{section}:" in text
    assert "  # Stop after so many optimizer steps. null: train for `epochs` instead.\n  max_steps: 40\n" in text


def test_the_written_platform_is_the_defaults_and_names_every_key(tmp_path: Path) -> None:
    _, path = reference.write(tmp_path / "project")
    assert platform.load(path) == Platform()
    text = path.read_text()
    for section in Platform.model_fields:
        assert f"\n{section}:" in text
    assert "  # Name of an existing PersistentVolumeClaim that many pods may write (RWX).\n  claim: tuneline\n" in text


def test_a_platform_that_is_there_is_kept_and_nothing_written(tmp_path: Path) -> None:
    (tmp_path / "platform.yaml").write_text("volume: {claim: mine}\n")
    with pytest.raises(OutputOccupiedError, match=r"platform\.yaml exists already"):
        reference.write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["platform.yaml"]


def test_a_file_that_is_there_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "customization.yaml").write_text("seed: 3\n")
    with pytest.raises(OutputOccupiedError, match="exists already"):
        reference.write(tmp_path)
    assert (tmp_path / "customization.yaml").read_text() == "seed: 3\n"


@pytest.mark.parametrize("fails", reference.FILES)
def test_a_write_that_fails_leaves_neither_file_and_the_next_try_writes_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    whole = Path.write_text

    def full(path: Path, text: str, **options: Any) -> int:
        if fails not in path.name:
            return whole(path, text, **options)
        whole(path, text[:100], **options)
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        reference.write(tmp_path)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    assert all(path.stat().st_size > 1000 for path in reference.write(tmp_path))


def test_init_does_not_write_through_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "platform.yaml").symlink_to("elsewhere.yaml")
    with pytest.raises(OutputOccupiedError, match=r"platform\.yaml exists already"):
        reference.write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["platform.yaml"]


def test_init_into_a_file_is_said_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("mine")
    for given, message in {"f": "f is not a folder", "f/deep": "f/deep cannot be a folder: f is none"}.items():
        error = refusal(2, "init", given, cwd=tmp_path)
        assert (error["kind"], error["message"], error["hint"]) == ("usage", message, "Name another folder.")
    assert (tmp_path / "f").read_text() == "mine"


def test_init_is_a_command(tmp_path: Path) -> None:
    assert answer("init", "here", cwd=tmp_path) == {"customization": "here/customization.yaml", "platform": "here/platform.yaml"}
    assert refusal(2, "init", "here", cwd=tmp_path)["kind"] == "output_occupied"


def test_the_documentation_of_the_configuration_is_generated_from_the_models() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == reference.page(), "python -m pipelines.reference > docs/configuration.md"
    assert (ROOT / "docs" / "platform.md").read_text() == reference.platform_page(), (
        "python -m pipelines.reference platform > docs/platform.md"
    )
