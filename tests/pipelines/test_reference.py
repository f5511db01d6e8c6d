"""The written configuration says what the models say."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.common.errors import OutputOccupiedError
from pipelines import reference
from pipelines.config import Customization, load
from tests.pipelines.command import ROOT, answer, refusal


def test_the_written_file_is_the_defaults_and_names_every_key(tmp_path: Path) -> None:
    path = reference.write(tmp_path / "project")
    assert load(path).model_dump() == Customization().model_dump()
    text = path.read_text()
    for section in Customization.model_fields:
        assert f"\n{section}:" in text
    assert "  # Rows an optimizer step. More is steadier and slower.\n  batch_size: 8\n" in text


def test_a_file_that_is_there_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "customization.yaml").write_text("seed: 3\n")
    with pytest.raises(OutputOccupiedError, match="exists already"):
        reference.write(tmp_path)
    assert (tmp_path / "customization.yaml").read_text() == "seed: 3\n"


def test_init_is_a_command(tmp_path: Path) -> None:
    assert answer("init", "here", cwd=tmp_path) == {"customization": "here/customization.yaml"}
    assert refusal(2, "init", "here", cwd=tmp_path)["kind"] == "output_occupied"


def test_the_documentation_of_the_configuration_is_generated_from_the_models() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == reference.page(), "python -m pipelines.reference > docs/configuration.md"
