"""Benchmark of data curation: near-duplicate search compared with other tools, the default curation, and the cost of a million rows.

    python -m benchmarks.curation --documents 100000 --workdir DIR [--peers datatrove,text-dedup,rensa]
    python -m benchmarks.curation --workdir DIR --parts scale --sizes 50000,100000,200000,400000,1000000
    python -m benchmarks.curation --workdir DIR --parts public,baseline --corpus FOLDER --about FILE --baseline CHECKOUT

--workdir contains the peers' environments, the corpora, the outputs and results.json, to which each run adds its parts. --markdown
replaces the sections of these parts in the page and keeps the others. The table states the error of a peer that fails.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import corpus, machine, measure, page, peers, profiled, scoring

ROOT = Path(__file__).resolve().parents[1]
THRESHOLD = 0.7
PARTS = ("fuzzy", "public", "baseline", "curation", "template", "scale")
SIZES = (50_000, 100_000, 200_000, 400_000, 1_000_000)
TEMPLATED = (10_000, 20_000, 40_000)
CURATIONS = {"default": (), "quality filters on all texts": ("data_curation.quality.apply_to=all",)}


def main() -> None:
    """Measure the requested parts, store the results, and write the page."""
    args = _arguments()
    workdir = args.workdir.resolve()
    workdir.mkdir(parents=True, exist_ok=True)
    kept = workdir / "results.json"
    results: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    parts: dict[str, Callable[[], Any]] = {
        "fuzzy": lambda: fuzzy(workdir, args.documents, args.seed, _wanted(args.peers), args.python),
        "public": lambda: public(workdir, args.corpus, args.about, _wanted(args.peers), args.python),
        "baseline": lambda: baseline(workdir, args),
        "curation": lambda: curation(workdir, args.documents, args.seed),
        "template": lambda: template(workdir, args.seed),
        "scale": lambda: scale(workdir, [int(size) for size in args.sizes.split(",")], args.seed),
    }
    for part in filter(None, args.parts.split(",")):
        results[part] = {**machine.circumstances("benchmarks.curation"), **parts[part]()}
        kept.write_text(json.dumps(results, indent=1))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    if args.markdown:
        previous = args.markdown.read_text(encoding="utf-8") if args.markdown.exists() else ""
        args.markdown.write_text(page.markdown(results, previous), encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curation", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--documents",
        type=int,
        default=100_000,
        metavar="N",
        help="Number of documents in the corpus of the parts fuzzy and curation.",
    )
    parser.add_argument("--workdir", type=Path, default=Path(".tuneline/benchmark-curation"), metavar="DIR")
    parser.add_argument(
        "--parts",
        default="fuzzy,curation,template",
        help=f"Comma-separated parts to measure: {', '.join(PARTS)}. Empty: write only the page.",
    )
    parser.add_argument(
        "--peers", default="datatrove,text-dedup,rensa", help="Comma-separated packages to compare with. Empty: none."
    )
    parser.add_argument("--python", default=sys.executable, help="Python interpreter of the peers' environments.")
    parser.add_argument(
        "--sizes",
        default=",".join(map(str, SIZES)),
        help="Comma-separated numbers of rows, each for one corpus of the part scale.",
    )
    parser.add_argument("--corpus", type=Path, action="append", default=[], help="Folder of public text; repeatable.")
    parser.add_argument(
        "--about", type=Path, metavar="FILE", help="Markdown file that describes the public text and its licences."
    )
    parser.add_argument(
        "--baseline", type=Path, metavar="CHECKOUT", help="Checkout with which to compare the default curation."
    )
    parser.add_argument("--repeats", type=int, default=3, help="Number of runs of each checkout, which alternate.")
    parser.add_argument("--million", action="store_true", help="Add scale to the parts.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="File to which all results are also written.")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="Page to write, with all results so far.")
    args = parser.parse_args()
    args.parts += ",scale" if args.million and "scale" not in args.parts else ""
    for name, given, known in (
        ("parts", args.parts, set(PARTS)),
        ("peers", args.peers, {t.package for t in peers.PEERS}),
    ):
        if unknown := set(filter(None, given.split(","))) - known:
            parser.error(f"--{name}: {', '.join(sorted(unknown))} is none of {', '.join(sorted(known))}")
    wanted = args.parts.split(",")
    if "public" in wanted and not (args.corpus and args.about):
        parser.error("the part public requires --corpus and --about")
    if "baseline" in wanted and not args.baseline:
        parser.error("the part baseline requires --baseline")
    return args


def _wanted(names: str) -> list[peers.Tool]:
    return [*peers.OURS, *(tool for tool in peers.PEERS if tool.package in names.split(","))]


@functools.cache
def _corpus(workdir: Path, documents: int, seed: int) -> corpus.Corpus:
    print(f"a corpus of {documents:,} documents", flush=True)
    return corpus.build(workdir / "corpora" / f"{documents}-{seed}.jsonl", documents, seed)


def fuzzy(workdir: Path, documents: int, seed: int, tools: list[peers.Tool], python: str) -> dict[str, Any]:
    """Measure every tool on the built corpus."""
    return compare(workdir, _corpus(workdir, documents, seed), tools, python)


def public(workdir: Path, folders: list[Path], about: Path, tools: list[peers.Tool], python: str) -> dict[str, Any]:
    """Measure every tool on public text."""
    made = corpus.collect(workdir / "corpora" / "public.jsonl", folders)
    return compare(workdir, made, tools, python) | {"about": about.read_text(encoding="utf-8").strip()}


def compare(workdir: Path, made: corpus.Corpus, tools: list[peers.Tool], python: str) -> dict[str, Any]:
    """Measure every tool on one corpus: its cost, and the recall and precision of its removals."""
    documents = made.documents
    pairs, similarity = corpus.true_pairs(corpus.texts(made.path), THRESHOLD)
    truth = {"pairs": len(pairs), "surplus": scoring.surplus(pairs, documents), "high": int((similarity >= 0.8).sum())}
    print(f"{truth['pairs']:,} true pairs", flush=True)
    rows = []
    for tool in tools:
        row = {"name": tool.name, "version": tool.version, "bands": tool.bands, "flags": tool.flags}
        try:
            row |= _compared(tool, workdir, made, pairs, similarity, python)
        except peers.PeerError as error:
            row["error"] = str(error)
        print(_line(row), flush=True)
        rows.append(row)
    return {"corpus": _described(made), "truth": truth, "tools": rows}


def _compared(
    tool: peers.Tool, workdir: Path, made: corpus.Corpus, pairs: Any, similarity: Any, python: str
) -> dict[str, Any]:
    folder = workdir / "fuzzy" / tool.name.replace(",", "").replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    start = peers.interpreter(tool, workdir, python)
    places = [str(made.path), str(folder)]
    log = folder / "log.txt"
    environment = {"HF_HOME": str(folder / "huggingface"), **tool.environment}
    if tool.package == "tuneline":
        environment["PYTHONPATH"] = str(ROOT)
    cost = measure.run([*start, "run", *places], log, [folder], folder, environment)
    if cost.returncode:
        raise peers.PeerError(f"exit code {cost.returncode}: {_tail(log)}")
    told = subprocess.run(
        [*start, "removed", *places], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    if told.returncode:
        raise peers.PeerError(" ".join(told.stderr.split())[-400:])
    result = scoring.score(json.loads(told.stdout), pairs, similarity, made.documents)
    return {"cost": cost.as_dict(), "score": result.as_dict(), "installed": peers.installed(tool, workdir)}


def _tail(log: Path) -> str:
    return " ".join(log.read_text(encoding="utf-8", errors="replace").split())[-400:]


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['name']}: {row['error']}"
    return f"{row['name']}: {row['cost']['cpu']:.1f} CPU s, recall {row['score']['recall']:.3f}, precision {row['score']['precision']:.3f}"


def _described(made: corpus.Corpus) -> dict[str, Any]:
    return {"documents": made.documents, "characters": made.characters, "sha256": made.sha256}


def curation(workdir: Path, documents: int, seed: int) -> dict[str, Any]:
    """Measure the whole stage through the command line with each set of settings, and profile the default."""
    made = _corpus(workdir, documents, seed)
    runs = [curated(workdir, made.path, name, settings) for name, settings in CURATIONS.items()]
    return {"corpus": _described(made), "runs": runs, "profile": profile(workdir, made)}


def baseline(workdir: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the default curation of this checkout and of the baseline in alternation, on the built corpus and each public folder."""
    checkouts = {"baseline": args.baseline.resolve(), "this checkout": ROOT}
    sources = {"built corpus": _corpus(workdir, args.documents, args.seed).path}
    sources |= {folder.name: folder.resolve() for folder in args.corpus}
    runs = []
    for source, path in sources.items():
        for _ in range(args.repeats):
            for name, root in checkouts.items():
                run = {"source": source, "checkout": name}
                runs.append(run | curated(workdir, path, f"{source}, {name}", root=root))
    return {"runs": runs, "commits": {name: machine.describe_commit(root) for name, root in checkouts.items()}}


