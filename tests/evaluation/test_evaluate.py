"""Evaluation of a tiny tuned Llama: equal items for all models, cached scores, and the verdict in an artifact."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact
from components.common.models import model_loading
from components.common.runtime import chat_completions
from components.common.runtime.errors import ConfigurationError, InputError
from components.common.runtime.reporters import SilentReporter
from components.evaluation import engine_loading
from components.evaluation.config import EvaluationConfig
from components.evaluation.stage import evaluate
from components.evaluation.task_interface import Continuation, Item, TaskContext
from components.evaluation.tasks.held_out import HeldOut, HeldOutTask
from components.evaluation.transformers_engine import TransformersEngine
from components.fine_tuning.config import FineTuningConfig
from components.fine_tuning.stage import finetune
from components.model_registry import evidence
from tests.datasets import dataset_of, small_dataset
from tests.evaluation.tasks.judge_server import MODEL_NAME, Reply, longer_is_better, serve_judge
from tests.tiny import tiny_model

CONFIG = EvaluationConfig(
    suite="none",
    max_length=96,
    generations=2,
    generation_tokens=4,
    bootstrap_samples=1000,
    # The test split has 24 items; the default rule on harmed items requires 29.
    gate=[rule for rule in EvaluationConfig(suite="none").gate if rule.max_harmed_share is None],
)


@pytest.fixture(scope="module")
def tuned_artifacts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Artifact, Artifact, Path]:
    """Return a dataset, a model tuned on it, and the folder of both."""
    folder = tmp_path_factory.mktemp("world")
    dataset = small_dataset(folder / "dataset", test=24)
    values = {
        "base_model": str(tiny_model(folder / "tiny")),
        "max_steps": 25,
        "batch_size": 4,
        "learning_rate": 5e-3,
        "max_length": 96,
    }
    model = finetune(
        dataset,
        folder / "model",
        FineTuningConfig.model_validate(values),
        seed=1,
        state=folder / "state",
        reporter=SilentReporter(),
    )
    return dataset, model, folder


def load_items(dataset: Artifact, model: model_loading.LoadableModel) -> list[Item]:
    return HeldOutTask(HeldOut()).items(
        TaskContext(model_loading.load_tokenizer(model.tokenizer), dataset, 96, 5, SilentReporter())
    )


def compute_losses(loaded: object, items: list[Item], batch_tokens: int) -> list[float]:
    engine = TransformersEngine(loaded, model_loading.load_tokenizer(Path(loaded.config.name_or_path)), batch_tokens)
    return [
        -likelihood.logprob
        for likelihood in engine.compute_likelihoods(
            [Continuation(item.request["ids"], item.request["answer"]) for item in items], SilentReporter()
        )
    ]


def run_evaluation(
    tuned_artifacts: tuple[Artifact, Artifact, Path],
    output: Path,
    incumbent: model_loading.LoadableModel | None = None,
    **changes: object,
) -> Artifact:
    dataset, model, folder = tuned_artifacts
    config = CONFIG.model_copy(update=changes)
    model_files = model_loading.open_model_artifact(model)
    evaluation = evaluate(
        model_files,
        dataset,
        output,
        config,
        incumbent=incumbent,
        seed=5,
        state=folder / "state",
        reporter=SilentReporter(),
    )
    assert evidence.check_evaluation(evaluation, model.manifest) == []
    return evaluation


def test_tuned_model_is_accepted(tuned_artifacts: tuple[Artifact, Artifact, Path], tmp_path: Path) -> None:
    artifact = run_evaluation(tuned_artifacts, tmp_path / "evaluation")
    result = json.loads((artifact.path / "evaluation.json").read_text())
    loss = result["metrics"]["held_out"]["loss"]
    assert result["verdict"] == "accepted"
    assert loss["candidate"] < loss["base"]
    assert loss["ci95"][1] < 0
    assert loss["n"] == 24
    assert loss["incumbent"] is None
    assert result["metrics"]["held_out"]["perplexity"]["base"] == pytest.approx(math.exp(loss["base"]))
    assert len(result["reasons"]) == len(result["rules"]) == 4


def test_edited_samples_are_refused(tuned_artifacts: tuple[Artifact, Artifact, Path], tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text("".join(f'{{"prompt": "Say {n}.", "reference": "a"}}\n' for n in range(10)))
    task = {"kind": "generation", "data": str(tmp_path / "q.jsonl"), "metrics": ["json_valid", "f1"]}
    sampling = {"max_new_tokens": 3, "temperature": 0.8, "samples": 3, "pass_at": [2]}
    gate = [{"metric": "generation.json_valid_pass_at_2", "against": "base", "max_loss": 0.5}]
    config = EvaluationConfig.model_validate({"tasks": [{**task, **sampling}], "gate": gate})
    artifact = run_evaluation(tuned_artifacts, tmp_path / "evaluation", tasks=config.tasks, gate=config.gate)
    table = parquet.read_table(artifact.path / "predictions.parquet")
    honest = table.to_pylist()

    def check(**change: str) -> list[str]:
        rows = [{**honest[0], **change}, *honest[1:]]
        parquet.write_table(pa.Table.from_pylist(rows, table.schema), artifact.path / "predictions.parquet")
        return evidence.check_evaluation(artifact, tuned_artifacts[1].manifest)

    samples = json.loads(honest[0]["candidate_samples"])
    right = [{**samples[0], "json_valid": 1 - samples[0]["json_valid"]}, *samples[1:]]
    assert check() == []
    item = f"generation of the candidate: the scores or the answer of item {honest[0]['id']} do not follow from its samples"
    assert check(candidate_samples=json.dumps(right)) == [item]
    assert check(candidate_answer="another") == [item]
    for changed in ("[]", json.dumps(samples[:2])):
        (objection,) = check(candidate_samples=changed)
        assert f"{len(json.loads(changed))} sampled answers" in objection
        assert "expected 3" in objection


def test_texts_that_must_not_be_stored_are_in_no_file(
    tuned_artifacts: tuple[Artifact, Artifact, Path], tmp_path: Path
) -> None:
    rows = "".join(f'{{"prompt": "Say zebra {n}.", "reference": "zebra {n}"}}\n' for n in range(10))
    (tmp_path / "q.jsonl").write_text(rows)
    task = {"kind": "generation", "data": str(tmp_path / "q.jsonl"), "metrics": ["chrf"], "max_new_tokens": 3}
    checks = {"kind": "answer_checks", "tasks": ["generation"]}
    gate = [{"metric": "generation.chrf", "against": "base", "max_loss": 90}]
    state = tuned_artifacts[2] / "state"
    for store in (True, False):
        config = EvaluationConfig.model_validate({"tasks": [{**task, "store_texts": store}, checks], "gate": gate})
        cached = set(state.rglob("scores/*.json"))
        artifact = run_evaluation(tuned_artifacts, tmp_path / str(store), tasks=config.tasks, gate=config.gate)
        predictions = parquet.read_table(artifact.path / "predictions.parquet").to_pylist()
        assert ("zebra" in json.dumps(predictions)) == store
        tasks = {row["task"] for row in predictions if row["candidate_answer"] is not None}
        assert ({"generation", "answer_checks"} <= tasks, "generation" in tasks) == (store, store), tasks
        assert all(json.loads(row["candidate_scores"]) for row in predictions)
        assert ("zebra" in (artifact.path / "report.html").read_text()) == store
        assert (set(state.rglob("scores/*.json")) > cached) == store, "the cached scores contain answers"
    with pytest.raises(ValueError, match="store_texts is false, and samples is 2"):
        EvaluationConfig.model_validate({"tasks": [{**task, "store_texts": False, "samples": 2, "temperature": 1}]})


def test_predictions_sum_to_reported_loss(tuned_artifacts: tuple[Artifact, Artifact, Path], tmp_path: Path) -> None:
    artifact = run_evaluation(tuned_artifacts, tmp_path / "evaluation")
    table = parquet.read_table(artifact.path / "predictions.parquet").to_pydict()
    loss = artifact.manifest.summary["metrics"]["held_out"]["loss"]
    for role in ("candidate", "base"):
        assert sum(table[f"{role}_nll"]) / sum(table["answer_tokens"]) == pytest.approx(loss[role])
    assert sum(answer is not None for answer in table["candidate_answer"]) == 2


def test_base_scores_equal_separately_loaded_base(
    tuned_artifacts: tuple[Artifact, Artifact, Path], tmp_path: Path
) -> None:
    dataset, model, _ = tuned_artifacts
    model_files = model_loading.open_model_artifact(model)
    items = load_items(dataset, model_files)
    base_model = model_loading.load_model(
        model_loading.LoadableModel(model_files.base.sha256, model_files.base, model_files.base.path, None, None)
    )
    table = parquet.read_table(
        run_evaluation(tuned_artifacts, tmp_path / "evaluation").path / "predictions.parquet"
    ).to_pydict()
    by_id = dict(zip(table["id"], table["base_nll"], strict=True))
    for item, nll in zip(items, compute_losses(base_model, items, 2048), strict=True):
        assert by_id[item.id] == pytest.approx(nll, rel=1e-5)


def test_batching_does_not_change_losses(tuned_artifacts: tuple[Artifact, Artifact, Path]) -> None:
    dataset, model, _ = tuned_artifacts
    model_files = model_loading.open_model_artifact(model)
    items, loaded = load_items(dataset, model_files), model_loading.load_model(model_files)
    assert compute_losses(loaded, items, 1) == pytest.approx(compute_losses(loaded, items, 4096), rel=1e-4)


def test_candidate_equal_to_incumbent_is_unchanged(
    tuned_artifacts: tuple[Artifact, Artifact, Path], tmp_path: Path
) -> None:
    artifact = run_evaluation(
        tuned_artifacts, tmp_path / "evaluation", incumbent=model_loading.open_model_artifact(tuned_artifacts[1])
    )
    assert artifact.manifest.summary["verdict"] == "unchanged"


@pytest.mark.parametrize(("quantization", "tolerance"), [("int8", 0.01), ("fp8", 0.05)])
def test_gate_measures_the_rounded_weights_of_the_candidate_only(
    tuned_artifacts: tuple[Artifact, Artifact, Path], tmp_path: Path, quantization: str, tolerance: float
) -> None:
    exact = run_evaluation(tuned_artifacts, tmp_path / "exact")
    rounded = run_evaluation(tuned_artifacts, tmp_path / "rounded", quantization=quantization, engine="auto")
    contents = [json.loads((one.path / "evaluation.json").read_text()) for one in (exact, rounded)]
    losses = [content["metrics"]["held_out"]["loss"] for content in contents]
    assert losses[0]["base"] == losses[1]["base"]
    assert losses[0]["candidate"] != losses[1]["candidate"] == pytest.approx(losses[0]["candidate"], abs=tolerance)
    assert [content["measured"]["settings"].get("quantization") for content in contents] == [None, quantization]
    assert f"{quantization} weights, as in the package" in (rounded.path / "report.html").read_text()


def test_quantized_evaluation_of_a_model_that_no_package_quantizes_is_refused(
    tuned_artifacts: tuple[Artifact, Artifact, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match="does not support the int8 weights"):
        run_evaluation(tuned_artifacts, tmp_path / "vllm", quantization="int8", engine="vllm")
    _, artifact, _ = tuned_artifacts
    model, quantized = model_loading.open_model_artifact(artifact), EvaluationConfig(quantization="int8")
    engine_loading.check_quantization(quantized, model)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"num_virtual_tokens": 4}')
    with pytest.raises(ConfigurationError, match="but the candidate has an adapter with virtual tokens"):
        engine_loading.check_quantization(quantized, replace(model, adapter=tmp_path / "adapter"))
    manifest = artifact.manifest.model_copy(
        update={"schema_": artifact.manifest.schema_.replace("/model/", f"/{artifact_folder.REWARD_MODEL}/")}
    )
    with pytest.raises(ConfigurationError, match="but the candidate is a reward model"):
        engine_loading.check_quantization(quantized, replace(model, artifact=Artifact(artifact.path, manifest)))


def test_base_model_as_candidate_is_refused(tuned_artifacts: tuple[Artifact, Artifact, Path], tmp_path: Path) -> None:
    dataset, _, folder = tuned_artifacts
    base = model_loading.open_model(folder / "tiny")
    artifact = evaluate(
        base, dataset, tmp_path / "e", CONFIG, incumbent=None, seed=5, state=folder / "state", reporter=SilentReporter()
    )
    assert artifact.manifest.summary["verdict"] == "refused"
    assert artifact.manifest.summary["reasons"][0].startswith(
        "held_out.loss is identical to that of the base on all 24 items"
    )


def test_scores_are_cached_and_damaged_cache_is_ignored(
    tuned_artifacts: tuple[Artifact, Artifact, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run_evaluation(tuned_artifacts, tmp_path / "1")
    measured: list[str] = []
    original = HeldOutTask.score
    monkeypatch.setattr(HeldOutTask, "score", lambda *a: measured.append("a model") or original(*a))
    second = run_evaluation(tuned_artifacts, tmp_path / "2", bootstrap_samples=2000)
    assert measured == []
    for cache_file in (tuned_artifacts[2] / "state" / "evaluation" / "scores").glob("*.json"):
        cache_file.write_text(cache_file.read_text()[:-20])
    third = run_evaluation(tuned_artifacts, tmp_path / "3")
    assert len(measured) == 2
    assert first.sha256 == third.sha256 != second.sha256
    repeated = run_evaluation(tuned_artifacts, tmp_path / "4", repetition=1)
    assert len(measured) == 4  # for a policy that limits the age, so the cached scores do not count
    assert repeated.sha256 != first.sha256
    assert repeated.manifest.summary == first.manifest.summary
    assert "repetition" not in json.loads((first.path / "evaluation.json").read_text())["measured"]["settings"]


def test_evaluation_needs_two_items(tuned_artifacts: tuple[Artifact, Artifact, Path], tmp_path: Path) -> None:
    dataset = small_dataset(tmp_path / "dataset", test=1)
    with pytest.raises(InputError, match="has 1 row with an answer"):
        evaluate(
            model_loading.open_model_artifact(tuned_artifacts[1]),
            dataset,
            tmp_path / "e",
            CONFIG,
            incumbent=None,
            seed=5,
            state=tmp_path,
            reporter=SilentReporter(),
        )
    assert not (tmp_path / "e" / artifact_folder.MANIFEST_FILENAME).exists()


def test_incumbent_with_other_template_is_not_compared(
    tuned_artifacts: tuple[Artifact, Artifact, Path], tmp_path: Path
) -> None:
    other = tiny_model(tmp_path / "other", seed=9)
    (other / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    )
    artifact = run_evaluation(tuned_artifacts, tmp_path / "evaluation", incumbent=model_loading.open_model(other))
    assert artifact.manifest.summary["verdict"] == "refused"
    assert "another tokenizer" in artifact.manifest.summary["reasons"][1]
    assert artifact.manifest.summary["metrics"]["held_out"]["loss"]["incumbent"] is None


def test_dataset_of_unknown_rows_is_refused(tuned_artifacts: tuple[Artifact, Artifact, Path], tmp_path: Path) -> None:
    dataset = small_dataset(tmp_path / "dataset")
    manifest = dataset.manifest.model_copy(update={"summary": {"rows_kind": "pictures"}})
    with pytest.raises(InputError, match="contains pictures rows"):
        HeldOutTask(HeldOut()).items(
            TaskContext(None, artifact_folder.Artifact(dataset.path, manifest), 96, 5, SilentReporter())
        )


def test_plain_text_scores_every_token_without_answers(
    tuned_artifacts: tuple[Artifact, Artifact, Path], tmp_path: Path
) -> None:
    items = load_items(dataset_of("text", tmp_path / "texts"), model_loading.open_model_artifact(tuned_artifacts[1]))
    assert len(items) == 4
    assert all(sum(item.request["answer"]) == item.length and not item.request["prompt"] for item in items)


def test_virtual_tokens_do_not_change_base_scores(
    tuned_artifacts: tuple[Artifact, Artifact, Path], tmp_path: Path
) -> None:
    dataset, lora, folder = tuned_artifacts
    values = {
        "base_model": str(folder / "tiny"),
        "adaptation": "p_tuning",
        "max_steps": 4,
        "batch_size": 4,
        "max_length": 96,
    }
    config = FineTuningConfig.model_validate({**values, "learning_rate": 5e-3})
    tuned = finetune(dataset, tmp_path / "model", config, seed=1, state=tmp_path / "state", reporter=SilentReporter())
    artifacts = [
        evaluate(
            model_loading.open_model_artifact(model),
            dataset,
            tmp_path / name,
            CONFIG,
            incumbent=None,
            seed=5,
            state=tmp_path / name / "state",
            reporter=SilentReporter(),
        )
        for name, model in (("prompt", tuned), ("lora", lora))
    ]
    losses = [artifact.manifest.summary["metrics"]["held_out"]["loss"] for artifact in artifacts]
    assert losses[0]["base"] == pytest.approx(losses[1]["base"], abs=1e-5), "the same base, whatever stands before it"
    assert losses[0]["candidate"] != pytest.approx(losses[0]["base"], abs=1e-3)


def test_rows_are_truncated_at_shortest_context_length(
    tuned_artifacts: tuple[Artifact, Artifact, Path], tmp_path: Path
) -> None:
    model_files = model_loading.open_model_artifact(tuned_artifacts[1])
    short = tmp_path / "short"
    shutil.copytree(model_files.base.path, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 24}))
    incumbent = model_loading.open_model(str(short))
    artifact = run_evaluation(tuned_artifacts, tmp_path / "evaluation", incumbent)
    rows = parquet.read_table(artifact.path / "predictions.parquet").to_pylist()
    assert max(row["length"] for row in rows) == 24
    assert (
        json.loads((artifact.path / "evaluation.json").read_text())["metrics"]["held_out"]["loss"]["incumbent"]
        is not None
    )


def test_unanswered_judgements_refuse_and_rerun(
    tuned_artifacts: tuple[Artifact, Artifact, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_completions, "INITIAL_BACKOFF_SECONDS", 0.0)
    request_count, unavailable = [0], [True]
    (tmp_path / "q.jsonl").write_text(
        "".join(json.dumps({"prompt": f"Say {n}.", "reference": "It is said."}) + "\n" for n in range(12))
    )
    pairs = [
        {"prompt": f"{n}?", "answers": ["Longer.", "Short."][:: 1 - n % 2 * 2], "label": "ab"[n % 2]} for n in range(30)
    ]
    (tmp_path / "labels.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))

    def decide(first: str, second: str) -> Reply:
        request_count[0] += 1
        return (503, "busy") if unavailable[0] and request_count[0] % 2 == 0 else longer_is_better(first, second)

    with serve_judge(decide) as server:
        settings = {
            "data": str(tmp_path / "q.jsonl"),
            "calibration": str(tmp_path / "labels.jsonl"),
            "base_url": server.url,
            "model": MODEL_NAME,
            "retries": 0,
            "parallel": 1,
            "max_new_tokens": 4,
        }
        config = EvaluationConfig.model_validate(
            {"max_length": 96, "bootstrap_samples": 1000, "tasks": [{"kind": "judge", **settings}]}
        )
        changes = {name: getattr(config, name) for name in ("tasks", "gate")}
        refused = run_evaluation(tuned_artifacts, tmp_path / "evaluation", **changes)
        unavailable[0] = False
        again = run_evaluation(tuned_artifacts, tmp_path / "evaluation", **changes)
    assert (refused.manifest.summary["verdict"], refused.manifest.is_reusable) == ("refused", False)
    assert "the judge's agreement with 30 labelled pairs is too low" in refused.manifest.summary["reasons"][0]
    assert again.manifest.is_reusable
    content = json.loads((again.path / "evaluation.json").read_text())
    assert content["figures"]["judge"]["candidate"]["unanswered"] == 0
    assert content["calibration"]["judge"]["kappa"] == 1.0
    assert "calibration of judge" in (again.path / "report.html").read_text()
    requests = request_count[0]
    run_evaluation(tuned_artifacts, tmp_path / "another", **{**changes, "min_items": 12})
    assert request_count[0] == requests, "scores and calibration are reused"
