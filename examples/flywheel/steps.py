"""The steps of the flywheel, in their order. Each is a command of tuneline, or requests to its gateway.

The days are simulated: the gateway captures with this machine's clock into `captured`, and `move_to_days` copies the
rows to `traffic` with the time of the simulated question. Users and editors are simulated; all else is real.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from components.common.runtime.errors import TunelineError
from components.common.runtime.http_client import build_opener
from components.common.runtime.process_control import die_with_parent
from examples.flywheel.questions import NETWORK_AND_CONCURRENCY, TEXT_AND_DATA, Question, read_questions

Json = dict[str, Any]
MODEL_NAME = "python-helper"
TRAINING_QUESTIONS = 280  # of the first version; the simulated users ask others
QUESTIONS_PER_DAY = 50  # the smallest window of the drift check
LAST_REFERENCE_DAY, LAST_CLEAN_DAY, FIRST_WHOLE_DAY, LAST_FEEDBACK_DAY, SHADOW_DAY, LAST_DAY = 3, 4, 6, 8, 9, 10
CLIENTS, SHADOW_CLIENTS, ANSWER_TOKENS, TIMEOUT_SECONDS = 16, 4, 16, 300
HELD_BACK = 0.2
# The hash of a simulated user decides whether the user is held back. In service, the key is random and secret.
SUBJECT_KEY = "0" * 64
MIXING_WEIGHTS = "{traffic: 0.54, team: 0.20, safety: 0.12, instructions: 0.14}"
LEARNING_RATE = "4.0e-4"  # at 3e-4, no answer has the form of the corrections
ROUTES = """routes:
  tuneline:
    targets: [{model: tuneline}]
    shadow: {model: tuneline-candidate, share: 1.0, max_running: 8}
