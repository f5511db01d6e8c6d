"""The pipeline: resolve, then the stages in sequence, with packaging and promotion behind the evaluation's verdict."""

from typing import NamedTuple

from kfp import dsl

from components.common.images import EVALUATION
from components.data_curation.component import data_curation
from components.data_versioning.component import data_versioning
from components.evaluation.component import evaluation
from components.fine_tuning.component import fine_tuning
from components.model_registry.component import promotion, registration
from components.triton_packaging.component import triton_packaging


class Outcome(NamedTuple):
    """What the pipeline gives: digests by kind, the dataset's revision, the verdict."""

    dataset: str
    version: str
    model: str
    evaluation: str
    verdict: str


@dsl.component(base_image=EVALUATION, install_kfp_package=False)
def resolve(  # kfp writes this source into the step, so what it returns stands here in full
    configuration: str,
) -> NamedTuple(
    "Plans",
    [
        ("data_curation", str),
        ("data_versioning", str),
        ("fine_tuning", str),
        ("evaluation", str),
        ("triton_packaging", str),
        ("model_registry", str),
    ],
):
    """Look at everything the customization depends on, and hand each stage a plan with its digests."""
    import yaml

    from components.common import step
    from pipelines.config import parse
    from pipelines.resolve import resolve as look

    with step.running("resolve") as s:
        plans = look(parse(yaml.safe_load(configuration) or {}, "configuration"), s.workdir, s.reporter).as_json()
    return tuple(plans.values())


@dsl.pipeline(name="tuneline-customization", description="Customise a language model on your own text and bring it into service.")
def customization(configuration: str = "") -> Outcome:
    """Curate, version, fine-tune, evaluate; package, register and promote what the evaluation accepts.

    Args:
        configuration: A customization.yaml as text. Empty: the defaults, which run the demo.
    """
    plans = resolve(configuration=configuration)
    plans.set_caching_options(enable_caching=False)
    curated = data_curation(plan=plans.outputs["data_curation"])
    dataset = curated.outputs["dataset"]
    versioned = data_versioning(plan=plans.outputs["data_versioning"], dataset=dataset)
    versioned.set_caching_options(enable_caching=False)  # it looks whether the remote still has the revision, which no key can say
    version = versioned.outputs["version"]
    tuned = fine_tuning(plan=plans.outputs["fine_tuning"], dataset=dataset, version=version)
    model = tuned.outputs["model"]
    judged = evaluation(plan=plans.outputs["evaluation"], model=model, dataset=dataset)
    lineage = {"version": version, "dataset": dataset, "model": model, "evaluation": judged.outputs["evaluation"]}
    registry = plans.outputs["model_registry"]
    with dsl.If(judged.outputs["verdict"] == "accepted", name="accepted"):
        packaged = triton_packaging(plan=plans.outputs["triton_packaging"], model=model)
        registered = registration(plan=registry, repository=packaged.outputs["repository"], **lineage)
        registered.set_caching_options(enable_caching=False)
        promoted = promotion(plan=registry, version=registered.outputs["version"], proof=registered.outputs["proof"])
        promoted.set_caching_options(enable_caching=False)
    with dsl.Else(name="not-accepted"):
        kept = registration(plan=registry, **lineage)
        kept.set_caching_options(enable_caching=False)
    return Outcome(dataset, version, model, judged.outputs["evaluation"], judged.outputs["verdict"])
