"""Checks of a candidate against its passage. The first check that fails is the reject reason.

The checks compare texts. They prove that the evidence is a quotation and that the words and numbers of an answer occur
in the passage, not that the answer is true. A judge can rate what they cannot compare.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from components.common.language_identification import identify_language
from components.common.row_comparison.words import find_words
from pipelines.synthesis.passages import Passage
from pipelines.synthesis.row_kinds import Candidate

MIN_EVIDENCE_WORDS = 3
MIN_QUESTION_WORDS = 3
MAX_QUESTION_CHARACTERS = 1_000
MAX_ANSWER_CHARACTERS = 8_000
MIN_CONTENT_CHARACTERS = 4  # of a word; shorter words are mostly function words
STEM_CHARACTERS = 5  # compared of each word, so that inflected forms are equal
MIN_LANGUAGE_CONFIDENCE = 0.8
MAX_PAIR_SIMILARITY = 0.9  # of the words of both answers of a pair
PASSAGE_REFERENCE = re.compile(
    r"\b(?:this|the|given|provided|above|following)\s+(?:passage|text|excerpt|context|paragraph|snippet)\b"
    r"|\b(?:mentioned|described|stated|provided|listed)\s+(?:above|below)\b",
    re.IGNORECASE,
)
INSTRUCTION_TEXT = re.compile(
    r"\b(?:ignore|disregard|forget|override)\b.{0,40}\b(?:previous|prior|above|earlier|all|your)\b.{0,40}"
    r"\b(?:instructions?|prompts?|rules)\b|\bsystem prompt\b|</?\s*passage\s*>",
    re.IGNORECASE | re.DOTALL,
)
NUMBER = re.compile(r"\d+(?:[.,:/-]\d+)*")
Check = Callable[[Candidate, Passage, float], str]


def list_texts(candidate: Candidate) -> Iterator[str]:
    """Yield the questions and answers of a candidate."""
    for turn in candidate.turns:
        yield turn.question
        yield turn.answer
    if candidate.rejected:
        yield candidate.rejected


def find_problem(candidate: Candidate, passage: Passage, min_support: float) -> tuple[str, str]:
    """Return the reject reason and a detail; ("", "") if all checks pass.

    Args:
        candidate: the row.
        passage: its passage.
        min_support: minimum share of an answer's content words that occur in the passage.
    """
    for reason, check in CHECKS.items():
        if detail := check(candidate, passage, min_support):
            return reason, detail
    return "", ""


def _check_length(candidate: Candidate, passage: Passage, min_support: float) -> str:
    for turn in candidate.turns:
        if len(find_words(turn.question)) < MIN_QUESTION_WORDS:
            return f"the question has fewer than {MIN_QUESTION_WORDS} words: {turn.question}"
        if not _list_content_words(turn.answer):
            return f"the answer contains no content words: {turn.answer}"
        if len(turn.question) > MAX_QUESTION_CHARACTERS or len(turn.answer) > MAX_ANSWER_CHARACTERS:
            return f"the question has {len(turn.question):,} characters, the answer {len(turn.answer):,}"
    return ""


def _check_instructions(candidate: Candidate, passage: Passage, min_support: float) -> str:
    matches = (INSTRUCTION_TEXT.search(text) for text in list_texts(candidate))
    return next((match[0] for match in matches if match), "")


def _check_references(candidate: Candidate, passage: Passage, min_support: float) -> str:
    matches = (PASSAGE_REFERENCE.search(text) for text in list_texts(candidate))
    return next((match[0] for match in matches if match), "")


def _check_copies(candidate: Candidate, passage: Passage, min_support: float) -> str:
    for turn in candidate.turns:
        if _list_content_words(turn.answer) <= _list_content_words(turn.question):
            return f"the answer adds no word to the question: {turn.answer}"
    return ""


def _check_evidence(candidate: Candidate, passage: Passage, min_support: float) -> str:
    words = f" {' '.join(find_words(passage.text))} "
    for turn in candidate.turns:
        evidence = find_words(turn.evidence)
        if len(evidence) < MIN_EVIDENCE_WORDS or f" {' '.join(evidence)} " not in words:
            return f"the passage does not contain: {turn.evidence}"
    return ""


def _check_support(candidate: Candidate, passage: Passage, min_support: float) -> str:
    known = _list_content_words(passage.text)
    for turn in candidate.turns:
        answer = _list_content_words(turn.answer)
        missing = sorted(answer - known - _list_content_words(turn.question))
        if 1 - len(missing) / len(answer) < min_support:
            return f"{len(missing)} of {len(answer)} words of the answer do not occur in the passage or the question: {', '.join(missing)}"
        if not answer & _list_content_words(turn.evidence):
            return f"the answer shares no word with its evidence: {turn.answer}"
    return ""


def _check_numbers(candidate: Candidate, passage: Passage, min_support: float) -> str:
    known = set(NUMBER.findall(passage.text))
    for turn in candidate.turns:
        if missing := sorted({*NUMBER.findall(turn.answer)} - known):
            return f"the passage does not contain {', '.join(missing)}"
    return ""


def _check_language(candidate: Candidate, passage: Passage, min_support: float) -> str:
    expected, confidence = identify_language(passage.text)
    found, own_confidence = identify_language(" ".join(list_texts(candidate)))
    is_certain = min(confidence, own_confidence) >= MIN_LANGUAGE_CONFIDENCE
    return f"{found} instead of {expected}" if is_certain and found != expected else ""


def _check_pair(candidate: Candidate, passage: Passage, min_support: float) -> str:
    if not candidate.rejected:
        return ""
    chosen, rejected = set(find_words(candidate.turns[-1].answer)), set(find_words(candidate.rejected))
    similarity = len(chosen & rejected) / max(1, len(chosen | rejected))
    return f"{similarity:.0%} of the words of both answers are equal" if similarity > MAX_PAIR_SIMILARITY else ""


def _list_content_words(text: str) -> set[str]:
    """Return the beginnings of words that state facts: long words, words with digits, and words of other scripts."""
    return {
        word[:STEM_CHARACTERS]
        for word in find_words(text)
        if len(word) >= MIN_CONTENT_CHARACTERS or not word.isascii() or any(map(str.isdigit, word))
    }


CHECKS: dict[str, Check] = {
    "length": _check_length,
    "instruction_text": _check_instructions,
    "passage_reference": _check_references,
    "copied_question": _check_copies,
    "missing_evidence": _check_evidence,
    "unsupported_number": _check_numbers,
    "unsupported_answer": _check_support,
    "language": _check_language,
    "equal_pair": _check_pair,
}
