"""Tiny random models of every family in docs/how-to/models.md: trained, evaluated, reloaded, or refused before training.

The matrix is in the `long` tier: it trains seven models of each family. The test of the router loss trains two models,
and the test of the table builds 33 families.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.common.artifacts.artifact_folder import Artifact
from components.common.models import model_loading
from components.common.runtime.errors import ConfigurationError
from components.common.runtime.reporters import SilentReporter
from components.fine_tuning import acceleration, adapters, model_support, packing_isolation
from components.fine_tuning.config import FineTuningConfig
from components.fine_tuning.stage import finetune
from tests import reference
from tests.datasets import dataset_of, small_dataset
from tests.model_families import FAMILIES, Family, build_configuration, write_model
from tests.tiny import tiny_tokenizer

BY_TYPE = {family.model_type: family for family in FAMILIES}
SHORT: dict[str, Any] = {"max_steps": 2, "micro_batch_size": 2, "batch_size": 2}
# Each pair of adaptation, objective, validation, packing and accumulation that the configuration accepts occurs.
ACCUMULATED: dict[str, Any] = {"batch_size": 4}
AUTOMATIC: dict[str, Any] = {"max_steps": None, "epochs": 0.5, "micro_batch_size": None, "batch_size": None}
COMBINATIONS: list[dict[str, Any]] = [
    {"adaptation": "lora", "objective": "sft", "validation_rows": 4, **AUTOMATIC},
    {"adaptation": "lora", "objective": "sft", "validation_rows": 4, **ACCUMULATED},
    {"adaptation": "lora", "objective": "dpo", "validation_rows": 0, **ACCUMULATED},
    {"adaptation": "lora", "objective": "sft", "validation_rows": 0, "packing": True},
    {"adaptation": "full", "objective": "sft", "validation_rows": 4, "packing": True, **ACCUMULATED},
    {"adaptation": "full", "objective": "dpo", "validation_rows": 4},
    {"adaptation": "p_tuning", "objective": "sft", "validation_rows": 4},
    {"adaptation": "p_tuning", "objective": "dpo", "validation_rows": 0, **ACCUMULATED},
]
Tune = Callable[..., Artifact]


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    folder = tmp_path_factory.mktemp("data")
    return {
        "sft": small_dataset(folder / "sft", train=12, validation=4, test=1),
        "dpo": dataset_of("preference", folder / "preference"),
    }


@pytest.fixture
def tune(datasets: dict[str, Artifact], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tune:
    """Return a function that trains a model folder for two steps."""
    monkeypatch.setenv("TUNELINE_THREADS", "1")

    def tune_model(model: Path, **changes: Any) -> Artifact:
        config = FineTuningConfig.model_validate({"base_model": str(model), **SHORT, **changes})
        output = tmp_path / str(len(list(tmp_path.iterdir())))
        return finetune(
            datasets[config.objective], output / "m", config, seed=1, state=output / "s", reporter=SilentReporter()
        )

    return tune_model


@pytest.mark.long
@pytest.mark.parametrize("model_type", BY_TYPE)
def test_family_trains_every_combination_or_is_refused(model_type: str, tune: Tune, tmp_path: Path) -> None:
    model = write_model(BY_TYPE[model_type], tmp_path / "base")
    model_config = model_loading.load_configuration(model)
    model_loading.check_base_model(model_loading.resolve_base_model(str(model)))
    for combination in COMBINATIONS:
        if combination.get("packing") and not can_pack(model_config):
            combination = {**combination, "packing": False}
        tuned = tune(model, **combination)
        assert (tuned.manifest.summary["validation_loss"] is not None) == bool(combination["validation_rows"])
        model_loading.load_model(model_loading.open_model(tuned.path))


@pytest.mark.parametrize("model_type", ["gemma2", "mixtral", "granitemoehybrid"])
def test_dense_expert_and_hybrid_model_train_at_defaults(model_type: str, tune: Tune, tmp_path: Path) -> None:
    summary = tune(write_model(BY_TYPE[model_type], tmp_path / "base"), **AUTOMATIC).manifest.summary
    assert summary["steps"] == 1
    assert summary["validation_loss_before"] > 0


@pytest.mark.long
@pytest.mark.parametrize("model_type", BY_TYPE)
def test_packing_is_refused_exactly_if_rows_leak(model_type: str) -> None:
    model_config = build_configuration(BY_TYPE[model_type], tiny_tokenizer())
    leak = packing_isolation.measure_leak(build_model(model_config), vocabulary=model_config.vocab_size)
    assert can_pack(model_config) == (not leak)


def can_pack(model_config: Any) -> bool:
    try:
        model_support.check_model(FineTuningConfig(packing=True), model_config)
    except ConfigurationError:
        return False
    return True


def build_model(model_config: Any, seed: int = 0) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(model_config)


@pytest.mark.parametrize("model_type", ["mixtral", "granitemoe"])
def test_rounding_of_experts_is_no_leak_between_packed_rows(model_type: str) -> None:
    import torch

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_local_experts": 16, "num_experts_per_tok": 2}
    model_config = build_configuration(Family("", model_type, sizes), tiny_tokenizer())
    model = build_model(model_config)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(packing_isolation, "MAX_EXPERT_ROUNDING", 0)
        assert packing_isolation.measure_leak(model, vocabulary=model_config.vocab_size) > 0
    packing_isolation.check_isolation(model, vocabulary=model_config.vocab_size)

    class PositionlessModel(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.config = model, model.config

        def forward(self, input_ids: Any, position_ids: Any, **options: Any) -> Any:
            return self.model(input_ids=input_ids, **options)

    with pytest.raises(ConfigurationError, match="packed rows attend to each other"):
        packing_isolation.check_isolation(PositionlessModel(), vocabulary=model_config.vocab_size)


def test_experts_are_adapted_without_dropout_and_the_report_says_so(
    tune: Tune, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    from safetensors import safe_open

    tuned = tune(write_model(BY_TYPE["mixtral"], tmp_path / "base"), validation_rows=0, lora={"rank": 4})
    assert not [warning for warning in recwarn if "_pattern" in str(warning.message)], "PEFT applies the patterns"
    with safe_open(tuned.path / "adapter_model.safetensors", "pt") as file:
        experts = "base_model.model.model.layers.0.mlp.experts"
        fused, down = (file.get_slice(f"{experts}.{name}lora_A.weight").get_shape()[0] for name in ("base_layer.", ""))
    assert (fused, down) == (4 * 2 * 4, 4 * 4), "4 experts of rank 4; gate_up_proj fuses two projections"
    assert '"lora_dropout": 0.0' in (tuned.path / "adapter_config.json").read_text()
    assert "lora.dropout: 0, because" in "\n".join(tuned.manifest.summary["choices"])
    dense = tune(write_model(BY_TYPE["llama"], tmp_path / "dense"), validation_rows=0)
    assert '"lora_dropout": 0.05' in (dense.path / "adapter_config.json").read_text()


@pytest.mark.long
def test_router_loss_is_trained_and_left_out_of_the_validation_loss(tune: Tune, tmp_path: Path) -> None:
    """A router loss of weight 0 and a large one: equal validation loss before training, different training losses."""
    summaries = []
    for weight in (0.0, 50.0):
        sizes = {**BY_TYPE["mixtral"].sizes, "router_aux_loss_coef": weight}
        model = write_model(Family("", "mixtral", sizes), tmp_path / f"base-{weight}")
        summaries.append(tune(model, adaptation="full", **ACCUMULATED).manifest.summary)
    without, with_router = summaries
    assert with_router["validation_loss_before"] == pytest.approx(without["validation_loss_before"], abs=1e-4)
    assert with_router["train_loss"] > without["train_loss"] + 50
    assert with_router["train_loss"] < without["train_loss"] + 50 * 4, "the loss is divided by the accumulation steps"


@pytest.mark.parametrize(
    ("model_type", "changes", "reason", "hint"),
    [
        ("gemma2", {"attention": "sdpa"}, "Gemma2ForCausalLM does not support sdpa; expected one of", "attention"),
        ("llama4_text", {"attention": "flash_attention_2"}, "does not support flash_attention_2", "attention"),
        ("jamba", {"packing": True}, "the state of its state-space .* is carried from row to row", "packing"),
        ("bloom", {"packing": True}, "the model has no position ids", "packing"),
        ("falcon", {"packing": True}, "its attention mask does not depend on position ids", "packing"),
        ("mixtral", {"lora": {"dora": True}}, "PEFT does not support DoRA for the experts", "dora"),
        ("llama", {"lora": {"target_modules": ["c_attn"]}}, "target_modules: Target modules", "q_proj"),
    ],
)
def test_recipe_that_the_model_cannot_train_is_refused(
    model_type: str, changes: dict[str, Any], reason: str, hint: str
) -> None:
    with pytest.raises(ConfigurationError, match=reason) as error:
        model_support.check_model(FineTuningConfig.model_validate(changes), build_configuration(BY_TYPE[model_type]))
    assert hint in error.value.hint


def test_model_type_without_causal_language_modeling_is_refused() -> None:
    from transformers import AutoConfig

    with pytest.raises(ConfigurationError, match="no class for causal language modeling with model_type t5"):
        model_support.check_model(FineTuningConfig(), AutoConfig.for_model("t5"))


def test_recipe_is_refused_before_rows_are_tokenized(tune: Tune, tmp_path: Path) -> None:
    model = write_model(BY_TYPE["falcon"], tmp_path / "base")
    with pytest.raises(ConfigurationError, match=r"fine_tuning\.packing"):
        tune(model, packing=True, max_length=64, learning_rate=1e-4)
    assert not list(tmp_path.glob("*/s"))


@pytest.mark.parametrize(("model_type", "attention"), [("gemma2", "eager"), ("gpt_oss", "eager"), ("llama", "sdpa")])
def test_automatic_attention_is_one_that_the_model_supports(model_type: str, attention: str) -> None:
    model_class = model_support.find_class(build_configuration(BY_TYPE[model_type]))
    assert acceleration._choose_attention(FineTuningConfig(), "cpu", False, model_class)[0] == attention


def test_linear_layers_that_peft_cannot_adapt_are_left_out() -> None:
    for model_type, excluded in (("llama4_text", ["router"]), ("mamba", ["out_proj"]), ("llama", [])):
        model = build_model(build_configuration(BY_TYPE[model_type]))
        assert adapters._list_unadaptable_modules(model) == excluded


@pytest.mark.long
def test_table_of_families_is_up_to_date() -> None:
    page = (reference.ROOT / "docs/how-to/models.md").read_text(encoding="utf-8")
    assert reference.render_models_page(page) == page, "run: python -m tests.reference"
