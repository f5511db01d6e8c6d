"""Pipelines of a single stage: from its input artifacts, given by digest, to its output artifact.

A stage has the same plan as in a full run, so both reuse the same results in the store.
"""

# The evaluation pipeline compares a model with the champion; a full run that repeats the champion's recipe compares the
# candidate with the champion's incumbent.

from collections.abc import Callable
from functools import partial
from typing import Any, List, NamedTuple  # noqa: UP035 - kfp reads List[str], not list[str]

from kfp import dsl

from components.common.runtime.container_images import EVALUATION_IMAGE
from components.data_curation.component import data_curation
from components.data_versioning.component import data_versioning
from components.evaluation.component import evaluation
from components.fine_tuning.component import fine_tuning
from components.triton_packaging.component import triton_packaging
from pipelines.config.customization_config import Customization
from pipelines.config.platform_config import Platform
from pipelines.definition import pod_spec, run_parameters
from pipelines.definition.customization_pipeline import add_platform_check

PipelineFunction = Callable[..., str]


@dsl.component(base_image=EVALUATION_IMAGE, install_kfp_package=False)
def plan_one(stage: str, configuration: str, sources: List[str] = [], dataset: str = "") -> NamedTuple(  # noqa: UP006, B006
    "Plan", [("config", str), ("inputs", str), ("seed", int), ("versioning", str), ("version", str)]
):
    """Resolve one stage's inputs. Return its section and inputs, the section of data versioning, and the dataset's revision."""
    import json

    from components.common import pipeline_step
    from components.data_curation.reading.source_settings import SourceEntry
    from pipelines.definition import run_parameters
    from pipelines.provenance import lineage
    from pipelines.steps.input_resolution import plan_stage

    with pipeline_step.step_context("plan_one") as s:
        config = run_parameters.parse_customization(configuration)
        if sources:
            config.data_curation.sources = [SourceEntry.model_validate(source) for source in sources]
        run_parameters.require_absolute_paths(config)
        given = plan_stage(stage, config, s.workdir, s.reporter)
        published = lineage.find_revision_uri(dataset, config.data_versioning, s.workdir) if dataset else ""
    versioning = config.data_versioning.model_dump_json()
    return (*given.values(), versioning, json.dumps({"uri": published or f"store:{dataset}"}))


def build(stage: str) -> Callable[[Customization, Platform | None], PipelineFunction]:
    """Return a function that builds the stage's pipeline for a customization and a platform.

    Args:
        stage: One of compilation.SINGLE_STAGE_PIPELINES.
    """

    def build_pipeline(config: Customization, platform: Platform | None = None) -> PipelineFunction:
        default = run_parameters.dump_customization(config)
        default_sources = run_parameters.default_parameters(config)["sources"]
        configure = partial(pod_spec.configure_task, platform=platform)

        def resolve_inputs(**given: Any) -> dsl.PipelineTask:
            task = configure(plan_one(stage=stage, **given), cached=False)
            add_platform_check(task, platform)
            return task

        def select_parameters(planned: dict[str, Any]) -> dict[str, Any]:
            return {name: planned[name] for name in ("config", "inputs", "seed")}

        def curate_data(
            sources: List[str] = default_sources,  # noqa: UP006
            configuration: str = default,
        ) -> str:
            """Curate raw text and publish it as a dataset version.

            Args:
                sources: Training text: files, globs and folders as pods see them.
                configuration: Text of a customization.yaml: data_curation, data_versioning, fine_tuning.base_model, seed.
            """
            planned = resolve_inputs(sources=sources, configuration=configuration).outputs
            curated = configure(data_curation(**select_parameters(planned))).outputs
            dataset = {name: curated[name] for name in ("dataset", "curated_dataset")}
            configure(data_versioning(config=planned["versioning"], **dataset), cached=False)
            return curated["dataset"]  # type: ignore[no-any-return] # kfp's outputs are untyped

        def tune_model(dataset: str, configuration: str = default) -> str:
            """Fine-tune the base model on a dataset of the store.

            Args:
                dataset: Digest of the dataset, as data curation returns it.
                configuration: Text of a customization.yaml: fine_tuning, seed.
            """
            planned = resolve_inputs(configuration=configuration, dataset=dataset).outputs
            tuned = configure(fine_tuning(**select_parameters(planned), dataset=dataset, version=planned["version"]))
            return tuned.outputs["model"]  # type: ignore[no-any-return]

        def evaluate_model(model: str, dataset: str, configuration: str = default) -> str:
            """Evaluate a model of the store against its base and the champion.

            Args:
                model: Digest of the model, as fine-tuning returns it.
                dataset: Digest of the dataset whose test split is evaluated.
                configuration: Text of a customization.yaml: evaluation, fine_tuning, model_registry.name, seed.
            """
            planned = select_parameters(resolve_inputs(configuration=configuration).outputs)
            return configure(evaluation(**planned, model=model, dataset=dataset)).outputs["evaluation"]  # type: ignore[no-any-return]

        def package_model(model: str, configuration: str = default) -> str:
            """Build a Triton model repository from a model of the store, and test the repository in a Triton server.

            Args:
                model: Digest of the model, as fine-tuning returns it.
                configuration: Text of a customization.yaml: triton_packaging, seed.
            """
            planned = select_parameters(resolve_inputs(configuration=configuration).outputs)
            return configure(triton_packaging(**planned, model=model)).outputs["repository"]  # type: ignore[no-any-return]

        functions: dict[str, PipelineFunction] = {
            "data_curation": curate_data,
            "fine_tuning": tune_model,
            "evaluation": evaluate_model,
            "triton_packaging": package_model,
        }
        function = functions[stage]
        return dsl.pipeline(  # type: ignore[no-any-return]
            name=f"tuneline-{stage.replace('_', '-')}",
            description=str(function.__doc__).split("\n")[0],
            pipeline_config=pod_spec.pipeline_config(platform),
        )(function)

    return build_pipeline
