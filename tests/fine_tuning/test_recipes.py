"""Every objective × adaptation that a processor can train: recorded losses with a fixed seed, and what each leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from components.common import models
from components.common.artifacts import Artifact
from components.common.errors import InputError
from components.common.progress import Silent
from components.fine_tuning import merging
from components.fine_tuning.stage import finetune
from tests.datasets import dataset_of, small_dataset
from tests.fine_tuning.recipes import ROWS, recipe
from tests.tiny import tiny_model

# Training loss of the sixth step and the best validation loss, on one thread. Another torch may move the last digits.
RECORDED = {
    ("sft", "lora", False): (6.9056, 6.9086),
    ("sft", "lora", True): (6.6412, 6.8180),
    ("sft", "full", False): (5.5198, 5.5246),
    ("sft", "full", True): (4.6242, 5.2711),
    ("sft", "p_tuning", False): (7.1988, 7.2429),
    ("sft", "prompt_tuning", False): (8.3061, 7.6941),
    ("text", "lora", False): (6.6770, 6.9879),
    ("text", "lora", True): (6.4924, 6.8719),
    ("text", "full", False): (5.1122, 5.2866),
    ("text", "full", True): (4.9438, 5.1365),
    ("text", "p_tuning", False): (6.8621, 6.8644),
    ("text", "prompt_tuning", False): (7.6830, 7.7052),
    ("dpo", "lora", False): (0.0144, 0.0170),
    ("dpo", "full", False): (0.0003, 0.0001),
    ("dpo", "p_tuning", False): (0.2496, 0.0629),
    ("dpo", "prompt_tuning", False): (1.5519, 1.3202),
    ("kto", "lora", False): (0.4254, 0.2142),
    ("kto", "full", False): (0.5082, 0.1105),
    ("kto", "p_tuning", False): (0.3890, 0.2356),
    ("kto", "prompt_tuning", False): (0.8425, 0.5596),
}
TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    folder = tmp_path_factory.mktemp("data")
    others = {kind: dataset_of(kind, folder / kind) for kind in ("text", "preference", "unpaired")}
    return {"sft": small_dataset(folder / "sft"), **others}


def tune(datasets: dict[str, Artifact], tiny: Path, place: Path, objective: str = "sft", **changes: Any) -> Artifact:
    config = recipe(tiny, objective=objective, **changes)
    return finetune(datasets[ROWS[objective]], place / "model", config, seed=3, state=place / "state", reporter=Silent())


@pytest.mark.parametrize(("objective", "adaptation", "packing"), RECORDED)
def test_a_recipe_trains_to_its_recorded_losses(
    objective: str,
    adaptation: str,
    packing: bool,
    datasets: dict[str, Artifact],
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TUNELINE_THREADS", "1")
    summary = tune(datasets, tiny, tmp_path, objective, adaptation=adaptation, packing=packing).manifest.summary
    assert (summary["train_loss"], summary["validation_loss"]) == pytest.approx(RECORDED[objective, adaptation, packing], abs=TOLERANCE)
    assert summary["validation_loss"] < summary["validation_loss_before"]


@pytest.mark.parametrize("adaptation", ["lora", "p_tuning", "prompt_tuning"])
def test_an_adapter_is_small_and_holds_nothing_of_the_base_and_no_pickle(
    adaptation: str, datasets: dict[str, Artifact], tiny: Path, tmp_path: Path
) -> None:
    from safetensors import safe_open

    made = tune(datasets, tiny, tmp_path, adaptation=adaptation, max_steps=1)
    with safe_open(str(made.path / "adapter_model.safetensors"), framework="pt") as weights:
        names = list(weights.keys())
    assert names
    assert all("lora_" in name or name == "prompt_embeddings" for name in names), names
    shipped = {file.path for file in made.manifest.files}
    assert not [name for name in shipped if name.endswith((".bin", ".pt", ".pth", ".pkl"))]
    assert str(tiny.parent) not in (made.path / "adapter_config.json").read_text()


@pytest.mark.parametrize(
    "settings", [{"lora": {"rslora": True}}, {"lora": {"dora": True}}, {"lora": {"target_modules": ["q_proj", "v_proj"]}}]
)
def test_a_merged_model_answers_as_base_and_update_apart(
    settings: dict[str, Any], datasets: dict[str, Artifact], tiny: Path, tmp_path: Path
) -> None:
    apart = models.load(models.open_model(tune(datasets, tiny, tmp_path / "apart", **settings).path))
    made = tune(datasets, tiny, tmp_path / "merged", merge=True, **settings)
    assert not list(made.path.glob("adapter_*"))
    whole = models.load(models.open_model(made.path))
    assert merging.difference(merging._logits(apart), merging._logits(whole)) <= merging.TOLERANCE


def test_virtual_tokens_that_begin_as_a_text_name_no_folder_of_this_machine(
    datasets: dict[str, Artifact], tiny: Path, tmp_path: Path
) -> None:
    settings = {"virtual_tokens": 4, "initial_text": "Answer the question."}
    made = tune(datasets, tiny, tmp_path, adaptation="prompt_tuning", prompt=settings)
    told = json.loads((made.path / "adapter_config.json").read_text())
    assert told["tokenizer_name_or_path"] == tiny.name
    models.load(models.open_model(made.path))


def test_the_shipped_virtual_tokens_of_p_tuning_are_those_that_were_trained(
    datasets: dict[str, Artifact], tiny: Path, tmp_path: Path
) -> None:
    made = tune(datasets, tiny, tmp_path, adaptation="p_tuning", validation_rows=4)
    loaded = models.load(models.open_model(made.path))
    assert held_out(loaded, datasets["sft"], tiny) == pytest.approx(made.manifest.summary["validation_loss"], abs=1e-4)


def held_out(model: Any, dataset: Artifact, tiny: Path) -> float:
    """Mean loss a token of the validation rows' answers, computed apart from the trainer."""
    import torch

    from components.fine_tuning.data import rows_of
    from components.fine_tuning.objectives import IGNORED, OBJECTIVES

    objective, tokenizer = OBJECTIVES["sft"], models.load_tokenizer(tiny)
    total, count = 0.0, 0
    for row in rows_of(dataset.path / "validation.parquet", objective.uses["sft"]):
        (example,) = objective.encode(tokenizer, row, 96).examples
        ids, labels = (torch.tensor(example[name]) for name in ("input_ids", "labels"))
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, -len(ids) :]
        kept = labels[1:] != IGNORED
        total += float(torch.nn.functional.cross_entropy(logits[:-1][kept], labels[1:][kept], reduction="sum"))
        count += int(kept.sum())
    return total / count


