"""Training with TRL and PEFT in one or several processes: checkpoints, resume, and selection of the best weights."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.common.cost import budgets
from components.common.cost.budgets import BudgetClock, BudgetReachedError
from components.common.models import adapter_merging, compute_devices, model_loading, model_shape, resource_formulas
from components.common.models.model_loading import LocalBaseModel
from components.common.runtime import process_control
from components.common.runtime.errors import InterruptedRunError
from components.common.runtime.reporters import Reporter
from components.common.workspace import job_folders
from components.fine_tuning import (
    acceleration,
    adapters,
    batch_order,
    callbacks,
    checkpoints,
    context_extension,
    mixing,
    model_support,
    muon,
    packing_isolation,
    rewards,
    sample_answers,
    sharding,
    token_cache,
    trainers,
    training_health,
    training_plan,
    varlen_attention,
)
from components.fine_tuning.acceleration import ComputeSettings
from components.fine_tuning.callbacks import TrainingEvents
from components.fine_tuning.config import FineTuningConfig, Recipe
from components.fine_tuning.optimizers import OPTIMIZERS
from components.fine_tuning.rewards import RewardInputs
from components.fine_tuning.token_cache import TokenizedDataset
from components.fine_tuning.training_plan import TrainingSteps

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainingArguments


LOCK_WAIT_SECONDS = job_folders.LOCK_STALE_AFTER_SECONDS + 30.0  # for a training run that is being stopped


@dataclass(frozen=True)
class TrainingJob:
    """Inputs of a training run, serializable for another process.

    `tokens`, `state`, `output` and `initial_adapter` are paths of folders. `budget` is the result of `BudgetClock.dump`.
    `reward_bases` has the folder of the base model of each reward model by the folder of the reward model.
    """

    base_path: str
    base_sha256: str
    base_uri: str
    config: dict[str, Any]
    seed: int
    tokens: str
    state: str
    output: str
    initial_adapter: str = ""
    budget: dict[str, Any] = field(default_factory=dict)
    reward_bases: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingResult:
    """Metrics of a training run, including the steps before a resume. Units: seconds, bytes, FLOP/s.

    `rows_seen` counts a row once per draw. `sources` is the result of `mixing.summarize_shares`; empty with packing, and
    with one source and no mixing settings. `choices` has one sentence per compute setting. `startup` has the duration
    of each startup phase. `alarms` has the step, the sentence and the factor on the learning rate of the first alarm of a
    guard; of all alarms if they lower the learning rate, also at its lower limit.
    """

    steps: int
    best_step: int | None
    tokens: int
    train_loss: float
    validation_loss: float | None
    validation_loss_before: float | None
    tokens_per_second: float
    step_tokens_per_second: float
    flops_per_second: float | None
    mfu: float | None
    peak_memory: int
    waited_share: float
    resumed_from: int | None
    stopped_early: bool
    parameters: dict[str, int]
    device: str
    processes: int
    rows_seen: int
    epochs: float
    warmup_steps: int
    sources: list[dict[str, Any]]
    choices: list[str]
    alarms: list[dict[str, Any]] = field(default_factory=list)
    startup: dict[str, float] = field(default_factory=dict)


class StartupTimer:
    """Timer of the startup phases, from the command to the first step, in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Add the duration of the block to `phase`."""
        start = time.perf_counter()
        yield
        self.seconds[phase] = round(self.seconds.get(phase, 0.0) + time.perf_counter() - start, 3)


def train(job: TrainingJob, reporter: Reporter, tokenizer: PreTrainedTokenizerBase | None = None) -> TrainingResult:
    """Train to the end of the recipe and write the weights of the best checkpoint to `job.output`.

    Training resumes from the newest complete checkpoint in `job.state`. The first process holds a lock on `job.state`,
    so that no other training writes there, whoever started it; it waits for a training run that is being stopped.

    Args:
        job: Inputs and folders.
        reporter: Receives progress and metrics.
        tokenizer: The base model's tokenizer. Default: load it.

    Raises:
        ConfigurationError: this machine cannot train the recipe, or packed rows attend to each other.
        EngineMissingError: a package that the recipe needs is not installed.
        TrainingError: a loss is not finite, the strategy is not in effect, or the merged model differs.
        InterruptedRunError: SIGTERM or SIGINT interrupted the training; its last step is saved.
        BudgetReachedError: a budget is used up; the last step is saved.
        BusyError: another training holds the lock, or took it over from this one.
    """
    with ExitStack() as cleanup:
        if os.environ.get("RANK", "0") != "0":
            return _train(job, reporter, tokenizer, lambda: None, cleanup)
        lock = job_folders.folder_lock(
            Path(job.state), job_folders.WRITER_LOCK_FILENAME, wait_seconds=LOCK_WAIT_SECONDS
        )
        return _train(job, reporter, tokenizer, cleanup.enter_context(lock), cleanup)


def _train(
    job: TrainingJob,
    reporter: Reporter,
    tokenizer: PreTrainedTokenizerBase | None,
    verify_lock: Callable[[], None],
    cleanup: ExitStack,
) -> TrainingResult:
    """Train without a lock; `verify_lock` is called before every write, and `cleanup` is closed after training."""
    import psutil

    budget = BudgetClock.load(job.budget, int(os.environ.get("WORLD_SIZE", "1")))
    timer = StartupTimer()
    config, state = Recipe.model_validate(job.config), Path(job.state)
    silence_libraries()
    device = acceleration.check_machine(config)
    if config.strategy == "zero3":
        os.environ["DS_ACCELERATOR"] = device  # DeepSpeed detects accelerators, but not a CPU
    with timer.measure("import"):
        import torch
        import trl  # noqa: F401 - takes most of the startup time
        from accelerate.utils import broadcast_object_list
    splits = token_cache.open_tokens(Path(job.tokens))
    if config.objective_spec.precomputes_reference:  # TRL writes files next to the rows, which other jobs share
        splits = token_cache.link_tokens(splits, state / token_cache.CACHE_FOLDER)
    reporter.step("loading the base model")
    with timer.measure("load"):
        model_loading.prepare_torch(job.seed, device)
        model_config = context_extension.extend_context(config, model_loading.load_configuration(Path(job.base_path)))
        outline = adapters.build_outline(model_config, config)
        parameters = _count_model_parameters(outline, model_config)
        shape = model_shape.ModelShape.from_configuration(model_config, parameters)
        settings = acceleration.choose_settings(config, device, shape, model_config)
        config = _adjust_to_outline(config, outline, settings)
        model_class = model_support.find_class(model_config)
        # With these arguments, transformers shards the weights of ZeRO-3 while it loads them.
        arguments = _build_arguments(splits, config, settings, job, model_class)
        sharding.prepare_loading(config)
        torch.manual_seed(job.seed)  # counting parameters consumed random numbers
        models = _load_models(job, config, settings, model_config)
        tokenizer = tokenizer or model_loading.load_tokenizer(Path(job.base_path))
    stop = threading.Event()
    with timer.measure("prepare"):
        checkpoint = None
        if arguments.process_index == 0:
            # ZeRO-3 cannot restore a checkpoint of the last step: it shards the model when the training starts.
            checkpoint = checkpoints.find_newest(
                state, reporter, lambda saved: config.strategy != "zero3" or not _is_finished(saved, config)
            )
        # Another host may still see an older state of the folder, because NFS caches folders.
        [checkpoint] = broadcast_object_list([checkpoint])
        rows = _build_row_lookup(splits, config, job.seed)
        events = callbacks.build_callback(config, state, reporter, stop, rows, verify_lock, budget)
        cleanup.enter_context(acceleration.keep_model_code(model_class))
        trainer = _build_trainer(models, tokenizer, splits, config, settings, arguments, job, events)

    def verify_first_step() -> None:
        timer.seconds["total"] = round(time.time() - psutil.Process().create_time(), 3)
        if sentence := sharding.verify_strategy(config, trainer.model_wrapped):
            settings.reasons.append(sentence)

    if config.strategy == "zero3":  # before the training starts, a process cannot run the model
        events.on_wrapped = lambda: _check_row_isolation(trainer, trainer.model_wrapped, config)
    else:
        _check_row_isolation(trainer, trainer.model, config)
    if settings.compile:
        acceleration.compile_layers(trainer.model)
    events.on_first_step = verify_first_step
    if checkpoint:
        reporter.note(f"resuming from step {checkpoints.parse_step(checkpoint)}")
    reporter.step("training")
    announcement = "saving a checkpoint and stopping after this step"
    # On preemption or requeue, the current step is finished and saved.
    with process_control.handle_stop_signals(stop, announcement if trainer.is_world_process_zero() else ""):
        _run_trainer(trainer, checkpoint, config, splits, verify_lock)
    if not _is_finished(vars(trainer.state), config):
        _check_interruption(events, stop, trainer.state.global_step)
    reporter.step("writing the model")
    result = _build_result(trainer, parameters, settings, config, checkpoint, splits, timer)
    verify_lock()
    _save_model(trainer, job, config)
    verify_lock()
    for warning in (
        training_health.describe_data_starvation(result.waited_share),
        training_health.describe_regression(
            result.validation_loss_before, result.validation_loss, are_rewards=config.objective_spec.has_rewards
        ),
    ):
        if warning:
            reporter.note(warning)
    return result


def _adjust_to_outline(config: Recipe, outline: PreTrainedModel, settings: ComputeSettings) -> Recipe:
    """Return the recipe without a dropout that the adapted model cannot apply; add reasons to the settings."""
    if config.has_lora_dropout and adapters.has_adapted_experts(outline):
        config = config.model_copy(update={"lora": config.lora.model_copy(update={"dropout": 0.0})})
        settings.reasons.append("lora.dropout: 0, because PEFT has no dropout for the weights of experts")
    if config.objective_spec.disables_dropout and config.adaptation_spec.is_low_rank and config.lora.dropout:
        settings.reasons.append("lora.dropout: 0, because noise would change the answers or their rewards")
    if OPTIMIZERS[config.optimizer].trains_matrices:
        share = muon.measure_share(outline)
        settings.reasons.append(f"optimizer muon: trains {share:.0%} of the weights; AdamW trains the others")
    return config


def _check_interruption(events: TrainingEvents, stop: threading.Event, step: int) -> None:
    """Raise the error of a training run that was saved before its last step, because of a budget or a signal."""
    if events.reached_limit:
        key, figures = events.reached_limit
        raise BudgetReachedError(f"{figures}; training was saved after step {step}", hint=budgets.describe_remedy(key))
    if stop.is_set():
        raise InterruptedRunError(
            f"training was interrupted after step {step} and was saved",
            hint="Run the same command again to resume from that step.",
        )


@dataclass(frozen=True)
class _LoadedModels:
    """The model to train, and the frozen models that the trainer receives."""

    trained: PreTrainedModel
    reference: PreTrainedModel | None
    teacher: PreTrainedModel | None


def _load_models(
    job: TrainingJob, config: Recipe, settings: ComputeSettings, model_config: PretrainedConfig
) -> _LoadedModels:
    """Load the models for training."""
    model, reference = _load_model(job, config, settings, model_config), None
    # TRL would load the reference model of dpo and kto whole, although all weights are trained in shards.
    if config.objective in ("dpo", "kto") and config.has_sharded_checkpoints:
        reference = _load_model(job, config, settings, model_config)
    return _LoadedModels(model, reference, _load_teacher(config, settings))


def _load_model(
    job: TrainingJob, config: Recipe, settings: ComputeSettings, model_config: PretrainedConfig
) -> PreTrainedModel:
    """Load the base model for training, with the initial adapter if the job has one."""
    from transformers import BitsAndBytesConfig

    if settings.attention == varlen_attention.NAME:
        varlen_attention.register()
    base, dtype = (
        LocalBaseModel(Path(job.base_path), job.base_sha256, job.base_uri),
        acceleration.choose_dtype(config, settings),
    )
    options: dict[str, object] = {
        "attn_implementation": settings.attention,
        **sharding.build_loading_options(config, bfloat16=settings.bfloat16),
    }
    if config.rope_scaling.factor > 1:
        options["config"] = model_config
    if config.adaptation_spec.holds_4bit_weights:
        # 4-bit NormalFloat with double quantization (Dettmers et al., arXiv 2305.14314)
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    loadable = model_loading.LoadableModel(base.sha256, base, base.path, None, None)
    model: PreTrainedModel = model_loading.load_model(
        loadable, trainable=True, dtype=dtype, has_reward_head=config.objective_spec.scores_answers, **options
    )
    model_support.align_with_trl(model)
    if job.initial_adapter:  # TRL keeps a frozen copy of it, named "ref", as the reference model of dpo and kto
        peft_config = adapters.build_peft_config(config, job.base_path, model)
        model = model_loading.attach_adapter(model, Path(job.initial_adapter), trainable=True, config=peft_config)
    return model


def _load_teacher(config: Recipe, settings: ComputeSettings) -> PreTrainedModel | None:
    """Load the teacher of a distillation in the compute precision; its source is a folder in the recipe of a job."""
    if not config.objective_spec.has_teacher:
        return None
    import torch

    source = str(config.distillation.teacher)
    base = LocalBaseModel(Path(source), config.distillation.teacher_sha256 or "", source)
    loadable = model_loading.LoadableModel(base.sha256, base, base.path, None, None)
    teacher: PreTrainedModel = model_loading.load_model(
        loadable,
        trainable=True,  # the trainer moves it to the device
        dtype=torch.bfloat16 if settings.bfloat16 else torch.float32,
        attn_implementation=settings.attention,
    )
    return teacher.requires_grad_(False).eval()


def count_parameters(model_config: PretrainedConfig, config: FineTuningConfig) -> dict[str, int]:
    """Return the numbers {"all", "trainable", "embedding"} of the adapted model's parameters, without loading weights.

    "embedding" counts the input embedding, and is 0 if the output head shares it; a reward model has no such head.

    Raises:
        ConfigurationError: PEFT cannot adapt the model.
    """
    return _count_model_parameters(adapters.build_outline(model_config, config), model_config)


def _count_model_parameters(model: PreTrainedModel, model_config: PretrainedConfig) -> dict[str, int]:
    is_tied = model_config.get_text_config().tie_word_embeddings and model.get_output_embeddings() is not None
    return {
        "all": sum(p.numel() for name, p in model.named_parameters() if ".ref." not in name),  # the reference's copy
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "embedding": 0 if is_tied else model.get_input_embeddings().weight.numel(),
    }


def _build_arguments(
    splits: TokenizedDataset,
    config: Recipe,
    settings: ComputeSettings,
    job: TrainingJob,
    model_class: type[PreTrainedModel],
) -> TrainingArguments:
    """Return the arguments of TRL's trainer."""
    import trl

    has_validation = bool(splits.validation.counts.examples)
    steps = training_plan.plan_steps(splits.train.count_epoch_examples(config.mixing), config)
    options = sharding.build_arguments(config) | _build_objective_options(splits, config, steps, model_class)
    if optimizer := OPTIMIZERS[config.optimizer].transformers_name:
        options["optim"] = optimizer
    if config.schedule == "warmup_stable_decay":
        decay_steps = math.ceil(training_plan.DECAY_SHARE * steps.total)
        options["lr_scheduler_kwargs"] = {"num_decay_steps": decay_steps, "decay_type": "linear"}
    sequences = config.micro_batch_size * max(config.answers_per_prompt, 1)
    arguments: TrainingArguments = getattr(trl, f"{config.objective_spec.trl_method}Config")(
        output_dir=job.state,
        max_steps=config.max_steps or -1,
        num_train_epochs=config.epochs,
        learning_rate=config.learning_rate,
        lr_scheduler_type=config.schedule,
        warmup_steps=steps.warmup,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        neftune_noise_alpha=config.neftune_noise_alpha,
        per_device_train_batch_size=sequences,
        per_device_eval_batch_size=sequences,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        eval_strategy="steps" if has_validation else "no",
        eval_steps=steps.checkpoint_interval,
        save_strategy="steps",
        save_steps=steps.checkpoint_interval,
        metric_for_best_model="eval_loss" if has_validation else None,
        greater_is_better=False if has_validation else None,
        logging_steps=1,
        logging_nan_inf_filter=False,  # True would log the last finite loss instead of NaN
        include_num_input_tokens_seen="non_padding",
        seed=job.seed,
        data_seed=job.seed,
        use_cpu=settings.device == "cpu",
        bf16=settings.bfloat16,
        gradient_checkpointing=settings.activation_checkpointing,
        use_liger_kernel=settings.liger,
        dataloader_num_workers=0,
        ddp_find_unused_parameters=False,
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    # With several visible GPUs, a single process would use DataParallel and multiply the rows of a step.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


def _build_objective_options(
    splits: TokenizedDataset, config: Recipe, steps: TrainingSteps, model_class: type[PreTrainedModel]
) -> dict[str, Any]:
    """Return the arguments that depend on the objective."""
    objective = config.objective_spec
    options: dict[str, Any] = config.preference.model_dump(include=objective.preference_settings)
    if objective.has_teacher:
        options |= {
            "max_completion_length": config.max_answer_tokens,
            "temperature": config.distillation.temperature,
            "beta": config.distillation.beta,
        }
    elif objective.generates:
        options |= {
            "num_generations": config.grpo.answers_per_prompt,
            "max_completion_length": config.grpo.max_answer_tokens,
            "temperature": config.grpo.temperature,
            "beta": config.grpo.kl_weight,
            "reward_weights": rewards.normalize_weights(config.grpo.rewards),
        }
    else:
        options["max_length"] = None  # the rows are already truncated
    if objective.disables_dropout:
        options["disable_dropout"] = True
    if objective.scores_answers:
        options["center_rewards_coefficient"] = config.reward_model.center_weight or None
    if objective.is_causal:
        options["dataset_kwargs"] = {"skip_prepare_dataset": True}  # the rows are already tokenized
    if not (objective.scores_answers or objective.has_teacher or model_support.has_router_loss(model_class)):
        options["router_aux_loss_coef"] = 0.0  # TRL requests the loss of every model with such a setting
    if objective.pair_loss:
        # TRL loads no reference model, and `reference_free_trainer` computes none.
        options["precompute_ref_log_probs"] = True
    elif objective.precomputes_reference:
        epoch_examples = splits.train.count_epoch_examples(config.mixing)
        drawn = training_plan.count_rows_seen(epoch_examples, epoch_examples, steps.total, config)
        visits_every_row = drawn >= splits.train.counts.examples
        options["precompute_ref_log_probs"] = visits_every_row and config.precomputes_reference
    return options


def _build_trainer(
    models: _LoadedModels,
    tokenizer: PreTrainedTokenizerBase,
    splits: TokenizedDataset,
    config: Recipe,
    settings: ComputeSettings,
    arguments: TrainingArguments,
    job: TrainingJob,
    events: TrainingEvents,
) -> Trainer:
    from transformers import PrinterCallback

    model, others = models.trained, {"ref_model": models.reference, "teacher_model": models.teacher}
    options: dict[str, Any] = {name: other for name, other in others.items() if other is not None}
    if not config.objective_spec.generates:
        options["data_collator"] = trainers.build_collator(config, tokenizer)
    samples_path = Path(job.state) / sample_answers.SAMPLES_FILENAME
    with adapters.explain_target_errors(model, config):
        trainer = trainers.build_trainer_class(
            config, splits, job.seed, samples_path, RewardInputs(job.reward_bases, Path(job.state))
        )(
            model=model,
            args=arguments,
            train_dataset=splits.train.dataset,
            eval_dataset=splits.validation.dataset if splits.validation.counts.examples else None,
            processing_class=tokenizer,
            peft_config=None if job.initial_adapter else adapters.build_peft_config(config, job.base_path, model),
            callbacks=[events],
            **options,
        )
    if config.adaptation_spec.holds_4bit_weights:
        adapters.keep_trained_weights_in_float32(trainer.model)
    if getattr(trainer, "ref_model", None) is not None:  # TRL loads it separately
        model_support.align_with_trl(trainer.ref_model)
    if settings.bfloat16:
        adapters.keep_inputs_in_compute_precision(trainer.model)
    trainer.args.save_only_model = False  # as for every strategy: a checkpoint has the optimizer's state
    trainer.remove_callback(PrinterCallback)  # the reporter prints progress
    events.trainer = trainer
    return trainer


def _check_row_isolation(trainer: Trainer, model: PreTrainedModel, config: Recipe) -> None:
    """If the rows of a sequence attend to each other, reject packing, or pad unpacked rows."""
    if not config.is_padding_free:
        return
    vocabulary = trainer.model.config.get_text_config().vocab_size
    with trainer.accelerator.autocast():
        if config.packing:
            packing_isolation.check_isolation(model, vocabulary=vocabulary)
        elif packing_isolation.measure_leak(model, vocabulary=vocabulary):
            trainer.data_collator.padding_free = False


def _run_trainer(
    trainer: Trainer,
    checkpoint: Path | None,
    config: Recipe,
    splits: TokenizedDataset,
    verify_lock: Callable[[], None],
) -> None:
    """Train from the checkpoint to the last step, or restore the state of a finished checkpoint."""
    from transformers import TrainerState

    verify_lock()
    log_path = Path(trainer.args.output_dir) / callbacks.LOG_FILENAME
    if checkpoint:
        if _is_finished(checkpoints.read_state(checkpoint), config):
            trainer.state = TrainerState.load_from_json(str(checkpoint / checkpoints.STATE_FILENAME))
            callbacks.truncate_log(log_path, trainer.state.global_step)
            return
    elif splits.validation.counts.examples and config.strategy != "zero3":
        callbacks.truncate_log(log_path, -1)
        (log_path.parent / sample_answers.SAMPLES_FILENAME).unlink(missing_ok=True)
        trainer.evaluate()  # the validation loss before training
        # Accelerate prepares a model only once. Without this reset, the model would not be wrapped for training, and
        # each process would train separately.
        trainer.accelerator._models.clear()
        trainer.model_wrapped = trainer.model
        trainer.model._is_accelerate_prepared = False
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except Exception as error:
        if not isinstance(error, OSError) or isinstance(error, FileNotFoundError):
            verify_lock()  # a successor removes the files that this training run saves
        raise


def _is_finished(state: dict[str, Any], config: Recipe) -> bool:
    """Return whether a trainer's state is at the last step, or was stopped early or by a guard."""
    history = state["log_history"]
    stopped_early = callbacks.has_stopped_early(history, config.early_stopping)
    has_alarm = config.grpo.on_alarm == "stop" and callbacks.find_alarm(history, config) is not None
    return bool(state["global_step"] >= state["max_steps"] or stopped_early or has_alarm)


def _save_model(trainer: Trainer, job: TrainingJob, config: Recipe) -> None:
    """Write the weights of the best checkpoint (without validation: the last), merged if configured."""
    checkpoint = Path(job.state) / f"checkpoint-{trainer.state.best_global_step or trainer.state.global_step}"
    output = Path(job.output)
    is_gathered = config.strategy == "zero3" or config.has_sharded_checkpoints
    if is_gathered:
        if config.has_sharded_checkpoints:
            sharding.load_shards(trainer.model, None, checkpoint)
        elif trainer.state.best_global_step not in (None, 0, trainer.state.global_step):
            trainer.state.best_model_checkpoint = str(checkpoint)
            trainer._load_best_model()
        sharding.save_consolidated(trainer, output)
    else:
        checkpoints.restore_trainable(trainer.model, checkpoint)
    if trainer.is_world_process_zero():
        model = trainer.accelerator.unwrap_model(trainer.model)
        if not is_gathered:
            for name in ("forward", "_original_forward"):  # remove Accelerate's forward, which computes in bfloat16
                model.__dict__.pop(name, None)
            selection: dict[str, object] = {"selected_adapters": ["default"]} if job.initial_adapter else {}
            if config.is_sharded:
                selection["state_dict"] = sharding.list_adapter_weights(model)
            model.save_pretrained(output, safe_serialization=True, **selection)
        if config.merge:
            if config.is_sharded or config.adaptation_spec.holds_4bit_weights:
                sharding.end_sharded_loading(config)
                model = adapter_merging.load_adapted(Path(job.base_path), output)
            merged = adapter_merging.merge(model, model_loading.read_dtype(Path(job.base_path)))
            for name in ("adapter_model.safetensors", "adapter_config.json"):
                (output / name).unlink(missing_ok=True)
            merged.save_pretrained(output, safe_serialization=True)
    trainer.accelerator.wait_for_everyone()


def _build_row_lookup(splits: TokenizedDataset, config: Recipe, seed: int) -> Callable[[int], list[str]]:
    """Return a function that returns the dataset row ids in the batch of a step, counted from 1."""
    batch, lengths, mixture = config.rows_per_step, splits.train.lengths, splits.train.build_mixture(config.mixing)
    epoch_steps = batch_order.count_epoch_steps(batch_order.count_epoch_rows(lengths, mixture), batch)

    def get_step_rows(step: int) -> list[str]:
        epoch, position = divmod(max(step, 1) - 1, epoch_steps)
        order = batch_order.order_epoch(lengths, batch, seed=seed, epoch=epoch, mixture=mixture)
        return splits.train.row_ids(order[position * batch : (position + 1) * batch])

    return get_step_rows


def _count_shares(splits: TokenizedDataset, config: Recipe, seed: int, steps: int) -> list[dict[str, Any]]:
    """Return the share of each source in the batches of a training run; see `TrainingResult`."""
    train = splits.train
    if config.packing or not (config.mixing.is_active or len(set(train.sources)) > 1):
        return []
    mixture = train.build_mixture(config.mixing)
    draws = batch_order.count_draws(train.lengths, config.rows_per_step, steps, seed=seed, mixture=mixture)
    return mixing.summarize_shares(mixing.count_shares(train.sources, train.lengths, draws))


def _build_result(
    trainer: Trainer,
    parameters: dict[str, int],
    settings: ComputeSettings,
    config: Recipe,
    checkpoint: Path | None,
    splits: TokenizedDataset,
    timer: StartupTimer,
) -> TrainingResult:
    history = trainer.state.log_history
    lines = callbacks.read_log(Path(trainer.args.output_dir) / callbacks.LOG_FILENAME)
    steps = [line for line in lines if "train_loss" in line]
    losses = {entry["step"]: entry["eval_loss"] for entry in history if "eval_loss" in entry}
    best_step = trainer.state.best_global_step or None
    durations = ("seconds", "step_seconds", "waited_seconds")
    seconds, step_seconds, waited = (sum(line[name] for line in steps) for name in durations)
    tokens = int(trainer.state.num_input_tokens_seen)
    flops = None
    if config.objective_spec.is_causal:  # the formula does not cover reference passes
        mean_length = splits.train.counts.tokens / max(splits.train.counts.examples, 1)
        trained_shape = model_shape.ModelShape.from_configuration(trainer.model.config, parameters)
        flops = tokens / (step_seconds + waited) * resource_formulas.estimate_training_flops(trained_shape, mean_length)
    steps_done, epoch_examples = int(trainer.state.global_step), splits.train.count_epoch_examples(config.mixing)
    alarms = callbacks.list_alarms(history, config)
    device = compute_devices.get_device_name(settings.device)
    peak = compute_devices.get_peak_flops(device)
    return TrainingResult(
        steps=steps_done,
        best_step=best_step,
        tokens=tokens,
        train_loss=float(steps[-1]["train_loss"]),
        validation_loss=losses.get(best_step, next(reversed(losses.values()), None)),
        validation_loss_before=next((line["validation_loss"] for line in lines if line["step"] == 0), None),
        tokens_per_second=round(tokens / seconds, 2),
        step_tokens_per_second=round(tokens / step_seconds, 2),
        flops_per_second=flops,
        mfu=round(flops / (peak * config.processes), 4) if flops and peak else None,
        peak_memory=compute_devices.get_peak_memory_bytes(settings.device),
        waited_share=round(waited / seconds, 4),
        resumed_from=checkpoints.parse_step(checkpoint) if checkpoint else None,
        stopped_early=callbacks.has_stopped_early(history, config.early_stopping),
        parameters={name: parameters[name] for name in ("all", "trainable")},
        device=device,
        processes=config.processes,
        rows_seen=training_plan.count_rows_seen(
            splits.train.count_epoch_rows(config.mixing), epoch_examples, steps_done, config
        ),
        epochs=sum(training_plan.count_epochs(epoch_examples, steps_done, config)),
        warmup_steps=int(trainer.args.warmup_steps),
        sources=_count_shares(splits, config, trainer.args.seed, steps_done),
        choices=settings.reasons,
        alarms=[
            {
                **asdict(alarm),
                "learning_rate_factor": callbacks.compute_rate_factor(alarms[:number], config),
            }
            for number, alarm in enumerate(alarms, start=1)
        ],
        startup=timer.seconds,
    )


def silence_libraries() -> None:
    """Prevent libraries from querying model hubs and from printing. All files are on this machine at this point."""
    for name in ("HF_HUB_OFFLINE", "TRL_EXPERIMENTAL_SILENCE", "TQDM_DISABLE"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    model_loading.silence_transformers()
