"""Datasets of given rows, tokenised as a training would have them, and the tiny model that fits a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from components.common import artifacts
from components.common.artifacts import Artifact, Input
from components.common.progress import Silent
from components.fine_tuning import methods, tokens, trainers
from components.fine_tuning.config import FineTuningConfig
from components.fine_tuning.tokens import Split, Tokenised
from tests.datasets import KINDS, SCHEMA

Row = dict[str, Any]


def dataset_with(folder: Path, kind: str, train: Iterable[Row], validation: Iterable[Row] = ()) -> Artifact:
    """A dataset of these very rows. `kind`: sft, or one of KINDS."""
    schema = SCHEMA if kind == "sft" else KINDS[kind][1]
    artifacts.begin(folder, kind)
    for split, rows in (("train", train), ("validation", validation), ("test", ())):
        parquet.write_table(pa.Table.from_pylist(list(rows), schema), folder / f"{split}.parquet")
    payload = [f"{split}.parquet" for split in ("train", "validation", "test")]
    source = Input(kind="file", content_sha256="3" * 64, uri="made.jsonl")
    return artifacts.publish(
        folder, "dataset", payload=payload, inputs=[source], config={}, seed=0, key=kind, summary={"rows_kind": kind, "splits": {}}
    )


def talk(name: str, *turns: str, system: str = "", tools: str | None = None) -> Row:
    """A conversation: the user and the assistant speak in turn."""
    said = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    opening = [{"role": "system", "content": system}] if system else []
    return {"id": name, "messages": [*opening, *said], "tools": tools, "source": "made", "meta": "{}"}


def recipe(**changes: object) -> FineTuningConfig:
    return FineTuningConfig.model_validate({"max_length": 400, "device": "cpu", **changes})


def prepared(dataset: Artifact, tokenizer: Any, state: Path, config: FineTuningConfig, *, sha256: str = "4" * 64) -> Tokenised:
    kind = str(dataset.manifest.summary["rows_kind"])
    return tokens.prepare(dataset, kind, tokenizer, sha256, config, state, Silent())


def model_for(tokenizer: Any, folder: Path, attention: str = "sdpa") -> Any:
    """The tiny model in `folder`, with an embedding for each of the tokenizer's tokens."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, attn_implementation=attention).eval()
    if len(tokenizer) > model.config.vocab_size:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    return model


def adapted(model: Any, **changes: object) -> Any:
    """The model with an adaptation that is no longer what it began as: matrices that begin as zeros are random."""
    import torch

    model = methods.adapt(model, recipe(**changes)).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return model


def micro_batch(split: Split, config: FineTuningConfig, tokenizer: Any) -> Any:
    """All examples of a split as one batch, as the trainer's collator makes it."""
    return trainers.collator(config, tokenizer)(list(split.dataset))


def pieces(example: Row, column: str = "input_ids") -> list[list[int]]:
    """What each of the rows that lie in an example has in a column; of one that is not packed, the column."""
    ends = [0]
    for length in example.get("seq_lengths") or [len(example[column])]:
        ends.append(ends[-1] + length)
    return [list(example[column][start:end]) for start, end in pairwise(ends)]


def flat(lists: Iterable[Sequence[int]]) -> list[int]:
    return [one for some in lists for one in some]
