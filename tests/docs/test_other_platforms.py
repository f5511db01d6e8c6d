"""docs/other-platforms.md: its examples are such as Argo and Airflow take, and call the command line with what it understands.

No Argo and no Airflow is installed where this runs. The workflow is compared with the fields that Argo has, and the DAG is executed with a
stand-in for the two classes of Airflow that it uses, which refuses a parameter that the operator does not have.
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
from tests.deploy.rendering import of_kind, rendered
from tests.pipelines.command import ROOT

Json = dict[str, Any]
EXAMPLES = ROOT / "docs" / "examples"
STAGES = ["curate", "finetune", "evaluate", "package", "register"]
# argoproj/argo-workflows, docs/fields.md: WorkflowSpec, Template, RetryStrategy, Backoff, DAGTask
SPEC = {"entrypoint", "serviceAccountName", "imagePullSecrets", "securityContext", "arguments", "volumes", "templateDefaults", "templates"}
TEMPLATE = {"name", "dag", "container", "retryStrategy", "podSpecPatch"}
RETRY = {"limit", "retryPolicy", "expression", "backoff"}
BACKOFF = {"duration", "factor", "maxDuration"}
# apache/airflow, providers/cncf/kubernetes: KubernetesPodOperator, and BaseOperator's part of it
OPERATOR = {
    "task_id", "retries", "retry_delay", "retry_exponential_backoff", "name", "namespace", "image", "cmds", "arguments", "configmaps",
    "volumes", "volume_mounts", "container_resources", "service_account_name", "automount_service_account_token", "image_pull_secrets",
    "security_context", "container_security_context", "termination_grace_period", "startup_timeout_seconds", "secrets", "skip_on_exit_code",
}  # fmt: skip


def understood(arguments: list[str]) -> Json:
    """What the real command line reads in some arguments, their templates filled in. Raises where it takes them not."""
    from typer.main import get_command

    from pipelines.cli import main

    filled = [re.sub(r"\{\{.*?\}\}", "filled-in", one) for one in arguments]
    commands = get_command(main.app).commands  # type: ignore[attr-defined]
    return dict(commands[filled[0]].make_context(filled[0], filled[1:]).params)


def argo() -> Json:
    return dict(yaml.safe_load((EXAMPLES / "argo-workflow.yaml").read_text(encoding="utf-8")))


def containers() -> dict[str, Json]:
    """The container of each stage of the workflow."""
    return {one["name"]: one["container"] for one in argo()["spec"]["templates"] if "container" in one}


class Operator:
    """In place of KubernetesPodOperator: keeps what it is given, and the order."""

    made: ClassVar[list[Operator]] = []

    def __init__(self, **given: Any) -> None:
        assert set(given) <= OPERATOR
        self.given, self.after = given, []  # type: tuple[Json, list[Operator]]
        Operator.made.append(self)

    def __rshift__(self, other: Operator) -> Operator:
        self.after.append(other)
        return other


class Dag:
    """In place of DAG."""

    def __init__(self, **given: Any) -> None:
        assert set(given) <= {"dag_id", "schedule", "catchup", "max_active_runs", "params"}

    def __enter__(self) -> Dag:
        return self

    def __exit__(self, *_: object) -> None:
        return None


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[Operator]:
    """The tasks that the DAG makes, in the order in which it names them."""
    provider = "airflow.providers.cncf.kubernetes"
    content: dict[str, Json] = {
        f"{provider}.operators.pod": {"KubernetesPodOperator": Operator},
        f"{provider}.secret": {"Secret": lambda *given: given},
        "airflow.sdk": {"DAG": Dag},
    }
    for name, values in content.items():
        module = ModuleType(name)
        vars(module).update(values)
        for package in (name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1)):
            monkeypatch.setitem(sys.modules, package, sys.modules.get(package, ModuleType(package)))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(Operator, "made", [])
    file = EXAMPLES / "airflow_dag.py"
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), {"__name__": "airflow_dag"})
    return Operator.made


def airflow_pod(given: Json) -> Json:
    """The pod that the operator makes of its parameters."""
    from kubernetes import client

    api = client.ApiClient()
    container = client.V1Container(
        name="base", image=given["image"], command=given["cmds"], args=given["arguments"], env=[], resources=given["container_resources"],
        volume_mounts=given["volume_mounts"], security_context=given["container_security_context"],
    )  # fmt: skip
    spec = client.V1PodSpec(
        containers=[container], init_containers=[], volumes=given["volumes"], restart_policy="Never",
        security_context=given["security_context"], service_account_name=given["service_account_name"],
        image_pull_secrets=given["image_pull_secrets"], termination_grace_period_seconds=given["termination_grace_period"],
        automount_service_account_token=given["automount_service_account_token"],
    )  # fmt: skip
    metadata = client.V1ObjectMeta(name=given["name"], namespace=given["namespace"])
    return dict(api.sanitize_for_serialization(client.V1Pod(api_version="v1", kind="Pod", metadata=metadata, spec=spec)))


def argo_pod(container: Json) -> Json:
    """The part of a stage's pod that the workflow says; Argo adds containers of its own."""
    said = argo()["spec"]
    spec = {
        "containers": [{"name": "main", "env": [], **container}], "initContainers": [], "volumes": said["volumes"],
        "securityContext": said["securityContext"], "restartPolicy": "Never", "serviceAccountName": said["serviceAccountName"],
    }  # fmt: skip
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod", "namespace": "team-a"}, "spec": spec}


