"""Configuration of fine-tuning, the recipe: what is learned (objective) × what is trained (adaptation), on how much, and how.

What cannot work is refused here, with the reason, before any work is done.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from components.common.devices import Device

Objective = Literal["sft", "text", "dpo", "kto"]
AdaptationName = Literal["lora", "full", "qlora", "p_tuning", "prompt_tuning"]
LOW_RANK = ("lora", "qlora")
PROMPTS = ("p_tuning", "prompt_tuning")
PREFERENCES = ("dpo", "kto")
SHARDED = ("fsdp2", "zero3")
MOST_RECIPES = 64
# With another one of these a validation loss measures something else, and the lowest would say nothing.
MEASURED_BY = ("base_model", "objective", "max_length", "validation_rows", "preference")
NO_RECIPE = ("card", "sweep")


class LoraConfig(BaseModel):
    """Low-rank adaptation (Hu et al., arXiv 2106.09685)."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    rank: int = Field(16, ge=1, description="Rank r of the update. Higher learns more and costs r(d_in + d_out) parameters a matrix.")
    alpha: float = Field(32.0, gt=0, description="The update is scaled by alpha/rank: higher learns faster and less stably.")
    dropout: float = Field(0.05, ge=0, lt=1, description="Dropout on the update's input. Higher resists overfitting on few rows.")
    target_modules: list[str] | Literal["all-linear"] = Field(
        "all-linear", description='Module names that get an update; "all-linear" is every linear layer but the output head.'
    )
    rslora: bool = Field(
        False, description="Scale the update by alpha/√rank, which keeps high ranks learning (rsLoRA, Kalajdzievski, arXiv 2312.03732)."
    )
    dora: bool = Field(
        False, description="Train magnitude and direction apart (DoRA, Liu et al., arXiv 2402.09353): nearer to full at low rank, slower."
    )


class PromptConfig(BaseModel):
    """Virtual tokens that are trained in front of every prompt, the model itself unchanged."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    virtual_tokens: int = Field(20, ge=1, description="Trained tokens in front of the prompt. They take context and time on every request.")
    encoder: Literal["mlp", "lstm"] = Field(
        "mlp", description="p_tuning: the network that makes the virtual tokens while training (Liu et al., arXiv 2103.10385)."
    )
    encoder_size: int = Field(128, ge=1, description="p_tuning: hidden size of that network. It is not shipped: only what it made is.")
    initial_text: str = Field(
        "", description='prompt_tuning: a text whose tokens the virtual ones begin as, such as "Answer briefly."; empty: random ones.'
    )


class PreferenceConfig(BaseModel):
    """Learning from preferences: pairs (dpo) or single answers with a label (kto)."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    beta: float = Field(0.1, gt=0, description="How strongly the model is held to where it began. Higher stays nearer.")
    desirable_weight: float = Field(1.0, gt=0, description="kto: weight of rows labelled good; raise it where they are few.")
    undesirable_weight: float = Field(1.0, gt=0, description="kto: weight of rows labelled bad.")


class CardConfig(BaseModel):
    """What the model card says of licences where the files do not."""

    model_config = ConfigDict(extra="forbid")

    base_licence: str = Field("", description='The base model\'s licence, such as "llama3.1"; empty: as its own card says.')
    data_licence: str = Field("", description='The training data\'s licence, such as "CC-BY-SA-3.0" or "internal"; empty: not stated.')


