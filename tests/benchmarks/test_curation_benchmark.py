"""The curation benchmark measures against a truth of its own: that truth and the scores made from it are right."""

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
def small(tmp_path_factory: pytest.TempPathFactory) -> corpus.Corpus:
    return corpus.build(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", documents=200, seed=3)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(small: corpus.Corpus, tmp_path: Path) -> None:
    again = corpus.build(tmp_path / "again.jsonl", documents=200, seed=3)
    other = corpus.build(tmp_path / "other.jsonl", documents=200, seed=4)
    assert again.path.read_bytes() == small.path.read_bytes()
    assert (again.sha256, again.documents) == (small.sha256, 200)
    assert other.sha256 != small.sha256


def test_documents_have_the_length_that_is_promised(small: corpus.Corpus) -> None:
    assert small.characters / small.documents == pytest.approx(corpus.CHARACTERS, rel=0.05)


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8])
def test_the_true_pairs_are_those_that_comparing_all_with_all_finds(small: corpus.Corpus, threshold: float) -> None:
    texts = corpus.texts(small.path)
    sets = [corpus.shingles(text) for text in texts]
    expected = {
        (a, b): similarity for b in range(len(sets)) for a in range(b) if (similarity := corpus.jaccard(sets[a], sets[b])) >= threshold
    }
    pairs, similarities = corpus.true_pairs(texts, threshold)
    found = dict(zip(map(tuple, pairs.tolist()), similarities.tolist(), strict=True))
    assert len(expected) > 20
    assert found == pytest.approx(expected)


def test_true_pairs_of_texts_without_words_and_of_few_words_are_found_too() -> None:
    texts = ["!!!", "one two", "One, two.", "one two three four five six", "", "one two three four five seven"]
    pairs, similarities = corpus.true_pairs(texts, 0.3)
    assert dict(zip(map(tuple, pairs.tolist()), similarities.tolist(), strict=True)) == pytest.approx({(0, 4): 1, (1, 2): 1, (3, 5): 1 / 3})


@pytest.mark.parametrize("target", [0.5, 0.7, 0.95])
def test_an_edited_copy_is_as_similar_as_it_was_asked_to_be(target: float) -> None:
    rng = random.Random(5)
    pool = corpus.sentences()
    text = " ".join(" ".join(rng.choice(pool)) for _ in range(7))
    copy = corpus.near_copy(text, target, pool, rng)
    assert corpus.jaccard(corpus.shingles(text), corpus.shingles(copy)) == pytest.approx(target, abs=0.025)


def test_scores_of_a_removal_that_can_be_counted_by_hand() -> None:
    # True pairs: a chain 0-1-2, a pair 3-4, a very similar pair 5-6; 7, 8 and 9 stand alone.
    pairs = numpy.array([[0, 1], [1, 2], [3, 4], [5, 6]])
    similarity = numpy.array([0.75, 0.72, 0.7, 0.9])
    result = scoring.score([1, 2, 6, 9], pairs, similarity, documents=10)
    assert result.removed == 4
    assert result.recall == 3 / 4  # 3 and 4 still stand together
    assert result.recall_high == 1
    assert result.precision == 3 / 4  # 9 is in no pair
    assert result.far == 2 / 4  # 2, whose one partner went too, and 9
    assert scoring.surplus(pairs, 10) == 4


def test_removing_nothing_loses_all_recall_and_no_precision() -> None:
    result = scoring.score([], numpy.array([[0, 1]]), numpy.array([0.9]), documents=2)
    assert (result.recall, result.precision, result.far) == (0, 1, 0)


def test_a_cost_counts_the_processes_that_a_command_starts(tmp_path: Path) -> None:
    inner = "import time; held = b'x' * 80_000_000; end = time.process_time() + 0.4\nwhile time.process_time() < end: pass"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    outer += "; open('file', 'wb').write(bytes(1_000_000)); sys.exit(3)"
    cost = measure.run([sys.executable, "-c", outer], tmp_path / "log", [tmp_path], tmp_path)
    assert cost.returncode == 3
    assert 0.4 <= cost.cpu < 2
    assert cost.rss > 80_000_000
    assert 1_000_000 <= cost.disk < 2_000_000
    assert max(cost.parts.values()) > 0.2
    assert max(cost.memory.values()) > 80_000_000


