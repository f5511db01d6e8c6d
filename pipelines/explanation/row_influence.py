"""Training rows that made an answer more likely: a kernel of gradients, with a lexical baseline beside it.

The scores are an approximation of one training step around the published weights. They say which rows pushed this way,
not which rows caused the answer: only a retraining without them would show that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from components.common.artifacts.artifact_folder import Artifact
from components.common.models import model_loading
from components.common.models.model_loading import LoadableModel
from components.common.row_comparison.words import list_texts
from components.common.runtime.counts import format_count
from components.common.runtime.errors import InputError
from components.common.runtime.reporters import Reporter
from components.data_versioning import dataset_rows
from components.fine_tuning.objectives import IGNORED_LABEL, OBJECTIVES, Objective, RowMapping
from pipelines.explanation import lexical_overlap, row_gradients
from pipelines.explanation.explained_answer import ExplainedAnswer
from pipelines.explanation.lexical_overlap import WordWeights
from pipelines.explanation.row_gradients import GradientCost, GradientSketch

if TYPE_CHECKING:
    from components.fine_tuning.objectives import Example

Row = dict[str, Any]
RIDGE = 0.1  # λ relative to the mean diagonal; benchmarks/influence.py measures the scores
TRAIN = "train"


@dataclass(frozen=True)
class ScoredRow:
    """A training row with its scores.

    Attributes:
        row: The row of the dataset.
        score: Kernel score, without a unit; positive: the row pushed towards the answer.
        lexical: Lexical baseline, from 0 to 1.
        random_share: Share of the other random rows that score at least as high; None without other random rows.
        lexical_rank: Rank by the lexical baseline among all training rows, from 1.
    """

    row: Row
    score: float
    lexical: float
    random_share: float | None
    lexical_rank: int


@dataclass(frozen=True)
class RowInfluence:
    """The highest-scored training rows.

    Attributes:
        rows: Rows with the highest scores, highest first.
        method: Description of the method.
        candidates: Number of rows with a kernel score.
        total: Number of rows of the training split.
        random_rows: Number of random rows among the candidates.
        without_answer: Candidates without a token to learn, which have no score.
        agreement: Spearman's rank correlation of kernel and lexical scores over the random rows; None for fewer than 3.
        cost: Measured cost.
    """

    rows: list[ScoredRow]
    method: str
    candidates: int
    total: int
    random_rows: int
    without_answer: int
    agreement: float | None
    cost: GradientCost

    def describe_cost(self) -> dict[str, Any]:
        """Return counts and cost for JSON."""
        counts = {name: getattr(self, name) for name in ("candidates", "total", "random_rows", "without_answer")}
        return {**counts, **asdict(self.cost), "agreement": self.agreement}


def compute_kernel_scores(query: np.ndarray, rows: np.ndarray, ridge: float = RIDGE) -> np.ndarray:
    """Return g·Gᵀ(GGᵀ + λI)⁻¹ with λ = `ridge` × the mean diagonal of GGᵀ.

    The inverse divides what rows have in common between them, which the plain inner product credits to every row; see
    the empirical neural tangent kernel in TRAK (Park et al., arXiv 2303.14186).

    Args:
        query: Gradient g of the answer's loss, shape (length,).
        rows: Gradients G of the rows' losses, shape (rows, length).
        ridge: λ relative to the mean diagonal.

    Returns:
        Scores, shape (rows,).
    """
    from scipy import linalg

    matrix: np.ndarray = rows.astype(np.float64)
    kernel = matrix @ matrix.T
    mean = float(np.trace(kernel)) / len(kernel)
    kernel[np.diag_indices_from(kernel)] += ridge * (mean or 1.0)
    scores: np.ndarray = linalg.solve(kernel, matrix @ query.astype(np.float64), assume_a="pos")
    return scores


@dataclass(frozen=True)
class Candidates:
    """Rows to score: those with the highest lexical similarity, and random rows.

    Attributes:
        numbers: Numbers of the rows in the training split, ascending.
        random: The random rows among them.
        lexical: Lexical similarity of every row of the training split.
    """

    numbers: list[int]
    random: set[int]
    lexical: list[float]


def select_candidates(texts: Sequence[str], query: str, limit: int, seed: int) -> Candidates:
    """Select the rows to score. If all rows fit the limit, all are candidates and all are random.

    Args:
        texts: Text of every training row.
        query: Text of the question and the answer.
        limit: Maximum number of candidates: half similar rows, half random ones. 0: all rows.
        seed: Seed of the random rows, which do not depend on the question, so that their gradients are cached.
    """
    lexical = lexical_overlap.score_rows(WordWeights(texts), texts, query)
    if not limit or len(texts) <= limit:
        return Candidates(list(range(len(texts))), set(range(len(texts))), lexical)
    random_rows = set(np.random.default_rng(seed).permutation(len(texts))[: (limit + 1) // 2].tolist())
    by_similarity = lexical_overlap.select_highest(lexical, len(texts))
    similar = [number for number in by_similarity if number not in random_rows][: limit // 2]
    return Candidates(sorted(random_rows.union(similar)), random_rows, lexical)


def find_influential_rows(
    model: LoadableModel,
    loaded: Any,
    tokenizer: Any,
    answer: ExplainedAnswer,
    dataset: Artifact,
    *,
    limit: int,
    top: int,
    seed: int,
    state: Path,
    reporter: Reporter,
) -> RowInfluence:
    """Score training rows for an answer.

    Args:
        model: The model.
        loaded: The loaded model; its adapter is trainable.
        tokenizer: The model's tokenizer.
        answer: The answer.
        dataset: The dataset that the model was trained on.
        limit: Maximum number of rows to score; 0 for all.
        top: Number of rows to return.
        seed: Seed of the random rows.
        state: Folder of unfinished work, for the cache.
        reporter: Receives progress.

    Raises:
        ConfigurationError: the gradients exceed the free memory, or the architecture is not supported.
        InputError: the dataset's rows do not suit the objective, or no candidate has a token to learn.
    """
    recipe = model.artifact.manifest.config if model.artifact else {}
    objective = OBJECTIVES[recipe.get("objective", "sft")]
    mapping = objective.get_mapping(
        str(dataset.manifest.summary.get("rows_kind", "sft")), f"the dataset in {dataset.path} contains"
    )
    texts = ["\n".join(list_texts(row)) for row in _read_texts(dataset, mapping)]
    query = "\n".join([*(str(one.get("content") or "") for one in answer.question.messages), answer.text])
    candidates = select_candidates(texts, query, limit, seed)
    if len(candidates.numbers) < len(texts):
        reporter.note(
            f"scoring {len(candidates.numbers):,} of {len(texts):,} training rows: those with the most similar words, and "
            f"{format_count(len(candidates.random), 'random row')}. Other rows may have had the same effect; see --rows"
        )
    rows, encoded = _encode_rows(dataset, candidates, mapping, objective, tokenizer, recipe.get("max_length"))
    scored, sketch, cost = _score_examples(model, loaded, tokenizer, answer, dataset, encoded, state, reporter)
    return RowInfluence(
        rows=_rank_rows(scored, rows, candidates, top),
        method=_describe_method(model, sketch),
        candidates=len(rows),
        total=len(texts),
        random_rows=len(candidates.random),
        without_answer=len(rows) - len(encoded),
        agreement=_correlate(scored, candidates),
        cost=cost,
    )


def _score_examples(
    model: LoadableModel,
    loaded: Any,
    tokenizer: Any,
    answer: ExplainedAnswer,
    dataset: Artifact,
    encoded: dict[int, list[Example]],
    state: Path,
    reporter: Reporter,
) -> tuple[dict[int, float], GradientSketch, GradientCost]:
    """Return the kernel score of each row by its number, the gradients' projection and their cost."""
    parameters = row_gradients.select_parameters(loaded)
    longest = max(example["length"] for examples in encoded.values() for example in examples)
    memory = row_gradients.check_memory(loaded, parameters, len(encoded), longest)
    sketch = GradientSketch(loaded, list(parameters.values()))
    key = {
        "model": model.sha256,
        "dataset": dataset.sha256,
        "parameters": sorted(parameters),
        "arithmetic": model_loading.describe_arithmetic(),
    }
    gradients, cost = row_gradients.compute_row_gradients(
        sketch,
        encoded,
        key,
        state,
        memory,
        reporter,
    )
    scores = compute_kernel_scores(sketch.compute([_encode_query(answer, tokenizer)]), gradients)
    return dict(zip(encoded, scores.tolist(), strict=True)), sketch, cost