class SweepConfig(BaseModel):
    """Several recipes over one dataset, of which the one with the lowest validation loss is the result."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    vary: dict[str, list[Any]] = Field(
        {},
        description="Keys of this section and the values to try, such as {learning_rate: [1e-4, 3e-4], lora.rank: [8, 16]}: every "
        f"combination is trained, {MOST_RECIPES} at most. Empty: no sweep.",
    )
    parallel: int = Field(
        2, ge=1, description="Recipes that are trained at once. Here they share the machine's memory and cores; elsewhere each is a job."
    )


class FineTuningConfig(BaseModel):
    """The recipe: objective × adaptation, and the optimizer's settings."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    base_model: str = Field(
        "embedded:smollm2-135m-instruct",
        description="The model to start from: embedded:smollm2-135m-instruct, a folder in the Hugging Face layout, "
        "store:<sha256> (see `tuneline models import`), or hf://org/name@revision.",
    )
    objective: Objective = Field(
        "sft",
        description="What is learned. sft: the assistant's answers, in all turns. text: every next token of plain text. "
        "dpo: to prefer the chosen answer of a pair. kto: to prefer answers labelled good.",
    )
    adaptation: AdaptationName = Field(
        "lora",
        description="What is trained. lora: a small update beside frozen weights. full: every weight (16 bytes a parameter). "
        "qlora: lora beside weights held in 4 bits (NVIDIA GPU). p_tuning, prompt_tuning: virtual tokens before the prompt, nothing else.",
    )
    lora: LoraConfig = Field(LoraConfig(), description="Settings of adaptations lora and qlora.")
    prompt: PromptConfig = Field(PromptConfig(), description="Settings of adaptations p_tuning and prompt_tuning.")
    preference: PreferenceConfig = Field(PreferenceConfig(), description="Settings of objectives dpo and kto.")
    card: CardConfig = Field(CardConfig(), description="Licences for the model card.")
    merge: bool = Field(
        False,
        description="lora, qlora: publish whole weights with the update in them, proven equal. Larger; needs no adapter support to serve.",
    )
    max_steps: int | None = Field(40, ge=1, description="Stop after so many optimizer steps. null: train for `epochs` instead.")
    epochs: float = Field(1.0, gt=0, description="Passes over the training rows; counts only where max_steps is null.")
    learning_rate: float = Field(
        5e-4,
        gt=0,
        description="Peak learning rate. Too high diverges. full, dpo and kto want about a tenth of lora's, prompts ten times it.",
    )
    schedule: Literal["linear", "cosine", "constant_with_warmup"] = Field(
        "linear", description="How the learning rate falls after warm-up."
    )
    warmup_steps: int = Field(4, ge=0, description="Optimizer steps over which the learning rate rises from 0 to its peak.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are scaled down to this norm when they exceed it.")
    batch_size: int = Field(
        8, ge=1, description="Rows an optimizer step, over all processes. More is steadier and slower. Packed rows count once."
    )
    tokens_per_step: int | None = Field(
        None, ge=8, description="With packing: tokens an optimizer step, instead of batch_size: so many packed rows of max_length as fit."
    )
    micro_batch_size: int = Field(
        2, ge=1, description="Rows in memory at once in a process; batch_size must be a multiple. Fewer needs less memory."
    )
    max_length: int = Field(256, ge=8, description="Tokens a row; longer rows are cut and counted. Memory grows with it.")
    packing: bool = Field(
        False, description="Put several short rows into one of max_length tokens; they never see each other. Faster where rows are short."
    )
    checkpoint_every: int = Field(10, ge=1, description="Optimizer steps between checkpoints: a killed run loses at most this much.")
    keep_checkpoints: int = Field(
        2, ge=2, description="Newest checkpoints kept, and the best besides. At least two: the newest may be torn by a crash."
    )
    validation_rows: int = Field(
        32,
        ge=0,
        description="Validation rows, the first ones, whose loss is measured at every checkpoint. The best one is the result. 0: the last.",
    )
    early_stopping: int | None = Field(
        None, ge=1, description="Stop once so many validations in a row brought no new best loss. null: go to the end."
    )
    device: Device = Field("auto", description="auto: the best that is here. cuda: NVIDIA. hpu: Gaudi. mps: Apple. cpu: the processor.")
    precision: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="auto: bfloat16 on NVIDIA and Gaudi, float32 elsewhere (on processors bfloat16 is many times slower)."
    )
    attention: Literal["auto", "sdpa", "flash_attention_2", "eager"] = Field(
        "auto", description="Attention kernel. auto: flash_attention_2 where it is installed on an NVIDIA GPU, else torch's own (sdpa)."
    )
    fused_kernels: Literal["auto", "on", "off"] = Field(
        "auto", description="Liger's fused layers on NVIDIA GPUs. auto: where liger-kernel is installed and knows the model."
    )
    compile: bool = Field(
        False, description="torch.compile: minutes at the start, faster steps after. For long trainings with packing on GPUs."
    )
    activation_checkpointing: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Compute activations twice instead of keeping them: a third more work, far less memory. auto: where memory needs it.",
    )
    processes: int = Field(1, ge=1, description="Processes that share the training on this machine, one an accelerator.")
    strategy: Literal["ddp", "fsdp2", "zero3"] = Field(
        "ddp",
        description="How several processes share the work. ddp: each holds the model. fsdp2, zero3 (DeepSpeed): each holds a part; proven "
        "to be so in every run, and refused where it cannot be.",
    )
    # Left out where there is none: a recipe reads as it did before there were sweeps, and so do its keys and digests.
    sweep: SweepConfig = Field(SweepConfig(), exclude_if=lambda sweep: not sweep.vary, description="Several recipes, compared.")

    @property
    def step_rows(self) -> int:
        """Rows, or packed rows, an optimizer step; a multiple of what all processes hold at once."""
        if not self.tokens_per_step:
            return self.batch_size
        at_once = self.micro_batch_size * self.processes
        return max(1, round(self.tokens_per_step / (self.max_length * at_once))) * at_once

    @property
    def accumulation(self) -> int:
        """Micro-batches of a process an optimizer step."""
        return self.step_rows // (self.micro_batch_size * self.processes)

    @model_validator(mode="after")
    def _can_work(self) -> FineTuningConfig:
        for wrong, reason in _contradictions(self):
            if wrong:
                raise ValueError(reason)
        if self.sweep.vary:
            _check_sweep(self)
        return self

    @property
    def recipes(self) -> dict[str, FineTuningConfig]:
        """The recipes of a sweep by what sets them apart, such as "learning_rate=0.0001, lora.rank=8"; without one, this one by ""."""
        named, keys = {}, sorted(self.sweep.vary)  # in JSON, and so in a plan, they may come in another order
        for values in itertools.product(*(self.sweep.vary[key] for key in keys)):
            name, recipe = _combined(self, dict(zip(keys, values, strict=True)))
            if name in named:
                raise ValueError(f"sweep.vary: {name} stands there twice")
            named[name] = recipe
        return named

    def value_of(self, key: str) -> Any:
        """The value of a dotted key, such as lora.rank."""
        found: Any = self
        for part in key.split("."):
            found = getattr(found, part)
        return found


