"""The platforms of deploy/overlays: their compiled pipelines, and the pods that Kubeflow creates from them.

The test marked `long` compiles every pipeline for several platforms.
"""

from __future__ import annotations

import copy
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.common.runtime.errors import ConfigurationError
from pipelines.config import platform_config
from pipelines.config.customization_config import Customization, load_customization
from pipelines.config.platform_config import Platform
from pipelines.definition import compilation
from pipelines.kubeflow.preflight import kubeflow_pods
from tests import kubernetes_schemas, pod_security
from tests.pipelines.command import ROOT

Json = dict[str, Any]
OVERLAYS = ("one-gpu-node", "xe9680-powerscale", "gaudi3-roce", "shared-gpus")
GOLDEN = ROOT / "tests" / "pipelines" / "golden"
REGENERATE = "if the change is intended: python -P -m tests.pipelines.test_platforms rewrites the golden files"
POWERSCALE = "xe9680-powerscale"


def get_platform_path(name: str) -> Path:
    return ROOT / "deploy" / "overlays" / name / "platform.yaml"


def compile_for(name: str) -> str:
    return compilation.compile_pipeline(Customization(), platform_config.load_platform(get_platform_path(name)))


def extract_platform_parts(text: str) -> str:
    """Return the platform-specific parts of a compiled pipeline: images, variables, resources, retries and the second document."""
    pipeline, kubernetes = yaml.safe_load_all(text)
    executors = pipeline["deploymentSpec"]["executors"]
    keys = ("image", "env", "resources")
    containers = {
        name: {key: executor["container"][key] for key in keys if key in executor["container"]}
        for name, executor in executors.items()
    }
    first = {"executors": containers, "retries": get_retry_policies(pipeline["root"]["dag"], pipeline["components"])}
    return yaml.safe_dump_all([first, kubernetes], sort_keys=True, width=140)


def get_retry_policies(dag: Json, components: Json) -> Json:
    """Return the retry policies by task, including conditional tasks."""
    policies = {}
    for name, task in dag["tasks"].items():
        inner = components[task["componentRef"]["name"]].get("dag")
        policies |= (
            get_retry_policies(inner, components)
            if inner
            else {name: task["retryPolicy"]}
            if "retryPolicy" in task
            else {}
        )
    return policies


@pytest.fixture(scope="module")
def compiled_texts() -> dict[str, str]:
    return {name: compile_for(name) for name in OVERLAYS}


@pytest.fixture(scope="module")
def pods(compiled_texts: dict[str, str]) -> dict[str, dict[str, Json]]:
    """The pods of each example by task."""
    return {name: kubeflow_pods.build_pods(text) for name, text in compiled_texts.items()}


def get_main_container(pod: Json) -> Json:
    return dict(pod["spec"]["containers"][0])


# Compiled pipelines


@pytest.mark.parametrize("name", OVERLAYS)
def test_compiled_examples_equal_the_golden_files(compiled_texts: dict[str, str], name: str) -> None:
    assert extract_platform_parts(compiled_texts[name]) == (GOLDEN / f"{name}.yaml").read_text(encoding="utf-8"), (
        REGENERATE
    )


@pytest.mark.parametrize("name", OVERLAYS)
def test_examples_match_the_protocol_buffers(compiled_texts: dict[str, str], name: str) -> None:
    from google.protobuf import json_format
    from kfp.kubernetes import kubernetes_executor_config_pb2 as kubernetes
    from kfp.pipeline_spec import pipeline_spec_pb2 as spec

    pipeline, platforms = yaml.safe_load_all(compiled_texts[name])
    json_format.ParseDict(pipeline, spec.PipelineSpec())
    json_format.ParseDict(platforms, spec.PlatformSpec())
    for config in platforms["platforms"]["kubernetes"]["deploymentSpec"]["executors"].values():
        read = json_format.ParseDict(config, kubernetes.KubernetesExecutorConfig())
        assert json_format.MessageToDict(read) == config, "every field is known"


def find_local_traces(text: str) -> list[str]:
    """Return the install commands and the paths of this machine in a compiled pipeline."""
    install_commands = ["pip install", "pip3 install", "uv pip", "ensurepip", "conda install", "apt-get"]
    local_paths = [
        str(ROOT),
        sys.prefix,
        f"{sys.base_prefix}/lib",
        f"{Path.home()}/",
        f"{tempfile.gettempdir()}/pytest",
        socket.gethostname(),
    ]
    return [word for word in install_commands + [path for path in local_paths if len(path) > 4] if word in text]


