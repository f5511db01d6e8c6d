"""The real Triton server with a vLLM package of two adapters.

On machines without vLLM the tests install a stand-in for it (vllm_stand_in.py) in a copy of the serving environment.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from components.common.artifacts.artifact_folder import Artifact
from components.common.models import model_loading
from components.common.models.model_loading import LoadableModel
from components.common.runtime.reporters import SilentReporter
from components.triton_packaging import serving_env
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.deployment import repository_api, serving_folder
from components.triton_packaging.deployment.serving_folder import Release
from components.triton_packaging.deployment.smoke_testing import SmokeTestError
from components.triton_packaging.deployment.version_switch import (
    deploy_version,
    exchange_version,
    must_unload_first,
    switch_version,
    try_release,
)
from components.triton_packaging.golden_requests import build_inputs
from components.triton_packaging.stage import package
from components.triton_packaging.triton_server import ModelLoadError, Server, running_server
from tests.triton_packaging import vllm_stand_in
from tests.triton_packaging.triton_clients import ResponseQueue, generate_with_transformers

pytestmark = pytest.mark.triton

PROMPTS = ["What is a list?", "Grüße, 你好"]
GREEDY = {"temperature": 0, "max_tokens": 24}
without_vllm = pytest.mark.skipif(serving_env.missing_vllm_reason() is None, reason="vLLM itself is installed")


@without_vllm
def test_package_is_unproven_and_not_served_without_vllm(adapted_model: LoadableModel, tmp_path: Path) -> None:
    config = TritonPackagingConfig(backend="vllm", model_name="two")
    artifact = package(adapted_model, tmp_path / "repository", config, seed=1, reporter=SilentReporter())
    assert artifact.manifest.summary["proof"] is None
    assert artifact.manifest.summary["unproven_because"] == "vLLM is not installed"
    proof = json.loads((artifact.path / "proof.json").read_text())
    inputs = [[one.kind, one.content_sha256] for one in artifact.manifest.inputs]
    assert proof == {"inputs": inputs, "proof": None, "unproven_because": "vLLM is not installed"}
    assert "requires --force" in (artifact.path / "report.html").read_text()
    with (
        pytest.raises(ModelLoadError, match="vLLM is not installed"),
        running_server(artifact.path, log=tmp_path / "log"),
    ):
        pass


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM in the serving environment: the installed one, or the STAND-IN, which is not vLLM."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if serving_env.missing_vllm_reason() is not None:
            folder = tmp_path_factory.mktemp("serving") / "environment"
            vllm_stand_in.install(serving_env.get_environment_folder(), folder)
            monkeypatch.setenv("TUNELINE_SERVING_ENV", str(folder))
            assert serving_env.missing_vllm_reason() is None
        yield


@pytest.fixture(scope="module")
def vllm_package(
    vllm: None, adapted_model: LoadableModel, second_adapter: LoadableModel, tmp_path_factory: pytest.TempPathFactory
) -> Artifact:
    """A proven vLLM package of two adapters on the tiny model."""
    config = TritonPackagingConfig(backend="vllm", model_name="two", golden_prompts=PROMPTS, golden_max_tokens=12)
    folder = tmp_path_factory.mktemp("vllm") / "repository"
    return package(
        adapted_model, folder, config, seed=1, reporter=SilentReporter(), adapters={"ot.her": second_adapter}
    )


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's log file."""
    return tmp_path_factory.mktemp("log") / "triton.log"


@pytest.fixture(scope="module")
def server(vllm_package: Artifact, log: Path) -> Iterator[Server]:
    """A real Triton server with the package."""
    with running_server(vllm_package.path, log=log) as running:
        yield running


@pytest.fixture(scope="module")
def models_by_adapter(
    base_model: LoadableModel, adapted_model: LoadableModel, second_adapter: LoadableModel
) -> dict[str, LoadableModel]:
    """The expected model by requested adapter. An empty name selects the base."""
    return {"": base_model, "two": adapted_model, "ot.her": second_adapter}


def render_prompt(model: LoadableModel, prompt: str) -> str:
    tokenizer = model_loading.load_tokenizer(model.tokenizer)
    return str(
        tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True)
    )


def build_sampling(adapter: str, **more: Any) -> dict[str, Any]:
    return {**GREEDY, **({"lora_name": adapter} if adapter else {}), **more}


def stream_grpc(server: Server, text: str, parameters: dict[str, Any], **flags: bool) -> list[Any]:
    """Return the responses of a gRPC stream, or raise the error of a response."""
    return request_grpc(server, "two", {"text_input": text, "sampling_parameters": json.dumps(parameters), **flags})


def request_grpc(server: Server, model: str, fields: dict[str, Any]) -> list[Any]:
    """Return the responses to a request with arbitrary inputs, or raise the error of a response."""
    from tritonclient import grpc

    responses, results = ResponseQueue(), []
    with grpc.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: responses.put((result, error)))
        client.async_stream_infer(model, build_inputs(fields), enable_empty_final_response=True)
        while True:
            result, error = responses.get(timeout=120)
            if error is not None:
                raise error
            results.append(result)
            if result.get_response().parameters["triton_final_response"].bool_param:
                return results


