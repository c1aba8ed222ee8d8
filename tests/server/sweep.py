"""Sends a server requests that schemathesis makes from its OpenAPI document, right and wrong ones.

segue serve model.gguf --port 8000 &
python -m tests.server.sweep http://127.0.0.1:8000 --examples 2000
"""

import argparse
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

Operation = APIOperation[Any, Any, Any, Any]

REQUEST_S = 60
MAX_TOKENS = 4
"""Answers are kept short, so that there is time for more of them."""
LENGTHS = {
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/responses": "max_output_tokens",
}


def sweep(url: str, *, examples: int, seed: int) -> int:
    """Sends `examples` requests of right and as many of wrong data to each path. Returns how many that were.

    Raises AssertionError at the first answer that is a server error, or not what the document says.
    """
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    count = 0
    for result in schema.get_all_operations():
        assert isinstance(result, Ok), result.err()
        for mode in GenerationMode:
            count += _send(result.ok(), mode, url, examples=examples, seed=seed)
    return count


def _send(operation: Operation, mode: GenerationMode, url: str, *, examples: int, seed: int) -> int:
    count = 0

    @hypothesis_seed(seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(_strategy(operation, mode))
    def send(case: Case[Any]) -> None:
        nonlocal count
        count += 1
        length = LENGTHS.get(operation.path)
        if length is not None and isinstance(case.body, dict) and _is_long(case.body.get(length)):
            case.body[length] = MAX_TOKENS
        response = case.call(base_url=url, timeout=REQUEST_S)
        assert response.status_code < 500, (case.as_curl_command(), response.text)
        if response.status_code >= 400:
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}, (case.as_curl_command(), response.text)
        elif "text/event-stream" not in response.headers.get("content-type", [""])[0]:
            checks = [
                not_a_server_error,
                status_code_conformance,
                content_type_conformance,
                response_schema_conformance,
            ]
            case.validate_response(response, checks=checks)

    send()
    return count


def _strategy(operation: Operation, mode: GenerationMode) -> st.SearchStrategy[Case[Any]]:
    if mode is GenerationMode.NEGATIVE and not operation.body:
        return operation.as_strategy(GenerationMode.POSITIVE)
    return operation.as_strategy(mode)


def _is_long(length: object) -> bool:
    return length is None or (isinstance(length, int) and length > MAX_TOKENS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--examples", type=int, default=500, help="for each path")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(sweep(arguments.url, examples=arguments.examples, seed=arguments.seed), "requests, no failure")


if __name__ == "__main__":
    main()
