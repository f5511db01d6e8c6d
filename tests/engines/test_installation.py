"""docs/how-to/install.md on an empty cluster of two nodes, by the page's own commands, up to a served model, and the operation of that site.

The site adapts the overlay as the page says: one team, its addresses, storage and sizes. Images hold folders alone, so the
overlay also mounts this machine's folders. This module runs all commands of the page except two.
test_verification_pod.py runs `make images`, for one image. `tuneline submit` needs the API server of Kubeflow Pipelines; instead,
`PipelinePods` creates the pods of the compiled files. In the `stress` tier
because a cluster, its servers and a whole pipeline run for minutes.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
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
from tests.pipelines.capture import traffic
from tests.pipelines.command import ROOT, environment, tuneline
from tests.pipelines.project import write_project
from tests.pipelines.test_pods import NAMES

Json = dict[str, Any]
pytestmark = [
    pytest.mark.stress, pytest.mark.cluster, pytest.mark.pipeline, pytest.mark.daft, pytest.mark.dvc, pytest.mark.mlflow,
    pytest.mark.triton, pytest.mark.s3, pytest.mark.postgresql, REQUIRED, pytest.mark.timeout(1800),
]  # fmt: skip
PAGE = ROOT / "docs" / "how-to" / "install.md"
OPERATIONS = (ROOT / "docs" / "how-to" / "operations.md").read_text(encoding="utf-8")
README = (DEPLOY / "README.md").read_text(encoding="utf-8")
OVERLAY = Path("deploy/overlays/xe9680-powerscale")
DATABASE_USER = 999
TIMEOUT_SECONDS = 400  # of a busy machine
KUEUE_CONFIG = """
apiVersion: config.kueue.x-k8s.io/v1beta2
kind: Configuration
integrations: {frameworks: [pod, trainer.kubeflow.org/trainjob]}
"""
# Captured traffic: 16 days until yesterday, of which the first ten are the reference of the drift check.
FIRST_DAY = datetime.now(UTC).replace(hour=9, minute=0, second=0) - timedelta(days=16)
LAST_REFERENCE_DAY = FIRST_DAY + timedelta(days=9)
CHANGED_OBJECTS = {
    "mlflow",
    "mlflow-backup",
    "registry-audit",
    "traffic-drift",
    "triton",
    "tuneline-gc",
}  # by the upgrade
ABANDONED_SECONDS = 40 * 86400  # above --older-than of the CronJob tuneline-gc
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

    def run(self, command: str, folder: Path | None = None, **variables: str) -> str:
        """Run a command of the page in bash, by default in the site's copy of deploy/."""
        kubeconfig = {"KUBECONFIG": str(self.cluster.folder / "admin.kubeconfig")}
        programs = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
        result = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", command],
            cwd=folder or self.checkout,
            env={**environment(), **programs, **kubeconfig, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}\n{self.describe()}"
        return result.stdout

    def run_cron_job(self, namespace: str, name: str, job: str, condition: str = "complete") -> str:
        """Run a job of a CronJob to its end and return its log."""
        self.run(f"kubectl -n {namespace} create job {job} --from=cronjob/{name}")
        log = f"kubectl -n {namespace} logs --all-containers job/{job}"
        wait = f"kubectl -n {namespace} wait --for=condition={condition} --timeout=180s job/{job}"
        self.run(f"{wait} || {{ {log}; exit 1; }}")
        return self.run(log)

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
        "data-repository": "data-repository",  # the default of data_versioning.repository
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
    reference_day = {"op": "replace", "path": "/spec/jobTemplate/spec/template/spec/containers/0/env/0/value"}
    patches.append(build_patch("CronJob", "traffic-drift", {**reference_day, "value": f"{LAST_REFERENCE_DAY:%F}"}))
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
    rights = site / "deploy" / "components" / "doctor" / "doctor-rbac.yaml"
    user = "{apiGroup: rbac.authorization.k8s.io, kind: User, name: ci@example.com}"
    rights.write_text(rights.read_text().replace(user, "{kind: ServiceAccount, name: doctor, namespace: default}"))


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
    (cluster.folder / "kueue-config.yaml").write_text(KUEUE_CONFIG)
    cluster.start_controllers("kueue")
    capacity = json.dumps({"status": {"capacity": {"nvidia.com/gpu": "8"}}})
    for node in (FIRST_NODE, SECOND_NODE):
        cluster.kubectl("patch", "node", node, "--subresource=status", "--type=merge", "-p", capacity)
    cluster.kubectl("cordon", SECOND_NODE)
    cluster.kubectl("taint", "nodes", FIRST_NODE, "node-role.kubernetes.io/control-plane:NoSchedule")
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
    for command, node in zip(
        read_commands("Check the prerequisites")[-3:], (FIRST_NODE, SECOND_NODE, FIRST_NODE), strict=True
    ):
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
def project(site: Site, passwords: dict[str, str]) -> Path:
    """The folder of the team's volume, which pods mount at /data: data, a base model and the page's two files."""
    project = write_project(site.volumes / "data")
    write_platform(site.checkout, site.claims, project)
    customization = yaml.safe_load((project / "customization.yaml").read_text())
    customization["data_curation"]["sources"] = ["/data/raw.jsonl"]
    customization["fine_tuning"]["base_model"] = "/data/tiny"
    customization["model_registry"]["auto_promote"] = False
    (project / "customization.yaml").write_text(yaml.safe_dump(customization))
    return project


