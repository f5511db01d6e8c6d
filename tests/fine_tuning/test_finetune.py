"""Fine-tuning of a tiny random Llama: loss, published artifact, errors, batch order and checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from components.common.artifacts.artifact_folder import Artifact
from components.common.cost.budgets import Budget, BudgetAccount, BudgetClock, BudgetReachedError, SpendingMeter
from components.common.models import model_loading
from components.common.runtime.errors import (
    ArtifactDamagedError,
    BusyError,
    ConfigurationError,
    InputError,
    TrainingError,
)
from components.common.runtime.reporters import SilentReporter
from components.fine_tuning import checkpoints, stage, trainers
from components.fine_tuning.batch_order import order_epoch
from components.fine_tuning.callbacks import TrainingEvents
from components.fine_tuning.config import FineTuningConfig, LoraConfig, Recipe
from components.fine_tuning.objectives import IGNORED_LABEL, OBJECTIVES, Example
from components.fine_tuning.rewards import RewardInputs
from components.fine_tuning.row_encoding import RowCounts, encode_rows, read_rows
from components.fine_tuning.stage import finetune
from tests.datasets import small_dataset
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return small_dataset(tmp_path_factory.mktemp("data") / "dataset")


def recipe(tiny: Path, **changes: object) -> FineTuningConfig:
    values = {
        "base_model": str(tiny),
        "max_steps": 6,
        "batch_size": 4,
        "micro_batch_size": 2,
        "checkpoint_every": 2,
        "max_length": 96,
    }
    return FineTuningConfig.model_validate({**values, "learning_rate": 5e-3, "warmup_steps": 1, **changes})


def tune(dataset: Artifact, tiny: Path, output: Path, **changes: object) -> Artifact:
    return finetune(
        dataset, output, recipe(tiny, **changes), seed=3, state=output.parent / "state", reporter=SilentReporter()
    )


def test_loss_falls_and_artifact_has_adapter_log_and_report(tiny: Path, dataset: Artifact, tmp_path: Path) -> None:
    model = tune(dataset, tiny, tmp_path / "model", max_steps=12)
    log = [json.loads(line) for line in (model.path / "training.jsonl").read_text().splitlines()]
    losses = [line["train_loss"] for line in log if "train_loss" in line]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.05
    summary = model.manifest.summary
    assert (summary["steps"], summary["resumed_from"]) == (12, None)
    assert summary["train_loss"] == losses[-1]
    assert 0 < summary["parameters"]["trainable"] < summary["parameters"]["all"]
    names = {file.path for file in model.manifest.files}
    assert {
        "adapter_model.safetensors",
        "adapter_config.json",
        "tokenizer.json",
        "training.jsonl",
        "report.html",
    } <= names
    assert not any(name.endswith((".bin", ".pt", ".pth")) for name in names), "a pickle must not be shipped"
    assert {i.kind for i in model.manifest.inputs} == {"dataset", "base_model"}
    assert not list((tmp_path / "state" / "fine_tuning").iterdir()), "checkpoints go when the model is there"


def test_digest_does_not_depend_on_base_and_output_paths(tiny: Path, dataset: Artifact, tmp_path: Path) -> None:
    linked_base = tmp_path / "other" / "place" / tiny.name
    linked_base.parent.mkdir(parents=True)
    linked_base.symlink_to(tiny)
    first, second = tune(dataset, tiny, tmp_path / "1" / "model"), tune(dataset, linked_base, tmp_path / "2" / "out")
    assert first.sha256 == second.sha256
    assert str(tiny.parent) not in (first.path / "adapter_config.json").read_text()


def test_rows_fetched_ahead_do_not_change_the_training(
    tiny: Path, dataset: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NVIDIA GPU gets the rows of a step while it computes the last one. Here a CPU does, over two epochs."""
    expected = tune(dataset, tiny, tmp_path / "plain" / "model", max_steps=10)
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda _: 250.0)
    monkeypatch.setattr("torch.cuda.Event", lambda **_: event)
    on_step_end = TrainingEvents.on_step_end

    def fetch_first(events: Any, *given: Any, **options: Any) -> None:
        assert events.trainer.fetch_ahead() == 0.25
        on_step_end(events, *given, **options)

    monkeypatch.setattr(TrainingEvents, "on_step_end", fetch_first)
    model = tune(dataset, tiny, tmp_path / "ahead" / "model", max_steps=10)
    assert model.sha256 == expected.sha256


