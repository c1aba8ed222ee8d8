"""Conversations as token ids, by the model's chat template.

The structure of a conversation is made of control tokens, and only the template may write them. A message with
the text of a control token in it ("how do I use <|im_end|>?") keeps it as plain text: see `_mark`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from itertools import islice

from segue.errors import ModelFileError, ParameterError
from segue.tokens.template import TemplateRefusal, render_template
from segue.tokens.tokenizer import Tokenizer

Message = Mapping[str, object]
"""A "role", a "content" (text, a list of text parts, or null), and what else the template knows."""

_PRIVATE_USE = range(0xF0000, 0xFFFFE)
"""Characters without a meaning. Those that a conversation does have are not taken."""
_SHOWN_ROLES = 8
_TOLD = ("content", "refusal", "tool_calls", "function_call")
"""What a message says. A template that knows no such role or field leaves it out without a word."""
_NOT_TOLD = frozenset(("role", "name", "tool_call_id", *_TOLD))
"""Another field can be what a model's own template shows in place of a content."""
_MAX_PROVEN = 256


def render_chat(
    template: str,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
    tools: Sequence[Mapping[str, object]] | None = None,
    now: datetime | None = None,
    **variables: object,
) -> str:
    """The text that a chat template makes of messages. `variables` are further ones that the template knows.

    `now` is the time that the template may tell; None: the clock's. Raises ParameterError when the messages
    have the wrong shape or the template refuses them, ModelFileError when the template is wrong.
    """
    fixed = {"bos_token": bos_token, "eos_token": eos_token, "add_generation_prompt": add_generation_prompt}
    return _Rendering.of(template, fixed, messages, tools, variables, now).render()


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, object]] | None = None,
    now: datetime | None = None,
    **variables: object,
) -> list[int]:
    """The token ids of a conversation. Control tokens written in messages, tools and variables stay text.

    Parameters and errors are those of `render_chat`; a model without a chat template is a ModelFileError too.
    """
    rendering = _rendering(tokenizer, messages, add_generation_prompt, tools, variables, now)
    _check_shown(rendering)
    return _encode(tokenizer, _mark(tokenizer, rendering))


def encode_continued(
    tokenizer: Tokenizer, messages: Sequence[Message], *, now: datetime | None = None
) -> list[int]:
    """The token ids of a conversation up to the end of the last message's text, with which an answer goes on.

    Errors are those of `encode_chat`; ParameterError also for a last message that is more, or less, than a text.
    """
    rendering = _rendering(tokenizer, messages, False, None, {}, now)
    last = rendering.messages[-1]
    if extra := [field for field in _TOLD if field != "content" and last.get(field)]:
        raise ParameterError("messages", extra, "the last message must have a text alone to be continued")
    text = _content(rendering, len(rendering.messages) - 1)
    _check_shown(rendering)
    head, tail = encode_head(tokenizer, messages, after=None, now=rendering.now)
    return head + tokenizer.encode(tail + text)


def encode_turn(
    tokenizer: Tokenizer, messages: Sequence[Message], *, after: int, now: datetime | None = None
) -> list[int]:
    """The token ids of all that the template writes after the text of message `after`, a generation prompt included.

    For a conversation that is computed up to there. Errors are those of `encode_chat`.
    """
    rendering = _rendering(tokenizer, messages, True, None, {}, now)
    marked, (begin,) = _bounded(tokenizer, rendering, {after: _content(rendering, after)})
    return _encode(tokenizer, replace(marked, text=marked.text.partition(begin)[2]))


def encode_head(
    tokenizer: Tokenizer, messages: Sequence[Message], *, after: int | None, now: datetime | None = None
) -> tuple[list[int], str]:
    """What the template writes before the text of the last message: token ids, and the plain text after those.

    The plain text and the message's own are to be encoded together. With `after`, only what follows the text of
    that message. Without a place for the text in the rendering, there is nothing before it.
    """
    rendering = _rendering(tokenizer, messages, False, None, {}, now)
    bounds = {} if after is None else {after: _content(rendering, after)}
    last = len(rendering.messages) - 1
    marked, ends = _bounded(tokenizer, rendering, {**bounds, last: ""})
    text, end, _ = marked.text.partition(ends[-1])
    if not end:
        return [], ""
    if after is not None:
        text = text.partition(ends[0])[2]
    pieces = tokenizer.split_special(text, control=True)
    tail = pieces[-1] if pieces else ""
    if isinstance(tail, int):
        return _encode(tokenizer, replace(marked, text=text)), ""
    head = text[: len(text) - len(tail)]
    return _encode(tokenizer, replace(marked, text=head)), marked.restored(tail)