def recipe_of(config: dict[str, Any], where: dict[str, Any]) -> FineTuningConfig:
    """The recipe of a step's plan, whose sweep is told apart `where` nothing of the result depends on it: how many run at once."""
    return FineTuningConfig.model_validate({**config, "sweep": {**config["sweep"], **where}} if where else config)


def _check_sweep(config: FineTuningConfig) -> None:
    """Raise ValueError for keys that cannot be varied, too many recipes, or one that cannot work."""
    for key, values in config.sweep.vary.items():
        if why := _not_to_vary(key, values, config.objective):
            raise ValueError(f"sweep.vary: {key}: {why}")
    count = math.prod(map(len, config.sweep.vary.values()))
    if count > MOST_RECIPES:
        raise ValueError(f"sweep.vary: these are {count} recipes, and {MOST_RECIPES} is the most")
    for name, recipe in config.recipes.items():
        if not recipe.validation_rows:
            raise ValueError(f"sweep.vary: {name}: validation_rows is 0, and recipes are compared by their loss")


def _not_to_vary(key: str, values: list[Any], objective: Objective) -> str:
    """Why a key cannot be varied with these values; "" where it can."""
    section, _, rest = key.partition(".")
    if section == "micro_batch_size" and objective == "kto":
        return "kto's loss has a reference term that is the mean over a micro-batch, so that recipes could not be compared by it"
    if section in MEASURED_BY:
        return "with another one the validation loss measures something else, so that recipes could not be compared by it"
    if section in NO_RECIPE:
        return "it is no part of a recipe"
    field = FineTuningConfig.model_fields.get(section)
    inner = field.annotation if field else None
    keys = inner.model_fields if isinstance(inner, type) and issubclass(inner, BaseModel) else {}
    if field is None or (rest and rest not in keys):
        return "there is no such key in fine_tuning"
    if keys and not rest:
        return f"it is a section; name a key of it, such as {section}.{next(iter(keys))}"
    return "" if values else "it has no values to try"


