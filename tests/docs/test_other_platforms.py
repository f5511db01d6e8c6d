"""docs/how-to/other-platforms.md: the Argo and Airflow examples are valid and call the CLI with accepted arguments.

Neither Argo nor Airflow is installed for the tests. The workflow is checked against the fields of Argo. The DAG runs with fakes of the two
Airflow classes that it uses; they refuse parameters that the operator does not have.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import yaml

from tests import kubernetes_schemas, pod_security
from tests.deploy.rendering import render_overlay, select_kind
from tests.pipelines.command import ROOT

Json = dict[str, Any]
EXAMPLES = ROOT / "docs" / "examples"
STAGES = ["curate", "finetune", "evaluate", "package", "register"]
# argoproj/argo-workflows, docs/fields.md: WorkflowSpec, Template, RetryStrategy, Backoff, DAGTask
SPEC = {
    "entrypoint",
    "serviceAccountName",
    "imagePullSecrets",
    "securityContext",
    "arguments",
    "volumes",
    "templateDefaults",
    "templates",
}
TEMPLATE = {"name", "dag", "container", "retryStrategy", "podSpecPatch"}
RETRY = {"limit", "retryPolicy", "expression", "backoff"}
BACKOFF = {"duration", "factor", "maxDuration"}
# apache/airflow, providers/cncf/kubernetes: KubernetesPodOperator and its base class BaseOperator
OPERATOR_PARAMETERS = {
    "task_id", "retries", "retry_delay", "retry_exponential_backoff", "name", "namespace", "image", "cmds", "arguments", "configmaps",
    "volumes", "volume_mounts", "container_resources", "service_account_name", "automount_service_account_token", "image_pull_secrets",
    "security_context", "container_security_context", "termination_grace_period", "startup_timeout_seconds", "secrets", "skip_on_exit_code",
}  # fmt: skip


def parse_command(arguments: list[str]) -> Json:
    """Parse arguments with the real CLI after filling in their templates; raise if the CLI refuses them."""
    from typer.main import get_command

    from pipelines.cli import main

    filled = [re.sub(r"\{\{.*?\}\}", "filled-in", argument) for argument in arguments]
    commands = get_command(main.app).commands  # type: ignore[attr-defined]
    return dict(commands[filled[0]].make_context(filled[0], filled[1:]).params)


def load_workflow() -> Json:
    return dict(yaml.safe_load((EXAMPLES / "argo-workflow.yaml").read_text(encoding="utf-8")))


def load_containers() -> dict[str, Json]:
    """Return the container of each stage of the workflow."""
    return {
        template["name"]: template["container"]
        for template in load_workflow()["spec"]["templates"]
        if "container" in template
    }


class FakeOperator:
    """Replace KubernetesPodOperator: record the parameters and the order."""

    instances: ClassVar[list[FakeOperator]] = []

    def __init__(self, **parameters: Any) -> None:
        assert set(parameters) <= OPERATOR_PARAMETERS
        self.parameters, self.downstream = parameters, []  # type: tuple[Json, list[FakeOperator]]
        FakeOperator.instances.append(self)

    def __rshift__(self, other: FakeOperator) -> FakeOperator:
        self.downstream.append(other)
        return other


class FakeDag:
    """Replace DAG."""

    def __init__(self, **parameters: Any) -> None:
        assert set(parameters) <= {"dag_id", "schedule", "catchup", "max_active_runs", "params"}

    def __enter__(self) -> FakeDag:
        return self

    def __exit__(self, *_: object) -> None:
        return None


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[FakeOperator]:
    """Return the tasks of the DAG in the order of their creation."""
    provider = "airflow.providers.cncf.kubernetes"
    modules: dict[str, Json] = {
        f"{provider}.operators.pod": {"KubernetesPodOperator": FakeOperator},
        f"{provider}.secret": {"Secret": lambda *arguments: arguments},
        "airflow.sdk": {"DAG": FakeDag},
    }
    for name, values in modules.items():
        module = ModuleType(name)
        vars(module).update(values)
        for package in (name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1)):
            monkeypatch.setitem(sys.modules, package, sys.modules.get(package, ModuleType(package)))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(FakeOperator, "instances", [])
    file = EXAMPLES / "airflow_dag.py"
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), {"__name__": "airflow_dag"})
    return FakeOperator.instances


def build_airflow_pod(parameters: Json) -> Json:
    """Return the pod that the operator creates from its parameters."""
    from kubernetes import client

    api = client.ApiClient()
    container = client.V1Container(
        name="base", image=parameters["image"], command=parameters["cmds"], args=parameters["arguments"], env=[], resources=parameters["container_resources"],
        volume_mounts=parameters["volume_mounts"], security_context=parameters["container_security_context"],
    )  # fmt: skip
    spec = client.V1PodSpec(
        containers=[container], init_containers=[], volumes=parameters["volumes"], restart_policy="Never",
        security_context=parameters["security_context"], service_account_name=parameters["service_account_name"],
        image_pull_secrets=parameters["image_pull_secrets"], termination_grace_period_seconds=parameters["termination_grace_period"],
        automount_service_account_token=parameters["automount_service_account_token"],
    )  # fmt: skip
    metadata = client.V1ObjectMeta(name=parameters["name"], namespace=parameters["namespace"])
    return dict(
        api.sanitize_for_serialization(client.V1Pod(api_version="v1", kind="Pod", metadata=metadata, spec=spec))
    )


def build_argo_pod(container: Json) -> Json:
    """Return the part of a stage's pod that the workflow defines; Argo adds its own containers."""
    workflow = load_workflow()["spec"]
    spec = {
        "containers": [{"name": "main", "env": [], **container}], "initContainers": [], "volumes": workflow["volumes"],
        "securityContext": workflow["securityContext"], "restartPolicy": "Never", "serviceAccountName": workflow["serviceAccountName"],
    }  # fmt: skip
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod", "namespace": "team-a"}, "spec": spec}