@pytest.fixture(scope="module")
def key(site: Site, passwords: dict[str, str], project: Path) -> str:
    """The steps of both pipelines register and promote the model in MLflow; the watchers of Triton's pods serve it. Returns an API key."""
    assert "Bound" in site.run("kubectl -n team-a get persistentvolumeclaims")
    compile_pipeline, _, compile_promotion, submit_promotion = read_commands("Train and promote the first model")
    site.run(compile_pipeline, project)
    site.run(compile_promotion, project)
    subprocess.run(["chown", "-R", f"{USER}:{USER}", project], check=True)
    pods = PipelinePods(site.cluster, (project / "pipeline.yaml").read_text(), project, "/data")
    outputs, steps = pods.run(project / "steps")
    assert steps == STEPS
    assert outputs["verdict"] == "accepted"
    assert {pod["metadata"]["labels"].get("kueue.x-k8s.io/managed") for pod in pods.ended.values()} == {"true"}
    promotion = PipelinePods(site.cluster, (project / "promotion.yaml").read_text(), project, "/data")
    _, steps = promotion.run(project / "promotion", **dict(re.findall(r"--param (\w+)=(\S+)", submit_promotion)))
    assert steps == ["promote", "finish"]
    site.run("kubectl -n team-a rollout status deployment/triton")
    return passwords["key"]


def test_checks_of_the_prerequisites_and_of_the_manifests(site: Site) -> None:
    """Of the custom resources, this cluster has only Kueue's."""
    version, _, nodes, _, kinds = map(site.run, read_commands("Check the prerequisites")[:-3])
    assert "Server Version: v1." in version
    assert [line.split() for line in nodes.splitlines()[1:]] == [[FIRST_NODE, "8"], [SECOND_NODE, "8"]]
    assert [line.split()[0] for line in kinds.splitlines()] == ["NAME", "clusterqueues.kueue.x-k8s.io"]
    (show,) = read_commands("Adapt the overlay")
    assert [*yaml.safe_load_all(site.run(show))] == build_kustomization(site.checkout / OVERLAY)


def test_doctor_reports_only_what_this_cluster_lacks(site: Site, project: Path) -> None:
    """An account with the rights of components/doctor runs it. The cluster has neither Kubeflow Pipelines nor an image registry."""
    site.run("kubectl -n default create serviceaccount doctor")
    config = json.loads((site.cluster.folder / "admin.kubeconfig").read_text())
    config["users"][0]["user"] = {"token": site.run("kubectl -n default create token doctor").strip()}
    config["contexts"][0]["context"]["namespace"] = NAMESPACE
    kubeconfig = site.checkout / "doctor.kubeconfig"
    kubeconfig.write_text(json.dumps(config))
    (doctor,) = read_commands("Check the cluster")
    report = site.run(doctor, project, KUBECONFIG=str(kubeconfig))
    findings = re.findall(r"^(ok|warning|MISSING) +(.+?): ", report, re.MULTILINE)
    images = {f"image registry.example/tuneline/python-{name}:1" for name in NAMES.values()}
    assert {name for mark, name in findings if mark != "ok"} == {"Kubeflow Pipelines", *images}, report
    assert "system:serviceaccount:default:doctor, in the namespace team-a" in report
    passed = {
        "pod dry run",
        "Kueue and pods",
        "queue team-a",
        "claim tuneline",
        "claim corpus",
        "secret mlflow",
        "MLflow",
    }
    assert passed <= {name for mark, name in findings if mark == "ok"}, report


