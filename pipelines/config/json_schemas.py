"""JSON schemas of the configuration files, for editors: `make lint` writes them to .vscode/schemas, outside git."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel

from pipelines.config.customization_config import Customization
from pipelines.config.platform_config import Platform

FOLDER = Path(__file__).resolve().parents[2] / ".vscode" / "schemas"
SCHEMAS: dict[str, type[BaseModel]] = {"customization.schema.json": Customization, "platform.schema.json": Platform}


def render_schemas() -> dict[str, str]:
    """Return the text of each schema by its file name."""
    return {name: json.dumps(model.model_json_schema(), indent=1) + "\n" for name, model in SCHEMAS.items()}


def write_schemas() -> None:
    """Write each schema to FOLDER."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in render_schemas().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_schemas()
