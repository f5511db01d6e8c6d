"""The compiled pipeline, for the defaults and for a cluster."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.common.runtime.errors import ConfigurationError, UsageError
from pipelines.config import platform_config
from pipelines.config.customization_config import Customization, load_customization
from pipelines.config.platform_config import Platform
from pipelines.definition import compilation, run_parameters
from tests.pipelines.command import ROOT, answer, refusal, tuneline

IMPORTS = ast.Import | ast.ImportFrom
GOLDEN = ROOT / "tests" / "pipelines" / "golden" / "pipeline.yaml"
REGENERATE = "if the change is intended: python -m pipelines.cli compile -o tests/pipelines/golden/pipeline.yaml"
STEPS = {
    "resolve",
    "data-curation",
    "data-versioning",
    "fine-tuning",
    "evaluation",
    "triton-packaging",
    "promotion",
    "report",
}
PLATFORM_TEXT = """
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


def load_documents(text: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text))


@pytest.fixture(scope="module")
def text() -> str:
    return compilation.compile_pipeline(Customization())


@pytest.fixture(scope="module")
def compiled(text: str) -> dict[str, Any]:
    return load_documents(text)[0]


@pytest.fixture(scope="module")
def cluster_executors(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """The executors of the pipeline for a cluster, and their Kubernetes settings."""
    file = tmp_path_factory.mktemp("placed") / "platform.yaml"
    file.write_text(PLATFORM_TEXT)
    pipeline, kubernetes = load_documents(
        compilation.compile_pipeline(Customization(), platform_config.load_platform(file))
    )
    return pipeline["deploymentSpec"]["executors"], kubernetes["platforms"]["kubernetes"]["deploymentSpec"]["executors"]


def test_compiled_pipeline_equals_the_golden_file(text: str) -> None:
    assert text == GOLDEN.read_text(encoding="utf-8"), REGENERATE


def test_compiled_promotion_pipeline_equals_the_golden_file() -> None:
    text = compilation.compile_pipeline(Customization(), pipeline="promotion")
    golden = GOLDEN.with_name("promotion.yaml")
    assert text == golden.read_text(encoding="utf-8"), (
        f"if the change is intended: tuneline compile --pipeline promotion -o {golden}"
    )


def test_no_step_installs_packages_at_start(compiled: dict[str, Any]) -> None:
    executors = compiled["deploymentSpec"]["executors"]
    assert len(executors) == len(STEPS) + 2, (
        "one executor per step, and two for registration: of accepted and of refused candidates"
    )
    for executor in executors.values():
        assert "pip install" not in " ".join(executor["container"]["command"])
        assert executor["container"]["image"].startswith("tuneline/")


def find_tasks(dag: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    """Return every task by name, including conditional ones."""
    by_name = {}
    for name, task in dag["tasks"].items():
        inner = components[task["componentRef"]["name"]].get("dag")
        by_name.update(find_tasks(inner, components) if inner else {name: task})
    return by_name


def test_only_stages_with_complete_cache_keys_are_cached(compiled: dict[str, Any]) -> None:
    found_tasks = find_tasks(compiled["root"]["dag"], compiled["components"])
    cached = {name for name, task in found_tasks.items() if task["cachingOptions"].get("enableCache")}
    assert cached == {"data-curation", "fine-tuning", "evaluation", "triton-packaging"}
    assert set(found_tasks) == STEPS | {"registration", "registration-2"}


def test_pipeline_has_at_most_twelve_described_parameters(
    compiled: dict[str, Any],
) -> None:
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


def test_every_pod_has_image_volume_environment_and_secrets(
    cluster_executors: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    executors, kubernetes = cluster_executors
    assert set(executors) == set(kubernetes), "every pod"
    images = {name.removeprefix("exec-"): executor["container"]["image"] for name, executor in executors.items()}
    assert {images["data-curation"], images["data-versioning"]} == {"r/c@sha256:1"}
    assert (images["fine-tuning"], images["triton-packaging"]) == ("r/t@sha256:2", "r/s@sha256:4")
    assert {images[name] for name in ("resolve", "evaluation", "registration", "registration-2", "promotion")} == {
        "r/e@sha256:3"
    }
    for name, executor in executors.items():
        variables = {pair["name"]: pair["value"] for pair in executor["container"]["env"]}
        title = variables.pop("TUNELINE_STEP", "")
        assert bool(title) == (name != "exec-finish"), "the exit task writes no record"
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
        assert (secret["secretName"], secret["keyToEnv"]) == (
            "mlflow",
            [{"envVar": "MLFLOW_TRACKING_TOKEN", "secretKey": "token"}],
        )
        assert [secret["secretName"] for secret in pod["imagePullSecret"]] == ["reg"]
        assert pod["imagePullPolicy"] == "Always"


def test_exit_task_ends_the_run_and_only_it_and_the_first_check_know_the_notified_services(tmp_path: Path) -> None:
    (tmp_path / "platform.yaml").write_text(
        "run: {ui: 'https://kubeflow.example'}\nnotifications: [{url: {name: notify, key: chat}, events: [failed]}]\n"
    )
    platform = platform_config.load_platform(tmp_path / "platform.yaml")
    for pipeline in ("customization", "promotion"):
        spec, kubernetes = load_documents(compilation.compile_pipeline(Customization(), platform, pipeline))
        tasks = spec["root"]["dag"]["tasks"]
        assert set(tasks) == {"exit-handler-1", "finish"}
        assert tasks["finish"]["triggerPolicy"] == {"strategy": "ALL_UPSTREAM_TASKS_COMPLETED"}
        settings = json.loads(tasks["finish"]["inputs"]["parameters"]["settings"]["runtimeValue"]["constant"])
        services = [{"name": "notify/chat", "variable": "TUNELINE_NOTIFICATION_1", "events": ["failed"]}]
        last_steps = ["Write the report" if pipeline == "customization" else "Promote the version"]
        assert settings == {"ui": "https://kubeflow.example", "notifications": services, "last_steps": last_steps}
        pods = kubernetes["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
        knowing = {name for name, pod in pods.items() if "notify" in str(pod.get("secretAsEnv"))}
        assert knowing == {"exec-finish"} | ({"exec-check-the-platform"} if pipeline == "customization" else set())


def test_artifacts_pass_from_task_to_task(compiled: dict[str, Any]) -> None:
    tasks = find_tasks(compiled["root"]["dag"], compiled["components"])
    taken = {name: set(task["inputs"].get("artifacts", ())) for name, task in tasks.items() if "inputs" in task}
    assert {name: artifacts for name, artifacts in taken.items() if artifacts} == {
        "data-versioning": {"curated_dataset"},
        "fine-tuning": {"curated_dataset"},
        "evaluation": {"curated_dataset", "tuned_model"},
        "triton-packaging": {"tuned_model"},
        "registration": {"tuned_model", "triton_package"},
        "registration-2": {"tuned_model"},
    }


def test_scheduling_applies_to_every_pod(
    cluster_executors: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    for pod in cluster_executors[1].values():
        assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
        assert pod["nodeSelector"]["labels"] == {"pool": "gpu"}
        assert pod["podMetadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team-a"}


def test_each_stage_requests_its_resources(cluster_executors: tuple[dict[str, Any], dict[str, Any]]) -> None:
    executors, kubernetes = cluster_executors
    training = executors["exec-fine-tuning"]["container"]["resources"]
    assert (training["resourceCpuRequest"], training["resourceCpuLimit"], training["resourceMemoryLimit"]) == (
        "8",
        "8",
        "64Gi",
    )
    assert (training["accelerator"]["resourceType"], training["accelerator"]["resourceCount"]) == (
        "nvidia.com/gpu",
        "2",
    )
    assert kubernetes["exec-fine-tuning"]["activeDeadlineSeconds"] == "3600"
    (memory,) = kubernetes["exec-fine-tuning"]["emptyDirMounts"]
    assert (memory["mountPath"], memory["medium"], memory["sizeLimit"]) == ("/dev/shm", "Memory", "8Gi")
    assert executors["exec-promotion"]["container"]["resources"]["resourceMemoryRequest"] == "2Gi"
    assert "resources" not in executors["exec-evaluation"]["container"]


def test_compilation_is_reproducible_across_processes(tmp_path: Path) -> None:
    (tmp_path / "platform.yaml").write_text(PLATFORM_TEXT)
    (tmp_path / "made").mkdir()
    results = []
    for seed in ("1", "2"):
        arguments = ("compile", "-p", "platform.yaml", "--set", "fine_tuning.lora.rank=4", "-o", f"made/{seed}.yaml")
        results.append(answer(*arguments, cwd=tmp_path, PYTHONHASHSEED=seed))
    assert results[0]["sha256"] == results[1]["sha256"]
    requests = {"resources.evaluation.memory_request": "2Gi", "resources.triton_packaging.memory_request": "3Gi"}
    sha256 = results[0]["sha256"]
    assert results[0] == {"pipeline": "made/1.yaml", "sha256": sha256, "warnings": [], "requests": requests}
    assert (tmp_path / "made" / "1.yaml").read_bytes() == (tmp_path / "made" / "2.yaml").read_bytes()
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == ["1.yaml", "2.yaml"], (
        "no temporary file is left"
    )


def test_configuration_becomes_defaults_and_one_line_of_yaml(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "seed: 7\ndata_curation:\n  sources: [/data/raw/*.jsonl]\n  text_unit: file\nfine_tuning:\n  max_steps: null\n"
    )
    pipeline = load_documents(
        compilation.compile_pipeline(load_customization(tmp_path / "c.yaml", resolve_paths=False))
    )[0]
    default = {name: p["defaultValue"] for name, p in pipeline["root"]["inputDefinitions"]["parameters"].items()}
    assert (default["seed"], default["sources"], default["max_steps"]) == (7, ["/data/raw/*.jsonl"], 0)
    assert default["configuration"] == "{data_curation: {text_unit: file}}"


def test_relative_path_is_refused_and_no_file_is_written(tmp_path: Path) -> None:
    error = refusal(2, "compile", "--set", "data_curation.sources=[raw/a.jsonl]", "-o", "pipeline.yaml", cwd=tmp_path)
    assert error == {
        "stage": "",
        "kind": "configuration",
        "message": "data_curation.sources: raw/a.jsonl is a relative path; pods require absolute paths",
        "hint": "Specify the path on the shared volume, as pods see it, for example /data/raw/tickets.jsonl.",
    }
    assert list(tmp_path.iterdir()) == []


def test_path_outside_the_volume_gives_a_warning(tmp_path: Path) -> None:
    config = load_customization(
        None,
        ["data_curation.sources=[/home/me/a.jsonl, /data/b.jsonl]", "fine_tuning.base_model=/models/llama"],
        resolve_paths=False,
    )
    assert compilation.write_pipeline(config, Platform(), tmp_path / "pipeline.yaml") == [
        "data_curation.sources: /home/me/a.jsonl is not on the shared volume, which pods mount at /data",
        "fine_tuning.base_model: /models/llama is not on the shared volume, which pods mount at /data",
    ]


def test_compiling_without_a_platform_warns_about_the_volume(tmp_path: Path) -> None:
    process = tuneline("compile", "-o", "pipeline.yaml", cwd=tmp_path)
    assert process.returncode == 0
    assert process.stderr == (
        "tuneline: without -p platform.yaml, the pods share no volume and cannot read each other's artifacts; "
        "`tuneline init` writes a commented platform.yaml\n"
    )
    assert process.stdout.startswith(
        "wrote pipeline.yaml; run it with: tuneline submit -f pipeline.yaml --endpoint URL --experiment NAME"
    )


def test_output_without_yaml_suffix_is_refused(tmp_path: Path) -> None:
    error = refusal(2, "compile", "-o", "pipeline.json", cwd=tmp_path)
    assert (error["kind"], error["message"]) == ("usage", "pipeline.json does not end in .yaml or .yml")
    assert error["hint"] == "Choose a name that Kubeflow accepts, for example -o pipeline.yaml."


def get_write_error(output: Path, *inputs: Path) -> tuple[str, str]:
    """Return the message and hint for an output that must not be written."""
    with pytest.raises(UsageError) as error:
        compilation.write_pipeline(Customization(), None, output, inputs=inputs)
    return error.value.message, error.value.hint


def test_configuration_and_platform_are_not_overwritten(tmp_path: Path) -> None:
    files = {"c.yaml": "seed: 7\n", "p.yaml": "volume: {claim: team-a}\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "link.yaml").symlink_to("c.yaml")
    for output in ("c.yaml", "p.yaml", "./c.yaml", "link.yaml"):
        error = refusal(2, "compile", "-c", "c.yaml", "-p", "p.yaml", "-o", output, cwd=tmp_path)
        message = f"output {Path(output)} is also an input"
        assert (error["kind"], error["message"], error["hint"]) == ("usage", message, "Choose another file with -o.")
    assert {name: (tmp_path / name).read_text() for name in files} == files


def test_file_that_is_not_a_compiled_pipeline_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text("notes: {pipelineInfo: 3}\n")
    assert get_write_error(file) == (
        f"{file} exists and is not a compiled pipeline",
        f"Choose another file with -o, or remove {file}.",
    )
    assert file.read_text() == "notes: {pipelineInfo: 3}\n"


def test_compiled_pipeline_and_empty_file_are_replaced(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.touch()
    for seed in (1, 2):
        compilation.write_pipeline(Customization(seed=seed), Platform(), file)
        assert (
            load_documents(file.read_text())[0]["root"]["inputDefinitions"]["parameters"]["seed"]["defaultValue"]
            == seed
        )


def test_error_names_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("mine")
    (tmp_path / "folder.yaml").mkdir()
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "device.yaml").symlink_to("/dev/null")
    new, file = tmp_path / "new" / "deep", tmp_path / "f"
    missing = f"Create the folder (mkdir -p {new}), or choose another file."
    assert get_write_error(new / "p.yaml") == (f"the folder {new} does not exist", missing)
    assert get_write_error(file / "p.yaml") == (f"{file} is not a folder", "Choose another folder.")
    assert get_write_error(file / "deep" / "p.yaml") == (
        f"{file / 'deep'} cannot be created: {file} is not a folder",
        "Choose another folder.",
    )
    folder = tmp_path / "folder.yaml"
    assert get_write_error(folder) == (
        f"{folder} is a folder",
        f"Choose a file in it, for example -o {folder / 'pipeline.yaml'}.",
    )
    for name in ("pipe.yaml", "device.yaml"):
        assert get_write_error(tmp_path / name) == (
            f"{tmp_path / name} is a pipe or a device, not a file",
            "Choose another file with -o.",
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["device.yaml", "f", "folder.yaml", "pipe.yaml"]
    assert file.read_text() == "mine"


def test_system_error_names_the_output(tmp_path: Path) -> None:
    output = tmp_path / ("x" * 250 + ".yaml")  # a valid name, but too long with the suffix of the temporary file
    with pytest.raises(OSError) as error:
        compilation.write_pipeline(Customization(), None, output)
    assert error.value.filename == str(output)


def test_secret_takes_precedence_over_a_configured_value(tmp_path: Path) -> None:
    (tmp_path / "platform.yaml").write_text(
        "mlflow: {tracking_uri: 'http://mlflow:5000'}\nenvironment: {HTTPS_PROXY: 'http://proxy:3128'}\n"
        "secrets: {HTTPS_PROXY: {name: proxy, key: url}, MLFLOW_TRACKING_URI: {name: mlflow, key: uri}}\n"
    )
    pipeline, kubernetes = load_documents(
        compilation.compile_pipeline(Customization(), platform_config.load_platform(tmp_path / "platform.yaml"))
    )
    for name, executor in pipeline["deploymentSpec"]["executors"].items():
        names = {pair["name"] for pair in executor["container"]["env"]}
        assert names - {"TUNELINE_STEP"} == {"TUNELINE_WORKDIR", "TUNELINE_STORE", "TUNELINE_STATE", "TUNELINE_CACHE"}
        secrets = kubernetes["platforms"]["kubernetes"]["deploymentSpec"]["executors"][name]["secretAsEnv"]
        assert {pair["envVar"] for secret in secrets for pair in secret["keyToEnv"]} == {
            "HTTPS_PROXY",
            "MLFLOW_TRACKING_URI",
        }


def test_store_can_be_a_bucket(tmp_path: Path) -> None:
    (tmp_path / "platform.yaml").write_text(
        "store: s3://models/team-a\nenvironment: {AWS_ENDPOINT_URL: 'https://s3.example:9021'}\n"
    )
    pipeline = load_documents(
        compilation.compile_pipeline(Customization(), platform_config.load_platform(tmp_path / "platform.yaml"))
    )[0]
    for executor in pipeline["deploymentSpec"]["executors"].values():
        variables = {pair["name"]: pair["value"] for pair in executor["container"]["env"]}
        assert variables["TUNELINE_STORE"] == "s3://models/team-a"
        assert variables["TUNELINE_CACHE"] == "/data/tuneline/cache"
        assert variables["TUNELINE_STATE"] == "/data/tuneline/state"


PUBLIC_VARIABLES = {
    "TOKENIZERS_PARALLELISM": "false",
    "GOOGLE_APPLICATION_CREDENTIALS": "/data/google.json",
    "AWS_WEB_IDENTITY_TOKEN_FILE": "/var/run/token",
    "TUNELINE_SIGNING_KEY_FILE": "/etc/signing/signing.key",
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


@pytest.mark.parametrize("name", PUBLIC_VARIABLES)
def test_variable_without_a_secret_is_accepted(tmp_path: Path, name: str) -> None:
    (tmp_path / "platform.yaml").write_text(yaml.safe_dump({"environment": {name: PUBLIC_VARIABLES[name]}}))
    assert platform_config.load_platform(tmp_path / "platform.yaml").environment == {name: PUBLIC_VARIABLES[name]}


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
def test_secret_variable_is_refused_without_its_value(tmp_path: Path, name: str) -> None:
    message = get_platform_error(tmp_path, {name: "s3cret"})
    assert message.endswith(
        f"{name} would be readable in the compiled pipeline; expected a reference to its secret under `secrets`"
    )


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
def test_address_with_a_password_is_refused_without_the_password(tmp_path: Path, name: str, address: str) -> None:
    assert get_platform_error(tmp_path, {name: address}).endswith(
        f"{name} contains an address with a password, which would be readable in the "
        "compiled pipeline; expected a reference to a secret with the full address, under `secrets`"
    )


def get_platform_error(folder: Path, environment: dict[str, str]) -> str:
    """Return the error message for a platform with this environment."""
    (folder / "platform.yaml").write_text(yaml.safe_dump({"environment": environment}))
    with pytest.raises(ConfigurationError) as error:
        platform_config.load_platform(folder / "platform.yaml")
    assert "s3cret" not in error.value.message + error.value.hint
    return error.value.message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("volumes: {}", "volumes: unknown key (did you mean volume?)"),
        ("resources: {training: {cpu: 1}}", "resources.training: unknown key"),
        ("volume: {claim: My_Claim}", "volume.claim: found 'My_Claim'"),
        ("volume: {mount: data}", "volume.mount: found 'data'"),
        ("resources: {fine_tuning: {memory: 64 GB}}", "resources.fine_tuning.memory: found '64 GB'"),
        ("store: gs://models/team-a", "store: expected s3://bucket/prefix without keys or endpoint"),
        ("store: 's3://me:pw@models/team-a'", "store: expected s3://bucket/prefix"),
        ("secrets: {HF_TOKEN: hf_abc}", "secrets.HF_TOKEN: expected a mapping of keys"),
        (
            "environment: {HF_TOKEN: hf_abc}",
            "HF_TOKEN would be readable in the compiled pipeline; expected a reference to its secret under `secrets`",
        ),
        (
            "mlflow: {tracking_uri: 'http://me:pw@mlflow'}",
            "contains a password; expected a reference to a secret",
        ),
        ("scheduling: {tolerations: [{value: x}]}", "key is empty; expected a key, or operator Exists"),
        ("environment: {'A B': x}", "A B is not a valid name of an environment variable"),
    ],
)
def test_invalid_platform_names_file_and_field(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "platform.yaml"
    file.write_text(content)
    with pytest.raises(ConfigurationError) as error:
        platform_config.load_platform(file)
    assert error.value.message.startswith(f"{file}: ")
    assert message in error.value.message
    assert "hf_abc" not in error.value.message
    assert ":pw@" not in error.value.message
    assert error.value.hint == "See docs/reference/platform.md, or run `tuneline init` to write a commented file."


def test_missing_platform_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as error:
        platform_config.load_platform(tmp_path / "platform.yaml")
    assert error.value.message == f"{tmp_path / 'platform.yaml'} does not exist"
    assert error.value.hint == "Check the path; `tuneline init` writes a commented platform.yaml."


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        ("data_curation", {"sources": "LIST", "configuration": "STRING"}),
        ("fine_tuning", {"dataset": "STRING", "configuration": "STRING"}),
        ("evaluation", {"model": "STRING", "dataset": "STRING", "configuration": "STRING"}),
        ("triton_packaging", {"model": "STRING", "configuration": "STRING"}),
    ],
)
def test_single_stage_pipeline_describes_its_input_artifacts(stage: str, expected: dict[str, str]) -> None:
    config = load_customization(None, ["seed=7", "evaluation.generations=3"], resolve_paths=False)
    pipeline = load_documents(compilation.compile_pipeline(config, pipeline=stage))[0]
    inputs = pipeline["root"]["inputDefinitions"]["parameters"]
    assert {name: definition["parameterType"] for name, definition in inputs.items()} == expected
    assert all(definition["description"] for definition in inputs.values())
    assert yaml.safe_load(inputs["configuration"]["defaultValue"]) == {"seed": 7, "evaluation": {"generations": 3}}
    names = {task["taskInfo"]["name"] for task in pipeline["root"]["dag"]["tasks"].values()}
    assert "Plan the stage" in names
    assert len(names) == (3 if stage == "data_curation" else 2)
    if stage == "data_curation":
        assert "curated_dataset" in pipeline["root"]["dag"]["tasks"]["data-versioning"]["inputs"]["artifacts"]


def test_steps_have_display_names(compiled: dict[str, Any]) -> None:
    found_tasks = find_tasks(compiled["root"]["dag"], compiled["components"])
    names = {
        task["taskInfo"]["name"]
        for task in found_tasks.values()
        if "dag" not in compiled["components"][task["componentRef"]["name"]]
    }
    assert {
        "Plan the run",
        "Curate the data",
        "Fine-tune the model",
        "Promote to champion",
        "Write the report",
    } <= names
    assert not any("-" in name and name == name.lower() for name in names)


def list_component_functions() -> list[tuple[str, ast.FunctionDef, set[str]]]:
    """Return file, function and the module's own names for every function that kfp copies into a pipeline."""
    found = []
    for file in sorted(file for package in ("components", "pipelines") for file in (ROOT / package).rglob("*.py")):
        module = ast.parse(file.read_text(encoding="utf-8"))
        names = {
            alias.asname or alias.name for node in module.body if isinstance(node, IMPORTS) for alias in node.names
        }
        names |= {node.name for node in module.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
        found += [
            (file.name, node, names) for node in functions if "dsl.component" in map(get_decorator, node.decorator_list)
        ]
    return found


def get_decorator(node: ast.expr) -> str:
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)


def test_component_functions_import_what_they_use() -> None:
    """kfp copies only the function: a name of its module does not exist in the pod."""
    functions = list_component_functions()
    assert len(functions) >= 10
    for file, function, module_names in functions:
        nodes = [node for statement in function.body for node in ast.walk(statement)]
        local = {alias.asname or alias.name for node in nodes if isinstance(node, IMPORTS) for alias in node.names}
        local |= {argument.arg for argument in function.args.args}
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        assert (used & module_names) - local == set(), f"{file}: {function.name}"


@pytest.mark.parametrize(
    "address",
    [
        "sql+postgresql://reader:hunter2@db/support",
        "sql+postgresql://reader@db/support?password=hunter2",
        "postgresql://reader:hunter2@db/support",
        "https://reader:hunter2@files.example/a.jsonl",
        "dvc://https://reader:hunter2@git.example/repository@v1:a.jsonl",
    ],
)
def test_password_of_a_source_is_refused_and_not_repeated(tmp_path: Path, address: str) -> None:
    arguments = ("--set", f"data_curation.sources={json.dumps([address])}")
    error = refusal(2, "compile", *arguments, "-o", "pipeline.yaml", cwd=tmp_path)
    assert "contains a password" in error["message"]
    assert "hunter2" not in json.dumps(error)
    assert list(tmp_path.iterdir()) == []


def test_database_source_is_part_of_the_configuration_and_its_secret_is_checked(tmp_path: Path) -> None:
    source = {"path": "sql+postgresql://reader@db/support", "table": "tickets", "order_by": ["id"]}
    source |= {"credentials_env": "SUPPORT_DB_PASSWORD"}
    config = load_customization(None, [f"data_curation.sources={json.dumps([source])}"], resolve_paths=False)
    [warning] = compilation.write_pipeline(config, Platform(), tmp_path / "pipeline.yaml")
    assert warning == (
        "data_curation.sources: the variable SUPPORT_DB_PASSWORD of credentials_env is not under `secrets` in platform.yaml"
    )
    platform = Platform.model_validate({"secrets": {"SUPPORT_DB_PASSWORD": {"name": "support-db", "key": "password"}}})
    assert compilation.write_pipeline(config, platform, tmp_path / "pipeline.yaml") == []
    parameters = load_documents((tmp_path / "pipeline.yaml").read_text())[0]["root"]["inputDefinitions"]["parameters"]
    default = {name: parameter["defaultValue"] for name, parameter in parameters.items()}
    combined = run_parameters.combine_parameters(default, default, default["configuration"])
    assert combined.data_curation.sources == config.data_curation.sources
