"""Ground truth, scores, measurements and report page of the curation benchmark.

In the long tier: the tests that build several corpora, edit copies word by word, or run tuneline itself.
"""

from __future__ import annotations

import pstats
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest

from benchmarks import corpus, curation, measure, page, peers, profiled, scoring


@pytest.fixture(scope="module")
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> corpus.Corpus:
    return corpus.build(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", documents=200, seed=3)


@pytest.mark.long
def test_corpus_bytes_depend_only_on_the_seed(small_corpus: corpus.Corpus, tmp_path: Path) -> None:
    same = corpus.build(tmp_path / "again.jsonl", documents=200, seed=3)
    different = corpus.build(tmp_path / "other.jsonl", documents=200, seed=4)
    assert same.path.read_bytes() == small_corpus.path.read_bytes()
    assert (same.sha256, same.documents) == (small_corpus.sha256, 200)
    assert different.sha256 != small_corpus.sha256


def test_documents_have_the_nominal_mean_length(small_corpus: corpus.Corpus) -> None:
    assert small_corpus.characters / small_corpus.documents == pytest.approx(corpus.CHARACTERS, rel=0.05)


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8])
def test_true_pairs_equal_exhaustive_comparison(small_corpus: corpus.Corpus, threshold: float) -> None:
    texts = corpus.texts(small_corpus.path)
    shingles = [corpus.shingles(text) for text in texts]
    expected = {
        (a, b): similarity
        for b in range(len(shingles))
        for a in range(b)
        if (similarity := corpus.jaccard(shingles[a], shingles[b])) >= threshold
    }
    pairs, similarities = corpus.true_pairs(texts, threshold)
    similarity_by_pair = dict(zip(map(tuple, pairs.tolist()), similarities.tolist(), strict=True))
    assert len(expected) > 20
    assert similarity_by_pair == pytest.approx(expected)


def test_true_pairs_include_short_and_empty_texts() -> None:
    texts = ["!!!", "one two", "One, two.", "one two three four five six", "", "one two three four five seven"]
    pairs, similarities = corpus.true_pairs(texts, 0.3)
    assert dict(zip(map(tuple, pairs.tolist()), similarities.tolist(), strict=True)) == pytest.approx(
        {(0, 4): 1, (1, 2): 1, (3, 5): 1 / 3}
    )


@pytest.mark.long
@pytest.mark.parametrize("target", [0.5, 0.7, 0.95])
def test_near_copy_has_the_requested_similarity(target: float) -> None:
    rng = random.Random(5)
    pool = corpus.sentences()
    text = " ".join(" ".join(rng.choice(pool)) for _ in range(7))
    copy = corpus.near_copy(text, target, pool, rng)
    assert corpus.jaccard(corpus.shingles(text), corpus.shingles(copy)) == pytest.approx(target, abs=0.025)


def test_removal_scores_match_hand_count() -> None:
    # True pairs: a chain 0-1-2, a pair 3-4, a very similar pair 5-6; 7, 8 and 9 are unique.
    pairs = numpy.array([[0, 1], [1, 2], [3, 4], [5, 6]])
    similarity = numpy.array([0.75, 0.72, 0.7, 0.9])
    score = scoring.score([1, 2, 6, 9], pairs, similarity, documents=10)
    assert score.removed == 4
    assert score.recall == 3 / 4  # 3 and 4 both remain
    assert score.recall_high == 1
    assert score.precision == 3 / 4  # 9 is in no pair
    assert score.far == 2 / 4  # 2, whose only partner was removed too, and 9
    assert scoring.surplus(pairs, 10) == 4


def test_no_removal_has_recall_zero_and_precision_one() -> None:
    score = scoring.score([], numpy.array([[0, 1]]), numpy.array([0.9]), documents=2)
    assert (score.recall, score.precision, score.far) == (0, 1, 0)


def test_cost_includes_child_processes(tmp_path: Path) -> None:
    inner = (
        "import time; held = b'x' * 80_000_000; end = time.process_time() + 0.4\nwhile time.process_time() < end: pass"
    )
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    outer += "; open('file', 'wb').write(bytes(1_000_000)); sys.exit(3)"
    cost = measure.run([sys.executable, "-c", outer], tmp_path / "log", [tmp_path], tmp_path)
    assert cost.returncode == 3
    assert 0.4 <= cost.cpu < 2
    assert cost.rss > 80_000_000
    assert 1_000_000 <= cost.disk < 2_000_000
    assert max(cost.parts.values()) > 0.2
    assert max(cost.memory.values()) > 80_000_000


def test_cost_excludes_other_children_of_the_caller(tmp_path: Path) -> None:
    busy_command = [sys.executable, "-c", "held = b'x' * 300_000_000\nwhile True: pass"]
    with subprocess.Popen(busy_command) as other_process:
        try:
            cost = measure.run([sys.executable, "-c", "import time; time.sleep(1)"], tmp_path / "log", [], tmp_path)
            assert other_process.poll() is None
        finally:
            other_process.kill()
    assert cost.rss < 300_000_000
    assert [part for part in cost.parts if "while True" in part] == []


