"""Routing of requests by name, alias, weight and subject; changes of the file; automatic aborts; shadow copies."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from components.common.runtime.errors import ConfigurationError
from pipelines.cli.main import app
from pipelines.gateway import shadow_traffic, traffic_routes
from pipelines.gateway.canary_comparison import DURATION, ERRORS, CanaryComparison, Outcome
from pipelines.gateway.completions import CHAT, Completion
from pipelines.gateway.errors import RequestError
from pipelines.gateway.openai_requests import GenerationCall
from pipelines.gateway.telemetry import AnswerMeasures
from pipelines.gateway.traffic_routes import AbortLimits, read_routes, set_route
from pipelines.gateway.traffic_routing import RELOAD_SECONDS, Assignment, TrafficRouter, get_position
from pipelines.gateway.triton_models import AnswerChunk, ServedModel, TritonModels

CALL = GenerationCall("tuner", ({"text_input": "Hello"},), {}, 1, None, stream=False, include_usage=False)


def serve(name: str, version: str, alias: str = "", traffic: str = "", registered: str = "helper") -> ServedModel:
    return ServedModel(name, "", "python", registered, version, "", 64, None, frozenset(), True, 0, alias, traffic)


class LoadedModels(TritonModels):
    """Models that answer at once with their name, or fail."""

    def __init__(self, *models: ServedModel, failing: str = "") -> None:
        self._models = {model.client_name: model for model in models}
        self._read_at, self._reading = math.inf, None  # the list is never read
        self.failing = failing
        self.answered: list[str] = []

    async def generate(self, model: ServedModel, inputs: Mapping[str, object]) -> AsyncIterator[AnswerChunk]:
        self.answered.append(model.name)
        if model.name == self.failing:
            raise RequestError(500, "the model failed to answer; see the server's log", code="model_error")
        yield AnswerChunk(f"I am {model.name}", "stop", 1, 1, model.version, [])


STABLE, CANDIDATE = serve("tuner", "3", "champion"), serve("tuner-candidate", "4", "candidate", "canary")
TARGETS = [{"model": "tuner", "weight": 90}, {"model": "tuner-candidate", "weight": 10}]


def write(path: Path, **settings: Any) -> Path:
    set_route(path, "tuner", {"targets": TARGETS, **settings})
    return path


def create_router(path: Path | None, *models: ServedModel, failing: str = "") -> TrafficRouter:
    loaded = LoadedModels(*(models or (STABLE, CANDIDATE)), failing=failing)
    return TrafficRouter(loaded, path, CollectorRegistry(), 10.0)


def assign(router: TrafficRouter, name: str = "tuner", **subject: Any) -> Assignment:
    return asyncio.run(router.assign(name, **subject))


def get_model(router: TrafficRouter, name: str = "tuner", **subject: Any) -> str:
    return assign(router, name, **subject).model.name


def get_models(router: TrafficRouter, subjects: list[dict[str, Any]]) -> list[str]:
    """Return the model of each subject's request; one event loop for all requests saves milliseconds per request."""

    async def assign_all() -> list[str]:
        return [(await router.assign("tuner", **subject)).model.name for subject in subjects]

    return asyncio.run(assign_all())


async def answer(router: TrafficRouter) -> str:
    """Answer one request as the application does, and return the name of its model."""
    assignment = await router.assign("tuner")
    measures = AnswerMeasures()
    completion = Completion(router._triton, assignment.model, CALL, CHAT, measures)
    routed, status = router.begin(assignment, completion, measures), 200
    try:
        await completion.answer()
    except RequestError as error:
        status = error.status
    router.finish(routed, status)
    return assignment.model.name


def test_names_and_aliases(tmp_path: Path) -> None:
    write(tmp_path / "routes.yaml", targets=[{**TARGETS[0], "weight": 0}, TARGETS[1]])
    for path in (None, tmp_path / "routes.yaml"):
        router = create_router(path)
        for base in ("tuner", "helper"):
            assert get_model(router, base) == ("tuner-candidate" if path else "tuner")
            assert get_model(router, f"{base}@champion") == "tuner"
            assert get_model(router, f"{base}@candidate") == "tuner-candidate"
        assert get_model(router, "tuner-candidate") == "tuner-candidate"
        for unknown in ("", "@", "@champion", "tuner@", "tuner@other", "other@champion", "tuner@candidate@champion"):
            with pytest.raises(RequestError) as caught:
                assign(router, unknown)
            assert caught.value.status == 404


