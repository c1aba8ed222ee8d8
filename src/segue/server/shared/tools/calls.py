"""The tools of a request: what the model is told, what it must call, and its calls in OpenAI's form."""

import secrets
from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from segue.errors import ParameterError
from segue.server.shared.http_errors import HttpError
from segue.server.shared.options import ToolFormat
from segue.server.shared.serving import Serving
from segue.server.shared.tools.formats import NEED_SPECIAL_TOKENS, READERS
from segue.server.shared.tools.reader import CallArguments, CallStart, Content, Piece

MISTRAL_ID_CHARS = 9
"""Mistral's templates take no other length."""


class FunctionDefinition(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, object] | None = None
    """A JSON schema."""
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(msgspec.Struct, kw_only=True):
    name: str


class NamedToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class FunctionCall(msgspec.Struct, kw_only=True):
    name: str
    arguments: str
    """JSON, as the model wrote it."""


class ToolCall(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class FunctionCallDelta(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, kw_only=True):
    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCallDelta


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a request wants of tools."""

    tools: Sequence[Tool] = ()
    format: ToolFormat | None = None
    """None: calls are not looked for."""
    required: bool = False
    name: str | None = None
    """Of the one that must be called."""
    parallel: bool = True

    @classmethod
    def of(
        cls,
        serving: Serving,
        tools: Sequence[Tool] | None,
        choice: ToolChoice | None,
        parallel: bool | None,
    ) -> "ToolUse":
        """Raises ParameterError."""
        if not tools:
            if choice not in (None, "none", "auto"):
                raise ParameterError("tool_choice", _shown(choice), "needs tools")
            return cls()
        if serving.tool_format is None:
            if choice == "none":
                return cls()
            raise ParameterError(
                "tools", [tool.function.name for tool in tools], "the model's chat template knows no tools"
            )
        name = choice.function.name if isinstance(choice, NamedToolChoice) else None
        if name is not None and name not in {tool.function.name for tool in tools}:
            raise ParameterError("tool_choice", name, "is none of the tools")
        return cls(
            tools=tools,
            format=None if choice == "none" else serving.tool_format,
            required=choice == "required" or name is not None,
            name=name,
            parallel=parallel is not False,
        )

    @property
    def for_template(self) -> list[dict[str, object]] | None:
        """As chat templates take them."""
        return msgspec.to_builtins(self.tools) if self.tools else None

    @property
    def needs_special_tokens(self) -> bool:
        return self.format in NEED_SPECIAL_TOKENS

    def reader(self) -> "CallReader":
        """For one answer."""
        return CallReader(self)

    def check(self, names: Sequence[str]) -> None:
        """Raises HttpError when an answer has not called (by these names) what it had to."""
        if self.required and not names:
            raise _not_called("the model called no tool, which tool_choice asks for")
        if self.name is not None and any(name != self.name for name in names):
            raise _not_called(f"the model called {names[0]!r}; tool_choice asks for {self.name!r}")


class CallReader:
    """One answer's text as content and tool calls."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        names = [tool.function.name for tool in use.tools]
        self._reader = None if use.format is None else READERS[use.format](names)
        self.names: list[str] = []
        """Of what was called so far."""

    def push(self, text: str, *, is_last: bool) -> list[Content | ToolCallDelta]:
        """What more text adds, in order. Raises HttpError at the end if a call is missing."""
        if self._reader is None:
            return [Content(text)]
        pieces = self._reader.push(text)
        if is_last:
            pieces += self._reader.finish()
        added = [
            self._added(piece)
            for piece in pieces
            if isinstance(piece, Content) or self._use.parallel or piece.index == 0
        ]
        if is_last:
            self._use.check(self.names)
        return added

    def _added(self, piece: Piece) -> Content | ToolCallDelta:
        match piece:
            case Content():
                return piece
            case CallStart():
                self.names.append(piece.name)
                function = FunctionCallDelta(name=piece.name, arguments="")
                return ToolCallDelta(index=piece.index, id=self._new_id(), type="function", function=function)
            case CallArguments():
                return ToolCallDelta(index=piece.index, function=FunctionCallDelta(arguments=piece.text))

    def _new_id(self) -> str:
        if self._use.format == "mistral":
            return secrets.token_hex(MISTRAL_ID_CHARS)[:MISTRAL_ID_CHARS]
        return f"call_{secrets.token_hex(12)}"


def _shown(choice: ToolChoice | None) -> object:
    return choice.function.name if isinstance(choice, NamedToolChoice) else choice


def _not_called(message: str) -> HttpError:
    return HttpError(
        f"{message}: ask again with another prompt or seed",
        status=HTTPStatus.UNPROCESSABLE_ENTITY,
        param="tool_choice",
        code="tool_not_called",
    )


def content_of(added: Sequence[Content | ToolCallDelta]) -> str | UnsetType:
    texts = [each.text for each in added if isinstance(each, Content)]
    return "".join(texts) if texts else UNSET


def calls_of(added: Sequence[Content | ToolCallDelta]) -> list[ToolCallDelta] | UnsetType:
    """One for each call: clients take the first chunk of a call as it is."""
    calls: dict[int, ToolCallDelta] = {}
    for each in added:
        if isinstance(each, ToolCallDelta):
            first = calls.setdefault(each.index, each)
            if first is not each:
                first.function.arguments = (first.function.arguments or "") + (each.function.arguments or "")
    return list(calls.values()) or UNSET
