"""`tuneline chat`: a conversation in the terminal with a server, a package or a registered version."""

from __future__ import annotations

import difflib
import io
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.common.runtime.errors import EngineMissingError, RegistryError, TunelineError, UsageError
from pipelines.cli.application import (
    DEFAULT_WORKDIR_PATH,
    JsonOption,
    TrackingUriOption,
    WorkdirOption,
    app,
    open_workdir,
    print_result,
    print_text,
)

if TYPE_CHECKING:
    from components.common.runtime.reporters import Reporter
    from pipelines.gateway.chat_client import Answer, ChatClient

TARGET_HINT = "Specify http://HOST:PORT, the folder of a package, or NAME@ALIAS."
SIGNAL_CHECK_SECONDS = 0.5
SETTINGS: dict[str, Callable[[str], float]] = {"temperature": float, "top_p": float, "max_tokens": int, "seed": int}
HELP = """\
/system TEXT         set the system prompt; without TEXT: remove it
/reset               clear the conversation
/model [NAME]        use another model; without NAME: list the models
/set [NAME=VALUE]    set temperature, top_p, max_tokens or seed; NAME= restores the server's default
/quit or Ctrl-D      end the chat
//TEXT               send a message that starts with /
Ctrl-C               stop the answer"""


@app.command()
def chat(
    target: Annotated[
        str,
        typer.Argument(help="URL of an OpenAI-compatible server, folder of a package, or NAME@ALIAS."),
    ],
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="Send this message, print the answer and exit.")
    ] = None,
    system: Annotated[str, typer.Option("--system", help="System prompt.")] = "",
    model: Annotated[
        str, typer.Option("--model", help="Model to chat with. Default: the first model on the server.")
    ] = "",
    key: Annotated[str, typer.Option("--key", envvar="TUNELINE_API_KEY", help="API key of the server.")] = "",
    tracking_uri: TrackingUriOption = "",
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> None:
    """Chat with a model in the terminal. A package or a registered version is served during the chat."""
    if prompt is not None and not prompt.strip():
        raise UsageError("--prompt is empty", hint="Specify a message, or omit --prompt to chat in the terminal.")
    if as_json and prompt is None:
        raise UsageError("--json requires --prompt", hint='Specify a message, for example --prompt "Hello".')
    from pipelines.gateway.chat_client import ChatClient

    with open_workdir("chat", as_json, workdir, tracking_uri) as (reporter, _), open_server(target, reporter) as url:
        client = ChatClient(url, key)
        conversation = Conversation(client, choose_model(client, model), system)
        if prompt is not None:
            answer = conversation.ask(prompt, is_quiet=as_json)
            if as_json:
                print_result(_build_result(conversation.model, answer), as_json, [])
            return
        _note(f"model {conversation.model} on {client.base_url}; /help lists the commands, Ctrl-D ends the chat")
        if url != target:
            _note(f"chat page: {url}/chat")
        with _answer_signals():
            hold_conversation(conversation)