def test_a_cost_leaves_out_and_leaves_alone_what_else_the_caller_started(tmp_path: Path) -> None:
    busy = [sys.executable, "-c", "held = b'x' * 300_000_000\nwhile True: pass"]
    with subprocess.Popen(busy) as other:
        try:
            cost = measure.run([sys.executable, "-c", "import time; time.sleep(1)"], tmp_path / "log", [], tmp_path)
            assert other.poll() is None
        finally:
            other.kill()
    assert cost.rss < 300_000_000
    assert [part for part in cost.parts if "while True" in part] == []


def test_a_profile_gives_the_time_of_libraries_to_our_module_that_called_them() -> None:
    root = Path(profiled.__file__).resolve().parents[1]
    ours, command = (str(root / "components/data_curation/rows.py"), 1, "f"), (str(root / "pipelines/cli/app.py"), 1, "g")
    library, deep, start = ("/usr/lib/library.py", 1, "h"), ("~", 0, "<built-in>"), ("~", 0, "<exec>")
    stats = {  # function: (calls, calls, own seconds, seconds with callees, callers in the same form)
        start: (1, 1, 0.5, 10.0, {}),
        command: (1, 1, 1.0, 9.5, {start: (1, 1, 1.0, 9.5)}),
        ours: (1, 1, 2.0, 6.0, {command: (1, 1, 2.0, 6.0)}),
        library: (4, 4, 1.5, 6.5, {ours: (3, 3, 1.0, 4.0), command: (1, 1, 0.5, 2.5)}),
        deep: (9, 9, 5.0, 5.0, {library: (9, 9, 5.0, 5.0)}),
    }
    by = profiled.by_module(stats)
    assert by["components.data_curation.rows"] == pytest.approx(2 + 6.5 * 4 / 6.5)
    assert by["pipelines.cli.app"] == pytest.approx(1 + 6.5 * 2.5 / 6.5)
    assert sum(by.values()) == pytest.approx(10)


