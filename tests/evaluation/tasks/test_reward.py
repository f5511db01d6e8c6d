"""The task `reward`: accuracy, length bias, calibration, and the whole evaluation of a reward model.

In the fast tier: the models are tiny, and one trained reward model serves all tests.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from components.common.artifacts.artifact_folder import Artifact
from components.common.models import model_loading
from components.common.runtime.errors import ConfigurationError
from components.common.runtime.reporters import Reporter, SilentReporter
from components.evaluation.config import EvaluationConfig, adapt_to_reward_model
from components.evaluation.reward_engine import RewardEngine
from components.evaluation.stage import evaluate
from components.evaluation.tasks import reward
from components.evaluation.tasks.reward import Reward, RewardTask
from components.fine_tuning.stage import finetune
from pipelines.config.customization_config import Customization, check_consistency
from tests.datasets import dataset_of, small_dataset
from tests.evaluation.tasks.fake_engines import PlainEngine, build_context
from tests.evaluation.tasks.test_likelihood_tasks import write_rows
from tests.fine_tuning.recipes import recipe
from tests.tiny import tiny_model

PAIRS = (
    {"id": "1", "prompt": "What is it?", "chosen": "A list.", "rejected": "The quick brown fox.", "subset": "chat"},
    {"id": "2", "prompt": "Open it?", "chosen": "Read every line of the file.", "rejected": "No.", "subset": "code"},
)


class FixedRewards(RewardEngine):
    """An engine with given rewards, in order."""

    def __init__(self, tokenizer: Any, rewards: Sequence[float]) -> None:
        self.tokenizer, self.rewards = tokenizer, list(rewards)
        self.conversations: list[list[int]] = []

    @property
    def max_input_tokens(self) -> int | None:
        return 14

    def compute_rewards(self, conversations: Sequence[Sequence[int]], reporter: Reporter) -> list[float]:
        self.conversations = [list(ids) for ids in conversations]
        return self.rewards


def build_task(folder: Path, **settings: Any) -> RewardTask:
    return RewardTask(Reward(data=write_rows(folder / "pairs.jsonl", *PAIRS), **settings))


def test_accuracy_bias_and_texts_of_pairs(engine: PlainEngine, tmp_path: Path) -> None:
    task, context = build_task(tmp_path), build_context(engine.tokenizer)
    items = task.items(context)
    assert [item.category for item in items] == ["chat", "code"], "RewardBench names its slices subset"
    fixed = FixedRewards(engine.tokenizer, [1.5, 0.5, -1.0, 2.0])
    scores = task.score(fixed, items, context, None)
    assert scores.values == {"accuracy": [1.0, 0.0]}
    assert scores.answers[1] == "reward of the chosen answer -1.000, of the rejected answer 2.000"
    assert max(map(len, fixed.conversations)) == 14, "longer conversations are truncated"
    figures = scores.figures
    assert (figures["pairs_chosen_shorter"], figures["accuracy_chosen_shorter"]) == (1, 1.0)
    assert (figures["pairs_chosen_longer"], figures["accuracy_chosen_longer"]) == (1, 0.0)
    assert (figures["longer_wins"], figures["longer_is_chosen"], figures["mean_reward"]) == (0.0, 0.5, 0.75)


def test_base_model_prefers_the_answer_with_the_higher_likelihood_per_token(
    engine: PlainEngine, tmp_path: Path
) -> None:
    from components.evaluation.tasks.preference import Preference, PreferenceTask

    task, context = build_task(tmp_path), build_context(engine.tokenizer)
    likelihoods = PreferenceTask(Preference(data=task.settings.data))
    expected = likelihoods.score(engine, likelihoods.items(context), context, None)
    scores = task.score(engine, task.items(context), context, None)
    assert scores.values["accuracy"] == expected.values["accuracy_per_token"]


@pytest.mark.parametrize(("pairs", "ids"), [("all", ["1", "2"]), ("chosen_shorter", ["1"]), ("chosen_longer", ["2"])])
def test_pairs_are_selected_by_length(pairs: str, ids: list[str], engine: PlainEngine, tmp_path: Path) -> None:
    items = build_task(tmp_path, pairs=pairs).build_items(build_context(engine.tokenizer))
    assert [item.id for item in items] == ids


def test_calibration_error_of_known_margins() -> None:
    certain = math.log(19)  # a confidence of 95%
    figures = reward.measure_calibration([certain] * 19 + [-certain])
    assert figures["calibration_error"] == pytest.approx(0, abs=1e-12)
    assert (figures["bin_4_pairs"], figures["bin_4_confidence"]) == (20, pytest.approx(0.95))
    figures = reward.measure_calibration([certain] * 6 + [-certain] * 4 + [math.nan])
    assert figures["calibration_error"] == pytest.approx(0.35)
    assert reward.measure_calibration([math.nan]) == {}
    assert reward.measure_calibration([1e6, -1e6])["calibration_error"] == pytest.approx(0.5)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Artifact, Artifact, Artifact]:
    """A reward model, a language model with the same base, and their dataset."""
    folder = tmp_path_factory.mktemp("reward")
    tiny, pairs = tiny_model(folder / "tiny"), dataset_of("preference", folder / "pairs", test=12)
    trained = [
        finetune(
            pairs,
            folder / objective,
            recipe(tiny, objective=objective),
            seed=3,
            state=folder / "state",
            reporter=SilentReporter(),
        )
        for objective in ("reward", "sft")
    ]
    return trained[0], trained[1], pairs


def run_evaluation(
    models: Sequence[Artifact], folder: Path, config: EvaluationConfig, incumbent: int | None = None
) -> Any:
    opened = [model_loading.open_model_artifact(model, accepts_reward_models=True) for model in models[:2]]
    return evaluate(
        opened[0],
        models[2],
        folder / "evaluation",
        config,
        incumbent=None if incumbent is None else opened[incumbent],
        seed=1,
        state=folder / "state",
        reporter=SilentReporter(),
    )


def test_reward_model_is_accepted_if_it_beats_chance(
    models: tuple[Artifact, Artifact, Artifact], tmp_path: Path
) -> None:
    evaluation = run_evaluation(models, tmp_path, adapt_to_reward_model(EvaluationConfig()))
    content = json.loads((evaluation.path / "evaluation.json").read_text())
    values = content["metrics"]["reward"]["accuracy"]
    assert (values["candidate"], values["n"]) == (1.0, 12)
    assert [(rule["against"], rule["min_gain"]) for rule in content["rules"]] == [
        (0.5, 0.0),
        ("incumbent", 0.0),
        ("incumbent", None),
    ]
    assert content["verdict"] == "accepted"
    assert content["measured"]["model"]["kind"] == "reward_model"
    assert content["measured"]["tasks"] == {"reward": "reward"}
    page = (evaluation.path / "report.html").read_text()
    assert "Accuracy on pairs by confidence of the reward model." in page
    assert "accuracy if the chosen answer is shorter" in page
    assert "reward of the chosen answer" in page


def test_tasks_and_incumbent_must_fit_the_candidate(
    models: tuple[Artifact, Artifact, Artifact], tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match="held_out of kind held_out cannot measure a reward model"):
        run_evaluation(models, tmp_path, EvaluationConfig())
    with pytest.raises(
        ConfigurationError, match="the candidate is a reward model, and the incumbent is a language model"
    ):
        run_evaluation(models, tmp_path, adapt_to_reward_model(EvaluationConfig()), incumbent=1)
    with pytest.raises(ConfigurationError, match="reward of kind reward measures reward models only"):
        run_evaluation(
            [models[1], *models[1:]], tmp_path, EvaluationConfig.model_validate({"tasks": [{"kind": "reward"}]})
        )


def test_objective_selects_tasks_and_gate_until_they_are_set() -> None:
    config = Customization.model_validate({"fine_tuning": {"objective": "reward"}, "evaluation": {"max_items": 50}})
    assert [task.kind for task in config.evaluation.tasks] == ["reward"]
    assert (config.evaluation.suite, config.evaluation.max_items) == ("none", 50)
    assert {rule.metric for rule in config.evaluation.gate} == {"reward.accuracy"}
    check_consistency(config)
    assert repr(Customization.model_validate({"fine_tuning": {"objective": "reward"}})) == (
        "Customization(fine_tuning={'objective': 'reward'})"
    )
    config.set("fine_tuning.objective", "dpo")
    assert config.evaluation.tasks[0].kind == "held_out"
    assert config.evaluation.suite == "default"
    own = {
        "tasks": [{"kind": "reward"}, {"kind": "reward", "name": "short", "pairs": "chosen_shorter"}],
        "suite": "none",
    }
    rules = [{"metric": "short.accuracy", "against": 0.5, "min_gain": 0.0}]
    config = Customization.model_validate(
        {"fine_tuning": {"objective": "reward"}, "evaluation": {**own, "gate": rules}}
    )
    assert [rule.metric for rule in config.evaluation.gate] == ["short.accuracy"]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"fine_tuning": {"objective": "reward"}, "evaluation": {"tasks": [{"kind": "held_out"}], "suite": "none"}},
            "held_out of kind held_out cannot measure a reward model",
        ),
        (
            {"fine_tuning": {"objective": "reward"}, "evaluation": {"suite": "default"}},
            "held_out of kind held_out cannot measure a reward model",
        ),
        (
            {"fine_tuning": {"objective": "reward"}, "model_registry": {"auto_promote": True}},
            "no regression suite measures reward models",
        ),
        ({"evaluation": {"tasks": [{"kind": "reward"}]}}, "of kind reward measures reward models only"),
    ],
)
def test_configuration_that_cannot_measure_the_model_is_rejected(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_consistency(Customization.model_validate(sections))


def test_sft_rows_are_no_pairs(engine: PlainEngine, tmp_path: Path) -> None:
    context = build_context(engine.tokenizer, small_dataset(tmp_path / "rows"))
    with pytest.raises(Exception, match="has sft rows; expected preference rows"):
        RewardTask(Reward()).items(context)
