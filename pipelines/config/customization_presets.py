"""Presets of customization.yaml: the files in presets/, which are also the configurations of the folders in examples/.

To add a preset, add its file; the first line is a comment with its description. examples/ has a folder for each.
"""

from __future__ import annotations

from pathlib import Path

from components.common.runtime.errors import UsageError

PRESETS_FOLDER = Path(__file__).parent / "presets"


def list_presets() -> list[str]:
    """Return the names of the presets."""
    return sorted(path.stem for path in PRESETS_FOLDER.glob("*.yaml"))


def read_preset(name: str) -> str:
    """Return the text of a preset's customization.yaml.

    Raises:
        UsageError: no preset has this name.
    """
    names = list_presets()
    if name not in names:
        raise UsageError(
            f"the preset {name!r} does not exist; expected one of {', '.join(names)}",
            hint="Choose one of these presets, or omit --preset for a file with every key.",
        )
    return (PRESETS_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
