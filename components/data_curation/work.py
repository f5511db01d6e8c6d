"""Row-level work: a chunk of records becomes a file of prepared rows.

It is a pure function of the chunk and the configuration: so it runs in this process, in several, or on the nodes of a Ray cluster, and the
files have the same bytes. A prepared row carries all that later steps compare, as hashes: the texts themselves are read again only where
two rows may be alike, and where rows are written.

    python -m components.data_curation.work FOLDER      prepares the chunks whose numbers stand on standard input, a line each
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from components.common import personal_data, process
from components.common.errors import TunelineError, of_the_machine
from components.common.progress import Reporter, Silent
from components.data_curation import cleaning, duplicates, formats, scrubbing
from components.data_curation.cleaning import Drop
from components.data_curation.config import DataCurationConfig
from components.data_curation.contamination import Index
from components.data_curation.language import identify
from components.data_curation.readers import Record, Unread
from components.data_curation.rows import CONTENT, Kind, Row, as_json
from components.data_curation.sources import Source
from components.data_curation.tables import content_schema

STRIDE = 1 << 24  # a row's place is its chunk's number times this, plus its number in the chunk
SETTINGS = "work.json"
HASHES = ("exact", "words", "answer", "prompt", "group")


@dataclass(frozen=True)
class Tools:
    """What the work needs besides the rows: the settings, and the evaluation sets that no row may share text with."""

    config: DataCurationConfig
    benchmarks: Index | None = None


@dataclass
class Done:
    """What is known of a chunk once it is prepared: how many rows its file has, the first place of each kind of row, what was unreadable,
    the personal data found (kind: [how often, in how many rows]), the files the rows are from, the formats they were read as, with how
    many rows have each; how many rows belong to a group, and of how many its value was redacted."""

    number: int
    rows: int = 0
    kinds: dict[Kind, tuple[str, int]] = field(default_factory=dict)
    unread: list[Unread] = field(default_factory=list)
    personal: dict[str, list[int]] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    forms: dict[str, int] = field(default_factory=dict)
    grouped: int = 0
    masked: int = 0


@dataclass
class Prepared:
    """A row and what became of it. `group` is what the rows have in common that one split must hold."""

    row: Row
    why: Drop | None
    group: str | None
    language: str = ""


def prepare(number: int, records: Iterable[Record | Unread], tools: Tools, folder: Path) -> Done:
    """Write the files of one chunk (see write) and tell what is in them."""
    done, prepared = Done(number), []
    for record in records:
        try:
            rows = formats.rows_of(record, tools.config.format) if isinstance(record, Record) else []
        except formats.ShapeError as error:
            rows, record = [], Unread(record.file, record.line, str(error))
        if isinstance(record, Unread):
            why = personal_data.masked(record.why, tools.config.personal_data.names)  # a reason may quote what it could not read
            done.unread.append(replace(record, why=why))
        prepared += [_prepared(row, tools, done) for row in rows]
    return write(done, prepared, tools.config, folder)


def prepare_published(number: int, rows: Sequence[Row], config: DataCurationConfig, folder: Path) -> Done:
    """The same for rows of an earlier revision, which are only compared with: nothing is cleaned or dropped."""
    return write(Done(number), [Prepared(row, None, _published_group(row, config.group_by)) for row in rows], config, folder)


def _prepared(row: Row, tools: Tools, done: Done) -> Prepared:
    cleaning.clean(row)
    group = _group(row, tools.config.group_by)  # before a placeholder makes all customers one
    found, private = scrubbing.scrub(row, tools.config.personal_data)
    done.grouped += group is not None
    done.masked += group != _group(row, tools.config.group_by)
    for kind, times in found.items():
        counted = done.personal.setdefault(kind, [0, 0])
        done.personal[kind] = [counted[0] + times, counted[1] + 1]
    spoken = identify(row.text())
    why = cleaning.drop(row, tools.config, spoken) or private or _contaminated(row, tools)
    return Prepared(row, why, group, spoken[0])


def _contaminated(row: Row, tools: Tools) -> Drop | None:
    return tools.benchmarks.drop(row.text()) if tools.benchmarks else None


def write(done: Done, prepared: Sequence[Prepared], config: DataCurationConfig, folder: Path) -> Done:
    """rows-*.arrow has every row of the chunk; texts-*.parquet has what the engine compares of those that no filter dropped."""
    import pyarrow
    from pyarrow import parquet

    done.rows, done.files = len(prepared), sorted({one.row.file for one in prepared})
    done.forms = dict(Counter(one.row.form for one in prepared))
    for one in prepared:
        done.kinds.setdefault(one.row.kind, (one.row.file, one.row.line))
    if len(done.kinds) != 1:  # no row, or kinds that no dataset can mix: nothing of it will be read
        return done
    kind = prepared[0].row.kind
    rows = [_columns(one, done.number * STRIDE + place, kind, config) for place, one in enumerate(prepared)]
    _write_arrow(rows_file(folder, done.number), pyarrow.Table.from_pylist(rows, schema=_schema(kind)))
    texts = pyarrow.Table.from_pylist([row for row in rows if row["reason"] is None], schema=_texts_schema())
    parquet.write_table(texts, texts_file(folder, done.number))
    return done


def rows_file(folder: Path, number: int) -> Path:
    """Where a chunk's rows lie."""
    return folder / f"rows-{number:09}.arrow"


