"""The overlays of deploy/ on a real API server, with the controllers of Kubernetes, Kueue, Trainer and KubeRay but without a node.

The API server validates strictly, enforces the restricted Pod Security level on the pods that its controllers create, and
evaluates the rights and the admission policies. The tests are in the `long` tier because the cluster needs a minute to start.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from components.common.launch import Command
from components.common.launch.kubernetes import job_manifests, kubernetes_client
from components.common.launch.launcher_settings import LauncherSettings
from components.common.runtime.errors import ConfigurationError
from pipelines.definition import pod_spec
from pipelines.steps import step_launcher
from tests.deploy.rendering import DEPLOY, OVERLAYS, load_overlay_platform, render_overlay, render_with_optional
from tests.deploy.test_chart import CHART, read_values
from tests.deploy.test_rights import REASONS
from tests.engines import cluster as cluster_kit
from tests.engines.cluster import REQUIRED, Cluster

Json = dict[str, Any]
pytestmark = [pytest.mark.long, pytest.mark.cluster, REQUIRED]
TEAM = "team-a"
ACCOUNT = f"system:serviceaccount:{TEAM}:tuneline"
TIMEOUT_SECONDS = 120  # of a busy machine
# Namespaces that other projects create, and the overlays that need them. The optional components need `monitoring`.
PREREQUISITES = {"kubeflow": ["one-gpu-node"], "gpu-operator": ["shared-gpus"], "monitoring": []}


@pytest.fixture(scope="module")
def api_server() -> Iterator[Cluster]:
    """A cluster without a node."""
    with cluster_kit.running_cluster(Path(os.environ[cluster_kit.KIT_VARIABLE]), node=False) as running:
        running.start_controllers("jobset", "trainer", "ray", "kueue")
        for namespace in PREREQUISITES:
            running.kubectl("create", "namespace", namespace)
        yield running


def wait_until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.5)


def wait_for_pods(cluster: Cluster, owner: Json, selector: str) -> None:
    wait_until(lambda: read(cluster, "pods", "-n", owner["namespace"], "-l", selector), f"{owner['name']} has no pods")


def read(cluster: Cluster, *arguments: str) -> list[Json]:
    items: list[Json] = json.loads(cluster.kubectl("get", *arguments, "-o", "json"))["items"]
    return items


def apply(cluster: Cluster, overlay: str) -> None:
    folder = str(DEPLOY / "overlays" / overlay)
    cluster.kubectl("apply", "--server-side", "--validate=strict", "-k", folder)


def edit(path: str, value: Any) -> Callable[[Json], None]:
    """Return a change of a manifest: set the value at a dotted path, whose numbers are indices of lists."""

    def change(manifest: Json) -> None:
        *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        target: Any = manifest
        for part in parents:
            target = target[part]
        if isinstance(target, list):
            target.append(value)
        else:
            target[last] = value

    return change


JOB_TEMPLATE = "spec.runtimePatches.0.trainingRuntimeSpec.template.spec.replicatedJobs.0.template.spec.template"
JOB_POD, JOB_METADATA = f"{JOB_TEMPLATE}.spec", f"{JOB_TEMPLATE}.metadata"
HEAD_POD = "spec.rayClusterSpec.headGroupSpec.template.spec"
WORKER_POD = "spec.rayClusterSpec.workerGroupSpecs.0.template.spec"
HOST_PATH = {"name": "host", "hostPath": {"path": "/"}}
SECRET_VARIABLE = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "mlflow", "key": "password"}}}
ATTACKS = {
    "trainjob": {
        "another image": (edit("spec.trainer.image", "evil.example/x:1"), "image evil.example/x:1 is not listed"),
        "another runtime": (
            edit("spec.runtimeRef.name", "torch-distributed"),
            "runtime ClusterTrainingRuntime/torch-distributed",
        ),
        "a secret as a variable": (edit("spec.trainer.env", [SECRET_VARIABLE]), "variables must have values"),
        "a secret of an initializer": (
            edit("spec.initializer", {"dataset": {"secretRef": {"name": "mlflow"}, "storageUri": "hf://a/b"}}),
            "only the runtime, the trainer",
        ),
        "another account": (
            edit(f"{JOB_POD}.serviceAccountName", "default-editor"),
            "service account of the pods is not listed",
        ),
        "a host path": (edit(f"{JOB_POD}.volumes.0", HOST_PATH), "volumes must be claims"),
        "a secret as a volume": (
            edit(f"{JOB_POD}.volumes.0", {"name": "s", "secret": {"secretName": "mlflow"}}),
            "volumes must be claims",
        ),
        "another claim": (
            edit(f"{JOB_POD}.volumes.0", {"name": "c", "persistentVolumeClaim": {"claimName": "payroll"}}),
            "volumes must be claims",
        ),
        "another pull secret": (edit(f"{JOB_POD}.imagePullSecrets.0", {"name": "mlflow"}), "pull secret is not listed"),
        "an init container": (
            edit(f"{JOB_POD}.initContainers", [{"name": "x"}]),
            "patches of pods may not add init containers",
        ),
        "a variable in a patch": (
            edit(f"{JOB_POD}.containers.0.env", [SECRET_VARIABLE]),
            "patches of pods may not add",
        ),
        "privileges": (
            edit(f"{JOB_POD}.containers.0.securityContext.privileged", True),
            "must forbid privilege escalation",
        ),
        "root": (edit(f"{JOB_POD}.securityContext.runAsNonRoot", False), "other than root"),
        "no limit of system calls": (
            edit(f"{JOB_POD}.securityContext.seccompProfile", {"type": "Unconfined"}),
            "other than root",
        ),
        "an empty account": (edit(f"{JOB_POD}.serviceAccountName", ""), "service account of the pods is not listed"),
        "the image of the runtime": (edit("spec.trainer.image", ""), "is not listed under images"),
        "the pods of the runtime": (edit("spec.runtimePatches", []), "must set the pods of the runtime's job node"),
        "another job of the runtime": (
            edit("spec.runtimePatches.0.trainingRuntimeSpec.template.spec.replicatedJobs.0.name", "other"),
            "must set the pods of the runtime's job node",
        ),
        "the security context of the runtime": (edit(f"{JOB_POD}.containers", []), "must set the container node only"),
        "a label that a Service selects": (
            edit(f"{JOB_METADATA}.labels", {"app.kubernetes.io/name": "triton"}),
            "a label or an annotation",
        ),
        "an annotation that a webhook reads": (
            edit(f"{JOB_METADATA}.annotations", {"sidecar.istio.io/userVolume": "[]"}),
            "a label or an annotation",
        ),
        "a capability": (
            edit(f"{JOB_POD}.containers.0.securityContext.capabilities.add", ["SYS_ADMIN"]),
            "must forbid privilege escalation",
        ),
    },
    "rayjob": {
        "another image": (edit(f"{WORKER_POD}.containers.0.image", "evil.example/x:1"), "evil.example/x:1"),
        "a second container": (
            edit(f"{HEAD_POD}.containers.1", {"name": "x", "image": "evil.example/x:1"}),
            "evil.example/x:1",
        ),
        "an init container": (
            edit(f"{HEAD_POD}.initContainers", [{"name": "x", "image": "evil.example/x:1"}]),
            "no init containers",
        ),
        "the network of the host": (edit(f"{WORKER_POD}.hostNetwork", True), "no access to the host"),
        "a token": (edit(f"{HEAD_POD}.automountServiceAccountToken", True), "no token of their service account"),
        "a node": (edit(f"{WORKER_POD}.nodeName", "control-plane"), "no access to the host"),
        "a secret as a variable": (
            edit(f"{HEAD_POD}.containers.0.env.0", SECRET_VARIABLE),
            "variables must have values",
        ),
        "all keys of a secret": (
            edit(f"{HEAD_POD}.containers.0.envFrom", [{"secretRef": {"name": "mlflow"}}]),
            "containers may set only an image",
        ),
        "a host path": (edit(f"{WORKER_POD}.volumes.0", HOST_PATH), "volumes must be claims"),
        "a projected token": (
            edit(
                f"{WORKER_POD}.volumes.0",
                {"name": "t", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}},
            ),
            "volumes must be claims",
        ),
        "another claim": (
            edit(f"{WORKER_POD}.volumes.0", {"name": "c", "persistentVolumeClaim": {"claimName": "payroll"}}),
            "volumes must be claims",
        ),
        "another pull secret": (
            edit(f"{HEAD_POD}.imagePullSecrets", [{"name": "mlflow"}]),
            "pull secret is not listed",
        ),
        "a capability": (
            edit(f"{WORKER_POD}.containers.0.securityContext.capabilities.add", ["SYS_ADMIN"]),
            "must forbid privilege escalation",
        ),
        "an annotation that a webhook reads": (
            edit(
                "spec.rayClusterSpec.headGroupSpec.template.metadata.annotations",
                {"sidecar.istio.io/userVolume": "[]"},
            ),
            "a label or an annotation",
        ),
        "another account": (
            edit(f"{HEAD_POD}.serviceAccountName", "default-editor"),
            "service account of the pods is not listed",
        ),
        "privileges": (
            edit(f"{HEAD_POD}.containers.0.securityContext.privileged", True),
            "must forbid privilege escalation",
        ),
        "root": (edit(f"{WORKER_POD}.securityContext.runAsNonRoot", False), "other than root"),
        "a group of the volume": (edit(f"{WORKER_POD}.securityContext.fsGroup", 0), "other than root"),
        "an empty account": (edit(f"{HEAD_POD}.serviceAccountName", ""), "service account of the pods is not listed"),
        "a label that injects a secret": (
            edit("spec.rayClusterSpec.headGroupSpec.template.metadata.labels.access-ml-pipeline", "true"),
            "a label or an annotation",
        ),
        "a pod that submits": (
            edit("spec.submitterPodTemplate", {"spec": {"containers": [{"name": "x"}]}}),
            "must use a dedicated cluster",
        ),
        "another cluster": (edit("spec.clusterSelector", {"ray.io/cluster": "other"}), "must use a dedicated cluster"),
        "an autoscaler": (edit("spec.rayClusterSpec.enableInTreeAutoscaling", True), "must use a dedicated cluster"),
        "a request before the stop": (
            edit(
                f"{HEAD_POD}.containers.0.lifecycle.preStop", {"httpGet": {"path": "/", "port": 80, "host": "mlflow"}}
            ),
            "a preStop command",
        ),
    },
}


@pytest.fixture(scope="class")
def limited(api_server: Cluster) -> Iterator[Cluster]:
    """The policies, both launchers' rights and the limits of the team of gaudi3-roce."""
    api_server.kubectl("create", "namespace", TEAM)
    parts = [
        (DEPLOY / part).read_text(encoding="utf-8")
        for part in (
            "components/launcher-policies/trainjob-policy.yaml",
            "components/launcher-policies/rayjob-policy.yaml",
            "components/launcher-trainjob/launcher-rbac.yaml",
            "components/launcher-rayjob/launcher-rbac.yaml",
            "components/runtime/training-runtime.yaml",
        )
    ]
    api_server.kubectl("apply", "--server-side", "-f", "-", text="\n---\n".join(parts))
    api_server.kubectl("-n", TEAM, "create", "serviceaccount", "tuneline")
    api_server.kubectl("-n", TEAM, "apply", "-f", str(DEPLOY / "overlays/gaudi3-roce/team-a/launcher-limits.yaml"))
    # With an empty line at the end, as a block scalar of YAML has it.
    values = {"data": {"runtimes": "ClusterTrainingRuntime/tuneline\n", "serviceAccounts": "tuneline-tools\n"}}
    api_server.kubectl("-n", TEAM, "patch", "configmap", kubernetes_client.LIMITS_NAME, "-p", json.dumps(values))
    yield api_server
    api_server.kubectl("delete", "namespace", TEAM)


