"""The real Triton server with the packaged tiny model.

The tests marked `long` kill the packaging or package further models, each with its own server start.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from components.common.artifacts.artifact_folder import Artifact
from components.common.models import model_loading
from components.common.models.model_loading import LoadableModel
from components.common.runtime import process_control
from components.common.runtime.errors import EngineMissingError
from components.common.runtime.reporters import SilentReporter
from components.common.workspace import liveness
from components.triton_packaging import triton_config, triton_server
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.serving_proof import ProofError
from components.triton_packaging.stage import package, write_repository
from components.triton_packaging.triton_server import ModelLoadError, Server, ServerAddress, keep_log, running_server
from tests.triton_packaging.triton_clients import get_metrics, infer_grpc

pytestmark = pytest.mark.triton

Generate = Callable[..., dict[str, Any]]


@pytest.fixture
def generate(server: Server) -> Generate:
    """Return a function that requests a complete answer. An error is returned as {"status", "error"}."""

    def request_answer(**fields: Any) -> dict[str, Any]:
        try:
            return infer_grpc(server, "tiny", **fields)
        except InferenceServerException as error:
            return {"status": error.status(), "error": error.message()}

    return request_answer


def test_server_opens_no_network_port_and_only_its_user_can_connect(server: Server) -> None:
    group = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    assert len(group) == 3
    assert [connection for process in group for connection in process.net_connections("inet")] == []
    sockets = server.metrics_socket.parent
    assert sorted(path.name for path in sockets.iterdir()) == ["grpc:1", "metrics"]
    assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
    assert get_metrics(server).startswith("# HELP")


def test_package_is_proven_by_a_real_server(proven_package: Artifact) -> None:
    proof = proven_package.manifest.summary["proof"]
    assert set(proof) == {
        "server_version",
        "ready_seconds",
        "golden_prompts",
        "matched",
        "tokens_per_second",
        "memory_mib",
    }
    assert set(proof["tokens_per_second"]) == {"1", "8"}
    assert all(speed > 0 for speed in proof["tokens_per_second"].values())
    assert proof["memory_mib"]["stubs"] > proof["memory_mib"]["server"] > 10
    assert (proof["server_version"], proof["golden_prompts"], proof["matched"]) == ("2.51.0", 4, 4)
    assert proof["ready_seconds"] > 0
    assert not list(proven_package.path.rglob("__pycache__"))
    assert not (proven_package.path / "triton.log").exists()


def test_golden_answers_match_transformers(golden_answers: list[dict[str, Any]], adapted_model: LoadableModel) -> None:
    model, tokenizer = model_loading.load_model(adapted_model), model_loading.load_tokenizer(adapted_model.tokenizer)
    for answer in golden_answers:
        chat = [{"role": "user", "content": answer["prompt"]}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        out = model.generate(**inputs, do_sample=False, max_new_tokens=12, pad_token_id=tokenizer.pad_token_id)
        assert tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True) == answer["text"]
    assert len({answer["text"] for answer in golden_answers}) == len(golden_answers)


def test_text_is_answered_as_a_chat(generate: Generate, golden_answers: list[dict[str, Any]]) -> None:
    answer = generate(text_input=golden_answers[0]["prompt"], max_tokens=12)
    assert answer["text_output"] == golden_answers[0]["text"]
    assert answer["prompt_tokens"] == golden_answers[0]["prompt_tokens"]
    assert answer["completion_tokens"] <= 12
    assert answer["finish_reason"] in ("stop", "length")


def test_chat_messages_give_the_same_answer_as_text(generate: Generate, golden_answers: list[dict[str, Any]]) -> None:
    messages = json.dumps([{"role": "user", "content": golden_answers[2]["prompt"]}])
    assert generate(messages=messages, max_tokens=12)["text_output"] == golden_answers[2]["text"]


def test_raw_text_skips_the_chat_template(generate: Generate, golden_answers: list[dict[str, Any]]) -> None:
    raw = generate(text_input=golden_answers[0]["prompt"], apply_chat_template=False, max_tokens=4)
    assert raw["prompt_tokens"] < golden_answers[0]["prompt_tokens"]


def test_grpc_gives_the_golden_answer(server: Server, golden_answers: list[dict[str, Any]]) -> None:
    from tritonclient import grpc

    text = grpc.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([golden_answers[1]["prompt"].encode()], dtype=np.object_))
    limit = grpc.InferInput("max_tokens", [1], "INT32")
    limit.set_data_from_numpy(np.array([12], dtype=np.int32))
    with grpc.InferenceServerClient(server.grpc_url) as client:
        result = client.infer("tiny", [text, limit])
    assert result.as_numpy("text_output")[0].decode() == golden_answers[1]["text"]


def test_grpc_rejects_text_that_is_not_utf_8(server: Server) -> None:
    from tritonclient import grpc

    text = grpc.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([b"\xff\xfe"], dtype=np.object_))
    with (
        grpc.InferenceServerClient(server.grpc_url) as client,
        pytest.raises(InferenceServerException, match="text_input is not UTF-8") as error,
    ):
        client.infer("tiny", [text])
    assert "INVALID_ARGUMENT" in error.value.status()


def test_sampling_is_reproducible_only_with_a_seed(generate: Generate) -> None:
    request = {"text_input": "Name the fox.", "max_tokens": 24, "temperature": 1.5}
    assert generate(**request, seed=7)["text_output"] == generate(**request, seed=7)["text_output"]
    assert len({generate(**request)["text_output"] for _ in range(3)}) > 1
    assert len({generate(**request, seed=seed)["text_output"] for seed in range(3)}) > 1


def test_sampling_from_the_best_token_is_greedy(generate: Generate, golden_answers: list[dict[str, Any]]) -> None:
    request = {"text_input": golden_answers[0]["prompt"], "max_tokens": 12, "temperature": 2.0}
    assert generate(**request, top_k=1)["text_output"] == golden_answers[0]["text"]
    assert generate(**request, top_p=1e-6)["text_output"] == golden_answers[0]["text"]


def test_answer_ends_before_the_stop_string(generate: Generate) -> None:
    text = str(generate(text_input="Name the fox.", max_tokens=40)["text_output"])
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    answer = generate(text_input="Name the fox.", max_tokens=40, stop=["never there", stop])
    assert answer["text_output"] == text[: text.index(stop)]
    assert answer["finish_reason"] == "stop"
    assert answer["completion_tokens"] < 40


def test_request_without_max_tokens_uses_the_default(generate: Generate) -> None:
    assert generate(text_input="Name the fox.")["completion_tokens"] <= 256


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "text_input and messages are both missing"),
        ({"max_tokens": 4}, "text_input and messages are both missing"),
        ({"text_input": "a", "messages": "[]"}, "text_input and messages are both set"),
        ({"text_input": ""}, "text_input is empty"),
        ({"text_input": "", "apply_chat_template": False}, "the prompt is empty"),
        ({"text_input": "word " * 3000}, "at most 2047 are allowed"),
        ({"text_input": "a" * 140_000}, "characters; at most"),
        ({"text_input": "a", "max_tokens": 0}, "max_tokens is 0; it must be from 1 to 1000"),
        ({"text_input": "a", "max_tokens": 1001}, "max_tokens is 1001; it must be from 1 to 1000"),
        ({"text_input": "6" * 2000, "max_tokens": 64}, "exceeds the model's context of 2048 tokens"),
        ({"text_input": "a", "temperature": -0.5}, "temperature is -0.5; it must be from 0 to 10"),
        ({"text_input": "a", "top_p": 0.0}, "top_p is 0"),
        ({"text_input": "a", "top_p": 1.5}, "top_p is 1.5"),
        ({"text_input": "a", "top_k": -1}, "top_k is -1"),
        ({"text_input": "a", "seed": -1}, "seed is -1"),
        ({"text_input": "a", "stop": [""]}, "stop[0] has 0 characters; from 1 to 256 are allowed"),
        ({"text_input": "a", "stop": ["x"] * 17}, "stop has 17 strings; at most 16"),
        ({"messages": "{"}, "messages is not JSON"),
        ({"messages": "[" * 5000}, "messages is not JSON"),
        ({"messages": "[]"}, "messages is []; expected a non-empty JSON list"),
        ({"messages": '[{"role": "king", "content": "a"}]'}, 'messages[0] is {"role": "king", "content": "a"}; expected a role'),
        ({"messages": '[{"role": "user", "content": 5}]'}, 'messages[0] is {"role": "user", "content": 5}; expected a role'),
        ({"messages": '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]'}, "end with a message of another role"),
        ({"messages": '[{"role": "user", "content": "a"}]', "apply_chat_template": False}, "messages require the chat template"),
        ({"text_input": ["a", "b"]}, "text_input"),
    ],
)  # fmt: skip
def test_client_error_is_an_invalid_argument(generate: Generate, body: dict[str, Any], message: str) -> None:
    response = generate(**body)
    assert response.get("status") == "StatusCode.INVALID_ARGUMENT", response
    assert message in response["error"]
    assert "Traceback" not in response["error"]


def test_requests_between_rejected_ones_are_answered(generate: Generate, golden_answers: list[dict[str, Any]]) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(
            pool.map(
                lambda number: generate(
                    text_input=golden_answers[number % 4]["prompt"], max_tokens=12 if number % 3 else 0
                ),
                range(12),
            )
        )
    assert [answer.get("status") for answer in answers] == [
        None if number % 3 else "StatusCode.INVALID_ARGUMENT" for number in range(12)
    ]
    assert all(
        answer["text_output"] == golden_answers[number % 4]["text"]
        for number, answer in enumerate(answers)
        if number % 3
    )


def test_serving_does_not_write_to_the_package(server: Server, generate: Generate, proven_package: Artifact) -> None:
    generate(text_input="Hello", max_tokens=1)
    on_disk = {p.relative_to(proven_package.path).as_posix() for p in proven_package.path.rglob("*") if p.is_file()}
    assert on_disk == {f.path for f in proven_package.manifest.files} | {"manifest.json"}


def test_server_reports_the_lineage_of_the_package(server: Server, adapted_model: LoadableModel) -> None:
    with InferenceServerClient(server.grpc_url) as client:
        config = client.get_model_config("tiny").config
    assert config.parameters["model_sha256"].string_value == adapted_model.sha256


def test_package_with_different_answers_is_not_published(
    adapted_model: LoadableModel, base_model: LoadableModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from components.triton_packaging import stage

    def other_weights(
        model: LoadableModel, output: Path, config: TritonPackagingConfig, dtype: str, *_: object
    ) -> Path:
        return write_repository(base_model, output, config, dtype)

    monkeypatch.setattr(stage, "write_repository", other_weights)
    config = TritonPackagingConfig(golden_prompts=["What is a list?"], golden_max_tokens=8)
    with pytest.raises(ProofError, match="What is a list"):
        package(adapted_model, tmp_path / "out", config, seed=1, reporter=SilentReporter())
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert (tmp_path / "out" / ".unfinished").exists()


@pytest.mark.long
def test_load_failure_includes_the_server_message(
    base_model: LoadableModel, tmp_path: Path, unproven_config: TritonPackagingConfig
) -> None:
    folder = write_repository(base_model, tmp_path, unproven_config, "float32")
    (folder / "1" / "weights" / "model.safetensors").unlink()
    with (
        pytest.raises(ModelLoadError, match=r"did not load tuneline(?s:.*)safetensors"),
        running_server(tmp_path, log=tmp_path / "triton.log"),
    ):
        pass
    assert not list(Path("/dev/shm").glob(f"tuneline_{os.getpid()}_*_region*"))


def test_invalid_model_configuration_is_reported(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text('name: "other" backend: "python"')
    with pytest.raises(ModelLoadError, match="did not load m"), running_server(tmp_path, log=tmp_path / "triton.log"):
        pass


SERVE = """
import sys, time
from pathlib import Path
from components.common.runtime.errors import TunelineError
from components.common.runtime.process_control import until_signal
from components.triton_packaging.package_serving import served_package
try:
    with until_signal(), served_package(Path(sys.argv[1]), Path(sys.argv[2])) as server:
        print(server.pid, server.grpc_url, flush=True)
        while True:
            time.sleep(0.5)
            server.check_alive()
    print("ended", flush=True)
