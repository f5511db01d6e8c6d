import csv
import gzip
import hashlib
import io
import itertools
import json
import re
import tracemalloc
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.common.errors import ConfigurationError, InputError
from components.data_curation import readers
from components.data_curation.config import DataCurationConfig
from components.data_curation.readers import Record, Unread, read
from components.data_curation.sources import list_sources

ROWS = [{"text": f"row number {i} with some words"} for i in range(50)]


@pytest.fixture
def read_all(tmp_path):
    def run(name, data, **config):
        path = tmp_path / name
        path.write_bytes(data)
        (source,) = list_sources([name], tmp_path)
        return list(read(source, DataCurationConfig(**config)))

    return run


def lines(rows=ROWS):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def fields(found):
    return [one.fields for one in found if isinstance(one, Record)]


def unread(found):
    return [one for one in found if isinstance(one, Unread)]


def test_every_container_gives_the_same_records(read_all, tmp_path):
    import pyarrow
    import zstandard
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "p.parquet")
    files = {
        "a.jsonl": lines(),
        "b.json": json.dumps(ROWS, indent=1).encode(),
        "c.json": lines(),
        "d.jsonl.gz": gzip.compress(lines()[:700]) + gzip.compress(lines()[700:]),
        "e.jsonl.zst": zstandard.compress(lines()[:700]) + zstandard.compress(lines()[700:]),
        "f.csv": b"text\r\n" + b"".join(r["text"].encode() + b"\r\n" for r in ROWS),
        "g.txt": "\n".join(r["text"] for r in ROWS).encode(),
        "h.jsonl": b"\xef\xbb\xbf" + lines().rstrip(),
        "p.parquet": (tmp_path / "p.parquet").read_bytes(),
    }
    for name, data in files.items():
        found = read_all(name, data)
        assert fields(found) == ROWS, name
        assert not unread(found), name


def test_unreadable_lines_are_told_with_their_place_and_the_others_are_read(read_all):
    data = b'{"text": "one"}\n{"text": \n{"text": "\xff"}\n[1]\n\n{"text": "six"}\n'
    found = read_all("rows.jsonl", data)
    assert [(r.line, r.fields["text"]) for r in found if isinstance(r, Record)] == [(1, "one"), (6, "six")]
    places = [(u.file, u.line, u.why) for u in unread(found)]
    assert [p[:2] for p in places] == [("rows.jsonl", 2), ("rows.jsonl", 3), ("rows.jsonl", 4)]
    assert "invalid JSON" in places[0][2]
    assert places[1][2] == "not UTF-8: byte 0xff at position 10"
    assert "list, not an object" in places[2][2]


def test_nesting_without_end_is_unreadable_not_fatal(read_all):
    (one,) = read_all("rows.jsonl", b"[" * 200_000 + b"\n")
    assert "nested too deeply" in one.why or "recursion" in one.why


def nested(depth: int) -> str:
    return "[" * (depth - 1) + "]" * (depth - 1)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "one.json"])
def test_how_deep_a_record_may_be_nested_does_not_hang_on_where_it_is_read(read_all, name):
    for depth in (200, 201, 800, 1200, 100_000):
        record = f'{{"text": {nested(depth)}}}'.encode()
        data = b"[" + record + b', {"text": "good"}]' if name == "rows.json" else record
        found = read_all(name, data)
        assert isinstance(found[0], Record) == (depth <= 200), depth
        if depth > 200:
            assert "nested too deeply" in found[0].why or "recursion" in found[0].why


@pytest.mark.parametrize("data", [b'{"text": "one"}\n', b'[{"text": "one"}]\n'], ids=["object", "array"])
def test_a_whole_value_before_the_place_where_a_file_breaks_off_does_not_hide_it(read_all, data):
    second = gzip.compress(b"".join(hashlib.sha256(bytes([i])).hexdigest().encode() + b"\n" for i in range(200)))
    found = read_all("rows.json.gz", gzip.compress(data) + second[:30])
    assert fields(found) == [{"text": "one"}]
    assert ["breaks off" in u.why for u in unread(found)] == [True]


def test_zstd_is_unpacked_piece_by_piece():
    import zstandard

    packed = zstandard.compress(b'{"text": "' + b"x" * 1000 + b'"}\n') * 3 + zstandard.compress(b"word " * 40_000_000)
    sizes = [len(piece) for piece in readers._decompressed(iter([packed]), ".zst")]
    assert sum(sizes) == 3 * 1013 + 200_000_000
    assert max(sizes) < 16_000_000


