"""Random rows of a dataset's split as token ids, with their answers marked."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, NamedTuple

from components.common.artifacts.artifact_folder import Artifact
from components.common.models import chat_templates, conversation_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class EncodedItem(NamedTuple):
    """A row: its id, its token ids, and 1 for each token of an answer."""

    id: str
    ids: list[int]
    mask: list[int]


def read_random_rows(
    dataset: Artifact,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_items: int,
    max_length: int,
    seed: int,
) -> list[EncodedItem]:
    """Return random rows of a split that have an answer within `max_length` tokens, in the chat template."""
    path = dataset.path / f"{split}.parquet"
    if dataset.manifest.summary.get("rows_kind") == conversation_rows.TEXT_KIND:
        rows = conversation_rows.read_texts(path)
    else:
        rows = conversation_rows.read_conversations(path, conversation_rows.get_rows_kind(dataset))
    items: list[EncodedItem] = []
    for row in sorted(rows, key=lambda row: hashlib.sha256(f"{seed}:{row['id']}".encode()).digest()):
        if "text" in row:
            ids = chat_templates.encode_text(tokenizer, row["text"])[:max_length]
            item = EncodedItem(str(row["id"]), ids, [1] * len(ids))
        else:
            tools = json.loads(row["tools"]) if row["tools"] else None
            encoded = chat_templates.encode_conversation(tokenizer, row["messages"], tools, max_length=max_length)
            item = EncodedItem(str(row["id"]), encoded.input_ids, encoded.answer_mask)
        if any(item.mask[1:]):
            items.append(item)
        if len(items) == max_items:
            break
    return items
