"""The arithmetic of the fine-tuning benchmark: what is counted, compared and written of its contestants; none is run here."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import fine_tuning, machine, peers, tuning_page, tuning_rows
from benchmarks.peers import run_tuneline_finetune, stopwatch, tuners

ROW = {"prompt": "What is it?", "response": "A thing."}
SAID = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A thing."}]


@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_every_form_are_one_question_and_one_answer_each_once(packed: bool, tmp_path: Path) -> None:
    longer = [{"role": "system", "content": "Be kind."}, *SAID]
    records = [
        ROW,
        {"messages": SAID},
        {"instruction": "Why?", "output": "So."},
        {"messages": longer},
        {"prompt": " ", "response": "x"},
        {"a": 1},
    ]
    text = "".join(json.dumps(record) + "\n" for record in records) + "\n"
    path = tmp_path / ("rows.jsonl.gz" if packed else "rows.jsonl")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    rows = tuning_rows.read(path)
    assert [row["messages"][0]["content"] for row in rows] == ["What is it?", "Why?"]
    assert rows[0]["messages"] == SAID
    assert len({row["id"] for row in rows}) == 2


def rows_of(count: int) -> list[tuning_rows.Row]:
    return [{"id": str(number), "messages": SAID} for number in range(count)]


def test_rows_are_chosen_in_whole_batches_until_there_are_enough_tokens() -> None:
    chosen = tuning_rows.choose(rows_of(12), [10] * 12, tokens=45, batch=4, held_out=3, max_length=100)
    assert [row["id"] for row in chosen.train] == [str(number) for number in range(8)]
    assert chosen.tokens == 80
    assert [row["id"] for row in chosen.held_out] == ["9", "10", "11"]


def test_long_rows_are_left_out_and_counted() -> None:
    chosen = tuning_rows.choose(rows_of(6), [10, 101, 10, 10, 101, 10], tokens=20, batch=2, held_out=1, max_length=100)
    assert [row["id"] for row in chosen.train] == ["0", "2"]
    assert [row["id"] for row in chosen.held_out] == ["5"]
    assert chosen.left_out == 2


def test_too_few_rows_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"5 rows to train on have fewer than 1,000 tokens in whole batches of 2"):
        tuning_rows.choose(rows_of(6), [10] * 6, tokens=1000, batch=2, held_out=1, max_length=100)


def test_the_digest_tells_the_rows_apart() -> None:
    one, other = (tuning_rows.choose(rows_of(6), [10] * 6, tokens=n, batch=2, held_out=1, max_length=100) for n in (20, 30))
    assert one.sha256 != other.sha256


def test_tokens_of_a_batch_are_counted_by_its_mask() -> None:
    import torch

    ids = torch.zeros(2, 3, dtype=torch.long)
    assert stopwatch.tokens_in(ids, None) == 6
    assert stopwatch.tokens_in(ids, torch.tensor([[1, 1, 0], [2, 0, 0]])) == 3
    sees = torch.tensor([[[True, False, False], [True, True, False], [False, False, False]]] * 2)[:, None]
    assert stopwatch.tokens_in(ids, sees) == 4
    assert stopwatch.tokens_in(ids, torch.where(sees, 0.0, torch.finfo(torch.float32).min)) == 4


def one_round(tokens: int = 1000, seconds: float = 10.0, pss: int = 2**30, **more: Any) -> dict[str, Any]:
    figures = {"tokens": tokens, "slots": 2000, "seconds": seconds, "cpu": 2 * seconds, "startup": 12.5, "steps": 2, "losses": [2.5, 2.25]}
    told = {"types": ["float32"], "threads": 2, "versions": {"torch": "2"}, "cost": {"pss": pss}}
    return {**figures, **told, **more}


def test_of_several_rounds_the_median_rate_and_the_most_memory_count() -> None:
    rounds = [one_round(seconds=s, pss=p) for s, p in ((10.0, 3), (40.0, 9), (20.0, 5))]
    row = tuning_page.combined([*rounds, {"error": "killed"}])
    assert row["rate"] == 50
    assert row["seconds"] == 20
    assert row["rates"] == [100, 25, 50]
    assert row["pss"] == 9
    assert tuning_page.padding(row) == 0.5


def test_a_contestant_that_failed_in_all_rounds_stays_with_its_error() -> None:
    assert tuning_page.combined([{"error": "first"}, {"error": "second"}]) == {"error": "second"}


def row(name: str, rate: float, pss: int = 2**30, **more: Any) -> dict[str, Any]:
    known = fine_tuning.KNOWN[name]
    about = {"name": name, "system": known.system, "packing": known.packing, "flags": known.flags}
    return {**about, **tuning_page.combined([one_round(seconds=1000 / rate, pss=pss)]), **more}


ROWS = [
    row("tuneline-off", 100, held_out=2.0),
    row("tuneline-on", 80, held_out=2.1),
    row("trl-off", 50, pss=2**31, held_out=2.0),
    row("trl-on", 60, pss=2**29, held_out=1.9),
    {"name": "llama-factory-off", "system": tuners.FACTORY, "packing": False, "flags": "", "error": "exit code 1: no such package"},
    row("llama-factory-on", 96),
]


def test_ratios_compare_like_with_like_and_the_best_with_the_best() -> None:
    found = {(pair["peer"], pair["label"]): pair for pair in tuning_page.ratios(ROWS)}
    off = found[tuners.TRL, "packing off"]
    assert (off["speed"], off["memory"], off["loss"]) == (2, 0.5, 0)
    assert off["cpu"] == pytest.approx(2)
    assert (off["fast"], off["lean"], off["equal"]) == (True, True, True)
    on = found[tuners.TRL, "packing on"]
    assert (on["fast"], on["lean"], on["equal"]) == (False, False, False)
    best = found[tuners.TRL, "best of either"]
    assert (best["ours"], best["theirs"]) == ("tuneline-off", "trl-on")
    assert (tuners.FACTORY, "packing off") not in found
    assert "loss" not in found[tuners.FACTORY, "packing on"]


def results() -> dict[str, Any]:
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
    about = {"command": "c", "date": "2026-11-21", "commit": "abc", "python": "3", "processor": "p", "cores": 2, "memory": 2**34, "load": 0}
    return {**about, "rounds": 1, "settings": settings, "data": data, "base_loss": 2.5, "rows": ROWS}


def test_the_page_says_which_goals_were_missed_and_which_peer_failed() -> None:
    page = tuning_page.markdown(results(), "images/plot.svg")
    assert "| tuneline-off | 1,000 | 10 | 100.0 | 20 | 50.0% | 1,024 MiB | 2.0000 |" in page
    assert "| tuneline-off / trl-off | packing off | 2.00 | ≥ 1.5: met | 2.00 | 0.50 | ≤ 1: met | +0.0000, equal or lower |" in page
    assert "≥ 1.5: **missed**" in page
    assert "| ≤ 1: **missed** | +0.2000, **higher** |" in page
    assert "**llama-factory-off** was not measured: exit code 1: no such package" in page
    assert "![tokens a second, and the loss while training](images/plot.svg)" in page
    assert "2.500 2.250" in page
    assert "On 2026-11-21." in page


def test_start_up_is_told_by_part_where_it_is_known() -> None:
    told = {
        **results(),
        "rows": [row("tuneline-off", 100, parts={"import": 6.0, "load": 3.0, "prepare": 1.0, "total": 12.0}), row("trl-off", 50)],
    }
    page = tuning_page.markdown(told, "plot.svg")
    assert "| tuneline-off | 12.5 | 6.0 | 3.0 | 1.0 |" in page
    assert "| trl-off | 12.5 |  |  |  |" in page


def test_the_plot_has_equal_bytes_for_equal_results(tmp_path: Path) -> None:
    for name in ("one", "other"):
        tuning_page.plot(results(), tmp_path / f"{name}.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "other.svg").read_bytes()


def test_figures_are_the_last_line_that_was_printed(tmp_path: Path) -> None:
    path = tmp_path / "told.txt"
    path.write_text("{'loss': 2.5}\n\n" + json.dumps({"tokens": 7}) + "\n")
    assert fine_tuning.last_line(path) == {"tokens": 7}
    path.write_text("{'loss': 2.5}\n")
    with pytest.raises(peers.PeerError, match="no figures were printed"):
        fine_tuning.last_line(path)


def test_the_command_on_the_page_names_no_folder_of_this_machine() -> None:
    given = ["--data", "/home/me/rows.jsonl.gz", "--workdir", "/tmp/w", "--peer-python", "/tmp/venv/bin/python", "--tokens", "9"]
    assert machine.anywhere(given) == ["--data", "rows.jsonl.gz", "--workdir", "DIR", "--peer-python", "PYTHON", "--tokens", "9"]


def test_the_recipe_and_the_dataset_are_ones_that_the_stage_takes(tmp_path: Path) -> None:
    from components.common import artifacts
    from components.fine_tuning.config import FineTuningConfig

    settings = {"rank": 16, "alpha": 32, "learning_rate": 5e-4, "batch_size": 8, "micro_batch_size": 2, "max_length": 512}
    config = FineTuningConfig.model_validate(run_tuneline_finetune.recipe({**settings, "packing": True, "recompute": None}))
    assert (config.lora.rank, config.lora.dropout, config.packing, config.activation_checkpointing) == (16, 0, True, "auto")
    assert config.accumulation == 4
    made = run_tuneline_finetune.dataset([{"id": "1", "messages": SAID}], tmp_path / "dataset")
    assert artifacts.read(made.path, "dataset").manifest.summary["splits"] == {"train": 1, "validation": 0, "test": 0}
