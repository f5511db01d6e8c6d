"""Semantic duplicates: rows whose prompts and answers have nearly the same meaning, in other words.

Exact and near-duplicates are already rejected. As in SemDeDup (Abbas et al. 2023, arXiv 2303.09540), rows are compared by
the cosine similarity of their embeddings, of many rows within the clusters of k-means only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from components.common.models import model_loading, text_embeddings
from components.common.models.text_embeddings import TextEmbedder
from components.common.runtime.errors import ConfigurationError
from components.common.runtime.reporters import Reporter
from components.data_curation.config import DataCurationConfig
from components.data_curation.filters.reject_reasons import SEMANTIC_DUPLICATE, Rejection
from components.data_curation.prepared_chunks import PreparedRows
from components.data_curation.row_verdicts import RowVerdicts
from components.data_curation.rows import CONTENT_COLUMNS, Row

BLOCK_ROWS = 512  # rows that are compared at once with the kept rows
MAX_COMPARED_ROWS = 20_000  # above this number, only rows of the same cluster are compared
CLUSTER_ROWS = 5_000  # mean number of rows in a cluster
CLUSTERED_SAMPLE = 50_000  # rows that determine the clusters
CLUSTER_ITERATIONS = 10
WORD_WITH_DIGIT = re.compile(r"(?<!\w)\w*\d(?:[\w.,:/-]*\w)?")  # matches at the start of words only, in linear time


@dataclass(frozen=True)
class _RowTexts:
    """The kept rows: their indices, and the unit vectors of prompts and answers.

    `exact_words` must be equal in duplicates: the words with digits of the prompt or the plain text, and the label.
    """

    indices: list[int]
    prompts: np.ndarray
    answers: np.ndarray
    exact_words: list[list[str]]


def compute_model_digest(config: DataCurationConfig) -> str:
    """Return the digest of the embedding model; "" if semantic duplicates are not rejected.

    Raises:
        ConfigurationError: the model is not set, or not on this machine.
    """
    return "" if config.semantic_duplicates.threshold is None else _find_model(config).sha256


def fetch_model(config: DataCurationConfig, reporter: Reporter) -> None:
    """Fetch or convert the embedding model unless it is on this machine or not used.

    Raises:
        ConfigurationError: the model is not set, or not available.
    """
    source = config.semantic_duplicates.model or config.tokens.base_model
    if config.semantic_duplicates.threshold is not None and source:
        model_loading.resolve_base_model(source, reporter)


def _find_model(config: DataCurationConfig) -> model_loading.LocalBaseModel:
    source = config.semantic_duplicates.model or config.tokens.base_model
    if not source:
        raise ConfigurationError(
            "data_curation.semantic_duplicates.model is not set, and no base model is set",
            hint="Set data_curation.semantic_duplicates.model to the folder of a model, or set fine_tuning.base_model.",
        )
    model = model_loading.find_local_base_model(source)
    if model is None:
        raise ConfigurationError(
            f"data_curation.semantic_duplicates: the model {source} is not on this machine",
            hint="Import the model with `tuneline models import`, or set data_curation.semantic_duplicates.model to a "
            "folder.",
        )
    return model


def find_semantic_duplicates(
    prepared: PreparedRows, verdicts: RowVerdicts, config: DataCurationConfig, reporter: Reporter
) -> dict[int, Rejection]:
    """Return the rejections of kept rows whose meaning is nearly that of an earlier kept row, by index.

    Both the cosine similarity of the prompts and that of the answers must reach the threshold, and the words with digits in
    both prompts must be equal: embeddings hardly distinguish numbers. Rows of earlier revisions are not compared.

    Raises:
        ConfigurationError: the model is not on this machine, or cannot embed texts.
    """
    settings, threshold = config.semantic_duplicates, config.semantic_duplicates.threshold
    if threshold is None:
        return {}
    reporter.step("embedding the kept rows")
    folder = _find_model(config).path
    if settings.embeddings == "input":
        batches = (
            texts for _, prompts, answers, _ in _iterate_texts(prepared, verdicts) for texts in (prompts, answers)
        )
        embed = text_embeddings.build_input_embedder(folder, batches)
    else:
        embed = text_embeddings.build_encoder(folder)
    rows = _embed_rows(prepared, verdicts, embed, reporter)
    reporter.step("comparing the embeddings")
    rejections: dict[int, Rejection] = {}
    for cluster in _cluster_rows(rows):
        for row, kept, similarity in _find_duplicates(rows, cluster, threshold):
            detail = f"{verdicts.ids[rows.indices[kept]]}, cosine similarity {similarity:.3f}"
            rejections[rows.indices[row]] = SEMANTIC_DUPLICATE.reject(detail, similarity)
    return rejections


def _iterate_texts(
    prepared: PreparedRows, verdicts: RowVerdicts
) -> Iterator[tuple[list[int], list[str], list[str], list[str]]]:
    """Yield the indices, prompts, answers and labels of the kept rows, chunk by chunk. Plain text is an answer."""
    columns = CONTENT_COLUMNS[prepared.kind]
    for begin, table in prepared.iterate_tables(columns):
        indices = [row for row in range(begin, begin + len(table)) if verdicts.splits[row]]
        contents = table.take([row - begin for row in indices]).to_pylist()
        rows = [Row(prepared.kind, content, "", "", {}, "", 0) for content in contents]
        labels = [str(content.get("label", "")) for content in contents]
        yield indices, [row.prompt() for row in rows], ["\n".join(row.answers()) for row in rows], labels


def _embed_rows(prepared: PreparedRows, verdicts: RowVerdicts, embed: TextEmbedder, reporter: Reporter) -> _RowTexts:
    """Embed the kept rows. The vectors are in files of the chunks' folder, not in memory."""
    count = sum(map(bool, verdicts.splits))
    indices: list[int] = []
    exact_words: list[list[str]] = []
    vectors: list[np.memmap[Any, np.dtype[np.float32]]] = []
    for found, prompts, answers, labels in _iterate_texts(prepared, verdicts):
        begin = len(indices)
        indices += found
        subjects = answers if prepared.kind == "text" else prompts
        for text, label in zip(subjects, labels, strict=True):
            exact_words.append([label, *sorted(WORD_WITH_DIGIT.findall(text.lower()))])
        for part, texts in enumerate((prompts, answers)):
            embedded = embed(texts)
            if len(vectors) == part:
                path = prepared.folder / f"embeddings-{part}.bin"
                vectors.append(np.memmap(path, np.float32, "w+", shape=(max(1, count), embedded.shape[1])))
            vectors[part][begin : len(indices)] = embedded
        reporter.progress(len(indices), count, "rows")
    return _RowTexts(indices, vectors[0], vectors[1], exact_words)


