"""One compiled pipeline for a chain of customizations."""

from __future__ import annotations

import json
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.common.runtime.errors import ConfigurationError, UsageError
from pipelines.config.customization_chain import insert_models, load_chain
from pipelines.config.platform_config import Platform
from pipelines.definition import compilation, run_parameters
from pipelines.definition.chain_steps import ChainStep, name_steps
from pipelines.kubeflow import submission
from pipelines.kubeflow.preflight import kubeflow_pods
from tests.kfp_api import KfpApi, serving
from tests.pipelines.command import ROOT, answer_in_process, run_in_process
from tests.pipelines.test_compiled import PLATFORM_TEXT, find_tasks, load_documents

GOLDEN = ROOT / "tests" / "pipelines" / "golden" / "chain.yaml"
REGENERATE = "if the change is intended: python -P -m tests.pipelines.test_compiled_chain rewrites the golden file"
NAMES = ("sft", "reward", "rlhf")
CACHED = ("data-curation", "fine-tuning", "evaluation", "triton-packaging")


def write_configurations(folder: Path) -> list[Path]:
    """Write the configurations of examples/rlhf with their data in /data."""
    paths = [folder / f"{name}.yaml" for name in NAMES]
    for path in paths:
        text = (ROOT / "examples" / "rlhf" / path.name).read_text(encoding="utf-8")
        path.write_text(text.replace("sources: [", "sources: [/data/"), encoding="utf-8")
    return paths


def compile_example(folder: Path, platform: Platform | None = None) -> str:
    paths = write_configurations(folder)
    chain = load_chain(paths, [], resolve_paths=False, or_demo=False)
    steps = [ChainStep(name, link, platform) for name, link in zip(name_steps(paths), chain, strict=True)]
    return compilation.compile_chain(steps)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return compile_example(tmp_path_factory.mktemp("chain"))


@pytest.fixture(scope="module")
def compiled(text: str) -> dict[str, Any]:
    return load_documents(text)[0]


def test_compiled_chain_equals_the_golden_file(text: str) -> None:
    assert text == GOLDEN.read_text(encoding="utf-8"), REGENERATE


def test_task_names_and_titles_begin_with_the_customization(compiled: dict[str, Any]) -> None:
    tasks = find_tasks(compiled["root"]["dag"], compiled["components"])
    titles = {name: task["taskInfo"]["name"] for name, task in tasks.items()}
    assert titles["reward-evaluation"] == "reward: Evaluate against base and champion"
    assert {name.partition("-")[0] for name in titles.keys() - {"check-chain"}} == set(NAMES)
    repeated = {f"{name}-registration-2" for name in ("sft", "rlhf")}  # of a refused candidate
    assert len({title for name, title in titles.items() if name not in repeated}) == len(titles) - len(repeated)
    assert [name for name in titles if "reward-" in name and ("packaging" in name or "promotion" in name)] == []
    cached = {name for name, task in tasks.items() if task["cachingOptions"].get("enableCache")}
    assert cached == {f"{name}-{step}" for name in NAMES for step in CACHED} - {"reward-triton-packaging"}


def test_later_customizations_wait_for_an_accepted_model_and_take_it(compiled: dict[str, Any]) -> None:
    components, dag = compiled["components"], compiled["root"]["dag"]
    for earlier, later in (("sft", "reward"), ("reward", "rlhf")):
        (group,) = [task for task in dag["tasks"].values() if task["taskInfo"]["name"] == f"{earlier}-not-refused"]
        assert group["triggerPolicy"]["condition"].endswith(f"{earlier}-evaluation-verdict'] != 'refused'")
        assert f"{earlier}-report" in group["dependentTasks"]
        dag = components[group["componentRef"]["name"]]["dag"]
        inputs = dag["tasks"][f"{later}-resolve"]["inputs"]["parameters"]
        assert inputs["tuned_model"] == {"componentInputParameter": "pipelinechannel--sft-fine-tuning-model"}
    assert inputs["reward_model"] == {"componentInputParameter": "pipelinechannel--reward-fine-tuning-model"}
    assert {name for name in dag["tasks"] if not name.startswith("condition")} == {
        f"rlhf-{step}"
        for step in ("resolve", "data-curation", "data-versioning", "fine-tuning", "evaluation", "report")
    }