def test_a_key_needs_the_name_of_the_route_or_of_the_model(tmp_path: Path) -> None:
    router = create_router(write(tmp_path / "routes.yaml"))
    names = ("tuner", "helper", "tuner@candidate", "helper@candidate", "tuner-candidate")
    assert [assign(router, name).name for name in names] == ["tuner"] * 4 + ["tuner-candidate"]


def test_a_route_may_have_a_name_of_its_own(tmp_path: Path) -> None:
    set_route(tmp_path / "r", "assistant", {"targets": [{"model": "tuner", "alias": "stable"}]})
    router = create_router(tmp_path / "r", serve("tuner", "1", registered=""))
    assert get_model(router, "assistant") == get_model(router, "assistant@stable") == "tuner"
    assert [name for name, _ in asyncio.run(router.list_models())] == ["assistant", "tuner"]


def test_weights_divide_requests(tmp_path: Path) -> None:
    random.seed(3)
    router = create_router(write(tmp_path / "routes.yaml"))
    counts = Counter(get_models(router, [{}] * 2000))
    assert 150 < counts["tuner-candidate"] < 250


@pytest.mark.parametrize(
    ("sticky", "subject"),
    [
        ("key", lambda n: {"key": f"team-{n}"}),
        ("user", lambda n: {"body": {"user": f"u{n}"}}),
        ("user", lambda n: {"body": {"safety_identifier": f"u{n}"}}),
        ("header x-tenant", lambda n: {"headers": {"x-tenant": f"t{n}"}}),
        ("header X-Tenant", lambda n: {"headers": {"x-tenant": f"t{n}"}}),
    ],
)
def test_a_subject_keeps_its_target_when_the_canary_grows(tmp_path: Path, sticky: str, subject: Any) -> None:
    path = tmp_path / "routes.yaml"
    subjects = [subject(number) for number in range(500)]
    router = create_router(write(path, sticky=sticky))
    first = get_models(router, subjects)
    assert first == get_models(create_router(path), subjects)
    assert 25 < first.count("tuner-candidate") < 80
    grown = create_router(write(path, sticky=sticky, targets=[{"model": "tuner"}, {"model": "tuner-candidate"}]))
    second = get_models(grown, subjects)
    assert second.count("tuner-candidate") > 200
    assert all(now == "tuner-candidate" for before, now in zip(first, second, strict=True) if before != "tuner")


def test_routes_divide_subjects_differently() -> None:
    positions = [(get_position("a", f"u{number}"), get_position("b", f"u{number}")) for number in range(400)]
    assert 60 < sum(a < 0.5 and b < 0.5 for a, b in positions) < 140


def test_requests_without_a_subject_are_divided_at_random(tmp_path: Path) -> None:
    random.seed(1)
    router = create_router(
        write(tmp_path / "routes.yaml", sticky="key", targets=[{**each, "weight": 1} for each in TARGETS])
    )
    assert len(set(get_models(router, [{"key": ""}] * 50))) == 2


def test_a_target_that_is_not_loaded_is_replaced(tmp_path: Path) -> None:
    path = write(tmp_path / "routes.yaml", targets=[{"model": "tuner", "weight": 0}, {"model": "tuner-candidate"}])
    assert get_model(create_router(path, STABLE)) == "tuner"
    assert get_model(create_router(path, CANDIDATE)) == "tuner-candidate"
    with pytest.raises(RequestError) as caught:
        assign(create_router(path, serve("other", "1", registered="")))
    assert caught.value.status == 503


def test_a_shadow_model_never_answers(tmp_path: Path) -> None:
    path = write(tmp_path / "routes.yaml", targets=[{"model": "tuner", "weight": 0}, {"model": "tuner-candidate"}])
    rejected = serve("tuner-candidate", "4", "candidate", "shadow")
    router = create_router(path, STABLE, rejected)
    assert get_model(router) == "tuner"
    for name in ("tuner-candidate", "tuner@candidate", "helper@candidate"):
        with pytest.raises(RequestError, match="receives shadow traffic only") as caught:
            assign(router, name)
        assert caught.value.status == 403
    assert [name for name, _ in asyncio.run(router.list_models())] == ["tuner"]
    assert asyncio.run(router.is_ready())
    assert not asyncio.run(create_router(path, rejected).is_ready())


