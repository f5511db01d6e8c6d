"""Row conservation: every input line is kept, rejected or quarantined, counted in the input and output files."""

import gzip
import json
import random
import zlib
from collections import Counter
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from components.data_curation import prepared_chunks, stage
from components.data_curation.config import Fractions
from components.data_curation.row_verdicts import find_no_similar

SPLIT_FRACTIONS = Fractions(train=0.5, validation=0.1, test=0.4)
# Input lines: rows of several formats and lengths, some similar, empty, of an unknown format or of another kind, and lines that are not rows.
WORDS = st.lists(
    st.sampled_from(["open", "the", "file", "é", "東京", "x@example.com", "4111111111111111", "\u200b", "Ã©"]),
    max_size=30,
).map(" ".join)
RECORDS = st.one_of(
    st.fixed_dictionaries({"prompt": WORDS, "completion": WORDS}),
    st.fixed_dictionaries({"instruction": WORDS, "output": WORDS, "id": st.sampled_from(["a", "b", 7])}),
    st.fixed_dictionaries(
        {"instruction": WORDS, "instances": st.lists(st.fixed_dictionaries({"output": WORDS}), min_size=1, max_size=3)}
    ),
    st.fixed_dictionaries(
        {
            "messages": st.lists(
                st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": WORDS})
            )
        }
    ),
    st.fixed_dictionaries({"nobody": WORDS}),
    st.fixed_dictionaries({"prompt": WORDS, "chosen": WORDS, "rejected": WORDS}),
)
INVALID_LINES = st.one_of(
    st.sampled_from([b'{"prompt": "q", "comple', b"[1, 2]", b"7", b"\xef\xbb\xbf"]),
    # with a quote, the line could be a JSON string, which is a text row
    st.binary(max_size=40).filter(lambda line: line.strip() and not set(b'\n"') & set(line)),
)
BLANK_LINES = st.sampled_from([b"", b" \t", b"\r"])
# A first line that is longer than the sample that the binary check reads.
LONG_ROW = {
    "prompt": "What is a file known by?",
    "completion": "By how it begins, and this is a beginning of some length. " * 80,
}
TEXT_FILES = st.lists(st.one_of(RECORDS, INVALID_LINES, BLANK_LINES), max_size=25).map(lambda lines: [LONG_ROW, *lines])
BINARY_FILES = st.sampled_from([[b"\xff\xfeh\0i\0"], [b"PK\x03\x04 a zip"], [bytes(100)], [b"PAR1"]])


def format_location(file, line):
    return f"line {line} of {file}"


