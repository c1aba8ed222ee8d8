"""POST /v1/completions and the fields that it shares with chat."""

import json
from typing import Any

import pytest

from segue import LLM, SamplingParams
from tests.server.conftest import Scripted
from tests.server.running import RunningServer, ServerProcess, read_events


def complete(server: RunningServer, **body: Any) -> dict[str, Any]:
    with server.client() as client:
        response = client.post("/v1/completions", json={"max_tokens": 8, "temperature": 0, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def stream(server: RunningServer, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    with server.client() as client, client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, done = read_events(response.iter_lines())
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


def text(server: RunningServer, **body: Any) -> str:
    answer = complete(server, **body)["choices"][0]["text"]
    assert isinstance(answer, str)
    return answer


def test_prompts_of_every_kind(server: RunningServer, long_llm: LLM) -> None:
    prompts = ["the hen", "an inn in the"]
    ids = [long_llm.get_tokenizer().encode(prompt) for prompt in prompts]
    alone = [text(server, prompt=prompt) for prompt in prompts]
    for given in (prompts, ids):
        choices = complete(server, prompt=given)["choices"]
        assert [choice["text"] for choice in choices] == alone
        assert [choice["index"] for choice in choices] == [0, 1]
    assert text(server, prompt=ids[0]) == alone[0]


def test_answers_to_several_prompts_are_numbered_by_prompt(server: RunningServer) -> None:
    body: dict[str, Any] = {
        "prompt": ["the hen", "of"],
        "n": 2,
        "seed": 4,
        "temperature": 1.0,
        "max_tokens": 10,
    }
    whole = complete(server, **body)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    texts = ["", "", "", ""]
    for chunk in stream(server, **body):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert whole["usage"]["completion_tokens"] <= 40


def test_echo_and_prompt_logprobs(server: RunningServer, long_llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=1, prompt_logprobs=1)
    (expected,) = long_llm.generate("the hen and", params, use_tqdm=False)
    (choice,) = complete(server, prompt="the hen and", max_tokens=4, echo=True, logprobs=1)["choices"]
    assert choice["text"] == "the hen and" + expected.outputs[0].text
    for token, offset in zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"].startswith(token, offset)
    prompt_ids = expected.prompt_token_ids
    assert expected.prompt_logprobs is not None
    assert choice["logprobs"]["token_logprobs"][: len(prompt_ids)] == [
        None if entry is None else entry[i].logprob
        for i, entry in zip(prompt_ids, expected.prompt_logprobs, strict=True)
    ]
    assert choice["logprobs"]["top_logprobs"][0] is None

    (scored,) = complete(server, prompt="the hen and", max_tokens=0, echo=True, logprobs=1)["choices"]
    assert scored["text"] == "the hen and"
    assert scored["logprobs"]["token_logprobs"] == choice["logprobs"]["token_logprobs"][: len(prompt_ids)]

    (raw,) = complete(server, prompt="the hen and", prompt_logprobs=1)["choices"]
    assert raw["text"] == text(server, prompt="the hen and")
    assert [
        None if entry is None else {int(i): each["logprob"] for i, each in entry.items()}
        for entry in raw["prompt_logprobs"]
    ] == [
        None if entry is None else {i: each.logprob for i, each in entry.items()}
        for entry in expected.prompt_logprobs
    ]


def test_echo_without_an_answer_costs_the_prompt(server: RunningServer) -> None:
    body: dict[str, Any] = {"prompt": ["the hen and", "inn"], "max_tokens": 0, "echo": True, "n": 2}
    whole = complete(server, **body, logprobs=0)
    assert [choice["text"] for choice in whole["choices"]] == ["the hen and"] * 2 + ["inn"] * 2
    assert all(choice["finish_reason"] == "length" for choice in whole["choices"])
    assert whole["usage"]["completion_tokens"] == 0
    assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] > 0
    *chunks, last = stream(server, **body, stream_options={"include_usage": True})
    assert last["usage"]["completion_tokens"] == 0
    assert {c["finish_reason"] for chunk in chunks for c in chunk["choices"]} == {"length"}


SAID = "the 🦊é hen 🐔🐔 in"
"""The tokens of these models are bytes where they have no words."""


def check_positions(choices: list[dict[str, Any]], *, num_after: int) -> None:
    """Of the tokens of SAID and `num_after` that have no text."""
    assert "".join(choice["text"] for choice in choices) == SAID
    tokens, offsets, tops = (
        [item for choice in choices for item in choice["logprobs"][field]]
        for field in ("tokens", "text_offset", "top_logprobs")
    )
    data, positions = b"", []
    for token in tokens[: len(tokens) - num_after]:
        positions.append(len(data.decode(errors="ignore")))
        part = token.removeprefix("bytes:")
        is_part = part != token
        data += part.encode().decode("unicode_escape").encode("latin-1") if is_part else token.encode()
    assert data.decode() == SAID
    assert r"bytes:\xf0" in tokens
    assert offsets == positions + [len(SAID)] * num_after
    assert all(token in top for token, top in zip(tokens, tops, strict=True) if top is not None)


@pytest.mark.parametrize("streamed", [True, False])
def test_positions_and_names_of_parts_of_characters(scripted: Scripted, streamed: bool) -> None:
    scripted.say(SAID)
    body: dict[str, Any] = {"prompt": "é🐔", "max_tokens": 60, "logprobs": 1}
    if streamed:
        choices = [choice for chunk in stream(scripted.server, **body) for choice in chunk["choices"]]
    else:
        choices = complete(scripted.server, **body)["choices"]
    check_positions(choices, num_after=1)


def test_positions_in_an_echoed_prompt(server: RunningServer) -> None:
    check_positions(
        complete(server, prompt=SAID, max_tokens=0, echo=True, logprobs=5)["choices"], num_after=0
    )
    (choice,) = complete(server, prompt=SAID, max_tokens=1, echo=True, logprobs=5)["choices"]
    assert choice["logprobs"]["text_offset"][-1] == len(SAID)
    sizes = [len(top) for top in choice["logprobs"]["top_logprobs"] if top is not None]
    assert min(sizes) >= 5  # no two tokens share a key


def test_echo_streams_the_prompt_first(server: RunningServer) -> None:
    body: dict[str, Any] = {
        "prompt": "the hen and",
        "max_tokens": 4,
        "echo": True,
        "logprobs": 1,
        "temperature": 0,
    }
    whole = complete(server, **body)["choices"][0]
    chunks = [chunk["choices"][0] for chunk in stream(server, **body)]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert chunks[0]["text"].startswith("the hen and")
    for field in ("tokens", "token_logprobs", "text_offset"):
        assert [item for chunk in chunks for item in chunk["logprobs"][field]] == whole["logprobs"][field]


@pytest.mark.parametrize("stop", ["said on", ["never", "said on", "on and"]])
def test_stop_is_never_partly_shown(scripted: Scripted, stop: str | list[str]) -> None:
    scripted.say("the hen said on and on")
    (choice,) = complete(scripted.server, prompt="x", stop=stop, max_tokens=50)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("the hen ", "stop", "said on")
    chunks = [c["choices"][0] for c in stream(scripted.server, prompt="x", stop=stop, max_tokens=50)]
    shown = ""
    for chunk in chunks:
        shown += chunk["text"]
        assert "the hen ".startswith(shown)
    assert shown == "the hen "
    assert chunks[-1]["finish_reason"] == "stop"
    kept = complete(scripted.server, prompt="x", stop=stop, max_tokens=50, include_stop_str_in_output=True)
    assert kept["choices"][0]["text"] == "the hen said on"


def test_split_characters_arrive_whole(scripted: Scripted) -> None:
    scripted.say("naïve 日本 🎵!")
    for chunk in stream(scripted.server, prompt="x", max_tokens=50):
        assert "\ufffd" not in chunk["choices"][0]["text"]
    assert text(scripted.server, prompt="x", max_tokens=50) == "naïve 日本 🎵!"


def test_how_an_answer_ends(scripted: Scripted) -> None:
    scripted.say("the hen")
    answer = complete(scripted.server, prompt="x", max_tokens=50)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] is None
    hen = scripted.script.token_ids[-1]
    ended = complete(scripted.server, prompt="x", max_tokens=50, stop_token_ids=[hen])["choices"][0]
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", hen)
    longer = complete(scripted.server, prompt="x", max_tokens=20, ignore_eos=True)
    assert longer["usage"]["completion_tokens"] == 20
    assert longer["choices"][0]["finish_reason"] == "length"
    special = text(scripted.server, prompt="x", max_tokens=20, ignore_eos=True, skip_special_tokens=False)
    assert special.endswith("<|im_end|>")


def test_sampling_fields_do_what_they_say(server: RunningServer, long_llm: LLM) -> None:
    drawn = {"prompt": "the hen", "temperature": 1.0, "max_tokens": 16, "ignore_eos": True}
    assert text(server, **drawn, seed=1) == text(server, **drawn, seed=1) != text(server, **drawn, seed=2)
    greedy = text(server, prompt="the hen", max_tokens=16, ignore_eos=True)
    for field in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-9}):
        assert text(server, **drawn, **field) == greedy
    assert text(server, prompt="the hen", max_tokens=16, repetition_penalty=5.0, ignore_eos=True) != greedy
    assert text(server, prompt="the hen", logit_bias={"100": 100}, max_tokens=3) == (
        3 * long_llm.get_tokenizer().decode([100])
    )
    assert complete(server, prompt="of", min_tokens=30, max_tokens=30)["usage"]["completion_tokens"] == 30


