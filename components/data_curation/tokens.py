"""What a dataset comes to in tokens: how many, how long its rows are, what the training length cuts, and how well rows pack.

Rows are written by the model's chat template and counted by its tokenizer as training does (components/common/chat.py), but without
transformers and torch, which a curation image does not have.
"""

from __future__ import annotations

import json
import math
import os
import re
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from heapq import nsmallest
from pathlib import Path
from typing import Any

from components.common import chat, conversations, cores, models
from components.common.errors import TunelineError
from components.common.progress import Reporter

PERCENTILES = (50, 90, 99)
BATCH = 1000  # rows tokenised at once
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Marks around the assistant's text in some templates; transformers reads them, and what is written does not change.
GENERATION = re.compile(r"(\{%[-+]?)\s*(end)?generation\s*([-+]?%\})")


@dataclass(frozen=True)
class TokenStatistics:
    """What `looked_at` of `rows` rows come to. `total` is scaled up to all rows; all else is of the `measured` ones.

    Not measured are those that training does not learn (answers labelled bad), and `refused` ones, which the chat template cannot write.
    `histogram` has rows by the upper end of their class: powers of two, and `max_length`. `truncated` is the share of rows longer than
    `max_length`, `lost` the share of all tokens behind it. `filled` is the share of tokens that are no padding where rows are packed into
    sequences of `max_length` (`sequences` of them), `filled_unpacked` where each row is a sequence of its own, padded to that length.
    """

    model: str
    max_length: int
    rows: int
    looked_at: int
    measured: int
    refused: int
    total: int
    mean: float
    longest: int
    percentiles: dict[int, int]
    histogram: dict[int, int]
    truncated: float
    lost: float
    sequences: int
    filled: float
    filled_unpacked: float

    @property
    def estimated(self) -> bool:
        """Whether the figures come from a sample."""
        return self.looked_at < self.rows


def measure(
    splits: Sequence[Path], kind: str, base_model: str, max_length: int, *, sample: int, reporter: Reporter
) -> TokenStatistics | str:
    """The token statistics of a dataset's splits (Parquet), or why there are none, in a sentence.

    At most `sample` rows are tokenised: those whose ids have the smallest hashes, so the choice depends neither on their order nor on their
    number. `kind` is the kind of the rows; of preference and labelled rows what training learns is counted.
    """
    folder = _tokenizer_folder(base_model)
    if isinstance(folder, str):
        return folder
    rows = _ids(splits)
    chosen = set(nsmallest(sample, range(len(rows)), key=lambda place: (_chance(rows[place]), place)))
    reporter.step("counting tokens")
    try:
        lengths, refused = _lengths(_texts(splits, kind, chosen, Template.of(folder)), folder, len(chosen), reporter)
    except (OSError, ValueError, TypeError) as error:
        return f"The tokenizer of {base_model} cannot be used, so tokens were not counted: {_first_line(error)}"
    if not lengths:
        return "No row could be written by the model's chat template, so tokens were not counted."
    return statistics(lengths, max_length, model=base_model, rows=len(rows), looked_at=len(chosen), refused=refused)


def _tokenizer_folder(base_model: str) -> Path | str:
    try:
        folder = models.tokenizer_here(base_model) if base_model else None
    except TunelineError as error:
        return f"Tokens were not counted: {error.message}."
    if folder:
        return folder
    if not base_model:
        return "Tokens were not counted: no base model is named (data_curation.tokens.base_model)."
    return f"Tokens were not counted: the tokenizer.json of {base_model} is not on this machine."


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def statistics(lengths: Sequence[int], max_length: int, *, model: str, rows: int, looked_at: int, refused: int = 0) -> TokenStatistics:
    """The statistics of measured rows by their lengths in tokens, one at least."""
    ordered, tokens = sorted(lengths), sum(lengths)
    cut = [min(length, max_length) for length in lengths]
    sequences = packed(cut, max_length)
    histogram: dict[int, int] = {}
    for length in ordered:
        power = 1 << max(length - 1, 0).bit_length()
        top = max_length if length <= max_length < power else power
        histogram[top] = histogram.get(top, 0) + 1
    return TokenStatistics(
        model=model,
        max_length=max_length,
        rows=rows,
        looked_at=looked_at,
        measured=len(lengths),
        refused=refused,
        total=round(tokens * rows / looked_at),
        mean=tokens / len(lengths),
        longest=ordered[-1],
        percentiles={p: ordered[max(math.ceil(p / 100 * len(ordered)), 1) - 1] for p in PERCENTILES},
        histogram=histogram,
        truncated=sum(length > max_length for length in lengths) / len(lengths),
        lost=(tokens - sum(cut)) / max(tokens, 1),
        sequences=sequences,
        filled=sum(cut) / (sequences * max_length),
        filled_unpacked=sum(cut) / (len(cut) * max_length),
    )


