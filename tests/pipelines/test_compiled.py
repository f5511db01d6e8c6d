"""What Kubeflow is given: the compiled pipeline, for the defaults and for a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from components.common.errors import ConfigurationError
from pipelines import compiling, platform
from pipelines.config import Customization, load
from pipelines.platform import Platform
from tests.pipelines.command import ROOT, answer, refusal, tuneline

GOLDEN = ROOT / "tests" / "pipelines" / "golden" / "pipeline.yaml"
REGENERATE = "if the change is meant: python -m pipelines.cli compile -o tests/pipelines/golden/pipeline.yaml"
STEPS = {"resolve", "data-curation", "data-versioning", "fine-tuning", "evaluation", "triton-packaging", "promotion", "report"}
CLUSTER = """
images: {curation: "r/c@sha256:1", training: "r/t@sha256:2", evaluation: "r/e@sha256:3", serving: "r/s@sha256:4",
  pull_secrets: [reg], pull_policy: Always}
volume: {claim: team-a, mount: /shared, folder: tuneline}
mlflow: {tracking_uri: "http://mlflow:5000"}
secrets: {MLFLOW_TRACKING_TOKEN: {name: mlflow, key: token}}
environment: {HTTPS_PROXY: "http://proxy:3128"}
scheduling: {node_selector: {pool: gpu}, tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}], queue: team-a}
resources:
  fine_tuning: {cpu: "8", memory: 64Gi, accelerator: nvidia.com/gpu, accelerators: 2, shared_memory: 8Gi, timeout_seconds: 3600}
  others: {cpu: 500m, memory: 2Gi}
"""


def documents(text: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text))


@pytest.fixture(scope="module")
def text() -> str:
    return compiling.compiled(Customization())


@pytest.fixture(scope="module")
def compiled(text: str) -> dict[str, Any]:
    return documents(text)[0]


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pipeline for a cluster that says everything a platform.yaml can say."""
    file = tmp_path_factory.mktemp("placed") / "platform.yaml"
    file.write_text(CLUSTER)
    pipeline, kubernetes = documents(compiling.compiled(Customization(), platform.load(file)))
    return pipeline["deploymentSpec"]["executors"], kubernetes["platforms"]["kubernetes"]["deploymentSpec"]["executors"]


def test_the_compiled_pipeline_is_the_one_that_was_reviewed(text: str) -> None:
    assert text == GOLDEN.read_text(encoding="utf-8"), REGENERATE


def test_no_step_installs_anything_when_its_pod_starts(compiled: dict[str, Any]) -> None:
    executors = compiled["deploymentSpec"]["executors"]
    assert len(executors) == len(STEPS) + 2, "each step, registration twice: for accepted and for refused candidates"
    for executor in executors.values():
        assert "pip install" not in " ".join(executor["container"]["command"])
        assert executor["container"]["image"].startswith("tuneline/")


