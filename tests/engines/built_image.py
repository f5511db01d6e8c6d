"""Builds an image with the installation page's `make images` and buildah, on a stand-in base image with this machine's Python.

The packages come from the package index that pip uses, with the hashes of hashes.txt.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from images import check
from tests.pipelines.command import ROOT

PAGE = ROOT / "docs" / "how-to" / "install.md"
LIBRARIES = Path("/lib/x86_64-linux-gnu")
# Of the libraries that manylinux wheels may expect of a system: those of glibc and GCC.
WHEEL_LIBRARIES = (
    "libgcc_s.so.1",
    "libstdc++.so.6",
    "libdl.so.2",
    "libpthread.so.0",
    "librt.so.1",
    "libutil.so.1",
    "libresolv.so.2",
)
LIBRARY = f"lib/python{sys.version_info.major}.{sys.version_info.minor}"
UNUSED_MODULES = ("test", "idlelib", "*tkinter*", "turtledemo", "lib2to3", "config-*", "site-packages", "_test*", "__pycache__")  # fmt: skip


def build_image(image: str, name: str, workdir: Path) -> Path:
    """Build an image from the committed files and return its OCI archive, in which it has this name.

    The registry and the tag are those of the page, whose command builds all images of an installation.
    """
    archive = workdir / f"{image}.tar"
    (command,) = re.findall(r"^make images (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    variables = dict(word.split("=", 1) for word in shlex.split(command))
    assert variables.keys() == {"IMAGES", "REGISTRY", "TAG"}, "check.build sets them"
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in check.storage(workdir).items():
            patch.setenv(variable, value)
        for variable in ("REGISTRY", "TAG"):
            patch.setattr(check, variable, variables[variable])
        _build_base(workdir)
        figures = check.Figures()
        check.collect_wheels(image, workdir, figures)
        check.clone(workdir)
        check.build(image, workdir, figures, "image")
        check.call(
            "buildah",
            "push",
            "--quiet",
            f"{check.REGISTRY}/python-{image}:{check.TAG}",
            f"oci-archive:{archive}:{name}",
        )
    return archive


def _build_base(workdir: Path) -> None:
    """Build the stand-in base image: busybox, this Python with pip and the libraries that they need."""
    root = workdir / "base"
    prefix = root / sys.base_prefix.lstrip("/")
    shutil.copytree(Path(sys.base_prefix) / LIBRARY, prefix / LIBRARY, ignore=shutil.ignore_patterns(*UNUSED_MODULES))
    (pip,) = (prefix / LIBRARY / "ensurepip" / "_bundled").glob("pip-*.whl")
    zipfile.ZipFile(pip).extractall(prefix / LIBRARY / "site-packages")
    for folder in ("bin", "usr/bin", "etc", "tmp"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "tmp").chmod(0o1777)
    (root / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    (root / "etc" / "group").write_text("root:x:0:\n")
    shutil.copy2(str(shutil.which("busybox")), root / "bin" / "busybox")
    for applet in subprocess.run(["busybox", "--list"], capture_output=True, text=True, check=True).stdout.split():
        if applet != "busybox":
            (root / "bin" / applet).symlink_to("busybox")
    (prefix / "bin").mkdir()
    program = prefix / "bin" / Path(sys.executable).resolve().name
    shutil.copy2(Path(sys.executable).resolve(), program)
    (root / "usr" / "bin" / "python3").symlink_to(Path(sys.base_prefix) / "bin" / program.name)
    linked = subprocess.run(["ldd", program, *prefix.rglob("*.so")], capture_output=True, text=True, check=False).stdout
    for name in {*re.findall(r"(/\S+) \(0x", linked), *(str(LIBRARIES / name) for name in WHEEL_LIBRARIES)}:
        if not name.startswith(str(root)):
            (root / name[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(name, root / name[1:])
    (workdir / "Containerfile").write_text(
        "FROM scratch\nCOPY base /\nENV PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8\n"
    )
    check.call(
        "buildah", "build", "--quiet", "--tag", check.BASE, "--file", str(workdir / "Containerfile"), str(workdir)
    )
