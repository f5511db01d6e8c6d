"""The pipeline: a look at the place, resolve, then the stages in sequence, with packaging and promotion behind the evaluation's verdict."""

import json
from typing import Any, List, NamedTuple  # noqa: UP035 - kfp reads List[str], not list[str]

from kfp import dsl

from components.common.images import EVALUATION
from components.data_curation.component import data_curation
from components.data_versioning.component import data_versioning
from components.evaluation.component import evaluation
from components.fine_tuning.component import fine_tuning
from components.model_registry.component import promotion, registration
from components.triton_packaging.component import triton_packaging
from pipelines import parameters, place, pods
from pipelines.config import Customization
from pipelines.platform import Platform


class Outcome(NamedTuple):
    """What the pipeline gives: digests by kind, the dataset's revision, the verdict."""

    dataset: str
    version: str
    model: str
    evaluation: str
    verdict: str


@dsl.component(base_image=EVALUATION, install_kfp_package=False)
def check_the_platform(wanted: str, found: dsl.Output[dsl.Markdown]):  # type: ignore[no-untyped-def]
    """Look whether the pods find what platform.yaml says, before any work: volume, space, secrets, MLflow. `wanted`: names and paths."""
    import json
    from pathlib import Path

    from components.common import step
    from pipelines import place

    with step.running(place.STEP, tracked=False) as s:
        place.check(json.loads(wanted), s.workdir, s.reporter, Path(found.path))


@dsl.component(base_image=EVALUATION, install_kfp_package=False)
def resolve(  # kfp writes this source into the step, so what it takes and returns stands here in full
    sources: List[str],  # noqa: UP006
    base_model: str,
    model_name: str,
    adaptation: str,
    max_steps: int,
    epochs: float,
    learning_rate: float,
    batch_size: int,
    max_length: int,
    seed: int,
    auto_promote: bool,
    configuration: str,
    compiled: str,
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
    """Look at everything the customization depends on, and hand each stage a plan with its digests. `compiled`: the parameters' defaults."""
    given = dict(locals())
    import json

    from components.common import step
    from pipelines import parameters
    from pipelines.resolve import resolve as look

    with step.running("resolve") as s:
        config = parameters.combine(given, json.loads(compiled), configuration)
        plans = look(config, s.workdir, s.reporter).as_json()
    return tuple(plans.values())


@dsl.component(base_image=EVALUATION, install_kfp_package=False)
def report(dataset: str, version: str, model: str, evaluation: str, registered: str, page: dsl.Output[dsl.HTML]):  # type: ignore[no-untyped-def]
    """One page of evidence: the data, the training, the comparison, the package's proof, the lineage, time and cost."""
    import json

    from components.common import step
    from pipelines import evidence

    with step.running("report") as s:
        made = {"dataset": dataset, "model": model, "evaluation": evaluation}
        evidence.publish(s, made, json.loads(version), json.loads(registered), page.path)


def build(config: Customization, platform: Platform | None = None) -> Any:
    """The pipeline with this customization as its parameters' defaults, its pods made for this platform: a function that kfp compiles.

    Without a platform kfp.local runs it here as well.
    """
    default = parameters.defaults(config)
    compiled = json.dumps(default, sort_keys=True)

    def placed(task: dsl.PipelineTask, *, cached: bool = True) -> dsl.PipelineTask:
        return pods.prepared(task, platform, cached=cached)

    @dsl.pipeline(
        name="tuneline-customization",
        description="Customise a language model on your own text and bring it into service.",
        pipeline_config=pods.pipeline_config(platform),
    )
    def customization(
        sources: List[str] = default["sources"],  # noqa: UP006
        base_model: str = default["base_model"],
        model_name: str = default["model_name"],
        adaptation: str = default["adaptation"],
        max_steps: int = default["max_steps"],
        epochs: float = default["epochs"],
        learning_rate: float = default["learning_rate"],
        batch_size: int = default["batch_size"],
        max_length: int = default["max_length"],
        seed: int = default["seed"],
        auto_promote: bool = default["auto_promote"],
        configuration: str = parameters.remainder(config),
    ) -> Outcome:
        """Curate, version, fine-tune, evaluate; package, register and promote what the evaluation accepts.

        Args:
            sources: The text to learn from: files, globs and folders as the pods see them, for example ["/data/raw/*.jsonl"]. demo:python-docs is the demo dataset.
            base_model: The model to start from: a folder on the volume in the Hugging Face layout, store:<sha256> as tuneline models import printed it, hf://org/name@revision, or embedded:smollm2-135m-instruct.
            model_name: Name of the registered model in MLflow. A new version of it is made.
            adaptation: What is trained. lora: a small update beside frozen weights. full: every weight (16 bytes a parameter).
            max_steps: Stop after so many optimizer steps. 0: train for `epochs` instead.
            epochs: Passes over the training rows; counts only where max_steps is 0.
            learning_rate: Peak learning rate. Too high diverges; full wants about a tenth of what lora takes.
            batch_size: Rows an optimizer step, a multiple of fine_tuning.micro_batch_size (2 unless `configuration` says otherwise).
            max_length: Tokens a row, in training and in evaluation; longer rows are cut and counted. Memory grows with it.
            seed: One seed for the split, the training and the intervals. The same seed and inputs give the same model.
            auto_promote: Make an accepted and proven version the champion at once. False: a person promotes it.
            configuration: Every other key, as the text of a customization.yaml, for example {evaluation: {max_items: 200}}. A parameter that you change here in the form wins over its default; a key set differently in both places is refused.
        """
        given = {name: value for name, value in locals().items() if name in {*default, "configuration"}}
        plans = placed(resolve(**given, compiled=compiled), cached=False)
        if platform:  # a broken place fails in seconds; this machine is looked at by its own run
            plans.after(placed(check_the_platform(wanted=json.dumps(place.wanted(platform))), cached=False))
        curated = placed(data_curation(plan=plans.outputs["data_curation"]))
        dataset = curated.outputs["dataset"]
        # Versioning looks whether the remote still has the revision, which no key can say.
        versioned = placed(data_versioning(plan=plans.outputs["data_versioning"], dataset=dataset), cached=False)
        version = versioned.outputs["version"]
        tuned = placed(fine_tuning(plan=plans.outputs["fine_tuning"], dataset=dataset, version=version))
        model = tuned.outputs["model"]
        judged = placed(evaluation(plan=plans.outputs["evaluation"], model=model, dataset=dataset))
        lineage = {"version": version, "dataset": dataset, "model": model, "evaluation": judged.outputs["evaluation"]}
        registry = plans.outputs["model_registry"]
        with dsl.If(judged.outputs["verdict"] == "accepted", name="accepted"):
            packaged = placed(triton_packaging(plan=plans.outputs["triton_packaging"], model=model))
            registered = placed(registration(plan=registry, repository=packaged.outputs["repository"], **lineage), cached=False)
            promoted = placed(promotion(plan=registry, registered=registered.outputs["registered"]), cached=False)
        with dsl.Else(name="not-accepted"):
            kept = placed(registration(plan=registry, **lineage), cached=False)
        placed(report(**lineage, registered=dsl.OneOf(promoted.outputs["registered"], kept.outputs["registered"])), cached=False)
        return Outcome(dataset, version, model, judged.outputs["evaluation"], judged.outputs["verdict"])

    return customization