def check_pod(pod: Json) -> None:
    assert kubernetes_schemas.problems(pod) == []
    for version in kubernetes_schemas.versions():
        assert kubernetes_schemas.schema_problems(pod, version) == []
    assert pod_security.violations(pod) == []


def check_folders(options: dict[str, Json]) -> None:
    """Check that each stage reads the output of its predecessor."""
    assert options["finetune"]["dataset"] == options["evaluate"]["dataset"] == options["curate"]["output"]
    assert (
        Path(options["evaluate"]["model"])
        == Path(options["package"]["model"])
        == options["register"]["model"]
        == options["finetune"]["output"]
    )
    assert (options["register"]["evaluation"], options["register"]["repository"]) == (
        options["evaluate"]["output"],
        options["package"]["output"],
    )
    assert options["evaluate"]["fail_on_refusal"] is True
    assert all(str(values["config"]) for values in options.values())


def test_workflow_has_only_argo_fields_and_ordered_stages() -> None:
    spec = load_workflow()["spec"]
    assert set(spec) <= SPEC
    assert [
        problem for template in [*spec["templates"], spec["templateDefaults"]] for problem in set(template) - TEMPLATE
    ] == []
    retry = spec["templateDefaults"]["retryStrategy"]
    assert (set(retry) <= RETRY, set(retry["backoff"]) <= BACKOFF) == (True, True)
    assert "lastRetry.exitCode) == 75" in retry["expression"]
    order = [(task["name"], task.get("depends")) for task in spec["templates"][0]["dag"]["tasks"]]
    assert order == list(zip(STAGES, [None, *STAGES], strict=False))
    assert list(load_containers()) == STAGES
    parameter_names = re.findall(
        r"workflow\.parameters\.(\w+)", (EXAMPLES / "argo-workflow.yaml").read_text(encoding="utf-8")
    )
    assert set(parameter_names) == {parameter["name"] for parameter in spec["arguments"]["parameters"]}