@dataclass
class Conversation:
    """The messages and settings of a chat."""

    client: ChatClient
    model: str
    system: str = ""
    settings: dict[str, float] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, text: str, *, is_quiet: bool = False) -> Answer:
        """Send a message, print the answer while it arrives, and add both to the conversation.

        After an error, the message is not part of the conversation. After Ctrl-C, the conversation keeps the message
        and the part of the answer that has arrived.

        Raises:
            UsageError, EngineMissingError: as ChatClient.stream.
        """
        from pipelines.gateway.chat_client import Answer

        question = {"role": "user", "content": text}
        system = [{"role": "system", "content": self.system}] if self.system else []
        answer = Answer()
        try:
            pieces = self.client.stream(answer, self.model, [*system, *self.messages, question], self.settings)
            with closing(pieces):  # type: ignore[type-var] # a generator, which closes its connection
                for piece in pieces:
                    if not is_quiet:
                        print_text(piece, end="")
        except KeyboardInterrupt:
            if answer.text:
                self.messages += [question, {"role": "assistant", "content": answer.text}]
            raise
        finally:
            if answer.text and not is_quiet:
                print(flush=True)
        self.messages += [question, {"role": "assistant", "content": answer.text}]
        return answer

    def run_command(self, line: str) -> bool:
        """Run a command such as /reset; return whether the chat continues.

        Raises:
            UsageError: the command or its value is not valid.
        """
        command, _, value = line.partition(" ")
        value = value.strip()
        match command:
            case "/quit" | "/exit":
                return False
            case "/help":
                _note(HELP)
            case "/system":
                self.system = value
                _note("system prompt set" if value else "no system prompt")
            case "/reset":
                self.messages.clear()
                _note("conversation cleared")
            case "/model" if value:
                self.model = choose_model(self.client, value)
                _note(f"model: {self.model}")
            case "/model":
                _note("\n".join(f"{'*' if name == self.model else ' '} {name}" for name in self.client.list_models()))
            case "/set":
                self._set(value)
                _note(", ".join(f"{name}={value}" for name, value in self.settings.items()) or "the server's defaults")
            case _:
                raise UsageError(f"{command} is not a command", hint="/help lists the commands.")
        return True

    def _set(self, assignment: str) -> None:
        name, _, value = (part.strip() for part in assignment.partition("="))
        if not assignment:
            return
        if name not in SETTINGS:
            raise UsageError(
                f"{name} is not a setting; expected {', '.join(SETTINGS)}", hint="Example: /set temperature=0.7"
            )
        if not value:
            self.settings.pop(name, None)
            return
        try:
            self.settings[name] = SETTINGS[name](value)
        except ValueError:
            kind = "a whole number" if SETTINGS[name] is int else "a number"
            raise UsageError(f"{name} is {value!r}; expected {kind}", hint="Example: /set temperature=0.7") from None


