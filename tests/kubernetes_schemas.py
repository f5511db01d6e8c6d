"""Strict validation of Kubernetes objects: unknown fields, missing fields and wrong types are errors.

`problems` uses the models of the `kubernetes` client, a dependency of kfp generated from the OpenAPI description of Kubernetes.
`schema_problems` uses the JSON schemas of kubernetes-validate, which the development extra installs.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

OLDEST_VERSION = (1, 30)
SCALAR_TYPES = {"str": str, "bool": bool, "int": int, "float": (int, float)}
QUANTITY = re.compile(r"^[+-]?(\d+|\d+\.\d*|\.\d+)(m|k|[KMGTPE]i?|[eE][+-]?\d+)?$")
VOLUME_NAME = re.compile(r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")


def problems(manifest: dict[str, Any]) -> list[str]:
    """Validate against the client's models and against API server rules that no schema contains."""
    errors = list(_model(_model_of(manifest), manifest, manifest["kind"]))
    return errors + (list(_check_pod_rules(manifest)) if manifest["kind"] == "Pod" else [])


def versions() -> list[str]:
    """Return the Kubernetes versions since OLDEST_VERSION with installed schemas; empty without the development extra."""
    try:
        from kubernetes_validate import utils
    except ImportError:
        return []
    return [
        version
        for version in dict.fromkeys(utils.all_versions())
        if tuple(map(int, version.split(".")[:2])) >= OLDEST_VERSION
    ]


def schema_problems(manifest: dict[str, Any], version: str) -> list[str]:
    """Validate against the strict schema of this version."""
    errors = _validator(manifest["apiVersion"], manifest["kind"], version).iter_errors(manifest)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in errors]


@functools.cache
def _validator(api: str, kind: str, version: str) -> Any:
    """Cache the validator: kubernetes_validate.validate reads 1 MB of definitions for each object."""
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


def _model_of(manifest: dict[str, Any]) -> str:
    """Return the name of the client's model of an object, such as V1Pod."""
    return f"{manifest['apiVersion'].rpartition('/')[2].upper()}{manifest['kind']}"


def _model(kind: str, value: Any, path: str) -> Iterator[str]:
    from kubernetes import client

    model = getattr(client, kind)
    if not isinstance(value, dict):
        yield f"{path}: a {kind} is wanted, not {value!r}"
        return
    fields = {name: (attribute, model.openapi_types[attribute]) for attribute, name in model.attribute_map.items()}
    for name in value:
        if name not in fields:
            yield f"{path}.{name}: {kind} has no such field"
        else:
            yield from _check_type(fields[name][1], value[name], f"{path}.{name}")
    try:
        model(**{fields[name][0]: value[name] for name in value if name in fields})
    except ValueError as error:  # a required field is missing, or a value is none of those allowed
        yield f"{path}: {error}"


def _check_type(kind: str, value: Any, path: str) -> Iterator[str]:
    inner = re.fullmatch(r"(list|dict)(?:\[|\()(?:str, ?)?(.*)(?:\]|\))", kind)
    if inner and isinstance(value, list if inner[1] == "list" else dict):
        items = enumerate(value) if isinstance(value, list) else value.items()
        for key, item in items:
            yield from _check_type(inner[2], item, f"{path}.{key}")
    elif inner:
        yield f"{path}: {kind} is wanted, not {value!r}"
    elif kind in SCALAR_TYPES:
        if not isinstance(value, SCALAR_TYPES[kind]) or (isinstance(value, bool) and kind != "bool"):
            yield f"{path}: {kind} is wanted, not {value!r}"
    elif kind.startswith(("V1", "V2")):
        yield from _model(kind, value, path)


def _check_pod_rules(pod: dict[str, Any]) -> Iterator[str]:
    """Rules of k8s.io/kubernetes, pkg/apis/core/validation: unique names and mount paths, existing volumes, valid quantities."""
    names = [volume["name"] for volume in pod["spec"]["volumes"]]
    yield from (f"volume {name}: no name for a volume" for name in names if not VOLUME_NAME.match(name))
    yield from (f"volume {name} is there twice" for name in names if names.count(name) > 1)
    for container in [*pod["spec"]["containers"], *pod["spec"]["initContainers"]]:
        paths = [mount["mountPath"] for mount in container["volumeMounts"]]
        yield from (f"{container['name']}: {path} is mounted twice" for path in paths if paths.count(path) > 1)
        yield from (
            f"{mount['name']}: no such volume" for mount in container["volumeMounts"] if mount["name"] not in names
        )
        variables = [variable["name"] for variable in container.get("env", [])]
        yield from (f"{container['name']}: {name} is set twice" for name in variables if variables.count(name) > 1)
        limits = container["resources"].get("limits", {})
        for name, quantity in [*limits.items(), *container["resources"].get("requests", {}).items()]:
            if not QUANTITY.match(quantity):
                yield f"{container['name']}: {quantity} is no amount of {name}"
            if "." in name.partition("/")[0] and not re.fullmatch(r"[a-z0-9.-]+/[A-Za-z0-9._-]+", name):
                yield f"{container['name']}: {name} is no resource"