def texts_file(folder: Path, number: int) -> Path:
    """Where the texts lie that the engine compares."""
    return folder / f"texts-{number:09}.parquet"


def _columns(one: Prepared, place: int, kind: Kind, config: DataCurationConfig) -> dict[str, Any]:
    """A row by the columns of both files."""
    row, text = one.row, one.row.text()
    content = {name: row.content.get(name) for name in CONTENT[kind]}
    dropped = {"reason": one.why.reason, "detail": one.why.detail} if one.why else {"reason": None, "detail": None}
    told = {"place": place, "own_id": row.own_id, "source": row.source, "meta": as_json(row.meta), "file": row.file, "line": row.line}
    known = {"digest": row.digest(), "language": one.language, "characters": len(text)}
    return {**content, **told, **dropped, **known, **({} if one.why else _compared(one, text, config))}


def _compared(one: Prepared, text: str, config: DataCurationConfig) -> dict[str, Any]:
    row = one.row
    words, answer = duplicates.words(text), duplicates.answer(row, config.answer_min_words)
    prompt = duplicates.words(row.prompt()) if row.kind in ("preference", "unpaired") else None
    return {
        "words": words,
        "answer": answer,
        "exact_hash": _hash(duplicates.exact(row.kind, text)),
        "words_hash": _hash(words),
        "answer_hash": _hash(answer),
        "prompt_hash": _hash(prompt),
        "group_hash": _hash(one.group),
    }


def _group(row: Row, key: str) -> str | None:
    """What the rows of one group have in common, where splits are made by group."""
    value = row.source if key == "source" else row.meta.get(key)
    return json.dumps(value, sort_keys=True) if key and value is not None else None


def _published_group(row: Row, key: str) -> str | None:
    """A published row's group, None where its value was redacted: a placeholder does not say which group it was."""
    group = _group(row, key)
    return None if group and any(placeholder in group for placeholder in personal_data.PLACEHOLDERS.values()) else group


def _hash(text: str | None) -> bytes | None:
    """128 bits: among a billion different texts, two get one hash with a probability of 1e-21."""
    return None if text is None else hashlib.blake2b(text.encode(), digest_size=16).digest()


def _texts_schema() -> Any:
    import pyarrow

    hashes = [(f"{name}_hash", pyarrow.binary(16)) for name in ("words", "answer")]
    return pyarrow.schema([("place", pyarrow.int64()), ("words", pyarrow.large_string()), ("answer", pyarrow.large_string()), *hashes])


