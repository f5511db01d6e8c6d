"""The model registry: a model version in MLflow for every evaluated model, with the digests of all it came from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from components.common import tracking
from components.common.artifacts import Artifact, Manifest
from components.common.errors import RegistryError, UsageError
from components.common.people import user
from components.common.progress import Reporter
from components.model_registry import approval, files, history, lineage, moving, patience, versions
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.history import Entry
from components.model_registry.promotion import CHAMPION, Promotion, promote, rollback
from components.model_registry.versions import PREFIX

__all__ = ["Champion", "Promotion", "Registration", "champion", "promote", "promote_at_once", "register", "registered", "rollback"]
LOGGED = "models:/"  # before the name of a logged model, as the source of a version
CANDIDATE, CHALLENGER = "candidate", "challenger"


class Registration(BaseModel):
    """A registered model version."""

    name: str
    version: str
    aliases: list[str]
    tags: dict[str, str]


class Champion(BaseModel):
    """A registered model version as its tags describe it: the one in service, or another."""

    name: str
    version: str
    model_sha256: str
    incumbent_sha256: str | None
    finetune_key: str
    store_uri: str
    tags: dict[str, str]

    def fetch(self, folder: Path) -> Artifact:
        """Lay its files out in `folder`, every digest checked. Raises RegistryError when they cannot be had any more."""
        with versions.talking():
            return files.fetch(self.name, self.version, self.model_sha256, self.store_uri, folder)

    def manifest(self) -> Manifest:
        """The manifest of the model whose files MLflow keeps for this version. Raises RegistryError when it keeps none."""
        with versions.talking():
            return files.kept(self.name, self.version)

    def files_sha256(self) -> str:
        """Digest of the model whose files MLflow keeps for this version. Raises RegistryError when it keeps none."""
        return self.manifest().content_sha256


def register(
    model: Artifact,
    evaluation: Artifact,
    repository: Artifact | None,
    config: ModelRegistryConfig,
    *,
    reporter: Reporter,
    dataset_version: Mapping[str, Any] | None = None,
    finetune_key: str = "",
) -> Registration:
    """Register an evaluated model under `config.name`, or find the version that this very model has and refresh its tags.

    The version gets the alias `candidate`, and `challenger` when its evaluation was accepted; no alias moves to or from the version in
    service. An evaluation that found the model to be that very one (`unchanged`) says nothing new: the version keeps its tags.
    A killed registration is completed by the next one of the same model: its version is found by the model's digest and gets what it lacks.
    `dataset_version` is the dataset's revision as data_versioning returned it; `finetune_key` names the recipe. Raises UsageError when
    evaluation or package were made from another model.
    """
    if history.is_history(config.name):
        raise UsageError(f"{config.name} is the name of a history", hint=f"Choose a name that does not end in {versions.HISTORY}.")
    lineage.check(model, evaluation, repository)
    tags = lineage.tags(model, evaluation, repository, dataset_version, finetune_key)
    verdict = lineage.verdict(evaluation)
    with versions.talking() as client:
        known = _registered(client, config.name, model.sha256)
        if known:
            reporter.note(f"{config.name} version {known.version} is this very model")
            _refresh(client, known, tags, evaluation)
        else:
            reporter.step(f"registering {config.name}")
            known = _create(client, config, model, evaluation, tags)
        if CHAMPION not in known.aliases:
            _alias(client, known, verdict)
        return _told(client, known)


def _registered(client: Any, name: str, model_sha256: str) -> Any | None:
    """The version with these files; where a lost answer or two jobs at once made several, the first that is there stays."""
    found = versions.search(client, name, (f"{PREFIX}model_sha256", model_sha256))
    for repeated in found[1:]:
        versions.remove_unused(client, repeated)
    return client.get_model_version(name, found[0].version) if found else None


def _refresh(client: Any, known: Any, tags: Mapping[str, str], evaluation: Artifact) -> None:
    """What is in service keeps the lineage it was promoted with, also when other data or another recipe leads to the same weights.

    The new evaluation comes before the tags that name it: who promotes on another machine reads it from MLflow.
    """
    if lineage.verdict(evaluation) == "unchanged":
        return
    if str(known.source).startswith(LOGGED):
        files.keep_evaluation(client, str(known.source).removeprefix(LOGGED), evaluation)
    if known.description != lineage.described(tags):
        client.update_model_version(known.name, known.version, description=lineage.described(tags))
    versions.untag(client, known, lineage.superseded(known.tags, tags))
    versions.tag(client, known, tags)


def _create(client: Any, config: ModelRegistryConfig, model: Artifact, evaluation: Artifact, tags: Mapping[str, str]) -> Any:
    """Files first, the version with all its tags last: a killed registration leaves no version, and the next one uses its files."""
    logged = files.log(client, config.name, model, evaluation, config.copy_limit_mb)
    versions.make_model(client, config.name)
    patience.again(
        lambda: client.create_model_version(
            config.name,
            f"{LOGGED}{logged.model_id}",
            run_id=logged.source_run_id or None,  # an empty one is refused by MLflow's authentication, whoever asks
            tags={f"{PREFIX}proof": lineage.UNPACKAGED, **tags},
            description=lineage.described(tags),
            model_id=logged.model_id,
        ),
        lambda: _registered(client, config.name, model.sha256),
    )
    made = _registered(client, config.name, model.sha256)
    if made is None:
        raise RegistryError(f"MLflow did not keep the version of {config.name}", hint="Check the server's log, then register again.")
    return made


def _alias(client: Any, version: Any, verdict: str) -> None:
    _give(client, version, CANDIDATE)
    if verdict == "accepted":
        _give(client, version, CHALLENGER)
    elif verdict == "refused" and CHALLENGER in version.aliases:
        why = "its new evaluation is refused"
        moving.move(client, version.name, Entry(kind="register", alias=CHALLENGER, to=None, by=user(), reason=why))


def _give(client: Any, version: Any, alias: str) -> None:
    """The last one registered has the alias, whoever of several that register at once comes last."""
    if alias in version.aliases:
        return
    digest = version.tags.get(f"{PREFIX}model_sha256", "")
    moving.move(client, version.name, Entry(kind="register", alias=alias, to=str(version.version), by=user(), digest=digest))


def _told(client: Any, version: Any) -> Registration:
    now = client.get_model_version(version.name, version.version)
    tags = {key: value for key, value in sorted(now.tags.items()) if key.startswith(PREFIX)}
    return Registration(name=now.name, version=str(now.version), aliases=sorted(now.aliases), tags=tags)


def promote_at_once(config: ModelRegistryConfig, version: str, *, compared_with: str | None, reporter: Reporter) -> Promotion | None:
    """Promote as the pipeline; None, with a note, where the policy asks for people, or where people took the version out of service."""
    with versions.talking() as client:
        back = [move for move in history.moves(history.read(client, config.name), CHAMPION) if version in (move.from_, move.to)][-1:]
    if back and back[0].kind == "rollback" and back[0].from_ == version:
        reporter.note(
            f"{config.name} version {version} is not promoted: {back[0].by} rolled the champion back from it ({back[0].reason}). "
            f"tuneline promote {config.name} --version {version} does it all the same."
        )
        return None
    try:
        return promote(config.name, version, by="pipeline", compared_with=compared_with, policy=approval.of(config), reporter=reporter)
    except approval.ApprovalNeededError as needed:
        reporter.note(f"{config.name} version {version} is not promoted: {needed.message}. {needed.hint}")
        return None


def champion(name: str, alias: str = CHAMPION) -> Champion | None:
    """The version in service; None when there is no registry, no such model, or no version with the alias yet.

    Raises RegistryError for a version that tuneline did not register: nothing is known of it.
    """
    if not tracking.enabled() or versions.store_is_missing():
        return None
    with versions.talking() as client:
        found = versions.holder(client, name, alias)
    if found is None:
        return None
    if f"{PREFIX}model_sha256" not in found.tags:
        raise RegistryError(
            f"{name} version {found.version} is the {alias} and was not registered by tuneline",
            hint=f"Register under another model_registry.name, or remove the alias {alias}.",
        )
    return _described(found)


def registered(name: str, which: str) -> Champion:
    """The version of a registered model with this number or alias.

    Raises RegistryError for an unknown model, version or alias, naming those that exist, and for a version that tuneline did not register.
    """
    versions.require_store(name)
    with versions.talking() as client:
        found = versions.get(client, name, which) if which.isdecimal() else versions.under(client, name, which)
    if f"{PREFIX}model_sha256" not in found.tags:
        raise RegistryError(
            f"{name} version {found.version} was not registered by tuneline, so nothing is known of where it came from",
            hint="Register the model with `tuneline register` or `tuneline run`.",
        )
    return _described(found)


def with_model(name: str, sha256: str) -> Champion | None:
    """The version of a registered model that is this very one; None where there is none."""
    with versions.talking() as client:
        found = _registered(client, name, sha256)
    return _described(found) if found else None


def _described(found: Any) -> Champion:
    tags = {key.removeprefix(PREFIX): value for key, value in found.tags.items() if key.startswith(PREFIX)}
    return Champion(
        name=found.name,
        version=str(found.version),
        model_sha256=tags["model_sha256"],
        incumbent_sha256=tags.get("incumbent_sha256"),
        finetune_key=tags.get("finetune_key", ""),
        store_uri=tags.get("store_uri", ""),
        tags=dict(found.tags),
    )
