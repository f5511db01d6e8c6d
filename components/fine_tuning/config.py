"""Configuration of fine-tuning: objective, adaptation, optimizer settings and device.

Validation rejects invalid combinations with the reason, before any work starts. Settings that are null are chosen from
the model and the rows when the training is planned (components/fine_tuning/recipe_defaults.py): a `Recipe` has them all.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from importlib import util
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from components.common.answer_metrics import json_answers
from components.common.models.adaptations import ADAPTATIONS, Adaptation, AdaptationName
from components.common.models.compute_devices import Device
from components.common.runtime import chat_endpoint
from components.common.runtime.errors import ConfigurationError
from components.common.runtime.validation_errors import describe_validation_error
from components.fine_tuning import judge_rewards
from components.fine_tuning.judge_rewards import DEFAULT_CRITERIA
from components.fine_tuning.mixing import MixingSettings
from components.fine_tuning.objectives import OBJECTIVES, Objective, ObjectiveName
from components.fine_tuning.optimizers import OPTIMIZERS, OptimizerName
from components.fine_tuning.presets import PRESETS, Preset, PresetName
from components.fine_tuning.rewards import REWARDS, RewardName
from components.fine_tuning.rollout_engines import ROLLOUT_ENGINES, RolloutEngine, RolloutEngineName

SHARDED_STRATEGIES = ("fsdp2", "zero3")
MAX_RECIPES = 64
# A validation loss measured with another value of these keys is not comparable.
LOSS_DEFINING_KEYS = (
    "base_model",
    "initial_adapter",
    "objective",
    "max_length",
    "validation_rows",
    "preference",
    "grpo.rewards",
    "grpo.max_answer_tokens",
    "reward_model",
    "distillation",
)
NON_RECIPE_KEYS = ("card", "sweep")


class Section(BaseModel):
    """A section of the configuration. Rejects unknown keys and numbers that are not finite."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class LoraConfig(Section):
    """Low-rank adaptation (Hu et al., arXiv 2106.09685)."""

    rank: int = Field(
        16,
        ge=1,
        description="Rank r of the update. A higher rank adds capacity; a matrix of m × n weights gets r(m + n) "
        "trained parameters.",
    )
    alpha: float = Field(
        32.0,
        gt=0,
        description="Numerator of the update's scale, alpha/rank. A higher value trains faster, but less stably.",
    )
    dropout: float = Field(
        0.05,
        ge=0,
        lt=1,
        description="Dropout on the input of the update. A higher value reduces overfitting on small datasets. "
        "The dropout is 0 with grpo, rloo, distill and reward, and if experts are adapted (docs/how-to/models.md).",
    )
    target_modules: list[str] | Literal["all-linear"] = Field(
        "all-linear",
        description='Names of the modules to update; "all-linear" selects every linear layer except the output head.',
    )
    rslora: bool = Field(
        False,
        description="true: scale the update by alpha/√rank, which prevents slow training at high ranks "
        "(rsLoRA, Kalajdzievski, arXiv 2312.03732); false: by alpha/rank.",
    )
    dora: bool = Field(
        False,
        description="Train magnitude and direction of the weights separately (DoRA, Liu et al., arXiv "
        "2402.09353). DoRA is closer to full fine-tuning at low ranks, but slower. false: plain LoRA.",
    )

    plus_ratio: float | None = Field(
        None,
        gt=0,
        description="Learning rate of the output matrix B relative to the input matrix A, for example 16 "
        "(LoRA+, Hayou et al., arXiv 2402.12354). null: equal rates.",
    )

    def build_peft_options(self, peft_type: str, tokenizer: str) -> dict[str, object]:
        """Return the keyword arguments of PEFT's configuration class; both parameters are unused."""
        targets = self.target_modules
        return {
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "use_rslora": self.rslora,
            "use_dora": self.dora,
            "target_modules": targets if isinstance(targets, str) else sorted(targets),
        }


class PromptConfig(Section):
    """Trained virtual tokens that precede every prompt; the model's weights do not change."""

    virtual_tokens: int = Field(
        20,
        ge=1,
        description="Number of virtual tokens before the prompt. Each of them takes up context and adds computation "
        "in every request.",
    )
    encoder: Literal["mlp", "lstm"] = Field(
        "mlp",
        description="p_tuning: network that generates the virtual tokens during training "
        "(Liu et al., arXiv 2103.10385).",
    )
    encoder_size: int = Field(
        128,
        ge=1,
        description="p_tuning: hidden size of the prompt encoder. The encoder is not published, only its virtual "
        "tokens.",
    )
    initial_text: str = Field(
        "",
        description="prompt_tuning: text whose tokens initialize the virtual tokens, "
        'such as "Answer briefly." Empty: random initialization.',
    )

    def build_peft_options(self, peft_type: str, tokenizer: str) -> dict[str, object]:
        """Return the keyword arguments of PEFT's configuration class.

        Args:
            peft_type: P_TUNING or PROMPT_TUNING.
            tokenizer: Folder of the base model's tokenizer.
        """
        options: dict[str, object] = {"num_virtual_tokens": self.virtual_tokens}
        if peft_type == "P_TUNING":
            return options | {
                "encoder_reparameterization_type": self.encoder.upper(),
                "encoder_hidden_size": self.encoder_size,
            }
        if self.initial_text:  # prompt tuning: Lester et al., arXiv 2104.08691
            options |= {
                "prompt_tuning_init": "TEXT",
                "prompt_tuning_init_text": self.initial_text,
                "tokenizer_name_or_path": tokenizer,
            }
        return options


class Ia3Config(Section):
    """Scaling of inner activations by trained vectors (Liu et al., arXiv 2205.05638)."""

    target_modules: list[str] = Field(
        [],
        description="Names of the modules to scale, such as [k_proj, v_proj, down_proj]. "
        "Empty: PEFT's default for the architecture.",
    )
    feedforward_modules: list[str] = Field(
        [],
        description="The target modules whose input is scaled instead of their output, such as [down_proj]. "
        "Used only if target_modules is set. Empty: every output is scaled.",
    )

    @model_validator(mode="after")
    def _check_modules(self) -> Ia3Config:
        unknown = sorted({*self.feedforward_modules} - {*self.target_modules})
        if unknown:
            raise ValueError(f"feedforward_modules lists {', '.join(unknown)}; expected modules of target_modules")
        return self

    def build_peft_options(self, peft_type: str, tokenizer: str) -> dict[str, object]:
        """Return the keyword arguments of PEFT's configuration class; both parameters are unused."""
        if not self.target_modules:
            return {}
        return {
            "target_modules": sorted(self.target_modules),
            "feedforward_modules": sorted(self.feedforward_modules),
        }


