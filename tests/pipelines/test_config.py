"""Errors of a wrong configuration, and values that two sections share."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.common.runtime.errors import ConfigurationError, TunelineError, UsageError
from components.common.runtime.validation_errors import KEYS_OF_OTHER_TOOLS
from pipelines.config.customization_config import Customization, check_consistency, load_customization, parse_values


def get_error_message(*overrides: str, file: Path | None = None) -> str:
    with pytest.raises(TunelineError) as error:
        load_customization(file, overrides)
    assert error.value.exit_code == 2
    assert error.value.hint
    return error.value.message


def test_defaults_train_on_all_rows_and_promote_nothing() -> None:
    config = load_customization(None, ["data_curation.sources=[tickets.jsonl]"], or_demo=True)
    tuning = config.fine_tuning
    assert (tuning.max_steps, tuning.epochs, tuning.max_length, config.evaluation.max_length) == (None,) * 4
    assert config.model_registry.auto_promote is False
    assert load_customization() == Customization()


def test_run_without_sources_is_the_demo_with_its_own_settings(tmp_path: Path) -> None:
    config = load_customization(None, ["fine_tuning.max_steps=7"], or_demo=True)
    assert (config.fine_tuning.max_steps, config.fine_tuning.batch_size, config.evaluation.max_length) == (7, 8, 256)
    assert [entry.path for entry in config.data_curation.sources] == ["demo:python-docs"]
    assert config.model_registry.auto_promote is True
    file = tmp_path / "customization.yaml"
    file.write_text("seed: 3\n")
    assert load_customization(file, or_demo=True).model_registry.auto_promote is False


def test_override_sets_its_key_with_its_type() -> None:
    config = load_customization(
        None,
        ["fine_tuning.max_steps=7", "fine_tuning.learning_rate=5e-4", "seed=9", "model_registry.auto_promote=false"],
    )
    assert (config.fine_tuning.max_steps, config.fine_tuning.learning_rate, config.seed) == (7, 5e-4, 9)
    assert config.model_registry.auto_promote is False
    assert load_customization(None, ["fine_tuning.max_steps=null"]).fine_tuning.max_steps is None


def test_override_sets_an_item_of_a_list(tmp_path: Path) -> None:
    file = tmp_path / "customization.yaml"
    file.write_text(
        "evaluation: {tasks: [{kind: generation, data: q.jsonl}]}\ndata_curation: {sources: [a.jsonl, b.jsonl]}\n"
    )
    config = load_customization(file, ["evaluation.tasks.0.data=r.jsonl", "data_curation.sources.1=c.jsonl"])
    assert str(Path.cwd() / "r.jsonl") in str(config.evaluation.tasks)
    assert [str(source.path) for source in config.data_curation.sources] == [
        f"{tmp_path}/a.jsonl",
        str(Path.cwd() / "c.jsonl"),
    ]
    for override, message in (
        ("evaluation.tasks.1.kind=qa", "evaluation.tasks is a list of length 1 and has no item 1"),
        ("evaluation.tasks.-1=x", "evaluation.tasks is a list of length 1 and has no item -1"),
        ("data_curation.sources.0.limit=3", "data_curation.sources.0 is not a mapping and has no item limit"),
        ("evaluation.gate.0=x", "the configuration does not set the list evaluation.gate"),
    ):
        with pytest.raises(UsageError) as refused:
            load_customization(file, [override])
        assert refused.value.message == f"{override.partition('=')[0]}: {message}"
    unknown = "evaluation.tasks.0.kind: found 'qa'; expected 'held_out', 'generation', "
    assert get_error_message("evaluation.tasks.0.kind=qa", file=file).startswith(f"--set: {unknown}")
    assert get_error_message("evaluation.tasks.0.max_items=x", file=file).startswith("--set: evaluation.tasks.0.")


def test_misspelled_key_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    file = tmp_path / "customization.yaml"
    file.write_text("fine_tuning:\n  learning_rat: 0.1\n")
    assert (
        get_error_message(file=file) == f"{file}: fine_tuning.learning_rat: unknown key (did you mean learning_rate?)"
    )
    assert "(allowed: seed, data_curation," in get_error_message("xyz.x=1")
    both = get_error_message("fine_tuning.epoch=2", file=file)
    assert both.startswith(f"{file}: fine_tuning.learning_rat: unknown key")
    file.write_text("fine_tuning:\n  learning_rate: 0.1\n")
    assert get_error_message("fine_tuning.epoch=2", "seed=3", file=file).startswith("--set: fine_tuning.epoch: unknown")
    assert get_error_message("data_curation.fraction.test=0.3", file=file).startswith(
        "--set: data_curation.fraction: unknown"
    )


def test_key_of_another_tool_is_refused_with_the_key_of_that_meaning() -> None:
    for key, meant in KEYS_OF_OTHER_TOOLS.items():
        section = "data_curation" if meant == "sources" else "fine_tuning.lora" if key == "r" else "fine_tuning"
        assert f"{section}.{key}: unknown key (did you mean {meant}?)" in get_error_message(f"{section}.{key}=1")


def test_wrong_type_names_field_value_and_allowed_values() -> None:
    assert get_error_message("fine_tuning.max_steps=many") == (
        "the configuration: fine_tuning.max_steps: found 'many'; expected a whole number"
    )
    assert "fine_tuning.batch_size" in get_error_message("fine_tuning.batch_size=0")
    for key, value, allowed in (
        ("max_tokens", "8", "32 or more"),
        ("overlap_sentences", "21", "20 or less"),
        ("max_expanded_bytes", "1000", "1000000 or more"),
        ("timeout_seconds", "0", "1 or more"),
        ("ocr", "magic", "'none' or 'tesseract'"),
        ("ocr_languages", "[../x]", ""),
        ("ocr_languages", "[]", ""),
    ):
        message = get_error_message(f"data_curation.documents.{key}={value}")
        assert f"data_curation.documents.{key}" in message
        assert allowed in message
    assert "batch_size 8 is not a multiple of micro_batch_size 3" in get_error_message(
        "fine_tuning.micro_batch_size=3", "fine_tuning.batch_size=8"
    )
    assert "expected exactly one of min_gain, max_loss, max_harmed_share" in get_error_message(
        "evaluation.gate=[{against: base}]"
    )


def test_missing_or_malformed_file_is_reported(tmp_path: Path) -> None:
    assert get_error_message(file=tmp_path / "none.yaml") == f"{tmp_path / 'none.yaml'} does not exist"
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1,")
    assert get_error_message(file=broken).startswith(f"{broken} is not YAML:")
    broken.write_text("- a\n- b\n")
    assert get_error_message(file=broken) == f"{broken} contains a list; expected a mapping of sections"
    broken.write_bytes(b"\xff\xfe\x00a")
    assert get_error_message(file=broken) == f"{broken} is not UTF-8: byte 0xff in line 1"


def test_override_without_a_value_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="is not of the form"):
        load_customization(None, ["fine_tuning.max_steps"])


def test_evaluation_uses_the_training_length_by_default() -> None:
    assert load_customization(None, ["fine_tuning.max_length=77"]).evaluation.max_length == 77
    assert (
        load_customization(None, ["fine_tuning.max_length=77", "evaluation.max_length=90"]).evaluation.max_length == 90
    )


def test_perplexity_uses_the_base_model_by_default() -> None:
    key = "data_curation.quality_scores.perplexity"
    overrides = ["fine_tuning.base_model=hf://org/name@main", f"{key}.enabled=true"]
    assert load_customization(None, overrides).data_curation.quality_scores.perplexity.model == "hf://org/name@main"
    scored = load_customization(None, [*overrides, f"{key}.model=hf://org/other@main"])
    assert scored.data_curation.quality_scores.perplexity.model == "hf://org/other@main"
    assert load_customization(None, overrides[:1]).data_curation.quality_scores.perplexity.model == ""


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ("{classifier: {good: [a.jsonl]}}", "bad is empty"),
        ("{classifier: {min_score: 0.5}}", "min_score is set, but good and bad are empty"),
        ("{classifier: {good: [a.jsonl], bad: [b.jsonl], min_score: 2}}", "found 2"),
        ("{perplexity: {max_score: 50}}", "max_score is set, but enabled is false"),
        ("{perplexity: {enabled: true, max_score: 0.5}}", "found 0.5"),
        ("{judge: {model: rater}}", "url is empty"),
        ("{judge: {url: 'https://judge.example/v1'}}", "model is empty"),
        ("{judge: {url: 'http://judge.example/v1', model: rater, credentials: KEY}}", "send the key unencrypted"),
        ("{judge: {url: 'ftp://judge.example', model: rater}}", "expected scheme http or https"),
        ("{judge: {url: 'https://me:secret@judge.example/v1', model: rater}}", "url contains a user, password"),
        ("{judge: {url: 'https://judge.example/v1', model: rater, min_score: 11}}", "found 11"),
    ],
)
def test_incomplete_quality_scores_are_refused(values: str, problem: str) -> None:
    assert problem in get_error_message(f"data_curation.quality_scores={values}")


def test_relative_paths_are_resolved_from_their_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    file = tmp_path / "project" / "customization.yaml"
    file.write_text(
        "data_curation:\n  sources: [raw/*.jsonl, demo:python-docs]\n"
        "  quality_scores: {classifier: {good: [good.jsonl], bad: [/data/bad.jsonl]}}\n"
        "fine_tuning:\n  base_model: models/llama\n  objective: distill\n  distillation: {teacher: models/large}\n"
    )
    config = load_customization(file)
    classifier = config.data_curation.quality_scores.classifier
    assert (classifier.good, classifier.bad) == ([str(tmp_path / "project" / "good.jsonl")], ["/data/bad.jsonl"])
    assert [entry.path for entry in config.data_curation.sources] == [
        str(tmp_path / "project" / "raw/*.jsonl"),
        "demo:python-docs",
    ]
    assert config.fine_tuning.base_model == str(tmp_path / "project" / "models/llama")
    assert config.fine_tuning.distillation.teacher == str(tmp_path / "project" / "models/large")
    rewards = "[{kind: reward_model, model: previous}, {kind: reward_model, model: helpful}]"
    own = ["fine_tuning.distillation={}", "fine_tuning.objective=grpo", f"fine_tuning.grpo.rewards={rewards}"]
    models = [reward.model for reward in load_customization(file, own).fine_tuning.grpo.rewards]
    assert models == ["previous", str(tmp_path / "here" / "helpful")]
    config = load_customization(
        file, ['data_curation.sources=["mine.jsonl"]', "fine_tuning.base_model=hf://org/name@main"]
    )
    assert [entry.path for entry in config.data_curation.sources] == [str(tmp_path / "here" / "mine.jsonl")]
    assert config.fine_tuning.base_model == "hf://org/name@main"


def test_every_key_has_a_description() -> None:
    def list_undescribed(model: type, prefix: str = "") -> list[str]:
        names = []
        for name, field in model.model_fields.items():  # type: ignore[attr-defined]
            inner = field.annotation
            if hasattr(inner, "model_fields"):
                names += list_undescribed(inner, f"{prefix}{name}.")
            if not field.description:
                names.append(prefix + name)
        return names

    assert list_undescribed(Customization) == []
    assert issubclass(ConfigurationError, TunelineError)


def test_tasks_that_are_not_a_list_are_refused(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("evaluation: {tasks: 5}\n")
    with pytest.raises(ConfigurationError, match="evaluation.tasks"):  # noqa: RUF043
        load_customization(tmp_path / "c.yaml")


def test_task_file_is_resolved_from_the_configuration_folder(tmp_path: Path) -> None:
    (tmp_path / "apps_ml").mkdir()
    file = tmp_path / "apps_ml" / "c.yaml"
    file.write_text(
        "evaluation: {tasks: [{kind: lm_eval, task: tickets.yaml, metrics: [acc]}], gate: [{metric: lm_eval.acc, min_gain: 0}]}\n"
    )
    assert load_customization(file).evaluation.tasks[0].list_file_paths() == {
        "task": str(tmp_path / "apps_ml" / "tickets.yaml")
    }


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["fine_tuning.adaptation=p_tuning", "triton_packaging.adapter=merged"], "can neither be merged into weights"),
        (["fine_tuning.adaptation=prompt_tuning", "triton_packaging.backend=vllm"], "nor be served by vLLM"),
        (["triton_packaging.weights=referenced"], "only the package would contain the merged weights"),
        (["triton_packaging.backend=vllm", "fine_tuning.lora.dora=true"], "vLLM does not support DoRA"),
        (["triton_packaging.quantization=int8", "triton_packaging.backend=vllm"], "with backend vllm"),
        (["triton_packaging.quantization=int8", "triton_packaging.adapter=attached"], "with an attached adapter"),
        (["triton_packaging.quantization=int8", "fine_tuning.adaptation=p_tuning"], "with an attached adapter"),
        (["triton_packaging.quantization=fp8"], "with backend python; expected backend vllm"),
        (
            [
                "triton_packaging.quantization=fp8",
                "triton_packaging.backend=vllm",
                "triton_packaging.vllm.quantization=awq",
            ],
            "with vllm.quantization awq",
        ),
        (["triton_packaging.quantization=int8", "evaluation.engine=vllm"], "does not support the int8 weights"),
        (["triton_packaging.quantization=int8", "evaluation.quantization=none"], "expected equal values"),
        (["evaluation.quantization=int8"], "expected equal values"),
        (["triton_packaging.quantization_margin=0"], "quantization_margin"),
        (["triton_packaging.quantization_margin=0.06"], "quantization_margin"),
    ],
)
def test_unpackageable_configuration_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_consistency(load_customization(None, overrides))


def test_evaluation_follows_the_quantization_of_the_package() -> None:
    config = load_customization(None, ["triton_packaging.quantization=int8"])
    assert config.evaluation.quantization == "int8"
    assert config.set("triton_packaging.quantization", "none").evaluation.quantization == "none"
    fp8 = load_customization(None, ["triton_packaging.quantization=fp8", "triton_packaging.backend=vllm"])
    check_consistency(fp8)  # the adapter is merged, not attached
    assert fp8.set("evaluation.engine", "vllm").evaluation.requested_engine == "vllm"
    config = load_customization(None, ["triton_packaging.quantization=int8", "fine_tuning.objective=reward"])
    assert config.evaluation.quantization == "none"  # a reward model is not packaged


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("table: tickets", "has no order_by; a server returns rows in no defined order"),
        ("order_by: [id]", "has neither table nor query; expected one of them"),
        ("table: tickets, order_by: [id], snapshot: '3'", "has the key snapshot; PostgreSQL cannot read an earlier"),
    ],
)
def test_settings_that_do_not_fit_a_server_are_refused_without_a_connection(settings: str, message: str) -> None:
    source = f"data_curation.sources=[{{path: 'sql+postgresql://reader@nowhere.example/desk', {settings}}}]"
    with pytest.raises(ConfigurationError, match=message):
        check_consistency(load_customization(None, [source]))


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
def test_packageable_configuration_is_accepted(overrides: list[str]) -> None:
    check_consistency(load_customization(None, overrides))


def test_gate_on_rewards_requires_no_task_list() -> None:
    rule = {"metric": "reward.accuracy", "against": 0.5, "min_gain": 0.1}
    reward = {"fine_tuning": {"objective": "reward"}}
    for evaluation in ({"gate": [rule]}, {"suite": "none"}):
        config = parse_values({**reward, "evaluation": evaluation}, "test").evaluation
        assert ([task.kind for task in config.tasks], config.suite) == (["reward"], "none")
    assert parse_values(reward, "test").evaluation.tasks[0].kind == "reward"
    with pytest.raises(ConfigurationError, match=r"no task measures reward\.accuracy"):
        parse_values({"evaluation": {"gate": [rule]}}, "test")
