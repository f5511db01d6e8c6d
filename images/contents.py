"""Write the CycloneDX bill of materials of an image during its build: its Python packages and Debian packages.

contents.py record REPORT ARCHIVES   add the hashes in a report of `pip install --report` to a file
contents.py write ARCHIVES FILE      write the bill of materials; runs with the image's Python

It uses only the standard library, because images do not contain cyclonedx-python-lib.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit


def record(report: Path, archives: Path) -> None:
    """Add the SHA-256 hash of each file that pip installed, by package URL."""
    known = json.loads(archives.read_text(encoding="utf-8")) if archives.exists() else {}
    for installed in json.loads(report.read_text(encoding="utf-8"))["install"]:
        metadata, source = installed["metadata"], installed["download_info"]
        digest = source.get("archive_info", {}).get("hashes", {}).get("sha256")
        if not digest and source["url"].startswith("file://"):  # pip 23 does not hash tuneline's wheel
            digest = hashlib.sha256(Path(unquote(urlsplit(source["url"]).path)).read_bytes()).hexdigest()
        known[build_python_url(metadata["name"], metadata["version"])] = digest
    archives.write_text(json.dumps(known, indent=1, sort_keys=True), encoding="utf-8")


def build_python_url(name: str, version: str) -> str:
    """Return the package URL of a Python package."""
    return f"pkg:pypi/{re.sub(r'[-_.]+', '-', name).lower()}@{quote(version)}"


def list_components(archives: dict[str, str], folders: list[str]) -> list[dict[str, Any]]:
    """Return the components of the bill of materials: Python packages in the folders, then Debian packages."""
    found: dict[str, dict[str, Any]] = {}
    for package in distributions(path=folders):
        if not package.name:  # damaged metadata of the base
            continue
        url = build_python_url(package.name, package.version)
        found[url] = {"type": "library", "name": package.name, "version": package.version, "purl": url, "bom-ref": url}
        if archives.get(url):
            found[url]["hashes"] = [{"alg": "SHA-256", "content": archives[url]}]
    if shutil.which("dpkg-query"):
        distribution = platform.freedesktop_os_release()["ID"]
        command = [
            "dpkg-query",
            "--show",
            "--showformat",
            "${db:Status-Status} ${Package} ${Version} ${Architecture}\\n",
        ]
        for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
            status, name, version, machine = line.split(" ")
            if status != "installed":  # removed, with remaining configuration files
                continue
            url = f"pkg:deb/{distribution}/{quote(name)}@{quote(version)}?arch={machine}"
            found[url] = {"type": "library", "name": name, "version": version, "purl": url, "bom-ref": url}
    return [found[url] for url in sorted(found)]


def write(archives: Path, output: Path) -> None:
    """Write the bill of materials of the image, whose Python runs this; its subject is tuneline."""
    environments = Path(sys.prefix).glob("*/lib/python*/site-packages")  # the serving environment
    folders = [path for path in sys.path if path.endswith("-packages")] + [str(path) for path in environments]
    components = list_components(json.loads(archives.read_text(encoding="utf-8")), folders)
    subject = next(component for component in components if component["name"] == "tuneline")
    components.remove(subject)
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": subject | {"type": "application"}},
        "components": components,
    }
    output.write_text(json.dumps(bill, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    {"record": record, "write": write}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