def test_pods_of_a_chain_equal_those_of_a_customization(tmp_path: Path) -> None:
    settings = yaml.safe_load(PLATFORM_TEXT) | {"launcher": {"kind": "slurm", "slurm": {"partition": "gpu"}}}
    settings["resources"]["fine_tuning"]["retries"] = 2
    platform = Platform.model_validate(settings)
    config = load_chain(write_configurations(tmp_path)[:1], [], resolve_paths=False)[0].customization
    single = kubeflow_pods.build_pods(compilation.compile_pipeline(config, platform))
    text = compile_example(tmp_path, platform)
    pods = kubeflow_pods.build_pods(text)
    compiled = load_documents(text)[0]
    group = compiled["root"]["dag"]["tasks"]["exit-handler-1"]["componentRef"]["name"]
    first_tasks = compiled["components"][group]["dag"]["tasks"]
    assert "dependentTasks" not in first_tasks["check-the-platform"]
    assert first_tasks["check-chain"]["dependentTasks"] == ["check-the-platform"]
    for name, pod in single.items():
        if name in ("check-the-platform", "finish"):
            assert pods[name]["spec"] == pod["spec"]
            continue
        chained = pods[f"sft-{name}"]["spec"]
        (title,) = [pair for pair in chained["containers"][0]["env"] if pair["name"] == "TUNELINE_STEP"]
        title["value"] = title["value"].removeprefix("sft: ")
        for key in ("image", "env", "resources", "volumeMounts"):
            assert chained["containers"][0].get(key) == pod["spec"]["containers"][0].get(key), (name, key)
        assert {**chained, "containers": None} == {**pod["spec"], "containers": None}
    tasks = find_tasks(compiled["root"]["dag"], compiled["components"])
    assert {tasks[f"{name}-fine-tuning"]["retryPolicy"]["maxRetryCount"] for name in NAMES} == {2}


def test_compile_fills_the_requests_of_each_customization(tmp_path: Path) -> None:
    paths = write_configurations(tmp_path)
    (tmp_path / "platform.yaml").write_text("volume: {claim: team-a}\n")
    options = [part for path in paths for part in ("-c", path)]
    command = ("compile", *options, "-p", tmp_path / "platform.yaml", "-o", tmp_path / "chain.yaml")
    result = answer_in_process(*command, cwd=tmp_path)
    (executors,) = (load_documents((tmp_path / "chain.yaml").read_text())[0]["deploymentSpec"]["executors"],)
    for name in NAMES:
        requested = result["requests"][f"{name}: resources.evaluation.memory_request"]
        assert executors[f"exec-{name}-evaluation"]["container"]["resources"]["resourceMemoryRequest"] == requested


def test_names_are_those_of_the_files() -> None:
    assert name_steps([Path("a/SFT v2.yaml"), Path("reward.yaml")]) == ["sft-v2", "reward"]
    assert name_steps([Path("a/sft.yaml"), Path("b/sft.yaml"), Path("__.yaml")]) == [
        "sft-1",
        "sft-2",
        "customization-3",
    ]


def test_texts_of_a_chain_give_the_chain(tmp_path: Path) -> None:
    paths = write_configurations(tmp_path)
    chain = load_chain(paths, [], resolve_paths=False)
    texts = run_parameters.dump_chain(chain)
    assert ["base_model" in text for text in texts] == [True, False, False]
    assert run_parameters.parse_chain(texts) == chain
    # A base model that equals the default still separates a customization from the one before.
    own = load_chain(
        [paths[0], paths[0]], ["fine_tuning.base_model=embedded:smollm2-135m-instruct"], resolve_paths=False
    )
    values = yaml.safe_load(paths[0].read_text())
    values["fine_tuning"]["base_model"] = "embedded:smollm2-135m-instruct"
    paths[1].write_text(yaml.safe_dump(values))
    separate = load_chain(paths[:2], [], resolve_paths=False)
    assert [link.tuned for link in (own[1], separate[1])] == [0, None]
    assert run_parameters.parse_chain(run_parameters.dump_chain(separate)) == separate
    used = insert_models(chain[2], "a" * 64, "b" * 64).fine_tuning
    assert (used.base_model, used.grpo.rewards[0].model) == (f"store:{'a' * 64}", f"store:{'b' * 64}")


