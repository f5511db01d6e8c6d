"""Packing: packed rows do not attend to each other, no row is lost, and unsupported settings are rejected."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from datasets import Dataset
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from components.common.runtime.errors import ConfigurationError
from components.common.runtime.reporters import SilentReporter
from components.fine_tuning import adapters, packing_isolation, token_cache, trainers
from components.fine_tuning.stage import finetune
from components.fine_tuning.token_cache import TokenizedDataset
from tests.fine_tuning.builders import (
    Row,
    add_random_adapter,
    build_conversation,
    build_dataset,
    collate_split,
    load_tiny_model,
    recipe,
    tokenize,
    unpack_column,
)
from tests.tiny import tiny_model, tiny_tokenizer

MAX_LENGTH = 64


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


def build_conversations(count: int) -> list[Row]:
    """Build rows of various lengths up to MAX_LENGTH tokens."""
    draw = random.Random(5)
    return [
        build_conversation(f"row {i}", f"What is {i}?", " ".join(["the list"] * draw.randint(1, 12)))
        for i in range(count)
    ]


def tokenize_conversations(folder: Path, tokenizer: Any, count: int, *, packing: bool) -> TokenizedDataset:
    dataset = build_dataset(folder / f"dataset-{packing}", "sft", build_conversations(count), build_conversations(3))
    return tokenize(dataset, tokenizer, folder, recipe(max_length=MAX_LENGTH, packing=packing))


def build_packed_batch(folder: Path, tokenizer: Any) -> Any:
    """Collate six rows, packed into fewer sequences, into one micro-batch."""
    splits = tokenize_conversations(folder, tokenizer, 6, packing=True)
    assert max(len(example["seq_lengths"]) for example in splits.train.dataset) > 1
    return collate_split(splits.train, recipe(packing=True), tokenizer)


def compute_logits(model: Any, ids: Any, batch: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=ids, position_ids=batch["position_ids"], use_cache=False).logits[0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("adaptation", ["full", "lora"])
def test_changed_row_leaves_logits_of_other_rows_bit_identical(
    attention: str, adaptation: str, tiny: Path, tokenizer: Any, tmp_path: Path
) -> None:
    batch, model = (
        build_packed_batch(tmp_path, tokenizer),
        add_random_adapter(load_tiny_model(tokenizer, tiny, attention), adaptation=adaptation),
    )
    before = compute_logits(model, batch["input_ids"], batch)
    row_of = (batch["position_ids"][0] == 0).cumsum(0)
    assert int(row_of[-1]) == 6
    for row in range(1, 7):
        inside = row_of == row
        changed = torch.where(inside, (batch["input_ids"] + 1) % len(tokenizer), batch["input_ids"])
        after = compute_logits(model, changed, batch)
        assert torch.equal(before[~inside], after[~inside])
        assert not torch.isclose(before[inside], after[inside]).all(1).any(), "the changed row itself does change"


def test_random_adapter_changes_logits(tiny: Path, tokenizer: Any, tmp_path: Path) -> None:
    batch, model = build_packed_batch(tmp_path, tokenizer), load_tiny_model(tokenizer, tiny)
    base_logits = compute_logits(model, batch["input_ids"], batch)
    assert (
        compute_logits(add_random_adapter(model, adaptation="lora"), batch["input_ids"], batch) - base_logits
    ).abs().max() > 0.01


class FullAttentionModel(torch.nn.Module):
    """A model with an attention mask that lets every token attend to every other."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, input_ids: Any, **kwargs: Any) -> Any:
        return self.model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), **kwargs)


