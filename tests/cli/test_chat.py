"""`segue chat`: turns and commands, with an engine of its own and with a server; a terminal's keys."""

import contextlib
import io
import json
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from segue import SamplingParams
from segue.cli.main import run_command
from segue.cli.talk.backend import ReplyEnd, ReplyStats, Turn
from segue.cli.talk.conversation import Conversation
from segue.cli.talk.remote import ServerAddress
from segue.cli.talk.terminal import Entry
from segue.display import terminal_text
from segue.errors import CapacityError, FailedError, ParameterError, RequestFailed, UsageError
from segue.llm.llm import LLM
from tests.cli.chat_terminal import CTRL_C, CTRL_D, chat_terminal
from tests.server.running import RunningServer, serve_process
from tests.weights.make_gguf import tiny_llama

KEY = "open-sesame"
CONTEXT = 4096
DRAWN = ("--max-tokens", "12", "--temperature", "1", "--seed", "5")
Chat = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with room for answers that somebody can stop."""
    return tiny_llama(tmp_path_factory.mktemp("model") / "talking.gguf", context=CONTEXT)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    flags = ("--served-model-name", "tiny", "--api-key", KEY, "--in-process", "--threads", "1")
    with serve_process(log, model_path, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def llm(model_path: Path) -> Iterator[LLM]:
    with LLM(model_path, threads=1) as llm:
        yield llm


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Chat:
    """Runs `segue chat` with these lines as stdin. Returns exit code, stdout, stderr."""

    def run(*arguments: str, lines: tuple[str, ...] = ()) -> tuple[int, str, str]:
        data = "".join(f"{line}\n" for line in lines).encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8", "surrogateescape"))
        code = run_command(["chat", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(params=["local", "remote"])
def chat(request: pytest.FixtureRequest, command: Chat, model_path: Path) -> Chat:
    """`command` with each back end."""
    if request.param == "local":
        where: tuple[str, ...] = (str(model_path), "--threads", "1")
    else:
        server: RunningServer = request.getfixturevalue("server")
        where = ("--url", server.url, "--api-key", KEY)

    def run(*arguments: str, lines: tuple[str, ...] = ()) -> tuple[int, str, str]:
        return command(*where, *arguments, lines=lines)

    return run


def answers(llm: LLM, *texts: str, system: str | None = None, seed: int = 5) -> list[str]:
    """What the model says to these turns."""
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=seed)
    opening = [] if system is None else [{"role": "system", "content": system}]
    with llm.session(opening) as session:
        said = []
        for text in texts:
            session.append(text)
            said.append(session.respond(params).text())
        return said


def printed(*texts: str) -> str:
    return "".join(f"{text}\n" for text in texts)


def messages(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    roles = [({"role": "user", "content": a}, {"role": "assistant", "content": b}) for a, b in pairs]
    return [message for pair in roles for message in pair]


def test_turns_are_remembered_and_forgotten(chat: Chat, llm: LLM) -> None:
    code, out, err = chat(*DRAWN, lines=("the hen", "on", "/reset", "the hen", "/quit", "never"))
    first, second = answers(llm, "the hen", "on")
    assert (code, out, err) == (0, printed(first, second, first), "")
    assert second != answers(llm, "on")[0], "the first turn must matter"


def test_undo_gives_back_what_was_there(chat: Chat, llm: LLM, request: pytest.FixtureRequest) -> None:
    code, out, err = chat(*DRAWN, lines=("the hen", "on", "/undo", "in", "/undo", "/undo", "/undo", "on"))
    first, second = answers(llm, "the hen", "on")
    if "remote" in request.node.callspec.id:
        # A server reads the text of the answer again.
        with llm.session(messages(("the hen", first))) as session:
            session.append("in")
            third = session.respond(SamplingParams(max_tokens=12, temperature=1.0, seed=5)).text()
    else:
        third = answers(llm, "the hen", "in")[1]
    assert (code, out) == (0, printed(first, second, third, *answers(llm, "on")))
    assert err.splitlines() == [
        "forgotten: on",
        "forgotten: in",
        "forgotten: the hen",
        "segue: error: there is no turn yet: say something first",
    ]


def test_retry_draws_with_the_next_seed(chat: Chat, llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    code, out, err = chat(*DRAWN, lines=("the hen", "/retry", "/retry", f"/save {path}"))
    drawn = [answers(llm, "the hen", seed=seed)[0] for seed in (5, 6, 7)]
    assert (code, out, err) == (0, printed(*drawn), f"2 messages in {path}\n")
    assert len(set(drawn)) == 3
    assert json.loads(path.read_text()) == messages(("the hen", drawn[2]))


def test_retry_without_chance_says_so(chat: Chat) -> None:
    code, out, err = chat("--max-tokens", "4", lines=("the hen", "/retry"))
    assert code == 0
    assert len(set(out.split("\n")[:2])) == 1
    assert "temperature is 0" in err


def test_system_message_can_change(chat: Chat, llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    lines = ("the hen", "/system Cluck.", "on", f"/save {path}", "/undo", "/undo", "/system", "the hen")
    code, out, _ = chat(*DRAWN, "--system", "Be brief.", lines=lines)
    saved = json.loads(path.read_text())
    assert code == 0
    assert saved[0] == {"role": "system", "content": "Cluck."}
    assert [message["content"] for message in saved[1:4]] == ["the hen", saved[2]["content"], "on"]
    with llm.session(saved[:3]) as session:
        session.append("on")
        params = SamplingParams(max_tokens=12, temperature=1.0, seed=5)
        assert session.respond(params).text() == saved[4]["content"]
    assert saved[2]["content"] == answers(llm, "the hen", system="Be brief.")[0]
    assert out == printed(saved[2]["content"], saved[4]["content"], *answers(llm, "the hen"))


def test_lines_that_belong_together(chat: Chat, llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    lines = ("//etc is", "one\\", "two", '"""', "/reset", "", "  on\\", '"""', f"/save {path}", '"""', "open")
    code, _, _ = chat(*DRAWN, lines=lines)
    assert code == 0
    said = [each["content"] for each in json.loads(path.read_text()) if each["role"] == "user"]
    assert said == ["/etc is", "one\ntwo", "/reset\n\n  on\\"]