def _content(rendering: "_Rendering", index: int) -> str:
    content = rendering.messages[index].get("content")
    if not isinstance(content, str):
        raise ParameterError("messages", _roles(rendering.messages), f"message {index} must have a text")
    return content


def _bounded(
    tokenizer: Tokenizer, rendering: "_Rendering", texts: Mapping[int, str]
) -> tuple["_Marked", list[str]]:
    """Renders with these messages' texts, each followed by a character of its own."""
    ends = _unused_characters(len(texts), [rendering.template, *_strings(rendering.given)])
    messages = list(rendering.messages)
    for (index, text), end in zip(texts.items(), ends, strict=True):
        messages[index] = {**messages[index], "content": text + end}
    return _mark(tokenizer, replace(rendering, messages=messages)), ends


@dataclass(frozen=True)
class _Rendering:
    """Everything a rendering depends on; the strings in `messages`, `tools` and `variables` come from users."""

    template: str
    fixed: Mapping[str, object]
    messages: list[dict[str, object]]
    tools: object
    variables: Mapping[str, object]
    now: datetime

    @classmethod
    def of(
        cls,
        template: str,
        fixed: Mapping[str, object],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None,
        variables: Mapping[str, object],
        now: datetime | None,
    ) -> "_Rendering":
        """Raises ParameterError when something has the wrong shape."""
        try:
            return cls(
                template=template,
                fixed=fixed,
                messages=_plain_messages(messages),
                tools=_plain(tools, "tools"),
                variables={name: _plain(value, name) for name, value in variables.items()},
                now=datetime.now() if now is None else now,
            )
        except RecursionError:
            raise ParameterError("messages", type(messages).__name__, "are nested too deeply") from None

    @property
    def given(self) -> dict[str, object]:
        return {"messages": self.messages, "tools": self.tools, **self.variables}

    def render(self, change: Callable[[str], str] | None = None) -> str:
        """The text, with every given string changed first."""
        given = self.given if change is None else _map_strings(self.given, change)
        assert isinstance(given, dict)
        try:
            return render_template(self.template, {"documents": None, **self.fixed, **given}, now=self.now)
        except TemplateRefusal as error:
            raise ParameterError(
                "messages", _roles(self.messages), f"the chat template does not take them: {error}"
            ) from None


@dataclass(frozen=True)
class _Marked:
    """A rendering in which some user text is replaced, so that the control tokens left are the template's."""

    text: str
    stand_ins: Mapping[int, str]
    """Code point → what it stands for; as `str.translate` takes it."""

    def restored(self, text: str) -> str:
        return text.translate(self.stand_ins)


def _rendering(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, object]] | None,
    variables: Mapping[str, object],
    now: datetime | None,
) -> _Rendering:
    if tokenizer.chat_template is None:
        raise ModelFileError("the model has no chat template; give it a plain prompt, or use a chat model")
    fixed = {
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "add_generation_prompt": add_generation_prompt,
    }
    return _Rendering.of(tokenizer.chat_template, fixed, messages, tools, variables, now)


