"""docs/how-to/install.md on an empty cluster of two nodes, by the page's own commands, up to a served model, and the operation of that site.

The site adapts the overlay as the page says: one team, its addresses, storage and sizes. Images hold folders alone, so the
overlay also mounts this machine's folders. In the `stress` tier because a cluster, its servers and a whole pipeline run for minutes.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml

from components.common.artifacts.artifact_folder import MANIFEST_FILENAME, compute_manifest_sha256
from tests.deploy.rendering import DEPLOY, build_kustomization, find_kubectl
from tests.engines.chat_traffic import CLIENTS, ChatTraffic
from tests.engines.cluster import REQUIRED, Cluster
from tests.engines.host_folders import NAMESPACE, PYTHON_FOLDERS, USER, build_image_root, build_volume, make_accessible
from tests.engines.pipeline_pods import STEPS, PipelinePods, add_image, add_images
from tests.engines.second_node import FIRST_NODE, SECOND_NODE, running_second_node
from tests.pipelines.command import ROOT, answer, tuneline
from tests.pipelines.project import write_project

Json = dict[str, Any]
pytestmark = [
    pytest.mark.stress, pytest.mark.cluster, pytest.mark.pipeline, pytest.mark.daft, pytest.mark.dvc, pytest.mark.mlflow,
    pytest.mark.triton, pytest.mark.s3, pytest.mark.postgresql, REQUIRED, pytest.mark.timeout(1800),
]  # fmt: skip
PAGE = ROOT / "docs" / "how-to" / "install.md"
README = (DEPLOY / "README.md").read_text(encoding="utf-8")
OVERLAY = Path("deploy/overlays/xe9680-powerscale")
DATABASE_USER = 999
TIMEOUT_SECONDS = 400  # of a busy machine
# The entry point of the image postgres, which no package index has: a database with its owner and initial scripts.
POSTGRES_ENTRYPOINT = """#!/bin/sh
set -e
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  initdb -D "$PGDATA" -U "$POSTGRES_USER" --pwfile="$POSTGRES_PASSWORD_FILE" $POSTGRES_INITDB_ARGS
  echo "host all all all scram-sha-256" >> "$PGDATA/pg_hba.conf"
  pg_ctl -D "$PGDATA" -o "-c listen_addresses=''" -w start
  createdb -U "$POSTGRES_USER" "$POSTGRES_DB"
  for file in /docker-entrypoint-initdb.d/*.sql; do psql -v ON_ERROR_STOP=1 -U "$POSTGRES_USER" -d "$POSTGRES_DB" -f "$file"; done
  pg_ctl -D "$PGDATA" -m fast -w stop
fi
exec postgres "$@" -c listen_addresses='*'
"""
# Triton's image has a server whose backends are at their default paths.
TRITON = """#!/opt/tuneline/bin/python3
import os, sys, tempfile
from pathlib import Path
from components.triton_packaging import triton_installation
program = triton_installation.get_triton_home() / "bin" / "tritonserver"
backends = triton_installation.create_backend_folder(Path(tempfile.mkdtemp()))
os.execve(program, [program, f"--backend-directory={backends}", *sys.argv[1:]], triton_installation.build_server_environment())
"""
PROGRAMS = {
    "serving/bin/tritonserver": TRITON,
    **{f"{image}/bin/tuneline": '#!/bin/sh\nexec python3 -m pipelines.cli "$@"\n' for image in ("curation", "serving")},
    "mlflow/bin/mlflow": '#!/bin/sh\nexec python3 -m mlflow "$@"\n',
}
SMALL = {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"cpu": "2", "memory": "4Gi"}}
PROBE = Path("docs/examples/storage-probe.yaml")
MODEL = "tiny-helper"  # of the project
S3_KEYS = ("site-key", "site-secret")


@dataclass
class Site:
    """A site's copy of deploy/, and the host's folders of its volumes."""

    cluster: Cluster
    checkout: Path
    volumes: Path
    claims: dict[str, str]

    def run(self, command: str, **variables: str) -> str:
        """Run a command of the page in bash."""
        kubeconfig = {"KUBECONFIG": str(self.cluster.folder / "admin.kubeconfig")}
        result = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", command],
            cwd=self.checkout,
            env={**os.environ, **kubeconfig, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}\n{self.describe()}"
        return result.stdout

    def describe(self) -> str:
        """Return the pods and the last events."""
        return (
            self.cluster.kubectl("get", "pods", "-A")
            + self.cluster.kubectl(
                *("get", "events", "-A", "--sort-by=.lastTimestamp"),
                *("-o", "custom-columns=OBJECT:.involvedObject.name,MESSAGE:.message"),
            )[-4000:]
        )


def read_commands(heading: str) -> list[str]:
    """Return the lines of the command blocks in a section of the page."""
    section = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    (text,) = (part for part in section if part.partition("\n")[0].partition(". ")[2] == heading)
    blocks = re.findall(r"^```(?:text|sh)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def adapt_overlay(site: Path, volumes: Path, claims: dict[str, str]) -> None:
    """Change the values of the site as the page says, and add a component that mounts this machine's folders."""
    overlay = site / OVERLAY
    values = yaml.safe_load((overlay / "site.yaml").read_text())
    values["data"] |= {
        "s3-endpoint": "http://s3.storage.svc:8333",
        "database-storage-class": "disks",
        "backup-storage-class": "disks",
        "user": str(USER),
        "group": str(USER),
        "served-model": MODEL,
    }
    (overlay / "site.yaml").write_text(yaml.safe_dump(values))
    kinds = ("Deployment", "StatefulSet", "CronJob")
    workloads = [
        m
        for m in build_kustomization(overlay)
        if m["kind"] in kinds and m["metadata"]["namespace"] in ("mlflow", NAMESPACE)
    ]
    patches: list[Json] = [{"patch": json.dumps(mount_folders(manifest, claims))} for manifest in workloads]
    patches.append(build_patch("Deployment", "mlflow", {"op": "replace", "path": "/spec/replicas", "value": 1}))
    for name, folder in (("tuneline-team-a", "data"), ("corpus-team-a", "corpus")):
        removed = [{"op": "remove", "path": f"/spec/{key}"} for key in ("nfs", "mountOptions")]
        host_path = {"op": "add", "path": "/spec/hostPath", "value": {"path": str(volumes / folder)}}
        patches.append(build_patch("PersistentVolume", name, *removed, host_path))
    component = {"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component", "resources": ["volumes.yaml"]}
    (overlay / "host-folders").mkdir()
    (overlay / "host-folders" / "kustomization.yaml").write_text(yaml.safe_dump({**component, "patches": patches}))
    (overlay / "host-folders" / "volumes.yaml").write_text(yaml.safe_dump_all(build_volumes(volumes, claims)))
    kustomization = yaml.safe_load((overlay / "kustomization.yaml").read_text())
    kustomization["resources"] = [name for name in kustomization["resources"] if not name.startswith("team-b")]
    kustomization["components"].append("host-folders")
    names = [{"name": image["name"], "newName": image["newName"], "newTag": "1"} for image in kustomization["images"]]
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump({**kustomization, "images": names}))


def build_patch(kind: str, name: str, *operations: Json) -> Json:
    return {"target": {"kind": kind, "name": name}, "patch": json.dumps(operations)}


def build_volumes(volumes: Path, claims: dict[str, str]) -> list[Json]:
    """Return the volumes and claims of this machine's folders, and the volumes of the database and its backups."""
    objects = [
        part
        for namespace in ("mlflow", NAMESPACE)
        for claim, path in claims.items()
        for part in build_volume(claim, path, "ReadOnlyMany", namespace)
    ]
    for claim, mode in (("data-postgresql-0", "ReadWriteOnce"), ("mlflow-backup", "ReadWriteMany")):
        volume, _ = build_volume(claim, volumes / claim, mode, "mlflow")
        reserved = {"claimRef": {"namespace": "mlflow", "name": claim}, "capacity": {"storage": "100Gi"}}
        objects.append({**volume, "spec": {**volume["spec"], **reserved, "storageClassName": "disks"}})
    return objects


def mount_folders(manifest: Json, claims: dict[str, str]) -> Json:
    """Return a patch that mounts the claims in all containers of a workload and reduces their resources."""
    if manifest["kind"] == "CronJob":
        template = mount_folders({**manifest, "kind": "Job", "spec": manifest["spec"]["jobTemplate"]["spec"]}, claims)
        return {**template, "kind": "CronJob", "spec": {"jobTemplate": {"spec": template["spec"]}}}
    pod = manifest["spec"]["template"]["spec"]
    mounts = [{"name": claim, "mountPath": path} for claim, path in claims.items()]
    containers = {
        kind: [{"name": container["name"], "resources": SMALL, "volumeMounts": mounts} for container in pod[kind]]
        for kind in ("containers", "initContainers")
        if kind in pod
    }
    volumes = [{"name": claim, "persistentVolumeClaim": {"claimName": claim}} for claim in claims]
    metadata = {key: manifest["metadata"][key] for key in ("name", "namespace")}
    return {
        "apiVersion": manifest["apiVersion"],
        "kind": manifest["kind"],
        "metadata": metadata,
        "spec": {"template": {"spec": {**containers, "volumes": volumes}}},
    }


def add_server_images(cluster: Cluster, folder: Path, mounts: list[str]) -> None:
    """Load the images of MLflow and PostgreSQL, and add Triton's program to the serving environment."""
    environments = folder / "environments"
    add_image(cluster, folder, "mlflow", mounts)
    for program, text in PROGRAMS.items():
        (environments / program).write_text(text)
        (environments / program).chmod(0o755)
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))[-1]
    root = build_image_root(folder / "roots" / "postgres", *mounts)
    (root / "etc" / "passwd").write_text(f"postgres:x:{DATABASE_USER}:{DATABASE_USER}::/tmp:/bin/sh\n")
    (root / "entrypoint").write_text(POSTGRES_ENTRYPOINT)
    (root / "entrypoint").chmod(0o755)
    cluster.add_image(
        root, "registry.example/library/postgres:1", Entrypoint=["/entrypoint"], Env=[f"PATH={programs}:/usr/bin:/bin"]
    )


def start_s3(cluster: Cluster) -> None:
    """Start an S3 server with a bucket `mlflow`, as the site's object storage."""
    identity = {"name": "site", "credentials": [{"accessKey": S3_KEYS[0], "secretKey": S3_KEYS[1]}]}
    config = {"identities": [{**identity, "actions": ["Admin", "Read", "Write", "List"]}]}
    program = str(Path(sys.executable).with_name("weed"))
    start = [program, "server", "-dir=/tmp", "-s3", "-s3.port=8333", "-s3.config=/config/s3.json", "-ip.bind=0.0.0.0"]
    folders = {claim: path for claim, path in PYTHON_FOLDERS.items() if claim != "python"}
    pod = {
        "nodeName": FIRST_NODE,
        "containers": [
            {
                "name": "s3",
                "image": "registry.example/tuneline/python-curation:1",
                "command": [*start, "-ip=127.0.0.1", "-master.volumeSizeLimitMB=256", "-volume.max=20"],
                "volumeMounts": [
                    {"name": "config", "mountPath": "/config"},
                    *({"name": name, "mountPath": path} for name, path in folders.items()),
                ],
            }
        ],
        "volumes": [
            {"name": "config", "configMap": {"name": "s3"}},
            *({"name": name, "hostPath": {"path": path}} for name, path in folders.items()),
        ],
    }
    metadata = {"name": "s3", "namespace": "storage", "labels": {"app": "s3"}}
    objects = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "storage"}},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"s3.json": json.dumps(config)}},
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {"selector": {"app": "s3"}, "ports": [{"port": 8333}]},
        },
    ]
    cluster.kubectl("apply", "-f", "-", text=yaml.safe_dump_all(objects))
    cluster.kubectl("-n", "storage", "wait", "--for=condition=Ready", "--timeout=120s", "pod/s3")
    make_bucket = f"until echo s3.bucket.create -name mlflow | {program} shell -master=127.0.0.1:9333; do sleep 1; done"
    cluster.kubectl("-n", "storage", "exec", "s3", "--", "sh", "-c", make_bucket)


def write_platform(checkout: Path, claims: dict[str, str], project: Path) -> None:
    """Adapt the overlay's platform.yaml: images, storage, sizes, user and the secrets that the site uses."""
    platform = yaml.safe_load((checkout / OVERLAY / "platform.yaml").read_text())
    stage = {"cpu": "1500m", "memory": "4Gi", "scratch": "2Gi"}
    names = ("curation", "training", "evaluation", "serving")
    platform |= {
        "images": {name: f"registry.example/tuneline/python-{name}:1" for name in names},
        "claims": [*platform["claims"], *({"claim": claim, "mount": mount} for claim, mount in claims.items())],
        "scratch": {"mount": "/tmp"},
        "secrets": {name: value for name, value in platform["secrets"].items() if name.startswith("MLFLOW_")},
        "environment": {"MLFLOW_EXPERIMENT_NAME": NAMESPACE, "TUNELINE_THREADS": "1"},
        "network": {},
        "security": {"run_as_user": USER, "run_as_group": USER, "run_as_non_root": True},
        "resources": {
            **dict.fromkeys(("data_curation", "fine_tuning", "evaluation"), stage),
            "triton_packaging": {**stage, "shared_memory": "256Mi"},
            "others": {"cpu": "500m", "memory": "2Gi", "scratch": "1Gi"},
        },
    }
    platform["claims"][0].pop("sub_path")
    (project / "platform.yaml").write_text(yaml.safe_dump(platform))


def write_probe(checkout: Path, claims: dict[str, str]) -> None:
    """Adapt the page's example of a storage probe: sizes, and mounts of this machine's folders."""
    job = yaml.safe_load((ROOT / PROBE).read_text(encoding="utf-8"))
    pod, mounted = job["spec"]["template"]["spec"], mount_folders(job, claims)["spec"]["template"]["spec"]
    (container,), (added,) = pod["containers"], mounted["containers"]
    container |= {"resources": SMALL, "volumeMounts": container["volumeMounts"] + added["volumeMounts"]}
    pod["volumes"] += mounted["volumes"]
    (checkout / PROBE).parent.mkdir(parents=True)
    (checkout / PROBE).write_text(yaml.safe_dump(job))


def compile_pipeline(project: Path) -> str:
    """Compile the project of the volume, which pods mount at /data, with the command of the page."""
    values = {"data_curation.sources": "[/data/raw.jsonl]", "fine_tuning.base_model": "/data/tiny"}
    options = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    options += ["-c", "customization.yaml", "-p", "platform.yaml", "-o", "pipeline.yaml"]
    answer("compile", *options, cwd=project)
    return (project / "pipeline.yaml").read_text(encoding="utf-8")


def fill_in_secrets(checkout: Path) -> dict[str, str]:
    """Fill in the example secrets. Returns the passwords by user, and an API key of the gateway under `key`."""
    secrets = checkout / "deploy" / "secrets"
    values = {"admin": "password-of-the-administrator", "pipeline": "password-of-the-pipeline"}
    for example in secrets.glob("*/*.example"):
        text = example.read_text().replace("admin-password=replace-me", f"admin-password={values['admin']}")
        example.with_suffix("").write_text(text.replace("replace-me", "a-long-random-string"))
    (secrets / "mlflow" / "mlflow-s3.env").write_text("access-key={}\nsecret-key={}\n".format(*S3_KEYS))
    (secrets / "team" / "mlflow.env").write_text(f"username=pipeline\npassword={values['pipeline']}\n")
    (secrets / "team" / "keys.yaml").unlink()
    created = tuneline("keys", "create", "application", "--keys", "keys.yaml", cwd=secrets / "team")
    return {**values, "key": created.stdout.strip()}


