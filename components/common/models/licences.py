"""Licences of models: the licence in the model card, and the names of licence files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict

from components.common.runtime.yaml_loading import MAX_CHARACTERS, load_yaml

MODEL_CARD_FILENAME = "README.md"
LICENCE_FILE_PATTERN = re.compile(r"(licen[cs]e|copying|notice|use_policy|terms)[^/]*", re.IGNORECASE)
# Licences, by their names on model hubs, that permit any use by anyone without prior consent.
PERMISSIVE_LICENCES = frozenset({
    "apache-2.0", "mit", "bsd", "bsd-2-clause", "bsd-3-clause", "isc", "zlib", "unlicense", "wtfpl", "ms-pl", "mpl-2.0", "artistic-2.0",
    "cc0-1.0", "cc-by-2.0", "cc-by-2.5", "cc-by-3.0", "cc-by-4.0", "cdla-permissive-1.0", "cdla-permissive-2.0", "pddl", "odc-by",
})  # fmt: skip


class Licence(BaseModel):
    """The licence in a model card.

    Attributes:
        id: identifier on model hubs; "" if the card has no licence.
        name, link: title and address of a licence that has no identifier on model hubs.
        gated: whether the hub grants access only to users who have accepted the licence.
    """

    model_config = ConfigDict(frozen=True)

    id: str = ""
    name: str = ""
    link: str = ""
    gated: bool = False

    @property
    def requires_acceptance(self) -> bool:
        """Whether a person must accept the licence before the model is used."""
        return self.gated or self.id.lower() not in PERMISSIVE_LICENCES

    @property
    def title(self) -> str:
        """The title of the licence for messages."""
        title = self.name or self.id or "not stated in the model card"
        return f"{title}, gated" if self.gated else title


def parse_card_fields(fields: dict[str, Any], *, gated: bool = False) -> Licence:
    """Return the licence in the front matter of a model card.

    Args:
        fields: keys and values of the front matter.
        gated: whether the hub grants access only to users who have accepted the licence.
    """
    texts = {}
    for key, field in (("id", "license"), ("name", "license_name"), ("link", "license_link")):
        value = fields.get(field) or ""  # some cards list several licences
        texts[key] = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return Licence(**texts, gated=gated or any(key.startswith("extra_gated") for key in fields))


def read_model_card(folder: Path) -> Licence:
    """Return the licence in a model folder's card; an empty licence if the folder has no readable card."""
    try:
        with (folder / MODEL_CARD_FILENAME).open(encoding="utf-8", errors="replace") as file:
            text = file.read(MAX_CHARACTERS)
    except OSError:
        return Licence()
    front = re.match(r"---\s*\n(.*?)\n---", text, re.DOTALL)
    try:
        fields = load_yaml(front[1]) if front else None
    except yaml.YAMLError:
        return Licence()
    return parse_card_fields(fields) if isinstance(fields, dict) else Licence()
