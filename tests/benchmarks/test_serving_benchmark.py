"""The load client, the serving benchmark and the soak: figures of planted data, pages of planted results, and short runs for real."""

from __future__ import annotations

import argparse
import itertools
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import load, served, serving, serving_page, soak, soak_page
from benchmarks.client import Answer, Ask, Sent, Target, arrivals, read
from benchmarks.serving_page import ALONE, BATCHED, GENERATE, VLLM
from components.common.errors import EngineMissingError, UsageError
from components.common.progress import Silent
from components.triton_packaging.server import Server, running_server
from tests.tiny import tiny_model

ABOUT = {"command": "c", "date": "2026-11-22", "commit": "abc", "python": "3", "processor": "p", "cores": 2, "memory": 2**34, "load": 0}


def answer(number: int = 0, due: float = 0.0, **other: Any) -> Answer:
    """A streamed answer of five tokens: the first after 0.2 s, the last after 1 s."""
    usual = {"tokens": 5, "first_tokens": 1, "first": 0.2, "seconds": 1.0, "version": "1", "text": "five tokens of a text"}
    return Answer(number, due, **{"streamed": True, "hung_up": False, "error": "", **usual, **other})


def piece(text: str, reason: str, tokens: int) -> bytes:
    """A streamed response as Triton sends it."""
    from tritonclient.grpc import service_pb2 as pb

    message = pb.ModelStreamInferResponse()
    message.infer_response.model_version = "7"
    for name, kind, raw in (
        ("text_output", "BYTES", struct.pack("<I", len(text.encode())) + text.encode()),
        ("finish_reason", "BYTES", struct.pack("<I", len(reason)) + reason.encode()),
        ("completion_tokens", "INT32", struct.pack("<i", tokens)),
    ):
        message.infer_response.outputs.add(name=name, datatype=kind, shape=[1])
        message.infer_response.raw_output_contents.append(raw)
    return bytes(message.SerializeToString())


def test_percentiles_are_those_of_numpy() -> None:
    values = list(np.random.default_rng(1).exponential(size=317))
    assert load.percentiles(values) == {f"p{rank}": pytest.approx(np.quantile(values, rank / 100)) for rank in (50, 90, 99)}
    assert load.percentiles(list(range(101))) == {"p50": 50, "p90": 90, "p99": 99}
    assert load.percentiles([]) is None


def test_throughput_runs_from_the_first_request_to_the_last_answer() -> None:
    told = load.figures([answer(0, due=10.0), answer(1, due=12.0), answer(2, due=11.0, seconds=3.0)])
    assert told["seconds"] == 4.0
    assert told["tokens_per_second"] == 15 / 4
    assert told["versions"] == {"1": 3}


def test_failed_and_hung_up_requests_are_counted_and_have_no_part_in_the_times() -> None:
    told = load.figures([answer(), answer(1, error="UNAVAILABLE: full", seconds=60.0), answer(2, hung_up=True, seconds=30.0)])
    assert (told["requests"], told["errors"], told["hung_up"]) == (3, 1, 1)
    assert told["said"] == {"UNAVAILABLE: full": 1}
    assert told["latency"]["p99"] == 1.0


def test_a_token_takes_the_time_after_the_first_piece_by_the_tokens_after_it() -> None:
    assert answer(tokens=9, first_tokens=3, first=0.4, seconds=1.0).per_token == pytest.approx(0.1)
    assert answer(tokens=3, first_tokens=3).per_token is None
    assert answer(streamed=False).per_token is None


def test_pieces_become_an_answer_with_its_times() -> None:
    came = [(5.5, piece("Gr", "", 1)), (6.0, piece("üße", "", 3)), (7.0, piece(".", "stop", 4))]
    found = read(Sent(3, Ask({}), due=5.0, came=came, end=7.1))
    assert (found.text, found.tokens, found.first_tokens, found.version, found.finish_reason) == ("Grüße.", 4, 1, "7", "stop")
    assert (found.first, found.seconds) == (0.5, 2.0)
    assert found.good


def test_a_stream_that_ends_before_its_last_piece_is_an_error() -> None:
    assert read(Sent(0, Ask({}), due=0.0, came=[(1.0, piece("Half", "", 1))], end=2.0)).error == "the answer broke off"