class PreferenceConfig(Section):
    """Settings of preference training: pairs (dpo, orpo, simpo) or single labelled answers (kto)."""

    beta: float = Field(
        0.1,
        gt=0,
        description="dpo, kto: weight of the penalty for deviating from the base model. A higher value allows less "
        "deviation.",
    )
    desirable_weight: float = Field(
        1.0, gt=0, description="kto: weight of desirable rows. Increase it if desirable rows are rare."
    )
    undesirable_weight: float = Field(1.0, gt=0, description="kto: weight of undesirable rows.")
    # Excluded if unchanged, so that other recipes keep the digests from before these objectives existed.
    odds_ratio_weight: float = Field(
        0.1,
        gt=0,
        exclude_if=lambda weight: weight == 0.1,
        description="orpo: weight of the odds-ratio term, relative to the prediction of the chosen answer (λ in the "
        "paper).",
    )
    reward_scale: float = Field(
        2.0,
        gt=0,
        exclude_if=lambda scale: scale == 2.0,
        description="simpo: factor on the mean log-probabilities (β in the paper, which uses 2 to 2.5).",
    )
    target_margin: float = Field(
        1.0,
        ge=0,
        exclude_if=lambda margin: margin == 1.0,
        description="simpo: reward by which the chosen answer should exceed the rejected one (γ in the paper; half of "
        "reward_scale is a good starting value).",
    )


PREVIOUS = "previous"  # source of a reward model: an earlier customization of the same chain


class RewardModelConfig(Section):
    """Settings of reward models."""

    center_weight: float = Field(
        0.01,
        ge=0,
        description="Weight of the squared sum of the two rewards of a pair, which keeps the mean reward near 0 "
        "(Eisenstein et al., arXiv 2312.09244). 0: only differences between rewards are meaningful.",
    )


class JudgeConfig(Section):
    """A language model at an OpenAI-compatible endpoint that rates answers. The texts leave this machine."""

    base_url: str = Field(
        min_length=1, description="URL of the endpoint without /chat/completions, such as https://judge.example/v1."
    )
    model: str = Field(min_length=1, description="Name of the model at the endpoint.")
    api_key_env: str = Field(
        "",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$|^$",
        description="Environment variable with the API key. Empty: no key.",
    )
    criteria: str = Field(
        DEFAULT_CRITERIA,
        min_length=1,
        max_length=20_000,
        description="Criteria for the score, as a text that the judge reads.",
    )
    concurrency: int = Field(4, ge=1, le=64, description="Maximum number of concurrent requests per process.")
    timeout_seconds: float = Field(60, gt=0, description="Timeout of a request in seconds.")
    retries: int = Field(3, ge=0, le=10, description="Maximum number of retries per request.")
    max_tokens: int | None = Field(
        None,
        ge=1,
        description="Maximum number of tokens in all requests to the judge and its judgements. Training stops at the "
        "limit; with a larger limit, it resumes. Concurrent requests may exceed the limit. null: no limit.",
    )

    @model_validator(mode="after")
    def _check_url(self) -> JudgeConfig:
        chat_endpoint.check_url(self.base_url, "base_url", "api_key_env", self.api_key_env)
        return self


# Settings of a judge that do not change its judgements.
JUDGE_OPERATION = {"api_key_env", "concurrency", "timeout_seconds", "retries", "max_tokens"}


class RewardConfig(Section):
    """An entry of `grpo.rewards`."""

    kind: RewardName = Field(
        description="Check that computes the reward, a number from 0 to 1. "
        + " ".join(f"{name}: {entry.summary}." for name, entry in REWARDS.items())
    )
    weight: float = Field(
        1.0,
        ge=0,
        description="Weight relative to the other rewards. 0: the reward is only recorded, to detect reward hacking.",
    )
    pattern: str | None = Field(None, description="regex: Python regular expression for the whole answer.")
    json_schema: dict[str, Any] | None = Field(None, description="json_schema: JSON Schema that the answer must match.")
    max_words: int | None = Field(
        None, ge=1, description="length: number of words up to which an answer has the reward 1."
    )

    # Excluded if unset, so that other recipes keep the digests from before this key existed.
    model: str | None = Field(
        None,
        exclude_if=lambda source: source is None,
        description="reward_model: reward model with the base model's tokenizer and chat template: its folder, store:<sha256>, or "
        "previous for the reward model that an earlier customization of the same command trains.",
    )
    sha256: str | None = Field(
        None,
        pattern=r"^[0-9a-f]{64}$",
        exclude_if=lambda digest: digest is None,
        description="reward_model: expected digest of the reward model. null: the digest is recorded when a run resolves its inputs.",
    )

    cpu_seconds: int | None = Field(
        None,
        ge=1,
        le=600,
        exclude_if=lambda seconds: seconds is None,
        description="unit_tests: CPU time limit, in seconds, for an answer's code and its tests. null: 10.",
    )
    memory_mb: int | None = Field(
        None,
        ge=128,
        exclude_if=lambda megabytes: megabytes is None,
        description="unit_tests: memory limit, in MB, for an answer's code and its tests. null: 512.",
    )

    judge: JudgeConfig | None = Field(
        None, exclude_if=lambda judge: judge is None, description="judge: the language model that rates answers."
    )

    @model_validator(mode="after")
    def _check_parameters(self) -> RewardConfig:
        entry = REWARDS[self.kind]
        given = [
            name
            for name in type(self).model_fields
            if name not in ("kind", "weight") and getattr(self, name) is not None
        ]
        accepted = [*filter(None, [entry.parameter]), *entry.options]
        if unused := [name for name in given if name not in accepted]:
            expected = f"; expected {' or '.join(accepted)}" if accepted else ""
            raise ValueError(f"{unused[0]} cannot be used with {self.kind}{expected}")
        if entry.parameter and entry.parameter not in given:
            raise ValueError(f"{self.kind} requires {entry.parameter}")
        if self.json_schema is not None and util.find_spec("jsonschema"):
            try:
                json_answers.build_validator(self.json_schema, "json_schema")
            except ConfigurationError as error:
                raise ValueError(error.message) from None
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except (re.error, OverflowError, RecursionError) as error:
                raise ValueError(f"pattern is not a regular expression: {error}") from None
        return self


