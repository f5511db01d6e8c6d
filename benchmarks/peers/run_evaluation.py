"""Likelihood tasks scored by tuneline's engine and by lm-eval's HFLM, alternately in one process with the same torch, threads and weights.

python -m benchmarks.peers.run_evaluation SETTINGS.json

Prints one line of figures. Seconds cover everything from the texts to the last likelihood: they include tokenization but, unless stated
otherwise, not imports and loading.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import icl
from benchmarks.peers import stopwatch
from components.common.models import model_loading
from components.common.models.model_loading import LoadableModel
from components.common.runtime import cpu_cores
from components.common.runtime.reporters import SilentReporter
from components.evaluation import engine_loading
from components.evaluation.task_interface import Continuation
from components.evaluation.transformers_engine import TransformersEngine

Answers = list[tuple[float, bool]]
Requests = Sequence[Sequence[str]]
Scorer = Callable[[Requests], Answers]
Scorers = Callable[[str], Scorer]  # of each task
Peer = Callable[[int | str, Requests], Answers]
OpenPeer = Callable[[str, str | None], tuple[Peer, Any]]
AUTO = 64  # the largest batch the peer's own search begins from: its default


def run(settings: dict[str, Any], open_peer: OpenPeer | None = None) -> dict[str, Any]:
    """Run all measurements.

    The settings are model, adapter (folders; "" to skip the adapter), tasks, rounds, batch_tokens, peer_batches, trial_rows and profile_rows.
    """
    model_loading.prepare_torch(0, "cpu")
    model_loading.silence_transformers()
    opened = model_loading.open_model(settings["model"])
    base = LoadableModel(opened.base.sha256, opened.base, opened.base.path, None, None)
    told = _side_by_side(base, settings, open_peer or lm_eval_peer)
    gc.collect()
    if settings["adapter"]:
        told["adapter"] = _with_adapter(base, settings, told.get("best"), open_peer or lm_eval_peer)
    told["lengths"] = _lengths(model_loading.load_tokenizer(base.tokenizer), settings["tasks"])
    return {
        **told,
        "versions": {**stopwatch.versions(), **_version("lm-eval")},
        "threads": cpu_cores.get_thread_count(),
    }


def _version(name: str) -> dict[str, str]:
    try:
        return {name: importlib.metadata.version(name)}
    except importlib.metadata.PackageNotFoundError:
        return {}


def make_adapter(base: LoadableModel, folder: Path) -> None:
    """Write a LoRA adapter of rank 16 on all linear layers with random second matrices: meaningless answers, real cost."""
    if (folder / model_loading.ADAPTER_CONFIG).exists():
        return
    import peft
    import torch

    settings = peft.LoraConfig(
        r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(model_loading.load_model(base), settings)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.02
    adapted.save_pretrained(folder)


def lm_eval_peer(model: str, adapter: str | None) -> tuple[Peer, Any]:
    """Return lm-eval's HFLM in float32 on the CPU, called with a batch size, and its model."""
    from lm_eval.api.instance import Instance  # type: ignore[import-not-found]
    from lm_eval.models.huggingface import HFLM  # type: ignore[import-not-found]

    scorer = HFLM(pretrained=model, peft=adapter, device="cpu", dtype="float32", batch_size=1, max_batch_size=AUTO)

    def score(batch: int | str, requests: Requests) -> Answers:
        scorer.batch_size_per_gpu, scorer.batch_schedule = batch, 1
        asked = [
            Instance("loglikelihood", {}, (context, continuation), place)
            for place, (context, continuation) in enumerate(requests)
        ]
        return [(float(value), bool(greedy)) for value, greedy in scorer.loglikelihood(asked, disable_tqdm=True)]

    return score, scorer.model


def encoded(tokenizer: Any, requests: Requests) -> list[Continuation]:
    """Return the requests as tokens, split as in lm-eval: both texts are tokenized together, and the context's token count marks the boundary."""
    ends = {context: len(tokenizer.encode(context)) for context in {context for context, _ in requests}}
    made = []
    for context, continuation in requests:
        ids = tokenizer.encode(context + continuation)
        made.append(Continuation(ids, [place >= ends[context] for place in range(len(ids))]))
    return made


def _lengths(tokenizer: Any, tasks: dict[str, list[icl.Item]]) -> dict[str, dict[str, int]]:
    """Return for each task: items, requests, their tokens, and the scored tokens."""
    told = {}
    for task, items in tasks.items():
        asked = encoded(tokenizer, _requests(items))
        tokens, scored = sum(len(one.ids) for one in asked), sum(sum(one.scored) for one in asked)
        told[task] = {"items": len(items), "requests": len(asked), "tokens": tokens, "scored": scored}
    return told