def test_arrivals_repeat_with_their_seed_and_come_at_the_rate_asked_for() -> None:
    first, again, other = (list(itertools.islice(arrivals(4.0, seed), 4000)) for seed in (1, 1, 2))
    assert first == again != other
    assert first == sorted(first)
    assert 4000 / first[-1] == pytest.approx(4.0, rel=0.05)
    assert np.std(np.diff(first)) == pytest.approx(0.25, rel=0.1)  # as wide as the mean: independent of each other


def test_prompts_are_lines_or_objects_of_inputs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One.\n\nTwo.\n")
    (tmp_path / "b.jsonl").write_text('{"messages": "[]", "max_tokens": 3}\n')
    assert load.prompts_of(tmp_path / "a.txt") == [{"text_input": "One."}, {"text_input": "Two."}]
    assert load.prompts_of(tmp_path / "b.jsonl") == [{"messages": "[]", "max_tokens": 3}]
    (tmp_path / "c.jsonl").write_text("[1]\n")
    for name in ("c.jsonl", "missing.txt"):
        with pytest.raises(UsageError):
            load.prompts_of(tmp_path / name)


def test_a_server_that_is_not_there_is_told() -> None:
    with pytest.raises(EngineMissingError, match="no Triton answers"):
        load.check_ready(Target("127.0.0.1:9", "a", "a_stream"), streamed=True)


def test_the_soak_asks_for_every_kind_and_repeats_with_its_seed() -> None:
    first, again = (list(itertools.islice(soak.plan(["a", "b", "c"], 5), 300)) for _ in range(2))
    assert first == again
    assert {one.kind for one in first} == set(soak.KINDS)
    assert all((one.ask.hang_up > 0) == (one.kind == "hung up") for one in first)
    assert all(one.ask.streamed for one in first if one.kind == "streamed")
    asked = {one.name: {k: v for k, v in one.ask.fields.items() if k != "text_input"} for one in first}
    assert all(asked[one.name].items() <= dict(one.ask.fields).items() for one in first)  # equal names, equal requests


def levels(speeds: dict[tuple[str, int], float], first: dict[str, float]) -> list[dict[str, Any]]:
    """One round of planted levels."""
    cpu = {"client": 0.1, "server": 1.0}
    times = {"p50": 0.5, "p90": 0.6, "p99": 0.7}
    return [
        {
            **{"contestant": name, "round": 0, "clients": clients, "rate": 0.0, "seconds": 1.0, "errors": 0, "cpu": cpu},
            **{"tokens_per_second": speed, "first_token": {**times, "p50": first.get(name, 0.5)}, "per_token": times, "latency": times},
        }
        for (name, clients), speed in speeds.items()
    ]


def results(many: float, **other: Any) -> dict[str, Any]:
    """Planted results of the benchmark: so many tokens a second at sixteen clients."""
    speeds = {(BATCHED, 1): 80.0, (BATCHED, 16): many, (ALONE, 1): 80.0, (ALONE, 16): 78.0, (VLLM, 1): 60.0, (VLLM, 16): 440.0}
    settings = {"model": "m", "clients": [1, 16], "rates": [], "requests": 8, "seconds": 20, "rounds": 1, "max_tokens": 32, "threads": 1}
    texts = {"contestant": BATCHED, "clients": 16, "answers": 9, "not_alone": 0, "not_generate": 0, "short": 0, "prompt_tokens": [16, 128]}
    parts = {"model": 1.0, "inputs": 0.5, "choosing": 0.1, "answers": 0.2, "rest": 0.2}
    return {
        **ABOUT,
        **{"settings": {**settings, "lengths": [16, 128], "texts": 16, "slots": 16}, "parameters": 27e6, "versions": {}, "errors": {}},
        **{"levels": levels(speeds, {BATCHED: 0.2, VLLM: 0.1}), "generate": [{"tokens_per_second": 85.0}], "texts": [texts]},
        **{"idle": {BATCHED: 0.0}, "ready": {BATCHED: {"seconds": 5.0, "version": "2.51.0"}}, "sha256": "ab" * 32},
        "profile": [{"clients": 16, "tokens_per_second": 470.0, "steps": 9, "seconds": 2.0, "parts": parts}],
        **other,
    }


