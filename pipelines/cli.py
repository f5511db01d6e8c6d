"""The command line. Results go to standard output (one JSON object under --json), everything else to standard error.

Only what parses the command line is imported here: `tuneline --help` must not wait for torch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.common.errors import EXIT_FAILED, EXIT_REFUSED, InterruptedRunError, TunelineError, UsageError
from components.common.places import DEFAULT_WORKDIR, Workdir

if TYPE_CHECKING:
    from components.common.progress import Reporter
    from pipelines.config import Customization

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Customise a large language model on your own text and bring it into service.",
)
data_app = typer.Typer(no_args_is_help=True, help="Dataset versions in the data repository.")
app.add_typer(data_app, name="data")

Config = Annotated[Path | None, typer.Option("-c", "--config", help="customization.yaml. Without one the defaults run the demo.")]
Sets = Annotated[list[str], typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key of the configuration. Repeatable.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output and nothing else there.")]
Output = Annotated[Path, typer.Option("-o", "--output", help="The folder to write.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace another artifact in the output folder.")]
WorkdirOption = Annotated[
    Path, typer.Option("--workdir", envvar="TUNELINE_WORKDIR", help="Store, state, tracking and runs of a customization.")
]
TrackingUri = Annotated[
    str, typer.Option("--tracking-uri", help="The MLflow server. Default: MLFLOW_TRACKING_URI, or the workdir's own store.")
]
RefusalFails = Annotated[bool, typer.Option("--fail-on-refusal", help="Exit 3 when the gate refuses.")]
HERE = Path(DEFAULT_WORKDIR)
INTERRUPTED_BY_TYPER = 130  # what typer makes of a KeyboardInterrupt


def main() -> None:
    """The console script: run the command, tell errors as errors are told, exit with the contract's codes."""
    arguments = sys.argv[1:]
    signal.signal(signal.SIGTERM, _terminated)
    try:
        code = app(arguments, standalone_mode=False)
        if code == INTERRUPTED_BY_TYPER:
            code = _tell(InterruptedRunError("interrupted", hint="Run the same command again."), arguments)
    except TunelineError as error:
        code = _tell(error, arguments)
    except OSError as error:
        code = _tell(_from_os(error), arguments)
    except Exception as error:  # click's usage errors have a message and an exit code; anything else is a fault of ours
        if not hasattr(error, "format_message"):
            raise
        hint = "tuneline --help lists the commands, tuneline COMMAND --help their options."
        code = _tell(UsageError(error.format_message(), hint=hint), arguments)
    sys.exit(code if isinstance(code, int) else 0)


def _terminated(*_: object) -> None:
    raise KeyboardInterrupt


def _from_os(error: OSError) -> TunelineError:
    told = TunelineError(f"{error.strerror or error}: {error.filename or ''}".rstrip(": "), hint="Check the folder's permissions.")
    told.kind = "disk_full" if error.errno == 28 else "system"
    told.hint = "Free some space and run the same command again." if error.errno == 28 else told.hint
    return told


def _tell(error: TunelineError, arguments: list[str]) -> int:
    """Print an error for a person, or as an object for a script."""
    if "--json" in arguments:
        print(json.dumps({"error": error.as_dict()}))
    else:
        where = f"{error.stage}: " if error.stage else ""
        print(f"tuneline: {where}{error.message}", file=sys.stderr)
        if error.hint:
            print(f"  {error.hint}", file=sys.stderr)
    return error.exit_code


def _print(result: dict[str, Any], as_json: bool, lines: list[str]) -> None:
    print(json.dumps(result, default=str) if as_json else "\n".join(lines))


def _config(config: Path | None, sets: list[str]) -> Customization:
    from pipelines.config import load

    return load(config, sets)


