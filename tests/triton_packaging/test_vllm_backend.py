"""The real Triton server with a vLLM package of two adapters. Where vLLM is not installed its stand-in answers, and the package says so."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.common import models
from components.common.artifacts import Artifact
from components.common.models import Model
from components.common.progress import Silent
from components.triton_packaging import serving_env
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.deployment import layout
from components.triton_packaging.deployment.layout import Release
from components.triton_packaging.deployment.repository_api import Address
from components.triton_packaging.deployment.switching import switch
from components.triton_packaging.protocols import tensors
from components.triton_packaging.server import ModelLoadError, Server, running_server
from components.triton_packaging.stage import package
from tests.triton_packaging.clients import Came, by_transformers, post

pytestmark = pytest.mark.triton

PROMPTS = ["What is a list?", "Grüße, 你好"]
GREEDY = {"temperature": 0, "max_tokens": 24}
without_vllm = pytest.mark.skipif(serving_env.missing_vllm() is None, reason="vLLM itself answers here")


@pytest.fixture(scope="module")
def made(tiny_adapted: Model, tiny_other: Model, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Two adapters over the tiny model, packaged and tried."""
    config = TritonPackagingConfig(backend="vllm", model_name="two", golden_prompts=PROMPTS, golden_max_tokens=12)
    folder = tmp_path_factory.mktemp("vllm") / "repository"
    return package(tiny_adapted, folder, config, seed=1, reporter=Silent(), adapters={"ot.her": tiny_other})


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server writes."""
    return tmp_path_factory.mktemp("log") / "triton.log"


@pytest.fixture(scope="module")
def server(made: Artifact, log: Path) -> Iterator[Server]:
    """A real server with the package."""
    with running_server(made.path, log=log) as running:
        yield running


@pytest.fixture(scope="module")
def served(tiny_base: Model, tiny_adapted: Model, tiny_other: Model) -> dict[str, Model]:
    """What answers, by the adapter that a request names."""
    return {"": tiny_base, "two": tiny_adapted, "ot.her": tiny_other}


def rendered(model: Model, prompt: str) -> str:
    tokenizer = models.load_tokenizer(model.tokenizer)
    return str(tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True))


def sampling(adapter: str, **more: Any) -> dict[str, Any]:
    return {**GREEDY, **({"lora_name": adapter} if adapter else {}), **more}


def streamed(server: Server, text: str, sampling: dict[str, Any], **flags: bool) -> list[Any]:
    """The responses of a gRPC stream. Raises the error that came instead of one."""
    from tritonclient import grpc

    came, results = Came(), []
    with grpc.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: came.put((result, error)))
        client.async_stream_infer(
            "two", tensors({"text_input": text, "sampling_parameters": json.dumps(sampling), **flags}), enable_empty_final_response=True
        )
        while True:
            result, error = came.get(timeout=120)
            if error is not None:
                raise error
            results.append(result)
            if result.get_response().parameters["triton_final_response"].bool_param:
                return results


def texts(results: list[Any]) -> list[str]:
    return [result.as_numpy("text_output")[0].decode() for result in results]


@without_vllm
def test_a_package_tried_with_the_stand_in_is_honest_about_it(made: Artifact) -> None:
    assert made.manifest.summary["proof"] is None
    because = made.manifest.summary["unproven_because"]
    assert because.startswith("vLLM is not installed here; a stand-in loaded the package and answered 6 of 6 golden prompts")
    told = json.loads((made.path / "proof.json").read_text())
    assert (told["proof"], told["stand_in"]["matched"]) == (None, 6)
    assert {answer.get("adapter", "") for answer in told["stand_in"]["answers"]} == {"", "two", "ot.her"}
    assert "cannot be promoted" in (made.path / "report.html").read_text()


@without_vllm
def test_the_stand_in_is_announced_in_the_log(server: Server, log: Path) -> None:
    assert "vLLM IS NOT INSTALLED" in log.read_text()


def test_every_adapter_and_the_base_answer_as_peft_does_over_a_grpc_stream(server: Server, served: dict[str, Model]) -> None:
    found = {}
    for adapter, model in served.items():
        results = streamed(server, rendered(model, PROMPTS[1]), sampling(adapter), stream=True)
        found[adapter] = "".join(texts(results))
        assert found[adapter] == by_transformers(model, PROMPTS[1], 24)
        assert len(results) > 2
    assert len(set(found.values())) == 3


def test_every_adapter_and_the_base_answer_as_peft_does_over_generate_stream(server: Server, served: dict[str, Model]) -> None:
    for adapter, model in served.items():
        body = {"text_input": rendered(model, PROMPTS[0]), "stream": True, "parameters": sampling(adapter)}
        status, answer = post(server, "two/generate_stream", body)
        assert status == 200, answer
        events = [json.loads(line.removeprefix("data: ")) for line in answer.split("\n\n") if line]
        assert "".join(event["text_output"] for event in events) == by_transformers(model, PROMPTS[0], 24)


def test_the_answer_holds_its_input_unless_that_is_left_out(server: Server, tiny_base: Model) -> None:
    text = rendered(tiny_base, PROMPTS[0])
    answer = by_transformers(tiny_base, PROMPTS[0], 24)
    for flags, expected in (({}, text + answer), ({"exclude_input_in_output": True}, answer)):
        status, told = post(server, "two/generate", {"text_input": text, **flags, "parameters": GREEDY})
        assert (status, json.loads(told)["text_output"]) == (200, expected)


def test_counts_and_the_reason_to_end_come_where_they_are_asked_for(server: Server, tiny_base: Model) -> None:
    flags = {f"return_{name}": True for name in ("finish_reason", "num_input_tokens", "num_output_tokens")}
    results = streamed(server, rendered(tiny_base, PROMPTS[0]), sampling("", max_tokens=5), stream=True, **flags)
    assert [result.as_numpy("finish_reason")[0] for result in results] == [b"None"] * (len(results) - 1) + [b"length"]
    assert sum(int(result.as_numpy("num_output_tokens")[0]) for result in results) == 5
    expected = len(models.load_tokenizer(tiny_base.tokenizer)(rendered(tiny_base, PROMPTS[0]))["input_ids"])
    assert {int(result.as_numpy("num_input_tokens")[0]) for result in results} == {expected}


def test_a_stop_string_ends_the_answer_before_it(server: Server, tiny_base: Model) -> None:
    whole = by_transformers(tiny_base, PROMPTS[0], 24)
    stop = whole[len(whole) // 2 :][:3]
    results = streamed(server, rendered(tiny_base, PROMPTS[0]), sampling("", stop=["never there", stop]), stream=True)
    assert "".join(texts(results)) == whole[: whole.index(stop)]


WRONG = [
    ({"text_input": "a", "parameters": {"lora_name": "nobody"}}, "there is no adapter 'nobody': known are ot.her, two"),
    ({"text_input": "a", "sampling_parameters": "nonsense"}, "sampling_parameters is not JSON"),
    ({"text_input": "a", "sampling_parameters": "[1]"}, "must be a JSON object"),
    ({"text_input": "a", "parameters": {"mood": "good"}}, "mood"),
    ({"text_input": "a", "parameters": {"max_tokens": 0}}, "max_tokens"),
    ({"text_input": "a", "parameters": {"temperature": -1}}, "temperature"),
    ({"stream": False}, "text_input"),
    ({"text_input": "list " * 3000, "parameters": {"max_tokens": 1}}, "2048"),
]


@pytest.mark.parametrize(("body", "said"), WRONG, ids=[said for _, said in WRONG])
def test_a_wrong_request_is_refused_with_a_sentence(server: Server, body: dict[str, Any], said: str) -> None:
    status, answer = post(server, "two/generate", body)
    assert (status, said in answer) == (400, True), (status, answer)
    assert "Traceback" not in answer


def test_an_unknown_adapter_is_refused_on_a_grpc_stream_too(server: Server) -> None:
    with pytest.raises(Exception, match="there is no adapter 'nobody'"):
        streamed(server, "a", {"lora_name": "nobody"}, stream=True)


def test_numbers_may_be_texts(server: Server, tiny_base: Model) -> None:
    text = rendered(tiny_base, PROMPTS[0])
    results = streamed(server, text, {"temperature": "0", "max_tokens": "24"}, exclude_input_in_output=True)
    assert texts(results) == [by_transformers(tiny_base, PROMPTS[0], 24)]


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("1/model.json", r"model\.json is missing"),
        ("1/multi_lora.json", r"multi_lora\.json is missing: model\.json enables LoRA"),
        ("1/weights", "the model two/1/weights of model.json is not there, looked for from"),
        ("1/adapters/ot.her/adapter_config.json", r"the adapter ot\.her is not in two/1/adapters/ot\.her, looked for from"),
    ],
)
def test_a_missing_file_is_told_when_the_model_is_loaded(made: Artifact, tmp_path: Path, lost: str, said: str) -> None:
    shutil.copytree(made.path, tmp_path / "copy")
    path = tmp_path / "copy" / "two" / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(ModelLoadError, match=said), running_server(tmp_path / "copy", log=tmp_path / "log"):
        pass


@pytest.mark.long
def test_one_vllm_package_takes_the_place_of_another_while_it_answers(
    made: Artifact, tiny_other: Model, served: dict[str, Model], tmp_path: Path
) -> None:
    """As `tuneline deploy` does it: tried beside the one in service with every adapter, then switched to."""
    config = TritonPackagingConfig(backend="vllm", model_name="one", golden_prompts=PROMPTS, golden_max_tokens=12)
    other = package(tiny_other, tmp_path / "other", config, seed=1, reporter=Silent())
    folder = tmp_path / "serving"
    (folder / "repository").mkdir(parents=True)
    old, new = (Release(str(n), layout.take_in(folder, found)) for n, found in enumerate((made, other), 1))
    asked = {"text_input": rendered(served[""], PROMPTS[0]), "exclude_input_in_output": True, "parameters": GREEDY}
    answers: list[tuple[int, str]] = []
    stop = threading.Event()
    with running_server(folder / "repository", models=[], log=tmp_path / "log") as server:
        address = Address(server.http_url, server.grpc_url)

        def bring(release: Release, before: Release | None) -> None:
            switch(
                address, folder, "clerk", release, before,
                lineage=lambda one: {"repository_sha256": one.package.sha256}, confirm=lambda: None, timeout=120.0, reporter=Silent(),
            )  # fmt: skip

        def keep_asking() -> None:
            while not stop.is_set():
                answers.append(post(server, "clerk/generate", asked))

        bring(old, None)
        asking = threading.Thread(target=keep_asking)
        asking.start()
        try:
            bring(new, old)
            for _ in range(2):
                post(server, "clerk/generate", asked)
        finally:
            stop.set()
            asking.join()
        with_adapter = {**asked, "parameters": {**GREEDY, "lora_name": "one"}}
        status, said = post(server, "clerk/generate", with_adapter)
    expected = by_transformers(served[""], PROMPTS[0], 24)
    found = [(status, json.loads(said)["text_output"], json.loads(said)["model_version"]) for status, said in answers]
    assert {(status, text) for status, text, _ in found} == {(200, expected)}, "no request failed, none was answered otherwise"
    assert [version for *_, version in found] == sorted(version for *_, version in found)
    assert {version for *_, version in found} == {"1", "2"}
    assert (status, json.loads(said)["text_output"]) == (200, by_transformers(served["ot.her"], PROMPTS[0], 24))