def _read_texts(dataset: Artifact, mapping: RowMapping) -> Iterator[Row]:
    columns = [name for name in mapping.columns if name not in ("tools", "label")]
    return dataset_rows.read_rows(dataset, TRAIN, columns)


def _encode_rows(
    dataset: Artifact,
    candidates: Candidates,
    mapping: RowMapping,
    objective: Objective,
    tokenizer: Any,
    max_length: int | None,
) -> tuple[dict[int, Row], dict[int, list[Example]]]:
    """Return the candidates, and the examples of those with a token to learn, by their number.

    Raises:
        InputError: no candidate has a token to learn.
    """
    length, numbers = int(max_length or tokenizer.model_max_length), set(candidates.numbers)
    rows, encoded = {}, {}
    for number, row in enumerate(dataset_rows.read_rows(dataset, TRAIN)):
        if number in numbers:
            rows[number] = row
            expanded = mapping.expand(row)
            examples = [example for one in expanded for example in objective.encode(tokenizer, one, length).examples]
            if examples:
                encoded[number] = examples
    if not encoded:
        raise InputError(
            f"no scored training row of {dataset.path} has a token to learn within {length:,} tokens",
            hint="Specify the dataset that the model was trained on.",
        )
    return rows, encoded


def _encode_query(answer: ExplainedAnswer, tokenizer: Any) -> Example:
    encoded = answer.encode(tokenizer, answer.question.messages)
    labels = [IGNORED_LABEL] * len(encoded.prompt_ids) + encoded.answer_ids
    return {"input_ids": [*encoded.prompt_ids, *encoded.answer_ids], "labels": labels, "length": len(labels)}


