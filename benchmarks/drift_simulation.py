"""Simulation of the drift check: how often it alarms without drift, and how soon with drift.

`make bench-drift` writes docs/reference/benchmarks-drift.md. Prompts are drawn at random from the demo's questions, and from other
texts that the arguments name; the embeddings are those of the demo's model. Synthetic embeddings show more runs.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from components.common.models import model_loading
from components.common.runtime.reporters import SilentReporter
from components.data_curation import python_docs
from pipelines.drift import alarm, embedding_source, window_test
from pipelines.drift.window_test import COMBINED

REFERENCE_WINDOWS = 6
WINDOW = 200
CHANGE = 5  # windows before a sudden change
AFTER = 12  # windows after it
SLOW_FROM, SLOW_TO, SLOW_SHARE = 20, 59, 0.4
HORIZON = alarm.HORIZON_WINDOWS
SYNTHETIC_WINDOW, SYNTHETIC_WIDTH = 50, 32
ALIKE_SHARE, ALIKE_PROMPTS = 0.3, 300

Draw = Callable[[np.random.Generator, int], np.ndarray]


@dataclass
class Runs:
    """Simulated runs of one case.

    Attributes:
        windows: number of windows of a run that has no alarm.
        change: number of windows before the change; None without drift.
        alarms: by run, the number of windows up to the alarm, or None.
        p_values: p-values of all windows without drift.
        inflations: by run.
        seconds: CPU seconds.
    """

    windows: int
    change: int | None
    alarms: list[int | None] = field(default_factory=list)
    p_values: list[float] = field(default_factory=list)
    inflations: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def count_false_alarms(self) -> int:
        """Return the number of runs that alarm without, or before, the drift."""
        last = self.windows if self.change is None else self.change
        return sum(found is not None and found <= last for found in self.alarms)

    def get_delays(self) -> list[int]:
        """Return the windows from the change to the alarm, of the runs that alarm after the change."""
        change = self.change or 0
        return sorted(found - change for found in self.alarms if found is not None and found > change)


def simulate(
    draw: Draw, draw_drifted: Callable[[np.random.Generator, int, int], np.ndarray], runs: Runs, count: int, size: int
) -> Runs:
    """Run the check on `count` sequences of windows up to the alarm.

    Args:
        draw: returns clean prompts.
        draw_drifted: returns the prompts of a window; its arguments are the generator, the size and the window from 0.
        runs: the case, which is completed.
        count: number of runs.
        size: prompts of a window.
    """
    began = time.process_time()
    for seed in range(count):
        generator = np.random.default_rng([seed, size])
        parts = [draw(generator, size) for _ in range(REFERENCE_WINDOWS)]
        tests = [
            window_test.compare_window(np.concatenate([*parts[:n], *parts[n + 1 :], parts[n]]), size, generator)
            for n in range(REFERENCE_WINDOWS)
        ]
        inflation = window_test.estimate_inflation(tests)
        known, p_values, found = np.concatenate(parts), list[float](), None
        for number in range(runs.windows):
            known = np.concatenate([known, draw_drifted(generator, size, number)])
            p_values.append(window_test.compare_window(known, size, generator, inflation).p_values[COMBINED])
            if alarm.compute_e_process(p_values)[-1] >= alarm.THRESHOLD:
                found = number + 1
                break
        runs.alarms.append(found)
        runs.inflations.append(inflation)
        runs.p_values += p_values[: runs.windows if runs.change is None else runs.change]
    runs.seconds = time.process_time() - began
    return runs


def sample(pool: np.ndarray) -> Draw:
    """Return a function that draws rows of a pool at random."""
    return lambda generator, count: pool[generator.integers(0, len(pool), count)]


def mix(
    clean: Draw, other: Draw, get_share: Callable[[int], float]
) -> Callable[[np.random.Generator, int, int], np.ndarray]:
    """Return a function that draws each prompt of a window from `other` with the probability of the window's share."""

    def draw(generator: np.random.Generator, count: int, window: int) -> np.ndarray:
        foreign = int(generator.binomial(count, get_share(window)))
        return np.concatenate([clean(generator, count - foreign), other(generator, foreign)])

    return draw


def sample_alike(pool: np.ndarray) -> Draw:
    """Return a function that draws a share of a window from neighbouring rows of the pool, and the rest at random."""

    def draw(generator: np.random.Generator, count: int) -> np.ndarray:
        alike = int(ALIKE_SHARE * count)
        start = generator.integers(0, len(pool) - ALIKE_PROMPTS)
        neighbours = pool[start + generator.integers(0, ALIKE_PROMPTS, alike)]
        return np.concatenate([pool[generator.integers(0, len(pool), count - alike)], neighbours])

    return draw


def read_texts(path: Path) -> list[str]:
    """Return the texts of a file: instructions of an Alpaca JSON file, or lines of a text file; both may be gzipped."""
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    if ".json" in path.name:
        return ["\n".join(filter(None, [row["instruction"], row.get("input")])) for row in json.loads(text)]
    return [line for line in text.splitlines() if line.strip()]


