"""The customizations of a compiled chain and the names of their tasks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.config.customization_chain import ChainedCustomization
from pipelines.config.platform_config import Platform


@dataclass(frozen=True)
class ChainStep:
    """A customization of a compiled chain.

    Attributes:
        name: prefix of its tasks' names.
        link: the customization, linked to the earlier ones whose models it uses.
        platform: the cluster, with the requests of this customization; None for the default images without a volume.
    """

    name: str
    link: ChainedCustomization
    platform: Platform | None


def name_steps(paths: Sequence[Path]) -> list[str]:
    """Return a name for each customization: its file's name, with its position if names are equal."""
    names = [re.sub("[^a-z0-9]+", "-", path.stem.lower()).strip("-") or "customization" for path in paths]
    if len(set(names)) == len(names):
        return names
    return [f"{name}-{number}" for number, name in enumerate(names, start=1)]
