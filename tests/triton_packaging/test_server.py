"""The real Triton server with the packaged tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from components.common import liveness, models, process
from components.common.artifacts import Artifact
from components.common.errors import EngineMissingError
from components.common.models import Model
from components.common.progress import Silent
from components.triton_packaging import pbtxt
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.proof import ProofError
from components.triton_packaging.server import ModelLoadError, Server, get_json, running_server
from components.triton_packaging.stage import package, write_repository

pytestmark = pytest.mark.triton

Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def ask(served: Server) -> Ask:
    """Ask over the generate extension; a refusal is {"status", "error"}."""

    def asking(**body: Any) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = get_json(f"{served.http_url}/v2/models/tiny/generate", method="POST", body=body)
        except urllib.error.HTTPError as error:
            return {"status": error.code, **json.loads(error.read())}
        return answer

    return asking


def test_a_package_is_proven_by_a_real_server(proven: Artifact) -> None:
    proof = proven.manifest.summary["proof"]
    assert set(proof) == {"server_version", "ready_seconds", "golden_prompts", "matched", "tokens_per_second", "memory_mib"}
    assert set(proof["tokens_per_second"]) == {"1", "8"}
    assert all(speed > 0 for speed in proof["tokens_per_second"].values())
    assert proof["memory_mib"]["stubs"] > proof["memory_mib"]["server"] > 10
    assert (proof["server_version"], proof["golden_prompts"], proof["matched"]) == ("2.51.0", 4, 4)
    assert proof["ready_seconds"] > 0
    assert not list(proven.path.rglob("__pycache__"))
    assert not (proven.path / "triton.log").exists()


def test_golden_answers_are_those_of_plain_transformers(golden: list[dict[str, Any]], tiny_adapted: Model) -> None:
    model, tokenizer = models.load(tiny_adapted), models.load_tokenizer(tiny_adapted.tokenizer)
    for answer in golden:
        chat = [{"role": "user", "content": answer["prompt"]}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        out = model.generate(**inputs, do_sample=False, max_new_tokens=12, pad_token_id=tokenizer.pad_token_id)
        assert tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True) == answer["text"]
    assert len({answer["text"] for answer in golden}) == len(golden)


def test_the_generate_endpoint_answers_a_plain_text_as_a_chat(ask: Ask, golden: list[dict[str, Any]]) -> None:
    answer = ask(text_input=golden[0]["prompt"], max_tokens=12)
    assert answer["text_output"] == golden[0]["text"]
    assert answer["prompt_tokens"] == golden[0]["prompt_tokens"]
    assert answer["completion_tokens"] <= 12
    assert answer["finish_reason"] in ("stop", "length")


def test_chat_messages_answer_like_the_text_they_hold(ask: Ask, golden: list[dict[str, Any]]) -> None:
    messages = json.dumps([{"role": "user", "content": golden[2]["prompt"]}])
    assert ask(messages=messages, max_tokens=12)["text_output"] == golden[2]["text"]


def test_raw_text_is_continued_without_the_template(ask: Ask, golden: list[dict[str, Any]]) -> None:
    raw = ask(text_input=golden[0]["prompt"], apply_chat_template=False, max_tokens=4)
    assert raw["prompt_tokens"] < golden[0]["prompt_tokens"]


def test_grpc_answers_the_same(served: Server, golden: list[dict[str, Any]]) -> None:
    from tritonclient import grpc

    text = grpc.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([golden[1]["prompt"].encode()], dtype=np.object_))
    limit = grpc.InferInput("max_tokens", [1], "INT32")
    limit.set_data_from_numpy(np.array([12], dtype=np.int32))
    with grpc.InferenceServerClient(served.grpc_url) as client:
        result = client.infer("tiny", [text, limit])
    assert result.as_numpy("text_output")[0].decode() == golden[1]["text"]


def test_grpc_refuses_text_that_is_not_utf_8(served: Server) -> None:
    from tritonclient import grpc
    from tritonclient.utils import InferenceServerException

    text = grpc.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([b"\xff\xfe"], dtype=np.object_))
    with (
        grpc.InferenceServerClient(served.grpc_url) as client,
        pytest.raises(InferenceServerException, match="text_input is not UTF-8") as refused,
    ):
        client.infer("tiny", [text])
    assert "INVALID_ARGUMENT" in refused.value.status()


def test_sampling_repeats_with_a_seed_and_differs_without(ask: Ask) -> None:
    how = {"text_input": "Name the fox.", "max_tokens": 24, "temperature": 1.5}
    assert ask(**how, seed=7)["text_output"] == ask(**how, seed=7)["text_output"]
    assert len({ask(**how)["text_output"] for _ in range(3)}) > 1
    assert len({ask(**how, seed=seed)["text_output"] for seed in range(3)}) > 1


def test_sampling_from_the_single_best_token_is_greedy(ask: Ask, golden: list[dict[str, Any]]) -> None:
    how = {"text_input": golden[0]["prompt"], "max_tokens": 12, "temperature": 2.0}
    assert ask(**how, top_k=1)["text_output"] == golden[0]["text"]
    assert ask(**how, top_p=1e-6)["text_output"] == golden[0]["text"]


def test_a_stop_string_ends_the_answer_before_it(ask: Ask) -> None:
    text = str(ask(text_input="Name the fox.", max_tokens=40)["text_output"])
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    answer = ask(text_input="Name the fox.", max_tokens=40, stop=["never there", stop])
    assert answer["text_output"] == text[: text.index(stop)]
    assert answer["finish_reason"] == "stop"
    assert answer["completion_tokens"] < 40


def test_a_request_without_a_limit_gets_the_default_one(ask: Ask) -> None:
    assert ask(text_input="Name the fox.")["completion_tokens"] <= 256


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "give either text_input or messages"),
        ({"max_tokens": 4}, "give either text_input or messages"),
        ({"text_input": "a", "messages": "[]"}, "not both"),
        ({"text_input": ""}, "text_input is empty"),
        ({"text_input": "", "apply_chat_template": False}, "the prompt is empty"),
        ({"text_input": "word " * 3000}, "at most 2047 are allowed"),
        ({"text_input": "a" * 140_000}, "characters; at most"),
        ({"text_input": "a", "max_tokens": 0}, "max_tokens is 0; it must be from 1 to 1000"),
        ({"text_input": "a", "max_tokens": 1001}, "max_tokens is 1001; it must be from 1 to 1000"),
        ({"text_input": "6" * 2000, "max_tokens": 64}, "exceed the model's context of 2048 tokens"),
        ({"text_input": "a", "temperature": -0.5}, "temperature is -0.5; it must be from 0 to 10"),
        ({"text_input": "a", "top_p": 0}, "top_p is 0"),
        ({"text_input": "a", "top_p": 1.5}, "top_p is 1.5"),
        ({"text_input": "a", "top_k": -1}, "top_k is -1"),
        ({"text_input": "a", "seed": -1}, "seed is -1"),
        ({"text_input": "a", "stop": [""]}, "a stop string must have from 1 to 256 characters"),
        ({"text_input": "a", "stop": ["x"] * 17}, "17 stop strings; at most 16"),
        ({"messages": "{"}, "messages is not JSON"),
        ({"messages": "[" * 5000}, "messages is not JSON"),
        ({"messages": "[]"}, "messages must be a JSON list"),
        ({"messages": '[{"role": "king", "content": "a"}]'}, "messages[0] must have a role"),
        ({"messages": '[{"role": "user", "content": 5}]'}, "messages[0] must have a role"),
        ({"messages": '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]'}, "nothing to answer"),
        ({"messages": '[{"role": "user", "content": "a"}]', "apply_chat_template": False}, "messages need the chat template"),
        ({"text_input": ["a", "b"]}, "text_input"),
    ],
)  # fmt: skip
def test_a_clients_fault_is_told_with_status_400(ask: Ask, body: dict[str, Any], message: str) -> None:
    refused = ask(**body)
    assert refused.get("status") == 400, refused
    assert message in refused["error"]
    assert "Traceback" not in refused["error"]


def test_the_next_request_after_refused_ones_is_answered(ask: Ask, golden: list[dict[str, Any]]) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda n: ask(text_input=golden[n % 4]["prompt"], max_tokens=12 if n % 3 else 0), range(12)))
    assert [a.get("status") for a in answers] == [None if n % 3 else 400 for n in range(12)]
    assert all(a["text_output"] == golden[n % 4]["text"] for n, a in enumerate(answers) if n % 3)


def test_serving_writes_nothing_into_the_package(served: Server, ask: Ask, proven: Artifact) -> None:
    ask(text_input="Hello", max_tokens=1)
    on_disk = {p.relative_to(proven.path).as_posix() for p in proven.path.rglob("*") if p.is_file()}
    assert on_disk == {f.path for f in proven.manifest.files} | {"manifest.json"}


def test_the_server_tells_the_packages_lineage(served: Server, tiny_adapted: Model) -> None:
    config = get_json(f"{served.http_url}/v2/models/tiny/config")
    assert config["parameters"]["model_sha256"]["string_value"] == tiny_adapted.sha256


def test_a_package_whose_answers_differ_is_not_published(
    tiny_adapted: Model, tiny_base: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from components.triton_packaging import stage

    def other_weights(model: Model, output: Path, config: TritonPackagingConfig, dtype: str, _: Any) -> Path:
        return write_repository(tiny_base, output, config, dtype)

    monkeypatch.setattr(stage, "write_repository", other_weights)
    config = TritonPackagingConfig(golden_prompts=["What is a list?"], golden_max_tokens=8)
    with pytest.raises(ProofError, match="What is a list"):
        package(tiny_adapted, tmp_path / "out", config, seed=1, reporter=Silent())
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert (tmp_path / "out" / ".unfinished").exists()


def test_a_model_that_does_not_load_is_told_in_the_servers_words(tiny_base: Model, tmp_path: Path, quick: TritonPackagingConfig) -> None:
    folder = write_repository(tiny_base, tmp_path, quick, "float32")
    (folder / "1" / "weights" / "model.safetensors").unlink()
    with (
        pytest.raises(ModelLoadError, match=r"did not load tuneline(?s:.*)safetensors"),
        running_server(tmp_path, log=tmp_path / "triton.log"),
    ):
        pass
    assert not list(Path("/dev/shm").glob(f"tuneline_{os.getpid()}_*_region*"))


def test_a_configuration_the_server_refuses_is_told(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text('name: "other" backend: "python"')
    with pytest.raises(ModelLoadError, match="did not load m"), running_server(tmp_path, log=tmp_path / "triton.log"):
        pass


SERVE = """
import sys
from pathlib import Path
from components.common.errors import TunelineError
from components.triton_packaging.serve import serve
try:
    serve(Path(sys.argv[1]), on_ready=lambda s: print(s.pid, s.http_url, flush=True), http_port=0, grpc_port=0, metrics_port=0)
    print("ended", flush=True)
