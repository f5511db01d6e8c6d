"""JSON schemas of the configuration files: `python -m pipelines.config.json_schemas` writes them to docs/schemas."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel

from pipelines.config.customization_config import Customization
from pipelines.config.platform_config import Platform

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "schemas"
SCHEMAS: dict[str, type[BaseModel]] = {"customization.schema.json": Customization, "platform.schema.json": Platform}


def render_schemas() -> dict[str, str]:
    """Return the text of each schema by its file name."""
    return {name: json.dumps(model.model_json_schema(), indent=1) + "\n" for name, model in SCHEMAS.items()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in render_schemas().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
