"""File readers: every format, compressed, truncated and damaged."""

import csv
import gzip
import hashlib
import io
import itertools
import json
import re
import tracemalloc
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.common.runtime.errors import ConfigurationError, InputError
from components.data_curation.config import DataCurationConfig
from components.data_curation.reading import csv_reader, file_readers
from components.data_curation.reading.file_readers import read_records
from components.data_curation.reading.raw_records import Record, UnreadableRecord
from components.data_curation.reading.source_files import list_sources

ROWS = [{"text": f"row number {i} with some words"} for i in range(50)]


@pytest.fixture
def read_source(tmp_path):
    def run(name, data, **config):
        path = tmp_path / name
        path.write_bytes(data)
        (source,) = list_sources([name], tmp_path)
        return list(read_records(source, DataCurationConfig(**config)))

    return run


def to_json_lines(rows=ROWS):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def get_fields(records):
    return [record.fields for record in records if isinstance(record, Record)]


def get_unreadable(records):
    return [record for record in records if isinstance(record, UnreadableRecord)]


def test_every_file_format_gives_the_same_records(read_source, tmp_path):
    import pyarrow
    import zstandard
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "p.parquet")
    files = {
        "a.jsonl": to_json_lines(),
        "b.json": json.dumps(ROWS, indent=1).encode(),
        "c.json": to_json_lines(),
        "d.jsonl.gz": gzip.compress(to_json_lines()[:700]) + gzip.compress(to_json_lines()[700:]),
        "e.jsonl.zst": zstandard.compress(to_json_lines()[:700]) + zstandard.compress(to_json_lines()[700:]),
        "f.csv": b"text\r\n" + b"".join(r["text"].encode() + b"\r\n" for r in ROWS),
        "g.txt": "\n".join(r["text"] for r in ROWS).encode(),
        "h.jsonl": b"\xef\xbb\xbf" + to_json_lines().rstrip(),
        "p.parquet": (tmp_path / "p.parquet").read_bytes(),
    }
    for name, data in files.items():
        records = read_source(name, data)
        assert get_fields(records) == ROWS, name
        assert not get_unreadable(records), name


def test_unreadable_lines_are_reported_and_the_others_are_read(read_source):
    data = b'{"text": "one"}\n{"text": \n{"text": "\xff"}\n[1]\n\n{"text": "six"}\n'
    records = read_source("rows.jsonl", data)
    assert [(record.line, record.fields["text"]) for record in records if isinstance(record, Record)] == [
        (1, "one"),
        (6, "six"),
    ]
    locations = [(unreadable.file, unreadable.line, unreadable.reason) for unreadable in get_unreadable(records)]
    assert [location[:2] for location in locations] == [("rows.jsonl", 2), ("rows.jsonl", 3), ("rows.jsonl", 4)]
    assert "invalid JSON" in locations[0][2]
    assert locations[1][2] == "not UTF-8: byte 0xff at position 10"
    assert "list; expected an object or a string" in locations[2][2]


def test_unclosed_nesting_is_unreadable_and_not_fatal(read_source):
    (record,) = read_source("rows.jsonl", b"[" * 200_000 + b"\n")
    assert "nested deeper than 200 levels" in record.reason


def nested_list(depth: int) -> str:
    return "[" * (depth - 1) + "]" * (depth - 1)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "one.json"])
def test_nesting_limit_is_the_same_in_lines_arrays_and_objects(read_source, name):
    for depth in (200, 201, 800, 1200, 100_000):
        record = f'{{"text": {nested_list(depth)}}}'.encode()
        data = b"[" + record + b', {"text": "good"}]' if name == "rows.json" else record
        records = read_source(name, data)
        assert isinstance(records[0], Record) == (depth <= 200), depth
        if depth > 200:
            assert "nested deeper than 200 levels" in records[0].reason


