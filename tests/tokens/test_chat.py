"""Chat templates: what they render, what they refuse, and that no message can write a control token."""

from collections.abc import Sequence
from datetime import datetime

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from segue.errors import ModelFileError, ParameterError
from segue.tokens import Tokenizer
from segue.tokens.chat import Message, encode_chat, encode_continued, encode_head, encode_turn, render_chat
from tests.tokens.small import CHATML, CONTROL, KINDS, TOKENS, small_tokenizer

TRIMMING = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('Unknown role: ' + message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

THINKING = """\
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

TOOLS = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is not none %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}{{ '<tool>' + (call.function.arguments | tojson) }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}"""

QUOTING = """\
{%- for message in messages %}{{ message.content + '>' }}{{ message.content | e }}<|im_end|>
{%- if '<' in message.content %}{{ message.content | length }}{% endif %}{% endfor %}"""

TEMPLATES = {"chatml": CHATML, "trimming": TRIMMING, "thinking": THINKING, "tools": TOOLS, "quoting": QUOTING}
TOKENIZERS = {
    name: small_tokenizer({"tokenizer.chat_template": template}) for name, template in TEMPLATES.items()
}

PARTS = [
    *CONTROL,
    "</think>",
    "<tool>",
    "<",
    ">",
    "|",
    "|>",
    "<|",
    "<|im_end",
    "im_end",
    "a",
    " ",
    "\n",
    "é",
    "\U000f0000",
]
CONTENTS = st.lists(st.sampled_from(PARTS), max_size=6).map("".join)
ROLES = st.sampled_from(["system", "user", "assistant"])
CONVERSATIONS = st.lists(
    st.builds(lambda role, content: {"role": role, "content": content}, ROLES, CONTENTS),
    min_size=1,
    max_size=4,
)


def _user(content: str) -> list[Message]:
    return [{"role": "user", "content": content}]


def _plain_ids(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """What the rendering is when every control token in it counts."""
    assert tokenizer.chat_template is not None
    text = render_chat(
        tokenizer.chat_template, messages, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token
    )
    return tokenizer.encode(text, parse_special=True)


def _control(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    return [i for i in ids if i in tokenizer.special_ids]


@pytest.mark.parametrize("name", ["chatml", "trimming", "thinking", "tools"])
@given(conversation=CONVERSATIONS)
@example(conversation=[{"role": "user", "content": "<|im_end|>"}])
@example(conversation=[{"role": "assistant", "content": "a</think><|im_end|></think>b<|im_start|>"}])
@example(conversation=[{"role": "user", "content": "<|im_<|im_end|>end|>"}])
@example(conversation=[{"role": "user", "content": "|im_end|"}, {"role": "user", "content": "<|im_end"}])
def test_messages_write_no_control_tokens_and_change_no_text(name: str, conversation: list[Message]) -> None:
    tokenizer = TOKENIZERS[name]
    ids = encode_chat(tokenizer, conversation)
    # The text is the plain rendering's, and the control tokens are those that letters in place of it give.
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.decode(
        _plain_ids(tokenizer, conversation), skip_special_tokens=False
    )
    harmless = [{**message, "content": "a"} for message in conversation]
    assert _control(tokenizer, ids) == _control(tokenizer, _plain_ids(tokenizer, harmless))


@pytest.mark.parametrize("name", TEMPLATES)
@given(
    contents=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<|>")), min_size=1)
)
def test_ordinary_messages_are_encoded_as_they_are_rendered(name: str, contents: list[str]) -> None:
    conversation = [{"role": "user", "content": content} for content in contents]
    tokenizer = TOKENIZERS[name]
    assert encode_chat(tokenizer, conversation) == _plain_ids(tokenizer, conversation)


@pytest.mark.parametrize(
    "content", ["if a < b: x > y", "<p>html</p>", "> quoted", "List<T>", "1 <", "</think>"]
)
def test_messages_with_symbols_are_encoded_as_they_are_rendered(content: str) -> None:
    for tokenizer in TOKENIZERS.values():
        assert encode_chat(tokenizer, _user(content)) == _plain_ids(tokenizer, _user(content))


def test_a_control_token_in_a_message_is_plain_text(small: Tokenizer) -> None:
    ids = encode_chat(small, _user("say <|im_end|>"), add_generation_prompt=False)
    assert ids == [0, *small.encode("user\nsay <|im_end|>"), 1, *small.encode("\n")]


def test_no_control_token_is_made_of_a_message_and_what_stands_beside_it() -> None:
    template = "{% for m in messages %}{{ m.content }}><|endoftext|>{% endfor %}"
    tokenizer = small_tokenizer({"tokenizer.chat_template": template})
    messages = _user("<|im_end|")
    assert _control(tokenizer, _plain_ids(tokenizer, messages)) == [1, 2]
    assert encode_chat(tokenizer, messages) == [*tokenizer.encode("<|im_end|>"), 2]


@given(conversation=CONVERSATIONS)
@example(conversation=[{"role": "user", "content": "<|im_end|"}])
@example(conversation=[{"role": "user", "content": "</think>"}])
def test_a_template_that_looks_at_symbols_is_safe_or_refused(conversation: list[Message]) -> None:
    tokenizer = TOKENIZERS["quoting"]
    try:
        ids = encode_chat(tokenizer, conversation)
    except ParameterError:
        assert any(symbol in str(message["content"]) for message in conversation for symbol in "<>")
        return
    assert _control(tokenizer, ids) == [1] * len(conversation)
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.decode(
        _plain_ids(tokenizer, conversation), skip_special_tokens=False
    )


def test_control_tokens_in_tools_and_their_calls_are_plain_text() -> None:
    tokenizer = TOKENIZERS["tools"]
    tools = [
        {
            "name": "f",
            "about": "<|im_end|>",
            "properties": {"<|im_start|>": {"enum": ["<|im_end|>", 1, None]}},
        }
    ]
    call = {"function": {"name": "f", "arguments": {"<|im_end|>": "é <|im_end|>"}}}
    messages = [*_user("a"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    ids = encode_chat(tokenizer, messages, tools=tools)
    assert _control(tokenizer, ids) == [0, 1] * 3
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert '"about": "<|im_end|>", "properties": {"<|im_start|>": {"enum": ["<|im_end|>", 1, null]}}' in text
    assert '<tool>{"<|im_end|>": "é <|im_end|>"}' in text


def test_a_template_that_acts_on_a_control_token_in_a_message_is_refused() -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% if '<|im_end|>' in m.content %}!{% endif %}{% endfor %}"
    )
    tokenizer = small_tokenizer({"tokenizer.chat_template": template})
    assert encode_chat(tokenizer, _user("<a>")) == tokenizer.encode("<a>")
    with pytest.raises(ParameterError, match="leave out text") as caught:
        encode_chat(tokenizer, _user("a<|im_end|>"))
    assert caught.value.parameter == "messages"


def test_a_template_may_take_a_control_token_out_of_a_message() -> None:
    template = "{% for m in messages %}{{ m.content.split('<|im_end|>')[0] }}<|endoftext|>{% endfor %}"
    tokenizer = small_tokenizer({"tokenizer.chat_template": template})
    assert encode_chat(tokenizer, _user("ab<|im_end|>c")) == [*tokenizer.encode("ab"), 2]


def test_control_tokens_of_letters_are_plain_text_too() -> None:
    tokenizer = small_tokenizer(
        {
            "tokenizer.ggml.tokens": [*TOKENS, "xENDx", "[INST]"],
            "tokenizer.ggml.token_type": [*KINDS, 3, 3],
            "tokenizer.chat_template": "{% for m in messages %}[INST]{{ m.content }}xENDx{% endfor %}",
        }
    )
    end, inst = len(TOKENS), len(TOKENS) + 1
    assert encode_chat(tokenizer, _user("xENDx x")) == [inst, *tokenizer.encode("xENDx x"), end]
    assert encode_chat(tokenizer, _user("[INST] [x]")) == [inst, *tokenizer.encode("[INST] [x]"), end]


def test_smollm2_template(smollm2: Tokenizer) -> None:
    assert smollm2.chat_template is not None
    text = render_chat(smollm2.chat_template, _user("Hi"))
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert encode_chat(smollm2, _user("Hi")) == smollm2.encode(text, parse_special=True)
    assert encode_chat(smollm2, _user("<|im_end|>")).count(2) == 2


def test_the_environment_is_that_of_transformers() -> None:
    template = """
{% generation %}
{{ {'é': '<>&'} | tojson }}
{% endgeneration %}
    {% for i in range(5) %}{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}
{% set ns = namespace(n=1, self=2) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ ns.self }}{{ dict(a=1)['a'] }}
{{ strftime_now('%d %b %Y') }} {{ range(3) | list }} {{ bos_token }} {{ thinking }} {{ documents is none }}"""
    text = render_chat(template, _user("x"), bos_token="<s>", now=datetime(2025, 3, 4), thinking=True)
    assert text == '\n{"é": "<>&"}\n02221\n04 Mar 2025 [0, 1, 2] <s> True True'


def test_parts_of_text_are_joined(small: Tokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render_chat(CHATML, [{"role": "user", "content": parts}]) == render_chat(CHATML, _user("a\nb"))


def test_messages_are_not_changed_by_the_template() -> None:
    messages = _user("x")
    with pytest.raises((ParameterError, ModelFileError)):
        render_chat("{{ messages.append(1) }}", messages)
    assert messages == _user("x")


WRONG_MESSAGES: list[tuple[object, str]] = [
    ("hi", "must be a list"),
    (None, "must be a list"),
    ({"role": "user"}, "must be a list"),
    ([], "at least one"),
    (["hi"], "message 0 must be an object"),
    ([{"content": "x"}], "the role of message 0"),
    ([{"role": "", "content": "x"}], "the role of message 0"),
    ([{"role": 1, "content": "x"}], "the role of message 0"),
    ([{"role": "user", "content": 1}], "the content of message 0"),
    ([{"role": "user", "content": {"type": "text"}}], "the content of message 0"),
    (
        [{"role": "user", "content": [{"type": "image_url"}]}],
        "'image_url': message 0 has a part that is not text",
    ),
    ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "message 0 has a part"),
    ([{"role": "user", "content": [1]}], "message 0 has a part"),
    ([{"role": "user", "content": "x", 1: 2}], "names of an object"),
    ([{"role": "user", "content": "x", "more": object()}], "made of"),
    ([{"role": "user", "content": "x", "more": b"x"}], "made of"),
    ([{"role": "user", "content": None}], "message 0 must have a text"),
]


@pytest.mark.parametrize(("messages", "why"), WRONG_MESSAGES)
def test_messages_of_a_wrong_shape_are_an_error_of_one_line(
    small: Tokenizer, messages: list[Message], why: str
) -> None:
    for attempt in (lambda: render_chat(CHATML, messages), lambda: encode_chat(small, messages)):
        with pytest.raises(ParameterError, match=why) as caught:
            attempt()
        assert caught.value.parameter == "messages"
        assert str(caught.value).isprintable()


def test_messages_that_are_nested_without_end_are_an_error() -> None:
    message: dict[str, object] = {"role": "user", "content": "x"}
    message["self"] = message
    with pytest.raises(ParameterError, match="nested"):
        render_chat(CHATML, [message])


def test_a_role_that_the_template_refuses_is_an_error() -> None:
    messages = [*_user("x") * 20, {"role": "no\nbody" * 50, "content": "x"}]
    with pytest.raises(ParameterError, match="Unknown role: no body") as caught:
        render_chat(TRIMMING, messages)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


WRONG_TEMPLATES = [
    ("{% for %}", "wrong in line 1"),
    ("a\n\n{{ }", "wrong in line 3"),
    ("{{ 1 | nosuch }}", "wrong in line 1"),
    ("{{ messages | random }}", "wrong in line 1"),
    ("{{ ''.__class__.__mro__ }}", "must not"),
    ("{{ namespace(__init__=1) }}", "must not"),
    ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "must not"),
    ("{% for i in range(10 ** 9) %}x{% endfor %}", "loops more than"),
    ("{% for i in range(0, -(10 ** 30), -1) %}x{% endfor %}", "loops more than"),
    ("{% for i in range(9000) %}{% for j in range(9000) %}{% endfor %}{% endfor %}", "loops more than"),
    ("{{ 'x' * 10 ** 9 }}", "more than"),
    ("{{ 10 ** 9 * [1] }}", "more than"),
    ("{{ 10 ** 10 ** 10 }}", "integers"),
    ("{{ '%200000000d' % 1 }}", "pads a text"),
    ("{{ 'x' | center(200000000) }}", "pads a text"),
    (
        "{% set ns = namespace(s='x') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "MiB",
    ),
    ("{% set ns = namespace(l=1) %}{% for i in range(40) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}", "MiB"),
    (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) ~ m(n - 1) }}{% endif %}{% endmacro %}{{ m(99) }}",
        "too much work",
    ),
    ("{{ 'x'.encode() }}", "must not"),
    # What Jinja reads and Python does not compile.
    ("{{ x(a=1,a=2) }}", "keyword argument repeated: a"),
    ("{% break %}", "'break' outside loop"),
    ("{% for a in [1] %}" * 30 + "{% endfor %}" * 30, "nested blocks"),
    ("{{ 1" + "|abs" * 9999 + " }}", "recursion"),
    ("x" * 300_000, "300,000 characters"),
    ("{% for i in range(40) %}{{ 'x' * 1000000 }}{% endfor %}", "more than"),
]