def test_library_time_is_attributed_to_the_calling_module() -> None:
    root = Path(profiled.__file__).resolve().parents[1]
    module, command = (
        (str(root / "components/data_curation/rows.py"), 1, "f"),
        (str(root / "pipelines/cli/application.py"), 1, "g"),
    )
    library, builtin, start = ("/usr/lib/library.py", 1, "h"), ("~", 0, "<built-in>"), ("~", 0, "<exec>")
    stats = {  # function: (calls, calls, own seconds, seconds with callees, callers in the same form)
        start: (1, 1, 0.5, 10.0, {}),
        command: (1, 1, 1.0, 9.5, {start: (1, 1, 1.0, 9.5)}),
        module: (1, 1, 2.0, 6.0, {command: (1, 1, 2.0, 6.0)}),
        library: (4, 4, 1.5, 6.5, {module: (3, 3, 1.0, 4.0), command: (1, 1, 0.5, 2.5)}),
        builtin: (9, 9, 5.0, 5.0, {library: (9, 9, 5.0, 5.0)}),
    }
    seconds = profiled.by_module(stats)
    assert seconds["components.data_curation.rows"] == pytest.approx(2 + 6.5 * 4 / 6.5)
    assert seconds["pipelines.cli.application"] == pytest.approx(1 + 6.5 * 2.5 / 6.5)
    assert sum(seconds.values()) == pytest.approx(10)


def test_profile_includes_child_processes_and_workers(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import multiprocessing, subprocess, sys\n"
        "from components.common.artifacts import hashing\n"
        "def work(method):\n"
        "    for n in range(20_000): hashing.digest({method: n})\n"
        "if __name__ == '__main__':\n"
        "    if sys.argv[1:]: work('child')\n"
        "    else:\n"
        "        subprocess.run([sys.executable, __file__, 'child'], check=True)\n"
        "        for method in ('fork', 'spawn'):\n"
        "            worker = multiprocessing.get_context(method).Process(target=work, args=[method])\n"
        "            worker.start(); worker.join()\n"
    )
    folder = tmp_path / "profiles"
    folder.mkdir()
    cost = measure.run([sys.executable, str(program)], tmp_path / "log", [], tmp_path, profiled.environment(folder))
    assert cost.returncode == 0, (tmp_path / "log").read_text()
    stats = [pstats.Stats(str(file)).stats for file in folder.glob("*.pstats")]
    calls = [sum(entry[1] for (_, _, name), entry in profile.items() if name == "digest") for profile in stats]
    assert [count for count in calls if count] == [20_000] * 3
    seconds = sum(profiled.by_module(profile).get("components.common.artifacts.hashing", 0) for profile in stats)
    assert profiled.summary(folder)["components.common.artifacts.hashing"] == pytest.approx(seconds, abs=0.01)


def build_result(documents: int, cpu: float, memory: int) -> dict[str, Any]:
    cost = {"cpu": cpu, "wall": cpu, "rss": memory, "pss": memory, "disk": documents * 1000}
    cost |= {"parts": {"pipelines.cli": cpu}, "memory": {"pipelines.cli": memory}}
    rows = {"in": documents, "kept": documents, "rejected": {}, "quarantined": 0}
    return {
        "name": "default",
        "settings": [],
        "documents": documents,
        "cost": cost,
        "rows": rows,
        "output": 1,
        "input": 1,
    }


ENVIRONMENT = {
    "command": "python -m benchmarks.curation",
    "commit": "abc",
    "python": "3",
    "processor": "p",
    "cores": 2,
    "memory": 1,
    "load": 0,
}


def test_page_reports_missed_goals_and_failed_peers() -> None:
    score = {"removed": 5, "recall": 0.96, "recall_high": 1.0, "precision": 0.99, "far": 0.0}
    cost = build_result(100, 2, 100)["cost"]
    tools = [
        {
            "name": "tuneline, near duplicates only",
            "version": "1",
            "bands": "",
            "flags": "",
            "cost": cost,
            "score": score,
        },
        {"name": "text-dedup", "version": "1", "bands": "", "flags": "", "cost": {**cost, "cpu": 30}, "score": score},
        {"name": "datatrove", "version": "1", "bands": "", "flags": "", "error": "no such package"},
    ]
    corpus_info = {"documents": 100, "characters": 65_000, "sha256": "ab"}
    fuzzy = {**ENVIRONMENT, "corpus": corpus_info, "truth": {"pairs": 9, "high": 4, "surplus": 5}, "tools": tools}
    text = page.markdown(
        {
            "fuzzy": fuzzy,
            "curation": {**ENVIRONMENT, "corpus": corpus_info, "runs": [build_result(100, 2, 100)], "profile": {}},
        }
    )
    assert "recall of at least 0.97: **missed** (0.960)" in text
    assert "precision of at least 0.95: met" in text
    assert "at most 1/5 of text-dedup's CPU time: met (1/15.0)" in text
    assert "**datatrove** was not measured: no such package" in text
    assert "2,000 documents per CPU second: **missed**" in text


