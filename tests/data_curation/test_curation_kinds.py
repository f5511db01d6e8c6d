"""Kinds of rows: odd records are quarantined, and a mix that is likely a mistake is refused before the preparation."""

import gzip
import json

import pytest

from components.common.runtime.errors import InputError
from components.common.runtime.reporters import SilentReporter
from components.data_curation import chunk_worker, prepared_chunks, row_kinds, stage
from components.data_curation.config import DataCurationConfig, Fractions
from components.data_curation.reading.raw_records import Source
from components.data_curation.stage import list_sources, preview_curation, summarize_rows

PAIR = {"prompt": "Why?", "chosen": "Because.", "rejected": "No."}
LABELLED = {"prompt": "Why?", "completion": "Because.", "label": True}
TRANSCRIPT = {"text": "Human: Why?\n\nAssistant: Because."}


def build_text(number):
    return {"text": " ".join(f"text{number}x{i}" for i in range(8))}


@pytest.fixture
def preview(tmp_path):
    """Return the function that curates files without the engine; it returns the counts and the quarantined records."""

    def run(*paths, **config):
        config = DataCurationConfig(sources=[str(path) for path in paths], **config)
        sources = list_sources(config.sources, tmp_path)
        with preview_curation(sources, config, seed=1, reporter=SilentReporter()) as result:
            return summarize_rows(result), result.prepared.unread

    return run


@pytest.mark.parametrize(("odd", "kind"), [(PAIR, "preference"), (LABELLED, "unpaired"), ({"text": "A note."}, "text")])
def test_record_of_another_kind_is_quarantined(write_rows, preview, make_distinct_row, odd, kind):
    rows = [make_distinct_row(i) for i in range(4)]
    summary, unread = preview(write_rows([odd, *rows]))
    assert summary["rows_kind"] == "sft"
    assert summary["rows"] == {"in": 5, "kept": 4, "quarantined": 1, "rejected": {}}
    assert [(one.file, one.line) for one in unread] == [("rows.jsonl", 1)]
    assert unread[0].reason.startswith(f"a row of kind {kind} (format ")
    assert unread[0].reason.endswith("the rows of this dataset are of kind sft")


def test_text_that_looks_like_a_transcript_is_quarantined_with_the_setting_that_keeps_it(write_rows, preview):
    path = write_rows([*map(build_text, range(4)), TRANSCRIPT])
    summary, (record,) = preview(path)
    assert (summary["rows_kind"], summary["rows"]["kept"]) == ("text", 4)
    assert (record.line, record.reason.rpartition(". ")[2]) == (
        5,
        "Set data_curation.format to text to keep transcripts as text",
    )
    assert preview(path, format="text")[0]["rows"]["kept"] == 5


def test_first_kind_is_used_for_two_rows_of_two_kinds(write_rows, preview, make_distinct_row):
    summary, (record,) = preview(write_rows([make_distinct_row(1), PAIR]))
    assert (summary["rows_kind"], record.line) == ("sft", 2)


def test_odd_records_up_to_the_share_are_quarantined(write_rows, preview, make_distinct_row):
    rows = [*map(make_distinct_row, range(90)), *[PAIR] * 10]
    assert preview(write_rows(rows), max_other_kind_share=0.1)[0]["rows"]["quarantined"] == 10
    with pytest.raises(InputError, match=r"max_other_kind_share is 0\.09$"):
        preview(write_rows(rows), max_other_kind_share=0.09)


def test_single_odd_record_in_the_sample_of_a_large_file_does_not_stop_the_run(write_rows, preview, make_distinct_row):
    path = write_rows([PAIR, *map(make_distinct_row, range(300))])
    assert preview(path, max_other_kind_share=0)[0]["rows"]["quarantined"] == 1


