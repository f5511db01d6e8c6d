"""Triton packaging as a Kubeflow component."""

from typing import NamedTuple

from kfp import dsl

from components.common.runtime.container_images import SERVING_IMAGE


@dsl.component(base_image=SERVING_IMAGE, install_kfp_package=False)
def triton_packaging(
    config: str,
    inputs: str,
    seed: int,
    model: str,
    report: dsl.Output[dsl.HTML],
    links: dsl.Output[dsl.Markdown],
    triton_package: dsl.Output[dsl.Model],
    tuned_model: dsl.Input[dsl.Model] = None,
    evaluation: str = "",
) -> NamedTuple("Outputs", [("repository", str)]):
    """Make a Triton model repository and prove it in a real server.

    Args:
        config: The section triton_packaging of the customization, as JSON.
        inputs: The code digest, and the reason why a server cannot test the package; null if it can, as JSON.
        seed: Seed of the generated answers.
        model: Digest of the model artifact.
        report: Packaging report.
        links: Links to the run and its artifacts.
        triton_package: Manifest of the model repository; its digest and address are the metadata.
        tuned_model: The model for Kubeflow's lineage; the digest selects the artifact.
        evaluation: Digest of the model's evaluation, whose calibrated weights are packaged; empty without an evaluation.

    Returns:
        Digest of the model repository artifact.
    """
    import json

    from components.common import pipeline_step
    from components.common.models import model_loading
    from components.common.models.quantizations import find_quantization
    from components.triton_packaging.config import TritonPackagingConfig
    from components.triton_packaging.stage import package

    p = {"config": json.loads(config), "seed": seed, **json.loads(inputs)}
    settings = TritonPackagingConfig(**p["config"])
    entry = find_quantization(settings.quantization)
    evaluated = evaluation if entry and entry.is_calibrated else ""  # others do not depend on the evaluation

    def build(out, s):  # type: ignore[no-untyped-def]
        artifact = s.load_artifact(model, "model")
        opened = model_loading.open_model_artifact(artifact, s.reporter)
        dataset, weights = None, ""
        if settings.quantization != "none" and (trained_on := artifact.manifest.find_input("dataset")):
            dataset = s.load_artifact(trained_on.content_sha256, "dataset")
        if evaluated:
            result = s.load_artifact(evaluated, "evaluation").path / "evaluation.json"
            weights = json.loads(result.read_text(encoding="utf-8"))["measured"]["calibration"]["weights_sha256"]
        options = {"dataset": dataset, "state": s.workdir.state, "evaluated_weights": weights}
        return package(opened, out, settings, seed=seed, reporter=s.reporter, **options)

    key = {"plan": p, "model": model, "evaluation": evaluated}
    made = pipeline_step.produce_artifact("triton_packaging", key, build, links.path)
    pipeline_step.copy_report(made, report.path)
    pipeline_step.describe_to_kfp(made, triton_package)
    return (made.sha256,)
