"""The JSON schemas for editors match the configuration models."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from pipelines.config import config_reference, json_schemas

ROOT = Path(__file__).parents[2]


def test_committed_schemas_match_the_models() -> None:
    for name, text in json_schemas.render_schemas().items():
        assert (json_schemas.FOLDER / name).read_text() == text, "run: python -m pipelines.config.json_schemas"


def test_editor_settings_point_to_the_schemas() -> None:
    settings = json.loads((ROOT / ".vscode" / "settings.json").read_text())
    assert set(settings["yaml.schemas"]) == {f"docs/schemas/{name}" for name in json_schemas.SCHEMAS}


def test_templates_are_valid_and_unknown_keys_are_not(tmp_path: Path) -> None:
    paths = config_reference.write_templates(tmp_path / "project")
    for path, text in zip(paths, json_schemas.render_schemas().values(), strict=True):
        content = yaml.safe_load(path.read_text())
        jsonschema.validate(content, json.loads(text))
        with pytest.raises(jsonschema.ValidationError, match="no_such_key"):
            jsonschema.validate({**content, "no_such_key": 1}, json.loads(text))