def tasks(dag: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    """Every task by name, those behind conditions too."""
    found = {}
    for name, task in dag["tasks"].items():
        inner = components[task["componentRef"]["name"]].get("dag")
        found.update(tasks(inner, components) if inner else {name: task})
    return found


def test_what_must_look_at_the_world_is_never_cached_and_the_rest_is(compiled: dict[str, Any]) -> None:
    found = tasks(compiled["root"]["dag"], compiled["components"])
    cached = {name for name, task in found.items() if task["cachingOptions"].get("enableCache")}
    assert cached == {"data-curation", "fine-tuning", "evaluation", "triton-packaging"}
    assert set(found) == STEPS | {"registration", "registration-2"}


def test_a_person_in_the_ui_sees_at_most_twelve_parameters_each_with_type_default_and_description(compiled: dict[str, Any]) -> None:
    parameters = compiled["root"]["inputDefinitions"]["parameters"]
    assert len(parameters) <= 12
    for name, parameter in parameters.items():
        assert parameter["isOptional"], name
        assert "defaultValue" in parameter, name
        assert len(parameter["description"]) > 30, name
    types = {name: parameter["parameterType"] for name, parameter in parameters.items()}
    assert types["sources"] == "LIST"
    assert types["auto_promote"] == "BOOLEAN"
    assert {types[name] for name in ("max_steps", "batch_size", "max_length", "seed")} == {"NUMBER_INTEGER"}
    assert {types[name] for name in ("epochs", "learning_rate")} == {"NUMBER_DOUBLE"}
    assert {types[name] for name in ("base_model", "model_name", "adaptation", "configuration")} == {"STRING"}


def test_every_pod_gets_its_image_volume_places_tracking_and_secrets(placed: tuple[dict[str, Any], dict[str, Any]]) -> None:
    executors, kubernetes = placed
    assert set(executors) == set(kubernetes), "every pod"
    images = {name.removeprefix("exec-"): executor["container"]["image"] for name, executor in executors.items()}
    assert {images["data-curation"], images["data-versioning"]} == {"r/c@sha256:1"}
    assert (images["fine-tuning"], images["triton-packaging"]) == ("r/t@sha256:2", "r/s@sha256:4")
    assert {images[name] for name in ("resolve", "evaluation", "registration", "registration-2", "promotion")} == {"r/e@sha256:3"}
    for name, executor in executors.items():
        variables = {pair["name"]: pair["value"] for pair in executor["container"]["env"]}
        assert variables == {
            "TUNELINE_WORKDIR": "/shared/tuneline",
            "TUNELINE_STORE": "/shared/tuneline/store",
            "TUNELINE_STATE": "/shared/tuneline/state",
            "TUNELINE_CACHE": "/shared/tuneline/cache",
            "MLFLOW_TRACKING_URI": "http://mlflow:5000",
            "HTTPS_PROXY": "http://proxy:3128",
        }
        pod = kubernetes[name]
        assert [(mount["constant"], mount["mountPath"]) for mount in pod["pvcMount"]] == [("team-a", "/shared")]
        (secret,) = pod["secretAsEnv"]
        assert (secret["secretName"], secret["keyToEnv"]) == ("mlflow", [{"envVar": "MLFLOW_TRACKING_TOKEN", "secretKey": "token"}])
        assert [secret["secretName"] for secret in pod["imagePullSecret"]] == ["reg"]
        assert pod["imagePullPolicy"] == "Always"


def test_every_pod_is_scheduled_alike_not_only_the_one_that_trains(placed: tuple[dict[str, Any], dict[str, Any]]) -> None:
    for pod in placed[1].values():
        assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
        assert pod["nodeSelector"]["labels"] == {"pool": "gpu"}
        assert pod["podMetadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team-a"}


def test_each_stage_asks_for_what_the_platform_gives_it(placed: tuple[dict[str, Any], dict[str, Any]]) -> None:
    executors, kubernetes = placed
    training = executors["exec-fine-tuning"]["container"]["resources"]
    assert (training["resourceCpuRequest"], training["resourceCpuLimit"], training["resourceMemoryLimit"]) == ("8", "8", "64Gi")
    assert (training["accelerator"]["resourceType"], training["accelerator"]["resourceCount"]) == ("nvidia.com/gpu", "2")
    assert kubernetes["exec-fine-tuning"]["activeDeadlineSeconds"] == "3600"
    (memory,) = kubernetes["exec-fine-tuning"]["emptyDirMounts"]
    assert (memory["mountPath"], memory["medium"], memory["sizeLimit"]) == ("/dev/shm", "Memory", "8Gi")
    assert executors["exec-promotion"]["container"]["resources"]["resourceMemoryRequest"] == "2Gi"
    assert "resources" not in executors["exec-evaluation"]["container"]


def test_the_same_input_gives_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    (tmp_path / "platform.yaml").write_text(CLUSTER)
    found = []
    for seed in ("1", "2"):
        arguments = ("compile", "-p", "platform.yaml", "--set", "fine_tuning.lora.rank=4", "-o", f"made/{seed}.yaml")
        found.append(answer(*arguments, cwd=tmp_path, PYTHONHASHSEED=seed))
    assert found[0]["sha256"] == found[1]["sha256"]
    assert found[0] == {"pipeline": "made/1.yaml", "sha256": found[0]["sha256"], "warnings": []}
    assert (tmp_path / "made" / "1.yaml").read_bytes() == (tmp_path / "made" / "2.yaml").read_bytes()
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == ["1.yaml", "2.yaml"], "nothing half-written stays"


def test_the_configuration_becomes_defaults_and_what_is_no_parameter_one_line_of_yaml(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "seed: 7\ndata_curation:\n  sources: [/data/raw/*.jsonl]\n  text_unit: file\nfine_tuning:\n  max_steps: null\n"
    )
    pipeline = documents(compiling.compiled(load(tmp_path / "c.yaml", here=False)))[0]
    default = {name: p["defaultValue"] for name, p in pipeline["root"]["inputDefinitions"]["parameters"].items()}
    assert (default["seed"], default["sources"], default["max_steps"]) == (7, ["/data/raw/*.jsonl"], 0)
    assert default["configuration"] == "{data_curation: {text_unit: file}}"


def test_a_relative_path_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    error = refusal(2, "compile", "--set", "data_curation.sources=[raw/a.jsonl]", "-o", "pipeline.yaml", cwd=tmp_path)
    assert error == {
        "stage": "",
        "kind": "configuration",
        "message": "data_curation.sources: raw/a.jsonl is a relative path, and a pod has no folder that it could count from",
        "hint": "Give the path that the pods see on the shared volume, for example /data/raw/tickets.jsonl.",
    }
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_not_on_the_volume_is_remarked(tmp_path: Path) -> None:
    config = load(None, ["data_curation.sources=[/home/me/a.jsonl, /data/b.jsonl]", "fine_tuning.base_model=/models/llama"], here=False)
    assert compiling.write(config, Platform(), tmp_path / "pipeline.yaml") == [
        "data_curation.sources: /home/me/a.jsonl is not on the volume, which the pods see as /data",
        "fine_tuning.base_model: /models/llama is not on the volume, which the pods see as /data",
    ]


def test_without_a_platform_a_person_is_told_of_the_volume(tmp_path: Path) -> None:
    done = tuneline("compile", "-o", "pipeline.yaml", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr == (
        "tuneline: without -p platform.yaml the pods share no volume and do not find one another's artifacts: "
        "`tuneline init` writes a commented platform.yaml\n"
    )
    assert done.stdout.startswith("wrote pipeline.yaml; run it: tuneline submit -f pipeline.yaml --endpoint URL --experiment NAME")


def test_an_ending_that_kubeflow_does_not_take_is_refused(tmp_path: Path) -> None:
    error = refusal(2, "compile", "-o", "pipeline.json", cwd=tmp_path)
    assert (error["kind"], error["message"]) == ("usage", "pipeline.json does not end in .yaml")
    assert error["hint"] == "Kubeflow takes a compiled pipeline by that ending: -o pipeline.yaml."


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("volumes: {}", "volumes: there is no such key (did you mean volume?)"),
        ("resources: {training: {cpu: 1}}", "resources.training: there is no such key"),
        ("volume: {claim: My_Claim}", "volume.claim: found 'My_Claim'"),
        ("volume: {mount: data}", "volume.mount: found 'data'"),
        ("resources: {fine_tuning: {memory: 64 GB}}", "resources.fine_tuning.memory: found '64 GB'"),
        ("secrets: {HF_TOKEN: hf_abc}", "secrets.HF_TOKEN: keys below it are wanted"),
        (
            "environment: {HF_TOKEN: hf_abc}",
            "HF_TOKEN would stand in the pipeline for all to read; name its secret and key under `secrets`",
        ),
        ("mlflow: {tracking_uri: 'http://me:pw@mlflow'}", "holds a password; name a secret for MLFLOW_TRACKING_USERNAME"),
        ("scheduling: {tolerations: [{value: x}]}", "a toleration without a key needs operator Exists"),
        ("environment: {'A B': x}", "A B is no name of an environment variable"),
    ],
)
def test_a_platform_that_cannot_be_meant_names_the_file_and_the_field(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "platform.yaml"
    file.write_text(content)
    with pytest.raises(ConfigurationError) as error:
        platform.load(file)
    assert error.value.message.startswith(f"{file}: ")
    assert message in error.value.message
    assert "hf_abc" not in error.value.message
    assert ":pw@" not in error.value.message
    assert error.value.hint == "docs/kubeflow.md explains the keys; `tuneline init` writes a commented file."


def test_a_platform_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as error:
        platform.load(tmp_path / "platform.yaml")
    assert error.value.message == f"{tmp_path / 'platform.yaml'} does not exist"
    assert error.value.hint == "Check the path; `tuneline init` writes a commented platform.yaml."
