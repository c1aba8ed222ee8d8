"""A conversation with a running server: one session of its realtime WebSocket, one item for each message.

The server keeps what it has sent of an answer when it is stopped, so what is still on its way is shown as well. When
a turn is undone the server reads the texts of those before it again: their token ids may be others than were drawn.
"""

import importlib.util
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlsplit

import msgspec

from segue.cli.talk.backend import Reply, ReplyClock, ReplyEnd, ReplyStats, Turn
from segue.display import one_line
from segue.errors import FailedError, ParameterError, RequestFailed, UsageError
from segue.interrupts import DeferredInterrupt
from segue.sample.params import SamplingParams

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

CONNECT_S: Final = 10.0
REPLY_S: Final = 30.0
"""In which the server says that it has taken an event."""
POLL_S: Final = 0.05
"""How long Ctrl-C may wait while nothing comes."""
_SCHEMES: Final = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
_SAMPLING_FIELDS: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
)


class _Error(msgspec.Struct):
    message: str
    type: str = ""
    event_id: str | None = None


class _Item(msgspec.Struct):
    id: str


class _Usage(msgspec.Struct):
    input_tokens: int
    output_tokens: int


class _StatusDetails(msgspec.Struct):
    error: _Error | None = None


class _Response(msgspec.Struct):
    id: str
    status: str
    status_details: _StatusDetails | None = None
    usage: _Usage | None = None


class _Session(msgspec.Struct):
    model: str


class _Event(msgspec.Struct):
    """What is read of a server's event."""

    type: str
    delta: str = ""
    item_id: str | None = None
    response_id: str | None = None
    item: _Item | None = None
    response: _Response | None = None
    session: _Session | None = None
    error: _Error | None = None


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _ModelList(msgspec.Struct):
    data: list[_Model]


class _Refusal(msgspec.Struct):
    """The body of an answer that is no 101."""

    error: _Error


_decoder = msgspec.json.Decoder(_Event)


class ServerAddress:
    """Where a server is, from what the user typed: "http://host:port", with or without "/v1"."""

    def __init__(self, url: str) -> None:
        given = url if "://" in url else f"http://{url}"
        try:
            parts = urlsplit(given)
            is_right = parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_right = False
        if not is_right or parts.query or parts.fragment or not given.isprintable() or " " in given:
            raise ParameterError("url", url, "must look like http://127.0.0.1:8000")
        self.url = url
        socket_scheme = _SCHEMES[parts.scheme]
        base = f"{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}/v1"
        self.models_url = f"{socket_scheme.replace('ws', 'http')}://{base}/models"
        self._realtime_url = f"{socket_scheme}://{base}/realtime"

    def realtime_url(self, model: str | None) -> str:
        return self._realtime_url if model is None else f"{self._realtime_url}?model={quote(model, safe='')}"


@contextmanager
def connect_backend(
    url: str, *, api_key: str | None, model: str | None, system: str | None
) -> Iterator["RemoteBackend"]:
    """A session with the server. Raises UsageError for a wrong address or model, FailedError when the server cannot
    be reached or does not want us."""
    if importlib.util.find_spec("websockets") is None:
        raise UsageError('segue chat --url needs websockets: pip install "segue[server]"')
    address = ServerAddress(url)
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise UsageError("api_key: must be printable ASCII")
    with _connect(address, model, headers) as socket:
        link = Link(socket, url)
        created = link.wait_for("session.created", item_id=None, event_id=None)
        assert created.session is not None, "wait_for checks it"
        name = created.session.model
        backend = RemoteBackend(link, name, _max_model_len(address, name, headers))
        backend.restart(system, [])
        yield backend


