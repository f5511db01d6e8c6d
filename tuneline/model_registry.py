"""`tuneline.Registry`: model versions in MLflow, with their history and lineage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from components.common.reporting import html_report
from components.common.runtime.errors import UsageError
from components.common.workspace.artifact_store import DEFAULT_WORKDIR
from tuneline import call_context
from tuneline.call_context import AnyCustomization, PathLike

if TYPE_CHECKING:
    from components.common.runtime.reporters import Reporter
    from components.common.workspace.artifact_store import Workdir
    from components.model_registry.history_audit import Audit
    from components.model_registry.promotion import Promotion
    from pipelines.provenance.lineage import Lineage


@dataclass(frozen=True, repr=False)
class ModelVersion:
    """A version of a registered model.

    Attributes:
        name: name of the registered model.
        version: number of the version.
        aliases: aliases that point to the version.
        tags: digests and facts that tuneline recorded.
    """

    name: str
    version: str
    aliases: list[str]
    tags: dict[str, str]

    def __repr__(self) -> str:
        return f"ModelVersion({self.name}/{self.version}, aliases={self.aliases})"

    def _repr_html_(self) -> str:
        rows = [[name.removeprefix("tuneline."), value] for name, value in sorted(self.tags.items())]
        return f"<b>{escape(repr(self))}</b>{html_report.render_table(['tag', 'value'], rows)}"


class ModelVersions(list[ModelVersion]):
    """Versions of a registered model, newest first, as a list that a notebook shows as a table."""

    def _repr_html_(self) -> str:
        head = ["version", "aliases", "verdict", "proof", "model", "dataset", "last promotion to champion"]
        rows = [
            [
                int(one.version),
                ", ".join(one.aliases),
                *(one.tags.get(f"tuneline.{tag}") for tag in ("verdict", "proof")),
                one.tags.get("tuneline.model_sha256", "")[:12],
                one.tags.get("tuneline.dataset_tag"),
                one.tags.get("tuneline.champion.reason"),
            ]
            for one in self
        ]
        return html_report.render_table(head, rows)


class Registry:
    """The model registry of an MLflow server.

        registry = Registry(workdir="my-project")
        print(registry.versions("helper"))
        registry.promote("helper", version=2, reason="better on tickets")

    Args:
        tracking_uri: URI of the MLflow server. Default: MLFLOW_TRACKING_URI, or a local store in the workdir.
        workdir: folder with the artifact store, state, tracking data and runs.
        quiet: report no progress.
    """

    def __init__(self, tracking_uri: str = "", *, workdir: PathLike = DEFAULT_WORKDIR, quiet: bool = False) -> None:
        self.tracking_uri, self.workdir, self.quiet = tracking_uri, workdir, quiet

    def __repr__(self) -> str:
        return f"Registry({self.tracking_uri!r}, workdir={str(self.workdir)!r})"

    def versions(self, name: str) -> ModelVersions:
        """Return the versions of a model, newest first.

        Raises:
            TunelineError: the model does not exist, or the server does not answer.
        """
        from components.model_registry import model_versions

        with self._open("versions"):
            model_versions.require_store(name)
            with model_versions.registry_client() as client:
                model = model_versions.require_model(client, name)
                aliases: dict[str, list[str]] = {}  # MLflow's search for versions omits their aliases
                for alias, number in sorted(model.aliases.items()):
                    aliases.setdefault(str(number), []).append(alias)
                numbers = {int(one.version): one for one in model_versions.list_versions(client, name)}
                return ModelVersions(
                    ModelVersion(name, str(number), aliases.get(str(number), []), dict(numbers[number].tags))
                    for number in sorted(numbers, reverse=True)
                )

    def promote(
        self,
        name: str,
        version: str | int,
        *,
        alias: str = "champion",
        by: str = "",
        reason: str = "",
        force: bool = False,
        customization: AnyCustomization = None,
    ) -> Promotion:
        """Move an alias to an intact version that passed its server test and was accepted against the champion.

        Args:
            name: name of the registered model.
            version: number of the version.
            alias: alias to move.
            by: user name recorded in the history. Default: the user of this process.
            reason: reason recorded in the history; required with `force`.
            force: promote despite failed checks.
            customization: customization whose gate rules are required; its policy applies if the history has no policy.

        Raises:
            TunelineError: a check fails, or the policy requires an approval.
        """
        if force and not reason.strip():
            raise UsageError("force requires a reason", hint="Give a reason; the history records it.")
        from components.model_registry import promotion_policy
        from components.model_registry.stage import promote
        from pipelines.steps.gate_requirements import describe_gate

        config = call_context.load(customization)
        with self._open("promote") as (work, reporter):
            work.root.mkdir(parents=True, exist_ok=True)
            return promote(
                name,
                version,
                alias=alias,
                by=by,
                reason=reason,
                force=force,
                policy=promotion_policy.build_policy(config.model_registry),
                **(describe_gate(config.evaluation) if customization else {}),
                reporter=reporter,
            )

    def rollback(
        self, name: str, *, by: str = "", reason: str = "", customization: AnyCustomization = None
    ) -> Promotion:
        """Move the alias champion back to its previous version.

        Args:
            name: name of the registered model.
            by: user name recorded in the history. Default: the user of this process.
            reason: reason recorded in the history.
            customization: customization whose policy applies if the history has no policy.

        Raises:
            TunelineError: no previous version exists, or the previous version is damaged.
        """
        from components.model_registry import promotion_policy
        from components.model_registry.stage import rollback

        policy = promotion_policy.build_policy(call_context.load(customization).model_registry)
        with self._open("rollback") as (work, reporter):
            work.root.mkdir(parents=True, exist_ok=True)
            return rollback(name, by=by, reason=reason, policy=policy, reporter=reporter)

    def lineage(self, reference: str, *, customization: AnyCustomization = None) -> Lineage:
        """Trace a version back to the dataset's revision and the raw files, and verify every digest.

        Args:
            reference: NAME@ALIAS, NAME@3 or NAME/3; NAME alone means its champion.
            customization: customization whose section `data_versioning` locates the data repository.

        Returns:
            The chain. `broken_links` lists links that do not match; `raise_if_broken` raises an error for them.

        Raises:
            TunelineError: the version does not exist.
        """
        from pipelines.provenance.lineage import trace

        with self._open("lineage") as (work, reporter):
            return trace(reference, work, call_context.load(customization).data_versioning, reporter)

    def audit(self, name: str) -> Audit:
        """Find moves, deletions and edits made outside tuneline; `tuneline registry audit --repair` records them.

        Raises:
            TunelineError: the model does not exist.
        """
        from components.model_registry.history_audit import audit

        with self._open("registry audit") as (_, reporter):
            return audit(name, reporter=reporter)

    @contextmanager
    def _open(self, prefix: str) -> Iterator[tuple[Workdir, Reporter]]:
        with call_context.open_call(prefix, self.workdir, quiet=self.quiet, tracking_uri=self.tracking_uri) as opened:
            yield opened
