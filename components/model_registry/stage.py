"""The registry: register a model version with all it came from, promote it when its evaluation accepted it, and find the way back."""

from __future__ import annotations

import getpass
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from components.common import tracking
from components.common.artifacts import Artifact
from components.common.errors import RegistryError, UsageError
from components.common.progress import Reporter
from components.model_registry import files
from components.model_registry.config import ModelRegistryConfig

CANDIDATE, CHALLENGER, CHAMPION = "candidate", "challenger", "champion"
PROVEN, UNPROVEN, UNPACKAGED = "proven", "unproven", "unpackaged"
TAG = "tuneline."


class Registration(BaseModel):
    """A registered model version."""

    name: str
    version: str
    aliases: list[str]
    tags: dict[str, str]


class Promotion(BaseModel):
    """An alias that moved: from a version (None: it was nowhere) to a version. Equal ones: nothing moved."""

    model_config = ConfigDict(populate_by_name=True)

    name: str
    alias: str
    from_: str | None = Field(alias="from")
    to: str


class Champion(BaseModel):
    """The model in service, as its tags describe it."""

    name: str
    version: str
    model_sha256: str
    incumbent_sha256: str | None
    finetune_key: str | None

    def fetch(self, folder: Path) -> Artifact:
        """Its model artifact, downloaded from the registry into `folder` and checked."""
        return files.download(_client(), self.name, self.version, folder)


def _client() -> Any:
    return tracking.connect().MlflowClient()


def register(
    model: Artifact,
    evaluation: Artifact,
    repository: Artifact | None,
    config: ModelRegistryConfig,
    *,
    reporter: Reporter,
    dataset_version: dict[str, Any] | None = None,
    finetune_key: str = "",
) -> Registration:
    """Register the model, or find the version it already is: the digest decides.

    The version gets the alias `candidate`, and `challenger` when the evaluation accepted it; a version in service keeps what it has.
    Raises UsageError when evaluation or repository belong to another model.
    """
    _check_same_model(model, evaluation, repository)
    client = _client()
    tags = _tags(model, evaluation, repository, dataset_version or {}, finetune_key)
    version = _find(client, config.name, model.sha256)
    if version is None:
        reporter.step("registering the model's files")
        version = files.create_version(client, config, model, evaluation, tags)
    else:
        for key, value in tags.items():
            client.set_model_version_tag(config.name, version, key, value)
    if CHAMPION not in _aliases(client, config.name, version):
        accepted = evaluation.manifest.summary["verdict"] == "accepted"
        for alias in (CANDIDATE, CHALLENGER) if accepted else (CANDIDATE,):
            client.set_registered_model_alias(config.name, alias, version)
    return Registration(name=config.name, version=version, aliases=_aliases(client, config.name, version), tags=tags)


def _check_same_model(model: Artifact, evaluation: Artifact, repository: Artifact | None) -> None:
    for other in (evaluation, repository):
        of = other.manifest.input("model") if other else None
        if other and (of is None or of.content_sha256 != model.sha256):
            named = of.content_sha256[:12] if of else "no tuned model"
            raise UsageError(
                f"the {other.manifest.kind} in {other.path} is of {named}, not of the model {model.sha256[:12]}",
                hint="Evaluate and package the model that you register.",
            )


def _tags(model: Artifact, evaluation: Artifact, repository: Artifact | None, version: dict[str, Any], finetune_key: str) -> dict[str, str]:
    """Every digest the version came from, the verdict and the proof. MLflow's tags are strings; what is absent is left out."""
    inputs = {kind: model.manifest.input(kind) for kind in ("dataset", "base_model")}
    incumbent = evaluation.manifest.input("incumbent")
    tags = {
        "model_sha256": model.sha256,
        "evaluation_sha256": evaluation.sha256,
        "repository_sha256": repository.sha256 if repository else None,
        "dataset_sha256": inputs["dataset"].content_sha256 if inputs["dataset"] else None,
        "base_model_sha256": inputs["base_model"].content_sha256 if inputs["base_model"] else None,
        "base_model_uri": inputs["base_model"].uri if inputs["base_model"] else None,
        "dataset_uri": version.get("uri") or (inputs["dataset"].uri if inputs["dataset"] else None),
        "dataset_rev": version.get("rev"),
        "dataset_md5": version.get("md5"),
        "incumbent_sha256": incumbent.content_sha256 if incumbent else None,
        "verdict": evaluation.manifest.summary["verdict"],
        "proof": _proof(repository),
        "finetune_key": finetune_key,
        "git_commit": model.manifest.produced_by.get("git_commit"),
        "model_path": str(model.path),
        "repository_path": str(repository.path) if repository else None,
    }
    return {TAG + name: str(value) for name, value in tags.items() if value}