def test_the_best_checkpoint_by_validation_loss_is_the_result(datasets: dict[str, Artifact], tiny: Path, tmp_path: Path) -> None:
    """A rate that is too high lets the loss rise again."""
    settings = {"adaptation": "full", "learning_rate": 1.0, "max_steps": 12, "schedule": "constant_with_warmup", "validation_rows": 4}
    made = tune(datasets, tiny, tmp_path, **settings)
    summary = made.manifest.summary
    lines = [json.loads(line) for line in (made.path / "training.jsonl").read_text().splitlines()]
    validations = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line and line["step"]}
    assert summary["best_step"] == min(validations, key=lambda step: validations[step]) < 12
    assert held_out(models.load(models.open_model(made.path)), datasets["sft"], tiny) == pytest.approx(min(validations.values()), abs=1e-4)


def test_early_stopping_ends_a_training_whose_validation_loss_rises(datasets: dict[str, Artifact], tiny: Path, tmp_path: Path) -> None:
    settings = {"learning_rate": 0.5, "max_steps": 40, "schedule": "constant_with_warmup", "early_stopping": 2}
    summary = tune(datasets, tiny, tmp_path, **settings).manifest.summary
    assert summary["stopped_early"]
    assert summary["steps"] == summary["best_step"] + 2 * 2 < 40


@pytest.mark.parametrize(
    ("objective", "kind", "fitting"), [("dpo", "sft", "sft"), ("text", "sft", "sft"), ("sft", "text", "text"), ("kto", "text", "text")]
)
def test_rows_that_an_objective_cannot_learn_from_are_refused_with_one_that_can(
    objective: str, kind: str, fitting: str, datasets: dict[str, Artifact], tiny: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=f"holds {kind} rows, which this objective cannot learn from") as error:
        finetune(datasets[kind], tmp_path / "m", recipe(tiny, objective=objective), seed=3, state=tmp_path / "state", reporter=Silent())
    assert f"fine_tuning.objective: {fitting}" in error.value.hint


def test_kto_takes_each_pair_as_two_labelled_answers(datasets: dict[str, Artifact], tiny: Path, tmp_path: Path) -> None:
    config = recipe(tiny, objective="kto", max_steps=1)
    made = finetune(datasets["preference"], tmp_path / "m", config, seed=3, state=tmp_path / "state", reporter=Silent())
    assert made.manifest.summary["rows"]["train"] == 48


def test_the_model_card_tells_data_recipe_losses_and_licences(datasets: dict[str, Artifact], tiny: Path, tmp_path: Path) -> None:
    card = {"base_licence": "Apache-2.0", "data_licence": "internal"}
    made = tune(datasets, tiny, tmp_path, card=card)
    text = (made.path / "README.md").read_text()
    for told in (
        "license: apache-2.0",
        "| training data | internal |",
        datasets["sft"].sha256,
        "| validation loss |",
        "| optimizer steps | 6",
    ):
        assert told in text
    assert str(tiny.parent) not in text


def test_licences_on_the_card_make_no_other_model(datasets: dict[str, Artifact], tiny: Path, tmp_path: Path) -> None:
    plain = tune(datasets, tiny, tmp_path / "1")
    told = tune(datasets, tiny, tmp_path / "2", card={"data_licence": "internal"})
    assert plain.sha256 == told.sha256


def test_tensorboard_reads_the_curves(datasets: dict[str, Artifact], tiny: Path, tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import directory_check  # noqa: F401 - the writer's own module reads no files back

    made = tune(datasets, tiny, tmp_path)
    (events,) = (made.path / "tensorboard").glob("events.out.tfevents.*")
    found = [(event.step, value.tag) for event in records(events.read_bytes(), Event) for value in event.summary.value]
    assert {step for step, tag in found if tag == "train_loss"} == set(range(1, 7))
    assert {step for step, tag in found if tag == "validation_loss"} == {0, 2, 4, 6}


def records(content: bytes, kind: Any) -> list[Any]:
    """The records of a TFRecord file: length, checksum, bytes, checksum."""
    found, place = [], 0
    while place < len(content):
        length = int.from_bytes(content[place : place + 8], "little")
        event = kind()
        event.ParseFromString(content[place + 12 : place + 12 + length])
        found.append(event)
        place += 16 + length
    return found
