"""Input resolution, the first step of a run: digests of all inputs of the customization.

The step is never cached. It computes the digests of the sources, each stage's code, the base model and the champion. A
stage's plan contains exactly the inputs that its result depends on, so the plan is a complete cache key.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from components.common.artifacts import code_digest, hashing
from components.common.artifacts.artifact_folder import REWARD_MODEL
from components.common.launch import launcher_settings
from components.common.models import compute_devices, model_loading
from components.common.models.model_loading import ModelOutline
from components.common.pipeline_step import STAGE_BY_ARTIFACT
from components.common.runtime import mounts
from components.common.runtime.errors import ConfigurationError
from components.common.runtime.reporters import Reporter
from components.common.workspace import artifact_store
from components.common.workspace.artifact_store import Workdir
from components.evaluation import engine_loading
from components.evaluation.stage import INCUMBENT_KIND_HINT
from components.evaluation.tasks import file_digests, task_preflight
from components.evaluation.tasks.task_preflight import TaskWorkload
from components.evaluation.tasks.tool_calls import ToolCalls
from components.fine_tuning import adapters, distillation, model_support, reward_sources, rewards
from components.fine_tuning.config import PREVIOUS, pop_placement
from components.model_registry.stage import RegisteredModel, find_by_digest, find_champion
from components.triton_packaging import quantization, triton_installation
from pipelines.config.customization_config import Customization, check_consistency
from pipelines.steps import curation_inputs, policy_preflight
from pipelines.steps.curation_inputs import CurationInputs

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

PROOF_DISABLED = "triton_packaging.prove is off"
PLACEMENT_KEYS = ("engine", "ray_address", "workers")  # settings of data_curation that do not affect its result
Plan = dict[str, Any]


@dataclass(frozen=True)
class StagePlans:
    """One plan per stage."""

    data_curation: Plan
    data_versioning: Plan
    fine_tuning: Plan
    evaluation: Plan
    triton_packaging: Plan
    model_registry: Plan

    def as_parameters(self) -> dict[str, Any]:
        """Return the outputs of the step `resolve`, in order: the parameters of the later steps."""
        parameters: dict[str, Any] = {"seed": self.fine_tuning["seed"]}
        for stage, plan in asdict(self).items():
            given = list_parameters(plan)
            parameters[stage] = given["config"]
            if stage in STAGE_BY_ARTIFACT.values():  # the other stages are never cached
                parameters[f"{stage}_inputs"] = given["inputs"]
        registry = self.model_registry
        return parameters | {"finetune_key": registry["finetune_key"], "incumbent": registry["incumbent"] or ""}


def list_parameters(plan: Plan) -> dict[str, Any]:
    """Return a plan as parameters of the stage's component: `config`, `inputs` and `seed`.

    The first two are canonical JSON, so that equal plans give equal parameters. A parameter of the type STRUCT would change them:
    it has no integers, and kfp.local accepts no null.
    """
    inputs = {name: value for name, value in plan.items() if name not in ("config", "seed")}
    texts = {
        name: hashing.canonical_json(value).decode() for name, value in (("config", plan["config"]), ("inputs", inputs))
    }
    return {**texts, "seed": plan["seed"]}


def resolve_plans(config: Customization, workdir: Workdir, reporter: Reporter) -> StagePlans:
    """Resolve all inputs and return the plans of the stages.

    Raises:
        ConfigurationError: a source or a model does not exist, the base model cannot be trained with the recipe, or the
            run would promote a model that the release policy refuses.
    """
    check_consistency(config)
    reporter.step("resolving the sources")
    inputs = fetch_inputs(config, workdir, reporter)
    reporter.step("resolving the base model")
    base = model_loading.resolve_base_model(config.fine_tuning.base_model, reporter)
    model_loading.check_base_model(base)
    outline = ModelOutline(model_loading.load_configuration(base.path), model_loading.load_tokenizer(base.path), base)
    initial_sha256 = check_recipes(config, base, outline.config)
    config = pin_training_models(config, base, reporter)
    workloads = check_tasks_and_policy(config, outline, reporter)
    reporter.step("resolving the champion")
    reason = get_unproven_reason(config)
    if reason:
        reporter.note(format_unproven_warning(reason))
    if warning := mounts.format_database_warning(os.environ.get("MLFLOW_TRACKING_URI", "")):
        reporter.note(warning)

    def find_incumbent(finetune_key: str) -> str | None:
        incumbent = _fetch_incumbent(config, workdir, finetune_key, reporter)
        _check_incumbent_kind(config, workdir, incumbent)
        return incumbent

    return build_plans(config, inputs, base.sha256, find_incumbent, reason, workloads, initial_sha256)


def check_customization(config: Customization, workdir: Workdir, reporter: Reporter) -> None:
    """Make the checks of `resolve_plans` that do not fetch the models, for a later customization of a chain.

    Raises:
        ConfigurationError, InputError: see `resolve_plans`.
    """
    fetch_inputs(config, workdir, reporter)
    outline = model_loading.load_outline(config.fine_tuning.base_model)
    if outline.base:
        model_loading.check_base_model(outline.base)
    check_recipes(config, outline.base, outline.config)
    check_training_models(config, outline)
    check_champion_kind(config, workdir)
    check_tasks_and_policy(config, outline, reporter)


def fetch_inputs(config: Customization, workdir: Workdir, reporter: Reporter) -> CurationInputs:
    """Return the inputs of the curation after fetching the earlier revisions."""
    inputs = curation_inputs.list_inputs(config, workdir, reporter)
    curation_inputs.fetch_earlier_revisions(config, inputs.earlier_revisions, workdir, reporter)
    return inputs


def check_recipes(
    config: Customization, base: model_loading.LocalBaseModel | None, model_config: PretrainedConfig
) -> str | None:
    """Check that the base model can be trained with the recipes, and quantized. Return the initial adapter's digest."""
    for recipe in config.fine_tuning.recipes.values():
        model_support.check_model(recipe, model_config)
    if not config.fine_tuning.objective_spec.scores_answers:  # a reward model is not packaged
        quantization.check_quantizable(config.triton_packaging, model_config)
    if launcher_settings.load_settings().entry.uses_this_machine:
        rewards.check_machine(config.fine_tuning.grpo.rewards)
    return find_initial_adapter(config, base.sha256 if base else None, model_config)


