"""Mixing weights: shares of the sources in an epoch, rows left out and repeated, and a training with weights."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact
from components.common.runtime.errors import ConfigurationError
from components.common.runtime.reporters import SilentReporter
from components.fine_tuning import batch_order, checkpoints, mixing, recipe_defaults, row_encoding
from components.fine_tuning.config import Recipe
from components.fine_tuning.mixing import SourceShare, build_mixture, count_shares, describe_shares, plan_shares
from components.fine_tuning.stage import finetune
from tests.datasets import SCHEMA
from tests.fine_tuning.recipes import recipe
from tests.tiny import tiny_model

SOURCES = ["a"] * 60 + ["b"] * 30 + ["c"] * 10


def draw(weights: dict[str, float], epoch: int = 0, seed: int = 1) -> list[int]:
    mixture = build_mixture(weights, SOURCES)
    return mixture.draw_epoch(seed=seed, epoch=epoch)


def test_share_of_each_source_follows_the_weights() -> None:
    counts = Counter(SOURCES[row] for row in draw({"a": 1, "b": 1, "c": 2}))
    assert counts == {"a": 25, "b": 25, "c": 50}
    counts = Counter(SOURCES[row] for row in draw({"a": 1, "b": 1, "c": 1}))
    assert sum(counts.values()) == len(SOURCES), "an epoch keeps its number of rows"
    assert set(counts.values()) == {33, 34}


def test_no_row_is_repeated_before_all_others_of_its_source() -> None:
    weights = {"a": 1.0, "b": 1.0, "c": 2.0}
    mixture = build_mixture(weights, SOURCES)
    draws = Counter(row for epoch in range(5) for row in mixture.draw_epoch(seed=1, epoch=epoch))
    for source in "abc":
        counts = {draws[row] for row, name in enumerate(SOURCES) if name == source}
        assert max(counts) - min(counts) <= 1
    assert draw(weights, epoch=1) != draw(weights, epoch=0) == draw(weights, epoch=0) != draw(weights, seed=2)


def test_a_glob_weights_its_sources_together_and_a_name_precedes_it() -> None:
    counts = Counter(SOURCES[row] for row in draw({"*": 1, "c": 1}))
    assert counts["c"] == 50
    assert counts["a"] + counts["b"] == 50
    assert mixing.match_sources({"docs/*": 1, "*": 1, "docs/x.md": 1}, ["docs/x.md", "docs/y.md", "z"]) == {
        "docs/x.md": "docs/x.md",
        "docs/y.md": "docs/*",
        "z": "*",
    }


def test_weight_zero_leaves_a_source_out() -> None:
    assert {SOURCES[row] for row in draw({"*": 1, "c": 0})} == {"a", "b"}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (
            {"a": 1, "b": 1, "c": 1, "web": 1},
            "no source of the training rows is matched by web; the sources are a, b, c",
        ),
        ({"a": 1}, "no weight for the sources b, c"),
        ({"[ab]": 1, "a": 1, "b": 1, "c": 1}, r"each source that \[ab\] matches has a more specific pattern: a, b"),
    ],
)
def test_unknown_and_missing_sources_are_refused_with_the_names_that_exist(
    weights: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        mixing.check_patterns(weights, SOURCES)


def test_rows_without_sources_are_refused(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"id": ["1"]}), tmp_path / "train.parquet")
    with pytest.raises(ConfigurationError, match=r"the training rows have no sources; expected the column source$"):
        mixing.check_patterns({"*": 1}, row_encoding.read_sources(tmp_path / "train.parquet"))


def test_weight_of_a_source_that_lost_all_rows_is_ignored() -> None:
    weights = {"a": 1.0, "b": 0.0, "lost": 2.0}
    mixture = build_mixture(weights, ["a", "b", "a"])
    assert set(mixture.draw_epoch(seed=1, epoch=0)) == {0, 2}
    assert plan_shares(weights, {"a": 2, "b": 1}, 3)[0].seen == 3
    note = mixing.describe_ignored_weights(weights, {"a", "b"})
    assert note
    assert "the weights of lost are ignored" in note
    assert mixing.describe_ignored_weights(weights, {"a", "b", "lost"}) is None
    with pytest.raises(ConfigurationError, match=r"each source with an answer to learn has the weight 0: b$"):
        build_mixture(weights, ["b"])


def test_planned_shares_agree_with_the_drawn_rows() -> None:
    weights = {"a": 1.0, "[bc]": 3.0}
    mixture = build_mixture(weights, SOURCES)
    drawn = [row for epoch in range(2) for row in mixture.draw_epoch(seed=1, epoch=epoch)]
    counted = count_shares(SOURCES, drawn)
    planned = plan_shares(weights, Counter(SOURCES), len(drawn))
    assert planned[0] == counted[0] == SourceShare("a", 60, 50, 10)
    for plan, count in zip(planned, counted, strict=True):
        assert plan.seen == pytest.approx(count.seen, rel=0.1)


def test_left_out_and_repeated_rows_are_reported() -> None:
    shares = plan_shares({"a": 1, "b": 1, "c": 2}, Counter(SOURCES), len(SOURCES))
    assert describe_shares(shares) == [
        "fine_tuning.mixing_weights leaves out 35 of 60 examples of a",
        "fine_tuning.mixing_weights leaves out 5 of 30 examples of b",
        "fine_tuning.mixing_weights repeats each of the 10 examples of c 5.0 times; an average example is seen 1.0 "
        "times",
    ]
    short = plan_shares({"*": 1}, Counter(SOURCES), 10)
    assert describe_shares(short) == [], "another warning reports a short training"


def test_batches_of_an_epoch_contain_the_drawn_rows() -> None:
    mixture = build_mixture({"a": 1, "b": 1, "c": 2}, SOURCES)
    order = batch_order.order_epoch(range(100), 8, seed=1, epoch=2, mixture=mixture)
    assert sorted(order) == sorted(mixture.draw_epoch(seed=1, epoch=2))
    batched = batch_order.list_batched_rows(range(100), 8, 30, seed=1, mixture=mixture)
    assert list(batched)[2 * 100 : 2 * 100 + 4 * 8] == order[: 4 * 8], "13 steps are an epoch"


def test_copies_of_a_row_are_in_different_batches() -> None:
    sources = ["large"] * 900 + ["small"] * 100
    lengths = [20 + row * 7919 % 211 for row in range(1000)]
    mixture = build_mixture({"large": 1, "small": 1}, sources)
    order = batch_order.order_epoch(lengths, 16, seed=1, epoch=0, mixture=mixture)
    batches = [order[i : i + 16] for i in range(0, len(order), 16)]
    assert [batch for batch in batches if len(set(batch)) < len(batch)] == []
    spreads = [max(lengths[row] for row in batch) - min(lengths[row] for row in batch) for batch in batches]
    assert statistics.median(spreads) < 60, "rows of a batch still have similar lengths"


def test_order_without_weights_is_stable() -> None:
    """Recorded losses depend on it."""
    order = batch_order.order_epoch([20 + row * 7919 % 211 for row in range(1000)], 16, seed=1, epoch=1)
    assert hashlib.sha256(json.dumps(order).encode()).hexdigest()[:16] == "17e2e06e57dba0d5"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Return a dataset with 18 rows of one source and 6 of another."""
    folder = tmp_path_factory.mktemp("data") / "mixed"
    artifact_folder.claim_folder(folder, "mixed")
    names = {"train": ["web.jsonl"] * 18 + ["handbook.md"] * 6, "validation": ["web.jsonl"] * 4, "test": ["web.jsonl"]}
    for split, sources in names.items():
        rows = [
            {
                "id": f"{split}{number}",
                "messages": [
                    {"role": "user", "content": f"What does file {number} do?"},
                    {"role": "assistant", "content": f"It opens {source}, {number} times."},
                ],
                "tools": None,
                "source": source,
                "meta": "{}",
            }
            for number, source in enumerate(sources)
        ]
        parquet.write_table(pa.Table.from_pylist(rows, SCHEMA), folder / f"{split}.parquet")
    payload = [f"{split}.parquet" for split in names]
    return artifact_folder.publish(
        folder, "dataset", payload=payload, inputs=[], config={}, seed=0, key="mixed", summary={"rows_kind": "sft"}
    )


