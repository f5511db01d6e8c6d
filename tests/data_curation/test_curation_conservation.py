"""Every row that comes in is kept, rejected or quarantined: counted from the lines as they were written and the files as they came out."""

import gzip
import json
import random
import zlib
from collections import Counter
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from components.data_curation import stage, staging
from components.data_curation.config import Fractions
from components.data_curation.judging import nothing_similar

HALVES = Fractions(train=0.5, validation=0.1, test=0.4)
# Lines as they are met: rows of several shapes and lengths, some alike, some empty, some of no known shape; and what is no row at all.
WORDS = st.lists(
    st.sampled_from(["open", "the", "file", "é", "東京", "x@example.com", "4111111111111111", "\u200b", "Ã©"]), max_size=30
).map(" ".join)
ROWS = st.one_of(
    st.fixed_dictionaries({"prompt": WORDS, "completion": WORDS}),
    st.fixed_dictionaries({"instruction": WORDS, "output": WORDS, "id": st.sampled_from(["a", "b", 7])}),
    st.fixed_dictionaries({"instruction": WORDS, "instances": st.lists(st.fixed_dictionaries({"output": WORDS}), min_size=1, max_size=3)}),
    st.fixed_dictionaries(
        {"messages": st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": WORDS}))}
    ),
    st.fixed_dictionaries({"nobody": WORDS}),
)
TORN = st.one_of(
    st.sampled_from([b'{"prompt": "q", "comple', b"[1, 2]", b"7", b"\xef\xbb\xbf"]),
    # a quote could make a JSON string of it, and that is a row of text
    st.binary(max_size=40).filter(lambda line: line.strip() and not set(b'\n"') & set(line)),
)
BLANK = st.sampled_from([b"", b" \t", b"\r"])
# A first line that is longer than the beginning by which a file is told from binary data.
LONG = {"prompt": "What is a file known by?", "completion": "By how it begins, and this is a beginning of some length. " * 80}
TEXT = st.lists(st.one_of(ROWS, TORN, BLANK), max_size=25).map(lambda lines: [LONG, *lines])
NO_TEXT = st.sampled_from([[b"\xff\xfeh\0i\0"], [b"PK\x03\x04 a zip"], [bytes(100)], [b"PAR1"]])


def place(file, line):
    return f"line {line} of {file}"


def write(path, lines, *, broken=False):
    """Write lines into a compressed file, every row with the place it stands at; returns those that can be had of it."""
    marked = [json.dumps({**line, "mark": place(path.name, n)}).encode() if is_object(line) else line for n, line in enumerate(lines, 1)]
    data = gzip.compress(b"\n".join(marked))
    if broken:
        data = data[: len(data) * 2 // 3]
        whole = zlib.decompressobj(wbits=31).decompress(data).count(b"\n")
        lines = [*lines[:whole], b"what is left of a line"]
    path.write_bytes(data)
    return lines


def is_object(line):
    return isinstance(line, dict)


def is_row(line):
    return is_object(line) and "nobody" not in line and line.get("messages") != []


def rows_in(line):
    """How many rows or unreadable places a line makes."""
    return len(line.get("instances", "1")) if is_object(line) else int(bool(line.strip()))


def counted(written, wanted):
    """The lines that are wanted, by their places, with the number of rows in each."""
    return Counter({place(file, n): rows_in(line) for file, lines in written.items() for n, line in enumerate(lines, 1) if wanted(line)})


def check_conserved(made, written):
    """Nothing is in the dataset's files but what was written, as often as it was; the manifest counts the same. Returns the reasons."""
    from pyarrow import parquet

    splits = {name: parquet.read_table(made.path / f"{name}.parquet").to_pylist() for name in ("train", "validation", "test")}
    kept = Counter(json.loads(row["meta"])["mark"] for rows in splits.values() for row in rows)
    dropped = parquet.read_table(made.path / "rejected.parquet").to_pylist()
    rejected = Counter(place(row["source"], row["line"]) for row in dropped)
    unread = [json.loads(line) for line in (made.path / "quarantine.jsonl").read_text(encoding="utf-8").splitlines()]
    quarantined = Counter(place(one["file"], one["line"]) for one in unread)
    assert kept + rejected == counted(written, is_row)
    assert quarantined == counted(written, lambda line: not is_row(line))
    reasons = Counter(row["reason"] for row in dropped)
    told = {"in": counted(written, bool).total(), "kept": kept.total(), "quarantined": len(unread), "rejected": reasons}
    assert made.manifest.summary["rows"] == told
    assert made.manifest.summary["splits"] == {name: len(rows) for name, rows in splits.items()}
    return reasons


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=st.lists(st.one_of(TEXT, NO_TEXT), min_size=1, max_size=3), broken=st.booleans())
def test_rows_in_are_kept_rejected_or_quarantined_whatever_comes(tmp_path, curated, samples, monkeypatch, files, broken):
    monkeypatch.setattr(stage, "_engine", lambda folder, config: nothing_similar)  # seconds a dataset, which the next test takes
    monkeypatch.setattr(stage.page, "render", lambda *told: "")
    whole = list(map(samples[1], range(20)))  # so that there is something to train on and to test with, whatever else comes
    with TemporaryDirectory(dir=tmp_path) as name:
        paths = [tmp_path / name / f"{number}.jsonl.gz" for number in range(1 + len(files))]
        some = zip(paths, [whole, *files], strict=True)
        written = {path.name: write(path, lines, broken=broken and path is paths[1]) for path, lines in some}
        check_conserved(curated(*paths, out=tmp_path / name / "out", fractions=HALVES), written)


def a_file(choose, conversation, count):
    """Lines in any order: rows, their copies and near copies, empty and unknown ones, torn and blank lines."""
    rows = [conversation(f"What is {choose.random()}?", " ".join(f"w{choose.randrange(900)}" for _ in range(40))) for _ in range(count)]
    copies = choose.choices(rows, k=count // 5)
    near = [conversation(question(row), f"{answer(row)} indeed") for row in choose.sample(rows, count // 10)]
    empty = [conversation(f"Who says {i}?", "") for i in range(count // 10)]
    others = [{"nobody": "knows"}, b'{"torn', b"", b"[]"] * (count // 20)
    lines = [*rows, *copies, *near, *empty, *others]
    choose.shuffle(lines)
    return [LONG, *lines]


def question(row):
    return row["messages"][0]["content"]


def answer(row):
    return row["messages"][1]["content"]


@pytest.mark.daft
@pytest.mark.parametrize(("seed", "workers"), [(1, 1), (2, 2)])
def test_nothing_is_lost_between_chunks_workers_and_the_engine(tmp_path, curated, samples, monkeypatch, seed, workers):
    choose = random.Random(seed)
    monkeypatch.setattr(staging, "SMALL", 0)
    monkeypatch.setattr(staging, "CHUNK_ROWS", choose.randrange(20, 60))
    paths = [tmp_path / f"{number}.jsonl.gz" for number in range(3)]
    written = {path.name: write(path, a_file(choose, samples[0], 150), broken=path is paths[1]) for path in paths}
    reasons = check_conserved(curated(*paths, workers=workers, fractions=HALVES), written)
    assert {reason for reason, rows in reasons.items() if rows > 10} == {"exact_duplicate", "near_duplicate", "empty_answer"}
