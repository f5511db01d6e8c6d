"""Mixing of sources: weights, caps, repetitions and temperature, rows left out and repeated, and trainings."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections import Counter
from collections.abc import Callable
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
from components.fine_tuning.mixing import (
    MixingSettings,
    SourceShare,
    build_mixture,
    count_shares,
    describe_shares,
    plan_shares,
)
from components.fine_tuning.stage import finetune
from tests.datasets import SCHEMA
from tests.fine_tuning.recipes import recipe
from tests.note_recorder import NoteRecorder
from tests.tiny import tiny_model

SOURCES = ["a"] * 60 + ["b"] * 30 + ["c"] * 10


def draw(weights: dict[str, float], epoch: int = 0, seed: int = 1) -> list[int]:
    mixture = build_mixture(MixingSettings(weights), SOURCES)
    return mixture.draw_epoch(seed=seed, epoch=epoch)


def test_share_of_each_source_follows_the_weights() -> None:
    counts = Counter(SOURCES[row] for row in draw({"a": 1, "b": 1, "c": 2}))
    assert counts == {"a": 25, "b": 25, "c": 50}
    counts = Counter(SOURCES[row] for row in draw({"a": 1, "b": 1, "c": 1}))
    assert sum(counts.values()) == len(SOURCES), "an epoch keeps its number of rows"
    assert set(counts.values()) == {33, 34}


def test_no_row_is_repeated_before_all_others_of_its_source() -> None:
    weights = {"a": 1.0, "b": 1.0, "c": 2.0}
    mixture = build_mixture(MixingSettings(weights), SOURCES)
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
            "no source of the training rows matches web; sources: a, b, c",
        ),
        ({"a": 1}, "no weight for the sources b, c"),
        ({"[ab]": 1, "a": 1, "b": 1, "c": 1}, r"each source that \[ab\] matches has a more specific pattern: a, b"),
    ],
)
def test_unknown_and_missing_sources_are_refused_with_the_names_that_exist(
    weights: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        mixing.check_settings(MixingSettings(weights), Counter(SOURCES))


def test_rows_without_sources_are_refused(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"id": ["1"]}), tmp_path / "train.parquet")
    with pytest.raises(ConfigurationError, match=r"the training rows have no sources; expected the column source$"):
        mixing.check_settings(MixingSettings({"*": 1}), row_encoding.count_sources(tmp_path / "train.parquet"))


def test_weight_of_a_source_that_lost_all_rows_is_ignored() -> None:
    settings = MixingSettings({"a": 1.0, "b": 0.0, "lost": 2.0})
    mixture = build_mixture(settings, ["a", "b", "a"])
    assert set(mixture.draw_epoch(seed=1, epoch=0)) == {0, 2}
    assert plan_shares(settings, {"a": 2, "b": 1}, 3, {"a": 4.0, "b": 5.0})[0] == SourceShare("a", 2, 3, 0, 12)
    (note,) = mixing.describe_ignored_settings(settings, {"a", "b"})
    assert "the values of lost are ignored" in note
    assert mixing.describe_ignored_settings(settings, {"a", "b", "lost"}) == []
    with pytest.raises(ConfigurationError, match=r"each source with an answer to learn has the weight 0: b$"):
        build_mixture(settings, ["b"])


def count_epochs(settings: MixingSettings, epochs: int = 1) -> Counter[str]:
    """Return the draws of each source."""
    mixture = build_mixture(settings, SOURCES)
    return Counter(SOURCES[row] for epoch in range(epochs) for row in mixture.draw_epoch(seed=1, epoch=epoch))


@pytest.mark.parametrize(
    ("settings", "counts"),
    [
        (MixingSettings(caps={"a": 20}), [20, 30, 10]),
        (MixingSettings(caps={"a": 100, "b": 1}), [60, 1, 10]),
        (MixingSettings(caps={"*": 15, "c": 4}, repetitions={"a": 0.5}), [7, 8, 4]),
        (MixingSettings(repetitions={"c": 3}), [60, 30, 30]),
        (MixingSettings(repetitions={"a": 0.5, "c": 2.5}), [30, 30, 25]),
        (MixingSettings(caps={"c": 25}, repetitions={"c": 3}), [60, 30, 25]),
        (MixingSettings({"a": 1, "b": 1, "c": 0}, repetitions={"c": 5}), [45, 45, 0]),
        (MixingSettings({"*": 1, "a": 3}, caps={"a": 10}), [10, 30, 10]),  # the weights alone would give 38 rows of a
        (MixingSettings({"a": 2, "*": 1}, repetitions={"b": 2}), [87, 37, 6]),
    ],
)
def test_caps_and_repetitions_set_the_rows_of_an_epoch(settings: MixingSettings, counts: list[int]) -> None:
    drawn = count_epochs(settings)
    assert [drawn[source] for source in "abc"] == counts
    planned = plan_shares(settings, Counter(SOURCES), sum(counts), dict.fromkeys("abc", 1.0))
    assert [share.seen for share in planned] == counts


def test_temperature_shares_rows_by_the_root_of_the_sizes() -> None:
    """Examples-proportional and temperature-scaled mixing of T5, with its artificial limit (arXiv 1910.10683, 3.5.2)."""
    assert not MixingSettings(temperature=1).is_active
    drawn = count_epochs(MixingSettings(temperature=2))
    roots = [size**0.5 for size in (60, 30, 10)]
    assert [100 * root / sum(roots) for root in roots] == pytest.approx([47.27, 33.43, 19.30], abs=0.01)
    assert [drawn[source] for source in "abc"] == [47, 34, 19], "by largest remainders"
    assert set(count_epochs(MixingSettings(temperature=1e6)).values()) == {33, 34}


@pytest.mark.parametrize("temperature", [1, 2, 4])
def test_caps_limit_the_sizes_before_the_temperature(temperature: float) -> None:
    limit = 20
    settings = MixingSettings(caps=dict.fromkeys("abc", limit), temperature=temperature)
    rates = [min(size, limit) ** (1 / temperature) for size in (60, 30, 10)]
    drawn = count_epochs(settings)
    assert sum(drawn.values()) == 20 + 20 + 10
    for source, rate in zip("abc", rates, strict=True):
        assert drawn[source] == pytest.approx(50 * rate / sum(rates), abs=1)


def test_sources_capped_together_have_one_share() -> None:
    settings = MixingSettings(caps={"[bc]": 40}, temperature=1e6)
    drawn = count_epochs(settings)
    assert (drawn["a"], drawn["b"] + drawn["c"]) == (60, 40), "the cap also limits a share that the temperature raises"
    assert count_epochs(MixingSettings(caps={"[bc]": 90}, temperature=1e6))["a"] == 50
    together = count_epochs(MixingSettings(caps={"[ab]": 45}), epochs=2)
    assert (together["a"], together["b"], together["c"]) == (60, 30, 20)


def test_epochs_draw_all_rows_of_a_capped_source_before_one_is_repeated() -> None:
    mixture = build_mixture(MixingSettings(caps={"a": 20}, repetitions={"c": 2.5}), SOURCES)
    assert len(batch_order.build_sampler(range(100), 8, seed=1, mixture=mixture)) == mixture.rows == 75
    draws = Counter(row for epoch in range(3) for row in mixture.draw_epoch(seed=1, epoch=epoch))
    assert {draws[row] for row, source in enumerate(SOURCES) if source == "a"} == {1}
    assert {draws[row] for row, source in enumerate(SOURCES) if source == "b"} == {3}
    assert {draws[row] for row, source in enumerate(SOURCES) if source == "c"} == {7, 8}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (MixingSettings(caps={"web": 1}), r"mixing_caps: no source .* matches web; sources: a, b, c"),
        (MixingSettings(repetitions={"web": 1}), r"mixing_repetitions: no source .* matches web;"),
        (MixingSettings(caps={"[ab]": 1, "a": 1, "b": 1}), r"mixing_caps: each source that \[ab\] matches has a more"),
        (MixingSettings(repetitions={"*": 0.001}), "mixing_repetitions: an epoch has 0.1 rows; expected at least 1"),
    ],
)
def test_caps_and_repetitions_without_rows_are_refused(settings: MixingSettings, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        mixing.check_settings(settings, Counter(SOURCES))


def test_caps_and_repetitions_of_weight_zero_are_reported() -> None:
    settings = MixingSettings({"a": 0, "*": 1}, caps={"a": 5, "b": 5}, repetitions={"a": 2})
    assert mixing.describe_ignored_settings(settings, set(SOURCES)) == [
        f"fine_tuning.mixing_{key}: the values of a are ignored, because the weight of their sources is 0"
        for key in ("caps", "repetitions")
    ]


def test_summary_adds_up_the_smallest_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixing, "MAX_LISTED_SOURCES", 1)
    shares = count_shares(SOURCES, [3] * 100, [1] * 60 + [2] * 30 + [0] * 10)
    first, rest = mixing.summarize_shares(shares)
    assert (first["source"], first["repetitions"], first["token_share"]) == ("a", 1, 0.5)
    assert rest == {
        "source": "2 other sources",
        "examples": 40,
        "seen": 60,
        "left_out": 10,
        "tokens": 180,
        "repetitions": 1.5,
        "token_share": 0.5,
    }


def test_planned_shares_agree_with_the_drawn_rows() -> None:
    settings = MixingSettings({"a": 1.0, "[bc]": 3.0})
    mixture, lengths = build_mixture(settings, SOURCES), [2] * 100
    counted = count_shares(SOURCES, lengths, batch_order.count_draws(lengths, 10, 20, seed=1, mixture=mixture))
    planned = plan_shares(settings, Counter(SOURCES), 200, dict.fromkeys("abc", 2.0))
    assert planned[0] == counted[0] == SourceShare("a", 60, 50, 10, 100)
    for plan, count in zip(planned, counted, strict=True):
        assert plan.seen == pytest.approx(count.seen, rel=0.1)


def test_left_out_and_repeated_rows_are_reported() -> None:
    lengths = dict.fromkeys("abc", 1.0)
    settings = MixingSettings({"a": 1, "b": 1, "c": 2})
    shares = plan_shares(settings, Counter(SOURCES), len(SOURCES), lengths)
    assert describe_shares(shares, len(SOURCES)) == [
        "mixing leaves out 35 of 60 examples of a",
        "mixing leaves out 5 of 30 examples of b",
        "mixing repeats 10 examples of c, with 5.0 occurrences on average; the average of all sources is 1.0",
    ]
    short = plan_shares(MixingSettings({"*": 1}), Counter(SOURCES), 10, lengths)
    assert describe_shares(short, len(SOURCES)) == [], "another warning reports a short training"


def test_batches_of_an_epoch_contain_the_drawn_rows() -> None:
    mixture = build_mixture(MixingSettings({"a": 1, "b": 1, "c": 2}), SOURCES)
    order = batch_order.order_epoch(range(100), 8, seed=1, epoch=2, mixture=mixture)
    assert sorted(order) == sorted(mixture.draw_epoch(seed=1, epoch=2))
    whole = Counter(row for epoch in range(2) for row in mixture.draw_epoch(seed=1, epoch=epoch))
    whole.update(order[: 4 * 8])
    draws = batch_order.count_draws(range(100), 8, 2 * 13 + 4, seed=1, mixture=mixture)
    assert draws == [whole[row] for row in range(100)], "13 steps are an epoch"


def test_copies_of_a_row_are_in_different_batches() -> None:
    sources = ["large"] * 900 + ["small"] * 100
    lengths = [20 + row * 7919 % 211 for row in range(1000)]
    mixture = build_mixture(MixingSettings({"large": 1, "small": 1}), sources)
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


def tune(dataset: Artifact, tiny: Path, folder: Path, **changes: Any) -> Artifact:
    config = recipe(tiny, max_steps=14, checkpoint_every=4, **changes)
    return finetune(dataset, folder / "model", config, seed=3, state=folder / "state", reporter=SilentReporter())


@pytest.fixture(scope="module")
def unmixed(dataset: Artifact, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Return a model whose recipe has no mixing settings."""
    return tune(dataset, tiny, tmp_path_factory.mktemp("unmixed"))


