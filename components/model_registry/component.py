"""Kubeflow components for registration and promotion; their results are never cached."""

from typing import NamedTuple

from kfp import dsl

from components.common.runtime.container_images import EVALUATION_IMAGE


@dsl.component(base_image=EVALUATION_IMAGE, install_kfp_package=False)
def registration(
    config: str,
    finetune_key: str,
    version: str,
    dataset: str,
    model: str,
    evaluation: str,
    links: dsl.Output[dsl.Markdown],
    repository: str = "",
    tuned_model: dsl.Input[dsl.Model] = None,
    triton_package: dsl.Input[dsl.Model] = None,
) -> NamedTuple("Outputs", [("registered", str)]):
    """Register a model version with the digests of its origin.

    Args:
        config: The section model_registry of the customization, as JSON.
        finetune_key: Digest of the recipe.
        version: The dataset's revision, as JSON.
        dataset: Digest of the dataset artifact.
        model: Digest of the model artifact.
        evaluation: Digest of the evaluation artifact.
        links: Links to the run and the registered version.
        repository: Digest of the Triton package; empty for a refused candidate.
        tuned_model: The model for Kubeflow's lineage; the digest selects the artifact.
        triton_package: The Triton package for Kubeflow's lineage; the digest selects the artifact.

    Returns:
        The registered version, as JSON.
    """
    import json

    from components.common import pipeline_step
    from components.common.reporting import mlflow_tracking
    from components.common.runtime.errors import TunelineError
    from components.model_registry import run_summary
    from components.model_registry.config import ModelRegistryConfig
    from components.model_registry.stage import register

    revision = json.loads(version)
    with pipeline_step.step_context("registration") as step:
        digests = {"dataset": dataset, "model": model, "evaluation": evaluation, "repository": repository}
        artifacts = {kind: step.load_artifact(sha256, kind) for kind, sha256 in digests.items() if sha256}
        registered = register(
            artifacts["model"],
            artifacts["evaluation"],
            artifacts.get("repository"),
            ModelRegistryConfig(**json.loads(config)),
            reporter=step.reporter,
            dataset_version=revision,
            finetune_key=finetune_key,
            cost=step.describe_cost(*artifacts.values()),
        )
        try:
            run_summary.log_summary(step.mlflow_run, registered, artifacts, revision)
        except TunelineError as error:  # the version is registered
            step.reporter.note(f"the MLflow run has no summary of the customization: {error.message}")
        step.report_result(**registered.model_dump(), repository=repository)
        link = mlflow_tracking.format_version_link(registered.name, registered.version)
        step.write_links(links.path, registered=link)
    return (registered.model_dump_json(),)


@dsl.component(base_image=EVALUATION_IMAGE, install_kfp_package=False)
def promotion(config: str, incumbent: str, registered: str) -> NamedTuple("Outputs", [("registered", str)]):
    """Make an accepted and proven model version the champion if the configuration enables `auto_promote`.

    Args:
        config: The section model_registry of the customization, as JSON.
        incumbent: Digest of the model that the candidate was compared with; empty for none.
        registered: The registered version, as JSON.

    Returns:
        `registered` with the key `moved` if the alias moved, as JSON.
    """
    import json

    from components.common import pipeline_step
    from components.model_registry.config import ModelRegistryConfig
    from components.model_registry.stage import auto_promote

    version, settings = json.loads(registered), ModelRegistryConfig(**json.loads(config))
    proof = version["tags"]["tuneline.proof"]
    with pipeline_step.step_context("promotion") as step:
        if settings.auto_promote and proof == "proven":
            moved = auto_promote(
                settings, version["version"], incumbent_sha256=incumbent or None, reporter=step.reporter
            )
            if moved:
                version["moved"] = moved.model_dump(by_alias=True)
                step.report_result(**version["moved"])
        elif settings.auto_promote:
            step.reporter.note(
                f"{settings.name} version {version['version']} is not promoted, because its package is {proof}"
            )
    return (json.dumps(version),)