def curated(
    workdir: Path, source: Path, name: str, settings: tuple[str, ...] = (), root: Path = ROOT
) -> dict[str, Any]:
    """Curate a file or folder with a checkout and return its cost and counts. A failure is an error in the result."""
    folder = workdir / "curation"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log, told = folder / "log.txt", folder / "result.json"
    command = [sys.executable, "-P", "-m", "pipelines.cli", *_command(source, folder, settings)]
    cost = measure.run(command, log, [folder], folder, {"PYTHONPATH": str(root), "TMPDIR": str(folder)}, told)
    row: dict[str, Any] = {
        "name": name,
        "settings": list(settings),
        "cost": cost.as_dict(),
    }
    if cost.returncode:
        row["error"] = f"exit code {cost.returncode}: {_message(told) or _tail(log)}"
    else:
        row["rows"] = json.loads(told.read_text())["rows"]
        row["output"] = sum(path.stat().st_size for path in (folder / "dataset").rglob("*") if path.is_file())
    print(f"curation, {name}: {row.get('error') or f'{cost.cpu:.1f} CPU s'}", flush=True)
    return row


def _message(told: Path) -> str:
    try:
        return str(json.loads(told.read_text())["error"]["message"])
    except (ValueError, KeyError):
        return ""


def _command(source: Path, folder: Path, settings: tuple[str, ...]) -> list[str]:
    sets = [part for setting in settings for part in ("--set", setting)]
    return [
        "curate",
        str(source),
        "-o",
        str(folder / "dataset"),
        "--workdir",
        str(folder / "workdir"),
        "--json",
        *sets,
    ]


