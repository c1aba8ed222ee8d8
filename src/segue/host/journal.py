"""What an engine has been told and has said: enough to bring another one to the same point.

    calls, in order    ✓ add a   ✓ add_chunk a   ✓ fork a b  │  truncate a   end_input b
                       └──── carried out: `requests` ───────┘  └──── `unconfirmed` ────┘

An answer is the same bit for bit however it is computed, so a request that is added again with its history, its
output so far included, goes on exactly as it would have. Calls and outputs are those on the wire.
"""

from array import array
from collections import deque
from collections.abc import Sequence

import msgspec

from segue.contract.reports import EngineOutput, FinishReason
from segue.engine.check import check_turn
from segue.engine.config import EngineConfig
from segue.engine.submission import Submission, TokenIds
from segue.errors import UsageError
from segue.host import wire
from segue.sample.params import SamplingParams


class _Input(msgspec.Struct, frozen=True):
    """A chunk that waits for its turn."""

    token_ids: TokenIds
    params: SamplingParams | None


class HeldRequest(msgspec.Struct, eq=False, kw_only=True):
    """An unfinished request, as the engine holds it."""

    submission: Submission
    """As it was made; what has become of it is in the other fields."""
    tokens: TokenIds
    """The history: prompt and output."""
    params: SamplingParams | None = None
    """Of the turn that is being answered; None between turns."""
    output_start: int = 0
    """Where in `tokens` that answer begins."""
    chunks: deque[_Input] = msgspec.field(default_factory=deque)
    input_ended: bool = False

    def fold(self, config: EngineConfig) -> None:
        """Between turns: take in the chunks that wait, up to one that is answered."""
        while self.chunks and self.params is None:
            chunk = self.chunks.popleft()
            try:
                check_turn(config, len(self.tokens), len(chunk.token_ids), chunk.params)
            except UsageError:
                continue  # the engine leaves it out, and has said so
            self.tokens.extend(chunk.token_ids)
            self.params, self.output_start = chunk.params, len(self.tokens)

    def take(self, output: EngineOutput, config: EngineConfig) -> None:
        """The engine has said this, and the request goes on."""
        if output.finish_reason is FinishReason.ABORT:
            return  # told by a `truncate`, which is carried out
        if output.finish_reason is FinishReason.ERROR:
            return  # about a chunk that is left out, here as well
        self.tokens.extend(output.token_ids)
        if output.finish_reason is not None:
            self.params = None
            if self.submission.keep == "computed":
                self.tokens.pop()
            self.fold(config)

    def calls(self) -> list[msgspec.Struct]:
        """What makes an engine that does not know the request hold it like this."""
        request_id = self.submission.request_id
        params, num_output_tokens = self.params, 0
        if params is not None:
            num_output_tokens = len(self.tokens) - self.output_start
        if params is not None and num_output_tokens and params.prompt_logprobs is not None:
            params = msgspec.structs.replace(params, prompt_logprobs=None)  # they came with the first token
        calls = [
            wire.CALL_TYPES["add_request"](
                msgspec.structs.replace(
                    self.submission,
                    token_ids=self.tokens[:],
                    params=params,
                    num_output_tokens=num_output_tokens,
                )
            )
        ]
        for chunk in self.chunks:
            calls.append(wire.CALL_TYPES["add_chunk"](request_id, chunk.token_ids, chunk.params))
        if self.input_ended:
            calls.append(wire.CALL_TYPES["end_input"](request_id))
        return calls