def _cluster_rows(rows: _RowTexts) -> list[np.ndarray]:
    """Return the rows that are compared with one another: all rows, or clusters of prompt and answer by k-means.

    A larger cluster, such as that of equal rows, is divided into parts of MAX_COMPARED_ROWS.
    """
    count = len(rows.indices)
    if count <= MAX_COMPARED_ROWS:
        return [np.arange(count)]

    def read_vectors(numbers: np.ndarray | slice) -> np.ndarray:
        vectors: np.ndarray = np.concatenate([rows.prompts[numbers], rows.answers[numbers]], axis=1)
        return vectors

    generator = np.random.default_rng(0)
    sample = read_vectors(np.sort(generator.permutation(count)[:CLUSTERED_SAMPLE]))
    centres = sample[generator.permutation(len(sample))[: -(-count // CLUSTER_ROWS)]].copy()
    for _ in range(CLUSTER_ITERATIONS):
        nearest = (sample @ centres.T).argmax(1)
        for number in range(len(centres)):
            members = sample[nearest == number]
            if len(members):
                centre = members.mean(0)
                centres[number] = centre / max(float(np.linalg.norm(centre)), 1e-12)
    parts = [(read_vectors(slice(i, i + CLUSTER_ROWS)) @ centres.T).argmax(1) for i in range(0, count, CLUSTER_ROWS)]
    nearest = np.concatenate(parts)
    clusters = (np.flatnonzero(nearest == number) for number in range(len(centres)))
    return [
        cluster[begin : begin + MAX_COMPARED_ROWS]
        for cluster in clusters
        for begin in range(0, len(cluster), MAX_COMPARED_ROWS)
    ]


def _find_duplicates(rows: _RowTexts, cluster: np.ndarray, threshold: float) -> Iterator[tuple[int, int, float]]:
    """Yield (row, most similar kept row, similarity) for the rows that are duplicates of earlier rows of the cluster."""
    kept: list[int] = []
    for begin in range(0, len(cluster), BLOCK_ROWS):
        block = cluster[begin : begin + BLOCK_ROWS].tolist()
        earlier = [*kept, *block]
        similarity = _compare(rows.answers, block, earlier)
        is_without_prompt = ~np.any(rows.prompts[block], axis=1)[:, None] & ~np.any(rows.prompts[earlier], axis=1)[None]
        similarity = np.minimum(similarity, np.where(is_without_prompt, 1, _compare(rows.prompts, block, earlier)))
        dropped: set[int] = set()
        for number, row in enumerate(block):
            candidates = np.flatnonzero(similarity[number, : len(kept) + number] >= threshold)
            best = [
                (float(similarity[number, place]), -place)
                for place in candidates.tolist()
                if earlier[place] not in dropped and rows.exact_words[earlier[place]] == rows.exact_words[row]
            ]
            if best:
                value, place = max(best)
                dropped.add(row)
                yield row, earlier[-place], min(value, 1.0)
        kept += [row for row in block if row not in dropped]


def _compare(vectors: np.ndarray, block: list[int], earlier: list[int]) -> np.ndarray:
    """Return the cosine similarities (rows of the block x earlier rows)."""
    left = np.asarray(vectors[block])
    parts = [left @ np.asarray(vectors[earlier[i : i + CLUSTER_ROWS]]).T for i in range(0, len(earlier), CLUSTER_ROWS)]
    similarity: np.ndarray = np.concatenate(parts, axis=1)
    return similarity
