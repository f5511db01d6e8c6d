"""Guarantees of every curation: equal input gives equal bytes for any number of workers, and published rows keep their splits.

The tests marked `long` start, or kill, several worker processes.
"""

import errno
import io
import json
import os
import signal
import threading

import pytest

from components.common.runtime.errors import EngineMissingError, InputError, TunelineError
from components.common.runtime.reporters import SilentReporter
from components.data_curation import chunk_worker, prepared_chunks
from components.data_curation.config import DataCurationConfig
from components.data_curation.stage import EarlierRevision, curate, list_sources


@pytest.fixture
def source_files(tmp_path, make_conversation, make_distinct_row):
    """Write three files whose rows are partly equal or similar across files, each with an invalid line."""
    text = " ".join(f"w{i}" for i in range(60))
    rows = [
        *map(make_distinct_row, range(300)),
        *map(make_distinct_row, range(20)),
        *(make_conversation("Tell me.", f"{text} {i}") for i in range(10)),
    ]
    for part in range(3):
        lines = [json.dumps(row) for row in rows[part::3]] + ['{"broken']
        (tmp_path / f"part{part}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [tmp_path / f"part{part}.jsonl" for part in range(3)]


@pytest.mark.daft
def test_result_is_independent_of_workers_chunks_and_source_order(source_files, curate_files, monkeypatch):
    baseline = curate_files(*source_files, out="alone", workers=1)
    assert baseline.manifest.summary["rows"]["rejected"] == {"exact_duplicate": 20, "near_duplicate": 9}
    monkeypatch.setattr(prepared_chunks, "MIN_PARALLEL_BYTES", 0)
    monkeypatch.setattr(prepared_chunks, "MAX_CHUNK_ROWS", 17)
    assert curate_files(*source_files[::-1], out="two", workers=2).sha256 == baseline.sha256
    monkeypatch.setattr(prepared_chunks, "MAX_CHUNK_ROWS", 41)
    assert (
        curate_files(source_files[1], source_files[0], source_files[2], out="three", workers=3).sha256
        == baseline.sha256
    )


@pytest.mark.daft
def test_worker_reports_a_full_disk(monkeypatch, tmp_path):
    def raise_disk_full(folder, number):
        raise OSError(errno.ENOSPC, "No space left on device", f"{folder}/{number}")

    read_descriptor, write_descriptor = os.pipe()
    monkeypatch.setattr(chunk_worker, "prepare_raw_chunk", raise_disk_full)
    monkeypatch.setattr(chunk_worker.process_control, "die_with_process", lambda pid: None)
    monkeypatch.setattr("sys.stdin", io.StringIO("7\n"))
    chunk_worker.run_worker(str(tmp_path), write_descriptor)
    with os.fdopen(read_descriptor) as stream:
        error = TunelineError.from_dict(json.loads(stream.readline()))
    assert error.kind == "disk_full"
    assert error.message.startswith(f"no space left in {tmp_path}")


@pytest.mark.long
@pytest.mark.daft
def test_killed_worker_is_reported_and_the_retry_succeeds(source_files, curate_files, tmp_path, monkeypatch):
    monkeypatch.setattr(prepared_chunks, "MIN_PARALLEL_BYTES", 0)
    monkeypatch.setattr(prepared_chunks, "MAX_CHUNK_ROWS", 5)
    start, children = prepared_chunks._start_worker, []

    def start_and_kill(folder):
        child = start(folder)  # two threads call this concurrently
        children.append(child)
        threading.Thread(target=os.kill, args=(child.pid, signal.SIGKILL)).start()
        return child

    monkeypatch.setattr(prepared_chunks, "_start_worker", start_and_kill)
    with pytest.raises(
        EngineMissingError, match=r"a worker process crashed while preparing rows \(exit code -9\)"
    ) as error:
        curate_files(*source_files, workers=2)
    assert "data_curation.workers" in error.value.hint
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert not (tmp_path / "out" / ".engine").exists()
    assert all(child.poll() is not None for child in children)
    monkeypatch.setattr(prepared_chunks, "_start_worker", start)
    assert curate_files(*source_files, workers=2).manifest.summary["rows"]["kept"] == 301


# A library in the worker that prints while a chunk is prepared, through sys.stdout and through the file descriptor.
CHATTY_SITECUSTOMIZE = """
import os, sys

def chat(event, arguments):
    if event == "open" and "raw-" in str(arguments[0]):
        print("chatter of a library", flush=True)
        os.write(1, b"more chatter\\n")

if "components.data_curation.chunk_worker" in sys.orig_argv:
    sys.addaudithook(chat)
    print("chatter at the start")
"""


@pytest.mark.long
@pytest.mark.daft
def test_library_output_in_a_worker_goes_to_standard_error(source_files, curate_files, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(prepared_chunks, "MIN_PARALLEL_BYTES", 0)
    monkeypatch.setattr(prepared_chunks, "MAX_CHUNK_ROWS", 50)
    quiet = curate_files(*source_files, out="quiet", workers=1)
    assert "chatter" not in capfd.readouterr().err
    (tmp_path / "chatty").mkdir()
    (tmp_path / "chatty" / "sitecustomize.py").write_text(CHATTY_SITECUSTOMIZE)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path / "chatty"), os.environ.get("PYTHONPATH")]))
    )
    loud = curate_files(*source_files, out="loud", workers=2)
    assert loud.sha256 == quiet.sha256
    captured = capfd.readouterr()
    assert (captured.err.count("chatter of a library"), captured.err.count("more chatter")) == (
        7,
        7,
    )  # chunks of 333 lines
    assert captured.err.count("chatter at the start") == 2
    assert "chatter" not in captured.out


