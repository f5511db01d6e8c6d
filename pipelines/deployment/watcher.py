"""Deployment of a registry alias: a Triton server serves the version that the alias points to, and follows its moves.

The registry is polled, since its webhooks do not reach private addresses. A version is not served if it fails promote's
checks, does not load, or does not answer its golden prompts. The current version then remains deployed, and the
rejected version is tagged with the reason.
"""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from components.common.artifacts.artifact_folder import Artifact
from components.common.runtime.counts import format_count
from components.common.runtime.errors import (
    ConfigurationError,
    DiskFullError,
    EngineMissingError,
    NotWritableError,
    RegistryError,
    TunelineError,
    UsageError,
)
from components.common.runtime.process_control import until_signal
from components.common.runtime.reporters import Reporter
from components.common.workspace import job_folders
from components.model_registry import evidence, promotion, servable_versions
from components.model_registry.release_policy import Policy
from components.model_registry.servable_versions import AliasTarget
from components.triton_packaging.deployment import deployment_state, repository_api, version_switch
from components.triton_packaging.deployment import serving_folder as layout
from components.triton_packaging.deployment.deployment_state import DeploymentState, RefusedVersion, ServedVersion
from components.triton_packaging.deployment.serving_folder import Release
from components.triton_packaging.triton_server import ModelLoadError, Server, ServerAddress, keep_log, running_server
from pipelines.deployment.canary_process import CanaryProcess
from pipelines.gateway.process import GatewayProcess
from pipelines.gateway.triton_models import CANARY, SHADOW

SERVER_EXIT_SECONDS = 5.0  # from a broken connection to the exit of the server
MAX_RESTARTS, RESTART_WINDOW_SECONDS = 5, 60.0  # maximum restarts, counted within this window
LOG_FILENAME = "deploy.log"  # in the serving folder: versions served, refused or lost, with times
RETRY_SECONDS = 30.0  # between two attempts to install a version that the machine had no space for
REFUSED_RETRY_SECONDS = 300.0  # between two attempts of a refused version while nothing is served


@dataclass
class Deployment:
    """The alias to follow, with its serving folder. `state` is the content of state.json; `timeout` is in seconds.

    A canary is served under a separate name, beside the deployment of another alias. A version that its evaluation
    rejected is served as well, and receives copies of requests only.
    """

    name: str
    alias: str
    folder: Path
    state: DeploymentState
    reporter: Reporter
    timeout: float = 300.0
    is_canary: bool = False
    checked_tags: str = ""  # digest of the served version's tags at the last check of a shadow version
    last_message: str = ""  # not repeated at every poll
    retry_after: tuple[str, float] = ("", 0.0)  # a version, and the monotonic time of its next attempt
    server_crashes: Counter[str] = field(default_factory=Counter)  # exits of the server while it tried a version
    is_persisted: bool = True  # whether state.json agrees with `state`
    on_served: Callable[[ServedVersion], None] = field(default=lambda _: None)

    def log(self, message: str) -> None:
        """Report a message once, and append it to deploy.log."""
        if message != self.last_message:
            self.reporter.note(message)
            # A full disk must not end the deployment.
            with suppress(OSError), (self.folder / LOG_FILENAME).open("a", encoding="utf-8") as file:
                file.write(f"{_now()} {message}\n")
        self.last_message = message

    def update(self, **changes: object) -> None:
        """Change the state and write state.json.

        If that fails, the service continues; a restart begins with the last written state.
        """
        self.state = self.state.model_copy(update=changes)
        try:
            deployment_state.write_state(self.folder, self.state)
            self.is_persisted = True
        except OSError as error:
            self.is_persisted = False
            self.log(f"{self.folder / deployment_state.STATE_FILENAME} cannot be written: {error}")

    def release(self, version: str, package: Artifact, *, is_shadow: bool = False) -> Release:
        """Return a release with the metadata that a server reports about its version."""
        metadata = {
            "registered_model": self.name,
            "registered_version": version,
            "registered_alias": self.alias,
            "repository_sha256": package.sha256,
        }
        if self.is_canary:
            metadata["traffic"] = SHADOW if is_shadow else CANARY
        return Release(version, package, metadata)


