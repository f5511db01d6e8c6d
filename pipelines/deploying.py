"""A Triton that follows the registry: whichever version the alias names is brought into service, wherever the alias was moved.

The registry is asked every few seconds; its webhooks do not reach private addresses. A version that fails promote's own checks, does not
load, or does not answer as it was proven to, is not served: the one in service stays, and the version is tagged with the reason.
"""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from components.common import jobs
from components.common.errors import (
    ConfigurationError,
    DiskFullError,
    EngineMissingError,
    NotWritableError,
    RegistryError,
    TunelineError,
    UsageError,
)
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

DYING_SECONDS = 5.0  # from a broken connection to the end of its server
RESTARTS, CALM_SECONDS = 5, 60.0  # a server that ends so often, each time within so many seconds, is not started again
LOG = "deploy.log"  # in the serving folder: what was taken into service, refused or lost, and when
NOTHING_YET, NOBODY = "no version has the alias yet", "no version has the alias, so what is served stays"
AGAIN_SECONDS = 30.0  # between two tries to take a version in that the machine had no room for
REFUSED_SECONDS = 300.0  # between two tries of a version that was refused, while nothing is served


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
    waits: tuple[str, float] = ("", 0.0)  # a version, and when (monotonic) it is tried again
    deaths: Counter[str] = field(default_factory=Counter)  # how often the server ended while it tried a version
    kept: bool = True  # whether state.json says what `state` does
    on_served: Callable[[Served], None] = field(default=lambda _: None)

    def say(self, words: str) -> None:
        """Tell the person at the command something, once, and keep it in deploy.log."""
        if words != self.told:
            self.reporter.note(words)
            with suppress(OSError), (self.folder / LOG).open("a", encoding="utf-8") as log:  # a full disk ends no service
                log.write(f"{_now()} {words}\n")
        self.told = words

    def keep(self) -> None:
        """Write state.json. Where that cannot be done now, what is served goes on, and a restart begins with what was written last."""
        try:
            state.write(self.folder, self.state)
            self.kept = True
        except OSError as error:
            self.kept = False
            self.say(f"{self.folder / state.STATE} cannot be written: {error}")


@contextmanager
def opened(name: str, folder: Path, reporter: Reporter, *, alias: str, served_as: str = "", timeout: float = 300.0) -> Iterator[Deployment]:
    """The deployment of a serving folder, which this process holds alone meanwhile.

    Raises BusyError where another one does, TunelineError for a folder that follows another model, UsageError for a `served_as` that
    is no model's name.
    """
    (folder / layout.REPOSITORY).mkdir(parents=True, exist_ok=True)
    with jobs.held(folder):
        known = state.read(folder) or State(registered_model=name, alias=alias, served_as=served_as)
        if (known.registered_model, known.alias) != (name, alias):
            raise TunelineError(
                f"{folder} serves {known.registered_model}@{known.alias}, not {name}@{alias}", hint="Name another folder with --folder."
            )
        if served_as and known.serving and layout.checked_name(served_as) != known.served_as:
            raise TunelineError(
                f"{folder} serves the model as {known.served_as}, not as {served_as}: its clients ask for that name",
                hint="Name another folder with --folder.",
            )
        known.served_as = layout.checked_name(served_as) if served_as else known.served_as
        known.refused = None  # a new start tries again
        yield Deployment(name, alias, folder, known, reporter, timeout)


def once(deployment: Deployment, server: Address) -> State:
    """Bring the version that the alias names now into service on a running server, and return what is served then.

    Raises RegistryError where the alias names none, or where that version may not be served; whatever went wrong with it otherwise.
    """
    found = service.wanted(deployment.name, deployment.alias)
    if found is None:
        raise RegistryError(f"{deployment.name} has no {deployment.alias}", hint=f"tuneline promote {deployment.name} --version N")
    switching.check_answers(server)
    _stay_in_service(deployment, server)
    _take(deployment, server, found)
    _tidy(deployment, server)
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
        _give_back(moved, f"not served: {error.message}"[:500], reporter)
        raise
    assert served is not None, "once() raises where nothing is served"
    return {"name": name, "alias": alias, **served.model_dump()}


def _give_back(moved: dict[str, Any], reason: str, reporter: Reporter) -> None:
    """Undo a promotion, unless somebody has moved the alias since. What goes wrong here is noted: the error before is the one to tell."""
    name, alias, before = moved["name"], moved["alias"], moved["from"]
    try:
        holder = service.wanted(name, alias)
        if before in (None, moved["to"]) or holder is None or holder.version != moved["to"]:
            return
        promotion.rollback(name, alias=alias, reason=reason, reporter=reporter)
        reporter.note(f"{name}@{alias} is given back to version {before}")
    except TunelineError as error:
        reporter.note(f"{name}@{alias} could not be given back: {error.message}")


