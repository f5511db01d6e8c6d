"""The generated templates, reference pages and JSON schemas agree with the models."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from components.common.runtime.errors import OutputOccupiedError
from pipelines.config import config_templates, platform_config
from pipelines.config.customization_config import Customization, load_customization
from pipelines.config.platform_config import Platform
from tests import reference
from tests.pipelines.command import ROOT, answer, refusal


def test_customization_template_has_defaults_and_every_key(tmp_path: Path) -> None:
    path, _ = config_templates.write_templates(tmp_path / "project")
    assert load_customization(path).model_dump() == Customization().model_dump()
    text = path.read_text()
    for section in Customization.model_fields:
        assert f"\n{section}:" in text
    assert "  # Number of optimizer steps. null: train for `epochs` instead.\n  max_steps: null\n" in text


def test_type_with_constraints_is_described_without_them() -> None:
    text = reference.render_pages()["docs/reference/configuration.md"]
    assert "| `fine_tuning.mixing_weights` | `{}` | mapping to number |" in text
    assert "metadata=" not in text


def test_platform_template_has_defaults_and_every_key(tmp_path: Path) -> None:
    _, path = config_templates.write_templates(tmp_path / "project")
    assert platform_config.load_platform(path) == Platform()
    text = path.read_text()
    for section in Platform.model_fields:
        assert f"\n{section}:" in text
    assert (
        "  # Name of an existing PersistentVolumeClaim with access mode ReadWriteMany (RWX).\n  claim: tuneline\n"
        in text
    )


def test_existing_platform_is_kept_and_no_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "platform.yaml").write_text("volume: {claim: mine}\n")
    with pytest.raises(OutputOccupiedError, match=r"platform\.yaml already exists"):
        config_templates.write_templates(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["platform.yaml"]


def test_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "customization.yaml").write_text("seed: 3\n")
    with pytest.raises(OutputOccupiedError, match="already exists"):
        config_templates.write_templates(tmp_path)
    assert (tmp_path / "customization.yaml").read_text() == "seed: 3\n"


@pytest.mark.parametrize("failing_file", config_templates.CONFIG_FILENAMES)
def test_failed_write_leaves_no_file_and_a_retry_writes_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_file: str
) -> None:
    write_text = Path.write_text

    def write_partially(path: Path, text: str, **options: Any) -> int:
        if failing_file not in path.name:
            return write_text(path, text, **options)
        write_text(path, text[:100], **options)
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_text", write_partially)
    with pytest.raises(OSError, match="No space left"):
        config_templates.write_templates(tmp_path)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    assert all(path.stat().st_size > 1000 for path in config_templates.write_templates(tmp_path))


def test_init_does_not_write_through_a_dangling_link(tmp_path: Path) -> None:
    (tmp_path / "platform.yaml").symlink_to("elsewhere.yaml")
    with pytest.raises(OutputOccupiedError, match=r"platform\.yaml already exists"):
        config_templates.write_templates(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["platform.yaml"]


def test_init_into_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("mine")
    for path, message in {"f": "f is not a folder", "f/deep": "f/deep cannot be created: f is not a folder"}.items():
        error = refusal(2, "init", path, cwd=tmp_path)
        assert (error["kind"], error["message"], error["hint"]) == ("usage", message, "Choose another folder.")
    assert (tmp_path / "f").read_text() == "mine"


def test_init_command_writes_both_files(tmp_path: Path) -> None:
    assert answer("init", "here", cwd=tmp_path) == {
        "customization": "here/customization.yaml",
        "platform": "here/platform.yaml",
        "preset": None,
        "sources": ["demo:python-docs"],
    }
    assert refusal(2, "init", "here", cwd=tmp_path)["kind"] == "output_occupied"


def test_configuration_pages_match_the_models() -> None:
    for path, text in reference.render_pages().items():
        assert (ROOT / path).read_text() == text, "run: python -m tests.reference"


def test_editor_settings_point_to_the_schemas_that_make_writes(tmp_path: Path) -> None:
    settings = json.loads((ROOT / ".vscode" / "settings.json").read_text())
    assert set(settings["yaml.schemas"]) == set(reference.SCHEMAS)
    reference.write(tmp_path, reference.render_schemas())
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.json")} == set(reference.SCHEMAS)
    assert ".vscode/schemas/" in (ROOT / ".gitignore").read_text().splitlines()


def test_templates_are_valid_and_unknown_keys_are_not(tmp_path: Path) -> None:
    paths = config_templates.write_templates(tmp_path / "project")
    for path, text in zip(paths, reference.render_schemas().values(), strict=True):
        content = yaml.safe_load(path.read_text())
        jsonschema.validate(content, json.loads(text))
        with pytest.raises(jsonschema.ValidationError, match="no_such_key"):
            jsonschema.validate({**content, "no_such_key": 1}, json.loads(text))