@contextmanager
def open_deployment(
    name: str,
    folder: Path,
    reporter: Reporter,
    *,
    alias: str,
    served_as: str = "",
    timeout: float = 300.0,
    is_canary: bool = False,
) -> Iterator[Deployment]:
    """Open the deployment of a serving folder, and lock the folder.

    Args:
        served_as: name of the model on the server; empty: the recorded name, or else the name in the package.
        timeout: seconds for a version to load.
        is_canary: serve beside the deployment of another alias; default name: the name in the package and the alias.

    Raises:
        BusyError: another process has locked the folder.
        TunelineError: the folder serves another model or alias.
        UsageError: `served_as` is not a valid model name.
    """
    (folder / layout.REPOSITORY_FOLDER).mkdir(parents=True, exist_ok=True)
    with job_folders.folder_lock(folder):
        state = deployment_state.read_state(folder) or DeploymentState(
            registered_model=name, alias=alias, served_as=served_as
        )
        hint = "Choose another folder with --folder."
        if (state.registered_model, state.alias) != (name, alias):
            raise TunelineError(
                f"{folder} serves {state.registered_model}@{state.alias}, not {name}@{alias}", hint=hint
            )
        if served_as and state.serving and layout.check_model_name(served_as) != state.served_as:
            raise TunelineError(
                f"{folder} serves the model to its clients as {state.served_as}, not as {served_as}",
                hint=hint,
            )
        state.served_as = layout.check_model_name(served_as) if served_as else state.served_as
        state.refused = None  # try again after a restart
        yield Deployment(name, alias, folder, state, reporter, timeout, is_canary)


def deploy_once(deployment: Deployment, server: ServerAddress) -> None:
    """Serve the alias's version on a running server.

    Raises:
        RegistryError: the alias has no version, or its version may not be served.
        TunelineError: the version cannot be installed.
    """
    target = servable_versions.resolve_alias(deployment.name, deployment.alias)
    if target is None:
        raise RegistryError(
            f"{deployment.name} has no version with the alias {deployment.alias}",
            hint=f"Promote a version: tuneline promote {deployment.name} --version N",
        )
    _restore_service(deployment, server)
    _reconcile(deployment, server, target)
    _remove_stale_versions(deployment, server)
    if deployment.state.refused:
        raise RegistryError(
            f"{target.name} version {target.version} is not served: {deployment.state.refused.reason}",
            hint="Promote another version, or roll back the alias.",
        )


def promote(
    name: str, version: str, *, alias: str, by: str, reason: str, force: bool, configuration: str, reporter: Reporter
) -> dict[str, Any]:
    """Move an alias as `tuneline promote` does.

    Args:
        name: the registered model.
        version: the number of the version to promote.
        alias: the alias to move.
        by: the user who promotes; "": the user of this process.
        reason: the reason for the history.
        force: promote despite failed checks.
        configuration: JSON with the approvers, used if the registry has no policy.
        reporter: receives steps and notes.

    Returns:
        {"name", "alias", "from", "to"}; "from" and "to" are version numbers, "from" is None without a previous version.

    Raises:
        RegistryError: the version does not exist, or a check failed and `force` is false.
    """
    policy = Policy.model_validate_json(configuration or "{}")
    return promotion.promote(
        name,
        version,
        alias=alias,
        by=by,
        reason=reason,
        force=force,
        policy=policy if policy.approvers else None,
        reporter=reporter,
    ).model_dump(by_alias=True)


