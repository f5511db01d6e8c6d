import gzip
import hashlib
import json

import pytest

from components.common.errors import ConfigurationError, InputError
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