def test_stats(chat: Chat) -> None:
    _, _, err = chat("--max-tokens", "1500", "--temperature", "1", lines=("/stats", "the hen", "/stats"))
    without, stats = err.splitlines()
    assert "no turn yet" in without
    times = r"first token after \d+\.\d{3} s \| [\d,.]+ tok/s"
    assert re.fullmatch(
        rf"[\d,]+ tokens, (cut off|complete) \| {times} \| history [\d,]+ of {CONTEXT:,} tokens", stats
    )


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("/fly", "no such command: /fly"),
        ("/etc/passwd is what?", "no such command: /etc/passwd"),
        ("/", "no such command: /"),
        ("/undo 2", "/undo stands alone"),
        ("/quit now", "/quit stands alone"),
        ("/save", "/save needs a file"),
        ("/save /no/such/folder/x", "cannot be written: No such file"),
        ("the hen " * 2000, "max_model_len"),
    ],
)
def test_wrong_lines_change_nothing(chat: Chat, llm: LLM, line: str, part: str) -> None:
    code, out, err = chat(*DRAWN, lines=("the hen", line, "on"))
    assert (code, out) == (0, printed(*answers(llm, "the hen", "on")))
    assert err.startswith("segue: error: ")
    assert err.count("\n") == 1
    assert part in err


# --- answers that do not come to their end, from a back end that says what a test wants ------------------------


class ScriptedReply:
    """Pieces of text, or what happens in place of one."""

    def __init__(self, script: list[str | BaseException], *, fails_at_once: BaseException | None) -> None:
        self._script = script
        self._fails_at_once = fails_at_once
        self._end = ReplyEnd.COMPLETE
        self.is_begun = False

    def begin(self) -> None:
        if self._fails_at_once is not None:
            raise self._fails_at_once
        self.is_begun = True

    def __next__(self) -> str:
        match self._script.pop(0) if self._script else StopIteration():
            case KeyboardInterrupt(args=(str(piece),)):
                signal.raise_signal(signal.SIGINT)
                return piece
            case BaseException() as error:
                raise error
            case str() as piece:
                return piece

    def stop(self) -> str:
        self._end = ReplyEnd.STOPPED
        return "".join(piece for piece in self._script if isinstance(piece, str))

    @property
    def stats(self) -> ReplyStats:
        return ReplyStats(
            num_prompt_tokens=1, num_tokens=1, time_to_first_token_s=None, decode_s=0.0, end=self._end
        )


