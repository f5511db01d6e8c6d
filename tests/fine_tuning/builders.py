"""Datasets built from given rows, their tokenized form, and a tiny model that fits a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact, ArtifactInput
from components.common.runtime.reporters import SilentReporter
from components.fine_tuning import adapters, token_cache, trainers
from components.fine_tuning.config import Recipe
from components.fine_tuning.token_cache import TokenizedDataset, TokenizedSplit
from tests.datasets import KINDS, SCHEMA
from tests.fine_tuning.recipes import complete_recipe

Row = dict[str, Any]


def build_dataset(folder: Path, kind: str, train: Iterable[Row], validation: Iterable[Row] = ()) -> Artifact:
    """Publish a dataset with exactly these rows. `kind` is sft or a key of KINDS."""
    schema = SCHEMA if kind == "sft" else KINDS[kind][1]
    artifact_folder.claim_folder(folder, kind)
    for split, rows in (("train", train), ("validation", validation), ("test", ())):
        parquet.write_table(pa.Table.from_pylist(list(rows), schema), folder / f"{split}.parquet")
    payload = [f"{split}.parquet" for split in ("train", "validation", "test")]
    source = ArtifactInput(kind="file", content_sha256="3" * 64, uri="made.jsonl")
    return artifact_folder.publish(
        folder,
        "dataset",
        payload=payload,
        inputs=[source],
        config={},
        seed=0,
        key=kind,
        summary={"rows_kind": kind, "splits": {}},
    )


def build_conversation(row_id: str, *turns: str, system: str = "", tools: str | None = None) -> Row:
    """Return a conversation row in which user and assistant alternate."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    system_messages = [{"role": "system", "content": system}] if system else []
    return {"id": row_id, "messages": [*system_messages, *messages], "tools": tools, "source": "made", "meta": "{}"}


def recipe(**changes: object) -> Recipe:
    return complete_recipe(**{"max_length": 400, "device": "cpu", **changes})


def tokenize(
    dataset: Artifact, tokenizer: Any, state: Path, config: Recipe, *, sha256: str = "4" * 64
) -> TokenizedDataset:
    kind = str(dataset.manifest.summary["rows_kind"])
    return token_cache.load_or_tokenize(dataset, kind, tokenizer, sha256, config, state, SilentReporter())


def load_tiny_model(tokenizer: Any, folder: Path, attention: str = "sdpa") -> Any:
    """Load the tiny model with one embedding per token of the tokenizer."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, attn_implementation=attention).eval()
    if len(tokenizer) > model.config.vocab_size:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    return model


def add_random_adapter(model: Any, **changes: object) -> Any:
    """Adapt the model and fill the zero-initialized LoRA matrices with random values, so that the adapter has an effect."""
    import torch

    model = adapters.adapt(model, recipe(**changes)).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return model


def collate_split(split: TokenizedSplit, config: Recipe, tokenizer: Any) -> Any:
    """Collate all examples of a split into one batch with the trainer's collator."""
    return trainers.build_collator(config, tokenizer)(list(split.dataset))


def unpack_column(example: Row, column: str = "input_ids") -> list[list[int]]:
    """Split a column of a possibly packed example into the values of its rows."""
    ends = [0]
    for length in example.get("seq_lengths") or [len(example[column])]:
        ends.append(ends[-1] + length)
    return [list(example[column][start:end]) for start, end in pairwise(ends)]


def flatten(lists: Iterable[Sequence[int]]) -> list[int]:
    return [item for items in lists for item in items]
