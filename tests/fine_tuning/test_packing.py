"""Rows that lie end to end in one sequence: they never see each other, none of them is lost, and what cannot keep that is refused."""

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

from components.common.errors import ConfigurationError
from components.common.progress import Silent
from components.fine_tuning import isolation, methods, tokens, trainers
from components.fine_tuning.stage import finetune
from components.fine_tuning.tokens import Tokenised
from tests.fine_tuning.made import Row, adapted, dataset_with, micro_batch, model_for, pieces, prepared, recipe, talk
from tests.tiny import tiny_model, tiny_tokenizer

LENGTH = 64


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


def conversations(count: int) -> list[Row]:
    """Rows of many lengths, none of them longer than LENGTH tokens."""
    draw = random.Random(5)
    return [talk(f"row {i}", f"What is {i}?", " ".join(["the list"] * draw.randint(1, 12))) for i in range(count)]


def splits_of(folder: Path, tokenizer: Any, count: int, *, packing: bool) -> Tokenised:
    dataset = dataset_with(folder / f"dataset-{packing}", "sft", conversations(count), conversations(3))
    return prepared(dataset, tokenizer, folder, recipe(max_length=LENGTH, packing=packing))


def packed_batch(folder: Path, tokenizer: Any) -> Any:
    """Two packed rows, as one micro-batch."""
    splits = splits_of(folder, tokenizer, 6, packing=True)
    assert max(len(one["seq_lengths"]) for one in splits.train.dataset) > 1
    return micro_batch(splits.train, recipe(packing=True), tokenizer)


def logits_of(model: Any, ids: Any, batch: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=ids, position_ids=batch["position_ids"], use_cache=False).logits[0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("adaptation", ["full", "lora"])
def test_a_changed_row_moves_no_logit_of_another_to_the_last_bit(
    attention: str, adaptation: str, tiny: Path, tokenizer: Any, tmp_path: Path
) -> None:
    batch, model = packed_batch(tmp_path, tokenizer), adapted(model_for(tokenizer, tiny, attention), adaptation=adaptation)
    before = logits_of(model, batch["input_ids"], batch)
    row_of = (batch["position_ids"][0] == 0).cumsum(0)
    assert int(row_of[-1]) == 6
    for row in range(1, 7):
        inside = row_of == row
        changed = torch.where(inside, (batch["input_ids"] + 1) % len(tokenizer), batch["input_ids"])
        after = logits_of(model, changed, batch)
        assert torch.equal(before[~inside], after[~inside])
        assert not torch.isclose(before[inside], after[inside]).all(1).any(), "the changed row itself does change"


def test_a_random_update_is_in_force_in_the_adapted_model(tiny: Path, tokenizer: Any, tmp_path: Path) -> None:
    batch, plain = packed_batch(tmp_path, tokenizer), model_for(tokenizer, tiny)
    one = logits_of(plain, batch["input_ids"], batch)
    assert (logits_of(adapted(plain, adaptation="lora"), batch["input_ids"], batch) - one).abs().max() > 0.01


class SeesAll(torch.nn.Module):
    """A model that is told by a mask to look at everything."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, input_ids: Any, **others: Any) -> Any:
        return self.model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), **others)


class CountsOn(torch.nn.Module):
    """A model that drops the positions it is given, as PEFT does with virtual tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, input_ids: Any, position_ids: Any, **others: Any) -> Any:
        return self.model(input_ids=input_ids, **others)


@pytest.mark.parametrize("leaky", [SeesAll, CountsOn])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_whose_rows_see_each_other_is_refused_with_its_kernel_and_a_way_out(
    leaky: Any, attention: str, tiny: Path, tokenizer: Any
) -> None:
    model = leaky(model_for(tokenizer, tiny, attention))
    with pytest.raises(ConfigurationError, match=rf"packed rows see each other here \(attention {attention}\)") as error:
        isolation.check(model, vocabulary=len(tokenizer))
    assert "packing to false" in error.value.hint