def _rank_rows(scored: dict[int, float], rows: dict[int, Row], candidates: Candidates, top: int) -> list[ScoredRow]:
    reference = np.sort([score for number, score in scored.items() if number in candidates.random])
    lexical = np.sort(candidates.lexical)
    found = []
    for number in sorted(scored, key=lambda one: (-scored[one], one))[:top]:
        score = scored[number]
        others = len(reference) - int(number in candidates.random)
        higher = len(reference) - int(np.searchsorted(reference, score, "left")) - int(number in candidates.random)
        similarity = candidates.lexical[number]
        rank = len(lexical) - int(np.searchsorted(lexical, similarity, "right")) + 1
        found.append(ScoredRow(rows[number], score, similarity, higher / others if others else None, rank))
    return found


def _correlate(scored: dict[int, float], candidates: Candidates) -> float | None:
    from scipy import stats

    pairs = [(score, candidates.lexical[number]) for number, score in scored.items() if number in candidates.random]
    if len(pairs) < 3 or any(len(set(values)) == 1 for values in zip(*pairs, strict=True)):
        return None
    return float(stats.spearmanr(*zip(*pairs, strict=True)).statistic)


def _describe_method(model: LoadableModel, sketch: GradientSketch) -> str:
    parts = "the adapter" if model.adapter else f"the matrices of the last {row_gradients.LAST_LAYERS} layers"
    projected = (
        f"; gradients projected from {sketch.size:,} to {sketch.length:,} dimensions"
        if sketch.length < sketch.size
        else ""
    )
    return f"ridge-regularized gradient kernel of {parts} at the published weights (λ = {RIDGE:g} × the mean of the diagonal){projected}"
