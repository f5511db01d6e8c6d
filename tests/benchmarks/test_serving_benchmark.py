"""Load client, serving benchmark and soak: figures and pages from synthetic data, and short runs against a real Triton.

The whole benchmark is in the stress tier: it starts a server for each contestant.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import load, served, serving, serving_page, soak, soak_page
from benchmarks.client import Answer, Ask, Sent, Target, arrivals, read
from benchmarks.serving_page import ALONE, BATCHED, GENERATE, VLLM
from components.common.runtime.errors import EngineMissingError, UsageError
from components.common.runtime.reporters import SilentReporter
from components.triton_packaging.triton_server import Server, running_server
from tests.tiny import tiny_model

ENVIRONMENT = {
    "command": "c",
    "date": "2026-11-22",
    "commit": "abc",
    "python": "3",
    "processor": "p",
    "cores": 2,
    "memory": 2**34,
    "load": 0,
}


def build_answer(number: int = 0, due: float = 0.0, **changes: Any) -> Answer:
    """Build a streamed answer of five tokens: the first after 0.2 s, the last after 1 s."""
    defaults = {
        "tokens": 5,
        "first_tokens": 1,
        "first": 0.2,
        "seconds": 1.0,
        "version": "1",
        "text": "five tokens of a text",
    }
    return Answer(number, due, **{"streamed": True, "hung_up": False, "error": "", **defaults, **changes})


def encode_response(text: str, reason: str, tokens: int) -> bytes:
    """Encode a streamed response as Triton does."""
    from tritonclient.grpc import service_pb2 as pb

    message = pb.ModelStreamInferResponse()
    message.infer_response.model_version = "7"
    for name, datatype, raw in (
        ("text_output", "BYTES", struct.pack("<I", len(text.encode())) + text.encode()),
        ("finish_reason", "BYTES", struct.pack("<I", len(reason)) + reason.encode()),
        ("completion_tokens", "INT32", struct.pack("<i", tokens)),
    ):
        message.infer_response.outputs.add(name=name, datatype=datatype, shape=[1])
        message.infer_response.raw_output_contents.append(raw)
    return bytes(message.SerializeToString())


def test_percentiles_match_numpy() -> None:
    values = list(np.random.default_rng(1).exponential(size=317))
    assert load.percentiles(values) == {
        f"p{rank}": pytest.approx(np.quantile(values, rank / 100)) for rank in (50, 90, 99)
    }
    assert load.percentiles(list(range(101))) == {"p50": 50, "p90": 90, "p99": 99}
    assert load.percentiles([]) is None


def test_throughput_spans_first_request_to_last_answer() -> None:
    figures = load.figures(
        [build_answer(0, due=10.0), build_answer(1, due=12.0), build_answer(2, due=11.0, seconds=3.0)]
    )
    assert figures["seconds"] == 4.0
    assert figures["tokens_per_second"] == 15 / 4
    assert figures["versions"] == {"1": 3}


def test_failed_and_cancelled_requests_are_excluded_from_latency() -> None:
    figures = load.figures(
        [
            build_answer(),
            build_answer(1, error="UNAVAILABLE: full", seconds=60.0),
            build_answer(2, hung_up=True, seconds=30.0),
        ]
    )
    assert (figures["requests"], figures["errors"], figures["hung_up"]) == (3, 1, 1)
    assert figures["said"] == {"UNAVAILABLE: full": 1}
    assert figures["latency"]["p99"] == 1.0


def test_time_per_token_excludes_the_first_response() -> None:
    assert build_answer(tokens=9, first_tokens=3, first=0.4, seconds=1.0).per_token == pytest.approx(0.1)
    assert build_answer(tokens=3, first_tokens=3).per_token is None
    assert build_answer(streamed=False).per_token is None


def test_streamed_responses_are_joined_with_their_times() -> None:
    responses = [
        (5.5, encode_response("Gr", "", 1)),
        (6.0, encode_response("üße", "", 3)),
        (7.0, encode_response(".", "stop", 4)),
    ]
    result = read(Sent(3, Ask({}), due=5.0, came=responses, end=7.1))
    assert (result.text, result.tokens, result.first_tokens, result.version, result.finish_reason) == (
        "Grüße.",
        4,
        1,
        "7",
        "stop",
    )
    assert (result.first, result.seconds) == (0.5, 2.0)
    assert result.good


def test_stream_without_final_response_is_an_error() -> None:
    assert (
        read(Sent(0, Ask({}), due=0.0, came=[(1.0, encode_response("Half", "", 1))], end=2.0)).error
        == "the answer broke off"
    )


def test_arrivals_follow_the_seed_and_the_requested_rate() -> None:
    first, again, other = (list(itertools.islice(arrivals(4.0, seed), 4000)) for seed in (1, 1, 2))
    assert first == again != other
    assert first == sorted(first)
    assert 4000 / first[-1] == pytest.approx(4.0, rel=0.05)
    assert np.std(np.diff(first)) == pytest.approx(0.25, rel=0.1)  # as wide as the mean: independent of each other


def test_prompts_are_text_lines_or_json_objects(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One.\n\nTwo.\n")
    (tmp_path / "b.jsonl").write_text('{"messages": "[]", "max_tokens": 3}\n')
    assert load.prompts_of(tmp_path / "a.txt") == [{"text_input": "One."}, {"text_input": "Two."}]
    assert load.prompts_of(tmp_path / "b.jsonl") == [{"messages": "[]", "max_tokens": 3}]
    (tmp_path / "c.jsonl").write_text("[1]\n")
    for name in ("c.jsonl", "missing.txt"):
        with pytest.raises(UsageError):
            load.prompts_of(tmp_path / name)


def test_unreachable_server_is_reported() -> None:
    with pytest.raises(EngineMissingError, match="no Triton answers"):
        load.check_ready(Target("127.0.0.1:9", "a", "a_stream"), streamed=True)


def test_soak_plan_has_every_request_kind_and_follows_the_seed() -> None:
    first, again = (list(itertools.islice(soak.plan(["a", "b", "c"], 5), 300)) for _ in range(2))
    assert first == again
    assert {request.kind for request in first} == set(soak.KINDS)
    assert all((request.hang_up > 0) == (request.kind == "hung up") for request in first)
    assert all(request.is_streamed for request in first if request.kind == "streamed")
    options = {request.name: (request.prompt, request.is_chat, request.options) for request in first}
    # A name identifies the request. A text's chats and completions differ only where the schema requires a chat.
    assert all(options[request.name] == (request.prompt, request.is_chat, request.options) for request in first)


def build_levels(speeds: dict[tuple[str, int], float], first: dict[str, float]) -> list[dict[str, Any]]:
    """Build one round of synthetic levels."""
    cpu = {BATCHED: 1.0, ALONE: 1.0, VLLM: 2.0}
    times = {"p50": 0.5, "p90": 0.6, "p99": 0.7}
    return [
        {
            **{
                "contestant": name,
                "round": 0,
                "clients": clients,
                "rate": 0.0,
                "seconds": 1.0,
                "errors": 0,
                "cpu": {"client": 0.1, "server": cpu[name]},
            },
            **{
                "tokens": speed,
                "tokens_per_second": speed,
                "first_token": {**times, "p50": first.get(name, 0.5)},
                "per_token": times,
                "latency": times,
            },
        }
        for (name, clients), speed in speeds.items()
    ]


def build_results(speed: float, **changes: Any) -> dict[str, Any]:
    """Build synthetic results with the given tokens per second at sixteen clients."""
    speeds = {
        (BATCHED, 1): 80.0,
        (BATCHED, 16): speed,
        (ALONE, 1): 80.0,
        (ALONE, 16): 78.0,
        (VLLM, 1): 60.0,
        (VLLM, 16): 440.0,
    }
    settings = {
        "model": "m",
        "clients": [1, 16],
        "rates": [],
        "requests": 8,
        "seconds": 20,
        "rounds": 1,
        "max_tokens": 32,
        "threads": 1,
    }
    text_checks = {
        "contestant": BATCHED,
        "clients": 16,
        "answers": 9,
        "not_alone": 0,
        "not_generate": 0,
        "short": 0,
        "prompt_tokens": [16, 128],
    }
    parts = {"model": 1.0, "inputs": 0.5, "choosing": 0.1, "answers": 0.2, "rest": 0.2}
    return {
        **ENVIRONMENT,
        **{
            "settings": {**settings, "lengths": [16, 128], "texts": 16, "slots": 16},
            "parameters": 27e6,
            "versions": {},
            "errors": {},
        },
        **{
            "levels": build_levels(speeds, {BATCHED: 0.2, VLLM: 0.1}),
            "generate": [{"tokens_per_second": 85.0}],
            "gateway": {
                "requests": 9,
                "clients": 2,
                "tokens": 64,
                "whole": 0.0015,
                "streamed": 0.0025,
                "token": 0.00005,
                "loop_share": 0.7,
                "captured": {"whole": 0.0016, "streamed": 0.0026, "token": 0.00005},
                "capture": {"path": 0.00001, "writer": 0.0001, "row_bytes": 900},
            },
            "texts": [text_checks],
        },
        **{"idle": {BATCHED: 0.0}, "ready": {BATCHED: {"seconds": 5.0, "version": "2.51.0"}}, "sha256": "ab" * 32},
        "profile": [{"clients": 16, "tokens_per_second": 470.0, "steps": 9, "seconds": 2.0, "parts": parts}],
        **changes,
    }


def test_page_reports_every_goal_as_met_or_missed() -> None:
    page = serving_page.markdown(build_results(430.0), "plot.svg")
    assert "tokens/s at 16 clients ÷ one at a time at 16 clients: 5.51 (goal: at least 5: met)" in page
    assert "tokens/s at 16 clients ÷ vLLM's: 0.977\n" in page
    assert "tokens per CPU second of the server at 16 clients ÷ vLLM's: 1.95 (goal: at least 1: met)" in page
    assert "gateway's CPU milliseconds per whole answer: 1.5 (goal: at most 2: met)" in page
    assert "gateway's CPU milliseconds per streamed answer of one token: 2.5 (goal: at most 2: **missed**)" in page
    assert "takes 70% of the time of these answers" in page
    assert "gateway's CPU milliseconds per further streamed token: 0.05 (goal: at most 0.1: met)" in page
    assert "CPU milliseconds of capture on the request path: 0.01 (goal: at most 0.05: met)" in page
    assert "| with capture | 1.60 | 2.60 | 0.050 |" in page
    assert "time to first token at 16 clients, p50 ÷ vLLM's: 2 (goal: at most 1.5: **missed**)" in page
    assert f"tokens/s at 1 client ÷ {GENERATE}: 0.941 (goal: at least 1: **missed**)" in page
    assert "answers among many clients equal those of a single client: met" in page
    assert "| 16 | 470.0 | 9 | 1.00 (50%) |" in page
    assert "at least 5: **missed**" in serving_page.markdown(build_results(380.0), "plot.svg")


def test_page_without_vllm_reports_the_cause_and_other_goals() -> None:
    ours = [level for level in build_results(430.0)["levels"] if level["contestant"] != VLLM]
    page = serving_page.markdown(build_results(430.0, levels=ours, errors={VLLM: "no such Python"}), "plot.svg")
    assert "**vLLM** was not measured: no such Python" in page
    assert "÷ vLLM's" not in page
    assert "one at a time at 1 client: 5.38" in page


def test_answer_changed_by_batching_misses_the_goal() -> None:
    answers = {
        f"{BATCHED} 1": [build_answer(n, text="right") for n in range(2)],
        f"{BATCHED} 16": [build_answer(n, text="right") for n in range(4)],
    }
    answers[f"{BATCHED} 16"][3].text = "wrong"
    text_checks = serving._compared(answers, [{"answers": ["right", "otherwise"]}], ["a", "b"])["texts"]
    assert [(check["clients"], check["not_alone"], check["not_generate"]) for check in text_checks] == [
        (1, 0, 1),
        (16, 1, 2),
    ]
    page = serving_page.markdown(build_results(430.0, texts=text_checks), "plot.svg")
    assert "answers among many clients equal those of a single client: **missed**" in page


def build_soak_results(memory_mib: list[float], leftovers: list[str] | None = None) -> dict[str, Any]:
    """Build synthetic soak results with one sample per minute of the model process's memory; two minutes are warm-up."""
    samples = [
        {
            "at": 60.0 * minute,
            "processes": {
                "tuneline": {**dict.fromkeys(("rss", "pss", "anonymous"), size * 2**20), "files": 30, "threads": 9}
            },
            "regions": 2,
            "shared": 2**21,
        }
        for minute, size in enumerate(memory_mib)
    ]
    log = soak.Log(Path("unused"), samples=samples, answers={"text 1": "a"})
    log.requests = [
        {
            "at": 61.0 * n,
            "kind": "streamed",
            "tokens": 4,
            "seconds": 1.0,
            "first": 0.1,
            "error": "",
            "hung_up": False,
            "wrong": False,
        }
        for n in range(len(memory_mib))
    ]
    settings = argparse.Namespace(
        minutes=len(memory_mib), warmup_minutes=2, rate=1, every=60, seed=0, model="m", threads=1
    )
    results = {
        **ENVIRONMENT,
        **soak.results_of(log, settings, leftovers or []),
        "cpu": {"client": 1.0, "server": 9.0, "gateway": 0.5},
        "parameters": 27e6,
        "server": "2.51",
    }
    return {**results, "verdict": soak_page.verdict(results)}