def test_a_changed_file_applies_and_a_broken_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, now = tmp_path / "routes.yaml", time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    router = create_router(path)  # the file does not exist yet
    assert not assign(router).is_weighted
    write(path, targets=[{"model": "tuner", "weight": 0}, {"model": "tuner-candidate"}])
    now += RELOAD_SECONDS
    assert get_model(router) == "tuner-candidate"
    path.write_text("routes: {tuner: {targets: []}}")
    for _ in range(3):
        now += RELOAD_SECONDS
        assert get_model(router) == "tuner-candidate"
    assert caplog.text.count("routing_file_invalid") == 1
    assert "targets" in asyncio.run(router.describe())["error"]
    path.unlink()
    now += RELOAD_SECONDS
    assert get_model(router) == "tuner"
    assert asyncio.run(router.describe()) == {"routes": [], "error": None}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("routes: [a]", "routes: Input should be a valid dictionary"),
        ("routes: {a: {targets: []}}", "routes.a.targets"),
        ("routes: {a: {targets: [{model: m, weight: -1}]}}", "weight"),
        ("routes: {a: {targets: [{model: m, weight: .nan}]}}", "weight"),
        ("routes: {a: {targets: [{model: m, weight: 0}]}}", "the weights of the targets are all 0"),
        ("routes: {a: {targets: [{model: m}, {model: m}]}}", "appears more than once"),
        ("routes: {a: {targets: [{model: m}], sticky: ip}}", "sticky"),
        ("routes: {a: {targets: [{model: m}], shadow: {model: s, share: 2}}}", "share"),
        ("routes: {a@b: {targets: [{model: m}]}}", "a@b"),
        ("routes: {a: {targets: [{model: m}], abort: {max_slowdown: 0.5}}}", "max_slowdown"),
        ("routes: {a: {target: m}}", "routes.a"),
        ("routes: {a", "cannot be read"),
        ("routes:\n  a: {targets: [{model: m}]}\n  a: {targets: [{model: n}]}", "line 3, column 3: duplicate key a"),
    ],
)
def test_invalid_routes_are_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "routes.yaml").write_text(content)
    with pytest.raises(ConfigurationError) as caught:
        read_routes(tmp_path / "routes.yaml")
    assert message in caught.value.message
    assert caught.value.hint


def simulate(rng: random.Random, requests: int, *, errors: float, slowdown: float, share: float = 0.2) -> int:
    """Return the number of the canary's requests before an abort, or 0. The stable target fails 1% of requests."""
    comparison, limits = CanaryComparison(), AbortLimits()
    for _ in range(requests):
        is_canary = rng.random() < share
        failed = rng.random() < (errors if is_canary else 0.01)
        first, seconds = (rng.lognormvariate(0, 0.7) * (slowdown if is_canary else 1) for _ in range(2))
        outcome = Outcome(True) if failed else Outcome(False, first, seconds)
        comparison.record(outcome, limits, is_canary=is_canary)
        if is_canary and comparison.find_reason(limits):
            return comparison.requests
    return 0


def test_equal_targets_are_rarely_aborted_and_worse_ones_soon() -> None:
    rng = random.Random(5)
    # At the limit of the hypothesis: as many errors, and exactly the tolerated latency.
    for slowdown in (1.0, 2.0):
        aborted = [simulate(rng, 1000, errors=0.01, slowdown=slowdown) > 0 for _ in range(60)]
        assert sum(aborted) <= 3
    for change in ({"errors": 0.2, "slowdown": 1.0}, {"errors": 0.01, "slowdown": 5.0}):
        found = [simulate(rng, 2000, **change) for _ in range(20)]
        assert all(0 < requests <= 200 for requests in found)