def test_virtual_tokens_before_packed_rows_are_refused(tiny: Path, tokenizer: Any) -> None:
    model = methods.adapt(model_for(tokenizer, tiny), recipe(adaptation="prompt_tuning"))
    with pytest.raises(ConfigurationError, match="packed rows see each other"):
        isolation.check(model, vocabulary=len(tokenizer))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("adaptation", ["full", "lora"])
def test_the_trial_finds_nothing_in_a_sound_model_and_leaves_it_and_the_random_numbers_as_they_were(
    attention: str, adaptation: str, tiny: Path, tokenizer: Any
) -> None:
    model = adapted(model_for(tokenizer, tiny, attention), adaptation=adaptation).train()
    drawn = torch.get_rng_state()
    assert isolation.moved(model, vocabulary=len(tokenizer)) == 0.0
    isolation.check(model, vocabulary=len(tokenizer))
    assert model.training
    assert torch.equal(drawn, torch.get_rng_state())


def test_a_training_whose_packed_rows_would_see_each_other_does_not_begin(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "moved", lambda *_, **__: 0.25)
    dataset = dataset_with(tmp_path / "dataset", "sft", conversations(4))
    config = recipe(base_model=str(tiny), packing=True, max_length=LENGTH, max_steps=1, batch_size=4)
    with pytest.raises(ConfigurationError, match=r"a changed row moved the others by 0\.25"):
        finetune(dataset, tmp_path / "model", config, seed=0, state=tmp_path / "state", reporter=Silent())
    assert not list(tmp_path.glob("state/fine_tuning/*/checkpoint-*"))