def deploy_promoted(
    moved: dict[str, Any], grpc_url: str, *, served_as: str, folder: Path, reporter: Reporter
) -> dict[str, Any]:
    """Serve the promoted version on a running server.

    If serving fails, move the alias back, so that it points to the served version, and raise the error.

    Args:
        moved: the result of `promote`.
        grpc_url: gRPC address of the server, HOST:PORT.
        served_as: name of the model on the server; empty: the recorded name, or else the name in the package.
        folder: the workdir.
        reporter: receives steps and notes.

    Returns:
        {"name", "alias", "version", "repository_sha256", "model_sha256", "since"}.

    Raises:
        TunelineError: the version cannot be served.
    """
    name, alias = moved["name"], moved["alias"]
    try:
        with open_deployment(
            name, get_serving_folder(folder, name), reporter, alias=alias, served_as=served_as
        ) as deployment:
            deploy_once(deployment, ServerAddress(grpc_url))
    except TunelineError as error:
        # Move the alias back only if it still points to the promoted version. Log errors; raise the original error.
        previous, promoted = moved["from"], moved["to"]
        try:
            holder = servable_versions.resolve_alias(name, alias)
            if previous not in (None, promoted) and holder is not None and holder.version == promoted:
                promotion.rollback(name, alias=alias, reason=f"not served: {error.message}"[:500], reporter=reporter)
                reporter.note(f"{name}@{alias} was moved back to version {previous}")
        except TunelineError as second_error:
            reporter.note(f"{name}@{alias} could not be moved back: {second_error.message}")
        raise
    served = deployment.state.serving
    assert served is not None, "deploy_once() raises if nothing is served"
    return {"name": name, "alias": alias, **served.model_dump()}


def get_serving_folder(workdir: Path, name: str) -> Path:
    """Return the default serving folder of a registered model: one folder per name."""
    folder = quote(name, safe=" ")
    return workdir / "serving" / (folder if folder.strip(".") else folder.replace(".", "%2E"))


def get_model_repository(folder: Path) -> Path:
    """Return Triton's model repository in a serving folder."""
    return folder / layout.REPOSITORY_FOLDER


def poll(deployment: Deployment, server: ServerAddress) -> None:
    """Poll the registry once and serve the alias's version. Change nothing if the registry or server is unreachable.

    Raises:
        UsageError, ConfigurationError: the address or the settings of the registry are invalid.
    """
    try:
        _restore_service(deployment, server)
        _remove_stale_versions(deployment, server)
        try:
            target = servable_versions.resolve_alias(deployment.name, deployment.alias)
        except (UsageError, ConfigurationError):
            raise
        except Exception as error:  # no response from the registry's address may end the service
            deployment.log(f"the registry is unreachable; keeping the deployed version: {_describe(error)}")
            return
        if target is None:
            consequence = "; keeping the deployed version" if deployment.state.serving else " yet"
            deployment.log(f"{deployment.name}@{deployment.alias}: no version has the alias{consequence}")
            return
        version, retry_at = deployment.retry_after
        if version != target.version or time.monotonic() >= retry_at:
            _reconcile(deployment, server, target)
    except (TransientError, EngineMissingError, OSError) as error:
        deployment.log(_describe(error))


def _restore_service(deployment: Deployment, server: ServerAddress) -> None:
    """Load the served version into a server that was restarted. Raises EngineMissingError if it is unreachable."""
    version_switch.check_reachable(server)
    serving, name = deployment.state.serving, deployment.state.served_as
    if serving is None:
        return
    installed = layout.list_installed_versions(deployment.folder, name)
    models = {name, *(model for model, version in installed if version == serving.version)}
    if all(repository_api.is_ready(server, model, serving.version) for model in models):
        return
    if resume(deployment, server):
        restored = deployment.state.serving or serving
        deployment.log(f"version {restored.version} is deployed again")


def _remove_stale_versions(deployment: Deployment, server: ServerAddress) -> None:
    if serving := deployment.state.serving:
        version_switch.remove_retired_versions(server, deployment.folder, deployment.state.served_as, serving.version)