def test_nulls_mean_not_given(server: RunningServer) -> None:
    nothing = dict.fromkeys(("n", "stop", "logprobs", "seed", "top_p", "best_of", "suffix", "stream", "user"))
    assert text(server, prompt="the hen", **nothing) == text(server, prompt="the hen")
    assert text(server, prompt="the hen", best_of=1, stop=[]) == text(server, prompt="the hen", stop="")


def test_truncated_prompts(server: RunningServer) -> None:
    ids = list(range(50, 90))
    assert text(server, prompt=ids, truncate_prompt_tokens=10) == text(server, prompt=ids[-10:])
    long_prompt = [5 + i % 200 for i in range(20_000)]
    answer = complete(server, prompt=long_prompt, truncate_prompt_tokens=-1, max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == 16384 - 1


def test_ids_and_names(server: RunningServer) -> None:
    answer = complete(
        server, prompt=[60, 61], request_id="mine", return_token_ids=True, return_tokens_as_token_ids=True,
        logprobs=0, model="also",
    )  # fmt: skip
    (choice,) = answer["choices"]
    assert (answer["id"], answer["model"]) == ("cmpl-mine", "also")
    assert choice["prompt_token_ids"] == [60, 61]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]


def test_unknown_fields_are_logged_and_ignored(server: ServerProcess) -> None:
    assert text(server, prompt="the hen", no_such_field=1) == text(server, prompt="the hen")
    assert "CompletionRequest: ignored the unknown field 'no_such_field'" in server.log


