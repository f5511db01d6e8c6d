"""The Terraform module for GKE, parsed as HCL: references, rights and defaults. It is never planned or applied here, which needs a project of Google.

Default tier: parsing takes a second.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import hcl2
import pytest
import yaml

from tests.deploy.rendering import DEPLOY, Json, render_overlay

MODULE = DEPLOY / "terraform" / "gke"
ROLES = {
    "google_project_iam_member.nodes": "roles/container.defaultNodeServiceAccount",
    "google_artifact_registry_repository_iam_member.nodes": "roles/artifactregistry.reader",
    "google_storage_bucket_iam_member.mlflow": "roles/storage.objectUser",
    "google_storage_bucket_iam_member.teams": "roles/storage.objectViewer",
}


@cache
def parse(name: str) -> Json:
    """Return a file of the module; blocks are lists, and strings have no quotes."""
    return dict(_unquote(hcl2.loads((MODULE / name).read_text(encoding="utf-8"))))


def _unquote(value: Any) -> Any:
    if isinstance(value, dict):
        return {_unquote(key): _unquote(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_unquote(each) for each in value]
    return value[1:-1] if isinstance(value, str) and value[:1] == value[-1:] == '"' else value


def read_blocks(kind: str) -> dict[str, Json]:
    """Return the blocks of a kind by name, those with two labels as `type.name`."""
    blocks: dict[str, Json] = {}
    for file in sorted(MODULE.glob("*.tf")):
        for block in parse(file.name).get(kind, []):
            ((label, body),) = block.items()
            named = (
                {f"{label}.{name}": inner for name, inner in body.items()}
                if kind in ("resource", "data")
                else {label: body}
            )
            assert not blocks.keys() & named.keys()
            blocks |= named
    return blocks


def iterate_strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from iterate_strings(each)


def test_references_and_declarations_match() -> None:
    resources, variables, data = read_blocks("resource"), read_blocks("variable"), read_blocks("data")
    provider = [parse("versions.tf")["provider"]]
    text = "\n".join(iterate_strings([resources, variables, data, read_blocks("output"), provider]))
    assert set(re.findall(r"\bvar\.(\w+)", text)) == set(variables)
    referenced = set(re.findall(r"(?<!data\.)\b(google_\w+\.\w+)\.", text))
    assert referenced <= set(resources)
    assert set(re.findall(r"\bdata\.(google_\w+\.\w+)", text)) == set(data)


def test_variables_and_outputs_have_descriptions() -> None:
    for block in (*read_blocks("variable").values(), *read_blocks("output").values()):
        assert block["description"].endswith(".")
    assert all("type" in variable for variable in read_blocks("variable").values())


def test_example_sets_known_variables_and_every_required_one() -> None:
    variables, example = read_blocks("variable"), parse("example.tfvars")
    assert example.keys() <= variables.keys()
    assert {name for name, variable in variables.items() if "default" not in variable} <= example.keys()


def test_rights_are_least_and_on_one_resource() -> None:
    """A binding or a policy instead of a member would remove the members that others added."""
    grants = {name: each for name, each in read_blocks("resource").items() if "_iam_" in name}
    assert {name: each["role"] for name, each in grants.items()} == ROLES
    assert all(name.partition(".")[0].endswith("_iam_member") for name in grants)
    assert not {"google_service_account_key", "google_storage_hmac_key"} & {
        name.partition(".")[0] for name in read_blocks("resource")
    }, "a key would be in the state"


def test_workload_identity_is_that_of_the_pipelines_account() -> None:
    member = read_blocks("resource")["google_storage_bucket_iam_member.teams"]["member"]
    accounts = [
        each["metadata"]["name"] for each in render_overlay("xe9680-powerscale") if each["kind"] == "ServiceAccount"
    ]
    namespace, account = member.rpartition("/subject/ns/")[2].split("/sa/")
    assert namespace == "${each.key}"
    assert account in accounts
    cluster = read_blocks("resource")["google_container_cluster.this"]
    assert cluster["workload_identity_config"][0]["workload_pool"] == "${var.project}.svc.id.goog"


@pytest.mark.parametrize("pool", ["system", "training", "serving"])
def test_node_pools_use_the_restricted_account_and_hide_its_credentials(pool: str) -> None:
    (config,) = read_blocks("resource")[f"google_container_node_pool.{pool}"]["node_config"]
    assert config["service_account"] == "${google_service_account.nodes.email}"
    assert config["workload_metadata_config"][0]["mode"] == "GKE_METADATA"
    assert config["shielded_instance_config"][0]["enable_secure_boot"] is True
    accelerators = config.get("guest_accelerator", [])
    assert len(accelerators) == (pool != "system")
    assert all(each["gpu_driver_installation_config"][0]["gpu_driver_version"] == "LATEST" for each in accelerators)


def test_labels_of_the_nodes_are_those_of_the_overlay() -> None:
    deployments = [each for each in render_overlay("xe9680-powerscale") if each["kind"] == "Deployment"]
    (selector,) = [found for each in deployments if (found := each["spec"]["template"]["spec"].get("nodeSelector"))]
    pools = read_blocks("resource")
    assert selector == pools["google_container_node_pool.serving"]["node_config"][0]["labels"]
    assert "node.example/model" in pools["google_container_node_pool.training"]["node_config"][0]["labels"]


def test_network_policies_are_enforced_and_nodes_are_private() -> None:
    cluster = read_blocks("resource")["google_container_cluster.this"]
    assert cluster["network_policy"] == [{"enabled": True, "provider": "CALICO", "__is_block__": True}]
    assert cluster["addons_config"][0]["network_policy_config"][0]["disabled"] is False
    assert cluster["private_cluster_config"][0]["enable_private_nodes"] is True
    assert cluster["master_authorized_networks_config"][0]["gcp_public_cidrs_access_enabled"] is False


def test_bucket_is_private_and_data_is_protected() -> None:
    resources, variables = read_blocks("resource"), read_blocks("variable")
    bucket = resources["google_storage_bucket.artifacts"]
    assert bucket["public_access_prevention"] == "enforced"
    assert bucket["uniform_bucket_level_access"] is True
    assert bucket["force_destroy"] == "${!var.deletion_protection}"
    assert variables["deletion_protection"]["default"] is True
    assert resources["google_filestore_instance.work"]["deletion_protection_enabled"] == "${var.deletion_protection}"


def test_output_names_keys_of_site_yaml() -> None:
    site = yaml.safe_load((DEPLOY / "overlays" / "xe9680-powerscale" / "site.yaml").read_text(encoding="utf-8"))["data"]
    assert read_blocks("output")["site"]["value"].keys() <= site.keys()


def test_broken_file_is_refused() -> None:
    """The parser is strict: a missing brace or an attribute without a value is an error."""
    text = (MODULE / "cluster.tf").read_text(encoding="utf-8")
    for broken in (text.replace("}", "", 1), text.replace('"CALICO"', "", 1)):
        with pytest.raises(Exception, match=r"Unexpected|Expected"):
            hcl2.loads(broken)
