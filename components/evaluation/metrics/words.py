"""How alike two texts are by their words: exact match and token F1 as SQuAD counts them, ROUGE-L, and chrF."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

PUNCTUATION = frozenset(string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalised(text: str) -> str:
    """Lower case, without punctuation (ASCII) and English articles, one space between words (Rajpurkar et al., arXiv 1606.05250)."""
    bare = "".join(c for c in text.lower() if c not in PUNCTUATION)
    return " ".join(ARTICLES.sub(" ", bare).split())


def exact_match(answer: str, references: Sequence[str]) -> float:
    """1.0 where the normalised answer is one of the normalised references, else 0.0."""
    said = normalised(answer)
    return float(any(said == normalised(reference) for reference in references))


def f1(answer: str, references: Sequence[str]) -> float:
    """The best token F1 with a reference, from 0 to 1; texts without words agree only with each other (SQuAD 2.0's script)."""
    return max(_f1(normalised(answer).split(), normalised(reference).split()) for reference in references)


def _f1(said: Sequence[str], wanted: Sequence[str]) -> float:
    if not said or not wanted:
        return float(said == wanted)
    shared = (Counter(said) & Counter(wanted)).total()
    if not shared:
        return 0.0
    precision, recall = shared / len(said), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)


def rouge_l(answer: str, references: Sequence[str]) -> float:
    """The best ROUGE-L F-measure with a reference, from 0 to 1 (Lin 2004), by the rouge-score package without stemming.

    Its words are runs of ASCII letters and digits: of texts in other scripts nothing is seen, and chrF measures them instead.
    """
    return max(float(_rouge().score(reference, answer)["rougeL"].fmeasure) for reference in references)


@cache
def _rouge() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=False)


def chrf(answer: str, references: Sequence[str]) -> float:
    """Character n-gram F-score from 0 to 100 (Popović 2015), by sacrebleu: sentence level, n up to 6, β = 2, the best reference."""
    return float(_chrf().sentence_score(answer, list(references)).score)


@cache
def _chrf() -> Any:
    from sacrebleu.metrics import CHRF

    return CHRF()