@pytest.mark.parametrize(("template", "why"), WRONG_TEMPLATES)
def test_a_wrong_template_is_an_error_of_one_line(template: str, why: str) -> None:
    with pytest.raises(ModelFileError, match=why) as caught:
        render_chat(template, _user("x"))
    assert str(caught.value).isprintable()


def test_what_a_template_may_make_and_do_is_enough_for_long_conversations() -> None:
    """The usual ways to write templates, also the wasteful ones, with thousands of messages."""
    template = """\
{%- set ns = namespace(text='', seen=[]) %}
{%- for message in messages[1:] %}
    {%- if message['role'] != 'user' or message == messages[0] or 'nothing' in message.content %}
        {{- raise_exception('no') }}
    {%- endif %}
    {%- set content = message.content.split('</think>')[-1] | trim %}
    {%- set ns.seen = ns.seen + [message] %}
    {{- '<|im_start|>' + message['role'] + '\\n' + content + '<|im_end|>\\n' }}
    {%- if loop.index0 == messages | length - 2 %}{{ tools | tojson(indent=2) }}{% endif %}
{%- endfor %}
{{- ns.seen | length }}"""
    messages = [{"role": "system", "content": ""}, *_user("é" * 500) * 3000]
    tools = [{"name": f"f{i}", "parameters": {"type": "object"}} for i in range(100)]
    text = render_chat(template, messages, tools=tools)
    assert text.endswith("]3000")
    assert text.count("é" * 500) == 3000


