"""What holds for every curation: no row is lost, and equal input gives equal bytes however the work is shared."""

import gzip
import json
import os
import signal
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from components.common.errors import EngineMissingError, InputError
from components.common.progress import Silent
from components.data_curation import staging
from components.data_curation.config import DataCurationConfig, Fractions
from components.data_curation.stage import Earlier, counts, curate, list_sources, survey

# Lines as they are met: rows of several shapes and lengths, some alike, some empty, some that are no rows at all.
WORDS = st.lists(
    st.sampled_from(["open", "the", "file", "é", "東京", "x@example.com", "4111111111111111", "\u200b", "Ã©"]), max_size=30
).map(" ".join)
ROWS = st.one_of(
    st.fixed_dictionaries({"prompt": WORDS, "completion": WORDS}),
    st.fixed_dictionaries({"instruction": WORDS, "output": WORDS, "id": st.sampled_from(["a", "b", 7])}),
    st.fixed_dictionaries(
        {"messages": st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": WORDS}))}
    ),
    st.fixed_dictionaries({"nobody": WORDS}),
)
LINES = st.one_of(ROWS.map(lambda row: json.dumps(row).encode()), st.binary(max_size=40), st.just(b'{"prompt": "q", "comple'), st.just(b""))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=st.lists(st.lists(LINES, max_size=25), min_size=1, max_size=3), cut=st.booleans())
def test_rows_in_are_kept_rejected_or_quarantined_whatever_comes(tmp_path, files, cut):
    for path in tmp_path.iterdir():
        path.unlink()
    for number, lines in enumerate(files):
        data = gzip.compress(b"\n".join(lines))
        (tmp_path / f"{number}.jsonl.gz").write_bytes(data[: len(data) * 2 // 3] if cut and number == 0 else data)
    config = DataCurationConfig(fractions=Fractions(train=0.5, validation=0.2, test=0.3))
    sources = list_sources([str(tmp_path)], tmp_path)
    try:
        with survey(sources, config, seed=1, reporter=Silent()) as curated:
            told = counts(curated)["rows"]  # raises where a row is lost
            fates = list(curated.judged.splits)
    except InputError:
        return  # nothing can be kept, or kinds are mixed: said, and nothing written
    assert told["in"] == told["kept"] + sum(told["rejected"].values()) + told["quarantined"]
    assert told["kept"] == sum(map(bool, fates))


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
def test_a_worker_that_is_killed_is_told_and_the_next_try_works(parts, curated, tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "SMALL", 0)
    monkeypatch.setattr(staging, "CHUNK_ROWS", 5)
    start, children = staging._child, []

    def watched(folder):
        children.append(start(folder))
        threading.Thread(target=lambda child: os.kill(child.pid, signal.SIGKILL), args=children[-1:]).start()
        return children[-1]

    monkeypatch.setattr(staging, "_child", watched)
    with pytest.raises(EngineMissingError, match=r"a process that prepares rows ended in the middle \(exit code -9\)") as error:
        curated(*parts, workers=2)
    assert "data_curation.workers" in error.value.hint
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert not (tmp_path / "out" / ".engine").exists()
    assert all(child.poll() is not None for child in children)
    monkeypatch.setattr(staging, "_child", start)
    assert curated(*parts, workers=2).manifest.summary["rows"]["kept"] == 301


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