@pytest.mark.parametrize("data", [b'{"text": "one"}\n', b'[{"text": "one"}]\n'], ids=["object", "array"])
def test_truncation_after_a_complete_value_is_reported(read_source, data):
    second = gzip.compress(b"".join(hashlib.sha256(bytes([i])).hexdigest().encode() + b"\n" for i in range(200)))
    records = read_source("rows.json.gz", gzip.compress(data) + second[:30])
    assert get_fields(records) == [{"text": "one"}]
    assert ["truncated" in u.reason for u in get_unreadable(records)] == [True]


def test_zstd_is_decompressed_in_chunks():
    import zstandard

    compressed = zstandard.compress(b'{"text": "' + b"x" * 1000 + b'"}\n') * 3 + zstandard.compress(
        b"word " * 40_000_000
    )
    sizes = [len(piece) for piece in file_readers._decompress(iter([compressed]), ".zst")]
    assert sum(sizes) == 3 * 1013 + 200_000_000
    assert max(sizes) < 16_000_000


def test_overlong_paragraph_is_skipped_and_reported(read_source):
    data = b"first\nparagraph\n\n" + b"a line\n" * 1000 + b"\n\nlast\n"
    records = read_source("notes.txt", data, text_unit="paragraph", max_line_bytes=1000)
    assert get_fields(records) == [{"text": "first\nparagraph"}, {"text": "last"}]
    assert [(u.line, u.reason) for u in get_unreadable(records)] == [
        (4, "longer than the 1,000 bytes of data_curation.max_line_bytes")
    ]


def test_overlong_line_is_skipped_and_reported(read_source):
    data = b'{"text": "' + b"x" * 300_000 + b'"}\n{"text": "short"}\n'
    records = read_source("rows.jsonl", data, max_line_bytes=1000)
    assert get_fields(records) == [{"text": "short"}]
    assert [(u.line, u.reason) for u in get_unreadable(records)] == [
        (1, "longer than the 1,000 bytes of data_curation.max_line_bytes")
    ]


