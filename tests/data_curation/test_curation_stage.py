import itertools
import json
import os
import re
import subprocess
import sys

import pytest

from components.common import artifacts
from components.common.errors import EngineMissingError, InputError, OutputOccupiedError
from components.common.process import python_environment
from components.data_curation import duplicates
from data import python_docs

pytestmark = pytest.mark.daft

PAYLOAD = {"train.parquet", "validation.parquet", "test.parquet", "rejected.parquet", "quarantine.jsonl"}


def shingles(text):
    """Word 5-grams, written anew so that the stage is not compared with itself."""
    found = re.findall(r"\w+", text.lower()) or text.split()
    return {tuple(found[i : i + 5]) for i in range(max(1, len(found) - 4))}


def jaccard(a, b):
    return len(a & b) / len(a | b)


@pytest.fixture(scope="module")
def docs(tmp_path_factory):
    """Every second row of the demo dataset, in a file of its own."""
    folder = tmp_path_factory.mktemp("docs")
    python_docs.build(folder / "all.jsonl")
    lines = (folder / "all.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "docs.jsonl").write_bytes(b"".join(lines[::2]))
    return folder / "docs.jsonl"


def test_the_demo_dataset_is_conserved_split_and_published(docs, curated, rows_of):
    made = curated(docs)
    rows, sizes = made.manifest.summary["rows"], made.manifest.summary["splits"]
    assert rows["in"] == len(docs.read_bytes().splitlines()) == rows["kept"] + sum(rows["rejected"].values()) + rows["quarantined"]
    assert rows["rejected"]["exact_duplicate"] > 200
    assert sizes == {name: len(rows_of(made, name)) for name in sizes}
    assert sum(sizes.values()) == rows["kept"]
    assert len(rows_of(made, "rejected")) == sum(rows["rejected"].values())
    assert {f.path for f in made.manifest.files if f.payload} == PAYLOAD
    assert artifacts.read(made.path, "dataset").sha256 == made.sha256


def test_no_test_row_is_like_a_row_of_another_split_by_brute_force(docs, curated, rows_of):
    made = curated(docs)
    for part, least in (("all", 1), ("answer", 8)):
        test = [t for t in texts(rows_of(made, "test"), part) if len(t.split()) >= least]
        others = [t for name in ("train", "validation") for t in texts(rows_of(made, name), part) if len(t.split()) >= least]
        index = {}
        for text in others:
            for shingle in (mine := shingles(text)):
                index.setdefault(shingle, []).append(mine)
        closest = max(jaccard(s, other) for s in map(shingles, test) for shingle in s for other in index.get(shingle, [frozenset({0})]))
        assert 0 < closest < 0.7, part


def texts(rows, part):
    return [" ".join(m["content"] for m in row["messages"] if part == "all" or m["role"] == "assistant") for row in rows]


def test_equal_input_gives_equal_bytes_wherever_it_lies_and_whatever_the_hash_seed(docs, curated, tmp_path):
    made = curated(docs)
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / docs.name).write_bytes(docs.read_bytes())
    script = (
        "import sys; from pathlib import Path; from components.common.progress import Silent\n"
        "from components.data_curation.config import DataCurationConfig; from components.data_curation.stage import curate, list_sources\n"
        "curate(list_sources(['.'], Path(sys.argv[1])), Path(sys.argv[2]), DataCurationConfig(), seed=1, reporter=Silent())\n"
    )
    (tmp_path / "script.py").write_text(script)
    environment = python_environment(PYTHONHASHSEED="99", PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    command = [sys.executable, "-P", str(tmp_path / "script.py"), str(tmp_path / "moved"), str(tmp_path / "deeper" / "there")]
    subprocess.run(command, env=environment, check=True)
    again = artifacts.read(tmp_path / "deeper" / "there", "dataset")
    assert again.sha256 == made.sha256
    assert str(tmp_path).encode() not in b"".join((again.path / name).read_bytes() for name in PAYLOAD)


def test_near_duplicates_go_and_name_the_row_that_stays_with_its_similarity(write, curated, rows_of, samples):
    conversation, different = samples
    text = [f"w{i}" for i in range(60)]
    near, far = [*text[:-2], "x", "y"], [*text[:20], *(f"z{i}" for i in range(40))]
    rows = [conversation("Tell me all of it.", " ".join(words)) for words in (text, near, far)]
    made = curated(write([*rows, *map(different, range(150))]))
    (rejected,) = rows_of(made, "rejected")
    kept = {r["messages"][1]["content"]: r["id"] for n in ("train", "validation", "test") for r in rows_of(made, n)}
    expected = jaccard(*(shingles("Tell me all of it. " + " ".join(words)) for words in (text, near)))
    assert rejected["reason"] == "near_duplicate"
    assert rejected["detail"] == f"similarity {expected:.3f} to {kept[' '.join(text)]}"
    assert " ".join(far) in kept


def test_recall_and_similarity_agree_with_brute_force(samples, tmp_path):
    import random

    from components.data_curation import staging, work
    from components.data_curation.config import DataCurationConfig
    from components.data_curation.readers import Record

    choose, made = random.Random(5), []
    for group in range(40):
        base = [f"g{group}w{i}" for i in range(40)]
        made += [" ".join(w if choose.random() > 0.03 else f"r{choose.random()}" for w in base) for _ in range(5)]
    made = list(dict.fromkeys(made))  # of equal texts the engine compares one
    records = [Record("f", i, {"text": text}) for i, text in enumerate(made)]
    done = [work.prepare(n, records[n * 70 : n * 70 + 70], work.Tools(DataCurationConfig()), tmp_path) for n in range(3)]
    staged = staging.Staged(tmp_path, "text", chunks=done)
    places = [place for chunk in done for place in staged.table(chunk, ["place"])["place"].to_pylist()]
    found, similarity = duplicates.similar(tmp_path, places, 0.7, None)["words"]
    pairs = dict(zip(map(tuple, found.tolist()), similarity.tolist(), strict=True))
    sets = [shingles(text) for text in made]
    true = {(a, b): jaccard(sets[a], sets[b]) for a, b in itertools.combinations(range(len(made)), 2)}
    true = {pair: s for pair, s in true.items() if s >= 0.7}
    assert len(true) > 20
    assert pairs == pytest.approx(true)


def test_case_and_white_space_make_no_difference(write, curated, rows_of, samples):
    conversation, different = samples
    rows = [conversation("Hello there?", "A fine\n\nanswer"), conversation("hello  there?", "a fine answer")]
    (rejected,) = rows_of(curated(write([*rows, *map(different, range(150))])), "rejected")
    assert (rejected["reason"], rejected["line"], rejected["source"]) == ("exact_duplicate", 2, "rows.jsonl")


def test_short_rows_that_differ_are_all_kept(write, curated, samples):
    rows = [samples[0](f"{i}?", f"{i + 1}") for i in range(200)]
    assert curated(write(rows)).manifest.summary["rows"]["kept"] == 200


def test_unreadable_lines_are_in_the_quarantine_and_counted(write, curated, samples):
    path = write(map(samples[1], range(150)))
    path.write_bytes(path.read_bytes() + b'{"broken\n{"nobody": "knows"}\n')
    made = curated(path)
    lines = [json.loads(line) for line in (made.path / "quarantine.jsonl").read_text().splitlines()]
    assert [(q["file"], q["line"]) for q in lines] == [("rows.jsonl", 151), ("rows.jsonl", 152)]
    assert made.manifest.summary["rows"] == {"in": 152, "kept": 150, "quarantined": 2, "rejected": {}}
    assert "rows.jsonl" in (made.path / "report.html").read_text()


@pytest.mark.parametrize(
    ("kind", "record"),
    [
        ("preference", {"prompt": "q{}", "chosen": "c{} is good", "rejected": "r{} is bad"}),
        ("unpaired", {"prompt": "q{}", "completion": "c{} is it", "label": "true"}),
        ("text", {"text": "document number {} has words"}),
    ],
)
def test_other_kinds_of_rows_are_curated_too(write, curated, rows_of, kind, record):
    made = curated(write([{k: v.format(i) for k, v in record.items()} for i in range(150)]))
    assert made.manifest.summary["rows_kind"] == kind
    assert made.manifest.summary["rows"]["kept"] == 150
    assert set(rows_of(made, "train")[0]) > {"id", "source", "meta"}


def test_a_finished_dataset_is_returned_and_another_one_refused(write, curated, samples):
    path = write(map(samples[1], range(150)))
    first = curated(path)
    stamp = (first.path / "train.parquet").stat().st_mtime_ns
    assert curated(path).sha256 == first.sha256
    assert (first.path / "train.parquet").stat().st_mtime_ns == stamp
    with pytest.raises(OutputOccupiedError):
        curated(path, seed=2)
    assert curated(path, seed=2, overwrite=True).sha256 != first.sha256


def test_mixed_kinds_are_refused_with_a_place_of_each(write, curated, samples):
    with pytest.raises(InputError, match=r"sft \(rows\.jsonl:1\), text \(rows\.jsonl:2\)"):
        curated(write([samples[1](1), {"text": "plain"}]))


def test_an_empty_source_is_refused(write, curated):
    with pytest.raises(InputError, match=r"^rows\.jsonl is empty$"):
        curated(write([]))


def test_a_source_of_which_nothing_stays_is_refused_with_the_reasons(write, curated):
    with pytest.raises(InputError, match=r"2 dropped as empty_answer; 1 place is unreadable: rows\.jsonl:3"):
        curated(write([{"prompt": "a", "completion": ""}, {"prompt": "b", "completion": " "}, {"x": 1}]))


def test_an_engine_that_dies_is_told_with_its_last_words_and_nothing_looks_finished(write, curated, samples, tmp_path, monkeypatch):
    monkeypatch.setattr(
        duplicates.process, "module_command", lambda *_: [sys.executable, "-c", "import sys, os; print('out of luck'); os._exit(134)"]
    )
    with pytest.raises(EngineMissingError, match=r"exit code 134\): out of luck"):
        curated(write(map(samples[1], range(150))))
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_an_engine_that_crashes_after_its_work_is_believed_by_its_result(write, curated, samples, monkeypatch):
    command = duplicates.process.module_command
    crash = "import os, subprocess, sys; subprocess.run(sys.argv[1:], check=True); os.abort()"
    monkeypatch.setattr(duplicates.process, "module_command", lambda *a: [sys.executable, "-c", crash, *command(*a)])
    assert curated(write(map(samples[1], range(150)))).manifest.summary["rows"]["kept"] == 150