def test_model_trains_after_a_validation_that_bypasses_its_wrapper(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several processes, transformers trains a wrapper of the model, and validates the model itself."""
    import torch
    import trl

    monkeypatch.setattr(trl.SFTTrainer, "training_step", lambda trainer, model, *_: model.train())
    splits: Any = SimpleNamespace(
        train=SimpleNamespace(lengths=[1], build_mixture=lambda _: None),
        validation=SimpleNamespace(counts=RowCounts()),
    )
    trainer_class = trainers.build_trainer_class(
        Recipe.model_validate(recipe(tiny, epochs=1.0).model_dump()), splits, 3, tmp_path, RewardInputs()
    )
    trainer, model = object.__new__(trainer_class), torch.nn.Linear(1, 1)
    wrapper = torch.nn.Sequential(model)
    trainer.model = model.eval()
    trainer.training_step(wrapper, {}, None)
    assert model.training


def encode_examples(path: Path, tokenizer: Any, max_length: int) -> tuple[list[Example], RowCounts]:
    rows = list(read_rows(path, OBJECTIVES["sft"].get_mapping("sft", "it holds")))
    counts = RowCounts()
    options: Any = {"max_length": max_length, "counts": counts, "reporter": SilentReporter()}
    return list(encode_rows(rows, OBJECTIVES["sft"], tokenizer, **options)), counts


def test_only_answer_tokens_have_labels_and_truncation_is_counted(tiny: Path, dataset: Artifact) -> None:
    tokenizer = model_loading.load_tokenizer(tiny)
    path = dataset.path / "train.parquet"
    complete, counts = encode_examples(path, tokenizer, 1000)
    learned = tokenizer.decode([label for label in complete[0]["labels"] if label != IGNORED_LABEL])
    assert learned == "It does open, open and open again, 0 times.<|im_end|>"
    assert (counts.truncated, counts.without_answer, len(complete)) == (0, 0, 24)
    longest = max(row["length"] for row in complete)
    _, truncated = encode_examples(path, tokenizer, longest - 1)
    assert truncated.truncated == sum(row["length"] == longest for row in complete) > 0


def test_training_fails_if_all_answers_are_truncated(tiny: Path, dataset: Artifact, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no training row has an answer within 8 tokens") as error:
        tune(dataset, tiny, tmp_path / "model", max_length=8)
    assert "max_length" in error.value.hint


def test_full_fine_tuning_weights_load(tiny: Path, dataset: Artifact, tmp_path: Path) -> None:
    model = tune(dataset, tiny, tmp_path / "model", adaptation="full", learning_rate=1e-3)
    loadable = model_loading.open_model(model.path)
    assert loadable.adapter is None
    assert (
        sum(p.numel() for p in model_loading.load_model(loadable).parameters())
        == model.manifest.summary["parameters"]["all"]
    )


def test_unknown_target_module_error_lists_available_modules(tiny: Path, dataset: Artifact, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="target_modules") as error:
        tune(dataset, tiny, tmp_path / "model", lora=LoraConfig(target_modules=["query_key_value"]).model_dump())
    assert "q_proj" in error.value.hint


def test_divergence_error_names_step_and_learning_rate(tiny: Path, dataset: Artifact, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"is (nan|inf) at step \d+, learning rate") as error:
        tune(dataset, tiny, tmp_path / "model", adaptation="full", learning_rate=1e18, max_steps=8, max_grad_norm=1e30)
    assert "learning_rate" in error.value.hint
    assert not (tmp_path / "model" / "manifest.json").exists()


def test_repeated_call_returns_finished_model(tiny: Path, dataset: Artifact, tmp_path: Path) -> None:
    first = tune(dataset, tiny, tmp_path / "model")
    modified_ns = (first.path / "manifest.json").stat().st_mtime_ns
    assert tune(dataset, tiny, tmp_path / "model").sha256 == first.sha256
    assert (first.path / "manifest.json").stat().st_mtime_ns == modified_ns


def test_epoch_order_groups_similar_lengths_and_covers_every_row_once() -> None:
    lengths = [(i * 7919) % 200 for i in range(501)]
    order = order_epoch(lengths, 4, seed=1, epoch=0)
    assert sorted(order) == list(range(501))
    assert order == order_epoch(lengths, 4, seed=1, epoch=0) != order_epoch(lengths, 4, seed=1, epoch=1)
    spreads = [
        max(lengths[row] for row in order[i : i + 4]) - min(lengths[row] for row in order[i : i + 4])
        for i in range(0, 500, 4)
    ]
    assert sum(spreads) / len(spreads) < 40, "a batch of four random rows would spread over 120"
    batch_lengths = [sum(lengths[row] for row in order[i : i + 4]) for i in range(0, 500, 4)]
    assert batch_lengths != sorted(batch_lengths, reverse=True)


def test_checkpoint_without_valid_marker_is_incomplete(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    (folder / "weights").write_text("w")
    assert not checkpoints.is_complete(folder)
    checkpoints.mark_complete(folder)
    assert checkpoints.is_complete(folder)
    (folder / "weights").write_text("x")
    assert not checkpoints.is_complete(folder)


def test_trained_tensors_are_saved_once_and_a_missing_one_fails_the_restore(tmp_path: Path) -> None:
    """A model file with all names needs no second copy; one with other names, such as those of fused experts, does."""
    import torch
    from safetensors.torch import save_file

    model = torch.nn.ModuleDict(
        {"gate": torch.nn.Linear(2, 2, bias=False), "experts": torch.nn.Linear(2, 2, bias=False)}
    )
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    for names, has_copy in (("gate.weight experts.weight", False), ("gate.weight experts.0.w1", True)):
        checkpoint = tmp_path / f"copied-{has_copy}"
        checkpoint.mkdir()
        save_file(dict(zip(names.split(), weights.values(), strict=True)), checkpoint / "model.safetensors")
        checkpoints.save_trainable(model, checkpoint)
        assert (checkpoint / checkpoints.TRAINABLE_FILENAME).exists() == has_copy
        torch.nn.init.zeros_(model["experts"].weight)
        checkpoints.restore_trainable(model, checkpoint)
        assert torch.equal(model["experts"].weight, weights["experts.weight"])
    (checkpoint / checkpoints.TRAINABLE_FILENAME).unlink()
    with pytest.raises(ArtifactDamagedError, match=r"lacks 1 trained tensor, for example experts\.weight"):
        checkpoints.restore_trainable(model, checkpoint)


def test_checkpoints_are_out_of_reach_of_a_run_that_lost_its_lock(tmp_path: Path) -> None:
    late = checkpoints.create_saving_folder(tmp_path) / "checkpoint-2"
    late.mkdir()
    (late / "weights").write_text("late")
    successor = checkpoints.create_saving_folder(tmp_path) / "checkpoint-2"
    assert [path.name for path in tmp_path.iterdir()] == [successor.parent.name]
    successor.mkdir()
    (successor / "weights").write_text("successor")
    checkpoints.publish(successor, tmp_path, lambda: None)
    with pytest.raises(FileNotFoundError):
        checkpoints.publish(late, tmp_path, lambda: None)
    assert checkpoints.is_complete(tmp_path / "checkpoint-2")
    assert (tmp_path / "checkpoint-2" / "weights").read_text() == "successor"


def test_training_killed_after_last_step_takes_no_further_step(tiny: Path, dataset: Artifact, tmp_path: Path) -> None:
    reference = tune(dataset, tiny, tmp_path / "1" / "model", schedule="constant_with_warmup")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("components.fine_tuning.training._save_model", _raise_keyboard_interrupt)
        with pytest.raises(KeyboardInterrupt):
            tune(dataset, tiny, tmp_path / "2" / "model", schedule="constant_with_warmup")
    resumed = tune(dataset, tiny, tmp_path / "2" / "model", schedule="constant_with_warmup")
    assert (resumed.sha256, resumed.manifest.summary["steps"]) == (reference.sha256, 6)
    assert resumed.manifest.summary["resumed_from"] == 6


def _raise_keyboard_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


class TakeoverReporter(SilentReporter):
    """Another training takes over the folder of the checkpoints after the log of a step."""

    def __init__(self, state: Path, step: int) -> None:
        self.state, self.takeover_step = state, step

    def metrics(self, values: Any, step: int) -> None:
        if step == self.takeover_step:
            (lock,) = (self.state / "fine_tuning").glob("*/writer")
            lock.write_text("other-host.1-1.00000000")
            checkpoints.create_saving_folder(lock.parent)


@pytest.mark.parametrize("step", [3, 4])  # between two checkpoints, and before the checkpoint of step 4 is saved
def test_training_whose_folder_was_taken_over_writes_nothing_more(
    tiny: Path, dataset: Artifact, tmp_path: Path, step: int
) -> None:
    state = tmp_path / "state"
    reporter = TakeoverReporter(state, step)
    with pytest.raises(BusyError, match="another process has taken over"):
        finetune(dataset, tmp_path / "model", recipe(tiny), seed=3, state=state, reporter=reporter)
    (work,) = (state / "fine_tuning").iterdir()
    assert [path.name for path in work.glob("checkpoint-*")] == ["checkpoint-2"]
    (work / "writer").unlink()  # the other training ends
    assert tune(dataset, tiny, tmp_path / "model").manifest.summary["resumed_from"] == 2


def test_per_layer_lists_keep_their_order(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"layer_types": ["sliding", "full", "sliding"], "target_modules": ["v", "q"]}))
    tokenizer: Any = SimpleNamespace(init_kwargs={}, save_pretrained=lambda _: None)
    stage._add_tokenizer(tokenizer, model_loading.LocalBaseModel(tmp_path, "0", "hf://org/name@abc"), tmp_path)
    assert json.loads(path.read_text()) == {"layer_types": ["sliding", "full", "sliding"], "target_modules": ["q", "v"]}


def test_model_and_tokenizer_load_once_and_startup_times_are_recorded(
    tiny: Path, dataset: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    loaded = []
    for auto_class in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        original = auto_class.from_pretrained
        monkeypatch.setattr(
            auto_class,
            "from_pretrained",
            lambda *args, auto_class=auto_class, original=original, **kwargs: (
                loaded.append(auto_class.__name__) or original(*args, **kwargs)
            ),
        )
    model = tune(dataset, tiny, tmp_path / "model", max_steps=1)
    assert sorted(loaded) == ["AutoModelForCausalLM", "AutoTokenizer"]
    assert set(model.manifest.summary["startup"]) == {"tokens", "import", "load", "prepare", "total"}
    assert "startup: import, s" in (model.path / "report.html").read_text()


@pytest.mark.long
def test_training_that_reaches_its_budget_is_saved_and_resumes_to_equal_weights(
    tiny: Path, dataset: Artifact, tmp_path: Path
) -> None:
    """Long: four trainings."""

    def tune_within(hours: float) -> Artifact:
        meter = SpendingMeter(accounts=[BudgetAccount(name="budget", budget=Budget(hours=hours))])
        output, state = tmp_path / "budgeted" / "model", tmp_path / "budgeted" / "state"
        return finetune(
            dataset, output, recipe(tiny), seed=3, state=state, reporter=SilentReporter(), budget=BudgetClock(meter)
        )

    for step in (1, 2):
        with pytest.raises(
            BudgetReachedError, match=rf"budget.hours is used up: .* was saved after step {step}$"
        ) as error:
            tune_within(hours=1e-9)
        assert error.value.exit_code == 75
    resumed = tune_within(hours=1)
    assert resumed.manifest.summary["resumed_from"] == 2
    assert resumed.sha256 == tune(dataset, tiny, tmp_path / "whole" / "model").sha256