"""
SHOWN_ANSWERS = 3


@dataclass(frozen=True)
class Flywheel:
    """The folder of the example, the port of the gateway, and the results of the finished steps."""

    folder: Path
    port: int
    results: dict[str, Json]

    def get_day(self, number: int) -> date:
        """Return the date of a simulated day, counted from 1."""
        return date.fromisoformat(self.results["prepare"]["first_day"]) + timedelta(days=number - 1)


@dataclass(frozen=True)
class Visit:
    """A question of a simulated user."""

    question: Question
    user: str
    time: datetime


def plan_visits(flywheel: Flywheel, first: int, last: int) -> list[Visit]:
    """Return the questions of these days: text and data, from day 5 on half and then all about the other topic."""
    topics = [read_questions(flywheel.folder, packages) for packages in (TEXT_AND_DATA, NETWORK_AND_CONCURRENCY)]
    remaining = [iter(topics[0][TRAINING_QUESTIONS:]), iter(topics[1])]
    visits = []
    for number in range(LAST_DAY * QUESTIONS_PER_DAY):
        day, position = number // QUESTIONS_PER_DAY + 1, number % QUESTIONS_PER_DAY
        is_new = day >= FIRST_WHOLE_DAY or (day > LAST_CLEAN_DAY and position % 2 == 1)
        start = datetime.combine(flywheel.get_day(day), time(9), UTC)
        visit = Visit(next(remaining[is_new]), f"user-{number % 400}", start + timedelta(minutes=10 * position))
        visits += [visit] if first <= day <= last else []
    return visits


def start_command(flywheel: Flywheel, *arguments: object) -> subprocess.Popen[str]:
    """Start a command of tuneline with --json. It ends with this process."""
    print("$ tuneline", *arguments, file=sys.stderr, flush=True)
    command = [sys.executable, "-P", "-m", "pipelines.cli", *map(str, arguments), "--json"]
    return subprocess.Popen(command, cwd=flywheel.folder, stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent)


def read_result(process: subprocess.Popen[str]) -> Json:
    """Return the object that a command prints.

    Raises:
        TunelineError: the command failed.
    """
    assert process.stdout is not None
    line = process.stdout.readline()
    result: Json = json.loads(line or '{"error": {"message": "tuneline ended without a result"}}')
    if error := result.get("error"):
        raise TunelineError.from_dict(error)
    return result


def run_command(flywheel: Flywheel, *arguments: object) -> Json:
    """Run a command of tuneline to its end, and return its result."""
    with start_command(flywheel, *arguments) as process:
        return read_result(process)


@contextmanager
def deployed_champion(flywheel: Flywheel, *more_options: object) -> Iterator[Json]:
    """Serve the champion with capture until the end of the block, which seals the captured files."""
    options = ["--http-port", flywheel.port, "--capture", "gateway-capture.yaml", "--workdir", "work", *more_options]
    with start_command(flywheel, "deploy", MODEL_NAME, *options) as process:
        try:
            yield read_result(process)
        finally:
            process.terminate()


def request(url: str, body: Mapping[str, object] | None = None) -> str:
    """Send a GET or, with a body, a JSON request to the gateway, and return the body of its answer."""
    headers = {"Content-Type": "application/json", "x-tuneline-consent": "granted"}
    data = None if body is None else json.dumps(body).encode()
    try:
        with build_opener(url).open(urllib.request.Request(url, data, headers), timeout=TIMEOUT_SECONDS) as response:  # noqa: S310
            return str(response.read().decode())
    except urllib.error.URLError as error:
        raise TunelineError(f"{url}: {error}", hint="See gateway.log in work/serving.") from None


def ask(server: Json, visits: Sequence[Visit], clients: int) -> list[str]:
    """Let simulated users ask the served model, and return the ids of the answers."""

    def send(visit: Visit) -> str:
        messages = [{"role": "user", "content": visit.question.text}]
        body = {"model": server["model"], "messages": messages, "user": visit.user, "max_tokens": ANSWER_TOKENS}
        return str(json.loads(request(f"{server['openai_url']}/chat/completions", body))["id"])

    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(send, visits))


def correct(server: Json, ids: Sequence[str], visits: Sequence[Visit]) -> int:
    """Post the editors' corrections of the answers about the new topic, and return their number."""
    corrected = [
        (key, visit)
        for key, visit in zip(ids, visits, strict=True)
        if visit.question.module.split(".")[0] in NETWORK_AND_CONCURRENCY
    ]
    for key, visit in corrected:
        body = {"id": key, "rating": "down", "correction": visit.question.correction, "author": "editor"}
        request(f"{server['openai_url']}/feedback", body)
    return len(corrected)


def serve_days(flywheel: Flywheel, first: int, last: int, *, with_feedback: bool = False) -> Json:
    """Let the users of these days ask the champion.

    Args:
        with_feedback: whether editors correct the answers about the new topic.

    Returns:
        Version of the champion, number and ids of the answers, and number and file of the corrections.
    """
    visits = plan_visits(flywheel, first, last)
    shutil.rmtree(flywheel.folder / "captured", ignore_errors=True)  # of an interrupted attempt
    with deployed_champion(flywheel) as server:
        ids = ask(server, visits, CLIENTS)
        corrections = correct(server, ids, visits) if with_feedback else 0
    rows = move_to_days(flywheel.folder, {key: visit.time for key, visit in zip(ids, visits, strict=True)})
    feedback = {"corrections": corrections, "file": str(Path(server["folder"]) / "feedback.jsonl")}
    return {"version": server["version"], "answers": len(ids), "captured": rows, "ids": ids, **feedback}


def wait_for(condition: Callable[[], bool], missing: str) -> None:
    """Wait until a condition holds.

    Raises:
        TunelineError: it does not hold within TIMEOUT_SECONDS.
    """
    deadline = monotonic() + TIMEOUT_SECONDS
    while not condition():
        if monotonic() > deadline:
            raise TunelineError(f"{missing} within {TIMEOUT_SECONDS} seconds", hint="See the logs in work/serving.")
        sleep(1)