def test_mix_in_a_later_file_is_refused_before_the_preparation(write_rows, preview, make_distinct_row, monkeypatch):
    monkeypatch.setattr(stage.prepared_chunks, "prepare_chunks", lambda *_: pytest.fail("prepared"))
    first = write_rows(map(make_distinct_row, range(1000)), "a.jsonl")
    second = write_rows(map(build_text, range(1000)), "b.jsonl")
    with pytest.raises(InputError, match=r"sft \(a\.jsonl:1\), text \(b\.jsonl:1\); an estimated \d\d\.\d% ") as error:
        preview(first, second)
    assert "Use sources of one kind" in error.value.hint


def test_mix_after_the_first_rows_is_refused_at_the_end(write_rows, preview, make_distinct_row):
    rows = [*map(make_distinct_row, range(150)), *map(build_text, range(50))]
    with pytest.raises(InputError, match=r"text \(rows\.jsonl:151\); 25\.0% of the rows are not of kind sft"):
        preview(write_rows(rows))


def test_small_file_of_another_kind_is_weighed_by_its_size(write_rows, preview, make_distinct_row):
    large = write_rows(map(make_distinct_row, range(2500)), "large.jsonl")
    small = write_rows(map(build_text, range(50)), "small.jsonl")
    assert preview(large, small)[0]["rows"]["quarantined"] == 50


def build_long_chat(make_conversation, number):
    return make_conversation(f"Why {number}?", " ".join(f"word{number}x{i}" for i in range(60)))


def estimate_text_share(tmp_path, *paths):
    counts = row_kinds.sample_kinds(list_sources([str(path) for path in paths], tmp_path), DataCurationConfig())
    return counts["text"].rows / sum(count.rows for count in counts.values())


def test_short_rows_with_metadata_are_weighed_by_their_records(write_rows, tmp_path, make_conversation):
    chats = write_rows((build_long_chat(make_conversation, i) for i in range(1000)), "chats.jsonl")
    notes = ({"text": "ok", "id": i, "created": "2024-01-01T00:00:00", "score": 1.0} for i in range(150))
    assert estimate_text_share(tmp_path, chats, write_rows(notes, "notes.jsonl")) == pytest.approx(0.13, abs=0.01)


def test_compressed_file_is_weighed_by_its_estimated_size(write_rows, tmp_path, make_conversation):
    chats = write_rows((build_long_chat(make_conversation, i) for i in range(2000)), "chats.jsonl")
    compressed = tmp_path / "chats.jsonl.gz"
    compressed.write_bytes(gzip.compress(chats.read_bytes()))
    notes = write_rows(map(build_text, range(90)), "notes.jsonl")
    assert estimate_text_share(tmp_path, compressed, notes) < 0.09


def test_estimate_is_an_error_above_twice_the_limit_only():
    counts = {"sft": row_kinds.KindCount("a", 1, 100, 91.0), "text": row_kinds.KindCount("b", 1, 9, 9.0)}
    row_kinds.check_mix(counts, "sft", 0.05, is_estimate=True)
    with pytest.raises(InputError, match=r"; 9\.0% of the rows"):
        row_kinds.check_mix(counts, "sft", 0.05)
    with pytest.raises(InputError, match=r"; an estimated 9\.0% of the rows"):
        row_kinds.check_mix(counts, "sft", 0.04, is_estimate=True)


def test_main_kind_is_the_exact_one_where_the_first_rows_are_of_another(write_rows, tmp_path, make_distinct_row):
    notes, reporter = [], SilentReporter()
    reporter.note = notes.append
    path = write_rows([*map(build_text, range(100)), *map(make_distinct_row, range(2000))])
    config = DataCurationConfig(sources=[str(path)])
    with preview_curation(list_sources(config.sources, tmp_path), config, seed=1, reporter=reporter) as result:
        summary = summarize_rows(result)
        assert len(list(result.prepared.folder.glob("rows-*.arrow"))) == 2
    assert summary["rows_kind"] == "sft"
    assert summary["rows"] == {"in": 2100, "kept": 2000, "quarantined": 100, "rejected": {}}
    assert [note for note in notes if note.startswith("most rows are of kind sft")]


