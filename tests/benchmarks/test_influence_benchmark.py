"""The benchmark of explanations: the score of a known truth, the facts, and the page."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import influence, influence_page
from benchmarks.influence import CaseResult, WordResult, compute_lds
from benchmarks.influence_facts import CASES
from components.common.row_comparison.words import find_words
from pipelines.explanation.word_attribution import DELETED_SHARES, GRADIENT_INPUT, LEAVE_ONE_OUT, RANDOM, DeletionEffect


def test_lds_is_one_for_the_effects_of_a_linear_model_and_minus_one_for_their_opposites() -> None:
    generator = np.random.default_rng(0)
    effects = generator.standard_normal((3, 12))
    halves = [generator.permutation(12)[:6] for _ in range(16)]
    truths = np.array([effects[:, half].sum(1) for half in halves])
    assert compute_lds(effects, halves, truths) == pytest.approx([1.0] * 3)
    assert compute_lds(-effects, halves, truths) == pytest.approx([-1.0] * 3)
    assert compute_lds(np.stack([effects, -effects]), halves, truths) == pytest.approx([0.0] * 3)


def test_questions_of_the_second_case_share_only_their_answers_with_rows() -> None:
    shared, unshared = CASES
    for number, (question, answer) in enumerate(unshared.list_questions()):
        words = {word for row in unshared.list_rows() for word in find_words(row[0])}
        assert words.isdisjoint(find_words(question))
        assert {row for row, (_, other) in enumerate(unshared.list_rows()) if other == answer} > set(
            unshared.list_own_rows(number)
        )
    for number, (question, answer) in enumerate(shared.list_questions()):
        own = [shared.list_rows()[row] for row in shared.list_own_rows(number)]
        assert {other for _, other in own} == {answer}
        assert all(set(find_words(question)) & set(find_words(row)) for row, _ in own)


def test_page_states_met_and_missed_goals() -> None:
    methods = (influence.KERNEL, influence.LEXICAL, influence.RANDOM)
    spread = np.linspace(-0.05, 0.05, 10)
    lds = dict(zip(methods, (0.8 + spread, 0.5 + spread**2, 0.0 + spread), strict=True))
    reverse = {**lds, influence.KERNEL: lds[influence.LEXICAL], influence.LEXICAL: lds[influence.KERNEL]}
    shares = dict.fromkeys(methods, 0.5)
    cases = [
        CaseResult(case, values, shares, 5.0, 2.0, 1.0, 2.0) for case, values in zip(CASES, (lds, reverse), strict=True)
    ]
    effects = [
        DeletionEffect(method, share, loss, 1.0)
        for method, loss in ((LEAVE_ONE_OUT, 6.0), (GRADIENT_INPUT, 2.0), (RANDOM, 1.0))
        for share in DELETED_SHARES
    ]
    words = [WordResult(f"Question {n}?", "Yes.", ["Question"], effects, 2.0, 6.0) for n in range(3)]
    facts = {
        "command": "c",
        "commit": "abc",
        "processor": "cpu",
        "cores": 2,
        "memory": 1 << 34,
        "python": "3",
        "load": 0.1,
    }
    page = influence_page.render(cases, words, 16, {**facts, "cpu_seconds": 60.0})
    assert f"({CASES[0].name}): met (0.30 ± " in page
    assert f"({CASES[1].name}): **missed** (-0.30 ± " in page
    assert "| gradient kernel (tuneline) | 0.80 ± 0.01 | 0.50 |" in page
    assert "| leave one out | 6.00 ± 0.00 | 1.00 ± 0.00 | 6.00 ± 0.00 | 1.00 ± 0.00 |" in page
    assert "the last question takes 6.0 instead of 2.0 CPU seconds" in page
