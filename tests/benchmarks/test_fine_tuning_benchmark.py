"""Row selection, figures, ratios and report page of the fine-tuning benchmark, without a training run."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import fine_tuning, machine, peers, tuning_page, tuning_rows
from benchmarks.peers import run_tuneline_finetune, stopwatch, tuners

ROW = {"prompt": "What is it?", "response": "A thing."}
CONVERSATION = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A thing."}]


@pytest.mark.parametrize("compressed", [False, True])
def test_rows_of_every_format_become_unique_single_turns(compressed: bool, tmp_path: Path) -> None:
    with_system_message = [{"role": "system", "content": "Be kind."}, *CONVERSATION]
    records = [
        ROW,
        {"messages": CONVERSATION},
        {"instruction": "Why?", "output": "So."},
        {"messages": with_system_message},
        {"prompt": " ", "response": "x"},
        {"a": 1},
    ]
    text = "".join(json.dumps(record) + "\n" for record in records) + "\n"
    path = tmp_path / ("rows.jsonl.gz" if compressed else "rows.jsonl")
    path.write_bytes(gzip.compress(text.encode()) if compressed else text.encode())
    rows = tuning_rows.read(path)
    assert [row["messages"][0]["content"] for row in rows] == ["What is it?", "Why?"]
    assert rows[0]["messages"] == CONVERSATION
    assert len({row["id"] for row in rows}) == 2


def build_rows(count: int) -> list[tuning_rows.Row]:
    return [{"id": str(number), "messages": CONVERSATION} for number in range(count)]


def test_rows_are_selected_in_full_batches_up_to_the_token_count() -> None:
    selection = tuning_rows.choose(build_rows(12), [10] * 12, tokens=45, batch=4, held_out=3, max_length=100)
    assert [row["id"] for row in selection.train] == [str(number) for number in range(8)]
    assert selection.tokens == 80
    assert [row["id"] for row in selection.held_out] == ["9", "10", "11"]


def test_long_rows_are_skipped_and_counted() -> None:
    selection = tuning_rows.choose(
        build_rows(6), [10, 101, 10, 10, 101, 10], tokens=20, batch=2, held_out=1, max_length=100
    )
    assert [row["id"] for row in selection.train] == ["0", "2"]
    assert [row["id"] for row in selection.held_out] == ["5"]
    assert selection.left_out == 2


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"5 training rows have fewer than 1,000 tokens in whole batches of 2"):
        tuning_rows.choose(build_rows(6), [10] * 6, tokens=1000, batch=2, held_out=1, max_length=100)


def test_digest_depends_on_the_selected_rows() -> None:
    smaller, larger = (
        tuning_rows.choose(build_rows(6), [10] * 6, tokens=n, batch=2, held_out=1, max_length=100) for n in (20, 30)
    )
    assert smaller.sha256 != larger.sha256


def test_batch_tokens_are_counted_by_the_attention_mask() -> None:
    import torch

    ids = torch.zeros(2, 3, dtype=torch.long)
    assert stopwatch.tokens_in(ids, None) == 6
    assert stopwatch.tokens_in(ids, torch.tensor([[1, 1, 0], [2, 0, 0]])) == 3
    attention = torch.tensor([[[True, False, False], [True, True, False], [False, False, False]]] * 2)[:, None]
    assert stopwatch.tokens_in(ids, attention) == 4
    assert stopwatch.tokens_in(ids, torch.where(attention, 0.0, torch.finfo(torch.float32).min)) == 4


def build_round(tokens: int = 1000, seconds: float = 10.0, pss: int = 2**30, **changes: Any) -> dict[str, Any]:
    figures = {
        "tokens": tokens,
        "slots": 2000,
        "seconds": seconds,
        "cpu": 2 * seconds,
        "startup": 12.5,
        "steps": 2,
        "losses": [2.5, 2.25],
    }
    environment = {"types": ["float32"], "threads": 2, "versions": {"torch": "2"}, "cost": {"pss": pss}}
    return {**figures, **environment, **changes}


def test_rounds_combine_to_median_rate_and_peak_memory() -> None:
    rounds = [build_round(seconds=s, pss=p) for s, p in ((10.0, 3), (40.0, 9), (20.0, 5))]
    row = tuning_page.combined([*rounds, {"error": "killed"}])
    assert row["rate"] == 50
    assert row["seconds"] == 20
    assert row["rates"] == [100, 25, 50]
    assert row["pss"] == 9
    assert tuning_page.padding(row) == 0.5


def test_contestant_without_successful_round_keeps_its_error() -> None:
    assert tuning_page.combined([{"error": "first"}, {"error": "second"}]) == {"error": "second"}


def build_row(name: str, rate: float, pss: int = 2**30, **changes: Any) -> dict[str, Any]:
    contestant = fine_tuning.KNOWN[name]
    description = {"name": name, "system": contestant.system, "packing": contestant.packing, "flags": contestant.flags}
    return {**description, **tuning_page.combined([build_round(seconds=1000 / rate, pss=pss)]), **changes}


ROWS = [
    build_row("tuneline-off", 100, held_out=2.0),
    build_row("tuneline-on", 80, held_out=2.1),
    build_row("trl-off", 50, pss=2**31, held_out=2.0),
    build_row("trl-on", 70, pss=2**29, held_out=1.9),
    {
        "name": "llama-factory-off",
        "system": tuners.FACTORY,
        "packing": False,
        "flags": "",
        "error": "exit code 1: no such package",
    },
    build_row("llama-factory-on", 96),
]


def test_profile_has_the_shares_of_all_operations() -> None:
    times = {
        "aten::addmm": 6.0,
        "aten::_scaled_dot_product_flash_attention_for_cpu": 1.0,
        "aten::_log_softmax_backward_data": 1.0,
        "aten::mul": 1.0,
        "Optimizer.step": 1.0,
    }
    averages = [SimpleNamespace(key=key, self_cpu_time_total=time) for key, time in times.items()]
    expected = {"matrix products": 0.6, "attention": 0.1, "loss": 0.1, "copies": 0.0, "element-wise": 0.1, "rest": 0.1}
    assert stopwatch.shares_of(averages) == expected


def test_ratios_compare_equal_packing_and_best_with_best() -> None:
    ratios = {(pair["peer"], pair["label"]): pair for pair in tuning_page.ratios(ROWS)}
    off = ratios[tuners.TRL, "packing off"]
    assert (off["speed"], off["memory"], off["loss"]) == (2, 0.5, 0)
    assert off["cpu"] == pytest.approx(2)
    assert (off["fast"], off["lean"], off["equal"]) == (True, True, True)
    on = ratios[tuners.TRL, "packing on"]
    assert (on["fast"], on["lean"], on["equal"]) == (False, False, False)
    best = ratios[tuners.TRL, "best of either"]
    assert (best["ours"], best["theirs"]) == ("tuneline-off", "trl-on")
    assert (tuners.FACTORY, "packing off") not in ratios
    assert "loss" not in ratios[tuners.FACTORY, "packing on"]


def test_ratios_use_the_best_settings_of_a_peer() -> None:
    off = tuning_page.ratios([*ROWS, build_row("trl-off-best", 90)])[0]
    assert (off["theirs"], off["fast"]) == ("trl-off-best", False)


PROFILES = {"tuneline-off": {"matrix products": 0.8, "rest": 0.2}, "trl-off": {"matrix products": 0.75, "rest": 0.25}}


def build_results() -> dict[str, Any]:
    data = {
        "rows": 8,
        "held_out": 3,
        "tokens": 1000,
        "left_out": 1,
        "max_length": 512,
        "sha256": "ab" * 32,
        "name": "rows.jsonl",
        "read": 12,
    }
    settings = {"rank": 16, "alpha": 32, "learning_rate": 5e-4, "batch_size": 8, "max_length": 512, "threads": 2}
    environment = {
        "command": "c",
        "date": "2026-11-21",
        "commit": "abc",
        "python": "3",
        "processor": "p",
        "cores": 2,
        "memory": 2**34,
        "load": 0,
    }
    return {
        **environment,
        "rounds": 1,
        "settings": settings,
        "data": data,
        "base_loss": 2.5,
        "rows": ROWS,
        "profiles": PROFILES,
    }


def test_page_reports_missed_goals_and_failed_peers() -> None:
    page = tuning_page.markdown(build_results(), "images/plot.svg")
    assert "| tuneline-off | 1,000 | 10 | 100.0 | 20 | 50.0% | 1,024 MiB | 2.0000 |" in page
    assert (
        "| tuneline-off / trl-off | packing off | 2.00 | ≥ 1.2: met | 2.00 | 0.50 | ≤ 1: met | +0.0000, equal or lower |"
        in page
    )
    assert "≥ 1.2: **missed**" in page
    assert "| ≤ 1: **missed** | +0.2000, **higher** |" in page
    assert "**llama-factory-off** was not measured: exit code 1: no such package" in page
    assert "![tokens per second, and the loss during training](images/plot.svg)" in page
    assert "2.500 2.250" in page
    assert "The measurements ran on 2026-11-21." in page
    assert "| trl-off | 75.0% | 25.0% |" in page


def test_page_breaks_startup_into_phases_if_measured() -> None:
    results = {
        **build_results(),
        "rows": [
            build_row("tuneline-off", 100, parts={"import": 6.0, "load": 3.0, "prepare": 1.0, "total": 12.0}),
            build_row("trl-off", 50),
        ],
    }
    page = tuning_page.markdown(results, "plot.svg")
    assert "| tuneline-off | 12.5 | 6.0 | 3.0 | 1.0 |" in page
    assert "| trl-off | 12.5 |  |  |  |" in page


def test_plot_bytes_are_deterministic(tmp_path: Path) -> None:
    for name in ("one", "other"):
        tuning_page.plot(build_results(), tmp_path / f"{name}.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "other.svg").read_bytes()


def test_figures_are_read_from_the_last_output_line(tmp_path: Path) -> None:
    path = tmp_path / "told.txt"
    path.write_text("{'loss': 2.5}\n\n" + json.dumps({"tokens": 7}) + "\n")
    assert fine_tuning.last_line(path) == {"tokens": 7}
    path.write_text("{'loss': 2.5}\n")
    with pytest.raises(peers.PeerError, match="no figures were printed"):
        fine_tuning.last_line(path)


def test_command_on_the_page_has_no_local_paths() -> None:
    arguments = [
        "--data",
        "/home/me/rows.jsonl.gz",
        "--workdir",
        "/tmp/w",
        "--peer-python",
        "/tmp/venv/bin/python",
        "--tokens",
        "9",
    ]
    assert machine.anywhere(arguments) == [
        "--data",
        "rows.jsonl.gz",
        "--workdir",
        "DIR",
        "--peer-python",
        "PYTHON",
        "--tokens",
        "9",
    ]


def test_recipe_and_dataset_are_accepted_by_the_stage(tmp_path: Path) -> None:
    from components.common.artifacts import artifact_folder
    from components.fine_tuning.config import Recipe

    settings = {
        "rank": 16,
        "alpha": 32,
        "learning_rate": 5e-4,
        "batch_size": 8,
        "micro_batch_size": 2,
        "max_length": 512,
    }
    config = Recipe.model_validate(run_tuneline_finetune.recipe({**settings, "packing": True, "recompute": None}))
    assert (config.lora.rank, config.lora.dropout, config.packing, config.activation_checkpointing) == (
        16,
        0,
        True,
        "auto",
    )
    assert config.gradient_accumulation_steps == 4
    dataset = run_tuneline_finetune.dataset([{"id": "1", "messages": CONVERSATION}], tmp_path / "dataset")
    assert artifact_folder.read(dataset.path, "dataset").manifest.summary["splits"] == {
        "train": 1,
        "validation": 0,
        "test": 0,
    }
