"""Data versioning as a Kubeflow component."""

from typing import NamedTuple

from kfp import dsl

from components.common.runtime.container_images import CURATION_IMAGE


@dsl.component(base_image=CURATION_IMAGE, install_kfp_package=False)
def data_versioning(
    config: str,
    dataset: str,
    links: dsl.Output[dsl.Markdown],
    curated_dataset: dsl.Input[dsl.Dataset] = None,
) -> NamedTuple("Outputs", [("version", str)]):
    """Publish a dataset as a DVC revision.

    Args:
        config: The section data_versioning of the customization, as JSON.
        dataset: Digest of the dataset artifact.
        links: Links to the run and its artifacts.
        curated_dataset: The dataset for Kubeflow's lineage; the digest selects the artifact.

    Returns:
        The published revision (`Version` without `created`), as JSON.
    """
    import json

    from components.common import pipeline_step
    from components.data_versioning.config import DataVersioningConfig
    from components.data_versioning.stage import publish

    with pipeline_step.step_context("data_versioning") as step:
        artifact = step.load_artifact(dataset, "dataset")
        version = publish(
            artifact, DataVersioningConfig(**json.loads(config)), workdir=step.workdir.root, reporter=step.reporter
        )
        step.cached = not version.created
        if step.mlflow_run:
            step.mlflow_run.log_dataset(artifact, name=version.tag, source=version.to_mlflow_source())
        step.write_links(links.path, revision=version.tag, dataset=dataset)
    return (version.model_dump_json(exclude={"created"}),)