def list_questions(package: str) -> list[str]:
    """Return questions about an installed package in the words of the demo's questions."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"the package {package} is not installed")
    found = python_docs._parse_sources(Path(spec.submodule_search_locations[0]))
    return list(dict.fromkeys(python_docs.build_question(each) for each in found))


def read_demo_questions() -> list[str]:
    """Return the distinct questions of the demo dataset."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "python_docs.jsonl"
        python_docs.build(path)
        rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        return list(dict.fromkeys(row["messages"][0]["content"] for row in rows))


def run_synthetic(runs: int) -> dict[str, Runs]:
    """Simulate synthetic embeddings: Student's t with 4 degrees, the drift a shift of two columns in 10% of the prompts."""

    def draw(generator: np.random.Generator, count: int) -> np.ndarray:
        return generator.standard_t(4, (count, SYNTHETIC_WIDTH)).astype(np.float32)

    def draw_shifted(generator: np.random.Generator, count: int) -> np.ndarray:
        values = draw(generator, count)
        values[:, :2] += 4
        return values

    size = SYNTHETIC_WINDOW
    return {
        "synthetic, none": simulate(draw, mix(draw, draw, lambda _: 0), Runs(HORIZON, None), runs, size),
        "synthetic, 10% shifted": simulate(
            draw,
            mix(draw, draw_shifted, lambda n: 0.1 if n >= CHANGE else 0.0),
            Runs(CHANGE + AFTER, CHANGE),
            runs // 3,
            size,
        ),
    }


def run_real(pools: dict[str, np.ndarray], scale: float) -> dict[str, Runs]:
    """Simulate mixtures of the demo's questions with other texts.

    Args:
        pools: embeddings by name: "demo", and any of "near", "far" and "language".
        scale: factor of the number of runs.
    """
    demo = sample(pools["demo"])
    results = {}

    def add(name: str, drifted: Callable[..., np.ndarray], windows: int, change: int | None, count: int) -> None:
        results[name] = simulate(demo, drifted, Runs(windows, change), max(1, round(count * scale)), WINDOW)
        print(name, results[name].alarms, f"{results[name].seconds:.0f} CPU s", flush=True)

    for kind, share, count in (
        *(("far", 0.1, 32), ("language", 0.1, 32), ("near", 0.3, 16), ("far", 0.05, 16), ("language", 0.05, 16)),
        *(("near", 0.1, 16), ("far", 0.3, 16)),
    ):
        if kind in pools:
            drifted = mix(demo, sample(pools[kind]), lambda n, share=share: share if n >= CHANGE else 0.0)  # type: ignore[misc]
            add(f"{kind}, {share:.0%}", drifted, CHANGE + AFTER, CHANGE, count)
    add("none", mix(demo, demo, lambda _: 0), HORIZON, None, 16)
    alike = sample_alike(pools["demo"])
    results["none, 30% of a window alike"] = simulate(
        alike, lambda g, count, _: alike(g, count), Runs(20, None), max(1, round(10 * scale)), WINDOW
    )
    if "near" in pools:

        def get_share(window: int) -> float:
            return SLOW_SHARE * max(0.0, (window - SLOW_FROM) / (SLOW_TO - SLOW_FROM))

        add("near, slow", mix(demo, sample(pools["near"]), get_share), HORIZON, SLOW_FROM, 6)
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the simulation and write the page."""
    from benchmarks import drift_simulation_page, machine

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--markdown", type=Path, help="Page to write; its plot is written to the folder images next to it."
    )
    parser.add_argument("--far", type=Path, nargs="*", default=[], help="Files of prompts about other topics.")
    parser.add_argument("--language", type=Path, nargs="*", default=[], help="Files of texts in other languages.")
    parser.add_argument("--near", nargs="*", default=[], help="Installed packages about which to ask questions.")
    parser.add_argument("--scale", type=float, default=1.0, help="Factor by which to multiply the number of runs.")
    options = parser.parse_args(arguments)
    began = time.process_time()
    texts = {
        "demo": read_demo_questions(),
        "near": [text for package in options.near for text in list_questions(package)],
        "far": [text for path in options.far for text in read_texts(path)],
        "language": [text for path in options.language for text in read_texts(path)],
    }
    folder = model_loading.resolve_base_model(model_loading.EMBEDDED_SOURCE, SilentReporter()).path
    embed = embedding_source.build_embedder(folder, embedding_source.INPUT)
    embedding_began = time.process_time()
    pools = {name: window_test.reduce_width(embed(each)) for name, each in texts.items() if each}
    counts = {name: len(each) for name, each in texts.items() if each}
    facts = {"texts": counts, "embedding_ms": (time.process_time() - embedding_began) / sum(counts.values()) * 1000}
    results = run_synthetic(max(3, round(60 * options.scale))) | run_real(pools, options.scale)
    facts |= {"seconds": time.process_time() - began, **machine.circumstances("benchmarks.drift_simulation")}
    if options.markdown:
        drift_simulation_page.write_page(results, options.markdown, facts)


if __name__ == "__main__":
    main()
