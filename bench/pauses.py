"""How long one client's demanding request holds up the streams of the others.

    python bench/pauses.py smollm2
    python bench/pauses.py model.gguf --streams 8 --json

Eight streams run on a server. Into them each of the requests below is sent, one kind after the other: what somebody
sends by mistake, or to do harm. For each it reports what became of it and the longest time that one of the streams
had to wait for its next event meanwhile, beside the longest wait of the same streams when they are alone. A stream
that breaks off is a failure (exit code 1).
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import httpx
import websockets
from serving import serving

NUM_CALM = 3
"""So many times the streams are measured alone."""
CALM_S = 2.0
AFTER_S = 0.5
"""What a request leaves behind may hold up streams a little later."""
MAX_MODEL_LEN = 8192
TIMEOUT_S = 120.0

Send = Callable[[httpx.AsyncClient], Awaitable[str]]


@dataclass
class Streams:
    """Streams of completions that go on until they are told to stop, each event with its time."""

    client: httpx.AsyncClient
    count: int
    events: list[tuple[float, int, int]] = field(default_factory=list)
    """When a stream, by its number, got an event, and of which of its answers."""
    failures: list[str] = field(default_factory=list)

    async def _one(self, number: int) -> None:
        body = {
            "prompt": f"Once upon a time there were {number + 2} bears",
            "max_tokens": 2000,
            "temperature": 1.0,
            "seed": number,
            "ignore_eos": True,
            "stream": True,
        }
        for answer in itertools.count():
            try:
                async with self.client.stream("POST", "/v1/completions", json=body) as response:
                    if response.status_code != 200:
                        self.failures.append(f"stream {number} got {response.status_code}")
                        return
                    async for line in response.aiter_lines():
                        if line.startswith("data: {"):
                            if '"error"' in line:
                                self.failures.append(f"stream {number}: {line[:200]}")
                            self.events.append((time.perf_counter(), number, answer))
            except httpx.HTTPError as error:
                self.failures.append(f"stream {number}: {type(error).__name__}: {error}")
                return

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Streams"]:
        tasks = [asyncio.create_task(self._one(number)) for number in range(self.count)]
        while len({number for _, number, _ in self.events}) < self.count and not self.failures:
            await asyncio.sleep(0.01)
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def worst_gap_s(self, begin_s: float, end_s: float) -> float:
        """The longest time between neighbouring events of one answer that lies, at least in part, in the window. The
        time to an answer's first event does not count: it waits its turn like everybody."""
        last: dict[tuple[int, int], float] = {}
        worst_s = 0.0
        for at_s, number, answer in self.events:
            before_s = last.get((number, answer))
            if before_s is not None and at_s > begin_s and before_s < end_s:
                worst_s = max(worst_s, at_s - before_s)
            last[number, answer] = at_s
        newest = dict(last.keys())  # each number with its latest answer
        # Whoever still waits has waited so long.
        return max([worst_s, *(end_s - last[each] for each in newest.items() if last[each] < end_s)])


def post(path: str, body: dict[str, object]) -> Send:
    async def send(client: httpx.AsyncClient) -> str:
        response = await client.post(path, json=body)
        return str(response.status_code)

    return send


def many(send: Send, count: int) -> Send:
    """The same at once, so many times."""

    async def send_all(client: httpx.AsyncClient) -> str:
        statuses = Counter(await asyncio.gather(*[send(client) for _ in range(count)]))
        return ", ".join(f"{number} × {status}" for status, number in sorted(statuses.items()))

    return send_all


def get(path: str) -> Send:
    async def send(client: httpx.AsyncClient) -> str:
        return str((await client.get(path)).status_code)

    return send


def realtime(*events: dict[str, object], query: str = "") -> Send:
    """A realtime session that gets these events, and what it says last."""

    async def send(client: httpx.AsyncClient) -> str:
        url = str(client.base_url).replace("http://", "ws://").rstrip("/") + f"/v1/realtime{query}"
        said = "nothing"
        try:
            async with websockets.connect(url, max_size=None, open_timeout=TIMEOUT_S) as socket:
                for event in events:
                    await socket.send(json.dumps(event))
                with contextlib.suppress(TimeoutError):
                    while True:
                        event = json.loads(await asyncio.wait_for(socket.recv(), 1.0))
                        said = event["type"]
                        if said == "error":
                            said = f"error {event['error'].get('code')}"
        except websockets.InvalidStatus as refused:
            said = str(refused.response.status_code)
        except websockets.ConnectionClosed as closed:
            said = f"closed {closed.rcvd.code if closed.rcvd else ''}"
        return said

    return send


def completion(**fields: object) -> Send:
    return post("/v1/completions", {"prompt": "One, two,", "max_tokens": 8, **fields})


