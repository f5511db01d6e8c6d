"""Recipes that run on a CPU: recorded losses per objective and adaptation, published files, merging and model cards.

The merge test is in the `long` tier because it trains two models per setting.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from components.common.artifacts.artifact_folder import Artifact
from components.common.models import adapter_merging, model_loading
from components.common.runtime.errors import ConfigurationError, InputError, TrainingError
from components.common.runtime.reporters import SilentReporter
from components.fine_tuning import adapters, checkpoints, model_support
from components.fine_tuning.config import FineTuningConfig
from components.fine_tuning.stage import finetune
from components.triton_packaging import adapter_placement
from components.triton_packaging.config import TritonPackagingConfig
from tests.datasets import dataset_of, small_dataset
from tests.fine_tuning.recipes import ROW_KINDS, recipe
from tests.model_families import FAMILIES, build_configuration
from tests.tiny import tiny_model

CONFIGURATIONS = {family.model_type: build_configuration(family) for family in FAMILIES}
# Training loss of the sixth step and best validation loss, on one thread. The last digits depend on the torch version.
EXPECTED_LOSSES = {
    ("sft", "lora", False): (6.9056, 6.9086),
    ("sft", "lora", True): (6.6412, 6.8180),
    ("sft", "full", False): (5.5198, 5.5246),
    ("sft", "full", True): (4.6242, 5.2711),
    ("sft", "ia3", False): (7.8722, 7.6125),
    ("sft", "ia3", True): (7.9377, 7.6156),
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
    ("orpo", "lora", False): (6.2752, 6.5244),
    ("orpo", "full", False): (4.5674, 4.7980),
    ("orpo", "p_tuning", False): (6.3805, 6.3419),
    ("orpo", "prompt_tuning", False): (8.2978, 7.8008),
    ("simpo", "lora", False): (0.0197, 0.0334),
    ("simpo", "full", False): (0.0001, 0.0003),
    ("simpo", "p_tuning", False): (0.0584, 0.0840),
    ("simpo", "prompt_tuning", False): (2.4929, 1.5368),
    ("grpo", "lora", False): (0.0010, 0.7500),
    ("grpo", "full", False): (0.0181, 0.7500),
    ("grpo", "p_tuning", False): (0.0467, 0.7500),
    ("rloo", "lora", False): (0.0, 0.7500),  # 0 before each update: the mean advantage; see test_rewards.py
    ("reward", "lora", False): (0.5289, 0.4195),
    ("reward", "full", False): (0.3997, 0.3140),
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


def tune(datasets: dict[str, Artifact], tiny: Path, folder: Path, objective: str = "sft", **changes: Any) -> Artifact:
    config = recipe(tiny, objective=objective, **changes)
    return finetune(
        datasets[ROW_KINDS[objective]],
        folder / "model",
        config,
        seed=3,
        state=folder / "state",
        reporter=SilentReporter(),
    )


@pytest.mark.parametrize(("objective", "adaptation", "packing"), EXPECTED_LOSSES)
def test_recipe_reaches_recorded_losses(
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
    assert (summary["train_loss"], summary["validation_loss"]) == pytest.approx(
        EXPECTED_LOSSES[objective, adaptation, packing], abs=TOLERANCE
    )
    assert summary["validation_loss"] < summary["validation_loss_before"]


@pytest.mark.parametrize(
    ("settings", "losses"),
    [
        ({"optimizer": "adafactor", "adaptation": "full"}, (5.4161, 4.8100)),
        ({"optimizer": "muon", "adaptation": "full", "weight_decay": 0.1}, (6.8544, 6.7361)),
        ({"lora": {"plus_ratio": 16.0}}, (4.4815, 4.4787)),
        ({"neftune_noise_alpha": 5.0}, (7.4627, 7.0528)),
        ({"schedule": "warmup_stable_decay"}, (6.5029, 6.3527)),
    ],
    ids=["adafactor", "muon", "lora+", "neftune", "warmup-stable-decay"],
)
def test_optimizer_settings_reach_recorded_losses_and_resume(
    settings: dict[str, Any],
    losses: tuple[float, float],
    datasets: dict[str, Artifact],
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TUNELINE_THREADS", "1")
    expected = tune(datasets, tiny, tmp_path / "whole", **settings)
    summary = expected.manifest.summary
    assert (summary["train_loss"], summary["validation_loss"]) == pytest.approx(losses, abs=TOLERANCE)
    interrupt_at_step_four(lambda: tune(datasets, tiny, tmp_path / "resumed", **settings))
    model = tune(datasets, tiny, tmp_path / "resumed", **settings)
    assert (model.sha256, model.manifest.summary["resumed_from"]) == (expected.sha256, 4)


def test_muon_trains_hidden_matrices_and_adamw_the_rest(tiny: Path) -> None:
    from components.fine_tuning import muon

    model = LlamaForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    matrices = muon.list_matrices(model)
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in matrices} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    options = {"lr": 1e-2}
    optimizer = muon.build_muon(model, matrices, 0.0, torch.optim.AdamW, options)
    model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer.step()
    for name, value in model.named_parameters():
        change = value.detach() - before[name]
        if name in matrices:  # singular values of the update are about 1, scaled by 0.2 √max(rows, columns) × rate
            scale = 0.2 * max(change.shape) ** 0.5 * 1e-2
            singular = torch.linalg.svdvals(change / scale)
            rank = int((singular > 0.3).sum())
            assert rank >= 7, name  # the gradient of 7 predicted tokens has at least this rank
            assert singular.max() < 1.4, name
        else:
            changed = change[change != 0]
            assert changed.abs().max() == pytest.approx(1e-2, rel=1e-2), name  # the first step of AdamW


@pytest.mark.parametrize(
    ("model_config", "expected"),
    [
        (  # its decays A_log and its routers have two dimensions
            CONFIGURATIONS["jamba"],
            {
                *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
                *("in_proj", "x_proj", "dt_proj", "out_proj"),
            },
        ),
        (  # the gate of its shared expert is a linear layer of one row
            CONFIGURATIONS["qwen3_next"],
            {
                *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
                *("in_proj_qkvz", "in_proj_ba", "out_proj"),
            },
        ),
        (  # its positions are an embedding, and its linear layers are transformers' Conv1D
            AutoConfig.for_model("gpt2", n_embd=32, n_layer=2, n_head=4, vocab_size=400),
            {"c_attn", "c_proj", "c_fc"},
        ),
    ],
    ids=["hybrid", "gated expert", "learned positions"],
)
def test_muon_trains_linear_layers_only(model_config: Any, expected: set[str]) -> None:
    from components.fine_tuning import muon

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    assert {name.split(".")[-2] for name in muon.list_matrices(model)} == expected


def test_muon_is_refused_if_adamw_would_train_most_of_the_model(tiny: Path) -> None:
    """The experts' weights have three dimensions. The estimate of Muon's memory would be too low."""
    config = recipe(tiny, adaptation="full", optimizer="muon")
    model_support.check_model(config, AutoConfig.from_pretrained(tiny))
    experts = CONFIGURATIONS["mixtral"]
    with pytest.raises(ConfigurationError, match=r"muon trains 8% of this model's weights.*at least 50%") as error:
        model_support.check_model(config, experts)
    assert error.value.hint == "Set fine_tuning.optimizer to adamw."


@pytest.mark.parametrize("adaptation", ["lora", "p_tuning"])
def test_sample_prompts_are_answered_at_every_validation_and_change_no_weight(
    adaptation: str, datasets: dict[str, Artifact], tiny: Path, tmp_path: Path
) -> None:
    settings = {"adaptation": adaptation, "sample_prompts": ["Name <the> fox.", "What is a list?"], "sample_tokens": 5}
    interrupt_at_step_four(lambda: tune(datasets, tiny, tmp_path, **settings))
    model = tune(datasets, tiny, tmp_path, **settings)
    assert model.sha256 == tune(datasets, tiny, tmp_path / "without", adaptation=adaptation).sha256
    lines = [json.loads(line) for line in (model.path / "samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 0, 2, 2, 4, 4, 6, 6]
    assert len({line["answer"] for line in lines if line["prompt"] == "What is a list?"}) > 1, "the model changes"
    page = (model.path / "report.html").read_text()
    assert "Sample answers" in page
    assert "Name &lt;the&gt; fox." in page


def test_lora_plus_applies_the_weight_decay(datasets: dict[str, Artifact], tiny: Path, tmp_path: Path) -> None:
    digests = {
        tune(datasets, tiny, tmp_path / str(decay), lora={"plus_ratio": 16.0}, weight_decay=decay).sha256
        for decay in (0.0, 0.9)
    }
    assert len(digests) == 2


def interrupt_at_step_four(train: Callable[[], object], step: int = 4) -> None:
    """Interrupt a training after its checkpoint of step 4, or another step."""
    rotate = checkpoints.rotate

    def interrupt(folder: Path, keep: int) -> None:
        rotate(folder, keep)
        if (folder / f"checkpoint-{step}").exists():
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkpoints, "rotate", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train()


def test_trained_weights_that_trl_rounds_become_float32_again(tiny: Path) -> None:
    """TRL converts trained weights beside 4-bit weights to bfloat16. No machine here has 4-bit weights: rounded by hand."""
    model = adapters.adapt(LlamaForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16), recipe(tiny))
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    adapters.keep_trained_weights_in_float32(model)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert model(input_ids=torch.arange(8)[None]).logits.isfinite().all()


@pytest.mark.parametrize("adaptation", ["lora", "p_tuning", "prompt_tuning", "ia3"])
def test_adapter_artifact_has_no_base_weights_and_no_pickle(
    adaptation: str, datasets: dict[str, Artifact], tiny: Path, tmp_path: Path
) -> None:
    from safetensors import safe_open

    model = tune(datasets, tiny, tmp_path, adaptation=adaptation, max_steps=1)
    with safe_open(str(model.path / "adapter_model.safetensors"), framework="pt") as weights:
        names = list(weights.keys())
    assert names
    assert all("lora_" in name or "ia3_" in name or name == "prompt_embeddings" for name in names), names
    shipped = {file.path for file in model.manifest.files}
    assert not [name for name in shipped if name.endswith((".bin", ".pt", ".pth", ".pkl"))]
    assert str(tiny.parent) not in (model.path / "adapter_config.json").read_text()


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {"lora": {"rslora": True}},
        {"lora": {"dora": True}},
        {"lora": {"target_modules": ["q_proj", "v_proj"]}},
        {"adaptation": "ia3"},
        {"adaptation": "ia3", "ia3": {"target_modules": ["v_proj", "up_proj"], "feedforward_modules": ["up_proj"]}},
    ],
)
def test_merged_model_matches_base_with_adapter(
    settings: dict[str, Any], datasets: dict[str, Artifact], tiny: Path, tmp_path: Path
) -> None:
    unmerged = model_loading.load_model(
        model_loading.open_model(tune(datasets, tiny, tmp_path / "apart", **settings).path)
    )
    model = tune(datasets, tiny, tmp_path / "merged", merge=True, **settings)
    assert not list(model.path.glob("adapter_*"))
    merged = model_loading.load_model(model_loading.open_model(model.path))
    assert (
        adapter_merging.compute_relative_difference(
            adapter_merging._compute_logits(unmerged), adapter_merging._compute_logits(merged)
        )
        <= adapter_merging.MAX_LOGIT_DIFFERENCE
    )


def test_merged_weights_keep_the_dtype_of_the_base(datasets: dict[str, Artifact], tiny: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    base = shutil.copytree(tiny, tmp_path / "bfloat16")
    AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16).save_pretrained(base)
    adapter = tune(datasets, base, tmp_path / "apart", max_steps=2)
    merged = tune(datasets, base, tmp_path / "merged", max_steps=2, merge=True)
    assert {tensor.dtype for tensor in load_file(merged.path / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((merged.path / "config.json").read_text())["dtype"] == "bfloat16"
    expected, actual = (
        adapter_merging._compute_logits(
            model_loading.load_model(model_loading.open_model(model.path), dtype=torch.float32)
        )
        for model in (adapter, merged)
    )
    difference = adapter_merging.compute_relative_difference(expected, actual)
    assert adapter_merging.MAX_LOGIT_DIFFERENCE < difference <= adapter_merging.get_rounding_tolerance(torch.bfloat16)


def test_weights_that_overflow_the_dtype_of_the_base_are_refused(tiny: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tiny)
    with torch.no_grad():
        base.model.layers[0].mlp.gate_proj.weight[0, 0] = 1e6  # the largest float16 is 65504
    with pytest.raises(TrainingError, match=r"relative difference of the logits is (nan|inf)"):
        adapter_merging.merge(get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"])), torch.float16)


def test_interrupted_ia3_training_resumes_and_is_packaged_merged(
    datasets: dict[str, Artifact], tiny: Path, tmp_path: Path
) -> None:
    expected = tune(datasets, tiny, tmp_path / "whole", adaptation="ia3")
    interrupt_at_step_four(lambda: tune(datasets, tiny, tmp_path / "resumed", adaptation="ia3"))
    model = tune(datasets, tiny, tmp_path / "resumed", adaptation="ia3")
    assert (model.sha256, model.manifest.summary["resumed_from"]) == (expected.sha256, 4)
    loadable = model_loading.open_model(model.path)
    for backend in ("python", "vllm"):
        packaging = TritonPackagingConfig.model_validate({"backend": backend})
        assert adapter_placement.place_adapters(loadable, packaging, {}).mode == "merged"


def test_ia3_settings_are_optional_and_validate_target_modules() -> None:
    assert "ia3" not in FineTuningConfig().model_dump()
    with pytest.raises(
        ValidationError, match="feedforward_modules lists down_proj; expected modules of target_modules"
    ):
        FineTuningConfig.model_validate({"ia3": {"target_modules": ["k_proj"], "feedforward_modules": ["down_proj"]}})


def test_prompt_tuning_with_initial_text_stores_no_local_path(
    datasets: dict[str, Artifact], tiny: Path, tmp_path: Path
) -> None:
    settings = {"virtual_tokens": 4, "initial_text": "Answer the question."}
    model = tune(datasets, tiny, tmp_path, adaptation="prompt_tuning", prompt=settings)
    adapter_config = json.loads((model.path / "adapter_config.json").read_text())
    assert adapter_config["tokenizer_name_or_path"] == tiny.name
    model_loading.load_model(model_loading.open_model(model.path))


def test_published_p_tuning_tokens_reproduce_the_validation_loss(
    datasets: dict[str, Artifact], tiny: Path, tmp_path: Path
) -> None:
    model = tune(datasets, tiny, tmp_path, adaptation="p_tuning", validation_rows=4)
    loaded = model_loading.load_model(model_loading.open_model(model.path))
    assert compute_validation_loss(loaded, datasets["sft"], tiny) == pytest.approx(
        model.manifest.summary["validation_loss"], abs=1e-4
    )


def compute_validation_loss(model: Any, dataset: Artifact, tiny: Path) -> float:
    """Compute the mean loss per answer token of the validation rows without the trainer."""
    import torch

    from components.fine_tuning.objectives import IGNORED_LABEL, OBJECTIVES
    from components.fine_tuning.row_encoding import read_rows

    objective, tokenizer = OBJECTIVES["sft"], model_loading.load_tokenizer(tiny)
    total, count = 0.0, 0
    for row in read_rows(dataset.path / "validation.parquet", objective.row_mappings["sft"]):
        (example,) = objective.encode(tokenizer, row, 96).examples
        ids, labels = (torch.tensor(example[name]) for name in ("input_ids", "labels"))
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, -len(ids) :]
        is_answer = labels[1:] != IGNORED_LABEL
        total += float(
            torch.nn.functional.cross_entropy(logits[:-1][is_answer], labels[1:][is_answer], reduction="sum")
        )
        count += int(is_answer.sum())
    return total / count


def test_checkpoint_with_lowest_validation_loss_is_published(
    datasets: dict[str, Artifact], tiny: Path, tmp_path: Path
) -> None:
    """The learning rate is too high, so that the loss rises again."""
    settings = {
        "adaptation": "full",
        "learning_rate": 1.0,
        "max_steps": 12,
        "schedule": "constant_with_warmup",
        "validation_rows": 4,
    }
    model = tune(datasets, tiny, tmp_path, **settings)
    summary = model.manifest.summary
    lines = [json.loads(line) for line in (model.path / "training.jsonl").read_text().splitlines()]
    validations = {
        line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line and line["step"]
    }
    assert summary["best_step"] == min(validations, key=lambda step: validations[step]) < 12
    assert compute_validation_loss(
        model_loading.load_model(model_loading.open_model(model.path)), datasets["sft"], tiny
    ) == pytest.approx(min(validations.values()), abs=1e-4)


def test_early_stopping_ends_training_when_validation_loss_rises(
    datasets: dict[str, Artifact], tiny: Path, tmp_path: Path
) -> None:
    settings = {"learning_rate": 5.0, "max_steps": 40, "schedule": "constant_with_warmup", "early_stopping": 2}
    summary = tune(datasets, tiny, tmp_path, **settings).manifest.summary
    assert summary["stopped_early"]
    assert summary["steps"] == summary["best_step"] + 2 * 2 < 40


@pytest.mark.parametrize(
    ("objective", "kind", "suggested_objective"),
    [("dpo", "sft", "sft"), ("text", "sft", "sft"), ("sft", "text", "text"), ("kto", "text", "text")],
)
def test_unsupported_row_kind_error_suggests_an_objective(
    objective: str, kind: str, suggested_objective: str, datasets: dict[str, Artifact], tiny: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=f"contains {kind} rows, which this objective cannot learn from") as error:
        finetune(
            datasets[kind],
            tmp_path / "m",
            recipe(tiny, objective=objective),
            seed=3,
            state=tmp_path / "state",
            reporter=SilentReporter(),
        )
    assert f"fine_tuning.objective to {suggested_objective}" in error.value.hint


def test_kto_converts_each_pair_to_two_labelled_answers(
    datasets: dict[str, Artifact], tiny: Path, tmp_path: Path
) -> None:
    config = recipe(tiny, objective="kto", max_steps=1)
    model = finetune(
        datasets["preference"], tmp_path / "m", config, seed=3, state=tmp_path / "state", reporter=SilentReporter()
    )
    assert model.manifest.summary["rows"]["train"] == 48


def test_model_card_lists_data_recipe_losses_and_licences(
    datasets: dict[str, Artifact], tiny: Path, tmp_path: Path
) -> None:
    card = {"base_licence": "Apache-2.0", "data_licence": "internal"}
    model = tune(datasets, tiny, tmp_path, card=card)
    text = (model.path / "README.md").read_text()
    for expected in (
        "license: apache-2.0",
        "| training data | internal |",
        datasets["sft"].sha256,
        "| validation loss |",
        "| optimizer steps | 6",
        "24; truncated rows: 0, by a total of 0 tokens (0.0% of all tokens); omitted rows: 0",
    ):
        assert expected in text
    assert str(tiny.parent) not in text


def test_model_card_does_not_change_the_digest(datasets: dict[str, Artifact], tiny: Path, tmp_path: Path) -> None:
    without_card = tune(datasets, tiny, tmp_path / "1")
    with_card = tune(datasets, tiny, tmp_path / "2", card={"data_licence": "internal"})
    assert without_card.sha256 == with_card.sha256


def test_tensorboard_events_contain_the_loss_curves(datasets: dict[str, Artifact], tiny: Path, tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import directory_check  # noqa: F401 - the writer's own module reads no files back

    model = tune(datasets, tiny, tmp_path)
    (events,) = (model.path / "tensorboard").glob("events.out.tfevents.*")
    values = [
        (event.step, value.tag)
        for event in parse_tfrecords(events.read_bytes(), Event)
        for value in event.summary.value
    ]
    assert {step for step, tag in values if tag == "train_loss"} == set(range(1, 7))
    assert {step for step, tag in values if tag == "validation_loss"} == {0, 2, 4, 6}


def parse_tfrecords(content: bytes, event_class: Any) -> list[Any]:
    """Parse a TFRecord file. A record has a length, a checksum, the bytes and a checksum."""
    events, offset = [], 0
    while offset < len(content):
        length = int.from_bytes(content[offset : offset + 8], "little")
        event = event_class()
        event.ParseFromString(content[offset + 12 : offset + 12 + length])
        events.append(event)
        offset += 16 + length
    return events
