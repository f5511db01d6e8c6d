"""Data versioning as a Kubeflow component."""

from typing import NamedTuple

from kfp import dsl

from components.common.images import CURATION


@dsl.component(base_image=CURATION, install_kfp_package=False)
def data_versioning(plan: str, dataset: str, links: dsl.Output[dsl.Markdown]) -> NamedTuple("Outputs", [("version", str)]):
    """Publish a dataset as a DVC revision. `plan`: configuration and code digest. Returns repository, path, revision and md5 as JSON."""
    import json

    from components.common import step
    from components.data_versioning.config import DataVersioningConfig
    from components.data_versioning.stage import publish

    p = json.loads(plan)
    with step.running("data_versioning") as s:
        found = s.artifact(dataset, "dataset")
        version = publish(found, DataVersioningConfig(**p["config"]), workdir=s.workdir.root, reporter=s.reporter)
        s.cached = not version.created
        if s.tracked:
            s.tracked.dataset(found, name=version.tag, source=version.source())
        s.show_links(links.path, revision=version.tag, dataset=dataset)
    return (version.model_dump_json(exclude={"created"}),)
