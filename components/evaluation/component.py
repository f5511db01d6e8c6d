"""Evaluation as a Kubeflow component."""

from typing import NamedTuple

from kfp import dsl

from components.common.images import EVALUATION


@dsl.component(base_image=EVALUATION, install_kfp_package=False)
def evaluation(
    plan: str, model: str, dataset: str, report: dsl.Output[dsl.HTML], links: dsl.Output[dsl.Markdown], metrics: dsl.Output[dsl.Metrics]
) -> NamedTuple("Outputs", [("evaluation", str), ("verdict", str)]):
    """Measure a model against its base and the model in service. `plan`: configuration, incumbent digest, seed and code digest."""
    import json

    from components.common import models, step
    from components.evaluation.config import EvaluationConfig
    from components.evaluation.stage import evaluate

    p = json.loads(plan)

    def build(out, s):  # type: ignore[no-untyped-def]
        opened = [models.from_artifact(s.artifact(sha, "model"), s.reporter) for sha in (model, p["incumbent"]) if sha]
        options = {"incumbent": opened[1] if p["incumbent"] else None, "seed": p["seed"], "state": s.workdir.state, "reporter": s.reporter}
        return evaluate(opened[0], s.artifact(dataset, "dataset"), out, EvaluationConfig(**p["config"]), **options)

    made = step.produce("evaluation", {"plan": p, "model": model, "dataset": dataset}, build, links.path)
    step.copy_report(made, report.path)
    step.show_figures(made, metrics)
    return (made.sha256, made.manifest.summary["verdict"])
