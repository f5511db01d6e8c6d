"""Token statistics of a dataset: total, lengths, truncation at the maximum row length, and packing.

Rows are rendered with the model's chat template and tokenized as in training, but without transformers and torch, which
the curation image does not contain.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from components.common.models import conversation_rows, model_loading, tokenization_check
from components.common.models.row_lengths import find_covering_length
from components.common.models.standalone_tokenizer import ChatTemplate, load_tokenizer
from components.common.runtime.errors import TunelineError, get_first_line
from components.common.runtime.reporters import Reporter
from components.data_curation.config import TokensConfig
from components.data_curation.rows import choose_sample

PERCENTILES = (50, 90, 99)
BATCH_ROWS = 1000


@dataclass(frozen=True)
class TokenStatistics:
    """Token counts of a dataset. All figures except `total` cover the measured rows.

    Attributes:
        model: the base model.
        max_length: the maximum row length in tokens.
        rows: the number of rows.
        sampled: the number of rows in the sample.
        measured: `sampled` without answers labelled bad, which training skips, and rows that the template rejects.
        refused_by_template: the number of rows that the chat template rejects.
        total: the number of tokens, extrapolated to all rows.
        mean: the mean number of tokens per row.
        longest: the number of tokens of the longest row.
        percentiles: tokens per row by percentile.
        histogram: the number of rows per class; the upper bounds are powers of two, and `max_length`.
        truncated_rows: the share of rows longer than `max_length`.
        truncated_tokens: the share of tokens beyond `max_length`.
        sequences: the number of sequences of `max_length` for packed rows.
        packed_utilization: the share of tokens that are not padding if rows are packed.
        unpacked_utilization: the share of tokens that are not padding if each row is padded.
    """

    model: str
    max_length: int
    rows: int
    sampled: int
    measured: int
    refused_by_template: int
    total: int
    mean: float
    longest: int
    percentiles: dict[int, int]
    histogram: dict[int, int]
    truncated_rows: float
    truncated_tokens: float
    sequences: int
    packed_utilization: float
    unpacked_utilization: float

    @property
    def is_estimated(self) -> bool:
        """Whether the figures come from a sample."""
        return self.sampled < self.rows


def measure_tokens(
    splits: Sequence[Path], kind: str, config: TokensConfig, reporter: Reporter
) -> TokenStatistics | str:
    """Return the token statistics of a dataset, or a sentence with the reason if tokens were not counted.

    At most `config.sample` rows are tokenized: those with the smallest hashes of their ids. The choice therefore does
    not depend on the order of the rows. For preference and labelled rows, only the text that training uses is counted.

    Args:
        splits: the splits' Parquet files.
        kind: the kind of the rows.
        config: the model whose tokenizer is used, the maximum row length and the size of the sample.
        reporter: receives the progress.
    """
    from pyarrow import parquet

    if not (base_model := config.base_model):
        return "Tokens were not counted: no base model is set (data_curation.tokens.base_model)."
    try:
        folder = model_loading.find_local_tokenizer(base_model)
        if folder:
            tokenization_check.check_tokenization(folder, base_model)
    except TunelineError as error:
        return f"Tokens were not counted: {error.message}."
    if not folder:
        return f"Tokens were not counted: the tokenizer.json of {base_model} is not on this machine."
    ids = [row for path in splits for row in parquet.read_table(path, columns=["id"])["id"].to_pylist()]
    chosen = choose_sample(ids, config.sample)
    reporter.step("counting tokens")
    try:
        texts = _render_texts(splits, kind, chosen, ChatTemplate.load(folder))
        tokenizer, lengths, refused, done = load_tokenizer(folder), list[int](), 0, 0
        while batch := list(islice(texts, BATCH_ROWS)):
            rendered = [text for text in batch if text is not None]
            encodings = tokenizer.encode_batch_fast(rendered, add_special_tokens=False)
            lengths += [len(encoding.ids) for encoding in encodings]
            refused += len(batch) - len(rendered)
            done += len(batch)
            reporter.progress(done, len(chosen), "rows")
    except (OSError, ValueError, TypeError) as error:
        return f"Tokens were not counted: the tokenizer of {base_model} cannot be used: {get_first_line(error)[:300]}"
    if not lengths:
        return (
            "Tokens were not counted: the sample contains no row that training uses and that the chat template of "
            f"{base_model} accepts."
        )
    max_length = config.max_length or find_covering_length(lengths)[1]
    return compute_statistics(
        lengths, max_length, model=base_model, rows=len(ids), sampled=len(chosen), refused_by_template=refused
    )


def compute_statistics(
    lengths: Sequence[int], max_length: int, *, model: str, rows: int, sampled: int, refused_by_template: int = 0
) -> TokenStatistics:
    """Compute the statistics from the lengths of the measured rows.

    Args:
        lengths: the lengths of the measured rows in tokens; at least one length.
        max_length: the training length in tokens.
        model: the base model.
        rows: the number of rows in the dataset.
        sampled: the number of rows in the sample.
        refused_by_template: the number of sampled rows that the chat template rejects.
    """
    ordered, tokens = sorted(lengths), sum(lengths)
    truncated = [min(length, max_length) for length in lengths]
    kept, sequences = sum(truncated), count_packed_sequences(truncated, max_length)
    histogram: Counter[int] = Counter()
    for length in ordered:
        power = 1 << max(length - 1, 0).bit_length()
        histogram[max_length if length <= max_length < power else power] += 1
    return TokenStatistics(
        model=model,
        max_length=max_length,
        rows=rows,
        sampled=sampled,
        measured=len(lengths),
        refused_by_template=refused_by_template,
        total=round(tokens * rows / sampled),
        mean=tokens / len(lengths),
        longest=ordered[-1],
        percentiles={p: ordered[max(math.ceil(p / 100 * len(ordered)), 1) - 1] for p in PERCENTILES},
        histogram=histogram,
        truncated_rows=sum(length > max_length for length in lengths) / len(lengths),
        truncated_tokens=(tokens - kept) / max(tokens, 1),
        sequences=sequences,
        packed_utilization=kept / (sequences * max_length),
        unpacked_utilization=kept / (len(lengths) * max_length),
    )


def count_packed_sequences(lengths: Sequence[int], capacity: int) -> int:
    """Return the number of sequences of `capacity` tokens for rows of these lengths, packed best-fit-decreasing.

    TRL packs the same way (Ding et al., Fewer Truncations Improve Language Modeling, 2024, arXiv 2404.10830). No
    length may exceed the capacity.
    """
    free: list[int] = []  # free tokens of each sequence, sorted
    for length in sorted(lengths, reverse=True):
        best = bisect_left(free, length)
        space = free.pop(best) if best < len(free) else capacity
        insort(free, space - length)
    return len(free)


def _render_texts(splits: Sequence[Path], kind: str, chosen: set[int], template: ChatTemplate) -> Iterator[str | None]:
    """Yield the rendered texts of the chosen rows (indices over all splits); None if the template rejects a row."""
    from pyarrow import parquet

    begin = 0
    for path in splits:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=BATCH_ROWS):
            wanted = [number for number in range(batch.num_rows) if begin + number in chosen]
            begin += batch.num_rows
            for row in batch.take(wanted).to_pylist() if wanted else []:
                if kind == "text":
                    yield row["text"] + template.end_token
                elif (messages := conversation_rows.extract_conversation(kind, row)) is not None:
                    yield template.render(messages, json.loads(row["tools"]) if row.get("tools") else None)