def test_page_leads_from_an_empty_cluster_to_a_served_model(site: Site, key: str) -> None:
    site.run("kubectl create namespace my-application")
    follow, label, request = read_commands("Query the model")
    assert f"{MODEL} version 1 is served as tuneline" in site.run(f"timeout 5 {follow} || [ $? = 124 ]")
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


def test_jobs_of_the_housekeeping_cron_jobs_complete(site: Site, key: str) -> None:
    """Garbage collection deletes an old checkpoint and keeps the champion; the backup has the registry; the traffic has not drifted."""
    data = site.volumes / "data"
    checkpoint = data / "tuneline" / "state" / "fine_tuning" / "abandoned" / "checkpoint"
    checkpoint.parent.mkdir()
    checkpoint.write_text("old")
    old = datetime.now(UTC).timestamp() - ABANDONED_SECONDS
    os.utime(checkpoint, (old, old))
    manifests = {path.parent.name: json.loads(path.read_text()) for path in data.glob("tuneline/store/*/manifest.json")}
    (model,) = [name for name, manifest in manifests.items() if manifest["schema"].startswith("tuneline/model/")]
    (data / "traffic").mkdir()
    traffic.write_questions(data / "traffic", FIRST_DAY, days=16, a_day=50, model_sha256=model)
    for folder in (checkpoint.parent, data / "traffic"):
        subprocess.run(["chown", "-R", f"{USER}:{USER}", folder], check=True)

    collected = json.loads(site.run_cron_job("team-a", "tuneline-gc", "gc").splitlines()[-1])
    assert [(item["path"], item["deleted"]) for item in collected["items"]] == [
        ("/data/tuneline/state/fine_tuning/abandoned", True)
    ]
    assert not checkpoint.parent.exists()
    assert any("champion" in kept["reason"] for kept in collected["kept"]), collected

    drift = json.loads(site.run_cron_job("team-a", "traffic-drift", "drift").splitlines()[-1])
    assert (drift["alarm"], [window["n"] for window in drift["windows"]]) == (False, [200]), drift
    assert (data / "traffic" / "drift-report" / "drift.html").is_file()

    name = Path(site.run_cron_job("mlflow", "mlflow-backup", "backup").splitlines()[-1]).name
    dump = site.volumes / "mlflow-backup" / name / "mlflow.dump"
    restore = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_restore"))[-1]
    aliases = site.run(f"{restore} --data-only --table=registered_model_aliases -f - {dump}")
    assert re.search(rf"^champion\t1\t{MODEL}\t", aliases, re.MULTILINE), aliases