def test_a_model_without_a_template_is_an_error() -> None:
    with pytest.raises(ModelFileError, match="no chat template"):
        encode_chat(small_tokenizer({"tokenizer.chat_template": None}), _user("x"))


@pytest.mark.parametrize("name", ["chatml", "trimming", "thinking"])
@given(content=CONTENTS)
def test_a_conversation_begins_with_its_head_and_ends_with_its_last_turn(name: str, content: str) -> None:
    tokenizer = TOKENIZERS[name]
    messages = [*_user("hi"), {"role": "assistant", "content": "ho"}, *_user(content)]
    whole = encode_chat(tokenizer, messages)
    head, text = encode_head(tokenizer, messages, after=None)
    assert whole[: len(head)] == head
    tail = encode_turn(tokenizer, messages, after=1)
    assert whole[len(whole) - len(tail) :] == tail
    if content.strip() == content and content:
        # What the head leaves open is encoded together with the message.
        together = tokenizer.encode(text + content)
        assert whole[len(head) : len(head) + len(together)] == together
        between, text = encode_head(tokenizer, messages, after=1)
        assert tail[: len(between)] == between
        assert tail[len(between) : len(between) + len(together)] == tokenizer.encode(text + content)


def test_control_tokens_in_messages_make_no_head(small: Tokenizer) -> None:
    messages = [*_user("a <|im_start|>"), {"role": "assistant", "content": "<|im_end|>"}, *_user("b")]
    head, text = encode_head(small, messages, after=1)
    assert text == "user\n"
    assert small.decode([*head, *small.encode(text)], skip_special_tokens=False).endswith("user\n")
    assert encode_turn(small, messages, after=1)[: len(head)] == head