def _check_judges(entries: list[RewardConfig]) -> list[RewardConfig]:
    judges = [judge_rewards.identify(entry.judge) for entry in entries if entry.judge]
    if len(set(judges)) < len(judges):
        raise ValueError("two judges have the same base_url, model and criteria; expected each judge once")
    return entries


class RolloutsConfig(Section):
    """Generation of the answers during reinforcement learning."""

    engine: RolloutEngineName = Field(
        "generate",
        description="Engine. " + " ".join(f"{name}: {entry.summary}." for name, entry in ROLLOUT_ENGINES.items()),
    )


class GrpoConfig(Section):
    """Reinforcement learning: the model answers each prompt several times, and better answers become more likely."""

    rewards: Annotated[list[RewardConfig], AfterValidator(_check_judges)] = Field(
        [],
        max_length=16,
        description="Checks that score an answer. The reward is the weighted mean of the scores. Required by the "
        "objectives grpo and rloo.",
    )
    answers_per_prompt: int = Field(
        8,
        ge=2,
        description="Number of answers to each prompt, which are compared with one another. More answers give a better "
        "estimate, and take proportionally longer.",
    )
    max_answer_tokens: int = Field(
        256,
        ge=1,
        description="Maximum length of an answer in tokens. Longer answers are cut off before they are scored.",
    )
    temperature: float = Field(
        1.0,
        gt=0,
        description="Sampling temperature of the answers. A higher value explores more, but less plausible, answers.",
    )
    kl_weight: float = Field(
        0.02,
        ge=0,
        description="Weight (β) of the penalty for diverging from the model before training. 0: the model may deviate "
        "freely.",
    )
    max_kl: float | None = Field(
        1.0,
        gt=0,
        description="Divergence from the model before training, in nats per token, above which a guard raises an alarm; "
        "not measured if kl_weight is 0. null: no limit.",
    )
    # Excluded if unchanged, so that other recipes keep the digests from before this key existed.
    rollouts: RolloutsConfig = Field(
        RolloutsConfig(),
        exclude_if=lambda rollouts: rollouts == RolloutsConfig(),
        description="Generation of the answers.",
    )
    on_alarm: Literal["stop", "lower_learning_rate", "note"] = Field(
        "stop",
        description="Action on a guard's alarm. stop: stop training, and use the checkpoint with the highest "
        "validation reward. lower_learning_rate: multiply the learning rate by alarm_rate_factor, again after 10 steps "
        "if an alarm persists. note: report the first alarm. Guards: the divergence exceeds max_kl; answers become "
        "much longer or shorter; all answers to most prompts have the same reward; a reward of weight 0 falls while "
        "the total rises.",
    )
    alarm_rate_factor: float = Field(
        0.5,
        gt=0,
        lt=1,
        exclude_if=(0.5).__eq__,
        description="lower_learning_rate: factor on the learning rate at each alarm.",
    )
    min_rate_factor: float = Field(
        0.1,
        gt=0,
        lt=1,
        exclude_if=(0.1).__eq__,
        description="lower_learning_rate: lower limit of the product of these factors. Further alarms are only reported.",
    )


class DistillationConfig(Section):
    """Distillation: the model answers prompts and learns a teacher's probabilities of the tokens."""

    teacher: str | None = Field(
        None,
        description="Teacher: a larger model with the base model's vocabulary, specified like base_model. Required "
        "by the objective distill.",
    )
    teacher_sha256: str | None = Field(
        None,
        pattern=r"^[0-9a-f]{64}$",
        exclude_if=lambda digest: digest is None,
        description="Expected digest of the teacher's files. null: the digest is recorded when a run resolves its inputs.",
    )
    beta: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Divergence to minimize. 1: reverse KL, which avoids answers that the teacher finds unlikely; 0: "
        "forward KL, which covers every answer that the teacher finds likely; in between: a generalized Jensen–Shannon "
        "divergence (Agarwal et al., arXiv 2306.13649).",
    )
    max_answer_tokens: int = Field(256, ge=1, description="Maximum length of an answer in tokens.")
    temperature: float = Field(
        1.0, gt=0, description="Temperature for sampling the answers, and for both models' probabilities in the loss."
    )

    @field_validator("teacher")
    @classmethod
    def _check_teacher(cls, teacher: str | None) -> str | None:
        if teacher is not None and teacher.startswith(("http://", "https://")):
            raise ValueError(
                "teacher is a URL, but the loss needs the teacher's probabilities of every token, which an endpoint does "
                "not return; expected a model. To learn an endpoint's answers, run `tuneline synthesize --template answer@1`, "
                "curate them, and use objective sft"
            )
        return teacher


class RopeScalingConfig(Section):
    """Scaling of rotary positions, which extends the model's context. Published in the model's config.json."""

    type: Literal["yarn", "llama3"] = Field(
        "yarn",
        description="Method. yarn: YaRN (Peng et al., arXiv 2309.00071). llama3: the method of Llama 3.1 "
        "(arXiv 2407.21783).",
    )
    factor: float = Field(
        1.0,
        ge=1,
        description="Extension factor of the model's context, such as 4 for 32,768 tokens instead of 8,192. 1: no scaling.",
    )


class CardConfig(Section):
    """Licences for the model card. They override the licences found in the files."""

    base_licence: str = Field(
        "", description='Licence of the base model, such as "llama3.1". Empty: the licence in its model card.'
    )
    data_licence: str = Field(
        "", description='Licence of the training data, such as "CC-BY-SA-3.0" or "internal". Empty: not stated.'
    )


