"""What is not as it was when a model was made is told with what it may change."""

from __future__ import annotations

import platform
from typing import Any

import pytest

from components.common import artifacts, cores, hashing, models
from components.common.artifacts import Input, Manifest
from components.common.errors import ConfigurationError
from components.common.models import Base
from components.data_curation.config import DataCurationConfig
from components.fine_tuning.config import FineTuningConfig
from pipelines import surroundings
from pipelines.surroundings import Difference, Work

HERE = {"torch": "2.9.1", "numpy": "2.3.0", "daft": "0.7.26", "mlflow": "3.17.2"}
BASE = Input(kind="base_model", content_sha256="ab" * 32, uri="/models/base")
CPU = {"device": "cpu", "threads": 2}
COMMIT, OTHER = "1" * 40, "2" * 40


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of four cores and one processor, with the base model on it."""
    monkeypatch.setattr(hashing, "packages", lambda: dict(HERE))
    monkeypatch.setattr(artifacts, "produced_by", lambda: {"tuneline": "0.1.0", "git_commit": COMMIT})
    monkeypatch.setattr(cores, "processor", lambda: "EPYC")
    monkeypatch.setattr(cores, "available", lambda: 4)
    monkeypatch.setattr(models, "base_model_here", lambda uri: Base(None, BASE.content_sha256, uri))  # type: ignore[arg-type]
    monkeypatch.delenv("TUNELINE_THREADS", raising=False)


def work(stage: str = "fine_tuning", *, key: str = "k", config: dict[str, Any] | None = None, **produced: Any) -> Work:
    """A stage's work as it would be recorded here, but for what is said."""
    settings = (FineTuningConfig if stage == "fine_tuning" else DataCurationConfig)()
    made = {"tuneline": "0.1.0", "git_commit": COMMIT, "packages": HERE, "python": platform.python_version(), "cpu": "EPYC", "key": "k"}
    manifest = Manifest(
        schema_="tuneline/model/v1", content_sha256="0", inputs=[], files=[], config_sha256="0", seed=0, summary={},
        config=settings.model_dump(mode="json") if config is None else config, produced_by={**made, **produced},
    )  # fmt: skip
    return Work(stage, "model" if stage == "fine_tuning" else "dataset", manifest, settings, key)


def told(*works: Work, arithmetic: dict[str, Any] | None = None, device: str = "cpu") -> list[tuple[str, str, str, str]]:
    found = surroundings.differences(works, BASE, CPU if arithmetic is None else arithmetic, device)
    return [(one.what, one.recorded, one.here, one.effect) for one in found]


def test_where_nothing_differs_nothing_is_told() -> None:
    assert told(work("data_curation"), work()) == []


def test_a_package_is_told_with_what_it_has_a_part_in() -> None:
    was = {"torch": "2.9.0", "numpy": "2.2.0", "daft": "0.7.25", "mlflow": "3.17.1"}
    assert told(work("data_curation", packages=was), work(packages=was)) == [
        ("torch", "2.9.0", "2.9.1", "may change the model"),
        ("numpy", "2.2.0", "2.3.0", "may change the dataset and the model"),
        ("daft", "0.7.25", "0.7.26", "may change the dataset"),
        ("mlflow", "3.17.1", "3.17.2", "changes neither: it only carries files"),
    ]


@pytest.mark.parametrize("grader", ["lm-eval", "rouge-score", "sacrebleu", "jsonschema", "nltk", "langdetect", "better-profanity", "vllm"])
def test_what_only_scores_models_changes_neither_and_explains_nothing(grader: str) -> None:
    assert grader in hashing.RESULT_PACKAGES
    was = {**HERE, grader: "1.0", "torch": "2.9.0"}
    assert told(work("data_curation", packages=was), work(packages=was)) == [
        ("torch", "2.9.0", "2.9.1", "may change the model"),
        (grader, "1.0", "not installed", "changes neither: it only measures"),
    ]
    found = surroundings.differences([work(packages=was)], BASE, CPU, "cpu")
    assert [one.what for one in surroundings.explaining(found, "model")] == ["torch"]


def test_no_package_is_named_twice() -> None:
    assert len(hashing.RESULT_PACKAGES) == len(set(hashing.RESULT_PACKAGES))


def test_a_dataset_that_is_not_curated_again_has_no_part_in_it() -> None:
    was = {**HERE, "numpy": "2.2.0", "daft": "0.7.25"}
    assert told(work(packages=was)) == [("numpy", "2.2.0", "2.3.0", "may change the model")]


def test_packages_that_one_side_lacks_are_told() -> None:
    was = {"numpy": "2.3.0", "daft": "0.7.26", "mlflow": "3.17.2", "deepspeed": "0.19.0"}
    assert told(work(packages=was)) == [
        ("torch", "not installed", "2.9.1", "may change the model"),
        ("deepspeed", "0.19.0", "not installed", "may change the model"),
    ]