def _schema(kind: Kind) -> Any:
    import pyarrow

    texts = ["own_id", "source", "meta", "file", "reason", "detail", "digest", "language"]
    numbers = [("place", pyarrow.int64()), ("line", pyarrow.int64()), ("characters", pyarrow.int64())]
    hashes = [(f"{name}_hash", pyarrow.binary(16)) for name in HASHES]
    return pyarrow.schema([*content_schema(kind), *((name, pyarrow.string()) for name in texts), *numbers, *hashes])


def _write_arrow(path: Path, table: Any) -> None:
    import pyarrow
    from pyarrow import ipc

    options = ipc.IpcWriteOptions(compression="lz4")
    with pyarrow.OSFile(str(path), "wb") as sink, ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)


def raw_file(folder: Path, number: int) -> Path:
    """Where a chunk's records lie until another process has prepared them."""
    return folder / f"raw-{number:09}.jsonl"


def done_file(folder: Path, number: int) -> Path:
    """Where another process tells what is in the files it wrote."""
    return folder / f"done-{number:09}.json"


def hand_out(folder: Path, number: int, records: Iterable[Record | Unread]) -> None:
    """Write a chunk's records for another process."""
    with raw_file(folder, number).open("w", encoding="utf-8") as file:
        for one in records:
            file.write(json.dumps(asdict(one) if isinstance(one, Unread) else vars(one)) + "\n")


def prepare_file(folder: str, number: int) -> int:
    """Prepare a chunk that was handed out; returns its number of rows. What another process works with is read once in a process."""
    place = Path(folder)
    done = prepare(number, _handed(raw_file(place, number)), _tools((place / SETTINGS).read_text(encoding="utf-8")), place)
    told = {**asdict(done), "unread": [asdict(one) for one in done.unread]}
    half = done_file(place, number).with_suffix(".half")
    half.write_text(json.dumps(told), encoding="utf-8")
    half.replace(done_file(place, number))
    return done.rows


def handed_back(folder: Path, number: int) -> Done:
    """What prepare_file told, and its records removed."""
    told = json.loads(done_file(folder, number).read_text(encoding="utf-8"))
    raw_file(folder, number).unlink()
    done_file(folder, number).unlink()
    kinds = {kind: (place[0], place[1]) for kind, place in told["kinds"].items()}
    return Done(**{**told, "kinds": kinds, "unread": [Unread(**one) for one in told["unread"]]})


def _handed(path: Path) -> Iterable[Record | Unread]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            told = json.loads(line)
            yield Unread(**told) if "why" in told else Record(**told)


def hand_out_settings(folder: Path, config: DataCurationConfig, benchmarks: Sequence[Source]) -> None:
    """Write what another process works with."""
    told = {"config": config.model_dump(mode="json"), "benchmarks": [one.model_dump() for one in benchmarks]}
    (folder / SETTINGS).write_text(json.dumps(told), encoding="utf-8")


@functools.lru_cache(maxsize=1)
def _tools(settings: str) -> Tools:
    told = json.loads(settings)
    return tools(DataCurationConfig(**told["config"]), [Source(**one) for one in told["benchmarks"]], Silent())


def tools(config: DataCurationConfig, benchmarks: Sequence[Source], reporter: Reporter) -> Tools:
    """What the work needs, made of the settings and the evaluation sets' files."""
    return Tools(config, Index.of(benchmarks, config, reporter) if benchmarks else None)


def main(folder: str, told: int) -> None:
    """Prepare chunks until standard input ends; each one that is done is told by its number, or by an error that a user can mend, in a
    line written to the descriptor `told`."""
    process.die_with(os.getppid())
    answers = os.fdopen(told, "w", encoding="utf-8")
    for line in sys.stdin:
        try:
            prepare_file(folder, int(line))
            answer: int | dict[str, Any] = int(line)
        except TunelineError as error:
            answer = error.as_dict()
        except Exception as error:
            refused = of_the_machine(error, [Path(folder)])
            if refused is None:
                raise
            answer = refused.as_dict()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