def test_workflow_arguments_are_accepted_by_the_cli() -> None:
    assert {tuple(container["command"]) for container in load_containers().values()} == {("tuneline",)}
    options = {name: parse_command(container["args"]) for name, container in load_containers().items()}
    check_folders(options)


def test_workflow_pods_are_valid_and_restricted() -> None:
    for container in load_containers().values():
        check_pod(build_argo_pod(container))


def test_workflow_names_objects_of_the_overlay() -> None:
    manifests, workflow = render_overlay("xe9680-powerscale"), load_workflow()["spec"]
    assert workflow["serviceAccountName"] in select_kind(manifests, "ServiceAccount", "team-a")
    for container in load_containers().values():
        (source,) = container["envFrom"]
        assert source["configMapRef"]["name"] in select_kind(manifests, "ConfigMap", "team-a")
    claims = [
        volume["persistentVolumeClaim"]["claimName"]
        for volume in workflow["volumes"]
        if "persistentVolumeClaim" in volume
    ]
    assert set(claims) <= set(select_kind(manifests, "PersistentVolumeClaim", "team-a"))


def test_dag_runs_five_stages_in_order_and_skips_on_refusal(tasks: list[FakeOperator]) -> None:
    assert [task.parameters["task_id"] for task in tasks] == STAGES
    assert [[downstream.parameters["task_id"] for downstream in task.downstream] for task in tasks] == [
        [name] for name in STAGES[1:]
    ] + [[]]
    skipped = {
        task.parameters["task_id"]: task.parameters["skip_on_exit_code"]
        for task in tasks
        if "skip_on_exit_code" in task.parameters
    }
    assert skipped == {"evaluate": 3}


def test_dag_arguments_are_accepted_by_the_cli(tasks: list[FakeOperator]) -> None:
    assert all(task.parameters["cmds"] == ["tuneline"] for task in tasks)
    check_folders({task.parameters["task_id"]: parse_command(task.parameters["arguments"]) for task in tasks})


def test_dag_pods_are_valid_and_restricted(tasks: list[FakeOperator]) -> None:
    for task in tasks:
        check_pod(build_airflow_pod(task.parameters))


def test_examples_use_the_documented_image_for_each_stage(tasks: list[FakeOperator]) -> None:
    page = (ROOT / "docs" / "how-to" / "other-platforms.md").read_text(encoding="utf-8")
    documented = {
        command: image
        for image, command in re.findall(r"^\| [a-z-]+ \| `(python-\w+)`.*? \| `tuneline (\w+) ", page, re.MULTILINE)
    }
    assert list(documented) == STAGES
    argo_images = {
        name: container["image"].rpartition("/")[2].partition(":")[0] for name, container in load_containers().items()
    }
    airflow_images = {
        task.parameters["task_id"]: task.parameters["image"].rpartition("/")[2].partition(":")[0] for task in tasks
    }
    assert documented == argo_images == airflow_images


def test_misspelled_option_is_rejected() -> None:
    with pytest.raises(Exception, match="No such option: --datset"):
        parse_command(["evaluate", "model", "--datset=x", "-o", "y"])


@pytest.mark.parametrize("name", ["argo-workflow.yaml", "airflow_dag.py"])
def test_volume_owner_is_listed_among_the_values_to_change(name: str) -> None:
    page = (ROOT / "docs" / "how-to" / "other-platforms.md").read_text(encoding="utf-8")
    (section,) = (section_text for section_text in page.split("\n## ") if f"(../examples/{name})" in section_text)
    for text in ((EXAMPLES / name).read_text(encoding="utf-8"), section):
        (values,) = re.findall(r"Change (?:the file's )?([^.]*)", text)
        assert {"namespace", "registry", "user and group"} <= {
            part.strip(": ").lower() for part in re.split(", |: | in it|\\(", values)
        }
