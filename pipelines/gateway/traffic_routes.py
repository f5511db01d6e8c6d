"""The routing file: for each public model name, weighted targets, sticky assignment, shadow traffic and abort limits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from components.common.artifacts import artifact_folder, hashing
from components.common.runtime import filesystem
from components.common.runtime.errors import ConfigurationError
from components.common.runtime.yaml_loading import StrictLoader, describe_yaml_error, load_yaml

EXAMPLE = "Example: routes: {assistant: {targets: [{model: assistant, weight: 95}, {model: assistant-candidate, weight: 5}]}}."
RouteName = Annotated[str, Field(pattern=r"^[^@\s]{1,128}$")]
ModelName = Annotated[str, Field(min_length=1, max_length=128)]


class Target(BaseModel):
    """A model that answers requests of a route."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: ModelName = Field(description="Name of the model in Triton.")
    weight: float = Field(1.0, ge=0, le=1e6, description="Share of the requests, relative to the other weights.")
    alias: str = Field("", description="ALIAS in NAME@ALIAS. Default: the registry alias of the deployment.")


class Shadow(BaseModel):
    """A model that receives copies of requests and never answers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: ModelName = Field(description="Name of the model in Triton.")
    share: float = Field(0.1, gt=0, le=1, description="Share of answered requests that are copied.")
    max_running: int = Field(
        4, ge=1, description="Maximum number of client requests in progress; above it, copies are dropped."
    )


class AbortLimits(BaseModel):
    """When a target other than the first loses its traffic."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = True
    min_requests: int = Field(50, ge=1, description="Minimum number of canary requests before an abort.")
    max_slowdown: float = Field(
        2.0, ge=1, le=1e3, description="Maximum ratio of the canary's latency to that of the first target."
    )
    false_abort_rate: float = Field(
        0.05, gt=0, lt=1, description="Maximum probability of an abort if the targets do not differ."
    )


class Route(BaseModel):
    """The route of one public model name. The first target is the stable one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    targets: list[Target] = Field(min_length=1)
    sticky: str = Field(
        "none",
        pattern=r"^(none|key|user|header [A-Za-z0-9-]{1,64})$",
        description="Subject that always gets the same target: key, user or header NAME. none: a random target per "
        "request.",
    )
    shadow: Shadow | None = None
    abort: AbortLimits = AbortLimits()
    updated: str = Field("", description="Time of the last change by `tuneline routes set`.")

    @model_validator(mode="after")
    def _check_targets(self) -> Route:
        models = [target.model for target in self.targets]
        if len(set(models)) < len(models):
            raise ValueError("a model appears more than once in targets")
        if not sum(target.weight for target in self.targets):
            raise ValueError("the weights of the targets are all 0")
        return self

    @property
    def digest(self) -> str:
        """Digest of the route; an abort holds until it changes."""
        return hashing.digest(self.model_dump(mode="json"))


class _RoutingFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    routes: dict[RouteName, Route] = {}


def read_routes(path: Path) -> dict[str, Route]:
    """Return the routes of a file by public model name; nothing if the file does not exist.

    Raises:
        ConfigurationError: the file cannot be read, or a route is invalid.
    """
    if not path.exists():
        return {}
    try:
        return _RoutingFile.model_validate(load_yaml(filesystem.read_text(path), StrictLoader) or {}).routes
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        problem = describe_yaml_error(error)
        raise ConfigurationError(f"the routing file {path} cannot be read: {problem}", hint=EXAMPLE) from None
    except ValidationError as error:
        raise _describe(str(path), error) from None


def set_route(path: Path, name: str, settings: Mapping[str, Any]) -> Route:
    """Replace the route of a public model name in the file.

    Args:
        path: the routing file; created if it does not exist.
        name: the public model name.
        settings: fields of Route.

    Raises:
        ConfigurationError: the file or the settings are invalid.
    """
    routes = read_routes(path)
    try:
        changed = _RoutingFile(routes={name: settings})
    except ValidationError as error:
        raise _describe("the route", error) from None
    _write_routes(path, {**routes, **changed.routes})
    return changed.routes[name]


def clear_routes(path: Path, name: str = "") -> list[str]:
    """Remove the route of a public model name, or all routes; return the removed names.

    Raises:
        ConfigurationError: the file is invalid, or has no route with this name.
    """
    routes = read_routes(path)
    if name and name not in routes:
        known = ", ".join(routes) or "none"
        raise ConfigurationError(f"{path} has no route for {name}; existing routes: {known}", hint="Check the name.")
    removed = [name] if name else list(routes)
    _write_routes(path, {each: route for each, route in routes.items() if each not in removed})
    return removed


def _write_routes(path: Path, routes: Mapping[str, Route]) -> None:
    content = {"routes": {name: route.model_dump(exclude_defaults=True) for name, route in routes.items()}}
    path.parent.mkdir(parents=True, exist_ok=True)
    artifact_folder.write_atomically(path, yaml.safe_dump(content, sort_keys=False))


def _describe(subject: str, error: ValidationError) -> ConfigurationError:
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"]))
    found = "" if isinstance(first["input"], dict) else f", found {first['input']!r}"
    return ConfigurationError(f"{subject}: {place}: {first['msg']}{found}", hint=EXAMPLE)
