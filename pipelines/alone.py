"""One stage alone, as a pipeline: from the artifacts it needs, by their digests in the store, to the one it makes.

Its plan is that of a whole run, so what it makes is found in the store by a whole run with the same settings, and the other way round. An
evaluation compares with the model in service; a whole run that repeats the recipe of that model compares with the one before it.
"""

import json
from collections.abc import Callable
from typing import Any, List, NamedTuple  # noqa: UP035 - kfp reads List[str], not list[str]

from kfp import dsl

from components.common.images import EVALUATION
from components.data_curation.component import data_curation
from components.data_versioning.component import data_versioning
from components.evaluation.component import evaluation
from components.fine_tuning.component import fine_tuning
from components.triton_packaging.component import triton_packaging
from pipelines import parameters, place, pods
from pipelines.config import Customization
from pipelines.customization import check_the_platform
from pipelines.platform import Platform

Placed = Callable[..., dsl.PipelineTask]


@dsl.component(base_image=EVALUATION, install_kfp_package=False)
def plan_one(stage: str, configuration: str, sources: List[str] = [], dataset: str = "") -> NamedTuple(  # noqa: UP006, B006
    "Plan", [("plan", str), ("versioning", str), ("version", str)]
):
    """Look at what one stage depends on. Returns its plan, that of the dataset's versioning, and the dataset's revision."""
    import json

    from components.common import step
    from pipelines import lineage, parameters
    from pipelines.resolve import alone

    with step.running("plan_one") as s:
        config = parameters.read(configuration)
        if sources:
            config.data_curation.sources = sources
        plan, versioning = alone(stage, parameters.with_absolute_paths(config), s.workdir, s.reporter)
        published = lineage.published_as(dataset, config.data_versioning, s.workdir) if dataset else ""
    return (plan, versioning, json.dumps({"uri": published or f"store:{dataset}"}))


def build(stage: str) -> Callable[[Customization, Platform | None], Any]:
    """What makes the pipeline of one stage, for a customization and a platform: a function that kfp compiles."""

    def built(config: Customization, platform: Platform | None = None) -> Any:
        def placed(task: dsl.PipelineTask, *, cached: bool = True) -> dsl.PipelineTask:
            return pods.prepared(task, platform, cached=cached)

        def planned(**given: Any) -> dsl.PipelineTask:
            task = placed(plan_one(stage=stage, **given), cached=False)
            if platform:
                task.after(placed(check_the_platform(wanted=json.dumps(place.wanted(platform))), cached=False))
            return task

        pipeline: Any = PIPELINES[stage](config, placed, planned)
        named = {"name": f"tuneline-{stage.replace('_', '-')}", "description": pipeline.__doc__.split("\n")[0]}
        return dsl.pipeline(**named, pipeline_config=pods.pipeline_config(platform))(pipeline)

    return built


def _curation(config: Customization, placed: Placed, planned: Placed) -> Any:
    def data(sources: List[str] = config.data_curation.sources, configuration: str = parameters.whole(config)) -> str:  # noqa: UP006
        """Curate raw text and publish it as a dataset version.

        Args:
            sources: The text to learn from: files, globs and folders as the pods see them.
            configuration: The text of a customization.yaml; of it, data_curation, data_versioning, fine_tuning.base_model and seed count here.
        """
        plans = planned(sources=sources, configuration=configuration)
        curated = placed(data_curation(plan=plans.outputs["plan"]))
        placed(data_versioning(plan=plans.outputs["versioning"], dataset=curated.outputs["dataset"]), cached=False)
        return curated.outputs["dataset"]  # type: ignore[no-any-return] # kfp's outputs are untyped

    return data


def _tuning(config: Customization, placed: Placed, planned: Placed) -> Any:
    def tuning(dataset: str, configuration: str = parameters.whole(config)) -> str:
        """Fine-tune the base model on a dataset of the store.

        Args:
            dataset: The dataset's digest, as the curation gives it.
            configuration: The text of a customization.yaml; of it, fine_tuning and seed count here.
        """
        plans = planned(configuration=configuration, dataset=dataset)
        tuned = placed(fine_tuning(plan=plans.outputs["plan"], dataset=dataset, version=plans.outputs["version"]))
        return tuned.outputs["model"]  # type: ignore[no-any-return]

    return tuning


def _evaluation(config: Customization, placed: Placed, planned: Placed) -> Any:
    def judging(model: str, dataset: str, configuration: str = parameters.whole(config)) -> str:
        """Measure a model of the store against its base and the model in service.

        Args:
            model: The model's digest, as the fine-tuning gives it.
            dataset: The digest of the dataset whose test split is measured.
            configuration: The text of a customization.yaml; of it, evaluation, fine_tuning.base_model, fine_tuning.max_length, seed and the registered model's name count here.
        """
        plans = planned(configuration=configuration)
        judged = placed(evaluation(plan=plans.outputs["plan"], model=model, dataset=dataset))
        return judged.outputs["evaluation"]  # type: ignore[no-any-return]

    return judging


def _packaging(config: Customization, placed: Placed, planned: Placed) -> Any:
    def packaging(model: str, configuration: str = parameters.whole(config)) -> str:
        """Package a model of the store for Triton, and prove it in a real server.

        Args:
            model: The model's digest, as the fine-tuning gives it.
            configuration: The text of a customization.yaml; of it, triton_packaging and seed count here.
        """
        packaged = placed(triton_packaging(plan=planned(configuration=configuration).outputs["plan"], model=model))
        return packaged.outputs["repository"]  # type: ignore[no-any-return]

    return packaging


PIPELINES = {"data_curation": _curation, "fine_tuning": _tuning, "evaluation": _evaluation, "triton_packaging": _packaging}