def test_tokenize_and_detokenize(server: RunningServer, long_llm: LLM) -> None:
    ids = long_llm.get_tokenizer().encode("the hen 日")
    messages = [{"role": "user", "content": "the hen"}]
    with server.client() as client:
        answer = client.post("/tokenize", json={"prompt": "the hen 日", "return_token_strs": True}).json()
        chat = client.post("/tokenize", json={"messages": messages}).json()
        assert client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "the hen 日"}
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), 16384)
    assert len(answer["token_strs"]) == len(ids)
    assert chat["tokens"] == long_llm.encode_chat(messages)


def test_continuing_a_message(server: RunningServer, long_llm: LLM) -> None:
    messages = [{"role": "user", "content": "the hen"}, {"role": "assistant", "content": "an inn"}]
    prompt = "<|im_start|>user\nthe hen<|im_end|>\n<|im_start|>assistant\nan inn"
    body: dict[str, Any] = {
        "messages": messages,
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    with server.client() as client:
        assert client.post("/tokenize", json=body).json()["tokens"] == long_llm.get_tokenizer().encode(
            prompt, parse_special=True
        )
        body |= {"max_tokens": 8, "temperature": 0}
        answer = client.post("/v1/chat/completions", json={**body, "echo": True}).json()
        assert answer["choices"][0]["message"]["content"] == "an inn" + text(server, prompt=prompt)
        parts = [{"type": "text", "text": "an"}, {"type": "text", "text": "inn"}]
        body["messages"] = [messages[0], {"role": "assistant", "content": parts}]
        answer = client.post("/v1/chat/completions", json={**body, "echo": True}).json()
    prompt = "<|im_start|>user\nthe hen<|im_end|>\n<|im_start|>assistant\nan\ninn"
    assert answer["choices"][0]["message"]["content"] == "an\ninn" + text(server, prompt=prompt)


def test_what_is_said_about_the_server(server: RunningServer) -> None:
    with server.client() as client:
        assert client.get("/health").status_code == 200
        assert set(client.get("/version").json()) == {"version"}
        model = client.get("/v1/models").json()["data"][0]
        assert (model["id"], model["max_model_len"]) == ("tiny", 16384)
        assert "/v1/chat/completions" in client.get("/docs").text
        assert client.get("/openapi.json").json()["openapi"].startswith("3.1")
        text = client.get("/metrics").text
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:num_preemptions_total",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:request_success_total",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:e2e_request_latency_seconds_bucket",
    ):
        assert f"\n{name}{{" in text, name


def test_metrics_count(scripted: Scripted) -> None:
    scripted.say("the hen said on")
    tokens = len(scripted.script.token_ids)
    complete(scripted.server, prompt=[5, 6, 7], n=2, max_tokens=50)
    metric = scripted.server.metric
    assert metric("vllm:prompt_tokens_total") == 3
    assert metric("vllm:generation_tokens_total") == 2 * (tokens + 1)
    assert metric("vllm:request_success_total") == 2
    assert metric("vllm:time_to_first_token_seconds_count") == 1
    assert metric("vllm:e2e_request_latency_seconds_count") == 1
    assert metric("segue:requests_cancelled_total") == 0


def test_request_ids_come_back(server: RunningServer) -> None:
    with server.client() as client:
        assert client.get("/health", headers={"x-request-id": "abc"}).headers["x-request-id"] == "abc"
        given = client.get("/health", headers={"x-request-id": "x" * 1000}).headers["x-request-id"]
    assert given.startswith("req_")
