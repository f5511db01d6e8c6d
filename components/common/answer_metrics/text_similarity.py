"""Text similarity metrics by their reference packages: ROUGE-L and chrF."""

from __future__ import annotations

from collections.abc import Sequence


def rouge_l(answer: str, references: Sequence[str]) -> float:
    """Return the best ROUGE-L F-measure with a reference, 0 to 1 (Lin 2004), by rouge-score without stemming.

    rouge-score considers only ASCII letters and digits. Use chrF for texts in other scripts.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"], use_stemmer=False)
    return max(float(scorer.score(reference, answer)["rougeL"].fmeasure) for reference in references)


def chrf(answer: str, references: Sequence[str]) -> float:
    """Return the best character n-gram F-score with a reference, 0 to 100 (Popović 2015).

    sacrebleu computes the score at sentence level with n ≤ 6 and β = 2.
    """
    from sacrebleu.metrics import CHRF

    return float(CHRF().sentence_score(answer, list(references)).score)
