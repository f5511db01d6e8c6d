"""The promotion pipeline: promote a version, then deploy it to Triton; a failed deployment restores the alias."""

import json
from collections.abc import Callable
from functools import partial

from kfp import dsl

from components.common.runtime.container_images import SERVING_IMAGE
from pipelines.config.customization_config import Customization
from pipelines.config.platform_config import Platform
from pipelines.definition import pod_spec
from pipelines.definition.customization_pipeline import report_end


@dsl.component(base_image=SERVING_IMAGE, install_kfp_package=False)
def promote(model_name: str, version: str, alias: str, by: str, reason: str, force: bool, configuration: str) -> str:
    """Move the alias after the checks of `tuneline promote`. Return the promotion as JSON."""
    import json

    from components.common import pipeline_step
    from pipelines.deployment import watcher

    with pipeline_step.step_context("promote") as s:
        moved = watcher.promote(
            model_name,
            version,
            alias=alias,
            by=by,
            reason=reason,
            force=force,
            configuration=configuration,
            reporter=s.reporter,
        )
        s.report_result(**moved)
    return json.dumps(moved)


@dsl.component(base_image=SERVING_IMAGE, install_kfp_package=False)
def deploy(promoted: str, triton_grpc_url: str, served_as: str) -> str:
    """Fetch, verify, load and test the version, then switch to it. Return the deployment as JSON."""
    import json

    from components.common import pipeline_step
    from pipelines.deployment import watcher

    with pipeline_step.step_context("deploy") as s:
        served = watcher.deploy_promoted(
            json.loads(promoted),
            triton_grpc_url,
            served_as=served_as,
            folder=s.workdir.root,
            reporter=s.reporter,
        )
        s.report_result(**served)
    return json.dumps(served)


def build(config: Customization, platform: Platform | None = None) -> Callable[..., dsl.PipelineTask]:
    """Return the pipeline function that kfp compiles, with the model's name and approvers as defaults.

    Args:
        config: The customization with the model's name and approvers.
        platform: The cluster whose pods the tasks are configured for; None for the default images without a volume.
    """
    policy = config.model_registry.model_dump(include={"approvers", "approvals_required"})

    configure = partial(pod_spec.configure_task, platform=platform, cached=False)  # a promotion always runs

    @dsl.pipeline(
        name="tuneline-promotion",
        description="Promote a model version and deploy it without losing requests.",
        pipeline_config=pod_spec.pipeline_config(platform),
    )
    def promotion(
        version: str,
        by: str,
        model_name: str = config.model_registry.name,
        alias: str = "champion",
        reason: str = "",
        force: bool = False,
        triton_grpc_url: str = "",
        served_as: str = "",
        configuration: str = json.dumps(policy, sort_keys=True),
    ) -> None:
        """Promote a version, and deploy it if a Triton server is given.

        Args:
            version: Number of the version in the registry.
            by: User who promotes, recorded in the history; an approver, if approvers are configured.
            model_name: Name of the registered model.
            alias: Alias to move.
            reason: Reason, recorded in the history; required for a forced promotion.
            force: Promote despite failed checks.
            triton_grpc_url: gRPC address of a Triton server in explicit mode, for example triton:8001. Empty: `tuneline deploy --watch` follows the alias.
            served_as: Name of the model in Triton. Empty: the name in the first package that is deployed there.
            configuration: Approvers as JSON, used if the registry has no policy.
        """
        with report_end(platform, "promote", deployed_to=triton_grpc_url):
            moved = configure(
                promote(
                    model_name=model_name,
                    version=version,
                    alias=alias,
                    by=by,
                    reason=reason,
                    force=force,
                    configuration=configuration,
                )
            )
            with dsl.If(triton_grpc_url != "", name="into-service"):
                configure(deploy(promoted=moved.output, triton_grpc_url=triton_grpc_url, served_as=served_as))

    return promotion  # type: ignore[no-any-return] # kfp's decorators are untyped