def _combined(config: FineTuningConfig, changes: dict[str, Any]) -> tuple[str, FineTuningConfig]:
    """The recipe with these values by dotted key, and its name. Raises ValueError, which names it, where it cannot work."""
    values = config.model_dump(exclude={"sweep"})
    for key, value in changes.items():
        section, _, rest = key.partition(".")
        if rest:
            values[section] = values[section] | {rest: value}
        else:
            values[section] = value
    try:
        recipe = FineTuningConfig.model_validate(values)
    except ValidationError as error:
        said = "; ".join(": ".join(filter(None, [".".join(map(str, one["loc"])), one["msg"]])) for one in error.errors())
        raise ValueError(f"sweep.vary: {_name(changes)}: {said}") from None
    return _name({key: recipe.value_of(key) for key in changes}), recipe


def _name(values: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in values.items())


def _contradictions(c: FineTuningConfig) -> list[tuple[bool, str]]:
    """What cannot be meant together, and why."""
    at_once = c.micro_batch_size * c.processes
    prompts, preferences = c.adaptation in PROMPTS, c.objective in PREFERENCES
    spread = f" × processes {c.processes}" if c.processes > 1 else ""
    return [
        (
            not c.tokens_per_step and c.batch_size % at_once > 0,
            f"batch_size {c.batch_size} is not a multiple of micro_batch_size {c.micro_batch_size}{spread}",
        ),
        (
            c.packing and prompts,
            f"packing cannot be used with {c.adaptation}: the virtual tokens stand before the first row only, and PEFT drops the positions "
            "that keep packed rows apart, so they would see each other",
        ),
        (c.packing and preferences, f"packing cannot be used with {c.objective}: each row is compared as a whole with its counterpart"),
        (
            bool(c.tokens_per_step) and not c.packing,
            "tokens_per_step needs packing: without it rows differ in length, and a step would not hold that many tokens",
        ),
        (
            c.merge and c.adaptation not in LOW_RANK,
            f"merge cannot be used with {c.adaptation}: "
            + ("virtual tokens are input, not weights that could be added" if prompts else "its weights are whole already"),
        ),
        (
            c.merge and c.strategy in SHARDED,
            f"merge cannot be used with strategy {c.strategy}: the update is put into weights that one process holds whole. Merge with ddp",
        ),
        (
            c.adaptation == "qlora" and c.device in ("cpu", "mps", "hpu"),
            f"qlora cannot run on {c.device}: the 4-bit weights of bitsandbytes need an NVIDIA GPU. Use lora",
        ),
        (
            c.objective == "kto" and c.micro_batch_size < 2,
            "kto needs micro_batch_size 2 or more: its reference term is the mean over the rows of a micro-batch",
        ),
        (
            bool(c.early_stopping) and not c.validation_rows,
            "early_stopping needs validation_rows: it watches their loss",
        ),
        (
            c.strategy in SHARDED and c.processes == 1,
            f"strategy {c.strategy} shards the model over processes, and processes is 1. Use ddp, or more processes",
        ),
        (
            c.strategy in SHARDED and (prompts or c.adaptation == "qlora"),
            f"strategy {c.strategy} cannot be used with {c.adaptation}: its trained tensors are not sharded",
        ),
    ]
