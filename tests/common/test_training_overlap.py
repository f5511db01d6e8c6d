"""Comparison of evaluated rows with training rows: equal to a comparison of all pairs, and cheap with common context."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.common.row_comparison import training_overlap
from components.common.row_comparison.shingles import ShingleIndex
from components.common.row_comparison.training_overlap import ComparedRow, build_row, find_overlaps

VOCABULARY = [f"v{number}" for number in range(2000)]
PROMPT = " ".join(random.Random(0).choices(VOCABULARY, k=349))


def build_text(seed: str, count: int) -> str:
    return " ".join(random.Random(seed).choices(VOCABULARY, k=count))


def build_conversation(row_id: str, *contents: str) -> ComparedRow:
    """Return a row with a system message, a user turn and an answer; without a system message for two contents."""
    roles = ("system", "user", "assistant")[-len(contents) :]
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    return build_row(row_id, {"messages": messages})


def build_rows(name: str, count: int, prompt: str = PROMPT) -> list[ComparedRow]:
    """Return rows with different questions and answers after one prompt."""
    return [
        build_conversation(f"{name}{n}", prompt, build_text(f"{name} q{n}", 15), build_text(f"{name} a{n}", 40))
        for n in range(count)
    ]


def list_shingles(words: Sequence[str]) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + 5]) for i in range(max(len(words) - 4, 1))}


def measure_similarity(first: Sequence[str], second: Sequence[str]) -> float:
    sets = list_shingles(first), list_shingles(second)
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def select_words(row: ComparedRow, recurring: set[int]) -> list[str]:
    """Return the specific words of a row; all words if it has no recurring line, as in the curation."""
    words = row.words.split(" ")
    return row.lines.select_words(words, recurring) if recurring.intersection(row.lines.list_keys(words)) else words


def compare_all_pairs(
    evaluated: Sequence[ComparedRow], trained: Sequence[ComparedRow], threshold: float
) -> dict[str, tuple[str, float]]:
    """Return the most similar training row and its similarity by evaluated row, without an index."""
    distinct = {row.words: row for row in evaluated if row.words}
    texts, answers = defaultdict(set), defaultdict(set)
    for row in [*distinct.values(), *trained]:
        words = row.words.split(" ")
        for key in row.lines.list_keys(words):
            texts[key].add(row.words)
            answers[key].add(tuple(words[row.lines.answer_start :]))
    recurring = {
        key
        for key, found in texts.items()
        if len(found) >= 10 or (key % 2 == 0 and len(found) >= 2 and len(answers[key]) >= 2)
    }
    best: dict[str, tuple[str, float]] = {}
    for row in distinct.values():
        for other in trained:
            whole = [one.words.split(" ") for one in (row, other)]
            specific = [select_words(one, recurring) for one in (row, other)]
            similarity = min(measure_similarity(*whole), measure_similarity(*specific))
            if row.words == other.words:
                similarity = 1.0
            if similarity >= threshold and similarity > best.get(row.id, ("", 0.0))[1]:
                best[row.id] = (other.id, similarity)
    return best


def edit(text: str, position: int) -> str:
    words = text.split(" ")
    return " ".join([*words[: position % len(words)], "edited", *words[position % len(words) + 1 :]])


# Parts of rows that recur, in several lengths: short and long lines, two lines, and copies with one other word.
SYSTEMS = ["", build_text("s0", 6), build_text("s1", 30), f"{build_text('s2', 9)}\n{build_text('s3', 20)}"]
QUESTIONS = [build_text("q0", 3), build_text("q1", 8), build_text("q2", 25), f"{build_text('s1', 30)} which?"]
ANSWERS = ["", "yes", build_text("a0", 12), build_text("a1", 40)]
POSITIONS = st.one_of(st.none(), st.integers(0, 40))


@st.composite
def draw_conversation(draw: Any) -> tuple[str, ...]:
    contents = []
    for texts in (SYSTEMS, QUESTIONS, ANSWERS):
        text, position = draw(st.sampled_from(texts)), draw(POSITIONS)
        contents.append(text if position is None or not text else edit(text, position))
    return tuple(contents)


@settings(max_examples=60)
@given(
    st.lists(draw_conversation(), min_size=1, max_size=8),
    st.lists(draw_conversation(), max_size=16),
    st.sampled_from([0.5, 0.55, 0.7, 0.8, 1.0]),
    st.sampled_from([0, 10]),
)
def test_overlaps_equal_a_comparison_of_all_pairs(
    evaluated: list[tuple[str, ...]], trained: list[tuple[str, ...]], threshold: float, singly: int
) -> None:
    rows = [build_conversation(f"e{number}", *contents) for number, contents in enumerate(evaluated)]
    others = [build_conversation(f"t{number}", *contents) for number, contents in enumerate(trained)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_overlap, "MAX_PAIRS_COMPARED_SINGLY", singly)
        found = find_overlaps(rows, lambda: others, threshold)
    assert {one.evaluated_id: (one.trained_id, one.similarity) for one in found} == compare_all_pairs(
        rows, others, threshold
    )


def test_common_system_prompt_causes_no_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    comparisons, shared_counts = [], []
    measure, count = training_overlap.measure_similarity, ShingleIndex.count_shared

    def count_shared(index: ShingleIndex, shingles: Any) -> Any:
        numbers, counts = count(index, shingles)
        shared_counts.extend(counts.tolist())
        return numbers, counts

    monkeypatch.setattr(
        training_overlap, "measure_similarity", lambda *sets: (comparisons.append(1), measure(*sets))[1]
    )
    monkeypatch.setattr(ShingleIndex, "count_shared", count_shared)
    evaluated, trained = build_rows("e", 60), build_rows("t", 200)
    assert find_overlaps(evaluated, lambda: trained, 0.7) == []
    assert (comparisons, shared_counts) == ([], [])
    edited = edit(build_text("t a7", 40), 39)
    copy = build_conversation("copy", PROMPT, build_text("t q7", 15), edited)
    [overlap] = find_overlaps([*evaluated, copy], lambda: trained, 0.7)
    assert (overlap.evaluated_id, overlap.trained_id, len(comparisons)) == ("copy", "t7", 1)
    assert 0.9 < overlap.similarity < 1


def test_comparison_ends_after_the_maximum_number_of_overlaps() -> None:
    trained, positions = build_rows("t", 40), []

    def read_trained() -> Any:
        for position, row in enumerate(trained):
            positions.append(position)
            yield row

    found = find_overlaps(trained[5:], read_trained, 0.7)
    assert [one.trained_id for one in found] == [f"t{number}" for number in range(5, 25)]
    assert positions == [*range(40), *range(25)]


def test_keys_beyond_the_memory_limit_are_counted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = build_rows("t", 30)
    whole = training_overlap._find_recurring_keys(lambda: trained)
    monkeypatch.setattr(training_overlap, "MAX_KEYS_IN_MEMORY", 300)
    reads = []
    divided = training_overlap._find_recurring_keys(lambda: reads.append(1) or trained)
    assert [keys.tolist() for keys in divided] == [keys.tolist() for keys in whole]
    assert len(whole.common) > 30
    assert len(reads) > 2


def build_items(prompts: Sequence[str], references: Sequence[str]) -> list[ComparedRow]:
    """Return the items of an evaluation set."""
    return [
        replace(training_overlap.build_item_row(f"i{number}", prompt, reference), is_external=True)
        for number, (prompt, reference) in enumerate(zip(prompts, references, strict=True))
    ]


def wrap_questions(wrapper: str, questions: Sequence[str]) -> list[str]:
    """Return the prompts of items: the questions within few-shot examples, an instruction or options."""
    examples = "\n\n".join(f"{build_text(f'few q{n}', 12)}\n{build_text(f'few a{n}', 6)}" for n in range(5))
    instruction = build_text("instruction", 10)
    return [
        {
            "few-shot examples": f"{examples}\n\n{question}",
            "instruction line": f"{instruction}\n{question}",
            "instruction in the line": f"{instruction} {question}",
            "options": f"{question}\nA. {build_text(f'{n} x', 6)}\nB. {build_text(f'{n} y', 6)}\nAnswer:",
            "passage": f"{build_text(f'passage {n}', 60)}\n{question}",
            "nothing": question,
        }[wrapper]
        for n, question in enumerate(questions)
    ]


WRAPPERS = ["few-shot examples", "instruction line", "instruction in the line", "options", "passage", "nothing"]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("reference", ["the answer of the row", "another"])
@pytest.mark.parametrize("turns", ["one turn", "system prompt", "first of two turns", "last of two turns"])
def test_wrapped_question_of_a_training_row_is_found(wrapper: str, reference: str, turns: str) -> None:
    questions = [build_text(f"question {n}", 14) for n in range(20)]
    answers = [build_text(f"answer {n}", 20) for n in range(20)]
    pair, other = [questions[7], answers[7]], [build_text("other q", 12), build_text("other a", 25)]
    contents = {
        "one turn": pair,
        "system prompt": [PROMPT, *pair],
        "first of two turns": [*pair, *other],
        "last of two turns": [*other, *pair],
    }[turns]
    roles = ["system"] * (turns == "system prompt") + ["user", "assistant"] * 2
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    trained = [*build_rows("t", 15), build_row("copy", {"messages": messages})]
    references = answers if reference != "another" else [build_text(f"{n} reference", 3) for n in range(20)]
    [overlap] = find_overlaps(build_items(wrap_questions(wrapper, questions), references), lambda: trained, 0.7)
    assert (overlap.evaluated_id, overlap.trained_id) == ("i7", "copy")


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_context_shared_with_training_rows_is_no_question(wrapper: str) -> None:
    questions = [build_text(f"question {n}", 14) for n in range(20)]
    prompts = wrap_questions(wrapper, questions)
    contexts = [prompt.replace(question, "") for prompt, question in zip(prompts, questions, strict=True)]
    trained = [
        build_conversation(f"t{n}", f"{contexts[n]}\n{build_text(f'new {n}', 14)}", build_text(f"answer {n}", 20))
        for n in range(20)
    ]
    examples = [build_conversation(f"x{n}", build_text(f"few q{n}", 12), build_text(f"few a{n}", 6)) for n in range(5)]
    items = build_items(prompts, [build_text(f"{n} reference", 3) for n in range(20)])
    assert find_overlaps(items, lambda: [*trained, *examples], 0.7) == []