def _reconcile(deployment: Deployment, server: ServerAddress, target: AliasTarget) -> None:
    """Serve the version of the alias, unless it is already served or was rejected."""
    serving = deployment.state.serving
    if serving and (serving.version, serving.repository_sha256) == (target.version, target.repository_sha256):
        # The alias points to the served version again, so a later move to the refused version retries it.
        if deployment.state.refused is not None or not deployment.is_persisted:
            deployment.update(refused=None)
        if deployment.is_persisted:
            deployment.last_message = ""
        deployment.retry_after = ("", 0.0)
        deployment.server_crashes.clear()
        if serving.is_shadow and deployment.checked_tags != target.tags_sha256:
            _recheck_shadow(deployment, server, target)
        return
    if deployment.state.is_refused(target.version, target.repository_sha256, target.tags_sha256):
        return
    try:
        model_sha256 = serving.model_sha256 if serving else servable_versions.UNKNOWN_MODEL
        objections = servable_versions.list_serving_objections(
            target.name, target.version, deployment.alias, model_sha256
        )
        is_rejected = any(each.startswith(evidence.VERDICT_OBJECTION) for each in objections)
        if deployment.is_canary:  # a version without an accepting verdict may receive copies of requests
            objections = [each for each in objections if not each.startswith(evidence.VERDICT_OBJECTION)]
        if objections:
            raise RegistryError(" and ".join(objections), hint="")
        _switch_version(deployment, server, target, is_shadow=is_rejected)
    except TransientError:
        raise
    except EngineMissingError:
        try:
            version_switch.check_reachable(server)
        except EngineMissingError:
            deployment.server_crashes[target.version] += 1
        if deployment.server_crashes[target.version] < 2:  # a third attempt could end the service
            raise  # server or registry became unreachable: not caused by the version
        _refuse(deployment, target, "the server exited twice while it loaded or tested the version")
    except (OSError, DiskFullError, NotWritableError) as error:
        deployment.retry_after = (target.version, time.monotonic() + RETRY_SECONDS)
        raise TransientError(
            f"version {target.version} cannot be installed now; --watch retries the installation: {_describe(error)}",
            hint="Check the serving folder's disk.",
        ) from None
    except Exception as error:  # no content of a package may end the service
        version_switch.check_reachable(server)
        _refuse(deployment, target, _describe(error))


def _recheck_shadow(deployment: Deployment, server: ServerAddress, target: AliasTarget) -> None:
    """Let a shadow version answer if its evaluation accepts it now, or a forced promotion overruled the verdict."""
    with suppress(RegistryError):
        objections = servable_versions.list_serving_objections(target.name, target.version, deployment.alias)
        deployment.checked_tags = target.tags_sha256
        serving, name = deployment.state.serving, deployment.state.served_as
        if objections or serving is None:
            return
        deployment.update(serving=serving.model_copy(update={"is_shadow": False}))
        for model in (f"{name}{layout.STREAM_SUFFIX}", name):  # a loaded model keeps its parameters
            with suppress(ModelLoadError):  # the package has no streaming model
                repository_api.unload_model(server, model)
        if resume(deployment, server):
            deployment.log(f"{target.name} version {target.version} now also answers client requests as {name}")