def _alone(stage: str, as_json: bool, workdir: Path, tracking_uri: str = "") -> tuple[Reporter, Workdir]:
    """What a stage used alone works with."""
    from components.common import progress

    os.environ["TUNELINE_WORKDIR"] = str(workdir.absolute())
    if tracking_uri:
        os.environ["MLFLOW_TRACKING_URI"] = tracking_uri
    return progress.console(quiet=as_json, prefix=f"{stage}: "), Workdir.from_environment()


def _tracked(work: Workdir) -> None:
    """Point MLflow at the server that was named, or at the workdir's own store."""
    os.environ["MLFLOW_TRACKING_URI"] = work.tracking_uri
    work.root.mkdir(parents=True, exist_ok=True)


def _done(reporter: Reporter) -> None:
    from components.common import progress

    progress.close(reporter)


@app.command()
def run(
    config: Config = None,
    sets: Sets = [],  # noqa: B006 - typer reads it, nobody writes it
    workdir: WorkdirOption = HERE,
    tracking_uri: TrackingUri = "",
    fail_on_refusal: RefusalFails = False,
    as_json: AsJson = False,
) -> int:
    """Run the whole pipeline on this machine: curate, version, fine-tune, evaluate, package, register, promote."""
    customization = _config(config, sets)
    from pipelines import local, summary

    result = local.run(customization, Workdir(workdir.absolute()), quiet=as_json, uri=tracking_uri or None)
    _print(result, as_json, summary.run(result, str(workdir)))
    return EXIT_REFUSED if fail_on_refusal and result["verdict"] == "refused" else 0


@app.command()
def curate(
    sources: Annotated[list[str], typer.Argument(help="Files, globs or folders of raw text; demo:python-docs is the demo dataset.")],
    output: Output,
    config: Config = None,
    sets: Sets = [],  # noqa: B006
    overwrite: Overwrite = False,
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """Clean, deduplicate and split raw text into a dataset."""
    customization = _config(config, sets)
    reporter, work = _alone("curate", as_json, workdir)
    from components.data_curation.stage import curate as stage
    from components.data_curation.stage import list_sources
    from pipelines.resolve import expand_demo

    found = list_sources(expand_demo(sources, work), Path.cwd())
    settings = customization.data_curation.model_copy(update={"sources": sources})
    made = stage(found, output, settings, seed=customization.seed, reporter=reporter, overwrite=overwrite)
    _done(reporter)
    rows, splits = made.manifest.summary["rows"], made.manifest.summary["splits"]
    result = {"dataset": str(output), "sha256": made.sha256, "rows": rows, "splits": splits}
    dropped = ", ".join(f"{n} {reason}" for reason, n in rows["rejected"].items()) or "none"
    lines = [f"{rows['kept']} of {rows['in']} rows kept; dropped: {dropped}; unreadable: {rows['quarantined']}"]
    _print(result, as_json, [*lines, f"splits: {splits}", f"report: {output / 'report.html'}"])


@app.command()
def finetune(
    dataset: Annotated[Path, typer.Argument(help="A curated dataset's folder.")],
    output: Output,
    config: Config = None,
    sets: Sets = [],  # noqa: B006
    overwrite: Overwrite = False,
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """Tune the base model on a dataset. Killed and started again, it goes on from the last checkpoint."""
    customization = _config(config, sets)
    reporter, work = _alone("finetune", as_json, workdir)
    from components.common import artifacts
    from components.fine_tuning.stage import finetune as stage

    found = artifacts.read(dataset, "dataset")
    options: dict[str, Any] = {"seed": customization.seed, "state": work.state, "reporter": reporter, "overwrite": overwrite}
    made = stage(found, output, customization.fine_tuning, dataset_uri=str(dataset), **options)
    _done(reporter)
    names = ("steps", "tokens", "train_loss", "validation_loss", "tokens_per_second", "resumed_from")
    result = {"model": str(output), "sha256": made.sha256} | {name: made.manifest.summary[name] for name in names}
    told = f"{result['steps']} steps, {result['tokens']} tokens, training loss {result['train_loss']:.4f}"
    _print(result, as_json, [told, f"report: {output / 'report.html'}"])


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(help="A tuned model's folder, or a base model's source.")],
    dataset: Annotated[Path, typer.Option("--dataset", help="The dataset whose test split is measured.")],
    output: Output,
    incumbent: Annotated[str, typer.Option("--incumbent", help="The model in service, to compare with as well.")] = "",
    config: Config = None,
    sets: Sets = [],  # noqa: B006
    overwrite: Overwrite = False,
    workdir: WorkdirOption = HERE,
    fail_on_refusal: RefusalFails = False,
    as_json: AsJson = False,
) -> int:
    """Measure a model against its base and the model in service, and give the verdict with its reasons."""
    customization = _config(config, sets)
    reporter, work = _alone("evaluate", as_json, workdir)
    from components.common import artifacts, models
    from components.evaluation.stage import evaluate as stage

    opened = models.open_model(model, reporter)
    other = models.open_model(incumbent, reporter) if incumbent else None
    found = artifacts.read(dataset, "dataset")
    options: dict[str, Any] = {"seed": customization.seed, "state": work.state, "reporter": reporter, "overwrite": overwrite}
    made = stage(opened, found, output, customization.evaluation, incumbent=other, **options)
    _done(reporter)
    summary = made.manifest.summary
    result = {"evaluation": str(output), "sha256": made.sha256} | {n: summary[n] for n in ("verdict", "reasons", "metrics")}
    _print(result, as_json, [f"verdict: {summary['verdict']}", *summary["reasons"], f"report: {output / 'report.html'}"])
    return EXIT_REFUSED if fail_on_refusal and summary["verdict"] == "refused" else 0


