"""How models write tool calls. Readers for the common formats, by vLLM's names.

hermes         text <tool_call>{"name": …, "arguments": {…}}</tool_call> …      Hermes, Qwen
llama3_json    {"name": …, "parameters": {…}}; {…}                              Llama 3.1 and 3.2
mistral        text [TOOL_CALLS][{"name": …, "arguments": {…}}, …]              Mistral, up to 2024
               text [TOOL_CALLS]name[ARGS]{…}[TOOL_CALLS]…                      Mistral, since
"""

from collections.abc import Collection, Mapping

from segue.server.shared.options import ToolFormat
from segue.server.shared.tools.reader import Call, Steps, ToolReader

HERMES_MARKER = "<tool_call>"
HERMES_END = "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
MISTRAL_MARKER = "[TOOL_CALLS]"


class HermesReader(ToolReader):
    def read(self) -> Steps:
        while (yield from self.content_until(HERMES_MARKER)):
            self.begin_raw(HERMES_MARKER)
            yield from self.space()
            if (yield from self.call(self.object_call, end=HERMES_END)):
                yield from self.space()
                yield from self.literal(HERMES_END)
            if self.num_calls:
                yield from self.space()


class Llama3Reader(ToolReader):
    """Calls have no marker of their own, so only known tools count, and only at the beginning."""

    def read(self) -> Steps:
        self.begin_raw()
        yield from self.space()
        if self.char == PYTHON_TAG[0] and not (yield from self.literal(PYTHON_TAG)):
            self.emit(self.raw())
            return
        yield from self.space()
        if self.char != "{":
            self.emit(self.raw())
        while self.char == "{" and (yield from self.call(self.object_call, known_only=True)):
            self.begin_raw()
            yield from self.space()
            if self.char == ";":
                yield from self.next()
                yield from self.space()


class MistralReader(ToolReader):
    def read(self) -> Steps:
        while (yield from self.content_until(MISTRAL_MARKER)):
            self.begin_raw(MISTRAL_MARKER)
            yield from self.space()
            if self.char == "[":
                yield from self.next()
                yield from self._list()
            else:
                yield from self.call(self._named)
            yield from self.space()

    def _list(self) -> Steps:
        yield from self.space()
        while (yield from self.call(self.object_call)):
            self.begin_raw()
            yield from self.space()
            if self.char == "]":
                yield from self.next()
                return
            if self.char == ",":
                yield from self.next()
                yield from self.space()
            elif self.char != "{":  # as with commas that are missing inside a call
                return

    def _named(self, call: Call) -> Steps:
        name = ""
        while self.char and self.char not in "[{" and not self.char.isspace():
            name += self.char
            yield from self.next()
        yield from self.space()
        if self.char == "[":
            yield from self.literal("[ARGS]")
            yield from self.space()
        if self.char == "{":
            call.start(name)
            yield from self.value(call.add)


READERS: Mapping[ToolFormat, type[ToolReader]] = {
    "hermes": HermesReader,
    "llama3_json": Llama3Reader,
    "mistral": MistralReader,
}

NEED_SPECIAL_TOKENS: Collection[ToolFormat] = frozenset({"llama3_json", "mistral"})
"""Their markers are control tokens, which must not be left out of the text."""


def tool_format_of(template: str) -> ToolFormat | None:
    """The format that a chat template asks the model for; None when it knows no tools."""
    if "tools" not in template:
        return None
    if MISTRAL_MARKER in template:
        return "mistral"
    if HERMES_MARKER in template:
        return "hermes"
    if PYTHON_TAG in template or '"parameters"' in template:
        return "llama3_json"
    return "hermes"