def test_memory_growth_during_warmup_is_ignored() -> None:
    results = build_soak_results([100, 300, 500, 502, 501, 503, 502, 500])
    assert soak_page.good(results)
    assert results["verdict"]["of"]["tuneline rss"]["begin"] == 501 * 2**20
    page = soak_page.markdown(results, "plot.svg")
    assert "flat within 5%: met" in page
    assert "no shared memory left at the end: met" in page


def test_memory_growth_or_leftover_shared_memory_misses_the_goal() -> None:
    assert not soak_page.good(build_soak_results([100, 300, *range(500, 560, 6)]))
    assert not soak_page.good(build_soak_results([500] * 4 + [560] + [500] * 4))
    results = build_soak_results([500] * 9, leftovers=["tuneline_1_region"])
    assert not soak_page.good(results)
    assert "**missed**; left: tuneline_1_region" in soak_page.markdown(results, "plot.svg")


def test_plots_are_written(tmp_path: Path) -> None:
    serving_page.plot(build_results(430.0), tmp_path / "images" / "serving.svg")
    soak_page.plot(build_soak_results([500] * 9), tmp_path / "images" / "soak.svg")
    assert all("</svg>" in path.read_text() for path in (tmp_path / "images").iterdir())


@pytest.fixture(scope="module")
def endless_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the tiny model without an end token."""
    folder = tmp_path_factory.mktemp("benchmark")
    return served.model(str(tiny_model(folder / "tiny")), folder / "model")


@pytest.fixture(scope="module")
def server(endless_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a real Triton server with the package."""
    folder = tmp_path_factory.mktemp("running")
    package = served.packaged(endless_model, folder / "package", slots=4)
    with running_server(package, log=folder / "triton.log") as server:
        yield server


