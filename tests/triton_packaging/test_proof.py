"""What counts as the same answer."""

from __future__ import annotations

import pytest
import torch

from components.common.models import Model
from components.common.progress import Silent
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.proof import Answer, ProofError, Reference, answer_before, compare, is_close

EXACT = Reference("Q", 5, "one two", ["", "one", "one two"], [False, False])
ROUNDED = Reference("Q", 5, "one two", ["", "one", "one two"], [False, True])


def test_an_equal_answer_is_exact() -> None:
    assert compare(EXACT, "HTTP", Answer("one two", 5, 2)) == "exact"


def test_half_a_character_at_the_end_is_no_difference() -> None:
    cut = Reference("Q", 5, "one \ufffd", ["", "one", "one \ufffd"], [False, False])
    assert compare(cut, "HTTP", Answer("one ", 5, 2)) == "exact"


def test_another_answer_is_told_with_the_prompt_and_both_answers() -> None:
    with pytest.raises(ProofError, match=r"gRPC(?s:.*)'Q'(?s:.*)one two(?s:.*)one too"):
        compare(EXACT, "gRPC", Answer("one too", 5, 2))


def test_a_lost_chat_template_is_seen_in_the_prompt_tokens() -> None:
    with pytest.raises(ProofError, match="Triton counted 2"):
        compare(EXACT, "HTTP", Answer("one two", 2, 2))


def test_a_token_that_rounding_could_have_chosen_is_no_failure_but_one_before_it_is() -> None:
    assert compare(ROUNDED, "HTTP", Answer("one too", 5, 2)) == "rounding"
    with pytest.raises(ProofError):
        compare(ROUNDED, "HTTP", Answer("ane two", 5, 2))


def test_an_answer_that_goes_on_after_the_reference_ended_is_a_failure() -> None:
    with pytest.raises(ProofError):
        compare(ROUNDED, "HTTP", Answer("one two three", 5, 2))


def test_logits_are_close_within_what_bfloat16_tells_apart() -> None:
    assert is_close(torch.tensor([20.0, 19.9, 1.0]))
    assert not is_close(torch.tensor([20.0, 19.0, 1.0]))


def test_in_float32_no_difference_is_put_down_to_rounding(tiny_adapted: Model) -> None:
    config = TritonPackagingConfig(golden_prompts=["What is a list?"], golden_max_tokens=8)
    (reference,) = answer_before(tiny_adapted, config, "float32", 0, Silent())
    assert len(reference.prefixes) == len(reference.close) + 1
    assert reference.prefixes[-1] == reference.text
    assert not any(reference.close)