def test_a_profile_has_the_time_of_children_and_of_workers_too(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import multiprocessing, subprocess, sys\n"
        "from components.common import hashing\n"
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
    calls = [sum(entry[1] for (_, _, name), entry in found.items() if name == "digest") for found in stats]
    assert [count for count in calls if count] == [20_000] * 3
    spent = sum(profiled.by_module(found).get("components.common.hashing", 0) for found in stats)
    assert profiled.summary(folder)["components.common.hashing"] == pytest.approx(spent, abs=0.01)


def result(documents: int, cpu: float, memory: int) -> dict[str, Any]:
    cost = {"cpu": cpu, "wall": cpu, "rss": memory, "pss": memory, "disk": documents * 1000}
    cost |= {"parts": {"pipelines.cli": cpu}, "memory": {"pipelines.cli": memory}}
    rows = {"in": documents, "kept": documents, "rejected": {}, "quarantined": 0}
    return {"name": "default", "settings": [], "documents": documents, "cost": cost, "rows": rows, "output": 1, "input": 1}


CIRCUMSTANCES = {
    "command": "python -m benchmarks.curation",
    "commit": "abc",
    "python": "3",
    "processor": "p",
    "cores": 2,
    "memory": 1,
    "load": 0,
}


def test_the_page_says_which_goals_were_missed_and_which_peer_failed() -> None:
    score = {"removed": 5, "recall": 0.96, "recall_high": 1.0, "precision": 0.99, "far": 0.0}
    cost = result(100, 2, 100)["cost"]
    tools = [
        {"name": "tuneline, near duplicates only", "version": "1", "bands": "", "flags": "", "cost": cost, "score": score},
        {"name": "text-dedup", "version": "1", "bands": "", "flags": "", "cost": {**cost, "cpu": 30}, "score": score},
        {"name": "datatrove", "version": "1", "bands": "", "flags": "", "error": "no such package"},
    ]
    made = {"documents": 100, "characters": 65_000, "sha256": "ab"}
    fuzzy = {**CIRCUMSTANCES, "corpus": made, "truth": {"pairs": 9, "high": 4, "surplus": 5}, "tools": tools}
    told = page.markdown({"fuzzy": fuzzy, "curation": {**CIRCUMSTANCES, "corpus": made, "runs": [result(100, 2, 100)], "profile": {}}})
    assert "recall of at least 0.97: **missed** (0.960)" in told
    assert "precision of at least 0.95: met" in told
    assert "at most 1/5 of text-dedup's CPU time: met (1/15.0)" in told
    assert "**datatrove** was not measured: no such package" in told
    assert "2,000 documents a CPU second: **missed**" in told


def test_documents_of_one_template_are_as_alike_as_is_said(tmp_path: Path) -> None:
    made, pairs = corpus.templated(tmp_path / "corpus.jsonl", 60)
    texts = [corpus.shingles(text) for text in corpus.texts(made.path)]
    assert pairs
    assert all(corpus.jaccard(texts[a], texts[b]) == pytest.approx(0.77, abs=0.005) for a, b in pairs)
    others = {(a, b) for a in range(60) for b in range(a + 1, 60)} - {*pairs}
    assert all(corpus.jaccard(texts[a], texts[b]) < 0.7 for a, b in others)


def test_the_page_tells_the_recall_among_documents_of_one_template() -> None:
    run = {"documents": 10_000, "cost": {"cpu": 20.0, "pss": 2**30, "disk": 2**20}, "planted": 500, "found": 490, "removed": 492}
    told = page.markdown({"template": {**CIRCUMSTANCES, "runs": [run]}})
    assert "| 10,000 | 20.0 | 2,000 µs | 1,024 MiB | 1 MiB | 490 of 500 | 0.980 | 492 |" in told


def test_the_page_draws_the_slopes_out_to_a_billion_rows() -> None:
    runs = [result(size, 10 + size * 0.0005, 2**30 + size * 2048) for size in (100_000, 400_000, 1_000_000)]
    told = page.markdown({"scale": {**CIRCUMSTANCES, "runs": runs}})
    assert "a million rows within 6 GiB: met" in told
    assert "| memory | 1,024 MiB | 2,048 bytes | 192 GiB | 1,908 GiB |" in told
    assert "| `pipelines.cli` | 1,024 MiB | 2,048 bytes |" in told
    assert "24 GiB hold 12 million rows" in told
    assert "| CPU | 10 s | 500 µs | 14 h | 139 h |" in told


def test_a_peer_that_cannot_be_installed_is_an_error_that_says_why(tmp_path: Path) -> None:
    tool = peers.Tool("old", "old", "none.py", "1", "", "", ("nothing",), python=(4, 0))
    with pytest.raises(peers.PeerError, match=r"needs Python 4.0 or newer: --python names one"):
        peers.interpreter(tool, tmp_path, sys.executable)
    with pytest.raises(peers.PeerError, match="cannot be started"):
        peers.interpreter(tool, tmp_path, str(tmp_path / "python"))


@pytest.mark.daft
@pytest.mark.parametrize("tool", peers.OURS, ids=lambda tool: tool.name)
def test_tuneline_itself_is_found_right_on_a_small_corpus(tool: peers.Tool, small: corpus.Corpus, tmp_path: Path) -> None:
    pairs, similarity = corpus.true_pairs(corpus.texts(small.path), 0.7)
    row = curation._compared(tool, tmp_path, small, pairs, similarity, sys.executable)
    assert row["score"]["recall"] >= 0.99
    assert row["score"]["precision"] == 1
    assert row["score"]["far"] == 0
