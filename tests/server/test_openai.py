"""The server as the `openai` package sees it."""

import asyncio
import json
from typing import Any

import openai as api
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionTokenLogprob

from segue import LLM, SamplingParams
from segue.server.api.response_objects import MessageItem, OutputText
from segue.server.api.stored_items import StoredItems
from tests.server.running import RunningServer

HELLO: Any = [{"role": "user", "content": "the hen and the inn"}]
GREEDY: Any = {"temperature": 0, "extra_body": {"ignore_eos": True}}


def test_models(openai: OpenAI) -> None:
    assert [model.id for model in openai.models.list()] == ["tiny", "also"]
    assert openai.models.retrieve("also").id == "also"
    with pytest.raises(api.NotFoundError) as caught:
        openai.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


def test_completion_says_what_the_llm_says(openai: OpenAI, long_llm: LLM) -> None:
    params = SamplingParams(seed=7, max_tokens=24, logprobs=2, ignore_eos=True)
    (expected,) = long_llm.generate("the hen", params, use_tqdm=False)
    answer = openai.completions.create(
        model="tiny", prompt="the hen", seed=7, max_tokens=24, logprobs=2, extra_body={"ignore_eos": True}
    )
    (choice,) = answer.choices
    assert choice.text == expected.outputs[0].text
    assert choice.finish_reason == "length"
    logprobs = expected.outputs[0].logprobs
    assert choice.logprobs is not None
    assert logprobs is not None
    ids = expected.outputs[0].token_ids
    assert choice.logprobs.token_logprobs == [
        entry[i].logprob for i, entry in zip(ids, logprobs, strict=True)
    ]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24


def test_completion_streams_the_same(openai: OpenAI) -> None:
    arguments: Any = {"model": "tiny", "prompt": "an inn", "max_tokens": 32, "seed": 1, "n": 3, "logprobs": 1}
    whole = openai.completions.create(**arguments)
    texts = ["", "", ""]
    tokens: list[list[str]] = [[], [], []]
    offsets: list[list[int]] = [[], [], []]
    usage = None
    for chunk in openai.completions.create(**arguments, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            assert choice.logprobs is not None
            tokens[choice.index] += choice.logprobs.tokens
            offsets[choice.index] += choice.logprobs.text_offset
    assert texts == [choice.text for choice in whole.choices]
    assert len(set(texts)) == 3
    assert tokens == [choice.logprobs.tokens for choice in whole.choices if choice.logprobs]
    assert offsets == [choice.logprobs.text_offset for choice in whole.choices if choice.logprobs]
    assert usage is not None
    assert whole.usage is not None
    assert usage.total_tokens == whole.usage.total_tokens


def test_chat_streams_the_same(openai: OpenAI) -> None:
    arguments: Any = {
        "model": "tiny",
        "messages": HELLO,
        "max_completion_tokens": 32,
        "n": 2,
        "seed": 2,
        "logprobs": True,
        "top_logprobs": 3,
    }
    whole = openai.chat.completions.create(**arguments)
    texts, roles = ["", ""], ["", ""]
    logprobs: list[list[ChatCompletionTokenLogprob]] = [[], []]
    reasons: list[str | None] = [None, None]
    for chunk in openai.chat.completions.create(**arguments, stream=True):
        assert chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            if choice.logprobs and choice.logprobs.content:
                logprobs[choice.index] += choice.logprobs.content
    assert roles == ["assistant", "assistant"]
    for choice in whole.choices:
        assert choice.message.content == texts[choice.index]
        assert choice.finish_reason == reasons[choice.index]
        assert choice.logprobs is not None
        assert choice.logprobs.content == logprobs[choice.index]
        for token in choice.logprobs.content or []:
            assert len(token.top_logprobs) == 3
            assert token.bytes is not None
            assert bytes(token.bytes).decode(errors="replace") == token.token


def test_chat_is_the_template_and_then_a_completion(openai: OpenAI, long_llm: LLM) -> None:
    answer = openai.chat.completions.create(model="tiny", messages=HELLO, max_tokens=20, **GREEDY)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    (expected,) = long_llm.chat(HELLO, params, use_tqdm=False)
    assert answer.choices[0].message.content == expected.outputs[0].text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)


def test_usage_with_every_chunk(openai: OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        chunk.usage.completion_tokens
        for chunk in openai.completions.create(
            model="tiny", prompt="of", max_tokens=9, stream=True, stream_options=options, **GREEDY
        )
        if chunk.usage
    ]
    assert counts == sorted(counts)
    assert (counts[0] > 0, counts[-1]) == (True, 9)


def test_cached_tokens_are_told(openai: OpenAI) -> None:
    prompt = "she said on and on and on that the hen is in the inn"

    def ask(salt: str) -> int:
        usage = openai.completions.create(
            model="tiny", prompt=prompt, max_tokens=1, extra_body={"cache_salt": salt}
        ).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    assert ask("one") == 0
    assert ask("one") >= 16
    assert ask("two") == 0