class PositionlessModel(torch.nn.Module):
    """A model that ignores its position ids, as PEFT does with virtual tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, input_ids: Any, position_ids: Any, **kwargs: Any) -> Any:
        return self.model(input_ids=input_ids, **kwargs)


@pytest.mark.parametrize("leaky_class", [FullAttentionModel, PositionlessModel])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_model_with_cross_row_attention_is_rejected_with_hint(
    leaky_class: Any, attention: str, tiny: Path, tokenizer: Any
) -> None:
    model = leaky_class(load_tiny_model(tokenizer, tiny, attention))
    with pytest.raises(
        ConfigurationError, match=rf"packed rows attend to each other \(attention {attention}\)"
    ) as error:
        packing_isolation.check_isolation(model, vocabulary=len(tokenizer))
    assert "packing to false" in error.value.hint


@pytest.mark.filterwarnings("ignore:Position ids are not supported")  # the reason of the rejection
def test_virtual_tokens_with_packed_rows_are_rejected(tiny: Path, tokenizer: Any) -> None:
    model = adapters.adapt(load_tiny_model(tokenizer, tiny), recipe(adaptation="prompt_tuning"))
    with pytest.raises(ConfigurationError, match="packed rows attend to each other"):
        packing_isolation.check_isolation(model, vocabulary=len(tokenizer))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("adaptation", ["full", "lora"])
def test_isolation_check_passes_and_keeps_model_and_random_state(
    attention: str, adaptation: str, tiny: Path, tokenizer: Any
) -> None:
    model = add_random_adapter(load_tiny_model(tokenizer, tiny, attention), adaptation=adaptation).train()
    random_state = torch.get_rng_state()
    assert packing_isolation.measure_leak(model, vocabulary=len(tokenizer)) == 0.0
    packing_isolation.check_isolation(model, vocabulary=len(tokenizer))
    assert model.training
    assert torch.equal(random_state, torch.get_rng_state())


def test_training_does_not_start_if_packed_rows_leak(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing_isolation, "measure_leak", lambda *_, **__: 0.25)
    dataset = build_dataset(tmp_path / "dataset", "sft", build_conversations(4))
    config = recipe(base_model=str(tiny), packing=True, max_length=MAX_LENGTH, max_steps=1, batch_size=4)
    with pytest.raises(ConfigurationError, match=r"changed the logits of other rows by 0\.25; expected 0"):
        finetune(dataset, tmp_path / "model", config, seed=0, state=tmp_path / "state", reporter=SilentReporter())
    assert not list(tmp_path.glob("state/fine_tuning/*/checkpoint-*"))


def test_unpacked_rows_are_padded_if_rows_would_leak(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = build_dataset(tmp_path / "dataset", "sft", build_conversations(4))
    config = recipe(base_model=str(tiny), max_length=MAX_LENGTH, max_steps=1, batch_size=4, micro_batch_size=4)
    losses = []
    for leak in (0.0, 0.25):
        monkeypatch.setattr(packing_isolation, "measure_leak", lambda *_, leak=leak, **__: leak)
        folder = tmp_path / str(leak)
        model = finetune(dataset, folder / "model", config, seed=0, state=folder / "state", reporter=SilentReporter())
        losses.append(model.manifest.summary["train_loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_packing_keeps_every_row_once_with_its_id(tokenizer: Any, tmp_path: Path) -> None:
    plain, packed = (
        tokenize_conversations(tmp_path, tokenizer, 60, packing=packing).train for packing in (False, True)
    )
    assert packed.packed
    assert not plain.packed
    assert len(packed.lengths) < len(plain.lengths) == 60
    assert max(packed.lengths) <= MAX_LENGTH
    assert packed.lengths == [len(example["input_ids"]) for example in packed.dataset]
    assert packed.counts == plain.counts
    assert Counter(list_rows(packed)) == Counter(list_rows(plain))
    assert packed.row_ids([1, 0]) == [*packed.dataset[1]["ids"], *packed.dataset[0]["ids"]]


def list_rows(split: token_cache.TokenizedSplit) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Return id, tokens and labels of each row in a split."""
    return [
        (row_id, tuple(ids), tuple(labels))
        for example in split.dataset
        for row_id, ids, labels in zip(
            example["ids"], unpack_column(example), unpack_column(example, "labels"), strict=True
        )
    ]


def test_validation_rows_are_not_packed(tokenizer: Any, tmp_path: Path) -> None:
    validation = tokenize_conversations(tmp_path, tokenizer, 6, packing=True).validation
    assert (validation.packed, len(validation.lengths)) == (False, 3)
    assert validation.row_ids(range(3)) == ["row 0", "row 1", "row 2"]


