"""Evaluating a tiny tuned Llama: equal items for all, scores kept, and the verdict in an artifact."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from components.common import artifacts, models
from components.common.artifacts import Artifact
from components.common.errors import InputError
from components.common.progress import Silent
from components.evaluation.config import EvaluationConfig
from components.evaluation.engine import TransformersEngine
from components.evaluation.stage import evaluate
from components.evaluation.task import Continuation, Given, Item
from components.evaluation.tasks import endpoint
from components.evaluation.tasks.config import HeldOut
from components.evaluation.tasks.held_out import HeldOutTask
from components.fine_tuning.config import FineTuningConfig
from components.fine_tuning.stage import finetune
from tests.datasets import dataset_of, small_dataset
from tests.evaluation.tasks.judge_server import NAME, Reply, longer_is_better, stand_in
from tests.tiny import tiny_model

CONFIG = EvaluationConfig(max_length=96, generations=2, generation_tokens=4, bootstrap_samples=1000)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Artifact, Artifact, Path]:
    """A dataset, a model tuned on it, and the folder of both."""
    folder = tmp_path_factory.mktemp("world")
    dataset = small_dataset(folder / "dataset", test=24)
    values = {"base_model": str(tiny_model(folder / "tiny")), "max_steps": 25, "batch_size": 4, "learning_rate": 5e-3, "max_length": 96}
    model = finetune(dataset, folder / "model", FineTuningConfig.model_validate(values), seed=1, state=folder / "state", reporter=Silent())
    return dataset, model, folder


def held_out(dataset: Artifact, model: models.Model) -> list[Item]:
    return HeldOutTask(HeldOut()).items(Given(models.load_tokenizer(model.tokenizer), dataset, 96, 5, Silent()))


def losses(loaded: object, items: list[Item], batch_tokens: int) -> list[float]:
    engine = TransformersEngine(loaded, models.load_tokenizer(Path(loaded.config.name_or_path)), batch_tokens)
    return [-one.logprob for one in engine.likelihoods([Continuation(i.ask["ids"], i.ask["answer"]) for i in items], Silent())]


def judge(world: tuple[Artifact, Artifact, Path], output: Path, incumbent: models.Model | None = None, **changes: object) -> Artifact:
    dataset, model, folder = world
    config = CONFIG.model_copy(update=changes)
    opened = models.from_artifact(model)
    return evaluate(opened, dataset, output, config, incumbent=incumbent, seed=5, state=folder / "state", reporter=Silent())


def test_a_model_that_learned_is_accepted_with_an_interval_that_excludes_zero(
    world: tuple[Artifact, Artifact, Path], tmp_path: Path
) -> None:
    made = judge(world, tmp_path / "evaluation")
    result = json.loads((made.path / "evaluation.json").read_text())
    loss = result["metrics"]["held_out"]["loss"]
    assert result["verdict"] == "accepted"
    assert loss["candidate"] < loss["base"]
    assert loss["ci95"][1] < 0
    assert loss["n"] == 24
    assert loss["incumbent"] is None
    assert result["metrics"]["held_out"]["perplexity"]["base"] == pytest.approx(math.exp(loss["base"]))
    assert len(result["reasons"]) == len(result["rules"]) == 4


def test_predictions_add_up_to_the_reported_loss(world: tuple[Artifact, Artifact, Path], tmp_path: Path) -> None:
    made = judge(world, tmp_path / "evaluation")
    table = parquet.read_table(made.path / "predictions.parquet").to_pydict()
    loss = made.manifest.summary["metrics"]["held_out"]["loss"]
    for role in ("candidate", "base"):
        assert sum(table[f"{role}_nll"]) / sum(table["answer_tokens"]) == pytest.approx(loss[role])
    assert sum(answer is not None for answer in table["candidate_answer"]) == 2


def test_the_base_scored_with_its_adapter_off_scores_as_the_base_alone(world: tuple[Artifact, Artifact, Path], tmp_path: Path) -> None:
    dataset, model, _ = world
    opened = models.from_artifact(model)
    items = held_out(dataset, opened)
    alone = models.load(models.Model(opened.base.sha256, opened.base, opened.base.path, None, None))
    table = parquet.read_table(judge(world, tmp_path / "evaluation").path / "predictions.parquet").to_pydict()
    by_id = dict(zip(table["id"], table["base_nll"], strict=True))
    for item, nll in zip(items, losses(alone, items, 2048), strict=True):
        assert by_id[item.id] == pytest.approx(nll, rel=1e-5)


def test_batching_does_not_change_the_losses(world: tuple[Artifact, Artifact, Path]) -> None:
    dataset, model, _ = world
    opened = models.from_artifact(model)
    items, loaded = held_out(dataset, opened), models.load(opened)
    assert losses(loaded, items, 1) == pytest.approx(losses(loaded, items, 4096), rel=1e-4)


def test_a_candidate_that_is_the_incumbent_is_unchanged(world: tuple[Artifact, Artifact, Path], tmp_path: Path) -> None:
    made = judge(world, tmp_path / "evaluation", incumbent=models.from_artifact(world[1]))
    assert made.manifest.summary["verdict"] == "unchanged"


def test_a_base_model_as_candidate_is_refused_since_it_gains_nothing(world: tuple[Artifact, Artifact, Path], tmp_path: Path) -> None:
    dataset, _, folder = world
    base = models.open_model(folder / "tiny")
    made = evaluate(base, dataset, tmp_path / "e", CONFIG, incumbent=None, seed=5, state=folder / "state", reporter=Silent())
    assert made.manifest.summary["verdict"] == "refused"
    assert made.manifest.summary["reasons"][0].startswith("held_out.loss is the same as that of the base in all 24 items")


def test_an_unchanged_model_is_not_measured_twice_and_a_broken_score_file_is_not_believed(
    world: tuple[Artifact, Artifact, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = judge(world, tmp_path / "1")
    measured: list[str] = []
    real = HeldOutTask.score
    monkeypatch.setattr(HeldOutTask, "score", lambda *a: measured.append("a model") or real(*a))
    two = judge(world, tmp_path / "2", bootstrap_samples=2000)
    assert measured == []
    for kept in (world[2] / "state" / "evaluation" / "scores").glob("*.json"):
        kept.write_text(kept.read_text()[:-20])
    three = judge(world, tmp_path / "3")
    assert len(measured) == 2
    assert one.sha256 == three.sha256 != two.sha256


def test_an_evaluation_needs_two_items(world: tuple[Artifact, Artifact, Path], tmp_path: Path) -> None:
    dataset = small_dataset(tmp_path / "dataset", test=1)
    with pytest.raises(InputError, match="has 1 rows that can be measured"):
        evaluate(models.from_artifact(world[1]), dataset, tmp_path / "e", CONFIG, incumbent=None, seed=5, state=tmp_path, reporter=Silent())
    assert not (tmp_path / "e" / artifacts.MANIFEST).exists()


def test_a_model_in_service_with_another_template_refuses_instead_of_being_measured_on_foreign_tokens(
    world: tuple[Artifact, Artifact, Path], tmp_path: Path
) -> None:
    other = tiny_model(tmp_path / "other", seed=9)
    (other / "chat_template.jinja").write_text("{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}")
    made = judge(world, tmp_path / "evaluation", incumbent=models.open_model(other))
    assert made.manifest.summary["verdict"] == "refused"
    assert "another tokenizer" in made.manifest.summary["reasons"][1]
    assert made.manifest.summary["metrics"]["held_out"]["loss"]["incumbent"] is None


def test_a_dataset_of_unknown_rows_is_refused_with_what_is_needed(world: tuple[Artifact, Artifact, Path], tmp_path: Path) -> None:
    dataset = small_dataset(tmp_path / "dataset")
    manifest = dataset.manifest.model_copy(update={"summary": {"rows_kind": "pictures"}})
    with pytest.raises(InputError, match="holds pictures rows"):
        HeldOutTask(HeldOut()).items(Given(None, artifacts.Artifact(dataset.path, manifest), 96, 5, Silent()))


def test_every_token_of_a_plain_text_is_measured_and_nothing_is_asked(world: tuple[Artifact, Artifact, Path], tmp_path: Path) -> None:
    items = held_out(dataset_of("text", tmp_path / "texts"), models.from_artifact(world[1]))
    assert len(items) == 4
    assert all(sum(item.ask["answer"]) == item.length and not item.ask["prompt"] for item in items)


def test_virtual_tokens_are_measured_beside_the_base_they_stand_before(world: tuple[Artifact, Artifact, Path], tmp_path: Path) -> None:
    dataset, lora, folder = world
    values = {"base_model": str(folder / "tiny"), "adaptation": "p_tuning", "max_steps": 4, "batch_size": 4, "max_length": 96}
    config = FineTuningConfig.model_validate({**values, "learning_rate": 5e-3})
    tuned = finetune(dataset, tmp_path / "model", config, seed=1, state=tmp_path / "state", reporter=Silent())
    made = [
        evaluate(
            models.from_artifact(model),
            dataset,
            tmp_path / name,
            CONFIG,
            incumbent=None,
            seed=5,
            state=tmp_path / name / "state",
            reporter=Silent(),
        )
        for name, model in (("prompt", tuned), ("lora", lora))
    ]
    losses = [one.manifest.summary["metrics"]["held_out"]["loss"] for one in made]
    assert losses[0]["base"] == pytest.approx(losses[1]["base"], abs=1e-5), "the same base, whatever stands before it"
    assert losses[0]["candidate"] != pytest.approx(losses[0]["base"], abs=1e-3)


def test_rows_are_cut_at_what_every_model_reads(world: tuple[Artifact, Artifact, Path], tmp_path: Path) -> None:
    opened = models.from_artifact(world[1])
    short = tmp_path / "short"
    shutil.copytree(opened.base.path, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 24}))
    incumbent = models.open_model(str(short))
    made = judge(world, tmp_path / "evaluation", incumbent)
    rows = parquet.read_table(made.path / "predictions.parquet").to_pylist()
    assert max(row["length"] for row in rows) == 24
    assert json.loads((made.path / "evaluation.json").read_text())["metrics"]["held_out"]["loss"]["incumbent"] is not None


def test_an_evaluation_whose_judge_did_not_answer_is_refused_and_made_again_when_asked_again(
    world: tuple[Artifact, Artifact, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "PAUSE", 0.0)
    asked, away = [0], [True]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps({"prompt": f"Say {n}.", "reference": "It is said."}) + "\n" for n in range(12)))

    def decide(first: str, second: str) -> Reply:
        asked[0] += 1
        return (503, "busy") if away[0] and asked[0] % 2 == 0 else longer_is_better(first, second)

    with stand_in(decide) as server:
        told = {"data": str(tmp_path / "q.jsonl"), "base_url": server.url, "model": NAME, "retries": 0, "parallel": 1, "max_new_tokens": 4}
        config = EvaluationConfig.model_validate({"max_length": 96, "bootstrap_samples": 1000, "tasks": [{"kind": "judge", **told}]})
        changes = {name: getattr(config, name) for name in ("tasks", "gate")}
        refused = judge(world, tmp_path / "evaluation", **changes)
        away[0] = False
        again = judge(world, tmp_path / "evaluation", **changes)
    assert (refused.manifest.summary["verdict"], refused.manifest.lasting) == ("refused", False)
    assert "is not a finite number in" in refused.manifest.summary["reasons"][0]
    assert again.manifest.lasting
    assert json.loads((again.path / "evaluation.json").read_text())["figures"]["judge"]["candidate"]["unanswered"] == 0
