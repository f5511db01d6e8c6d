"""The bill of materials that an image writes during its build, of the environment of these tests."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tests.pipelines.command import ROOT


def run_script(*arguments: object) -> None:
    command = [sys.executable, "-P", str(ROOT / "images" / "contents.py"), *map(str, arguments)]
    subprocess.run(command, check=True, timeout=120)


def report(name: str, package_version: str, **source: Any) -> dict[str, Any]:
    """Return an entry of the report of `pip install --report`."""
    return {"metadata": {"name": name, "version": package_version}, "download_info": source}


def test_bill_of_materials_lists_packages_with_the_hashes_that_pip_reported(tmp_path: Path) -> None:
    wheel = tmp_path / "tuneline wheel.whl"
    wheel.write_bytes(b"wheel")
    downloaded = {"url": "https://files.example/a.whl", "archive_info": {"hashes": {"sha256": "5" * 64}}}
    reports = [
        [report("PyYAML", version("PyYAML"), **downloaded)],
        [report("tuneline", version("tuneline"), url=wheel.as_uri(), archive_info={})],
    ]
    for installed in reports:
        (tmp_path / "report.json").write_text(json.dumps({"install": installed}))
        run_script("record", tmp_path / "report.json", tmp_path / "archives.json")
    run_script("write", tmp_path / "archives.json", tmp_path / "sbom.cdx.json")

    text = (tmp_path / "sbom.cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    bill = json.loads(text)
    subject = bill["metadata"]["component"]
    assert (subject["name"], subject["version"]) == ("tuneline", version("tuneline"))
    assert subject["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(b"wheel").hexdigest()}]
    components = {component["purl"]: component for component in bill["components"]}
    pyyaml = components[f"pkg:pypi/pyyaml@{version('PyYAML')}"]
    assert pyyaml["hashes"] == [{"alg": "SHA-256", "content": "5" * 64}]
    assert f"pkg:pypi/pydantic@{version('pydantic')}" in components
    if Path("/var/lib/dpkg/status").exists():
        assert any(url.startswith("pkg:deb/") for url in components)
