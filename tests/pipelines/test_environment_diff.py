"""Environment differences since a training are reported with their possible effect."""

from __future__ import annotations

import platform
from typing import Any

import pytest

from components.common.artifacts import artifact_folder, code_digest
from components.common.artifacts.artifact_folder import ArtifactInput, Manifest
from components.common.models import model_loading
from components.common.models.model_loading import LocalBaseModel
from components.common.runtime import cpu_cores
from components.common.runtime.errors import ConfigurationError
from components.data_curation.config import DataCurationConfig
from components.fine_tuning.config import FineTuningConfig
from pipelines.provenance import environment_diff
from pipelines.provenance.environment_diff import Difference, StageRecord

PACKAGES = {"torch": "2.9.1", "numpy": "2.3.0", "daft": "0.7.26", "mlflow": "3.17.2"}
BASE = ArtifactInput(kind="base_model", content_sha256="ab" * 32, uri="/models/base")
CPU = {"device": "cpu", "threads": 2}
COMMIT, OTHER = "1" * 40, "2" * 40


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine with four cores, one processor and the base model."""
    monkeypatch.setattr(code_digest, "result_packages", lambda: dict(PACKAGES))
    monkeypatch.setattr(artifact_folder, "collect_provenance", lambda: {"tuneline": "0.1.0", "git_commit": COMMIT})
    monkeypatch.setattr(cpu_cores, "get_processor_name", lambda: "EPYC")
    monkeypatch.setattr(cpu_cores, "count_available_cores", lambda: 4)
    monkeypatch.setattr(
        model_loading, "find_local_base_model", lambda uri: LocalBaseModel(None, BASE.content_sha256, uri)
    )  # type: ignore[arg-type]
    monkeypatch.delenv("TUNELINE_THREADS", raising=False)


def build_record(
    stage: str = "fine_tuning", *, key: str = "k", config: dict[str, Any] | None = None, **produced: Any
) -> StageRecord:
    """Return the record of a stage run in this environment, except for the given values."""
    settings = (FineTuningConfig if stage == "fine_tuning" else DataCurationConfig)()
    environment = {
        "tuneline": "0.1.0",
        "git_commit": COMMIT,
        "packages": PACKAGES,
        "python": platform.python_version(),
        "cpu": "EPYC",
        "key": "k",
    }
    manifest = Manifest(
        schema_="tuneline/model/v1", content_sha256="0", inputs=[], files=[], config_sha256="0", seed=0, summary={},
        config=settings.model_dump(mode="json") if config is None else config, produced_by={**environment, **produced},
    )  # fmt: skip
    return StageRecord(stage, "model" if stage == "fine_tuning" else "dataset", manifest, settings, key)


def compare(
    *records: StageRecord, arithmetic: dict[str, Any] | None = None, device: str = "cpu"
) -> list[tuple[str, str, str, str]]:
    differences = environment_diff.compare_environments(
        records, BASE, CPU if arithmetic is None else arithmetic, device
    )
    return [(difference.what, difference.recorded, difference.here, difference.effect) for difference in differences]


def test_equal_environments_have_no_differences() -> None:
    assert compare(build_record("data_curation"), build_record()) == []


def test_package_versions_are_reported_with_their_possible_effect() -> None:
    recorded = {"torch": "2.9.0", "numpy": "2.2.0", "daft": "0.7.25", "mlflow": "3.17.1"}
    assert compare(build_record("data_curation", packages=recorded), build_record(packages=recorded)) == [
        ("torch", "2.9.0", "2.9.1", "may change the model"),
        ("numpy", "2.2.0", "2.3.0", "may change the dataset and the model"),
        ("daft", "0.7.25", "0.7.26", "may change the dataset"),
        ("mlflow", "3.17.1", "3.17.2", "no effect: used only to transfer files"),
    ]


def test_packages_of_a_model_that_scored_the_rows_may_change_the_dataset() -> None:
    record = build_record("data_curation", packages={**PACKAGES, "torch": "2.9.0"})
    assert compare(record) == []
    record.manifest.inputs.append(ArtifactInput(kind="scoring_model", content_sha256="cd" * 32, uri="base"))
    assert compare(record) == [("torch", "2.9.0", "2.9.1", "may change the dataset")]


@pytest.mark.parametrize(
    "grader", ["lm-eval", "rouge-score", "sacrebleu", "jsonschema", "nltk", "langdetect", "better-profanity", "vllm"]
)
def test_evaluation_packages_do_not_explain_a_difference(grader: str) -> None:
    assert grader in code_digest.RESULT_PACKAGES
    recorded = {**PACKAGES, grader: "1.0", "torch": "2.9.0"}
    assert compare(build_record("data_curation", packages=recorded), build_record(packages=recorded)) == [
        ("torch", "2.9.0", "2.9.1", "may change the model"),
        (grader, "1.0", "not installed", "no effect: used only to evaluate"),
    ]
    differences = environment_diff.compare_environments([build_record(packages=recorded)], BASE, CPU, "cpu")
    assert [difference.what for difference in environment_diff.select_differences(differences, "model")] == ["torch"]


def test_result_packages_are_unique() -> None:
    assert len(code_digest.RESULT_PACKAGES) == len(set(code_digest.RESULT_PACKAGES))


def test_curation_packages_are_ignored_if_only_the_training_is_repeated() -> None:
    recorded = {**PACKAGES, "numpy": "2.2.0", "daft": "0.7.25"}
    assert compare(build_record(packages=recorded)) == [("numpy", "2.2.0", "2.3.0", "may change the model")]


def test_packages_missing_on_one_side_are_reported() -> None:
    recorded = {"numpy": "2.3.0", "daft": "0.7.26", "mlflow": "3.17.2", "deepspeed": "0.19.0"}
    assert compare(build_record(packages=recorded)) == [
        ("torch", "not installed", "2.9.1", "may change the model"),
        ("deepspeed", "0.19.0", "not installed", "may change the model"),
    ]


def test_stages_with_different_python_versions_are_reported_separately() -> None:
    assert compare(build_record("data_curation", python="3.10.1"), build_record(python="3.10.2")) == [
        ("Python", "3.10.1", platform.python_version(), "may change the dataset"),
        ("Python", "3.10.2", platform.python_version(), "may change the model"),
    ]


def test_unrecorded_values_are_not_reported() -> None:
    earlier = build_record()
    for name in ("python", "cpu"):
        del earlier.manifest.produced_by[name]
    assert compare(earlier, arithmetic={}) == []


def test_changed_code_is_reported_with_its_commit() -> None:
    assert compare(build_record(key="other", git_commit=OTHER)) == [
        ("code of fine_tuning", "2" * 12, "1" * 12, "may change the model")
    ]
    assert compare(build_record(git_commit=OTHER)) == [], "another commit with the same code of this stage"


def test_key_explained_by_a_package_is_not_a_code_difference() -> None:
    recorded = {**PACKAGES, "torch": "2.9.0"}
    assert [what for what, *_ in compare(build_record(key="other", packages=recorded))] == ["torch"]
    assert [what for what, *_ in compare(build_record(key="other", packages=recorded, git_commit=OTHER))] == [
        "code of fine_tuning",
        "torch",
    ]


def test_unexplained_key_is_reported() -> None:
    assert compare(build_record(key="other")) == [("key of fine_tuning", "k", "other", "may change the model")]
    assert compare(build_record(key="other", git_commit=f"{COMMIT}+changes"))[0][:2] == (
        "code of fine_tuning",
        f"{'1' * 12}+changes",
    )


def test_setting_unknown_to_the_recording_version_is_reported() -> None:
    config = FineTuningConfig().model_dump(mode="json")
    del config["lora"]["dora"]
    assert compare(build_record(config=config)) == [
        ("fine_tuning.lora.dora", "not recorded", "false", "may change the model")
    ]


def test_different_base_model_blocks_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_loading, "find_local_base_model", lambda uri: LocalBaseModel(None, "cd" * 32, uri))  # type: ignore[arg-type]
    assert compare(build_record()) == [("base model", "ab" * 6, "cd" * 6, "prevents the reproduction")]


def test_missing_local_base_model_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def raise_missing(uri: str) -> LocalBaseModel:
        raise ConfigurationError(f"{uri} is not a folder")

    monkeypatch.setattr(model_loading, "find_local_base_model", raise_missing)
    assert [row[2] for row in compare(build_record())] == ["missing: /models/base is not a folder"]
    monkeypatch.setattr(model_loading, "find_local_base_model", lambda _: None)
    assert compare(build_record()) == []


@pytest.mark.parametrize(("recorded", "expected"), [(1, 1), (4, 4), (5, None), (None, None)])
def test_recorded_thread_count_is_used_if_there_are_enough_cores(recorded: int | None, expected: int | None) -> None:
    assert environment_diff.select_threads({"threads": recorded} if recorded else {}) == expected


def test_too_few_cores_are_reported() -> None:
    assert compare(build_record(), arithmetic={"device": "cpu", "threads": 64}) == [
        ("threads", "64", "4", "may change the model")
    ]


def test_different_processor_is_reported_for_a_cpu_training() -> None:
    assert compare(build_record(cpu="Xeon")) == [("processor", "Xeon", "EPYC", "may change the model")]
    assert compare(build_record("data_curation", cpu="Xeon"), build_record()) == []


def test_different_device_is_reported_and_a_missing_one_blocks() -> None:
    recorded = {"device": "NVIDIA H100 80GB HBM3", "threads": 2}
    assert compare(build_record(), arithmetic=recorded) == [
        ("device", "NVIDIA H100 80GB HBM3", "cpu", "may change the model")
    ]
    blocked = ("device", "NVIDIA H100 80GB HBM3", "no hpu", "prevents the reproduction")
    assert compare(build_record(), arithmetic=recorded, device="hpu") == [blocked]


@pytest.mark.parametrize(
    ("setting", "recorded", "expected"),
    [
        ("auto", "cpu", "cpu"),
        ("auto", "NVIDIA H100 80GB HBM3", "auto"),
        ("cuda", "NVIDIA H100 80GB HBM3", "cuda"),
        ("cpu", "cpu", "cpu"),
    ],
)
def test_cpu_training_is_repeated_on_the_cpu(setting: str, recorded: str, expected: str) -> None:
    assert environment_diff.select_device(setting, {"device": recorded}) == expected


def test_transport_packages_do_not_explain_a_difference() -> None:
    differences = [
        Difference("torch", "1", "2", "may change the model"),
        Difference("mlflow", "1", "2", environment_diff.EFFECT_NONE_TRANSPORT),
    ]
    assert environment_diff.select_differences(differences, "model") == differences[:1]
    assert environment_diff.select_differences(differences, "dataset") == []