def _mark(tokenizer: Tokenizer, rendering: _Rendering) -> _Marked:
    """Renders so that control tokens from the template can be told from text that looks like them.

    A template is a program: it trims, splits, joins and tests what it is given, so where a user's text ends up
    cannot be told from the rendering. It is rendered again with parts of the user's text replaced by characters
    of private use, and that is taken if putting the text back gives the plain rendering: then the template did
    the same with both. What is replaced:

    1. the characters that control tokens begin and end with: no control token can then come from a message, nor
       from a message and what the template puts beside it;
    2. if the template looks at those (it splits a message at "</think>", say): whole control tokens.

    If it looks at those too, the plain rendering is taken. The last two only if they have the control tokens of
    the first, so none from a message; else ParameterError.

    A template that writes both ends of a control token itself, as in '<|' + role + '|>', means what it gets.
    """
    text = rendering.render()
    control_tokens = tokenizer.special_tokens
    safe = _replace(rendering, text, _ends(control_tokens))
    if safe is not None and safe.restored(safe.text) == text:
        return safe
    for marked in (_replace(rendering, text, control_tokens), _Marked(text, {})):
        if safe is None or marked is None or marked.restored(marked.text) != text:
            continue
        if _control_ids(tokenizer, marked.text) == _control_ids(tokenizer, safe.text):
            return marked
    raise ParameterError(
        "messages",
        _roles(rendering.messages),
        "the chat template would make control tokens of text in them; leave out text that looks like those",
    )


def _check_shown(rendering: _Rendering) -> None:
    """Raises ParameterError for what the template leaves out of its rendering: it is marked, and looked for.

    What showed once of a role's messages is not looked for again.
    """
    proven = _proven(rendering.template)
    said = {
        (i, field): (str(message["role"]), field, i == 0)
        for i, message in enumerate(rendering.messages)
        for field in _TOLD
        if message.get(field)
    }
    hidden = [place for place, kind in said.items() if kind not in proven]
    for at_end in (True, False):  # a template may cut a text at either end
        if not hidden:
            return
        marks = _unused_characters(len(hidden), [rendering.template, *_strings(rendering.given)])
        messages = list(rendering.messages)
        for (i, field), mark in zip(hidden, marks, strict=True):
            messages[i] = {**messages[i], field: _with_mark(messages[i][field], mark, at_end=at_end)}
        try:
            text = replace(rendering, messages=messages).render()
        except ParameterError:
            return  # of the marks; or of the messages, and then it is raised for them
        marked = list(zip(hidden, marks, strict=True))
        if len(proven) < _MAX_PROVEN:
            proven.update(said[place] for place, mark in marked if mark in text)
        hidden = [place for place, mark in marked if mark not in text]
    if hidden:
        i, field = hidden[0]
        why = f"the model's chat template has no place for the {field} of message {i}: leave it out"
        raise ParameterError("messages", str(rendering.messages[i]["role"])[:20], why)


@lru_cache(maxsize=16)
def _proven(template: str) -> set[tuple[str, str, bool]]:
    """What the template was seen to show: role, field, and whether of the first message."""
    return set()


def _with_mark(value: object, mark: str, *, at_end: bool) -> object:
    """The text with the mark at one end; in calls, the mark at each name and among the arguments."""
    if isinstance(value, str):
        return value + mark if at_end else mark + value
    if isinstance(value, list):
        return [_with_mark(call, mark, at_end=at_end) for call in value]
    if not isinstance(value, dict):
        return value
    marked = dict(value)
    for name in ("function", "name"):
        if name in marked:
            marked[name] = _with_mark(marked[name], mark, at_end=at_end)
    match marked.get("arguments"):
        case dict(arguments):
            marked["arguments"] = {**arguments, mark: mark}
        case str(arguments):
            marked["arguments"] = arguments + mark
    return marked


def _replace(rendering: _Rendering, text: str, parts: Sequence[str]) -> _Marked | None:
    """Renders with these parts of the given strings replaced; None when the template does not take that.

    `text` is the plain rendering. Longer parts come first in `parts`.
    """
    strings = list(_strings(rendering.given))
    if not any(part in string for part in parts for string in strings):
        return _Marked(text, {})
    stand_ins = dict(zip(parts, _unused_characters(len(parts), [text, *strings]), strict=True))
    pattern = re.compile("|".join(map(re.escape, parts)))
    try:
        marked = rendering.render(lambda string: pattern.sub(lambda found: stand_ins[found[0]], string))
    except ParameterError:
        return None
    return _Marked(marked, {ord(char): part for part, char in stand_ins.items()})