class SweepConfig(Section):
    """A sweep: several recipes trained on one dataset. The model with the lowest validation loss is the result."""

    vary: dict[str, list[Any]] = Field(
        {},
        description="Keys of this section and the values to try, such as "
        "{learning_rate: [1e-4, 3e-4], lora.rank: [8, 16]}. Every combination is trained; "
        f"at most {MAX_RECIPES} are allowed. Not allowed: {', '.join(LOSS_DEFINING_KEYS)}, which change the definition of "
        "the validation loss, and micro_batch_size with kto and orpo. Empty: no sweep.",
    )
    parallel: int = Field(
        2,
        ge=1,
        description="Maximum number of recipes to train at once. "
        "Without a launcher, the recipes share this machine; with a launcher, each recipe is a separate job.",
    )


class FineTuningConfig(Section):
    """A recipe: objective, adaptation, optimizer settings and device."""

    base_model: str = Field(
        "embedded:smollm2-135m-instruct",
        description="Base model: embedded:smollm2-135m-instruct, a folder in the Hugging Face layout, "
        "store:<sha256> (see `tuneline models import`), or hf://org/name@revision. Also a tuned model: its folder or "
        "store:<sha256>; an adapter is first merged into its base model.",
    )
    # Excluded if unset, so that other recipes keep the digests from before this key existed.
    initial_adapter: str | None = Field(
        None,
        exclude_if=lambda source: source is None,
        description="Tuned model whose adapter is trained further: its folder or store:<sha256>. Requires adaptation "
        "lora with the adapter's settings, and the adapter's base model. The penalty of dpo and kto is relative to this "
        "adapter. null: a new adapter.",
    )
    objective: ObjectiveName = Field(
        "sft",
        description="Training objective. "
        + " ".join(f"{name}: {entry.summary}." for name, entry in OBJECTIVES.items()),
    )
    adaptation: AdaptationName = Field(
        "lora",
        description="Trained parameters. "
        + " ".join(f"{name}: {entry.summary}." for name, entry in ADAPTATIONS.items()),
    )
    lora: LoraConfig = Field(LoraConfig(), description="Settings of the adaptations lora and qlora.")
    prompt: PromptConfig = Field(PromptConfig(), description="Settings of the adaptations p_tuning and prompt_tuning.")
    # Excluded if unchanged, so that other recipes keep the digests from before this adaptation existed.
    ia3: Ia3Config = Field(
        Ia3Config(), exclude_if=lambda ia3: ia3 == Ia3Config(), description="Settings of the adaptation ia3."
    )
    preference: PreferenceConfig = Field(
        PreferenceConfig(), description="Settings of the objectives dpo, kto, orpo and simpo."
    )
    # Excluded if unchanged, so that other recipes keep the digests from before this objective existed.
    grpo: GrpoConfig = Field(
        GrpoConfig(),
        exclude_if=lambda grpo: grpo == GrpoConfig(),
        description="Settings of the objectives grpo and rloo.",
    )
    distillation: DistillationConfig = Field(
        DistillationConfig(),
        exclude_if=lambda settings: settings == DistillationConfig(),
        description="Settings of the objective distill.",
    )
    reward_model: RewardModelConfig = Field(
        RewardModelConfig(),
        exclude_if=lambda settings: settings == RewardModelConfig(),
        description="Settings of the objective reward.",
    )
    card: CardConfig = Field(CardConfig(), description="Licences for the model card.")
    merge: bool = Field(
        False,
        description="Merge the adapter into the base model and publish the whole model, after a check that the "
        "logits agree. The weights keep the base model's data type. One process then needs memory for the whole "
        "model in float32, even with a sharded strategy. The published model is larger, but serving "
        "requires no adapter support.",
    )
    # Excluded if unchanged, so that other recipes keep the digests from before this key existed.
    preset: PresetName = Field(
        "balanced",
        exclude_if=lambda preset: preset == "balanced",
        description="Size of the training run, which sets epochs, max_length and early_stopping if they are null. "
        + " ".join(f"{name}: {entry.summary}." for name, entry in PRESETS.items()),
    )
    max_steps: int | None = Field(
        None, ge=1, description="Number of optimizer steps. null: train for `epochs` instead."
    )
    epochs: float | None = Field(
        None,
        gt=0,
        description="Number of passes over the training rows. Used only if max_steps is null. null: "
        + ", ".join(f"{entry.epochs:g} for {name}" for name, entry in OBJECTIVES.items())
        + ".",
    )
    learning_rate: float | None = Field(
        None,
        gt=0,
        description="Peak learning rate. Training diverges if it is too high. null: chosen from the adaptation, the "
        "objective and the model's hidden size (docs/how-to/fine-tuning.md).",
    )
    optimizer: OptimizerName = Field(
        "adamw",
        description="Optimizer. " + " ".join(f"{name}: {entry.summary}." for name, entry in OPTIMIZERS.items()),
    )
    schedule: Literal["linear", "cosine", "warmup_stable_decay", "constant_with_warmup"] = Field(
        "linear",
        description="Decay of the learning rate after warm-up. warmup_stable_decay: constant until the last tenth of "
        "the steps, then linear to 0 (MiniCPM, arXiv 2404.06395).",
    )
    warmup_steps: int | None = Field(
        None,
        ge=0,
        description="Optimizer steps over which the learning rate rises from 0 to its peak. null: 3% of the steps.",
    )
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay of AdamW and Muon.")
    neftune_noise_alpha: float | None = Field(
        None,
        gt=0,
        description="Scale of uniform noise on the input embeddings during training, for example 5; it can improve "
        "answers on small datasets (NEFTune, Jain et al., arXiv 2310.05914). null: no noise.",
    )
    max_grad_norm: float = Field(
        1.0, gt=0, description="Maximum gradient norm. Larger gradients are scaled down to this norm."
    )
    batch_size: int | None = Field(
        None,
        ge=1,
        description="Rows per optimizer step, over all processes. A larger batch is more stable, but steps are slower. "
        "A packed row counts once, as does a prompt of grpo, rloo and distill. null: 16 (grpo, rloo: 8), or the next multiple of micro_batch_size × "
        "processes.",
    )
    tokens_per_step: int | None = Field(
        None,
        ge=8,
        description="With packing: tokens per optimizer step, used instead of batch_size. "
        "Rounded to a multiple of max_length × micro_batch_size × processes. null: use batch_size.",
    )
    micro_batch_size: int | None = Field(
        None,
        ge=1,
        description="Rows per process in one forward pass. batch_size must be a multiple of "
        "micro_batch_size × processes. Fewer rows need less memory. null: as many as fit into memory, at most 8; at "
        "most 2 on a CPU, or if a launcher trains on other machines.",
    )
    max_length: int | None = Field(
        None,
        ge=8,
        description="Maximum length of a row in tokens. Longer rows are truncated; with objective text, they are "
        "split. grpo, rloo and distill leave out rows whose prompt is longer. Memory use grows with the length. null: "
        "the 95th percentile of the row lengths, within the model's context and memory.",
    )
    # Excluded if unchanged, so that other recipes keep the digests from before this section existed.
    rope_scaling: RopeScalingConfig = Field(
        RopeScalingConfig(),
        exclude_if=lambda scaling: scaling == RopeScalingConfig(),
        description="Extension of the model's context for long rows.",
    )
    # Excluded if unset, so that other recipes keep the digests from before this key existed.
    mixing_weights: dict[str, Annotated[float, Field(ge=0)]] = Field(
        {},
        exclude_if=lambda weights: not weights,
        description="Relative shares of the sources in an epoch, such as {handbook.jsonl: 2, '*': 1}: names of "
        "sources, or globs for sources that share a weight. Rows are repeated or left out accordingly; the number of "
        "rows per epoch does not change. A source's name is its file's name, or the field `source` of its records. "
        "0: leave the source out. Empty: every row once per epoch.",
    )
    mixing_caps: dict[str, Annotated[int, Field(ge=1)]] = Field(
        {},
        exclude_if=lambda caps: not caps,
        description="Maximum number of rows per epoch, such as {'web/*': 10000}, by the name of a source, or by a glob "
        "for sources that are capped together. Each epoch draws different rows. Empty: no maximum.",
    )
    mixing_repetitions: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {},
        exclude_if=lambda repetitions: not repetitions,
        description="Number of times that each row occurs per epoch, such as {handbook.jsonl: 3, 'web/*': 0.5}, by "
        "the name of a source or by a glob. Empty: 1.",
    )
    mixing_temperature: float = Field(
        1.0,
        ge=1,
        exclude_if=lambda temperature: temperature == 1,
        description="Without mixing_weights, the shares of the sources in an epoch are proportional to their numbers of "
        "rows, after repetitions and caps, to the power of 1/mixing_temperature. Higher values bring the shares closer "
        "together (Raffel et al., arXiv 1910.10683, section 3.5.2). 1: proportional shares.",
    )
    packing: bool = Field(
        False,
        description="Pack several short rows into one row of max_length tokens, without attention between the short "
        "rows. Training is faster if most rows are short.",
    )
    checkpoint_every: int | None = Field(
        None,
        ge=1,
        description="Optimizer steps between checkpoints. An interruption loses at most this many steps. "
        "null: a twentieth of the steps, at least 10.",
    )
    keep_checkpoints: int = Field(
        2,
        ge=2,
        description="Number of recent checkpoints to keep, in addition to the best one. "
        "At least 2, because a crash can damage the newest checkpoint.",
    )
    validation_rows: int = Field(
        128,
        ge=0,
        description="Number of validation rows whose loss is measured at every checkpoint; the first rows are used. "
        "With grpo and rloo, the model answers these rows, and the validation loss is 1 − the mean reward. The checkpoint with "
        "the lowest loss is the result. 0: the last checkpoint is the result.",
    )
    sample_prompts: list[str] = Field(
        [],
        max_length=8,
        description="Prompts that the model answers at every validation, for the report. Empty: no prompts. Each answer takes "
        "the time of up to `sample_tokens` forward passes.",
    )
    sample_tokens: int = Field(48, ge=1, description="Maximum length, in tokens, of an answer to sample_prompts.")
    early_stopping: int | None = Field(
        None,
        ge=1,
        description="Stop after this many consecutive validations without a lower loss. null: do not stop early.",
    )
    device: Device = Field(
        "auto",
        description="Training device. auto: the best available device. cuda: NVIDIA GPU. hpu: Intel Gaudi. "
        "mps: Apple GPU. cpu: CPU.",
    )
    precision: Literal["auto", "bfloat16", "float32"] = Field(
        "auto",
        description="Compute precision. auto: bfloat16 on NVIDIA and Gaudi, "
        "float32 elsewhere (bfloat16 is many times slower on a CPU).",
    )
    attention: Literal["auto", "sdpa", "varlen", "flash_attention_2", "eager"] = Field(
        "auto",
        description="Attention kernel. auto, on an NVIDIA GPU with bfloat16: flash_attention_2 if it is installed, else varlen "
        "(PyTorch's FlashAttention for rows of different lengths) for objectives without padding. auto, in all other cases or if "
        "the model does not support these kernels: sdpa (PyTorch's kernel), or else eager.",
    )
    fused_kernels: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Liger's fused layers on NVIDIA GPUs. "
        "auto: on if liger-kernel is installed and supports the model, unless compile is true or the objective is reward or "
        "distill.",
    )
    compile: bool = Field(
        False,
        description="Compile the layers with torch.compile: startup takes about a minute longer, and steps are "
        "faster. Suited to long training runs on GPUs.",
    )
    activation_checkpointing: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Recompute activations in the backward pass: about one third more computation, much less memory. "
        "auto: on if the memory estimate exceeds 90% of the free memory.",
    )
    processes: int = Field(1, ge=1, description="Number of training processes, one per accelerator.")
    strategy: Literal["ddp", "fsdp2", "zero3"] = Field(
        "ddp",
        description="Distribution of the model. ddp: each process holds the whole model. fsdp2, zero3 (DeepSpeed): "
        "each process holds a shard. A run fails if the strategy has no effect.",
    )
    # Excluded if unused, so that a recipe without a sweep keeps its digest from before sweeps existed.
    sweep: SweepConfig = Field(
        SweepConfig(), exclude_if=lambda sweep: not sweep.vary, description="Sweep over several recipes."
    )

    @property
    def adaptation_spec(self) -> Adaptation:
        """The adaptation's settings section, PEFT type and capabilities."""
        return ADAPTATIONS[self.adaptation]

    @property
    def objective_spec(self) -> Objective:
        """The objective's trainer, encoding and capabilities."""
        return OBJECTIVES[self.objective]

    @property
    def rollout_engine(self) -> RolloutEngine:
        """The engine that generates answers, and its capabilities."""
        return ROLLOUT_ENGINES[self.grpo.rollouts.engine]

    @property
    def preset_spec(self) -> Preset:
        """The automatic settings of the training's size."""
        return PRESETS[self.preset]

    @property
    def is_sharded(self) -> bool:
        """Whether each process holds only a shard of the model."""
        return self.strategy in SHARDED_STRATEGIES

    @property
    def is_padding_free(self) -> bool:
        """Whether the rows of a micro-batch form one sequence, instead of being padded to the longest row."""
        return self.objective_spec.is_causal and not self.adaptation_spec.is_prompt_based

    @property
    def has_masked_attention(self) -> bool:
        """Whether attention on a GPU has a mask of rows or padding; flash_attention_2 removes padding instead."""
        return self.attention in ("sdpa", "eager") or (
            not self.is_padding_free and self.attention != "flash_attention_2"
        )

    @property
    def max_answer_tokens(self) -> int:
        """Maximum length of the answers that the model generates during the training; 0 if it generates none."""
        objective = self.objective_spec
        if not objective.generates:
            return 0
        return self.distillation.max_answer_tokens if objective.has_teacher else self.grpo.max_answer_tokens

    @property
    def answers_per_prompt(self) -> int:
        """Answers that the model generates for a prompt in a training step; 0 if it generates none."""
        objective = self.objective_spec
        return 0 if not objective.generates else 1 if objective.has_teacher else self.grpo.answers_per_prompt

    @property
    def precomputes_reference(self) -> bool:
        """Whether TRL computes the reference of the loss before training, if the training visits every row.

        TRL hashes the model for it, which fails on FSDP2's shards.
        """
        return self.objective_spec.precomputes_reference and self.strategy != "fsdp2"

    @property
    def has_sharded_checkpoints(self) -> bool:
        """Whether the processes write their shards to FSDP2's checkpoints. They hold equal adapters, which one writes."""
        return self.strategy == "fsdp2" and self.adaptation_spec.trains_all_weights

    @property
    def max_checkpoints(self) -> int:
        """Most checkpoints at one time: the oldest is removed after the newest is complete, and the best may be older."""
        return self.keep_checkpoints + 1 + bool(self.validation_rows)

    @property
    def mixing(self) -> MixingSettings:
        """Settings for the shares of the sources in an epoch."""
        return MixingSettings(self.mixing_weights, self.mixing_caps, self.mixing_repetitions, self.mixing_temperature)

    @property
    def has_lora_dropout(self) -> bool:
        """Whether low-rank updates use dropout, which stores additional activations."""
        return self.adaptation_spec.is_low_rank and self.lora.dropout > 0 and not self.objective_spec.disables_dropout

    @model_validator(mode="after")
    def _check_consistency(self) -> FineTuningConfig:
        for is_conflict, reason in _find_conflicts(self):
            if is_conflict:
                raise ValueError(reason)
        return self

    @model_validator(mode="after")
    def _check_sweep(self) -> FineTuningConfig:
        if not self.sweep.vary:
            return self
        for key, values in self.sweep.vary.items():
            if reason := self._explain_invalid_key(key, values):
                raise ValueError(f"sweep.vary: {key} {reason}")
        count = math.prod(map(len, self.sweep.vary.values()))
        if count > MAX_RECIPES:
            raise ValueError(f"sweep.vary: {count} combinations; expected at most {MAX_RECIPES}")
        for name, recipe in self.recipes.items():
            if not recipe.validation_rows:
                raise ValueError(
                    f"sweep.vary: {name}: validation_rows is 0; expected at least 1, "
                    "because the sweep compares recipes by validation loss"
                )
        return self

    def _explain_invalid_key(self, key: str, values: list[Any]) -> str:
        """Return the reason why a sweep cannot vary this key over these values, or ""."""
        section, _, subkey = key.partition(".")
        if section == "micro_batch_size" and (term := self.objective_spec.micro_batch_term):
            return (
                f"cannot be varied: {term} of {self.objective}'s loss is the mean over a micro-batch, "
                "so losses of different recipes are not comparable"
            )
        if section in LOSS_DEFINING_KEYS or key in LOSS_DEFINING_KEYS:
            return "changes the definition of the validation loss, so losses of different recipes are not comparable"
        if section in NON_RECIPE_KEYS:
            return "is not part of a recipe"
        value = getattr(self, section) if section in FineTuningConfig.model_fields else None
        subkeys = type(value).model_fields if isinstance(value, BaseModel) else {}
        if section not in FineTuningConfig.model_fields or (subkey and subkey not in subkeys):
            return "is not a key of fine_tuning"
        if subkeys and not subkey:
            return f"is a section; expected one of its keys, such as {section}.{next(iter(subkeys))}"
        return "" if values else "has an empty list of values; expected at least one value"

    @property
    def recipes(self) -> dict[str, FineTuningConfig]:
        """The recipes of a sweep by name, such as "learning_rate=0.0001, lora.rank=8"; {"": self} without a sweep.

        Raises:
            ValueError: a recipe is invalid or listed twice.
        """
        recipes: dict[str, FineTuningConfig] = {}
        keys = sorted(self.sweep.vary)  # their order differs in a plan, which is canonical JSON
        for changes in itertools.product(*(self.sweep.vary[key] for key in keys)):
            values = self.model_dump(exclude={"sweep"})
            for key, value in zip(keys, changes, strict=True):
                section, _, subkey = key.partition(".")
                values[section] = values.get(section, {}) | {subkey: value} if subkey else value
            try:
                recipe = FineTuningConfig.model_validate(values)
            except ValidationError as error:
                name = ", ".join(f"{key}={value}" for key, value in zip(keys, changes, strict=True))
                raise ValueError(describe_validation_error(error, f"sweep.vary: {name}", FineTuningConfig)) from None
            name = ", ".join(f"{key}={recipe.get_value(key)}" for key in keys)
            if name in recipes:
                raise ValueError(f"sweep.vary: {name} is listed twice")
            recipes[name] = recipe
        return recipes

    def get_value(self, key: str) -> object:
        """Return the value of a dotted key, such as lora.rank."""
        value: object = self
        for part in key.split("."):
            value = getattr(value, part)
        return value