@pytest.mark.parametrize("name", OVERLAYS)
def test_examples_have_image_digests_and_no_local_traces(compiled_texts: dict[str, str], name: str) -> None:
    assert find_local_traces(compiled_texts[name]) == []
    pipeline, _ = yaml.safe_load_all(compiled_texts[name])
    for executor in pipeline["deploymentSpec"]["executors"].values():
        assert platform_config.IMAGE_DIGEST_PATTERN.search(executor["container"]["image"])


@pytest.mark.parametrize("pipeline", compilation.PIPELINE_NAMES)
def test_pipelines_without_a_platform_have_no_local_traces(pipeline: str) -> None:
    assert find_local_traces(compilation.compile_pipeline(Customization(), pipeline=pipeline)) == []


# Pods


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_pod_is_valid_for_kubernetes(pods: dict[str, dict[str, Json]], name: str) -> None:
    assert len(pods[name]) == 12
    for pod in pods[name].values():
        assert kubernetes_schemas.problems(pod) == []


@pytest.mark.parametrize("version", kubernetes_schemas.versions() or ["none"])
def test_every_pod_passes_the_schema_of_each_version(pods: dict[str, dict[str, Json]], version: str) -> None:
    if version == "none":
        pytest.skip(
            "kubernetes-validate, of the development extra, is not installed; the client's models were checked above"
        )
    for pod in (pod for name in OVERLAYS for pod in pods[name].values()):
        assert kubernetes_schemas.schema_problems(pod, version) == []
    broken = copy.deepcopy(pods["gaudi3-roce"]["resolve"])
    broken["spec"]["containers"][0]["securityContext"]["runAsNonroot"] = True
    assert "runAsNonroot" in kubernetes_schemas.schema_problems(broken, version)[0]


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_pod_passes_the_restricted_pod_security_standard(pods: dict[str, dict[str, Json]], name: str) -> None:
    assert {task: pod_security.violations(pod) for task, pod in pods[name].items()} == {task: [] for task in pods[name]}


def _with_change(change: Callable[[Json], Any]) -> Callable[[Json], Json]:
    def apply(pod: Json) -> Json:
        changed = copy.deepcopy(pod)
        change(changed["spec"])
        return changed

    return apply


def _set_security_context(**values: Any) -> Callable[[Json], None]:
    return lambda spec: spec["containers"][0]["securityContext"].update(values)


# Changes of a restricted pod, and the violations; tests/engines/test_api_contract.py makes them on a real API server.
SECURITY_VIOLATIONS: list[tuple[Callable[[Json], Any], str]] = [
    (lambda spec: spec.update(hostNetwork=True), "Baseline, Host Namespaces: hostNetwork"),
    (_set_security_context(privileged=True, allowPrivilegeEscalation=True), "Baseline, Privileged Containers: main"),
    (
        _set_security_context(capabilities={"drop": ["ALL"], "add": ["SYS_NICE"]}),
        "Baseline and Restricted, Capabilities: main adds SYS_NICE",
    ),
    (_set_security_context(capabilities={}), "Baseline and Restricted, Capabilities: main does not drop ALL"),
    (
        lambda spec: spec["volumes"].append({"name": "host", "hostPath": {"path": "/"}}),
        "Restricted, Volume Types: host is a hostPath",
    ),
    (
        lambda spec: spec["volumes"].append({"name": "n", "nfs": {"server": "nas", "path": "/"}}),
        "Restricted, Volume Types: n is a nfs",
    ),
    (
        lambda spec: spec["containers"][0].update(ports=[{"containerPort": 80, "hostPort": 80}]),
        "Baseline, Host Ports: main",
    ),
    (
        lambda spec: spec["containers"][0].update(livenessProbe={"httpGet": {"host": "10.0.0.1", "port": 80}}),
        "Baseline, Host Probes / Lifecycle Hooks: main",
    ),
    (
        lambda spec: spec["securityContext"].update(sysctls=[{"name": "kernel.msgmax", "value": "1"}]),
        "Baseline, Sysctls: kernel.msgmax",
    ),
    (_set_security_context(allowPrivilegeEscalation=None), "Restricted, Privilege Escalation: main"),
    (_set_security_context(runAsNonRoot=False), "Restricted, Running as Non-root: main"),
    (_set_security_context(runAsUser=0), "Restricted, Running as Non-root user: main"),
    (_set_security_context(seccompProfile={"type": "Unconfined"}), "Baseline and Restricted, Seccomp: main"),
    (
        lambda spec: (
            spec.update(hostUsers=False),
            spec["containers"][0]["securityContext"].update(procMount="Unmasked"),
        ),
        "Baseline, /proc Mount Type: main",
    ),
    (_set_security_context(seLinuxOptions={"type": "spc_t"}), "Baseline, SELinux: main"),
    (_set_security_context(appArmorProfile={"type": "Unconfined"}), "Baseline, AppArmor: main"),
]