def check_pod(pod: Json) -> None:
    assert kubernetes_schemas.problems(pod) == []
    for version in kubernetes_schemas.versions():
        assert kubernetes_schemas.schema_problems(pod, version) == []
    assert pod_security.violations(pod) == []


def folders(read: dict[str, Json]) -> None:
    """Each stage reads what the one before wrote."""
    assert read["finetune"]["dataset"] == read["evaluate"]["dataset"] == read["curate"]["output"]
    assert Path(read["evaluate"]["model"]) == Path(read["package"]["model"]) == read["register"]["model"] == read["finetune"]["output"]
    assert (read["register"]["evaluation"], read["register"]["repository"]) == (read["evaluate"]["output"], read["package"]["output"])
    assert read["evaluate"]["fail_on_refusal"] is True
    assert all(str(one["config"]) for one in read.values())


def test_the_workflow_has_the_fields_that_argo_knows_and_the_stages_in_their_order() -> None:
    spec = argo()["spec"]
    assert set(spec) <= SPEC
    assert [problem for one in [*spec["templates"], spec["templateDefaults"]] for problem in set(one) - TEMPLATE] == []
    retry = spec["templateDefaults"]["retryStrategy"]
    assert (set(retry) <= RETRY, set(retry["backoff"]) <= BACKOFF) == (True, True)
    assert "lastRetry.exitCode) == 75" in retry["expression"]
    order = [(one["name"], one.get("depends")) for one in spec["templates"][0]["dag"]["tasks"]]
    assert order == list(zip(STAGES, [None, *STAGES], strict=False))
    assert list(containers()) == STAGES
    named = re.findall(r"workflow\.parameters\.(\w+)", (EXAMPLES / "argo-workflow.yaml").read_text(encoding="utf-8"))
    assert set(named) == {one["name"] for one in spec["arguments"]["parameters"]}


def test_the_command_line_takes_what_the_workflow_calls_it_with() -> None:
    assert {tuple(one["command"]) for one in containers().values()} == {("tuneline",)}
    read = {name: understood(one["args"]) for name, one in containers().items()}
    folders(read)


def test_the_workflows_pods_are_such_as_kubernetes_and_a_restricted_namespace_take() -> None:
    for container in containers().values():
        check_pod(argo_pod(container))


def test_the_workflow_names_what_deploy_makes() -> None:
    things, said = rendered("xe9680-powerscale"), argo()["spec"]
    assert said["serviceAccountName"] in of_kind(things, "ServiceAccount", "team-a")
    for container in containers().values():
        (place,) = container["envFrom"]
        assert place["configMapRef"]["name"] in of_kind(things, "ConfigMap", "team-a")
    claims = [one["persistentVolumeClaim"]["claimName"] for one in said["volumes"] if "persistentVolumeClaim" in one]
    assert set(claims) <= set(of_kind(things, "PersistentVolumeClaim", "team-a"))


def test_the_dag_makes_the_five_stages_one_after_the_other_and_only_a_refusal_is_skipped(tasks: list[Operator]) -> None:
    assert [one.given["task_id"] for one in tasks] == STAGES
    assert [[after.given["task_id"] for after in one.after] for one in tasks] == [[name] for name in STAGES[1:]] + [[]]
    skipped = {one.given["task_id"]: one.given["skip_on_exit_code"] for one in tasks if "skip_on_exit_code" in one.given}
    assert skipped == {"evaluate": 3}


def test_the_command_line_takes_what_the_dag_calls_it_with(tasks: list[Operator]) -> None:
    assert all(one.given["cmds"] == ["tuneline"] for one in tasks)
    folders({one.given["task_id"]: understood(one.given["arguments"]) for one in tasks})


def test_the_dags_pods_are_such_as_kubernetes_and_a_restricted_namespace_take(tasks: list[Operator]) -> None:
    for one in tasks:
        check_pod(airflow_pod(one.given))


def test_both_examples_call_each_stage_in_the_same_image_as_the_page_says(tasks: list[Operator]) -> None:
    page = (ROOT / "docs" / "other-platforms.md").read_text(encoding="utf-8")
    told = {command: image for image, command in re.findall(r"^\| [a-z-]+ \| `(python-\w+)`.*? \| `tuneline (\w+) ", page, re.MULTILINE)}
    assert list(told) == STAGES
    of_argo = {name: one["image"].rpartition("/")[2].partition(":")[0] for name, one in containers().items()}
    of_airflow = {one.given["task_id"]: one.given["image"].rpartition("/")[2].partition(":")[0] for one in tasks}
    assert told == of_argo == of_airflow


def test_a_misspelt_option_would_be_found() -> None:
    with pytest.raises(Exception, match="No such option: --datset"):
        understood(["evaluate", "model", "--datset=x", "-o", "y"])


@pytest.mark.parametrize("name", ["argo-workflow.yaml", "airflow_dag.py"])
def test_whose_the_volume_is_stands_among_what_is_to_be_changed(name: str) -> None:
    page = (ROOT / "docs" / "other-platforms.md").read_text(encoding="utf-8")
    (section,) = (part for part in page.split("\n## ") if f"(examples/{name})" in part)
    for text in ((EXAMPLES / name).read_text(encoding="utf-8"), section):
        changed = text.partition("To be changed")[2].split(".")[0]
        assert {"namespace", "registry", "user and group"} <= {one.strip(": ").lower() for one in re.split(", |: | in it|\\(", changed)}