def test_a_common_outage_aborts_no_canary() -> None:
    rng, limits, comparison = random.Random(2), AbortLimits(), CanaryComparison()
    for number in range(4000):
        failed = rng.random() < (0.9 if 1000 < number < 3000 else 0.0)
        comparison.record(Outcome(failed), limits, is_canary=rng.random() < 0.1)
        assert not comparison.find_reason(limits)
    assert sum(comparison.pairs[ERRORS]) > 20


def test_an_abort_needs_the_minimum_of_requests_and_names_the_quantity() -> None:
    comparison, limits = CanaryComparison(), AbortLimits(min_requests=30)
    for _ in range(30):
        assert not comparison.find_reason(limits)
        comparison.record(Outcome(False, 1.0, 1.0), limits, is_canary=False)
        comparison.record(Outcome(False, 1.0, 2.5), limits, is_canary=True)
    assert comparison.find_reason(limits) == DURATION
    assert not comparison.find_reason(AbortLimits(enabled=False))


def test_a_failing_canary_is_aborted_until_its_route_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    random.seed(4)
    path, now = tmp_path / "routes.yaml", time.monotonic()
    write(path, targets=[{**each, "weight": 1} for each in TARGETS], abort={"min_requests": 10})
    router = create_router(path, failing="tuner-candidate")
    with caplog.at_level(logging.INFO):
        answered = Counter(asyncio.run(answer_many(router, 200)))
    assert 10 <= answered["tuner-candidate"] < 40
    assert caplog.text.count("canary_aborted route=tuner model=tuner-candidate version=4 reason='error rate'") == 1
    stable, canary = asyncio.run(router.describe())["routes"][0]["targets"]
    assert (stable["effective_weight"], stable["aborted"], stable["errors"]) == (1, None, 0)
    assert (canary["effective_weight"], canary["aborted"]["reason"]) == (0, "error rate")
    assert canary["errors"] == canary["requests"] == answered["tuner-candidate"]
    assert get_model(router, "tuner@candidate") == "tuner-candidate"  # an explicit request is not routed

    restarted = create_router(path, failing="tuner-candidate")
    assert set(asyncio.run(answer_many(restarted, 20))) == {"tuner"}
    set_route(path, "other", {"targets": TARGETS})  # another route does not end the abort
    monkeypatch.setattr(time, "monotonic", lambda: now + 60)
    assert set(asyncio.run(answer_many(restarted, 20))) == {"tuner"}
    write(path, targets=[{**each, "weight": 1} for each in TARGETS], updated="now")
    monkeypatch.setattr(time, "monotonic", lambda: now + 120)
    assert set(asyncio.run(answer_many(restarted, 20))) == {"tuner", "tuner-candidate"}


async def answer_many(router: TrafficRouter, requests: int) -> list[str]:
    return [await answer(router) for _ in range(requests)]


def test_an_abort_holds_if_it_cannot_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "routes.yaml", targets=[{**each, "weight": 1} for each in TARGETS])
    router = create_router(path, failing="tuner-candidate")

    def fail(*_: object) -> None:
        raise OSError("read-only file system")

    monkeypatch.setattr("components.common.artifacts.artifact_folder.write_atomically", fail)
    asyncio.run(answer_many(router, 300))
    assert "canary_abort_not_saved" in caplog.text
    assert set(asyncio.run(answer_many(router, 20))) == {"tuner"}


def test_a_new_version_of_the_canary_begins_a_new_comparison(tmp_path: Path) -> None:
    path = write(
        tmp_path / "routes.yaml", targets=[{**each, "weight": 1} for each in TARGETS], abort={"min_requests": 500}
    )
    router = create_router(path)
    asyncio.run(answer_many(router, 40))
    before = asyncio.run(router.describe())["routes"][0]["targets"][1]
    assert sum(before["evidence"][DURATION][each] for each in ("worse", "not_worse")) > 5
    router._triton._models["tuner-candidate"] = serve("tuner-candidate", "5", "candidate", "canary")
    while asyncio.run(answer(router)) != "tuner-candidate":
        pass
    after = asyncio.run(router.describe())["routes"][0]["targets"][1]
    assert sum(after["evidence"][DURATION][each] for each in ("worse", "not_worse")) <= 1


