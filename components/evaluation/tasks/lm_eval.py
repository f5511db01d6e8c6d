"""A task of lm-eval (Gao et al., the Language Model Evaluation Harness): its prompts and its score, with a value for every document.

What lm-eval computes over all documents at once (a corpus BLEU, a Matthews correlation) has no value for one of them, so that two models
could not be compared document by document: such a metric is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.common.progress import Reporter
from components.evaluation.task import Continuation, Decoding, Engine, Given, Item, Likelihood, Metric, Scores
from components.evaluation.tasks import asking, harness, lm_eval_metrics, reading, task_files
from components.evaluation.tasks.config import LMEval


@dataclass(frozen=True)
class LMEvalTask:
    """One task of lm-eval, by its name or by its file."""

    settings: LMEval

    @property
    def name(self) -> str:
        """What metrics are named by."""
        return self.settings.name

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """Those that the settings name; whether lm-eval measures them shows when it runs."""
        return {metric: lm_eval_metrics.metric_of(metric, self.settings) for metric in self.settings.metrics}

    @property
    def against_base(self) -> bool:
        """lm-eval measures a model by itself."""
        return False

    def items(self, given: Given) -> list[Item]:
        """The documents; `ask` holds every request that lm-eval makes of one. Raises as harness.run does."""
        if task_files.is_path(self.settings.task):
            reading.existing(self.settings.task, "task")
        if self.settings.data:
            reading.records(self.settings.data)
        samples = harness.run(self.settings, Asked(given.tokenizer), given.reporter, asked_alone=True).samples
        return asking.first([_item(one, given) for one in samples], None)

    def score(self, engine: Engine, items: Sequence[Item], given: Given, base: Scores | None) -> Scores:
        """lm-eval's values by document. Raises ConfigurationError for a metric that has none."""
        outcome = harness.run(self.settings, engine, given.reporter)
        found = {metric: lm_eval_metrics.by_document(metric, [one[metric] for one in outcome.samples]) for metric in self.settings.metrics}
        for metric, (values, weights) in found.items():
            lm_eval_metrics.check_same(metric, values, weights, outcome.scores[metric])
        weighted = {metric: weights for metric, (_, weights) in found.items() if weights}
        broken = [_unmeasured(one) for one in outcome.samples]
        figures = {f"lm_eval_{metric}": math.nan if any(broken) else score for metric, score in outcome.scores.items()}
        told = {metric: [math.nan if bad else v for v, bad in zip(some, broken, strict=True)] for metric, (some, _) in found.items()}
        return Scores(told, weighted, _answers(outcome.samples), figures)


def _unmeasured(sample: Mapping[str, Any]) -> bool:
    """Whether a log-likelihood of a document is no number. lm-eval would take the first option for the likeliest, right or wrong."""
    told = [one[0] if isinstance(one, (list, tuple)) else one for some in sample["resps"] for one in some]
    return any(isinstance(one, float) and math.isnan(one) for one in told)


def _item(sample: Mapping[str, Any], given: Given) -> Item:
    requests = json.loads(json.dumps(sample["arguments"], default=str))
    prompt = str(requests[0][0]) if requests and requests[0] else ""
    longest = max(
        (str(request[0]) + (request[1] if isinstance(request[-1], str) and len(request) > 1 else "") for request in requests), key=len
    )
    return Item(
        id=f"{int(sample['doc_id']):06d}",
        prompt=prompt,
        reference=str(sample.get("target", "")),
        length=len(asking.encode_bare(given.tokenizer, longest)),
        ask={"requests": requests, "filter": sample["filter"]},
    )


def _answers(samples: Sequence[Mapping[str, Any]]) -> list[str]:
    """What was generated for every document; nothing where lm-eval asked for log-likelihoods."""
    found = [one["resps"] for one in samples]
    texts = [some[0][0] if some and some[0] and isinstance(some[0][0], str) else None for some in found]
    return [text or "" for text in texts] if all(isinstance(text, str) for text in texts) else []


@dataclass(frozen=True)
class Asked:
    """Stands in for a model while requests are only written down: it knows the tokenizer and answers nothing."""

    tokenizer: Any
    room: int | None = None

    def likelihoods(self, asked: Sequence[Continuation], reporter: Reporter) -> list[Likelihood]:
        """Nothing is measured."""
        return [Likelihood(-1.0, 1, False)] * len(asked)

    def answers(self, prompts: Sequence[Sequence[int]], decoding: Decoding, reporter: Reporter) -> list[str]:
        """Nothing is answered."""
        return [""] * len(prompts)