def our_scorer(engine: Any) -> Scorer:
    """Return a function that scores texts with tuneline's engine."""

    def score(requests: Requests) -> Answers:
        return [
            (one.logprob, one.greedy)
            for one in engine.compute_likelihoods(encoded(engine.tokenizer, requests), SilentReporter())
        ]

    return score


def _requests(items: Sequence[icl.Item]) -> list[list[str]]:
    return [request for item in items for request in item["requests"]]


def _timed(score: Scorers, tasks: dict[str, list[icl.Item]]) -> tuple[dict[str, Any], dict[str, Answers]]:
    """Return wall and CPU seconds of each task, and the answers."""
    figures, answers = {}, {}
    for task, items in tasks.items():
        wall, cpu = time.perf_counter(), time.process_time()
        answers[task] = score(task)(_requests(items))
        figures[task] = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    total = {key: sum(one[key] for one in figures.values()) for key in ("wall", "cpu")}
    return {**total, "tasks": figures}, answers


def _side_by_side(base: LoadableModel, settings: dict[str, Any], open_peer: OpenPeer) -> dict[str, Any]:
    """Score the base model's tasks with both systems in alternation; the first system changes from round to round."""
    tasks = settings["tasks"]
    loaded = model_loading.load_model(base)
    ours = our_scorer(
        TransformersEngine(loaded, model_loading.load_tokenizer(base.tokenizer), settings["batch_tokens"])
    )
    try:
        peer, peer_model = open_peer(settings["model"], None)
    except ImportError as error:
        mine, answers = zip(*[_timed(lambda _: ours, tasks) for _ in range(settings["rounds"])], strict=True)
        return {
            "ours": mine,
            "peer_error": f"{type(error).__name__}: {error}",
            "accuracy": {"ours": _accuracy(tasks, answers[0])},
        }
    trials = _trials(peer, tasks, settings["peer_batches"], settings["trial_rows"])
    best = min(trials, key=lambda trial: trial["cpu"])["batch"]
    best_of = {task: min(trials, key=lambda trial: trial["tasks"][task]["cpu"])["batch"] for task in tasks}
    rounds: dict[str, list[Any]] = {"ours": [], "theirs": []}
    found: dict[str, dict[str, Answers]] = {}
    contestants: dict[str, Scorers] = {"ours": lambda _: ours, "theirs": lambda task: partial(peer, best_of[task])}
    for number in range(settings["rounds"]):
        for name in sorted(contestants, reverse=bool(number % 2)):
            figures, found[name] = _timed(contestants[name], tasks)
            rounds[name].append(figures)
            _note(f"round {number + 1}, {name}", figures)
    profiles = {
        name: _profiled(model, contestants[name], tasks, settings["profile_rows"])
        for name, model in (("ours", loaded), ("theirs", peer_model))
    }
    compared = compare(tasks, found["ours"], found["theirs"])
    return {**rounds, "trials": trials, "best": best, "best_of": best_of, "profiles": profiles, **compared}


def _trials(
    peer: Peer, tasks: dict[str, list[icl.Item]], batches: Sequence[int | str], rows: int
) -> list[dict[str, Any]]:
    """Return the peer's seconds on the first rows of each task by batch size, after a warm-up with the first batch size."""
    few = {task: items[:rows] for task, items in tasks.items()}
    _timed(lambda _: partial(peer, batches[0]), few)
    trials = []
    for batch in batches:
        trials.append({"batch": batch, **_timed(lambda _, size=batch: partial(peer, size), few)[0]})
        _note(f"trial, batch size {batch}", trials[-1])
    return trials


def _note(name: str, figures: dict[str, Any]) -> None:
    """Log the progress."""
    print(f"{name}: {figures['wall']:.1f} s, {figures['cpu']:.1f} CPU s", file=sys.stderr, flush=True)


def compare(tasks: dict[str, list[icl.Item]], ours: dict[str, Answers], theirs: dict[str, Answers]) -> dict[str, Any]:
    """Return the accuracy of both, the items that only one answers correctly, and the differences of the log-likelihoods (nats per request)."""
    told: dict[str, Any] = {"unequal": {}, "differences": {}}
    for task, items in tasks.items():
        verdicts = zip(icl.right(items, ours[task]), icl.right(items, theirs[task]), strict=True)
        told["unequal"][task] = [place for place, (one, other) in enumerate(verdicts) if one != other]
        apart = [abs(one[0] - other[0]) for one, other in zip(ours[task], theirs[task], strict=True)]
        told["differences"][task] = {"mean": sum(apart) / len(apart), "most": max(apart)}
    return {"accuracy": {"ours": _accuracy(tasks, ours), "theirs": _accuracy(tasks, theirs)}, **told}


def _accuracy(tasks: dict[str, list[icl.Item]], answers: dict[str, Answers]) -> dict[str, float]:
    return {task: sum(icl.right(items, answers[task])) / len(items) for task, items in tasks.items()}


