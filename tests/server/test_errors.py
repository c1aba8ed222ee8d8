"""What is wrong with a request comes back as OpenAI's error object, with the field's name."""

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from segue.errors import RequestFailed
from segue.server.shared.options import ServerOptions
from segue.tokens import Tokenizer
from tests.server.conftest import CONTEXT, Scripted
from tests.server.running import RunningServer, read_events, serve_process
from tests.weights.make_gguf import tiny_llama

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"
HELLO = [{"role": "user", "content": "hen"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Checks that it is an error object, and nothing else."""
    body = response.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "\n" not in error["message"]
    assert error["type"] == ("invalid_request_error" if response.status_code < 500 else "server_error")
    return error


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": None}, "prompt"),
        (COMPLETIONS, {"prompt": 3}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", 1]}, "prompt"),
        (COMPLETIONS, {"prompt": [[1, "a"]]}, "prompt[0][1]"),
        (COMPLETIONS, {"prompt": [999_999]}, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (COMPLETIONS, {"prompt": [True]}, "prompt[0]"),
        (COMPLETIONS, {"prompt": ["a"] * 3000}, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 20, "n": 128}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "stop": ["b"] * 65}, "stop"),
        (COMPLETIONS, {"prompt": "a", "stop": "b" * 4097}, "stop"),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": [1] * 1025}, "stop_token_ids"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"prompt": [5] * 10_000, "prompt_logprobs": 20}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": [[5] * 1000] * 20, "echo": True, "logprobs": 1, "n": 6}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": -5}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 10**30}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "n": 0}, "n"),
        (COMPLETIONS, {"prompt": "a", "n": 100_000}, "n"),
        (COMPLETIONS, {"prompt": "a", "best_of": 2}, "best_of"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix"),
        (COMPLETIONS, {"prompt": "a", "adapter": "mine"}, "adapter"),
        (CHAT, {"messages": HELLO, "adapter": "mine"}, "adapter"),
        (RESPONSES, {"input": "a", "adapter": "mine"}, "adapter"),
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature"),
        (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, "temperature"),
        (COMPLETIONS, {"prompt": "a", "top_p": 0}, "top_p"),
        (COMPLETIONS, {"prompt": "a", "top_k": -2}, "top_k"),
        (COMPLETIONS, {"prompt": "a", "min_p": 2}, "min_p"),
        (COMPLETIONS, {"prompt": "a", "presence_penalty": 3}, "presence_penalty"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"999999": 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"1": 1000}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 5000}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "seed": 2**70}, "seed"),
        (COMPLETIONS, {"prompt": "a", "stop": [1]}, "stop[0]"),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": [999_999]}, "stop_token_ids"),
        (COMPLETIONS, {"prompt": "a", "min_tokens": 17}, "min_tokens"),
        (COMPLETIONS, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        (COMPLETIONS, {"prompt": "a", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "a", "stream": "yes"}, "stream"),
        (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (COMPLETIONS, {"prompt": "a", "model": "gpt-4"}, "model"),
        (COMPLETIONS, {"prompt": "a", "model": 4}, "model"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": HELLO * 4097}, "messages"),
        (CHAT, {"messages": HELLO, "tools": [TOOL] * 1025}, "tools"),
        (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": HELLO, "prompt_logprobs": 21}, "prompt_logprobs"),
        (RESPONSES, {"input": "a", "include": [LOGPROBS], "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": ["hi"]}, "messages[0]"),
        (CHAT, {"messages": [{"content": "hi"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": 4}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 5000}, "top_logprobs"),
        (CHAT, {"messages": HELLO, "logprobs": 2}, "logprobs"),
        (CHAT, {"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens"),
        (CHAT, {"messages": HELLO, "max_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, "tools[0].function"),
        (CHAT, {"messages": HELLO, "tools": [{"type": "web"}]}, "tools[0].type"),
        (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": HELLO, "tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
        (
            CHAT,
            {
                "messages": HELLO,
                "tools": [TOOL],
                "tool_choice": {"type": "function", "function": {"name": "x"}},
            },
            "tool_choice",
        ),
        (CHAT, {"messages": HELLO, "functions": [{"name": "f"}]}, "functions"),
        (CHAT, {"messages": HELLO, "chat_template": "x"}, "chat_template"),
        (CHAT, {"messages": HELLO, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        (CHAT, {"messages": HELLO, "continue_final_message": True}, "continue_final_message"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages"),
        (RESPONSES, {}, "input"),
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"input": [{"type": "image"}]}, "input"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        (RESPONSES, {"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        (RESPONSES, {"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        (RESPONSES, {"input": "a", "background": True}, "background"),
        (RESPONSES, {"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/detokenize", {"tokens": [999_999]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
def test_wrong_fields_are_named(server: RunningServer, path: str, body: dict[str, Any], param: str) -> None:
    with server.client() as client:
        response = client.post(path, json=body)
    assert response.status_code == (404 if body.get("model") == "gpt-4" else 400), response.text
    assert error_of(response)["param"] == param


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"null",
        b"\xff\xfe",
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"prompt":NaN}',
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize"])
def test_bodies_that_are_no_object(server: RunningServer, path: str, content: bytes) -> None:
    with server.client() as client:
        response = client.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error_of(response)


def test_deeply_nested_messages(server: RunningServer) -> None:
    def nested(depth: int) -> str:
        return '{"a":' * depth + "1" + "}" * depth

    with server.client() as client:
        for depth, status in ((20, 200), (2_000, 400), (100_000, 400)):
            body = f'{{"messages": [{{"role": "user", "content": "x", "more": {nested(depth)}}}], "max_tokens": 4}}'
            response = client.post(CHAT, content=body, headers={"content-type": "application/json"})
            assert response.status_code == status, depth
            if status == 400:
                assert "nested too deeply" in error_of(response)["message"]


def test_only_json_is_taken(server: RunningServer) -> None:
    with server.client() as client:
        response = client.post(
            COMPLETIONS, content=b'{"prompt": "a"}', headers={"content-type": "text/plain"}
        )
    assert response.status_code == 415
    assert "application/json" in error_of(response)["message"]


def test_paths_and_methods(server: RunningServer) -> None:
    with server.client() as client:
        for path in ("/v1/nothing", "/v1/completions/", "/%00", "/v1/responses/resp_1"):
            response = client.get(path)
            assert response.status_code == 404, path
            assert "Invalid URL" in error_of(response)["message"]
        response = client.get(COMPLETIONS)
        assert response.status_code == 405
        assert error_of(response)["code"] == "method_not_supported"
        assert response.headers["allow"] == "POST"
        assert client.post("/health").status_code == 405
    assert server.metric("segue:http_requests_total") > 0


def test_prompts_that_can_never_fit(server: RunningServer) -> None:
    with server.client() as client:
        for prompt in ([5] * 20_000, "hen " * 20_000, "x" * 3_000_000):
            response = client.post(COMPLETIONS, json={"prompt": prompt})
            assert response.status_code == 400
            error = error_of(response)
            assert error["code"] == "context_length_exceeded"
            assert f"maximum context length is {CONTEXT} tokens" in error["message"]  # clients look for it
            assert "max_model_len" not in error["message"]  # the model has no more
        response = client.post(CHAT, json={"messages": [{"role": "user", "content": "hen " * 20_000}]})
        assert error_of(response)["code"] == "context_length_exceeded"


LONG = "a" * 1_200_000


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        (COMPLETIONS, {"prompt": ["a"] * 20_000}, "2048 answers"),
        (COMPLETIONS, {"prompt": LONG}, "maximum context length"),
        (COMPLETIONS, {"prompt": LONG, "truncate_prompt_tokens": 5}, "limit is 1,048,576"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "--max-logprobs=20"),
        (COMPLETIONS, {"prompt": "a", "stop": "b" * 5000}, "4,096"),
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "maximum context length"),
        (CHAT, {"messages": HELLO, "tools": [{**TOOL, "more": None}] * 2000}, "limit is 1,024"),
        (RESPONSES, {"input": LONG}, "maximum context length"),
        ("/tokenize", {"prompt": LONG}, "limit is 1,048,576"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
            "limit is 1,048",
        ),
    ],
)
def test_limits_are_looked_at_before_work_is_done(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], why: str
) -> None:
    encoded: list[int] = []
    encode = Tokenizer.encode

    def count(tokenizer: Tokenizer, text: str, **options: Any) -> list[int]:
        encoded.append(len(text))
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", count)
    with scripted.server.client() as client:
        response = client.post(path, json=body)
        assert response.status_code == 400
        assert why in error_of(response)["message"]
        assert encoded == []
        client.post("/tokenize", json={"prompt": "a"})
        assert encoded == [1]


def test_prompts_that_a_flag_lets_in(tmp_path: Path) -> None:
    with (
        serve_process(
            tmp_path / "log", tiny_llama(tmp_path / "tiny.gguf"), "--max-model-len", "100"
        ) as server,
        server.client() as client,
    ):
        message = error_of(client.post(COMPLETIONS, json={"prompt": [5] * 100}))["message"]
    assert "maximum context length is 100 tokens" in message
    assert "raise max_model_len" in message


@pytest.mark.parametrize("scripted", [ServerOptions(max_request_bytes=1000)], indirect=True)
def test_bodies_that_are_too_large(scripted: Scripted) -> None:
    with scripted.server.client() as client:
        body = json.dumps({"prompt": "a" * 2000}).encode()
        headers = {"content-type": "application/json"}
        response = client.post(COMPLETIONS, content=body, headers=headers)
        assert response.status_code == 413
        assert "1000 bytes" in error_of(response)["message"]
        parts = (body[i : i + 100] for i in range(0, len(body), 100))  # chunked: no length is told
        response = client.post(COMPLETIONS, content=parts, headers=headers)
        assert response.status_code == 413
        assert client.post(COMPLETIONS, json={"prompt": "a"}).status_code == 200


@pytest.mark.parametrize("scripted", [ServerOptions(api_keys=("one", "two"))], indirect=True)
def test_keys(scripted: Scripted) -> None:
    with scripted.server.client() as client:
        for path in ("/health", "/version", "/metrics", "/docs", "/openapi.json"):
            assert client.get(path).status_code == 200
        for headers, code in (
            ({}, None),
            ({"authorization": "Bearer three"}, "invalid_api_key"),
            ({"authorization": "Bearer"}, "invalid_api_key"),
            ({"authorization": "Basic one"}, "invalid_api_key"),
        ):
            for method, path in (
                ("GET", "/v1/models"),
                ("POST", CHAT),
                ("POST", "/tokenize"),
                ("GET", "/nothing"),
            ):
                response = client.request(method, path, headers=headers)
                assert response.status_code == 401
                assert error_of(response)["code"] == code
        for key in ("one", "two"):
            assert client.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200


@pytest.mark.parametrize(
    "scripted", [ServerOptions(cors_origins=("https://a.example",), api_keys=("k",))], indirect=True
)
def test_cors(scripted: Scripted) -> None:
    with scripted.server.client() as client:
        asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
        response = client.options(CHAT, headers={**asked, "access-control-request-headers": "authorization"})
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://a.example"
        refused = client.post(CHAT, json={}, headers={"origin": "https://a.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"
        other = client.get("/health", headers={"origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


def test_a_request_that_fails(scripted: Scripted) -> None:
    scripted.say("the hen")
    scripted.script.failure = RequestFailed("the step broke")
    with scripted.server.client() as client:
        response = client.post(COMPLETIONS, json={"prompt": "a"})
        assert response.status_code == 500
        assert "the step broke" in error_of(response)["message"]
        with client.stream("POST", CHAT, json={"messages": HELLO, "stream": True}) as stream:
            *_, chunk, done = read_events(stream.iter_lines())
        assert "the step broke" in json.loads(chunk)["error"]["message"]
        assert done == "[DONE]"
        with client.stream("POST", RESPONSES, json={"input": "a", "stream": True}) as stream:
            *_, last = read_events(stream.iter_lines())
        event = json.loads(last)
        assert event["type"] == "response.failed"
        assert "the step broke" in event["response"]["error"]["message"]
        assert scripted.server.metric("segue:requests_failed_total") == 3
        assert scripted.server.metric("segue:requests_cancelled_total") == 0
        scripted.script.failure = None
        assert client.post(COMPLETIONS, json={"prompt": "a"}).json()["choices"][0]["text"] == "the hen"


def test_a_response_that_fails_leaves_no_item_in_progress(scripted: Scripted) -> None:
    script = scripted.script
    script.gate = threading.Semaphore(1)
    scripted.say("the hen " * 100)
    with (
        scripted.server.client() as client,
        client.stream("POST", RESPONSES, json={"input": "a", "stream": True}) as stream,
    ):
        for line in stream.iter_lines():
            if line == "event: response.output_text.delta" and script.failure is None:
                script.failure = RuntimeError("the step broke")
                script.gate.release(100)
            if line.startswith("data: "):
                last = line.removeprefix("data: ")
            if line == "event: response.output_item.added":
                script.gate.release()
    event = json.loads(last)
    assert event["type"] == "response.failed"
    (item,) = event["response"]["output"]
    assert item["status"] == "incomplete"
    assert item["content"][0]["text"]