def chat(**fields: object) -> Send:
    messages = [{"role": "user", "content": "Count to three."}]
    return post("/v1/chat/completions", {"messages": messages, "max_tokens": 8, **fields})


def json_schema(schema: Mapping[str, object]) -> Send:
    return chat(
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
        max_tokens=32,
    )


def demanding() -> dict[str, Send]:
    """What is asked for, in words, and how."""
    words = "words and more words " * 50_000
    many_tools = [
        {"type": "function", "function": {"name": f"tool_{i}", "parameters": {"type": "object"}}}
        for i in range(5000)
    ]
    alternatives = " | ".join(json.dumps(f"alternative {i} of many") for i in range(3000))
    wide = {"type": "object", "properties": {f"field_{i}": {"type": "string"} for i in range(3000)}}
    return {
        "300 kB of stop strings": completion(stop=["x" * 100 + str(i) for i in range(3000)]),
        "one stop string of 300 kB": completion(stop="x" * 300_000),
        "n = 1,000": completion(n=1000),
        "20,000 prompts": completion(prompt=["Once upon a time"] * 20_000),
        "logit_bias for every id": completion(logit_bias={str(i): 0.5 for i in range(49_152)}),
        "1,024 logprobs": completion(logprobs=1024, max_tokens=64),
        "prompt logprobs of 4,000 tokens": completion(prompt=[500] * 4000, echo=True, logprobs=5),
        "a prompt of a megabyte": completion(prompt=words),
        "a prompt of 6,000 tokens": completion(prompt=[500 + i % 300 for i in range(6000)]),
        "/tokenize of a megabyte": post("/tokenize", {"prompt": words}),
        "20,000 messages": chat(messages=[{"role": "user", "content": "hello"}] * 20_000),
        "5,000 tools": chat(tools=many_tools),
        "a grammar of 3,000 alternatives": completion(
            structured_outputs={"grammar": f"start: {alternatives}"}
        ),
        "the regex a{1000000}": completion(structured_outputs={"regex": "a{1000000}"}),
        "a schema with 3,000 fields": json_schema(wide),
        "a schema that is new, 20 times": many(
            json_schema({"type": "object", "properties": {"city": {"type": "string"}}}), 20
        ),
        "a realtime session with a megabyte": realtime({"type": "input_text.append", "text": words}),
        "a realtime event of 5,000 digits": realtime(query=f"?session_id=S&last_event_id=event_{'9' * 5000}"),
        "the engine's state, 200 times": many(get("/engine"), 200),
        "the metrics, 200 times": many(get("/metrics"), 200),
        "2,000 requests at once": many(completion(max_tokens=1), 2000),
    }


@dataclass(frozen=True)
class Finding:
    """What a demanding request came to."""

    name: str
    outcome: str
    seconds: float
    """Until its answer."""
    worst_pause_s: float


async def measure(url: str, num_streams: int) -> tuple[list[Finding], list[float], list[str]]:
    """The findings, the longest waits of the streams alone, and which streams broke."""
    # A kept connection may be closed by the server in the moment in which it is used again.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with (
        httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client,
        Streams(client, num_streams).running() as streams,
    ):
        calm_s = []
        for _ in range(NUM_CALM):
            begin_s = time.perf_counter()
            await asyncio.sleep(CALM_S)
            calm_s.append(streams.worst_gap_s(begin_s, time.perf_counter()))
        findings = []
        for name, send in demanding().items():
            begin_s = time.perf_counter()
            try:
                outcome = await send(client)
            except (httpx.HTTPError, OSError) as error:
                outcome = type(error).__name__
            answered_s = time.perf_counter() - begin_s
            await asyncio.sleep(AFTER_S)
            worst_s = streams.worst_gap_s(begin_s, time.perf_counter())
            findings.append(Finding(name, outcome, answered_s, worst_s))
        return findings, calm_s, streams.failures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    arguments = parser.parse_args()
    with serving(arguments.model, "--max-model-len", str(MAX_MODEL_LEN), "--no-access-log") as (url, _):
        findings, calm_s, failures = asyncio.run(measure(url, arguments.streams))
    if arguments.json:
        print(
            json.dumps(
                {
                    "alone_worst_pause_s": calm_s,
                    "findings": [vars(each) for each in findings],
                    "failures": failures,
                },
                indent=2,
            )
        )
    else:
        print(f"{'alone':40} {'':24} {'':>10} {statistics.median(calm_s) * 1e3:9.0f} ms")
        for each in findings:
            print(
                f"{each.name:40} {each.outcome:24.24} {each.seconds:8.2f} s {each.worst_pause_s * 1e3:9.0f} ms"
            )
    for failure in failures[:20]:
        print(failure, file=sys.stderr)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