class _Engine:
    """Carries out calls on what is held; the methods are named like the engine's, and never fail: where the engine
    refuses, it says so in an output."""

    def __init__(self, config: EngineConfig) -> None:
        self.requests: dict[str, HeldRequest] = {}
        self._config = config

    def add_request(self, submission: Submission) -> None:
        assert submission.num_output_tokens == 0, "a caller's request is new"
        request = HeldRequest(submission=submission, tokens=array("i"))
        request.chunks.append(_Input(submission.token_ids, submission.params))
        request.fold(self._config)
        self.requests[submission.request_id] = request

    def add_chunk(self, request_id: str, token_ids: TokenIds, params: SamplingParams | None) -> None:
        request = self.requests.get(request_id)
        if request is not None:
            request.chunks.append(_Input(token_ids, params))
            request.fold(self._config)

    def truncate(self, request_id: str, num_tokens: int) -> None:
        request = self.requests.get(request_id)
        if request is not None and num_tokens <= len(request.tokens):
            del request.tokens[num_tokens:]
            request.params = None
            request.chunks.clear()

    def fork(self, request_id: str, new_request_id: str, num_tokens: int | None, default_seed: int) -> None:
        source = self.requests.get(request_id)
        if source is None or (num_tokens is not None and num_tokens > len(source.tokens)):
            return
        submission = source.submission.forked(new_request_id, default_seed)
        self.requests[new_request_id] = HeldRequest(submission=submission, tokens=source.tokens[:num_tokens])

    def end_input(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        if request is not None:
            request.input_ended = True

    def abort_request(self, request_id: str) -> None:
        self.requests.pop(request_id, None)

    def reset_prefix_cache(self) -> None:
        """Nothing of it is held here."""


_ADD_REQUEST = wire.CALL_TYPES["add_request"]
_FORK = wire.CALL_TYPES["fork"]


def subject(call: msgspec.Struct) -> str | None:
    """The request that a call is about, or that it makes."""
    match call:
        case _ADD_REQUEST():
            submission: Submission = getattr(call, "submission")  # noqa: B009 - its type is made at run time
            return submission.request_id
        case _FORK():
            return str(getattr(call, "new_request_id"))  # noqa: B009
        case _:
            return getattr(call, "request_id", None)


class Journal:
    """The calls on one connection and what came of them."""

    def __init__(self, config: EngineConfig) -> None:
        self.num_confirmed = 0
        """How many calls are known to have been carried out."""
        self._unconfirmed: deque[msgspec.Struct | None] = deque()
        """The others, oldest first; None: one of which nothing is left to do."""
        self._config = config
        self._engine = _Engine(config)

    @property
    def requests(self) -> dict[str, HeldRequest]:
        """The unfinished ones, oldest first."""
        return self._engine.requests

    @property
    def unfinished(self) -> list[str]:
        """The ids of these, and of those that an unconfirmed call makes."""
        new = (subject(call) for call in self.unconfirmed if isinstance(call, _ADD_REQUEST | _FORK))
        return list(dict.fromkeys((*self.requests, *map(str, new))))

    @property
    def unconfirmed(self) -> list[msgspec.Struct]:
        return [call for call in self._unconfirmed if call is not None]

    def told(self, call: msgspec.Struct) -> None:
        """A call was made."""
        self._unconfirmed.append(call)

    def progress(self, num_confirmed: int, outputs: Sequence[EngineOutput]) -> None:
        """A step came after so many calls and brought this."""
        while self.num_confirmed < num_confirmed:
            self._carry_out(self._unconfirmed.popleft())
            self.num_confirmed += 1
        for output in outputs:
            if output.finished:
                self.requests.pop(output.request_id, None)
            elif (request := self.requests.get(output.request_id)) is not None:
                request.take(output, self._config)

    def was_carried_out(self, request_id: str) -> None:
        """The request is known to the engine, whatever else of the unconfirmed is not. Only a fork is not taken for
        that: what it starts with depends on the calls before it."""
        for index, call in enumerate(self._unconfirmed):
            if isinstance(call, _ADD_REQUEST) and subject(call) == request_id:
                self._carry_out(call)
                self._unconfirmed[index] = None

    def refuse(self, request_id: str) -> None:
        """Nothing more is to be done about the request."""
        self.requests.pop(request_id, None)
        for index, call in enumerate(self._unconfirmed):
            if call is not None and subject(call) == request_id:
                self._unconfirmed[index] = None

    def start_over(self) -> None:
        """Another engine will be told all that is not confirmed."""
        pending = self.unconfirmed
        self.num_confirmed += len(self._unconfirmed) - len(pending)
        self._unconfirmed = deque(pending)

    def _carry_out(self, call: msgspec.Struct | None) -> None:
        if call is not None:
            arguments = {name: getattr(call, name) for name in call.__struct_fields__}
            getattr(self._engine, type(call).__name__)(**arguments)
