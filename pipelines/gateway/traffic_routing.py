"""Chooses the model that answers a request: names and aliases, canaries, sticky assignment, and their automatic abort."""

from __future__ import annotations

import hashlib
import logging
import random
import time
from collections import Counter as Tally
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter
from pydantic import BaseModel, TypeAdapter, ValidationError

from components.common.artifacts import artifact_folder
from components.common.runtime import filesystem
from components.common.runtime.errors import ConfigurationError
from pipelines.gateway.canary_comparison import CanaryComparison, Outcome, log_evidence
from pipelines.gateway.completions import Completion
from pipelines.gateway.errors import RequestError
from pipelines.gateway.shadow_traffic import CaptureAnswer, ShadowTraffic
from pipelines.gateway.telemetry import AnswerMeasures
from pipelines.gateway.traffic_routes import Route, Target, read_routes
from pipelines.gateway.triton_models import CANARY, SHADOW, ServedModel, TritonModels, unavailable

RELOAD_SECONDS = 2.0

logger = logging.getLogger("tuneline.gateway")


class Abort(BaseModel):
    """A target that lost its traffic. It holds until the route changes."""

    route: str
    target: str
    reason: str
    version: str
    at: str
    route_sha256: str


ABORTS = TypeAdapter(list[Abort])


@dataclass(frozen=True)
class Assignment:
    """The model that answers a request.

    Attributes:
        name: the public name, which the API key must allow.
        route: name of the route, or "" for a request that no route handles.
        is_weighted: whether the model was chosen by weight, so that its targets can be compared.
    """

    model: ServedModel
    name: str
    route: str = ""
    is_weighted: bool = False


@dataclass(frozen=True)
class RoutedAnswer:
    """A request that is being answered, since the time `began`."""

    assignment: Assignment
    completion: Completion
    measures: AnswerMeasures
    began: float = field(default_factory=time.perf_counter)


