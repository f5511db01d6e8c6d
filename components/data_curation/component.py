"""Data curation as a Kubeflow component."""

from typing import NamedTuple

from kfp import dsl

from components.common.runtime.container_images import CURATION_IMAGE


@dsl.component(base_image=CURATION_IMAGE, install_kfp_package=False)
def data_curation(
    config: str,
    inputs: str,
    seed: int,
    report: dsl.Output[dsl.HTML],
    links: dsl.Output[dsl.Markdown],
    curated_dataset: dsl.Output[dsl.Dataset],
) -> NamedTuple("Outputs", [("dataset", str)]):
    """Clean, deduplicate and split raw text.

    Args:
        config: The section data_curation of the customization, as JSON.
        inputs: Sources, evaluation sets, earlier revisions and scoring inputs with digests, and the code digest, as JSON.
        seed: Seed of the split.
        report: Curation report.
        links: Links to the run and its artifacts.
        curated_dataset: Manifest of the dataset artifact; its digest and address are the metadata.

    Returns:
        Digest of the dataset artifact.
    """
    import json

    from components.common import pipeline_step
    from components.data_curation.config import DataCurationConfig
    from components.data_curation.stage import EarlierRevision, ScoringInputs, Source, curate, load_extracts

    p = {"config": json.loads(config), "seed": seed, **json.loads(inputs)}
    execution = p.pop("where")  # settings that do not affect the result
    sources, benchmarks, settings = (
        [Source(**s) for s in p["sources"]],
        [Source(**s) for s in p["benchmarks"]],
        DataCurationConfig(**p["config"], **execution),
    )
    dataset = pipeline_step.produce_artifact(
        "data_curation",
        p,
        lambda out, s: curate(
            load_extracts(sources, s.load_artifact),
            out,
            settings,
            seed=seed,
            reporter=s.reporter,
            benchmarks=benchmarks,
            earlier=[EarlierRevision(tag, s.load_artifact(sha256, "dataset")) for tag, sha256 in p["earlier"]],
            scoring=ScoringInputs.from_plan(p["scoring"]),
            state=s.workdir.state,
        ),
        links.path,
    )
    pipeline_step.copy_report(dataset, report.path)
    pipeline_step.describe_to_kfp(dataset, curated_dataset)
    return (dataset.sha256,)