def check_tasks_and_policy(config: Customization, outline: ModelOutline, reporter: Reporter) -> list[TaskWorkload]:
    """Return the workload of the evaluation's tasks after the checks of the tasks and of the release policy."""
    workloads = check_evaluation_tasks(config, lambda: (outline.tokenizer, outline.config), reporter)
    policy_preflight.check_policy(config, outline.base, workloads, reporter)
    return workloads


def find_initial_adapter(config: Customization, base_sha256: str | None, model_config: PretrainedConfig) -> str | None:
    """Return the digest of the initial adapter after its checks, or None; see `adapters.open_initial_adapter`."""
    recipes = config.fine_tuning.recipes.values()
    opened = [adapters.open_initial_adapter(recipe, base_sha256, model_config) for recipe in recipes]
    return opened[0].sha256 if opened[0] else None


def pin_training_models(config: Customization, base: model_loading.LocalBaseModel, reporter: Reporter) -> Customization:
    """Return the customization with the digests of its teacher and its reward models, after their checks."""
    if launcher_settings.load_settings().entry.uses_this_machine:
        rewards.check_services(config.fine_tuning.grpo.rewards)
    teacher = distillation.resolve_teacher(config.fine_tuning, base.path, reporter)
    tuning = distillation.pin_teacher(config.fine_tuning, teacher)
    reward_models = reward_sources.open_reward_models(tuning, base.path)
    reward_sources.resolve_bases(reward_models, reporter)  # so that a missing one does not end the fine-tuning step
    tuning = reward_sources.pin_reward_models(tuning, reward_models)
    return config.model_copy(update={"fine_tuning": tuning})