def build_examples(lengths: list[int]) -> list[Row]:
    """Build rows of these lengths with unique tokens and labels."""
    rows, next_token = [], 0
    for number, length in enumerate(lengths):
        ids = list(range(next_token, next_token + length))
        rows.append(
            {
                "ids": [f"row {number % 7}"],
                "length": length,
                "input_ids": ids,
                "labels": [-100, *(token + 1 for token in ids[1:])],
            }
        )
        next_token += length
    return rows


def pack_examples(rows: list[Row], folder: Path, length: int) -> list[Row]:
    numbers = pa.list_(pa.int32())
    schema = pa.schema(
        [("ids", pa.list_(pa.string())), ("length", pa.int32()), ("input_ids", numbers), ("labels", numbers)]
    )
    path = folder / "train.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for start in range(0, len(rows), 100):
            stream.write_batch(pa.RecordBatch.from_pylist(rows[start : start + 100], schema=schema))
    token_cache._pack(path, length)
    return list(Dataset.from_file(str(path)))


def assert_rows_survive_packing(lengths: list[int], length: int) -> None:
    examples = build_examples(lengths)
    with tempfile.TemporaryDirectory() as folder:
        packed = pack_examples(examples, Path(folder), length)
    rows = [
        (row_id, ids, labels)
        for example in packed
        for row_id, ids, labels in zip(example["ids"], unpack_column(example), unpack_column(example, "labels"), strict=True)
    ]  # fmt: skip
    assert sorted(rows) == sorted((example["ids"][0], example["input_ids"], example["labels"]) for example in examples)
    assert all(
        len(example["input_ids"])
        == len(example["labels"])
        == example["length"]
        == sum(example["seq_lengths"])
        <= length
        for example in packed
    )


@given(
    st.integers(2, 40).flatmap(
        lambda length: st.tuples(st.lists(st.integers(2, length), min_size=1, max_size=60), st.just(length))
    )
)
@example(([40] * 3, 40))
@settings(max_examples=30)
def test_packing_conserves_rows_of_any_length(lengths_and_limit: tuple[list[int], int]) -> None:
    assert_rows_survive_packing(*lengths_and_limit)


def test_packing_conserves_more_rows_than_one_chunk() -> None:
    draw = random.Random(3)
    assert_rows_survive_packing([draw.randint(2, 30) for _ in range(2345)], 30)


def test_micro_batch_loss_equals_the_loss_of_separate_rows(tiny: Path, tokenizer: Any, tmp_path: Path) -> None:
    config, model = recipe(max_length=MAX_LENGTH), load_tiny_model(tokenizer, tiny)
    train = tokenize_conversations(tmp_path, tokenizer, 6, packing=False).train
    collate = trainers.build_collator(config, tokenizer)
    combined = collate(list(train.dataset))
    assert combined["input_ids"].shape == (1, sum(train.lengths)), "no padding"
    assert "attention_mask" not in combined
    separate = [collate([example]) for example in train.dataset]
    label_counts = [int((example["labels"] != -100).sum()) for example in separate]
    losses = [trainers._compute_answer_loss(model, example, None).item() for example in separate]
    expected = sum(loss * count for loss, count in zip(losses, label_counts, strict=True)) / sum(label_counts)
    assert trainers._compute_answer_loss(model, combined, None).item() == pytest.approx(expected, abs=1e-5)


UNSUPPORTED = {
    "p_tuning": (
        {"adaptation": "p_tuning"},
        "packing cannot be used with p_tuning: the virtual tokens precede only the first packed row",
    ),
    "prompt_tuning": (
        {"adaptation": "prompt_tuning"},
        "packing cannot be used with prompt_tuning: .* position ids that separate packed rows",
    ),
    "dpo": ({"objective": "dpo"}, "packing cannot be used with dpo: the loss compares whole rows"),
    "kto": ({"objective": "kto"}, "packing cannot be used with kto: the loss compares whole rows"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_packing_is_rejected_with_reason(name: str) -> None:
    changes, reason = UNSUPPORTED[name]
    recipe(**changes)
    with pytest.raises(ValidationError, match=reason):
        recipe(packing=True, **changes)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_padding_free_batches_are_used_only_where_supported(name: str) -> None:
    assert not recipe(**UNSUPPORTED[name][0]).is_padding_free
    assert recipe().is_padding_free
