"""Comparison of the evaluation's metrics with maintained implementations of others, item by item on real data.

    python -m benchmarks.metrics_agreement --data DIR [--model FOLDER] [--items 200]

DIR contains gsm8k_train.jsonl.gz (OpenAI's grade-school-math) and, for the likelihood tasks, icl_*.jsonl[.gz] of MosaicML's
in-context-learning suite. Likelihood tasks are compared with lm-eval's hf backend on the model in FOLDER, or on a tiny random one. Missing
files are skipped.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from components.common.answer_metrics import numeric_answers, squad_metrics, text_similarity
from components.common.runtime.reporters import SilentReporter
from components.evaluation.task_interface import Scores, TaskContext
from components.evaluation.tasks import lm_eval_runner, record_files
from components.evaluation.tasks.last_word import LastWord, LastWordTask
from components.evaluation.tasks.lm_eval import LMEval
from components.evaluation.tasks.multiple_choice import MultipleChoice, MultipleChoiceTask

OPENAI = re.compile(r"#### (\-?[0-9\.\,]+)")  # openai/grade-school-math, dataset.py
NEAR = 1e-9
NEAR_LOGPROB = 1e-3  # nats: two orders of the same sums in float32
CHOICES = ("piqa", "copa", "openbook_qa", "arc_easy", "winogrande")
CHOICE_FILE = """task: agreement
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{query}}"
doc_to_choice: choices
doc_to_target: gold
"""
WORD_FILE = """task: agreement
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{context}}"
doc_to_target: "{{' ' + continuation}}"
"""
METRICS = {
    "acc": "{metric: acc, aggregation: mean, higher_is_better: true}",
    "acc_norm": "{metric: acc_norm, aggregation: mean, higher_is_better: true}",
    "perplexity": "{metric: perplexity, aggregation: perplexity, higher_is_better: false}",
}


@dataclass(frozen=True)
class Agreement:
    """The number of items that two implementations scored, and the first item with different scores ("" for none)."""

    what: str
    items: int
    differing: int
    first: str = ""

    def line(self) -> str:
        """Return a line to print."""
        told = f"{self.what}: {self.items - self.differing:,} of {self.items:,} items agree"
        return told + (f"; the first that does not: {self.first}" if self.first else "")


def compared(what: str, ours: Sequence[Any], theirs: Sequence[Any], near: float = NEAR) -> Agreement:
    """Compare two lists of scores item by item."""
    different = [place for place, pair in enumerate(zip(ours, theirs, strict=True)) if not _same(*pair, near)]
    first = f"item {different[0]}: {ours[different[0]]} and {theirs[different[0]]}" if different else ""
    return Agreement(what, len(ours), len(different), first)


def _same(one: Any, other: Any, near: float) -> bool:
    return math.isclose(one, other, rel_tol=near, abs_tol=near) if isinstance(one, float) else bool(one == other)


def final_numbers(data: Path) -> Iterator[Agreement]:
    """Compare the extraction of numbers from GSM8K's solutions with OpenAI's; also with the number in a box or a sentence."""
    answers = [one.get_text("answer") for one in record_files.read_records(str(data / "gsm8k_train.jsonl.gz"))]
    theirs = [
        found[1].strip().replace(",", "") if (found := OPENAI.search(answer)) else "[invalid]" for answer in answers
    ]
    yield compared(
        "marked number, OpenAI's extraction",
        [numeric_answers.extract_marked_number(answer) for answer in answers],
        theirs,
    )
    yield compared(
        "final number, OpenAI's extraction in value",
        [_number(answer) for answer in answers],
        [float(one) for one in theirs],
    )
    boxed = [answer.replace("#### ", "\\boxed{") + "}" for answer in answers]
    yield compared("final number in a box", [_number(answer) for answer in boxed], [float(one) for one in theirs])
    said = [answer.rpartition("\n#### ")[0] + f"\nThe answer is {answer.rpartition('#### ')[2]}." for answer in answers]
    yield compared("final number in a sentence", [_number(answer) for answer in said], [float(one) for one in theirs])


def _number(text: str) -> float:
    return float(numeric_answers.extract_final_number(text) or 0)


def likeness(data: Path, items: int) -> Iterator[Agreement]:
    """Compare neighbouring solutions of GSM8K as answer and reference: exact match and F1, ROUGE-L, chrF."""
    rows = [one.get_text("answer") for one in record_files.read_records(str(data / "gsm8k_train.jsonl.gz"))][
        : items + 1
    ]
    pairs = [
        *pairwise(rows),
        *((row, row.upper()) for row in rows[:20]),
        *((row[: len(row) // 2], row) for row in rows[:20]),
    ]
    from lm_eval.tasks.qasper import metrics as squad

    for what, ours, theirs in (
        (
            "exact match, SQuAD's script",
            squad_metrics.exact_match,
            lambda one, other: squad.normalize_answer(one) == squad.normalize_answer(other),
        ),
        ("token F1, SQuAD's script", squad_metrics.f1, lambda one, other: squad.f1_abstractive([one], [other])),
        ("ROUGE-L, by its definition", text_similarity.rouge_l, _rouge),
        ("chrF, by its definition", text_similarity.chrf, _chrf),
    ):
        yield compared(
            what, [ours(one, [other]) for one, other in pairs], [float(theirs(one, other)) for one, other in pairs]
        )


def _chrf(answer: str, reference: str, longest: int = 6, beta: float = 2.0) -> float:
    """Return chrF from 0 to 100: F of the mean precision and recall of character n-grams without white space (Popović 2015, as in sacrebleu)."""
    said, wanted = ("".join(text.split()) for text in (answer, reference))
    precisions, recalls = [], []
    for n in range(1, longest + 1):
        mine, theirs = (
            Counter(text[place : place + n] for place in range(len(text) - n + 1)) for text in (said, wanted)
        )
        if mine and theirs:
            common = (mine & theirs).total()
            precisions.append(common / mine.total())
            recalls.append(common / theirs.total())
    precision, recall = (sum(some) / max(len(some), 1) for some in (precisions, recalls))
    return 100 * (1 + beta**2) * precision * recall / (beta**2 * precision + recall) if precision + recall else 0.0


def _rouge(answer: str, reference: str) -> float:
    """Return the ROUGE-L F-measure from the longest common subsequence, by its recurrence (Lin 2004, section 3)."""
    said, wanted = (re.findall(r"[a-z0-9]+", text.lower()) for text in (answer, reference))
    row = [0] * (len(wanted) + 1)
    for word in said:
        before = 0
        for place, other in enumerate(wanted, 1):
            before, row[place] = row[place], before + 1 if word == other else max(row[place], row[place - 1])
    common = row[-1]
    precision, recall = common / max(len(said), 1), common / max(len(wanted), 1)
    return 2 * precision * recall / (precision + recall) if common else 0.0


def likelihoods(data: Path, model: Path | None, items: int) -> Iterator[Agreement]:
    """Compare tuneline's tasks and engine with lm-eval's hf backend, on the same rows and the same loaded model."""
    with tempfile.TemporaryDirectory() as folder:
        engine = _engine(model, Path(folder) / "model")
        for name in CHOICES:
            yield from _beside(data, name, Path(folder), engine, items, CHOICE_FILE, ("acc", "acc_norm"), _choice)
        yield from _beside(data, "lambada_openai", Path(folder), engine, items, WORD_FILE, ("acc", "perplexity"), _word)


def _choice(path: str) -> Any:
    return MultipleChoiceTask(MultipleChoice(data=path))


def _word(path: str) -> Any:
    return LastWordTask(LastWord(data=path))


def _beside(
    data: Path,
    name: str,
    folder: Path,
    engine: Any,
    items: int,
    text: str,
    metrics: Sequence[str],
    make: Callable[[str], Any],
) -> Iterator[Agreement]:
    found = next((path for path in (data / f"icl_{name}.jsonl", data / f"icl_{name}.jsonl.gz") if path.is_file()), None)
    if found is None:
        return
    rows = [
        {**one.row, "id": f"{place:06d}"} for place, one in enumerate(record_files.read_records(str(found))[:items])
    ]
    if "context_options" in rows[0]:
        text = text.replace('"{{query}}"', "gold").replace("doc_to_choice: choices", "doc_to_choice: context_options")
        text = text.replace("doc_to_target: gold", 'doc_to_target: "{{continuation}}"')
        metrics = [metric for metric in metrics if metric == "acc"]  # acc_norm would divide by the contexts' lengths
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "agreement.yaml").write_text(
        text + "metric_list: [" + ", ".join(METRICS[one] for one in metrics) + "]\n", encoding="utf-8"
    )
    ours, theirs = _ours(make(str(folder / "rows.jsonl")), engine), _theirs(folder, engine, metrics)
    for metric in metrics:
        near = NEAR_LOGPROB if metric == "perplexity" else NEAR
        yield compared(f"{name} {metric}, lm-eval's hf backend", list(ours.values[metric]), theirs[metric], near)


def _ours(task: Any, engine: Any) -> Scores:
    given = TaskContext(tokenizer=engine.tokenizer, dataset=None, max_length=2048, seed=0, reporter=SilentReporter())
    scores: Scores = task.score(engine, task.items(given), given, None)
    return scores


def _theirs(folder: Path, engine: Any, metrics: Sequence[str]) -> dict[str, list[float]]:
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

    from components.evaluation.tasks.lm_eval_metrics import extract_document_values

    settings = LMEval(task=str(folder / "agreement.yaml"), metrics=list(metrics))
    with lm_eval_runner.offline(), tempfile.TemporaryDirectory() as cache:
        task = lm_eval_runner.load_task(settings, cache)
        lm = HFLM(pretrained=engine.model, tokenizer=engine.tokenizer, batch_size=1, max_length=engine.max_input_tokens)
        samples = evaluator.evaluate(lm=lm, task_dict={"tasks": {"agreement": task}}, bootstrap_iters=0)["samples"][
            "agreement"
        ]
    ordered = sorted(samples, key=lambda one: int(one["doc_id"]))
    return {metric: extract_document_values(metric, [one[metric] for one in ordered])[0] for metric in metrics}


def _engine(model: Path | None, folder: Path) -> Any:
    from tests.evaluation.tasks.fake_engines import PlainEngine, plain_engine

    if model is None:
        return plain_engine(folder)
    from components.common.models import model_loading

    opened = model_loading.open_model(model)
    return PlainEngine(model_loading.load_model(opened), model_loading.load_tokenizer(opened.tokenizer))


def main() -> int:
    """Run all possible comparisons; exit with status 1 if an item differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="Folder of the public files.")
    parser.add_argument("--model", type=Path, help="Model in the Hugging Face layout. Default: a tiny random model.")
    parser.add_argument(
        "--items",
        type=int,
        default=200,
        help="Number of items to compare of each file; of GSM8K, all numbers are compared.",
    )
    given = parser.parse_args()
    wrong = 0
    parts: list[Iterator[Agreement]] = [likelihoods(given.data, given.model, given.items)]
    if (given.data / "gsm8k_train.jsonl.gz").is_file():
        parts = [final_numbers(given.data), likeness(given.data, given.items), *parts]
    for part in parts:
        for found in part:
            wrong += found.differing
            print(found.line(), flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
