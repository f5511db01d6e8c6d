"""MLflow and the models under names with TLS: Ingress and Gateway API name existing services, hosts and namespaces.

Default tier: rendered manifests, in milliseconds. tests/deploy/test_objects.py checks their fields.
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.deploy.rendering import (
    DEPLOY,
    OVERLAYS,
    Json,
    render_with_optional,
    select_kind,
    selector_matches,
    team_namespace,
)

each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


def read_site(overlay: str) -> dict[str, str]:
    site: Any = yaml.safe_load((DEPLOY / "overlays" / overlay / "site.yaml").read_text(encoding="utf-8"))
    return dict(site["data"])


def find_port(manifests: list[Json], namespace: str, service: str, port: str | int) -> Json:
    """Return the port of a service by its name or number."""
    ports = select_kind(manifests, "Service", namespace)[service]["spec"]["ports"]
    (found,) = [each for each in ports if port in (each["name"], each["port"])]
    return dict(found)


@each_overlay
def test_ingresses_have_the_hosts_of_the_site_and_certificates(overlay: str) -> None:
    manifests, site = render_with_optional(overlay), read_site(overlay)
    hosts = {("mlflow", "mlflow"): site["mlflow-host"], (team_namespace(overlay), "triton"): site["serving-host"]}
    ingresses = [each for each in manifests if each["kind"] == "Ingress"]
    assert len(ingresses) == len(hosts)
    for ingress in ingresses:
        name, namespace, spec = ingress["metadata"]["name"], ingress["metadata"]["namespace"], ingress["spec"]
        (rule,), (tls,) = spec["rules"], spec["tls"]
        assert [rule["host"]] == tls["hosts"] == [hosts[namespace, name]]
        assert ingress["metadata"]["annotations"] == {"cert-manager.io/cluster-issuer": site["cluster-issuer"]}
        assert spec["ingressClassName"] == site["ingress-class"]
        for path in rule["http"]["paths"]:
            backend = path["backend"]["service"]
            assert find_port(manifests, namespace, backend["name"], backend["port"]["name"])


@each_overlay
def test_routes_are_accepted_by_a_listener_with_their_host(overlay: str) -> None:
    manifests, site = render_with_optional(overlay), read_site(overlay)
    (gateway,) = select_kind(manifests, "Gateway").values()
    assert gateway["spec"]["gatewayClassName"] == site["ingress-class"]
    assert gateway["metadata"]["annotations"] == {"cert-manager.io/cluster-issuer": site["cluster-issuer"]}
    listeners = {each["name"]: each for each in gateway["spec"]["listeners"]}
    assert {name: each["hostname"] for name, each in listeners.items()} == {
        "mlflow": site["mlflow-host"],
        "models": site["serving-host"],
    }
    labels = {name: each["metadata"].get("labels", {}) for name, each in select_kind(manifests, "Namespace").items()}
    labels.setdefault("kubeflow", {"tuneline/uses-mlflow": "true"})  # docs/how-to/install.md labels it
    routes = [each for each in manifests if each["kind"] == "HTTPRoute"]
    assert len(routes) == len(listeners)
    for route in routes:
        namespace, (parent,) = route["metadata"]["namespace"], route["spec"]["parentRefs"]
        assert (parent["namespace"], parent["name"]) == (gateway["metadata"]["namespace"], gateway["metadata"]["name"])
        listener = listeners[parent["sectionName"]]
        assert route["spec"]["hostnames"] == [listener["hostname"]]
        own = labels[namespace] | {"kubernetes.io/metadata.name": namespace}
        assert selector_matches(listener["allowedRoutes"]["namespaces"]["selector"], own)
        for rule in route["spec"]["rules"]:
            (backend,) = rule["backendRefs"]
            assert find_port(manifests, namespace, backend["name"], backend["port"])


@each_overlay
def test_network_policies_let_the_proxies_of_the_gateway_in(overlay: str) -> None:
    manifests = render_with_optional(overlay)
    (gateway,) = select_kind(manifests, "Gateway").values()
    labels = select_kind(manifests, "Namespace")[gateway["metadata"]["namespace"]]["metadata"]["labels"]
    for namespace, name in (("mlflow", "mlflow"), (team_namespace(overlay), "triton")):
        sources = select_kind(manifests, "NetworkPolicy", namespace)[name]["spec"]["ingress"][0]["from"]
        assert any(selector_matches(each["namespaceSelector"], labels) for each in sources)


@each_overlay
def test_only_the_api_of_the_models_is_exposed(overlay: str) -> None:
    """The gateway has metrics and health checks under other paths."""
    manifests = render_with_optional(overlay)
    namespace = team_namespace(overlay)
    (rule,) = select_kind(manifests, "Ingress", namespace)["triton"]["spec"]["rules"]
    assert [path["path"] for path in rule["http"]["paths"]] == ["/v1"]
    (route,) = select_kind(manifests, "HTTPRoute", namespace)["triton"]["spec"]["rules"]
    assert [match["path"]["value"] for match in route["matches"]] == ["/v1"]
    assert route["timeouts"] == {"request": "0s"}, "a limit would end a streamed answer"
