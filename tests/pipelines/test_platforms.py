"""The platforms of deploy/overlays: what is compiled for them, and the pods that Kubeflow makes of it."""

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

from components.common.errors import ConfigurationError
from pipelines import compiling, platform
from pipelines.cluster import kubeflow_pods
from pipelines.config import Customization, load
from pipelines.platform import Platform
from tests import kubernetes_schemas, pod_security
from tests.pipelines.command import ROOT

Json = dict[str, Any]
EXAMPLES = ("one-gpu-node", "xe9680-powerscale", "gaudi3-roce", "shared-gpus")
GOLDEN = ROOT / "tests" / "pipelines" / "golden"
REGENERATE = "if the change is meant: python -P -m tests.pipelines.test_platforms writes the golden copies anew"
POWERSCALE = "xe9680-powerscale"


def example(name: str) -> Path:
    return ROOT / "deploy" / "overlays" / name / "platform.yaml"


def compiled_for(name: str) -> str:
    return compiling.compiled(Customization(), platform.load(example(name)))


def fixed(text: str) -> str:
    """What the platform fixes in a compiled pipeline: image, variables, resources and retries, and the whole second document."""
    pipeline, kubernetes = yaml.safe_load_all(text)
    executors = pipeline["deploymentSpec"]["executors"]
    kept = ("image", "env", "resources")
    containers = {name: {key: one["container"][key] for key in kept if key in one["container"]} for name, one in executors.items()}
    first = {"executors": containers, "retries": retries(pipeline["root"]["dag"], pipeline["components"])}
    return yaml.safe_dump_all([first, kubernetes], sort_keys=True, width=140)


def retries(dag: Json, components: Json) -> Json:
    """The retry policy of every task that has one, those behind conditions too."""
    found = {}
    for name, task in dag["tasks"].items():
        inner = components[task["componentRef"]["name"]].get("dag")
        found |= retries(inner, components) if inner else {name: task["retryPolicy"]} if "retryPolicy" in task else {}
    return found


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return {name: compiled_for(name) for name in EXAMPLES}


@pytest.fixture(scope="module")
def pods(texts: dict[str, str]) -> dict[str, dict[str, Json]]:
    """Every pod of every example."""
    return {name: kubeflow_pods.pods(text) for name, text in texts.items()}


def main_of(pod: Json) -> Json:
    return dict(pod["spec"]["containers"][0])


# What is compiled


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_an_example_fixes_is_what_was_reviewed(texts: dict[str, str], name: str) -> None:
    assert fixed(texts[name]) == (GOLDEN / f"{name}.yaml").read_text(encoding="utf-8"), REGENERATE


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_protocol_buffers_know_every_field_of_an_example(texts: dict[str, str], name: str) -> None:
    from google.protobuf import json_format
    from kfp.kubernetes import kubernetes_executor_config_pb2 as kubernetes
    from kfp.pipeline_spec import pipeline_spec_pb2 as spec

    pipeline, platforms = yaml.safe_load_all(texts[name])
    json_format.ParseDict(pipeline, spec.PipelineSpec())
    json_format.ParseDict(platforms, spec.PlatformSpec())
    for config in platforms["platforms"]["kubernetes"]["deploymentSpec"]["executors"].values():
        read = json_format.ParseDict(config, kubernetes.KubernetesExecutorConfig())
        assert json_format.MessageToDict(read) == config, "nothing is lost on the way"


def own_traces(text: str) -> list[str]:
    """Commands that install something, and places of this machine, that a compiled pipeline holds."""
    installing = ["pip install", "pip3 install", "uv pip", "ensurepip", "conda install", "apt-get"]
    here = [str(ROOT), sys.prefix, f"{sys.base_prefix}/lib", f"{Path.home()}/", f"{tempfile.gettempdir()}/pytest", socket.gethostname()]
    return [word for word in installing + [place for place in here if len(place) > 4] if word in text]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_installs_nothing_is_of_no_machine_and_names_images_by_digest(texts: dict[str, str], name: str) -> None:
    assert own_traces(texts[name]) == []
    pipeline, _ = yaml.safe_load_all(texts[name])
    for executor in pipeline["deploymentSpec"]["executors"].values():
        assert platform.DIGEST.search(executor["container"]["image"])