def packed(lengths: Sequence[int], room: int) -> int:
    """How many sequences of `room` tokens hold rows of these lengths (none longer), packed best-fit-decreasing as TRL does.

    Ding et al., Fewer Truncations Improve Language Modeling, 2024 (arXiv 2404.10830): no row is cut in two to fill a sequence.
    """
    left: list[int] = []  # room left in each sequence, sorted
    for length in sorted(lengths, reverse=True):
        place = bisect_left(left, length)
        space = left.pop(place) if place < len(left) else room
        insort(left, space - length)
    return len(left)


def _ids(splits: Sequence[Path]) -> list[str]:
    from pyarrow import parquet

    return [row for path in splits for row in parquet.read_table(path, columns=["id"])["id"].to_pylist()]


def _chance(row: str) -> bytes:
    return blake2b(row.encode(errors="surrogatepass"), digest_size=8).digest()


def _texts(splits: Sequence[Path], kind: str, chosen: set[int], template: Template) -> Iterator[str | None]:
    """The chosen rows as training sees them, by their places over all splits; None for one that the template refuses."""
    from pyarrow import parquet

    place = -1
    for path in splits:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=BATCH):
            wanted = [number for number in range(batch.num_rows) if place + 1 + number in chosen]
            place += batch.num_rows
            for row in batch.take(wanted).to_pylist() if wanted else []:
                if kind == "text":
                    yield row["text"] + template.end
                elif (messages := conversations.of(kind, row)) is not None:
                    yield template.write(messages, json.loads(row["tools"]) if row.get("tools") else None)


def _lengths(texts: Iterator[str | None], folder: Path, total: int, reporter: Reporter) -> tuple[list[int], int]:
    """Tokens of each text, and how many texts there were not."""
    tokenizer, lengths, refused = _tokenizer(folder), [], 0
    done = 0
    for batch in _batches(texts):
        written = [text for text in batch if text is not None]
        refused += len(batch) - len(written)
        lengths += [len(encoding.ids) for encoding in tokenizer.encode_batch_fast(written, add_special_tokens=False)]
        done += len(batch)
        reporter.progress(done, total, "rows")
    return lengths, refused


def _batches(texts: Iterator[str | None]) -> Iterator[list[str | None]]:
    batch: list[str | None] = []
    for text in texts:
        batch.append(text)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _tokenizer(folder: Path) -> Any:
    """The tokenizer, with as many threads as this process may use. What it would cut or pad is counted whole."""
    threads = cores.threads()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true" if threads > 1 else "false")
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers has no exception of its own
        raise ValueError(f"tokenizer.json cannot be read: {_first_line(error)}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@dataclass(frozen=True)
class Template:
    """A model's chat template: `write` gives a conversation as one text, `end` is the token that ends a sequence."""

    templates: Mapping[str, Callable[..., str]]
    tokens: Mapping[str, str]

    @property
    def end(self) -> str:
        """The end-of-sequence token, "" where the tokenizer names none."""
        return self.tokens.get("eos_token", "")

    @staticmethod
    def of(folder: Path) -> Template:
        """The template of a model's folder, or the plain one where it has none. Raises ValueError for one that is no template."""
        settings = _settings(folder / "tokenizer_config.json")
        tokens = {name: text for name in SPECIAL if (text := _token(settings.get(name)))}
        return Template({name: _compiled(source) for name, source in _sources(folder, settings).items()}, tokens)

    def write(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> str | None:
        """The conversation as the template writes it; None where the template refuses it, as it would in training."""
        from jinja2 import TemplateError

        write = self.templates.get("tool_use" if tools else "default") or self.templates["default"]
        try:
            return write(messages=list(messages), tools=tools, documents=None, add_generation_prompt=False, **self.tokens)
        except (TemplateError, TypeError):
            return None


def _settings(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


def _token(value: Any) -> str | None:
    """A special token, which is named by its text or by an object with it."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def _sources(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name: from chat_template.jinja or the settings, as transformers finds them; at least the one named "default"."""
    named = settings.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        named = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if isinstance(named, list):
        found = {one["name"]: one["template"] for one in named}
    else:
        found = {"default": named} if isinstance(named, str) and named else {}
    return {"default": chat.PLAIN_TEMPLATE} | found


def _compiled(source: str) -> Callable[..., str]:
    """The template in a sandbox, with what transformers gives to templates. Raises ValueError where it is no template."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    sandbox.filters["tojson"] = _to_json
    sandbox.globals["raise_exception"] = _refuse
    sandbox.globals["strftime_now"] = _now
    try:
        return sandbox.from_string(GENERATION.sub(_without_mark, source)).render
    except jinja2.TemplateError as error:
        raise ValueError(f"its chat template is none: {error}") from None


def _without_mark(mark: re.Match[str]) -> str:
    return f"{mark[1]} {'endif' if mark[2] else 'if true'} {mark[3]}"


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    from datetime import datetime

    return datetime.now().astimezone().strftime(form)