def move_to_days(folder: Path, times: Mapping[str, datetime]) -> int:
    """Copy the captured rows to the files of their simulated days, and return their number."""
    days: dict[Path, list[str]] = defaultdict(list)
    for path in sorted((folder / "captured").glob("*/*/*/*.jsonl")):  # MODEL/DAY/HOUR/FILE
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            moment = times[row["tuneline"].get("shadow_of") or row["response"]["id"]]
            row["timestamp"] = int(moment.timestamp())
            days[folder / "traffic" / path.parents[2].name / f"{moment:%Y-%m-%d}" / "09"].append(json.dumps(row))
    for hour, lines in days.items():
        hour.mkdir(parents=True, exist_ok=True)
        (hour / "simulated.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return sum(map(len, days.values()))


def prepare(flywheel: Flywheel) -> Json:
    """Write the training data of the first version, and the configuration files."""
    folder = flywheel.folder
    questions = read_questions(folder, TEXT_AND_DATA)[:TRAINING_QUESTIONS]
    rows = [{"prompt": each.text, "completion": each.documentation, "source": "team"} for each in questions]
    (folder / "team.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "subject.key").write_text(SUBJECT_KEY, encoding="utf-8")
    (folder / "subject.key").chmod(0o600)
    (folder / "routes.yaml").write_text(ROUTES, encoding="utf-8")
    for name in ("customization.yaml", "capture.yaml", "safety.jsonl", "instructions.jsonl"):
        shutil.copy(Path(__file__).with_name(name), folder)
    settings = (folder / "capture.yaml").read_text(encoding="utf-8")
    (folder / "gateway-capture.yaml").write_text(settings.replace("folder: traffic", "folder: captured"))
    return {"rows": len(rows), "first_day": str(datetime.now(UTC).date() - timedelta(days=LAST_FEEDBACK_DAY - 1))}


def train(flywheel: Flywheel) -> Json:
    """Train, evaluate, package, register and promote the first version."""
    result = run_command(flywheel, "run", "-c", "customization.yaml", "--workdir", "work")
    if "champion" not in result["mlflow"]["aliases"]:
        raise TunelineError(f"the first version was not promoted: {result['verdict']}", hint=f"See {result['report']}.")
    return result


def serve_first_version(flywheel: Flywheel) -> Json:
    """Serve the first version. The questions drift from day 5 on; editors correct the answers about the new topic."""
    return serve_days(flywheel, 1, LAST_FEEDBACK_DAY, with_feedback=True)


def find_drift(flywheel: Flywheel) -> Json:
    """Compare the later days with the first ones."""
    result = check_drift(flywheel, "drift", f"..{flywheel.get_day(LAST_REFERENCE_DAY)}")
    if not result["alarm"]:
        raise TunelineError("the drift check raised no alarm", hint=f"See {result['report']}.")
    return result


def check_drift(flywheel: Flywheel, name: str, days: str) -> Json:
    """Run the drift check, and keep its output as NAME.json."""
    options = ["--reference-days", days, "--window", QUESTIONS_PER_DAY, "-o", f"{name}-report", "--workdir", "work"]
    result = run_command(flywheel, "traffic", "drift", "--capture", "capture.yaml", *options)
    (flywheel.folder / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")
    return result


def continue_retraining(flywheel: Flywheel) -> Json:
    """Run `tuneline retrain`, which continues an unfinished retraining, and return the recorded state."""
    feedback = flywheel.results["serve_first_version"]["file"]
    options = ["--capture", "capture.yaml", "--feedback", feedback, "--drift", "drift.json", "--held-back", HELD_BACK]
    options += ["--shadow-days", 7, "--set", f"fine_tuning.mixing_weights={MIXING_WEIGHTS}"]
    options += ["--set", f"fine_tuning.learning_rate={LEARNING_RATE}"]
    run_command(flywheel, "retrain", "-c", "customization.yaml", *options, "--workdir", "work")
    # Not the command's result: it has none if this step was interrupted after the decision.
    state = (flywheel.folder / "retraining" / "retraining.json").read_text(encoding="utf-8")
    return dict(json.loads(state)["retrainings"][-1])


def retrain(flywheel: Flywheel) -> Json:
    """Train the next version on the exported corrections, and compare it with the champion on held-back questions."""
    cycle = continue_retraining(flywheel)
    if cycle["decision"]:
        raise TunelineError(
            f"the next version did not become a shadow: {cycle['decision']}, {cycle['reason']}",
            hint=f"See {cycle['run']['report']}.",
        )
    export = json.loads((Path(cycle["rows"]) / "export.json").read_text(encoding="utf-8"))
    return {**cycle, "export": export}


def serve_shadow(flywheel: Flywheel) -> Json:
    """Serve a day with the candidate as shadow of the champion; editors correct the champion's answers."""
    visits = plan_visits(flywheel, SHADOW_DAY, SHADOW_DAY)
    # The shadow period begins when the candidate is trained, which an interruption can delay beyond the simulated day.
    delay = datetime.fromisoformat(flywheel.results["retrain"]["shadow"]["since"]) - visits[0].time
    times = [visit.time + max(delay, timedelta()) + timedelta(seconds=1) for visit in visits]
    shutil.rmtree(flywheel.folder / "captured", ignore_errors=True)
    options = ["--watch", "--canary-alias", "candidate", "--routes", "routes.yaml"]
    with deployed_champion(flywheel, *options) as server:
        url = server["openai_url"]
        wait_for(lambda: "tuneline-candidate" in request(f"{url}/models"), "the candidate was not loaded")
        ids = ask(server, visits, SHADOW_CLIENTS)
        correct(server, ids, visits)
        metrics = url.removesuffix("/v1") + "/metrics"
        pattern = re.compile(r"^tuneline_gateway_shadow_answers_total\{.*\} (\S+)$", re.MULTILINE)
        wait_for(
            lambda: sum(map(float, pattern.findall(request(metrics)))) >= len(ids),
            "the shadow did not answer all copies",
        )
    rows = move_to_days(flywheel.folder, dict(zip(ids, times, strict=True)))
    return {"version": server["version"], "answers": len(ids), "captured": rows, "ids": ids}


def promote(flywheel: Flywheel) -> Json:
    """Let the shadow answers decide on the candidate."""
    cycle = continue_retraining(flywheel)
    if cycle["decision"] != "promoted":
        raise TunelineError(
            f"the next version was not promoted: {cycle['decision'] or 'undecided'}, {cycle['reason']}",
            hint=f"See {flywheel.folder / 'retraining' / 'retraining.json'}.",
        )
    return {**cycle, "answers": read_shown_answers(flywheel)}


def read_shown_answers(flywheel: Flywheel) -> list[Json]:
    """Return questions of the shadow day with the correction and the answers of both versions."""
    visits = plan_visits(flywheel, SHADOW_DAY, SHADOW_DAY)
    by_id = dict(zip(flywheel.results["serve_shadow"]["ids"], visits, strict=True))
    answers: dict[str, Json] = {key: {} for key in list(by_id)[:SHOWN_ANSWERS]}
    for path in (flywheel.folder / "traffic").glob("*/*/*/*.jsonl"):
        for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            shadowed = row["tuneline"].get("shadow_of")
            key = shadowed or row["response"]["id"]
            if key in answers:
                text = row["response"]["choices"][0]["message"]["content"]
                answers[key]["candidate_answer" if shadowed else "incumbent_answer"] = text
    return [
        {"prompt": by_id[key].question.text, "reference": by_id[key].question.correction, **texts}
        for key, texts in answers.items()
    ]


def serve_next_version(flywheel: Flywheel) -> Json:
    """Serve the promoted version on the following day."""
    return serve_days(flywheel, SHADOW_DAY + 1, LAST_DAY)


def check_again(flywheel: Flywheel) -> Json:
    """Accept the days after the change as the new reference, and compare the following days with it."""
    days = f"{flywheel.get_day(FIRST_WHOLE_DAY)}..{flywheel.get_day(LAST_FEEDBACK_DAY)}"
    return check_drift(flywheel, "drift-again", days)


STEPS = (
    prepare, train, serve_first_version, find_drift, retrain, serve_shadow, promote, serve_next_version, check_again,
)  # fmt: skip