def _connect(address: ServerAddress, model: str | None, headers: dict[str, str]) -> "ClientConnection":
    from websockets.exceptions import InvalidStatus, WebSocketException
    from websockets.sync.client import connect

    try:
        return connect(
            address.realtime_url(model), additional_headers=headers, open_timeout=CONNECT_S, max_size=None
        )
    except InvalidStatus as error:
        status = error.response.status_code
        if status == 403:
            raise FailedError(f"{address.url} refuses to talk: {_message(error.response.body)}") from None
        if status == 401:
            what = "refuses this key" if headers else "wants a key"
            raise FailedError(f"{address.url} {what}: give the right one with --api-key") from None
        raise FailedError(
            f"{address.url} has no realtime sessions (HTTP {status}): is it the address of segue serve?"
        ) from None
    except TimeoutError:
        raise FailedError(f"{address.url} does not answer within {CONNECT_S:g} s: is it right?") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise FailedError(
            f"{address.url} cannot be reached: {reason}; start a server with: segue serve MODEL"
        ) from None
    except WebSocketException as error:
        raise FailedError(f"{address.url} is no server for segue chat: {one_line(str(error))}") from None


def _message(body: bytes | bytearray | None) -> str:
    """Of a server's error."""
    try:
        return one_line(msgspec.json.decode(body or b"", type=_Refusal).error.message)
    except msgspec.DecodeError:
        return "it does not say why"


def _max_model_len(address: ServerAddress, model: str, headers: dict[str, str]) -> int | None:
    """None where the server does not tell."""
    request = urllib.request.Request(address.models_url, headers=headers)
    with suppress(OSError, ValueError, msgspec.DecodeError):
        with urllib.request.urlopen(request, timeout=CONNECT_S) as response:
            models = msgspec.json.decode(response.read(), type=_ModelList).data
        return next((each.max_model_len for each in models if each.id == model), None)
    return None


class Link:
    """A server's events. A connection that ends raises FailedError."""

    def __init__(self, socket: "ClientConnection", url: str) -> None:
        self._socket = socket
        self._url = url
        self._num_sent = 0

    def send(self, kind: str, **fields: Any) -> str:
        """Returns the event's id."""
        from websockets.exceptions import ConnectionClosed

        self._num_sent += 1
        event_id = f"chat_{self._num_sent}"
        try:
            self._socket.send(msgspec.json.encode({"type": kind, "event_id": event_id, **fields}).decode())
        except (ConnectionClosed, OSError) as error:
            raise self._lost(error) from None
        return event_id

    def poll(self, timeout_s: float = POLL_S) -> _Event | None:
        """The next event, if one comes in this time."""
        from websockets.exceptions import ConnectionClosed

        try:
            return _decoder.decode(self._socket.recv(timeout=timeout_s))
        except TimeoutError:
            return None
        except msgspec.DecodeError as error:
            raise FailedError(f"{self._url} sent an event that cannot be read: {error}") from None
        except (ConnectionClosed, OSError) as error:
            raise self._lost(error) from None

    def request(self, kind: str, answer: str, *, about: str | None = None, **fields: Any) -> _Event:
        """Send an event; the event of the kind `answer` (about this item). Raises UsageError when the server refuses.
        Ctrl-C waits for the answer; when the user insists, nobody knows what the server did, and that is the end."""
        with DeferredInterrupt():
            try:
                return self.wait_for(answer, item_id=about, event_id=self.send(kind, **fields))
            except KeyboardInterrupt:
                raise FailedError(f"{self._url} did not answer {kind} before it was interrupted") from None

    def wait_for(self, kind: str, *, item_id: str | None, event_id: str | None) -> _Event:
        """The event of this kind (about this item), while others pass by. Raises UsageError with the error that
        answers `event_id`, or any error when that is None."""
        while True:
            event = self.poll(REPLY_S)
            if event is None:
                raise FailedError(f"{self._url} does not answer any more: {kind} did not come")
            if event.type == "error" and event.error is not None:
                if event_id is None or event.error.event_id == event_id:
                    raise UsageError(event.error.message)
            elif event.type == kind and item_id in (None, event.item_id, event.item and event.item.id):
                return event

    def _lost(self, error: Exception) -> FailedError:
        reason = one_line(str(error)) or type(error).__name__
        return FailedError(f"the connection to {self._url} was lost: {reason}")