def _with_adapter(
    base: LoadableModel, settings: dict[str, Any], best: int | str | None, open_peer: OpenPeer
) -> dict[str, Any]:
    """Measure an adapter and its base alternately, alone and together, including loading, enabling the adapter, tokenization and scoring."""
    tuned = LoadableModel("adapter", base.base, base.weights, Path(settings["adapter"]), None)
    make_adapter(base, Path(settings["adapter"]))
    tasks, budget = settings["tasks"], settings["batch_tokens"]
    requests = _requests([item for items in tasks.values() for item in items])

    def through(*roles: Any) -> list[Answers]:
        return [
            our_scorer(engine)(requests)
            for _, engine in engine_loading.open_engines(*roles, batch_tokens=budget, reporter=SilentReporter())
        ]

    def attached() -> list[Answers]:
        return [
            our_scorer(
                TransformersEngine(
                    model_loading.load_model(tuned), model_loading.load_tokenizer(base.tokenizer), budget
                )
            )(requests)
        ]

    def theirs() -> list[Answers]:
        return [open_peer(settings["model"], str(tuned.adapter))[0](best or 1, requests)]

    contestants: dict[str, Callable[[], list[Answers]]] = {
        "base alone": lambda: through(base, None),
        "adapter alone, added to the weights": lambda: through(tuned, None),
        "adapter alone, not added": attached,
        "base and adapter": lambda: through(tuned, base),
        **({"lm-eval, adapter": theirs} if best is not None else {}),
    }
    rounds: dict[str, list[Any]] = {name: [] for name in contestants}
    found: dict[str, list[Answers]] = {}
    for number in range(settings["rounds"]):
        for name in sorted(contestants, reverse=bool(number % 2)):
            gc.collect()
            wall, cpu = time.perf_counter(), time.process_time()
            found[name] = contestants[name]()
            rounds[name].append({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu})
            _note(f"round {number + 1}, {name}", rounds[name][-1])
    beside = found["adapter alone, not added"][0]
    together = found["base and adapter"]
    return {
        "rounds": rounds,
        "added_apart": _apart(found["adapter alone, added to the weights"][0], beside),
        "together_apart": max(_apart(together[0], found["base alone"][0]), _apart(together[1], beside)),
    }


def _apart(one: Answers, other: Answers) -> float:
    return max(abs(a[0] - b[0]) for a, b in zip(one, other, strict=True))


def _profiled(model: Any, score: Scorers, tasks: dict[str, list[icl.Item]], rows: int) -> dict[str, Any]:
    """Return seconds on one thread by part of the model, and the positions (tokens with padding) that it processed, for the first rows.

    Few-shot tasks are skipped if others are measured, because their shared examples would hide the cost of a question.
    """
    import torch

    without_examples = {name: items for name, items in tasks.items() if not name.endswith(icl.FEW_SHOT_SUFFIX)}
    few = {task: items[:rows] for task, items in (without_examples or tasks).items()}
    threads = cpu_cores.get_thread_count()
    os.environ["TUNELINE_THREADS"] = "1"
    torch.set_num_threads(1)
    with _watched(model) as spent:
        began = time.perf_counter()
        _timed(score, few)
        total = time.perf_counter() - began
    os.environ["TUNELINE_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    inside = spent.pop("model")
    slots = spent.pop("slots")
    parts = {**spent, "rest of the model": inside - sum(spent.values()), "outside the model": total - inside}
    return {"total": total, "slots": slots, "parts": parts}


@contextmanager
def _watched(model: Any) -> Iterator[dict[str, float]]:
    """Return the seconds in the attention, the feed-forward layers, the head and the whole model, and the number of positions."""
    spent = {"attention": 0.0, "feed-forward": 0.0, "head": 0.0, "model": 0.0, "slots": 0.0}
    named = {"self_attn": "attention", "mlp": "feed-forward", "lm_head": "head"}
    began: dict[str, float] = {}
    hooks = []

    def watch(module: Any, part: str) -> None:
        def begin(*_: Any) -> None:
            began[part] = time.perf_counter()

        def end(*_: Any) -> None:
            spent[part] += time.perf_counter() - began[part]

        hooks.extend((module.register_forward_pre_hook(begin), module.register_forward_hook(end)))

    def count(module: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        spent["slots"] += (args[0] if args else given["input_ids"]).numel()

    for name, module in model.named_modules():
        if (last := name.rsplit(".", 1)[-1]) in named:
            watch(module, named[last])
    watch(model, "model")
    hooks.append(model.register_forward_pre_hook(count, with_kwargs=True))
    try:
        yield spent
    finally:
        for hook in hooks:
            hook.remove()


if __name__ == "__main__":
    stopwatch.say(run(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