@pytest.mark.triton
def test_answers_have_times_tokens_and_version(server: Server) -> None:
    target = Target(server.grpc_url, "tuneline", "tuneline_stream")
    requests = [Ask({"text_input": f"Say {n % 3}.", "max_tokens": 12}) for n in range(9)]
    figures, answers = load.measure(target, requests, clients=3, server=server.pid)
    assert [answer.number for answer in answers] == list(range(9))
    assert all(
        answer.good and answer.tokens == 12 and answer.version == "1" and 0 < answer.first < answer.seconds
        for answer in answers
    )
    assert len({answer.text for answer in answers}) == 3
    assert figures["tokens"] == 9 * 12
    assert figures["cpu"]["client"] < figures["cpu"]["server"]
    _, unary_answers = load.measure(target, [Ask(request.fields, streamed=False) for request in requests], rate=50.0)
    assert [answer.text for answer in unary_answers] == [answer.text for answer in answers]


@pytest.mark.triton
def test_refused_and_cancelled_requests_are_distinguished(server: Server) -> None:
    target = Target(server.grpc_url, "tuneline", "tuneline_stream")
    requests = [
        Ask({"text_input": "a", "max_tokens": 0}, streamed=False),
        Ask({"text_input": "a", "max_tokens": 0}),
        Ask({"text_input": "a", "max_tokens": 1000}, hang_up=0.1),
        Ask({"text_input": "a", "max_tokens": 1000}, streamed=False, hang_up=0.1),
    ]
    _, (unary, stream, *cancelled) = load.measure(target, requests, clients=4)
    assert "max_tokens is 0" in unary.error
    assert "max_tokens is 0" in stream.error
    assert all(answer.hung_up and not answer.error for answer in cancelled)
    with pytest.raises(EngineMissingError, match="no model other_stream"):
        load.check_ready(Target(server.grpc_url, "other", "other_stream"), streamed=True)