def test_many_at_once_answer_as_one_alone(server: RunningServer) -> None:
    async def ask(client: AsyncOpenAI, i: int) -> str:
        text = ""
        stream = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": f"the hen {i % 5}"}], max_tokens=20, seed=i % 5,
            stream=True,
        )  # fmt: skip
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        return text

    async def main() -> None:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            alone = [await ask(client, i) for i in range(5)]
            together = await asyncio.gather(*[ask(client, i) for i in range(40)])
        assert together == [alone[i % 5] for i in range(40)]

    asyncio.run(main())


def test_errors_are_the_packages_own(openai: OpenAI) -> None:
    with pytest.raises(api.NotFoundError):
        openai.chat.completions.create(model="gpt-4", messages=HELLO)
    with pytest.raises(api.BadRequestError) as caught:
        openai.chat.completions.create(model="tiny", messages=HELLO, top_p=3)
    assert caught.value.param == "top_p"
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(api.BadRequestError) as caught:
        openai.completions.create(model="tiny", prompt=[5] * 20_000)
    assert caught.value.code == "context_length_exceeded"


def test_response(openai: OpenAI) -> None:
    arguments: Any = {"model": "tiny", "input": "the hen", "max_output_tokens": 12, "extra_body": {"seed": 3}}
    whole = openai.responses.create(**arguments, instructions="be in the inn", metadata={"a": "b"})
    assert whole.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.metadata == {"a": "b"}
    assert whole.usage is not None
    assert whole.usage.output_tokens == 12
    chat = openai.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": "be in the inn"}, {"role": "user", "content": "the hen"}],
        max_tokens=12,
        seed=3,
    )
    assert whole.output_text == chat.choices[0].message.content


def test_response_streams_the_documented_events(openai: OpenAI) -> None:
    arguments: Any = {
        "model": "tiny",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "the hen"}]}],
        "max_output_tokens": 12,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 1,
        "extra_body": {"seed": 3},
    }
    events = list(openai.responses.create(**arguments, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * len(deltas),
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    last = events[-1]
    assert last.type == "response.incomplete"
    assert "".join(event.delta for event in deltas) == last.response.output_text
    assert sum(len(event.logprobs) for event in deltas) == 12
    whole = openai.responses.create(**arguments)
    assert whole.output_text == last.response.output_text
    assert (
        json.loads(whole.to_json())["output"][0]["content"]
        == json.loads(last.response.to_json())["output"][0]["content"]
    )


@pytest.mark.parametrize("stream", [True, False])
def test_items_of_an_answer_can_be_referred_to(server: RunningServer, *, stream: bool) -> None:
    """As Vercel's client does from its second turn on."""
    question = {"role": "user", "content": "the hen"}
    settings = {"temperature": 0, "max_output_tokens": 8}
    with server.client() as client:

        def answer(*items: dict[str, str], **more: object) -> dict[str, Any]:
            body = {"input": [question, *items], **settings, **more}
            if not stream:
                return dict(client.post("/v1/responses", json=body).json())
            with client.stream("POST", "/v1/responses", json={**body, "stream": True}) as events:
                data = [line for line in events.iter_lines() if line.startswith("data: ")]
            return dict(json.loads(data[-1].removeprefix("data: "))["response"])

        first, unstored = answer(), answer(store=False)
        assert (first["store"], unstored["store"]) == (True, False)
        (item,) = first["output"]
        again = {"role": "user", "content": "an inn"}
        said = {"role": "assistant", "content": item["content"][0]["text"]}
        by_reference = answer({"type": "item_reference", "id": item["id"]}, again)
        assert by_reference["output"][0]["content"] == answer(said, again)["output"][0]["content"]
        reference = {"type": "item_reference", "id": unstored["output"][0]["id"]}
        refused = client.post("/v1/responses", json={"input": [reference]})
        assert refused.status_code == 400
        assert "send the item itself" in refused.json()["error"]["message"]


def test_stored_items_have_a_bound() -> None:
    stored = StoredItems(max_bytes=1000)
    for number in range(20):
        stored.keep(MessageItem(id=f"msg_{number}", content=[OutputText(text="x" * 100)]))
    kept = [number for number in range(20) if stored.find(f"msg_{number}") is not None]
    assert 0 < len(kept) < 10
    assert kept == list(range(20 - len(kept), 20))


def test_a_response_says_which_format_was_asked_for(openai: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    text: Any = {"format": {"type": "json_schema", "name": "one", "schema": schema, "strict": True}}
    response = openai.responses.create(model="tiny", input="the hen", text=text, max_output_tokens=20)
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.model_dump(by_alias=True, exclude_none=True) == text["format"]
    for kind in ("json_object", "text"):
        text = {"format": {"type": kind}}
        response = openai.responses.create(model="tiny", input="the hen", text=text, max_output_tokens=20)
        assert response.text is not None
        assert response.text.format is not None
        assert response.text.format.type == kind
