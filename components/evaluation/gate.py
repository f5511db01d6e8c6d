"""The gate: rules over measured differences, a verdict, and a sentence of reason for every rule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.evaluation import statistics
from components.evaluation.config import EvaluationConfig, Rule
from components.evaluation.statistics import Interval


@dataclass(frozen=True)
class Ruling:
    """What a rule said: whether it holds, and why in a sentence."""

    rule: Rule
    holds: bool
    reason: str
    gain: Interval | None


def rulings(nll: Mapping[str, Sequence[float]], tokens: Sequence[int], config: EvaluationConfig, seed: int) -> list[Ruling]:
    """Judge every rule. `nll` holds the items' summed losses by model: candidate, base, and incumbent where there is one."""
    return [_judge(rule, nll, tokens, config, seed) for rule in config.gate]


def _judge(rule: Rule, nll: Mapping[str, Sequence[float]], tokens: Sequence[int], config: EvaluationConfig, seed: int) -> Ruling:
    against = str(rule.against)
    if against == "incumbent" and "incumbent" not in nll:
        return Ruling(rule, True, "There is no model in service to compare with.", None)
    if against == "incumbent" and not nll["incumbent"]:
        return Ruling(rule, False, f"The {rule.metric} cannot be compared: the model in service has another tokenizer.", None)
    if not all(math.isfinite(v) for name in ("candidate", against) for v in nll.get(name, ())):
        return Ruling(rule, False, f"The {rule.metric} of the candidate or of {against} is not a finite number.", None)
    gain = _gain(rule, nll, tokens, config, seed)
    bound = rule.min_gain if rule.min_gain is not None else -float(rule.max_loss or 0.0)
    holds = gain.low > bound if rule.min_gain is not None else gain.low >= bound
    return Ruling(rule, holds, _sentence(rule, gain, bound, holds, len(tokens)), gain)


def _gain(rule: Rule, nll: Mapping[str, Sequence[float]], tokens: Sequence[int], config: EvaluationConfig, seed: int) -> Interval:
    """The improvement with its interval: how far the candidate's value lies below the other's."""
    perplexity = rule.metric == "held_out.perplexity"
    options: dict[str, Any] = {"samples": config.bootstrap_samples, "confidence": rule.confidence, "seed": seed}
    if isinstance(rule.against, float):
        own = statistics.bootstrap(nll["candidate"], tokens, **options)
        scale = math.exp if perplexity else float
        return Interval(*(rule.against - scale(v) for v in (own.value, own.high, own.low)))
    other = nll[rule.against]
    if perplexity:
        return statistics.paired_perplexity(nll["candidate"], other, tokens, **options)
    difference = statistics.paired_bootstrap(nll["candidate"], other, tokens, **options)
    return Interval(-difference.value, -difference.high, -difference.low)


def _sentence(rule: Rule, gain: Interval, bound: float, holds: bool, items: int) -> str:
    against = {"base": "the base", "incumbent": "the model in service"}.get(str(rule.against), str(rule.against))
    direction = "better" if gain.value >= 0 else "worse"
    measured = f"{rule.metric} is {abs(gain.value):.4f} {direction} than {against}"
    interval = f"{rule.confidence:.0%} interval of the gain {gain.low:+.4f} to {gain.high:+.4f}, {items} items"
    if holds:
        return f"{measured} ({interval}), as the rule asks (gain above {bound:+.4f})."
    if gain.low <= 0 <= gain.high:
        return f"{measured} ({interval}): too small a difference for this many items; the rule asks for a gain above {bound:+.4f}."
    return f"{measured} ({interval}); the rule asks for a gain above {bound:+.4f}."