@pytest.mark.long
@pytest.mark.triton
def test_short_soak_samples_every_process_without_errors(endless_model: Path, tmp_path: Path) -> None:
    settings = argparse.Namespace(
        minutes=0.08, warmup_minutes=0.02, rate=8.0, every=1.0, seed=1, model="tiny", threads=1
    )
    model = tmp_path / "model"
    shutil.copytree(endless_model, model)
    for name in ("config.json", "generation_config.json"):  # the end token, which a JSON schema needs
        shutil.copy(endless_model.parent / "tiny" / name, model)
    package, log = served.packaged(model, tmp_path / "package", slots=4), soak.Log(tmp_path / "samples.jsonl")
    with soak.running_stack(package, tmp_path) as (server, gateway, client):
        soak.soak(server, gateway, client, ["One.", "Two two."], settings, log, SilentReporter())
    results = {**soak.results_of(log, settings, []), **ENVIRONMENT}
    assert set(results["samples"][0]["processes"]) == {"gateway", "tritonserver", "tuneline", "tuneline_stream"}
    assert all(memory["rss"] > memory["pss"] > 0 for memory in results["samples"][-1]["processes"].values())
    assert results["samples"][-1]["regions"] > 0
    assert all(kind["requests"] for kind in results["kinds"].values())
    assert (results["all"]["errors"], results["all"]["wrong"]) == (0, 0), results["all"]["said"]
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == len(results["samples"])