except TunelineError as error:
    print(error.kind, error.message, flush=True)
"""
PACKAGE = """
import sys
from pathlib import Path
from components.common import models
from components.common.progress import Plain
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.stage import package
config = TritonPackagingConfig(golden_prompts=["Name the fox."], golden_max_tokens=8)
package(models.open_model(sys.argv[1]), Path(sys.argv[2]), config, seed=1, reporter=Plain(sys.stdout))
"""


def start(program: str, *arguments: Path) -> subprocess.Popen[str]:
    """A Python process of ours whose lines can be read."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    root = Path(__file__).parents[2]
    return subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True, preexec_fn=process.die_with_parent)


@pytest.fixture
def serving(proven: Artifact, tmp_path: Path) -> Any:
    """A serving process, ready: (process, server's pid, url)."""
    child = start(SERVE, proven.path)
    assert child.stdout
    pid, url = child.stdout.readline().split()
    yield child, int(pid), url
    child.kill()
    child.wait()
    child.stdout.close()


def gone(pid: int, seconds: float = 10.0) -> bool:
    """Whether a process ends within so many seconds; one that waits for its parent to look has ended."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def stubs_of(pid: int) -> list[int]:
    """The children of a server."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serving_answers_and_ends_cleanly_on_a_signal(
    serving: tuple[Any, int, str], golden: list[dict[str, Any]], number: signal.Signals
) -> None:
    child, pid, url = serving
    answer = get_json(f"{url}/v2/models/tiny/generate", method="POST", body={"text_input": golden[0]["prompt"], "max_tokens": 12})
    assert answer["text_output"] == golden[0]["text"]
    child.send_signal(number)
    assert child.stdout.read() == "ended\n"
    assert child.wait(30) == 0
    assert gone(pid)
    assert not list(Path("/dev/shm").glob(f"tuneline_{child.pid}_*"))


