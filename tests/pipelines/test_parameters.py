"""How a run's parameters, their defaults and the text of `configuration` become one customization."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.common.errors import ConfigurationError
from pipelines import parameters, reference
from pipelines.config import Customization, load

DEFAULTS = parameters.defaults(Customization())


def combined(text: str = "", **changed: Any) -> Customization:
    return parameters.combine({**DEFAULTS, **changed}, DEFAULTS, text)


def refused(text: str = "", **changed: Any) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as error:
        combined(text, **changed)
    assert error.value.exit_code == 2
    return error.value


def test_nothing_changed_is_the_defaults() -> None:
    assert combined() == Customization()


def test_a_changed_parameter_wins_over_its_default() -> None:
    config = combined(sources=["/data/a.jsonl"], max_steps=7, seed=9, auto_promote=False, adaptation="full", model_name="mine")
    assert config.data_curation.sources == ["/data/a.jsonl"]
    assert (config.fine_tuning.max_steps, config.fine_tuning.adaptation, config.seed) == (7, "full", 9)
    assert (config.model_registry.name, config.model_registry.auto_promote) == ("mine", False)


def test_no_steps_means_epochs() -> None:
    assert combined(max_steps=0, epochs=2.5).fine_tuning.max_steps is None
    assert combined("fine_tuning: {max_steps: null}").fine_tuning.max_steps is None
    assert parameters.defaults(load(None, ["fine_tuning.max_steps=null"]))["max_steps"] == 0


def test_a_parameter_at_its_default_yields_to_the_configuration() -> None:
    config = combined("fine_tuning: {max_steps: 3, lora: {rank: 4}}\nseed: 5")
    assert (config.fine_tuning.max_steps, config.fine_tuning.lora.rank, config.seed) == (3, 4, 5)
    assert combined("fine_tuning: {max_steps: 3}", learning_rate=0.1).fine_tuning.learning_rate == 0.1


def test_a_key_set_differently_in_both_places_is_refused_with_both_values() -> None:
    error = refused("fine_tuning: {max_steps: 3}", max_steps=7)
    assert error.message == "fine_tuning.max_steps is set twice: the parameter max_steps is 7, and `configuration` says 3"
    assert error.hint == "Set it in one place: take it out of `configuration`, or leave the parameter max_steps at its default."
    assert "model_registry.name is set twice" in refused("model_registry: {name: a}", model_name="b").message


def test_a_key_set_alike_in_both_places_is_no_conflict() -> None:
    assert combined("fine_tuning: {learning_rate: 1e-3, max_steps: 7}", learning_rate=0.001, max_steps=7).fine_tuning.learning_rate == 1e-3
    assert combined("fine_tuning: {max_steps: null}", max_steps=0).fine_tuning.max_steps is None


def test_a_length_changed_in_the_form_cuts_training_and_evaluation_alike() -> None:
    assert combined(max_length=99).evaluation.max_length == 99
    assert combined("evaluation: {max_length: 50}", max_length=99).evaluation.max_length == 50


def test_what_the_models_refuse_names_the_key() -> None:
    message = refused(adaptation="magic").message
    allowed = "'lora', 'full', 'qlora', 'p_tuning' or 'prompt_tuning'"
    assert message == f"the run's parameters: fine_tuning.adaptation: found 'magic'; Input should be {allowed}"
    assert (
        "fine_tuning.learning_rat: there is no such key (did you mean learning_rate?)" in refused("fine_tuning: {learning_rat: 1}").message
    )
    assert "fine_tuning: found 'text'" in refused("fine_tuning: text", max_steps=3).message


def test_configuration_that_is_no_yaml_or_no_sections_is_said() -> None:
    assert refused("a: [1").message.startswith("the parameter `configuration` is not YAML: ")
    error = refused("- a")
    assert error.message == "the parameter `configuration` holds a list, not sections"
    assert error.hint == "It wants the text of a customization.yaml, for example `evaluation: {max_items: 200}`."


def test_a_relative_path_is_refused_where_only_pods_read_it() -> None:
    error = refused(sources=["demo:python-docs", "raw/a.jsonl"])
    assert error.message == "data_curation.sources: raw/a.jsonl is a relative path, and a pod has no folder that it could count from"
    assert error.hint == "Give the path that the pods see on the shared volume, for example /data/raw/tickets.jsonl."
    assert "fine_tuning.base_model: models/llama is a relative path" in refused(base_model="models/llama").message
    assert combined(base_model="hf://org/name@main", sources=["/data/*"]).fine_tuning.base_model == "hf://org/name@main"


def test_the_remainder_is_what_the_parameters_cannot_say() -> None:
    config = load(
        None, ["seed=9", "fine_tuning.lora.rank=4", "fine_tuning.batch_size=8", "evaluation.gate=[{against: base, max_loss: 0.1}]"]
    )
    left = parameters.remainder(config)
    assert yaml.safe_load(left) == {"fine_tuning": {"lora": {"rank": 4}}, "evaluation": {"gate": [{"against": "base", "max_loss": 0.1}]}}
    compiled = parameters.defaults(config)
    assert parameters.combine(compiled, compiled, left) == config


def test_the_remainder_is_one_line_whatever_it_holds() -> None:
    prompts = ["Two lines:\nthe second, with ü and 'quotes'", "yes", "2026-01-01"]
    config = load(
        None, ["fine_tuning.lora.rank=4", f"triton_packaging.golden_prompts={json.dumps(prompts)}", "data_curation.fractions.test=0.05"]
    )
    left = parameters.remainder(config)
    assert "\n" not in left
    assert yaml.safe_load(left) == {"triton_packaging": {"golden_prompts": prompts}, "fine_tuning": {"lora": {"rank": 4}}}


def test_a_commented_file_of_defaults_leaves_no_remainder(tmp_path: Path) -> None:
    file, _ = reference.write(tmp_path)
    assert parameters.remainder(load(file)) == ""
    assert parameters.remainder(Customization()) == ""


def test_a_length_of_the_evaluation_alone_stays_in_the_remainder() -> None:
    config = load(None, ["fine_tuning.max_length=512", "evaluation.max_length=256"])
    assert yaml.safe_load(parameters.remainder(config)) == {"evaluation": {"max_length": 256}}
    assert parameters.remainder(load(None, ["fine_tuning.max_length=512"])) == ""


def test_the_first_step_of_a_run_refuses_a_key_that_is_set_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipelines.customization import resolve

    events = tmp_path / "events.jsonl"
    monkeypatch.setenv("TUNELINE_EVENTS", str(events))
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # a step takes over SIGTERM; this process is not only a step
    given = {**DEFAULTS, "max_steps": 7, "configuration": "fine_tuning: {max_steps: 3}", "compiled": json.dumps(DEFAULTS)}
    with pytest.raises(SystemExit) as ended:
        resolve.python_func(**given)
    last = json.loads(events.read_text().splitlines()[-1])
    assert (ended.value.code, last["event"], last["error"]["stage"], last["error"]["kind"]) == (2, "failed", "resolve", "configuration")
    assert last["error"]["message"].startswith("fine_tuning.max_steps is set twice: the parameter max_steps is 7")
