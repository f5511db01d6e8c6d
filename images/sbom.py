"""The CycloneDX bill of materials of tuneline[all]: the installed packages that it requires, with their versions.

python -m images.sbom FILE
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def resolve_packages(requirement: str) -> dict[str, set[str]]:
    """Return the packages that a requirement needs, directly or transitively, each with its own dependencies, by canonical name.

    Raises:
        PackageNotFoundError: a required package is not installed.
    """
    required: dict[str, set[str]] = {}
    pending, resolved = [Requirement(requirement)], set()
    while pending:
        current = pending.pop()
        name = canonicalize_name(current.name)
        for extra in ("", *sorted(current.extras)):
            if (name, extra) in resolved:
                continue
            resolved.add((name, extra))
            children = [Requirement(text) for text in importlib.metadata.requires(name) or []]
            children = [child for child in children if not child.marker or child.marker.evaluate({"extra": extra})]
            required.setdefault(name, set()).update(canonicalize_name(child.name) for child in children)
            pending += children
    return required


def build_bom(required: dict[str, set[str]]) -> Bom:
    """Build the bill of materials with its dependency graph; tuneline itself is its subject."""
    bom = Bom()
    components = {}
    for name in sorted(required):
        version = importlib.metadata.version(name)
        url = PackageURL("pypi", name=name, version=version)
        kind = ComponentType.APPLICATION if name == "tuneline" else ComponentType.LIBRARY
        components[name] = Component(name=name, version=version, type=kind, purl=url, bom_ref=str(url))
    bom.metadata.component = components["tuneline"]
    bom.components.update(component for name, component in components.items() if name != "tuneline")
    for name, component in components.items():
        bom.register_dependency(component, [components[child] for child in sorted(required[name] - {name})])
    return bom


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(JsonV1Dot6(build_bom(resolve_packages("tuneline[all]"))).output_as_string(indent=2))