@pytest.fixture(scope="module")
def two_nodes(cluster: Cluster) -> Iterator[Cluster]:
    with running_second_node(cluster) as running:
        yield running


@pytest.fixture(scope="module")
def site(two_nodes: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """An empty cluster with the prerequisites of the page, and the site's copy of deploy/.

    Only the serving pods, which wait for the label of serving nodes, run on the second node: it is cordoned during the installation.
    """
    cluster = two_nodes
    folder = tmp_path_factory.mktemp("installation")
    for part in ("deploy", "mlflow"):
        shutil.copytree(ROOT / part, folder / "checkout" / part, symlinks=True)
    owners = {"data": USER, "corpus": USER, "data-postgresql-0": DATABASE_USER, "mlflow-backup": USER}
    for name, owner in owners.items():
        (folder / "volumes" / name).mkdir(parents=True)
        shutil.chown(folder / "volumes" / name, owner, owner)
    claims = {**PYTHON_FOLDERS, "environments": str(folder / "environments")}
    adapt_overlay(folder / "checkout", folder / "volumes", claims)
    cluster.start_controllers("kueue")
    capacity = json.dumps({"status": {"capacity": {"nvidia.com/gpu": "8"}}})
    for node in (FIRST_NODE, SECOND_NODE):
        cluster.kubectl("patch", "node", node, "--subresource=status", "--type=merge", "-p", capacity)
    cluster.kubectl("cordon", SECOND_NODE)
    mounts = ["/data", "/corpus", *claims.values()]
    add_images(cluster, folder, mounts)
    add_server_images(cluster, folder, mounts)
    write_probe(folder / "checkout", claims)
    make_accessible(folder)
    start_s3(cluster)
    return Site(cluster, folder / "checkout", folder / "volumes", claims)


@pytest.fixture(scope="module")
def passwords(site: Site) -> dict[str, str]:
    """Run the commands of the page up to the installed servers and MLflow's users. Returns the passwords and the API key."""
    labels = [line for line in read_commands("Check the prerequisites") if line.startswith("kubectl label node")]
    for command, node in zip(labels, (FIRST_NODE, SECOND_NODE), strict=True):
        site.run(command.replace("NODE", node, 1))
    values = fill_in_secrets(site.checkout)
    certificate = re.findall(
        r"^openssl .*|^kubectl -n mlflow create secret generic postgresql-tls .*", README, re.MULTILINE
    )
    for command in [*read_commands("Create the secrets"), *certificate]:
        site.run(command)
    commands = read_commands("Apply and verify")
    start, end = (
        next(i for i, line in enumerate(commands) if line.startswith(text)) for text in ("export", "kubectl apply -f")
    )
    for command in commands[:start]:
        site.run(command)
    (site.checkout / "netrc").write_text(f"machine localhost login admin password {values['admin']}\n")
    users = "\n".join(commands[start:end]).replace("-u admin", f"-u admin:{values['admin']}")
    users = users.replace("tuneline-demo", MODEL).replace('"..."', f'"{values["pipeline"]}"')
    owner = next(line for line in users.splitlines() if line.startswith("curl")).replace("pipeline", "owner")
    with port_forward(site):
        site.run(
            users.replace("sh mlflow/grant.sh", f"{owner}\nsh mlflow/grant.sh", 1), NETRC=str(site.checkout / "netrc")
        )
    site.run(f"kubectl uncordon {SECOND_NODE}")
    return values


@contextmanager
def port_forward(site: Site) -> Iterator[None]:
    """Forward MLflow's port, with the command in a comment of the page."""
    command = ["-n", "mlflow", "port-forward", "service/mlflow", "5000"]
    assert " ".join(command) in PAGE.read_text(encoding="utf-8")
    kubeconfig = f"--kubeconfig={site.cluster.folder / 'admin.kubeconfig'}"
    with subprocess.Popen([find_kubectl(), kubeconfig, *command], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        process.stdout.readline()
        try:
            yield
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def key(site: Site, passwords: dict[str, str]) -> str:
    """The steps of the pipeline register and promote the model in MLflow; the watchers of Triton's pods serve it. Returns an API key."""
    assert "Bound" in site.run("kubectl -n team-a get persistentvolumeclaims")
    project = write_project(site.volumes / "data")
    write_platform(site.checkout, site.claims, project)
    pods = PipelinePods(site.cluster, compile_pipeline(project), project, "/data")
    subprocess.run(["chown", "-R", f"{USER}:{USER}", project], check=True)
    outputs, steps = pods.run(project / "steps")
    assert steps == STEPS
    assert outputs["verdict"] == "accepted"
    site.run("kubectl -n team-a rollout status deployment/triton")
    return passwords["key"]


def test_page_leads_from_an_empty_cluster_to_a_served_model(site: Site, key: str) -> None:
    site.run("kubectl create namespace my-application")
    label, request = read_commands("Query the model")[1:]
    site.run(label)
    site.cluster.kubectl("apply", "-f", "-", text=json.dumps(build_client()))
    site.run("kubectl -n my-application wait --for=condition=Ready pod/client")
    in_pod = f"kubectl -n my-application exec client -- env KEY={key} sh -c {shlex.quote(request)}"
    answered = json.loads(site.run(in_pod))
    assert answered["model"] == "tuneline"
    assert answered["choices"][0]["message"]["role"] == "assistant"
    refused = json.loads(site.run(in_pod.replace(key, "wrong")))
    assert refused["error"]["code"] == "invalid_api_key"


def test_probe_of_the_volume_from_two_nodes(site: Site, passwords: dict[str, str]) -> None:
    """The pods of the page's Job find each other, and report that both nodes of this test share one kernel."""
    commands = read_commands("Apply and verify")
    start = next(i for i, line in enumerate(commands) if line.startswith("kubectl apply -f"))
    for command in commands[start:]:
        log = site.run(command)
    site.run("kubectl -n team-a wait --for=condition=complete --timeout=60s job/storage-probe")
    assert "ok       hosts: storage-probe-0 and storage-probe-1, one kernel" in log
    assert f"ok       owner: storage-probe-0: user {USER}; storage-probe-1: user {USER}" in log
    assert "ok       exclusive names: exactly one participant got each of 200 names" in log
    assert "MISSING" not in log
    nodes = site.run("kubectl -n team-a get pods -l app.kubernetes.io/name=storage-probe -o jsonpath={..nodeName}")
    assert {*nodes.split()} == {FIRST_NODE, SECOND_NODE}


def test_drained_node_moves_the_pods_without_a_failed_request(site: Site, key: str) -> None:
    """Both pods are on the drained node; the PodDisruptionBudget keeps one until the other's replacement serves the model."""

    def list_pods() -> dict[str, str]:
        """Return the node of each serving pod."""
        selector = "-l app.kubernetes.io/name=triton --field-selector=status.phase=Running"
        columns = "NAME:.metadata.name,NODE:.spec.nodeName"
        text = site.run(f"kubectl -n team-a get pods {selector} --no-headers -o custom-columns={columns}")
        return dict(line.split() for line in text.splitlines())

    before = list_pods()
    assert [*before.values()] == [SECOND_NODE] * 2
    site.run(f"kubectl label node {FIRST_NODE} node.example/role=serving")
    address = site.run("kubectl -n team-a get service triton -o jsonpath={.spec.clusterIP}")
    with ChatTraffic(f"http://{address}:8000/v1", key) as traffic:
        traffic.wait_for_answers(20)
        answered = traffic.answered.copy()
        drain = site.run(f"kubectl drain {SECOND_NODE} --ignore-daemonsets --delete-emptydir-data 2>&1")
        answered = traffic.answered - answered
        site.run("kubectl -n team-a wait --for=delete --timeout=180s " + " ".join(f"pod/{name}" for name in before))
        site.run("kubectl -n team-a rollout status deployment/triton")
        traffic.wait_for_answers(20)
    assert traffic.failures == [], f"{traffic.answered}\n{drain}"
    assert {*answered} == {*CLIENTS}, answered  # during the drain
    assert "Cannot evict pod as it would violate the pod's disruption budget" in drain
    after = list_pods()
    assert [*after.values()] == [FIRST_NODE] * 2
    assert not {*before} & {*after}


def test_audit_reports_a_package_that_was_changed_in_the_bucket(
    site: Site, key: str, passwords: dict[str, str]
) -> None:
    """A job of the hourly CronJob succeeds on the promoted version, and fails after a change of the version's files."""

    def audit(name: str, condition: str) -> tuple[int, Json]:
        """Return the exit code of a job's container, and its report."""
        site.run(f"kubectl -n team-a create job {name} --from=cronjob/registry-audit")
        site.run(f"kubectl -n team-a wait --for=condition={condition} --timeout=120s job/{name}")
        status = "{.items[0].status.containerStatuses[0].state.terminated.exitCode}"
        code = site.run(f"kubectl -n team-a get pods -l job-name={name} -o jsonpath={status}")
        return int(code), json.loads(site.run(f"kubectl -n team-a logs job/{name}").splitlines()[-1])

    code, report = audit("audit-before", "complete")
    assert (code, report["findings"], report["aliases"]["champion"]) == (0, [], "1")
    (site.checkout / "netrc").write_text(f"machine localhost login admin password {passwords['admin']}\n")
    with port_forward(site):
        address = f"http://localhost:5000/api/2.0/mlflow/model-versions/get?name={MODEL}&version=1"
        version = json.loads(site.run(f"curl -fsS --netrc-file netrc '{address}'"))["model_version"]
    change_manifest(site, version["source"])
    code, report = audit("audit-after", "failed")
    (finding,) = report["findings"]
    assert (code, finding["kind"]) == (1, "digest")
    assert re.fullmatch(
        "version 1 is tagged with model digest [0-9a-f]{12}; MLflow stores model 0{12}", finding["what"]
    )


def change_manifest(site: Site, model: str) -> None:
    """Replace the manifest of a logged model in MLflow's bucket by one with another digest of the files, and a matching digest of its own."""
    address = site.run("kubectl -n storage get service s3 -o jsonpath={.spec.clusterIP}")
    bucket = boto3.client(
        "s3", endpoint_url=f"http://{address}:8333", aws_access_key_id=S3_KEYS[0], aws_secret_access_key=S3_KEYS[1]
    )
    suffix = f"/{model.removeprefix('models:/')}/artifacts/{MANIFEST_FILENAME}"
    names = [item["Key"] for item in bucket.list_objects_v2(Bucket="mlflow")["Contents"]]
    (name,) = [name for name in names if name.endswith(suffix)]
    manifest = json.loads(bucket.get_object(Bucket="mlflow", Key=name)["Body"].read())
    manifest["content_sha256"] = "0" * 64
    manifest["manifest_sha256"] = compute_manifest_sha256(manifest)
    bucket.put_object(Bucket="mlflow", Key=name, Body=json.dumps(manifest).encode())


def build_client() -> Json:
    """Return a pod with curl."""
    mount = {"name": "usr", "mountPath": "/usr"}
    container = {"name": "client", "image": "registry.example/tuneline/python-curation:1", "command": ["sleep", "600"]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "client", "namespace": "my-application"},
        "spec": {
            "nodeName": FIRST_NODE,  # a drain refuses to evict a pod without a controller
            "containers": [{**container, "volumeMounts": [mount]}],
            "volumes": [{"name": "usr", "hostPath": {"path": "/usr"}}],
        },
    }