def check_training_models(config: Customization, outline: ModelOutline) -> Customization:
    """Check the teacher and the reward models, and return the customization with their digests.

    The digest of a teacher that is not on this machine stays unknown, as does a reward model that an earlier customization
    of the chain has yet to train.
    """
    tuning = config.fine_tuning
    if not any(reward.model == PREVIOUS for reward in tuning.grpo.rewards):
        tokenizer = outline.base.path if outline.base else None
        opened = reward_sources.open_reward_models(tuning, tokenizer)
        tuning = reward_sources.pin_reward_models(tuning, opened)
    if source := tuning.distillation.teacher:
        with model_loading.replace_error_key(distillation.TEACHER_KEY):
            teacher = model_loading.load_outline(source)
        distillation.check_vocabulary(source, teacher.tokenizer, teacher.config, outline.tokenizer, outline.config)
        model_support.check_context(tuning, teacher.config, distillation.TEACHER_KEY, source)
        tuning = distillation.pin_teacher(tuning, teacher.base)
    return config.model_copy(update={"fine_tuning": tuning})


def _check_tasks_with(
    base: model_loading.LocalBaseModel, config: Customization, reporter: Reporter
) -> list[TaskWorkload]:
    return check_evaluation_tasks(
        config, lambda: (model_loading.load_tokenizer(base.path), model_loading.load_configuration(base.path)), reporter
    )


def check_evaluation_tasks(
    config: Customization,
    load_base: Callable[[], tuple[PreTrainedTokenizerBase, PretrainedConfig]],
    reporter: Reporter,
) -> list[TaskWorkload]:
    """Return the workload of the evaluation's tasks, after checking all that can be checked without a dataset.

    Args:
        config: The customization.
        load_base: Returns the base model's tokenizer and configuration.
        reporter: Receives steps and notes.

    Raises:
        EngineMissingError: evaluation.engine is vllm, and vLLM is not installed.
        ConfigurationError, InputError: The evaluation would raise the same error after the training.
    """
    evaluation = config.evaluation
    engine_loading.check_vllm_installed(evaluation.engine)
    if not task_preflight.should_check_tasks(evaluation.tasks):
        return []
    reporter.step("checking the evaluation's tasks")
    tokenizer, configuration = load_base()
    context = getattr(configuration.get_text_config(decoder=True), "max_position_embeddings", None)
    return task_preflight.check_tasks(
        evaluation.tasks, tokenizer, config.seed, evaluation.max_length, reporter, context
    )


def build_plans(
    config: Customization,
    inputs: CurationInputs,
    base_sha256: str,
    find_incumbent: Callable[[str], str | None],
    unproven_reason: str | None,
    workloads: Sequence[TaskWorkload],
    initial_adapter_sha256: str | None = None,
) -> StagePlans:
    """Return the plans for resolved inputs.

    Args:
        find_incumbent: Returns the digest of the model to compare with for a recipe's key.
        unproven_reason: The reason why the package cannot be proven on this machine; None if it can be proven.
    """
    curation = build_curation_plan(config, inputs)
    tuning = build_fine_tuning_plan(config, base_sha256, initial_adapter_sha256)
    # On another device the same recipe gives a model that differs in its last bits, so the device is part of the key.
    finetune_key = hashing.digest(
        [drop_placement(curation), drop_placement(tuning), model_loading.describe_arithmetic()]
    )
    incumbent = find_incumbent(finetune_key)
    return StagePlans(
        data_curation=curation,
        data_versioning=_build_plan("data_versioning", config),
        fine_tuning=tuning,
        evaluation=build_evaluation_plan(config, incumbent, workloads),
        triton_packaging=build_packaging_plan(config, unproven_reason),
        model_registry={
            **_build_plan("model_registry", config),
            "finetune_key": finetune_key,
            "incumbent": incumbent,
        },
    )


