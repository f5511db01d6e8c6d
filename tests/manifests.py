"""Changes to the manifests of artifacts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from components.common.artifacts import artifact_folder


def read_fields(folder: Path) -> dict[str, Any]:
    """Return the fields of a manifest as JSON values."""
    fields: dict[str, Any] = json.loads((folder / artifact_folder.MANIFEST_FILENAME).read_text(encoding="utf-8"))
    return fields


def reseal(folder: Path, **changes: Any) -> None:
    """Change fields of a manifest, and write the digest that covers the new fields."""
    fields = read_fields(folder) | changes
    fields["manifest_sha256"] = artifact_folder.compute_manifest_sha256(fields)
    (folder / artifact_folder.MANIFEST_FILENAME).write_text(json.dumps(fields), encoding="utf-8")