@pytest.mark.parametrize("pipeline", compiling.PIPELINES)
def test_without_a_platform_nothing_is_installed_and_of_no_machine_either(pipeline: str) -> None:
    assert own_traces(compiling.compiled(Customization(), pipeline=pipeline)) == []


# The pods


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_pod_is_one_that_kubernetes_takes(pods: dict[str, dict[str, Json]], name: str) -> None:
    assert len(pods[name]) == 11
    for pod in pods[name].values():
        assert kubernetes_schemas.problems(pod) == []


@pytest.mark.parametrize("version", kubernetes_schemas.versions() or ["none"])
def test_every_pod_passes_the_schema_of_each_version(pods: dict[str, dict[str, Json]], version: str) -> None:
    if version == "none":
        pytest.skip("kubernetes-validate, of the development extra, is not installed; the client's models were asked above")
    for pod in (pod for name in EXAMPLES for pod in pods[name].values()):
        assert kubernetes_schemas.schema_problems(pod, version) == []
    broken = copy.deepcopy(pods["gaudi3-roce"]["resolve"])
    broken["spec"]["containers"][0]["securityContext"]["runAsNonroot"] = True
    assert "runAsNonroot" in kubernetes_schemas.schema_problems(broken, version)[0]


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_pod_passes_the_restricted_pod_security_standard(pods: dict[str, dict[str, Json]], name: str) -> None:
    assert {task: pod_security.violations(pod) for task, pod in pods[name].items()} == {task: [] for task in pods[name]}


def _spoilt(change: Callable[[Json], None]) -> Callable[[Json], Json]:
    def made(pod: Json) -> Json:
        spoilt = copy.deepcopy(pod)
        change(spoilt["spec"])
        return spoilt

    return made


def _context(**values: Any) -> Callable[[Json], None]:
    return lambda spec: spec["containers"][0]["securityContext"].update(values)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda spec: spec.update(hostNetwork=True), "Baseline, Host Namespaces: hostNetwork"),
        (_context(privileged=True), "Baseline, Privileged Containers: main"),
        (_context(capabilities={"drop": ["ALL"], "add": ["SYS_NICE"]}), "Baseline and Restricted, Capabilities: main adds SYS_NICE"),
        (_context(capabilities={}), "Baseline and Restricted, Capabilities: main does not drop ALL"),
        (lambda spec: spec["volumes"].append({"name": "host", "hostPath": {"path": "/"}}), "Restricted, Volume Types: host is a hostPath"),
        (lambda spec: spec["volumes"].append({"name": "n", "nfs": {}}), "Restricted, Volume Types: n is a nfs"),
        (_context(allowPrivilegeEscalation=None), "Restricted, Privilege Escalation: main"),
        (_context(runAsNonRoot=False), "Restricted, Running as Non-root: main"),
        (_context(runAsUser=0), "Restricted, Running as Non-root user: main"),
        (_context(seccompProfile={"type": "Unconfined"}), "Baseline and Restricted, Seccomp: main"),
        (_context(procMount="Unmasked"), "Baseline, /proc Mount Type: main"),
        (_context(seLinuxOptions={"type": "spc_t"}), "Baseline, SELinux: main"),
        (_context(appArmorProfile={"type": "Unconfined"}), "Baseline, AppArmor: main"),
    ],
)
def test_the_check_of_the_standard_finds_what_breaks_it(
    pods: dict[str, dict[str, Json]], change: Callable[[Json], None], said: str
) -> None:
    assert said in pod_security.violations(_spoilt(change)(pods["one-gpu-node"]["resolve"]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda spec: spec.update(priority_class="x"), "Pod.spec.priority_class: V1PodSpec has no such field"),
        (lambda spec: spec.update(activeDeadlineSeconds="5"), "Pod.spec.activeDeadlineSeconds: int is wanted, not '5'"),
        (lambda spec: spec["volumes"].append({"name": "a.b"}), "volume a.b: no name for a volume"),
        (lambda spec: spec["volumes"].append({"name": "tuneline"}), "volume tuneline is there twice"),
        (lambda spec: spec["containers"][0].pop("name"), "Invalid value for `name`, must not be `None`"),
        (lambda spec: spec["containers"][0]["resources"]["limits"].update(cpu="two"), "main: two is no amount of cpu"),
    ],
)
def test_the_check_of_the_schema_finds_what_breaks_it(pods: dict[str, dict[str, Json]], change: Callable[[Json], None], said: str) -> None:
    spoilt = _spoilt(change)(pods["one-gpu-node"]["resolve"])
    spoilt["spec"]["containers"][0].setdefault("name", "main") if "name" not in said else None
    found = list(kubernetes_schemas._model("V1Pod", spoilt, "Pod")) if "Invalid" in said else kubernetes_schemas.problems(spoilt)
    assert any(said in problem for problem in found), found


