"""What holds for every curation: equal input gives equal bytes however the work is shared, and what was promised of published rows."""

import errno
import io
import json
import os
import signal
import threading

import pytest

from components.common.errors import EngineMissingError, InputError, TunelineError
from components.common.progress import Silent
from components.data_curation import staging, work
from components.data_curation.config import DataCurationConfig
from components.data_curation.stage import Earlier, curate, list_sources


@pytest.fixture
def parts(tmp_path, samples):
    """Rows in three files, some equal or alike across them, with what cannot be read."""
    conversation, different = samples
    text = " ".join(f"w{i}" for i in range(60))
    rows = [*map(different, range(300)), *map(different, range(20)), *(conversation("Tell me.", f"{text} {i}") for i in range(10))]
    for part in range(3):
        lines = [json.dumps(row) for row in rows[part::3]] + ['{"broken']
        (tmp_path / f"part{part}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [tmp_path / f"part{part}.jsonl" for part in range(3)]


@pytest.mark.daft
def test_workers_chunks_and_the_order_of_sources_make_no_difference(parts, curated, monkeypatch):
    alone = curated(*parts, out="alone", workers=1)
    assert alone.manifest.summary["rows"]["rejected"] == {"exact_duplicate": 20, "near_duplicate": 9}
    monkeypatch.setattr(staging, "SMALL", 0)
    monkeypatch.setattr(staging, "CHUNK_ROWS", 17)
    assert curated(*parts[::-1], out="two", workers=2).sha256 == alone.sha256
    monkeypatch.setattr(staging, "CHUNK_ROWS", 41)
    assert curated(parts[1], parts[0], parts[2], out="three", workers=3).sha256 == alone.sha256


@pytest.mark.daft
def test_a_worker_whose_disk_is_full_says_so(monkeypatch, tmp_path):
    def full(folder, number):
        raise OSError(errno.ENOSPC, "No space left on device", f"{folder}/{number}")

    answers, told = os.pipe()
    monkeypatch.setattr(work, "prepare_file", full)
    monkeypatch.setattr(work.process, "die_with", lambda pid: None)
    monkeypatch.setattr("sys.stdin", io.StringIO("7\n"))
    work.main(str(tmp_path), told)
    with os.fdopen(answers) as said:
        error = TunelineError.from_dict(json.loads(said.readline()))
    assert error.kind == "disk_full"
    assert error.message.startswith(f"no space left in {tmp_path}")


@pytest.mark.daft
def test_a_worker_that_is_killed_is_told_and_the_next_try_works(parts, curated, tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "SMALL", 0)
    monkeypatch.setattr(staging, "CHUNK_ROWS", 5)
    start, children = staging._child, []

    def watched(folder):
        child = start(folder)  # two threads do this at once
        children.append(child)
        threading.Thread(target=os.kill, args=(child.pid, signal.SIGKILL)).start()
        return child

    monkeypatch.setattr(staging, "_child", watched)
    with pytest.raises(EngineMissingError, match=r"a process that prepares rows ended in the middle \(exit code -9\)") as error:
        curated(*parts, workers=2)
    assert "data_curation.workers" in error.value.hint
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert not (tmp_path / "out" / ".engine").exists()
    assert all(child.poll() is not None for child in children)
    monkeypatch.setattr(staging, "_child", start)
    assert curated(*parts, workers=2).manifest.summary["rows"]["kept"] == 301


# A library in the worker that prints while a chunk is prepared: through Python, and past it.
CHATTY = """
import os, sys

def chat(event, arguments):
    if event == "open" and "raw-" in str(arguments[0]):
        print("chatter of a library", flush=True)
        os.write(1, b"more chatter\\n")

if "components.data_curation.work" in sys.orig_argv:
    sys.addaudithook(chat)
    print("chatter at the start")
"""


@pytest.mark.daft
def test_what_a_library_prints_in_a_worker_is_no_answer_and_goes_to_standard_error(parts, curated, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(staging, "SMALL", 0)
    monkeypatch.setattr(staging, "CHUNK_ROWS", 50)
    quiet = curated(*parts, out="quiet", workers=1)
    assert "chatter" not in capfd.readouterr().err
    (tmp_path / "chatty").mkdir()
    (tmp_path / "chatty" / "sitecustomize.py").write_text(CHATTY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path / "chatty"), os.environ.get("PYTHONPATH")])))
    loud = curated(*parts, out="loud", workers=2)
    assert loud.sha256 == quiet.sha256
    said = capfd.readouterr()
    assert (said.err.count("chatter of a library"), said.err.count("more chatter")) == (7, 7)  # chunks of 333 lines
    assert said.err.count("chatter at the start") == 2
    assert "chatter" not in said.out


@pytest.fixture
def again(tmp_path):
    """Curate a file beside earlier datasets, by their names."""

    def run(path, out, earlier, **config):
        made = DataCurationConfig(sources=[str(path)], **config)
        before = [Earlier(name, dataset) for name, dataset in earlier.items()]
        return curate(list_sources(made.sources, tmp_path), tmp_path / out, made, seed=2, reporter=Silent(), earlier=before)

    return run