def _switch_version(
    deployment: Deployment, server: ServerAddress, target: AliasTarget, *, is_shadow: bool = False
) -> None:
    previous = deployment.state.serving
    old = _find_release(deployment, previous)
    with servable_versions.open_package(target.name, target.version) as package:
        deployment.reporter.step(f"fetching version {target.version}")
        copy = layout.copy_package(deployment.folder, package)
        new = deployment.release(target.version, copy, is_shadow=is_shadow)
    packaged_name = f"{new.packaged_name}-{deployment.alias}" if deployment.is_canary else new.packaged_name
    name = deployment.state.served_as or layout.check_model_name(packaged_name)
    if previous and version_switch.must_unload_first(new):
        _check_alias(deployment, target)
        deployment.reporter.step(f"unloading version {previous.version} to load version {new.version}")
        version_switch.exchange_version(server, deployment.folder, name, new, old, deployment.timeout)
    else:
        deployment.reporter.step(f"testing version {new.version}")
        count = version_switch.try_release(server, deployment.folder, name, new, deployment.timeout)
        deployment.reporter.note(
            f"version {new.version} was loaded next to the deployed version and answered {format_count(count, 'golden prompt')} correctly"
        )
        _check_alias(deployment, target)
        deployment.reporter.step(f"switching to version {new.version}")
        version_switch.switch_version(server, deployment.folder, name, new, old, deployment.timeout)
    served = ServedVersion(
        version=target.version,
        repository_sha256=target.repository_sha256,
        model_sha256=target.model_sha256,
        since=_now(),
        is_shadow=is_shadow,
    )
    deployment.update(served_as=name, serving=served, before=previous, refused=None)
    deployment.on_served(served)
    replaced = f", in place of version {previous.version}" if previous else ""
    limited = " for shadow traffic only (its evaluation did not accept it)" if is_shadow else ""
    deployment.log(f"{target.name} version {target.version} is served as {name}{limited}{replaced}")
    _prune_packages(deployment, name)
    if deployment.is_canary:  # the tags describe the versions of the stable alias
        return
    _tag_version(deployment, target.version, servable_versions.IN_SERVICE)
    if previous and previous.version != target.version:
        _tag_version(deployment, previous.version, servable_versions.RETIRED)


def _check_alias(deployment: Deployment, target: AliasTarget) -> None:
    """Raise TransientError if the alias was moved in the meantime."""
    with suppress(RegistryError, EngineMissingError):  # an unreachable registry confirms its previous answer
        now = servable_versions.resolve_alias(target.name, deployment.alias)
        if now is None or now.version != target.version:
            raise TransientError(
                f"{target.name}@{deployment.alias} no longer points to version {target.version}", hint="Deploy again."
            )


def _prune_packages(deployment: Deployment, name: str) -> None:
    """Delete packages that are not served, installed or the rollback target."""
    used = {one.repository_sha256 for one in (deployment.state.serving, deployment.state.before) if one}
    installed = layout.list_installed_versions(deployment.folder, name).values()
    layout.remove_other_packages(deployment.folder, used | set(installed))


def _describe(error: Exception) -> str:
    if isinstance(error, TunelineError):
        return error.message
    return str(error) if isinstance(error, OSError) else repr(error)


def _refuse(deployment: Deployment, target: AliasTarget, reason: str) -> None:
    serving = deployment.state.serving
    deployment.retry_after = ("", 0.0) if serving else (target.version, time.monotonic() + REFUSED_RETRY_SECONDS)
    deployment.server_crashes[target.version] = 0
    deployment.update(
        refused=RefusedVersion(
            version=target.version,
            repository_sha256=target.repository_sha256,
            said_sha256=target.tags_sha256,
            reason=reason,
            at=_now(),
        )
    )
    _prune_packages(deployment, deployment.state.served_as)
    current = f"version {serving.version} remains deployed" if serving else "no version is served"
    _tag_version(deployment, target.version, servable_versions.REFUSED, reason)
    deployment.log(f"{target.name} version {target.version} is not served, {current}: {reason}")


def _tag_version(deployment: Deployment, version: str, state: str, reason: str = "") -> None:
    """Tag a version in the registry for people; a failure is only logged."""
    try:
        servable_versions.record_serving_state(deployment.name, version, state, reason)
    except (RegistryError, EngineMissingError) as error:
        deployment.log(f"version {version} could not be tagged as {state}: {error.message}")


def _find_release(deployment: Deployment, served: ServedVersion | None) -> Release | None:
    """Return the verified local copy of a served version, or None."""
    package = layout.find_package(deployment.folder, served.repository_sha256) if served else None
    return deployment.release(served.version, package, is_shadow=served.is_shadow) if served and package else None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class ServerOptions:
    """Options of a server.

    Attributes:
        log: file for the server's output.
        sockets: folder of the server's sockets; a restarted server has the same addresses.
        poll_interval: seconds between two polls of the registry.
        follow: serve each version that the alias moves to.
        on_ready: called once a version is served.
        gateway: the gateway in front of the server; it is stopped first, so that its answers can finish.
        canary: the deployment of a second alias on the same server, or None.
    """

    log: Path
    sockets: Path
    poll_interval: float
    follow: bool
    on_ready: Callable[[Server], None]
    gateway: GatewayProcess
    canary: CanaryProcess | None = None