class NoteRecorder(SilentReporter):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


def tune(dataset: Artifact, tiny: Path, folder: Path, **changes: Any) -> Artifact:
    config = recipe(tiny, max_steps=14, checkpoint_every=4, **changes)
    return finetune(dataset, folder / "model", config, seed=3, state=folder / "state", reporter=SilentReporter())


def test_training_draws_the_weighted_rows_and_resumes_bit_identically(
    dataset: Artifact, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNELINE_THREADS", "1")
    weights = {"handbook.md": 3.0, "*": 1.0}
    expected = tune(dataset, tiny, tmp_path / "whole", mixing_weights=weights)
    # Two epochs of 6 steps and 2 steps of the third, with 4 rows each.
    handbook, web = expected.manifest.summary["sources"]
    assert (handbook["source"], handbook["examples"], handbook["left_out"]) == ("handbook.md", 6, 0)
    assert 36 <= handbook["seen"] <= 44
    assert handbook["seen"] + web["seen"] == expected.manifest.summary["rows_seen"] == 56
    assert "handbook.md" in (expected.path / "report.html").read_text(encoding="utf-8")
    card = (expected.path / "README.md").read_text()
    assert f"| examples drawn from handbook.md | {handbook['seen']}, of 6 examples |" in card
    assert expected.sha256 != tune(dataset, tiny, tmp_path / "unweighted").sha256

    rotate = checkpoints.rotate

    def interrupt(folder: Path, keep: int) -> None:
        rotate(folder, keep)
        if (folder / "checkpoint-8").exists():
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkpoints, "rotate", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tune(dataset, tiny, tmp_path / "resumed", mixing_weights=weights)
    model = tune(dataset, tiny, tmp_path / "resumed", mixing_weights=weights)
    assert (model.sha256, model.manifest.summary["resumed_from"]) == (expected.sha256, 8)


def test_memory_check_excludes_sources_with_weight_zero(
    dataset: Artifact, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mixing.select_trained({"*": 1, "b": 0}, ["a", "b", "c"], [10, 90, 20]) == [10, 20]
    longest: list[int] = []

    def record_length(recipe: Recipe, length: int, *_: object) -> None:
        longest.append(length)
        raise ConfigurationError("before the training", hint="")

    monkeypatch.setattr(recipe_defaults, "check_memory", record_length)
    for weights in ({"*": 1.0}, {"web.jsonl": 1.0, "handbook.md": 0.0}):
        with pytest.raises(ConfigurationError, match="before the training"):
            tune(dataset, tiny, tmp_path, mixing_weights=weights)
    assert longest[1] < longest[0]


def test_documents_state_the_distinct_examples_and_their_draws(dataset: Artifact, tiny: Path, tmp_path: Path) -> None:
    weights = {"handbook.md": 1.0, "web.jsonl": 0.0}
    model = tune(dataset, tiny, tmp_path, mixing_weights=weights)
    page, card = (model.path / "report.html").read_text(encoding="utf-8"), (model.path / "README.md").read_text()
    assert "Trained on the conversations of 6 of 24 examples, 56 draws, 2.33 epochs" in page
    assert "24 of 24" not in page
    assert "| examples seen | 56 draws of 6 of 24 examples, 2.33 epochs |" in card
    assert "rows seen" not in page + card


def test_shares_of_divided_texts_count_examples(tiny: Path, tmp_path: Path) -> None:
    """A text is one row, but several examples."""
    folder = tmp_path / "texts"
    artifact_folder.claim_folder(folder, "texts")
    words = {"long.txt": 600, "short.txt": 10}
    for split, sources in {"train": ["long.txt"] * 4 + ["short.txt"] * 8, "validation": ["short.txt"]}.items():
        rows = [
            {"id": f"{split}{number}", "text": f"{number}: " + "word " * words[source], "source": source, "meta": "{}"}
            for number, source in enumerate(sources)
        ]
        parquet.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
    texts = artifact_folder.publish(
        folder,
        "dataset",
        payload=["train.parquet", "validation.parquet"],
        inputs=[],
        config={},
        seed=0,
        key="texts",
        summary={"rows_kind": "text"},
    )
    reporter = NoteRecorder()
    config = recipe(
        tiny, objective="text", max_length=64, max_steps=None, epochs=1, mixing_weights={"long.txt": 1, "short.txt": 1}
    )
    model = finetune(texts, tmp_path / "model", config, seed=3, state=tmp_path / "state", reporter=reporter)
    summary = model.manifest.summary
    long, short = summary["sources"]
    assert (summary["rows"]["train"], long["examples"] + short["examples"]) == (12, summary["examples"])
    assert long["seen"] + short["seen"] == summary["examples"] > 12
    page, card = (model.path / "report.html").read_text(encoding="utf-8"), (model.path / "README.md").read_text()
    assert f"<td>{long['seen'] / summary['examples']:.1%}</td>" in page
    assert f"{summary['examples']} draws of" in card
    assert [note for note in reporter.notes if "leaves out" in note] == [
        f"fine_tuning.mixing_weights leaves out {long['left_out']} of {long['examples']} examples of long.txt"
    ]


def test_source_that_loses_all_rows_is_ignored_by_the_training(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    artifact_folder.claim_folder(folder, "long")
    for split, sources in {"train": ["web"] * 8 + ["manual"] * 2, "validation": ["web"] * 2}.items():
        rows = [
            {
                "id": f"{split}{number}",
                "messages": [
                    {"role": "user", "content": "Why? " * (300 if source == "manual" else 1)},
                    {"role": "assistant", "content": f"Reason {number}."},
                ],
                "tools": None,
                "source": source,
                "meta": "{}",
            }
            for number, source in enumerate(sources)
        ]
        parquet.write_table(pa.Table.from_pylist(rows, SCHEMA), folder / f"{split}.parquet")
    payload = ["train.parquet", "validation.parquet"]
    data = artifact_folder.publish(
        folder, "dataset", payload=payload, inputs=[], config={}, seed=0, key="long", summary={"rows_kind": "sft"}
    )
    reporter, config = NoteRecorder(), recipe(tiny, max_steps=2, mixing_weights={"web": 1.0, "manual": 1.0})
    model = finetune(data, tmp_path / "model", config, seed=3, state=tmp_path / "state", reporter=reporter)
    assert [share["source"] for share in model.manifest.summary["sources"]] == ["web"]
    assert [note for note in reporter.notes if "the weights of manual are ignored" in note]


def test_unknown_source_is_refused_before_rows_are_tokenized(dataset: Artifact, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"matched by blog; the sources are handbook.md, web.jsonl"):
        tune(dataset, tiny, tmp_path, mixing_weights={"blog": 1.0, "*": 1.0})
    assert not (tmp_path / "state").exists()


def test_weights_survive_the_canonical_order_of_a_plan(tiny: Path) -> None:
    """A plan is canonical JSON, which sorts keys: the weights must not depend on their order."""
    weights = {"*": 1.0, "docs/*": 2.0}
    plan = json.loads(json.dumps(recipe(tiny, mixing_weights=weights).model_dump(), sort_keys=True))
    assert plan["mixing_weights"] == weights
    names = ["docs/x", "y"]
    assert build_mixture(weights, names) == build_mixture(dict(reversed(weights.items())), names)