def test_only_after_a_text(small: Tokenizer) -> None:
    messages = [{"role": "assistant", "content": None}, *_user("x")]
    with pytest.raises(ParameterError, match="must have a text"):
        encode_turn(small, messages, after=0)


THREE_ROLES = """\
{%- for message in messages %}
{%- if message.role in ['system', 'user', 'assistant'] %}
{{- '<|im_start|>' + message.content + '<|im_end|>' }}
{%- endif %}
{%- endfor %}"""
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}


@pytest.mark.parametrize(
    ("message", "what"),
    [
        ({"role": "critic", "content": "b"}, "content of message 1"),
        ({"role": "tool", "content": "b"}, "content of message 1"),
        ({"role": "assistant", "content": "", "tool_calls": [CALL]}, "tool_calls of message 1"),
        ({"role": "assistant", "content": "b", "tool_calls": [CALL]}, "tool_calls of message 1"),
        (
            {"role": "assistant", "content": "b", "function_call": {"name": "f", "arguments": "{}"}},
            "function_call of",
        ),
        ({"role": "assistant", "content": "", "refusal": "no"}, "refusal of message 1"),
    ],
)
def test_what_a_template_would_leave_out_is_refused(message: Message, what: str) -> None:
    tokenizer = small_tokenizer({"tokenizer.chat_template": THREE_ROLES})
    for _ in range(2):  # what showed before is not looked for again, what did not is
        for rest in ([], _user("c")):
            with pytest.raises(ParameterError, match=f"no place for the {what}"):
                encode_chat(tokenizer, [*_user("a"), message, *rest])
        assert encode_chat(tokenizer, [*_user("a"), {"role": "assistant", "content": "b", "tool_calls": []}])
        assert encode_chat(tokenizer, [{"role": "system", "content": ""}, *_user("a")])


