"""The customization pipeline: platform check, input resolution, then the stages.

Packaging and promotion are gated on the evaluation.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, List, NamedTuple  # noqa: UP035 - kfp reads List[str], not list[str]

from kfp import dsl

from components.common.runtime.container_images import EVALUATION_IMAGE
from components.data_curation.component import data_curation
from components.data_versioning.component import data_versioning
from components.evaluation.component import evaluation
from components.fine_tuning.component import fine_tuning
from components.model_registry.component import promotion, registration
from components.triton_packaging.component import triton_packaging
from pipelines.config.customization_config import Customization
from pipelines.config.platform_config import Platform
from pipelines.definition import pod_spec, run_parameters
from pipelines.definition.pipeline_names import CUSTOMIZATION_PIPELINE
from pipelines.steps import platform_check


class PipelineOutputs(NamedTuple):
    """Outputs of the pipeline: digests by kind, the dataset's revision, the verdict."""

    dataset: str
    version: str
    model: str
    evaluation: str
    verdict: str


@dsl.component(base_image=EVALUATION_IMAGE, install_kfp_package=False)
def check_the_platform(wanted: str, found: dsl.Output[dsl.Markdown]):  # type: ignore[no-untyped-def]
    """Check that pods can use the volume, disk space, secrets and MLflow of platform.yaml. `wanted`: names and paths."""
    import json
    from pathlib import Path

    from components.common import pipeline_step
    from pipelines.steps import platform_check

    with pipeline_step.step_context(platform_check.STEP_NAME, tracked=False) as s:
        platform_check.check_platform(json.loads(wanted), s.workdir, s.reporter, Path(found.path))


@dsl.component(base_image=EVALUATION_IMAGE, install_kfp_package=False)
def resolve(  # kfp copies this source into the step, so its parameters and outputs are written out in full
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
        ("seed", int),
        ("data_curation", str),
        ("data_curation_inputs", str),
        ("data_versioning", str),
        ("fine_tuning", str),
        ("fine_tuning_inputs", str),
        ("evaluation", str),
        ("evaluation_inputs", str),
        ("triton_packaging", str),
        ("triton_packaging_inputs", str),
        ("model_registry", str),
        ("finetune_key", str),
        ("incumbent", str),
    ],
):
    """Resolve all inputs; return each stage's section of the customization and its inputs. `compiled`: the parameters' defaults."""
    given = dict(locals())
    import json

    from components.common import pipeline_step
    from pipelines.definition import run_parameters
    from pipelines.steps.input_resolution import resolve_plans

    with pipeline_step.step_context("resolve") as s:
        config = run_parameters.combine_parameters(given, json.loads(compiled), configuration)
        plans = resolve_plans(config, s.workdir, s.reporter)
    return tuple(plans.as_parameters().values())


@dsl.component(base_image=EVALUATION_IMAGE, install_kfp_package=False)
def report(dataset: str, version: str, model: str, evaluation: str, registered: str, page: dsl.Output[dsl.HTML]):  # type: ignore[no-untyped-def]
    """Write the run's report: data, training, evaluation, package proof, lineage, time and cost."""
    import json

    from components.common import pipeline_step
    from pipelines.steps import report_data

    with pipeline_step.step_context("report") as s:
        digests = {"dataset": dataset, "model": model, "evaluation": evaluation}
        report_data.publish_report(s, digests, json.loads(version), json.loads(registered), page.path)


@dsl.component(base_image=EVALUATION_IMAGE, install_kfp_package=False)
def finish(
    status: dsl.PipelineTaskFinalStatus, settings: str, page: dsl.Output[dsl.HTML], deployed_to: str = ""
) -> NamedTuple("Outputs", [("dataset", str), ("version", str), ("model", str), ("evaluation", str), ("verdict", str)]):
    """Report the end of the run, also after a failure.

    Args:
        status: State of the run.
        settings: See `run_end.report_end`, as JSON.
        page: Page about the end of the run.
        deployed_to: Server to which the promotion pipeline deploys; empty for none.

    Returns:
        The outputs of the pipeline; empty texts if the run failed.
    """
    import json
    from pathlib import Path

    from components.common import pipeline_step
    from pipelines.steps import run_end
    from pipelines.steps.stage_names import STEP_TITLES

    given = json.loads(settings)
    given["last_steps"] += [STEP_TITLES["deploy"]] if deployed_to else []
    with pipeline_step.step_context("finish", tracked=False) as s:
        outputs = run_end.report_end(status.state, given, s.reporter, Path(page.path)).outputs
    return tuple(outputs.get(name, "") for name in ("dataset", "version", "model", "evaluation", "verdict"))


