"""Reward models on the tiny model: training, files, and use as a reward. In the fast tier, because each training takes a second."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForSequenceClassification, GPTNeoXConfig, GPTNeoXForCausalLM, GraniteConfig

from components.common.artifacts.artifact_folder import REWARD_MODEL, Artifact
from components.common.models import model_loading, reward_models
from components.common.runtime.errors import ArtifactDamagedError, ConfigurationError, TrainingError, UsageError
from components.fine_tuning import model_support, reward_sources, rewards
from components.fine_tuning.config import RewardConfig
from components.fine_tuning.rewards import Rollout
from components.fine_tuning.stage import finetune
from pipelines.provenance.erasure_search import StoredArtifact, find_descendants
from tests.datasets import dataset_of, small_dataset
from tests.fine_tuning.recipes import REQUIRED_SETTINGS, recipe
from tests.fine_tuning.test_recipes import interrupt_at_step_four
from tests.note_recorder import NoteRecorder
from tests.tiny import tiny_model

CONVERSATIONS = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16, 17], [18], [19, 20, 21]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return dataset_of("preference", tmp_path_factory.mktemp("data") / "pairs")


def train(pairs: Artifact, tiny: Path, folder: Path, **changes: Any) -> Artifact:
    config = recipe(tiny, objective="reward", **changes)
    return finetune(pairs, folder / "model", config, seed=3, state=folder / "state", reporter=NoteRecorder())


@pytest.fixture(scope="module")
def trained(pairs: Artifact, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    """A reward model by adaptation."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TUNELINE_THREADS", "1")
        return {
            name: train(pairs, tiny, tmp_path_factory.mktemp(name), adaptation=name) for name in ("lora", "full", "ia3")
        }


def compute(artifact: Artifact, conversations: list[list[int]], batch_tokens: int) -> list[float]:
    opened = model_loading.open_model(artifact.path, accepts_reward_models=True)
    model = reward_models.load_reward_model(opened, model_loading.load_tokenizer(opened.tokenizer))
    return reward_models.compute_rewards(model, conversations, batch_tokens)


@pytest.mark.parametrize("adaptation", ["lora", "full", "ia3"])
def test_published_files_give_equal_rewards_in_transformers_and_in_any_batch(
    adaptation: str, trained: dict[str, Artifact], tiny: Path
) -> None:
    artifact = trained[adaptation]
    assert artifact.manifest.kind == REWARD_MODEL
    assert "pipeline_tag: text-classification" in (artifact.path / "README.md").read_text()
    folder = artifact.path if adaptation == "full" else tiny
    plain: Any = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    if adaptation != "full":
        from peft import PeftModel

        plain = PeftModel.from_pretrained(plain, str(artifact.path))
    plain.eval()
    with torch.no_grad():
        expected = [float(plain(input_ids=torch.tensor([ids])).logits) for ids in CONVERSATIONS]
    assert len({round(value, 4) for value in expected}) > 1
    assert compute(artifact, CONVERSATIONS, 1) == pytest.approx(expected, abs=1e-5)
    assert compute(artifact, CONVERSATIONS, 1000) == pytest.approx(expected, abs=1e-5)


def test_untrained_model_prefers_no_answer_and_training_logs_accuracy(trained: dict[str, Artifact]) -> None:
    summary = trained["lora"].manifest.summary
    assert summary["validation_loss_before"] == pytest.approx(0.693147, abs=1e-5)
    assert summary["validation_loss"] < 0.5
    log = [json.loads(line) for line in (trained["lora"].path / "training.jsonl").read_text().splitlines()]
    assert log[-1].keys() >= {
        "validation_preference_accuracy",
        "validation_reward_margin",
        "validation_mean_reward",
    }
    assert "Preference for chosen over rejected answers." in (trained["lora"].path / "report.html").read_text()


