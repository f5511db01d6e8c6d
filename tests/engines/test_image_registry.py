"""`make images` with buildah, skopeo and a real registry: pinned bases, bills of materials, pushes and signatures.

Long tier. The image of these tests contains only busybox; `make images-check` builds the real ones.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.pipelines.command import ROOT

pytestmark = [pytest.mark.registry, pytest.mark.long]
CONTAINERFILE = """ARG BASE_IMAGE={base}
FROM ${{BASE_IMAGE}}
COPY sbom.cdx.json /opt/tuneline/sbom.cdx.json
"""
SIGNING_SKOPEO = os.environ.get("TUNELINE_SIGNING_SKOPEO", "")  # Debian 12 disables Sigstore in its skopeo


@dataclass(frozen=True)
class Registry:
    """A registry, a checkout whose only image is `tiny`, and an environment in which buildah and skopeo use them."""

    address: str
    checkout: Path
    environment: dict[str, str]

    @property
    def base(self) -> str:
        return f"{self.address}/base:1"

    def run(self, *command: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=folder or self.checkout,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def output(self, *command: str) -> str:
        result = self.run(*command)
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    def push_base(self, content: str) -> str:
        """Push a base image of busybox and a file, and return its digest."""
        folder = self.checkout.parent / "base"
        folder.mkdir(exist_ok=True)
        shutil.copy(str(shutil.which("busybox")), folder)
        (folder / "content").write_text(content)
        (folder / "Containerfile").write_text("FROM scratch\nCOPY busybox /bin/cat\nCOPY content /content\n")
        self.output("buildah", "build", "--quiet", "--tag", self.base, str(folder))
        self.output("buildah", "push", "--quiet", self.base)
        return self.digest(self.base)

    def digest(self, image: str) -> str:
        return self.output("skopeo", "inspect", "--no-tags", "--format", "{{.Digest}}", f"docker://{image}")

    def make_images(self, *variables: str) -> subprocess.CompletedProcess[str]:
        settings = {"IMAGES": "tiny", "ENGINE": "buildah", "REGISTRY": f"{self.address}/tuneline", "TAG": "1"}
        return self.run("make", "images", *(f"{name}={value}" for name, value in settings.items()), *variables)

    def base_label(self) -> str:
        inspected = self.output("buildah", "inspect", "--type", "image", f"{self.address}/tuneline/python-tiny:1")
        return str(json.loads(inspected)["OCIv1"]["config"]["Labels"]["org.opencontainers.image.base.digest"])


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    settings = {"version": "0.1", "log": {"level": "warn"}, "http": {"addr": address}}
    settings["storage"] = {"filesystem": {"rootdirectory": str(tmp_path / "registry")}}
    (tmp_path / "registry.yml").write_text(json.dumps(settings))
    home = tmp_path / "home"
    (home / ".config" / "containers").mkdir(parents=True)
    (home / ".config" / "containers" / "registries.conf").write_text(
        f'[[registry]]\nlocation = "{address}"\ninsecure = true\n'
    )
    storage = f'[storage]\ndriver = "vfs"\ngraphroot = "{tmp_path}/storage"\nrunroot = "{tmp_path}/run"\n'
    (tmp_path / "storage.conf").write_text(storage)
    checkout = tmp_path / "checkout"
    (checkout / "images").mkdir(parents=True)
    scripts = [
        f"images/{name}" for name in ("build.sh", "install.sh", "triton_version.sh", "contents.py", "bases.lock")
    ]
    for name in ("Makefile", "hashes.txt", "embedded.txt", *scripts):
        shutil.copy(ROOT / name, checkout / name)
    (checkout / "pyproject.toml").touch()
    (tmp_path / "python").write_text("#!/bin/sh\nmkdir -p dist && touch dist/tuneline-1.2.3-py3-none-any.whl\n")
    (tmp_path / "python").chmod(0o755)
    (checkout / "images" / "tiny.Containerfile").write_text(CONTAINERFILE.format(base=f"{address}/base:1"))
    (checkout / "sbom.cdx.json").write_text('{"bomFormat": "CycloneDX"}\n')
    environment = {
        **os.environ,
        "HOME": str(home),
        "BUILDAH_ISOLATION": "chroot",
        "STORAGE_DRIVER": "vfs",
        "CONTAINERS_STORAGE_CONF": str(tmp_path / "storage.conf"),
        "TMPDIR": str(tmp_path),
        "PYTHON": str(tmp_path / "python"),
    }
    server = subprocess.Popen(
        ["docker-registry", "serve", str(tmp_path / "registry.yml")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until_open(address)
        yield Registry(address, checkout, environment)
    finally:
        server.terminate()
        server.wait(timeout=30)


def wait_until_open(address: str) -> None:
    host, _, port = address.partition(":")
    for _attempt in range(100):
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    pytest.fail(f"docker-registry does not listen on {address}")


def test_base_stays_pinned_until_it_is_updated(registry: Registry) -> None:
    first = registry.push_base("one")
    result = registry.make_images()
    assert result.returncode == 0, result.stderr
    lock = registry.checkout / "images" / "bases.lock"
    assert lock.read_text().splitlines()[-1] == f"{registry.base} {first}"
    assert f"{registry.base} is now {first}. Commit this file" in result.stderr
    assert registry.base_label() == first

    second = registry.push_base("two")
    assert second != first
    result = registry.make_images()
    assert (result.returncode, result.stderr.count("bases.lock")) == (0, 0), result.stderr
    assert registry.base_label() == first

    result = registry.make_images("UPDATE_BASES=1")
    assert f"is now {second}, was {first}. Commit this file" in result.stderr
    assert registry.base_label() == second
    assert [line for line in lock.read_text().splitlines() if line[0] != "#"] == [f"{registry.base} {second}"]


def test_unknown_base_is_reported(registry: Registry) -> None:
    result = registry.make_images()
    assert result.returncode != 0
    assert f"cannot read the digest of {registry.base} from its registry" in result.stderr


def test_push_writes_bill_of_materials_and_digest(registry: Registry) -> None:
    registry.push_base("one")
    result = registry.make_images("PUSH=1")
    assert result.returncode == 0, result.stderr
    image = f"{registry.address}/tuneline/python-tiny"
    assert f"pushed {image}@{registry.digest(f'{image}:1')}\n" in result.stdout
    assert (registry.checkout / "dist" / "python-tiny.digest").read_text() == registry.digest(f"{image}:1")
    assert json.loads((registry.checkout / "dist" / "python-tiny.cdx.json").read_text()) == {"bomFormat": "CycloneDX"}


@pytest.mark.skipif(not SIGNING_SKOPEO, reason="TUNELINE_SIGNING_SKOPEO is not set to a skopeo that can sign")
def test_policy_accepts_only_signed_images(registry: Registry) -> None:
    folder, image = registry.checkout.parent, f"{registry.address}/tuneline/python-tiny"
    (folder / "passphrase").write_text("planted\n")
    key_options = ("--output-prefix", str(folder / "site"), "--passphrase-file", str(folder / "passphrase"))
    registry.output(SIGNING_SKOPEO, "generate-sigstore-key", *key_options)
    registry.push_base("one")
    sign = (f"SIGN_KEY={folder}/site.private", f"SIGN_PASSPHRASE_FILE={folder}/passphrase")
    result = registry.make_images("PUSH=1", f"SKOPEO={SIGNING_SKOPEO}", *sign)
    assert result.returncode == 0, result.stderr
    result = registry.make_images("PUSH=1", "TAG=unsigned", "ARGS=--label changed=yes")
    assert result.returncode == 0, result.stderr

    requirement = {"type": "sigstoreSigned", "keyPath": f"{folder}/site.pub"}
    policy = {"default": [{"type": "reject"}], "transports": {"docker": {registry.address: [requirement]}}}
    (folder / "policy.json").write_text(json.dumps(policy))
    (folder / "registries.d").mkdir()
    (folder / "registries.d" / "site.yaml").write_text("default-docker: {use-sigstore-attachments: true}\n")
    verify = (
        SIGNING_SKOPEO,
        "--policy",
        f"{folder}/policy.json",
        "--registries.d",
        f"{folder}/registries.d",
        "copy",
        "--quiet",
    )

    signed, unsigned = (registry.digest(f"{image}:{tag}") for tag in ("1", "unsigned"))
    registry.output(*verify, f"docker://{image}:1", f"dir:{folder}/copied")
    result = registry.run(*verify, f"docker://{image}:unsigned", f"dir:{folder}/refused")
    assert "A signature was required, but no signature exists" in result.stderr

    # The signature of one image does not verify another.
    signatures = [f"docker://{image}:{digest.replace(':', '-')}.sig" for digest in (signed, unsigned)]
    registry.output("skopeo", "copy", "--quiet", *signatures)
    result = registry.run(*verify, f"docker://{image}:unsigned", f"dir:{folder}/refused")
    assert f"Signature for digest {signed} does not match" in result.stderr