@contextlib.contextmanager
def report_end(
    platform: Platform | None, last_step: str = "report", prefix: str = "", **arguments: Any
) -> Iterator[dsl.PipelineTask | None]:
    """Run the task `finish` after the tasks of the block, successful or not.

    Args:
        platform: The cluster; None for kfp.local, which runs no such task.
        last_step: The step that ends a successful run.
        prefix: Prefix of that task's name.
        arguments: Further arguments of `finish`.

    Yields:
        The task; None without one.
    """
    if platform is None:
        yield None
        return
    services = [
        {"variable": variable, "name": each.name, "events": each.events}
        for variable, each in platform.notification_variables.items()
    ]
    last_steps = [pod_spec.build_title(last_step, prefix)]
    settings = {"ui": platform.run.ui, "notifications": services, "last_steps": last_steps}
    task = finish(settings=json.dumps(settings, sort_keys=True), **arguments)
    ended = pod_spec.configure_task(task, platform, cached=False)
    with dsl.ExitHandler(ended, name="run"):
        yield ended


def add_platform_check(task: dsl.PipelineTask, platform: Platform | None) -> None:
    """Run the platform check before the task: a broken platform fails within seconds. Local runs need no check."""
    if platform:
        wanted = json.dumps(platform_check.describe_expected(platform))
        task.after(pod_spec.configure_task(check_the_platform(wanted=wanted), platform, cached=False))


def add_stages(
    plans: dsl.PipelineTask,
    configure: Callable[..., dsl.PipelineTask],
    prefix: str = "",
    *,
    can_package: bool = True,
) -> tuple[PipelineOutputs, dsl.PipelineTask]:
    """Add the tasks of a customization after its `resolve`. Return its outputs and its last task.

    Args:
        plans: The task `resolve` of the customization.
        configure: Configures a task, see `pod_spec.configure_task`.
        prefix: Prefix of the tasks' names.
        can_package: Whether the model may be packaged; False for a reward model.
    """

    def component(function: dsl.base_component.BaseComponent) -> dsl.base_component.BaseComponent:
        return pod_spec.name_component(function, prefix)

    def select_parameters(stage: str) -> dict[str, Any]:
        return {
            "config": plans.outputs[stage],
            "inputs": plans.outputs[f"{stage}_inputs"],
            "seed": plans.outputs["seed"],
        }

    curated = configure(component(data_curation)(**select_parameters("data_curation")))
    dataset, curated_dataset = curated.outputs["dataset"], curated.outputs["curated_dataset"]
    # Versioning checks that the remote still has the revision, which no cache key can express.
    versioned = configure(
        component(data_versioning)(
            config=plans.outputs["data_versioning"], dataset=dataset, curated_dataset=curated_dataset
        ),
        cached=False,
    )
    version = versioned.outputs["version"]
    tuned = configure(
        component(fine_tuning)(
            **select_parameters("fine_tuning"), dataset=dataset, version=version, curated_dataset=curated_dataset
        )
    )
    model, tuned_model = tuned.outputs["model"], tuned.outputs["tuned_model"]
    evaluated = configure(
        component(evaluation)(
            **select_parameters("evaluation"),
            model=model,
            dataset=dataset,
            curated_dataset=curated_dataset,
            tuned_model=tuned_model,
        )
    )
    lineage = {
        "version": version,
        "dataset": dataset,
        "model": model,
        "evaluation": evaluated.outputs["evaluation"],
    }
    registry = plans.outputs["model_registry"]
    register = partial(component(registration), config=registry, finetune_key=plans.outputs["finetune_key"])
    if can_package:
        group = f"{prefix}-" if prefix else ""
        with dsl.If(evaluated.outputs["packaging"] == "yes", name=f"{group}accepted"):
            packaged = configure(
                component(triton_packaging)(
                    **select_parameters("triton_packaging"),
                    model=model,
                    tuned_model=tuned_model,
                    evaluation=lineage["evaluation"],
                )
            )
            package = {name: packaged.outputs[name] for name in ("repository", "triton_package")}
            registered = configure(register(tuned_model=tuned_model, **package, **lineage), cached=False)
            promoted = configure(
                component(promotion)(
                    config=registry, incumbent=plans.outputs["incumbent"], registered=registered.outputs["registered"]
                ),
                cached=False,
            )
        with dsl.Else(name=f"{group}not-packaged"):
            kept = configure(register(tuned_model=tuned_model, **lineage), cached=False)
        outcome = dsl.OneOf(promoted.outputs["registered"], kept.outputs["registered"])
    else:
        outcome = configure(register(tuned_model=tuned_model, **lineage), cached=False).outputs["registered"]
    reported = configure(component(report)(**lineage, registered=outcome), cached=False)
    return PipelineOutputs(dataset, version, model, lineage["evaluation"], evaluated.outputs["verdict"]), reported