def build_curation_plan(config: Customization, inputs: CurationInputs) -> Plan:
    """Return the curation plan. `where` holds the settings that do not affect the result."""
    plan = {**_build_plan("data_curation", config), **inputs.as_plan()}
    return {**plan, "where": {name: plan["config"].pop(name) for name in PLACEMENT_KEYS}}


def drop_placement(plan: Plan) -> Plan:
    """Return a plan without `where`, for the cache key."""
    return {name: value for name, value in plan.items() if name != "where"}


def build_fine_tuning_plan(config: Customization, base_sha256: str, initial_adapter_sha256: str | None = None) -> Plan:
    """Return the fine-tuning plan. `where` holds the settings that do not affect the result."""
    launcher = launcher_settings.load_settings()
    plan = {
        **_build_plan("fine_tuning", config),
        "base_sha256": base_sha256,
        **({"initial_adapter_sha256": initial_adapter_sha256} if initial_adapter_sha256 else {}),
        "threads": os.environ.get("TUNELINE_THREADS", ""),
        **({"launcher": launcher.describe_hardware()} if not launcher.entry.uses_this_machine else {}),
    }
    tuning = config.fine_tuning
    if launcher.entry.uses_this_machine and None in (tuning.max_length, tuning.micro_batch_size):
        # The settings that are chosen depend on the memory. On a cluster the training's pod may have another limit.
        device = compute_devices.select_device(tuning.device)
        plan["memory_gb"] = round(compute_devices.get_total_memory_bytes(device) / 1e9)
    where = pop_placement(plan["config"])
    if metrics := list_test_call_metrics(config):
        where["tool_call_metrics"] = metrics
    return {**plan, "where": where} if where else plan


def list_test_call_metrics(config: Customization) -> list[str]:
    """Return the metrics of the tool_calls tasks that evaluate the dataset; empty without such a task."""
    tasks = [task for task in config.evaluation.tasks if isinstance(task, ToolCalls) and not task.data]
    return sorted({metric for task in tasks for metric in task.metrics})


def build_evaluation_plan(config: Customization, incumbent: str | None, workloads: Sequence[TaskWorkload]) -> Plan:
    """Return the evaluation plan; `incumbent` is the digest of the model to compare with."""
    plan = {
        **_build_plan("evaluation", config),
        "incumbent": incumbent,
        "files": file_digests.digest_task_files(config.evaluation.tasks),
    }
    if others := {load.settings.name: load.digest for load in workloads if not load.is_identified_by_files}:
        plan["asked"] = others
    return plan


def build_packaging_plan(config: Customization, unproven_reason: str | None) -> Plan:
    """Return the packaging plan."""
    return {**_build_plan("triton_packaging", config), "unproven": unproven_reason}


def plan_stage(stage: str, config: Customization, workdir: Workdir, reporter: Reporter) -> dict[str, Any]:
    """Return the parameters of the component of a stage that runs alone.

    They equal those of the stage in a whole run, but only the stage's own inputs are resolved. An evaluation
    compares with the champion.

    Args:
        stage: data_curation, fine_tuning, evaluation or triton_packaging.
        config: The customization.
        workdir: The workdir of the run.
        reporter: Receives steps and notes.

    Raises:
        ConfigurationError: an input does not exist.
    """
    check_consistency(config, can_promote=False)
    if stage == "data_curation":
        plan = build_curation_plan(config, fetch_inputs(config, workdir, reporter))
    elif stage == "triton_packaging":
        plan = build_packaging_plan(config, get_unproven_reason(config))
    else:
        base = model_loading.resolve_base_model(config.fine_tuning.base_model, reporter)
        if stage == "fine_tuning":
            initial_sha256 = check_recipes(config, base, model_loading.load_configuration(base.path))
            config = pin_training_models(config, base, reporter)
            plan = build_fine_tuning_plan(config, base.sha256, initial_sha256)
        else:
            workloads = _check_tasks_with(base, config, reporter)
            plan = build_evaluation_plan(config, _fetch_incumbent(config, workdir, "", reporter), workloads)
    return list_parameters(plan)