def hold_conversation(conversation: Conversation) -> None:
    """Answer the lines of standard input until /quit or its end. Errors are printed; the chat continues."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401 - input() edits lines and keeps a history
    elif isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
            if line.startswith("/") and not line.startswith("//"):
                if not conversation.run_command(line):
                    return
            elif line:
                answer = conversation.ask(line.removeprefix("/") if line.startswith("//") else line)
                if is_terminal:
                    _note(format_answer(answer))
        except EOFError:
            if is_terminal:
                print()
            return
        except KeyboardInterrupt:
            _note("\nstopped; Ctrl-D or /quit ends the chat")
        except TunelineError as error:
            _note(f"{error.message}\n  {error.hint}")


def format_answer(answer: Answer) -> str:
    """Return version, token counts and times of an answer as text."""
    facts = [f"version {answer.version}"] if answer.version else []
    if answer.usage:
        facts.append(f"{answer.usage.get('prompt_tokens')} + {answer.usage.get('completion_tokens')} tokens")
    if answer.first_token_seconds is not None:
        facts.append(f"first token {answer.first_token_seconds:.2f} s")
        tokens = (answer.usage or {}).get("completion_tokens", 0)
        if tokens > 1 and answer.seconds > answer.first_token_seconds:
            facts.append(f"{(tokens - 1) / (answer.seconds - answer.first_token_seconds):.1f} tokens/s")
    else:
        facts.append("empty answer")
    if answer.finish_reason == "length":
        facts.append("token limit reached")
    return f"[{', '.join(facts)}]"


def choose_model(client: ChatClient, name: str) -> str:
    """Return the server's model of this name, or its first model for "".

    Raises:
        UsageError: the server has no such model.
        EngineMissingError: the server has no model, or does not answer.
    """
    models = client.list_models()
    if not models:
        raise EngineMissingError(f"{client.base_url} has no model", hint="Load a model on the server.")
    if not name:
        return next(iter(models))
    for model, names in models.items():
        if name in names:
            return model
    raise UsageError(
        f"{client.base_url} has no model {name!r}; existing models: {', '.join(models)}", hint="Correct the name."
    )


@contextmanager
def open_server(target: str, reporter: Reporter) -> Iterator[str]:
    """Yield the URL of the target's server; for a package or a registered version, serve it during the block.

    Raises:
        UsageError: the target is neither a URL, nor an existing folder, nor the name of a version.
        RegistryError: the version does not exist, or has no package.
    """
    if target.startswith(("http://", "https://")):
        yield target
        return
    if Path(target).is_dir():
        from components.common.artifacts import artifact_folder

        if "/" not in target and not (Path(target) / artifact_folder.MANIFEST_FILENAME).exists():
            raise UsageError(
                f"the folder {target} is not a package",
                hint=f"To chat with the registered model {target}, use {target}@champion. {TARGET_HINT}",
            )
        with serve_package(Path(target), reporter) as url:
            yield url
        return
    folder, _, name = target.rpartition("/")
    if folder and not name.isdecimal() and "@" not in target and Path(folder).is_dir():  # NAME/3 is a version
        similar = difflib.get_close_matches(name, [path.name for path in Path(folder).iterdir()], n=1)
        hint = f"Use {folder}/{similar[0]}, or correct the path." if similar else TARGET_HINT
        raise UsageError(f"the folder {target} does not exist", hint=hint)
    reporter.step(f"resolving {target}")
    from components.model_registry import servable_versions
    from pipelines.provenance.lineage import parse_reference

    try:
        name, alias = parse_reference(target)
    except UsageError:
        raise UsageError(
            f"{target!r} is neither a URL, nor an existing folder, nor NAME@ALIAS", hint=TARGET_HINT
        ) from None
    version = alias
    if not alias.isdecimal():
        holder = servable_versions.resolve_alias(name, alias)
        if holder is None:
            raise RegistryError(
                f"{name} has no version with the alias {alias}",
                hint=f"Promote a version first: tuneline promote {name} --version N.",
            )
        version = holder.version
    reporter.step(f"fetching the package of {name} version {version}")
    with servable_versions.open_package(name, version) as package, serve_package(package.path, reporter) as url:
        yield url


@contextmanager
def serve_package(repository: Path, reporter: Reporter) -> Iterator[str]:
    """Serve a package with Triton and the gateway during the block, and yield the gateway's URL.

    Raises:
        UsageError: the folder is not a package of tuneline.
        EngineMissingError: a server does not start.
    """
    from components.common.artifacts import artifact_folder
    from components.common.runtime import reporters
    from components.common.workspace import artifact_store
    from components.common.workspace.job_folders import private_folder
    from components.triton_packaging.package_serving import served_package
    from pipelines.gateway import addresses
    from pipelines.gateway.process import GatewayOptions, running_gateway

    artifact_folder.read_manifest(repository, "repository")  # another folder is refused before a server is announced
    reporter.step("starting the server")
    with (
        artifact_store.keep_paths_in_use(repository),
        private_folder(Path(tempfile.gettempdir()), "tuneline-chat", mode=0o700) as work,
        addresses.listen("127.0.0.1", 0) as listener,
        served_package(repository, work / "triton.log", reporter) as server,
        running_gateway(
            listener,
            server.grpc_url,
            server.metrics_socket,
            repository,
            GatewayOptions(log=work / "gateway.log", drain_seconds=0),
        ) as gateway,
    ):
        reporters.close_reporter(reporter)
        yield gateway.url


@contextmanager
def _answer_signals() -> Iterator[None]:
    """Ctrl-C interrupts once, so that only the answer stops; SIGTERM ends the chat.

    Without a timer, input() would handle a signal that arrives just before it waits for a key only after a key press.
    """

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    previous = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGTERM: signal.signal(signal.SIGTERM, end),
        signal.SIGALRM: signal.signal(signal.SIGALRM, lambda *_: None),
    }
    signal.setitimer(signal.ITIMER_REAL, SIGNAL_CHECK_SECONDS, SIGNAL_CHECK_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _build_result(model: str, answer: Answer) -> dict[str, Any]:
    return {
        "answer": answer.text,
        "model": model,
        "version": answer.version,
        "usage": answer.usage,
        "seconds": round(answer.seconds, 3),
        "first_token_seconds": None if answer.first_token_seconds is None else round(answer.first_token_seconds, 3),
    }


def _note(text: str) -> None:
    """Print a message to the user; standard output contains only answers."""
    print_text(text, file=sys.stderr)
