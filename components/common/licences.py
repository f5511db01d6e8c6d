"""Under which licence a model is, by its card, and what stands of it beside its weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict

CARD = "README.md"
# Files beside the weights that say what one may do with them.
TEXTS = re.compile(r"(licen[cs]e|copying|notice|use_policy|terms)[^/]*", re.IGNORECASE)
# Licences by their names on model hubs under which anyone may use a model for anything, without being asked first.
FREE = frozenset({
    "apache-2.0", "mit", "bsd", "bsd-2-clause", "bsd-3-clause", "isc", "zlib", "unlicense", "wtfpl", "ms-pl", "mpl-2.0", "artistic-2.0",
    "cc0-1.0", "cc-by-2.0", "cc-by-2.5", "cc-by-3.0", "cc-by-4.0", "cdla-permissive-1.0", "cdla-permissive-2.0", "pddl", "odc-by",
})  # fmt: skip


class Licence(BaseModel):
    """A licence as a model's card names it: its name on model hubs ("" where nothing is said), its own name and place where it is none
    that they know, and whether the model's owner lets in only who agreed to it."""

    model_config = ConfigDict(frozen=True)

    id: str = ""
    name: str = ""
    link: str = ""
    gated: bool = False

    @property
    def asks(self) -> bool:
        """Whether a person has to accept it before the model is used."""
        return self.gated or self.id.lower() not in FREE

    @property
    def title(self) -> str:
        """As a person is told of it."""
        named = self.name or self.id or "no licence that its card names"
        return f"{named}, gated" if self.gated else named


def of_values(said: dict[str, Any], *, gated: bool = False) -> Licence:
    """The licence that the fields of a card's front matter name."""
    texts = {key: _text(said.get(f"license{end}")) for key, end in (("id", ""), ("name", "_name"), ("link", "_link"))}
    return Licence(**texts, gated=gated or any(key.startswith("extra_gated") for key in said))


def _text(value: Any) -> str:
    """Some cards name several licences."""
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value or "")


def of_folder(folder: Path) -> Licence:
    """The licence that the card in a model's folder names; one that names nothing where there is no card, or none that can be read."""
    try:
        text = (folder / CARD).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return Licence()
    front = re.match(r"---\s*\n(.*?)\n---", text, re.DOTALL)
    try:
        said = yaml.safe_load(front[1]) if front else None
    except yaml.YAMLError:
        return Licence()
    return of_values(said) if isinstance(said, dict) else Licence()
