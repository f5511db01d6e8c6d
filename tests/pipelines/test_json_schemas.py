"""The JSON schemas for editors match the configuration models."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from pipelines.config import config_reference, json_schemas

ROOT = Path(__file__).parents[2]


def test_editor_settings_point_to_the_files_that_make_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = json.loads((ROOT / ".vscode" / "settings.json").read_text())
    folder = json_schemas.FOLDER.relative_to(ROOT)
    assert set(settings["yaml.schemas"]) == {str(folder / name) for name in json_schemas.SCHEMAS}
    monkeypatch.setattr(json_schemas, "FOLDER", tmp_path / folder)
    json_schemas.write_schemas()
    written = {path.name: path.read_text() for path in (tmp_path / folder).iterdir()}
    assert written == json_schemas.render_schemas()
    assert f"{folder}/" in (ROOT / ".gitignore").read_text().splitlines()


def test_templates_are_valid_and_unknown_keys_are_not(tmp_path: Path) -> None:
    paths = config_reference.write_templates(tmp_path / "project")
    for path, text in zip(paths, json_schemas.render_schemas().values(), strict=True):
        content = yaml.safe_load(path.read_text())
        jsonschema.validate(content, json.loads(text))
        with pytest.raises(jsonschema.ValidationError, match="no_such_key"):
            jsonschema.validate({**content, "no_such_key": 1}, json.loads(text))