class Recipe(FineTuningConfig):
    """A recipe whose automatic settings have been chosen, without a sweep."""

    epochs: float = Field(gt=0)
    learning_rate: float = Field(gt=0)
    batch_size: int = Field(ge=1)
    micro_batch_size: int = Field(ge=1)
    max_length: int = Field(ge=8)

    @property
    def rows_per_step(self) -> int:
        """Rows, or packed rows, per optimizer step; a multiple of micro_batch_size × processes."""
        if not self.tokens_per_step:
            return self.batch_size
        concurrent_rows = self.micro_batch_size * self.processes
        return max(1, round(self.tokens_per_step / (self.max_length * concurrent_rows))) * concurrent_rows

    @property
    def gradient_accumulation_steps(self) -> int:
        """Number of micro-batches per process in an optimizer step."""
        return self.rows_per_step // (self.micro_batch_size * self.processes)


def pop_placement(config: dict[str, Any]) -> dict[str, Any]:
    """Remove the keys that do not affect the result from the section `fine_tuning` of a plan, and return them.

    They are `parallel` of a sweep, and by position in `grpo.rewards` the keys JUDGE_OPERATION of judges.
    """
    placement: dict[str, Any] = {}
    if sweep := config.get("sweep"):
        placement["parallel"] = sweep.pop("parallel")
    rewards = config.get("grpo", {}).get("rewards", [])
    if judges := {number: entry["judge"] for number, entry in enumerate(rewards) if "judge" in entry}:
        placement["judges"] = {
            str(number): {name: judge.pop(name) for name in sorted(JUDGE_OPERATION)} for number, judge in judges.items()
        }
    return placement


