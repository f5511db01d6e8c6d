"""Proof: when a served answer counts as equal to the reference."""

from __future__ import annotations

import pytest
import torch

from components.common.models.model_loading import LoadableModel
from components.common.runtime.reporters import SilentReporter
from components.triton_packaging import serving_proof
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.serving_proof import (
    ProofError,
    ReferenceAnswer,
    ServerAnswer,
    generate_references,
    is_input_tie,
    is_rounding_tie,
    match_answer,
)

EXACT = ReferenceAnswer("Q", 5, "one two", ["", "one", "one two"], [False, False])
ROUNDED = ReferenceAnswer("Q", 5, "one two", ["", "one", "one two"], [False, True])


def test_equal_answer_is_an_exact_match() -> None:
    assert match_answer(EXACT, "HTTP", ServerAnswer("one two", 5, 2)) == "exact"


def test_incomplete_last_character_is_ignored() -> None:
    reference = ReferenceAnswer("Q", 5, "one \ufffd", ["", "one", "one \ufffd"], [False, False])
    assert match_answer(reference, "HTTP", ServerAnswer("one ", 5, 2)) == "exact"


def test_different_answer_error_shows_prompt_and_both_answers() -> None:
    with pytest.raises(ProofError, match=r"gRPC(?s:.*)'Q'(?s:.*)one two(?s:.*)one too"):
        match_answer(EXACT, "gRPC", ServerAnswer("one too", 5, 2))


def test_missing_chat_template_is_detected_by_prompt_tokens() -> None:
    with pytest.raises(ProofError, match="Triton counted 2"):
        match_answer(EXACT, "HTTP", ServerAnswer("one two", 2, 2))


def test_difference_is_accepted_only_at_a_rounding_tie() -> None:
    assert match_answer(ROUNDED, "HTTP", ServerAnswer("one too", 5, 2)) == "rounding"
    with pytest.raises(ProofError):
        match_answer(ROUNDED, "HTTP", ServerAnswer("ane two", 5, 2))


def test_answer_longer_than_the_reference_fails() -> None:
    with pytest.raises(ProofError):
        match_answer(ROUNDED, "HTTP", ServerAnswer("one two three", 5, 2))


def test_rounding_tie_depends_on_bfloat16_resolution() -> None:
    assert is_rounding_tie(torch.tensor([20.0, 19.9, 1.0]))
    assert not is_rounding_tie(torch.tensor([20.0, 19.0, 1.0]))


def test_tie_of_rounded_inputs_has_an_absolute_limit() -> None:
    assert is_input_tie(torch.tensor([20.0, 19.98, 1.0]), serving_proof.INT8_TIE_LOGITS)
    assert not is_input_tie(torch.tensor([20.0, 19.96, 1.0]), serving_proof.INT8_TIE_LOGITS)


def test_int8_reference_has_ties_where_its_logits_are_close(
    adapted_model: LoadableModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()):
        pytest.skip("the processor has no VNNI")
    config = TritonPackagingConfig(quantization="int8", golden_prompts=["What is a list?"], golden_max_tokens=8)
    monkeypatch.setattr(serving_proof, "INT8_TIE_LOGITS", 1e9)
    [reference] = generate_references(adapted_model, config, "float32", 1, SilentReporter())
    assert reference.rounding_ties
    assert all(reference.rounding_ties)
    monkeypatch.setattr(serving_proof, "INT8_TIE_LOGITS", -1.0)
    [reference] = generate_references(adapted_model, config, "float32", 1, SilentReporter())
    assert not any(reference.rounding_ties)


def test_fp8_reference_has_ties_where_its_logits_are_close(
    adapted_model: LoadableModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TritonPackagingConfig(
        backend="vllm", quantization="fp8", golden_prompts=["What is a list?"], golden_max_tokens=8
    )
    for limit, expected in ((1e9, True), (-1.0, False)):
        monkeypatch.setattr(serving_proof, "FP8_TIE_LOGITS", limit)
        [reference] = generate_references(adapted_model, config, "float32", 1, SilentReporter())
        assert set(reference.rounding_ties) == {expected}


def test_float32_reference_has_no_rounding_ties(adapted_model: LoadableModel) -> None:
    config = TritonPackagingConfig(golden_prompts=["What is a list?"], golden_max_tokens=8)
    (reference,) = generate_references(adapted_model, config, "float32", 0, SilentReporter())
    assert len(reference.prefixes) == len(reference.rounding_ties) + 1
    assert reference.prefixes[-1] == reference.text
    assert not any(reference.rounding_ties)