except TunelineError as error:
    print(error.kind, error.message, error.hint, flush=True)
"""
PACKAGE = """
import sys
from pathlib import Path
from components.common.models import model_loading
from components.common.runtime.reporters import PlainTextReporter
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.stage import package
config = TritonPackagingConfig(golden_prompts=["Name the fox."], golden_max_tokens=8)
package(model_loading.open_model(sys.argv[1]), Path(sys.argv[2]), config, seed=1, reporter=PlainTextReporter(sys.stdout))
"""


def start_program(program: str, *arguments: Path) -> subprocess.Popen[str]:
    """Start a Python program with its output piped."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        command, cwd=root, stdout=subprocess.PIPE, text=True, preexec_fn=process_control.die_with_parent
    )


@pytest.fixture
def serving(proven_package: Artifact, tmp_path: Path) -> Any:
    """A ready serving process: (process, pid of the server, URL)."""
    child = start_program(SERVE, proven_package.path, tmp_path / "triton.log")
    assert child.stdout
    pid, url = child.stdout.readline().split()
    yield child, int(pid), url
    child.kill()
    child.wait()
    child.stdout.close()


def has_exited(pid: int, seconds: float = 10.0) -> bool:
    """Return whether a process exits within `seconds`. A zombie has exited."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def list_children(pid: int) -> list[int]:
    """Return the process ids of the children of a process."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_serving_answers_and_stops_cleanly_on_signal(
    serving: tuple[Any, int, str], golden_answers: list[dict[str, Any]], signal_number: signal.Signals
) -> None:
    child, pid, url = serving
    answer = infer_grpc(ServerAddress(url), "tiny", text_input=golden_answers[0]["prompt"], max_tokens=12)
    assert answer["text_output"] == golden_answers[0]["text"]
    child.send_signal(signal_number)
    assert child.stdout.read() == "ended\n"
    assert child.wait(30) == 0
    assert has_exited(pid)
    assert not list(Path("/dev/shm").glob(f"tuneline_{child.pid}_*"))