@pytest.mark.parametrize("compression", ["gz", "zst"])
def test_truncated_file_gives_its_readable_rows_and_the_position(read_source, compression):
    import zstandard

    rows = [{"text": hashlib.sha256(str(i).encode()).hexdigest() * 8} for i in range(4000)]
    compressed = {"gz": gzip.compress, "zst": zstandard.compress}[compression](to_json_lines(rows))
    records = read_source(f"rows.jsonl.{compression}", compressed[: len(compressed) // 2])
    assert 500 < len(get_fields(records)) < 3500
    assert get_fields(records) == rows[: len(get_fields(records))]
    (unreadable,) = get_unreadable(records)
    assert unreadable.line == len(get_fields(records)) + 1
    assert "truncated" in unreadable.reason


def test_damaged_compressed_file_is_reported(read_source):
    (unreadable,) = read_source("rows.jsonl.gz", b"this is no gzip at all")
    assert "damaged" in unreadable.reason


def test_complete_elements_of_a_truncated_array_are_read(read_source):
    records = read_source("rows.json", json.dumps(ROWS).encode()[:-20])
    assert get_fields(records) == ROWS[:-1]
    assert [u.line for u in get_unreadable(records)] == [50]


CHINESE = [{"text": f"第{i}行有几个字"} for i in range(200)]


@pytest.mark.parametrize("cut_bytes", range(6, 12))
def test_array_cut_within_a_character_gives_its_complete_elements(read_source, cut_bytes):
    data = json.dumps(CHINESE, ensure_ascii=False).encode()
    records = read_source("rows.json", data[:-cut_bytes])
    assert get_fields(records) == CHINESE[:-1]
    (unreadable,) = get_unreadable(records)
    assert unreadable.line == 200
    assert unreadable.reason.startswith("invalid JSON: Unterminated string")


def test_compressed_array_cut_within_a_character_reports_the_position(read_source):
    rows = [{"text": hashlib.sha256(str(i).encode()).hexdigest() + "字" * 40} for i in range(2000)]
    compressed = gzip.compress(json.dumps(rows, ensure_ascii=False).encode())
    for cut in range(len(compressed) // 2, len(compressed) // 2 + 40):
        records = read_source("rows.json.gz", compressed[:cut])
        assert 500 < len(get_fields(records)) < 1500
        assert get_fields(records) == rows[: len(get_fields(records))]
        assert [(u.line, "truncated" in u.reason) for u in get_unreadable(records)] == [
            (len(get_fields(records)) + 1, True)
        ]


def test_truncated_json_lines_named_json_are_reported_once(read_source):
    rows = [{"text": hashlib.sha256(str(i).encode()).hexdigest()} for i in range(2000)]
    compressed = gzip.compress(to_json_lines(rows))
    records = read_source("rows.json.gz", compressed[: len(compressed) // 2])
    assert get_fields(records) == rows[: len(get_fields(records))]
    assert [u.line for u in get_unreadable(records)] == [len(get_fields(records)) + 1]


def test_invalid_byte_in_an_array_loses_only_its_element(read_source):
    data = json.dumps(CHINESE, ensure_ascii=False).encode()
    at = data.index("第7行".encode())
    records = read_source("rows.json", data[: at + 1] + b"\xff" + data[at + 2 :])
    assert get_fields(records) == [*CHINESE[:7], *CHINESE[8:]]
    assert [(u.line, u.reason) for u in get_unreadable(records)] == [(8, "not UTF-8: byte 0xe7 at position 10")]


@pytest.mark.parametrize("key", ["data", "Data", "rows", "records", "examples", "items"])
def test_records_wrapped_in_an_object_are_read(read_source, key):
    data = json.dumps({"version": "1.1", key: [*ROWS, "Rain."]}, indent=1).encode()
    assert get_fields(read_source("a.json", data)) == [*ROWS, {"text": "Rain."}]
    assert [record.line for record in read_source("a.json", data)][:3] == [1, 2, 3]


def test_faulty_elements_of_wrapped_records_are_reported_one_by_one(read_source):
    data = b'{"data": [{"text": "caf\xe9"}, {"text": "%s"}, {"text": "good"}]}' % (b"x" * 2000)
    records = read_source("a.json", data, max_line_bytes=1000)
    assert [(record.line, record.reason[:8]) for record in get_unreadable(records)] == [
        (1, "not UTF-"),
        (2, "longer t"),
    ]
    assert get_fields(records) == [{"text": "good"}]


@pytest.mark.parametrize(
    "value",
    [{"text": "Rain.", "data": [{"a": 1}]}, {"data": [{"a": 1}], "rows": [{"a": 2}]}, {"data": [1, 2]}, {"data": 5}],
)
def test_object_that_is_a_record_or_has_no_single_list_of_records_is_one_record(read_source, value):
    assert get_fields(read_source("a.json", json.dumps(value).encode())) == [value]


def test_escaped_surrogate_in_wrapped_records_stays_in_its_element(read_source):
    data = rb'{"version": [1], "data": [{"text":"\ud800a"}, {"text":"\udce9"}, {"text":"b", "n": NaN}], "end": 1}'
    records = read_source("a.json", data)
    assert get_fields(records) == [{"text": "\ud800a"}, {"text": "\udce9"}, {"text": "b", "n": None}]
    records = read_source("a.json", data.replace(b'"b"', b'"caf\xe9"'))
    assert get_fields(records) == [{"text": "\ud800a"}, {"text": "\udce9"}]
    assert [(record.line, record.reason) for record in get_unreadable(records)] == [
        (3, "not UTF-8: byte 0xe9 at position 12")
    ]


def test_escaped_surrogate_in_an_array_is_not_an_invalid_byte(read_source):
    (record,) = read_source("rows.json", rb'[{"text": "\udcff"}]')
    assert record.fields == {"text": "\udcff"}


def test_csv_rows_of_wrong_width_or_encoding_are_reported(read_source):
    data = b'prompt,completion\nq1,a1\nq2\n"q,3","a\n3"\nq4,\xe9\nq5,a5\n'
    records = read_source("rows.csv", data)
    assert get_fields(records) == [
        {"prompt": p, "completion": c} for p, c in [("q1", "a1"), ("q,3", "a\n3"), ("q5", "a5")]
    ]
    assert [(u.line, u.reason) for u in get_unreadable(records)] == [
        (3, "1 field; the header has 2"),
        (6, "not UTF-8: byte 0xe9"),
    ]


TABLE_LINES = [b"question,answer\n", *(f"q{i},a{i}\n".encode() for i in range(2, 61))]
CELLS = [{"question": f"q{i}", "answer": f"a{i}"} for i in range(2, 61)]
LONG_CELL = b"x" * 300_000
UNCLOSED_QUOTE = "invalid CSV: a quote opened here is not closed correctly: "


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_delimiter_of_a_table_is_the_most_frequent_one_outside_quotes_in_its_header(read_source, delimiter):
    rows = [["instruction", "note, maybe; or not", "output"], ["Pay 1,50; or not?", "", "No;\nnever, ever"]]
    table = io.StringIO()
    csv.writer(table, delimiter=delimiter).writerows(rows)
    (fields,) = get_fields(read_source("a.csv", table.getvalue().encode("utf-8-sig")))
    assert list(fields.values()) == rows[1]
    assert list(fields) == rows[0]


def test_other_delimiters_in_the_cells_do_not_divide_them(read_source):
    assert get_fields(read_source("a.csv", b"text\nOne; two\n")) == [{"text": "One; two"}]
    assert get_fields(read_source("a.tsv", b"a;b;c\td\n1\t2\n")) == [{"a;b;c": "1", "d": "2"}]
    assert get_fields(read_source("empty.csv", b"")) == []


@pytest.mark.parametrize("start", [b"\n", b"\r\n  \r\n", b"\xef\xbb\xbf\n"])
def test_delimiter_is_chosen_by_the_first_line_that_is_not_blank(read_source, start):
    (record,) = read_source("a.csv", start + b"prompt;completion\nq, 1;a\n")
    assert (record.line, record.fields) == (start.count(b"\n") + 2, {"prompt": "q, 1", "completion": "a"})


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
@pytest.mark.parametrize("delimiter", [",", ";", "|", "\t"])
@pytest.mark.parametrize("start", ["sep=%s\r\n", "\ufeffSEP=%s\n", '"sep=%s"\n', "\nsep=%s\n\n"])
def test_separator_line_of_a_spreadsheet_sets_the_delimiter(read_source, start, delimiter, name):
    table = f"{start}prompt%scompletion\n1 % 2%sa\n".replace("%s", delimiter)
    assert get_fields(read_source(name, table.encode())) == [{"prompt": "1 % 2", "completion": "a"}]


def test_column_whose_name_begins_like_a_separator_line_is_read(read_source):
    assert get_fields(read_source("a.csv", b"sep=,b\n1,2\n")) == [{"sep=": "1", "b": "2"}]


def build_table(**replacements):
    """Return the table with some lines replaced: l6 is line 6."""
    return b"".join(replacements.get(f"l{number}", line) for number, line in enumerate(TABLE_LINES, 1))


def get_locations(records):
    return [(record.line, record.reason) for record in get_unreadable(records)]


def cells_except(*numbers):
    return [row for number, row in enumerate(CELLS, 2) if number not in numbers]


@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz"])
def test_unclosed_quote_loses_only_its_line(read_source, name):
    data = build_table(l6=b'q6,"a6\n')
    records = read_source(name, gzip.compress(data) if name.endswith("gz") else data)
    assert get_fields(records) == cells_except(6)
    assert get_locations(records) == [(6, UNCLOSED_QUOTE + "unexpected end of data in line 60")]


def test_unclosed_quote_before_quoted_cells_loses_only_its_line(read_source):
    records = read_source(
        "rows.csv", build_table(l6=b'q6,"a6\n', l9=b'"q9","a9"\n', l20=b'"q20,a20\n', l60=b'q60,"a60')
    )
    assert get_fields(records) == cells_except(6, 20, 60)
    assert get_locations(records) == [
        (6, UNCLOSED_QUOTE + "',' expected after '\"' in line 9"),
        (20, UNCLOSED_QUOTE + "',' expected after '\"' in line 60"),
        (60, "invalid CSV: unexpected end of data"),
    ]


def test_quoted_cell_can_contain_line_breaks_and_doubled_quotes(read_source):
    rows = [["q", 'He said:\n\n"""Go,""\nand went"'], ["two\r\nlines", 'b"'], ["q3", '"\n"'], ["q4", "a4"]]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([["question", "answer"], *rows])
    records = read_source("rows.csv", text.getvalue().encode())
    assert [list(row.values()) for row in get_fields(records)] == rows
    assert [record.line for record in records] == [2, 6, 8, 10]


def test_overlong_quoted_cell_is_reported_and_its_rows_are_read(read_source):
    closed_far_below = b"question,answer\n" * 100 + b'q,a"\n'
    records = read_source("rows.csv", build_table(l6=b'q6,"a6\n') + closed_far_below, max_line_bytes=1000)
    assert len(get_fields(records)) == 58 + 101
    assert get_locations(records) == [
        (6, UNCLOSED_QUOTE + "longer than the 1,000 bytes of data_curation.max_line_bytes in line 96")
    ]


def test_unclosed_quote_is_handled_in_constant_memory(tmp_path):
    rows = 40_000
    (tmp_path / "rows.csv").write_bytes(b'question,answer\nq,"a\n' + b"question,answer\n" * rows)
    (source,) = list_sources(["rows.csv"], tmp_path)
    tracemalloc.start()
    record_count = sum(
        isinstance(record, Record) for record in read_records(source, DataCurationConfig(max_line_bytes=10_000))
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (record_count, peak < 3_000_000) == (rows, True)


def test_multiline_row_of_wrong_width_is_reported_with_its_lines(read_source):
    records = read_source("rows.csv", build_table(l6=b'q6,"a6\n', l31=b'q31,a31 inch",more\n'))
    assert get_fields(records) == cells_except(*range(6, 32))
    assert get_locations(records) == [(6, "lines 6 to 31: 3 fields; the header has 2")]


@pytest.mark.parametrize(
    ("first", "second", "third"),
    [
        (b'q6,"a6\n', LONG_CELL + b"\n", b'b,more"\n'),
        (b'q6,"a6\n', b'""' + LONG_CELL + b'""\n', b'b,more"\n'),
        (b'q6,"' + LONG_CELL + b"\n", b"b,more\n", b'b,more"\n'),
        (b'q6,"a6\n', b"b,more\n", b"b," + LONG_CELL + b'"\n'),
    ],
    ids=["within", "doubled", "first", "last"],
)
def test_multiline_row_with_an_overlong_line_is_quarantined_as_a_whole(read_source, first, second, third):
    records = read_source("rows.csv", build_table(l6=first, l7=second, l8=third), max_line_bytes=1000)
    assert get_fields(records) == cells_except(6, 7, 8)
    assert get_locations(records) == [(6, "lines 6 to 8: longer than the 1,000 bytes of data_curation.max_line_bytes")]


def test_overlong_line_between_rows_loses_no_other_row(read_source):
    records = read_source(
        "rows.csv", build_table(l6=b"q6," + LONG_CELL + b"\n", l8=b'"' + LONG_CELL + b"\n"), max_line_bytes=1000
    )
    assert get_fields(records) == cells_except(6, 8)
    assert [line for line, _ in get_locations(records)] == [6, 8]


def test_lines_of_a_truncated_quoted_cell_are_not_read_as_rows(read_source):
    letter = "".join(f"on day {i}, we met {hashlib.sha256(str(i).encode()).hexdigest()}\n" for i in range(3000))
    compressed = gzip.compress(f'instruction,response\nq1,a1\nwrite,"{letter}"\n'.encode())
    records = read_source("rows.csv.gz", compressed[: len(compressed) // 2])
    assert get_fields(records) == [{"instruction": "q1", "response": "a1"}]
    ((line, reason),) = get_locations(records)
    assert line == 3
    assert re.fullmatch(r"lines 3 to 1\d{3}: the compressed file is truncated", reason)


def test_lines_without_outer_quotes_are_reread_a_bounded_number_of_times(read_source, monkeypatch):
    counts = Counter[str]()
    read_next = csv_reader._CsvLines.__next__
    monkeypatch.setattr(csv_reader, "MAX_CSV_RECORD_LINES", 100)

    def count_line(csv_lines: csv_reader._CsvLines) -> str:
        counts["lines"] += 1
        return read_next(csv_lines)

    monkeypatch.setattr(csv_reader._CsvLines, "__next__", count_line)
    bad_lines = 3000
    records = read_source(
        "rows.csv", b"question,answer\n" + b'what is it","the answer is so\n' * bad_lines + b'q,a\n"several\nlines",b\n'
    )
    assert get_fields(records) == [{"question": "q", "answer": "a"}, {"question": "several\nlines", "answer": "b"}]
    assert [line for line, _ in get_locations(records)] == list(range(2, bad_lines + 2))
    assert counts["lines"] < 20 * bad_lines


def test_record_above_the_line_limit_is_reported_and_its_lines_are_read(read_source, monkeypatch):
    monkeypatch.setattr(csv_reader, "MAX_CSV_RECORD_LINES", 50)
    records = read_source("rows.csv", build_table(l6=b'q6,"a6\n') + b"q,a\n" * 20 + b'q,a"\n')
    assert get_locations(records) == [(6, UNCLOSED_QUOTE + "more than 50 lines in line 56")]
    assert len(get_fields(records)) == 58 + 21


def test_every_line_of_a_truncated_table_is_read_or_reported(read_source):
    rows = "".join(f'q{i},"{hashlib.sha256(str(i).encode()).hexdigest()}\nb{i}"\n' for i in range(3000))
    compressed = gzip.compress(f"question,answer\n{rows}".encode())
    for cut in range(len(compressed) // 2, len(compressed) // 2 + 60, 7):
        records = read_source("rows.csv.gz", compressed[:cut])
        assert [row["question"] for row in get_fields(records)] == [f"q{i}" for i in range(len(get_fields(records)))]
        assert len(get_fields(records)) > 1000
        assert "truncated" in get_locations(records)[-1][1]
        assert [line for line, _ in get_locations(records)][-1] <= 2 * len(get_fields(records)) + 3


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ("question,answer, answer", "the header contains the column 'answer' more than once"),
        ("question,,column 2", "the header contains the column 'column 2' more than once"),
        ('question,"answer', UNCLOSED_QUOTE + "unexpected end of data in line 3"),
        (f"question,{'answer' * 200}", "longer than the 1,000 bytes of data_curation.max_line_bytes"),
        ("question,r\udce9ponse", "not UTF-8: byte 0xe9"),
    ],
    ids=["doubled", "doubled-by-place", "quote", "long", "bytes"],
)
def test_table_with_an_invalid_header_is_not_read(read_source, header, reason):
    records = read_source(
        "rows.csv", f"{header}\nq1,a1,b1\nq2,a2,b2\n".encode(errors="surrogateescape"), max_line_bytes=1000
    )
    assert get_fields(records) == []
    assert get_locations(records) == [(1, f"{reason}; the rows below this header are skipped")]


def test_table_in_another_encoding_is_reported_by_its_encoding(read_source):
    records = read_source("rows.csv", "question,answer\nq,a\n".encode("utf-16"))
    assert get_locations(records) == [(1, "the file is UTF-16LE text, not UTF-8; it is skipped")]


def test_unnamed_columns_get_distinct_names(read_source):
    records = read_source("rows.csv", b"\n,question,,answer\n0,q,x,a\n")
    assert get_fields(records) == [{"column 1": "0", "question": "q", "column 3": "x", "answer": "a"}]


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from(["word", ",", '"', "\n", '"\n"', "\n,", "long"]), max_size=60),
    st.sampled_from([1000, 10_000]),
)
def test_every_word_of_a_table_is_in_a_row_or_a_reported_line(tmp_path_factory, pieces, max_line_bytes):
    numbers = itertools.count(100)
    text = "a,b\n" + "".join(
        {"word": f"w{next(numbers)}", "long": f"w{next(numbers)}" + 1200 * "x"}.get(piece, piece) for piece in pieces
    )
    folder = tmp_path_factory.mktemp("table")
    (folder / "rows.csv").write_text(text)
    records = list(
        read_records(list_sources(["rows.csv"], folder)[0], DataCurationConfig(max_line_bytes=max_line_bytes))
    )
    reported = {number for record in get_unreadable(records) for number in reported_lines(record)}
    serialized = json.dumps(get_fields(records))
    unreported_words = [
        word
        for number, line in enumerate(text.split("\n"), 1)
        if number not in reported
        for word in re.findall(r"w\d+", line)
    ]
    assert [word for word in unreported_words if word not in serialized] == []


def reported_lines(unreadable):
    match = re.match(r"lines (\d+) to (\d+): ", unreadable.reason)
    return range(unreadable.line, int(match[2]) + 1) if match else [unreadable.line]


def test_nan_is_read_as_null(read_source):
    assert get_fields(read_source("rows.jsonl", b'{"text": "a", "score": NaN}\n')) == [{"text": "a", "score": None}]


def test_text_is_read_by_lines_paragraphs_or_files(read_source):
    data = b"one\ntwo\n\n\nthree\n"
    assert [r.fields["text"] for r in read_source("t.txt", data)] == ["one", "two", "three"]
    blocks = read_source("t.txt", data, text_unit="paragraph")
    assert [(r.line, r.fields["text"]) for r in blocks] == [(1, "one\ntwo"), (5, "three")]
    assert [r.fields["text"] for r in read_source("t.txt", data, text_unit="file")] == ["one\ntwo\n\n\nthree\n"]


def test_damaged_parquet_file_is_reported(read_source):
    (unreadable,) = read_source("rows.parquet", b"PAR1 nothing PAR1")
    assert "unreadable Parquet" in unreadable.reason


def test_file_changed_since_it_was_listed_is_refused_by_name(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(to_json_lines())
    (source,) = list_sources(["rows.jsonl"], tmp_path)
    path.write_bytes(to_json_lines() + b"\n")
    with pytest.raises(InputError, match=r"rows\.jsonl changed while it was read"):
        list(read_records(source, DataCurationConfig()))


def test_files_globs_and_folders_are_listed_once_in_name_order(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "deep/c.txt.gz", "deep/.hidden/d.txt", "deep/picture.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    sources = list_sources(["deep", "*.jsonl", "b.jsonl"], tmp_path)
    assert [s.name for s in sources] == ["a.jsonl", "b.jsonl", "c.txt.gz"]
    assert list_sources(["b.jsonl", "a.jsonl", "deep/c.txt.gz"], tmp_path) == sources
    assert sources[0].sha256 == hashlib.sha256(b"a.jsonl").hexdigest()


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("missing.jsonl", "does not exist"),
        ("*.nothing", "matches no supported file"),
        ("empty", "without a supported file"),
        ("x.png", "suffix '.png'"),
    ],
)
def test_pattern_without_a_match_is_refused_by_name(tmp_path, pattern, reason):
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.png").write_text("x")
    with pytest.raises(ConfigurationError, match=reason) as error:
        list_sources([pattern], tmp_path)
    assert f"data_curation.sources: {pattern!r}" in error.value.message
    assert error.value.exit_code == 2
