"""The curation stage from source files to the dataset, with the engine process."""

import itertools
import json
import os
import re
import subprocess
import sys

import pytest

from components.common.artifacts import artifact_folder
from components.common.runtime.errors import EngineMissingError, InputError, OutputOccupiedError
from components.common.runtime.process_control import build_python_environment
from components.data_curation import python_docs
from components.data_curation.comparison import engine_process
from tests.lost_answers import lose_answers

pytestmark = pytest.mark.daft

PAYLOAD = {"train.parquet", "validation.parquet", "test.parquet", "rejected.parquet", "quarantine.jsonl"}


def compute_shingles(text):
    """Return word 5-grams, implemented independently of the stage."""
    words = re.findall(r"\w+", text.lower()) or text.split()
    return {tuple(words[i : i + 5]) for i in range(max(1, len(words) - 4))}


def compute_jaccard(a, b):
    return len(a & b) / len(a | b)


@pytest.fixture(scope="module")
def docs_file(tmp_path_factory):
    """Write every second row of the demo dataset to a file."""
    folder = tmp_path_factory.mktemp("docs")
    python_docs.build(folder / "all.jsonl")
    lines = (folder / "all.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "docs.jsonl").write_bytes(b"".join(lines[::2]))
    return folder / "docs.jsonl"


def test_demo_dataset_is_conserved_split_and_published(docs_file, curate_files, read_rows):
    artifact = curate_files(docs_file)
    rows, sizes = artifact.manifest.summary["rows"], artifact.manifest.summary["splits"]
    assert (
        rows["in"]
        == len(docs_file.read_bytes().splitlines())
        == rows["kept"] + sum(rows["rejected"].values()) + rows["quarantined"]
    )
    assert rows["rejected"]["exact_duplicate"] > 200
    assert sizes == {name: len(read_rows(artifact, name)) for name in sizes}
    assert sum(sizes.values()) == rows["kept"]
    assert len(read_rows(artifact, "rejected")) == sum(rows["rejected"].values())
    assert {f.path for f in artifact.manifest.files if f.payload} == PAYLOAD
    assert artifact_folder.read(artifact.path, "dataset").sha256 == artifact.sha256


def test_dataset_is_curated_over_a_server_whose_answers_are_lost(docs_file, curate_files, tmp_path):
    with lose_answers(tmp_path) as lost:
        artifact = curate_files(docs_file)
    assert lost >= {"mkdir", "rename"}
    assert artifact_folder.read(artifact.path, "dataset").sha256 == artifact.sha256


def test_chunk_of_a_worker_is_collected_over_a_server_whose_answers_are_lost(tmp_path, monkeypatch):
    """Workers of Ray are on other hosts; the folder is shared."""
    from components.data_curation import chunk_worker
    from components.data_curation.config import DataCurationConfig
    from components.data_curation.reading.raw_records import Record

    monkeypatch.setattr("components.common.runtime.process_control.restrict_new_files", lambda: None)
    with lose_answers(tmp_path) as lost:
        chunk_worker.write_settings(tmp_path, "text", DataCurationConfig(), [])
        chunk_worker.write_raw_chunk(tmp_path, 0, [Record("docs.txt", 1, {"text": "a text of five words"})])
        assert chunk_worker.prepare_raw_chunk(str(tmp_path), 0) == 1
        assert chunk_worker.collect_chunk(tmp_path, 0).rows == 1
        chunk_worker.remove_chunks(tmp_path)
    assert lost >= {"rename", "unlink"}
    assert [path.name for path in tmp_path.iterdir()] == [chunk_worker.SETTINGS_FILENAME]


def test_no_test_row_is_similar_to_a_row_of_another_split(docs_file, curate_files, read_rows):
    artifact = curate_files(docs_file)
    for part, min_words in (("all", 1), ("answer", 8)):
        test_texts = [
            text for text in extract_texts(read_rows(artifact, "test"), part) if len(text.split()) >= min_words
        ]
        other_texts = [
            text
            for name in ("train", "validation")
            for text in extract_texts(read_rows(artifact, name), part)
            if len(text.split()) >= min_words
        ]
        index = {}
        for text in other_texts:
            for shingle in (text_shingles := compute_shingles(text)):
                index.setdefault(shingle, []).append(text_shingles)
        closest = max(
            compute_jaccard(row_shingles, other)
            for row_shingles in map(compute_shingles, test_texts)
            for shingle in row_shingles
            for other in index.get(shingle, [frozenset({0})])
        )
        assert 0 < closest < 0.7, part


def extract_texts(rows, part):
    return [
        " ".join(m["content"] for m in row["messages"] if part == "all" or m["role"] == "assistant") for row in rows
    ]


def test_equal_input_gives_equal_bytes_for_any_path_and_hash_seed(docs_file, curate_files, tmp_path):
    artifact = curate_files(docs_file)
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / docs_file.name).write_bytes(docs_file.read_bytes())
    script = (
        "import sys; from pathlib import Path; from components.common.runtime.reporters import SilentReporter\n"
        "from components.data_curation.config import DataCurationConfig; from components.data_curation.stage import curate, list_sources\n"
        "curate(list_sources(['.'], Path(sys.argv[1])), Path(sys.argv[2]), DataCurationConfig(), seed=1, reporter=SilentReporter())\n"
    )
    (tmp_path / "script.py").write_text(script)
    environment = build_python_environment(PYTHONHASHSEED="99", PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    command = [
        sys.executable,
        "-P",
        str(tmp_path / "script.py"),
        str(tmp_path / "moved"),
        str(tmp_path / "deeper" / "there"),
    ]
    subprocess.run(command, env=environment, check=True)
    second = artifact_folder.read(tmp_path / "deeper" / "there", "dataset")
    assert second.sha256 == artifact.sha256
    assert str(tmp_path).encode() not in b"".join((second.path / name).read_bytes() for name in PAYLOAD)


def test_near_duplicate_is_rejected_with_kept_row_and_similarity(
    write_rows, curate_files, read_rows, make_conversation, make_distinct_row
):
    text = [f"w{i}" for i in range(60)]
    near, far = [*text[:-2], "x", "y"], [*text[:20], *(f"z{i}" for i in range(40))]
    rows = [make_conversation("Tell me all of it.", " ".join(words)) for words in (text, near, far)]
    artifact = curate_files(write_rows([*rows, *map(make_distinct_row, range(150))]))
    (rejected,) = read_rows(artifact, "rejected")
    kept = {
        r["messages"][1]["content"]: r["id"] for n in ("train", "validation", "test") for r in read_rows(artifact, n)
    }
    expected = compute_jaccard(*(compute_shingles("Tell me all of it. " + " ".join(words)) for words in (text, near)))
    assert rejected["reason"] == "near_duplicate"
    assert rejected["detail"] == f"similarity {expected:.3f} to {kept[' '.join(text)]}"
    assert " ".join(far) in kept


def test_recall_and_similarity_agree_with_brute_force(tmp_path):
    import random

    from components.data_curation import chunk_worker, prepared_chunks
    from components.data_curation.config import DataCurationConfig
    from components.data_curation.reading.raw_records import Record

    rng, texts = random.Random(5), []
    for group in range(40):
        base = [f"g{group}w{i}" for i in range(40)]
        texts += [" ".join(word if rng.random() > 0.03 else f"r{rng.random()}" for word in base) for _ in range(5)]
    texts = list(dict.fromkeys(texts))  # the engine compares one of several equal texts
    records = [Record("f", i, {"text": text}) for i, text in enumerate(texts)]
    chunks = [
        chunk_worker.prepare_chunk(n, records[n * 70 : n * 70 + 70], "text", DataCurationConfig(), None, tmp_path)
        for n in range(3)
    ]
    prepared = prepared_chunks.PreparedRows(tmp_path, "text", chunks=chunks)
    places = [place for chunk in chunks for place in prepared.read_table(chunk, ["place"])["place"].to_pylist()]
    pair_array, similarity = engine_process.find_similar_texts(tmp_path, places, 0.7, None)["words"]
    pairs = dict(zip(map(tuple, pair_array.tolist()), similarity.tolist(), strict=True))
    sets = [compute_shingles(text) for text in texts]
    expected = {(a, b): compute_jaccard(sets[a], sets[b]) for a, b in itertools.combinations(range(len(texts)), 2)}
    expected = {pair: value for pair, value in expected.items() if value >= 0.7}
    assert len(expected) > 20
    assert pairs == pytest.approx(expected)


def test_duplicates_ignore_case_and_white_space(
    write_rows, curate_files, read_rows, make_conversation, make_distinct_row
):
    rows = [make_conversation("Hello there?", "A fine\n\nanswer"), make_conversation("hello  there?", "a fine answer")]
    (rejected,) = read_rows(curate_files(write_rows([*rows, *map(make_distinct_row, range(150))])), "rejected")
    assert (rejected["reason"], rejected["line"], rejected["source"]) == ("exact_duplicate", 2, "rows.jsonl")


def test_distinct_short_rows_are_kept(write_rows, curate_files, make_conversation):
    rows = [make_conversation(f"{i}?", f"{i + 1}") for i in range(200)]
    assert curate_files(write_rows(rows)).manifest.summary["rows"]["kept"] == 200


def test_unreadable_lines_are_quarantined_and_counted(write_rows, curate_files, make_distinct_row):
    path = write_rows(map(make_distinct_row, range(150)))
    path.write_bytes(path.read_bytes() + b'{"broken\n{"nobody": "knows"}\n')
    artifact = curate_files(path)
    quarantine = [json.loads(text) for text in (artifact.path / "quarantine.jsonl").read_text().splitlines()]
    assert [(line["file"], line["line"]) for line in quarantine] == [("rows.jsonl", 151), ("rows.jsonl", 152)]
    assert artifact.manifest.summary["rows"] == {"in": 152, "kept": 150, "quarantined": 2, "rejected": {}}
    assert "rows.jsonl" in (artifact.path / "report.html").read_text()


@pytest.mark.parametrize(
    ("kind", "record"),
    [
        ("preference", {"prompt": "q{}", "chosen": "c{} is good", "rejected": "r{} is bad"}),
        ("unpaired", {"prompt": "q{}", "completion": "c{} is it", "label": "true"}),
        ("text", {"text": "document number {} has words"}),
    ],
)
def test_other_row_kinds_are_curated(write_rows, curate_files, read_rows, kind, record):
    artifact = curate_files(write_rows([{k: v.format(i) for k, v in record.items()} for i in range(150)]))
    assert artifact.manifest.summary["rows_kind"] == kind
    assert artifact.manifest.summary["rows"]["kept"] == 150
    assert set(read_rows(artifact, "train")[0]) > {"id", "source", "meta"}


def test_finished_dataset_is_reused_and_another_one_is_not_overwritten(write_rows, curate_files, make_distinct_row):
    path = write_rows(map(make_distinct_row, range(150)))
    first = curate_files(path)
    modified_ns = (first.path / "train.parquet").stat().st_mtime_ns
    assert curate_files(path).sha256 == first.sha256
    assert (first.path / "train.parquet").stat().st_mtime_ns == modified_ns
    with pytest.raises(OutputOccupiedError):
        curate_files(path, seed=2)
    assert curate_files(path, seed=2, overwrite=True).sha256 != first.sha256


def test_empty_source_is_refused(write_rows, curate_files):
    with pytest.raises(InputError, match=r"^rows\.jsonl is empty$"):
        curate_files(write_rows([]))


def test_source_without_kept_rows_is_refused_with_the_reasons(write_rows, curate_files):
    with pytest.raises(InputError, match=r"2 rejected as empty_answer; 1 record is unreadable: rows\.jsonl:3"):
        curate_files(write_rows([{"prompt": "a", "completion": ""}, {"prompt": "b", "completion": " "}, {"x": 1}]))


def test_engine_crash_is_reported_and_leaves_no_manifest(
    write_rows, curate_files, make_distinct_row, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        engine_process.process_control,
        "build_module_command",
        lambda *_: [sys.executable, "-c", "import sys, os; print('out of luck'); os._exit(134)"],
    )
    with pytest.raises(EngineMissingError, match=r"exit code 134\): out of luck"):
        curate_files(write_rows(map(make_distinct_row, range(150))))
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_engine_crash_after_its_result_is_ignored(write_rows, curate_files, make_distinct_row, monkeypatch):
    command = engine_process.process_control.build_module_command
    crash = "import os, subprocess, sys; subprocess.run(sys.argv[1:], check=True); os.abort()"
    monkeypatch.setattr(
        engine_process.process_control, "build_module_command", lambda *a: [sys.executable, "-c", crash, *command(*a)]
    )
    assert curate_files(write_rows(map(make_distinct_row, range(150)))).manifest.summary["rows"]["kept"] == 150
