"""The page of the benchmark of explanations, docs/reference/benchmarks-explanation.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import influence
from benchmarks.influence import KERNEL, LEXICAL, CaseResult, WordResult
from benchmarks.page import made_with, met, table_of
from pipelines.explanation.word_attribution import GRADIENT_INPUT, LEAVE_ONE_OUT, RANDOM

HEAD = """# Explanations, measured

`make bench-explanation` writes this page. It compares the scores of [`tuneline explain`](../how-to/explain.md) with retrainings on half of
the rows, and with deletions of words.
"""

ROWS = """## Training rows

The embedded SmolLM2-135M learns 20 made-up facts in two forms each (40 rows): LoRA of rank {rank} on the last {layers} layers,
{epochs} epochs, learning rate {rate:g}, {batch} rows per step. The benchmark explains ten questions in a third form. The ground truth is
{retrainings} retrainings on random halves of the rows, each in a different order.

- **LDS**: linear datamodeling score (Park et al., [TRAK](https://arxiv.org/abs/2303.14186)), the rank correlation (Spearman) of the answer's
  log-probability with the summed scores of the retraining's rows. Random scores give 0; 1 is out of reach, because the order of the rows also changes.
  The table shows the mean ± standard error over the questions.
- **own rows**: share of the fact's two rows in the two highest-scored rows.
"""

CASES = """### {title}

A row: "{row_question}" → "{row_answer}". A question: "{question}" → "{answer}". Loss of the questions' answers: {before:.2f} → {after:.2f} nats per token.
Computing the gradients of all rows takes {share:.2f} times the CPU time of training.
"""

READING = """## Interpretation

- A high score means that a row made the answer more likely, not that it caused the answer.
- Expect lower scores on real data than on these few, easy and distinct facts. Published scores of comparable methods on GPT-2 are 0.2 to 0.5
  ([bergson](https://github.com/EleutherAI/bergson)).
- Shared words need no model, and include the words of the answer. If they score as high as the kernel, the kernel adds nothing.
- Not measured: GPUs, larger models, full fine-tuning, `qlora`, datasets with more than {rows} rows.
"""

WORDS = """## Words of the prompt

The embedded model answers {count} questions with up to {tokens} tokens. The table shows how much log-probability the answer loses without the top words of
a ranking, and with only these words (nats, mean ± standard error over the questions). With a good ranking, the answer loses much
without these words and little with only these words. The test favours leave-one-out, because both delete words.
"""


def render(cases: Sequence[CaseResult], words: Sequence[WordResult], retrainings: int, facts: dict[str, Any]) -> str:
    """Return the page."""
    rows = ROWS.format(
        rank=influence.RANK,
        layers=influence.LAST_LAYERS,
        epochs=influence.EPOCHS,
        rate=influence.LEARNING_RATE,
        batch=influence.BATCH_ROWS,
        retrainings=retrainings,
    )
    parts = [
        HEAD,
        made_with(facts) + f"\nThe benchmark took {facts['cpu_seconds'] / 60:.1f} CPU minutes.\n",
        _summarize(cases, words),
        rows,
        *map(_describe_case, cases),
        READING.format(rows=len(cases[0].case.list_rows())),
        WORDS.format(count=len(words), tokens=influence.ANSWER_TOKENS),
        _compare_rankings(words),
        _describe_sharing(words),
        table_of(
            ("question", "answer", "highest-scored words"),
            [(one.question, one.answer, ", ".join(one.top_words)) for one in words],
        ),
    ]
    return "\n".join(parts)


def _describe_mean(values: Sequence[float] | np.ndarray) -> str:
    return f"{np.mean(values):.2f} ± {np.std(values, ddof=1) / len(values) ** 0.5:.2f}"


def _list_losses(words: Sequence[WordResult], method: str, share: float, part: str) -> list[float]:
    return [getattr(e, part) for one in words for e in one.effects if (e.method, e.share) == (method, share)]


def _summarize(cases: Sequence[CaseResult], words: Sequence[WordResult]) -> str:
    lines = []
    for result in cases:
        difference = result.lds[KERNEL] - result.lds[LEXICAL]
        error = difference.std(ddof=1) / len(difference) ** 0.5
        lines.append(
            f"- Goal: the gradient kernel's LDS exceeds that of shared words by two standard errors ({result.case.name}): "
            f"{met(bool(difference.mean() > 2 * error))} ({_describe_mean(difference)})"
        )
    for share in sorted({effect.share for one in words for effect in one.effects}):
        found = (_list_losses(words, method, share, "removed") for method in (LEAVE_ONE_OUT, RANDOM))
        gain: np.ndarray = np.subtract(*found)
        error = gain.std(ddof=1) / len(gain) ** 0.5
        lines.append(
            f"- Goal: removing the top {share:.0%} of the words costs the answer more log-probability than removing random ones, by two "
            f"standard errors: {met(bool(gain.mean() > 2 * error))} ({_describe_mean(gain)} nats)"
        )
    return "\n".join(lines) + "\n"


def _describe_case(result: CaseResult) -> str:
    row, question = result.case.list_rows()[0], result.case.list_questions()[0]
    text = CASES.format(
        title=result.case.name.capitalize(),
        row_question=row[0],
        row_answer=row[1],
        question=question[0],
        answer=question[1],
        before=result.loss_before,
        after=result.loss_after,
        share=result.gradient_seconds / result.training_seconds,
    )
    order = sorted(result.lds, key=lambda method: -result.lds[method].mean())
    table = [(method, _describe_mean(result.lds[method]), f"{result.top_share[method]:.2f}") for method in order]
    return f"{text}\n{table_of(('method', 'LDS', 'own rows'), table)}"


def _compare_rankings(words: Sequence[WordResult]) -> str:
    shares = sorted({effect.share for one in words for effect in one.effects})
    head = [
        "ranking",
        *(f"{part} {share:.0%}" for share in shares for part in ("without the top", "with only the top")),
    ]
    rows = [
        [method]
        + [_describe_mean(_list_losses(words, method, share, part)) for share in shares for part in ("removed", "kept")]
        for method in (LEAVE_ONE_OUT, GRADIENT_INPUT, RANDOM)
    ]
    return table_of(head, rows)


def _describe_sharing(words: Sequence[WordResult]) -> str:
    shared, whole = words[-1].seconds, words[-1].unshared_seconds or 0.0
    mean = sum(one.seconds for one in words) / len(words)
    return (
        f"An explanation with all deletions takes {mean:.1f} CPU seconds on average. The engine computes the words before a removed "
        f"word once. Without shared prefixes, the last question takes {whole:.1f} instead of {shared:.1f} CPU seconds.\n"
    )
