"""Cache of tokenized splits, identified by digest; resumed training runs and other recipes reuse them.

Splits are memory-mapped Arrow files: they can exceed the memory, and the processes of one machine share them.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from components.common.artifacts import artifact_folder, code_digest, hashing
from components.common.artifacts.artifact_folder import Artifact
from components.common.runtime import filesystem
from components.common.runtime.reporters import Reporter
from components.common.workspace import job_folders, liveness
from components.fine_tuning import mixing
from components.fine_tuning.config import Recipe
from components.fine_tuning.mixing import MixingSettings, Mixture
from components.fine_tuning.objectives import KL_COLUMN, TEXT, TOKEN_LIST, Example, RowMapping
from components.fine_tuning.row_encoding import RowCounts, encode_rows, read_rows

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

CACHE_FOLDER = "tokens"
INDEX_FILENAME = "tokens.json"
MAX_CACHED_DATASETS = 4  # the least recently used datasets are deleted
WRITE_BATCH_ROWS = 1000
SPLITS = ("train", "validation")
TOKENIZER_FILES = ("token", "chat_template", "vocab", "merges", "special", "added", "spiece", "sentencepiece")


@dataclass(frozen=True)
class TokenizedSplit:
    """An Arrow file of examples, and the counts of its rows. A packed example has the ids of several rows."""

    path: Path
    counts: RowCounts
    packed: bool

    @cached_property
    def dataset(self) -> Dataset:
        """The memory-mapped examples."""
        from datasets import Dataset

        return Dataset.from_file(str(self.path))

    @cached_property
    def lengths(self) -> list[int]:
        """Number of tokens of each example."""
        return [int(n) for n in self.dataset.data.column("length").to_pylist()]

    @cached_property
    def sources(self) -> list[str]:
        """Source of each example; only of unpacked examples."""
        return [str(source) for source in self.dataset.data.column("source").to_pylist()]

    def build_mixture(self, settings: MixingSettings) -> Mixture | None:
        """Return the mixture of the examples; None if every example is drawn once per epoch."""
        return mixing.build_mixture(settings, self.sources) if settings.is_active else None

    def count_epoch_examples(self, settings: MixingSettings) -> int:
        """Return the number of examples in the batches of an epoch."""
        return mixing.count_epoch_examples(settings, Counter(self.sources)) if settings.is_active else len(self.lengths)

    def count_epoch_rows(self, settings: MixingSettings) -> int:
        """Return the number of rows of an epoch. A mixture draws examples, whose share of all examples this is."""
        rows = self.counts.rows - self.counts.without_answer
        return round(rows * self.count_epoch_examples(settings) / max(len(self.lengths), 1))

    def row_ids(self, examples: Iterable[int]) -> list[str]:
        """Return the ids of the dataset's rows in the examples with these indices."""
        ids = self.dataset.data.column("ids")
        return [row_id for example in examples for row_id in ids[example].as_py()]

    def summarize(self) -> dict[str, object]:
        """Return the counts of a training split for the model's manifest.

        Returns:
            "rows" (an object with "train", "truncated", "cut_tokens", "cut_share" and "without_answer"), "examples", and per epoch
            "tokens_a_pass" and "learned_tokens_a_pass".
        """
        counts = self.counts
        return {
            "rows": {
                "train": counts.rows - counts.without_answer,
                "truncated": counts.truncated,
                "cut_tokens": counts.cut_tokens,
                "cut_share": counts.cut_share,
                "without_answer": counts.without_answer,
            },
            "examples": len(self.lengths),
            "tokens_a_pass": counts.tokens,
            "learned_tokens_a_pass": counts.learned,
        }


@dataclass(frozen=True)
class TokenizedDataset:
    """The tokenized splits, and whether they were cached."""

    folder: Path
    train: TokenizedSplit
    validation: TokenizedSplit
    cached: bool


