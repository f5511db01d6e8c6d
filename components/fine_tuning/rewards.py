"""Rewards of reinforcement learning, which score the answers that a model generates, from 0 to 1.

To add a reward, extend `RewardName` and `REWARDS`; a parameter is a key of `RewardConfig`.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from components.common.answer_metrics import ifeval_checks, json_answers, numeric_answers, repetition, squad_metrics
from components.common.runtime import code_sandbox
from components.common.runtime.counts import format_count
from components.common.runtime.errors import InputError, TrainingError
from components.fine_tuning import code_rewards, judge_rewards

if TYPE_CHECKING:
    from components.fine_tuning.config import JudgeConfig, RewardConfig

RewardName = Literal[
    "exact_match",
    "final_number",
    "f1",
    "json_valid",
    "json_schema",
    "json_match",
    "regex",
    "length",
    "no_repetition",
    "ifeval",
    "unit_tests",
    "reward_model",
    "judge",
]
REWARD_BATCH_TOKENS = 2048  # of a reward model
MAX_SCORED_REFERENCES = 32


@dataclass(frozen=True)
class Rollout:
    """A generated answer to a prompt.

    Attributes:
        question: The last message of the prompt.
        reference: The answer in the training row.
        answer: The generated answer, without special tokens.
        tokens: The tokens of the prompt and of the answer.
        meta: The other fields of the training row, as a JSON object.
    """

    question: str
    reference: str
    answer: str
    tokens: Sequence[int] = ()
    meta: str = "{}"


Fields = Mapping[str, Any]  # of a training row
Check = Callable[[Rollout], float]
Scorer = Callable[[Sequence[Rollout]], list[float]]  # nan: without a score


@dataclass(frozen=True)
class RewardInputs:
    """Inputs of the scorers besides the configuration.

    Attributes:
        reward_bases: Folders of the base models of reward models, by the folders of the reward models. A base model that
            is not listed is resolved from the manifest.
        state: Folder of the training's state, where judgements and verdicts are stored. None: they are not stored.
    """

    reward_bases: Mapping[str, str] = field(default_factory=dict)
    state: Path | None = None


@dataclass(frozen=True)
class Reward:
    """A kind of reward.

    Attributes:
        summary: What the reward checks; shown in the configuration reference.
        build: Function that returns the scorer of an entry of `grpo.rewards`.
        parameter: Key of the entry that the reward requires; "" if it has none.
        options: Keys of the entry that the reward accepts.
        check_fields: Function that checks the fields of a training row that the reward reads. It raises ValueError, whose
            message begins with a verb.
        check_machine: Function that checks whether this machine can compute the reward.
        check_service: Function that sends a request to the service that computes the reward.
    """

    summary: str
    build: Callable[[RewardConfig, RewardInputs], Scorer]
    parameter: str = ""
    options: tuple[str, ...] = ()
    check_fields: Callable[[Fields], object] | None = None
    check_machine: Callable[[RewardConfig], object] | None = None
    check_service: Callable[[RewardConfig], object] | None = None


def _score_each(build_check: Callable[[RewardConfig], Check]) -> Callable[[RewardConfig, RewardInputs], Scorer]:
    """Return the `build` of a reward that scores one answer at a time."""

    def build(config: RewardConfig, _: RewardInputs) -> Scorer:
        check = build_check(config)
        return lambda rollouts: [check(rollout) for rollout in rollouts]

    return build


def _build_schema_check(config: RewardConfig) -> Check:
    validator = json_answers.build_validator(config.json_schema, "the schema in fine_tuning.grpo.rewards")
    return lambda rollout: json_answers.score_schema(rollout.answer, validator)


def score_json_match(answer: str, reference: str) -> float:
    """Return the share of the keys of both JSON objects that have equal values; other JSON values are equal or not."""
    try:
        found, expected = (json_answers.parse_json_answer(text) for text in (answer, reference))
    except json_answers.InvalidJSONAnswerError:
        return 0.0
    if not (isinstance(found, dict) and isinstance(expected, dict)):
        return float(found == expected)
    keys = found.keys() | expected.keys()
    equal = [key for key in keys if key in found and key in expected and found[key] == expected[key]]
    return len(equal) / len(keys) if keys else 1.0


def _build_regex_check(config: RewardConfig) -> Check:
    pattern = re.compile(config.pattern or "", re.DOTALL)
    return lambda rollout: float(pattern.fullmatch(rollout.answer.strip()) is not None)


def _build_length_check(config: RewardConfig) -> Check:
    limit = config.max_words or 1

    def score(rollout: Rollout) -> float:
        words = len(rollout.answer.split())
        return min(1.0, max(0.0, 2 - words / limit)) if words else 0.0

    return score


def _score_instructions(rollout: Rollout) -> float:
    row = json.loads(rollout.meta)
    instructions = {name: row[name] for name in ("instruction_id_list", "kwargs")}
    followed = ifeval_checks.check_answer(instructions, rollout.answer)["inst_level_strict_acc"]
    return sum(followed) / len(followed)


def _check_repetition(rollout: Rollout) -> float:
    return float(bool(rollout.answer.strip()) and not repetition.is_repetitive(rollout.answer))


def _build_unit_tests(config: RewardConfig, inputs: RewardInputs) -> Scorer:
    score_code = code_rewards.build_scorer(config.cpu_seconds, config.memory_mb, inputs.state)
    return lambda rollouts: score_code([(one.question, one.answer, json.loads(one.meta)) for one in rollouts])


def _get_judge(config: RewardConfig) -> JudgeConfig:
    assert config.judge is not None  # required by the kind
    return config.judge


def _build_judge(config: RewardConfig, inputs: RewardInputs) -> Scorer:
    score_answers = judge_rewards.build_scorer(_get_judge(config), inputs.state)
    return lambda rollouts: score_answers([(rollout.question, rollout.answer) for rollout in rollouts])


def _load_reward_model(config: RewardConfig, inputs: RewardInputs) -> Scorer:
    """Return a scorer of the reward model in the folder `config.model`.

    Its rewards are centered at 0, so that in the Bradley–Terry model σ(reward) is the probability that an answer is
    preferred to one with the mean reward.
    """
    from components.common.artifacts import artifact_folder
    from components.common.models import model_loading, reward_models

    folder = str(config.model)
    base = inputs.reward_bases.get(folder)
    artifact = artifact_folder.read(Path(folder), artifact_folder.REWARD_MODEL)
    opened = model_loading.open_model_artifact(
        artifact, accepts_reward_models=True, base_folder=Path(base) if base else None
    )
    model = reward_models.load_reward_model(opened, model_loading.load_tokenizer(opened.tokenizer))

    def score(rollouts: Sequence[Rollout]) -> list[float]:
        conversations = [rollout.tokens for rollout in rollouts]
        rewards = reward_models.compute_rewards(model, conversations, REWARD_BATCH_TOKENS)
        if invalid := sum(not math.isfinite(reward) for reward in rewards):
            raise TrainingError(
                f"the reward model in {folder} returns a non-finite reward for {invalid} of "
                f"{format_count(len(rewards), 'answer')}",
                hint="Train the reward model again with a lower fine_tuning.learning_rate.",
            )
        return [0.5 * (1 + math.tanh(reward / 2)) for reward in rewards]  # σ without an overflow

    return score


REWARDS: dict[RewardName, Reward] = {
    "exact_match": Reward(
        "the answer equals the row's answer, ignoring case, punctuation and articles",
        _score_each(lambda _: lambda rollout: squad_metrics.exact_match(rollout.answer, [rollout.reference])),
    ),
    "final_number": Reward(
        "the last number of the answer equals that of the row's answer",
        _score_each(lambda _: lambda rollout: numeric_answers.score_final_number(rollout.answer, [rollout.reference])),
    ),
    "f1": Reward(
        "F1 score of the words that the answer shares with the row's answer",
        _score_each(lambda _: lambda rollout: squad_metrics.f1(rollout.answer, [rollout.reference])),
    ),
    "json_valid": Reward(
        "the answer is a JSON value", _score_each(lambda _: lambda rollout: json_answers.score_json(rollout.answer))
    ),
    "json_schema": Reward(
        "the answer is JSON that matches `json_schema`", _score_each(_build_schema_check), "json_schema"
    ),
    "json_match": Reward(
        "share of the keys of the two JSON objects, in the answer and in the row's answer, whose values are equal",
        _score_each(lambda _: lambda rollout: score_json_match(rollout.answer, rollout.reference)),
    ),
    "regex": Reward(
        "the whole answer matches the regular expression `pattern`", _score_each(_build_regex_check), "pattern"
    ),
    "length": Reward(
        "1 for an answer of at most `max_words` words, decreasing to 0 at twice that number",
        _score_each(_build_length_check),
        "max_words",
    ),
    "no_repetition": Reward(
        "the answer is not empty and does not repeat its words",
        _score_each(lambda _: _check_repetition),
    ),
    "ifeval": Reward(
        "share of the row's instructions that the answer follows; the row has the fields instruction_id_list and "
        "kwargs, as in the IFEval dataset",
        _score_each(lambda _: _score_instructions),
        check_fields=ifeval_checks.parse_instructions,
        check_machine=lambda _: ifeval_checks.load_checkers(),
    ),
    "unit_tests": Reward(
        "the Python code in the answer passes the tests in the row's field test, with entry_point as in HumanEval; "
        "the code runs in isolation, with only Python's standard library",
        _build_unit_tests,
        options=("cpu_seconds", "memory_mb"),
        check_fields=code_rewards.check_tests,
        check_machine=lambda _: code_sandbox.check_isolation(),
    ),
    "reward_model": Reward(
        "a reward model's estimate of the probability that people prefer the answer to an average answer",
        _load_reward_model,
        "model",
        options=("sha256",),
    ),
    "judge": Reward(
        "the score from 1 to 10 that a language model at an endpoint gives the answer, scaled to 0 to 1",
        _build_judge,
        "judge",
        check_machine=lambda config: judge_rewards.read_key(_get_judge(config)),
        check_service=lambda config: judge_rewards.probe(_get_judge(config)),
    ),
}


@dataclass(frozen=True)
class WeightedReward:
    """An entry of `grpo.rewards`: its name in metrics, its share of the total reward, its scorer, and whether it uses a service."""

    name: str
    weight: float
    compute: Scorer
    has_service: bool = False

    def score(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Return the reward of each rollout; 0 without a score."""
        return fill_missing(self.compute(rollouts))