def test_copies_are_sent_beside_the_answers_and_compared(tmp_path: Path) -> None:
    path = write(
        tmp_path / "routes.yaml", targets=TARGETS[:1], shadow={"model": "tuner-candidate", "share": 1, "max_running": 2}
    )

    async def run(failing: str) -> tuple[list[str], dict[str, int]]:
        router = create_router(path, failing=failing)
        for _ in range(3):
            assert await answer(router) == "tuner"
        for _ in range(20):
            await asyncio.sleep(0)
        router.running = 10  # a busy server sends no copies
        await answer(router)
        await asyncio.sleep(0)
        shadow = (await router.describe())["routes"][0]["shadow"]
        return router._triton.answered, shadow["answers"]  # type: ignore[attr-defined]

    answered, outcomes = asyncio.run(run(""))
    assert (answered.count("tuner"), answered.count("tuner-candidate")) == (4, 3)
    assert outcomes == {"different": 3, "dropped": 1}
    assert asyncio.run(run("tuner-candidate"))[1] == {"failed": 3, "dropped": 1}


def test_a_full_queue_drops_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow_traffic, "QUEUE_LENGTH", 2)
    path = write(tmp_path / "routes.yaml", targets=TARGETS[:1], shadow={"model": "tuner-candidate", "share": 1})
    router = create_router(path)

    async def run() -> None:
        await answer_many(router, 5)  # the fake model answers without yielding to the workers

    asyncio.run(run())
    assert router._shadow.outcomes["tuner", "tuner-candidate", "dropped"] == 3


def test_waiting_copies_are_answered_before_the_gateway_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "routes.yaml", targets=TARGETS[:1], shadow={"model": "tuner-candidate", "share": 1})

    async def run() -> Mapping[Any, int]:
        router = create_router(path)
        await answer_many(router, 5)
        await asyncio.wait_for(router.close(), 10)
        return router._shadow.outcomes

    assert asyncio.run(run()) == {("tuner", "tuner-candidate", "different"): 5}

    class EndlessAnswer:
        def __init__(self, *_: object) -> None: ...

        async def answer(self) -> None:
            await asyncio.sleep(600)

    monkeypatch.setattr(shadow_traffic, "Completion", EndlessAnswer)
    monkeypatch.setattr(shadow_traffic, "CLOSE_SECONDS", 0.05)
    assert asyncio.run(run()) == {("tuner", "tuner-candidate", "dropped"): 5}


def test_the_command_line_changes_the_file(tmp_path: Path) -> None:
    def run(*arguments: str) -> Any:
        result = CliRunner().invoke(app, ["routes", *arguments, "--routes", str(tmp_path / "routes.yaml"), "--json"])
        assert result.exit_code == 0, result.output
        return json.loads(result.output)

    targets = ["--target", "tuner=95", "--target", "tuner-candidate=5"]
    run("set", "tuner", *targets, "--sticky", "header x-tenant", "--shadow", "next=0.5", "--max-slowdown", "3")
    route = run("show")["routes"]["tuner"]
    assert [(each["model"], each["weight"]) for each in route["targets"]] == [("tuner", 95), ("tuner-candidate", 5)]
    assert (route["sticky"], route["shadow"]["share"], route["abort"]["max_slowdown"]) == ("header x-tenant", 0.5, 3)
    digest = read_routes(tmp_path / "routes.yaml")["tuner"].digest
    run("set", "tuner", *targets, "--sticky", "header x-tenant", "--shadow", "next=0.5", "--max-slowdown", "3")
    assert read_routes(tmp_path / "routes.yaml")["tuner"].digest != digest  # ends an abort
    assert run("clear", "tuner")["cleared"] == ["tuner"]
    assert run("show") == {"routes": {}, "aborts": []}


def test_errors_of_the_command_line_name_the_value(tmp_path: Path) -> None:
    for settings, value in (
        ({"targets": [{"model": "m", "weight": "x"}]}, "'x'"),
        ({"targets": [], "sticky": "ip"}, "[]"),
    ):
        with pytest.raises(ConfigurationError, match="the route") as caught:
            set_route(tmp_path / "routes.yaml", "tuner", settings)
        assert value in caught.value.message
    with pytest.raises(ConfigurationError, match="has no route for other; existing routes: none"):
        traffic_routes.clear_routes(tmp_path / "routes.yaml", "other")
