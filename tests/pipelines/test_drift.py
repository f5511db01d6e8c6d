"""Drift of captured prompts: the tests of windows, the alarm, and `tuneline traffic drift`.

The command runs on a table of random word vectors; the long test embeds with the input embeddings of the tiny model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from components.common.artifacts import artifact_folder
from components.common.workspace import artifact_store
from pipelines.capture import erasure
from pipelines.drift import alarm, captured_prompts, drift_check, new_prompts, window_test
from pipelines.drift.captured_prompts import Prompt
from pipelines.drift.window_test import COMBINED
from tests.datasets import QUESTION_WORDS, small_dataset
from tests.pipelines.capture import traffic
from tests.pipelines.command import answer, answer_in_process, refusal, run_in_process
from tests.tiny import tiny_model

FIRST_DAY = datetime(2026, 10, 1, 9, tzinfo=UTC)
WINDOW = 50


def draw(generator: np.random.Generator, count: int, shift: float = 0.0) -> np.ndarray:
    values = generator.standard_normal((count, 16)).astype(np.float32)
    values[:, 0] += shift
    return values


def test_p_values_of_unchanged_prompts_are_uniform() -> None:
    generator = np.random.default_rng(0)
    known = draw(generator, 150)
    p_values = []
    for number in range(30):
        known = np.concatenate([known, draw(generator, WINDOW)])
        p_values.append(window_test.compare_window(known, WINDOW, np.random.default_rng(number)).p_values[COMBINED])
    # Kolmogorov–Smirnov with 30 values: 0.29 has p = 0.01.
    assert np.abs(np.sort(p_values) - np.arange(1, 31) / 30).max() < 0.29
    assert max(alarm.compute_e_process(p_values)) < alarm.THRESHOLD


def test_shifted_and_widened_windows_are_found() -> None:
    generator = np.random.default_rng(3)
    known = draw(generator, 400)
    shifted = np.concatenate([known, draw(generator, WINDOW, shift=1.5)])
    test = window_test.compare_window(shifted, WINDOW, np.random.default_rng(0))
    assert max(test.p_values.values()) < 0.001
    # Two opposite halves have the mean of the others: only the discrepancy finds them.
    halves = np.concatenate([draw(generator, 100, shift=4), draw(generator, 100, shift=-4)])
    test = window_test.compare_window(np.concatenate([known, halves]), 200, np.random.default_rng(0))
    assert test.p_values[window_test.MMD] < 0.001
    assert test.p_values[window_test.MEAN_SHIFT] > 0.01
    assert test.p_values[COMBINED] < 0.05


@pytest.mark.parametrize("column", [0.0, 1.0])
def test_embeddings_whose_columns_cancel_are_compared(column: float) -> None:
    """Equal prompts have no variance. Embeddings of a layer norm have a sum of zero in each row."""
    values = np.random.default_rng(0).integers(0, 3, 250) * column
    embeddings = np.array([values, -values, values * 0], np.float32).T
    test = window_test.compare_window(embeddings, WINDOW, np.random.default_rng(0))
    assert min(test.p_values.values()) > 0.05
    assert window_test.estimate_inflation([test]) >= 1
    clusters, share = new_prompts.find_clusters(embeddings[:200], embeddings[200:], build_prompts(WINDOW, 1), 0)
    assert (clusters, share) == ([], 0)


def test_alike_prompts_within_windows_inflate_the_statistic() -> None:
    generator = np.random.default_rng(4)

    def measure(spread: float) -> float:
        parts = [draw(generator, WINDOW) + spread * generator.standard_normal(16) for _ in range(6)]
        tests = [
            window_test.compare_window(np.concatenate([*parts[:n], *parts[n + 1 :], parts[n]]), WINDOW, generator)
            for n in range(6)
        ]
        return window_test.estimate_inflation(tests)

    assert measure(0.0) < 1.3
    # The variance of a window's mean is 1/50 + 0.3² instead of 1/50.
    assert measure(0.3) > 2
    assert window_test.estimate_inflation([]) == 1


def test_random_windows_have_distinct_prompts_and_equal_chances() -> None:
    windows = window_test.draw_windows(12, 5, 6000, np.random.default_rng(0))
    assert all(len(set(row)) == 5 for row in windows[:100].tolist())
    # A prompt is in 2,500 windows on average, with a standard deviation of 38.
    np.testing.assert_allclose(np.bincount(windows.ravel(), minlength=12), 2500, atol=160)


def test_wide_embeddings_keep_their_distances() -> None:
    wide = np.random.default_rng(5).standard_normal((20, 4096)).astype(np.float32)
    narrow = window_test.reduce_width(wide)
    assert narrow.shape == (20, window_test.MAX_WIDTH)
    np.testing.assert_allclose(np.linalg.norm(narrow, axis=1), np.linalg.norm(wide, axis=1), rtol=0.15)


def test_bets_are_fair_and_a_late_drift_is_found() -> None:
    grid = np.arange(1, 5001) / 5000
    bets = [alarm.calibrate(p) for p in grid]
    assert 0.88 < np.mean(bets) <= 1
    assert bets == sorted(bets, reverse=True)
    process = alarm.compute_e_process([0.6] * 50 + [0.0002] * 3)
    assert process[49] < 2
    assert process[52] > alarm.THRESHOLD
    assert alarm.compute_e_process([0.0002])[0] < alarm.THRESHOLD, "one window is never enough"
    assert alarm.compute_e_process([0.0002] * 400)[-1] < float("inf"), "JSON has no infinity"


def test_false_alarms_are_rare_in_uniform_p_values() -> None:
    generator = np.random.default_rng(6)
    p_values = generator.integers(1, 5001, (400, 60)) / 5000
    alarms = sum(max(alarm.compute_e_process(row)) >= alarm.THRESHOLD for row in p_values.tolist())
    assert alarms / 400 <= 0.05


def build_prompts(count: int, hours: int, **changes: Any) -> list[Prompt]:
    start = int(FIRST_DAY.timestamp())
    values = {
        "version": "7",
        "state": "complete",
        "is_cut": False,
        "is_refused": False,
        "rating": None,
        "language": "en",
    }
    return [Prompt(str(n), start + n * hours * 3600, f"text {n}", **{**values, **changes}) for n in range(count)]


def test_windows_have_complete_days_and_enough_prompts() -> None:
    prompts = build_prompts(480, hours=1)  # 24 a day, from 9 o'clock
    today = (FIRST_DAY + timedelta(days=12)).date()
    windows, pending = captured_prompts.split_windows(prompts, "day", today, 0)
    assert [len(window) for window in windows] == [63, 72, 72, 72]
    assert pending == 480 - sum(map(len, windows))
    weeks, _ = captured_prompts.split_windows(prompts, "week", today, 0)
    assert [each[0].day.isoweekday() for each in weeks] == [4, 1]
    fixed, pending = captured_prompts.split_windows(prompts, 200, today, 0)
    assert ([len(window) for window in fixed], pending) == ([200, 200], 80)
    large, _ = captured_prompts.split_windows(build_prompts(3000, hours=0), "day", today, 0)
    assert len(large[0]) == captured_prompts.MAX_WINDOW_PROMPTS


def test_figures_compare_shares_and_lengths() -> None:
    reference = build_prompts(100, 1)
    window = [*build_prompts(40, 1), *build_prompts(10, 1, language="de", is_refused=True, is_cut=True, state="failed")]
    panels = captured_prompts.compute_panels(window, reference)
    for name in ("other_language", "refused", "cut", "failed"):
        assert (panels[name]["value"], panels[name]["difference"]) == (0.2, 0.2)
        # Wilson's intervals are 0.1124 to 0.3304 for 10 of 50, and 0 to 0.0370 for 0 of 100 (Newcombe 1998, method 10).
        expected = [0.2 - (0.0876**2 + 0.0370**2) ** 0.5, 0.3304]
        np.testing.assert_allclose(panels[name]["ci95"], expected, atol=0.0002)
    assert panels["aborted"]["difference"] == 0
    assert not [name for name in panels if name.startswith("rated_down")]
    rated = captured_prompts.compute_panels(build_prompts(9, 1, rating="down"), build_prompts(9, 1, rating="up"))
    assert rated["rated_down_version_7"]["difference"] == 1


WORDS = sorted({word for pair in QUESTION_WORDS for word in pair})


def embed(texts: Sequence[str]) -> np.ndarray:
    """Return the mean of random word vectors."""
    vectors = np.random.default_rng(0).standard_normal((len(WORDS), 24))
    table, zero = dict(zip(WORDS, vectors, strict=True)), np.zeros(24)
    return np.array([np.mean([table.get(word, zero) for word in text.split()], axis=0) for text in texts], np.float32)


def write_home(home: Path, days: int, foreign_from: int, **facts: object) -> None:
    traffic.write_questions(home, FIRST_DAY, days=days, a_day=50, foreign_from=foreign_from, **facts)
    (home / "model").mkdir()


@pytest.fixture
def fake_embedder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Embed with random word vectors, so that the command needs no model."""
    from pipelines.drift import embedding_source

    monkeypatch.setattr(embedding_source, "find_folder", lambda source, _: Path(source))
    monkeypatch.setattr(embedding_source, "build_embedder", lambda *_: embed)


