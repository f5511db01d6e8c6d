"""Build the images and run them as a cluster would, on a Debian machine without a Docker engine.

    python -m images.check [--images curation …] [--workdir DIR] [--markdown FILE]

Requires root, Debian's packages buildah and mmdebstrap, and Python 3.11. `make images` builds every image from the committed files, without a
package index, on a stand-in for the public base image that consists of Debian 12's packages. Commands in an image run as the image's user, with the
image as a read-only root and without a network; these restrictions are tested first. An image of a stage then runs it on generated rows and a tiny
model, and the artifact must have the same digest as that of the same command outside. The curation image also runs the pipeline's step. A second
build after a commit measures how long an image takes whose package layer exists.
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
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import yaml

from benchmarks.machine import ROOT, circumstances
from components.common.runtime.reporters import SilentReporter
from components.common.workspace.artifact_store import Workdir
from components.triton_packaging import serving_env
from images.stated import containerfile, stated
from pipelines.config.customization_config import Customization
from pipelines.config.platform_config import Platform
from pipelines.definition import compilation
from pipelines.steps import curation_inputs, input_resolution
from tests.datasets import QUESTION_WORDS
from tests.tiny import tiny_model

NEEDED = ("buildah", "mmdebstrap", "unshare", "chroot")
SUITE, PYTHON = "bookworm", (3, 11)
PACKAGES = ("python3", "python3-pip", "libpython3.11", "git", "ca-certificates")  # the contents of the public base
BASE = "localhost/tuneline-stand-in:12"
REGISTRY, TAG = "localhost/tuneline", "check"
ROWS = [
    {"prompt": f"How do I {verb} a {noun}?", "completion": f"To {verb} a {noun}, open desk {len(verb + noun)}."}
    for verb, noun in QUESTION_WORDS
]
CURATION = {
    "near_duplicate_threshold": 0.95,
    "answer_min_words": 1000,
    "fractions": {"train": 0.6, "validation": 0.1, "test": 0.3},
}
TUNING = {"base_model": "tiny", "max_steps": 2, "batch_size": 4, "max_length": 96, "validation_rows": 0}


def as_options(section: str, settings: dict[str, Any]) -> list[str]:
    """Return settings as command-line options."""
    return [part for key, value in settings.items() for part in ("--set", f"{section}.{key}={json.dumps(value)}")]


# The artifact of each image's stage, and the command that creates it in the volume's folder.
STAGES = {
    "curation": ("dataset", ["curate", "raw.jsonl", *as_options("data_curation", CURATION)]),
    "training": ("model", ["finetune", "dataset", *as_options("fine_tuning", TUNING)]),
    "evaluation": ("evaluation", ["evaluate", "model", "--dataset", "dataset", "--set", "evaluation.generations=0"]),
    "serving": ("repository", ["package", "model", "--set", "triton_packaging.golden_max_tokens=2"]),
}
COMMANDS = {  # of the images without a stage
    "mlflow": ["mlflow", "--version"],
    "verification": ["tuneline", "verify", "--help"],
}
LARGEST_PACKAGES = 6
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# Mounts the image read-only, with the additions of a container runtime: /proc, four devices, /tmp and /dev/shm, a loopback interface, and the
# volume, at the same path as outside.
CONFINE = """
python=$1 root=$2 volume=$3 user=$4; shift 4
"$python" -c 'import fcntl, socket, struct; fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh", b"lo", 1))'  # SIOCSIFFLAGS, IFF_UP
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for device in null zero random urandom; do : >"$root/dev/$device"; mount --bind "/dev/$device" "$root/dev/$device"; done
mkdir "$root/dev/shm"
mount -o remount,ro "$root/dev"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mkdir -p "$root$volume"
mount --bind "$volume" "$root$volume"
mount -o remount,bind,ro "$root"
exec chroot --userspec="$user" --groups= "$root" /usr/bin/env -i --chdir="$volume" "$@"
"""
# Runs in the image and reports the user, the capabilities, and the results of writing to each folder and of connecting to a server.
PROOF = """
import errno, json, os, socket, sys
def refusal(do):
    try: do()
    except OSError as error: return errno.errorcode.get(error.errno, str(error))
    return "allowed"
