"""Write docs/reference/benchmarks-serving.md and its plot; neither is edited by hand."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.page import made_with, met, table_of

BATCHED, ALONE, VLLM, GENERATE = "tuneline", "tuneline, one at a time", "vLLM", "plain generate"
MANY = 16  # clients of the goals
FASTER, PER_CORE, FIRST, SINGLE = 5.0, 1.0, 1.5, 1.0
REQUEST_MILLISECONDS, TOKEN_MILLISECONDS, CAPTURE_MILLISECONDS = 2.0, 0.1, 0.05

HEAD = """# Serving, measured

`benchmarks/serving.py` writes this page. It compares a tuneline package, the same package with one slot (no batching) and, on request, vLLM
behind a Python model of the benchmark. They run alternately in the same Triton server binary. The model is `{model}` ({parameters:.0f}M parameters) in
float32 (threads per engine: {threads}). The {texts} prompts have about {lengths} tokens; every answer has {max_tokens} tokens, decoded
greedily and streamed. The load client runs on the same machine.
"""

MEASURES = """- **clients**: each sends {requests} requests, one after the other (each text at least once). The figures are medians; rounds: {rounds}
- **first token**, **per token**, **answer**: milliseconds to the first piece, between later pieces, and to the end; percentiles over all
  requests of a round
- **CPU**: cores that the server with its models uses; **client's CPU**: cores that the load client uses
- **tokens per CPU s**: tokens per CPU second of the server with its models
- **{generate}**: a loop with `transformers.generate` over the same prompts, in a separate process
"""

RATES = """Requests arrive at random (a seeded Poisson process) for {seconds:g} seconds. Times are measured from the moment when a request is due.
"""

GATEWAY = """The CPU time covers the gateway's process with an API key, a usage file and a request log.
The official OpenAI client sends {requests} chats of each kind
from {clients} clients. Further tokens were measured with streamed answers of {tokens} tokens. The event loop's thread (model messages, JSON, HTTP)
takes {loop_share:.0%} of the time of these answers, gRPC's threads the rest.
"""

CAPTURE = """
Capture of every request, measured alone with answers as long as their prompts, takes {path:.4f} ms of CPU time per request in the event
loop's thread and {writer:.3f} ms in the writer's thread (redaction, JSON, files). A row has {row_bytes:.0f} bytes.
"""


def rounds(results: dict[str, Any], name: str, clients: int = 0, rate: float = 0.0) -> list[dict[str, Any]]:
    """Return a contestant's levels with a number of clients, or at a rate."""
    return [
        one for one in results["levels"] if (one["contestant"], one["clients"], one["rate"]) == (name, clients, rate)
    ]


def speed(results: dict[str, Any], name: str, clients: int = 1) -> float | None:
    """Return the median tokens per second of the rounds; None if not measured."""
    if name == GENERATE:
        return median(one["tokens_per_second"] for one in results["generate"])
    found = [one["tokens_per_second"] for one in rounds(results, name, clients)]
    return median(found) if found else None


def tokens_per_cpu_second(results: dict[str, Any], name: str, clients: int) -> float | None:
    """Return the median tokens per CPU second of the server with its models; None if not measured."""
    found = [one["tokens"] / one["cpu"]["server"] for one in rounds(results, name, clients)]
    return median(found) if found else None


def seconds(levels: list[dict[str, Any]], key: str, rank: str) -> float | None:
    """Return the median of a percentile of the rounds in seconds; None if not measured."""
    found = [one[key][rank] for one in levels if one[key]]
    return median(found) if found else None


