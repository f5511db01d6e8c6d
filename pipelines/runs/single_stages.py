"""Single stages from folder to folder, and the server of a package, for the command line and the Python API."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from components.common.artifacts import artifact_folder
from components.common.launch.launcher_settings import LauncherSettings
from components.common.runtime.reporters import Reporter
from components.common.workspace import artifact_store
from components.common.workspace.artifact_store import Workdir
from components.triton_packaging.triton_server import Server
from pipelines.config.customization_config import Customization
from pipelines.gateway.process import GatewayOptions, GatewayProcess
from pipelines.runs.results import DatasetResult, EvaluationResult, ModelResult, PackageResult


def select_sources(customization: Customization, paths: Sequence[str]) -> None:
    """Replace the sources by paths, each with the settings of all entries with this path."""
    from components.data_curation.reading.source_settings import SourceEntry

    stated = customization.data_curation.sources
    customization.data_curation.sources = [
        entry
        for path in paths
        for entry in [one for one in stated if one.path in (path, str(Path(path).absolute()))]
        or [SourceEntry(path=path)]
    ]


def curate_sources(
    customization: Customization, output: Path, work: Workdir, reporter: Reporter, *, overwrite: bool = False
) -> DatasetResult:
    """Clean, deduplicate and split the sources of the customization into a dataset.

    Raises:
        ConfigurationError: a source does not exist.
        InputError: the sources have no usable row.
        OutputOccupiedError: `output` contains another artifact.
    """
    from components.data_curation.stage import curate
    from pipelines.steps import curation_inputs

    inputs = curation_inputs.list_inputs(customization, work, reporter)
    earlier = curation_inputs.fetch_earlier_revisions(customization, inputs.earlier_revisions, work, reporter)
    dataset = curate(
        inputs.sources,
        output,
        customization.data_curation,
        seed=customization.seed,
        reporter=reporter,
        overwrite=overwrite,
        benchmarks=inputs.benchmarks,
        earlier=earlier,
        scoring=inputs.scoring,
        state=work.state,
    )
    return DatasetResult.from_artifact(output, dataset)


def finetune_dataset(
    dataset: Path,
    output: Path,
    customization: Customization,
    launcher: LauncherSettings,
    work: Workdir,
    reporter: Reporter,
    *,
    overwrite: bool = False,
) -> ModelResult:
    """Tune the base model on a dataset. After an interruption, the same call resumes from the last checkpoint.

    Raises:
        ArtifactDamagedError: the dataset is unfinished or has changed.
        OutputOccupiedError: `output` contains another artifact.
        TrainingError: the training failed.
    """
    reporter.step("reading the dataset")
    from components.fine_tuning.sweep import tune

    tuning = customization.fine_tuning
    others = [tuning.initial_adapter, tuning.distillation.teacher, *(reward.model for reward in tuning.grpo.rewards)]
    with artifact_store.keep_paths_in_use(dataset, tuning.base_model, *filter(None, others)):
        model = tune(
            artifact_folder.read(dataset, "dataset"),
            output.absolute(),
            customization.fine_tuning,
            dataset_uri=str(dataset),
            launcher_settings=launcher,
            seed=customization.seed,
            state=work.state,
            reporter=reporter,
            overwrite=overwrite,
        )
    return ModelResult.from_artifact(output, model)


def evaluate_model(
    model: str,
    dataset: Path,
    output: Path,
    customization: Customization,
    work: Workdir,
    reporter: Reporter,
    *,
    incumbent: str = "",
    overwrite: bool = False,
) -> EvaluationResult:
    """Compare a model with its base model and the incumbent, and decide whether the model may be promoted.

    Args:
        model: folder of a tuned model, or source of a base model.
        incumbent: folder of the deployed model; empty for no second baseline.

    Raises:
        ArtifactDamagedError: the dataset or a model is unfinished or has changed.
        OutputOccupiedError: `output` contains another artifact.
    """
    reporter.step("reading the model")
    from components.common.models import model_loading
    from components.evaluation.config import adapt_to_reward_model
    from components.evaluation.stage import evaluate

    with artifact_store.keep_paths_in_use(model, dataset, *([incumbent] if incumbent else [])):
        candidate = model_loading.open_model(model, reporter, accepts_reward_models=True)
        compared = None
        if incumbent:
            compared = model_loading.open_model(incumbent, reporter, argument="incumbent", accepts_reward_models=True)
        config = customization.evaluation
        evaluation = evaluate(
            candidate,
            artifact_folder.read(dataset, "dataset"),
            output,
            adapt_to_reward_model(config) if candidate.is_reward_model else config,
            incumbent=compared,
            seed=customization.seed,
            state=work.state,
            reporter=reporter,
            overwrite=overwrite,
        )
    return EvaluationResult.from_artifact(output, evaluation)


def package_model(
    model: str,
    output: Path,
    customization: Customization,
    work: Workdir,
    reporter: Reporter,
    *,
    adapters: Mapping[str, Path] | None = None,
    dataset: Path | None = None,
    overwrite: bool = False,
) -> PackageResult:
    """Build a Triton model repository and test it in a Triton server.

    Args:
        model: folder of a tuned model, or source of a base model.
        adapters: folders of additional adapters of the same base model, by name; vLLM only.
        dataset: folder of the dataset whose test split is used to measure a quantized model. Default: the dataset
            that the model was trained on.

    Raises:
        ArtifactDamagedError: a model is unfinished or has changed.
        OutputOccupiedError: `output` contains another artifact.
    """
    reporter.step("reading the model")
    from components.common.models import model_loading, training_lineage
    from components.triton_packaging.stage import package

    folders = adapters or {}
    with ExitStack() as in_use:
        in_use.enter_context(artifact_store.keep_paths_in_use(model, *folders.values()))
        opened = model_loading.open_model(model, reporter)
        trained_on = opened.artifact.manifest.find_input("dataset") if opened.artifact else None
        if customization.triton_packaging.quantization != "none" and dataset is None and trained_on:
            dataset = training_lineage.find_folder(trained_on, "")
        if dataset:
            in_use.enter_context(artifact_store.keep_paths_in_use(dataset))
        repository = package(
            opened,
            output,
            customization.triton_packaging,
            seed=customization.seed,
            reporter=reporter,
            overwrite=overwrite,
            adapters={
                name: model_loading.open_model(str(folder), reporter, argument=f"adapter {name}")
                for name, folder in folders.items()
            },
            dataset=artifact_folder.read(dataset, "dataset") if dataset else None,
            state=work.state,
        )
    return PackageResult.from_artifact(output, repository)


@dataclass(frozen=True)
class ServedPackage:
    """A Triton server behind the gateway.

    Attributes:
        openai_url: base URL for OpenAI clients.
        url: root URL of the gateway.
        models: names of the served models; the first is the model that clients request.
        metrics: URL of the gateway's metrics.
        grpc: gRPC address of Triton.
    """

    server: Server
    gateway: GatewayProcess

    @property
    def openai_url(self) -> str:
        return self.gateway.openai_url

    @property
    def url(self) -> str:
        return self.gateway.url

    @property
    def models(self) -> list[str]:
        return list(self.server.models)

    @property
    def metrics(self) -> str:
        return f"{self.gateway.url}/metrics"

    @property
    def grpc(self) -> str:
        return self.server.grpc_url

    def check_alive(self) -> None:
        """Restart the gateway if it has exited.

        Raises:
            EngineMissingError: Triton has exited, or the gateway exits repeatedly.
        """
        self.server.check_alive()
        self.gateway.check_alive()

    def as_dict(self) -> dict[str, object]:
        """Return the object that `tuneline serve --json` prints when the server is ready."""
        return {
            "openai_url": self.openai_url,
            "http": self.url,
            "grpc": self.grpc,
            "metrics": self.metrics,
            "model": self.models[0],
            "models": self.models,
            "pid": os.getpid(),
        }

    def __repr__(self) -> str:
        return f"ServedPackage({self.openai_url}, model={self.models[0]})"


@contextmanager
def serve_repository(
    repository: Path,
    work: Workdir,
    reporter: Reporter,
    *,
    host: str = "127.0.0.1",
    http_port: int = 0,
    keys: Path | None = None,
    routes: Path | None = None,
    capture: Path | None = None,
    drain_seconds: float = 60.0,
    trust: Sequence[Path] = (),
) -> Iterator[ServedPackage]:
    """Serve a package through the OpenAI API until the end of the block.

    Args:
        http_port: port of the gateway; 0 for any free port.
        keys: file of API keys; required unless `host` is a loopback address.
        routes: routing file of canaries and shadow traffic.
        capture: capture file.
        drain_seconds: time in seconds to finish answers in progress at the end.
        trust: keys; the repository must have a signature of one of these. Empty: no signature is required.

    Raises:
        ArtifactDamagedError: a file of the package was changed or added.
        ConfigurationError: other machines can reach `host`, and `keys` is not set.
        EngineMissingError: Triton cannot run on this machine, or a server does not start.
        PortInUseError: another process listens on the port.
    """
    from components.triton_packaging.package_serving import served_package
    from pipelines.capture.traffic_bucket import check_capture_file
    from pipelines.gateway import addresses
    from pipelines.gateway.process import running_gateway

    addresses.require_keys(host, keys)
    if capture:
        check_capture_file(capture)
    with artifact_store.keep_paths_in_use(repository), addresses.listen(host, http_port) as listener:
        if trust:
            from components.model_registry import signature_checks, trust_root

            pinned = trust_root.load_trust(list(trust))
            signature_checks.require_signature(artifact_folder.read(repository, "repository"), pinned)
        folder, name = work.root / "serving", repository.absolute().name
        options = GatewayOptions(
            keys,
            folder / f"{name}.usage.json",
            feedback=folder / f"{name}.feedback.jsonl",
            routes=routes,
            capture=capture,
            log=folder / f"{name}.gateway.log",
            drain_seconds=drain_seconds,
        )
        reporter.step("starting the server")
        with (
            served_package(repository, folder / f"{name}.triton.log", reporter) as server,
            running_gateway(listener, server.grpc_url, server.metrics_socket, repository, options) as gateway,
        ):
            yield ServedPackage(server, gateway)