def build_job(kind: str) -> Json:
    """Return the manifest that the launcher creates on the platform of gaudi3-roce."""
    platform = load_overlay_platform("gaudi3-roce")
    settings = step_launcher.resolve_launcher(platform, pod_spec.merge_scheduling(platform.scheduling, None))
    values = settings.trainjob.model_dump(exclude={"runtime", "runtime_kind"})
    if kind == "trainjob":
        values["runtime"] = "tuneline"
    launcher = LauncherSettings.model_validate({"kind": kind, "nodes": 2, kind: values})
    build = job_manifests.build_trainjob if kind == "trainjob" else job_manifests.build_rayjob
    return build(
        launcher, Command("components.fine_tuning.worker", ["job.json"], 8, 2), Path("/data/launch"), "tuneline-1-1"
    )


def create(cluster: Cluster, manifest: Json, account: str = ACCOUNT) -> str:
    """Create an object in a dry run as the launcher; return the text of the refusal, or an empty text."""
    arguments = ("-n", TEAM, f"--as={account}", "create", "--validate=false", "--dry-run=server", "-f", "-")
    try:
        cluster.kubectl(*arguments, text=yaml.safe_dump(manifest))
    except AssertionError as error:
        return str(error)
    return ""


class TestLauncherPolicies:
    """Before the overlays: once all policies with parameters are deleted, Kubernetes 1.36 finds no parameters of new ones."""

    @pytest.mark.parametrize("kind", ATTACKS)
    def test_launcher_may_create_its_own_jobs_and_nothing_wider(self, limited: Cluster, kind: str) -> None:
        attacks = {attack: (build_job(kind), reason) for attack, (_, reason) in ATTACKS[kind].items()}
        for attack, (change, _) in ATTACKS[kind].items():
            change(attacks[attack][0])
        # The API server enforces new policies after a moment. Until it has their parameters, it refuses all jobs.
        first, _ = next(iter(attacks.values()))
        wait_until(lambda: bool(create(limited, first)), "the policy is not enforced")
        wait_until(lambda: not create(limited, build_job(kind)), create(limited, build_job(kind)))
        for attack, (manifest, reason) in attacks.items():
            refusal = create(limited, manifest)
            assert "ValidatingAdmissionPolicy" in refusal and reason in refusal, f"{attack}: {refusal}"  # noqa: PT018

    def test_launcher_in_another_namespace_is_limited_too(self, limited: Cluster) -> None:
        binding = ("rolebinding", "other", "--role=tuneline-launcher-trainjob", "--serviceaccount=other:tuneline")
        limited.kubectl("-n", TEAM, "create", *binding)
        manifest, account = build_job("trainjob"), "system:serviceaccount:other:tuneline"
        wait_until(lambda: not create(limited, manifest, account), create(limited, manifest, account))
        manifest["spec"]["trainer"]["image"] = "evil.example/x:1"
        assert "is not listed under images" in create(limited, manifest, account)

    def test_launcher_without_limits_is_refused_with_the_name_of_the_config_map(
        self, limited: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KUBECONFIG", str(limited.folder / "admin.kubeconfig"))
        client = kubernetes_client.connect(TEAM)
        client.client.default_headers["Impersonate-User"] = ACCOUNT
        limits = limited.kubectl("-n", TEAM, "get", "configmap", kubernetes_client.LIMITS_NAME, "-o", "yaml")
        limited.kubectl("-n", TEAM, "delete", "configmap", kubernetes_client.LIMITS_NAME)
        try:
            with pytest.raises(ConfigurationError, match="the cluster rejects the job") as raised:
                client.create(kubernetes_client.TRAINJOB, build_job("trainjob"))
        finally:
            body = yaml.safe_load(limits)
            body["metadata"] = {"name": kubernetes_client.LIMITS_NAME}
            limited.kubectl("-n", TEAM, "create", "-f", "-", text=yaml.safe_dump(body))
        assert kubernetes_client.LIMITS_NAME in str(raised.value.hint)


@pytest.fixture
def applied(api_server: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """Apply an overlay, and delete its objects, because claims and sets of another overlay differ in immutable fields."""
    overlay = str(request.param)
    apply(api_server, overlay)
    yield overlay
    delete_overlay(api_server, overlay)


def delete_overlay(cluster: Cluster, overlay: str) -> None:
    """Delete the objects of an overlay and wait for the end of its namespaces and claims."""
    folder = str(DEPLOY / "overlays" / overlay)
    cluster.kubectl("delete", "-k", folder, "--wait=false", "--ignore-not-found")
    own = [name for name in ("mlflow", "team-a", "team-b") if name not in PREREQUISITES]
    wait_until(lambda: not {ns["metadata"]["name"] for ns in read(cluster, "namespaces")} & {*own}, "namespaces remain")
    wait_until(lambda: not read(cluster, "persistentvolumeclaims", "-A"), "claims remain")


def test_chart_is_installed_upgraded_rolled_back_and_uninstalled(api_server: Cluster) -> None:
    """Its objects are those of the overlay (tests/deploy/test_chart.py). `helm test` needs a node and is not run."""

    def read_scaler() -> Json:
        (scaler,) = read(api_server, "horizontalpodautoscalers", "-A")
        return dict(scaler)

    values = read_values("xe9680-powerscale")
    api_server.kubectl("create", "namespace", "release")
    kubeconfig = api_server.folder / "admin.kubeconfig"
    with helm_python.Config(kubeconfig_path=kubeconfig, namespace="release", burst_limit=200) as helm:
        helm.install(CHART, "site", values)
        assert read_scaler()["spec"]["maxReplicas"] == 4
        values["teams"][0]["serving"]["maxReplicas"] = 9
        helm.upgrade(CHART, "site", values)
        assert read_scaler()["spec"]["maxReplicas"] == 9
        helm.rollback("site", version=1)
        assert read_scaler()["spec"]["maxReplicas"] == 4
        assert len(read(api_server, "persistentvolumes")) == 4
        helm.uninstall("site")
    wait_until(lambda: not read(api_server, "deployments", "-n", TEAM), "deployments remain")
    assert len(read(api_server, "persistentvolumes")) == 4, "data survives an uninstall"
    assert {claim["metadata"]["namespace"] for claim in read(api_server, "persistentvolumeclaims", "-A")} == {
        "mlflow",
        "team-a",
        "team-b",
    }
    delete_overlay(api_server, "xe9680-powerscale")


@pytest.mark.parametrize("applied", OVERLAYS, indirect=True)
def test_overlay_applies_twice_and_its_pods_are_admitted(api_server: Cluster, applied: str) -> None:
    kinds = "deployments,statefulsets,cronjobs,configmaps,networkpolicies,roles,rolebindings,services,clusterqueues"

    def read_contents() -> dict[str, Json]:
        """Return the objects without metadata and status, and without the replicas, which an autoscaler sets."""
        return {
            o["metadata"]["uid"]: {**o, "metadata": {}, "status": {}, "spec": {**o.get("spec", {}), "replicas": None}}
            for o in read(api_server, kinds, "-A")
        }

    before = read_contents()
    apply(api_server, applied)
    assert read_contents() == before
    sets = [m for m in render_overlay(applied) if m["kind"] in ("Deployment", "StatefulSet")]
    assert len(sets) == 3
    for manifest in sets:
        labels = manifest["spec"]["selector"]["matchLabels"].items()
        wait_for_pods(api_server, manifest["metadata"], ",".join(f"{key}={value}" for key, value in labels))
    for manifest in (m for m in render_overlay(applied) if m["kind"] == "CronJob"):
        name, namespace = manifest["metadata"]["name"], manifest["metadata"]["namespace"]
        api_server.kubectl("-n", namespace, "create", "job", f"try-{name}", f"--from=cronjob/{name}")
        wait_for_pods(api_server, manifest["metadata"], f"job-name=try-{name}")
    served = api_server.kubectl("api-versions").split()  # others need controllers such as the Prometheus operator
    base = render_overlay(applied)
    optional = [m for m in render_with_optional(applied) if m not in base and m["apiVersion"] in served]
    names = {(m["kind"], m["metadata"]["name"]) for m in optional}
    assert ("Ingress", "triton") in names
    assert (("ConfigMap", "tuneline-alerts") in names) == (applied != "one-gpu-node")
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": optional})
    options = ("--server-side", "--dry-run=server", "--validate=strict", "--force-conflicts")
    api_server.kubectl("apply", *options, "-f", "-", text=text)
    refused = [e["message"] for e in read(api_server, "events", "-A") if e["reason"] == "FailedCreate"]
    assert refused == [], "Pod Security, an account or a limit refused pods"


@pytest.mark.parametrize("applied", OVERLAYS, indirect=True)
def test_accounts_have_the_documented_rights_and_no_others(api_server: Cluster, applied: str) -> None:
    """Only the account of the steps has rights; the API server computes them for all accounts of the overlay."""
    launcher = load_overlay_platform(applied).launcher.kind
    documented = {*REASONS["tuneline-runner"], *REASONS.get(f"tuneline-launcher-{launcher}", {})}
    accounts = [m["metadata"] for m in render_overlay(applied) if m["kind"] == "ServiceAccount"]
    assert {"tuneline", "tuneline-tools"} <= {account["name"] for account in accounts}
    for account in accounts:
        name, namespace = account["name"], account["namespace"]
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectRulesReview",
            "spec": {"namespace": namespace},
        }
        answer = json.loads(
            api_server.kubectl(
                f"--as=system:serviceaccount:{namespace}:{name}",
                *("create", "--validate=false", "-f", "-", "-o", "json"),
                text=json.dumps(review),
            )
        )
        granted = {
            (verb, group, kind, name)
            for rule in answer["status"]["resourceRules"]
            for group in rule["apiGroups"]
            for kind in rule["resources"]
            for verb in rule["verbs"]
            for name in rule.get("resourceNames", [""])
        }
        own = {right for right in granted if right[1] not in ("authorization.k8s.io", "authentication.k8s.io")}
        assert own == (documented if name == "tuneline" else set()), account
