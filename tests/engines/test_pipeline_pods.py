"""The whole pipeline as pods of a real cluster, to the digests of a run on this machine.

In the `stress` tier because a cluster starts and 24 steps run in pods.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from components.common.artifacts import artifact_folder
from components.common.runtime import cpu_cores
from tests.deploy.rendering import render_overlay
from tests.engines.cluster import REQUIRED, Cluster
from tests.engines.host_folders import NAMESPACE, PYTHON_FOLDERS, USER, build_volume, make_accessible
from tests.engines.pipeline_pods import ACCOUNT, STEPS, PipelinePods, add_images
from tests.pipelines.project import run, write_project
from tests.pipelines.test_pods import NAMES, compile_project, list_manifests

Json = dict[str, Any]
pytestmark = [
    pytest.mark.stress, pytest.mark.cluster, pytest.mark.pipeline, pytest.mark.daft, pytest.mark.dvc, pytest.mark.mlflow,
    pytest.mark.triton, REQUIRED, pytest.mark.timeout(1800),
]  # fmt: skip
TEAM_KINDS = ("ServiceAccount", "Role", "RoleBinding", "NetworkPolicy")
TOKEN = "hf_" + "a1b2" * 8
# Writes what the container's process has, not what its specification requests.
PROBE = """
import json, os, tempfile
from pathlib import Path
from components.common.runtime import cpu_cores
status = dict(line.split(":\\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
try:
    root = Path("/probe").write_text("")
except OSError as error:
    root = error.strerror
print(json.dumps({
    "token": os.environ["HF_TOKEN"], "ids": [os.getuid(), os.getgid()], "temporary": tempfile.gettempdir(),
    "cores": cpu_cores.count_available_cores(), "capabilities": int(status["CapBnd"], 16),
    "privileges": status["NoNewPrivs"], "seccomp": status["Seccomp"], "root": root,
    "shared memory": os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize,
}))
"""


def write_platform(project: Path, claims: dict[str, str]) -> None:
    """Write the platform.yaml of a restricted namespace, with a writable /tmp below the read-only root."""
    stage = {"cpu": "1500m", "memory": "4Gi", "scratch": "2Gi"}
    platform = {
        "images": {name: f"registry.example/tuneline/python-{name}:1" for name in NAMES.values()},
        "volume": {"claim": "tuneline", "mount": str(project), "folder": "pods"},
        "claims": [{"claim": claim, "mount": mount} for claim, mount in claims.items()],
        "scratch": {"mount": "/tmp"},
        "secrets": {"HF_TOKEN": {"name": "hugging-face", "key": "token"}},
        "environment": {"TUNELINE_THREADS": str(cpu_cores.get_thread_count())},
        "security": {"run_as_user": USER, "run_as_group": USER, "run_as_non_root": True},
        "resources": {
            **dict.fromkeys(("data_curation", "fine_tuning", "evaluation"), stage),
            "triton_packaging": {**stage, "shared_memory": "256Mi"},
            "others": {"cpu": "1", "memory": "2Gi", "scratch": "1Gi"},
        },
        "run": {"service_account": ACCOUNT},
    }
    (project / "platform.yaml").write_text(yaml.safe_dump(platform))


@pytest.fixture(scope="module")
def local_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Future[Json]]:
    """The JSON result of a run of the same project on this machine, beside the first run in pods, which often waits."""
    project = write_project(tmp_path_factory.mktemp("local-run"))
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(run, project, "wd", preloaded=False)


@pytest.fixture(scope="module")
def team(local_run: Future[Json], cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> PipelinePods:
    """A namespace with the objects of deploy/, images, volumes, the secret and a compiled project."""
    folder = tmp_path_factory.mktemp("pipeline-pods")
    (folder / "project").mkdir()
    project = write_project(folder / "project")
    claims = {**PYTHON_FOLDERS, "environments": str(folder / "environments")}
    write_platform(project, claims)
    compiled = compile_project(project)
    add_images(cluster, folder, [str(project), *claims.values()])
    subprocess.run(["chown", "-R", f"{USER}:{USER}", project], check=True)
    make_accessible(folder)
    overlay = render_overlay("xe9680-powerscale")
    objects = [m for m in overlay if m["kind"] == "Namespace" and m["metadata"]["name"] == NAMESPACE]
    objects += [m for m in overlay if m["kind"] in TEAM_KINDS and m["metadata"].get("namespace") == NAMESPACE]
    objects += build_volume("tuneline", project, "ReadWriteMany")
    objects += [part for claim, path in claims.items() for part in build_volume(claim, path, "ReadOnlyMany")]
    cluster.kubectl("apply", "--server-side", "--validate=strict", "-f", "-", text=yaml.safe_dump_all(objects))
    pods = PipelinePods(cluster, compiled, project, str(project))
    set_token(pods, TOKEN)
    return pods


def set_token(team: PipelinePods, token: str) -> None:
    """Write the secret from which the pods get HF_TOKEN."""
    manifest = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hugging-face"}}
    team.kubectl("apply", "-f", "-", text=json.dumps({**manifest, "stringData": {"token": token}}))


class FirstRun(NamedTuple):
    """The outputs, the steps, the ended pods by step, and the folder with the output files of each step."""

    outputs: Json
    steps: list[str]
    ended: dict[str, Json]
    root: Path


@pytest.fixture(scope="module")
def first_run(team: PipelinePods) -> FirstRun:
    root = team.volume / "first"
    outputs, steps = team.run(root)
    return FirstRun(outputs, steps, dict(team.ended), root)


def test_pods_give_the_digests_of_a_run_on_this_machine(
    first_run: FirstRun, local_run: Future[Json], team: PipelinePods
) -> None:
    outputs, local = first_run.outputs, local_run.result()
    digests = {kind: artifact_folder.read(Path(path), kind).sha256 for kind, path in local["artifacts"].items()}
    assert first_run.steps == STEPS
    assert {kind: outputs[kind] for kind in digests if kind != "repository"} == {
        kind: digest for kind, digest in digests.items() if kind != "repository"
    }
    assert outputs["verdict"] == local["verdict"] == "accepted"
    stored = {Path(name).name for name, _ in list_manifests(team.volume)}
    assert stored == set(digests.values()), "no other artifact was built"


def test_restricted_level_admits_the_pods_and_refuses_wider_ones(first_run: FirstRun, team: PipelinePods) -> None:
    ended = first_run.ended
    assert list(ended) == STEPS
    assert {pod["status"]["phase"] for pod in ended.values()} == {"Succeeded"}
    assert {pod["spec"]["serviceAccountName"] for pod in ended.values()} == {ACCOUNT}
    assert TOKEN not in json.dumps(ended)
    wider = team.build_pods()["resolve"]
    del wider["spec"]["containers"][0]["securityContext"]["runAsNonRoot"]
    with pytest.raises(AssertionError, match='violates PodSecurity "restricted:latest": runAsNonRoot != true'):
        team.kubectl("create", "--dry-run=server", "-f", "-", text=json.dumps(wider))


def test_first_step_confirms_volume_secret_and_account_of_the_pod(first_run: FirstRun, team: PipelinePods) -> None:
    page = (first_run.root / "check-the-platform" / "found").read_text(encoding="utf-8")
    assert f"| ok | volume at {team.volume} | mounted |" in page
    assert "| ok | variable HF_TOKEN | is set |" in page
    assert "| ok | temporary files | /tmp |" in page
    assert f"| ok | service account | system:serviceaccount:{NAMESPACE}:tuneline |" in page
    assert TOKEN not in page


def test_process_of_a_step_has_the_limits_and_the_secret(team: PipelinePods, tmp_path: Path) -> None:
    pods = team.build_pods()
    container = pods["triton-packaging"]["spec"]["containers"][0]
    probe = {"command": [*container["command"][:2], "python3", "-c", PROBE], "args": []}
    exit_code, log = team.run_container(pods, "triton-packaging", {**container, **probe}, tmp_path / "cwd")
    assert exit_code == 0, log
    assert json.loads(log) == {
        "token": TOKEN,
        "ids": [USER, USER],
        "temporary": "/tmp",
        "cores": 2,
        "capabilities": 0,
        "privileges": "1",
        "seccomp": "2",
        "root": "Read-only file system",
        "shared memory": 256 * 2**20,
    }


def test_failed_step_ends_the_run_with_its_exit_code_and_message(team: PipelinePods) -> None:
    set_token(team, f"{TOKEN}\n")
    try:
        with pytest.raises(AssertionError) as raised:
            team.run(team.volume / "failed")
    finally:
        set_token(team, TOKEN)
    refusal = str(raised.value)
    assert refusal.startswith("check-the-platform ended with 1:\n")
    assert "variable HF_TOKEN: begins or ends with a space or a line break" in refusal
    assert TOKEN not in refusal
    phases = {step: pod["status"]["phase"] for step, pod in team.ended.items()}
    assert phases == {"check-the-platform": "Failed", "finish": "Succeeded"}
    page = (team.volume / "failed" / "finish" / "page").read_text(encoding="utf-8")
    assert "Check the platform: failed" in page
    assert "variable HF_TOKEN: begins or ends with a space or a line break" in page
    assert TOKEN not in page


def test_second_run_takes_every_artifact_from_the_store(first_run: FirstRun, team: PipelinePods) -> None:
    before = list_manifests(team.volume)
    outputs, steps = team.run(team.volume / "second")
    assert steps == STEPS
    assert {kind: outputs[kind] for kind in ("dataset", "version", "model")} == {
        kind: first_run.outputs[kind] for kind in ("dataset", "version", "model")
    }
    assert list_manifests(team.volume) == before