def profile(workdir: Path, made: corpus.Corpus) -> dict[str, float]:
    """Return the CPU seconds of the default curation by module, over all its Python processes (under cProfile, which slows them down)."""
    folder = workdir / "profile"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, "-P", "-m", "pipelines.cli", *_command(made.path, folder, ())]
    measure.run(command, folder / "log.txt", [], folder, profiled.environment(folder))
    return profiled.summary(folder)


def template(workdir: Path, seed: int) -> dict[str, Any]:
    """Measure the search for near duplicates among documents that share a long template."""
    rows = []
    for size in TEMPLATED:
        folder = workdir / "template"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        made, pairs = corpus.templated(folder / "corpus.jsonl", size, seed)
        command = [sys.executable, "-m", "benchmarks.peers.run_tuneline", "run", str(made.path), str(folder)]
        cost = measure.run(command, folder / "log.txt", [folder], folder, {"PYTHONPATH": str(ROOT)})
        removed = set(json.loads((folder / "removed.json").read_text()))
        found = sum(bool(removed & {*pair}) for pair in pairs)
        rows.append(
            {"documents": size, "cost": cost.as_dict(), "planted": len(pairs), "found": found, "removed": len(removed)}
        )
        print(f"template, {size:,} rows: {cost.cpu:.1f} CPU s, {found} of {len(pairs)} found", flush=True)
    return {"runs": rows}


def scale(workdir: Path, sizes: list[int], seed: int) -> dict[str, Any]:
    """Measure the default curation of increasing numbers of rows."""
    rows = []
    for size in sizes:
        made = _corpus(workdir, size, seed)
        result = curated(workdir, made.path, f"{size:,} rows")
        rows.append(result | {"documents": size, "input": made.path.stat().st_size})
        made.path.unlink()
    return {"runs": rows}


if __name__ == "__main__":
    main()