def test_server_and_model_processes_exit_with_killed_parent(serving: tuple[Any, int, str]) -> None:
    child, pid, _ = serving
    pids = [pid, *list_children(pid)]
    child.kill()
    assert all(has_exited(process_id) for process_id in pids)


def test_server_exit_is_reported_and_its_log_is_kept(serving: tuple[Any, int, str], tmp_path: Path) -> None:
    child, pid, _ = serving
    os.kill(pid, signal.SIGKILL)
    output, log = child.stdout.read(), tmp_path / "triton.log"
    assert "engine_missing the Triton server exited with status -9" in output
    assert f"The complete log is {log}." in output
    assert "successfully loaded 'tiny'" in log.read_text()
    assert keep_log(log).read_text()
    assert not log.exists()


def test_server_exit_while_loading_is_reported_with_log(
    proven_package: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_start = triton_server._start
    command = ["sh", "-c", "echo 'E1 error: broken'; exit 3"]
    monkeypatch.setattr(triton_server, "_start", lambda _, folder, log: original_start(command, folder, log))
    with (
        pytest.raises(EngineMissingError, match=r"exited with status 3(?s:.*)error: broken"),
        running_server(proven_package.path, log=tmp_path / "log"),
    ):
        pass


@pytest.mark.parametrize("crashes", [1, 2])
def test_server_that_crashes_at_its_start_is_started_again_once(
    proven_package: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crashes: int
) -> None:
    commands = [["sh", "-c", "kill -SEGV $$"]] * crashes
    start = triton_server._start
    monkeypatch.setattr(
        triton_server, "_start", lambda command, *rest: start(commands.pop() if commands else command, *rest)
    )
    with ExitStack() as stack:
        if crashes == 2:
            stack.enter_context(pytest.raises(EngineMissingError, match="exited with status -11"))
        with running_server(proven_package.path, models=["tiny_stream"], log=tmp_path / "log") as server:
            assert server.models == ["tiny_stream"]
    assert not commands
    assert (tmp_path / "log.previous").exists()


def test_files_of_a_killed_server_are_removed_at_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    original_start = triton_server._start
    monkeypatch.setattr(triton_server, "_start", lambda _, folder, log: original_start(["false"], folder, log))
    (tmp_path / f"tuneline-triton.{liveness.identify_host()}.4194303-1.0a1b2c3d").mkdir()
    with pytest.raises(EngineMissingError), running_server(tmp_path, models=["m"], log=tmp_path / "log"):
        pass
    assert [path.name for path in tmp_path.glob("tuneline-*")] == []


def test_server_start_timeout_is_reported(proven_package: Artifact, tmp_path: Path) -> None:
    with (
        pytest.raises(ModelLoadError, match="not ready after 0 seconds"),
        running_server(proven_package.path, log=tmp_path / "log", ready_timeout=0.2),
    ):
        pass


@pytest.mark.long
def test_package_of_base_weights_is_proven(base_model: LoadableModel, tmp_path: Path) -> None:
    config = TritonPackagingConfig(golden_prompts=["Name the fox."], golden_max_tokens=8)
    artifact = package(base_model, tmp_path / "out", config, seed=1, reporter=SilentReporter())
    assert artifact.manifest.summary["proof"]["matched"] == 1
    assert triton_config.read_config(artifact.path / "tuneline").parameters["base_model"].string_value == "model"


def test_serving_stops_cleanly_while_the_model_loads(proven_package: Artifact, tmp_path: Path) -> None:
    child = start_program(SERVE, proven_package.path, tmp_path / "triton.log")
    deadline = time.monotonic() + 120
    while not list_children(child.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    children = list_children(child.pid)  # the server and possibly its short-lived children
    child.send_signal(signal.SIGINT)
    output, _ = child.communicate(timeout=90)
    assert output == "ended\n"
    assert children
    assert all(has_exited(pid) for pid in children)


@pytest.mark.long
def test_packaging_killed_during_proof_resumes_with_same_digest(
    tiny_folder: Path, base_model: LoadableModel, tmp_path: Path
) -> None:
    config = TritonPackagingConfig(golden_prompts=["Name the fox."], golden_max_tokens=8)
    child = start_program(PACKAGE, tiny_folder, tmp_path / "out")
    assert child.stdout
    assert any("loading the package" in line for line in child.stdout)
    child.kill()
    child.communicate()
    assert not (tmp_path / "out" / "manifest.json").exists()
    resumed, uninterrupted = (
        package(base_model, tmp_path / name, config, seed=1, reporter=SilentReporter()) for name in ("out", "elsewhere")
    )
    assert resumed.sha256 == uninterrupted.sha256
    assert resumed.manifest.summary["proof"]["matched"] == 1
