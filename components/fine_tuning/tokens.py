"""Tokenised splits, kept by digest: a training that goes on, and the next recipe over the same rows, need not tokenise again.

Arrow files that are mapped into memory, so that the rows need not fit into it and the processes of one machine share them.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

from components.common import artifacts, hashing, jobs, liveness
from components.common.artifacts import Artifact
from components.common.progress import Reporter
from components.fine_tuning.config import FineTuningConfig
from components.fine_tuning.data import Counts, encode, rows_of
from components.fine_tuning.objectives import OBJECTIVES, PARTNER, TOKENS, Example, Objective, Use

FOLDER = "tokens"
INDEX = "tokens.json"
KEPT = 4  # tokenised datasets; the least lately used go
WRITTEN_AT_ONCE = 1000  # rows
SPLITS = ("train", "validation")
TOKENIZER_FILES = ("token", "chat_template", "vocab", "merges", "special", "added", "spiece", "sentencepiece")


@dataclass(frozen=True)
class Split:
    """A tokenised split: an Arrow file, what became of its rows, and, packed, the ids of the rows in each packed one."""

    path: Path
    counts: Counts
    packed: bool

    @cached_property
    def dataset(self) -> Any:
        """The examples, as a datasets.Dataset mapped from the file."""
        from datasets import Dataset

        return Dataset.from_file(str(self.path))

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each example."""
        return [int(n) for n in self.dataset.data.column("length").to_pylist()]

    def ids(self, examples: Iterable[int]) -> list[str]:
        """The ids of the dataset's rows that these examples are made of."""
        named = self.dataset.data.column("ids")
        return [one for example in examples for one in named[example].as_py()]


@dataclass(frozen=True)
class Tokenised:
    """Both splits."""

    folder: Path
    train: Split
    validation: Split
    cached: bool


def prepare(
    dataset: Artifact, kind: str, tokenizer: Any, tokenizer_sha256: str, config: FineTuningConfig, state: Path, reporter: Reporter
) -> Tokenised:
    """The tokenised splits of a dataset, from `state`/tokens where they are there whole, else made there."""
    folder = state / FOLDER / _key(dataset, tokenizer_sha256, config)
    if _is_whole(folder):
        folder.touch()
        reporter.note(f"tokens of {dataset.sha256[:12]} are there from before and are used again")
        return opened(folder, cached=True)
    objective = OBJECTIVES[config.objective]
    use = objective.of(kind, f"the dataset in {dataset.path} holds")
    with jobs.private_folder(folder.parent, ".tokenising") as work:
        limits = {"train": None, "validation": config.validation_rows}
        counts = {}
        for split in SPLITS:
            reporter.step(f"reading the {'training' if split == 'train' else split} rows")
            make = partial(_write, objective=objective, use=use, tokenizer=tokenizer, config=config, reporter=reporter)
            counts[split] = make(dataset.path / f"{split}.parquet", work / f"{split}.arrow", limits[split])
        if config.packing and counts["train"].examples:
            _pack(work / "train.arrow", config.max_length)
        _index(work, counts, config.packing)
        jobs.settle(work, folder, partial(_kept, folder), state / FOLDER / ".aside")
    shutil.rmtree(state / FOLDER / ".aside", ignore_errors=True)
    _drop_oldest(folder.parent)
    return opened(folder, cached=False)


def opened(folder: Path, *, cached: bool = True) -> Tokenised:
    """The tokenised splits in a folder."""
    told = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    train, validation = (
        Split(folder / f"{split}.arrow", Counts(**told["counts"][split]), told["packed"] and split == "train") for split in SPLITS
    )
    return Tokenised(folder, train, validation, cached)


