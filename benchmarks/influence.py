"""Benchmark of explanations: row scores against retraining on random halves, and word scores against deletions.

    python -m benchmarks.influence --markdown docs/reference/benchmarks-explanation.md

The linear datamodeling score (LDS; Park et al., TRAK, arXiv 2303.14186, section 4) is Spearman's rank correlation, over the retrainings,
between the answer's log-probability and the sum of the scores of the rows that a retraining saw.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.influence_facts import CASES, QUESTIONS, FactCase
from components.common.models import chat_templates, model_loading
from components.common.models.model_loading import LoadableModel
from components.common.runtime.reporters import SilentReporter
from components.evaluation.transformers_engine import TransformersEngine
from components.fine_tuning.objectives import IGNORED_LABEL, Example
from pipelines.explanation import explained_answer, row_gradients, row_influence
from pipelines.explanation.explained_answer import Question
from pipelines.explanation.lexical_overlap import WordWeights, score_rows
from pipelines.explanation.row_gradients import GradientSketch
from pipelines.explanation.word_attribution import DeletionEffect, attribute_words

EPOCHS, BATCH_ROWS, LEARNING_RATE = 5, 4, 5e-4
RANK, LAST_LAYERS = 4, 4
ANSWER_TOKENS, RANDOM_SCORES = 16, 20
WHOLE = 1 << 62  # length of a gradient without projection
KERNEL, EXACT_KERNEL, SUMMED_KERNEL = "gradient kernel (tuneline)", "without projection", "with summed losses"
LAST_LAYER_KERNEL = "with gradients of the last layers' matrices"
COSINE, DOT_PRODUCT, LEXICAL, RANDOM = "gradient cosine", "gradient dot product", "shared words", "random"


@dataclass(frozen=True)
class CaseResult:
    """Results of a set of facts.

    Attributes:
        case: The facts.
        lds: LDS of each question by method.
        top_share: By method, the mean share of the fact's own two rows in the two highest-scored rows.
        loss_before: Loss of the questions' answers in the base model, nats per token.
        loss_after: The same after training on all rows.
        gradient_seconds: CPU seconds of all row gradients.
        training_seconds: CPU seconds of the training on all rows.
    """

    case: FactCase
    lds: dict[str, np.ndarray]
    top_share: dict[str, float]
    loss_before: float
    loss_after: float
    gradient_seconds: float
    training_seconds: float


@dataclass(frozen=True)
class WordResult:
    """Deletion figures of one question, and the CPU seconds of its explanation; of the last question also without shared prefixes."""

    question: str
    answer: str
    top_words: list[str]
    effects: list[DeletionEffect]
    seconds: float
    unshared_seconds: float | None


class Trainer:
    """Trains a low-rank adapter on the last layers of the embedded model, from equal initial values each time.

    The layers below are frozen, so that their output for a row is computed once.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.tokenizer, self._model = tokenizer, model
        self._inputs: dict[tuple[int, ...], Any] = {}
        self._layers = model.model.layers
        self._first = len(self._layers) - LAST_LAYERS
        self.model = model

    def encode(self, question: str, answer: str) -> Example:
        """Return the labelled tokens of a conversation, and remember the input of the trained layers."""
        import torch

        turns = [
            ("system", "Answer."),
            ("user", question),
            ("assistant", answer),
        ]  # shorter than the default system prompt
        messages = [{"role": role, "content": text} for role, text in turns]
        encoded = chat_templates.encode_conversation(self.tokenizer, messages, max_length=128)
        pairs = zip(encoded.input_ids, encoded.answer_mask, strict=True)
        labels = [token if is_answer else IGNORED_LABEL for token, is_answer in pairs]
        self._model.model.layers = self._layers
        with torch.no_grad():
            states = self._model.model(input_ids=torch.tensor([encoded.input_ids]), output_hidden_states=True)
        self._inputs[tuple(encoded.input_ids)] = states.hidden_states[self._first][0]
        self._model.model.layers = self._layers[self._first :]
        return {"input_ids": encoded.input_ids, "labels": labels, "length": len(labels)}

    def train(self, examples: Sequence[Example], seed: int) -> Any:
        """Return the adapted model after EPOCHS over the examples; the seed determines their order."""
        import peft
        import torch

        torch.manual_seed(0)
        settings = peft.LoraConfig(
            r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type=peft.TaskType.CAUSAL_LM
        )
        adapted = peft.get_peft_model(self.model, settings)
        trained = [value for value in adapted.parameters() if value.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
        order = np.random.default_rng(seed)
        for _ in range(EPOCHS):
            shuffled = order.permutation(len(examples))
            for start in range(0, len(examples), BATCH_ROWS):
                batch = [examples[number] for number in shuffled[start : start + BATCH_ROWS]]
                optimizer.zero_grad()
                self._compute_loss(adapted, batch).backward()
                optimizer.step()
        return adapted.eval()

    def _compute_loss(self, model: Any, batch: Sequence[Example]) -> Any:
        """Return the mean loss of the labelled tokens of all examples. Right padding is behind every label."""
        import torch
        from torch.nn.functional import cross_entropy

        inner = model.get_base_model() if hasattr(model, "peft_config") else model
        width = max(example["length"] for example in batch)
        inputs = torch.zeros((len(batch), width, inner.config.hidden_size))
        labels = torch.full((len(batch), width), IGNORED_LABEL)
        for row, example in enumerate(batch):
            inputs[row, : example["length"]] = self._inputs[tuple(example["input_ids"])]
            labels[row, : example["length"]] = torch.tensor(example["labels"])
        states = inner.model(inputs_embeds=inputs, use_cache=False).last_hidden_state
        is_learned = labels[:, 1:] != IGNORED_LABEL
        return cross_entropy(inner.lm_head(states[:, :-1][is_learned]), labels[:, 1:][is_learned])

    def measure(self, model: Any, examples: Sequence[Example]) -> np.ndarray:
        """Return the mean log-probability per answer token of each example."""
        import torch

        with torch.inference_mode():
            losses = [-float(self._compute_loss(model, [example])) for example in examples]
        return np.array(losses)

    def read_inputs(self, model: Any) -> Any:
        """Return a module that takes the tokens of an encoded row, as the whole model does, for their gradients."""
        import torch

        inputs = self._inputs

        class LastLayers(torch.nn.Module):
            device = torch.device("cpu")

            def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
                embedded = inputs[tuple(input_ids[0].tolist())][None]
                return model(inputs_embeds=embedded, use_cache=use_cache)

        return LastLayers()


def measure_case(trainer: Trainer, case: FactCase, retrainings: int) -> CaseResult:
    """Score the rows of the facts for each question, retrain on random halves, and compare."""
    rows = [trainer.encode(question, answer) for question, answer in case.list_rows()]
    queries = [trainer.encode(question, answer) for question, answer in case.list_questions()]
    before = -trainer.measure(trainer.model, queries).mean()
    start = time.process_time()
    adapted = trainer.train(rows, seed=0)
    training_seconds = time.process_time() - start
    after = -trainer.measure(adapted, queries).mean()
    start = time.process_time()
    gradients = _compute_gradients(trainer, adapted, rows, WHOLE)
    gradient_seconds = time.process_time() - start
    scores = _score(trainer, adapted, case, rows, queries, gradients)
    trainer.model = adapted.unload()
    halves, truths = [], []
    generator = np.random.default_rng(1)
    for number in range(retrainings):
        half = np.sort(generator.permutation(len(rows))[: len(rows) // 2])
        retrained = trainer.train([rows[one] for one in half], seed=number + 1)
        halves.append(half)
        truths.append(trainer.measure(retrained, queries))
        trainer.model = retrained.unload()
        print(f"{case.name}: retraining {number + 1} of {retrainings}", flush=True)
    lds = {method: compute_lds(values, halves, np.array(truths)) for method, values in scores.items()}
    own = [set(case.list_own_rows(number)) for number in range(len(queries))]
    shares = {method: _measure_top_share(values, own) for method, values in scores.items()}
    return CaseResult(case, lds, shares, float(before), float(after), gradient_seconds, training_seconds)


def compute_lds(scores: np.ndarray, halves: Sequence[np.ndarray], truths: np.ndarray) -> np.ndarray:
    """Return the LDS of each question.

    Args:
        scores: Scores of the rows, shape (questions, rows), or (repetitions, questions, rows), of which the mean is taken.
        halves: Row numbers of each retraining.
        truths: Log-probability of each question's answer after each retraining, shape (retrainings, questions).
    """
    from scipy import stats

    if scores.ndim == 3:
        return np.asarray(np.mean([compute_lds(one, halves, truths) for one in scores], axis=0))
    predicted = np.array([[own[half].sum() for half in halves] for own in scores])
    pairs = zip(predicted, truths.T, strict=True)
    return np.array([stats.spearmanr(one, truth).statistic for one, truth in pairs])


def _measure_top_share(scores: np.ndarray, own: Sequence[set[int]]) -> float:
    tables = scores if scores.ndim == 3 else scores[None]
    found = [
        len(own[number].intersection(np.argsort(-one, kind="stable")[: len(own[number])].tolist())) / len(own[number])
        for table in tables
        for number, one in enumerate(table)
    ]
    return float(np.mean(found))


def _compute_gradients(trainer: Trainer, model: Any, examples: Sequence[Example], length: int) -> np.ndarray:
    parameters = row_gradients.select_parameters(model)
    sketch = GradientSketch(trainer.read_inputs(model), list(parameters.values()), length)
    return np.stack([sketch.compute([one]) for one in examples])


def _score(
    trainer: Trainer,
    adapted: Any,
    case: FactCase,
    rows: Sequence[Example],
    queries: Sequence[Example],
    exact: np.ndarray,
) -> dict[str, np.ndarray]:
    """Return the scores of the rows for each question by method, shape (questions, rows).

    `exact` are the gradients of the rows without a projection, shape (rows, numbers).
    """
    import torch

    def apply_kernel(own: np.ndarray, query: np.ndarray) -> np.ndarray:
        return np.stack([row_influence.compute_kernel_scores(one, own) for one in query])

    exact_queries = _compute_gradients(trainer, adapted, queries, WHOLE)
    sketch = GradientSketch(adapted, list(row_gradients.select_parameters(adapted).values()))
    gradients, query_gradients = (
        np.stack([sketch.project(torch.from_numpy(one)).numpy() for one in part]) for part in (exact, exact_queries)
    )
    counts = np.array([[sum(label != IGNORED_LABEL for label in row["labels"])] for row in rows])
    texts = ["\n".join(pair) for pair in case.list_rows()]
    weights = WordWeights(texts)
    dots = query_gradients @ gradients.T
    norms = np.linalg.norm(gradients, axis=1)[None] * np.linalg.norm(query_gradients, axis=1)[:, None]
    scores = {
        KERNEL: apply_kernel(gradients, query_gradients),
        EXACT_KERNEL: apply_kernel(exact, exact_queries),
        SUMMED_KERNEL: apply_kernel(gradients * counts, query_gradients),
        COSINE: dots / norms,
        DOT_PRODUCT: dots,
        LEXICAL: np.array([score_rows(weights, texts, "\n".join(pair)) for pair in case.list_questions()]),
        RANDOM: np.random.default_rng(2).standard_normal((RANDOM_SCORES, len(queries), len(rows))),
    }
    merged = copy.deepcopy(adapted).merge_and_unload()
    parts = (_compute_gradients(trainer, merged, part, row_gradients.SKETCH_LENGTH) for part in (rows, queries))
    scores[LAST_LAYER_KERNEL] = apply_kernel(*parts)
    return scores


def measure_words(model: Any, tokenizer: Any) -> Iterator[WordResult]:
    """Explain the embedded model's greedy answers to QUESTIONS by leaving words out."""
    reporter = SilentReporter()
    engine = TransformersEngine(model, tokenizer, 2048)
    for text in QUESTIONS:
        question = Question([{"role": "user", "content": text}])
        answer = explained_answer.build_answer(engine, question, None, ANSWER_TOKENS, reporter)
        seconds, words = _time(lambda a=answer: attribute_words(engine, model, a, "word", 0, reporter))
        unshared_seconds = None
        if text == QUESTIONS[-1]:
            engine._branching = False  # every prompt is computed whole
            unshared_seconds, _ = _time(lambda a=answer: attribute_words(engine, model, a, "word", 0, reporter))
        ranked = sorted(zip(words.scores, (unit.text for unit in words.units), strict=True), reverse=True)
        yield WordResult(text, answer.text, [word for _, word in ranked[:2]], words.effects, seconds, unshared_seconds)


def _time(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = call()
    return time.process_time() - start, result


def main() -> None:
    """Measure, and write the page."""
    from benchmarks import influence_page
    from benchmarks.machine import circumstances

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", type=Path, required=True)
    parser.add_argument(
        "--retrainings", type=int, default=16, help="Number of retrainings on random halves of the rows."
    )
    arguments = parser.parse_args()
    facts = circumstances("benchmarks.influence")
    model_loading.prepare_torch(0, "cpu")
    base = model_loading.resolve_base_model(model_loading.EMBEDDED_SOURCE)
    model = model_loading.load_model(LoadableModel(base.sha256, base, base.path, None, None)).to("cpu")
    tokenizer = model_loading.load_tokenizer(base.path)
    words = list(measure_words(model, tokenizer))
    trainer = Trainer(model, tokenizer)
    cases = [measure_case(trainer, case, arguments.retrainings) for case in CASES]
    facts["cpu_seconds"] = time.process_time()
    arguments.markdown.write_text(influence_page.render(cases, words, arguments.retrainings, facts), encoding="utf-8")


if __name__ == "__main__":
    main()