def serving_folder(workdir: Path, name: str) -> Path:
    """Where a registered model is served from, unless another place is named. A name is one folder, whatever it holds."""
    folder = quote(name, safe=" ")
    return workdir / "serving" / (folder if folder.strip(".") else folder.replace(".", "%2E"))


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
    """One look at the server and at the registry, and what follows. A registry or a server that is away changes nothing."""
    try:
        switching.check_answers(server)
        _stay_in_service(deployment, server)
        _tidy(deployment, server)
        found = _wanted(deployment)
        if found and not (deployment.waits[0] == found.version and time.monotonic() < deployment.waits[1]):
            _take(deployment, server, found)
    except (PassingError, EngineMissingError, OSError) as error:
        deployment.say(_told(error))


def _wanted(deployment: Deployment) -> Wanted | None:
    try:
        found = service.wanted(deployment.name, deployment.alias)
    except (UsageError, ConfigurationError):
        raise
    except Exception as error:  # whatever is said in the registry's place must not end the service
        deployment.say(f"the registry cannot be asked, so what is served stays: {_told(error)}")
        return None
    if found is None:
        deployment.say(f"{deployment.name}@{deployment.alias}: {NOBODY if deployment.state.serving else NOTHING_YET}")
    return found


def _stay_in_service(deployment: Deployment, server: Address) -> None:
    """A server that was started again has forgotten what it served."""
    if deployment.state.serving is None or _answers(deployment, server, deployment.state.serving.version):
        return
    if resumed(deployment, server):
        deployment.say(f"version {deployment.state.serving.version} is in service again")


def _answers(deployment: Deployment, server: Address, version: str) -> bool:
    name = deployment.state.served_as
    models = {name, *(model for model, laid_out in layout.laid_out(deployment.folder, name) if laid_out == version)}
    return all(repository_api.is_served(server, model, version) for model in models)


def _tidy(deployment: Deployment, server: Address) -> None:
    if deployment.state.serving:
        switching.tidy(server, deployment.folder, deployment.state.served_as, deployment.state.serving.version)


def _resume(deployment: Deployment, server: Address) -> bool:
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
    if serving and deployment.state.is_refused(found.version, found.repository_sha256, found.said_sha256):
        return
    try:
        reasons = service.objections(found.name, found.version, deployment.alias, serving.model_sha256 if serving else service.UNKNOWN)
        if reasons:
            raise RegistryError(" and ".join(reasons), hint="")
        _bring_in(deployment, server, found)
    except PassingError:
        raise
    except EngineMissingError:
        if not _ended_again(deployment, server, found.version):
            raise  # the server or the registry went away: that is not the version's fault
        _refuse(deployment, found, "the server ended while it was tried, and did so again")
    except (OSError, DiskFullError, NotWritableError) as error:
        deployment.waits = (found.version, time.monotonic() + AGAIN_SECONDS)
        raise PassingError(
            f"version {found.version} cannot be taken in now, and is tried again: {_told(error)}", hint="Look at the serving folder's disk."
        ) from None
    except Exception as error:  # a package may hold whatever it likes, and must not end the service
        switching.check_answers(server)
        _refuse(deployment, found, _told(error))


def _ended_again(deployment: Deployment, server: Address, version: str) -> bool:
    """Whether the server is gone, and was before when this version was tried: a version that ends its server would end the service."""
    try:
        switching.check_answers(server)
    except EngineMissingError:
        deployment.deaths[version] += 1
    return deployment.deaths[version] > 1


def _bring_in(deployment: Deployment, server: Address, found: Wanted) -> None:
    kept = deployment.state
    old = _release(deployment, kept.serving)
    with service.package(found.name, found.version) as package:
        deployment.reporter.step(f"fetching version {found.version}")
        new = Release(found.version, layout.take_in(deployment.folder, package))
    name = kept.served_as or new.own_name
    switching.switch(
        server, deployment.folder, name, new, old,
        lineage=lambda release: _lineage(deployment, release), confirm=lambda: _confirm(deployment, found),
        timeout=deployment.timeout, reporter=deployment.reporter,
    )  # fmt: skip
    before = kept.serving
    now = Served(version=found.version, repository_sha256=found.repository_sha256, model_sha256=found.model_sha256, since=_now())
    deployment.state = kept.model_copy(update={"served_as": name, "serving": now, "before": before, "refused": None})
    deployment.keep()
    deployment.on_served(now)
    instead = f", in the place of {before.version}" if before else ""
    deployment.say(f"{found.name} version {found.version} is in service as {name}{instead}")
    _remove_unneeded(deployment, name)
    _mark(deployment, found.version, service.IN_SERVICE)
    if before and before.version != found.version:
        _mark(deployment, before.version, service.RETIRED)


def _confirm(deployment: Deployment, found: Wanted) -> None:
    """Raise PassingError where the alias was moved away during the trial. A registry that is away now was asked before."""
    with suppress(RegistryError, EngineMissingError):
        now = service.wanted(found.name, deployment.alias)
        if now is None or now.version != found.version:
            raise MovedAwayError(f"{found.name}@{deployment.alias} does not name version {found.version} any more", hint="Deploy again.")