@pytest.mark.daft
def test_published_rows_never_move_and_a_newcomer_between_two_splits_is_left_out(write, curated, again, rows_of, samples):
    conversation, different = samples
    rows = [{**different(i), "customer": f"c{i}"} for i in range(300)]
    first = curated(write(rows[:200], "first.jsonl"), out="v1", seed=1, group_by="customer")
    there = by_id(first, rows_of)
    told = {split: rows_of(first, split)[0] for split in ("train", "test")}
    answer = {split: row["messages"][1]["content"] for split, row in told.items()}
    like_test = conversation("A newcomer that says what a test row says.", answer["test"])
    bridge = {**conversation("Of a test row's customer, with a train row's answer.", answer["train"]), **json.loads(told["test"]["meta"])}
    path = write([*rows[100:], like_test, bridge], "second.jsonl")
    second = again(path, "v2", {"dataset-v1": first}, group_by="customer")
    now = by_id(second, rows_of)
    assert all(now[row] == there[row] for row in now.keys() & there.keys())
    assert len(now.keys() & there.keys()) == 100
    assert like_test["messages"][0]["content"] in [row["messages"][0]["content"] for row in rows_of(second, "test")]
    (left_out,) = rows_of(second, "rejected")
    assert left_out["reason"] == "near_duplicate_across_splits"
    assert left_out["detail"] == "alike rows that lie in test and train"
    assert left_out["text"].startswith("Of a test row's customer")
    assert second.sha256 == again(path, "v2-again", {"dataset-v1": first}, group_by="customer").sha256
    assert ("earlier", "dataset-v1", first.sha256) in [(one.kind, one.uri, one.content_sha256) for one in second.manifest.inputs]


def by_id(dataset, rows_of):
    return {row["id"]: split for split in ("train", "validation", "test") for row in rows_of(dataset, split)}


@pytest.mark.daft
def test_rows_published_before_are_dropped_when_asked_for_and_name_the_revision(write, curated, again, rows_of, samples):
    first = curated(write(map(samples[1], range(150)), "first.jsonl"), out="v1", seed=1)
    second = again(write(map(samples[1], range(100, 300)), "second.jsonl"), "v2", {"dataset-v1": first}, published="drop")
    rejected = rows_of(second, "rejected")
    assert len(rejected) == 50
    ids = {row["id"] for split in ("train", "validation", "test") for row in rows_of(first, split)}
    assert all(row["reason"] == "exact_duplicate" and row["detail"].endswith(" of dataset-v1") for row in rejected)
    assert {row["detail"].split()[2] for row in rejected} <= ids


@pytest.mark.daft
def test_rows_of_one_group_lie_in_one_split(write, curated, rows_of, samples):
    rows = [{**samples[1](i), "customer": f"c{i % 40}"} for i in range(400)]
    made = curated(write(rows), group_by="customer")
    places = {}
    for split in ("train", "validation", "test"):
        for row in rows_of(made, split):
            places.setdefault(json.loads(row["meta"])["customer"], set()).add(split)
    assert len(places) == 40
    assert all(len(some) == 1 for some in places.values())


@pytest.mark.daft
def test_personal_data_stands_nowhere_in_the_dataset_or_its_report(write, curated, samples):
    conversation, different = samples
    secret, card = "jane.roe@corp.example.com", "4111 1111 1111 1111"
    rows = [
        conversation("Who answers?", f"Write to {secret} and wait for an answer."),
        {**conversation("Which card?", f"It is card {card}."), "note": f"from {secret}"},
        conversation(secret, ""),  # dropped as empty: its text is redacted all the same
    ]
    made = curated(write([*rows, *map(different, range(150))]), personal_data={"credit_card": "drop"})
    assert made.manifest.summary["rows"]["rejected"] == {"empty_answer": 1, "personal_data": 1}
    for path in made.path.iterdir():
        data = path.read_bytes()
        if path.suffix == ".parquet":
            from pyarrow import parquet

            data = json.dumps(parquet.read_table(path).to_pylist()).encode()
        assert secret.encode() not in data, path.name
        assert card.encode() not in data, path.name
    report = (made.path / "report.html").read_text()
    assert "<td>email</td>" in report
    assert "<td>credit card</td>" in report


@pytest.mark.daft
def test_rows_that_hold_evaluation_items_go_and_name_them(write, tmp_path, samples, rows_of):
    conversation, different = samples
    item = "A train leaves the station at noon with forty two passengers and a dog on board, how many legs are there?"
    exam = write([{"question": item, "answer": "88"}], "exam.jsonl")
    path = write([conversation("Solve it.", f"Sure. {item} Let me think."), *map(different, range(150))])
    config = DataCurationConfig(sources=[str(path)])
    sources, sets = list_sources([str(path)], tmp_path), list_sources([str(exam)], tmp_path)
    made = curate(sources, tmp_path / "out", config, seed=1, reporter=Silent(), benchmarks=sets)
    (rejected,) = rows_of(made, "rejected")
    assert rejected["reason"] == "contaminated"
    assert "exam.jsonl:1" in rejected["detail"]
    assert ("evaluation_set", "exam.jsonl") in [(one.kind, one.uri) for one in made.manifest.inputs]


@pytest.mark.daft
@pytest.mark.parametrize("where", ["train", "test"])
def test_a_corpus_of_one_text_is_a_dataset_though_a_split_stays_empty_and_one_conversation_is_refused(
    tmp_path, curated, samples, rows_of, where
):
    fractions = {"train": 0.001, "validation": 0.001, "test": 0.001, where: 0.998}
    text = "The ferry to the island leaves at nine and comes back at five. Bring a coat, since it is cold on deck."
    (tmp_path / "page.txt").write_text(text)
    (tmp_path / "row.jsonl").write_text(json.dumps(samples[0]("Tell me.", text)) + "\n")
    made = curated(tmp_path / "page.txt", fractions=fractions)
    there = [split for split in ("train", "validation", "test") if rows_of(made, split)]
    assert there == [where]
    assert made.manifest.summary["rows"]["kept"] == 1
    assert "too few rows for the split" in (made.path / "report.html").read_text(encoding="utf-8")
    with pytest.raises(InputError, match="too few rows for the split"):
        curated(tmp_path / "row.jsonl", fractions=fractions, out="row")
    assert not (tmp_path / "row" / "manifest.json").exists()