def test_a_paragraph_without_end_is_passed_over_as_a_line_is(read_all):
    data = b"first\nparagraph\n\n" + b"a line\n" * 1000 + b"\n\nlast\n"
    found = read_all("notes.txt", data, text_unit="paragraph", max_line_bytes=1000)
    assert fields(found) == [{"text": "first\nparagraph"}, {"text": "last"}]
    assert [(u.line, u.why) for u in unread(found)] == [(4, "longer than the 1,000 bytes of data_curation.max_line_bytes")]


def test_a_line_that_is_too_long_is_passed_over(read_all):
    data = b'{"text": "' + b"x" * 300_000 + b'"}\n{"text": "short"}\n'
    found = read_all("rows.jsonl", data, max_line_bytes=1000)
    assert fields(found) == [{"text": "short"}]
    assert [(u.line, u.why) for u in unread(found)] == [(1, "longer than the 1,000 bytes of data_curation.max_line_bytes")]


@pytest.mark.parametrize("compression", ["gz", "zst"])
def test_a_truncated_file_gives_what_is_readable_and_where_it_breaks_off(read_all, compression):
    import zstandard

    rows = [{"text": hashlib.sha256(str(i).encode()).hexdigest() * 8} for i in range(4000)]
    whole = {"gz": gzip.compress, "zst": zstandard.compress}[compression](lines(rows))
    found = read_all(f"rows.jsonl.{compression}", whole[: len(whole) // 2])
    assert 500 < len(fields(found)) < 3500
    assert fields(found) == rows[: len(fields(found))]
    (broken,) = unread(found)
    assert broken.line == len(fields(found)) + 1
    assert "breaks off" in broken.why


def test_a_damaged_compressed_file_is_told(read_all):
    (broken,) = read_all("rows.jsonl.gz", b"this is no gzip at all")
    assert "damaged" in broken.why


def test_of_a_truncated_array_the_whole_elements_are_read(read_all):
    found = read_all("rows.json", json.dumps(ROWS).encode()[:-20])
    assert fields(found) == ROWS[:-1]
    assert [u.line for u in unread(found)] == [50]


CHINESE = [{"text": f"第{i}行有几个字"} for i in range(200)]


@pytest.mark.parametrize("missing", range(6, 12))
def test_of_an_array_cut_within_a_character_the_whole_elements_are_read(read_all, missing):
    data = json.dumps(CHINESE, ensure_ascii=False).encode()
    found = read_all("rows.json", data[:-missing])
    assert fields(found) == CHINESE[:-1]
    (broken,) = unread(found)
    assert broken.line == 200
    assert broken.why.startswith("invalid JSON: Unterminated string")


def test_of_a_truncated_compressed_array_cut_within_a_character_it_is_told_where_it_breaks_off(read_all):
    rows = [{"text": hashlib.sha256(str(i).encode()).hexdigest() + "字" * 40} for i in range(2000)]
    whole = gzip.compress(json.dumps(rows, ensure_ascii=False).encode())
    for cut in range(len(whole) // 2, len(whole) // 2 + 40):
        found = read_all("rows.json.gz", whole[:cut])
        assert 500 < len(fields(found)) < 1500
        assert fields(found) == rows[: len(fields(found))]
        assert [(u.line, "breaks off" in u.why) for u in unread(found)] == [(len(fields(found)) + 1, True)]


def test_the_line_in_which_json_lines_by_another_name_break_off_is_told_once(read_all):
    rows = [{"text": hashlib.sha256(str(i).encode()).hexdigest()} for i in range(2000)]
    whole = gzip.compress(lines(rows))
    found = read_all("rows.json.gz", whole[: len(whole) // 2])
    assert fields(found) == rows[: len(fields(found))]
    assert [u.line for u in unread(found)] == [len(fields(found)) + 1]


def test_a_bad_byte_in_an_array_costs_its_element_only(read_all):
    data = json.dumps(CHINESE, ensure_ascii=False).encode()
    at = data.index("第7行".encode())
    found = read_all("rows.json", data[: at + 1] + b"\xff" + data[at + 2 :])
    assert fields(found) == [*CHINESE[:7], *CHINESE[8:]]
    assert [(u.line, u.why) for u in unread(found)] == [(8, "not UTF-8: byte 0xe7 at position 10")]


def test_an_escaped_surrogate_in_an_array_is_not_taken_for_a_bad_byte(read_all):
    (one,) = read_all("rows.json", rb'[{"text": "\udcff"}]')
    assert one.fields == {"text": "\udcff"}


def test_csv_rows_of_the_wrong_width_and_encoding_are_told_apart(read_all):
    data = b'prompt,completion\nq1,a1\nq2\n"q,3","a\n3"\nq4,\xe9\nq5,a5\n'
    found = read_all("rows.csv", data)
    assert fields(found) == [{"prompt": p, "completion": c} for p, c in [("q1", "a1"), ("q,3", "a\n3"), ("q5", "a5")]]
    assert [(u.line, u.why) for u in unread(found)] == [(3, "1 fields under a header of 2"), (6, "not UTF-8")]


TABLE = [b"question,answer\n", *(f"q{i},a{i}\n".encode() for i in range(2, 61))]
CELLS = [{"question": f"q{i}", "answer": f"a{i}"} for i in range(2, 61)]
LONG = b"x" * 300_000
OPENED = "invalid CSV: a quote is opened here and not closed as it should be: "


def table(**changed):
    """The table with other lines in place of some: l6 for line 6."""
    return b"".join(changed.get(f"l{number}", line) for number, line in enumerate(TABLE, 1))


def places(found):
    return [(one.line, one.why) for one in unread(found)]


def but(*numbers):
    return [row for number, row in enumerate(CELLS, 2) if number not in numbers]


@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz"])
def test_a_quote_that_nobody_closes_costs_its_line_and_not_the_rows_below(read_all, name):
    data = table(l6=b'q6,"a6\n')
    found = read_all(name, gzip.compress(data) if name.endswith("gz") else data)
    assert fields(found) == but(6)
    assert places(found) == [(6, OPENED + "unexpected end of data in line 60")]


def test_a_quote_that_a_quoted_cell_below_seems_to_close_costs_its_line_only(read_all):
    found = read_all("rows.csv", table(l6=b'q6,"a6\n', l9=b'"q9","a9"\n', l20=b'"q20,a20\n', l60=b'q60,"a60'))
    assert fields(found) == but(6, 20, 60)
    assert places(found) == [
        (6, OPENED + "',' expected after '\"' in line 9"),
        (20, OPENED + "',' expected after '\"' in line 60"),
        (60, "invalid CSV: unexpected end of data"),
    ]


def test_a_cell_in_quotes_may_hold_lines_blank_lines_and_doubled_quotes_and_stands_where_it_begins(read_all):
    rows = [["q", 'He said:\n\n"""Go,""\nand went"'], ["two\r\nlines", 'b"'], ["q3", '"\n"'], ["q4", "a4"]]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([["question", "answer"], *rows])
    found = read_all("rows.csv", text.getvalue().encode())
    assert [list(row.values()) for row in fields(found)] == rows
    assert [one.line for one in found] == [2, 6, 8, 10]


def test_a_cell_in_quotes_that_goes_on_for_too_long_is_broken_and_the_rows_in_it_are_read(read_all):
    closed_far_below = b"question,answer\n" * 100 + b'q,a"\n'
    found = read_all("rows.csv", table(l6=b'q6,"a6\n') + closed_far_below, max_line_bytes=1000)
    assert len(fields(found)) == 58 + 101
    assert places(found) == [(6, OPENED + "longer than the 1,000 bytes of data_curation.max_line_bytes in line 96")]


def test_a_quote_that_nobody_closes_is_looked_for_without_holding_the_file(tmp_path):
    rows = 40_000
    (tmp_path / "rows.csv").write_bytes(b'question,answer\nq,"a\n' + b"question,answer\n" * rows)
    (source,) = list_sources(["rows.csv"], tmp_path)
    tracemalloc.start()
    found = sum(isinstance(one, Record) for one in read(source, DataCurationConfig(max_line_bytes=10_000)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (found, peak < 3_000_000) == (rows, True)


def test_a_row_over_several_lines_that_has_not_the_headers_width_is_told_with_its_lines(read_all):
    found = read_all("rows.csv", table(l6=b'q6,"a6\n', l31=b'q31,a31 inch",more\n'))
    assert fields(found) == but(*range(6, 32))
    assert places(found) == [(6, "lines 6 to 31: 3 fields under a header of 2")]


@pytest.mark.parametrize(
    ("first", "second", "third"),
    [
        (b'q6,"a6\n', LONG + b"\n", b'b,more"\n'),
        (b'q6,"a6\n', b'""' + LONG + b'""\n', b'b,more"\n'),
        (b'q6,"' + LONG + b"\n", b"b,more\n", b'b,more"\n'),
        (b'q6,"a6\n', b"b,more\n", b"b," + LONG + b'"\n'),
    ],
    ids=["within", "doubled", "first", "last"],
)
def test_a_row_with_a_line_that_is_too_long_is_quarantined_whole(read_all, first, second, third):
    found = read_all("rows.csv", table(l6=first, l7=second, l8=third), max_line_bytes=1000)
    assert fields(found) == but(6, 7, 8)
    assert places(found) == [(6, "lines 6 to 8: longer than the 1,000 bytes of data_curation.max_line_bytes")]


def test_a_line_that_is_too_long_between_rows_costs_no_other(read_all):
    found = read_all("rows.csv", table(l6=b"q6," + LONG + b"\n", l8=b'"' + LONG + b"\n"), max_line_bytes=1000)
    assert fields(found) == but(6, 8)
    assert [line for line, _ in places(found)] == [6, 8]


def test_of_a_table_that_breaks_off_within_a_quoted_cell_no_line_of_that_cell_is_taken_for_a_row(read_all):
    letter = "".join(f"on day {i}, we met {hashlib.sha256(str(i).encode()).hexdigest()}\n" for i in range(3000))
    whole = gzip.compress(f'instruction,response\nq1,a1\nwrite,"{letter}"\n'.encode())
    found = read_all("rows.csv.gz", whole[: len(whole) // 2])
    assert fields(found) == [{"instruction": "q1", "response": "a1"}]
    ((line, why),) = places(found)
    assert line == 3
    assert re.fullmatch(r"lines 3 to 1\d{3}: the compressed file breaks off here: its end is missing", why)


def test_lines_that_lost_their_outer_quotes_are_not_read_again_and_again(read_all, monkeypatch):
    taken = Counter[str]()
    real = readers._CsvLines._next
    monkeypatch.setattr(readers, "SPAN", 100)

    def counted(lines: readers._CsvLines) -> tuple[int, Any]:
        taken["lines"] += 1
        return real(lines)

    monkeypatch.setattr(readers._CsvLines, "_next", counted)
    bad = 3000
    found = read_all("rows.csv", b"question,answer\n" + b'what is it","the answer is so\n' * bad + b'q,a\n"several\nlines",b\n')
    assert fields(found) == [{"question": "q", "answer": "a"}, {"question": "several\nlines", "answer": "b"}]
    assert [line for line, _ in places(found)] == list(range(2, bad + 2))
    assert taken["lines"] < 20 * bad


def test_a_record_of_more_lines_than_any_has_is_broken_and_its_lines_are_read(read_all, monkeypatch):
    monkeypatch.setattr(readers, "SPAN", 50)
    found = read_all("rows.csv", table(l6=b'q6,"a6\n') + b"q,a\n" * 20 + b'q,a"\n')
    assert places(found) == [(6, OPENED + "more than 50 lines in line 56")]
    assert len(fields(found)) == 58 + 21


def test_of_a_table_that_breaks_off_within_a_quoted_cell_every_line_is_read_or_told(read_all):
    rows = "".join(f'q{i},"{hashlib.sha256(str(i).encode()).hexdigest()}\nb{i}"\n' for i in range(3000))
    whole = gzip.compress(f"question,answer\n{rows}".encode())
    for cut in range(len(whole) // 2, len(whole) // 2 + 60, 7):
        found = read_all("rows.csv.gz", whole[:cut])
        assert [row["question"] for row in fields(found)] == [f"q{i}" for i in range(len(fields(found)))]
        assert len(fields(found)) > 1000
        assert "breaks off" in places(found)[-1][1]
        assert [line for line, _ in places(found)][-1] <= 2 * len(fields(found)) + 3


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ("question,answer, answer", "the header names the column 'answer' twice"),
        ("question,,column 2", "the header names the column 'column 2' twice"),
        ('question,"answer', OPENED + "unexpected end of data in line 3"),
        (f"question,{'answer' * 200}", "longer than the 1,000 bytes of data_curation.max_line_bytes"),
        ("question,r\udce9ponse", "not UTF-8"),
    ],
    ids=["doubled", "doubled-by-place", "quote", "long", "bytes"],
)
def test_without_a_header_to_go_by_nothing_of_a_table_is_read(read_all, header, why):
    found = read_all("rows.csv", f"{header}\nq1,a1,b1\nq2,a2,b2\n".encode(errors="surrogateescape"), max_line_bytes=1000)
    assert fields(found) == []
    assert places(found) == [(1, f"{why}; nothing below this header is read")]


def test_a_table_in_another_encoding_is_told_by_it_and_not_by_its_header(read_all):
    found = read_all("rows.csv", "question,answer\nq,a\n".encode("utf-16"))
    assert places(found) == [(1, "the file is UTF-16LE text, not UTF-8; nothing of it is read")]


def test_columns_without_a_name_are_kept_apart(read_all):
    found = read_all("rows.csv", b"\n,question,,answer\n0,q,x,a\n")
    assert fields(found) == [{"column 1": "0", "question": "q", "column 3": "x", "answer": "a"}]


@settings(max_examples=300)
@given(st.lists(st.sampled_from(["word", ",", '"', "\n", '"\n"', "\n,", "long"]), max_size=60), st.sampled_from([1000, 10_000]))
def test_every_word_of_a_table_is_in_a_row_or_in_a_line_that_is_told(tmp_path_factory, pieces, longest):
    numbers = itertools.count(100)
    text = "a,b\n" + "".join({"word": f"w{next(numbers)}", "long": f"w{next(numbers)}" + 1200 * "x"}.get(piece, piece) for piece in pieces)
    folder = tmp_path_factory.mktemp("table")
    (folder / "rows.csv").write_text(text)
    found = list(read(list_sources(["rows.csv"], folder)[0], DataCurationConfig(max_line_bytes=longest)))
    told = {number for one in unread(found) for number in spanned(one)}
    held = json.dumps(fields(found))
    lost = [word for number, line in enumerate(text.split("\n"), 1) if number not in told for word in re.findall(r"w\d+", line)]
    assert [word for word in lost if word not in held] == []


def spanned(one):
    match = re.match(r"lines (\d+) to (\d+): ", one.why)
    return range(one.line, int(match[2]) + 1) if match else [one.line]


def test_nan_is_no_value(read_all):
    assert fields(read_all("rows.jsonl", b'{"text": "a", "score": NaN}\n')) == [{"text": "a", "score": None}]


def test_text_is_read_by_lines_blocks_or_whole_files(read_all):
    data = b"one\ntwo\n\n\nthree\n"
    assert [r.fields["text"] for r in read_all("t.txt", data)] == ["one", "two", "three"]
    blocks = read_all("t.txt", data, text_unit="paragraph")
    assert [(r.line, r.fields["text"]) for r in blocks] == [(1, "one\ntwo"), (5, "three")]
    assert [r.fields["text"] for r in read_all("t.txt", data, text_unit="file")] == ["one\ntwo\n\n\nthree\n"]


def test_a_broken_parquet_file_is_told(read_all):
    (broken,) = read_all("rows.parquet", b"PAR1 nothing PAR1")
    assert "unreadable Parquet" in broken.why


def test_a_file_that_changed_since_it_was_listed_is_refused_by_name(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines())
    (source,) = list_sources(["rows.jsonl"], tmp_path)
    path.write_bytes(lines() + b"\n")
    with pytest.raises(InputError, match=r"rows\.jsonl changed while it was read"):
        list(read(source, DataCurationConfig()))


def test_files_globs_and_folders_are_listed_once_each_by_name_whatever_order_they_are_named_in(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "deep/c.txt.gz", "deep/.hidden/d.txt", "deep/picture.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    listed = list_sources(["deep", "*.jsonl", "b.jsonl"], tmp_path)
    assert [s.name for s in listed] == ["a.jsonl", "b.jsonl", "c.txt.gz"]
    assert list_sources(["b.jsonl", "a.jsonl", "deep/c.txt.gz"], tmp_path) == listed
    assert listed[0].sha256 == hashlib.sha256(b"a.jsonl").hexdigest()


@pytest.mark.parametrize(
    ("pattern", "why"),
    [("missing.jsonl", "does not exist"), ("*.nothing", "matches no file"), ("empty", "holds no file"), ("x.png", "suffix '.png'")],
)
def test_a_pattern_that_names_nothing_is_refused_by_name(tmp_path, pattern, why):
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.png").write_text("x")
    with pytest.raises(ConfigurationError, match=why) as error:
        list_sources([pattern], tmp_path)
    assert f"data_curation.sources: {pattern!r}" in error.value.message
    assert error.value.exit_code == 2
