"""Single stages from folder to folder, and the server of a package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from components.common.runtime.errors import UsageError
from components.common.workspace.artifact_store import DEFAULT_WORKDIR
from pipelines.runs import single_stages
from pipelines.runs.results import DatasetResult, EvaluationResult, ModelResult, PackageResult
from pipelines.runs.single_stages import ServedPackage
from tuneline import call_context
from tuneline.call_context import AnyCustomization, PathLike


def curate(
    sources: PathLike | Sequence[PathLike] | None,
    output: PathLike,
    customization: AnyCustomization = None,
    *,
    workdir: PathLike = DEFAULT_WORKDIR,
    overwrite: bool = False,
    quiet: bool = False,
) -> DatasetResult:
    """Clean, deduplicate and split raw text into a dataset.

        dataset = curate(["tickets.jsonl"], "dataset")
        print(dataset.rows, dataset.splits)

    Args:
        sources: files, globs or folders of raw text. None: data_curation.sources of the customization.
        output: folder of the dataset.
        customization: the customization, or the path of its file. None: the defaults.
        workdir: folder of unfinished work and published revisions.
        overwrite: replace an existing artifact in the output folder.
        quiet: report no progress.

    Raises:
        TunelineError: a source does not exist or has no usable row, or the output folder is occupied.
    """
    config = call_context.load(customization)
    if sources is not None:
        paths = [sources] if isinstance(sources, str | Path) else sources
        if not paths:
            raise UsageError("sources is an empty list", hint="Pass files, globs or folders, or None.")
        single_stages.select_sources(config, [str(path) for path in paths])
    with call_context.open_call("curate", workdir, quiet=quiet) as (work, reporter):
        return single_stages.curate_sources(config, Path(output), work, reporter, overwrite=overwrite)


def finetune(
    dataset: PathLike,
    output: PathLike,
    customization: AnyCustomization = None,
    *,
    workdir: PathLike = DEFAULT_WORKDIR,
    platform: PathLike | None = None,
    launcher: str = "",
    overwrite: bool = False,
    quiet: bool = False,
) -> ModelResult:
    """Tune the base model on a dataset. After an interruption, the same call resumes from the last checkpoint.

        model = finetune("dataset", "model", Customization.load(fine_tuning={"max_steps": 100}))
        print(model.validation_loss)

    Args:
        dataset: folder of a curated dataset.
        output: folder of the model.
        customization: the customization, or the path of its file. None: the defaults.
        workdir: folder of checkpoints.
        platform: platform.yaml whose `launcher` section configures the launcher of the training job.
        launcher: launcher of the training job. Default: that of `platform` or of TUNELINE_LAUNCHER.
        overwrite: replace an existing artifact in the output folder.
        quiet: report no progress.

    Raises:
        TunelineError: the dataset has changed, training failed, or the output folder is occupied.
    """
    config = call_context.load(customization)
    with call_context.open_call("finetune", workdir, quiet=quiet) as (work, reporter):
        settings = call_context.load_launcher(platform, launcher)
        return single_stages.finetune_dataset(
            Path(dataset), Path(output), config, settings, work, reporter, overwrite=overwrite
        )


def evaluate(
    model: PathLike,
    dataset: PathLike,
    output: PathLike,
    customization: AnyCustomization = None,
    *,
    incumbent: PathLike = "",
    workdir: PathLike = DEFAULT_WORKDIR,
    overwrite: bool = False,
    quiet: bool = False,
) -> EvaluationResult:
    """Compare a model with its base model and the incumbent, and decide whether the model may be promoted.

        evaluation = evaluate("model", "dataset", "evaluation")
        print(evaluation.verdict, *evaluation.reasons, sep="\\n")

    Args:
        model: folder of a tuned model, or source of a base model.
        dataset: folder of the dataset with the test split.
        output: folder of the evaluation.
        customization: the customization, or the path of its file. None: the defaults.
        incumbent: folder of the deployed model, a second baseline.
        workdir: folder of cached scores.
        overwrite: replace an existing artifact in the output folder.
        quiet: report no progress.

    Raises:
        TunelineError: an artifact has changed, a task is invalid, or the output folder is occupied.
    """
    config = call_context.load(customization)
    with call_context.open_call("evaluate", workdir, quiet=quiet) as (work, reporter):
        return single_stages.evaluate_model(
            str(model),
            Path(dataset),
            Path(output),
            config,
            work,
            reporter,
            incumbent=str(incumbent),
            overwrite=overwrite,
        )


def package(
    model: PathLike,
    output: PathLike,
    customization: AnyCustomization = None,
    *,
    adapters: Mapping[str, PathLike] | None = None,
    dataset: PathLike | None = None,
    workdir: PathLike = DEFAULT_WORKDIR,
    overwrite: bool = False,
    quiet: bool = False,
) -> PackageResult:
    """Build a Triton model repository and test it in a Triton server.

        repository = package("model", "repository")
        print(repository.proof)

    Args:
        model: folder of a tuned model, or source of a base model.
        output: folder of the repository.
        customization: the customization, or the path of its file. None: the defaults.
        adapters: folders of additional adapters of the same base model, by name; vLLM only.
        dataset: dataset whose test split is used to measure a quantized model. None: the model's training dataset.
        workdir: folder of the artifact store.
        overwrite: replace an existing artifact in the output folder.
        quiet: report no progress.

    Raises:
        TunelineError: the model has changed, Triton does not load the package, or the output folder is occupied.
    """
    config = call_context.load(customization)
    folders = {name: Path(folder) for name, folder in (adapters or {}).items()}
    with call_context.open_call("package", workdir, quiet=quiet) as (work, reporter):
        return single_stages.package_model(
            str(model),
            Path(output),
            config,
            work,
            reporter,
            adapters=folders,
            dataset=Path(dataset) if dataset else None,
            overwrite=overwrite,
        )


@contextmanager
def serve(
    repository: PathLike,
    *,
    host: str = "127.0.0.1",
    http_port: int = 0,
    keys: PathLike | None = None,
    workdir: PathLike = DEFAULT_WORKDIR,
    drain_seconds: float = 60.0,
    quiet: bool = False,
) -> Iterator[ServedPackage]:
    """Serve a packaged model through the OpenAI API until the end of the block.

        with serve("repository") as server:
            client = openai.OpenAI(base_url=server.openai_url, api_key="none")

    Args:
        repository: folder of a Triton model repository that `package` built.
        host: address to listen on.
        http_port: HTTP port; 0 for any free port.
        keys: file of API keys (see `tuneline keys create`); required unless `host` is a loopback address.
        workdir: folder of logs and feedback.
        drain_seconds: time in seconds to finish answers in progress at the end.
        quiet: report no progress.

    Raises:
        TunelineError: the package has changed, Triton cannot run on this machine, or the port is in use.
    """
    with ExitStack() as server:
        with call_context.open_call("serve", workdir, quiet=quiet) as (work, reporter):
            served = server.enter_context(
                single_stages.serve_repository(
                    Path(repository),
                    work,
                    reporter,
                    host=host,
                    http_port=http_port,
                    keys=Path(keys) if keys else None,
                    drain_seconds=drain_seconds,
                )
            )
        yield served
