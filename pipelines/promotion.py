"""The pipeline of a release: promote a version, then bring it into service in a running Triton; a version that does not get there gives the
alias back."""

import json
from typing import Any

from kfp import dsl

from components.common.images import SERVING
from pipelines import pods
from pipelines.config import Customization
from pipelines.platform import Platform


@dsl.component(base_image=SERVING, install_kfp_package=False)
def promote(model_name: str, version: str, alias: str, by: str, reason: str, force: bool, configuration: str) -> str:
    """Move the alias, after every check of `tuneline promote`. Returns what moved, as JSON."""
    import json

    from components.common import step
    from pipelines import deploying

    with step.running("promote") as s:
        moved = deploying.promoted(
            model_name, version, alias=alias, by=by, reason=reason, force=force, configuration=configuration, reporter=s.reporter
        )
        s.result(**moved)
    return json.dumps(moved)


@dsl.component(base_image=SERVING, install_kfp_package=False)
def deploy(promoted: str, triton_url: str, triton_grpc_url: str, served_as: str) -> str:
    """Fetch the version, verify it, load it beside the one in service, ask it, switch. Returns what is served, as JSON."""
    import json

    from components.common import step
    from pipelines import deploying

    with step.running("deploy") as s:
        served = deploying.in_service(
            json.loads(promoted), triton_url, triton_grpc_url, served_as=served_as, folder=s.workdir.root, reporter=s.reporter
        )
        s.result(**served)
    return json.dumps(served)


def build(config: Customization, platform: Platform | None = None) -> Any:
    """The pipeline with this customization's model name and approvers; its pods made for this platform: a function that kfp compiles."""
    policy = config.model_registry.model_dump(include={"approvers", "approvals_required"})

    def placed(task: dsl.PipelineTask) -> dsl.PipelineTask:
        return pods.prepared(task, platform, cached=False)  # a promotion is made anew each time

    @dsl.pipeline(
        name="tuneline-promotion",
        description="Promote a model version and bring it into service without losing a request.",
        pipeline_config=pods.pipeline_config(platform),
    )
    def promotion(
        version: str,
        by: str,
        model_name: str = config.model_registry.name,
        alias: str = "champion",
        reason: str = "",
        force: bool = False,
        triton_url: str = "",
        triton_grpc_url: str = "",
        served_as: str = "",
        configuration: str = json.dumps(policy, sort_keys=True),
    ) -> str:
        """Promote a version; where a Triton is named, bring it into service there.

        Args:
            version: The version's number in the registry.
            by: Who promotes; kept in the history, and one of the approvers where there are any.
            model_name: The registered model.
            alias: The alias to move.
            reason: Why; kept in the history. A forced promotion needs one.
            force: Promote against what the checks say.
            triton_url: HTTP address of a Triton in explicit mode, http://triton:8000. Empty: `tuneline deploy --watch` follows the alias.
            triton_grpc_url: The same server's gRPC address, for example triton:8001.
            served_as: The model's name in Triton; empty: that of the first package served there.
            configuration: Approvers, where the registry holds no policy of its own.
        """
        moved = placed(
            promote(model_name=model_name, version=version, alias=alias, by=by, reason=reason, force=force, configuration=configuration)
        )
        with dsl.If(triton_url != "", name="into-service"):
            placed(deploy(promoted=moved.output, triton_url=triton_url, triton_grpc_url=triton_grpc_url, served_as=served_as))
        return moved.output  # type: ignore[no-any-return] # kfp's outputs are untyped

    return promotion