@pytest.mark.parametrize(("change", "message"), SECURITY_VIOLATIONS)
def test_security_check_finds_violations(
    pods: dict[str, dict[str, Json]], change: Callable[[Json], None], message: str
) -> None:
    assert message in pod_security.violations(_with_change(change)(pods["one-gpu-node"]["resolve"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda spec: spec.update(priority_class="x"), "Pod.spec.priority_class: V1PodSpec has no such field"),
        (lambda spec: spec.update(activeDeadlineSeconds="5"), "Pod.spec.activeDeadlineSeconds: int is wanted, not '5'"),
        (lambda spec: spec["volumes"].append({"name": "a.b"}), "volume a.b: no name for a volume"),
        (lambda spec: spec["volumes"].append({"name": "tuneline"}), "volume tuneline is there twice"),
        (lambda spec: spec["containers"][0].pop("name"), "Invalid value for `name`, must not be `None`"),
        (lambda spec: spec["containers"][0]["resources"]["limits"].update(cpu="two"), "main: two is no amount of cpu"),
    ],
)
def test_schema_check_finds_violations(
    pods: dict[str, dict[str, Json]], change: Callable[[Json], None], message: str
) -> None:
    changed = _with_change(change)(pods["one-gpu-node"]["resolve"])
    changed["spec"]["containers"][0].setdefault("name", "main") if "name" not in message else None
    problems = (
        list(kubernetes_schemas._model("V1Pod", changed, "Pod"))
        if "Invalid" in message
        else kubernetes_schemas.problems(changed)
    )
    assert any(message in problem for problem in problems), problems


def test_default_pod_lacks_only_run_as_non_root() -> None:
    violations = {
        problem
        for pod in kubeflow_pods.build_pods(compilation.compile_pipeline(Customization(), Platform())).values()
        for problem in pod_security.violations(pod)
    }
    assert violations == {"Restricted, Running as Non-root: main"}


# Effects of the platform keys


