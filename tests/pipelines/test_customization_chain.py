"""`tuneline run` with several configurations: each run tunes the model of the run before.

Long tier: the test of SFT and DPO runs the pipeline twice.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.common.gate_rules import SUITE_PREFIX
from components.common.runtime.errors import ConfigurationError
from components.common.runtime.reporters import SilentReporter
from components.common.workspace.artifact_store import Workdir
from components.model_registry import signing_keys
from pipelines.config.customization_chain import load_chain, replace_base_model
from pipelines.config.customization_config import Customization
from pipelines.runs import local_runner, run_summary
from pipelines.steps import chain_check
from tests.pipelines.command import ROOT, answer, refusal, run_in_process
from tests.pipelines.project import CONFIGURATION, write_project
from tests.tiny import tiny_model

DIGESTS = ("a" * 64, "b" * 64)


def write_chain(folder: Path, *sections: dict[str, Any]) -> list[Path]:
    """Write a configuration per section `fine_tuning`."""
    (folder / "raw.jsonl").write_text('{"instruction": "What?", "input": "", "output": "That."}\n')
    paths = [folder / f"{number}.yaml" for number in range(len(sections))]
    for path, section in zip(paths, sections, strict=True):
        values = {"data_curation": {"sources": ["raw.jsonl"]}, "fine_tuning": section}
        values["model_registry"] = {"name": f"model-{path.stem}"}
        path.write_text(yaml.safe_dump(values))
    return paths


def test_later_customization_tunes_the_model_of_the_one_before(tmp_path: Path) -> None:
    paths = write_chain(tmp_path, {"base_model": "/a"}, {"objective": "dpo"}, {"base_model": "/b"}, {})
    chain = load_chain(paths, ["fine_tuning.max_steps=3"])
    assert [link.tuned for link in chain] == [None, 0, None, 2]
    # Until the model exists, the base of the one before stands for it: both have one architecture.
    assert [link.customization.fine_tuning.base_model for link in chain] == ["/a", "/a", "/b", "/b"]
    assert {link.customization.fine_tuning.max_steps for link in chain} == {3}
    changed = replace_base_model(chain[1].customization, f"store:{DIGESTS[0]}")
    assert changed.fine_tuning.base_model == changed.data_curation.tokens.base_model == f"store:{DIGESTS[0]}"
    assert changed.fine_tuning.objective == "dpo"


def test_example_of_the_documentation_is_a_chain() -> None:
    paths = [ROOT / "docs" / "examples" / "sft-dpo" / name for name in ("sft.yaml", "dpo.yaml")]
    sft, dpo = load_chain(paths, [])
    assert (sft.tuned, dpo.tuned) == (None, 0)
    assert sft.customization.model_registry.name != dpo.customization.model_registry.name
    gate = [rule for rule in dpo.customization.evaluation.gate if not rule.metric.startswith(SUITE_PREFIX)]
    assert [(rule.metric, rule.min_gain) for rule in gate if rule.against == "base" and not rule.slices] == [
        ("preference.margin", 0.0),
        ("held_out.loss", None),
    ]


def test_override_of_the_base_model_applies_to_the_start_of_a_chain(tmp_path: Path) -> None:
    chain = load_chain(write_chain(tmp_path, {}, {}), ["fine_tuning.base_model=/c"])
    assert [(link.customization.fine_tuning.base_model, link.tuned) for link in chain] == [("/c", None), ("/c", 0)]


def test_reward_model_of_a_chain_scores_the_answers_of_the_model_before_it(tmp_path: Path) -> None:
    rewarded = {"objective": "grpo", "grpo": {"rewards": [{"kind": "reward_model", "model": "previous"}]}}
    chain = load_chain(write_chain(tmp_path, {"base_model": "/a"}, {"objective": "reward"}, rewarded), [])
    assert [(link.tuned, link.rewarded_by) for link in chain] == [(None, None), (0, None), (0, 1)]
    assert chain[2].customization.fine_tuning.base_model == "/a"
    with pytest.raises(ConfigurationError, match=r"1\.yaml: .* no earlier customization trains a reward model"):
        load_chain(write_chain(tmp_path, {"base_model": "/a"}, rewarded), [])


def test_reward_model_and_language_model_of_a_chain_have_different_names(tmp_path: Path) -> None:
    paths = write_chain(tmp_path, {}, {"objective": "reward"}, {})
    with pytest.raises(
        ConfigurationError, match=r"name is one in .*0\.yaml and in .*1\.yaml, of which one trains a reward"
    ):
        load_chain(paths, ["model_registry.name=one"])
    assert len(load_chain([paths[0], paths[2]], ["model_registry.name=one"])) == 2


def test_dry_run_refuses_a_reward_model_with_another_tokenizer(tmp_path: Path) -> None:
    bases = [tiny_model(tmp_path / "tiny"), tiny_model(tmp_path / "other")]
    (bases[1] / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    rewarded = {"objective": "grpo", "grpo": {"rewards": [{"kind": "reward_model", "model": "previous"}]}}
    sections = {"base_model": str(bases[0])}, {"objective": "reward", "base_model": str(bases[1])}, rewarded
    options = [part for path in write_chain(tmp_path, *sections) for part in ("-c", path)]
    for arguments in (["--dry-run"], []):
        process = run_in_process("run", *options, *arguments, "--workdir", tmp_path / "wd", "--json", cwd=tmp_path)
        assert process.returncode == 2
        assert "whose tokenizer or chat template differs" in json.loads(process.stdout)["error"]["message"]


JUDGE = {"kind": "judge", "judge": {"base_url": "http://127.0.0.1:9/v1", "model": "j", "api_key_env": "ABSENT_KEY"}}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"objective": "grpo", "packing": False, "grpo": {"rewards": [JUDGE]}}, "ABSENT_KEY"),
        ({"initial_adapter": "/none"}, "fine_tuning.initial_adapter: /none"),
        ({}, "TUNELINE_SIGNING_KEY"),
    ],
    ids=["judge key", "adapter", "signer of the policy check"],
)
def test_later_customization_is_checked_like_the_first(
    section: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    if not section:
        monkeypatch.setenv(signing_keys.KEY_VARIABLE, "/none.pem")
    base = str(tiny_model(tmp_path / "tiny"))
    options = ["evaluation.suite=none", "evaluation.tasks=[{kind: held_out}]"]
    chain = load_chain(write_chain(tmp_path, {"base_model": base}, {"base_model": base, **section}), options)
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        chain_check.check_later_customizations(chain, Workdir(tmp_path / "wd"), SilentReporter())


def test_virtual_tokens_cannot_be_tuned_further(tmp_path: Path) -> None:
    paths = write_chain(tmp_path, {"adaptation": "p_tuning"}, {})
    with pytest.raises(
        ConfigurationError, match=r"1\.yaml tunes the model of .*0\.yaml, whose adaptation p_tuning cannot"
    ):
        load_chain(paths, [])
    paths = write_chain(tmp_path, {"adaptation": "p_tuning"}, {"base_model": "/b"})
    assert load_chain(paths, [])[1].tuned is None


def test_initial_adapter_requires_a_base_model_in_a_chain(tmp_path: Path) -> None:
    paths = write_chain(tmp_path, {"base_model": "/a"}, {"initial_adapter": "/sft"})
    with pytest.raises(ConfigurationError, match=r"1\.yaml sets fine_tuning\.initial_adapter, which must match"):
        load_chain(paths, [])
    paths = write_chain(tmp_path, {"base_model": "/a"}, {"initial_adapter": "/sft", "base_model": "/a"})
    assert load_chain(paths, [])[1].tuned is None


@pytest.mark.parametrize(("first_verdict", "exit_code"), [("accepted", 0), ("unchanged", 0), ("refused", 3)])
def test_chain_runs_until_a_gate_refuses_a_model(
    first_verdict: str, exit_code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[str] = []

    def fake_run(config: Customization, *_: object, **__: object) -> dict[str, Any]:
        model, verdict = DIGESTS[len(runs)], ["accepted", first_verdict][not runs]
        runs.append(config.fine_tuning.base_model)
        return {"verdict": verdict, "artifacts": {"model": f"/store/{model}"}}

    monkeypatch.setattr(local_runner, "run", fake_run)
    base = str(tiny_model(tmp_path / "tiny"))
    monkeypatch.setattr(run_summary, "format_run", lambda result: [f"verdict: {result['verdict']}"])
    paths = write_chain(tmp_path, {"base_model": base}, {})
    arguments = ["run", "-c", paths[0], "-c", paths[1], "--workdir", tmp_path / "wd", "--fail-on-refusal"]
    process = run_in_process(*arguments, "--json", cwd=tmp_path)
    result = json.loads(process.stdout)
    assert process.returncode == exit_code
    expected = [base, f"store:{DIGESTS[0]}"][: 1 if exit_code else 2]
    assert runs == expected
    assert len(result["chain"]) == len(expected)
    assert {name: result[name] for name in ("verdict", "artifacts")} == result["chain"][-1]
    runs.clear()
    text = run_in_process(*arguments, cwd=tmp_path).stdout
    assert (f"not run, because the gate refused the model: {paths[1]}" in text) == bool(exit_code)


def test_later_configuration_is_checked_before_the_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_runner, "run", None)
    paths = write_chain(tmp_path, {}, {"objective": "dpo", "packing": True})
    options = [part for path in paths for part in ("-c", path)]
    arguments = ["run", *options, "--workdir", tmp_path / "wd", "--json"]
    assert run_in_process(*arguments, cwd=tmp_path).returncode == 2
    paths[1].write_text("data_curation: {sources: [missing.jsonl]}\n")
    process = run_in_process(*arguments, cwd=tmp_path)
    assert "missing.jsonl" in json.loads(process.stdout)["error"]["message"]
    tiny_model(tmp_path / "tiny")
    for section, message in (
        ({"lora": {"target_modules": ["nope"]}}, "lora.target_modules"),
        ({"base_model": "/does/not/exist"}, "/does/not/exist"),
        ({"optimizer": "adamw_8bit"}, "adamw_8bit requires an NVIDIA GPU"),
    ):
        write_chain(tmp_path, {"base_model": "tiny"}, section)
        assert message in json.loads(run_in_process(*arguments, cwd=tmp_path).stdout)["error"]["message"]


@pytest.mark.long
@pytest.mark.pipeline
@pytest.mark.daft
@pytest.mark.dvc
@pytest.mark.mlflow
@pytest.mark.triton
def test_sft_and_dpo_in_one_command(tmp_path: Path) -> None:
    project = write_project(tmp_path)
    rows = [json.loads(line) for line in (project / "raw.jsonl").read_text().splitlines()]
    # In reversed word order: a promotion refuses test rows that an earlier model of the lineage was trained on.
    texts = [[" ".join(reversed(row[name].split())) for name in ("instruction", "output")] for row in rows]
    pairs = [{"prompt": prompt, "chosen": chosen, "rejected": "It is red."} for prompt, chosen in texts]
    (project / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    values = yaml.safe_load(CONFIGURATION)
    values["data_curation"]["sources"] = ["pairs.jsonl"]
    del values["fine_tuning"]["base_model"]
    values["fine_tuning"]["objective"] = "dpo"
    values["model_registry"]["name"] = "tiny-dpo"
    (project / "dpo.yaml").write_text(yaml.safe_dump(values))
    chain = ["run", "-c", "customization.yaml", "-c", "dpo.yaml", "--workdir", "wd"]
    estimate = answer(*chain, "--dry-run", cwd=project)
    assert len(estimate["chain"]) == 2
    result = answer(*chain, cwd=project)
    sft, dpo = result["chain"]
    assert result == {**dpo, "chain": [sft, dpo]}
    assert [run["verdict"] for run in (sft, dpo)] == ["accepted", "accepted"]
    assert dpo["artifacts"]["repository"], "the DPO model is packaged over the merged SFT model"
    lineage = answer("lineage", "tiny-dpo@champion", "--workdir", "wd", cwd=project)
    digests = {
        kind: [one["sha256"] for one in lineage["chain"] if one["kind"] == kind] for kind in ("dataset", "model")
    }
    for kind, found in digests.items():
        assert found == [Path(run["artifacts"][kind]).name for run in (dpo, sft)]
    repeated = answer(*chain, cwd=project)
    assert all(
        stage["cached"] for run in repeated["chain"] for stage in run["stages"] if stage["name"] == "fine_tuning"
    )
    assert refusal(2, *chain[:4], "none.yaml", "--dry-run", "--workdir", "wd", cwd=project)["kind"] == "configuration"