def test_rows_below_many_unreadable_records_are_read(tmp_path, preview, make_distinct_row, monkeypatch):
    monkeypatch.setattr(row_kinds, "MAX_SAMPLED_RECORDS_PER_FILE", 5)
    path = tmp_path / "rows.jsonl"
    path.write_text("{\n" * 5 + json.dumps(build_text(1)) + "\n")
    assert preview(path)[0]["rows_kind"] == "text"


def test_sample_of_a_file_is_bounded_by_records(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_text("{\n" * 3000)
    read = []
    read_records = row_kinds.file_readers.read_records

    def count_records(source, config):
        for record in read_records(source, config):
            read.append(record)
            yield record

    monkeypatch.setattr(row_kinds.file_readers, "read_records", count_records)
    assert row_kinds.sample_kinds(list_sources([str(path)], tmp_path), DataCurationConfig()) == {}
    assert len(read) == row_kinds.MAX_SAMPLED_RECORDS_PER_FILE + 1


@pytest.mark.parametrize("count", [298, 300, 3000])
def test_sampled_files_do_not_follow_a_period_of_the_files(count, monkeypatch):
    def add_kind(source, _, counts):
        row_kinds.add_count(counts, source.uri, row_kinds.KindCount(source.uri, 1))

    monkeypatch.setattr(row_kinds, "_sample_file", add_kind)
    sources = [Source(uri="sft" if i % 3 else "text", sha256="", bytes=1) for i in range(count)]
    counts = row_kinds.sample_kinds(sources, DataCurationConfig())
    assert counts["text"].rows / sum(one.rows for one in counts.values()) == pytest.approx(1 / 3, abs=0.15)


def test_sample_reads_a_hundred_of_many_files(write_rows, tmp_path, monkeypatch, make_distinct_row):
    read = []
    source = list_sources([str(write_rows([make_distinct_row(1)]))], tmp_path)[0]
    read_records = row_kinds.file_readers.read_records
    monkeypatch.setattr(
        row_kinds.file_readers,
        "read_records",
        lambda source, config: (read.append(source), read_records(source, config))[1],
    )
    row_kinds.sample_kinds([source] * 1000, DataCurationConfig())
    assert len(read) == 100


def test_rows_that_only_an_unsampled_file_contains_are_found(write_rows, tmp_path, make_distinct_row):
    (empty,) = list_sources([str(write_rows([], "empty.jsonl"))], tmp_path)
    (source,) = list_sources([str(write_rows([make_distinct_row(1)]))], tmp_path)
    counts = row_kinds.sample_kinds([*[empty] * 201, source], DataCurationConfig())
    assert row_kinds.find_main_kind(counts) == "sft"


def test_workers_quarantine_the_same_records(write_rows, preview, make_distinct_row, monkeypatch, tmp_path):
    rows = [json.loads(json.dumps(make_distinct_row(i))) for i in range(40)]
    path = write_rows([*rows[:20], PAIR, *rows[20:]])
    local = preview(path)
    records = next(prepared_chunks.read_chunks(list_sources([str(path)], tmp_path), DataCurationConfig()))
    chunk_worker.write_settings(tmp_path, "sft", DataCurationConfig(fractions=Fractions()), [])
    chunk_worker.write_raw_chunk(tmp_path, 7, records)
    assert chunk_worker.prepare_raw_chunk(str(tmp_path), 7) == 40
    summary = chunk_worker.collect_chunk(tmp_path, 7)
    assert summary.unread == local[1]
    assert {kind: count.rows for kind, count in summary.kinds.items()} == {"sft": 40, "preference": 1}


@pytest.mark.parametrize("key", ["Source", "Customer", "Query"])
def test_group_by_finds_a_key_by_its_original_spelling(write_rows, tmp_path, key):
    rows = [{"Question": f"Why {i}?", "Answer": f"Because {i}.", key: f"c{i % 4}"} for i in range(20)]
    config = DataCurationConfig(sources=[str(write_rows(rows))], group_by=key)
    with preview_curation(list_sources(config.sources, tmp_path), config, seed=1, reporter=SilentReporter()) as result:
        assert {chunk.grouped for chunk in result.prepared.chunks} == {20}
        assert result.verdicts.cluster_count <= 4