def test_stage_scheduling_extends_the_common_scheduling(pods: dict[str, dict[str, Json]]) -> None:
    training, curation = (pods[POWERSCALE][name] for name in ("fine-tuning", "data-curation"))
    assert training["spec"]["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert training["spec"]["nodeSelector"] == {"node.example/model": "xe9680"}
    affinity = training["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [expression["key"] for expression in term["matchExpressions"]] == [
        "nvidia.com/gpu.product",
        "nvidia.com/gpu.memory",
    ], "all must hold"
    assert affinity["preferredDuringSchedulingIgnoredDuringExecution"][0]["weight"] == 50
    assert "tolerations" not in curation["spec"]
    assert list(curation["spec"]["affinity"]["nodeAffinity"]) == ["preferredDuringSchedulingIgnoredDuringExecution"]


def test_every_pod_has_queue_and_priority_labels(pods: dict[str, dict[str, Json]]) -> None:
    labels = {"kueue.x-k8s.io/queue-name": "team-a", "kueue.x-k8s.io/priority-class": "customization", "team": "team-a"}
    assert all(pod["metadata"]["labels"] == labels for pod in pods[POWERSCALE].values())


def test_accelerators_use_the_platforms_resource_name(pods: dict[str, dict[str, Json]]) -> None:
    limits = {name: get_main_container(pods[name]["fine-tuning"])["resources"]["limits"] for name in OVERLAYS}
    assert (limits["one-gpu-node"]["nvidia.com/gpu"], limits[POWERSCALE]["nvidia.com/gpu"]) == ("1", "8")
    assert not [key for key in limits["gaudi3-roce"] if "/" in key], "its accelerators are the TrainJob's"
    assert get_main_container(pods["gaudi3-roce"]["evaluation"])["resources"]["limits"]["habana.ai/gaudi"] == "1"
    assert get_main_container(pods["shared-gpus"]["evaluation"])["resources"]["limits"]["nvidia.com/mig-3g.40gb"] == "1"
    assert "habana.ai/gaudi" not in get_main_container(pods["gaudi3-roce"]["triton-packaging"])["resources"]["limits"]


def test_scratch_is_an_empty_dir_or_an_ephemeral_claim(pods: dict[str, dict[str, Json]]) -> None:
    def scratch(pod: Json) -> Json:
        return next(volume for volume in pod["spec"]["volumes"] if volume["name"] == "scratch")

    assert scratch(pods["gaudi3-roce"]["evaluation"])["emptyDir"] == {"sizeLimit": "200Gi"}
    template = scratch(pods[POWERSCALE]["fine-tuning"])["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert (template["storageClassName"], template["resources"]["requests"]["storage"]) == ("local-nvme", "3Ti")
    variables = {
        variable["name"]: variable.get("value")
        for variable in get_main_container(pods["gaudi3-roce"]["evaluation"])["env"]
    }
    assert variables["TMPDIR"] == "/scratch"
    assert "TMPDIR" not in {variable["name"] for variable in get_main_container(pods["gaudi3-roce"]["resolve"])["env"]}


def test_every_pod_has_proxies_and_ca_certificates(pods: dict[str, dict[str, Json]]) -> None:
    for pod in pods[POWERSCALE].values():
        variables = {variable["name"]: variable.get("value") for variable in get_main_container(pod)["env"]}
        assert variables["HTTPS_PROXY"] == variables["https_proxy"] == "http://proxy.example:3128"
        assert (
            variables["NO_PROXY"]
            == variables["no_proxy"]
            == "localhost,127.0.0.1,.svc,.cluster.local,10.0.0.0/8,mlflow.example"
        )
        for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE"):
            assert variables[name] == "/etc/tuneline/certificates/ca-bundle.crt"
        mounts = {mount["mountPath"]: mount["name"] for mount in get_main_container(pod)["volumeMounts"]}
        assert mounts["/etc/tuneline/certificates"] == "company-authorities"
        assert mounts["/corpus"] == "corpus"
        secret_refs = {
            variable["name"]: variable["valueFrom"]["secretKeyRef"]
            for variable in get_main_container(pod)["env"]
            if "secretKeyRef" in variable.get("valueFrom", {})
        }
        assert (secret_refs["GIT_PASSWORD"]["name"], secret_refs["GIT_PASSWORD"]["key"]) == ("git", "password")


def test_secrets_and_config_maps_are_mounted_as_files() -> None:
    platform = platform_config.load_platform(get_platform_path("one-gpu-node")).model_dump()
    platform |= {
        "secret_files": [{"name": "git-key", "mount": "/etc/git"}],
        "config_files": [{"name": "git-settings", "mount": "/etc/settings"}],
    }
    pods = kubeflow_pods.build_pods(compilation.compile_pipeline(Customization(), Platform.model_validate(platform)))
    for pod in pods.values():
        mounts = {mount["mountPath"]: mount["name"] for mount in get_main_container(pod)["volumeMounts"]}
        assert (mounts["/etc/git"], mounts["/etc/settings"]) == ("git-key", "git-settings")


def test_run_has_deadline_ttl_and_retries(compiled_texts: dict[str, str]) -> None:
    pipeline, kubernetes = yaml.safe_load_all(compiled_texts["one-gpu-node"])
    assert kubernetes["platforms"]["kubernetes"]["pipelineConfig"] == {
        "activeDeadlineSeconds": 345600,
        "resourceTtlOnCompletion": 604800,
    }
    policy = get_retry_policies(pipeline["root"]["dag"], pipeline["components"])
    assert policy == {
        "fine-tuning": {
            "backoffDuration": "60s",
            "backoffFactor": 2.0,
            "backoffMaxDuration": "3600s",
            "maxRetryCount": 2,
        }
    }


# Contradictions


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("images: {pinned: true}", "images.pinned requires digests; curation is tuneline/python-curation:latest"),
        ("claims: [{claim: a, mount: data}]", "claims.0.mount: found 'data'"),
        (
            "claims: [{claim: tuneline, mount: /b}]",
            "claims[0]: volume already has a volume tuneline; volumes are named after their content",
        ),
        ("claims: [{claim: a, mount: /data}]", "claims[0]: /data is already the mount path of volume"),
        ("claims: [{claim: gcs-scratch, mount: /b}]", "claims[0]: Kubeflow already has a volume gcs-scratch"),
        (
            "claims: [{claim: a, mount: /kfp-launcher/b}]",
            "claims[0]: /kfp-launcher/b is reserved for Kubeflow or the system",
        ),
        ("volume: {claim: team.a}", "volume.claim: found 'team.a'"),
        (
            "secret_files: [{name: a, mount: /a}, {name: a, mount: /b}]",
            "secret_files[1]: secret_files[0] already has a volume a",
        ),
        ("secret_files: [{name: a.b, mount: /a}]", "secret_files.0.name: found 'a.b'"),
        ("network: {certificates: {config_map: a, secret: b}}", "config_map and secret are both set"),
        (
            "network: {https_proxy: 'http://me:pw@proxy:3128'}",
            "network.https_proxy: contains a password; expected a reference to a secret",
        ),
        (
            "network: {https_proxy: 'http://a'}\nenvironment: {HTTPS_PROXY: 'http://b'}",
            "network.https_proxy: HTTPS_PROXY is also set under",
        ),
        (
            "resources: {evaluation: {memory: 8Gi, memory_request: 4Gi}}",
            "resources.evaluation.memory_request: no effect, because memory 8Gi sets both request and limit",
        ),
        ("network: {proxy: 'http://a'}", "network.proxy: unknown key (did you mean"),
        ("security: {run_as_user: 0}", "security.run_as_user: found 0; expected 1 or more"),
        (
            "security: {privileged: true}",
            "security.privileged: unknown key (allowed: run_as_user, run_as_group, run_as_non_root)",
        ),
        ("scheduling: {node_affinity: [{key: a}]}", "operator In expects at least one value"),
        ("scheduling: {node_affinity: [{key: a, operator: Gt, values: [x]}]}", "operator Gt expects one integer"),
        ("scheduling: {node_affinity: [{key: a, operator: Exists, values: [x]}]}", "operator Exists expects no values"),
        (
            "scheduling: {node_affinity: [{key: a, operator: Exists, weight: 0}]}",
            "weight: found 0; expected 1 or more",
        ),
        ("resources: {fine_tuning: {scratch: 1 TB}}", "resources.fine_tuning.scratch: found '1 TB'"),
        ("resources: {fine_tuning: {retries: -1}}", "resources.fine_tuning.retries: found -1; expected 0 or more"),
        (
            "resources: {fine_tuning: {scheduling: {queues: a}}}",
            "resources.fine_tuning.scheduling.queues: unknown key",
        ),
        (
            "resources: {others: {scratch: 1Gi}}\nscratch: {mount: /data}",
            "scratch: /data is already the mount path of volume",
        ),
        ("resources: {fine_tuning: {accelerator: gpu}}", "resources.fine_tuning.accelerator: found 'gpu'"),
        ("scheduling: {queue: team a}", "scheduling.queue: found 'team a'; 'team a' is not a valid label value"),
        ("scheduling: {labels: {team/a/b: x}}", "'team/a/b' is not a valid label key"),
        ("scheduling: {node_selector: {pool: true}}", "scheduling.node_selector.pool: found true; expected a string"),
        ("run: {service_account: My_Account}", "run.service_account: found 'My_Account'"),
    ],
)
def test_contradictions_name_file_and_field(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "platform.yaml"
    file.write_text(content)
    with pytest.raises(ConfigurationError) as error:
        platform_config.load_platform(file)
    assert error.value.message.startswith(f"{file}: ")
    assert message in error.value.message
    assert ":pw@" not in error.value.message


@pytest.mark.long
def test_path_on_a_further_volume_gives_no_warning(tmp_path: Path) -> None:
    config = load_customization(
        None, ["data_curation.sources=[/corpus/a.jsonl, /elsewhere/b.jsonl]"], resolve_paths=False
    )
    file = tmp_path / "pipeline.yaml"
    (warning,) = compilation.write_pipeline(config, platform_config.load_platform(get_platform_path(POWERSCALE)), file)
    assert warning.startswith("data_curation.sources: /elsewhere/b.jsonl is not on the shared volume")


def test_platform_without_new_keys_compiles_unchanged(tmp_path: Path) -> None:
    (tmp_path / "platform.yaml").write_text(
        "volume: {claim: team-a, mount: /scratch}\nresources: {fine_tuning: {shared_memory: 8Gi}}\n"
    )
    text = compilation.compile_pipeline(Customization(), platform_config.load_platform(tmp_path / "platform.yaml"))
    for word in ("securityContext", "nodeAffinity", "retryPolicy", "TMPDIR", "pipelineConfig", "PROXY"):
        assert word not in text


if __name__ == "__main__":
    for name in OVERLAYS:
        (GOLDEN / f"{name}.yaml").write_text(extract_platform_parts(compile_for(name)), encoding="utf-8")