OPTIONS = ("--embedding-model", "model", "--reference-days", "..2026-10-06", "--window", str(WINDOW))


@pytest.mark.usefixtures("fake_embedder")
def test_command_reports_drift_and_equal_files_give_equal_results(tmp_path: Path) -> None:
    write_home(tmp_path, days=12, foreign_from=9)
    result = answer_in_process("traffic", "drift", *OPTIONS, cwd=tmp_path)
    assert (result["alarm"], result["reference"]["prompts"], result["reference"]["windows"]) == (True, 300, 6)
    assert result["alarm_window"] > 3
    assert [window["n"] for window in result["windows"]] == [WINDOW] * 6
    first = result["windows"][0]
    assert set(first["tests"]) == {"mean_shift", "mmd", "combined"}
    assert (first["from"], first["versions"]) == ("2026-10-07T09:00:00+00:00", ["7"])
    assert result == answer_in_process("traffic", "drift", *OPTIONS, cwd=tmp_path)
    # Later traffic does not change the e-values of earlier windows.
    shorter = tmp_path / "shorter"
    shorter.mkdir()
    write_home(shorter, days=9, foreign_from=9)
    earlier = answer_in_process("traffic", "drift", *OPTIONS, "--fail-on-alarm", cwd=shorter)
    assert (earlier["alarm"], earlier["windows"]) == (False, result["windows"][:3])
    finished = run_in_process("traffic", "drift", *OPTIONS, "--fail-on-alarm", cwd=tmp_path)
    assert "ALARM: prompts have changed, first seen in window" in finished.stdout
    assert finished.returncode == 3


