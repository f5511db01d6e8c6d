"""A Triton that follows the registry: whichever version the alias names is brought into service, wherever the alias was moved.

The registry is asked every few seconds; its webhooks do not reach private addresses. A version that fails promote's own checks, does not
load, or does not answer as it was proven to, is not served: the one in service stays, and the version is tagged with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from components.common import jobs
from components.common.errors import EngineMissingError, RegistryError, TunelineError
from components.common.progress import Reporter
from components.model_registry import promotion, service
from components.model_registry.approval import Policy
from components.model_registry.service import Wanted
from components.triton_packaging import serve
from components.triton_packaging.deployment import layout, repository_api, state, switching
from components.triton_packaging.deployment.layout import Release
from components.triton_packaging.deployment.repository_api import Address
from components.triton_packaging.deployment.state import Refused, Served, State
from components.triton_packaging.server import Server, running_server

RESTARTS, CALM_SECONDS = 5, 60.0  # a server that ends so often, each time within so many seconds, is not started again
LOG = "deploy.log"  # in the serving folder: what was taken into service, refused or lost, and when
NOTHING_YET = "no version has the alias yet"


@dataclass
class Deployment:
    """What is to be followed, and where it is served from. `state` is what state.json says."""

    name: str
    alias: str
    folder: Path
    state: State
    reporter: Reporter
    timeout: float = 300.0
    told: str = ""  # the last thing said, which is not said again at every look
    on_served: Callable[[Served], None] = field(default=lambda _: None)

    def say(self, words: str) -> None:
        """Tell the person at the command something, once, and keep it in deploy.log."""
        if words != self.told:
            self.reporter.note(words)
            with (self.folder / LOG).open("a", encoding="utf-8") as log:
                log.write(f"{_now()} {words}\n")
        self.told = words


@contextmanager
def opened(name: str, folder: Path, reporter: Reporter, *, alias: str, served_as: str = "", timeout: float = 300.0) -> Iterator[Deployment]:
    """The deployment of a serving folder, which this process holds alone meanwhile.

    Raises BusyError where another one does, TunelineError for a folder that follows another model.
    """
    (folder / layout.REPOSITORY).mkdir(parents=True, exist_ok=True)
    with jobs.held(folder):
        known = state.read(folder) or State(registered_model=name, alias=alias, served_as=served_as)
        if (known.registered_model, known.alias) != (name, alias):
            raise TunelineError(
                f"{folder} serves {known.registered_model}@{known.alias}, not {name}@{alias}", hint="Name another folder with --folder."
            )
        if served_as and known.served_as not in ("", served_as):
            raise TunelineError(
                f"{folder} serves the model as {known.served_as}, not as {served_as}: its clients ask for that name",
                hint="Name another folder with --folder.",
            )
        known.refused = None  # a new start tries again
        yield Deployment(name, alias, folder, known, reporter, timeout)


def once(deployment: Deployment, server: Address) -> State:
    """Bring the version that the alias names now into service on a running server, and return what is served then.

    Raises RegistryError where the alias names none, or where that version may not be served; whatever went wrong with it otherwise.
    """
    found = service.wanted(deployment.name, deployment.alias)
    if found is None:
        raise RegistryError(f"{deployment.name} has no {deployment.alias}", hint=f"tuneline promote {deployment.name} --version N")
    resume(deployment, server)
    _take(deployment, server, found)
    if deployment.state.refused:
        raise RegistryError(
            f"{found.name} version {found.version} is not served: {deployment.state.refused.reason}",
            hint="What was served before still is. Promote another version, or roll back.",
        )
    return deployment.state


def promoted(
    name: str, version: str, *, alias: str, by: str, reason: str, force: bool, configuration: str, reporter: Reporter
) -> dict[str, Any]:
    """Move an alias as `tuneline promote` does; `configuration` is JSON with the approvers. Returns what moved: name, alias, from, to."""
    policy = Policy.model_validate_json(configuration or "{}")
    options: dict[str, Any] = {"alias": alias, "by": by, "reason": reason, "force": force}
    return promotion.promote(name, version, **options, policy=policy if policy.approvers else None, reporter=reporter).model_dump(
        by_alias=True
    )


def in_service(moved: dict[str, Any], url: str, grpc_url: str, *, served_as: str, folder: Path, reporter: Reporter) -> dict[str, Any]:
    """Bring the version of a promotion into service on a running server. Returns what is served: name, version, digests.

    Where that fails the alias goes back to where it was, so that it names what is served; the error is then raised.
    """
    name, alias = moved["name"], moved["alias"]
    try:
        with opened(name, serving_folder(folder, name), reporter, alias=alias, served_as=served_as) as deployment:
            served = once(deployment, Address(url.rstrip("/"), grpc_url)).serving
    except TunelineError as error:
        if moved["from"] not in (None, moved["to"]):
            promotion.rollback(name, alias=alias, reason=f"not served: {error.message}"[:500], reporter=reporter)
            reporter.note(f"{name}@{alias} is given back to version {moved['from']}")
        raise
    assert served is not None, "once() raises where nothing is served"
    return {"name": name, "alias": alias, **served.model_dump()}


def serving_folder(workdir: Path, name: str) -> Path:
    """Where a registered model is served from, unless another place is named."""
    return workdir / "serving" / name


def follow(deployment: Deployment, server: Address, *, every: float, alive: Callable[[], None]) -> None:
    """Follow the alias until interrupted. `alive` raises when the server has ended; it is asked between two looks at the registry."""
    while True:
        alive()
        look(deployment, server)
        until = time.monotonic() + every
        while time.monotonic() < until:
            alive()
            time.sleep(min(0.5, every))


def look(deployment: Deployment, server: Address) -> None:
    """One look at the registry, and what follows from it. A registry or a server that is away changes nothing."""
    try:
        found = service.wanted(deployment.name, deployment.alias)
    except (RegistryError, EngineMissingError) as error:
        deployment.say(f"the registry cannot be asked, so what is served stays: {error.message}")
        return
    try:
        _stay_in_service(deployment, server)
        if found is None:
            deployment.say(f"{deployment.name}@{deployment.alias}: {NOTHING_YET}")
        else:
            _take(deployment, server, found)
    except EngineMissingError as error:
        deployment.say(error.message)


def _stay_in_service(deployment: Deployment, server: Address) -> None:
    """A server that was started again has forgotten what it served."""
    serving, name = deployment.state.serving, deployment.state.served_as
    if serving and not repository_api.is_served(server, name, serving.version) and resume(deployment, server):
        deployment.say(f"version {serving.version} is in service again")


def resume(deployment: Deployment, server: Address) -> bool:
    """Have the server answer with the version that was in service last. Returns whether there was one that is whole."""
    release = _release(deployment, deployment.state.serving)
    if release is None:
        return False
    name = deployment.state.served_as
    switching.put_in_service(server, deployment.folder, name, release, _lineage(deployment, release), deployment.timeout)
    return True


def _take(deployment: Deployment, server: Address, found: Wanted) -> None:
    """Take what the alias names into service, if that is not so already and was not refused."""
    serving = deployment.state.serving
    same = serving is not None and (serving.version, serving.repository_sha256) == (found.version, found.repository_sha256)
    if same:
        _back_to_normal(deployment)
        return
    if deployment.state.is_refused(found.version, found.repository_sha256):
        return
    try:
        reasons = service.objections(found.name, found.version, deployment.alias, serving.model_sha256 if serving else service.UNKNOWN)
        if reasons:
            raise RegistryError(" and ".join(reasons), hint="")
        _bring_in(deployment, server, found)
    except EngineMissingError:
        raise  # the server or the registry went away: that is not the version's fault
    except (TunelineError, OSError) as error:
        _refuse(deployment, found, error)


def _bring_in(deployment: Deployment, server: Address, found: Wanted) -> None:
    kept = deployment.state
    old = _release(deployment, kept.serving)
    with service.package(found.name, found.version) as package:
        deployment.reporter.step(f"fetching version {found.version}")
        new = Release(found.version, layout.take_in(deployment.folder, package))
    name = kept.served_as or new.own_name
    switching.switch(
        server, deployment.folder, name, new, old,
        lineage=lambda release: _lineage(deployment, release), timeout=deployment.timeout, reporter=deployment.reporter,
    )  # fmt: skip
    before = kept.serving
    now = Served(version=found.version, repository_sha256=found.repository_sha256, model_sha256=found.model_sha256, since=_now())
    deployment.state = kept.model_copy(update={"served_as": name, "serving": now, "before": before, "refused": None})
    state.write(deployment.folder, deployment.state)
    layout.keep_only(deployment.folder, {each.repository_sha256 for each in (now, before) if each})
    _mark(deployment, found.version, service.IN_SERVICE)
    if before and before.version != found.version:
        _mark(deployment, before.version, service.RETIRED)
    instead = f", in the place of {before.version}" if before else ""
    deployment.say(f"{found.name} version {found.version} is in service as {name}{instead}")
    deployment.on_served(now)


def _refuse(deployment: Deployment, found: Wanted, error: TunelineError | OSError) -> None:
    reason = error.message if isinstance(error, TunelineError) else str(error)
    refused = Refused(version=found.version, repository_sha256=found.repository_sha256, reason=reason, at=_now())
    deployment.state = deployment.state.model_copy(update={"refused": refused})
    state.write(deployment.folder, deployment.state)
    serving = deployment.state.serving
    stays = f"version {serving.version} stays in service" if serving else "nothing is served"
    _mark(deployment, found.version, service.REFUSED, reason)
    deployment.say(f"{found.name} version {found.version} is not served, {stays}: {reason}")


def _back_to_normal(deployment: Deployment) -> None:
    """The alias names what is served: a version that was refused may be tried again when it is named again."""
    if deployment.state.refused is not None:
        deployment.state = deployment.state.model_copy(update={"refused": None})
        state.write(deployment.folder, deployment.state)
    deployment.told = ""


def _mark(deployment: Deployment, version: str, what: str, reason: str = "") -> None:
    """Tags are for people: a registry that does not take them now stops nothing."""
    try:
        service.mark(deployment.name, version, what, reason)
    except (RegistryError, EngineMissingError) as error:
        deployment.say(f"version {version} could not be tagged as {what}: {error.message}")


def _release(deployment: Deployment, served: Served | None) -> Release | None:
    """The verified copy of a version that was in service."""
    package = layout.taken_in(deployment.folder, served.repository_sha256) if served else None
    return Release(served.version, package) if served and package else None


def _lineage(deployment: Deployment, release: Release) -> dict[str, str]:
    """What a running server says of itself beside what the package says."""
    named = {"registered_model": deployment.name, "registered_version": release.version}
    return {**named, "repository_sha256": release.package.sha256}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class OwnServer:
    """How a server of our own is run: its ports by running_server's names, its log, seconds between two looks at the registry."""

    ports: dict[str, int]
    host: str
    log: Path
    every: float
    watch: bool
    on_ready: Callable[[Server], None]