def recipe_from_plan(config: dict[str, Any], placement: dict[str, Any]) -> FineTuningConfig:
    """Return the recipe of a step's plan.

    Args:
        config: The section `fine_tuning` of the plan.
        placement: The keys that `pop_placement` removed.
    """
    config = copy.deepcopy(config)
    if "parallel" in placement:
        config["sweep"]["parallel"] = placement["parallel"]
    for number, keys in placement.get("judges", {}).items():
        config["grpo"]["rewards"][int(number)]["judge"] |= keys
    return FineTuningConfig.model_validate(config)


def _find_conflicts(c: FineTuningConfig) -> list[tuple[bool, str]]:
    """Return a pair for each invalid combination: whether the recipe has it, and the error message."""
    return [*_find_row_conflicts(c), *_find_adaptation_conflicts(c), *_find_distribution_conflicts(c)]


def _find_rollout_conflicts(c: FineTuningConfig) -> list[tuple[bool, str]]:
    adaptation, is_other = c.adaptation_spec, c.rollout_engine.answer is not None
    return [
        (
            is_other and not c.objective_spec.has_rewards,
            f"grpo.rollouts.engine {c.grpo.rollouts.engine} cannot be used with {c.objective}; expected objective grpo or "
            "rloo",
        ),
        (
            is_other and (adaptation.is_prompt_based or c.compile),
            f"grpo.rollouts.engine {c.grpo.rollouts.engine} cannot be used with adaptation {c.adaptation} and compile "
            f"{str(c.compile).lower()}: it generates without virtual tokens, and has not been tested with compiled "
            "layers; expected lora, qlora, ia3 or full, and compile false",
        ),
    ]