def read_texts(results: list[Any]) -> list[str]:
    return [result.as_numpy("text_output")[0].decode() for result in results]


@without_vllm
def test_every_adapter_and_the_base_are_proven(vllm_package: Artifact) -> None:
    """The stand-in for vLLM answers, so this shows the coverage of the proof and nothing about vLLM."""
    assert vllm_package.manifest.summary["proof"]["matched"] == 6
    proof = json.loads((vllm_package.path / "proof.json").read_text())
    assert {answer.get("adapter", "") for answer in proof["answers"]} == {"", "two", "ot.her"}


def test_adapters_and_base_match_peft_over_grpc_stream(
    server: Server, models_by_adapter: dict[str, LoadableModel]
) -> None:
    answers = {}
    for adapter, model in models_by_adapter.items():
        results = stream_grpc(server, render_prompt(model, PROMPTS[1]), build_sampling(adapter), stream=True)
        answers[adapter] = "".join(read_texts(results))
        assert answers[adapter] == generate_with_transformers(model, PROMPTS[1], 24)
        assert len(results) > 2
    assert len(set(answers.values())) == 3


def test_answer_includes_the_prompt_unless_excluded(server: Server, base_model: LoadableModel) -> None:
    text = render_prompt(base_model, PROMPTS[0])
    answer = generate_with_transformers(base_model, PROMPTS[0], 24)
    assert read_texts(stream_grpc(server, text, GREEDY)) == [text + answer]
    assert read_texts(stream_grpc(server, text, GREEDY, exclude_input_in_output=True)) == [answer]


def test_token_counts_and_finish_reason_are_returned_on_request(server: Server, base_model: LoadableModel) -> None:
    flags = {f"return_{name}": True for name in ("finish_reason", "num_input_tokens", "num_output_tokens")}
    results = stream_grpc(
        server, render_prompt(base_model, PROMPTS[0]), build_sampling("", max_tokens=5), stream=True, **flags
    )
    assert [result.as_numpy("finish_reason")[0] for result in results] == [b"None"] * (len(results) - 1) + [b"length"]
    assert sum(int(result.as_numpy("num_output_tokens")[0]) for result in results) == 5
    expected = len(
        model_loading.load_tokenizer(base_model.tokenizer)(render_prompt(base_model, PROMPTS[0]))["input_ids"]
    )
    assert {int(result.as_numpy("num_input_tokens")[0]) for result in results} == {expected}


def test_answer_ends_before_the_stop_string(server: Server, base_model: LoadableModel) -> None:
    expected = generate_with_transformers(base_model, PROMPTS[0], 24)
    stop = expected[len(expected) // 2 :][:3]
    results = stream_grpc(
        server, render_prompt(base_model, PROMPTS[0]), build_sampling("", stop=["never there", stop]), stream=True
    )
    assert "".join(read_texts(results)) == expected[: expected.index(stop)]


INVALID_REQUESTS = [
    (
        {"text_input": "a", "sampling_parameters": '{"lora_name": "nobody"}'},
        "adapter 'nobody' does not exist; available adapters: ot.her, two",
    ),
    ({"text_input": "a", "sampling_parameters": "nonsense"}, "sampling_parameters is not JSON"),
    ({"text_input": "a", "sampling_parameters": "[1]"}, "is [1]; expected a JSON object"),
    ({"text_input": "a", "sampling_parameters": '{"mood": "good"}'}, "mood"),
    ({"text_input": "a", "sampling_parameters": '{"max_tokens": 0}'}, "max_tokens"),
    ({"text_input": "a", "sampling_parameters": '{"temperature": -1}'}, "temperature"),
    ({"stream": False}, "text_input"),
    ({"text_input": "list " * 3000, "sampling_parameters": '{"max_tokens": 1}'}, "2048"),
]


@pytest.mark.parametrize(("body", "message"), INVALID_REQUESTS, ids=[message for _, message in INVALID_REQUESTS])
def test_invalid_request_is_rejected_with_a_message(server: Server, body: dict[str, Any], message: str) -> None:
    with pytest.raises(InferenceServerException, match=re.escape(message)) as error:
        request_grpc(server, "two", body)
    assert "Traceback" not in str(error.value)


def test_numeric_parameters_may_be_strings(server: Server, base_model: LoadableModel) -> None:
    text = render_prompt(base_model, PROMPTS[0])
    results = stream_grpc(server, text, {"temperature": "0", "max_tokens": "24"}, exclude_input_in_output=True)
    assert read_texts(results) == [generate_with_transformers(base_model, PROMPTS[0], 24)]


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("1/model.json", r"model\.json is missing"),
        ("1/multi_lora.json", r"multi_lora\.json is missing: model\.json enables LoRA"),
        ("1/weights", r"the model in model\.json was not found: two/1/weights, relative to"),
        (
            "1/adapters/ot.her/adapter_config.json",
            r"adapter ot\.her was not found in two/1/adapters/ot\.her, relative to",
        ),
    ],
)
def test_missing_file_is_reported_at_load_time(
    vllm_package: Artifact, tmp_path: Path, missing: str, message: str
) -> None:
    shutil.copytree(vllm_package.path, tmp_path / "copy")
    path = tmp_path / "copy" / "two" / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(ModelLoadError, match=message), running_server(tmp_path / "copy", log=tmp_path / "log"):
        pass