def load_or_tokenize(
    dataset: Artifact,
    kind: str,
    tokenizer: PreTrainedTokenizerBase,
    tokenizer_sha256: str,
    config: Recipe,
    state: Path,
    reporter: Reporter,
) -> TokenizedDataset:
    """Return a dataset's tokenized splits from `state`/tokens; tokenize again if they are missing or damaged.

    Args:
        dataset: The dataset artifact.
        kind: Kind of the dataset's rows.
        tokenizer: The base model's tokenizer.
        tokenizer_sha256: Digest returned by `hash_tokenizer`.
        config: The recipe.
        state: Folder of the cache.
        reporter: Receives progress and notes.

    Raises:
        InputError: the objective does not accept this kind of rows.
    """
    keys = ("objective", "max_length", "packing", "validation_rows")
    code = code_digest.code_sha256("fine_tuning")
    key = hashing.digest([dataset.sha256, tokenizer_sha256, code, {name: getattr(config, name) for name in keys}])
    folder = state / CACHE_FOLDER / key
    if _is_complete(folder):
        folder.touch()
        reporter.note(f"using the cached tokens of dataset {dataset.sha256[:12]}")
        return open_tokens(folder, cached=True)
    mapping, counts = config.objective_spec.get_mapping(kind, f"the dataset in {dataset.path} contains"), {}
    with job_folders.private_folder(folder.parent, ".tokenising") as work:
        for split, limit in (("train", None), ("validation", config.validation_rows)):
            reporter.step(f"reading the {'training' if split == 'train' else split} rows")
            source, target = dataset.path / f"{split}.parquet", work / f"{split}.arrow"
            counts[split] = _write_split(source, target, limit, mapping, tokenizer, config, reporter)
        if config.packing and counts["train"].examples:
            _pack(work / "train.arrow", config.max_length)
        index = {
            "packed": config.packing,
            "counts": {split: asdict(split_counts) for split, split_counts in counts.items()},
            "files": {f"{split}.arrow": hashing.sha256_file(work / f"{split}.arrow") for split in SPLITS},
        }
        artifact_folder.write_atomically(work / INDEX_FILENAME, json.dumps(index, indent=1) + "\n")
        aside = state / CACHE_FOLDER / ".aside"
        job_folders.move_into_place(work, folder, lambda: folder if _is_complete(folder) else None, aside)
    shutil.rmtree(aside, ignore_errors=True)
    # Keep datasets in use: a training run sends a heartbeat to its dataset.
    complete = [path for path in job_folders.list_folder(folder.parent) if (path / INDEX_FILENAME).exists()]
    for old in sorted(complete, key=lambda path: path.stat().st_mtime, reverse=True)[MAX_CACHED_DATASETS:]:
        if liveness.seconds_since_heartbeat(old) > job_folders.LOCK_STALE_AFTER_SECONDS:
            shutil.rmtree(old, ignore_errors=True)
    return open_tokens(folder, cached=False)


def open_tokens(folder: Path, *, cached: bool = True) -> TokenizedDataset:
    """Return the tokenized splits in a folder; `cached` states whether they were cached."""
    index = json.loads((folder / INDEX_FILENAME).read_text(encoding="utf-8"))
    train, validation = (
        TokenizedSplit(
            folder / f"{split}.arrow", RowCounts(**index["counts"][split]), index["packed"] and split == "train"
        )
        for split in SPLITS
    )
    return TokenizedDataset(folder, train, validation, cached)


def link_tokens(splits: TokenizedDataset, folder: Path) -> TokenizedDataset:
    """Link the splits to a separate folder and return them, for libraries that write files next to their input."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*(f"{split}.arrow" for split in SPLITS), INDEX_FILENAME):
        if not (folder / name).exists():
            try:
                filesystem.link(splits.folder / name, folder / name)
            except OSError:  # a file system without hard links
                shutil.copy2(splits.folder / name, folder / name)
    return open_tokens(folder, cached=splits.cached)


def hash_tokenizer(folder: Path) -> str:
    """Return the digest of the tokenizer's files."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name.startswith(TOKENIZER_FILES))
    return hashing.content_sha256((path.name, hashing.sha256_file(path)) for path in files)