def test_templated_documents_have_the_documented_similarity(tmp_path: Path) -> None:
    templated, pairs = corpus.templated(tmp_path / "corpus.jsonl", 60)
    shingles = [corpus.shingles(text) for text in corpus.texts(templated.path)]
    assert pairs
    assert all(corpus.jaccard(shingles[a], shingles[b]) == pytest.approx(0.77, abs=0.005) for a, b in pairs)
    others = {(a, b) for a in range(60) for b in range(a + 1, 60)} - {*pairs}
    assert all(corpus.jaccard(shingles[a], shingles[b]) < 0.7 for a, b in others)


def test_page_reports_recall_on_templated_documents() -> None:
    run = {
        "documents": 10_000,
        "cost": {"cpu": 20.0, "pss": 2**30, "disk": 2**20},
        "planted": 500,
        "found": 490,
        "removed": 492,
    }
    text = page.markdown({"template": {**ENVIRONMENT, "runs": [run]}})
    assert "| 10,000 | 20.0 | 2,000 µs | 1,024 MiB | 1 MiB | 490 of 500 | 0.980 | 492 |" in text


def test_page_compares_checkouts_and_keeps_other_sections() -> None:
    runs = [
        {**build_result(1_000, cpu, memory * 2**20), "source": "rows", "checkout": checkout}
        for checkout, cpu, memory in (("baseline", 4, 300), ("this checkout", 2, 200), ("baseline", 6, 310))
    ]
    part = {**ENVIRONMENT, "runs": runs, "commits": {"baseline": "abc", "this checkout": "def"}}
    previous = (
        "# Old\n\n## The whole curation\n\nkept\n\n## Default curation, compared with an earlier commit\n\nreplaced\n"
    )
    text = page.markdown({"baseline": part}, previous)
    assert "| rows | this checkout | 1,000 | 1,000 | 2.0 | 500 | 2.50 | 200 MiB |" in text
    assert "| rows | baseline | 1,000 | 1,000 | 5.0 | 200 | 1.00 | 310 MiB |" in text
    assert "replaced" not in text
    assert text.endswith("## The whole curation\n\nkept\n")


def test_public_text_is_read_as_a_curation_reads_it(tmp_path: Path) -> None:
    folder = tmp_path / "public"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"instruction": "Why?", "output": "Because."}\n{"broken\n')
    (folder / "b.txt").write_text("one\ntwo\n")
    made = corpus.collect(tmp_path / "corpus.jsonl", [folder])
    assert corpus.texts(made.path) == ["Why?\nBecause.", "one", "two"]


def test_page_extrapolates_to_a_billion_rows() -> None:
    runs = [build_result(size, 10 + size * 0.0005, 2**30 + size * 2048) for size in (100_000, 400_000, 1_000_000)]
    text = page.markdown({"scale": {**ENVIRONMENT, "runs": runs}})
    assert "a million rows within 6 GiB: met" in text
    assert "| memory | 1,024 MiB | 2,048 bytes | 192 GiB | 1,908 GiB |" in text
    assert "| `pipelines.cli` | 1,024 MiB | 2,048 bytes |" in text
    assert "24 GiB hold 12 million rows" in text
    assert "| CPU | 10 s | 500 µs | 14 h | 139 h |" in text


def test_uninstallable_peer_is_an_error_with_its_cause(tmp_path: Path) -> None:
    tool = peers.Tool("old", "old", "none.py", "1", "", "", ("nothing",), python=(4, 0))
    with pytest.raises(peers.PeerError, match=r"needs Python 4.0 or newer: --python names one"):
        peers.interpreter(tool, tmp_path, sys.executable)
    with pytest.raises(peers.PeerError, match="cannot be started"):
        peers.interpreter(tool, tmp_path, str(tmp_path / "python"))


@pytest.mark.long
@pytest.mark.daft
@pytest.mark.parametrize("tool", peers.OURS, ids=lambda tool: tool.name)
def test_tuneline_scores_high_on_a_small_corpus(tool: peers.Tool, small_corpus: corpus.Corpus, tmp_path: Path) -> None:
    pairs, similarity = corpus.true_pairs(corpus.texts(small_corpus.path), 0.7)
    row = curation._compared(tool, tmp_path, small_corpus, pairs, similarity, sys.executable)
    assert row["score"]["recall"] >= 0.99
    assert row["score"]["precision"] == 1
    assert row["score"]["far"] == 0