places = ["/", "/opt/tuneline", "/etc", "/usr/bin", "/var/tmp", "/dev"]
print(json.dumps({
    "user": [os.getuid(), os.getgid(), os.getgroups()],
    "writing": {place: refusal(lambda: open(os.path.join(place, "written"), "w")) for place in places},
    "connecting": refusal(lambda: socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5)),
    "volume": refusal(lambda: open(os.path.join(sys.argv[3], "written"), "w").close()),
    "capabilities": next(line.split()[1] for line in open("/proc/self/status") if line.startswith("CapEff")),
}))
"""
EXPECTED = {"connecting": "ENETUNREACH", "volume": "allowed", "capabilities": "0" * 16}


@dataclass
class Figures:
    """Results for the page: seconds by step, bytes by image."""

    seconds: dict[str, float] = field(default_factory=dict)
    size: dict[str, int] = field(default_factory=dict)
    base: int = 0
    packages: dict[str, dict[str, int]] = field(default_factory=dict)
    proof: dict[str, Any] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Time a step, and print its start and duration."""
        print(f"{step} …", flush=True)
        began = time.monotonic()
        yield
        self.seconds[step] = time.monotonic() - began
        print(f"{step}: {self.seconds[step]:.0f} s", flush=True)


def main() -> None:
    """Build and run the images, compare the digests, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--images", nargs="+", default=["curation"], choices=[*STAGES, *COMMANDS], help="Images to build and run."
    )
    parser.add_argument(
        "--workdir",
        type=Path,
        default=Path(".tuneline/images-check"),
        help="Working folder, which needs at least 10 GB and is removed at the end.",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="Keep the working folder with the base image and the wheels for the next run.",
    )
    parser.add_argument("--markdown", type=Path, help="Page to write.")
    given = parser.parse_args()
    check_machine()
    given.workdir.mkdir(parents=True, exist_ok=True)
    figures = Figures()
    try:
        for done in checked(given.images, given.workdir.resolve(), figures):
            page = rendered(done, given.images[len(done) :], figures)
            if given.markdown:
                given.markdown.write_text(page, encoding="utf-8")
    finally:
        if not given.keep:
            shutil.rmtree(given.workdir)
    print(page)


def check_machine() -> None:
    """Exit with a message if a program, root or the Python version is missing."""
    missing = [program for program in NEEDED if not shutil.which(program)]
    if missing:
        raise SystemExit(f"{', '.join(missing)} not found: apt-get install buildah mmdebstrap")
    if os.geteuid() or sys.version_info[:2] != PYTHON:
        raise SystemExit(
            "images.check requires root, for mounts and namespaces, and Python 3.11, like the stand-in base image"
        )


def checked(images: Sequence[str], workdir: Path, figures: Figures) -> Iterator[Sequence[str]]:
    """Build the images one after the other and run the stage of each. Yield the completed images after each one."""
    os.environ.update(storage(workdir))
    stand_in(workdir, figures)
    volume = workdir / "data"
    shutil.rmtree(volume, ignore_errors=True)
    volume.mkdir()
    write_rows(volume / "raw.jsonl")
    tiny_model(volume / "tiny")
    with mounted(BASE) as (root, _):
        figures.base = measure_folder(root)
    for image in images:
        name = f"{REGISTRY}/python-{image}:{TAG}"
        collect_wheels(image, workdir, figures)
        checkout = clone(workdir)
        layers = build(image, workdir, figures, "image")
        commit_change(checkout)
        reused, last = build(image, workdir, figures, "next commit")[:-1], layers.pop()
        assert reused == layers, f"the second build of {image} changed more than the layer of tuneline ({last})"
        with mounted(name) as (root, config):
            figures.size[image] = measure_folder(root)
            figures.packages[image] = measure_packages(root)
            run_it(image, root, config, volume, figures)
        call("buildah", "rmi", name)
        call("buildah", "rmi", "--prune")  # one image at a time, because each needs twice its size
        yield images[: images.index(image) + 1]


def storage(workdir: Path) -> dict[str, str]:
    """Return variables for buildah without user namespaces, with all its files in the workdir."""
    settings, driver = workdir / "storage.conf", os.environ.get("STORAGE_DRIVER", "overlay")
    settings.write_text(f'[storage]\ndriver = "{driver}"\ngraphroot = "{workdir}/storage"\nrunroot = "{workdir}/run"\n')
    (workdir / "scratch").mkdir(exist_ok=True)
    return {
        "BUILDAH_ISOLATION": "chroot",
        "STORAGE_DRIVER": driver,
        "CONTAINERS_STORAGE_CONF": str(settings),
        "TMPDIR": f"{workdir}/scratch",
    }


def stand_in(workdir: Path, figures: Figures) -> None:
    """Build the stand-in base image from Debian's packages, unless an earlier run left it."""
    if (
        subprocess.run(["buildah", "inspect", "--type", "image", BASE], capture_output=True, check=False).returncode
        == 0
    ):
        return
    with figures.timed("stand-in base"):
        archive = workdir / "base.tar"
        call("mmdebstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, str(archive))
        (workdir / "Containerfile").write_text("FROM scratch\nADD base.tar /\n")
        call("buildah", "build", "--quiet", "--tag", BASE, "--file", str(workdir / "Containerfile"), str(workdir))
        archive.unlink()


def collect_wheels(image: str, workdir: Path, figures: Figures) -> None:
    """Collect all packages of the image for this Python, so that it can be built without an index, as in an air-gapped environment."""
    wanted, wheels = stated(containerfile(image)), workdir / "wheels"
    pinned = (ROOT / "embedded.txt").read_text(encoding="utf-8").splitlines()
    alone = [line.split()[0] for line in pinned if line.partition("==")[0] in wanted["EMBEDDED"].split()]
    with figures.timed(f"wheels of {image}"):
        download(
            wheels,
            "--constraint",
            "constraints.txt",
            f".[{wanted['EXTRAS']}]",
            "hatchling",
            "pip",
            "setuptools",
            "wheel",
        )
        if alone:
            download(
                wheels,
                "--no-deps",
                *alone,
                *([serving_env.NUMPY_REQUIREMENT] if "nvidia-pytriton" in wanted["EMBEDDED"] else []),
            )


def download(folder: Path, *wanted: str) -> None:
    """Add the files of these requirements to the folder, as published: a wheel built here would have another hash."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), "--find-links", str(folder)]
    if subprocess.run([*pip, "--no-index", *wanted], cwd=ROOT, capture_output=True, check=False).returncode:
        call(*pip, *wanted)


def clone(workdir: Path) -> Path:
    """Clone the repository, so that the checkout does not change."""
    checkout = workdir / "checkout"
    shutil.rmtree(checkout, ignore_errors=True)
    call("git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(checkout))
    return checkout


def commit_change(checkout: Path) -> None:
    """Commit a new file of tuneline."""
    (checkout / "tuneline" / "next_commit.py").touch()
    call("git", "add", "tuneline", cwd=checkout)
    author = ["-c", "user.name=images.check", "-c", "user.email=images.check@localhost"]
    call("git", *author, "commit", "--quiet", "--message", "Add a file", cwd=checkout)


def build(image: str, workdir: Path, figures: Figures, step: str) -> list[str]:
    """Build the image with `make images` in the clone, and return the digests of its layers."""
    checkout = workdir / "checkout"
    (workdir / "wheels").rename(checkout / "wheels")
    settings = {
        "IMAGES": image,
        "BASE_IMAGE": BASE,
        "ENGINE": "buildah",
        "REGISTRY": REGISTRY,
        "TAG": TAG,
        "PYTHON": sys.executable,
    }
    mirror = ["PIP_NO_INDEX=1", "PIP_FIND_LINKS=wheels"]
    if any((checkout / "wheels").glob("torch-*+cpu*")):  # hashes.txt has the hashes of PyPI's torch
        mirror.append(f"TORCH_INDEX_URL={CPU_TORCH_INDEX}")
    options = [f"{name}={value}" for name, value in settings.items()] + ["ARGS=--pull=never --quiet"]
    try:
        with figures.timed(f"{step} of {image}"):
            call("env", *mirror, "make", "images", *options, cwd=checkout)
    finally:
        (checkout / "wheels").rename(workdir / "wheels")
    inspected = json.loads(output("buildah", "inspect", "--type", "image", f"{REGISTRY}/python-{image}:{TAG}"))
    return list(inspected["OCIv1"]["rootfs"]["diff_ids"])


@contextmanager
def mounted(name: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield a writable copy of the image's files and its configuration (`config` in the OCI image specification)."""
    config = json.loads(output("buildah", "inspect", "--type", "image", name))["OCIv1"]["config"]
    container = output("buildah", "from", "--pull=never", name).strip()
    try:
        root = Path(output("buildah", "mount", container).strip())
        yield root, config
    finally:
        call("buildah", "rm", container)


def measure_folder(root: Path) -> int:
    """Return the bytes that a folder occupies."""
    return int(output("du", "-sxB1", str(root)).split()[0])


def measure_packages(root: Path) -> dict[str, int]:
    """Return the bytes of the files in the RECORD of each package that the build installed, largest first."""
    sizes: dict[str, int] = {}
    for package in distributions(path=[str(path) for path in root.glob("opt/tuneline/lib/python*/site-packages")]):
        files = [Path(str(file.locate())) for file in package.files or []]
        sizes[package.name] = sum(file.lstat().st_size for file in files if file.exists())
    return dict(sorted(sizes.items(), key=lambda pair: -pair[1]))


def run_it(image: str, root: Path, config: dict[str, Any], volume: Path, figures: Figures) -> None:
    """Check the restrictions, then run the image's commands and its stage."""
    check_labels(config, volume.parent / "checkout")
    belongs_to(config["User"], volume)
    figures.proof[image] = confinement(root, config, volume)
    if image in COMMANDS:
        confined(root, config, volume, *COMMANDS[image])
        return
    confined(root, config, volume, "tuneline", "--version")
    confined(root, config, volume, "python3", "-m", "kfp.dsl.executor_main", "--help")
    work(image, root, config, volume, figures)
    if image == "curation":
        with figures.timed("the compiled step"):
            step = compiled_step(root, config, volume)
        same(image, figures, "the compiled step", step)


def belongs_to(user: str, volume: Path) -> None:
    """Make the image's user the owner of the volume and its files, as on an NFS export."""
    call("chown", "--recursive", user, str(volume))


def check_labels(config: dict[str, Any], checkout: Path) -> None:
    """Check that the labels contain the version and the commit of the checkout."""
    commit = output("git", "-C", str(checkout), "rev-parse", "HEAD").strip()
    labels, prefix = config["Labels"], "org.opencontainers.image."
    version = output(sys.executable, "-c", "from importlib.metadata import version; print(version('tuneline'))").strip()
    found = {name: labels[prefix + name] for name in ("version", "revision", "base.name")}
    if found != {"version": version, "revision": commit, "base.name": BASE}:
        raise SystemExit(f"the labels are {found}; expected version {version}, revision {commit} and base {BASE}")


def confinement(root: Path, config: dict[str, Any], volume: Path) -> dict[str, Any]:
    """Check that writes outside the volume fail, and a connection that works outside the image."""
    with listening() as (host, port):
        socket.create_connection((host, port), timeout=5).close()
        found: dict[str, Any] = json.loads(
            confined(root, config, volume, "python3", "-c", PROOF, host, str(port), str(volume))
        )
    user = [*map(int, config["User"].split(":")), []]
    refused = set(found["writing"].values())
    if (
        user[0] == 0
        or found["user"] != user
        or refused != {"EROFS"}
        or any(found[key] != value for key, value in EXPECTED.items())
    ):
        raise SystemExit(f"the image does not run with the expected restrictions: {found}")
    return found


@contextmanager
def listening() -> Iterator[tuple[str, int]]:
    """Run a server on a non-loopback address of this machine, if it has one, and yield its host and port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing, but selects the local address
        host = probe.getsockname()[0]
    with socket.create_server((host, 0)) as server:
        threading.Thread(target=lambda: server.accept(), daemon=True).start()
        yield host, server.getsockname()[1]


def work(image: str, root: Path, config: dict[str, Any], volume: Path, figures: Figures) -> None:
    """Run the stage's command outside, after those of the stages before it, and in the image, and compare the digests."""
    for before in [*STAGES][: [*STAGES].index(image) + 1]:
        if before not in figures.digests:
            artifact, command = STAGES[before]
            with figures.timed(f"{before} outside"):
                started = (
                    "env",
                    f"TUNELINE_WORKDIR={volume.parent}/outside",
                    sys.executable,
                    "-P",
                    "-m",
                    "pipelines.cli",
                )
                made = output(*started, *command, "-o", artifact, "--json", cwd=volume)
            figures.digests[before] = json.loads(made)["sha256"]
    belongs_to(config["User"], volume)
    artifact, command = STAGES[image]
    with figures.timed(f"{image} in the image"):
        made = confined(root, config, volume, "tuneline", *command, "-o", f"{artifact}-of-the-image", "--json")
    same(image, figures, "the image", json.loads(made)["sha256"])


def same(image: str, figures: Figures, place: str, sha256: str) -> None:
    """Exit if the digest differs from that of the command outside."""
    if sha256 != figures.digests[image]:
        raise SystemExit(
            f"{image}: {place} produced {sha256}; the same command outside produced {figures.digests[image]}"
        )


def write_rows(path: Path) -> None:
    """Write the rows, a duplicate of every eighth row, and a line that is not JSON."""
    path.write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, *ROWS[::8]]) + "no JSON\n", encoding="utf-8")