def _proof(repository: Artifact | None) -> str:
    if repository is None:
        return UNPACKAGED
    return PROVEN if repository.manifest.summary.get("proof") else UNPROVEN


def _find(client: Any, name: str, model_sha256: str) -> str | None:
    """The version of this model digest, the newest if there are several."""
    found = client.search_model_versions(f"name = '{name}' and tags.`{TAG}model_sha256` = '{model_sha256}'")
    return max((str(v.version) for v in found), key=int, default=None)


def _aliases(client: Any, name: str, version: str) -> list[str]:
    return sorted(alias for alias, at in client.get_registered_model(name).aliases.items() if str(at) == version)


def champion(name: str) -> Champion | None:
    """The model in service under this name, or None."""
    client = _client()
    version = _holder(client, name, CHAMPION)
    if version is None:
        return None
    tags = client.get_model_version(name, version).tags
    if TAG + "model_sha256" not in tags:
        raise RegistryError(
            f"{name} version {version} is the champion and was not registered by tuneline",
            hint="Register under another model_registry.name, or remove the alias champion.",
        )
    return Champion(
        name=name,
        version=version,
        model_sha256=tags[TAG + "model_sha256"],
        incumbent_sha256=tags.get(TAG + "incumbent_sha256"),
        finetune_key=tags.get(TAG + "finetune_key"),
    )


def _holder(client: Any, name: str, alias: str) -> str | None:
    from mlflow.exceptions import MlflowException

    try:
        at = client.get_registered_model(name).aliases.get(alias)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    return str(at) if at is not None else None


def promote(
    name: str, version: str, *, reporter: Reporter, alias: str = CHAMPION, by: str = "", force: bool = False, reason: str = ""
) -> Promotion:
    """Move `alias` to a version that its evaluation accepted and a real server proved.

    Anything else is refused with RegistryError, unless `force` with a `reason`, which is kept with the version.
    """
    client = _client()
    tags = _version_tags(client, name, version)
    held = _holder(client, name, alias)
    if held == version:
        reporter.note(f"{name} version {version} already is the {alias}")
        return Promotion(name=name, alias=alias, from_=held, to=version)
    if force and not reason:
        raise UsageError("--force needs --reason", hint="Say why; it is kept with the version.")
    against = _objection(tags)
    if against and not force:
        raise RegistryError(f"{name} version {version} {against}", hint="Promote another version, or --force with a --reason.")
    record = {f"previous_{alias}": held or "", "promoted_by": by or getpass.getuser(), "promoted_at": _now()}
    if against:
        record |= {"forced": against, "forced_reason": reason}
    for key, value in record.items():
        client.set_model_version_tag(name, version, TAG + key, value)
    client.set_registered_model_alias(name, alias, version)
    return Promotion(name=name, alias=alias, from_=held, to=version)


def _objection(tags: dict[str, str]) -> str | None:
    """Why a version may not go into service, or None."""
    verdict, proof = tags.get(TAG + "verdict", "none"), tags.get(TAG + "proof", UNPACKAGED)
    if verdict != "accepted":
        return f"was not accepted by its evaluation (verdict: {verdict})"
    if proof != PROVEN:
        return f"is {proof}: no Triton server has shown that it answers as it should"
    return None


def _version_tags(client: Any, name: str, version: str) -> dict[str, str]:
    """Raises RegistryError naming what there is when the version is not."""
    from mlflow.exceptions import MlflowException

    try:
        return dict(client.get_model_version(name, version).tags)
    except MlflowException:
        known = sorted({str(v.version) for v in client.search_model_versions(f"name = '{name}'")}, key=int)
        if known:
            raise RegistryError(f"{name} has no version {version}", hint=f"It has {', '.join(known)}.") from None
        names = ", ".join(m.name for m in client.search_registered_models()) or "none yet"
        raise RegistryError(f"there is no registered model {name}", hint=f"There are: {names}.") from None


def rollback(name: str, *, reporter: Reporter, by: str = "") -> Promotion:
    """Give the alias champion back to the version that held it before this one."""
    client = _client()
    held = _holder(client, name, CHAMPION)
    if held is None:
        raise RegistryError(f"{name} has no champion", hint="Promote a version first.")
    previous = _version_tags(client, name, held).get(f"{TAG}previous_{CHAMPION}")
    if not previous:
        raise RegistryError(f"nothing was in service before {name} version {held}", hint="Promote the version you want instead.")
    client.set_registered_model_alias(name, CHAMPION, previous)
    client.set_model_version_tag(name, held, TAG + "rolled_back_by", by or getpass.getuser())
    client.set_model_version_tag(name, held, TAG + "rolled_back_at", _now())
    return Promotion(name=name, alias=CHAMPION, from_=held, to=previous)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