def interrupt_at(step: int) -> Callable[[Path, int], None]:
    """Return a replacement of `checkpoints.rotate` that interrupts after the checkpoint of a step."""
    rotate = checkpoints.rotate

    def rotate_and_interrupt(folder: Path, keep: int) -> None:
        rotate(folder, keep)
        if (folder / f"checkpoint-{step}").exists():
            raise KeyboardInterrupt

    return rotate_and_interrupt


def test_training_draws_the_weighted_rows_and_resumes_bit_identically(
    dataset: Artifact, tiny: Path, unmixed: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    assert f"| handbook.md | 6 | {handbook['seen']} | {handbook['repetitions']:.2f} | {handbook['tokens']:,} |" in card
    assert handbook["tokens"] + web["tokens"] == expected.manifest.summary["tokens"]
    assert handbook["token_share"] + web["token_share"] == pytest.approx(1)
    assert expected.sha256 != unmixed.sha256

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkpoints, "rotate", interrupt_at(8))
        with pytest.raises(KeyboardInterrupt):
            tune(dataset, tiny, tmp_path / "resumed", mixing_weights=weights)
    model = tune(dataset, tiny, tmp_path / "resumed", mixing_weights=weights)
    assert (model.sha256, model.manifest.summary["resumed_from"]) == (expected.sha256, 8)


