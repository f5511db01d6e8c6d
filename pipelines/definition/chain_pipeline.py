"""The pipeline of a chain of customizations: each one's stages in order, until a gate refuses a model."""

import contextlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import List, NamedTuple  # noqa: UP035 - kfp reads List[str], not list[str]

from kfp import dsl

from components.common.runtime.container_images import EVALUATION_IMAGE
from pipelines.definition import pod_spec, run_parameters
from pipelines.definition.chain_steps import ChainStep
from pipelines.definition.customization_pipeline import add_platform_check, add_stages, report_end
from pipelines.definition.pipeline_names import CHAIN_PIPELINE


@dsl.component(base_image=EVALUATION_IMAGE, install_kfp_package=False)
def check_chain(configurations: List[str], compiled: str):  # type: ignore[no-untyped-def] # noqa: UP006
    """Check all customizations before the first one runs. `compiled`: `configurations` at compile time, as JSON."""
    import json

    from components.common import pipeline_step
    from pipelines.definition import run_parameters
    from pipelines.steps import chain_check

    with pipeline_step.step_context("check_chain", tracked=False) as s:
        chain = run_parameters.parse_chain(configurations)
        run_parameters.check_compiled_chain(chain, json.loads(compiled))
        chain_check.check_later_customizations(chain, s.workdir, s.reporter)


@dsl.component(base_image=EVALUATION_IMAGE, install_kfp_package=False)
def resolve(
    configurations: List[str],  # noqa: UP006
    position: int,
    tuned_model: str = "",
    reward_model: str = "",
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
    """Resolve the inputs of the customization at `position`; the models are digests of earlier customizations' models."""
    from components.common import pipeline_step
    from pipelines.config import customization_chain
    from pipelines.definition import run_parameters
    from pipelines.steps.input_resolution import resolve_plans

    with pipeline_step.step_context("resolve") as s:
        link = run_parameters.parse_chain(configurations)[position]
        config = customization_chain.insert_models(link, tuned_model, reward_model)
        plans = resolve_plans(config, s.workdir, s.reporter)
    return tuple(plans.as_parameters().values())


def build(steps: Sequence[ChainStep]) -> Callable[..., None]:
    """Return the pipeline function that kfp compiles, with the customizations as defaults of its parameter."""
    platform = steps[0].platform
    default = run_parameters.dump_chain([step.link for step in steps])
    compiled = json.dumps(default)

    @dsl.pipeline(
        name=CHAIN_PIPELINE,
        description=f"Customize a language model in sequence: {', '.join(step.name for step in steps)}.",
        pipeline_config=pod_spec.pipeline_config(platform),
    )
    def chain(configurations: List[str] = default) -> None:  # noqa: UP006
        """Run customizations in sequence until a gate refuses a model.

        Args:
            configurations: Texts of customization.yaml files, in order. One without fine_tuning.base_model tunes the model before it.
        """
        models: list[str] = []
        with report_end(platform, prefix=steps[-1].name), contextlib.ExitStack() as conditions:
            last = pod_spec.configure_task(
                check_chain(configurations=configurations, compiled=compiled), platform, cached=False
            )
            add_platform_check(last, platform)
            for position, step in enumerate(steps):
                config = step.link.customization
                configure = partial(
                    pod_spec.configure_task,
                    platform=step.platform,
                    budget=config.budget if config.budget.limits else None,
                    prefix=step.name,
                )
                used = {"tuned_model": step.link.tuned, "reward_model": step.link.rewarded_by}
                earlier = {name: models[index] for name, index in used.items() if index is not None}
                plans = pod_spec.name_component(resolve, step.name)(
                    configurations=configurations, position=position, **earlier
                )
                outputs, reported = add_stages(
                    configure(plans, cached=False).after(last),
                    configure,
                    step.name,
                    can_package=not step.link.trains_reward_model,
                )
                last = reported
                models.append(outputs.model)
                if position < len(steps) - 1:
                    conditions.enter_context(dsl.If(outputs.verdict != "refused", name=f"{step.name}-not-refused"))

    return chain  # type: ignore[no-any-return] # kfp's decorators are untyped