def serve_and_follow(deployment: Deployment, how: OwnServer) -> None:
    """Run a server of our own that follows the alias, until SIGINT or SIGTERM; with `watch` false it keeps the version of the beginning.

    A server that ends by itself is started again on the same ports, with what was in service. `on_ready` is called when a version is in
    service. Raises EngineMissingError when it ends again and again, RegistryError where there is nothing to serve and nothing is watched.
    """
    ended: list[float] = []
    with serve.until_signal():
        while True:
            try:
                _one_life(deployment, how)
            except ServerEndedError as error:
                how, ended = replace(how, ports=error.ports), [*ended[-RESTARTS:], time.monotonic()]
                if len(ended) > RESTARTS and ended[-1] - ended[0] < RESTARTS * CALM_SECONDS:
                    raise EngineMissingError(error.message, hint=error.hint) from None
                deployment.say(f"the server ended; it is started again with what was in service. {error.message}")


class ServerEndedError(EngineMissingError):
    """A server that was ready ended by itself. `ports` are those it listened on."""

    ports: dict[str, int]


def _one_life(deployment: Deployment, how: OwnServer) -> None:
    """From the start of a server to its end."""
    options: dict[str, Any] = {**how.ports, "ready_timeout": deployment.timeout, "reporter": deployment.reporter}
    with running_server(deployment.folder / layout.REPOSITORY, models=[], log=how.log, host=how.host, **options) as server:
        try:
            _serve(deployment, server, how)
        except EngineMissingError as error:
            if server.process.poll() is None:
                raise
            ended = ServerEndedError(error.message, hint=error.hint)
            ended.ports = {"http_port": server.http_port, "grpc_port": server.grpc_port, "metrics_port": server.metrics_port}
            raise ended from None


def _serve(deployment: Deployment, server: Server, how: OwnServer) -> None:
    address = Address(server.http_url, server.grpc_url)
    resumed = _resumed(deployment, address)
    if resumed:
        how.on_ready(server)
    deployment.on_served = lambda _: how.on_ready(server)
    if how.watch:
        follow(deployment, address, every=how.every, alive=server.check_alive)
    elif not resumed:
        once(deployment, address)
    while True:
        server.check_alive()
        time.sleep(0.5)


def _resumed(deployment: Deployment, address: Address) -> bool:
    """What was in service, or the version before where that does not load any more."""
    if deployment.state.serving is None:
        return False
    try:
        if resume(deployment, address):
            return True
        deployment.say(f"the copy of version {deployment.state.serving.version} is damaged; it is fetched again")
    except TunelineError as error:
        if isinstance(error, EngineMissingError):
            raise
        deployment.say(f"version {deployment.state.serving.version} does not load any more: {error.message}")
    deployment.state = deployment.state.model_copy(update={"serving": deployment.state.before, "before": None})
    return deployment.state.serving is not None and _resumed(deployment, address)