def serve_and_follow(deployment: Deployment, options: ServerOptions) -> None:
    """Run a server until SIGINT or SIGTERM.

    With `follow`, it follows the alias; otherwise it keeps the first version.

    A server that exits is restarted with the same address and the deployed version. `on_ready` is called once a
    version is served.

    Raises:
        EngineMissingError: the server exits repeatedly.
        RegistryError: the alias has no version that can be served, and `follow` is false.
    """
    exits: list[float] = []
    keep_log(options.log)
    with until_signal():
        while True:
            try:
                error = _run_server(deployment, options, is_restart=bool(exits))
            except EngineMissingError as failure:
                if not exits:  # only a restart is repeated if the server does not start
                    raise
                error = failure
            exits = [*exits[-MAX_RESTARTS:], time.monotonic()]
            if len(exits) > MAX_RESTARTS and exits[-1] - exits[0] < MAX_RESTARTS * RESTART_WINDOW_SECONDS:
                raise EngineMissingError(error.message, hint=error.hint)
            kept = keep_log(options.log)
            deployment.log(
                f"the server exited and is being restarted with the deployed version; its log is kept in {kept}. {error.message}"
            )
            # Back off by one second for each earlier exit within the window.
            time.sleep(sum(one > exits[-1] - RESTART_WINDOW_SECONDS for one in exits) - 1)


class TransientError(TunelineError):
    """A version was not served for a temporary reason that is not caused by the version."""


def _run_server(deployment: Deployment, options: ServerOptions, *, is_restart: bool) -> EngineMissingError:
    """Run a server until it exits, and return the error of a server that was ready."""
    with running_server(
        get_model_repository(deployment.folder),
        models=[],
        log=options.log,
        sockets=options.sockets,
        other_repositories=[options.canary.repository] if options.canary else [],
        ready_timeout=deployment.timeout,
        reporter=deployment.reporter,
    ) as server:
        try:
            is_resumed = resume(deployment, server)
            if is_resumed:
                if not options.follow and not is_restart:
                    poll(deployment, server)
                options.on_ready(server)
            deployment.on_served = lambda _: options.on_ready(server)
            if not is_resumed and not options.follow:
                deploy_once(deployment, server)
            next_poll = time.monotonic()
            while True:
                server.check_alive()
                options.gateway.check_alive()
                if options.canary:
                    options.canary.check_alive()
                if options.follow and time.monotonic() >= next_poll:
                    poll(deployment, server)
                    next_poll = time.monotonic() + options.poll_interval
                time.sleep(min(0.5, options.poll_interval))
        except KeyboardInterrupt:
            options.gateway.stop()
            if options.canary:
                options.canary.stop()
            raise
        except EngineMissingError as error:
            # A server that exits breaks its connections shortly before.
            try:
                server.process.wait(timeout=SERVER_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                raise error from None
            return error


def resume(deployment: Deployment, server: ServerAddress) -> bool:
    """Load the version that was deployed, or else the previous version; return whether a version is served.

    Raises:
        EngineMissingError: the server is unreachable.
    """
    while serving := deployment.state.serving:
        try:
            if release := _find_release(deployment, serving):
                version_switch.deploy_version(
                    server, deployment.folder, deployment.state.served_as, release, deployment.timeout
                )
                return True
            deployment.log(f"the copy of version {serving.version} is damaged; fetching it again")
        except EngineMissingError:
            raise
        except (TunelineError, OSError) as error:
            deployment.log(f"version {serving.version} cannot be loaded: {_describe(error)}")
        deployment.state = deployment.state.model_copy(update={"serving": deployment.state.before, "before": None})
    return False
