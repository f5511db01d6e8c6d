"""Runs the steps of a compiled pipeline as pods of a real cluster, and the images of these pods.

The pods are those of `kubeflow_pods.build_pods`, with the additions that an installation makes: the run's label and service
account, and the documented patch for a read-only root. A script replaces Kubeflow's launcher, which PyPI does not have: it
starts the step's command. Paths of outputs are on the shared volume, so that no artifact is uploaded.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
import uuid
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pipelines.kubeflow.preflight import kubeflow_pods
from tests import image_packages, kfp_launcher
from tests.engines.cluster import Cluster
from tests.engines.host_folders import NAMESPACE, USER, build_image_root
from tests.images.test_containerfiles import instruction_values
from tests.pipelines.command import ROOT
from tests.pipelines.test_pods import NAMES

Json = dict[str, Any]
ACCOUNT = "tuneline"  # run.service_account in platform.yaml
POLL_INTERVAL_SECONDS = 0.5
TIMEOUT_SECONDS = 400  # of a busy machine
STEPS = [
    "check-the-platform", "resolve", "data-curation", "data-versioning", "fine-tuning", "evaluation", "triton-packaging",
    "registration", "promotion", "report", "finish",
]  # fmt: skip


@dataclass
class PipelinePods:
    """A compiled pipeline in the team's namespace, the folder of its volume, and the pods that have ended, by step."""

    cluster: Cluster
    compiled: str
    volume: Path
    mount: str
    ended: dict[str, Json] = field(default_factory=dict)

    def kubectl(self, *arguments: str, text: str = "") -> str:
        return self.cluster.kubectl("-n", NAMESPACE, *arguments, text=text)

    def run(self, root: Path, **parameters: str) -> tuple[Json, list[str]]:
        """Run the pipeline and return its outputs and the steps in order; outputs of the steps are in `root`."""
        self.ended.clear()
        return kfp_launcher.run(self.compiled, parameters, root, partial(self.run_container, self.build_pods()))

    def build_pods(self) -> dict[str, Json]:
        """Return the pods with the account and the label of a run, and with a read-only root."""
        pods, run_id = kubeflow_pods.build_pods(self.compiled), str(uuid.uuid4())
        for pod in pods.values():
            pod["metadata"].setdefault("labels", {})["pipeline/runid"] = run_id
            pod["spec"]["serviceAccountName"] = ACCOUNT
            pod["spec"]["containers"][0]["securityContext"]["readOnlyRootFilesystem"] = True
        return pods

    def run_container(self, pods: dict[str, Json], executor: str, container: Json, work: Path) -> tuple[int, str]:
        """Run the pod of an executor with these arguments, and return the container's exit code and log."""
        shutil.chown(work.parent, USER, USER)
        name = f"{executor}-{time.monotonic_ns()}"
        (main,) = pods[executor]["spec"]["containers"]
        arguments = [argument.replace(str(self.volume), self.mount) for argument in container["args"]]
        main |= {"command": container["command"], "args": arguments}
        body = {**pods[executor], "metadata": {**pods[executor]["metadata"], "name": name}}
        self.kubectl("create", "--validate=strict", "-f", "-", text=json.dumps(body))
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while (pod := json.loads(self.kubectl("get", "pod", name, "-o", "json")))["status"]["phase"] not in (
            "Succeeded",
            "Failed",
        ):
            assert time.monotonic() < deadline, f"{pod['status']}\n{self.kubectl('get', 'events')}"
            time.sleep(POLL_INTERVAL_SECONDS)
        self.ended[executor] = pod
        (status,) = pod["status"]["containerStatuses"]
        return int(status["state"]["terminated"]["exitCode"]), self.kubectl("logs", name, "-c", "main")


def add_images(cluster: Cluster, folder: Path, mounts: list[str]) -> None:
    """Load the steps' four images and that of the launcher.

    An image's /opt/tuneline is a link to its virtual environment in `folder`/environments, one of the mounts.
    """
    image_packages.copy_packages(folder / "environments" / "tuneline")
    for name in NAMES.values():
        add_image(cluster, folder, name, mounts)
    (folder / "environments" / "serving" / "serving").symlink_to(Path(sys.prefix) / "serving")
    programs = folder / "roots" / "launcher" / "bin"
    programs.mkdir(parents=True)
    shutil.copy2(str(shutil.which("busybox")), programs / "busybox")
    (programs / "launcher-v2").write_text('#!/bin/busybox sh\nexec busybox cp /bin/launch "$2"\n')
    (programs / "launch").write_text('#!/bin/sh\nshift\nexec "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    cluster.add_image(programs.parent, kubeflow_pods.LAUNCHER_IMAGE, User=str(USER))


def add_image(cluster: Cluster, folder: Path, name: str, mounts: list[str]) -> None:
    """Load an image with the packages and the variables of its Containerfile."""
    file = ROOT / "images" / f"{name}.Containerfile"
    arguments = dict(value.split("=", 1) for value in instruction_values(file, "ARG") if "=" in value)
    environments = folder / "environments"
    extras, embedded = arguments["EXTRAS"].split(","), arguments["EMBEDDED"].strip('"').split()
    image_packages.create_environment(environments / name, environments / "tuneline", extras, embedded)
    root = build_image_root(folder / "roots" / name, *mounts)
    (root / "opt").mkdir()
    (root / "opt" / "tuneline").symlink_to(environments / name)
    settings, _ = instruction_values(file, "ENV")
    variables = [word.replace("$PATH", "/usr/local/bin:/usr/bin:/bin") for word in shlex.split(settings)]
    cluster.add_image(root, f"registry.example/tuneline/python-{name}:1", User=str(USER), Env=variables)
