"""Token cache: cache keys, eviction and repair. Tokenization: truncated, dropped and kept rows with their counts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from components.common.artifacts.artifact_folder import Artifact
from components.common.runtime.errors import InputError
from components.common.runtime.reporters import SilentReporter
from components.fine_tuning import token_cache
from components.fine_tuning.config import FineTuningConfig
from components.fine_tuning.stage import finetune
from components.fine_tuning.token_cache import MAX_CACHED_DATASETS, TokenizedDataset
from tests.datasets import dataset_of, small_dataset
from tests.fine_tuning.builders import Row, build_conversation, build_dataset, flatten, recipe, tokenize
from tests.tiny import tiny_model, tiny_tokenizer

ROW_KINDS = {
    "sft": "sft",
    "text": "text",
    "dpo": "preference",
    "kto": "unpaired",
}  # by objective


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    """Small datasets, by objective."""
    folder = tmp_path_factory.mktemp("data")
    return {name: build_small_dataset(kind, folder / name) for name, kind in ROW_KINDS.items()}


def build_small_dataset(kind: str, folder: Path) -> Artifact:
    return small_dataset(folder, train=9) if kind == "sft" else dataset_of(kind, folder, train=9)


@pytest.fixture
def forbid_tokenization(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(token_cache, "encode_rows", refuse)


def list_cache_folders(state: Path) -> set[Path]:
    return {path for path in (state / token_cache.CACHE_FOLDER).iterdir() if path.is_dir()}


def list_examples(splits: TokenizedDataset) -> list[list[Row]]:
    return [list(split.dataset) for split in (splits.train, splits.validation)]


@pytest.fixture
def cached_splits(datasets: dict[str, Artifact], tokenizer: Any, tmp_path: Path) -> TokenizedDataset:
    return tokenize(datasets["sft"], tokenizer, tmp_path, recipe())


def test_same_rows_are_tokenized_once(
    cached_splits: TokenizedDataset,
    datasets: dict[str, Artifact],
    tokenizer: Any,
    tmp_path: Path,
    forbid_tokenization: None,
) -> None:
    reloaded = tokenize(datasets["sft"], tokenizer, tmp_path, recipe())
    assert (cached_splits.cached, reloaded.cached) == (False, True)
    assert (reloaded.folder, reloaded.train.counts, reloaded.validation.counts) == (
        cached_splits.folder,
        cached_splits.train.counts,
        cached_splits.validation.counts,
    )
    assert list_examples(reloaded) == list_examples(cached_splits)


def test_training_settings_do_not_invalidate_the_token_cache(
    cached_splits: TokenizedDataset,
    datasets: dict[str, Artifact],
    tokenizer: Any,
    tmp_path: Path,
    forbid_tokenization: None,
) -> None:
    other = recipe(learning_rate=1e-5, adaptation="full", max_steps=3, batch_size=16)
    assert tokenize(datasets["sft"], tokenizer, tmp_path, other).folder == cached_splits.folder


CACHE_KEY_CHANGES = {"max_length": 60, "packing": True, "validation_rows": 1}


@pytest.mark.parametrize("name", CACHE_KEY_CHANGES)
def test_tokenization_settings_use_separate_cache_entries(
    name: str, cached_splits: TokenizedDataset, datasets: dict[str, Artifact], tokenizer: Any, tmp_path: Path
) -> None:
    other = tokenize(datasets["sft"], tokenizer, tmp_path, recipe(**{name: CACHE_KEY_CHANGES[name]}))
    assert not other.cached
    assert list_cache_folders(tmp_path) == {cached_splits.folder, other.folder}


def test_objective_tokenizer_and_dataset_use_separate_cache_entries(
    datasets: dict[str, Artifact], tokenizer: Any, tmp_path: Path
) -> None:
    dataset = datasets["dpo"]
    entries = [tokenize(dataset, tokenizer, tmp_path, recipe(objective=name)) for name in ("sft", "dpo", "kto")]
    entries.append(tokenize(dataset, tokenizer, tmp_path, recipe(), sha256="5" * 64))
    assert not any(entry.cached for entry in entries)
    assert len(list_cache_folders(tmp_path)) == len(entries)
    assert not tokenize(datasets["sft"], tokenizer, tmp_path, recipe()).cached


def test_tokenizer_digest_covers_only_tokenizer_files(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "tiny")
    digest = token_cache.hash_tokenizer(folder)
    (folder / "README.md").write_text("another")
    (folder / "model.safetensors").write_bytes(b"others")
    assert token_cache.hash_tokenizer(folder) == digest
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        with (folder / name).open("a") as file:
            file.write(" ")
        assert token_cache.hash_tokenizer(folder) != digest
        digest = token_cache.hash_tokenizer(folder)


@pytest.mark.parametrize("filename", [f"{split}.arrow" for split in token_cache.SPLITS])
@pytest.mark.parametrize("damage", ["changed", "cut", "removed"])
def test_damaged_cache_file_is_rebuilt(
    filename: str,
    damage: str,
    cached_splits: TokenizedDataset,
    datasets: dict[str, Artifact],
    tokenizer: Any,
    tmp_path: Path,
) -> None:
    path, expected = cached_splits.folder / filename, list_examples(cached_splits)
    content = path.read_bytes()
    path.unlink()  # the open file is memory-mapped; overwriting it would change the data in use
    if damage != "removed":
        path.write_bytes(
            content[:-9] if damage == "cut" else content[:-100] + bytes([content[-100] ^ 1]) + content[-99:]
        )
    rebuilt = tokenize(datasets["sft"], tokenizer, tmp_path, recipe())
    assert (rebuilt.cached, rebuilt.folder) == (False, cached_splits.folder)
    assert list_examples(rebuilt) == expected
    assert {path.name for path in list_cache_folders(tmp_path)} == {cached_splits.folder.name}, "nothing else is left"


@pytest.mark.parametrize("content", ["", "{", "{}", None])
def test_torn_or_missing_index_is_rebuilt(
    content: str | None, cached_splits: TokenizedDataset, datasets: dict[str, Artifact], tokenizer: Any, tmp_path: Path
) -> None:
    index = cached_splits.folder / token_cache.INDEX_FILENAME
    index.unlink()
    if content is not None:
        index.write_text(content)
    assert not tokenize(datasets["sft"], tokenizer, tmp_path, recipe()).cached
    assert tokenize(datasets["sft"], tokenizer, tmp_path, recipe()).cached


def test_least_recently_used_cache_entry_is_evicted(
    datasets: dict[str, Artifact], tokenizer: Any, tmp_path: Path
) -> None:
    entries = [
        tokenize(datasets["sft"], tokenizer, tmp_path, recipe(max_length=100 + i)) for i in range(MAX_CACHED_DATASETS)
    ]
    for age, entry in enumerate(reversed(entries), start=1):
        os.utime(entry.folder, ns=(age_ns := entry.folder.stat().st_mtime_ns - age * 10**12, age_ns))
    assert tokenize(datasets["sft"], tokenizer, tmp_path, recipe(max_length=100)).cached, "the oldest is used again"
    new_entry = tokenize(datasets["sft"], tokenizer, tmp_path, recipe(max_length=99))
    assert list_cache_folders(tmp_path) == {
        new_entry.folder,
        entries[0].folder,
        *(entry.folder for entry in entries[2:]),
    }


@pytest.mark.parametrize("objective", ROW_KINDS)
def test_every_objective_writes_ids_counts_and_lengths(
    objective: str, datasets: dict[str, Artifact], tokenizer: Any, tmp_path: Path
) -> None:
    train = tokenize(datasets[objective], tokenizer, tmp_path, recipe(objective=objective)).train
    assert train.row_ids(range(9)) == [f"{i:08x}" for i in range(9)]
    assert (train.counts.rows, train.counts.examples, train.counts.tokens) == (9, 9, sum(train.lengths))
    assert train.lengths == [sum(map(len, list_sequences(example))) for example in train.dataset]


def tokenize_text(length: int, tokenizer: Any, folder: Path, max_length: int) -> tuple[list[int], TokenizedDataset]:
    """Tokenize a text of `length` tokens, including the BOS and EOS tokens."""
    text = "." * (length - 2)
    rows = [{"id": "long", "text": text}]
    splits = tokenize(
        build_dataset(folder / "dataset", "text", rows),
        tokenizer,
        folder,
        recipe(objective="text", max_length=max_length),
    )
    ids = [tokenizer.bos_token_id, *tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    assert len(ids) == length
    return ids, splits


@pytest.mark.parametrize("length", [15, 16, 17, 18, 31, 32, 46, 47])
def test_long_text_is_split_without_losing_a_token(length: int, tokenizer: Any, tmp_path: Path) -> None:
    ids, splits = tokenize_text(length, tokenizer, tmp_path, 16)
    rows = list(splits.train.dataset)
    assert [ids[0], *flatten(row["labels"][1:] for row in rows)] == ids, (
        "each is a target once; a row's first token never is"
    )
    assert all(row["labels"] == row["input_ids"] for row in rows)
    assert splits.train.lengths == [min(16, length - start) for start in range(0, length - 1, 15)]
    assert splits.train.row_ids(range(len(rows))) == ["long"] * len(rows)
    counts = splits.train.counts
    assert (counts.rows, counts.truncated, counts.tokens, counts.learned) == (1, 0, length + len(rows) - 1, length - 1)


@pytest.mark.parametrize("objective", ["sft", "dpo", "kto"])
def test_long_rows_are_truncated_at_the_end_and_counted(
    objective: str, datasets: dict[str, Artifact], tokenizer: Any, tmp_path: Path
) -> None:
    complete = tokenize(datasets[objective], tokenizer, tmp_path, recipe(objective=objective)).train
    assert (complete.counts.truncated, complete.counts.without_answer) == (0, 0)
    lengths = [max(len(sequence) for sequence in list_sequences(row)) for row in complete.dataset]
    limit = sorted(lengths)[4]
    truncated = tokenize(datasets[objective], tokenizer, tmp_path, recipe(objective=objective, max_length=limit)).train
    assert truncated.counts.truncated == sum(length > limit for length in lengths) > 0
    sequences = [sequence for row in complete.dataset for sequence in list_sequences(row)]
    cut_tokens = sum(max(len(sequence) - limit, 0) for sequence in sequences)
    assert (complete.counts.cut_tokens, complete.counts.cut_share) == (0, 0)
    assert truncated.counts.cut_tokens == cut_tokens
    assert truncated.counts.tokens + cut_tokens == complete.counts.tokens
    assert truncated.counts.cut_share == cut_tokens / complete.counts.tokens
    assert truncated.counts.examples == 9
    for before, after in zip(complete.dataset, truncated.dataset, strict=True):
        assert list_sequences(after) == [sequence[:limit] for sequence in list_sequences(before)]


def list_sequences(row: Row) -> list[list[int]]:
    """Return the sequences that the model reads: one, or one per answer."""
    if "input_ids" in row:
        return [row["input_ids"]]
    return [row["prompt_ids"] + row[name] for name in ("chosen_ids", "rejected_ids", "completion_ids") if name in row]


@pytest.mark.parametrize("objective", ["sft", "dpo", "kto"])
def test_rows_with_truncated_answers_are_dropped_and_counted(
    objective: str, datasets: dict[str, Artifact], tokenizer: Any, tmp_path: Path
) -> None:
    train = tokenize(datasets[objective], tokenizer, tmp_path, recipe(objective=objective, max_length=8)).train
    counts = train.counts
    assert (counts.rows, counts.examples, counts.without_answer, counts.truncated, counts.tokens, counts.learned) == (
        9,
        0,
        9,
        0,
        0,
        0,
    )
    assert (train.lengths, train.row_ids(range(0)), counts.cut_tokens) == ([], [], 0)


def test_rows_without_an_answer_are_dropped(tokenizer: Any, tmp_path: Path) -> None:
    rows = [
        build_conversation("asked", "What is it?"),
        build_conversation("answered", "What is it?", "A list."),
        build_conversation("silent", "Anybody?"),
    ]
    train = tokenize(build_dataset(tmp_path / "dataset", "sft", rows), tokenizer, tmp_path, recipe()).train
    assert (train.counts.rows, train.counts.examples, train.counts.without_answer, train.counts.truncated) == (
        3,
        1,
        2,
        0,
    )
    assert train.row_ids([0]) == ["answered"]
    assert train.counts.learned == len(tokenizer("A list.<|im_end|>")["input_ids"])


@pytest.mark.parametrize("packing", [False, True])
def test_unusual_and_duplicate_row_ids_are_kept(packing: bool, tokenizer: Any, tmp_path: Path) -> None:
    names = ["a b", " a", "", "a b", "ä,\n\t\"b'", "c d e"]
    rows = [build_conversation(name, "What?", "the list " * (i + 1)) for i, name in enumerate(names)]
    train = tokenize(
        build_dataset(tmp_path / "dataset", "sft", rows), tokenizer, tmp_path, recipe(packing=packing)
    ).train
    assert sorted(train.row_ids(range(len(train.lengths)))) == sorted(names)


def test_validation_rows_limits_only_the_validation_split(
    datasets: dict[str, Artifact], tokenizer: Any, tmp_path: Path
) -> None:
    splits = tokenize(datasets["sft"], tokenizer, tmp_path, recipe(validation_rows=3))
    assert (splits.train.counts.rows, splits.validation.counts.rows) == (9, 3)
    without_validation = tokenize(datasets["sft"], tokenizer, tmp_path, recipe(validation_rows=0))
    assert (without_validation.validation.counts.rows, without_validation.validation.lengths) == (0, [])


class ProgressRecorder(SilentReporter):
    """Records the progress updates."""

    def __init__(self) -> None:
        self.updates: list[tuple[float, float | None]] = []

    def progress(self, done: float, total: float | None, unit: str) -> None:
        self.updates.append((done, total))


@pytest.mark.parametrize(
    "objective",
    ["sft", "dpo", "kto"],
)
def test_progress_ends_at_its_total(
    objective: str, datasets: dict[str, Artifact], tokenizer: Any, tmp_path: Path
) -> None:
    reporter, config = ProgressRecorder(), recipe(objective=objective, validation_rows=0)
    token_cache.load_or_tokenize(datasets["dpo"], "preference", tokenizer, "4" * 64, config, tmp_path, reporter)
    assert [done for done, _ in reporter.updates] == [*range(1, len(reporter.updates) + 1)]
    assert reporter.updates[-1][0] == reporter.updates[-1][1]


@pytest.mark.parametrize("packing", [False, True])
def test_empty_training_split_is_rejected(packing: bool, tmp_path: Path) -> None:
    tiny, empty = tiny_model(tmp_path / "tiny"), dataset_of("text", tmp_path / "dataset", train=0)
    config = FineTuningConfig(base_model=str(tiny), objective="text", packing=packing, max_length=32, max_steps=1)
    with pytest.raises(InputError, match="training split is empty") as error:
        finetune(empty, tmp_path / "model", config, seed=0, state=tmp_path / "state", reporter=SilentReporter())
    assert "Curate more rows" in error.value.hint
    assert not (tmp_path / "model" / "manifest.json").exists()


def test_incomplete_cache_entry_of_a_killed_job_is_ignored(
    cached_splits: TokenizedDataset, datasets: dict[str, Artifact], tokenizer: Any, tmp_path: Path
) -> None:
    incomplete = cached_splits.folder.with_name("half")
    shutil.copytree(cached_splits.folder, incomplete)
    (incomplete / token_cache.INDEX_FILENAME).unlink()
    shutil.rmtree(cached_splits.folder)
    incomplete.rename(cached_splits.folder)
    assert not tokenize(datasets["sft"], tokenizer, tmp_path, recipe()).cached