def goals(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the measured goals, each with its ratio and whether it is met. A ratio without a goal is for comparison."""
    many = max(results["settings"]["clients"])
    ours = speed(results, BATCHED, many)
    firsts = {name: seconds(rounds(results, name, many), "first_token", "p50") for name in (BATCHED, VLLM)}
    per_core = [tokens_per_cpu_second(results, name, many) for name in (BATCHED, VLLM)]
    wanted = [
        (
            f"tokens/s at {many} clients ÷ one at a time at {many} clients",
            ours,
            speed(results, ALONE, many),
            FASTER,
            True,
        ),
        (f"tokens/s at {many} clients ÷ one at a time at 1 client", ours, speed(results, ALONE, 1), FASTER, True),
        (f"tokens/s at {many} clients ÷ {GENERATE}", ours, speed(results, GENERATE), None, True),
        (f"tokens/s at {many} clients ÷ vLLM's", ours, speed(results, VLLM, many), None, True),
        (f"tokens per CPU second of the server at {many} clients ÷ vLLM's", *per_core, PER_CORE, True),
        (f"time to first token at {many} clients, p50 ÷ vLLM's", firsts[BATCHED], firsts[VLLM], FIRST, False),
        (f"tokens/s at 1 client ÷ {GENERATE}", speed(results, BATCHED, 1), speed(results, GENERATE), SINGLE, True),
    ]
    cost = results["gateway"]
    costs = [
        ("gateway's CPU milliseconds per whole answer", cost["whole"], REQUEST_MILLISECONDS),
        ("gateway's CPU milliseconds per streamed answer of one token", cost["streamed"], REQUEST_MILLISECONDS),
        ("gateway's CPU milliseconds per further streamed token", cost["token"], TOKEN_MILLISECONDS),
        ("CPU milliseconds of capture on the request path", cost["capture"]["path"], CAPTURE_MILLISECONDS),
    ]
    return [
        *(_goal(*one) for one in wanted if one[1] and one[2]),
        *(_goal(name, 1000 * seconds, 1.0, goal, False) for name, seconds, goal in costs),
    ]


def _goal(name: str, mine: float, theirs: float, goal: float | None, more: bool) -> dict[str, Any]:
    ratio = mine / theirs
    reached = goal is None or (ratio >= goal if more else ratio <= goal)
    return {"name": name, "ratio": ratio, "goal": goal, "more": more, "met": reached}


def same(results: dict[str, Any]) -> bool:
    """Return whether answers among many clients are complete and equal those of a single client."""
    return not any(one["not_alone"] or one["short"] for one in results["texts"] if one["contestant"] != VLLM)


def summary(results: dict[str, Any]) -> str:
    """Return a few lines for the terminal."""
    lines = [f"{one['name']}: {one['ratio']:.3g}{_wanted(one)}" for one in goals(results)]
    return "\n".join([*lines, f"answers among many clients equal those of a single client: {same(results)}"])


def _wanted(one: dict[str, Any]) -> str:
    if one["goal"] is None:
        return ""
    return f" (goal: {'at least' if one['more'] else 'at most'} {one['goal']:g}: {met(one['met'])})"


def markdown(results: dict[str, Any], plot: str) -> str:
    """Return the page; `plot` is the address of the plot."""
    settings = results["settings"]
    lengths = " or ".join(", ".join(map(str, settings["lengths"])).rsplit(", ", 1))
    told = {**settings, "parameters": results["parameters"] / 1e6, "lengths": lengths}
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    failed = "".join(f"\n**{name}** was not measured: {error}\n" for name, error in results["errors"].items())
    parts = [
        HEAD.format(**told),
        made_with(results) + f"\nThe measurements ran on {results['date']} with {versions}.\n" + failed,
        _goals(results),
        f"![tokens per second and times by clients and by rate]({plot})\n",
        "## By clients\n\n" + MEASURES.format(**settings, generate=GENERATE) + "\n" + _clients(results),
        "## The gateway\n\n" + GATEWAY.format(**results["gateway"]) + "\n" + _gateway(results),
        "## By rate\n\n" + RATES.format(**settings) + "\n" + _rates(results),
        _texts(results),
        _servers(results),
    ]
    return "\n".join([*parts, _profile(results)])


def _goals(results: dict[str, Any]) -> str:
    return "".join(f"- {one['name']}: {one['ratio']:.3g}{_wanted(one)}\n" for one in goals(results)) + (
        f"- answers among many clients equal those of a single client: {met(same(results))}\n"
    )


HEADINGS = [
    "tokens/s",
    "tokens per CPU s",
    "first token p50",
    "p90",
    "p99",
    "per token p50",
    "p99",
    "answer p50",
    "p99",
    "CPU",
    "client's CPU",
    "errors",
]
TIMES = (("first_token", ("p50", "p90", "p99")), ("per_token", ("p50", "p99")), ("latency", ("p50", "p99")))


def _clients(results: dict[str, Any]) -> str:
    rows = [
        [name, str(clients), *_row(found)]
        for clients in results["settings"]["clients"]
        for name in (BATCHED, ALONE, VLLM)
        if (found := rounds(results, name, clients))
    ]
    plain = [one["tokens_per_second"] for one in results["generate"]]
    rows.append([GENERATE, "1", _spread(plain), *[""] * (len(HEADINGS) - 1)])
    return table_of(["", "clients", *HEADINGS], rows)


def _gateway(results: dict[str, Any]) -> str:
    cost = results["gateway"]
    rows = [
        [name, *(f"{1000 * each[key]:.2f}" for key in ("whole", "streamed")), f"{1000 * each['token']:.3f}"]
        for name, each in {"without capture": cost, "with capture": cost["captured"]}.items()
    ]
    capture = cost["capture"]
    text = CAPTURE.format(path=1000 * capture["path"], writer=1000 * capture["writer"], row_bytes=capture["row_bytes"])
    return (
        table_of(["", "ms per whole answer", "ms per streamed answer of one token", "ms per further token"], rows)
        + text
    )


def _rates(results: dict[str, Any]) -> str:
    rows = [
        [name, f"{rate:g}", *_row(found)]
        for rate in results["settings"]["rates"]
        for name in (BATCHED, VLLM)
        if (found := rounds(results, name, rate=rate))
    ]
    return table_of(["", "requests per second", *HEADINGS], rows)


def _row(found: list[dict[str, Any]]) -> list[str]:
    times = [seconds(found, key, rank) for key, ranks in TIMES for rank in ranks]
    cpu = [median((one["cpu"][key] or 0.0) / one["seconds"] for one in found) for key in ("server", "client")]
    return [
        _spread([one["tokens_per_second"] for one in found]),
        f"{median(one['tokens'] / one['cpu']['server'] for one in found):.0f}",
        *(f"{value * 1000:.0f}" if value is not None else "" for value in times),
        *(f"{share:.2f}" for share in cpu),
        str(sum(one["errors"] for one in found)),
    ]


def _spread(values: list[float]) -> str:
    several = f" ({min(values):.0f}–{max(values):.0f})" if len(values) > 1 else ""
    return f"{median(values):.1f}{several}"


def _texts(results: dict[str, Any]) -> str:
    rows = [
        [
            one["contestant"],
            str(one["clients"] or "at a rate"),
            f"{one['prompt_tokens'][0]}–{one['prompt_tokens'][1]}",
            *(str(one[key]) for key in ("answers", "not_alone", "not_generate", "short")),
        ]
        for one in results["texts"]
    ]
    head = [
        "",
        "clients",
        "prompt tokens",
        "answers",
        "differ from one client's",
        f"differ from {GENERATE}",
        "too short",
    ]
    return f"## Answers\n\nThe sha256 of the prompts begins with `{results['sha256'][:16]}`.\n\n" + table_of(head, rows)


def _servers(results: dict[str, Any]) -> str:
    rows = [
        [name, told["version"], f"{told['seconds']:.0f}", f"{results['idle'][name]:.2f}"]
        for name, told in results["ready"].items()
    ]
    return "## The servers\n\n" + table_of(["", "Triton", "s until ready", "cores used when idle"], rows)


def _profile(results: dict[str, Any]) -> str:
    """Return the parts of a step's time in the batching engine, without a server."""
    told = "The batching engine runs in a separate process without a server and receives all requests at once. The table shows seconds by part of a step.\n"
    parts = list(results["profile"][0]["parts"])
    rows = [
        [
            str(one["clients"]),
            f"{one['tokens_per_second']:.1f}",
            str(one["steps"]),
            *(f"{one['parts'][part]:.2f} ({one['parts'][part] / one['seconds']:.0%})" for part in parts),
        ]
        for one in results["profile"]
    ]
    return "## Time breakdown\n\n" + told + "\n" + table_of(["requests at once", "tokens/s", "steps", *parts], rows)


def plot(results: dict[str, Any], path: Path) -> None:
    """Draw tokens per second and times by clients, and times by rate, as one SVG."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "tuneline"  # equal plots have equal bytes
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.4), layout="constrained")
    (tokens, first), (each, late) = figure.subplots(2, 2)
    clients, rates = results["settings"]["clients"], results["settings"]["rates"]
    for number, name in enumerate((BATCHED, ALONE, VLLM)):
        if not rounds(results, name, clients[0]):
            continue
        style = {"label": name, "color": f"C{number}", "marker": "o"}
        found = [rounds(results, name, count) for count in clients]
        tokens.plot(clients, [speed(results, name, count) for count in clients], **style)
        first.plot(clients, [1000 * (seconds(one, "first_token", "p50") or 0) for one in found], **style)
        each.plot(clients, [1000 * (seconds(one, "per_token", "p50") or 0) for one in found], **style)
        known = [(rate, one) for rate in rates if (one := rounds(results, name, rate=rate))]
        for rank, line in (("p50", "-"), ("p99", ":")):
            times = [1000 * (seconds(one, "latency", rank) or 0) for _, one in known]
            late.plot([rate for rate, _ in known], times, **{**style, "label": f"{name}, {rank}", "linestyle": line})
    tokens.axhline(speed(results, GENERATE) or 0, color="grey", linewidth=0.8, linestyle="--", label=GENERATE)
    titles = ("tokens per second", "first token p50, ms", "a token p50, ms", "answer, ms")
    for axes, title, x in zip(
        (tokens, first, each, late), titles, ["clients"] * 3 + ["requests per second"], strict=True
    ):
        _finish(axes, title, x)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})


def _finish(axes: Any, title: str, x: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