def _ends(control_tokens: Sequence[str]) -> list[str]:
    """What has to be replaced in a text to leave no control token in it and make none at its ends.

    The symbols that control tokens begin or end with; a token with letters or digits there as a whole, since
    templates look at letters all the time.
    """
    symbols = {char for token in control_tokens for char in (token[0], token[-1]) if not char.isalnum()}
    words = [token for token in control_tokens if not {token[0], token[-1]} & symbols]
    return [*words, *sorted(symbols)]


def _control_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    pieces = tokenizer.split_special(text, control=True)
    return [piece for piece in pieces if isinstance(piece, int) and piece in tokenizer.special_ids]


def _encode(tokenizer: Tokenizer, marked: _Marked) -> list[int]:
    ids: list[int] = []
    for piece in tokenizer.split_special(marked.text, control=True):
        if isinstance(piece, int):
            ids.append(piece)
        else:
            ids += tokenizer.encode(marked.restored(piece))
    return ids


def _plain_messages(messages: object) -> list[dict[str, object]]:
    """Messages as dicts that have a role; a content of text parts is joined, as vLLM does it."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise ParameterError("messages", type(messages).__name__, "must be a list of messages")
    if not messages:
        raise ParameterError("messages", [], "must have at least one message")
    return [_plain_message(i, message) for i, message in enumerate(messages)]


def _plain_message(i: int, message: object) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise ParameterError("messages", type(message).__name__, f"message {i} must be an object with a role")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ParameterError("messages", type(role).__name__, f"the role of message {i} must be a text")
    plain = _plain(message, "messages")
    assert isinstance(plain, dict)
    if all(plain.get(name) is None for name in _TOLD) and not plain.keys() - _NOT_TOLD:
        raise ParameterError("messages", [role], f"message {i} must have a text as its content")
    if plain.get("content") is not None:
        plain["content"] = text_of(plain, i)
    return plain


def text_of(message: Message, index: int = 0) -> str:
    """The content of a message, its parts joined. `index` is told in a ParameterError for what is no text."""
    match message.get("content"):
        case None:
            return ""
        case str(text):
            return text
        case list(parts):
            return "\n".join([_text_part(index, part) for part in parts])
        case other:
            why = f"the content of message {index} must be a text, a list of text parts, or null"
            raise ParameterError("messages", type(other).__name__, why)


def _text_part(i: int, part: object) -> str:
    match part:
        case str():
            return part
        case {"type": "text", "text": str(text)}:
            return text
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    shown = kind if isinstance(kind, str) else type(kind).__name__
    raise ParameterError(
        "messages", shown, f"message {i} has a part that is not text; this model reads text only"
    )


def _plain(value: object, name: str) -> object:
    """A copy made of dicts, lists, strings, numbers, booleans and None: all that a template is given."""
    if isinstance(value, Mapping):
        return {_plain_key(key, name): _plain(item, name) for key, item in value.items()}
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_plain(item, name) for item in value]
    raise ParameterError(
        name, type(value).__name__, "has to be made of objects, lists, texts, numbers and null"
    )


def _plain_key(key: object, name: str) -> str:
    if not isinstance(key, str):
        raise ParameterError(name, type(key).__name__, "the names of an object must be texts")
    return key


def _map_strings(value: object, change: Callable[[str], str]) -> object:
    """The plain value with every string in it changed, the names in objects too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(name): _map_strings(item, change) for name, item in value.items()}
    if isinstance(value, list):
        return [_map_strings(item, change) for item in value]
    return value


def _strings(value: object) -> Iterator[str]:
    """Every string in the plain value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _unused_characters(number: int, texts: Sequence[str]) -> list[str]:
    """Characters of private use that are in none of the texts."""
    used = set().union(*texts)
    free = (chr(point) for point in _PRIVATE_USE if chr(point) not in used)
    return list(islice(free, number))


def _roles(messages: Sequence[Mapping[str, object]]) -> list[str]:
    """The roles, for an error's message: the last few, each cut short."""
    roles = [str(message["role"])[:20] for message in messages]
    return roles if len(roles) <= _SHOWN_ROLES else ["…", *roles[-_SHOWN_ROLES:]]