def compiled_step(root: Path, config: dict[str, Any], volume: Path) -> str:
    """Run data curation with the command and environment of the compiled pipeline and a plan of `resolve`; return the digest."""
    wanted, platform = (
        Customization.model_validate({"data_curation": CURATION | {"sources": [str(volume / "raw.jsonl")]}}),
        Platform(),
    )
    platform.volume.mount = str(volume)
    found = curation_inputs.list_inputs(wanted, Workdir(volume.parent / "resolve"), SilentReporter())
    plans = input_resolution.build_plans(wanted, found, "", lambda _: None, None, [])
    parameters = input_resolution.list_parameters(plans.data_curation)
    executor, outputs = step_of(compilation.compile_pipeline(wanted, platform), "data-curation")
    variables = [f"{pair['name']}={pair['value']}" for pair in executor["env"]]
    given = json.dumps(executor_input(parameters, outputs, volume / "step"))
    arguments = [given if part == "{{$}}" else part for part in executor["args"]]
    confined(root, config, volume, *executor["command"], *arguments, variables=variables)
    told = json.loads((volume / "step" / "executor_output.json").read_text(encoding="utf-8"))
    return str(told["parameterValues"]["dataset"])


def step_of(compiled: str, task: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a task's container in a compiled pipeline, and its output artifacts by name."""
    pipeline = next(iter(yaml.safe_load_all(compiled)))
    container = pipeline["deploymentSpec"]["executors"][f"exec-{task}"]["container"]
    return container, pipeline["components"][f"comp-{task}"]["outputDefinitions"]["artifacts"]


def executor_input(parameters: dict[str, Any], given: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the input that KFP's launcher passes to the step: parameters and output paths (kfp_pipeline_spec: ExecutorInput)."""
    pages = {
        name: {"artifacts": [{"name": name, "type": one["artifactType"], "uri": f"{folder}/{name}", "metadata": {}}]}
        for name, one in given.items()
    }
    outputs = {
        "parameters": {"dataset": {"outputFile": f"{folder}/dataset"}},
        "artifacts": pages,
        "outputFile": f"{folder}/executor_output.json",
    }
    return {"inputs": {"parameterValues": parameters}, "outputs": outputs}


def confined(root: Path, config: dict[str, Any], volume: Path, *command: str, variables: Sequence[str] = ()) -> str:
    """Run a command as the image's user, with a read-only root and without a network, and return its output."""
    spaces = ("--mount", "--net", "--ipc", "--uts", "--pid", "--fork", "--kill-child")
    there = [sys.executable, str(root), str(volume), config["User"], *config["Env"], *variables]
    return output("unshare", *spaces, "sh", "-euc", CONFINE, "confine", *there, *command)


def output(*command: str, cwd: Path | None = None) -> str:
    """Run a command and return its standard output. Exit with its output if it fails."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        shown = " ".join(command)[:200]
        raise SystemExit(f"{shown} … exited {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def call(*command: str, cwd: Path = ROOT) -> None:
    """Run a command in the checkout and show its output. Exit if it fails."""
    if code := subprocess.run(command, cwd=cwd, check=False).returncode:
        raise SystemExit(f"{' '.join(command)[:300]} exited {code}")


def rendered(images: Sequence[str], left: Sequence[str], figures: Figures) -> str:
    """Return the page with the figures of the completed images and a list of those that are left."""
    here = circumstances("images.check")
    proof = figures.proof[images[0]]
    tried = ", ".join(f"`{place}` {told}" for place, told in proof["writing"].items())
    unfinished = f"\nNot done by this run: {', '.join(left)}.\n" if left else ""
    return PAGE.format(
        rows="\n".join(row(image, figures) for image in images), tried=tried, connecting=proof["connecting"], uid=proof["user"][0],
        gid=proof["user"][1], gib=here["memory"] / 2**30, packages=", ".join(PACKAGES),
        sizes="\n".join(format_size_row(image, figures) for image in images), left=unfinished, lines=len([*ROWS, *ROWS[::8]]) + 1, **here,
    )  # fmt: skip


def row(image: str, figures: Figures) -> str:
    """Return the row of an image in the table of builds and runs."""
    took = figures.seconds
    cells = [f"python-{image}", f"{took[f'image of {image}']:.0f}", f"{took[f'next commit of {image}']:.0f}"]
    if image in COMMANDS:
        cells += [f"`{' '.join(COMMANDS[image])}`", "—", "—", "—"]
    else:
        cells += [
            f"`tuneline {STAGES[image][1][0]}`",
            f"{took[f'{image} outside']:.0f}",
            f"{took[f'{image} in the image']:.0f}",
        ]
        cells += [f"`{figures.digests[image][:16]}…`"]
    return f"| {' | '.join(cells)} |"


def format_size_row(image: str, figures: Figures) -> str:
    """Return the row of an image in the table of sizes: MiB, and the shares of the base and of the largest packages."""
    size, packages = figures.size[image], figures.packages[image]
    largest = ", ".join(f"{name} {format_share(packages[name], size)}" for name in list(packages)[:LARGEST_PACKAGES])
    cells = [
        f"python-{image}",
        f"{size / 2**20:.0f}",
        format_share(figures.base, size),
        format_share(sum(packages.values()), size),
    ]
    return f"| {' | '.join([*cells, str(len(packages)), largest])} |"


def format_share(part: int, total: int) -> str:
    """Return a share in percent, with one digit after the point below 10 %."""
    percent = 100 * part / total
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.1f} %"


PAGE = """# Images built and run

`make images-check` writes this page with `{command}`.
Measured on {date} at commit {commit} on {processor}, {cores} cores with a load average of {load}, {gib:.0f} GiB, Python {python}.

buildah built the images without a registry, on a stand-in for the public base image: Debian 12, installed by mmdebstrap with
{packages}. All packages came from a folder of wheels, as in an air-gapped environment.

In each image, the user was {uid}:{gid} without other groups or capabilities. Writes failed
({tried}), except to `/tmp`, `/dev/shm` and the volume.
A connection that works outside the container also failed ({connecting}). The image's labels contained the version and commit.

Under these limits, each image ran the command below; stages ran on {lines} lines of data with a tiny model. The digests equal those of the same
commands run outside. The second build followed a commit of tuneline and reused the layer of the packages.

| image | build, s | second build, s | command | outside, s | in the image, s | digest, inside and outside |
|---|---|---|---|---|---|---|
{rows}
{left}
The curation image also ran the command of the compiled pipeline's curation step, in the default environment of `platform.yaml`, and produced the same
digest.

## Sizes

Sizes are uncompressed. The packages are those that the build installs; the sizes of their files are from their RECORD files. torch is the build for CPUs.

| image | MiB | base | packages | number of packages | largest packages |
|---|---|---|---|---|---|
{sizes}
"""

if __name__ == "__main__":
    main()