class RemoteBackend:
    """Implements `ChatBackend`."""

    def __init__(self, link: Link, model: str, max_model_len: int | None) -> None:
        self.model = model
        self.max_model_len = max_model_len
        self.link = link
        self.turns: list[list[str]] = []
        """The ids of each turn's items: the question's, and the answer's once it is known."""
        self._num_items = 0

    def reply(self, text: str, params: SamplingParams) -> Reply:
        return _RemoteReply(self, text, params)

    def new_item_id(self) -> str:
        self._num_items += 1
        return f"chat_item_{self._num_items}"

    def undo(self) -> None:
        with DeferredInterrupt():
            for item_id in reversed(self.turns.pop()):
                kind, answer = "conversation.item.delete", "conversation.item.deleted"
                self.link.request(kind, answer, about=item_id, item_id=item_id)

    def restart(self, system: str | None, turns: Sequence[Turn]) -> None:
        with DeferredInterrupt():
            session = {"type": "realtime", "instructions": system or ""}
            self.link.request("session.update", "session.updated", session=session)
            while len(self.turns) > len(turns):
                self.undo()


class _RemoteReply:
    """Implements `Reply`."""

    def __init__(self, backend: RemoteBackend, text: str, params: SamplingParams) -> None:
        self._backend = backend
        self._text = text
        self._params = params
        self._clock = ReplyClock()
        self._response: _Response | None = None
        """Once it is created; with its end, once it is over."""
        self._is_over = False

    @property
    def is_begun(self) -> bool:
        return self._response is not None

    def begin(self) -> None:
        link = self._backend.link
        item_id = self._backend.new_item_id()
        content = [{"type": "input_text", "text": self._text}]
        item = {"id": item_id, "type": "message", "role": "user", "content": content}
        with DeferredInterrupt():
            link.request("conversation.item.create", "conversation.item.done", about=item_id, item=item)
            self._backend.turns.append([item_id])
            fields = _response_fields(self._params)
            try:
                self._response = link.request("response.create", "response.created", response=fields).response
            except UsageError:
                self._backend.undo()
                raise

    def __next__(self) -> str:
        if self._is_over:
            raise StopIteration
        event = self._backend.link.poll()
        return "" if event is None else self._text_of(event)

    def stop(self) -> str:
        if self._response is None or self._is_over:
            return ""
        # An answer that ends meanwhile makes this an error, which nobody waits for.
        self._backend.link.send("response.cancel", response_id=self._response.id)
        rest = []
        while not self._is_over:
            event = self._backend.link.poll(REPLY_S)
            if event is None:
                raise FailedError("the server does not answer any more: the answer did not end")
            rest.append(self._text_of(event))
        return "".join(rest)

    def _text_of(self, event: _Event) -> str:
        """Take note of an event; the text that it brings."""
        assert self._response is not None, "begin comes first"
        if event.type == "response.done" and event.response is not None:
            self._end(event.response)
        elif event.response_id == self._response.id:
            if event.type == "response.output_text.delta":
                self._clock.tick()
                return event.delta
            if event.type == "response.output_item.added" and event.item is not None:
                self._backend.turns[-1].append(event.item.id)
        return ""

    def _end(self, response: _Response) -> None:
        if self._response is None or response.id != self._response.id:
            return
        self._response, self._is_over = response, True
        if response.status == "failed":
            details = response.status_details
            error = None if details is None else details.error
            raise RequestFailed(
                "the turn failed on the server" if error is None else f"the turn failed: {error.message}"
            )

    @property
    def stats(self) -> ReplyStats:
        assert self._response is not None, "begin comes first"
        assert self._is_over, "there are none before the end"
        usage = self._response.usage or _Usage(0, 0)
        ends = {"completed": ReplyEnd.COMPLETE, "incomplete": ReplyEnd.CUT_OFF}
        return ReplyStats(
            num_prompt_tokens=usage.input_tokens,
            num_tokens=usage.output_tokens,
            time_to_first_token_s=self._clock.time_to_first_token_s,
            decode_s=self._clock.decode_s,
            end=ends.get(self._response.status, ReplyEnd.STOPPED),
        )


def _response_fields(params: SamplingParams) -> dict[str, object]:
    """How to answer, in the words of a `response.create`."""
    sampling = {name: getattr(params, name) for name in _SAMPLING_FIELDS}
    return {"max_output_tokens": params.max_tokens or "inf", **sampling}