def write_compressed(path, lines, *, is_truncated=False):
    """Write lines into a compressed file, each row with its location; return the lines that a reader can recover."""
    encoded = [
        json.dumps({**line, "mark": format_location(path.name, n)}).encode() if is_object(line) else line
        for n, line in enumerate(lines, 1)
    ]
    data = gzip.compress(b"\n".join(encoded))
    if is_truncated:
        data = data[: len(data) * 2 // 3]
        complete = zlib.decompressobj(wbits=31).decompress(data).count(b"\n")
        lines = [*lines[:complete], b"what is left of a line"]
    path.write_bytes(data)
    return lines


def is_object(line):
    return isinstance(line, dict)


def is_row(line):
    return is_object(line) and not {"nobody", "chosen"} & line.keys() and line.get("messages") != []


def count_rows(line):
    """Return the number of rows or unreadable places of a line."""
    return len(line.get("instances", "1")) if is_object(line) else int(bool(line.strip()))


def count_by_location(written, is_wanted):
    """Return the number of rows of the wanted lines by location."""
    return Counter(
        {
            format_location(file, n): count_rows(line)
            for file, lines in written.items()
            for n, line in enumerate(lines, 1)
            if is_wanted(line)
        }
    )


def check_conserved(artifact, written):
    """Check that the dataset holds each written row as often as it was written and the manifest agrees; return the reject reasons."""
    from pyarrow import parquet

    splits = {
        name: parquet.read_table(artifact.path / f"{name}.parquet").to_pylist()
        for name in ("train", "validation", "test")
    }
    kept = Counter(json.loads(row["meta"])["mark"] for rows in splits.values() for row in rows)
    rejected_rows = parquet.read_table(artifact.path / "rejected.parquet").to_pylist()
    rejected = Counter(format_location(row["source"], row["line"]) for row in rejected_rows)
    quarantine = [
        json.loads(line) for line in (artifact.path / "quarantine.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    quarantined = Counter(format_location(place["file"], place["line"]) for place in quarantine)
    assert kept + rejected == count_by_location(written, is_row)
    assert quarantined == count_by_location(written, lambda line: not is_row(line))
    reasons = Counter(row["reason"] for row in rejected_rows)
    expected = {
        "in": count_by_location(written, bool).total(),
        "kept": kept.total(),
        "quarantined": len(quarantine),
        "rejected": reasons,
    }
    assert artifact.manifest.summary["rows"] == expected
    assert artifact.manifest.summary["splits"] == {name: len(rows) for name, rows in splits.items()}
    return reasons


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=st.lists(st.one_of(TEXT_FILES, BINARY_FILES), min_size=1, max_size=3), is_truncated=st.booleans())
def test_every_row_is_kept_rejected_or_quarantined(
    tmp_path, curate_files, make_distinct_row, monkeypatch, files, is_truncated
):
    monkeypatch.setattr(
        stage.engine_process, "find_similar_texts", lambda folder, locations, **_: find_no_similar(locations)
    )  # takes seconds for each dataset; the next test covers it
    monkeypatch.setattr(stage.report, "render", lambda *args: "")
    distinct_rows = list(map(make_distinct_row, range(80)))  # fill the splits, and outnumber other kinds
    with TemporaryDirectory(dir=tmp_path) as name:
        paths = [tmp_path / name / f"{number}.jsonl.gz" for number in range(1 + len(files))]
        contents = zip(paths, [distinct_rows, *files], strict=True)
        written = {
            path.name: write_compressed(path, lines, is_truncated=is_truncated and path is paths[1])
            for path, lines in contents
        }
        config = {"fractions": SPLIT_FRACTIONS, "max_other_kind_share": 1}
        check_conserved(curate_files(*paths, out=tmp_path / name / "out", **config), written)


def build_lines(rng, make_conversation, count):
    """Return shuffled lines: rows, copies, near copies, empty answers, unknown formats, invalid and blank lines."""
    rows = [
        make_conversation(f"What is {rng.random()}?", " ".join(f"w{rng.randrange(900)}" for _ in range(40)))
        for _ in range(count)
    ]
    copies = rng.choices(rows, k=count // 5)
    near_copies = [
        make_conversation(get_question(row), f"{get_answer(row)} indeed") for row in rng.sample(rows, count // 10)
    ]
    empty_answers = [make_conversation(f"Who says {i}?", "") for i in range(count // 10)]
    other_lines = [{"nobody": "knows"}, b'{"torn', b"", b"[]"] * (count // 20)
    lines = [*rows, *copies, *near_copies, *empty_answers, *other_lines]
    rng.shuffle(lines)
    return [LONG_ROW, *lines]


def get_question(row):
    return row["messages"][0]["content"]


def get_answer(row):
    return row["messages"][1]["content"]


@pytest.mark.daft
@pytest.mark.parametrize(("seed", "workers"), [(1, 1), (2, 2)])
def test_no_row_is_lost_between_chunks_workers_and_engine(
    tmp_path, curate_files, make_conversation, monkeypatch, seed, workers
):
    rng = random.Random(seed)
    monkeypatch.setattr(prepared_chunks, "MIN_PARALLEL_BYTES", 0)
    monkeypatch.setattr(prepared_chunks, "MAX_CHUNK_ROWS", rng.randrange(20, 60))
    paths = [tmp_path / f"{number}.jsonl.gz" for number in range(3)]
    written = {
        path.name: write_compressed(path, build_lines(rng, make_conversation, 150), is_truncated=path is paths[1])
        for path in paths
    }
    reasons = check_conserved(curate_files(*paths, workers=workers, fractions=SPLIT_FRACTIONS), written)
    assert {reason for reason, rows in reasons.items() if rows > 10} == {
        "exact_duplicate",
        "near_duplicate",
        "empty_answer",
    }