def test_the_page_tells_each_goal_and_whether_it_was_met() -> None:
    page = serving_page.markdown(results(430.0), "plot.svg")
    assert "tokens/s at 16 clients over one at a time at 16: 5.51 (goal: at least 5: met)" in page
    assert "tokens/s at 16 clients over vLLM's: 0.98 (goal: at least 0.9: met)" in page
    assert "first token at 16 clients over vLLM's, p50: 2.00 (goal: at most 1.5: **missed**)" in page
    assert f"tokens/s at 1 client over {GENERATE}: 0.94 (goal: at least 0.9: met)" in page
    assert "answers among many clients are those given alone: met" in page
    assert "| 16 | 470.0 | 9 | 1.00 (50%) |" in page
    assert "at least 5: **missed**" in serving_page.markdown(results(380.0), "plot.svg")


def test_without_vllm_the_page_says_why_and_has_the_other_goals() -> None:
    ours = [one for one in results(430.0)["levels"] if one["contestant"] != VLLM]
    page = serving_page.markdown(results(430.0, levels=ours, errors={VLLM: "no such Python"}), "plot.svg")
    assert "**vLLM** was not measured: no such Python" in page
    assert "over vLLM's" not in page
    assert "one at a time at 1: 5.38" in page


def test_an_answer_that_differs_from_the_one_given_alone_is_a_missed_goal() -> None:
    came = {f"{BATCHED} 1": [answer(n, text="right") for n in range(2)], f"{BATCHED} 16": [answer(n, text="right") for n in range(4)]}
    came[f"{BATCHED} 16"][3].text = "wrong"
    found = serving._compared(came, [{"answers": ["right", "otherwise"]}], ["a", "b"])["texts"]
    assert [(one["clients"], one["not_alone"], one["not_generate"]) for one in found] == [(1, 0, 1), (16, 1, 2)]
    page = serving_page.markdown(results(430.0, texts=found), "plot.svg")
    assert "answers among many clients are those given alone: **missed**" in page


def soaked(held: list[float], left: list[str] | None = None) -> dict[str, Any]:
    """Planted results of a soak: a sample a minute of what the model's process held, in MiB; two minutes are the warm-up."""
    samples = [
        {
            "at": 60.0 * minute,
            "processes": {"tuneline": {**dict.fromkeys(("rss", "pss", "anonymous"), size * 2**20), "files": 30, "threads": 9}},
            "regions": 2,
            "shared": 2**21,
        }
        for minute, size in enumerate(held)
    ]
    log = soak.Log(Path("unused"), samples=samples, answers={"text 1": "a"})
    log.requests = [
        {"at": 61.0 * n, "kind": "streamed", "tokens": 4, "seconds": 1.0, "first": 0.1, "error": "", "hung_up": False, "wrong": False}
        for n in range(len(held))
    ]
    settings = argparse.Namespace(minutes=len(held), warmup_minutes=2, rate=1, every=60, seed=0, model="m", threads=1)
    told = {
        **ABOUT,
        **soak.results_of(log, settings, left or []),
        "cpu": {"client": 1.0, "server": 9.0},
        "parameters": 27e6,
        "server": "2.51",
    }
    return {**told, "verdict": soak_page.verdict(told)}


def test_memory_that_grows_only_while_warming_up_is_flat() -> None:
    told = soaked([100, 300, 500, 502, 501, 503, 502, 500])
    assert soak_page.good(told)
    assert told["verdict"]["of"]["tuneline rss"]["begin"] == 501 * 2**20
    page = soak_page.markdown(told, "plot.svg")
    assert "flat within 5%: met" in page
    assert "no shared memory left over at the end: met" in page


def test_memory_that_grows_afterwards_is_a_missed_goal_and_so_is_what_is_left_over() -> None:
    assert not soak_page.good(soaked([100, 300, *range(500, 560, 6)]))
    assert not soak_page.good(soaked([500] * 4 + [560] + [500] * 4))
    told = soaked([500] * 9, left=["tuneline_1_region"])
    assert not soak_page.good(told)
    assert "**missed**; left: tuneline_1_region" in soak_page.markdown(told, "plot.svg")