def build(config: Customization, platform: Platform | None = None) -> Callable[..., dsl.PipelineTask]:
    """Return the pipeline function that kfp compiles, with this customization as its parameters' defaults.

    Args:
        platform: The cluster whose pods the tasks are configured for; None for kfp.local.
    """
    default = run_parameters.default_parameters(config)
    compiled = json.dumps(default, sort_keys=True)
    budget = config.budget if config.budget.limits else None
    configure = partial(pod_spec.configure_task, platform=platform, budget=budget)

    @dsl.pipeline(
        name=CUSTOMIZATION_PIPELINE,
        description="Customize a language model on your own text and deploy it.",
        pipeline_config=pod_spec.pipeline_config(platform),
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
        configuration: str = run_parameters.dump_remaining_keys(config),
    ) -> PipelineOutputs:
        """Curate, version, fine-tune, evaluate; package, register and promote an accepted candidate.

        A reward model is registered without a package.

        Args:
            sources: Training text: files, globs and folders as pods see them, for example ["/data/raw/*.jsonl"]. demo:python-docs is the demo dataset.
            base_model: Base model: a folder on the volume in the Hugging Face layout, store:<sha256> as printed by tuneline models import, hf://org/name@revision, or embedded:smollm2-135m-instruct.
            model_name: Name of the registered model in MLflow; the run registers a new version.
            adaptation: Parameters to train. lora: a small update of frozen weights. full: all weights (16 bytes per parameter).
            max_steps: Number of optimizer steps. 0: train for `epochs` instead.
            epochs: Number of passes over the training rows; used only if max_steps is 0. 0: the default of the objective.
            learning_rate: Peak learning rate. Training diverges if the rate is too high. 0: chosen from adaptation, objective and model size.
            batch_size: Rows per optimizer step, a multiple of fine_tuning.micro_batch_size. 0: 16.
            max_length: Tokens per row in training and evaluation; longer rows are truncated and counted. 0: a length that fits 95% of the rows, within the limits of context and memory.
            seed: Seed of the split, training and confidence intervals. Equal seeds and inputs give equal models.
            auto_promote: Promote an accepted and proven version to champion immediately. False: a person promotes it.
            configuration: All other keys, as the text of a customization.yaml, for example {evaluation: {max_items: 200}}. A parameter that is changed in this form overrides its default; a key with two different values is rejected.
        """
        given = {name: value for name, value in locals().items() if name in {*default, "configuration"}}
        with report_end(platform) as ended:
            plans = configure(resolve(**given, compiled=compiled), cached=False)
            add_platform_check(plans, platform)
            outputs = add_stages(plans, configure)[0]
        if ended is None:
            return outputs
        return PipelineOutputs(*(ended.outputs[name] for name in PipelineOutputs._fields))

    return customization  # type: ignore[no-any-return] # kfp's decorators are untyped
