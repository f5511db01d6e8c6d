"""`tuneline policy`: the release policy of a registered model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from components.common.runtime.counts import format_count
from pipelines.cli.application import (
    DEFAULT_WORKDIR_PATH,
    JsonOption,
    TrackingUriOption,
    WorkdirOption,
    app,
    open_workdir,
    print_result,
)

if TYPE_CHECKING:
    from components.model_registry.policy_checks import PolicyInForce
    from components.model_registry.policy_report import PolicyTest

policy_app = typer.Typer(no_args_is_help=True, help="Release policy of a registered model.")
app.add_typer(policy_app, name="policy")
NameArgument = Annotated[str, typer.Argument(help="Name of the registered model.")]


@policy_app.command()
def show(
    name: NameArgument,
    history: Annotated[bool, typer.Option("--history", help="List all policies with user, time and changes.")] = False,
    tracking_uri: TrackingUriOption = "",
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> None:
    """Show the release policy of the model, or its changes."""
    from components.model_registry import policy_report

    with open_workdir("policy show", as_json, workdir, tracking_uri):
        if not history:
            _print_policy(name, policy_report.read_policy_in_force(name), as_json)
            return
        entries = policy_report.list_changes(name)
    lines = [
        f"entry {entry.number}, {entry.at}, {entry.by}{'' if entry.intact else ' (edited outside tuneline)'}: "
        f"{'; '.join(entry.changes) or 'no change'}"
        for entry in entries
    ]
    result = {"name": name, "entries": [entry.model_dump() for entry in entries]}
    print_result(result, as_json, lines or [f"{name} has no release policy"])


@policy_app.command("set")
def set_policy(
    name: NameArgument,
    file: Annotated[
        Path, typer.Argument(readable=False, help="YAML file of the policy. Example: mlflow/promotion-policy.yaml.")
    ],
    by: Annotated[
        str,
        typer.Option(
            "--by",
            help="User name recorded in the history. If the policy in force lists approvers, only an approver may replace the policy. "
            "Default: the user of this process.",
        ),
    ] = "",
    tracking_uri: TrackingUriOption = "",
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> None:
    """Set the release policy of the model. A policy that no version could satisfy is refused."""
    from components.common.runtime.user_name import get_user_name
    from components.model_registry import model_versions, policy_report, promotion_policy, release_policy
    from pipelines.steps import policy_preflight

    policy = release_policy.read_policy(file)
    policy_preflight.check_metrics(policy, str(file))
    with open_workdir("policy set", as_json, workdir, tracking_uri):
        model_versions.require_store(name)
        with model_versions.registry_client() as client:
            model_versions.require_model(client, name)
            promotion_policy.set_policy(client, name, policy, by or get_user_name())
        in_force = policy_report.read_policy_in_force(name)
    _print_policy(name, in_force, as_json)


def _print_policy(name: str, in_force: PolicyInForce, as_json: bool) -> None:
    import yaml

    policy = in_force.policy
    result = {"name": name, "entry": in_force.number or None, **policy.model_dump(mode="json")}
    fields = policy.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    text = yaml.safe_dump(fields, sort_keys=False, allow_unicode=True).rstrip() if fields else "no requirements"
    title = f"entry {in_force.number} of its history" if in_force.number else "no release policy"
    print_result(result, as_json, [f"# {name}: {title}", text])


@policy_app.command("test")
def check(
    name: NameArgument,
    version: Annotated[str, typer.Option("--version", help="Version to test.")],
    tracking_uri: TrackingUriOption = "",
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> None:
    """Check a version against each requirement of the policy. Exit with status 1 if a requirement is not met."""
    from components.model_registry import policy_report

    with open_workdir("policy test", as_json, workdir, tracking_uri):
        result = policy_report.check_version(name, version)
    print_result(result.model_dump(), as_json, _format_test(result))
    if not result.met:
        raise typer.Exit(1)


def _format_test(result: PolicyTest) -> list[str]:
    lines = [
        f"{'✔' if one.met else '✘'} {one.requirement}{f': {one.reason}' * (not one.met)}" for one in result.requirements
    ]
    unmet = sum(not one.met for one in result.requirements)
    total = format_count(len(lines), "requirement")
    verdict = f"{unmet} of {total} not met" if unmet else f"{total}: all met"
    source = f"policy entry {result.entry}" if result.entry else "no release policy"
    return [*lines, f"{result.name} version {result.version}, {source}: {verdict}"]
