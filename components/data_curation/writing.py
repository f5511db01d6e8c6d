"""The dataset's files, written chunk by chunk, and on the way all that the report tells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from components.common.personal_data.config import NamesConfig
from components.data_curation import tables
from components.data_curation.drops import Drop
from components.data_curation.facts import Facts
from components.data_curation.judging import Judged
from components.data_curation.rows import CONTENT, Kind, Row
from components.data_curation.splits import SPLITS
from components.data_curation.staging import Staged

SPLIT_FILES = {name: f"{name}.parquet" for name in SPLITS}


def write(staged: Staged, judged: Judged, output: Path, names: NamesConfig | None = None) -> Facts:
    """Write train, validation and test, the rejected rows and what was unreadable: the payload of the dataset. Returns what was met.

    `names` is how names are found in the examples that are shown.
    """
    facts = Facts(names=names or NamesConfig())
    import pyarrow

    with ExitStack() as stack:
        schema = tables.split_schema(staged.kind)
        into = {name: stack.enter_context(tables.Writer(output / file, schema)) for name, file in SPLIT_FILES.items()}
        rejected = stack.enter_context(tables.Writer(output / "rejected.parquet", tables.rejected_schema()))
        for table, splits in _verdicts(staged, judged):
            for name, writer in into.items():
                writer.add(table.filter(_is(splits, name)))
            dropped = _rejected(table.filter(_is(splits, "")), staged.kind)
            rejected.add(dropped)
            _count(table.filter(pyarrow.array(map(bool, splits))), dropped, facts)
    tables.write_quarantine(output / "quarantine.jsonl", staged.unread)
    for one in staged.unread:
        facts.miss(one)
    return facts


def _count(kept: Any, dropped: Any, facts: Facts) -> None:
    for told in kept.select(["file", "characters", "language"]).to_pylist():
        facts.keep(**told)
    for told in dropped.select(["reason", "detail", "source", "line", "text"]).to_pylist():
        facts.reject(Drop(told["reason"], told["detail"]), told["source"], told["line"], told["text"])


def _verdicts(staged: Staged, judged: Judged) -> Iterator[tuple[Any, list[str]]]:
    """Chunk by chunk the rows with their ids, reasons and details, and the splits they go into ("" for dropped ones)."""
    import pyarrow

    begin = 0
    for done in staged.chunks:
        if not done.rows:
            continue
        table, end = staged.table(done), begin + done.rows
        alike = {row - begin: judged.alike[row] for row in range(begin, end) if row in judged.alike}
        for column in ("reason", "detail"):
            told = table[column].to_pylist()
            for row, why in alike.items():
                told[row] = getattr(why, column)
            table = table.set_column(table.schema.get_field_index(column), column, pyarrow.array(told, pyarrow.string()))
        yield table.append_column("id", pyarrow.array(judged.ids[begin:end], pyarrow.string())), judged.splits[begin:end]
        begin = end


def _is(splits: Sequence[str], name: str) -> Any:
    import pyarrow

    return pyarrow.array([split == name for split in splits], pyarrow.bool_())


def _rejected(table: Any, kind: Kind) -> Any:
    """Dropped rows with the columns of rejected.parquet: all that is said in them as one text.

    Both sources stand in it: file and line say where to look, and by its own source a row is found as in a split.
    """
    import pyarrow

    texts = [_text(content, kind) for content in table.select(CONTENT[kind]).to_pylist()]
    told = table.select(["id", "file", "line", "reason", "detail", "source"])
    told = told.rename_columns(["id", "source", "line", "reason", "detail", "own_source"])
    return told.append_column("text", pyarrow.array(texts, pyarrow.large_string()))


def _text(content: dict[str, Any], kind: Kind) -> str:
    return Row(kind=kind, content=content, own_id="", source="", meta={}, file="", line=0).text()
