"""Kernel scores, their gradients and cache, the lexical baseline, and the choice of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from components.common.artifacts.artifact_folder import Artifact
from components.common.models.model_loading import LoadableModel
from components.common.runtime.errors import ConfigurationError
from components.common.runtime.reporters import SilentReporter
from components.evaluation.transformers_engine import TransformersEngine
from pipelines.explanation import row_gradients, row_influence
from pipelines.explanation.explained_answer import Question, build_answer
from pipelines.explanation.lexical_overlap import WordWeights, score_rows
from pipelines.explanation.row_gradients import GradientSketch
from pipelines.explanation.row_influence import RowInfluence, compute_kernel_scores, select_candidates
from tests.pipelines.explanation.conftest import PLANTED, PLANTED_ID, build_model

REPORTER = SilentReporter()


def test_kernel_scores_solve_the_ridge_system() -> None:
    generator = np.random.default_rng(0)
    rows, query = generator.standard_normal((7, 40)).astype(np.float32), generator.standard_normal(40)
    kernel = rows.astype(float) @ rows.T
    ridge = 0.1 * np.mean(np.diag(kernel))
    expected = (query @ rows.T) @ np.linalg.inv(kernel + ridge * np.eye(7))
    np.testing.assert_allclose(compute_kernel_scores(query.astype(np.float32), rows), expected, rtol=1e-5)
    # Copies of a row share its score, which the inner product would give to each of them.
    copies = compute_kernel_scores(rows[0], np.stack([rows[0], rows[0], rows[1]]))
    assert copies[0] == pytest.approx(copies[1])
    assert copies[0] < 0.6


def find_rows(
    model: LoadableModel, loaded: Any, engine: TransformersEngine, dataset: Artifact, state: Path, limit: int = 0
) -> RowInfluence:
    answer = build_answer(engine, Question([{"role": "user", "content": PLANTED[0]}]), PLANTED[1], 8, REPORTER)
    return row_influence.find_influential_rows(
        model,
        loaded,
        engine.tokenizer,
        answer,
        dataset,
        limit=limit,
        top=5,
        seed=0,
        state=state,
        reporter=REPORTER,
    )


def test_planted_row_is_found_and_gradients_are_cached(
    model: LoadableModel, loaded: Any, engine: TransformersEngine, dataset: Artifact, tmp_path: Path
) -> None:
    found = find_rows(model, loaded, engine, dataset, tmp_path)
    first = found.rows[0]
    assert first.row["id"] == PLANTED_ID
    assert (first.random_share, first.lexical_rank) == (0.0, 1)
    assert first.lexical == pytest.approx(1.0)
    assert found.rows[1].score < first.score / 2
    assert (found.candidates, found.total, found.cost.computed, found.cost.cached) == (12, 12, 12, 0)
    again = find_rows(model, loaded, engine, dataset, tmp_path)
    assert (again.cost.computed, again.cost.cached) == (0, 12)
    assert [one.score for one in again.rows] == [one.score for one in found.rows]


def test_interrupted_gradients_continue_and_damaged_files_are_replaced(
    model: LoadableModel, loaded: Any, engine: TransformersEngine, dataset: Artifact, tmp_path: Path
) -> None:
    limited = find_rows(model, loaded, engine, dataset, tmp_path, limit=4)
    whole = find_rows(model, loaded, engine, dataset, tmp_path)
    assert limited.candidates == limited.cost.computed == 4 == whole.cost.cached
    files = sorted(tmp_path.glob("explanation/*/rows-*.npy"))
    files[0].write_bytes(files[0].read_bytes()[:-100])
    again = find_rows(model, loaded, engine, dataset, tmp_path)
    assert 0 < again.cost.computed < 12
    assert [one.score for one in again.rows] == [one.score for one in whole.rows]


def test_gradients_equal_those_of_backward_and_projections_keep_their_inner_products(
    model: LoadableModel, loaded: Any, engine: TransformersEngine
) -> None:
    parameters = list(row_gradients.select_parameters(loaded).values())
    answer = build_answer(engine, Question([{"role": "user", "content": PLANTED[0]}]), PLANTED[1], 8, REPORTER)
    example = row_influence._encode_query(answer, engine.tokenizer)
    exact = GradientSketch(loaded, parameters, 1 << 40).compute([example])
    labels = [-100 if label < 0 else label for label in example["labels"]]
    import torch

    loaded.zero_grad()
    loaded(input_ids=torch.tensor([example["input_ids"]]), labels=torch.tensor([labels])).loss.backward()
    expected = np.concatenate([value.grad.flatten().numpy() for value in parameters])
    loaded.zero_grad()
    np.testing.assert_allclose(exact, expected, atol=1e-5 * np.abs(expected).max())
    halves = [{**example, "labels": [*labels[:cut], *[-100] * (len(labels) - cut)]} for cut in (0, len(labels))]
    np.testing.assert_allclose(GradientSketch(loaded, parameters, 1 << 40).compute(halves), exact, atol=1e-6)
    projected = GradientSketch(loaded, parameters, 2048).compute([example])
    assert projected.shape == (2048,)
    assert np.dot(projected, projected) == pytest.approx(np.dot(exact, exact), rel=0.15)


def test_full_weights_are_represented_by_their_last_layers(dataset: Artifact, tmp_path: Path) -> None:
    from components.common.models import model_loading

    full = build_model(tmp_path, dataset, peft_type="")
    loaded = model_loading.load_model(full, trainable=True).eval()
    engine = TransformersEngine(loaded, model_loading.load_tokenizer(full.tokenizer), 512)
    found = find_rows(full, loaded, engine, dataset, tmp_path / "state")
    assert found.rows[0].row["id"] == PLANTED_ID
    assert "the matrices of the last 2 layers" in found.method
    trained = {name for name, value in loaded.named_parameters() if value.requires_grad}
    assert trained == {name for name, value in loaded.named_parameters() if value.dim() == 2 and ".layers." in name}


def test_models_without_row_gradients_are_refused(dataset: Artifact, tmp_path: Path) -> None:
    virtual = build_model(tmp_path / "virtual", dataset, peft_type="PROMPT_TUNING")
    with pytest.raises(ConfigurationError, match="the adaptation PROMPT_TUNING are not supported"):
        row_gradients.check_support(virtual)
    preferred = build_model(tmp_path / "preferred", dataset, objective="dpo")
    with pytest.raises(ConfigurationError, match="the objective dpo are not supported; expected sft or text"):
        row_gradients.check_support(preferred)


def test_gradients_beyond_the_free_memory_are_refused(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = row_gradients.select_parameters(loaded)
    needed = row_gradients.check_memory(loaded, parameters, 100, 64)
    monkeypatch.setattr(row_gradients.compute_devices, "get_free_memory_bytes", lambda _: 1_000_000)
    with pytest.raises(ConfigurationError, match=r"the gradients of 100 rows need an estimated 0\.\d GB"):
        row_gradients.check_memory(loaded, parameters, 100, 64)
    assert needed > row_gradients.resource_formulas.PROCESS_BYTES


def test_rare_shared_words_weigh_more_than_common_ones() -> None:
    texts = ["the file opens", "the zebra opens", "the file closes", "the file ends"]
    scores = score_rows(WordWeights(texts), texts, "Where is the zebra?")
    assert scores[1] == max(scores) > 2 * scores[0] > 0
    assert score_rows(WordWeights(texts), texts, "unknown") == [0.0] * 4


def test_candidates_are_similar_rows_and_random_rows_that_do_not_depend_on_the_question() -> None:
    texts = [f"alpha {n}" if n % 10 else f"beta {n}" for n in range(100)]
    first, second = (select_candidates(texts, query, 20, seed=3) for query in ("beta", "alpha 1"))
    assert set(range(0, 100, 10)) <= set(first.numbers)
    assert len(first.numbers) == 20
    assert first.random == second.random
    assert len(first.random) == 10
    assert first.numbers == sorted(first.numbers)
    assert select_candidates(texts, "beta", 0, seed=3).numbers == list(range(100))
