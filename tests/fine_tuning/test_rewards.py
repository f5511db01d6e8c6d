"""Rewards, their guards, and reinforcement learning on the tiny model: in the fast tier, because each training takes a second."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from components.common.artifacts.artifact_folder import Artifact
from components.common.models import model_loading
from components.common.runtime import code_sandbox
from components.common.runtime.errors import ConfigurationError, InputError
from components.fine_tuning import batch_order, objectives, reward_guards, rewards, training_health
from components.fine_tuning.config import FineTuningConfig, RewardConfig
from components.fine_tuning.rewards import Rollout
from components.fine_tuning.stage import finetune
from tests.datasets import dataset_of, small_dataset
from tests.fine_tuning.builders import build_conversation, build_dataset
from tests.fine_tuning.recipes import REQUIRED_SETTINGS, recipe
from tests.fine_tuning.test_recipes import interrupt_at_step_four
from tests.note_recorder import NoteRecorder
from tests.tiny import tiny_model, tiny_tokenizer

SCHEMA = {"type": "object", "required": ["sum"], "properties": {"sum": {"type": "integer"}}}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return small_dataset(tmp_path_factory.mktemp("data") / "dataset")


def tune(dataset: Artifact, tiny: Path, folder: Path, **changes: Any) -> tuple[Artifact, list[str]]:
    reporter = NoteRecorder()
    config = recipe(tiny, **{"objective": "grpo", **changes})
    model = finetune(dataset, folder / "model", config, seed=3, state=folder / "state", reporter=reporter)
    return model, reporter.notes


def score(entry: dict[str, Any], answer: str, reference: str = "") -> float:
    (reward,) = rewards.build_rewards([RewardConfig.model_validate(entry)])
    return reward.score([Rollout("question", reference, answer)])[0]


@pytest.mark.parametrize(
    ("entry", "answer", "reference", "expected"),
    [
        ({"kind": "exact_match"}, "The sum.", "sum", 1.0),
        ({"kind": "exact_match"}, "sums", "sum", 0.0),
        ({"kind": "final_number"}, "3 + 4 makes 7.00", "It is 7", 1.0),
        ({"kind": "final_number"}, "no number", "It is 7", 0.0),
        ({"kind": "f1"}, "red blue", "blue", pytest.approx(2 / 3)),
        ({"kind": "json_valid"}, '{"sum": 7}', "", 1.0),
        ({"kind": "json_valid"}, '{"sum": 7} as asked', "", 0.0),
        ({"kind": "json_schema", "json_schema": SCHEMA}, '```json\n{"sum": 7}\n```', "", 1.0),
        ({"kind": "json_schema", "json_schema": SCHEMA}, '{"sum": "7"}', "", 0.0),
        ({"kind": "json_match"}, '{"a": 1, "b": 3}', '{"a": 1, "b": 2}', 0.5),
        ({"kind": "json_match"}, '{"a": 1, "c": 0}', '{"a": 1}', 0.5),
        ({"kind": "json_match"}, "a: 1", '{"a": 1}', 0.0),
        ({"kind": "json_match"}, "[1]", "[1]", 1.0),
        ({"kind": "json_match"}, "{}", "{}", 1.0),
        ({"kind": "json_schema", "json_schema": {"multipleOf": 0.01}}, "1e400", "", 0.0),
        ({"kind": "json_schema", "json_schema": {"multipleOf": 0.01}}, "9" * 4000, "", 0.0),
        ({"kind": "no_repetition"}, " ", "", 0.0),
        ({"kind": "regex", "pattern": "yes|no"}, " no\n", "", 1.0),
        ({"kind": "regex", "pattern": "yes|no"}, "no idea", "", 0.0),
        ({"kind": "length", "max_words": 4}, "one two three four", "", 1.0),
        ({"kind": "length", "max_words": 4}, "1 2 3 4 5 6", "", 0.5),
        ({"kind": "length", "max_words": 4}, "1 2 3 4 5 6 7 8 9", "", 0.0),
        ({"kind": "length", "max_words": 4}, " ", "", 0.0),
        ({"kind": "no_repetition"}, "go on " * 20, "", 0.0),
    ],
)
def test_reward_scores_answers(entry: dict[str, Any], answer: str, reference: str, expected: float) -> None:
    assert score(entry, answer, reference) == expected


INSTRUCTIONS = {
    "instruction_id_list": ["punctuation:no_comma", "change_case:english_lowercase"],
    "kwargs": [{}, {"unused": None}],
}


def build_instruction_rows(*fields: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {**build_conversation(str(i), f"Say the word {i}.", "one word"), "meta": json.dumps(fields[i % len(fields)])}
        for i in range(8)
    ]


@pytest.mark.parametrize(("answer", "expected"), [("one two", 1.0), ("One two", 0.5), ("One, two", 0.0), (" ", 0.0)])
def test_share_of_followed_instructions_is_rewarded(answer: str, expected: float) -> None:
    (reward,) = rewards.build_rewards([RewardConfig(kind="ifeval")])
    assert reward.score([Rollout("question", "", answer, meta=json.dumps(INSTRUCTIONS))]) == [expected]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, "the row has None in instruction_id_list and None in kwargs"),
        (
            {"instruction_id_list": ["punctuation:none"], "kwargs": [{}]},
            "the row has the unknown instruction punctuation:none",
        ),
        (
            {"instruction_id_list": ["keywords:existence"], "kwargs": [{"words": 3}]},
            "the row has kwargs that keywords:existence does not accept",
        ),
    ],
)
def test_row_without_valid_instructions_is_refused_before_training(
    tiny: Path, tmp_path: Path, fields: dict[str, Any], problem: str
) -> None:
    rows = build_instruction_rows(INSTRUCTIONS, INSTRUCTIONS, INSTRUCTIONS, fields)
    data = build_dataset(tmp_path / "data", "sft", rows)
    settings = {"rewards": [{"kind": "ifeval"}]}
    with pytest.raises(InputError) as raised:
        tune(data, tiny, tmp_path, grpo=settings, validation_rows=0)
    assert raised.value.message.startswith(f"the reward ifeval cannot score the row 3: {problem}")


def test_model_is_trained_to_follow_instructions(tiny: Path, tmp_path: Path) -> None:
    data = build_dataset(tmp_path / "data", "sft", build_instruction_rows(INSTRUCTIONS))
    settings = {**REQUIRED_SETTINGS["grpo"]["grpo"], "rewards": [{"kind": "ifeval"}]}
    model, _ = tune(data, tiny, tmp_path, grpo=settings, validation_rows=0, max_steps=2)
    log = [json.loads(line) for line in (model.path / "training.jsonl").read_text().splitlines()]
    assert [0 <= line["reward_ifeval"] <= 1 for line in log if "train_loss" in line] == [True, True]


ADDITION = {"test": "def check(candidate):\n    assert candidate(3, 4) == 7", "entry_point": "add"}


@pytest.mark.usefixtures("isolation")
@pytest.mark.parametrize(
    ("question", "answer", "fields", "expected"),
    [
        ("Add numbers.", "Here:\n```python\ndef add(a, b):\n    return a + b\n```\n```\nadd(1, 2)\n```", ADDITION, 1.0),
        ("Add numbers.", "```\ndef add(a, b):\n    return a - b\n```", ADDITION, 0.0),
        ("Add numbers.", "```py\ndef add(a, b):\n    return a + b", ADDITION, 1.0),
        ("Add numbers.", "I cannot.", ADDITION, 0.0),
        ('def add(a, b):\n    """Add."""\n', "    return a + b", ADDITION, 1.0),
        ("import math\ndef add(a, b):\n    pass\n", "def add(a, b):\n    return math.floor(a + b)", ADDITION, 1.0),
        ("Define x.", "x = 7", {"test": "assert x == 7"}, 1.0),
        ("Add.", "```\npip install x\n```\n```python\ndef add(a, b):\n    return a + b\n```", ADDITION, 1.0),
    ],
)
def test_code_that_passes_its_tests_is_rewarded(
    question: str, answer: str, fields: dict[str, Any], expected: float
) -> None:
    (reward,) = rewards.build_rewards([RewardConfig(kind="unit_tests", cpu_seconds=2)])
    assert reward.score([Rollout(question, "", answer, meta=json.dumps(fields))]) == [expected]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, "has None in test; expected Python code"),
        ({"test": "def check("}, "has no valid Python code in test: '(' was never closed"),
        (
            {"test": "assert f() == 1", "entry_point": "f"},
            "has an entry_point, and test does not define check(candidate)",
        ),
        (
            {"test": "assert f() == 1", "entry_point": "f()"},
            "has 'f()' in entry_point; expected the name of a function",
        ),
        (
            {"test": "def check(f): pass", "entry_point": "lambda"},
            "has 'lambda' in entry_point; expected the name of a function",
        ),
    ],
)
def test_row_without_valid_tests_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError) as raised:
        rewards.check_row_fields([RewardConfig(kind="unit_tests")], "rows.jsonl:3", json.dumps(fields))
    assert raised.value.message.startswith(
        f"the reward unit_tests cannot score the row rows.jsonl:3: the row {problem}"
    )


@pytest.mark.usefixtures("isolation")
def test_verdicts_are_stored_for_a_resumed_training(tmp_path: Path) -> None:
    """The answers pass or fail at random: 16 equal verdicts of an answer that runs again have a probability of 2⁻¹⁶."""
    entry = RewardConfig(kind="unit_tests", cpu_seconds=2)
    program = "import os\nif os.urandom(1)[0] % 2: raise ValueError"
    rollouts = [
        Rollout("", "", f"{program}\n# {number}", meta=json.dumps({"test": "assert True"})) for number in range(16)
    ]
    (first,) = rewards.build_rewards([entry], rewards.RewardInputs(state=tmp_path))
    expected = first.score(rollouts)
    assert first.score(rollouts) == expected
    (resumed,) = rewards.build_rewards([entry], rewards.RewardInputs(state=tmp_path))
    assert resumed.score(rollouts) == expected


@pytest.mark.usefixtures("isolation")
def test_model_is_trained_with_unit_tests(tiny: Path, tmp_path: Path) -> None:
    """The tiny model writes no Python code: its answers run, and fail."""
    data = build_dataset(tmp_path / "data", "sft", build_instruction_rows(ADDITION))
    settings = {**REQUIRED_SETTINGS["grpo"]["grpo"], "rewards": [{"kind": "unit_tests", "cpu_seconds": 2}]}
    model, _ = tune(data, tiny, tmp_path, grpo=settings, validation_rows=0, max_steps=2)
    log = [json.loads(line) for line in (model.path / "training.jsonl").read_text().splitlines()]
    assert [line["reward_unit_tests"] for line in log if "train_loss" in line] == [0, 0]


def test_machine_that_cannot_isolate_code_is_refused_before_training(
    dataset: Artifact, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_sandbox, "COMMAND", [sys.executable, "-c", "print('no isolation')"])
    with pytest.raises(ConfigurationError, match="generated code cannot be isolated on this machine: no isolation"):
        tune(dataset, tiny, tmp_path, grpo={"rewards": [{"kind": "unit_tests"}]})


def test_references_are_scored_without_models_and_services() -> None:
    entries = [
        RewardConfig.model_validate(entry)
        for entry in (
            {"kind": "exact_match"},
            {"kind": "regex", "pattern": "[0-9]+"},
            {"kind": "reward_model", "model": "x"},
        )
    ]
    means, count = rewards.score_references(entries, [{"question": "a?", "reference": "b", "meta": "{}"}] * 70)
    assert (means, count) == ({"exact_match": 1, "regex": 0}, 24)  # every third row
    (warning,) = rewards.describe_references(means, count)
    assert warning.startswith("the reward regex is 0 for the reference answer of every checked row (24 rows).")
    assert rewards.describe_references(*rewards.score_references(entries, [])) == []


def test_total_is_the_weighted_mean_and_repeated_kinds_have_numbers() -> None:
    entries = [
        {"kind": "json_valid", "weight": 3},
        {"kind": "regex", "pattern": "x"},
        {"kind": "regex", "pattern": "1", "weight": 0},
    ]
    weighted = rewards.build_rewards([RewardConfig.model_validate(entry) for entry in entries])
    scores, totals = rewards.compute_totals(weighted, [Rollout("", "", "1"), Rollout("", "", "x")])
    assert scores == {"json_valid": [1.0, 0.0], "regex": [0.0, 1.0], "regex_3": [1.0, 0.0]}
    assert totals == [0.75, 0.25]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "grpo"}, "objective grpo requires grpo.rewards; found none"),
        (
            {"grpo": {"rewards": [{"kind": "json_valid"}]}},
            "grpo.rewards cannot be used with sft; expected objective grpo",
        ),
        (
            {"objective": "grpo", "grpo": {"rewards": [{"kind": "json_valid", "weight": 0}]}},
            "grpo.rewards: every weight is 0; expected at least one above 0",
        ),
        ({"objective": "grpo", "grpo": {"rewards": [{"kind": "regex"}]}}, "regex requires pattern"),
        (
            {"objective": "grpo", "grpo": {"rewards": [{"kind": "regex", "pattern": "("}]}},
            "pattern is not a regular expression: missing ), unterminated subpattern",
        ),
        (
            {"objective": "grpo", "grpo": {"rewards": [{"kind": "json_schema", "json_schema": {"type": "objekt"}}]}},
            "is not a valid JSON Schema: 'objekt' is not valid",
        ),
        (
            {"objective": "grpo", "grpo": {"rewards": [{"kind": "json_valid", "max_words": 3}]}},
            "max_words cannot be used with json_valid",
        ),
        (
            {"objective": "grpo", "grpo": {"rewards": [{"kind": "json_valid"}]}, "packing": True},
            "packing cannot be used with grpo",
        ),
        (
            {"objective": "grpo", "grpo": {"rewards": [{"kind": "json_valid"}]}, "strategy": "fsdp2", "processes": 2},
            "strategy fsdp2 cannot be used with grpo, which has not been tested with shards; expected ddp",
        ),
        (
            {
                "objective": "grpo",
                "grpo": {"rewards": [{"kind": "json_valid"}]},
                "sweep": {"vary": {"grpo.rewards": [[{"kind": "f1"}]]}},
            },
            "grpo.rewards changes the definition of the validation loss",
        ),
    ],
)
def test_invalid_recipe_is_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)").replace(".", r"\.")):
        FineTuningConfig.model_validate(changes)


def test_unset_section_does_not_change_the_digest_of_other_recipes() -> None:
    assert "grpo" not in FineTuningConfig().model_dump()


def test_batches_repeat_rows_for_the_answers_and_the_last_is_completed() -> None:
    rows = batch_order.repeat_batches([4, 2, 7], 2, answers=2, repeats=3)
    assert rows == [4, 4, 2, 2] * 3 + [7, 7, 4, 4] * 3
    sampler = batch_order.build_sampler([5, 6, 7], 2, seed=1, answers=2, repeats=3)
    assert len(sampler) == len(list(sampler)) == 24
    assert set(Counter(sampler)) == {0, 1, 2}


def test_prompt_is_encoded_with_the_last_answer_as_reference() -> None:
    tokenizer = tiny_tokenizer()
    objective = objectives.OBJECTIVES["grpo"]
    row = build_conversation("1", "What is 3 + 4?", "It is 7.", "And 5 + 5?", "It is 10.")
    (prompt,) = objective.row_mappings["sft"].expand(row)
    (example,) = objective.encode(tokenizer, prompt, 100).examples
    assert (example["question"], example["reference"]) == ("And 5 + 5?", "It is 10.")
    assert tokenizer.decode(example["prompt"]).endswith("And 5 + 5?<|im_end|>\n<|im_start|>assistant\n")
    assert objective.encode(tokenizer, prompt, len(example["prompt"]) - 1).examples == []
    (unanswered,) = objective.row_mappings["sft"].expand(build_conversation("2", "Only a question"))
    assert objective.encode(tokenizer, unanswered, 100).examples == []


def log_lines(count: int, **values: float) -> list[dict[str, float]]:
    return [{"reward": 0.5, "answer_tokens": 20.0, "equal_reward_groups": 0.2, "kl": 0.1, **values}] * count


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ({"kl": 1.5}, "the divergence from the reference model is 1.5 nats per token; the limit is 1"),
        ({"answer_tokens": 90.0}, "the mean answer length is 90 tokens; in the first 10 steps it was 20"),
        ({"answer_tokens": 4.0}, "the mean answer length is 4 tokens; in the first 10 steps it was 20"),
        ({"equal_reward_groups": 0.95}, "for 95% of the prompts, all answers have the same reward"),
        (
            {"reward": 0.9, "reward_truth": 0.1},
            "the trained reward rises while the reward truth, which is only recorded, falls",
        ),
    ],
)
def test_guard_raises_alarm(last: dict[str, float], message: str) -> None:
    lines = log_lines(10, reward_truth=0.5) + log_lines(10, **{"reward_truth": 0.5, **last})
    assert reward_guards.find_alarm(lines[:-1], 1.0, ["truth"]) is None
    assert str(reward_guards.find_alarm(lines, 1.0, ["truth"])).startswith(message)


def test_no_alarm_for_a_solved_task_or_a_healthy_training() -> None:
    solved = log_lines(10) + log_lines(10, reward=0.99, equal_reward_groups=1.0)
    assert reward_guards.find_alarm(solved, 1.0, []) is None
    assert reward_guards.find_alarm(log_lines(10) + log_lines(10, reward=0.8, kl=3.0), None, []) is None
    slightly_lower = log_lines(10, reward_truth=0.5) + log_lines(10, reward=0.9, reward_truth=0.46)
    assert reward_guards.find_alarm(slightly_lower, None, ["truth"]) is None


def test_model_that_generates_computes_in_bfloat16(dataset: Artifact, tiny: Path, tmp_path: Path) -> None:
    model, _ = tune(dataset, tiny, tmp_path, precision="bfloat16", max_steps=2, sample_prompts=["What?"])
    assert model.manifest.summary["steps"] == 2


def test_flat_reward_is_reported() -> None:
    assert training_health.describe_stall([-1.0] * 30, are_rewards=True) is None
    assert training_health.describe_stall([-0.1 * i for i in range(30)], are_rewards=True) is None
    message = training_health.describe_stall([0.0] * 30, are_rewards=True)
    assert str(message).startswith("the reward does not rise: mean 0 in the first 10 steps, 0 in the last 10 steps.")


def test_training_logs_rewards_and_samples_and_resumes_bit_identically(
    dataset: Artifact, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNELINE_THREADS", "1")
    expected, notes = tune(dataset, tiny, tmp_path / "whole")
    assert "objective grpo trains on the prompts of the last answers" in notes
    log = [json.loads(line) for line in (expected.path / "training.jsonl").read_text().splitlines()]
    assert [line["validation_reward"] for line in log if "validation_reward" in line] == pytest.approx(
        [1 - line["validation_loss"] for line in log if "validation_loss" in line]
    )
    step = next(line for line in log if line["step"] == 3 and "train_loss" in line)
    assert step.keys() >= {
        "reward_length",
        "reward_no_repetition",
        "kl",
        "entropy",
        "answer_tokens",
        "truncated_answers",
    }
    samples = [json.loads(line) for line in (expected.path / "samples.jsonl").read_text().splitlines()]
    assert Counter(line["step"] for line in samples) == {0: 4, 2: 4, 4: 4, 6: 4}
    page = (expected.path / "report.html").read_text()
    assert "Mean length of the answers." in page
    assert "validation reward before training" in page
    assert "left out" not in page, "no prompt exceeds the limit"
    assert "(reward 0" in page
    interrupt_at_step_four(lambda: tune(dataset, tiny, tmp_path / "resumed"))
    resumed, _ = tune(dataset, tiny, tmp_path / "resumed")
    assert (resumed.sha256, resumed.manifest.summary["resumed_from"]) == (expected.sha256, 4)
    resumed_log = [json.loads(line) for line in (resumed.path / "training.jsonl").read_text().splitlines()]
    assert [line.get("reward") for line in resumed_log] == [line.get("reward") for line in log]
    assert (resumed.path / "samples.jsonl").read_bytes() == (expected.path / "samples.jsonl").read_bytes()


def test_alarm_stops_training_and_a_repeated_call_returns_the_model(
    dataset: Artifact, tiny: Path, tmp_path: Path
) -> None:
    settings = {**REQUIRED_SETTINGS["grpo"]["grpo"], "rewards": [{"kind": "regex", "pattern": "never"}]}
    model, notes = tune(dataset, tiny, tmp_path, max_steps=30, checkpoint_every=25, grpo=settings)
    assert (model.manifest.summary["steps"], model.manifest.summary["validation_loss"]) == (20, 1.0)
    (alarm,) = model.manifest.summary["alarms"]
    assert alarm["sentence"].startswith("for 100% of the prompts, all answers have the same reward")
    assert (alarm["step"], alarm["learning_rate_factor"]) == (20, 1.0)
    assert any(
        note.startswith("training stops: for 100% of the prompts, all answers have the same reward") for note in notes
    )
    assert "A guard stopped the training: for 100% of the prompts" in (model.path / "report.html").read_text()
    assert tune(dataset, tiny, tmp_path, max_steps=30, checkpoint_every=25, grpo=settings)[0].sha256 == model.sha256


@pytest.mark.long  # three trainings of 42 steps
def test_alarms_lower_the_learning_rate_to_a_limit_and_training_resumes_bit_identically(
    dataset: Artifact, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNELINE_THREADS", "1")
    guarded = {"max_kl": 1e-9, "on_alarm": "lower_learning_rate", "alarm_rate_factor": 0.4, "min_rate_factor": 0.3}
    changes = {
        "grpo": {**REQUIRED_SETTINGS["grpo"]["grpo"], **guarded},
        "max_steps": 42,
        "checkpoint_every": 11,
        "validation_rows": 0,
        "schedule": "constant_with_warmup",
    }
    expected, notes = tune(dataset, tiny, tmp_path / "whole", **changes)
    log = [json.loads(line) for line in (expected.path / "training.jsonl").read_text().splitlines()]
    rates = {line["step"]: line["learning_rate"] for line in log if "train_loss" in line}
    assert [rates[step] / 5e-3 for step in (20, 21, 30, 31, 42)] == pytest.approx([1, 0.4, 0.4, 0.3, 0.3])
    alarms = [(alarm["step"], alarm["learning_rate_factor"]) for alarm in expected.manifest.summary["alarms"]]
    assert alarms == [(20, 0.4), (30, 0.3), (40, 0.3)]
    assert sum("the learning rate is lowered to" in note for note in notes) == 2
    page = (expected.path / "report.html").read_text()
    assert "At step 30, a guard lowered the learning rate to 0.3 times its scheduled value: the divergence" in page
    assert "At step 40, with the learning rate at its lower limit, a guard raised an alarm: the divergence" in page
    interrupt_at_step_four(lambda: tune(dataset, tiny, tmp_path / "resumed", **changes), step=22)
    resumed, _ = tune(dataset, tiny, tmp_path / "resumed", **changes)
    assert (resumed.sha256, resumed.manifest.summary["resumed_from"]) == (expected.sha256, 22)
    assert resumed.manifest.summary["alarms"] == expected.manifest.summary["alarms"]
    lowered = {**changes["grpo"], "max_kl": None}
    assert tune(dataset, tiny, tmp_path / "free", **{**changes, "grpo": lowered})[0].sha256 != expected.sha256


def test_long_prompts_are_left_out_and_counted(tiny: Path, tmp_path: Path) -> None:
    rows = [build_conversation(str(i), "word " * (1 if i else 200), "It is one.") for i in range(8)]
    model, notes = tune(build_dataset(tmp_path / "data", "sft", rows), tiny, tmp_path, validation_rows=0, max_steps=2)
    assert (
        "1 training row is left out, because the prompt exceeds 96 tokens or the conversation does not end with a text answer"
        in notes
    )
    assert model.manifest.summary["rows"]["train"] == 7


def test_adapter_is_trained_further_and_preference_rows_give_prompts(tiny: Path, tmp_path: Path) -> None:
    pairs = dataset_of("preference", tmp_path / "pairs")
    supervised = finetune(
        pairs, tmp_path / "sft", recipe(tiny), seed=3, state=tmp_path / "state", reporter=NoteRecorder()
    )
    model, _ = tune(pairs, tiny, tmp_path, initial_adapter=str(supervised.path), max_steps=2, checkpoint_every=2)
    log = [json.loads(line) for line in (model.path / "training.jsonl").read_text().splitlines()]
    first = next(line for line in log if "train_loss" in line)
    assert first["kl"] == pytest.approx(0, abs=1e-5), "the reference is the adapter before the training"
    assert (model.path / "adapter_model.safetensors").exists()
    assert model_loading.load_tokenizer(model.path)


def test_rloo_differs_from_grpo_and_resumes_bit_identically(
    dataset: Artifact, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNELINE_THREADS", "1")
    expected, _ = tune(dataset, tiny, tmp_path / "whole", objective="rloo")
    log = [json.loads(line) for line in (expected.path / "training.jsonl").read_text().splitlines()]
    steps = [line for line in log if "train_loss" in line]
    assert [line["gradient_norm"] for line in steps[:3]] == pytest.approx([0, 13.12, 0.4334], rel=1e-2)
    assert {"reward_length", "kl", "entropy", "answer_tokens", "equal_reward_groups"} <= steps[0].keys()
    interrupt_at_step_four(lambda: tune(dataset, tiny, tmp_path / "resumed", objective="rloo"))
    resumed, _ = tune(dataset, tiny, tmp_path / "resumed", objective="rloo")
    assert (resumed.sha256, resumed.manifest.summary["resumed_from"]) == (expected.sha256, 4)


def test_rloo_trains_and_validates_with_continuous_batching(dataset: Artifact, tiny: Path, tmp_path: Path) -> None:
    settings = {**REQUIRED_SETTINGS["rloo"]["grpo"], "rollouts": {"engine": "continuous_batching"}}
    model, _ = tune(dataset, tiny, tmp_path, objective="rloo", grpo=settings, max_steps=1, checkpoint_every=1)
    log = [json.loads(line) for line in (model.path / "training.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log if "validation_loss" in line] == [0, 1]
    assert all(0 < line["answer_tokens"] <= 16 for line in log if "train_loss" in line)
