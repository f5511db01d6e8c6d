"""`tuneline register`, `promote`, `rollback`, `lineage` and `registry`: model versions in MLflow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from components.common.runtime.counts import format_count
from components.common.runtime.errors import UsageError
from pipelines.cli.application import (
    DEFAULT_WORKDIR_PATH,
    ConfigOption,
    JsonOption,
    ReferenceArgument,
    SetOption,
    TrackingUriOption,
    WorkdirOption,
    app,
    load_config,
    open_workdir,
    print_result,
)
from pipelines.cli.tables import format_history

if TYPE_CHECKING:
    from components.model_registry.config import ModelRegistryConfig

registry_app = typer.Typer(no_args_is_help=True, help="Show and audit the history of a registered model.")
app.add_typer(registry_app, name="registry")
NameArgument = Annotated[str, typer.Argument(help="Name of the registered model.")]
ByOption = Annotated[
    str, typer.Option("--by", help="User name recorded in the history. Default: the user of this process.")
]


@app.command()
def register(
    model: Annotated[Path, typer.Option("--model", help="Folder of the tuned model.")],
    evaluation: Annotated[Path, typer.Option("--evaluation", help="Folder of the model's evaluation.")],
    repository: Annotated[
        Path | None,
        typer.Option(
            "--repository",
            help="Folder of the model's Triton model repository. Omit this option for a refused candidate or a reward "
            "model.",
        ),
    ] = None,
    name: Annotated[
        str,
        typer.Option("--name", help="Name of the registered model. Default: model_registry.name of the configuration."),
    ] = "",
    config: ConfigOption = None,
    sets: SetOption = [],  # noqa: B006
    tracking_uri: TrackingUriOption = "",
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> None:
    """Register a model version in MLflow, tagged with the digests of its inputs."""
    settings = _replace_name(load_config(config, sets).model_registry, name)
    from components.common.artifacts import artifact_folder
    from components.common.workspace import artifact_store
    from components.model_registry.stage import register as register_version

    paths = [path for path in (model, evaluation, repository) if path]
    with artifact_store.keep_paths_in_use(*paths):
        artifacts = (artifact_folder.read(model, "model"), artifact_folder.read(evaluation, "evaluation"))
        package = artifact_folder.read(repository, "repository") if repository else None
        with open_workdir("register", as_json, workdir, tracking_uri, writes=True) as (reporter, _):
            version = register_version(*artifacts, package, settings, reporter=reporter)
    line = f"{version.name} version {version.version}, aliases: {', '.join(version.aliases) or 'none'}"
    print_result(version.model_dump(), as_json, [line])


def _replace_name(settings: ModelRegistryConfig, name: str) -> ModelRegistryConfig:
    """Replace the name of the registered model, if one is given."""
    try:
        return type(settings).model_validate({**settings.model_dump(), "name": name}) if name else settings
    except ValueError:
        raise UsageError(
            f"--name {name} is not a valid name of a registered model", hint="Use a name without slashes and colons."
        ) from None


@app.command()
def promote(
    name: NameArgument,
    version: Annotated[str, typer.Option("--version", help="Version to promote.")],
    alias: Annotated[str, typer.Option("--alias", help="Alias to move.")] = "champion",
    by: ByOption = "",
    force: Annotated[bool, typer.Option("--force", help="Promote despite failed checks. Requires --reason.")] = False,
    reason: Annotated[
        str,
        typer.Option("--reason", help="Reason, recorded in the history. Default: no reason; required with --force."),
    ] = "",
    config: ConfigOption = None,
    sets: SetOption = [],  # noqa: B006
    tracking_uri: TrackingUriOption = "",
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> None:
    """Move an alias to an intact, accepted version that passed its server test.

    For the alias champion, the evaluation must have compared the version with the current champion.
    """
    if force and not reason.strip():
        raise UsageError("--force requires --reason", hint="Give a reason with --reason; the history records it.")
    customization = load_config(config, sets)
    from components.model_registry import promotion_policy
    from components.model_registry.stage import promote as promote_version
    from pipelines.steps.gate_requirements import describe_gate

    with open_workdir("promote", as_json, workdir, tracking_uri, writes=True) as (reporter, _):
        promotion = promote_version(
            name,
            version,
            alias=alias,
            by=by,
            force=force,
            reason=reason,
            policy=promotion_policy.build_policy(customization.model_registry),
            **(describe_gate(customization.evaluation) if config else {}),
            reporter=reporter,
        )
    moved = promotion.model_dump(by_alias=True)
    print_result(moved, as_json, [f"{name}@{alias}: {moved['from'] or 'none'} → {moved['to']}"])


@app.command()
def rollback(
    name: NameArgument,
    by: ByOption = "",
    reason: Annotated[
        str,
        typer.Option(
            "--reason",
            help='Reason, recorded in the history. Default: "rollback from version N", where N is the current version.',
        ),
    ] = "",
    config: ConfigOption = None,
    sets: SetOption = [],  # noqa: B006
    tracking_uri: TrackingUriOption = "",
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> None:
    """Move the alias champion back to its previous version."""
    customization = load_config(config, sets)
    from components.model_registry import promotion_policy
    from components.model_registry.stage import rollback as roll_back

    policy_ = promotion_policy.build_policy(customization.model_registry)
    with open_workdir("rollback", as_json, workdir, tracking_uri, writes=True) as (reporter, _):
        moved = roll_back(name, by=by, reason=reason, policy=policy_, reporter=reporter).model_dump(by_alias=True)
    print_result(moved, as_json, [f"{name}@{moved['alias']}: {moved['from']} → {moved['to']}"])


@registry_app.command()
def audit(
    name: NameArgument,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Complete or void interrupted moves, record manual moves, write a missing checkpoint, and acknowledge "
            "all other findings except those about the champion's evidence.",
        ),
    ] = False,
    by: ByOption = "",
    tracking_uri: TrackingUriOption = "",
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> None:
    """Compare the aliases with the history, and verify history and champion.

    Exit with status 1 if a finding is open.
    """
    from components.common.runtime.user_name import get_user_name
    from components.model_registry.history_audit import audit as audit_history

    with open_workdir("registry audit", as_json, workdir, tracking_uri) as (reporter, _):
        report = audit_history(name, repair=repair, by=by or get_user_name(), reporter=reporter)
    lines = [f"✘ {finding.what}" for finding in report.findings] + [f"! {note}" for note in report.notes]
    verdict = (
        "every alias agrees with the history"
        if report.clean
        else f"{format_count(len(report.findings), 'difference')}; --repair resolves or acknowledges all except those "
        "about the champion's evidence"
    )
    print_result(
        report.model_dump(), as_json, [*lines, f"{name}: {format_count(report.entries, 'entry', 'entries')}, {verdict}"]
    )
    if not report.clean:
        raise typer.Exit(1)


@registry_app.command()
def history(
    name: NameArgument,
    alias: Annotated[str, typer.Option("--alias", help="Show only entries of this alias. Default: all.")] = "",
    tracking_uri: TrackingUriOption = "",
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> None:
    """Show the entries of the model's history with user, time, versions and reason, and the cost of the versions."""
    from components.model_registry import model_versions, registry_history

    with open_workdir("registry history", as_json, workdir, tracking_uri):
        model_versions.require_store(name)
        with model_versions.registry_client() as client:
            model_versions.require_model(client, name)
            entries = [
                entry.get_public_fields() for entry in registry_history.read(client, name) if alias in ("", entry.alias)
            ]
            moved = {entry["to"] for entry in entries}
            costs = {
                str(version.version): version.tags[model_versions.COST_TAG]
                for version in model_versions.list_versions(client, name)
                if str(version.version) in moved and model_versions.COST_TAG in version.tags
            }
    lines = [*format_history(name, entries), *(f"cost of version {version}: {cost}" for version, cost in costs.items())]
    print_result({"name": name, "entries": entries, "costs": costs}, as_json, lines)


@app.command()
def lineage(
    reference: ReferenceArgument,
    config: ConfigOption = None,
    sets: SetOption = [],  # noqa: B006
    tracking_uri: TrackingUriOption = "",
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> None:
    """Trace a model version back to the dataset's revision and the raw files, and verify every digest."""
    settings = load_config(config, sets).data_versioning
    from pipelines.provenance.lineage import print_tree, summarize, trace

    with open_workdir("lineage", as_json, workdir, tracking_uri) as (reporter, work):
        chain = trace(reference, work, settings, reporter)
    if not as_json:
        print_tree(chain)
    chain.raise_if_broken()
    print_result(chain.as_dict(), as_json, [summarize(chain)])