@pytest.mark.usefixtures("fake_embedder")
def test_rows_that_are_not_tested_are_reported(tmp_path: Path) -> None:
    write_home(tmp_path, days=10, foreign_from=10)
    settings = traffic.load(tmp_path)
    time = FIRST_DAY + timedelta(days=8)
    jane = settings.hash_subject("jane")
    erasure.erase(settings, "jane", "test", seal_seconds=0)
    empty, other = (traffic.build_row(n, timestamp=int(time.timestamp())) for n in (9001, 9002))
    erased = traffic.build_row(9003, jane, timestamp=int(time.timestamp()))
    del empty["request"]["messages"]
    other["tuneline"]["version"] = "8"
    path = traffic.write_sealed(settings, time, [empty, other, erased])
    path.write_bytes(path.read_bytes() + b'{"damaged\n')
    result = answer_in_process("traffic", "drift", *OPTIONS, cwd=tmp_path)
    assert result["limitations"][:2] == [
        "rows without user text are not tested: 1 of 502",
        "the check skipped 1 damaged line",
    ]
    assert "several versions answered (7, 8)" in result["limitations"][-1]
    assert (result["alarm"], result["pending"]) == (False, 1)


@pytest.mark.usefixtures("fake_embedder")
@pytest.mark.parametrize(
    ("code", "options", "message"),
    [
        (2, ("--window", "20"), "--window is '20'; expected 50 to 2000 prompts, day or week"),
        (2, ("--reference-days", "2026-10-02.."), "--reference-days has no last day"),
        (1, ("--reference-days", "2025-10-02..2025-10-03"), "no prompt was captured on the reference days"),
        (1, ("--reference-days", "2026-10-01"), "has 50 prompts in complete windows; expected at least 100"),
        (1, ("--window", "200", "--reference-days", "..2026-10-03"), "has 0 prompts in complete windows; expected"),
        (1, ("--reference-days", "..2026-10-31"), "no window after the reference is complete"),
        (1, ("--model", "other"), "no traffic of the model 'other' was captured"),
        (1, ("--reference", "gone-revision"), "gone-revision"),
    ],
)
def test_input_without_a_verdict_is_refused(tmp_path: Path, code: int, options: tuple[str, ...], message: str) -> None:
    write_home(tmp_path, days=8, foreign_from=8)
    found = refusal(code, "traffic", "drift", *OPTIONS, *options, cwd=tmp_path)
    assert message in found["message"]
    assert found["hint"]


