"""Requests and responses of the vLLM backend for JSON schemas and log-probabilities, without Triton and vLLM."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from components.triton_packaging.vllm_backend import tuneline_tensors

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The backend's module, with a minimal stand-in for Triton's utilities, which exist only inside of Triton."""
    triton: Any = ModuleType("triton_python_backend_utils")
    triton.Tensor = lambda name, array: (name, array.tolist())
    triton.InferenceResponse = lambda output_tensors: dict(output_tensors)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", triton)
    monkeypatch.syspath_prepend(str(Path(tuneline_tensors.__file__).parent))
    monkeypatch.delitem(sys.modules, "tuneline_requests", raising=False)
    return importlib.import_module("tuneline_requests")


def build_request(parameters: dict[str, Any], **flags: bool) -> Any:
    values = {"text_input": [b"a"], "sampling_parameters": [json.dumps(parameters).encode()]}
    arrays = {
        **{name: np.array(value, dtype=np.object_) for name, value in values.items()},
        **{name: np.array([value]) for name, value in flags.items()},
    }

    def build_tensor(name: str) -> Any:
        return SimpleNamespace(name=lambda: name, as_numpy=lambda: arrays[name])

    return SimpleNamespace(inputs=lambda: [build_tensor(name) for name in arrays])


@pytest.mark.parametrize("value", [{"json": SCHEMA}, json.dumps({"json": SCHEMA})], ids=["object", "text"])
def test_structured_outputs_may_be_a_text(requests: Any, value: object) -> None:
    """Triton's vLLM backend expects a text."""
    parsed = requests.parse_request(build_request({"structured_outputs": value}), [])
    assert parsed.sampling == {"structured_outputs": {"json": SCHEMA}}


@pytest.mark.parametrize(
    ("value", "message"),
    [("{", "structured_outputs is not JSON"), ("[1]", r"structured_outputs is \[1\]; expected"), (5, "is 5; expected")],
)
def test_invalid_structured_outputs_are_rejected(requests: Any, value: object, message: str) -> None:
    with pytest.raises(requests.ClientError, match=message):
        requests.parse_request(build_request({"structured_outputs": value}), [])


def test_response_has_the_logprobs_of_its_new_tokens(requests: Any) -> None:
    request = requests.parse_request(build_request({"logprobs": 1}, return_logprobs=True, stream=True), [])
    logprobs = [
        {7: SimpleNamespace(logprob=-0.5, rank=1, decoded_token="a")},
        {8: SimpleNamespace(logprob=-1.5, rank=2, decoded_token=" b"), 9: SimpleNamespace(logprob=-1.0, rank=1, decoded_token="c")},
    ]  # fmt: skip
    sent = requests.PartialAnswer(["a"], [1], ["None"], 3, False, [logprobs[:1]])
    answer = requests.PartialAnswer(["a b"], [2], ["stop"], 3, True, [logprobs])
    response = requests.build_response(request, answer, sent)
    assert response["text_output"] == [b" b"]
    assert json.loads(response["logprobs"][0]) == [
        {
            "8": {"logprob": -1.5, "rank": 2, "decoded_token": " b"},
            "9": {"logprob": -1.0, "rank": 1, "decoded_token": "c"},
        }
    ]


def test_logprobs_are_null_without_the_sampling_parameter(requests: Any) -> None:
    request = requests.parse_request(build_request({}, return_logprobs=True), [])
    response = requests.build_response(request, requests.PartialAnswer(["a"], [1], ["stop"], 3, True, [None]), None)
    assert response["logprobs"] == [b"null"]