@pytest.mark.stress
@pytest.mark.triton
def test_benchmark_runs_from_model_to_page(
    endless_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    options = (
        f"--workdir {tmp_path / 'work'} --model {endless_model} --clients 1,2 --rates 20 --seconds 1 --requests 2 "
        "--rounds 1 --max-tokens 6 --gateway-requests 4"
    )
    monkeypatch.setattr(
        "sys.argv", ["serving", *options.split(), "--vllm-python", "/no/python", "--markdown", str(page)]
    )
    monkeypatch.setattr(serving, "IDLE", 0.1)
    serving.main()
    results = json.loads((tmp_path / "work" / "results.json").read_text())
    assert serving_page.same(results)
    assert {level["contestant"] for level in results["levels"]} == {BATCHED, ALONE}
    assert not any(check["not_generate"] for check in results["texts"])
    assert "**vLLM** was not measured: /no/python" in page.read_text()
    assert 0 < results["gateway"]["whole"] < 1
    assert 0 < results["gateway"]["token"] < 0.1
    assert 0 < results["gateway"]["loop_share"] <= 1
    assert 0 < results["gateway"]["captured"]["whole"] < 1
    assert 0 < results["gateway"]["capture"]["path"] < 0.001
    assert [profile["clients"] for profile in results["profile"]] == [1, 2]