def _find_row_conflicts(c: FineTuningConfig) -> list[tuple[bool, str]]:
    adaptation, objective = c.adaptation_spec, c.objective_spec
    times_processes = f" × processes {c.processes}" if c.processes > 1 else ""
    micro_batch_size = c.micro_batch_size or objective.min_micro_batch_size
    concurrent_rows = micro_batch_size * c.processes
    return [
        (
            not c.tokens_per_step and (c.batch_size or 0) % concurrent_rows > 0,
            f"batch_size {c.batch_size} is not a multiple of micro_batch_size {micro_batch_size}{times_processes}",
        ),
        (
            c.packing and adaptation.is_prompt_based,
            f"packing cannot be used with {c.adaptation}: the virtual tokens precede only the first packed row, "
            "and PEFT drops the position ids that separate packed rows",
        ),
        (
            c.packing and not objective.is_causal,
            f"packing cannot be used with {c.objective}: the loss compares whole rows",
        ),
        (
            c.mixing.is_active and c.packing,
            f"{', '.join(c.mixing.active_keys)} cannot be used with packing: a packed row contains rows of several "
            "sources; expected packing false",
        ),
        (
            bool(c.mixing_weights) and c.mixing_temperature != 1,
            f"mixing_temperature {c.mixing_temperature:g} cannot be used with mixing_weights: the weights set the shares "
            "of the sources; expected mixing_temperature 1, or no mixing_weights",
        ),
        (
            bool(c.mixing_weights) and not any(c.mixing_weights.values()),
            "mixing_weights: every weight is 0; expected at least one above 0",
        ),
        (
            bool(c.tokens_per_step) and not c.packing,
            "tokens_per_step requires packing, which is false: without packing, rows differ in length and a "
            "step has fewer tokens",
        ),
        (
            bool(c.initial_adapter) and (c.adaptation != "lora" or c.is_sharded),
            f"initial_adapter cannot be used with adaptation {c.adaptation} and strategy {c.strategy}; expected lora "
            "and ddp",
        ),
        (
            (c.micro_batch_size or objective.min_micro_batch_size) < objective.min_micro_batch_size,
            f"{c.objective} requires micro_batch_size {objective.min_micro_batch_size} or more; found "
            f"{c.micro_batch_size}: the reference term of the loss is the mean over the rows of a micro-batch",
        ),
        (
            objective.has_rewards != bool(c.grpo.rewards),
            f"objective {c.objective} requires grpo.rewards; found none"
            if objective.has_rewards
            else f"grpo.rewards cannot be used with {c.objective}; expected objective grpo or rloo",
        ),
        (
            objective.has_teacher != bool(c.distillation.teacher),
            "objective distill requires distillation.teacher; found none"
            if objective.has_teacher
            else f"distillation.teacher cannot be used with {c.objective}; expected objective distill",
        ),
        (
            objective.has_teacher and adaptation.is_prompt_based,
            f"adaptation {c.adaptation} cannot be used with {c.objective}: the loss is computed without virtual tokens",
        ),
        *_find_rollout_conflicts(c),
        (
            bool(c.grpo.rewards) and not any(reward.weight for reward in c.grpo.rewards),
            "grpo.rewards: every weight is 0; expected at least one above 0",
        ),
        (
            bool(c.sample_prompts) and objective.scores_answers,
            f"sample_prompts cannot be used with {c.objective}: a reward model does not answer prompts",
        ),
        (
            bool(c.sample_prompts) and (not c.validation_rows or c.is_sharded),
            f"sample_prompts requires validation_rows of at least 1 and strategy ddp; found {c.validation_rows} and "
            f"{c.strategy}: the prompts are answered at validations, by one process",
        ),
        (
            bool(c.early_stopping) and not c.validation_rows,
            "early_stopping requires validation_rows of at least 1; found 0: early stopping monitors the "
            "validation loss",
        ),
    ]


