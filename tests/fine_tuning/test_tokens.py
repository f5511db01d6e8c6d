"""Tokenised datasets: kept by digest and made anew where one changed, and every row of them cut, left out or kept as it is counted."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from components.common.artifacts import Artifact
from components.common.errors import InputError
from components.common.progress import Silent
from components.fine_tuning import tokens
from components.fine_tuning.config import FineTuningConfig
from components.fine_tuning.stage import finetune
from components.fine_tuning.tokens import KEPT, Tokenised
from tests.datasets import dataset_of, small_dataset
from tests.fine_tuning.made import Row, dataset_with, flat, prepared, recipe, talk
from tests.tiny import tiny_model, tiny_tokenizer

KINDS = {"sft": "sft", "text": "text", "dpo": "preference", "kto": "unpaired"}  # of rows, by the objective that learns from them


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    """Small datasets, by objective."""
    folder = tmp_path_factory.mktemp("data")
    return {name: dataset_for(kind, folder / name) for name, kind in KINDS.items()}


def dataset_for(kind: str, folder: Path) -> Artifact:
    return small_dataset(folder, train=9) if kind == "sft" else dataset_of(kind, folder, train=9)


@pytest.fixture
def no_tokenising(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(tokens, "encode", refuse)


def folders(state: Path) -> set[Path]:
    return {path for path in (state / tokens.FOLDER).iterdir() if path.is_dir()}


def examples_of(splits: Tokenised) -> list[list[Row]]:
    return [list(split.dataset) for split in (splits.train, splits.validation)]


@pytest.fixture
def first(datasets: dict[str, Artifact], tokenizer: Any, tmp_path: Path) -> Tokenised:
    return prepared(datasets["sft"], tokenizer, tmp_path, recipe())


def test_the_same_rows_are_not_tokenised_twice(
    first: Tokenised, datasets: dict[str, Artifact], tokenizer: Any, tmp_path: Path, no_tokenising: None
) -> None:
    again = prepared(datasets["sft"], tokenizer, tmp_path, recipe())
    assert (first.cached, again.cached) == (False, True)
    assert (again.folder, again.train.counts, again.validation.counts) == (first.folder, first.train.counts, first.validation.counts)
    assert examples_of(again) == examples_of(first)


def test_what_tokens_do_not_depend_on_does_not_tokenise_again(
    first: Tokenised, datasets: dict[str, Artifact], tokenizer: Any, tmp_path: Path, no_tokenising: None
) -> None:
    other = recipe(learning_rate=1e-5, adaptation="full", max_steps=3, batch_size=16)
    assert prepared(datasets["sft"], tokenizer, tmp_path, other).folder == first.folder


OTHERS = {"max_length": 60, "packing": True, "validation_rows": 1}


@pytest.mark.parametrize("name", OTHERS)
def test_another_setting_is_another_place(
    name: str, first: Tokenised, datasets: dict[str, Artifact], tokenizer: Any, tmp_path: Path
) -> None:
    other = prepared(datasets["sft"], tokenizer, tmp_path, recipe(**{name: OTHERS[name]}))
    assert not other.cached
    assert folders(tmp_path) == {first.folder, other.folder}


def test_another_objective_tokenizer_or_dataset_is_another_place(datasets: dict[str, Artifact], tokenizer: Any, tmp_path: Path) -> None:
    pairs = datasets["dpo"]
    made = [prepared(pairs, tokenizer, tmp_path, recipe(objective=name)) for name in ("sft", "dpo", "kto")]
    made.append(prepared(pairs, tokenizer, tmp_path, recipe(), sha256="5" * 64))
    assert not any(one.cached for one in made)
    assert len(folders(tmp_path)) == len(made)
    assert not prepared(datasets["sft"], tokenizer, tmp_path, recipe()).cached


def test_the_tokenizers_digest_is_of_the_files_that_make_tokens(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "tiny")
    digest = tokens.tokenizer_sha256(folder)
    (folder / "README.md").write_text("another")
    (folder / "model.safetensors").write_bytes(b"others")
    assert tokens.tokenizer_sha256(folder) == digest
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        with (folder / name).open("a") as file:
            file.write(" ")
        assert tokens.tokenizer_sha256(folder) != digest
        digest = tokens.tokenizer_sha256(folder)


@pytest.mark.parametrize("damage", [f"{split}.arrow" for split in tokens.SPLITS])
@pytest.mark.parametrize("how", ["changed", "cut", "removed"])
def test_a_changed_file_is_not_believed_but_made_anew(
    damage: str, how: str, first: Tokenised, datasets: dict[str, Artifact], tokenizer: Any, tmp_path: Path
) -> None:
    path, expected = first.folder / damage, examples_of(first)
    content = path.read_bytes()
    path.unlink()  # a copy is mapped into memory
    if how != "removed":
        path.write_bytes(content[:-9] if how == "cut" else content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
    again = prepared(datasets["sft"], tokenizer, tmp_path, recipe())
    assert (again.cached, again.folder) == (False, first.folder)
    assert examples_of(again) == expected
    assert {path.name for path in folders(tmp_path)} == {first.folder.name}, "nothing else is left"


@pytest.mark.parametrize("content", ["", "{", "{}", None])
def test_a_torn_or_missing_index_is_made_anew(
    content: str | None, first: Tokenised, datasets: dict[str, Artifact], tokenizer: Any, tmp_path: Path
) -> None:
    index = first.folder / tokens.INDEX
    index.unlink()
    if content is not None:
        index.write_text(content)
    assert not prepared(datasets["sft"], tokenizer, tmp_path, recipe()).cached
    assert prepared(datasets["sft"], tokenizer, tmp_path, recipe()).cached


def test_the_lately_used_are_kept_and_no_more_than_so_many(datasets: dict[str, Artifact], tokenizer: Any, tmp_path: Path) -> None:
    made = [prepared(datasets["sft"], tokenizer, tmp_path, recipe(max_length=100 + i)) for i in range(KEPT)]
    for age, one in enumerate(reversed(made), start=1):
        os.utime(one.folder, ns=(age_ns := one.folder.stat().st_mtime_ns - age * 10**12, age_ns))
    assert prepared(datasets["sft"], tokenizer, tmp_path, recipe(max_length=100)).cached, "the oldest is used again"
    new = prepared(datasets["sft"], tokenizer, tmp_path, recipe(max_length=99))
    assert folders(tmp_path) == {new.folder, made[0].folder, *(one.folder for one in made[2:])}


@pytest.mark.parametrize("objective", KINDS)
def test_an_objective_writes_the_columns_it_names_and_the_tokens_of_each_row(
    objective: str, datasets: dict[str, Artifact], tokenizer: Any, tmp_path: Path
) -> None:
    train = prepared(datasets[objective], tokenizer, tmp_path, recipe(objective=objective)).train
    assert train.ids(range(9)) == [f"{i:08x}" for i in range(9)]
    assert (train.counts.rows, train.counts.examples, train.counts.tokens) == (9, 9, sum(train.lengths))
    assert train.lengths == [sum(map(len, sequences(one))) for one in train.dataset]


def text_of(length: int, tokenizer: Any, folder: Path, max_length: int) -> tuple[list[int], Tokenised]:
    """A text of so many tokens, its marks of beginning and end included, and what it became."""
    said = "." * (length - 2)
    rows = [{"id": "long", "text": said}]
    splits = prepared(dataset_with(folder / "dataset", "text", rows), tokenizer, folder, recipe(objective="text", max_length=max_length))
    ids = [tokenizer.bos_token_id, *tokenizer(said)["input_ids"], tokenizer.eos_token_id]
    assert len(ids) == length
    return ids, splits


@pytest.mark.parametrize("length", [15, 16, 17, 18, 31, 32, 46, 47])
def test_a_long_text_is_learned_in_pieces_and_no_token_of_it_is_lost(length: int, tokenizer: Any, tmp_path: Path) -> None:
    ids, splits = text_of(length, tokenizer, tmp_path, 16)
    rows = list(splits.train.dataset)
    assert [ids[0], *flat(row["labels"][1:] for row in rows)] == ids, "each is a target once; a row's first token never is"
    assert all(row["labels"] == row["input_ids"] for row in rows)
    assert splits.train.lengths == [min(16, length - start) for start in range(0, length - 1, 15)]
    assert splits.train.ids(range(len(rows))) == ["long"] * len(rows)
    counts = splits.train.counts
    assert (counts.rows, counts.truncated, counts.tokens, counts.learned) == (1, 0, length + len(rows) - 1, length - 1)


@pytest.mark.parametrize("objective", ["sft", "dpo", "kto"])
def test_rows_that_are_cut_are_counted_and_cut_at_their_end(
    objective: str, datasets: dict[str, Artifact], tokenizer: Any, tmp_path: Path
) -> None:
    whole = prepared(datasets[objective], tokenizer, tmp_path, recipe(objective=objective)).train
    assert (whole.counts.truncated, whole.counts.without_answer) == (0, 0)
    lengths = [max(len(one) for one in sequences(row)) for row in whole.dataset]
    limit = sorted(lengths)[4]
    cut = prepared(datasets[objective], tokenizer, tmp_path, recipe(objective=objective, max_length=limit)).train
    assert cut.counts.truncated == sum(length > limit for length in lengths) > 0
    assert cut.counts.examples == 9
    for before, after in zip(whole.dataset, cut.dataset, strict=True):
        assert sequences(after) == [one[:limit] for one in sequences(before)]


def sequences(row: Row) -> list[list[int]]:
    """What the model reads of an example: one sequence, or that of each answer."""
    if "input_ids" in row:
        return [row["input_ids"]]
    return [row["prompt_ids"] + row[name] for name in ("chosen_ids", "rejected_ids", "completion_ids") if name in row]


@pytest.mark.parametrize("objective", ["sft", "dpo", "kto"])
def test_rows_of_which_no_answer_is_left_are_left_out_and_counted(
    objective: str, datasets: dict[str, Artifact], tokenizer: Any, tmp_path: Path
) -> None:
    train = prepared(datasets[objective], tokenizer, tmp_path, recipe(objective=objective, max_length=8)).train
    counts = train.counts
    assert (counts.rows, counts.examples, counts.without_answer, counts.truncated, counts.tokens, counts.learned) == (9, 0, 9, 0, 0, 0)
    assert (train.lengths, train.ids(range(0))) == ([], [])


def test_rows_in_which_nobody_answers_are_left_out_among_others(tokenizer: Any, tmp_path: Path) -> None:
    rows = [talk("asked", "What is it?"), talk("answered", "What is it?", "A list."), talk("silent", "Anybody?")]
    train = prepared(dataset_with(tmp_path / "dataset", "sft", rows), tokenizer, tmp_path, recipe()).train
    assert (train.counts.rows, train.counts.examples, train.counts.without_answer, train.counts.truncated) == (3, 1, 2, 0)
    assert train.ids([0]) == ["answered"]
    assert train.counts.learned == len(tokenizer("A list.<|im_end|>")["input_ids"])


@pytest.mark.parametrize("packing", [False, True])
def test_ids_are_kept_as_they_are_with_spaces_or_none_or_twice(packing: bool, tokenizer: Any, tmp_path: Path) -> None:
    names = ["a b", " a", "", "a b", "ä,\n\t\"b'", "c d e"]
    rows = [talk(name, "What?", "the list " * (i + 1)) for i, name in enumerate(names)]
    train = prepared(dataset_with(tmp_path / "dataset", "sft", rows), tokenizer, tmp_path, recipe(packing=packing)).train
    assert sorted(train.ids(range(len(train.lengths)))) == sorted(names)


def test_only_so_many_validation_rows_are_tokenised_and_all_of_the_training(
    datasets: dict[str, Artifact], tokenizer: Any, tmp_path: Path
) -> None:
    splits = prepared(datasets["sft"], tokenizer, tmp_path, recipe(validation_rows=3))
    assert (splits.train.counts.rows, splits.validation.counts.rows) == (9, 3)
    none = prepared(datasets["sft"], tokenizer, tmp_path, recipe(validation_rows=0))
    assert (none.validation.counts.rows, none.validation.lengths) == (0, [])


class Counting(Silent):
    """Notes how far each report says it is, and of how many."""

    def __init__(self) -> None:
        self.told: list[tuple[float, float | None]] = []

    def progress(self, done: float, total: float | None, unit: str) -> None:
        self.told.append((done, total))


@pytest.mark.parametrize(
    "objective",
    ["sft", "dpo", "kto"],
)
def test_progress_ends_at_the_number_of_rows_it_named(
    objective: str, datasets: dict[str, Artifact], tokenizer: Any, tmp_path: Path
) -> None:
    reporter, config = Counting(), recipe(objective=objective, validation_rows=0)
    tokens.prepare(datasets["dpo"], "preference", tokenizer, "4" * 64, config, tmp_path, reporter)
    assert [done for done, _ in reporter.told] == [*range(1, len(reporter.told) + 1)]
    assert reporter.told[-1][0] == reporter.told[-1][1]


@pytest.mark.parametrize("packing", [False, True])
def test_an_empty_training_split_is_an_error_that_says_so(packing: bool, tmp_path: Path) -> None:
    tiny, empty = tiny_model(tmp_path / "tiny"), dataset_of("text", tmp_path / "dataset", train=0)
    config = FineTuningConfig(base_model=str(tiny), objective="text", packing=packing, max_length=32, max_steps=1)
    with pytest.raises(InputError, match="training split is empty") as error:
        finetune(empty, tmp_path / "model", config, seed=0, state=tmp_path / "state", reporter=Silent())
    assert "Curate more rows" in error.value.hint
    assert not (tmp_path / "model" / "manifest.json").exists()


def test_what_a_killed_job_left_half_made_is_not_taken_for_tokens(
    first: Tokenised, datasets: dict[str, Artifact], tokenizer: Any, tmp_path: Path
) -> None:
    half = first.folder.with_name("half")
    shutil.copytree(first.folder, half)
    (half / tokens.INDEX).unlink()
    shutil.rmtree(first.folder)
    half.rename(first.folder)
    assert not prepared(datasets["sft"], tokenizer, tmp_path, recipe()).cached