@pytest.fixture
def curate_after(tmp_path):
    """Return the function that curates a file after earlier datasets, given by name."""

    def run(path, out, earlier, **options):
        config = DataCurationConfig(sources=[str(path)], **options)
        revisions = [EarlierRevision(name, dataset) for name, dataset in earlier.items()]
        return curate(
            list_sources(config.sources, tmp_path),
            tmp_path / out,
            config,
            seed=2,
            reporter=SilentReporter(),
            earlier=revisions,
        )

    return run


@pytest.mark.daft
def test_published_rows_keep_their_split_and_bridging_rows_are_rejected(
    write_rows, curate_files, curate_after, read_rows, make_conversation, make_distinct_row
):
    rows = [{**make_distinct_row(i), "customer": f"c{i}"} for i in range(300)]
    first_dataset = curate_files(write_rows(rows[:200], "first.jsonl"), out="v1", seed=1, group_by="customer")
    first_splits = map_ids_to_splits(first_dataset, read_rows)
    first_rows = {split: read_rows(first_dataset, split)[0] for split in ("train", "test")}
    answers = {split: row["messages"][1]["content"] for split, row in first_rows.items()}
    row_like_test = make_conversation("A newcomer that says what a test row says.", answers["test"])
    bridge = {
        **make_conversation("Of a test row's customer, with a train row's answer.", answers["train"]),
        **json.loads(first_rows["test"]["meta"]),
    }
    path = write_rows([*rows[100:], row_like_test, bridge], "second.jsonl")
    second_dataset = curate_after(path, "v2", {"dataset-v1": first_dataset}, group_by="customer")
    second_splits = map_ids_to_splits(second_dataset, read_rows)
    assert all(second_splits[row] == first_splits[row] for row in second_splits.keys() & first_splits.keys())
    assert len(second_splits.keys() & first_splits.keys()) == 100
    assert row_like_test["messages"][0]["content"] in [
        row["messages"][0]["content"] for row in read_rows(second_dataset, "test")
    ]
    (rejected,) = read_rows(second_dataset, "rejected")
    assert rejected["reason"] == "near_duplicate_across_splits"
    assert rejected["detail"] == "similar to rows in test and train"
    assert rejected["text"].startswith("Of a test row's customer")
    assert (
        second_dataset.sha256
        == curate_after(path, "v2-again", {"dataset-v1": first_dataset}, group_by="customer").sha256
    )
    assert ("earlier", "dataset-v1", first_dataset.sha256) in [
        (entry.kind, entry.uri, entry.content_sha256) for entry in second_dataset.manifest.inputs
    ]


def map_ids_to_splits(dataset, read_rows):
    return {row["id"]: split for split in ("train", "validation", "test") for row in read_rows(dataset, split)}


@pytest.mark.daft
def test_published_drop_rejects_earlier_rows_and_names_the_revision(
    write_rows, curate_files, curate_after, read_rows, make_distinct_row
):
    first_dataset = curate_files(write_rows(map(make_distinct_row, range(150)), "first.jsonl"), out="v1", seed=1)
    second_dataset = curate_after(
        write_rows(map(make_distinct_row, range(100, 300)), "second.jsonl"),
        "v2",
        {"dataset-v1": first_dataset},
        published="drop",
    )
    rejected = read_rows(second_dataset, "rejected")
    assert len(rejected) == 50
    ids = {row["id"] for split in ("train", "validation", "test") for row in read_rows(first_dataset, split)}
    assert all(row["reason"] == "exact_duplicate" and row["detail"].endswith(" of dataset-v1") for row in rejected)
    assert {row["detail"].split()[2] for row in rejected} <= ids


