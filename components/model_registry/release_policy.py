"""Release policy of a registered model: what a version must satisfy to be the champion, and who promotes it.

`promotion_policy` records policies in the history, `policy_checks` compares versions with them.
"""

from __future__ import annotations

import operator
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from components.common.gate_rules import Rule
from components.common.runtime.errors import ConfigurationError
from components.common.runtime.validation_errors import describe_validation_error
from components.common.runtime.yaml_loading import StrictLoader, describe_yaml_error, load_yaml
from components.model_registry.config import check_approval_count
from components.model_registry.trust_root import KeyId

Name = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, pattern=r"^[^\n]*$")]
MAX_ITEMS, MAX_DAYS = 10**9, 36_500
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Metric = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*\.[A-Za-z0-9_,@.-]+$")]


class RequiredTask(BaseModel):
    """A task that the evaluation must have measured."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$", description="Name of the task in evaluation.tasks.")
    kind: str | None = Field(None, min_length=1, description="Kind of the task. null: any kind.")
    items_sha256: Digest | None = Field(
        None,
        description="Digest of the task's items, as tasks.NAME.items_sha256 in evaluation.json. null: any items.",
    )
    files_sha256: list[Digest] = Field(
        [], description="SHA-256 digests of files that the task must read. Empty: any files."
    )
    min_items: int | None = Field(None, ge=2, le=MAX_ITEMS, description="Minimum number of items. null: any number.")
    min_kappa: float | None = Field(
        None,
        ge=0,
        lt=1,
        exclude_if=lambda limit: limit is None,
        description="Agreement (kappa_bound) that the calibration of a judge must exceed. null: 0.4, if a rule uses the judge.",
    )


class Policy(BaseModel):
    """The approvers of promotions, and the requirements for a version. A candidate's own rules may only be stricter."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    approvers: list[Name] = Field(
        [],
        description="Names of the approvers, as passed with --by. Empty: everyone with write access to the registry.",
    )
    approvals_required: int = Field(1, ge=1, le=2, description="Number of approvals that a promotion requires.")
    tasks: list[RequiredTask] = Field([], description="Tasks that the evaluation must include.")
    suite: Literal["default"] | None = Field(
        None,
        exclude_if=operator.not_,
        description="default: the evaluation must contain the tasks, items and rules of the regression suite, as "
        "defined by the tuneline version that promotes. null: the suite is not required.",
    )
    rules: list[Rule] = Field(
        [], description="Rules of the gate, as in evaluation.gate. The evaluation's rules must be at least as strict."
    )
    slice_min_items: int | None = Field(
        None,
        ge=2,
        le=MAX_ITEMS,
        description="Minimum number of items of a slice for the required rules over slices. The evaluation must use "
        "the same number. null: 10.",
    )
    min_items: int | None = Field(
        None,
        ge=2,
        le=MAX_ITEMS,
        description="Minimum number of items of every task that a rule of the gate compares. null: any number.",
    )
    confidence: float | None = Field(
        None,
        gt=0.5,
        lt=1,
        description="Minimum confidence of the gate's rules, except rules over slices. null: any confidence.",
    )
    max_loss: dict[Metric, Annotated[float, Field(ge=0)]] = Field(
        {}, description="Largest max_loss of a rule of the gate, by metric."
    )
    licences: list[Name] | None = Field(
        None, min_length=1, description="Allowed licences of the base model, such as apache-2.0. null: any licence."
    )
    max_evaluation_age_days: int | None = Field(
        None, ge=1, le=MAX_DAYS, description="Maximum age of the evaluation at promotion, in days. null: any age."
    )

    signatures: Literal["required"] | None = Field(
        None,
        exclude_if=operator.not_,
        description="required: the history and every artifact of the version's lineage are signed with a trusted "
        "key, and every input has an attestation. null: signatures are not required.",
    )
    trusted_keys: list[KeyId] = Field(
        [],
        exclude_if=operator.not_,
        description="IDs of the keys and identities in TUNELINE_TRUST whose signatures of artifacts are accepted. "
        "Empty: all of them.",
    )

    @model_validator(mode="after")
    def _check_approval_count(self) -> Policy:
        check_approval_count(self.approvers, self.approvals_required)
        return self

    @model_validator(mode="after")
    def _check_contradictions(self) -> Policy:
        counts = Counter(task.name for task in self.tasks)
        if duplicates := sorted(name for name, count in counts.items() if count > 1):
            raise ValueError(f"tasks: duplicate name {duplicates[0]}; expected a distinct name for each task")
        if self.trusted_keys and not self.signatures:
            raise ValueError("trusted_keys is set, but signatures is null; expected signatures: required")
        if self.slice_min_items is not None and not any(rule.slices for rule in self.rules):
            raise ValueError(
                f"slice_min_items is {self.slice_min_items}, but no rule has slices; expected null, or a rule with slices"
            )
        return self

    @property
    def has_requirements(self) -> bool:
        """Whether the policy requires anything of a version, apart from approvals."""
        return bool(self.model_dump(exclude={"approvers", "approvals_required"}, exclude_defaults=True))


def read_policy(path: Path) -> Policy:
    """Read a policy from a YAML file.

    Raises:
        ConfigurationError: the file is not a valid policy, or no version could satisfy the policy.
    """
    import yaml

    try:
        values = load_yaml(path.read_text(encoding="utf-8"), StrictLoader)
        if values is None or values == {}:  # an empty file would remove every requirement and approver
            raise ConfigurationError(
                f"{path} has no key; expected a policy", hint="To remove all requirements, write approvers: []."
            )
        return Policy.model_validate(values)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(
            f"{path} cannot be read: {describe_yaml_error(error)}",
            hint="Pass a YAML file, such as mlflow/promotion-policy.yaml.",
        ) from None
    except ValidationError as error:
        raise ConfigurationError(
            describe_validation_error(error, str(path), Policy),
            hint="Correct the file; mlflow/promotion-policy.yaml is an example.",
        ) from None