@app.command()
def package(
    model: Annotated[str, typer.Argument(help="A tuned model's folder, or a base model's source.")],
    output: Output,
    config: Config = None,
    sets: Sets = [],  # noqa: B006
    overwrite: Overwrite = False,
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """Make a Triton model repository and prove it in a real server."""
    customization = _config(config, sets)
    reporter, _ = _alone("package", as_json, workdir)
    from components.common import models
    from components.triton_packaging.stage import package as stage

    opened = models.open_model(model, reporter)
    made = stage(opened, output, customization.triton_packaging, seed=customization.seed, reporter=reporter, overwrite=overwrite)
    _done(reporter)
    names = ("model_name", "backend", "proof")
    result = {"repository": str(output), "sha256": made.sha256} | {name: made.manifest.summary[name] for name in names}
    proof = result["proof"]
    told = (
        f"{proof['matched']} of {proof['golden_prompts']} golden prompts answered alike"
        if proof
        else f"unproven: {made.manifest.summary['unproven_because']}"
    )
    _print(result, as_json, [told, f"talk to it: tuneline serve {output}"])


@app.command()
def register(
    model: Annotated[Path, typer.Option("--model", help="The tuned model's folder.")],
    evaluation: Annotated[Path, typer.Option("--evaluation", help="Its evaluation's folder.")],
    repository: Annotated[Path | None, typer.Option("--repository", help="Its Triton repository; none for a refused candidate.")] = None,
    name: Annotated[str, typer.Option("--name", help="The registered model's name.")] = "",
    config: Config = None,
    sets: Sets = [],  # noqa: B006
    tracking_uri: TrackingUri = "",
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """Register a model version in MLflow, tagged with every digest it came from."""
    customization = _config(config, sets)
    reporter, work = _alone("register", as_json, workdir, tracking_uri)
    from components.common import artifacts
    from components.model_registry.stage import register as stage

    found = (artifacts.read(model, "model"), artifacts.read(evaluation, "evaluation"))
    proven = artifacts.read(repository, "repository") if repository else None
    _tracked(work)
    settings = customization.model_registry.model_copy(update={"name": name} if name else {})
    done = stage(*found, proven, settings, reporter=reporter)
    _done(reporter)
    _print(done.model_dump(), as_json, [f"{done.name} version {done.version}, aliases: {', '.join(done.aliases) or 'none'}"])


@app.command()
def promote(
    name: Annotated[str, typer.Argument(help="The registered model's name.")],
    version: Annotated[str, typer.Option("--version", help="The version to promote.")],
    alias: Annotated[str, typer.Option("--alias", help="The alias to move.")] = "champion",
    by: Annotated[str, typer.Option("--by", help="Who promotes; default: the user of this system.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Promote against the gate's verdict; needs --reason.")] = False,
    reason: Annotated[str, typer.Option("--reason", help="Why; kept with the version.")] = "",
    tracking_uri: TrackingUri = "",
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """Move an alias to a model version that its evaluation accepted."""
    if force and not reason:
        raise UsageError("--force needs --reason", hint="Say why; it is kept with the version.")
    reporter, work = _alone("promote", as_json, workdir, tracking_uri)
    from components.model_registry.stage import promote as stage

    _tracked(work)
    moved = stage(name, version, alias=alias, by=by, force=force, reason=reason, reporter=reporter).model_dump(by_alias=True)
    _print(moved, as_json, [f"{name}@{alias}: {moved['from'] or 'none'} → {moved['to']}"])


@app.command()
def rollback(
    name: Annotated[str, typer.Argument(help="The registered model's name.")],
    by: Annotated[str, typer.Option("--by", help="Who rolls back; default: the user of this system.")] = "",
    tracking_uri: TrackingUri = "",
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """Give the alias champion back to the version that held it before."""
    reporter, work = _alone("rollback", as_json, workdir, tracking_uri)
    from components.model_registry.stage import rollback as stage

    _tracked(work)
    moved = stage(name, by=by, reporter=reporter).model_dump(by_alias=True)
    _print(moved, as_json, [f"{name}@{moved['alias']}: {moved['from']} → {moved['to']}"])


@app.command()
def serve(
    repository: Annotated[Path, typer.Argument(help="A packaged Triton repository's folder.")],
    http_port: Annotated[int, typer.Option("--http-port", help="0: any free one.")] = 8000,
    grpc_port: Annotated[int, typer.Option("--grpc-port", help="0: any free one.")] = 8001,
    metrics_port: Annotated[int, typer.Option("--metrics-port", help="0: any free one.")] = 8002,
    host: Annotated[str, typer.Option("--host", help="The address to listen on.")] = "127.0.0.1",
    as_json: AsJson = False,
) -> None:
    """Serve a packaged model with a real Triton until Ctrl-C."""
    reporter, _ = _alone("serve", as_json, HERE)
    from components.triton_packaging.serve import serve as stage

    def ready(server: Any) -> None:
        _done(reporter)
        name = server.models[0] if server.models else "MODEL"
        told = f'curl -s {server.http_url}/v2/models/{name}/generate -d \'{{"text_input": "What does os.path.join do?"}}\''
        result = {
            "http": server.http_url,
            "grpc": server.grpc_url,
            "metrics": server.metrics_url,
            "models": server.models,
            "pid": os.getpid(),
        }
        _print(result, as_json, [f"ready on {server.http_url} (gRPC {server.grpc_url}); Ctrl-C ends it", told])
        sys.stdout.flush()

    stage(repository, http_port=http_port, grpc_port=grpc_port, metrics_port=metrics_port, host=host, on_ready=ready, reporter=reporter)


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="The folder to write into.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """Write a commented customization.yaml: every key with its default and its effect."""
    from pipelines.reference import write

    path = write(folder)
    _print({"customization": str(path)}, as_json, [f"wrote {path}; run it with: tuneline run -c {path}"])


@app.command()
def doctor(workdir: WorkdirOption = HERE, as_json: AsJson = False) -> int:
    """Say what works on this machine, what is missing, and how to get it."""
    from pipelines.doctor import examine

    findings = examine(Workdir(workdir.absolute()))
    ok = all(f["ok"] or not f["needed"] for f in findings)
    lines = [f"{'ok     ' if f['ok'] else 'MISSING' if f['needed'] else 'without'}  {f['name']}: {f['found']}{_how(f)}" for f in findings]
    _print({"ok": ok, "findings": findings}, as_json, lines)
    return 0 if ok else EXIT_FAILED


def _how(finding: dict[str, Any]) -> str:
    return f"\n         {finding['hint']}" if finding["hint"] else ""


@data_app.command("publish")
def data_publish(
    dataset: Annotated[Path, typer.Argument(help="A curated dataset's folder.")],
    config: Config = None,
    sets: Sets = [],  # noqa: B006
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """Publish a dataset as the next revision. Content that is published already keeps its revision."""
    customization = _config(config, sets)
    reporter, work = _alone("data", as_json, workdir)
    from components.common import artifacts
    from components.data_versioning.stage import publish

    version = publish(artifacts.read(dataset, "dataset"), customization.data_versioning, workdir=work.root, reporter=reporter)
    _done(reporter)
    _print(
        version.model_dump(), as_json, [f"{version.tag} ({version.rev[:12]}) {'published' if version.created else 'was published already'}"]
    )


@data_app.command("fetch")
def data_fetch(
    revision: Annotated[str, typer.Argument(help="A tag or a commit of the data repository.")],
    output: Output,
    config: Config = None,
    sets: Sets = [],  # noqa: B006
    overwrite: Overwrite = False,
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """Fetch a published revision, every digest checked."""
    customization = _config(config, sets)
    reporter, work = _alone("data", as_json, workdir)
    from components.data_versioning.stage import fetch

    found = fetch(revision, output, customization.data_versioning, workdir=work.root, reporter=reporter, overwrite=overwrite)
    _done(reporter)
    _print({"dataset": str(output), "sha256": found.sha256, "revision": revision}, as_json, [f"{revision} is in {output}"])


@data_app.command("list")
def data_list(
    config: Config = None,
    sets: Sets = [],  # noqa: B006
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """List the published revisions."""
    customization = _config(config, sets)
    from components.data_versioning.stage import versions

    found = versions(customization.data_versioning, workdir=workdir.absolute())
    lines = [f"{v.tag}  {v.rev[:12]}  {v.content_sha256[:12]}" for v in found]
    _print({"versions": [v.model_dump() for v in found]}, as_json, lines or ["nothing is published yet"])


@data_app.command("show")
def data_show(
    revision: Annotated[str, typer.Argument(help="A tag or a commit of the data repository.")],
    config: Config = None,
    sets: Sets = [],  # noqa: B006
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """Show what a revision holds and what it was made from."""
    customization = _config(config, sets)
    from components.data_versioning.stage import show

    found = show(revision, customization.data_versioning, workdir=workdir.absolute())
    _print(found, as_json, [json.dumps(found, indent=2, default=str)])


@data_app.command("diff")
def data_diff(
    before: Annotated[str, typer.Argument(help="A tag or a commit.")],
    after: Annotated[str, typer.Argument(help="A tag or a commit.")],
    config: Config = None,
    sets: Sets = [],  # noqa: B006
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """Compare two revisions row by row."""
    customization = _config(config, sets)
    reporter, work = _alone("data", as_json, workdir)
    from components.data_versioning.stage import diff

    found = diff(before, after, customization.data_versioning, workdir=work.root, reporter=reporter)
    _done(reporter)
    _print(found, as_json, [json.dumps(found, indent=2, default=str)])


def _version(asked: bool) -> None:
    if asked:
        from components.common.artifacts import produced_by

        print(f"tuneline {produced_by()['tuneline']}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Options of tuneline itself."""


if __name__ == "__main__":
    main()