def test_upgrade_and_rollback_without_a_failed_request(site: Site, key: str) -> None:
    """The steps of docs/how-to/operations.md, with another tag of the same images and another value of site.yaml."""
    section = OPERATIONS.partition("### MLflow\n")[2].partition("\n## ")[0]
    back_up, stop_mlflow, _, wait_for_mlflow = re.findall(r"`(kubectl [^`]+)`", section)
    (show_changes,) = re.findall(r"`(kubectl diff .+?)`", OPERATIONS)
    _, apply, *_ = read_commands("Apply and verify")
    files = [site.checkout / OVERLAY / name for name in ("kustomization.yaml", "site.yaml")]
    former = [file.read_text() for file in files]
    kustomization, values = map(yaml.safe_load, former)
    for image in kustomization["images"]:
        if "tuneline/" in image["name"]:
            tag_image(site.cluster, f"{image['newName']}:1", f"{image['newName']}:2")
            image["newTag"] = "2"
    values["data"]["mlflow-host"] = "second.example"

    def roll_out(kustomization: str, values: str) -> tuple[Counter[str], set[str], str]:
        """Apply a revision. Returns the number of answers by client meanwhile, the images of Triton's pods, and MLflow's host."""
        before = chat.answered.copy()
        for file, text in zip(files, (kustomization, values), strict=True):
            file.write_text(text)
        changes = site.run(f"{show_changes.replace('OVERLAY', str(OVERLAY))} || [ $? = 1 ]")
        assert {*re.findall(r"^diff .*/LIVE-\d+/\S+\.([\w-]+) /", changes, re.MULTILINE)} == CHANGED_OBJECTS, changes
        site.run(stop_mlflow)
        assert site.run("kubectl -n mlflow get pods -l app.kubernetes.io/name=mlflow -o name") == ""
        site.run(apply)
        site.run(wait_for_mlflow)
        site.run("kubectl -n team-a rollout status deployment/triton")
        pods = json.loads(site.run("kubectl -n team-a get pods -l app.kubernetes.io/name=triton -o json"))["items"]
        active = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        ended = [f"pod/{pod['metadata']['name']}" for pod in pods if pod not in active]
        assert len(active) == 2
        site.run(f"kubectl -n team-a wait --for=delete --timeout=180s {' '.join(ended)}" if ended else "true")
        images = {container["image"] for pod in active for container in pod["spec"]["containers"]}
        host = site.run("kubectl -n mlflow exec deployment/mlflow -- printenv PUBLIC_HOST").strip()
        chat.wait_for_answers(20)
        return chat.answered - before, images, host

    site.run(back_up)
    site.run("kubectl -n mlflow wait --for=condition=complete --timeout=180s job/before")
    address = site.run("kubectl -n team-a get service triton -o jsonpath={.spec.clusterIP}")
    with ChatTraffic(f"http://{address}:8000/v1", key) as chat:
        chat.wait_for_answers(20)
        answered, *upgraded = roll_out(yaml.safe_dump(kustomization), yaml.safe_dump(values))
        audit = json.loads(site.run_cron_job("team-a", "registry-audit", "audit-upgraded").splitlines()[-1])
        answered_later, *rolled_back = roll_out(*former)
    assert chat.failures == [], chat.answered
    assert {*answered} == {*answered_later} == {*CLIENTS}
    assert upgraded == [{"registry.example/tuneline/python-serving:2"}, "second.example"]
    assert rolled_back == [{"registry.example/tuneline/python-serving:1"}, "mlflow.example"]
    assert audit["findings"] == []


def test_lost_databases_are_restored_from_the_backup(site: Site, key: str) -> None:
    """The steps of docs/how-to/operations.md, with the backup that preceded the upgrade."""
    section = OPERATIONS.partition("## Restore\n")[2].partition("\n## ")[0]
    (suspend,) = re.findall(r"`(kubectl .+ patch [^`]+)`", section)
    (block,) = re.findall(r"```text\n +(kubectl .*?)\n +```", section, re.DOTALL)
    (stop_mlflow,) = re.findall(r"`(kubectl -n mlflow delete [^`]+)`", OPERATIONS)
    _, apply, wait_for_mlflow, *_ = read_commands("Apply and verify")
    *_, backup = sorted(path.name for path in (site.volumes / "mlflow-backup").iterdir())
    site.run(stop_mlflow)
    site.run(suspend)
    for name in ("mlflow", "mlflow_auth"):
        statements = f"-c 'DROP DATABASE {name}' -c 'CREATE DATABASE {name}'"
        site.run(f"kubectl -n mlflow exec postgresql-0 -- psql -U mlflow -d postgres {statements}")
    for command in block.replace("\\\n", " ").splitlines():
        site.run(command.replace("TIME", backup))
    site.run(apply)
    site.run(wait_for_mlflow)
    report = json.loads(site.run_cron_job("team-a", "registry-audit", "audit-restored").splitlines()[-1])
    assert (report["findings"], report["aliases"]["champion"]) == ([], "1")
    site.run(suspend.replace("true", "false"))


def tag_image(cluster: Cluster, name: str, added: str) -> None:
    """Give an image of the nodes another name."""
    for folder in filter(None, (cluster.folder, cluster.second_folder)):
        ctr = ["ctr", "-a", str(folder / "containerd.sock"), "-n", "k8s.io", "images"]
        subprocess.run([*ctr, "tag", name, added], capture_output=True, check=True)


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
        log = site.run_cron_job("team-a", "registry-audit", name, condition)
        status = "{.items[0].status.containerStatuses[0].state.terminated.exitCode}"
        code = site.run(f"kubectl -n team-a get pods -l job-name={name} -o jsonpath={status}")
        return int(code), json.loads(log.splitlines()[-1])

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
