"""What Kubeflow is given: the compiled pipeline, for the defaults and for a cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.common.errors import ConfigurationError, UsageError
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


def test_the_compiled_pipeline_of_a_release_is_the_one_that_was_reviewed() -> None:
    text = compiling.compiled(Customization(), pipeline="promotion")
    golden = GOLDEN.with_name("promotion.yaml")
    assert text == golden.read_text(encoding="utf-8"), f"if the change is meant: tuneline compile --pipeline promotion -o {golden}"


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
    (tmp_path / "made").mkdir()
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


def refused(output: Path, *inputs: Path) -> tuple[str, str]:
    """Message and hint of `compiling.write` for an output that it must not write."""
    with pytest.raises(UsageError) as error:
        compiling.write(Customization(), None, output, inputs=inputs)
    return error.value.message, error.value.hint


def test_the_configuration_and_the_platform_are_never_overwritten(tmp_path: Path) -> None:
    files = {"c.yaml": "seed: 7\n", "p.yaml": "volume: {claim: team-a}\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "link.yaml").symlink_to("c.yaml")
    for output in ("c.yaml", "p.yaml", "./c.yaml", "link.yaml"):
        error = refusal(2, "compile", "-c", "c.yaml", "-p", "p.yaml", "-o", output, cwd=tmp_path)
        said = f"{Path(output)} is what is read: it would be overwritten"
        assert (error["kind"], error["message"], error["hint"]) == ("usage", said, "Name another file with -o.")
    assert {name: (tmp_path / name).read_text() for name in files} == files


def test_a_file_that_is_no_compiled_pipeline_is_never_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text("notes: {pipelineInfo: 3}\n")
    assert refused(file) == (f"{file} exists and is not a compiled pipeline", "Name another file with -o, or remove this one first.")
    assert file.read_text() == "notes: {pipelineInfo: 3}\n"


def test_a_compiled_pipeline_and_an_empty_file_are_replaced(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.touch()
    for seed in (1, 2):
        compiling.write(Customization(seed=seed), Platform(), file)
        assert documents(file.read_text())[0]["root"]["inputDefinitions"]["parameters"]["seed"]["defaultValue"] == seed


def test_an_output_that_cannot_be_written_is_said_with_the_name_that_was_given(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("mine")
    (tmp_path / "folder.yaml").mkdir()
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "device.yaml").symlink_to("/dev/null")
    new, file = tmp_path / "new" / "deep", tmp_path / "f"
    missing = f"Make it (mkdir -p {new}), or name another file."
    assert refused(new / "p.yaml") == (f"the folder {new} does not exist", missing)
    assert refused(file / "p.yaml") == (f"{file} is not a folder", "Name another folder.")
    assert refused(file / "deep" / "p.yaml") == (f"{file / 'deep'} cannot be a folder: {file} is none", "Name another folder.")
    folder = tmp_path / "folder.yaml"
    assert refused(folder) == (f"{folder} is a folder", f"Name a file in it, for example -o {folder / 'pipeline.yaml'}.")
    for name in ("pipe.yaml", "device.yaml"):
        assert refused(tmp_path / name) == (f"{tmp_path / name} is a pipe or a device, not a file", "Name another file with -o.")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["device.yaml", "f", "folder.yaml", "pipe.yaml"]
    assert file.read_text() == "mine"


def test_an_error_of_the_system_names_the_output_and_not_its_draft(tmp_path: Path) -> None:
    output = tmp_path / ("x" * 250 + ".yaml")  # a name that just fits; its draft's does not
    with pytest.raises(OSError) as error:
        compiling.write(Customization(), None, output)
    assert error.value.filename == str(output)


def test_a_secret_may_hold_a_whole_address_and_wins_over_what_is_written(tmp_path: Path) -> None:
    (tmp_path / "platform.yaml").write_text(
        "mlflow: {tracking_uri: 'http://mlflow:5000'}\nenvironment: {HTTPS_PROXY: 'http://proxy:3128'}\n"
        "secrets: {HTTPS_PROXY: {name: proxy, key: url}, MLFLOW_TRACKING_URI: {name: mlflow, key: uri}}\n"
    )
    pipeline, kubernetes = documents(compiling.compiled(Customization(), platform.load(tmp_path / "platform.yaml")))
    for name, executor in pipeline["deploymentSpec"]["executors"].items():
        written = {pair["name"] for pair in executor["container"]["env"]}
        assert written == {"TUNELINE_WORKDIR", "TUNELINE_STORE", "TUNELINE_STATE", "TUNELINE_CACHE"}
        secrets = kubernetes["platforms"]["kubernetes"]["deploymentSpec"]["executors"][name]["secretAsEnv"]
        assert {pair["envVar"] for secret in secrets for pair in secret["keyToEnv"]} == {"HTTPS_PROXY", "MLFLOW_TRACKING_URI"}


def test_the_store_may_be_a_bucket_while_the_rest_stays_on_the_volume(tmp_path: Path) -> None:
    (tmp_path / "platform.yaml").write_text("store: s3://models/team-a\nenvironment: {AWS_ENDPOINT_URL: 'https://s3.example:9021'}\n")
    pipeline = documents(compiling.compiled(Customization(), platform.load(tmp_path / "platform.yaml")))[0]
    for executor in pipeline["deploymentSpec"]["executors"].values():
        variables = {pair["name"]: pair["value"] for pair in executor["container"]["env"]}
        assert variables["TUNELINE_STORE"] == "s3://models/team-a"
        assert variables["TUNELINE_CACHE"] == "/data/tuneline/cache"
        assert variables["TUNELINE_STATE"] == "/data/tuneline/state"


HARMLESS = {
    "TOKENIZERS_PARALLELISM": "false",
    "GOOGLE_APPLICATION_CREDENTIALS": "/data/google.json",
    "AWS_WEB_IDENTITY_TOKEN_FILE": "/var/run/token",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    "MAX_TOKENS": "100",
    "KEYBOARD": "de",
    "KEY_PREFIX": "runs/",
    "MONKEY": "yes please",
    "PWD": "/data",
    "HTTPS_PROXY": "http://proxy:3128",
    "NO_PROXY": "localhost,10.0.0.0/8",
    "ME": "http://me@host:80/",
    "PACKAGES": "https://host:443/simple/a@1.2",
    "HOSTS": "http://one:80,http://me@two",
}


@pytest.mark.parametrize("name", HARMLESS)
def test_a_variable_that_is_no_secret_may_be_written(tmp_path: Path, name: str) -> None:
    (tmp_path / "platform.yaml").write_text(yaml.safe_dump({"environment": {name: HARMLESS[name]}}))
    assert platform.load(tmp_path / "platform.yaml").environment == {name: HARMLESS[name]}


@pytest.mark.parametrize(
    "name",
    [
        "TOKEN",
        "HF_TOKEN",
        "hf_token",
        "GITHUB_TOKEN_2",
        "DB_PASSWD",
        "DB_PASSWORD",
        "PGPASSWORD",
        "MYSQL_PWD",
        "SMTP_PASS",
        "CLIENT_SECRET",
        "SECRET_VALUE",
        "OPENAI_API_KEY",
        "APIKEY",
        "MY_APIKEY",
        "AWS_SECRET_ACCESS_KEY",
        "SSH_PASSPHRASE",
    ],
)
def test_a_variable_that_is_a_secret_is_refused_without_its_value(tmp_path: Path, name: str) -> None:
    message = told_of(tmp_path, {name: "s3cret"})
    assert message.endswith(f"{name} would stand in the pipeline for all to read; name its secret and key under `secrets`")


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://u:s3cret@h/x",
        "http://u:s3cret@proxy:3128",
        "redis://:s3cret@h",
        "http://u:a/s3cret@h",
        "http://u:s3cret#b@h:1/",
        "--index-url https://u:s3cret@h/simple",
        "http://one:80,http://u:s3cret@two",
    ],
)
@pytest.mark.parametrize("name", ["MLFLOW_TRACKING_URI", "HTTPS_PROXY", "ANY"])
def test_an_address_with_a_password_is_refused_without_it(tmp_path: Path, name: str, address: str) -> None:
    assert told_of(tmp_path, {name: address}).endswith(
        f"{name} holds an address with a password, which would stand in the pipeline for all to read; "
        "name a secret and key under `secrets` that hold the whole address"
    )


def told_of(folder: Path, environment: dict[str, str]) -> str:
    """What a platform with this environment is refused with."""
    (folder / "platform.yaml").write_text(yaml.safe_dump({"environment": environment}))
    with pytest.raises(ConfigurationError) as error:
        platform.load(folder / "platform.yaml")
    assert "s3cret" not in error.value.message + error.value.hint
    return error.value.message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("volumes: {}", "volumes: there is no such key (did you mean volume?)"),
        ("resources: {training: {cpu: 1}}", "resources.training: there is no such key"),
        ("volume: {claim: My_Claim}", "volume.claim: found 'My_Claim'"),
        ("volume: {mount: data}", "volume.mount: found 'data'"),
        ("resources: {fine_tuning: {memory: 64 GB}}", "resources.fine_tuning.memory: found '64 GB'"),
        ("store: gs://models/team-a", "store: wants s3://bucket/prefix, without keys or the service's address"),
        ("store: 's3://me:pw@models/team-a'", "store: wants s3://bucket/prefix"),
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


@pytest.mark.parametrize(
    ("stage", "given"),
    [
        ("data_curation", {"sources": "LIST", "configuration": "STRING"}),
        ("fine_tuning", {"dataset": "STRING", "configuration": "STRING"}),
        ("evaluation", {"model": "STRING", "dataset": "STRING", "configuration": "STRING"}),
        ("triton_packaging", {"model": "STRING", "configuration": "STRING"}),
    ],
)
def test_a_stage_alone_asks_for_the_artifacts_it_starts_from_and_says_what_they_are(stage: str, given: dict[str, str]) -> None:
    config = load(None, ["seed=7", "evaluation.generations=3"], here=False)
    pipeline = documents(compiling.compiled(config, pipeline=stage))[0]
    inputs = pipeline["root"]["inputDefinitions"]["parameters"]
    assert {name: one["parameterType"] for name, one in inputs.items()} == given
    assert all(one["description"] for one in inputs.values())
    assert yaml.safe_load(inputs["configuration"]["defaultValue"]) == {"seed": 7, "evaluation": {"generations": 3}}
    names = {task["taskInfo"]["name"] for task in pipeline["root"]["dag"]["tasks"].values()}
    assert "Plan the stage" in names
    assert len(names) == (3 if stage == "data_curation" else 2)


def test_the_boxes_of_the_ui_say_what_a_step_does(compiled: dict[str, Any]) -> None:
    found = tasks(compiled["root"]["dag"], compiled["components"])
    said = {task["taskInfo"]["name"] for task in found.values() if "dag" not in compiled["components"][task["componentRef"]["name"]]}
    assert {"Plan the run", "Curate the data", "Fine-tune the model", "Promote to champion", "Report the evidence"} <= said
    assert not any("-" in name and name == name.lower() for name in said)