class ScriptedBackend:
    model = "script"
    max_model_len = None

    def __init__(self, *script: str | BaseException, fails_at_once: BaseException | None = None) -> None:
        self._reply = ScriptedReply([*script], fails_at_once=fails_at_once)
        self.num_undone = 0

    def reply(self, text: str, params: SamplingParams) -> ScriptedReply:
        return self._reply

    def undo(self) -> None:
        self.num_undone += 1

    def restart(self, system: str | None, turns: Sequence[Turn]) -> None:
        raise NotImplementedError


def test_what_was_read_when_it_is_stopped_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    backend = ScriptedBackend("a ", KeyboardInterrupt("as well"), " and the rest")
    conversation = Conversation(backend, SamplingParams(), None)
    assert conversation.take(Entry("the hen", is_block=False))
    assert capsys.readouterr().out == "a as well and the rest ...\n"
    conversation.take(Entry("/stats", is_block=False))
    assert capsys.readouterr().err == "1 tokens, stopped | history 2 tokens\n"
    assert backend.num_undone == 0


@pytest.mark.parametrize(
    ("backend", "error", "num_undone"),
    [
        (ScriptedBackend(fails_at_once=KeyboardInterrupt()), None, 0),
        (ScriptedBackend(fails_at_once=CapacityError("too long")), CapacityError, 0),
        (ScriptedBackend("", KeyboardInterrupt("")), None, 1),
        (ScriptedBackend("", RequestFailed("broken")), RequestFailed, 1),
        (ScriptedBackend("a", FailedError("gone")), FailedError, 0),
    ],
)
def test_a_turn_without_an_answer_is_forgotten(
    backend: ScriptedBackend,
    error: type[Exception] | None,
    num_undone: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    conversation = Conversation(backend, SamplingParams(), None)
    with contextlib.nullcontext() if error is None else pytest.raises(error):
        conversation.take(Entry("the hen", is_block=False))
    assert backend.num_undone == num_undone
    with pytest.raises(UsageError, match="no turn yet"):
        conversation.take(Entry("/stats", is_block=False))


# --- a server ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def answering_port(reply: bytes) -> Iterator[str]:
    """A server that says this to everybody, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def assert_one_error(result: tuple[int, str, str], code: int, *parts: str) -> None:
    assert result[:2] == (code, "")
    assert result[2].startswith("segue: error: ")
    assert result[2].count("\n") == 1
    assert all(part in result[2] for part in parts), result[2]


def test_servers_that_cannot_be_talked_to(
    command: Chat, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nobody = f"http://127.0.0.1:{listener.getsockname()[1]}"
    assert_one_error(command("--url", nobody), 1, nobody, "Connection refused")
    assert_one_error(command("--url", server.url), 1, "wants a key", "--api-key")
    assert_one_error(command("--url", server.url, "--api-key", "wrong"), 1, "refuses this key")
    assert_one_error(command("other", "--url", server.url, "--api-key", KEY), 2, "other")
    assert_one_error(command("--url", f"{server.url}/x", "--api-key", KEY), 1, server.url)
    why = b'{"error": {"message": "not by this name: --allowed-host lets it"}}'
    for body, shown in ((why, "--allowed-host"), (b"no", "it does not say why")):
        head = f"HTTP/1.1 403 Forbidden\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with answering_port(head + body) as url:
            assert_one_error(command("--url", url), 1, url, shown)
    with answering_port(b"220 mail.example ESMTP\r\n") as url:
        assert_one_error(command("--url", url), 1, url, "no server for segue chat")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert_one_error(command("--url", server.url), 2, "websockets", 'pip install "segue[server]"')


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((), "no model"),
        (("--url", "ftp://x"), "url='ftp://x'"),
        (("--url", "http://"), "url="),
        (("--url", "http://x:y"), "url="),
        (("--url", "x", "--api-key", "schlüssel"), "api_key"),
        (("--url", "x", "--threads", "2"), "--threads is for an engine"),
        (("--url", "x", "--runtime", "reference"), "--runtime is for an engine"),
    ],
)
def test_command_lines_that_are_wrong(command: Chat, arguments: tuple[str, ...], part: str) -> None:
    assert_one_error(command(*arguments), 2, part)


@pytest.mark.parametrize(
    ("url", "realtime", "models"),
    [
        ("http://h:1", "ws://h:1/v1/realtime", "http://h:1/v1/models"),
        ("h:1", "ws://h:1/v1/realtime", "http://h:1/v1/models"),
        ("https://h/v1/", "wss://h/v1/realtime", "https://h/v1/models"),
        ("wss://h/proxy/", "wss://h/proxy/v1/realtime", "https://h/proxy/v1/models"),
        ("http://[::1]:8000", "ws://[::1]:8000/v1/realtime", "http://[::1]:8000/v1/models"),
    ],
)
def test_addresses(url: str, realtime: str, models: str) -> None:
    address = ServerAddress(url)
    assert (address.realtime_url(None), address.models_url) == (realtime, models)
    assert address.realtime_url("a b/c") == f"{realtime}?model=a%20b%2Fc"


@pytest.mark.parametrize("url", ["", "http://", "gopher://h", "http://h:99999", "http://h?x", "http://a b"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ParameterError, match="must look like"):
        ServerAddress(url)


def test_key_and_name_may_come_from_elsewhere(
    command: Chat, server: RunningServer, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEGUE_API_KEY", KEY)
    code, out, err = command("tiny", "--url", server.url, *DRAWN, lines=("the hen",))
    assert (code, out, err) == (0, printed(*answers(llm, "the hen")), "")


def test_a_server_that_goes_away_is_one_line(tmp_path: Path, model_path: Path) -> None:
    flags = ("--in-process", "--threads", "1", "--shutdown-timeout", "0")
    with (
        serve_process(tmp_path / "log", model_path, *flags) as server,
        chat_terminal("--url", server.url, SEGUE_HOME=str(tmp_path)) as terminal,
    ):
        terminal.until(b"> ")
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        terminal.type(b"the hen\n")
        error = terminal.until(b"lost: ")
        assert terminal.wait() == 1
    assert error.count(b"segue: error: the connection to ") == 1
    assert b"Traceback" not in terminal.shown


# --- a terminal -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["local", "remote"])
def test_ctrl_c_stops_an_answer_which_is_remembered_as_shown(
    where: str, request: pytest.FixtureRequest, model_path: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "saved.json"
    if where == "local":
        arguments: tuple[str, ...] = (str(model_path), "--runtime", "reference")
    else:
        arguments = ("--url", request.getfixturevalue("server").url, "--api-key", KEY)
    flags = ("--max-tokens", "4000", "--temperature", "1", "--seed", "11")
    with chat_terminal(*arguments, *flags, SEGUE_HOME=str(tmp_path)) as terminal:
        terminal.until(b"> ")
        terminal.type(b"the hen\n")
        terminal.until(b"the hen\r\n")
        terminal.until_shown(200)
        terminal.type(CTRL_C)
        shown = terminal.until(b" ...\r\n")
        terminal.until(b"> ")
        terminal.type(b"dropped")
        terminal.until(b"dropped")
        terminal.insist(CTRL_C, b"> ")
        terminal.type(f"/save {saved}\n".encode())
        terminal.until(b"2 messages in")
        terminal.until(b"> ")
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
    asked, answer = json.loads(saved.read_text())
    assert asked["content"] == "the hen"
    text = shown.removesuffix(b" ...\r\n").replace(CTRL_C, b"").replace(b"\r\n", b"\n")
    assert text == terminal_text(answer["content"]).encode()
    assert b"Traceback" not in terminal.shown


def test_lines_are_kept_for_the_next_time(model_path: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    arguments = (str(model_path), "--max-tokens", "2", "--threads", "1")
    with chat_terminal(*arguments, SEGUE_HOME=str(home)) as terminal:
        terminal.until(b"> ")
        terminal.type(b"/system Cluck.\n/quit\n")
        assert terminal.wait() == 0
    history = home / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert [line for line in history.read_text().splitlines() if line.startswith("/")] == [
        "/system Cluck.",
        "/quit",
    ]
    history.write_text("".join(f"line {n}\n" for n in range(1200)))
    history.chmod(0o644)
    with chat_terminal(*arguments, SEGUE_HOME=str(home)) as terminal:
        terminal.until(b"> ")
        terminal.type(b"\x10")
        terminal.until(b"line 1199")
        terminal.insist(CTRL_C, b"> ")
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
    assert history.stat().st_mode & 0o777 == 0o600
    assert len(history.read_text().splitlines()) <= 1001


def test_chat_without_a_place_for_its_history(model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    arguments = (str(model_path), "--max-tokens", "2", "--threads", "1")
    with chat_terminal(*arguments, SEGUE_HOME=str(tmp_path / "file")) as terminal:
        terminal.until(b"> ")
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
    assert b"error" not in terminal.shown