def test_missing_models_are_refused(tmp_path: Path) -> None:
    write_home(tmp_path, days=8, foreign_from=8)
    options = OPTIONS[2:]
    error = refusal(1, "traffic", "drift", *options, cwd=tmp_path)
    assert "do not record the digest of their model" in error["message"]
    error = refusal(2, "traffic", "drift", *options, "--embedding-model", "model", cwd=tmp_path)
    assert "contains no model with safetensors files and tokenizer.json" in error["message"]
    error = refusal(
        2, "traffic", "drift", *options, "--embedding-model", "model", "--embeddings", "output", cwd=tmp_path
    )
    assert error["message"]


@pytest.mark.usefixtures("fake_embedder")
def test_model_is_required_if_several_were_captured(tmp_path: Path) -> None:
    write_home(tmp_path, days=8, foreign_from=8)
    (tmp_path / "traffic" / "other" / "2026-10-01").mkdir(parents=True)
    error = refusal(2, "traffic", "drift", *OPTIONS, cwd=tmp_path)
    assert error["message"] == "traffic of 2 models was captured: echo, other"


def test_reference_of_a_dataset_has_no_clean_windows() -> None:
    texts = [f"How do I {verb} a {noun} ?" for verb, noun in QUESTION_WORDS] * 3
    windows = [[*build_prompts(WINDOW, 1)] for _ in range(2)]
    check = drift_check.check_drift(drift_check.Reference("dataset", texts), windows, embed, 0)
    assert check.inflation == 1
    assert "a dataset has no days" in check.limitations[0]
    assert check.windows[0]["panels"] == {}
    assert json.loads(json.dumps(check.as_json()))["windows"][0]["n"] == WINDOW