def _remove_unneeded(deployment: Deployment, name: str) -> None:
    """Of the packages those stay that are served, that are the way back, and that give their last answers."""
    used = {each.repository_sha256 for each in (deployment.state.serving, deployment.state.before) if each}
    layout.keep_only(deployment.folder, used | set(layout.laid_out(deployment.folder, name).values()))


def _told(error: Exception) -> str:
    return error.message if isinstance(error, TunelineError) else str(error) if isinstance(error, OSError) else repr(error)


def _refuse(deployment: Deployment, found: Wanted, reason: str) -> None:
    serving = deployment.state.serving
    deployment.waits = ("", 0.0) if serving else (found.version, time.monotonic() + REFUSED_SECONDS)
    deployment.deaths[found.version] = 0
    refused = Refused(
        version=found.version, repository_sha256=found.repository_sha256, said_sha256=found.said_sha256, reason=reason, at=_now()
    )
    deployment.state = deployment.state.model_copy(update={"refused": refused})
    deployment.keep()
    _remove_unneeded(deployment, deployment.state.served_as)
    stays = f"version {serving.version} stays in service" if serving else "nothing is served"
    _mark(deployment, found.version, service.REFUSED, reason)
    deployment.say(f"{found.name} version {found.version} is not served, {stays}: {reason}")


def _back_to_normal(deployment: Deployment) -> None:
    """The alias names what is served: a version that was refused may be tried again when it is named again."""
    if deployment.state.refused is not None or not deployment.kept:
        deployment.state = deployment.state.model_copy(update={"refused": None})
        deployment.keep()
    if deployment.kept:
        deployment.told = ""
    deployment.waits = ("", 0.0)
    deployment.deaths.clear()


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
                _one_life(deployment, how, again=bool(ended))
            except ServerEndedError as error:
                how, ended = replace(how, ports=error.ports), [*ended[-RESTARTS:], time.monotonic()]
                if len(ended) > RESTARTS and ended[-1] - ended[0] < RESTARTS * CALM_SECONDS:
                    raise EngineMissingError(error.message, hint=error.hint) from None
                deployment.say(f"the server ended; it is started again with what was in service. {error.message}")
                time.sleep(sum(one > ended[-1] - CALM_SECONDS for one in ended) - 1)


class PassingError(TunelineError):
    """A version was not taken into service for a reason that is not its own and passes."""


class MovedAwayError(PassingError):
    """The alias was moved during the trial of the version that it named."""


class ServerEndedError(EngineMissingError):
    """A server that was ready ended by itself. `ports` are those it listened on."""

    ports: dict[str, int]


def _one_life(deployment: Deployment, how: OwnServer, *, again: bool) -> None:
    """From the start of a server to its end. One that was ready once is started again, also where its start goes wrong then."""
    try:
        _live(deployment, how, again=again)
    except ServerEndedError:
        raise
    except EngineMissingError as error:
        if not again:
            raise
        raise _ended(error, how.ports) from None


def _ended(error: EngineMissingError, ports: dict[str, int]) -> ServerEndedError:
    ended = ServerEndedError(error.message, hint=error.hint)
    ended.ports = ports
    return ended


def _live(deployment: Deployment, how: OwnServer, *, again: bool) -> None:
    options: dict[str, Any] = {**how.ports, "ready_timeout": deployment.timeout, "reporter": deployment.reporter}
    with running_server(deployment.folder / layout.REPOSITORY, models=[], log=how.log, host=how.host, **options) as server:
        try:
            _serve(deployment, server, how, again=again)
        except EngineMissingError as error:
            if not _has_ended(server):
                raise
            ports = {"http_port": server.http_port, "grpc_port": server.grpc_port, "metrics_port": server.metrics_port}
            raise _ended(error, ports) from None


def _has_ended(server: Server) -> bool:
    """A server that dies breaks its connections off a moment before it has ended."""
    try:
        server.process.wait(timeout=DYING_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


def _serve(deployment: Deployment, server: Server, how: OwnServer, *, again: bool) -> None:
    address = Address(server.http_url, server.grpc_url)
    known = resumed(deployment, address)
    if known and not how.watch and not again:
        look(deployment, address)
    if known:
        how.on_ready(server)
    deployment.on_served = lambda _: how.on_ready(server)
    if how.watch:
        follow(deployment, address, every=how.every, alive=server.check_alive)
    elif not known:
        once(deployment, address)
    while True:
        server.check_alive()
        time.sleep(0.5)


def resumed(deployment: Deployment, address: Address) -> bool:
    """Have the server answer with what was in service, or with the version before where that does not load any more. Returns whether it
    does."""
    if deployment.state.serving is None:
        return False
    try:
        if _resume(deployment, address):
            return True
        deployment.say(f"the copy of version {deployment.state.serving.version} is damaged; it is fetched again")
    except EngineMissingError:
        raise
    except (TunelineError, OSError) as error:
        deployment.say(f"version {deployment.state.serving.version} does not load any more: {_told(error)}")
    deployment.state = deployment.state.model_copy(update={"serving": deployment.state.before, "before": None})
    return deployment.state.serving is not None and resumed(deployment, address)
