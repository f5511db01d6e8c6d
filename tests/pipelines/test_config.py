"""What a person reads when the configuration is wrong, and what two sections share."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.common.errors import ConfigurationError, TunelineError, UsageError
from components.evaluation.tasks.config import files
from pipelines.config import Customization, check_whole, load


def said(*overrides: str, file: Path | None = None) -> str:
    with pytest.raises(TunelineError) as error:
        load(file, overrides)
    assert error.value.exit_code == 2
    assert error.value.hint
    return error.value.message


def test_the_defaults_are_the_demo() -> None:
    config = load()
    assert config == Customization()
    assert config.fine_tuning.base_model == "embedded:smollm2-135m-instruct"
    assert config.model_registry.auto_promote is True
    assert config.data_curation.sources == ["demo:python-docs"]


def test_an_override_reaches_its_key_with_its_type() -> None:
    config = load(None, ["fine_tuning.max_steps=7", "fine_tuning.learning_rate=5e-4", "seed=9", "model_registry.auto_promote=false"])
    assert (config.fine_tuning.max_steps, config.fine_tuning.learning_rate, config.seed) == (7, 5e-4, 9)
    assert config.model_registry.auto_promote is False
    assert load(None, ["fine_tuning.max_steps=null"]).fine_tuning.max_steps is None


def test_a_misspelt_key_is_refused_with_the_one_that_was_meant(tmp_path: Path) -> None:
    file = tmp_path / "customization.yaml"
    file.write_text("fine_tuning:\n  learning_rat: 0.1\n")
    assert said(file=file) == f"{file}: fine_tuning.learning_rat: there is no such key (did you mean learning_rate?)"
    assert "(allowed: seed, data_curation," in said("xyz.x=1")


def test_a_wrong_type_names_the_field_what_was_found_and_what_is_allowed() -> None:
    assert said("fine_tuning.max_steps=many") == ("the configuration: fine_tuning.max_steps: found 'many'; a whole number is wanted")
    assert "fine_tuning.batch_size" in said("fine_tuning.batch_size=0")
    assert "batch_size 8 is not a multiple of micro_batch_size 3" in said("fine_tuning.micro_batch_size=3")
    assert "give either min_gain or max_loss" in said("evaluation.gate=[{against: base}]")


def test_a_file_that_is_missing_or_not_yaml_or_not_sections_is_said(tmp_path: Path) -> None:
    assert said(file=tmp_path / "none.yaml") == f"{tmp_path / 'none.yaml'} does not exist"
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1,")
    assert said(file=broken).startswith(f"{broken} is not YAML:")
    broken.write_text("- a\n- b\n")
    assert said(file=broken) == f"{broken} holds a list, not sections"
    broken.write_bytes(b"\xff\xfe\x00a")
    assert said(file=broken) == f"{broken} is not UTF-8: byte 0xff in line 1"


def test_an_override_without_a_value_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="is not of the form"):
        load(None, ["fine_tuning.max_steps"])


def test_rows_are_cut_alike_for_training_and_evaluation_unless_told_otherwise() -> None:
    assert load(None, ["fine_tuning.max_length=77"]).evaluation.max_length == 77
    assert load(None, ["fine_tuning.max_length=77", "evaluation.max_length=90"]).evaluation.max_length == 90


def test_paths_in_a_file_count_from_the_file_and_overrides_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    file = tmp_path / "project" / "customization.yaml"
    file.write_text("data_curation:\n  sources: [raw/*.jsonl, demo:python-docs]\nfine_tuning:\n  base_model: models/llama\n")
    config = load(file)
    assert config.data_curation.sources == [str(tmp_path / "project" / "raw/*.jsonl"), "demo:python-docs"]
    assert config.fine_tuning.base_model == str(tmp_path / "project" / "models/llama")
    config = load(file, ['data_curation.sources=["mine.jsonl"]', "fine_tuning.base_model=hf://org/name@main"])
    assert config.data_curation.sources == [str(tmp_path / "here" / "mine.jsonl")]
    assert config.fine_tuning.base_model == "hf://org/name@main"


def test_every_knob_is_described() -> None:
    def undescribed(model: type, prefix: str = "") -> list[str]:
        found = []
        for name, field in model.model_fields.items():  # type: ignore[attr-defined]
            inner = field.annotation
            if hasattr(inner, "model_fields"):
                found += undescribed(inner, f"{prefix}{name}.")
            if not field.description:
                found.append(prefix + name)
        return found

    assert undescribed(Customization) == []
    assert issubclass(ConfigurationError, TunelineError)


def test_tasks_that_are_no_list_are_told_as_a_wrong_configuration(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("evaluation: {tasks: 5}\n")
    with pytest.raises(ConfigurationError, match="evaluation.tasks"):  # noqa: RUF043
        load(tmp_path / "c.yaml")


def test_a_task_file_in_a_folder_with_any_name_counts_from_the_files_own_folder(tmp_path: Path) -> None:
    (tmp_path / "apps_ml").mkdir()
    file = tmp_path / "apps_ml" / "c.yaml"
    file.write_text(
        "evaluation: {tasks: [{kind: lm_eval, task: tickets.yaml, metrics: [acc]}], gate: [{metric: lm_eval.acc, min_gain: 0}]}\n"
    )
    assert files(load(file).evaluation.tasks[0]) == {"task": str(tmp_path / "apps_ml" / "tickets.yaml")}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["fine_tuning.adaptation=p_tuning", "triton_packaging.adapter=merged"], "can neither be merged into weights"),
        (["fine_tuning.adaptation=prompt_tuning", "triton_packaging.backend=vllm"], "nor be served by vLLM"),
        (["triton_packaging.weights=referenced"], "the adapter is merged, into weights that lie nowhere else"),
        (["triton_packaging.backend=vllm", "fine_tuning.lora.dora=true"], "vLLM does not compute DoRA"),
    ],
)
def test_a_model_that_could_not_be_packaged_as_configured_is_refused_before_it_is_trained(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_whole(load(None, overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        ["fine_tuning.adaptation=p_tuning"],
        ["triton_packaging.weights=referenced", "triton_packaging.adapter=attached"],
        ["triton_packaging.weights=referenced", "fine_tuning.adaptation=full"],
        ["triton_packaging.weights=referenced", "triton_packaging.backend=vllm"],
        ["triton_packaging.backend=vllm", "triton_packaging.adapter=merged", "fine_tuning.lora.dora=true"],
    ],
)
def test_what_can_be_packaged_as_configured_is_accepted(overrides: list[str]) -> None:
    check_whole(load(None, overrides))
