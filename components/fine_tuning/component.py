"""Fine-tuning as a Kubeflow component."""

from typing import NamedTuple

from kfp import dsl

from components.common.images import TRAINING


@dsl.component(base_image=TRAINING, install_kfp_package=False)
def fine_tuning(plan: str, dataset: str, version: str, report: dsl.Output[dsl.HTML], links: dsl.Output[dsl.Markdown]) -> NamedTuple(
    "Outputs", [("model", str)]
):
    """Tune the base model on a dataset. `plan`: configuration, base model digest, seed and code digest; `version`: the dataset's revision."""
    import json

    from components.common import models, step
    from components.common.launch import settings
    from components.fine_tuning.config import recipe_of
    from components.fine_tuning.sweep import tune

    p, uri = json.loads(plan), json.loads(version)["uri"]
    recipe = recipe_of(p["config"], p.pop("where", {}))

    def build(out, s):  # type: ignore[no-untyped-def]
        base = models.base_model(p["config"]["base_model"], s.reporter, p["base_sha256"])
        options = {"seed": p["seed"], "state": s.workdir.state, "reporter": s.reporter, "dataset_uri": uri, "base": base}
        options |= {"where": settings.from_environment(), "tracked": s.tracked}
        return tune(s.artifact(dataset, "dataset"), out, recipe, **options)

    key = {"plan": p, "dataset": dataset, "revision": uri.rpartition("@")[2]}  # a work folder at another place keeps what it has tuned
    made = step.produce("fine_tuning", key, build, links.path)
    step.copy_report(made, report.path)
    return (made.sha256,)