def test_the_server_and_its_model_are_gone_after_the_parent_is_killed(serving: tuple[Any, int, str]) -> None:
    child, pid, _ = serving
    everyone = [pid, *stubs_of(pid)]
    child.kill()
    assert all(gone(each) for each in everyone)


def test_a_server_that_dies_is_told(serving: tuple[Any, int, str]) -> None:
    child, pid, _ = serving
    os.kill(pid, signal.SIGKILL)
    assert "engine_missing the Triton server ended with exit status -9" in child.stdout.read()


def test_a_server_that_ends_while_loading_is_told_with_its_log(proven: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from components.triton_packaging import server

    monkeypatch.setattr(server, "_command", lambda *_: ["sh", "-c", "echo 'E1 error: broken'; exit 3"])
    with pytest.raises(EngineMissingError, match=r"exit status 3(?s:.*)error: broken"), running_server(proven.path, log=tmp_path / "log"):
        pass


def test_what_a_killed_server_left_is_swept_when_the_next_one_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from components.triton_packaging import server

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(server, "_command", lambda *_: ["false"])
    (tmp_path / f"tuneline-triton.{liveness.where()}.4194303-1.0a1b2c3d").mkdir()
    with pytest.raises(EngineMissingError), running_server(tmp_path, models=["m"], log=tmp_path / "log"):
        pass
    assert [path.name for path in tmp_path.glob("tuneline-*")] == []


def test_a_server_that_is_too_slow_is_told(proven: Artifact, tmp_path: Path) -> None:
    with (
        pytest.raises(ModelLoadError, match="not ready after 0 seconds"),
        running_server(proven.path, log=tmp_path / "log", ready_timeout=0.2),
    ):
        pass


def test_a_package_of_plain_base_weights_is_proven_too(tiny_base: Model, tmp_path: Path) -> None:
    config = TritonPackagingConfig(golden_prompts=["Name the fox."], golden_max_tokens=8)
    made = package(tiny_base, tmp_path / "out", config, seed=1, reporter=Silent())
    assert made.manifest.summary["proof"]["matched"] == 1
    assert pbtxt.read(made.path / "tuneline").parameters["base_model"].string_value == "model"


def test_serving_ends_cleanly_when_asked_while_the_model_still_loads(proven: Artifact) -> None:
    child = start(SERVE, proven.path)
    until = time.monotonic() + 120
    while not stubs_of(child.pid) and time.monotonic() < until:
        time.sleep(0.02)
    started = stubs_of(child.pid)  # the server, and for a moment what it starts
    child.send_signal(signal.SIGINT)
    output, _ = child.communicate(timeout=90)
    assert output == "ended\n"
    assert started
    assert all(gone(pid) for pid in started)


def test_packaging_killed_in_its_proof_finishes_when_run_again_with_the_same_digest(
    tiny_folder: Path, tiny_base: Model, tmp_path: Path
) -> None:
    config = TritonPackagingConfig(golden_prompts=["Name the fox."], golden_max_tokens=8)
    child = start(PACKAGE, tiny_folder, tmp_path / "out")
    assert child.stdout
    assert any("loading the package" in line for line in child.stdout)
    child.kill()
    child.communicate()
    assert not (tmp_path / "out" / "manifest.json").exists()
    again = package(tiny_base, tmp_path / "out", config, seed=1, reporter=Silent())
    elsewhere = package(tiny_base, tmp_path / "elsewhere", config.model_copy(update={"prove": False}), seed=1, reporter=Silent())
    assert again.sha256 == elsewhere.sha256
    assert again.manifest.summary["proof"]["matched"] == 1
