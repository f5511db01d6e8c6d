"""Keys of the lines and prefixes that recur across different texts: a dataset's system prompts, passages and templates."""

from __future__ import annotations

import numpy as np

MIN_LINE_ANSWERS = 2  # the lines of edited copies of a row share their answer
MANY_TEXTS = 10  # also of a prefix: edited copies begin alike


def select_recurring_keys(keys: np.ndarray, answers: np.ndarray, min_line_texts: int) -> np.ndarray:
    """Return the sorted keys that recur (int64).

    A line recurs if it is in several texts with different answers, or in many texts; a prefix, if it is in many texts.

    Args:
        keys: the distinct keys of each different text (int64, (keys,)).
        answers: for each key, the key of its text's answer (int64, (keys,)).
        min_line_texts: minimum number of texts with a line.
    """
    order = np.lexsort((answers, keys))
    keys, answers = keys[order], answers[order]
    is_new_key = np.diff(keys, prepend=-1) != 0
    is_new_answer = is_new_key | (np.diff(answers, prepend=-1) != 0)
    begins = np.flatnonzero(is_new_key)
    text_counts = np.diff(begins, append=len(keys))
    answer_counts = np.add.reduceat(is_new_answer, begins, dtype=np.int64) if len(begins) else begins
    distinct = keys[begins]
    is_line_of_several = (distinct & 1 == 0) & (text_counts >= min_line_texts) & (answer_counts >= MIN_LINE_ANSWERS)
    recurring: np.ndarray = distinct[is_line_of_several | (text_counts >= MANY_TEXTS)]
    return recurring