def test_without_a_word_on_security_a_pod_lacks_only_that_it_runs_as_a_user() -> None:
    found = {
        problem
        for pod in kubeflow_pods.pods(compiling.compiled(Customization(), Platform())).values()
        for problem in pod_security.violations(pod)
    }
    assert found == {"Restricted, Running as Non-root: main"}


# What each key leads to


def test_a_stages_own_scheduling_adds_to_that_of_all(pods: dict[str, dict[str, Json]]) -> None:
    training, curation = (pods[POWERSCALE][name] for name in ("fine-tuning", "data-curation"))
    assert training["spec"]["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert training["spec"]["nodeSelector"] == {"node.example/model": "xe9680"}
    affinity = training["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [one["key"] for one in term["matchExpressions"]] == ["nvidia.com/gpu.product", "nvidia.com/gpu.memory"], "all must hold"
    assert affinity["preferredDuringSchedulingIgnoredDuringExecution"][0]["weight"] == 50
    assert "tolerations" not in curation["spec"]
    assert list(curation["spec"]["affinity"]["nodeAffinity"]) == ["preferredDuringSchedulingIgnoredDuringExecution"]


def test_every_pod_waits_in_the_queue_with_its_priority(pods: dict[str, dict[str, Json]]) -> None:
    labels = {"kueue.x-k8s.io/queue-name": "team-a", "kueue.x-k8s.io/priority-class": "customization", "team": "team-a"}
    assert all(pod["metadata"]["labels"] == labels for pod in pods[POWERSCALE].values())


def test_accelerators_are_asked_for_by_the_name_that_the_platform_gives(pods: dict[str, dict[str, Json]]) -> None:
    limits = {name: main_of(pods[name]["fine-tuning"])["resources"]["limits"] for name in EXAMPLES}
    assert (limits["one-gpu-node"]["nvidia.com/gpu"], limits[POWERSCALE]["nvidia.com/gpu"]) == ("1", "8")
    assert not [key for key in limits["gaudi3-roce"] if "/" in key], "its accelerators are the TrainJob's"
    assert main_of(pods["gaudi3-roce"]["evaluation"])["resources"]["limits"]["habana.ai/gaudi"] == "1"
    assert main_of(pods["shared-gpus"]["evaluation"])["resources"]["limits"]["nvidia.com/mig-3g.40gb"] == "1"
    assert "habana.ai/gaudi" not in main_of(pods["gaudi3-roce"]["triton-packaging"])["resources"]["limits"]


def test_scratch_is_the_nodes_disk_or_a_claim_on_a_storage_class(pods: dict[str, dict[str, Json]]) -> None:
    def scratch(pod: Json) -> Json:
        return next(volume for volume in pod["spec"]["volumes"] if volume["name"] == "scratch")

    assert scratch(pods["gaudi3-roce"]["evaluation"])["emptyDir"] == {"sizeLimit": "200Gi"}
    template = scratch(pods[POWERSCALE]["fine-tuning"])["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert (template["storageClassName"], template["resources"]["requests"]["storage"]) == ("local-nvme", "3Ti")
    variables = {one["name"]: one.get("value") for one in main_of(pods["gaudi3-roce"]["evaluation"])["env"]}
    assert variables["TMPDIR"] == "/scratch"
    assert "TMPDIR" not in {one["name"] for one in main_of(pods["gaudi3-roce"]["resolve"])["env"]}


def test_proxies_and_authorities_reach_every_pod(pods: dict[str, dict[str, Json]]) -> None:
    for pod in pods[POWERSCALE].values():
        variables = {one["name"]: one.get("value") for one in main_of(pod)["env"]}
        assert variables["HTTPS_PROXY"] == variables["https_proxy"] == "http://proxy.example:3128"
        assert variables["NO_PROXY"] == variables["no_proxy"] == "localhost,127.0.0.1,.svc,.cluster.local,10.0.0.0/8,mlflow.example"
        for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE"):
            assert variables[name] == "/etc/tuneline/certificates/ca-bundle.crt"
        mounted = {mount["mountPath"]: mount["name"] for mount in main_of(pod)["volumeMounts"]}
        assert mounted["/etc/tuneline/certificates"] == "company-authorities"
        assert mounted["/corpus"] == "corpus"
        told = {one["name"]: one["valueFrom"]["secretKeyRef"] for one in main_of(pod)["env"] if "secretKeyRef" in one.get("valueFrom", {})}
        assert (told["GIT_PASSWORD"]["name"], told["GIT_PASSWORD"]["key"]) == ("git", "password")


def test_a_secret_and_a_config_map_are_files_where_the_platform_says_so() -> None:
    said = platform.load(example("one-gpu-node")).model_dump()
    said |= {
        "secret_files": [{"name": "git-key", "mount": "/etc/git"}],
        "config_files": [{"name": "git-settings", "mount": "/etc/settings"}],
    }
    pods = kubeflow_pods.pods(compiling.compiled(Customization(), Platform.model_validate(said)))
    for pod in pods.values():
        mounted = {mount["mountPath"]: mount["name"] for mount in main_of(pod)["volumeMounts"]}
        assert (mounted["/etc/git"], mounted["/etc/settings"]) == ("git-key", "git-settings")


def test_the_run_ends_in_time_and_is_forgotten_and_its_steps_are_tried_again(texts: dict[str, str]) -> None:
    pipeline, kubernetes = yaml.safe_load_all(texts["one-gpu-node"])
    assert kubernetes["platforms"]["kubernetes"]["pipelineConfig"] == {"activeDeadlineSeconds": 345600, "resourceTtlOnCompletion": 604800}
    policy = retries(pipeline["root"]["dag"], pipeline["components"])
    assert policy == {"fine-tuning": {"backoffDuration": "60s", "backoffFactor": 2.0, "backoffMaxDuration": "3600s", "maxRetryCount": 2}}


# What cannot be meant


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("images: {pinned: true}", "images.pinned wants images by digest; curation is tuneline/python-curation:latest"),
        ("claims: [{claim: a, mount: data}]", "claims.0.mount: found 'data'"),
        (
            "claims: [{claim: tuneline, mount: /b}]",
            "claims[0]: volume has a volume tuneline already; Kubeflow names one after what it holds",
        ),
        ("claims: [{claim: a, mount: /data}]", "claims[0]: /data is where volume is mounted"),
        ("claims: [{claim: gcs-scratch, mount: /b}]", "claims[0]: Kubeflow has a volume gcs-scratch already"),
        ("claims: [{claim: a, mount: /kfp-launcher/b}]", "claims[0]: /kfp-launcher/b is a place that Kubeflow or the system needs"),
        ("volume: {claim: team.a}", "volume.claim: found 'team.a'"),
        ("secret_files: [{name: a, mount: /a}, {name: a, mount: /b}]", "secret_files[1]: secret_files[0] has a volume a already"),
        ("secret_files: [{name: a.b, mount: /a}]", "secret_files.0.name: found 'a.b'"),
        ("network: {certificates: {config_map: a, secret: b}}", "name a config_map or a secret, not both"),
        ("network: {https_proxy: 'http://me:pw@proxy:3128'}", "network.https_proxy: holds a password; name a secret"),
        ("network: {https_proxy: 'http://a'}\nenvironment: {HTTPS_PROXY: 'http://b'}", "network.https_proxy: HTTPS_PROXY under"),
        ("network: {proxy: 'http://a'}", "network.proxy: there is no such key (did you mean"),
        ("security: {run_as_user: 0}", "security.run_as_user: found 0; 1 or more is wanted"),
        ("security: {privileged: true}", "security.privileged: there is no such key (allowed: run_as_user, run_as_group, run_as_non_root)"),
        ("scheduling: {node_affinity: [{key: a}]}", "operator In wants at least one value"),
        ("scheduling: {node_affinity: [{key: a, operator: Gt, values: [x]}]}", "operator Gt wants one whole number"),
        ("scheduling: {node_affinity: [{key: a, operator: Exists, values: [x]}]}", "operator Exists wants no values"),
        ("scheduling: {node_affinity: [{key: a, operator: Exists, weight: 0}]}", "weight: found 0; 1 or more is wanted"),
        ("resources: {fine_tuning: {scratch: 1 TB}}", "resources.fine_tuning.scratch: found '1 TB'"),
        ("resources: {fine_tuning: {retries: -1}}", "resources.fine_tuning.retries: found -1; 0 or more is wanted"),
        ("resources: {fine_tuning: {scheduling: {queues: a}}}", "resources.fine_tuning.scheduling.queues: there is no such key"),
        ("resources: {others: {scratch: 1Gi}}\nscratch: {mount: /data}", "scratch: /data is where volume is mounted"),
        ("resources: {fine_tuning: {accelerator: gpu}}", "resources.fine_tuning.accelerator: found 'gpu'"),
        ("scheduling: {queue: team a}", "scheduling.queue: found 'team a'; 'team a' is no value of a label"),
        ("scheduling: {labels: {team/a/b: x}}", "'team/a/b' is no key of a label"),
        ("scheduling: {node_selector: {pool: true}}", "scheduling.node_selector.pool: found true; a text is wanted"),
        ("run: {service_account: My_Account}", "run.service_account: found 'My_Account'"),
    ],
)
def test_what_cannot_be_meant_names_file_and_field(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "platform.yaml"
    file.write_text(content)
    with pytest.raises(ConfigurationError) as error:
        platform.load(file)
    assert error.value.message.startswith(f"{file}: ")
    assert message in error.value.message
    assert ":pw@" not in error.value.message


def test_a_path_on_a_further_volume_is_not_remarked(tmp_path: Path) -> None:
    config = load(None, ["data_curation.sources=[/corpus/a.jsonl, /elsewhere/b.jsonl]"], here=False)
    file = tmp_path / "pipeline.yaml"
    (remark,) = compiling.write(config, platform.load(example(POWERSCALE)), file)
    assert remark.startswith("data_curation.sources: /elsewhere/b.jsonl is not on the volume")


def test_a_file_from_before_these_keys_compiles_to_what_it_did(tmp_path: Path) -> None:
    (tmp_path / "platform.yaml").write_text("volume: {claim: team-a, mount: /scratch}\nresources: {fine_tuning: {shared_memory: 8Gi}}\n")
    text = compiling.compiled(Customization(), platform.load(tmp_path / "platform.yaml"))
    for word in ("securityContext", "nodeAffinity", "retryPolicy", "TMPDIR", "pipelineConfig", "PROXY"):
        assert word not in text


if __name__ == "__main__":
    for each in EXAMPLES:
        (GOLDEN / f"{each}.yaml").write_text(fixed(compiled_for(each)), encoding="utf-8")