def linked(splits: Tokenised, folder: Path) -> Tokenised:
    """The same splits in a folder of one's own, as links: what libraries keep beside the files they read lies there too."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*(f"{split}.arrow" for split in SPLITS), INDEX):
        if not (folder / name).exists():
            try:
                os.link(splits.folder / name, folder / name)
            except OSError:  # a file system without links
                shutil.copy2(splits.folder / name, folder / name)
    return opened(folder, cached=splits.cached)


def tokenizer_sha256(folder: Path) -> str:
    """Digest of the files that decide how text becomes tokens."""
    files = sorted(p for p in folder.iterdir() if p.is_file() and p.name.startswith(TOKENIZER_FILES))
    return hashing.content_sha256((p.name, hashing.sha256_file(p)) for p in files)


def _key(dataset: Artifact, tokenizer_sha256: str, config: FineTuningConfig) -> str:
    names = ("objective", "max_length", "packing", "validation_rows")
    code = hashing.code_sha256("fine_tuning")
    return hashing.digest([dataset.sha256, tokenizer_sha256, code, {name: getattr(config, name) for name in names}])


def _write(
    source: Path,
    target: Path,
    limit: int | None,
    *,
    objective: Objective,
    use: Use,
    tokenizer: Any,
    config: FineTuningConfig,
    reporter: Reporter,
) -> Counts:
    """Tokenise a split into an Arrow stream, as datasets.Dataset.from_file reads it."""
    import pyarrow as pa

    counts = Counts()
    types = {TOKENS: pa.list_(pa.int32()), "bool": pa.bool_()}
    fields = [("ids", pa.list_(pa.string())), ("length", pa.int32()), *((name, types[kind]) for name, kind in objective.features.items())]
    rows = rows_of(source, use, limit)
    total = min(limit or sys.maxsize, use.each * _rows_in(source))
    examples = encode(rows, objective, tokenizer, max_length=config.max_length, counts=counts, reporter=reporter, total=total)
    if PARTNER in objective.features:
        examples = mismatched(examples, config.max_length)
    schema = pa.schema(fields)
    with pa.OSFile(str(target), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for some in _in_batches(examples):
            stream.write_batch(pa.RecordBatch.from_pylist(some, schema=schema))
    return counts


def mismatched(examples: Iterable[Example], max_length: int) -> Iterator[Example]:
    """Each prompt with the answer of a row with another prompt besides: KTO estimates its reference term from such pairs (Ethayarajh et
    al., arXiv 2402.01306, section 4.1). Of neighbouring rows many share their prompt. The first wait for one that does not."""
    waiting: list[Example] = []
    other: Example | None = None  # the last example with another prompt than the one before

    def paired(example: Example, partner: Example) -> Example:
        room = max_length - len(example["prompt_ids"])
        return {**example, PARTNER: partner["completion_ids"][:room]}

    last: Example | None = None
    for example in examples:
        if last is not None and example["prompt_ids"] != last["prompt_ids"]:
            other = last
            yield from (paired(one, example) for one in waiting)
            waiting = []
        if other is None:
            waiting.append(example)
        else:
            yield paired(example, other)
        last = example
    yield from (paired(one, one) for one in waiting)  # the split has one prompt only


def _rows_in(path: Path) -> int:
    import pyarrow.parquet as parquet

    return int(parquet.ParquetFile(path).metadata.num_rows)


def _in_batches(examples: Iterator[Example]) -> Iterator[list[Example]]:
    while some := list(islice(examples, WRITTEN_AT_ONCE)):
        yield some


def _pack(path: Path, length: int) -> None:
    """Pack an Arrow file of examples into rows of `length` tokens, by TRL's best fit decreasing (Ding et al., arXiv 2404.10830)."""
    import numpy as np
    import pyarrow as pa
    from datasets import Dataset, disable_progress_bars
    from trl import pack_dataset

    disable_progress_bars()
    plain = Dataset.from_file(str(path))
    ids = [one for (one,) in plain.data.column("ids").to_pylist()]
    lists = plain.data.table.select(["input_ids", "labels"])
    # Which row a token is from travels through the packing as a third column of the same lengths.
    lengths = plain.data.column("length").to_numpy()
    numbers = _lists(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths), lengths)
    packed = pack_dataset(Dataset(lists.append_column("row", numbers).combine_chunks()), length, "bfd", {"keep_in_memory": True})
    table = packed.data.table.combine_chunks()
    sizes = np.array([sum(one) for one in table.column("seq_lengths").to_pylist()], dtype=np.int32)
    rows = np.split(table.column("row").combine_chunks().flatten().to_numpy(), np.cumsum(sizes)[:-1])
    named = pa.array([[ids[row] for row in dict.fromkeys(one.tolist())] for one in rows], pa.list_(pa.string()))
    table = table.drop_columns(["row"]).append_column("ids", named).append_column("length", pa.array(sizes)).replace_schema_metadata(None)
    temporary = path.with_suffix(".packed")
    with pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=WRITTEN_AT_ONCE)
    temporary.replace(path)


def _lists(values: Any, lengths: Any) -> Any:
    """A column of lists of these lengths."""
    import numpy as np
    import pyarrow as pa

    return pa.ListArray.from_arrays(pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32()), pa.array(values))


def _index(folder: Path, counts: dict[str, Counts], packed: bool) -> None:
    files = {f"{split}.arrow": hashing.sha256_file(folder / f"{split}.arrow") for split in SPLITS}
    told = {"packed": packed, "counts": {split: asdict(one) for split, one in counts.items()}, "files": files}
    artifacts.write_atomically(folder / INDEX, json.dumps(told, indent=1) + "\n")


def _is_whole(folder: Path) -> bool:
    """Whether every file the index names is there and unchanged."""
    try:
        told = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        return all(hashing.sha256_file(folder / name) == sha256 for name, sha256 in told["files"].items())
    except (OSError, ValueError, KeyError):
        return False


def _kept(folder: Path) -> Path | None:
    """Another job's, where it is whole."""
    return folder if _is_whole(folder) else None


def _drop_oldest(parent: Path) -> None:
    """Keep the KEPT lately used, and those in use: a training gives signs of life at its own."""
    whole = sorted((p for p in jobs.listed(parent) if (p / INDEX).exists()), key=lambda p: p.stat().st_mtime, reverse=True)
    for folder in whole[KEPT:]:
        if liveness.silence(folder) > jobs.QUIET:
            shutil.rmtree(folder, ignore_errors=True)