def fill_missing(scores: Sequence[float]) -> list[float]:
    """Return the scores with 0 instead of nan."""
    return [0.0 if math.isnan(score) else score for score in scores]


def name_rewards(entries: Sequence[RewardConfig]) -> list[str]:
    """Return the names of the entries in metrics: their kinds. A kind that is listed again has its position in its name."""
    kinds = [entry.kind for entry in entries]
    return [f"{kind}_{number}" if kind in kinds[: number - 1] else kind for number, kind in enumerate(kinds, start=1)]


def normalize_weights(entries: Sequence[RewardConfig]) -> list[float]:
    """Return the weights of the entries, scaled to a sum of 1."""
    total = sum(entry.weight for entry in entries)
    return [entry.weight / total for entry in entries]


def reads_fields(entries: Iterable[RewardConfig]) -> bool:
    """Return whether a reward reads fields of the training row besides its conversation."""
    return any(REWARDS[entry.kind].check_fields for entry in entries)


def has_machine_requirements(entries: Iterable[RewardConfig]) -> bool:
    """Return whether a reward requires what some machines lack."""
    return any(REWARDS[entry.kind].check_machine for entry in entries)


def check_machine(entries: Iterable[RewardConfig]) -> None:
    """Check that this machine can compute the rewards.

    Raises:
        ConfigurationError: generated code cannot be isolated, data of IFEval's checkers is missing, or an API key is not set.
        EngineMissingError: IFEval's checkers are not installed.
    """
    for entry in entries:
        if check := REWARDS[entry.kind].check_machine:
            check(entry)


