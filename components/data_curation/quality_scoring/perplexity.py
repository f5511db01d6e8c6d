"""Perplexity of rows under a causal language model: the exponential of the mean negative log-likelihood per token.

The first token is predicted from the start token. Rows are batched by length; padding does not affect their scores.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from components.common.artifacts.artifact_folder import ArtifactInput
from components.common.models import model_loading
from components.common.runtime.counts import format_count
from components.common.runtime.errors import EngineMissingError
from components.common.runtime.reporters import Reporter
from components.data_curation.quality_scoring.scorer_interface import KeptRows, ScorerResult
from components.data_curation.rows import extract_text
from components.data_curation.score_settings import PerplexitySettings

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MODEL_KIND = "scoring_model"  # kind of the input that is the model
KEY = "data_curation.quality_scores.perplexity"
MAX_CHARACTERS_PER_TOKEN = 100  # bounds the text that is tokenized for max_tokens
ESTIMATE_ROWS = 16
MIN_ESTIMATED_ROWS = 200  # below, an estimate takes longer than it helps
MAX_SCORE = 1e9  # of a finite loss; larger values are stored as this value


@dataclass
class PerplexityScorer:
    """A scorer of rows by perplexity. The model is loaded when rows are scored.

    Attributes:
        settings: the settings of the scorer.
        model: the model, whose digest was verified.
        maximum: the highest score of a kept row; None for no limit.
    """

    settings: PerplexitySettings
    model: model_loading.LocalBaseModel
    maximum: float | None
    minimum: float | None = None
    name: str = "perplexity"
    bin_edges: Sequence[float] = tuple(1 << power for power in range(31))

    @property
    def description(self) -> str:
        """The meaning of the score."""
        return f"perplexity under {self.model.name}; lower values mean more fluent text"

    @staticmethod
    def open(settings: PerplexitySettings, sha256: str, reporter: Reporter) -> PerplexityScorer:
        """Return the scorer after checking that its model is available.

        Args:
            settings: the settings of the scorer.
            sha256: the required digest of the model's files; "" to accept every digest.
            reporter: receives progress.

        Raises:
            ConfigurationError: the model is not available.
            EngineMissingError: PyTorch is not installed.
            ArtifactDamagedError: the model has another digest.
        """
        check_installed()
        base = model_loading.resolve_base_model(settings.model, reporter, sha256 or None)
        return PerplexityScorer(settings, base, settings.max_score)

    def score(self, rows: KeptRows, reporter: Reporter) -> ScorerResult:
        """Return the perplexity of each row; rows without a token have no score."""
        import numpy as np

        device = model_loading.prepare_torch(0)
        weights = model_loading.LoadableModel(self.model.sha256, self.model, self.model.path, None, None)
        model = model_loading.load_model(weights)
        tokenizer = model_loading.load_tokenizer(self.model.path)
        scores: np.ndarray = np.full(len(rows.is_kept), np.nan)
        limit, truncated, done, started = self._find_token_limit(model), 0, 0, 0.0
        for indices, contents in rows.iterate_contents():
            texts = [extract_text(content)[: (limit + 1) * MAX_CHARACTERS_PER_TOKEN] for content in contents]
            encoded = [encode_text(tokenizer, text) for text in texts]
            truncated += sum(len(tokens) > limit + 1 for tokens in encoded)
            encoded = [tokens[: limit + 1] for tokens in encoded]
            if not started:
                self._report_estimate(model, encoded, rows.count, reporter)
                started = time.monotonic()
            for numbers in group_by_length(encoded, self.settings.batch_tokens):
                for number, loss in zip(numbers, compute_losses(model, [encoded[n] for n in numbers]), strict=True):
                    scores[indices[number]] = min(math.exp(min(loss, 700)), MAX_SCORE)
                done += len(numbers)
                reporter.progress(done, rows.count, "rows")
        rate = done / max(time.monotonic() - started, 1e-6)
        reporter.note(f"perplexity: {rate:,.1f} rows per second on {device}")
        return ScorerResult(scores, {"truncated_rows": truncated})

    def _find_token_limit(self, model: PreTrainedModel) -> int:
        """Return the maximum number of scored tokens of a row, within the context of the model."""
        context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        return min(self.settings.max_tokens, context - 1) if context else self.settings.max_tokens

    def _report_estimate(
        self, model: PreTrainedModel, encoded: Sequence[Sequence[int]], total: int, reporter: Reporter
    ) -> None:
        """Report the estimated duration, measured on a few rows of the first chunk."""
        if total < MIN_ESTIMATED_ROWS:
            return
        sample = [list(tokens) for tokens in encoded[:: max(1, len(encoded) // ESTIMATE_ROWS)][:ESTIMATE_ROWS]]
        compute_losses(model, sample[:1])  # the first pass also allocates memory
        begin = time.monotonic()
        for numbers in group_by_length(sample, self.settings.batch_tokens):
            compute_losses(model, [sample[number] for number in numbers])
        rate = len(sample) / max(time.monotonic() - begin, 1e-6)
        seconds = total / rate
        duration = f"{seconds / 60:,.0f} minutes" if seconds > 120 else format_count(round(seconds), "second")
        reporter.note(f"perplexity: {total:,} rows take about {duration} ({rate:,.1f} rows per second)")


def check_installed() -> None:
    """Raise EngineMissingError if PyTorch or transformers is not installed."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise EngineMissingError(
            f"{KEY}.enabled is true, but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed",
            hint="Run: pip install 'tuneline[models]'. On a cluster, set images.curation to the evaluation image, which "
            f"contains PyTorch; or set {KEY}.enabled to false.",
        )


