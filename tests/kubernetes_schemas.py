"""Is an object one that Kubernetes takes? Checked strictly: an unknown field, a missing one, another type.

Always against the models of the `kubernetes` client that kfp brings along, made from Kubernetes' own OpenAPI description; and, where the
development extra is installed, against the JSON schemas of every version that the package kubernetes-validate carries.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

OLDEST = (1, 29)
PLAIN = {"str": str, "bool": bool, "int": int, "float": (int, float)}
QUANTITY = re.compile(r"^[+-]?(\d+|\d+\.\d*|\.\d+)(m|k|[KMGTPE]i?|[eE][+-]?\d+)?$")
VOLUME_NAME = re.compile(r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")


def problems(thing: dict[str, Any]) -> list[str]:
    """What the client's models and the rules of the API server that no schema holds find wrong."""
    found = list(_model(_model_of(thing), thing, thing["kind"]))
    return found + (list(_rules(thing)) if thing["kind"] == "Pod" else [])


def versions() -> list[str]:
    """The versions of Kubernetes from OLDEST on whose JSON schemas are here; none without the development extra."""
    try:
        from kubernetes_validate import utils
    except ImportError:
        return []
    return [version for version in dict.fromkeys(utils.all_versions()) if tuple(map(int, version.split(".")[:2])) >= OLDEST]


def schema_problems(thing: dict[str, Any], version: str) -> list[str]:
    """What this version's strict schema refuses."""
    found = _validator(thing["apiVersion"], thing["kind"], version).iter_errors(thing)
    return [f"{'.'.join(map(str, problem.absolute_path))}: {problem.message}" for problem in found]


@functools.cache
def _validator(api: str, kind: str, version: str) -> Any:
    """kubernetes_validate.validate without reading its definitions, 1 MB, again for each object."""
    import jsonschema
    from kubernetes_validate import utils
    from referencing import Registry, Resource

    group, _, api_version = api.rpartition("/")
    name = "-".join(filter(None, [kind.lower(), group.partition(".")[0], api_version]))
    schema = utils.schema_contents(f"{_folder(version)}/{name}.json", version)
    registry = _definitions(version) @ (Resource.from_contents(schema) @ Registry())
    return jsonschema.Draft202012Validator(schema, registry=registry)


@functools.cache
def _definitions(version: str) -> Any:
    from kubernetes_validate import utils
    from referencing import Resource

    return Resource.from_contents(utils.schema_contents(f"{_folder(version)}/_definitions.json", version))


def _folder(version: str) -> str:
    return f"kubernetes-json-schema/v{version}-local-strict"


def _model_of(thing: dict[str, Any]) -> str:
    """The client's model of an object: V1Pod, V2HorizontalPodAutoscaler."""
    return f"{thing['apiVersion'].rpartition('/')[2].upper()}{thing['kind']}"


def _model(kind: str, value: Any, where: str) -> Iterator[str]:
    from kubernetes import client

    model = getattr(client, kind)
    if not isinstance(value, dict):
        yield f"{where}: a {kind} is wanted, not {value!r}"
        return
    fields = {name: (attribute, model.openapi_types[attribute]) for attribute, name in model.attribute_map.items()}
    for name in value:
        if name not in fields:
            yield f"{where}.{name}: {kind} has no such field"
        else:
            yield from _typed(fields[name][1], value[name], f"{where}.{name}")
    try:
        model(**{fields[name][0]: value[name] for name in value if name in fields})
    except ValueError as error:  # a required field is missing, or a value is none of those allowed
        yield f"{where}: {error}"


def _typed(kind: str, value: Any, where: str) -> Iterator[str]:
    inner = re.fullmatch(r"(list|dict)(?:\[|\()(?:str, ?)?(.*)(?:\]|\))", kind)
    if inner and isinstance(value, list if inner[1] == "list" else dict):
        pairs = enumerate(value) if isinstance(value, list) else value.items()
        for key, one in pairs:
            yield from _typed(inner[2], one, f"{where}.{key}")
    elif inner:
        yield f"{where}: {kind} is wanted, not {value!r}"
    elif kind in PLAIN:
        if not isinstance(value, PLAIN[kind]) or (isinstance(value, bool) and kind != "bool"):
            yield f"{where}: {kind} is wanted, not {value!r}"
    elif kind.startswith(("V1", "V2")):
        yield from _model(kind, value, where)


def _rules(pod: dict[str, Any]) -> Iterator[str]:
    """k8s.io/kubernetes, pkg/apis/core/validation: names and places are unique, mounts have a volume, quantities are some, requests fit."""
    names = [volume["name"] for volume in pod["spec"]["volumes"]]
    yield from (f"volume {name}: no name for a volume" for name in names if not VOLUME_NAME.match(name))
    yield from (f"volume {name} is there twice" for name in names if names.count(name) > 1)
    for container in [*pod["spec"]["containers"], *pod["spec"]["initContainers"]]:
        paths = [mount["mountPath"] for mount in container["volumeMounts"]]
        yield from (f"{container['name']}: {path} is mounted twice" for path in paths if paths.count(path) > 1)
        yield from (f"{mount['name']}: no such volume" for mount in container["volumeMounts"] if mount["name"] not in names)
        variables = [one["name"] for one in container.get("env", [])]
        yield from (f"{container['name']}: {name} is set twice" for name in variables if variables.count(name) > 1)
        limits = container["resources"].get("limits", {})
        for name, amount in [*limits.items(), *container["resources"].get("requests", {}).items()]:
            if not QUANTITY.match(amount):
                yield f"{container['name']}: {amount} is no amount of {name}"
            if "." in name.partition("/")[0] and not re.fullmatch(r"[a-z0-9.-]+/[A-Za-z0-9._-]+", name):
                yield f"{container['name']}: {name} is no resource"
