"""The images built for real and run as a cluster would run them, on a Debian machine without a Docker engine.

    python -m images.check [--images curation …] [--workdir DIR] [--markdown FILE]

As root, with Debian's packages buildah and mmdebstrap, and Python 3.11. A stand-in for the public base is made of Debian 12's packages,
and every image is built on it by `make images` without an index, from what is committed. What then runs in an image runs as the image's own
user, with the image as a read-only root and no network; that this holds is tried first. The curation image curates raw rows twice: by the
command line, and as the compiled pipeline's step. Both must come to the digest that the same command has outside.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.machine import ROOT, circumstances
from components.common.places import Workdir
from components.common.progress import Silent
from images.stated import containerfile, stated
from pipelines import compiling, material, resolve
from pipelines.config import Customization
from pipelines.platform import Platform

NEEDED = ("buildah", "mmdebstrap", "unshare", "chroot")
SUITE, PYTHON = "bookworm", (3, 11)
PACKAGES = ("python3", "python3-pip", "libpython3.11", "git", "ca-certificates")  # what the public base has
BASE = "localhost/tuneline-stand-in:12"
REGISTRY, TAG = "localhost/tuneline", "check"
ROWS = 400
DATA = "/data"
# Mounts the image read-only, with what a runtime adds: /proc, four devices, and /tmp, /dev/shm and /data to write to.
CONFINE = """
root=$1 data=$2 user=$3; shift 3
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for device in null zero random urandom; do : >"$root/dev/$device"; mount --bind "/dev/$device" "$root/dev/$device"; done
mkdir "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount --bind "$data" "$root/data"
mount -o remount,bind,ro "$root"
exec chroot --userspec="$user" --groups= "$root" /usr/bin/env -i "$@"
"""
# Tried in the image: who runs it, whether anything can be written or reached, and what writing to the volume does.
PROOF = """
import errno, json, os, socket, sys
def refusal(do):
    try: do()
    except OSError as error: return errno.errorcode.get(error.errno, str(error))
    return "allowed"
places = ["/", "/opt/tuneline", "/etc", "/usr/bin", "/var/tmp"]
print(json.dumps({
    "user": [os.getuid(), os.getgid(), os.getgroups()],
    "writing": {place: refusal(lambda: open(os.path.join(place, "written"), "w")) for place in places},
    "connecting": refusal(lambda: socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5)),
    "volume": refusal(lambda: open("/data/written", "w").close()),
    "capabilities": next(line.split()[1] for line in open("/proc/self/status") if line.startswith("CapEff")),
}))
"""
EXPECTED = {"connecting": "ENETUNREACH", "volume": "allowed", "capabilities": "0" * 16}


@dataclass
class Figures:
    """What was found, for the page. Seconds by step, bytes by image."""

    seconds: dict[str, float] = field(default_factory=dict)
    size: dict[str, int] = field(default_factory=dict)
    proof: dict[str, Any] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Time a step, and say so."""
        print(f"{step} …", flush=True)
        began = time.monotonic()
        yield
        self.seconds[step] = time.monotonic() - began
        print(f"{step}: {self.seconds[step]:.0f} s", flush=True)