def list_model_input(settings: PerplexitySettings, reporter: Reporter, *, fetch: bool) -> ArtifactInput:
    """Return the model as an input of the dataset.

    Args:
        settings: the settings of the scorer.
        reporter: receives progress.
        fetch: whether to fetch or convert a model that is not on this machine. Otherwise its digest is "".

    Raises:
        ConfigurationError: the model is not available.
        EngineMissingError: PyTorch is not installed.
    """
    check_installed()
    with model_loading.replace_error_key(f"{KEY}.model"):
        base = (
            model_loading.resolve_base_model(settings.model, reporter)
            if fetch
            else model_loading.find_local_base_model(settings.model)
        )
    return ArtifactInput(
        kind=MODEL_KIND, content_sha256=base.sha256 if base else "", uri=base.name if base else settings.model
    )


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the start token and the tokens of a text. Without a start token, the first token is not scored."""
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    tokens: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return tokens if start is None else [start, *tokens]


def group_by_length(encoded: Sequence[Sequence[int]], batch_tokens: int) -> Iterator[list[int]]:
    """Yield the indices of sequences with a token to score, in batches of similar length.

    A batch has at most `batch_tokens` tokens with padding, or one sequence.
    """
    batch: list[int] = []
    for number in sorted(range(len(encoded)), key=lambda one: (len(encoded[one]), one)):
        length = len(encoded[number])
        if length < 2:
            continue
        if batch and length * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def compute_losses(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> list[float]:
    """Return the mean negative log-likelihood in nats of each sequence's tokens after the first.

    Sequences are padded on the right: a causal model computes a token only from the tokens before it.
    """
    import torch
    from torch.nn.functional import cross_entropy

    longest = max(map(len, sequences))
    tokens = torch.tensor([[*one, *[0] * (longest - len(one))] for one in sequences], device=model.device)
    lengths = [len(one) for one in sequences]
    mask = torch.arange(longest, device=model.device)[None] < torch.tensor(lengths, device=model.device)[:, None]
    with torch.inference_mode():
        logits: torch.Tensor = _forward(model, tokens, mask)
        return [
            float(cross_entropy(logits[row, : length - 1].float(), tokens[row, 1:length]))
            for row, length in enumerate(lengths)
        ]


def _forward(model: Any, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=tokens, attention_mask=mask.long(), use_cache=False).logits
    return logits
