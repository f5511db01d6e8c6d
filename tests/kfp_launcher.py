"""Runs a compiled pipeline task by task as Kubeflow does: the driver resolves inputs, the launcher starts the executor's command.

Driver and launcher of kubeflow/pipelines are not on PyPI. This module reimplements them at the commit that
pipelines/kubeflow/preflight/kubeflow_pods.py follows (backend/src/v2/driver/resolve.go and dag.go; backend/src/v2/component/launcher_v2.go),
with two differences: artifact URIs are local folders instead of uploads, and a regular expression parses conditions instead of CEL.
An exit task runs after its tasks, also when one of them failed; like Kubeflow's, it gets the state alone.
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
# Runs the container of an executor, whose working directory is the folder; returns its exit code and its log.
RunContainer = Callable[[str, Json, Path], tuple[int, str]]
OPTIONAL_OUTPUTS = ("refusals",)  # only the regression suite has refusals
EXIT_STRATEGY = "ALL_UPSTREAM_TASKS_COMPLETED"


@dataclass(frozen=True)
class Values:
    """Parameters and artifacts of a task, by name: its inputs or its outputs."""

    parameters: Json = field(default_factory=dict)
    artifacts: Json = field(default_factory=dict)


@dataclass(frozen=True)
class PipelineRun:
    """A run: pipeline, containers by task, output folder, how a container runs and the executors run so far."""

    pipeline: Json
    containers: dict[str, Json]
    root: Path
    run_container: RunContainer
    executed: list[str] = field(default_factory=list)


def run(compiled: str, parameters: Json, root: Path, run_container: RunContainer) -> tuple[Json, list[str]]:
    """Run a compiled pipeline with these parameters. Returns its outputs and the executors that ran, in order.

    Raises AssertionError with the log of the first step that fails.
    """
    pods = kubeflow_pods.build_pods(compiled)
    containers = {name: pod["spec"]["containers"][0] for name, pod in pods.items()}
    pipeline_run = PipelineRun(next(iter(yaml.safe_load_all(compiled))), containers, root, run_container)
    outputs = _run_dag(pipeline_run, pipeline_run.pipeline["root"], Values(parameters))
    return outputs.parameters, pipeline_run.executed


def _run_dag(pipeline_run: PipelineRun, component: Json, given: Values) -> Values:
    """Run the tasks of a component in order of their dependencies, then its exit tasks. Returns its outputs."""
    inputs = Values(_with_defaults(component, given.parameters), given.artifacts)
    results: dict[str, Values] = {}
    tasks = component["dag"]["tasks"]
    exits = {
        name: task for name, task in tasks.items() if task.get("triggerPolicy", {}).get("strategy") == EXIT_STRATEGY
    }
    failure: AssertionError | None = None
    try:
        for name, task in _in_dependency_order({name: task for name, task in tasks.items() if name not in exits}):
            _run_if_triggered(pipeline_run, name, task, inputs, results, "")
    except AssertionError as error:
        failure = error
    for name, task in exits.items():
        _run_if_triggered(pipeline_run, name, task, inputs, results, "FAILED" if failure else "COMPLETE")
    if failure:
        raise failure
    outputs = component["dag"].get("outputs", {}).get("parameters", {})
    return Values({name: _resolve_output(source, results) for name, source in outputs.items()})


def _run_if_triggered(
    pipeline_run: PipelineRun, name: str, task: Json, inputs: Values, results: dict[str, Values], state: str
) -> None:
    """Run a task unless its condition is false, and add its outputs to the results. `state`: of the tasks before an exit task."""
    sources = task.get("inputs", {})
    values = Values(
        {key: _resolve_value(source, inputs, results, state) for key, source in sources.get("parameters", {}).items()},
        {key: _resolve_artifact(source, inputs, results) for key, source in sources.get("artifacts", {}).items()},
    )
    if _is_triggered(task, values.parameters):
        component = pipeline_run.pipeline["components"][task["componentRef"]["name"]]
        results[name] = _run_task(pipeline_run, name, component, values)


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


def _resolve_value(source: Json, inputs: Values, results: dict[str, Values], state: str) -> Any:
    if "runtimeValue" in source:
        return source["runtimeValue"]["constant"]
    if "taskFinalStatus" in source:
        producer = source["taskFinalStatus"]["producerTask"]
        return {"state": state, "pipelineTaskName": producer, "pipelineJobResourceName": "run", "error": {}}
    if "componentInputParameter" in source:
        return inputs.parameters[source["componentInputParameter"]]
    selector = source["taskOutputParameter"]
    return results[selector["producerTask"]].parameters[selector["outputParameterKey"]]


def _resolve_artifact(source: Json, inputs: Values, results: dict[str, Values]) -> Json:
    if "componentInputArtifact" in source:
        artifact: Json = inputs.artifacts[source["componentInputArtifact"]]
    else:
        selector = source["taskOutputArtifact"]
        artifact = results[selector["producerTask"]].artifacts[selector["outputArtifactKey"]]
    return artifact


def _is_triggered(task: Json, values: Json) -> bool:
    condition = task.get("triggerPolicy", {}).get("condition")
    if condition is None:
        return True
    match = CONDITION.fullmatch(condition)
    assert match, f"a condition of another form: {condition}"
    is_negated = bool(match["no"]) != (match["operator"] == "!=")
    return bool((values[match["name"]] == match["value"]) != is_negated)


def _resolve_output(source: Json, results: dict[str, Values]) -> Any:
    """Return an output of one task, or of the first task that ran."""
    selectors = source.get("valueFromOneof", {}).get("parameterSelectors") or [source["valueFromParameter"]]
    return next(
        results[selector["producerSubtask"]].parameters[selector["outputParameterKey"]]
        for selector in selectors
        if selector["producerSubtask"] in results
    )


def _run_task(pipeline_run: PipelineRun, name: str, component: Json, values: Values) -> Values:
    if "dag" in component:
        return _run_dag(pipeline_run, component, values)
    executor = component["executorLabel"].removeprefix("exec-")
    pipeline_run.executed.append(executor)
    folder = pipeline_run.root / name
    work = folder / "cwd"
    work.mkdir(parents=True)
    given = Values(_with_defaults(component, values.parameters), values.artifacts)
    executor_input = _executor_input(component, given, folder)
    container = pipeline_run.containers[executor]
    arguments = [argument.replace("{{$}}", json.dumps(executor_input)) for argument in container["args"]]
    exit_code, log = pipeline_run.run_container(executor, {**container, "args": arguments}, work)
    assert exit_code == 0, f"{executor} ended with {exit_code}:\n{log[-6000:]}"
    output_metadata: Json = json.loads(Path(executor_input["outputs"]["outputFile"]).read_text(encoding="utf-8"))
    artifacts: Json = {}
    for output in component.get("outputDefinitions", {}).get("artifacts", {}):
        written = output_metadata["artifacts"][output]["artifacts"][0]
        is_empty = not ((folder / output).is_file() or written["metadata"])
        assert not is_empty or output in OPTIONAL_OUTPUTS, f"{name} gave nothing for its output {output}"
        artifacts[output] = {"artifacts": [{**written, "type": {"instanceSchema": ""}}]}  # as Kubeflow passes it on
    return Values(output_metadata.get("parameterValues", {}), artifacts)


def _executor_input(component: Json, given: Values, folder: Path) -> Json:
    """Build the executor input of a step: its inputs and the paths of its outputs."""
    declared = component.get("outputDefinitions", {})
    artifacts = {name: _artifact(name, artifact, folder) for name, artifact in declared.get("artifacts", {}).items()}
    parameters = {name: {"outputFile": str(folder / "parameters" / name)} for name in declared.get("parameters", {})}
    outputs = {"parameters": parameters, "artifacts": artifacts, "outputFile": str(folder / "output_metadata.json")}
    return {"inputs": {"parameterValues": given.parameters, "artifacts": given.artifacts}, "outputs": outputs}


def _artifact(name: str, declared: Json, folder: Path) -> Json:
    return {"artifacts": [{"name": name, "type": declared["artifactType"], "uri": str(folder / name), "metadata": {}}]}


def run_process(
    image_environment: Callable[[str], dict[str, str]], executor: str, container: Json, work: Path
) -> tuple[int, str]:
    """Run the command of a container in a process, without the launcher in front of it.

    `image_environment` returns the variables of an image. The environment consists of these and those of the container.
    """
    launcher, dashes, *command = container["command"]
    assert (launcher, dashes) == (kubeflow_pods.LAUNCHER_PATH, "--"), executor
    result = subprocess.run(
        [*command, *container["args"]],
        cwd=work,
        env={**image_environment(container["image"]), **_pod_variables(container)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=STEP_TIMEOUT_SECONDS,
        check=False,
    )
    return result.returncode, result.stdout


def _pod_variables(container: Json) -> dict[str, str]:
    """Return the variables of the pod; secrets are not supported."""
    return {
        variable["name"]: variable["value"] if "value" in variable else FIELDS[variable["name"]]
        for variable in container["env"]
    }