def test_both_plots_are_drawn(tmp_path: Path) -> None:
    serving_page.plot(results(430.0), tmp_path / "images" / "serving.svg")
    soak_page.plot(soaked([500] * 9), tmp_path / "images" / "soak.svg")
    assert all("</svg>" in path.read_text() for path in (tmp_path / "images").iterdir())


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model without an end token."""
    folder = tmp_path_factory.mktemp("benchmark")
    return served.model(str(tiny_model(folder / "tiny")), folder / "model")


@pytest.fixture(scope="module")
def running(endless: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real server with its package."""
    folder = tmp_path_factory.mktemp("running")
    package = served.packaged(endless, folder / "package", slots=4)
    with running_server(package, log=folder / "triton.log") as server:
        yield server


@pytest.mark.triton
def test_every_answer_of_a_loop_comes_with_its_times_tokens_and_version(running: Server) -> None:
    target = Target(running.grpc_url, "tuneline", "tuneline_stream")
    asks = [Ask({"text_input": f"Say {n % 3}.", "max_tokens": 12}) for n in range(9)]
    told, answers = load.measure(target, asks, clients=3, server=running.pid)
    assert [one.number for one in answers] == list(range(9))
    assert all(one.good and one.tokens == 12 and one.version == "1" and 0 < one.first < one.seconds for one in answers)
    assert len({one.text for one in answers}) == 3
    assert told["tokens"] == 9 * 12
    assert told["cpu"]["client"] < told["cpu"]["server"]
    _, whole = load.measure(target, [Ask(ask.fields, streamed=False) for ask in asks], rate=50.0)
    assert [one.text for one in whole] == [one.text for one in answers]


@pytest.mark.triton
def test_refusals_and_clients_that_hang_up_are_told_apart(running: Server) -> None:
    target = Target(running.grpc_url, "tuneline", "tuneline_stream")
    asks = [
        Ask({"text_input": "a", "max_tokens": 0}, streamed=False),
        Ask({"text_input": "a", "max_tokens": 0}),
        Ask({"text_input": "a", "max_tokens": 1000}, hang_up=0.1),
        Ask({"text_input": "a", "max_tokens": 1000}, streamed=False, hang_up=0.1),
    ]
    _, (unary, stream, *gone) = load.measure(target, asks, clients=4)
    assert "max_tokens is 0" in unary.error
    assert "max_tokens is 0" in stream.error
    assert all(one.hung_up and not one.error for one in gone)
    with pytest.raises(EngineMissingError, match="no model other_stream"):
        load.check_ready(Target(running.grpc_url, "other", "other_stream"), streamed=True)


@pytest.mark.triton
def test_a_few_seconds_of_soak_see_every_process_and_leave_nothing(running: Server, tmp_path: Path) -> None:
    log = soak.Log(tmp_path / "samples.jsonl")
    settings = argparse.Namespace(minutes=0.08, warmup_minutes=0.02, rate=8.0, every=1.0, seed=1, model="tiny", threads=1)
    soak.soak(running, ["One.", "Two two."], settings, log, Silent())
    told = {**soak.results_of(log, settings, []), **ABOUT}
    assert set(told["samples"][0]["processes"]) == {"tritonserver", "tuneline", "tuneline_stream"}
    assert all(held["rss"] > held["pss"] > 0 for held in told["samples"][-1]["processes"].values())
    assert told["samples"][-1]["regions"] > 0
    assert told["all"]["requests"] > 10
    assert (told["all"]["errors"], told["all"]["wrong"]) == (0, 0)
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == len(told["samples"])


@pytest.mark.triton
def test_the_benchmark_runs_from_the_model_to_the_page(endless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    options = f"--workdir {tmp_path / 'work'} --model {endless} --clients 1,2 --rates 20 --seconds 1 --requests 2 --rounds 1 --max-tokens 6"
    monkeypatch.setattr("sys.argv", ["serving", *options.split(), "--vllm-python", "/no/python", "--markdown", str(page)])
    monkeypatch.setattr(serving, "IDLE", 0.1)
    serving.main()
    found = json.loads((tmp_path / "work" / "results.json").read_text())
    assert serving_page.same(found)
    assert {one["contestant"] for one in found["levels"]} == {BATCHED, ALONE}
    assert not any(one["not_generate"] for one in found["texts"])
    assert "**vLLM** was not measured: /no/python" in page.read_text()
    assert [one["clients"] for one in found["profile"]] == [1, 2]
