"""Fine-tuning a tiny random Llama: what it learns, what it leaves, and that a killed training ends with the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from components.common import models
from components.common.artifacts import Artifact
from components.common.errors import ConfigurationError, InputError, TrainingError
from components.common.progress import Silent
from components.fine_tuning import checkpoints, stage
from components.fine_tuning.config import FineTuningConfig, LoraConfig
from components.fine_tuning.data import Examples, rows_of, tokenise
from components.fine_tuning.objectives import IGNORED, OBJECTIVES
from components.fine_tuning.sampling import epoch_order
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
    values = {"base_model": str(tiny), "max_steps": 6, "batch_size": 4, "micro_batch_size": 2, "checkpoint_every": 2, "max_length": 96}
    return FineTuningConfig.model_validate({**values, "learning_rate": 5e-3, "warmup_steps": 1, **changes})


def tune(dataset: Artifact, tiny: Path, output: Path, **changes: object) -> Artifact:
    return finetune(dataset, output, recipe(tiny, **changes), seed=3, state=output.parent / "state", reporter=Silent())


def test_the_loss_falls_and_the_artifact_holds_an_adapter_its_log_and_its_report(tiny: Path, dataset: Artifact, tmp_path: Path) -> None:
    made = tune(dataset, tiny, tmp_path / "model", max_steps=12)
    log = [json.loads(line) for line in (made.path / "training.jsonl").read_text().splitlines()]
    losses = [line["train_loss"] for line in log if "train_loss" in line]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.05
    summary = made.manifest.summary
    assert (summary["steps"], summary["resumed_from"]) == (12, None)
    assert summary["train_loss"] == losses[-1]
    assert 0 < summary["parameters"]["trainable"] < summary["parameters"]["all"]
    names = {file.path for file in made.manifest.files}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "training.jsonl", "report.html"} <= names
    assert not any(name.endswith((".bin", ".pt", ".pth")) for name in names), "a pickle must not be shipped"
    assert {i.kind for i in made.manifest.inputs} == {"dataset", "base_model"}
    assert not list((tmp_path / "state" / "fine_tuning").iterdir()), "checkpoints go when the model is there"


def test_two_trainings_with_one_seed_are_equal_wherever_base_and_output_lie(tiny: Path, dataset: Artifact, tmp_path: Path) -> None:
    elsewhere = tmp_path / "other" / "place" / tiny.name
    elsewhere.parent.mkdir(parents=True)
    elsewhere.symlink_to(tiny)
    one, two = tune(dataset, tiny, tmp_path / "1" / "model"), tune(dataset, elsewhere, tmp_path / "2" / "out")
    assert one.sha256 == two.sha256
    assert str(tiny.parent) not in (one.path / "adapter_config.json").read_text()


def examples(path: Path, tokenizer: object, max_length: int) -> Examples:
    rows = list(rows_of(path, OBJECTIVES["sft"].of("sft", "it holds")))
    return tokenise(rows, OBJECTIVES["sft"], tokenizer, max_length=max_length, total=len(rows), reporter=Silent())


def test_only_answer_tokens_are_learned_and_what_is_cut_is_counted(tiny: Path, dataset: Artifact) -> None:
    tokenizer = models.load_tokenizer(tiny)
    path = dataset.path / "train.parquet"
    whole = examples(path, tokenizer, 1000)
    learned = tokenizer.decode([label for label in whole.rows[0]["labels"] if label != IGNORED])
    assert learned == "It does open, open and open again, 0 times.<|im_end|>"
    assert (whole.truncated, whole.without_answer, len(whole.rows)) == (0, 0, 24)
    longest = max(row["length"] for row in whole.rows)
    cut = examples(path, tokenizer, longest - 1)
    assert cut.truncated == sum(row["length"] == longest for row in whole.rows) > 0


def test_rows_whose_answers_are_all_cut_off_are_an_error_that_says_so(tiny: Path, dataset: Artifact, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no training row has an answer within 8 tokens") as error:
        tune(dataset, tiny, tmp_path / "model", max_length=8)
    assert "max_length" in error.value.hint


def test_full_fine_tuning_gives_weights_that_load(tiny: Path, dataset: Artifact, tmp_path: Path) -> None:
    made = tune(dataset, tiny, tmp_path / "model", adaptation="full", learning_rate=1e-3)
    opened = models.open_model(made.path)
    assert opened.adapter is None
    assert sum(p.numel() for p in models.load(opened).parameters()) == made.manifest.summary["parameters"]["all"]


def test_an_unknown_target_module_names_those_there_are(tiny: Path, dataset: Artifact, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="target_modules") as error:
        tune(dataset, tiny, tmp_path / "model", lora=LoraConfig(target_modules=["query_key_value"]).model_dump())
    assert "q_proj" in error.value.hint


def test_a_learning_rate_that_explodes_stops_with_step_and_rate(tiny: Path, dataset: Artifact, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"is (nan|inf) at step \d+, learning rate") as error:
        tune(dataset, tiny, tmp_path / "model", adaptation="full", learning_rate=1e18, max_steps=8, max_grad_norm=1e30)
    assert "learning_rate" in error.value.hint
    assert not (tmp_path / "model" / "manifest.json").exists()


def test_the_same_call_again_returns_the_finished_model(tiny: Path, dataset: Artifact, tmp_path: Path) -> None:
    one = tune(dataset, tiny, tmp_path / "model")
    written = (one.path / "manifest.json").stat().st_mtime_ns
    assert tune(dataset, tiny, tmp_path / "model").sha256 == one.sha256
    assert (one.path / "manifest.json").stat().st_mtime_ns == written


def test_rows_of_like_length_share_a_batch_and_every_row_comes_once_an_epoch() -> None:
    lengths = [(i * 7919) % 200 for i in range(501)]
    order = epoch_order(lengths, 4, seed=1, epoch=0)
    assert sorted(order) == list(range(501))
    assert order == epoch_order(lengths, 4, seed=1, epoch=0) != epoch_order(lengths, 4, seed=1, epoch=1)
    spread = [max(lengths[r] for r in order[i : i + 4]) - min(lengths[r] for r in order[i : i + 4]) for i in range(0, 500, 4)]
    assert sum(spread) / len(spread) < 40, "a batch of four random rows would spread over 120"
    firsts = [sum(lengths[r] for r in order[i : i + 4]) for i in range(0, 500, 4)]
    assert firsts != sorted(firsts, reverse=True)


def test_a_checkpoint_without_its_marker_is_not_whole(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    (folder / "weights").write_text("w")
    assert not checkpoints.is_complete(folder)
    checkpoints.mark_complete(folder)
    assert checkpoints.is_complete(folder)
    (folder / "weights").write_text("x")
    assert not checkpoints.is_complete(folder)


def test_a_training_killed_after_its_last_step_does_no_further_one(tiny: Path, dataset: Artifact, tmp_path: Path) -> None:
    whole = tune(dataset, tiny, tmp_path / "1" / "model", schedule="constant_with_warmup")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("components.fine_tuning.training._write", _killed)
        with pytest.raises(KeyboardInterrupt):
            tune(dataset, tiny, tmp_path / "2" / "model", schedule="constant_with_warmup")
    again = tune(dataset, tiny, tmp_path / "2" / "model", schedule="constant_with_warmup")
    assert (again.sha256, again.manifest.summary["steps"]) == (whole.sha256, 6)
    assert again.manifest.summary["resumed_from"] == 6


def _killed(*_: object) -> None:
    raise KeyboardInterrupt


def test_lists_with_one_entry_a_layer_keep_their_order(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"layer_types": ["sliding", "full", "sliding"], "target_modules": ["v", "q"]}))
    stage._write_canonically(path, models.Base(tmp_path, "0", "hf://org/name@abc"))
    assert json.loads(path.read_text()) == {"layer_types": ["sliding", "full", "sliding"], "target_modules": ["q", "v"]}


def test_model_and_tokenizer_are_loaded_once_and_what_the_start_took_is_listed(
    tiny: Path, dataset: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    loaded = []
    for kind in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        plain = kind.from_pretrained
        monkeypatch.setattr(kind, "from_pretrained", lambda *a, kind=kind, plain=plain, **k: loaded.append(kind.__name__) or plain(*a, **k))
    made = tune(dataset, tiny, tmp_path / "model", max_steps=1)
    assert sorted(loaded) == ["AutoModelForCausalLM", "AutoTokenizer"]
    assert set(made.manifest.summary["startup"]) == {"tokens", "import", "load", "prepare", "total"}
    assert "start: import, s" in (made.path / "report.html").read_text()