def check_services(entries: Iterable[RewardConfig]) -> None:
    """Send a request to each service that computes a reward.

    Raises:
        ConfigurationError: an API key is not set.
        EngineMissingError: a service does not answer, or rejects the request.
    """
    for entry in entries:
        if check := REWARDS[entry.kind].check_service:
            check(entry)


def check_row_fields(entries: Iterable[RewardConfig], location: str, meta: str | None) -> None:
    """Check the fields of a training row that the rewards read.

    Args:
        entries: The entries of `grpo.rewards`.
        location: Id of the row, or its file and line, for the error.
        meta: The fields besides the conversation, as a JSON object.

    Raises:
        InputError: a field is missing or invalid.
    """
    for entry in entries:
        check = REWARDS[entry.kind].check_fields
        try:
            if check:
                check(json.loads(meta or "{}"))
        except ValueError as error:
            raise InputError(
                f"the reward {entry.kind} cannot score the row {location}: the row {error}",
                hint="Correct or remove the row in the sources (docs/how-to/reinforcement-learning.md).",
            ) from None


def score_references(entries: Sequence[RewardConfig], rows: Sequence[Fields]) -> tuple[dict[str, float], int]:
    """Score reference answers as if the model had generated them, except with reward models and services.

    Args:
        entries: The entries of `grpo.rewards`.
        rows: Training rows with `question`, `reference` and `meta`. At most MAX_SCORED_REFERENCES, evenly spread, are scored.

    Returns:
        The mean score by the name of the reward, and the number of scored rows.
    """
    chosen = (rows[index] for index in range(0, len(rows), math.ceil(len(rows) / MAX_SCORED_REFERENCES) or 1))
    rollouts = [Rollout(row["question"], row["reference"], row["reference"], (), row["meta"]) for row in chosen]
    local = {
        name: REWARDS[entry.kind].build(entry, RewardInputs())
        for name, entry in zip(name_rewards(entries), entries, strict=True)
        if REWARDS[entry.kind].parameter not in ("model", "judge")
    }
    means = {name: math.fsum(score(rollouts)) / len(rollouts) for name, score in local.items()} if rollouts else {}
    return means, len(rollouts)