def test_rows_that_would_see_each_other_are_padded_where_they_are_not_packed(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = dataset_with(tmp_path / "dataset", "sft", conversations(4))
    config = recipe(base_model=str(tiny), max_length=LENGTH, max_steps=1, batch_size=4, micro_batch_size=4)
    losses = []
    for leak in (0.0, 0.25):
        monkeypatch.setattr(isolation, "moved", lambda *_, leak=leak, **__: leak)
        place = tmp_path / str(leak)
        made = finetune(dataset, place / "model", config, seed=0, state=place / "state", reporter=Silent())
        losses.append(made.manifest.summary["train_loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_packing_keeps_every_token_of_every_row_once_and_knows_whose_they_are(tokenizer: Any, tmp_path: Path) -> None:
    plain, packed = (splits_of(tmp_path, tokenizer, 60, packing=packing).train for packing in (False, True))
    assert packed.packed
    assert not plain.packed
    assert len(packed.lengths) < len(plain.lengths) == 60
    assert max(packed.lengths) <= LENGTH
    assert packed.lengths == [len(one["input_ids"]) for one in packed.dataset]
    assert packed.counts == plain.counts
    assert Counter(contents(packed)) == Counter(contents(plain))
    assert packed.ids([1, 0]) == [*packed.dataset[1]["ids"], *packed.dataset[0]["ids"]]


def contents(split: tokens.Split) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Id, tokens and labels of each row in a split."""
    return [
        (name, tuple(ids), tuple(labels))
        for one in split.dataset
        for name, ids, labels in zip(one["ids"], pieces(one), pieces(one, "labels"), strict=True)
    ]


def test_validation_rows_are_not_packed_so_that_the_loss_is_over_the_same_rows(tokenizer: Any, tmp_path: Path) -> None:
    validation = splits_of(tmp_path, tokenizer, 6, packing=True).validation
    assert (validation.packed, len(validation.lengths)) == (False, 3)
    assert validation.ids(range(3)) == ["row 0", "row 1", "row 2"]


def examples_of(lengths: list[int]) -> list[Row]:
    """Rows of these lengths, each of which has tokens and labels of its own."""
    rows, begun = [], 0
    for number, length in enumerate(lengths):
        ids = list(range(begun, begun + length))
        rows.append({"ids": [f"row {number % 7}"], "length": length, "input_ids": ids, "labels": [-100, *(one + 1 for one in ids[1:])]})
        begun += length
    return rows


def packed_by(rows: list[Row], folder: Path, length: int) -> list[Row]:
    numbers = pa.list_(pa.int32())
    schema = pa.schema([("ids", pa.list_(pa.string())), ("length", pa.int32()), ("input_ids", numbers), ("labels", numbers)])
    path = folder / "train.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for start in range(0, len(rows), 100):
            stream.write_batch(pa.RecordBatch.from_pylist(rows[start : start + 100], schema=schema))
    tokens._pack(path, length)
    return list(Dataset.from_file(str(path)))


def assert_conserved(lengths: list[int], length: int) -> None:
    given_rows = examples_of(lengths)
    with tempfile.TemporaryDirectory() as folder:
        packed = packed_by(given_rows, Path(folder), length)
    found = [
        (name, ids, labels)
        for one in packed
        for name, ids, labels in zip(one["ids"], pieces(one), pieces(one, "labels"), strict=True)
    ]  # fmt: skip
    assert sorted(found) == sorted((one["ids"][0], one["input_ids"], one["labels"]) for one in given_rows)
    assert all(len(one["input_ids"]) == len(one["labels"]) == one["length"] == sum(one["seq_lengths"]) <= length for one in packed)


@given(st.integers(2, 40).flatmap(lambda length: st.tuples(st.lists(st.integers(2, length), min_size=1, max_size=60), st.just(length))))
@example(([40] * 3, 40))
@settings(max_examples=30)
def test_whatever_the_lengths_of_the_rows_packing_conserves_them(drawn: tuple[list[int], int]) -> None:
    assert_conserved(*drawn)


def test_more_rows_than_are_packed_at_once_are_conserved() -> None:
    draw = random.Random(3)
    assert_conserved([draw.randint(2, 30) for _ in range(2345)], 30)


def test_rows_in_one_micro_batch_have_the_loss_that_each_has_alone(tiny: Path, tokenizer: Any, tmp_path: Path) -> None:
    config, model = recipe(max_length=LENGTH), model_for(tokenizer, tiny)
    train = splits_of(tmp_path, tokenizer, 6, packing=False).train
    collate = trainers.collator(config, tokenizer)
    together = collate(list(train.dataset))
    assert together["input_ids"].shape == (1, sum(train.lengths)), "no padding"
    assert "attention_mask" not in together
    alone = [collate([one]) for one in train.dataset]
    learned = [int((one["labels"] != -100).sum()) for one in alone]
    losses = [trainers._loss_of_answers(model, one, None).item() for one in alone]
    expected = sum(loss * count for loss, count in zip(losses, learned, strict=True)) / sum(learned)
    assert trainers._loss_of_answers(model, together, None).item() == pytest.approx(expected, abs=1e-5)


REFUSED = {
    "p_tuning": ({"adaptation": "p_tuning"}, "packing cannot be used with p_tuning: the virtual tokens stand before the first row only"),
    "prompt_tuning": ({"adaptation": "prompt_tuning"}, "packing cannot be used with prompt_tuning: .* would see each other"),
    "dpo": ({"objective": "dpo"}, "packing cannot be used with dpo: each row is compared as a whole"),
    "kto": ({"objective": "kto"}, "packing cannot be used with kto: each row is compared as a whole"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_packing_is_refused_with_the_reason_where_it_cannot_work(name: str) -> None:
    changes, reason = REFUSED[name]
    recipe(**changes)
    with pytest.raises(ValidationError, match=reason):
        recipe(packing=True, **changes)


@pytest.mark.parametrize("name", REFUSED)
def test_rows_lie_end_to_end_only_where_that_was_found_sound(name: str) -> None:
    assert not trainers.lies_end_to_end(recipe(**REFUSED[name][0]))
    assert trainers.lies_end_to_end(recipe())