@pytest.mark.daft
def test_rows_of_one_group_are_in_one_split(write_rows, curate_files, read_rows, make_distinct_row):
    rows = [{**make_distinct_row(i), "customer": f"c{i % 40}"} for i in range(400)]
    artifact = curate_files(write_rows(rows), group_by="customer")
    splits_by_customer = {}
    for split in ("train", "validation", "test"):
        for row in read_rows(artifact, split):
            splits_by_customer.setdefault(json.loads(row["meta"])["customer"], set()).add(split)
    assert len(splits_by_customer) == 40
    assert all(len(splits) == 1 for splits in splits_by_customer.values())


@pytest.mark.daft
def test_dataset_and_report_contain_no_personal_data(write_rows, curate_files, make_conversation, make_distinct_row):
    email, card = "jane.roe@corp.example.com", "4111 1111 1111 1111"
    rows = [
        make_conversation("Who answers?", f"Write to {email} and wait for an answer."),
        {**make_conversation("Which card?", f"It is card {card}."), "note": f"from {email}"},
        make_conversation(email, ""),  # rejected as empty, and its text is redacted too
    ]
    artifact = curate_files(
        write_rows([*rows, *map(make_distinct_row, range(150))]), personal_data={"credit_card": "drop"}
    )
    assert artifact.manifest.summary["rows"]["rejected"] == {"empty_answer": 1, "personal_data": 1}
    for path in artifact.path.iterdir():
        data = path.read_bytes()
        if path.suffix == ".parquet":
            from pyarrow import parquet

            data = json.dumps(parquet.read_table(path).to_pylist()).encode()
        assert email.encode() not in data, path.name
        assert card.encode() not in data, path.name
    report = (artifact.path / "report.html").read_text()
    assert "<td>email</td>" in report
    assert "<td>credit card</td>" in report


@pytest.mark.daft
def test_rows_with_evaluation_items_are_rejected_and_name_them(
    write_rows, tmp_path, make_conversation, make_distinct_row, read_rows
):
    item = "A train leaves the station at noon with forty two passengers and a dog on board, how many legs are there?"
    evaluation_file = write_rows([{"question": item, "answer": "88"}], "exam.jsonl")
    path = write_rows(
        [make_conversation("Solve it.", f"Sure. {item} Let me think."), *map(make_distinct_row, range(150))]
    )
    config = DataCurationConfig(sources=[str(path)])
    sources, evaluation_sets = list_sources([str(path)], tmp_path), list_sources([str(evaluation_file)], tmp_path)
    artifact = curate(sources, tmp_path / "out", config, seed=1, reporter=SilentReporter(), benchmarks=evaluation_sets)
    (rejected,) = read_rows(artifact, "rejected")
    assert rejected["reason"] == "contaminated"
    assert "exam.jsonl:1" in rejected["detail"]
    assert ("evaluation_set", "exam.jsonl") in [(entry.kind, entry.uri) for entry in artifact.manifest.inputs]


@pytest.mark.daft
@pytest.mark.parametrize("full_split", ["train", "test"])
def test_single_text_is_a_dataset_and_a_single_conversation_is_refused(
    tmp_path, curate_files, make_conversation, read_rows, full_split
):
    fractions = {"train": 0.001, "validation": 0.001, "test": 0.001, full_split: 0.998}
    text = "The ferry to the island leaves at nine and comes back at five. Bring a coat, since it is cold on deck."
    (tmp_path / "page.txt").write_text(text)
    (tmp_path / "row.jsonl").write_text(json.dumps(make_conversation("Tell me.", text)) + "\n")
    artifact = curate_files(tmp_path / "page.txt", fractions=fractions)
    filled_splits = [split for split in ("train", "validation", "test") if read_rows(artifact, split)]
    assert filled_splits == [full_split]
    assert artifact.manifest.summary["rows"]["kept"] == 1
    assert "too few rows for the split" in (artifact.path / "report.html").read_text(encoding="utf-8")
    with pytest.raises(InputError, match="too few rows for the split"):
        curate_files(tmp_path / "row.jsonl", fractions=fractions, out="row")
    assert not (tmp_path / "row" / "manifest.json").exists()