def _write_split(
    source: Path,
    target: Path,
    limit: int | None,
    mapping: RowMapping,
    tokenizer: PreTrainedTokenizerBase,
    config: Recipe,
    reporter: Reporter,
) -> RowCounts:
    """Tokenize a split into an Arrow stream that `datasets.Dataset.from_file` reads."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    objective = config.objective_spec
    types = {TOKEN_LIST: pa.list_(pa.int32()), TEXT: pa.string(), "bool": pa.bool_()}
    columns = [(name, types[feature]) for name, feature in objective.features.items()]
    schema = pa.schema([("ids", pa.list_(pa.string())), ("source", pa.string()), ("length", pa.int32()), *columns])
    counts = RowCounts()
    examples = encode_rows(
        read_rows(source, mapping, limit),
        objective,
        tokenizer,
        max_length=config.max_length,
        counts=counts,
        reporter=reporter,
        total=min(limit or sys.maxsize, mapping.max_rows_per_row * parquet.ParquetFile(source).metadata.num_rows),
    )
    if KL_COLUMN in objective.features:
        examples = add_kl_completions(examples, config.max_length)
    with pa.OSFile(str(target), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        while batch := list(islice(examples, WRITE_BATCH_ROWS)):
            stream.write_batch(pa.RecordBatch.from_pylist(batch, schema=schema))
    return counts


def add_kl_completions(examples: Iterable[Example], max_length: int) -> Iterator[Example]:
    """Add to each example the answer of a row with another prompt.

    KTO estimates its reference term from such mismatched pairs (Ethayarajh et al., arXiv 2402.01306, section 4.1).
    Neighbouring rows often share their prompt, so the partner is the last row with another prompt. Examples before the
    second prompt are held back until that prompt appears.
    """

    def pair(example: Example, partner: Example) -> Example:
        return {**example, KL_COLUMN: partner["completion_ids"][: max_length - len(example["prompt_ids"])]}

    waiting: list[Example] = []
    partner: Example | None = None
    previous: Example | None = None
    for example in examples:
        if previous is not None and example["prompt_ids"] != previous["prompt_ids"]:
            partner = previous
            yield from (pair(unpaired, example) for unpaired in waiting)
            waiting = []
        if partner is None:
            waiting.append(example)
        else:
            yield pair(example, partner)
        previous = example
    yield from (pair(unpaired, unpaired) for unpaired in waiting)  # all rows share one prompt


def _pack(path: Path, length: int) -> None:
    """Pack an Arrow file into rows of `length` tokens, by best fit decreasing (Ding et al., arXiv 2404.10830)."""
    import numpy as np
    import pyarrow as pa
    from datasets import Dataset, disable_progress_bars
    from trl import pack_dataset

    disable_progress_bars()
    unpacked = Dataset.from_file(str(path))
    ids = [row_id for (row_id,) in unpacked.data.column("ids").to_pylist()]
    table = unpacked.data.table.select(["input_ids", "labels"])
    # A third list column carries the row number of each token through the packing.
    lengths = unpacked.data.column("length").to_numpy()
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    row_numbers = pa.array(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths))
    table = table.append_column("row", pa.ListArray.from_arrays(offsets, row_numbers)).combine_chunks()
    table = pack_dataset(Dataset(table), length, "bfd", {"keep_in_memory": True}).data.table.combine_chunks()
    packed_lengths = np.array([sum(sizes) for sizes in table.column("seq_lengths").to_pylist()], dtype=np.int32)
    token_rows = table.column("row").combine_chunks().flatten().to_numpy()
    packed_rows = np.split(token_rows, np.cumsum(packed_lengths)[:-1])
    packed_ids = [[ids[row] for row in dict.fromkeys(rows.tolist())] for rows in packed_rows]
    table = (
        table.drop_columns(["row"])
        .append_column("ids", pa.array(packed_ids, pa.list_(pa.string())))
        .append_column("length", pa.array(packed_lengths))
        .replace_schema_metadata(None)
    )
    temporary = path.with_suffix(".packed")
    with pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=WRITE_BATCH_ROWS)
    filesystem.rename(temporary, path)


def _is_complete(folder: Path) -> bool:
    """Return whether every file in the index exists and matches its digest."""
    try:
        files = json.loads((folder / INDEX_FILENAME).read_text(encoding="utf-8"))["files"]
        return all(hashing.sha256_file(folder / name) == sha256 for name, sha256 in files.items())
    except (OSError, ValueError, KeyError):
        return False
