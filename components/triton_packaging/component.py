"""Triton packaging as a Kubeflow component."""

from typing import NamedTuple

from kfp import dsl

from components.common.images import SERVING


@dsl.component(base_image=SERVING, install_kfp_package=False)
def triton_packaging(plan: str, model: str, report: dsl.Output[dsl.HTML], links: dsl.Output[dsl.Markdown]) -> NamedTuple(
    "Outputs", [("repository", str)]
):
    """Make a Triton model repository and prove it in a real server. `plan`: configuration, seed and code digest, as JSON."""
    import json

    from components.common import models, step
    from components.triton_packaging.config import TritonPackagingConfig
    from components.triton_packaging.stage import package

    p = json.loads(plan)

    def build(out, s):  # type: ignore[no-untyped-def]
        opened = models.from_artifact(s.artifact(model, "model"), s.reporter)
        return package(opened, out, TritonPackagingConfig(**p["config"]), seed=p["seed"], reporter=s.reporter)

    made = step.produce("triton_packaging", {"plan": p, "model": model}, build, links.path)
    step.copy_report(made, report.path)
    return (made.sha256,)