def _find_adaptation_conflicts(c: FineTuningConfig) -> list[tuple[bool, str]]:
    adaptation, objective = c.adaptation_spec, c.objective_spec
    unmergeable = (
        "it trains all weights, so no adapter exists"
        if adaptation.trains_all_weights
        else "virtual tokens are inputs and cannot be added to weights"
    )
    return [
        (c.merge and not adaptation.is_mergeable, f"merge cannot be used with {c.adaptation}: {unmergeable}"),
        (
            c.rope_scaling.factor > 1
            and (c.is_sharded or adaptation.holds_4bit_weights or not (c.merge or adaptation.trains_all_weights)),
            f"rope_scaling cannot be used with adaptation {c.adaptation}, merge {str(c.merge).lower()} and strategy "
            f"{c.strategy}: the scaling is published in the configuration of whole weights; expected adaptation full, "
            "or lora or ia3 with merge true, and strategy ddp",
        ),
        (
            c.rope_scaling.factor > 1 and objective.has_reference and adaptation.trains_all_weights,
            f"rope_scaling cannot be used with {c.objective} and full: the reference model has the unscaled positions; "
            "expected lora with merge true, or objective simpo or orpo",
        ),
        (
            objective.scores_answers and not adaptation.fits_reward_models,
            f"adaptation {c.adaptation} cannot be used with {c.objective}: it has not been tested with reward models; "
            f"expected {' or '.join(name for name, entry in ADAPTATIONS.items() if entry.fits_reward_models)}",
        ),
        (
            objective.scores_answers and (c.merge or bool(c.initial_adapter) or c.rope_scaling.factor > 1),
            f"merge, initial_adapter and rope_scaling cannot be used with {c.objective}, which adds a new output layer to "
            "the base model; expected merge false, no initial_adapter and rope_scaling.factor 1",
        ),
        (
            adaptation.holds_4bit_weights and c.device in ("cpu", "mps", "hpu"),
            f"{c.adaptation} cannot run on {c.device}: the 4-bit weights of bitsandbytes require an NVIDIA GPU; "
            "expected device auto or cuda",
        ),
        (
            bool(c.lora.plus_ratio) and (not adaptation.is_low_rank or c.is_sharded),
            f"lora.plus_ratio cannot be used with adaptation {c.adaptation} and strategy {c.strategy}: it sets the "
            "rates of the two matrices of an unsharded low-rank update; expected lora or qlora with ddp",
        ),
        (
            bool(c.neftune_noise_alpha) and (not objective.is_causal or adaptation.is_prompt_based),
            f"neftune_noise_alpha cannot be used with {c.objective} and {c.adaptation}: noise can be added only to "
            "the input embeddings of sft and text, without virtual tokens",
        ),
        (
            OPTIMIZERS[c.optimizer].trains_matrices and not adaptation.trains_all_weights,
            f"optimizer {c.optimizer} cannot be used with {c.adaptation}: it updates whole weight matrices; expected "
            "adaptation full, or optimizer adamw",
        ),
        (
            OPTIMIZERS[c.optimizer].requires_bitsandbytes and c.device in ("cpu", "mps", "hpu"),
            f"optimizer {c.optimizer} cannot run on {c.device}: bitsandbytes requires an NVIDIA GPU; expected "
            "optimizer adamw or adafactor",
        ),
    ]


def _find_distribution_conflicts(c: FineTuningConfig) -> list[tuple[bool, str]]:
    return [
        (
            c.is_sharded and (c.objective_spec.generates or c.objective_spec.scores_answers),
            f"strategy {c.strategy} cannot be used with {c.objective}, which has not been tested with shards; expected ddp",
        ),
        (
            c.optimizer != "adamw" and c.is_sharded,
            f"optimizer {c.optimizer} cannot be used with strategy {c.strategy}: "
            + (
                "it needs whole matrices"
                if OPTIMIZERS[c.optimizer].trains_matrices
                else "it has not been tested on shards"
            )
            + "; expected adamw",
        ),
        (
            c.is_sharded and c.processes == 1,
            f"strategy {c.strategy} requires at least 2 processes; processes is 1",
        ),
        (
            any(entry.judge and (entry.judge.max_tokens or c.processes) < c.processes for entry in c.grpo.rewards),
            f"grpo.rewards: max_tokens of a judge is less than the number of processes, {c.processes}, which share it",
        ),
        (
            c.is_sharded and not c.adaptation_spec.is_shardable,
            f"strategy {c.strategy} cannot be used with {c.adaptation}: the trained tensors are not sharded",
        ),
    ]
