"""Raw text in, clean train, validation and test rows out; every dropped row with its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.common import artifacts, hashing
from components.common.artifacts import Artifact, Input
from components.common.errors import InputError
from components.common.progress import Reporter
from components.data_curation import cleaning, duplicates, facts, formats, page, readers, splits, tables
from components.data_curation.cleaning import Drop
from components.data_curation.config import DataCurationConfig
from components.data_curation.readers import Unread
from components.data_curation.rows import Kind, Row, give_ids
from components.data_curation.sources import Source, list_sources, named

__all__ = ["Curated", "Source", "curate", "list_sources", "named", "survey"]

STAGE = "data_curation"
SPLIT_FILES = {name: f"{name}.parquet" for name in splits.SPLITS}
PAYLOAD = (*SPLIT_FILES.values(), "rejected.parquet", "quarantine.jsonl")
ENGINE_FOLDER = ".engine"
SHOWN = 3  # sources that an error names
FORMATS = "docs/data.md shows the formats that are read."
# What to do about a source of which nothing could be read, by what was found in it.
ICONV = "Convert it: iconv -f {encoding} -t UTF-8 {{file}} > utf8-{{file}}, then name the new file."
RENAME = "Rename it: .gz or .zst at its end for a compressed file, .parquet for Parquet."
COPY = "Copy or download {file} again, and compare its size or checksum with the original's."
ADVICE = {
    "UTF-16LE": ICONV.format(encoding="UTF-16LE"),
    "UTF-16BE": ICONV.format(encoding="UTF-16BE"),
    "not UTF-8": ICONV.format(encoding="LATIN1").replace("Convert it:", "Convert it from the encoding it has, for example:"),
    "its name does not say": RENAME,
    "breaks off": COPY,
    "damaged": COPY,
}


@dataclass(frozen=True)
class Curated:
    """What became of the rows: kept ones by split, dropped ones with their reason, and the places that could not be read.

    `groups` is how many groups of rows there are that belong together; one goes into one split as a whole.
    """

    kind: Kind
    by_split: dict[str, list[Row]]
    dropped: list[tuple[Row, Drop]]
    unread: list[Unread]
    groups: int

    @property
    def kept(self) -> list[Row]:
        """The rows of all splits."""
        return [row for rows in self.by_split.values() for row in rows]


def curate(
    sources: Sequence[Source],
    output: Path,
    config: DataCurationConfig,
    *,
    seed: int,
    reporter: Reporter,
    overwrite: bool = False,
) -> Artifact:
    """Make a dataset of the sources in the folder `output` and return it; one finished there under the same key is returned as it is.

    The dataset has train, validation and test rows, those rejected (with reason and detail) and a list of what was unreadable. Raises
    InputError when a source has changed since it was listed, kinds of rows are mixed, nothing is kept or a split stays empty, and
    EngineMissingError when Daft gives no result.
    """
    inputs = [Input(kind="raw", content_sha256=source.sha256, uri=source.name) for source in sources]
    key = _key(inputs, config, seed)
    if finished := artifacts.begin(output, key, overwrite=overwrite):
        return finished
    rows, unread = _read(sources, config, reporter)
    _check_any(sources, rows, unread)
    _note(sources, rows, unread, reporter)
    curated = _curated(rows, unread, lambda clean: duplicates.compare(clean, output / ENGINE_FOLDER, config), config, seed, reporter)
    check_splits(curated, config)
    if not curated.by_split["validation"]:
        reporter.note("no row fell into the validation split")
    summary = counts(curated, rows_in=len(rows) + len(unread))
    reporter.step("writing the dataset")
    _write(curated, output, page.render(summary, sources, facts.of(curated.kept, curated.dropped, unread)))
    return artifacts.publish(
        output, "dataset", payload=PAYLOAD, inputs=inputs, config=config.model_dump(), seed=seed, key=key, summary=summary
    )


def survey(sources: Sequence[Source], config: DataCurationConfig, *, seed: int, reporter: Reporter) -> Curated:
    """What curation would make of the sources, without the Daft engine and without writing anything.

    Rows that are only similar to each other are not found, so what is kept is an upper bound, and exact where there are none. Raises
    InputError as curate does, but for a split that stays empty: see check_splits.
    """
    rows, unread = _read(sources, config, reporter)
    _check_any(sources, rows, unread)
    return _curated(rows, unread, lambda clean: duplicates.equal(clean, config), config, seed, reporter)


def check_splits(curated: Curated, config: DataCurationConfig) -> None:
    """Raise InputError where there is nothing to train on or nothing to test with."""
    splits.check_filled({name: len(some) for name, some in curated.by_split.items()}, curated.groups, config.fractions)


def _key(inputs: Sequence[Input], config: DataCurationConfig, seed: int) -> str:
    """What the result depends on: not where the sources lie, only what they hold and are called."""
    settings = config.model_dump(exclude={"sources"})
    named = [[one.uri, one.content_sha256] for one in inputs]
    return hashing.digest({"stage": STAGE, "code": hashing.code_sha256(STAGE), "inputs": named, "config": settings, "seed": seed})


def _read(sources: Sequence[Source], config: DataCurationConfig, reporter: Reporter) -> tuple[list[Row], list[Unread]]:
    """All rows in input order, cleaned and with their ids, and all that is unreadable."""
    reporter.step("reading")
    rows: list[Row] = []
    unread: list[Unread] = []
    for number, one in enumerate(_each(sources, config), 1):
        if isinstance(one, Unread):
            unread.append(one)
        else:
            rows.append(one)
        if number % 1000 == 0:
            reporter.progress(number, None, "rows")
    reporter.progress(len(rows) + len(unread), len(rows) + len(unread), "rows")
    give_ids(rows)
    return rows, unread


def _note(sources: Sequence[Source], rows: Sequence[Row], unread: Sequence[Unread], reporter: Reporter) -> None:
    """Say what nobody may learn from a file only: what was unreadable, sources without rows, ids that were taken."""
    if unread:
        reporter.note(f"{_places(unread)}; quarantine.jsonl lists {'it' if len(unread) == 1 else 'them all'}")
    heard = {row.file for row in rows} | {one.file for one in unread}
    for source in sources:
        if source.name not in heard:
            reporter.note(f"{source.name} {'is empty' if source.bytes == 0 else 'holds no row'}")
    renamed = [row for row in rows if row.own_id and row.id != row.own_id]
    if renamed:
        what = "row has the id of an earlier one" if len(renamed) == 1 else "rows have the id of an earlier one"
        first = f"{renamed[0].file}:{renamed[0].line} is now {renamed[0].id}"
        reporter.note(f"{len(renamed):,} {what} and got a running number: {first}{' and so on' if len(renamed) > 1 else ''}")


def _places(unread: Sequence[Unread]) -> str:
    first = f"{unread[0].file}:{unread[0].line}: {unread[0].why}"
    return f"1 place is unreadable: {first}" if len(unread) == 1 else f"{len(unread):,} places are unreadable, the first {first}"


def _each(sources: Sequence[Source], config: DataCurationConfig) -> Iterator[Row | Unread]:
    for source in sources:
        for record in readers.read(source, config):
            if isinstance(record, Unread):
                yield record
                continue
            try:
                rows = formats.rows_of(record, config.format)
            except formats.ShapeError as error:
                yield Unread(record.file, record.line, str(error))
                continue
            for row in rows:
                cleaning.clean(row)
                yield row


def _curated(
    rows: list[Row],
    unread: list[Unread],
    compare: Callable[[list[Row]], duplicates.Likeness],
    config: DataCurationConfig,
    seed: int,
    reporter: Reporter,
) -> Curated:
    kind = _one_kind(rows)
    reporter.step("filtering")
    dropped = [(row, why) for row in rows if (why := cleaning.drop(row, config))]
    gone = {id(row) for row, _ in dropped}
    clean = [row for row in rows if id(row) not in gone]
    if not clean:
        raise _nothing(dropped, unread)
    reporter.step("comparing rows")
    found = compare(clean)
    repeats = duplicates.drops(clean, found)
    dropped += [(clean[place], why) for place, why in repeats.items()]
    together = duplicates.clusters(clean, found)
    places = splits.assign(clean, together, config.fractions, seed)
    by_split = {name: [r for i, r in enumerate(clean) if places[i] == name and i not in repeats] for name in splits.SPLITS}
    return Curated(kind, by_split, dropped, unread, len(set(together)))


def _check_any(sources: Sequence[Source], rows: Sequence[Row], unread: Sequence[Unread]) -> None:
    """Raise InputError where not one row could be read."""
    if unread and not rows:
        raise _nothing([], unread)
    if not rows:
        names = ", ".join(source.name for source in sources[:SHOWN]) + (f" and {len(sources) - SHOWN} more" if len(sources) > SHOWN else "")
        are = "is" if len(sources) == 1 else "are"
        what = f"{are} empty" if not any(source.bytes for source in sources) else "holds no row" if len(sources) == 1 else "hold no row"
        raise InputError(f"{names} {what}", hint=f"Name files with rows in data_curation.sources; {FORMATS}")


def _one_kind(rows: Sequence[Row]) -> Kind:
    """The kind that all rows have. Raises InputError when there is more than one."""
    first: dict[Kind, Row] = {}
    for row in rows:
        first.setdefault(row.kind, row)
    if len(first) > 1:
        where = ", ".join(f"{kind} ({row.file}:{row.line})" for kind, row in first.items())
        raise InputError(
            f"the sources mix kinds of rows: {where}",
            hint="A dataset has one kind: name only sources of one, or force one way to read them with data_curation.format.",
        )
    return next(iter(first))


def _nothing(dropped: Sequence[tuple[Row, Drop]], unread: Sequence[Unread]) -> InputError:
    """No row is left: the error counts why, and gives the first unreadable place."""
    reasons = Counter(why.reason for _, why in dropped)
    counted = [f"{count} dropped as {reason}" for reason, count in sorted(reasons.items())] + ([_places(unread)] if unread else [])
    advice = next((told.format(file=unread[0].file) for sign, told in ADVICE.items() if unread and sign in unread[0].why), None)
    return InputError(
        f"no row is left to keep: {'; '.join(counted)}",
        hint=advice or f"Check data_curation.sources and data_curation.format; {FORMATS}",
    )


def counts(curated: Curated, rows_in: int) -> dict[str, Any]:
    """The counts of the manifest. Rows in = kept + rejected + quarantined, or there is a fault here."""
    reasons = Counter(why.reason for _, why in curated.dropped)
    sizes = {name: len(rows) for name, rows in curated.by_split.items()}
    kept = sum(sizes.values())
    if rows_in != kept + reasons.total() + len(curated.unread):
        raise AssertionError(f"rows were lost: {rows_in} in, {kept} kept, {reasons.total()} rejected, {len(curated.unread)} quarantined")
    rows = {"in": rows_in, "kept": kept, "quarantined": len(curated.unread), "rejected": dict(sorted(reasons.items()))}
    return {"rows": rows, "splits": sizes, "rows_kind": curated.kind}


def _write(curated: Curated, output: Path, html: str) -> None:
    for name, rows in curated.by_split.items():
        tables.write_split(output / SPLIT_FILES[name], curated.kind, rows)
    tables.write_rejected(output / "rejected.parquet", curated.dropped)
    tables.write_quarantine(output / "quarantine.jsonl", curated.unread)
    (output / "report.html").write_text(html, encoding="utf-8")