@pytest.mark.long
def test_epochs_of_a_training_with_caps_have_their_rows_and_resume_bit_identically(
    dataset: Artifact, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trains twice; the resumed training with weights, above, is the one of the fast tier."""
    monkeypatch.setenv("TUNELINE_THREADS", "1")
    # An epoch has 8 rows of web.jsonl and 9 of handbook.md: 5 steps.
    settings = {"mixing_caps": {"web.jsonl": 8}, "mixing_repetitions": {"handbook.md": 1.5}}
    changes: dict[str, Any] = {"max_steps": None, "epochs": 3, "checkpoint_every": 4, **settings}
    recorder = NoteRecorder()

    def train(folder: Path) -> Artifact:
        config = recipe(tiny, **changes)
        return finetune(dataset, folder / "model", config, seed=3, state=folder / "state", reporter=recorder)

    expected = train(tmp_path / "whole")
    summary = expected.manifest.summary
    handbook, web = summary["sources"]
    assert (summary["steps"], summary["rows_seen"], summary["epochs"]) == (15, 51, 3)
    assert (handbook["seen"], handbook["repetitions"], handbook["left_out"]) == (27, 4.5, 0)
    assert (web["seen"], web["left_out"]) == (24, 0), "three epochs reach all 18 rows"
    assert handbook["tokens"] + web["tokens"] == summary["tokens"]
    assert not [note for note in recorder.notes if "trains on" in note or "leaves out" in note]
    assert "24 of 24 examples in 51 draws." in (expected.path / "report.html").read_text(encoding="utf-8")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkpoints, "rotate", interrupt_at(8))
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "resumed")
    model = train(tmp_path / "resumed")
    assert (model.sha256, model.manifest.summary["resumed_from"]) == (expected.sha256, 8)
    assert [note for note in recorder.notes if "resuming" in note] == ["resuming from step 8"]


def test_sources_of_a_training_without_settings_are_reported(unmixed: Artifact) -> None:
    summary = unmixed.manifest.summary
    handbook, web = summary["sources"]
    assert (handbook["examples"], web["examples"], handbook["seen"] + web["seen"]) == (6, 18, summary["rows_seen"])
    assert handbook["tokens"] + web["tokens"] == summary["tokens"]
    page, card = (unmixed.path / "report.html").read_text(encoding="utf-8"), (unmixed.path / "README.md").read_text()
    assert f'<td class="n">{100 * web["token_share"]:.1f}</td>' in page
    assert "| rows seen | 56, 2.33 epochs |" in card
    assert f"| web.jsonl | 18 | {web['seen']} | {web['repetitions']:.2f} |" in card


def test_memory_check_excludes_sources_with_weight_zero(
    dataset: Artifact, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mixing.select_trained(MixingSettings({"*": 1, "b": 0}), ["a", "b", "c"], [10, 90, 20]) == [10, 20]
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
    assert "Trained for 2.33 epochs on 6 of 24 examples in 56 draws. Training used the conversations." in page
    assert "24 of 24" not in page
    assert "| examples seen | 6 of 24 examples in 56 draws, 2.33 epochs |" in card
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
    assert f'<td class="n">{100 * long["token_share"]:.1f}</td>' in page
    assert f"examples in {summary['examples']} draws" in card
    assert [note for note in reporter.notes if "leaves out" in note] == [
        f"mixing leaves out {long['left_out']} of {long['examples']} examples of long.txt"
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
    assert [note for note in reporter.notes if "the values of manual are ignored" in note]


def test_unknown_source_is_refused_before_rows_are_tokenized(dataset: Artifact, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"matches blog; sources: handbook.md, web.jsonl"):
        tune(dataset, tiny, tmp_path, mixing_weights={"blog": 1.0, "*": 1.0})
    assert not (tmp_path / "state").exists()


def test_weights_survive_the_canonical_order_of_a_plan(tiny: Path) -> None:
    """A plan is canonical JSON, which sorts keys: the weights must not depend on their order."""
    weights = {"*": 1.0, "docs/*": 2.0}
    plan = json.loads(json.dumps(recipe(tiny, mixing_weights=weights).model_dump(), sort_keys=True))
    assert plan["mixing_weights"] == weights
    names = ["docs/x", "y"]
    reordered = MixingSettings(dict(reversed(weights.items())))
    assert build_mixture(MixingSettings(weights), names) == build_mixture(reordered, names)