def get_unproven_reason(config: Customization) -> str | None:
    """Return the reason why the package cannot be proven on this machine; None if it can be proven."""
    return (
        triton_installation.unprovable_reason(config.triton_packaging.backend)
        if config.triton_packaging.prove
        else PROOF_DISABLED
    )


def format_unproven_warning(reason: str) -> str:
    """Return the warning about an unproven package."""
    action = (
        "Set triton_packaging.prove to true to test the package."
        if reason == PROOF_DISABLED
        else triton_installation.installation_hint()
    )
    return f"the model will be packaged unproven and cannot be promoted: {reason}. {action}"


def _build_plan(stage: str, config: Customization) -> Plan:
    return {
        "config": getattr(config, stage).model_dump(mode="json"),
        "seed": config.seed,
        "code": code_digest.code_sha256(stage),
    }


def select_incumbent(found: RegisteredModel | None, finetune_key: str) -> str | None:
    """Return the digest of the model to compare the candidate with: the champion.

    If the champion was trained with the current recipe, the candidate will be identical to it. In this case, return the
    model that the champion was compared with, so that the cached evaluation of the champion applies.
    """
    if found is None:
        return None
    return found.incumbent_sha256 if found.finetune_key == finetune_key else found.model_sha256


def check_champion_kind(config: Customization, workdir: Workdir) -> None:
    """Raise ConfigurationError if one of model and champion is a reward model; not if this store lacks the champion."""
    champion = find_champion(config.model_registry.name)
    _check_incumbent_kind(config, workdir, champion.model_sha256 if champion else None)


def _check_incumbent_kind(config: Customization, workdir: Workdir, incumbent: str | None) -> None:
    """Raise ConfigurationError if one of candidate and incumbent is a reward model, and the other is not."""
    manifest = artifact_store.read_manifest(workdir.store, incumbent) if incumbent else None
    is_reward_model = config.fine_tuning.objective_spec.scores_answers
    names = {"model": "language model", REWARD_MODEL: "reward model"}
    if manifest and (manifest.kind == REWARD_MODEL) != is_reward_model:
        raise ConfigurationError(
            f"the champion of {config.model_registry.name} is a {names[manifest.kind]}; objective "
            f"{config.fine_tuning.objective} trains a {names[REWARD_MODEL if is_reward_model else 'model']}",
            hint=INCUMBENT_KIND_HINT,
        )


def _fetch_incumbent(config: Customization, workdir: Workdir, finetune_key: str, reporter: Reporter) -> str | None:
    """Return the digest of the model to compare with, fetched from the registry if this store lacks it."""
    found = find_champion(config.model_registry.name)
    incumbent = select_incumbent(found, finetune_key)
    if found is None or incumbent is None or artifact_store.has_artifact(workdir.store, incumbent):
        return incumbent
    holder = found if incumbent == found.model_sha256 else find_by_digest(found.name, incumbent)
    if holder is None:
        reporter.note(
            f"the model that version {found.version} was compared with is neither in this store nor in the "
            f"registry; the candidate is compared with version {found.version} instead"
        )
        holder = found
    if not artifact_store.has_artifact(workdir.store, holder.model_sha256):
        reporter.note(f"fetching version {holder.version} of {holder.name} from the registry for the comparison")
        with artifact_store.job_folder(workdir.store) as folder:
            artifact_store.add_artifact(workdir.store, holder.fetch(folder / "incumbent"))
    return holder.model_sha256