@pytest.mark.long
def test_vllm_package_is_replaced_without_failed_requests(
    vllm_package: Artifact, second_adapter: LoadableModel, models_by_adapter: dict[str, LoadableModel], tmp_path: Path
) -> None:
    """Like `tuneline deploy`: test the new version next to the served one, then switch. Long: proves two packages."""
    config = TritonPackagingConfig(backend="vllm", model_name="one", golden_prompts=PROMPTS, golden_max_tokens=12)
    new_package = package(second_adapter, tmp_path / "other", config, seed=1, reporter=SilentReporter())
    folder = tmp_path / "serving"
    (folder / "repository").mkdir(parents=True)
    old, new = (
        Release(str(version), serving_folder.copy_package(folder, artifact), {"repository_sha256": artifact.sha256})
        for version, artifact in enumerate((vllm_package, new_package), 1)
    )
    request = {
        "text_input": render_prompt(models_by_adapter[""], PROMPTS[0]),
        "exclude_input_in_output": True,
        "sampling_parameters": json.dumps(GREEDY),
    }
    answers: list[tuple[str, str]] = []  # version, text
    stop = threading.Event()
    with running_server(folder / "repository", models=[], log=tmp_path / "log") as server:

        def deploy(release: Release, previous: Release | None) -> None:
            try_release(server, folder, "clerk", release, 120.0)
            switch_version(server, folder, "clerk", release, previous, 120.0)

        def send_requests() -> None:
            while not stop.is_set():
                answers.append(request_answer(server, request))

        deploy(old, None)
        client = threading.Thread(target=send_requests)
        client.start()
        try:
            deploy(new, old)
            for _ in range(2):
                request_answer(server, request)
        finally:
            stop.set()
            client.join()
        with_adapter = {**request, "sampling_parameters": json.dumps({**GREEDY, "lora_name": "one"})}
        _, answer = request_answer(server, with_adapter)
    expected = generate_with_transformers(models_by_adapter[""], PROMPTS[0], 24)
    assert {text for _, text in answers} == {expected}
    assert [version for version, _ in answers] == sorted(version for version, _ in answers)
    assert {version for version, _ in answers} == {"1", "2"}
    assert answer == generate_with_transformers(models_by_adapter["ot.her"], PROMPTS[0], 24)


@pytest.mark.stress
def test_vllm_version_that_needs_the_whole_gpu_is_exchanged_and_restored_on_failure(
    vllm_package: Artifact, models_by_adapter: dict[str, LoadableModel], tmp_path: Path
) -> None:
    """Long: loads three versions one after the other."""
    folder = tmp_path / "serving"
    (folder / "repository").mkdir(parents=True)
    copy = serving_folder.copy_package(folder, vllm_package)
    shutil.copytree(copy.path, tmp_path / "wrong")
    proof = json.loads((tmp_path / "wrong" / "proof.json").read_text())
    proof["answers"] = [{**answer, "text": "another text"} for answer in proof["answers"]]
    (tmp_path / "wrong" / "proof.json").write_text(json.dumps(proof))
    first, second, wrong = (
        Release("1", copy), Release("2", copy), Release("3", Artifact(tmp_path / "wrong", copy.manifest))
    )  # fmt: skip
    assert must_unload_first(first)
    request = {
        "text_input": render_prompt(models_by_adapter[""], PROMPTS[0]),
        "exclude_input_in_output": True,
        "sampling_parameters": json.dumps(GREEDY),
    }
    with running_server(folder / "repository", models=[], log=tmp_path / "log") as server:
        deploy_version(server, folder, "clerk", first, 120.0)
        assert exchange_version(server, folder, "clerk", second, first, 120.0) == 6
        assert repository_api.get_version_states(server, "clerk")["1"] == "UNAVAILABLE"
        assert request_answer(server, request)[0] == "2"
        with pytest.raises(SmokeTestError, match="differs from the proof"):
            exchange_version(server, folder, "clerk", wrong, second, 120.0)
        assert request_answer(server, request)[0] == "2"


def test_small_memory_share_lets_two_vllm_versions_run_at_once(vllm_package: Artifact, tmp_path: Path) -> None:
    shutil.copytree(vllm_package.path, tmp_path / "copy")
    settings = tmp_path / "copy" / "two" / "1" / "model.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "gpu_memory_utilization": 0.5}))
    assert not must_unload_first(Release("1", Artifact(tmp_path / "copy", vllm_package.manifest)))


def request_answer(server: Server, fields: dict[str, Any]) -> tuple[str, str]:
    """Return the version that answered and the text of a complete answer."""
    results = request_grpc(server, "clerk", fields)
    return results[0].get_response().model_version, "".join(read_texts(results))