def main() -> None:
    """Build, run, compare, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", nargs="+", default=["curation"], help="Which to build; curation is also run.")
    parser.add_argument("--workdir", type=Path, default=Path(".tuneline/images-check"), help="Takes 10 GB and more; removed at the end.")
    parser.add_argument("--keep", action="store_true", help="Leave the workdir, so that the next run finds base and wheels there.")
    parser.add_argument("--markdown", type=Path, help="Where to write the page.")
    given = parser.parse_args()
    check_machine()
    given.workdir.mkdir(parents=True, exist_ok=True)
    figures = Figures()
    try:
        page = checked(given.images, given.workdir.resolve(), figures)
    finally:
        if not given.keep:
            shutil.rmtree(given.workdir)
    print(page)
    if given.markdown:
        given.markdown.write_text(page, encoding="utf-8")


def check_machine() -> None:
    """Say what is missing before anything is built."""
    missing = [program for program in NEEDED if not shutil.which(program)]
    if missing:
        raise SystemExit(f"{', '.join(missing)} not found: apt-get install buildah mmdebstrap")
    if os.geteuid() or sys.version_info[:2] != PYTHON:
        raise SystemExit("this needs root, for mounts and namespaces, and Python 3.11, as the stand-in base has")


def checked(images: Sequence[str], workdir: Path, figures: Figures) -> str:
    """Build these images, and run what the curation image is for. Returns the page."""
    os.environ.update(storage(workdir))
    stand_in(workdir, figures)
    for image in images:
        collect_wheels(image, workdir, figures)
        build(image, workdir, figures)
        with mounted(image) as (root, config):
            figures.size[image] = int(output("du", "-sxB1", str(root)).split()[0])
            run_it(image, root, config, workdir, figures)
    return rendered(images, figures)


def storage(workdir: Path) -> dict[str, str]:
    """Buildah without overlay mounts or user namespaces, everything under the workdir."""
    settings = workdir / "storage.conf"
    settings.write_text(f'[storage]\ndriver = "vfs"\ngraphroot = "{workdir}/storage"\nrunroot = "{workdir}/run"\n')
    (workdir / "scratch").mkdir(exist_ok=True)
    return {
        "BUILDAH_ISOLATION": "chroot",
        "STORAGE_DRIVER": "vfs",
        "CONTAINERS_STORAGE_CONF": str(settings),
        "TMPDIR": f"{workdir}/scratch",
    }


def stand_in(workdir: Path, figures: Figures) -> None:
    """A base of Debian's packages with what the public one has; kept between runs."""
    if subprocess.run(["buildah", "inspect", "--type", "image", BASE], capture_output=True, check=False).returncode == 0:
        return
    with figures.timed("stand-in base"):
        archive = workdir / "base.tar"
        call("mmdebstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, str(archive))
        (workdir / "Containerfile").write_text("FROM scratch\nADD base.tar /\n")
        call("buildah", "build", "--quiet", "--tag", BASE, "--file", str(workdir / "Containerfile"), str(workdir))
        archive.unlink()


def collect_wheels(image: str, workdir: Path, figures: Figures) -> None:
    """All that the image installs, as wheels for this Python; the image is then built without an index, as behind an air gap."""
    wanted, wheels = stated(containerfile(image)), workdir / "wheels"
    with figures.timed(f"wheels of {image}"):
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", str(wheels), "--find-links", str(wheels)]
        call(*pip, "--constraint", "constraints.txt", f".[{wanted['EXTRAS']}]")
        for name in wanted["EMBEDDED"].split():
            line = next(line for line in (ROOT / "embedded.txt").read_text().splitlines() if line.startswith(f"{name}=="))
            call(*pip, "--no-deps", line.split()[0])
        if "nvidia-pytriton" in wanted["EMBEDDED"]:
            call(*pip, "--no-deps", "numpy==1.26.4")
    for own in wheels.glob("tuneline-*.whl"):
        own.unlink()  # `make images` builds it


def build(image: str, workdir: Path, figures: Figures) -> None:
    """By `make images`, from a copy of what git holds and the wheels: the checkout itself stays as it is."""
    checkout = workdir / "checkout"
    shutil.rmtree(checkout, ignore_errors=True)
    call("git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(checkout))
    (workdir / "wheels").rename(checkout / "wheels")
    options = {"IMAGES": image, "BASE_IMAGE": BASE, "ENGINE": "buildah", "REGISTRY": REGISTRY, "TAG": TAG, "PYTHON": sys.executable}
    try:
        with figures.timed(f"image of {image}"):
            call("make", "images", *(f"{name}={value}" for name, value in options.items()), "ARGS=--pull=never --quiet", cwd=checkout)
    finally:
        (checkout / "wheels").rename(workdir / "wheels")


@contextmanager
def mounted(image: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The image's files, in a working copy, and its configuration (OCI image specification: config)."""
    name = f"{REGISTRY}/python-{image}:{TAG}"
    config = json.loads(output("buildah", "inspect", "--type", "image", name))["OCIv1"]["config"]
    container = output("buildah", "from", "--pull=never", name).strip()
    try:
        root = Path(output("buildah", "mount", container).strip())
        (root / "data").mkdir()  # as a runtime does for a volume
        yield root, config
    finally:
        call("buildah", "rm", container)


def run_it(image: str, root: Path, config: dict[str, Any], workdir: Path, figures: Figures) -> None:
    """Prove the confinement, then that the image holds what it is for."""
    volume = workdir / "data"
    shutil.rmtree(volume, ignore_errors=True)
    volume.mkdir()
    os.chown(volume, *map(int, config["User"].split(":")))
    check_labels(config)
    figures.proof[image] = confinement(root, config, volume)
    confined(root, config, volume, "tuneline", "--version")
    confined(root, config, volume, "python3", "-m", "kfp.dsl.executor_main", "--help")
    if image == "curation":
        curate(root, config, volume, figures)


def check_labels(config: dict[str, Any]) -> None:
    """Version and commit are those of the checkout."""
    commit = output("git", "-C", str(ROOT), "rev-parse", "HEAD").strip()
    labels, prefix = config["Labels"], "org.opencontainers.image."
    version = output(sys.executable, "-c", "from importlib.metadata import version; print(version('tuneline'))").strip()
    found = {name: labels[prefix + name] for name in ("version", "revision", "base.name")}
    if found != {"version": version, "revision": commit, "base.name": BASE}:
        raise SystemExit(f"the labels say {found}, the checkout is {version} at {commit}")


def confinement(root: Path, config: dict[str, Any], volume: Path) -> dict[str, Any]:
    """Try what must not work: writing anywhere but to the volume, and a connection that works outside."""
    with listening() as (host, port):
        socket.create_connection((host, port), timeout=5).close()
        found: dict[str, Any] = json.loads(confined(root, config, volume, "python3", "-c", PROOF, host, str(port)))
    user = [*map(int, config["User"].split(":")), []]
    refused = set(found["writing"].values())
    if user[0] == 0 or found["user"] != user or refused != {"EROFS"} or any(found[key] != value for key, value in EXPECTED.items()):
        raise SystemExit(f"the image is not confined as it should be: {found}")
    return found


@contextmanager
def listening() -> Iterator[tuple[str, int]]:
    """A server on an address of this machine that is not its loopback, where there is one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; tells which address would be used
        host = probe.getsockname()[0]
    with socket.create_server((host, 0)) as server:
        threading.Thread(target=lambda: server.accept(), daemon=True).start()
        yield host, server.getsockname()[1]


def curate(root: Path, config: dict[str, Any], volume: Path, figures: Figures) -> None:
    """The same rows curated outside, in the image, and in it as the step of the compiled pipeline: one digest."""
    raw, command = volume / "raw.jsonl", ["curate", "raw.jsonl", "--json", "-o"]
    write_rows(raw)
    with figures.timed("curate outside"):
        made = output(sys.executable, "-P", "-m", "pipelines.cli", *command, str(volume.parent / "outside"), "--overwrite", cwd=volume)
        outside = json.loads(made)
    with figures.timed("curate in the image"):
        inside = json.loads(confined(root, config, volume, "sh", "-c", f"cd {DATA} && exec tuneline {' '.join(command)} {DATA}/inside"))
    with figures.timed("the compiled step in the image"):
        step = compiled_step(root, config, volume, raw)
    figures.digests = {"outside": outside["sha256"], "in the image": inside["sha256"], "as the compiled step": step}
    if len(set(figures.digests.values())) != 1 or not outside["rows"]["kept"]:
        raise SystemExit(f"the digests differ, or nothing was kept: {figures.digests} {outside['rows']}")


def write_rows(path: Path) -> None:
    """Questions and answers: most to keep, every eighth a copy of another, and one line that is no JSON."""
    rows = [
        {"prompt": f"What does drawer {n % (ROWS * 7 // 8)} of the archive hold?", "completion": f"Letters of the year {1500 + n % 350}."}
        for n in range(ROWS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "no JSON\n", encoding="utf-8")


def compiled_step(root: Path, config: dict[str, Any], volume: Path, raw: Path) -> str:
    """Data curation by its own command and environment of the compiled pipeline, with a plan as `resolve` makes it. Returns the digest."""
    wanted = Customization()
    wanted.data_curation.sources = [str(raw)]
    found = material.look_at(wanted, Workdir(volume.parent / "resolve"), Silent())
    plan = resolve.plan(wanted, found, "", lambda _: None, None, []).as_json()["data_curation"].replace(str(volume), DATA)
    executor = step_of(compiling.compiled(Customization(), Platform()), "data-curation")
    variables = [f"{pair['name']}={pair['value']}" for pair in executor["env"]]
    given = json.dumps(executor_input(plan))
    arguments = [given if part == "{{$}}" else part for part in executor["args"]]
    confined(root, config, volume, *executor["command"], *arguments, variables=variables)
    return (volume / "step" / "dataset").read_text(encoding="utf-8")


def step_of(compiled: str, task: str) -> dict[str, Any]:
    """A task's container in a compiled pipeline."""
    pipeline = next(iter(yaml.safe_load_all(compiled)))
    container: dict[str, Any] = pipeline["deploymentSpec"]["executors"][f"exec-{task}"]["container"]
    return container


def executor_input(plan: str) -> dict[str, Any]:
    """What KFP's launcher hands the step: parameters, and where its outputs go (kfp_pipeline_spec: ExecutorInput)."""
    page = {"name": "report", "type": {"schemaTitle": "system.HTML"}, "uri": f"{DATA}/step/report", "metadata": {}}
    outputs = {
        "parameters": {"dataset": {"outputFile": f"{DATA}/step/dataset"}},
        "artifacts": {"report": {"artifacts": [page]}},
        "outputFile": f"{DATA}/step/executor_output.json",
    }
    return {"inputs": {"parameterValues": {"plan": plan}}, "outputs": outputs}


def confined(root: Path, config: dict[str, Any], volume: Path, *command: str, variables: Sequence[str] = ()) -> str:
    """What a command prints, run as the image's user in its environment, on a read-only root, in a network of its own without a way out."""
    spaces = ("--mount", "--net", "--ipc", "--uts", "--pid", "--fork", "--kill-child")
    there = [str(root), str(volume), config["User"], *config["Env"], *variables]
    return output("unshare", *spaces, "sh", "-euc", CONFINE, "confine", *there, *command)


def output(*command: str, cwd: Path | None = None) -> str:
    """What a command prints on standard output. SystemExit with what it said where it fails."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        shown = " ".join(command)[:200]
        raise SystemExit(f"{shown} … exited {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def call(*command: str, cwd: Path = ROOT) -> None:
    """Run a command in the checkout, its output shown. SystemExit where it fails."""
    if code := subprocess.run(command, cwd=cwd, check=False).returncode:
        raise SystemExit(f"{' '.join(command)[:300]} exited {code}")


def rendered(images: Sequence[str], figures: Figures) -> str:
    """The page: what was built and run, and the figures."""
    here = circumstances("images.check")
    rows = "\n".join(
        f"| {image} | {stated(containerfile(image))['EXTRAS']} | {figures.seconds[f'wheels of {image}']:.0f} "
        f"| {figures.seconds[f'image of {image}']:.0f} | {figures.size[image] / 2**20:.0f} |"
        for image in images
    )
    proof = next(iter(figures.proof.values()))
    digests = "\n".join(f"| {name} | {seconds(name, figures)} | `{sha256}` |" for name, sha256 in figures.digests.items())
    tried = ", ".join(f"`{place}` {told}" for place, told in proof["writing"].items())
    return PAGE.format(rows=rows, digests=digests, tried=tried, connecting=proof["connecting"], uid=proof["user"][0], gid=proof["user"][1],
        gib=here["memory"] / 2**30, packages=", ".join(PACKAGES), rows_in=ROWS + 1, **here)  # fmt: skip


def seconds(name: str, figures: Figures) -> str:
    """Of a way to curate."""
    step = {"outside": "curate outside", "in the image": "curate in the image", "as the compiled step": "the compiled step in the image"}
    return f"{figures.seconds[step[name]]:.0f}"


PAGE = """# The images, built and run

`make images-check` writes this page: `{command}`, {date}, commit {commit}, {processor}, {cores} cores, {gib:.0f} GiB, Python {python},
load {load}.

There was no Docker engine and no public registry: buildah built on a stand-in base, Debian 12 by mmdebstrap with {packages}. Every package
came from a folder of wheels, without an index, as behind an air gap.

| image | extras | wheels, s | build, s | size with base, MiB |
|---|---|---|---|---|
{rows}

In each, `tuneline --version` and KFP's executor started. The image's user was {uid}:{gid} without other groups or capabilities. Writing
failed ({tried}), and so did a connection that works outside ({connecting}). The labels name the version and the commit.

The curation image then curated {rows_in} lines under the same confinement, with a tmpfs at `/tmp` and a volume at `/data`:

| {rows_in} lines curated | s | digest of the dataset |
|---|---|---|
{digests}

The last is the command of the compiled pipeline's step with the environment that `platform.yaml`'s defaults give it.
"""

if __name__ == "__main__":
    main()
