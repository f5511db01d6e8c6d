"""Combination of a run's parameters, their defaults and `configuration` into one customization."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.common.models.adaptations import ADAPTATIONS
from components.common.runtime.errors import ConfigurationError
from components.data_curation.stage import ScoringInputs
from pipelines.config import config_templates
from pipelines.config.customization_config import Customization, load_customization
from pipelines.definition import chain_pipeline, customization_pipeline, run_parameters
from pipelines.steps import input_resolution
from pipelines.steps.curation_inputs import CurationInputs

DEFAULTS = run_parameters.default_parameters(Customization())


def combine(text: str = "", **changed: Any) -> Customization:
    return run_parameters.combine_parameters({**DEFAULTS, **changed}, DEFAULTS, text)


def get_error(text: str = "", **changed: Any) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as error:
        combine(text, **changed)
    assert error.value.exit_code == 2
    return error.value


def test_unchanged_parameters_give_the_defaults() -> None:
    assert combine() == Customization()


def test_changed_parameter_overrides_its_default() -> None:
    config = combine(
        sources=["/data/a.jsonl"], max_steps=7, seed=9, auto_promote=False, adaptation="full", model_name="mine"
    )
    assert [entry.path for entry in config.data_curation.sources] == ["/data/a.jsonl"]
    assert (config.fine_tuning.max_steps, config.fine_tuning.adaptation, config.seed) == (7, "full", 9)
    assert (config.model_registry.name, config.model_registry.auto_promote) == ("mine", False)


def test_zero_steps_select_epochs() -> None:
    assert combine(max_steps=0, epochs=2.5).fine_tuning.max_steps is None
    assert combine("fine_tuning: {max_steps: null}").fine_tuning.max_steps is None
    assert run_parameters.default_parameters(load_customization(None, ["fine_tuning.max_steps=null"]))["max_steps"] == 0


def test_configuration_overrides_a_parameter_at_its_default() -> None:
    config = combine("fine_tuning: {max_steps: 3, lora: {rank: 4}}\nseed: 5")
    assert (config.fine_tuning.max_steps, config.fine_tuning.lora.rank, config.seed) == (3, 4, 5)
    assert combine("fine_tuning: {max_steps: 3}", learning_rate=0.1).fine_tuning.learning_rate == 0.1


def test_conflicting_values_of_a_key_are_refused() -> None:
    error = get_error("fine_tuning: {max_steps: 3}", max_steps=7)
    assert (
        error.message == "fine_tuning.max_steps is set twice: the parameter max_steps is 7, and `configuration` has 3"
    )
    assert (
        error.hint
        == "Remove fine_tuning.max_steps from `configuration`, or leave the parameter max_steps at its default."
    )
    assert "model_registry.name is set twice" in get_error("model_registry: {name: a}", model_name="b").message


def test_equal_values_of_a_key_are_accepted() -> None:
    assert (
        combine(
            "fine_tuning: {learning_rate: 1e-3, max_steps: 7}", learning_rate=0.001, max_steps=7
        ).fine_tuning.learning_rate
        == 1e-3
    )
    assert combine("fine_tuning: {max_steps: null}", max_steps=0).fine_tuning.max_steps is None


def test_changed_length_applies_to_training_and_evaluation() -> None:
    assert combine(max_length=99).evaluation.max_length == 99
    assert combine("evaluation: {max_length: 50}", max_length=99).evaluation.max_length == 50


def test_validation_error_names_the_key() -> None:
    message = get_error(adaptation="magic").message
    *names, last = (f"'{name}'" for name in ADAPTATIONS)
    allowed = f"{', '.join(names)} or {last}"
    assert message == f"the run's parameters: fine_tuning.adaptation: found 'magic'; expected {allowed}"
    assert (
        "fine_tuning.learning_rat: unknown key (did you mean learning_rate?)"
        in get_error("fine_tuning: {learning_rat: 1}").message
    )
    assert "fine_tuning: found 'text'" in get_error("fine_tuning: text", max_steps=3).message


def test_malformed_configuration_is_reported() -> None:
    assert get_error("a: [1").message.startswith("the parameter `configuration` is not YAML: ")
    error = get_error("- a")
    assert error.message == "the parameter `configuration` is a list; expected a YAML mapping of sections"
    assert error.hint == "Specify the text of a customization.yaml, for example `evaluation: {max_items: 200}`."


def test_relative_path_is_refused() -> None:
    error = get_error(sources=["demo:python-docs", "raw/a.jsonl"])
    assert error.message == "data_curation.sources: raw/a.jsonl is a relative path; pods require absolute paths"
    assert error.hint == "Specify the path on the shared volume, as pods see it, for example /data/raw/tickets.jsonl."
    assert "fine_tuning.base_model: models/llama is a relative path" in get_error(base_model="models/llama").message
    assert combine(base_model="hf://org/name@main", sources=["/data/*"]).fine_tuning.base_model == "hf://org/name@main"


def test_remaining_keys_are_those_without_a_parameter() -> None:
    config = load_customization(
        None,
        [
            "seed=9",
            "fine_tuning.lora.rank=4",
            "fine_tuning.batch_size=8",
            "evaluation.gate=[{against: base, max_loss: 0.1}]",
        ],
    )
    remaining = run_parameters.dump_remaining_keys(config)
    assert yaml.safe_load(remaining) == {
        "fine_tuning": {"lora": {"rank": 4}},
        "evaluation": {"gate": [{"against": "base", "max_loss": 0.1}]},
    }
    compiled = run_parameters.default_parameters(config)
    assert run_parameters.combine_parameters(compiled, compiled, remaining) == config


def test_sections_that_are_off_by_default_are_remaining_keys() -> None:
    examples = {"good": ["/data/good.jsonl"], "bad": ["/data/bad.jsonl"]}
    vary = {"learning_rate": [1e-4, 3e-4]}
    overrides = [f"data_curation.quality_scores.classifier={examples}", f"fine_tuning.sweep.vary={vary}"]
    config = load_customization(None, overrides)
    remaining = run_parameters.dump_remaining_keys(config)
    assert yaml.safe_load(remaining) == {
        "data_curation": {"quality_scores": {"classifier": examples}},
        "fine_tuning": {"sweep": {"vary": vary}},
    }
    compiled = run_parameters.default_parameters(config)
    assert run_parameters.combine_parameters(compiled, compiled, remaining) == config


def test_remaining_keys_are_one_line() -> None:
    prompts = ["Two lines:\nthe second, with ü and 'quotes'", "yes", "2026-01-01"]
    config = load_customization(
        None,
        [
            "fine_tuning.lora.rank=4",
            f"triton_packaging.golden_prompts={json.dumps(prompts)}",
            "data_curation.fractions.test=0.05",
        ],
    )
    remaining = run_parameters.dump_remaining_keys(config)
    assert "\n" not in remaining
    assert yaml.safe_load(remaining) == {
        "triton_packaging": {"golden_prompts": prompts},
        "fine_tuning": {"lora": {"rank": 4}},
    }


def test_template_has_no_remaining_keys(tmp_path: Path) -> None:
    file, _ = config_templates.write_templates(tmp_path)
    assert run_parameters.dump_remaining_keys(load_customization(file)) == ""
    assert run_parameters.dump_remaining_keys(Customization()) == ""


def test_evaluation_length_is_a_remaining_key() -> None:
    config = load_customization(None, ["fine_tuning.max_length=512", "evaluation.max_length=256"])
    assert yaml.safe_load(run_parameters.dump_remaining_keys(config)) == {"evaluation": {"max_length": 256}}
    assert run_parameters.dump_remaining_keys(load_customization(None, ["fine_tuning.max_length=512"])) == ""


def test_resolve_step_refuses_conflicting_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipelines.definition.customization_pipeline import resolve

    events = tmp_path / "events.jsonl"
    monkeypatch.setenv("TUNELINE_EVENTS", str(events))
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # a step would replace this process's SIGTERM handler
    parameters = {
        **DEFAULTS,
        "max_steps": 7,
        "configuration": "fine_tuning: {max_steps: 3}",
        "compiled": json.dumps(DEFAULTS),
    }
    with pytest.raises(SystemExit) as exit_info:
        resolve.python_func(**parameters)
    last = json.loads(events.read_text().splitlines()[-1])
    assert (exit_info.value.code, last["event"], last["error"]["stage"], last["error"]["kind"]) == (
        2,
        "failed",
        "resolve",
        "configuration",
    )
    assert last["error"]["message"].startswith("fine_tuning.max_steps is set twice: the parameter max_steps is 7")


def test_parameters_of_the_stages_are_the_outputs_of_the_step_resolve() -> None:
    """The steps return their outputs by position."""
    inputs = CurationInputs([], [], [], "", "", ScoringInputs())
    plans = input_resolution.build_plans(load_customization(None), inputs, "0a", lambda _: None, None, [])
    parameters = plans.as_parameters()
    for step in (customization_pipeline.resolve, chain_pipeline.resolve):
        assert list(step.component_spec.outputs) == list(parameters)
    section = json.loads(parameters["fine_tuning"])
    assert (section["adaptation"], parameters["seed"], parameters["incumbent"]) == ("lora", 42, "")
    assert json.loads(parameters["fine_tuning_inputs"])["base_sha256"] == "0a"