def test_interrupted_training_resumes_bit_identically(
    trained: dict[str, Artifact], pairs: Artifact, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNELINE_THREADS", "1")
    interrupt_at_step_four(lambda: train(pairs, tiny, tmp_path))
    resumed = train(pairs, tiny, tmp_path)
    assert (resumed.sha256, resumed.manifest.summary["resumed_from"]) == (trained["lora"].sha256, 4)


def test_center_weight_keeps_the_mean_reward_near_zero(pairs: Artifact, tiny: Path, tmp_path: Path) -> None:
    options = {"max_steps": 20, "checkpoint_every": 20, "adaptation": "full"}
    means = {}
    for weight in (0.0, 1.0):
        model = train(pairs, tiny, tmp_path / str(weight), reward_model={"center_weight": weight}, **options)
        log = [json.loads(line) for line in (model.path / "training.jsonl").read_text().splitlines()]
        means[weight] = abs(log[-1]["validation_mean_reward"])
    assert means[1.0] < means[0.0]


def test_reward_model_is_refused_where_answers_are_needed(trained: dict[str, Artifact], tiny: Path) -> None:
    with pytest.raises(UsageError, match="is a reward model, which scores answers but does not generate text"):
        model_loading.open_model(trained["lora"].path)
    for artifact in trained.values():
        with pytest.raises(ConfigurationError, match="is a reward model, which does not predict tokens"):
            model_loading.resolve_base_model(str(artifact.path))


@pytest.mark.parametrize("adaptation", ["lora", "full"])
def test_rewards_in_bfloat16_have_the_resolution_of_float32(trained: dict[str, Artifact], adaptation: str) -> None:
    opened = model_loading.open_model(trained[adaptation].path, accepts_reward_models=True)
    tokenizer = model_loading.load_tokenizer(opened.tokenizer)
    model = reward_models.load_reward_model(opened, tokenizer, torch.bfloat16)
    assert next(model.parameters()).dtype == torch.bfloat16
    computed = torch.tensor(reward_models.compute_rewards(model, CONVERSATIONS, 64))
    assert not torch.equal(computed, computed.bfloat16().float())


def test_class_without_reward_head_is_refused(tiny: Path) -> None:
    config = recipe(tiny, objective="reward")
    with pytest.raises(ConfigurationError, match="cannot give models of type granite an output layer"):
        model_support.check_model(config, GraniteConfig())
    model_support.check_model(recipe(tiny), GraniteConfig(num_hidden_layers=1))


def test_output_layer_of_another_name_is_dropped(tmp_path: Path) -> None:
    shape = {
        "vocab_size": 32,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    GPTNeoXForCausalLM(GPTNeoXConfig(**shape)).save_pretrained(tmp_path)
    loaded = model_loading._load_weights(tmp_path, has_reward_head=True)
    assert not loaded.score.weight.any()


def load_reward_model(model: Artifact, base: str = "") -> Callable[[list[Rollout]], list[float]]:
    """Return the scorer of a reward model; its base model is resolved if no folder is given."""
    folder = str(model.path)
    entry = RewardConfig(kind="reward_model", model=folder)
    (reward,) = rewards.build_rewards([entry], rewards.RewardInputs({folder: base} if base else {}))
    return reward.score


def test_rewards_that_are_not_finite_end_the_training(
    trained: dict[str, Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_models, "compute_rewards", lambda *_: [0.5, float("nan")])
    score = load_reward_model(trained["full"])
    with pytest.raises(TrainingError, match=r"the reward model in .* returns a non-finite reward for 1 of 2 answers"):
        score([Rollout("a", "a", "a", (1,)), Rollout("b", "b", "b", (2,))])


def test_training_process_reads_the_base_of_a_reward_model_from_its_folder(
    trained: dict[str, Artifact], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (base,) = reward_sources.resolve_bases({0: trained["lora"]}, NoteRecorder()).values()
    assert Path(base) == tiny
    expected = load_reward_model(trained["lora"])([Rollout("a", "a", "a", (5, 6))])
    # The process of a launcher has another environment, in which the URI in the manifest may mean nothing.
    monkeypatch.setattr(
        model_loading, "resolve_base_model", lambda *_, **__: pytest.fail("the base model was resolved again")
    )
    score = load_reward_model(trained["lora"], base)
    assert score([Rollout("a", "a", "a", (5, 6))]) == expected


def test_context_of_reward_model_must_hold_a_row_and_its_answer(trained: dict[str, Artifact], tiny: Path) -> None:
    entry = {"kind": "reward_model", "model": str(trained["lora"].path)}
    config = recipe(tiny, objective="grpo", grpo={"rewards": [entry]}, max_length=4096)
    with pytest.raises(
        ConfigurationError, match=r"rewards\[0\]\.model: the context of .* rows of fine_tuning.max_length"
    ):
        reward_sources.open_reward_models(config, tiny)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kind": "reward_model"}, "reward_model requires model"),
        ({"kind": "f1", "model": "/rm"}, "model cannot be used with f1"),
        ({"kind": "f1", "sha256": "a" * 64}, "sha256 cannot be used with f1"),
    ],
)
def test_entry_of_a_reward_model_is_checked(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        RewardConfig.model_validate(settings)


def test_reward_is_the_probability_of_a_preference(trained: dict[str, Artifact]) -> None:
    (reward,) = rewards.build_rewards(
        [RewardConfig.model_validate({"kind": "reward_model", "model": str(trained["full"].path)})]
    )
    rollouts = [Rollout("question", "", "answer", ids) for ids in CONVERSATIONS]
    logits = torch.tensor(compute(trained["full"], CONVERSATIONS, 1000))
    assert reward.score(rollouts) == pytest.approx(torch.sigmoid(logits).tolist(), abs=1e-6)


def build_grpo(tiny: Path, source: str, **changes: Any) -> Any:
    settings = {**REQUIRED_SETTINGS["grpo"]["grpo"], "rewards": [{"kind": "reward_model", "model": source}]}
    return recipe(tiny, objective="grpo", grpo=settings, **changes)


def test_reinforcement_learning_with_a_reward_model_records_its_digest(
    trained: dict[str, Artifact], tiny: Path, tmp_path: Path
) -> None:
    dataset = small_dataset(tmp_path / "data")
    config = build_grpo(tiny, str(trained["lora"].path), max_steps=2, checkpoint_every=2)
    options: dict[str, Any] = {"seed": 3, "state": tmp_path / "state", "reporter": NoteRecorder()}
    model = finetune(dataset, tmp_path / "model", config, **options)
    source = model.manifest.find_input(reward_sources.REWARD_INPUT)
    assert source is not None
    assert source.content_sha256 == trained["lora"].sha256
    assert model.manifest.config["grpo"]["rewards"][0]["sha256"] == trained["lora"].sha256
    log = [json.loads(line) for line in (model.path / "training.jsonl").read_text().splitlines()]
    assert all(0 < line["validation_reward_reward_model"] < 1 for line in log if "validation_loss" in line)
    assert finetune(dataset, tmp_path / "model", config, **options).sha256 == model.sha256
    stored = [StoredArtifact("", each.manifest, lambda: model) for each in (trained["lora"], model)]
    pairs = trained["lora"].manifest.find_input("dataset")
    assert pairs is not None
    # A row that is erased from the pairs affects the rewarded model also.
    assert find_descendants({pairs.content_sha256}, stored, []) == {trained["lora"].sha256, model.sha256}


def test_unsuitable_reward_models_are_refused(trained: dict[str, Artifact], tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"fine_tuning\.grpo\.rewards\[0\]\.model: .* is not a reward model"):
        reward_sources.open_reward_models(build_grpo(tiny, str(tiny)), tiny)
    with pytest.raises(ConfigurationError, match="no earlier customization of the command trains a reward model"):
        reward_sources.open_reward_models(build_grpo(tiny, "previous"), tiny)
    other = tiny_model(tmp_path / "other")
    (other / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(ConfigurationError, match="differs from that of the base model"):
        reward_sources.open_reward_models(build_grpo(other, str(trained["lora"].path)), other)
    config = build_grpo(tiny, str(trained["lora"].path))
    pinned = reward_sources.pin_reward_models(config, reward_sources.open_reward_models(config, tiny))
    changed = reward_sources.pin_reward_models(config, {0: trained["full"]})
    assert reward_sources.open_reward_models(pinned, tiny)[0].sha256 == trained["lora"].sha256
    with pytest.raises(ArtifactDamagedError, match=r"the digest of .* is .*; expected"):
        reward_sources.open_reward_models(changed, tiny)