def test_changed_configurations_must_fit_the_compiled_tasks(tmp_path: Path, compiled: dict[str, Any]) -> None:
    declared = compiled["root"]["inputDefinitions"]["parameters"]
    texts = declared["configurations"]["defaultValue"]
    changed = [text.replace("max_length: 96", "max_length: 64") for text in texts]
    submission.check_chain_parameter(declared, {"configurations": changed})
    changed[1] = changed[1].replace("max_length", "max_lenth")
    with pytest.raises(ConfigurationError, match=r"configurations\[1\]: fine_tuning\.max_lenth: unknown key"):
        submission.check_chain_parameter(declared, {"configurations": changed})
    with pytest.raises(ConfigurationError) as error:
        submission.check_chain_parameter(declared, {"configurations": texts[:2]})
    assert error.value.message == (
        "configurations trains [0] a language model, [1] a reward model from [0]; the pipeline is compiled for [0] a "
        "language model, [1] a reward model from [0], [2] a language model from [0] and [1]"
    )
    with pytest.raises(ConfigurationError, match=r"the parameter `configurations\[0\]` is a list"):
        submission.check_chain_parameter(declared, {"configurations": ["- a"]})
    for value, kind in (({"seed": 1}, "a mapping"), ([], "a list"), (1, "a number"), (None, "null")):
        with pytest.raises(ConfigurationError, match=rf"^configurations\[1\] is {kind}; expected the text of a custom"):
            submission.check_chain_parameter(declared, {"configurations": [texts[0], value]})
    with pytest.raises(ConfigurationError, match="configurations is an empty list; expected texts"):
        submission.check_chain_parameter(declared, {"configurations": []})
    with pytest.raises(UsageError, match="the parameter configurations is 'abc'; expected a list of strings"):
        submission.parse_parameters(["configurations=abc"], declared)


def test_submitted_chain_is_one_run_and_its_parameter_is_checked(tmp_path: Path) -> None:
    options = [part for path in write_configurations(tmp_path) for part in ("-c", path)]
    with serving(KfpApi()) as api:
        server = ("--endpoint", api.url, "--experiment", "rlhf")
        answer_in_process("submit", *options, *server, cwd=tmp_path)
        (created,) = [call.json for call in api.calls if (call.method, call.path) == ("POST", "/apis/v2beta1/runs")]
        assert created["pipeline_spec"]["pipelineInfo"]["name"] == "tuneline-chain"
        assert len(api.runs) == 1
        process = run_in_process(
            "submit", *options, *server, "--param", "configurations=['seed: 2']", "--json", cwd=tmp_path
        )
        assert process.returncode == 2
        assert json.loads(process.stdout)["error"]["message"].startswith("configurations trains [0] a language model; ")
        assert len(api.runs) == 1


def test_check_chain_finds_a_missing_source_of_a_later_customization(
    tmp_path: Path, compiled: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipelines.definition.chain_pipeline import check_chain

    events = tmp_path / "events.jsonl"
    monkeypatch.setenv("TUNELINE_EVENTS", str(events))
    monkeypatch.setenv("TUNELINE_WORKDIR", str(tmp_path))
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # a step would replace this process's SIGTERM handler
    texts = compiled["root"]["inputDefinitions"]["parameters"]["configurations"]["defaultValue"]
    with pytest.raises(SystemExit) as exit_info:
        check_chain.python_func(configurations=texts, compiled=json.dumps(texts))
    error = json.loads(events.read_text().splitlines()[-1])["error"]
    assert (exit_info.value.code, error["stage"], error["kind"]) == (2, "check_chain", "configuration")
    assert "/data/pairs.jsonl" in error["message"]


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        (("rlhf.yaml",), (), "no earlier customization trains a reward model"),
        (("sft.yaml", "rlhf.yaml"), (), "rlhf.yaml: fine_tuning.grpo.rewards has a reward with model previous"),
        (("sft.yaml", "reward.yaml"), ("--pipeline", "evaluation"), "--pipeline evaluation has 2 configurations"),
        (
            ("sft.yaml", "reward.yaml"),
            ("--set", "model_registry.name=one"),
            "model_registry.name is one in sft.yaml and",
        ),
        (("sft.yaml", "reward.yaml"), ("--set", "data_curation.sources=[raw.jsonl]"), "raw.jsonl is a relative path"),
        (("sft.yaml", "missing.yaml"), (), "missing.yaml does not exist"),
        (("sft.yaml", "reward.yaml"), ("-o", "reward.yaml"), "output reward.yaml is also an input"),
    ],
)
def test_chain_that_cannot_run_is_not_compiled(
    files: tuple[str, ...], options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    write_configurations(tmp_path)
    before = {path: path.read_text() for path in tmp_path.iterdir()}
    command = ["compile", *(part for file in files for part in ("-c", file)), "-o", "chain.yaml", *options, "--json"]
    process = run_in_process(*command, cwd=tmp_path)
    assert process.returncode == 2
    assert message in json.loads(process.stdout)["error"]["message"]
    assert {path: path.read_text() for path in tmp_path.iterdir()} == before


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        GOLDEN.write_text(compile_example(Path(name)), encoding="utf-8")
