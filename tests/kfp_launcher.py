"""A compiled pipeline, run task by task as Kubeflow does it: a driver resolves the inputs, a launcher starts the executor's own command.

Both are parts of kubeflow/pipelines that are not on PyPI, so what they do is written out here, at the commit that
pipelines/cluster/kubeflow_pods.py follows (backend/src/v2/driver/resolve.go and dag.go; backend/src/v2/component/launcher_v2.go). Two
things are other than there: an artifact's address is a folder of this machine, where the launcher would upload it, and a condition is read
by its form, where the driver has CEL.
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

from pipelines.cluster import kubeflow_pods

Json = dict[str, Any]
CONDITION = re.compile(r"(?P<no>!\()?inputs\.parameter_values\['(?P<name>[^']+)'\]\s*==\s*'(?P<value>[^']*)'\)?")
FIELDS = {"KFP_POD_NAME": "pod", "KFP_POD_UID": "uid", "NAMESPACE": "team", "KFP_RUN_ID": "run"}
LONGEST = 600.0  # seconds a step may take


@dataclass(frozen=True)
class Launched:
    """A run: its pipeline, the containers of its pods by task, where its outputs lie, what its pods' images would set, and what ran."""

    pipeline: Json
    containers: dict[str, Json]
    root: Path
    image: Callable[[str], dict[str, str]]
    ran: list[str] = field(default_factory=list)


def run(compiled: str, given: Json, root: Path, image: Callable[[str], dict[str, str]]) -> tuple[Json, list[str]]:
    """Run a compiled pipeline with these parameters. Returns its outputs and the executors that ran, in their order.

    `image` gives, for the name of an image, the variables that it sets; a step's environment is these, those of its pod, and no other.
    Raises AssertionError with the log of the first step that fails.
    """
    pods = kubeflow_pods.pods(compiled)
    containers = {name: pod["spec"]["containers"][0] for name, pod in pods.items()}
    launched = Launched(next(iter(yaml.safe_load_all(compiled))), containers, root, image)
    return _dag(launched, launched.pipeline["root"], given), launched.ran


def _dag(launched: Launched, component: Json, given: Json) -> Json:
    """Run a component that is made of tasks, each when those it depends on have ended. Returns its outputs."""
    inputs, made = _with_defaults(component, given), {}
    for name, task in _in_order(component["dag"]["tasks"]):
        values = {key: _value(source, inputs, made) for key, source in task.get("inputs", {}).get("parameters", {}).items()}
        if _is_triggered(task, values):
            made[name] = _task(launched, name, launched.pipeline["components"][task["componentRef"]["name"]], values)
    outputs = component["dag"].get("outputs", {}).get("parameters", {})
    return {name: _output(source, made) for name, source in outputs.items()}


def _with_defaults(component: Json, given: Json) -> Json:
    """A number without a fraction is one, whatever the YAML says: protobuf has one kind of number, and its JSON writes 8 for 8.0."""
    declared = component.get("inputDefinitions", {}).get("parameters", {})
    values = {name: one["defaultValue"] for name, one in declared.items() if "defaultValue" in one} | given
    unknown = values.keys() - declared.keys()
    assert not unknown, f"no such parameters: {unknown}"
    return {name: int(value) if isinstance(value, float) and value.is_integer() else value for name, value in values.items()}


def _in_order(tasks: dict[str, Json]) -> Iterable[tuple[str, Json]]:
    waiting = dict(tasks)
    while waiting:
        ready = [name for name, task in waiting.items() if not any(other in waiting for other in task.get("dependentTasks", []))]
        assert ready, f"tasks wait for one another: {set(waiting)}"
        yield from ((name, waiting.pop(name)) for name in ready)


def _value(source: Json, inputs: Json, made: dict[str, Json]) -> Any:
    if "runtimeValue" in source:
        return source["runtimeValue"]["constant"]
    if "componentInputParameter" in source:
        return inputs[source["componentInputParameter"]]
    asked = source["taskOutputParameter"]
    return made[asked["producerTask"]][asked["outputParameterKey"]]


def _is_triggered(task: Json, values: Json) -> bool:
    condition = task.get("triggerPolicy", {}).get("condition")
    if condition is None:
        return True
    match = CONDITION.fullmatch(condition)
    assert match, f"a condition of another form: {condition}"
    return bool((values[match["name"]] == match["value"]) != bool(match["no"]))


def _output(source: Json, made: dict[str, Json]) -> Any:
    """An output of one task, or of the first that ran."""
    asked = source.get("valueFromOneof", {}).get("parameterSelectors") or [source["valueFromParameter"]]
    return next(made[one["producerSubtask"]][one["outputParameterKey"]] for one in asked if one["producerSubtask"] in made)


def _task(launched: Launched, name: str, component: Json, values: Json) -> Json:
    if "dag" in component:
        return _dag(launched, component, values)
    executor = component["executorLabel"].removeprefix("exec-")
    launched.ran.append(executor)
    folder = launched.root / name
    work = folder / "cwd"
    work.mkdir(parents=True)
    asked = _executor_input(component, _with_defaults(component, values), folder)
    _start(launched, executor, json.dumps(asked), work)
    told: Json = json.loads(Path(asked["outputs"]["outputFile"]).read_text(encoding="utf-8"))
    for output in component.get("outputDefinitions", {}).get("artifacts", {}):
        metadata = told["artifacts"][output]["artifacts"][0]["metadata"]
        assert (folder / output).is_file() or metadata, f"{name} gave nothing for its output {output}"
    found: Json = told.get("parameterValues", {})
    return found


def _executor_input(component: Json, values: Json, folder: Path) -> Json:
    """What a step is told: its inputs, and where each output is wanted."""
    declared = component.get("outputDefinitions", {})
    artifacts = {name: _artifact(name, one, folder) for name, one in declared.get("artifacts", {}).items()}
    parameters = {name: {"outputFile": str(folder / "parameters" / name)} for name in declared.get("parameters", {})}
    outputs = {"parameters": parameters, "artifacts": artifacts, "outputFile": str(folder / "output_metadata.json")}
    return {"inputs": {"parameterValues": values}, "outputs": outputs}


def _artifact(name: str, declared: Json, folder: Path) -> Json:
    return {"artifacts": [{"name": name, "type": declared["artifactType"], "uri": str(folder / name), "metadata": {}}]}


def _start(launched: Launched, executor: str, asked: str, work: Path) -> None:
    """The container's own command in a new process, without the launcher in front of it."""
    container = launched.containers[executor]
    launcher, dashes, *command = container["command"]
    assert (launcher, dashes) == (kubeflow_pods.LAUNCHER_PATH, "--")
    arguments = [argument.replace("{{$}}", asked) for argument in container["args"]]
    done = subprocess.run(
        [*command, *arguments],
        cwd=work,
        env={**launched.image(container["image"]), **_variables(container)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONGEST,
        check=False,
    )
    assert done.returncode == 0, f"{executor} ended with {done.returncode}:\n{done.stdout[-6000:]}"


def _variables(container: Json) -> dict[str, str]:
    """What the pod sets; a variable from a secret would need one, and none is asked for here."""
    return {one["name"]: one["value"] if "value" in one else FIELDS[one["name"]] for one in container["env"]}