def test_large_datasets_are_sampled_before_they_are_embedded() -> None:
    texts = [f"How do I {verb} a {noun} ?" for verb, noun in QUESTION_WORDS]
    dataset = texts * (1 + drift_check.MAX_REFERENCE_PROMPTS // len(texts))
    windows = [build_prompts(WINDOW, 1) for _ in range(4)]
    sizes = []

    def count_and_embed(texts: Sequence[str]) -> np.ndarray:
        sizes.append(len(texts))
        return np.random.default_rng(len(sizes)).standard_normal((len(texts), 8)).astype(np.float32)

    for reference in (
        drift_check.Reference("dataset", dataset),
        drift_check.Reference.from_windows("days", windows),
    ):
        check = drift_check.check_drift(reference, windows[:1], count_and_embed, 0, dataset)
        assert f"the dataset is a sample of 5,000 of {len(dataset):,} prompts" in check.limitations
    assert max(sizes) == drift_check.MAX_REFERENCE_PROMPTS


@pytest.mark.usefixtures("fake_embedder")
def test_report_and_metrics_are_written_for_their_readers(tmp_path: Path) -> None:
    write_home(tmp_path, days=11, foreign_from=8)
    result = answer_in_process("traffic", "drift", *OPTIONS, "-o", "out", "--metrics", "drift.prom", cwd=tmp_path)
    page = (tmp_path / "out" / "drift.html").read_text()
    assert result["report"] == "out/drift.html"
    assert "Alarm: prompts have changed" in page
    assert "Group 1" in page
    nouns = {noun for _, noun in QUESTION_WORDS[len(QUESTION_WORDS) // 2 :]}
    assert any(f"a {noun} ?" in page for noun in nouns), "new prompts are shown"
    modes = [path.stat().st_mode & 0o7777 for path in (tmp_path / "out", tmp_path / "out" / "drift.html")]
    assert modes == [0o2750, 0o640]
    assert (tmp_path / "drift.prom").stat().st_mode & 0o777 == 0o644
    lines = [line.split() for line in (tmp_path / "drift.prom").read_text().splitlines() if not line.startswith("#")]
    values = {name: float(value) for name, value in lines}
    assert values['tuneline_traffic_drift_alarm{model="echo"}'] == 1
    assert values['tuneline_traffic_drift_e_value{model="echo"}'] == result["windows"][-1]["e_value"]
    assert values['tuneline_traffic_drift_windows{model="echo"}'] == len(result["windows"])
    # Prompts are in the page only.
    assert "How do I" not in (tmp_path / "drift.prom").read_text() + json.dumps(result)


@pytest.mark.long
@pytest.mark.mlflow
def test_drift_on_a_stored_model_and_a_dataset(tmp_path: Path, tuned_in_store: tuple[Path, str]) -> None:
    """Long: it trains the tiny model for two steps and opens an MLflow store."""
    workdir, sha256 = tuned_in_store
    traffic.write_questions(tmp_path, FIRST_DAY, days=14, a_day=50, foreign_from=9, share=0.5, model_sha256=sha256)
    small_dataset(tmp_path / "dataset", train=200)
    options = ("--reference-days", "..2026-10-06", "--window", 50, "--workdir", workdir)
    result = answer("traffic", "drift", *options, "--reference", "dataset", "--mlflow", cwd=tmp_path)
    assert (result["alarm"], result["model_sha256"]) == (True, sha256)
    assert result["alarm_window"] > 3
    tests = result["windows"][0]["tests"]
    assert tests["dataset_combined"]["p"] < 0.001 < tests["combined"]["p"], "the dataset has other questions"
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{workdir}/mlflow.db")
    logged = client.get_metric_history(result["mlflow"]["run_id"], "e_value")
    assert [metric.value for metric in logged] == [window["e_value"] for window in result["windows"]]
    # The dataset alone is the reference of all captured days.
    alone = answer("traffic", "drift", "--reference", "dataset", *options[2:], cwd=tmp_path)
    assert (alone["alarm"], alone["reference"]["windows"], len(alone["windows"])) == (True, 0, 14)
    error = refusal(1, "traffic", "drift", *options[:4], "--workdir", tmp_path / "empty", cwd=tmp_path)
    assert f"the model {sha256[:12]} of the captured rows is not in" in error["message"]


@pytest.fixture
def tuned_in_store(tmp_path: Path) -> tuple[Path, str]:
    """A workdir whose store has an adapter of the tiny model, and the adapter's digest."""
    tiny_model(tmp_path / "base")
    small_dataset(tmp_path / "rows")
    settings = {"base_model": tmp_path / "base", "max_steps": 2, "validation_rows": 0}
    sets = [part for name, value in settings.items() for part in ("--set", f"fine_tuning.{name}={value}")]
    built = answer("finetune", tmp_path / "rows", "-o", tmp_path / "tuned", *sets, cwd=tmp_path)
    store = tmp_path / "work" / "store"
    artifact_store.add_artifact(store, artifact_folder.read(tmp_path / "tuned", "model"))
    return tmp_path / "work", built["sha256"]