class TrafficRouter:
    """The routes of a file, which is read again when it changes, and the results of their targets.

    Args:
        triton: the model server.
        path: the routing file, or None: each model has its own name only.
        registry: registry of the metrics.
        request_seconds: limit of the time for one answer.
    """

    def __init__(self, triton: TritonModels, path: Path | None, registry: CollectorRegistry, request_seconds: float):
        self.path = path
        self.state_path = get_state_path(path) if path else None
        self.error = ""  # of the last change of the file
        self.running = 0
        self._triton = triton
        self._routes: dict[str, Route] = {}
        self._aborts: dict[tuple[str, str], Abort] = {}
        self._comparisons: dict[tuple[str, str], CanaryComparison] = {}
        self._tallies: Tally[tuple[str, str, str]] = Tally()
        self._shadow = ShadowTraffic(triton, request_seconds, registry)
        self._requests = Counter(
            "tuneline_gateway_route_requests", "Requests to a route, by the model that answered.",
            ("route", "model", "version"), registry=registry,
        )  # fmt: skip
        self._fallbacks = Counter(
            "tuneline_gateway_route_fallbacks", "Requests that another target answered because the chosen target was not loaded.",
            ("route", "model"), registry=registry,
        )  # fmt: skip
        self._abort_counter = Counter(
            "tuneline_gateway_canary_aborts", "Targets that were aborted and no longer receive requests.", ("route", "model", "reason"),
            registry=registry,
        )  # fmt: skip
        self._checked = 0.0
        if path is not None:
            self._apply(read_routes(path))
            self._checked = time.monotonic()

    async def list_models(self) -> list[tuple[str, ServedModel]]:
        """Return the public names with the models that stand for them, sorted by name.

        Raises:
            RequestError: the server does not answer.
        """
        self._reload()
        models = await self._read_models()
        names = {name: model for name, model in models.items() if model.traffic != SHADOW}
        for name, route in self._routes.items():
            loaded = [models[target.model] for target in _list_loaded(route, models)]
            names |= {name: loaded[0]} if loaded else {}
        return sorted(names.items())

    async def is_ready(self) -> bool:
        """Return whether a model is loaded, not counting canaries.

        Raises:
            RequestError: the server does not answer.
        """
        return any(model.traffic not in (CANARY, SHADOW) for model in (await self._read_models()).values())

    async def assign(
        self,
        name: str,
        *,
        key: str = "",
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Assignment:
        """Return the model that answers a request for NAME or NAME@ALIAS.

        Args:
            name: the name in the request.
            key: name of the API key, or "".
            body: the request's fields, for the subject of a sticky route.
            headers: the request's headers, for the same purpose.

        Raises:
            RequestError: no model has the name, no target is loaded, or the server does not answer.
        """
        self._reload()
        models = await self._read_models()
        if routed := self._find_route(name, models):
            route = self._routes[routed]
            subject = _find_subject(route.sticky, key, body or {}, headers or {})
            return Assignment(self._choose(routed, route, models, subject), routed, routed, is_weighted=True)
        base, _, alias = name.rpartition("@")
        if base and (model := self._find_alias(base, alias, models)):
            routed = self._find_route(base, models)
            assignment = Assignment(model, routed or base, routed)
        else:
            model = await self._triton.find_model(name)
            assignment = Assignment(model, model.client_name)
        if model.traffic == SHADOW:
            raise RequestError(
                403, f"the model {name!r} receives shadow traffic only: its evaluation did not accept it",
                code="model_not_allowed", param="model",
            )  # fmt: skip
        return assignment

    async def _read_models(self) -> dict[str, ServedModel]:
        return {model.client_name: model for model in await self._triton.list_models()}

    def _choose(self, name: str, route: Route, models: Mapping[str, ServedModel], subject: str) -> ServedModel:
        """Return the target of a subject, or a random one; the first loaded target if that one is not loaded."""
        weighted = [(target, self._get_weight(name, target)) for target in route.targets]
        chosen = choose_target(weighted, get_position(name, subject) if subject else random.random())  # noqa: S311
        loaded = _list_loaded(route, models)
        if chosen not in loaded:
            if not loaded:
                raise unavailable(f"no target of {name} is loaded")
            self._fallbacks.labels(name, chosen.model).inc()
            # A target without weight, such as an aborted one, answers only if there is no other.
            chosen = next((target for target in loaded if self._get_weight(name, target)), loaded[0])
        return models[chosen.model]

    def _get_weight(self, name: str, target: Target) -> float:
        return 0.0 if (name, target.model) in self._aborts else target.weight

    def _find_route(self, name: str, models: Mapping[str, ServedModel]) -> str:
        """Return the name of the route for a public name or the registered name of its first target, or ""."""
        if name in self._routes:
            return name
        stable = {each: models.get(route.targets[0].model) for each, route in self._routes.items()}
        return next((each for each, model in stable.items() if model and name and model.registered == name), "")

    def _find_alias(self, base: str, alias: str, models: Mapping[str, ServedModel]) -> ServedModel | None:
        route = self._routes.get(self._find_route(base, models))
        for target in _list_loaded(route, models, with_shadow=True) if route else []:
            if alias == (target.alias or models[target.model].alias):
                return models[target.model]
        registered = {model.registered for model in models.values() if base in (model.client_name, model.registered)}
        found = [each for each in models.values() if each.registered in registered - {""} and each.alias == alias]
        return found[0] if found else None

    def begin(self, assignment: Assignment, completion: Completion, measures: AnswerMeasures) -> RoutedAnswer:
        """Count a request that is being answered. `finish` must follow."""
        self.running += 1
        return RoutedAnswer(assignment, completion, measures)

    def finish(self, answer: RoutedAnswer, status: int, capture: CaptureAnswer | None = None) -> None:
        """Record a finished request, abort a canary that is worse, and copy the request to the shadow model.

        Args:
            answer: the request.
            status: HTTP status; 499 if the client disconnected.
            capture: captures the answer of the shadow model, or None.
        """
        self.running -= 1
        name, model, completion = answer.assignment.route, answer.assignment.model, answer.completion
        route, seconds = self._routes.get(name), time.perf_counter() - answer.began
        if route is None:
            return
        is_error = status >= 500 or completion.error is not None
        is_answered = status == 200 and not is_error
        self._requests.labels(name, model.client_name, completion.version).inc()
        self._tallies[name, model.client_name, "requests"] += 1
        self._tallies[name, model.client_name, "errors"] += is_error
        if answer.assignment.is_weighted and (is_answered or is_error or status == 499):
            first = answer.measures.first_seconds
            if status == 499 and first is None:
                first = seconds  # a client that gives up without a first token has measured at least this time
            outcome = Outcome(is_error, None if is_error else first, seconds if is_answered else None)
            self._compare(name, route, model.client_name, completion.version, outcome)
        if route.shadow and is_answered and random.random() < route.shadow.share:  # noqa: S311
            shadow = self._triton.get_known(route.shadow.model)
            if shadow is None or shadow.client_name == model.client_name:
                return
            if self.running > route.shadow.max_running:
                self._shadow.drop(name, shadow)
            else:
                self._shadow.submit(name, shadow, completion, seconds, capture)

    async def close(self) -> None:
        """Finish the copies that wait for the shadow model."""
        await self._shadow.close()

    def _compare(self, name: str, route: Route, model: str, version: str, outcome: Outcome) -> None:
        stable = route.targets[0].model
        is_canary = model != stable
        for target in [each.model for each in route.targets[1:] if model in (stable, each.model)]:
            key = (name, target)
            if key in self._aborts:
                continue
            comparison = self._comparisons.get(key)
            if comparison is None or comparison.versions.get(is_canary, version) != version:
                comparison = self._comparisons[key] = CanaryComparison()
            comparison.versions[is_canary] = version
            comparison.record(outcome, route.abort, is_canary=is_canary)
            if reason := comparison.find_reason(route.abort):
                self._abort(name, target, comparison.versions.get(True, ""), reason, route)

    def _abort(self, name: str, target: str, version: str, reason: str, route: Route) -> None:
        assert self.state_path is not None
        at = datetime.now(UTC).isoformat(timespec="seconds")
        self._aborts[name, target] = Abort(
            route=name, target=target, reason=reason, version=version, at=at, route_sha256=route.digest
        )
        self._abort_counter.labels(name, target, reason).inc()
        logger.warning(
            "canary_aborted route=%s model=%s version=%s reason=%r requests=%d",
            name, target, version, reason, self._comparisons[name, target].requests,
        )  # fmt: skip
        try:
            saved = [abort for abort in read_aborts(self.state_path) if (abort.route, abort.target) not in self._aborts]
            content = ABORTS.dump_json([*saved, *self._aborts.values()], indent=2).decode() + "\n"
            artifact_folder.write_atomically(self.state_path, content)
        except OSError as error:  # the abort holds until the gateway is started again
            logger.warning("canary_abort_not_saved file=%s error=%r", self.state_path, str(error))

    def _reload(self) -> None:
        if self.path is None or time.monotonic() < self._checked + RELOAD_SECONDS:
            return
        self._checked = time.monotonic()
        try:
            self._apply(read_routes(self.path))
        except ConfigurationError as error:  # keep the valid routes: a bad edit must not end the service
            if error.message != self.error:
                logger.warning("routing_file_invalid error=%r", error.message)
            self.error = error.message

    def _apply(self, routes: dict[str, Route]) -> None:
        """Use these routes, and the recorded aborts of those that are unchanged."""
        assert self.state_path is not None
        for name in {*routes, *self._routes}:
            if routes.get(name) != self._routes.get(name):
                logger.info("route_changed name=%s route=%r", name, show_route(routes[name]) if name in routes else "-")
                for counts in (self._comparisons, self._tallies):
                    for key in [key for key in counts if key[0] == name]:
                        del counts[key]  # type: ignore[arg-type]
        self._routes, self.error = routes, ""
        digests = {name: route.digest for name, route in routes.items()}
        aborts = [*self._aborts.values(), *read_aborts(self.state_path)]
        self._aborts = {
            (abort.route, abort.target): abort for abort in aborts if digests.get(abort.route) == abort.route_sha256
        }

    async def describe(self) -> dict[str, Any]:
        """Return the routes with the state and the counts of their targets.

        Raises:
            RequestError: the server does not answer.
        """
        self._reload()
        models = await self._read_models()
        routes = [
            {
                "name": name,
                "sticky": route.sticky,
                "targets": [self._describe_target(name, route, target, models) for target in route.targets],
                "shadow": self._describe_shadow(name, route, models),
                "updated": route.updated,
            }
            for name, route in self._routes.items()
        ]
        return {"routes": routes, "error": self.error or None}

    def _describe_target(
        self, name: str, route: Route, target: Target, models: Mapping[str, ServedModel]
    ) -> dict[str, Any]:
        model, comparison = models.get(target.model), self._comparisons.get((name, target.model))
        abort = self._aborts.get((name, target.model))
        return {
            "model": target.model,
            "weight": target.weight,
            "effective_weight": self._get_weight(name, target),
            "loaded": model is not None,
            "version": model.version if model else None,
            "alias": target.alias or (model.alias if model else "") or None,
            "requests": self._tallies[name, target.model, "requests"],
            "errors": self._tallies[name, target.model, "errors"],
            "evidence": {
                quantity: {"worse": worse, "not_worse": better, "log_e": round(log_evidence(worse, better), 2)}
                for quantity, (worse, better) in (comparison.pairs if comparison else {}).items()
            },
            "aborted": abort.model_dump(include={"reason", "version", "at"}) if abort else None,
        }

    def _describe_shadow(self, name: str, route: Route, models: Mapping[str, ServedModel]) -> dict[str, Any] | None:
        if route.shadow is None:
            return None
        outcomes = self._shadow.outcomes.items()
        counts = {kind: count for (each, model, kind), count in outcomes if (each, model) == (name, route.shadow.model)}
        return {**route.shadow.model_dump(), "loaded": route.shadow.model in models, "answers": counts}


def get_position(route: str, subject: str) -> float:
    """Return the subject's position in [0, 1), which depends on the route, so that routes divide subjects differently."""
    digest = hashlib.sha256(f"{route}\0{subject}".encode()).digest()
    return int.from_bytes(digest[:7]) / 2**56


def choose_target(weighted: Sequence[tuple[Target, float]], position: float) -> Target:
    """Return the target at a position in [0, 1). The first target has the end of the interval.

    A canary that grows takes subjects from the first target and keeps its own.
    """
    total = sum(weight for _, weight in weighted)
    level = 0.0
    for target, weight in weighted[:0:-1]:
        level += weight
        if position * total < level:
            return target
    return weighted[0][0]


def get_state_path(path: Path) -> Path:
    """Return the file next to a routing file that records the aborted targets."""
    return path.with_name(f"{path.name}.aborts.json")


def show_route(route: Route) -> str:
    """Return a route in one line."""
    shadow = f" shadow={route.shadow.model}={route.shadow.share:g}" if route.shadow else ""
    return " ".join(f"{target.model}={target.weight:g}" for target in route.targets) + f" sticky={route.sticky}{shadow}"


def read_aborts(path: Path) -> list[Abort]:
    """Return the aborts of a state file; nothing if the file does not exist or cannot be read."""
    try:
        return ABORTS.validate_json(filesystem.read_bytes(path))
    except FileNotFoundError:
        return []
    except (OSError, ValidationError) as error:
        logger.warning("abort_file_invalid file=%s error=%r", path, str(error))
        return []


def _list_loaded(route: Route, models: Mapping[str, ServedModel], *, with_shadow: bool = False) -> list[Target]:
    return [
        target
        for target in route.targets
        if target.model in models and (with_shadow or models[target.model].traffic != SHADOW)
    ]


def _find_subject(sticky: str, key: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> str:
    """Return the subject of a sticky route, or "" if the request has none."""
    if sticky == "key":
        return key
    if sticky == "user":
        return str(body.get("user") or body.get("safety_identifier") or "")
    return headers.get(sticky.removeprefix("header ").lower(), "") if sticky.startswith("header ") else ""