def describe_references(means: Mapping[str, float], rows: int) -> list[str]:
    """Return a warning for each reward of which all reference answers get 0.

    Args:
        means: The mean score by the name of the reward, as `score_references` returns it.
        rows: The number of scored rows.
    """
    return [
        f"the reward {name} is 0 for the reference answer of every checked row ({format_count(rows, 'row')}). "
        "Correct the reward or the rows, unless the references are placeholders"
        for name, mean in means.items()
        if not mean
    ]


def build_rewards(entries: Sequence[RewardConfig], inputs: RewardInputs = RewardInputs()) -> list[WeightedReward]:
    """Return the rewards, with weights that sum to 1. Reward models are loaded from their folders.

    Args:
        entries: The entries of `grpo.rewards`.
        inputs: The other inputs of the scorers.

    Raises:
        ConfigurationError: a JSON schema is invalid, or a reward model cannot be loaded.
    """
    return [
        WeightedReward(
            name, weight, REWARDS[entry.kind].build(entry, inputs), REWARDS[entry.kind].check_service is not None
        )
        for name, weight, entry in zip(name_rewards(entries), normalize_weights(entries), entries, strict=True)
    ]


def compute_totals(
    rewards: Sequence[WeightedReward], rollouts: Sequence[Rollout]
) -> tuple[dict[str, list[float]], list[float]]:
    """Return the scores of each reward by name, and the weighted sum of each rollout."""
    scores = {reward.name: reward.score(rollouts) for reward in rewards}
    weights = [reward.weight for reward in rewards]
    totals = [sum(map(operator.mul, weights, values)) for values in zip(*scores.values(), strict=True)]
    return scores, totals
