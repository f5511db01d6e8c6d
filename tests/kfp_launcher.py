"""Runs a compiled pipeline task by task as Kubeflow does: the driver resolves inputs, the launcher starts the executor's command.

Driver and launcher of kubeflow/pipelines are not on PyPI. This module reimplements them at the commit that
pipelines/kubeflow/preflight/kubeflow_pods.py follows (backend/src/v2/driver/resolve.go and dag.go; backend/src/v2/component/launcher_v2.go),
with two differences: artifact URIs are local folders instead of uploads, and a regular expression parses conditions instead of CEL.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pipelines.kubeflow.preflight import kubeflow_pods

Json = dict[str, Any]
CONDITION = re.compile(
    r"(?P<no>!\()?inputs\.parameter_values\['(?P<name>[^']+)'\]\s*(?P<operator>[=!]=)\s*'(?P<value>[^']*)'\)?"
)
FIELDS = {"KFP_POD_NAME": "pod", "KFP_POD_UID": "uid", "NAMESPACE": "team", "KFP_RUN_ID": "run"}
STEP_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class PipelineRun:
    """A run: pipeline, containers by task, output folder, environment variables by image and the executors run so far."""

    pipeline: Json
    containers: dict[str, Json]
    root: Path
    image_environment: Callable[[str], dict[str, str]]
    executed: list[str] = field(default_factory=list)


def run(
    compiled: str, parameters: Json, root: Path, image_environment: Callable[[str], dict[str, str]]
) -> tuple[Json, list[str]]:
    """Run a compiled pipeline with these parameters. Returns its outputs and the executors that ran, in order.

    `image_environment` returns the variables of an image. A step's environment consists of these and those of its pod.
    Raises AssertionError with the log of the first step that fails.
    """
    pods = kubeflow_pods.build_pods(compiled)
    containers = {name: pod["spec"]["containers"][0] for name, pod in pods.items()}
    pipeline_run = PipelineRun(next(iter(yaml.safe_load_all(compiled))), containers, root, image_environment)
    return _run_dag(pipeline_run, pipeline_run.pipeline["root"], parameters), pipeline_run.executed


def _run_dag(pipeline_run: PipelineRun, component: Json, parameters: Json) -> Json:
    """Run the tasks of a component in order of their dependencies. Returns its outputs."""
    inputs, results = _with_defaults(component, parameters), {}
    for name, task in _in_dependency_order(component["dag"]["tasks"]):
        values = {
            key: _resolve_value(source, inputs, results)
            for key, source in task.get("inputs", {}).get("parameters", {}).items()
        }
        if _is_triggered(task, values):
            results[name] = _run_task(
                pipeline_run, name, pipeline_run.pipeline["components"][task["componentRef"]["name"]], values
            )
    outputs = component["dag"].get("outputs", {}).get("parameters", {})
    return {name: _resolve_output(source, results) for name, source in outputs.items()}


def _with_defaults(component: Json, parameters: Json) -> Json:
    """Merge defaults; a whole float becomes an int, since protobuf has one number type and its JSON writes 8 for 8.0."""
    declared = component.get("inputDefinitions", {}).get("parameters", {})
    values = {
        name: parameter["defaultValue"] for name, parameter in declared.items() if "defaultValue" in parameter
    } | parameters
    unknown = values.keys() - declared.keys()
    assert not unknown, f"no such parameters: {unknown}"
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value for name, value in values.items()
    }


def _in_dependency_order(tasks: dict[str, Json]) -> Iterable[tuple[str, Json]]:
    waiting = dict(tasks)
    while waiting:
        ready = [
            name
            for name, task in waiting.items()
            if not any(other in waiting for other in task.get("dependentTasks", []))
        ]
        assert ready, f"tasks wait for one another: {set(waiting)}"
        yield from ((name, waiting.pop(name)) for name in ready)


def _resolve_value(source: Json, inputs: Json, results: dict[str, Json]) -> Any:
    if "runtimeValue" in source:
        return source["runtimeValue"]["constant"]
    if "componentInputParameter" in source:
        return inputs[source["componentInputParameter"]]
    selector = source["taskOutputParameter"]
    return results[selector["producerTask"]][selector["outputParameterKey"]]


def _is_triggered(task: Json, values: Json) -> bool:
    condition = task.get("triggerPolicy", {}).get("condition")
    if condition is None:
        return True
    match = CONDITION.fullmatch(condition)
    assert match, f"a condition of another form: {condition}"
    is_negated = bool(match["no"]) != (match["operator"] == "!=")
    return bool((values[match["name"]] == match["value"]) != is_negated)


def _resolve_output(source: Json, results: dict[str, Json]) -> Any:
    """Return an output of one task, or of the first task that ran."""
    selectors = source.get("valueFromOneof", {}).get("parameterSelectors") or [source["valueFromParameter"]]
    return next(
        results[selector["producerSubtask"]][selector["outputParameterKey"]]
        for selector in selectors
        if selector["producerSubtask"] in results
    )


def _run_task(pipeline_run: PipelineRun, name: str, component: Json, values: Json) -> Json:
    if "dag" in component:
        return _run_dag(pipeline_run, component, values)
    executor = component["executorLabel"].removeprefix("exec-")
    pipeline_run.executed.append(executor)
    folder = pipeline_run.root / name
    work = folder / "cwd"
    work.mkdir(parents=True)
    executor_input = _executor_input(component, _with_defaults(component, values), folder)
    _run_container(pipeline_run, executor, json.dumps(executor_input), work)
    output_metadata: Json = json.loads(Path(executor_input["outputs"]["outputFile"]).read_text(encoding="utf-8"))
    for output in component.get("outputDefinitions", {}).get("artifacts", {}):
        metadata = output_metadata["artifacts"][output]["artifacts"][0]["metadata"]
        assert (folder / output).is_file() or metadata, f"{name} gave nothing for its output {output}"
    parameter_values: Json = output_metadata.get("parameterValues", {})
    return parameter_values


def _executor_input(component: Json, values: Json, folder: Path) -> Json:
    """Build the executor input of a step: its inputs and the paths of its outputs."""
    declared = component.get("outputDefinitions", {})
    artifacts = {name: _artifact(name, artifact, folder) for name, artifact in declared.get("artifacts", {}).items()}
    parameters = {name: {"outputFile": str(folder / "parameters" / name)} for name in declared.get("parameters", {})}
    outputs = {"parameters": parameters, "artifacts": artifacts, "outputFile": str(folder / "output_metadata.json")}
    return {"inputs": {"parameterValues": values}, "outputs": outputs}


def _artifact(name: str, declared: Json, folder: Path) -> Json:
    return {"artifacts": [{"name": name, "type": declared["artifactType"], "uri": str(folder / name), "metadata": {}}]}


def _run_container(pipeline_run: PipelineRun, executor: str, executor_input_json: str, work: Path) -> None:
    """Run the command of the container without the launcher in front of it."""
    container = pipeline_run.containers[executor]
    launcher, dashes, *command = container["command"]
    assert (launcher, dashes) == (kubeflow_pods.LAUNCHER_PATH, "--")
    arguments = [argument.replace("{{$}}", executor_input_json) for argument in container["args"]]
    result = subprocess.run(
        [*command, *arguments],
        cwd=work,
        env={**pipeline_run.image_environment(container["image"]), **_pod_variables(container)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=STEP_TIMEOUT_SECONDS,
        check=False,
    )
    assert result.returncode == 0, f"{executor} ended with {result.returncode}:\n{result.stdout[-6000:]}"


def _pod_variables(container: Json) -> dict[str, str]:
    """Return the variables of the pod; secrets are not supported."""
    return {
        variable["name"]: variable["value"] if "value" in variable else FIELDS[variable["name"]]
        for variable in container["env"]
    }