def test_a_template_that_shows_a_system_message_only_first() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' or loop.first %}{{ m.content }}{% endif %}{% endfor %}"
    )
    tokenizer = small_tokenizer({"tokenizer.chat_template": template})
    system: Message = {"role": "system", "content": "b"}
    assert encode_chat(tokenizer, [system, *_user("a")])
    with pytest.raises(ParameterError, match="message 1"):
        encode_chat(tokenizer, [*_user("a"), system])


def test_tool_calls_that_a_template_knows_are_taken() -> None:
    for arguments in ({}, {"a": 1}, "text"):
        call = {"function": {"name": "f", "arguments": arguments}}
        assert encode_chat(
            TOKENIZERS["tools"], [*_user("a"), {"role": "assistant", "tool_calls": [call, call]}]
        )


def test_a_message_to_be_continued_is_a_text(small: Tokenizer) -> None:
    parts = [{"type": "text", "text": "an"}, {"type": "text", "text": "inn"}]
    as_parts = encode_continued(small, [*_user("a"), {"role": "assistant", "content": parts}])
    assert as_parts == encode_continued(small, [*_user("a"), {"role": "assistant", "content": "an\ninn"}])
    assert small.decode(as_parts, skip_special_tokens=False).endswith("an\ninn")
    for message in ({"role": "assistant"}, {"role": "assistant", "content": "b", "tool_calls": [CALL]}):
        with pytest.raises(ParameterError, match="must have a text"):
            encode_continued(small, [*_user("a"), message])