def test_two_stages_under_different_versions_are_told_apart() -> None:
    assert told(work("data_curation", python="3.11.1"), work(python="3.11.2")) == [
        ("Python", "3.11.1", platform.python_version(), "may change the dataset"),
        ("Python", "3.11.2", platform.python_version(), "may change the model"),
    ]


def test_what_an_earlier_tuneline_did_not_record_is_not_told() -> None:
    earlier = work()
    for name in ("python", "cpu"):
        del earlier.manifest.produced_by[name]
    assert told(earlier, arithmetic={}) == []


def test_other_code_is_told_by_its_commit() -> None:
    assert told(work(key="other", git_commit=OTHER)) == [("code of fine_tuning", "2" * 12, "1" * 12, "may change the model")]
    assert told(work(git_commit=OTHER)) == [], "another commit with the same code of this stage"


def test_another_key_that_a_package_explains_is_no_other_code_where_the_commit_is_the_same() -> None:
    was = {**HERE, "torch": "2.9.0"}
    assert [what for what, *_ in told(work(key="other", packages=was))] == ["torch"]
    assert [what for what, *_ in told(work(key="other", packages=was, git_commit=OTHER))] == ["code of fine_tuning", "torch"]


def test_another_key_that_nothing_explains_is_told_also_of_one_commit() -> None:
    assert told(work(key="other")) == [("key of fine_tuning", "k", "other", "may change the model")]
    assert told(work(key="other", git_commit=f"{COMMIT}+changes"))[0][:2] == ("code of fine_tuning", f"{'1' * 12}+changes")


def test_a_setting_that_was_not_known_then_is_told_with_its_default() -> None:
    config = FineTuningConfig().model_dump(mode="json")
    del config["lora"]["dora"]
    assert told(work(config=config)) == [("fine_tuning.lora.dora", "not recorded", "false", "may change the model")]


def test_another_base_model_stops_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "base_model_here", lambda uri: Base(None, "cd" * 32, uri))  # type: ignore[arg-type]
    assert told(work()) == [("base model", "ab" * 6, "cd" * 6, "the training cannot be repeated with it")]


def test_a_base_model_that_is_gone_is_told_and_one_that_has_to_be_fetched_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(uri: str) -> Base:
        raise ConfigurationError(f"{uri} is not a folder")

    monkeypatch.setattr(models, "base_model_here", gone)
    assert [row[2] for row in told(work())] == ["missing: /models/base is not a folder"]
    monkeypatch.setattr(models, "base_model_here", lambda _: None)
    assert told(work()) == []


@pytest.mark.parametrize(("recorded", "used"), [(1, 1), (4, 4), (5, None), (None, None)])
def test_as_many_threads_are_used_as_were_where_there_are_so_many_cores(recorded: int | None, used: int | None) -> None:
    assert surroundings.threads_to_use({"threads": recorded} if recorded else {}) == used


def test_fewer_cores_than_threads_were_used_are_told() -> None:
    assert told(work(), arithmetic={"device": "cpu", "threads": 64}) == [("threads", "64", "4", "may change the model")]


def test_another_processor_is_told_of_a_training_on_it() -> None:
    assert told(work(cpu="Xeon")) == [("processor", "Xeon", "EPYC", "may change the model")]
    assert told(work("data_curation", cpu="Xeon"), work()) == []


def test_another_device_is_told_and_one_that_is_not_here_stops_the_training() -> None:
    recorded = {"device": "NVIDIA H100 80GB HBM3", "threads": 2}
    assert told(work(), arithmetic=recorded) == [("device", "NVIDIA H100 80GB HBM3", "cpu", "may change the model")]
    stops = ("device", "NVIDIA H100 80GB HBM3", "no hpu", "the training cannot be repeated with it")
    assert told(work(), arithmetic=recorded, device="hpu") == [stops]


@pytest.mark.parametrize(
    ("setting", "recorded", "used"),
    [("auto", "cpu", "cpu"), ("auto", "NVIDIA H100 80GB HBM3", "auto"), ("cuda", "NVIDIA H100 80GB HBM3", "cuda"), ("cpu", "cpu", "cpu")],
)
def test_what_was_trained_on_the_processor_is_trained_on_it_again(setting: str, recorded: str, used: str) -> None:
    assert surroundings.device_to_use(setting, {"device": recorded}) == used


def test_what_only_carries_files_explains_nothing() -> None:
    found = [Difference("torch", "1", "2", "may change the model"), Difference("mlflow", "1", "2", surroundings.NEITHER)]
    assert surroundings.explaining(found, "model") == found[:1]
    assert surroundings.explaining(found, "dataset") == []
