"""Registration and promotion as Kubeflow components. Neither is ever cached."""

from typing import NamedTuple

from kfp import dsl

from components.common.images import EVALUATION


@dsl.component(base_image=EVALUATION, install_kfp_package=False)
def registration(
    plan: str, version: str, dataset: str, model: str, evaluation: str, links: dsl.Output[dsl.Markdown], repository: str = ""
) -> NamedTuple("Outputs", [("registered", str)]):
    """Register a model version with the digests of all it came from. `version`: the dataset's revision; `repository`: empty when refused."""
    import json

    from components.common import step, tracking
    from components.model_registry.config import ModelRegistryConfig
    from components.model_registry.stage import register

    p, rev = json.loads(plan), json.loads(version)
    with step.running("registration") as s:
        data = s.artifact(dataset, "dataset")
        package = s.artifact(repository, "repository") if repository else None
        made = s.artifact(model, "model"), s.artifact(evaluation, "evaluation"), package
        done = register(*made, ModelRegistryConfig(**p["config"]), reporter=s.reporter, dataset_version=rev, finetune_key=p["finetune_key"])
        tracking.log_dataset(data, rev)
        s.result(**done.model_dump(), repository=repository)
        s.show_links(links.path, registered=tracking.link_to_version(done.name, done.version))
    return (done.model_dump_json(),)


@dsl.component(base_image=EVALUATION, install_kfp_package=False)
def promotion(plan: str, registered: str) -> NamedTuple("Outputs", [("registered", str)]):
    """Make an accepted and proven model version the champion, where the configuration asks for it. Returns what it was given and what moved."""
    import json

    from components.common import step
    from components.model_registry.config import ModelRegistryConfig
    from components.model_registry.stage import promote_at_once

    p, done = json.loads(plan), json.loads(registered)
    config, proof = ModelRegistryConfig(**p["config"]), done["tags"]["tuneline.proof"]
    with step.running("promotion") as s:
        if config.auto_promote and proof == "proven":
            moved = promote_at_once(config, done["version"], compared_with=p["incumbent"], reporter=s.reporter)
            if moved:
                done["moved"] = moved.model_dump(by_alias=True)
                s.result(**done["moved"])
        elif config.auto_promote:
            s.reporter.note(f"{config.name} version {done['version']} is {proof}, so it is not promoted")
    return (json.dumps(done),)
