"""Loads a server with streams of which many are left early, and checks that nothing is lost or kept.

    python bench/server_load.py smollm2                     # 200 streams at a time, 1,000 requests
    python bench/server_load.py model.gguf --requests 5000 --streams 200 --kv-blocks 400

Starts `segue serve` with a pool of KV blocks that is too small for all streams. Each client asks for a completion of a
random length; three in ten go away at a random moment, one in twenty asks for what must be refused. Fails (exit code
1) when an answer is not complete or not that of the same request alone, when a wrong request is not refused, when
a block or a request is left at the end, or when the server's memory grew in the second half.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from serving import serving

PROMPTS = [
    "Once upon a time",
    "The capital of France is",
    "A fugue is a piece of music in which",
    "def fibonacci(n):",
    "1, 2, 3, 4,",
]
LONGEST = 120
"""Tokens of an answer."""
MAX_MODEL_LEN = 256
MAX_GROWTH_BYTES = 24 << 20
"""Of all the server's processes, from the middle of the run to its end."""
SHARE_REFUSED, SHARE_LEFT = 0.05, 0.3


@dataclass(frozen=True)
class Ask:
    """One request. Equal ones have equal answers."""

    prompt: str
    seed: int
    max_tokens: int

    @property
    def body(self) -> dict[str, object]:
        return {
            "prompt": self.prompt,
            "seed": self.seed,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "stream": True,
        }


@dataclass
class Tally:
    """What came of all requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    first_event_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    resident_bytes: list[int] = field(default_factory=list)
    """At about ten moments of the run."""


class LoadTest:
    """The clients of one server."""

    def __init__(self, host: str, port: int, pid: int, seed: int) -> None:
        self.tally = Tally()
        self._host = host
        self._port = port
        self._pid = pid
        self._random = random.Random(seed)
        self._asks = [
            Ask(prompt, seed, self._random.randint(2, LONGEST)) for prompt in PROMPTS for seed in range(4)
        ]
        self._alone: dict[Ask, str] = {}

    async def run(self, num_requests: int, num_streams: int) -> None:
        """First each question alone, then all at once in any order."""
        for ask in self._asks:
            self._alone[ask] = await self._answer(ask)
        self.tally = Tally()
        numbers = iter(range(num_requests))
        every = max(num_requests // 10, 1)
        await asyncio.gather(*[self._client(numbers, every) for _ in range(num_streams)])
        self.tally.resident_bytes.append(resident_bytes(self._pid))

    async def _client(self, numbers: Iterator[int], every: int) -> None:
        for number in numbers:
            if number % every == 0:
                self.tally.resident_bytes.append(resident_bytes(self._pid))
            luck = self._random.random()
            ask = self._random.choice(self._asks)
            try:
                if luck < SHARE_REFUSED:
                    await self._be_refused()
                elif luck < SHARE_REFUSED + SHARE_LEFT:
                    await self._leave(ask)
                elif await self._answer(ask) != self._alone[ask]:
                    raise AssertionError(f"{ask} is answered in another way than alone")
            except (OSError, ValueError, KeyError, AssertionError, asyncio.IncompleteReadError) as error:
                self.tally.failures.append(f"request {number}: {type(error).__name__}: {error}")

    async def _answer(self, ask: Ask) -> str:
        """The whole answer."""
        text, reason = "", None
        async with contextlib.aclosing(self._events(ask)) as events:
            async for choice in events:
                text += choice["text"]
                reason = choice["finish_reason"] or reason
        if reason != "length":
            raise AssertionError(f"an answer ended with {reason}")
        self.tally.outcomes["complete"] += 1
        self.tally.num_tokens += ask.max_tokens
        return text

    async def _leave(self, ask: Ask) -> None:
        """Goes away after some events, or before the first."""
        left = self._random.randint(0, ask.max_tokens // 2)
        async with contextlib.aclosing(self._events(ask)) as events:
            while left:
                left -= 1
                await anext(events)
        self.tally.outcomes["left"] += 1

    async def _be_refused(self) -> None:
        status, _, writer = await self._post({"prompt": [5] * (MAX_MODEL_LEN + 1)})
        writer.close()
        if status != 400:
            raise AssertionError(f"a prompt that is too long got {status}")
        self.tally.outcomes["refused"] += 1

    async def _events(self, ask: Ask) -> AsyncGenerator[dict[str, str], None]:
        """The first choice of each event. Closing this closes the connection."""
        begin_s = time.perf_counter()
        status, reader, writer = await self._post(ask.body)
        try:
            if status != 200:
                raise AssertionError(f"status {status}")
            is_first = True
            while not (line := await reader.readline()).startswith(b"data: [DONE]"):
                if not line:
                    raise AssertionError("the stream broke off")
                if line.startswith(b"data: "):
                    if is_first:
                        self.tally.first_event_s.append(time.perf_counter() - begin_s)
                        is_first = False
                    yield json.loads(line[6:])["choices"][0]
        finally:
            writer.close()

    async def _post(self, body: dict[str, object]) -> tuple[int, asyncio.StreamReader, asyncio.StreamWriter]:
        content = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(self._host, self._port)
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            "content-type: application/json\r\nconnection: close\r\n"
        )
        writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        try:
            status = int((await reader.readline()).split()[1])
        except (IndexError, OSError):
            writer.close()
            raise
        return status, reader, writer


def resident_bytes(pid: int) -> int:
    """Of a process and all it started."""
    total = 0
    for each in [pid, *descendants(pid)]:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            pages = int(Path(f"/proc/{each}/statm").read_text().split()[1])
            total += pages * os.sysconf("SC_PAGE_SIZE")
    return total


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            found += [child, *descendants(child)]
    return found


def metrics_of(url: str) -> dict[str, float]:
    """Values without their labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    parts = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    return {name.partition("{")[0]: float(value) for name, _, value in parts}


def wait_for_idle(url: str, timeout_s: float = 10.0) -> dict[str, float]:
    """The metrics once no request is left, or after the time-out."""
    end_s = time.monotonic() + timeout_s
    while True:
        metrics = metrics_of(url)
        if metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"] == 0:
            return metrics
        if time.monotonic() > end_s:
            return metrics
        time.sleep(0.05)


def check(tally: Tally, metrics: dict[str, float]) -> list[str]:
    """What is wrong."""
    wrong = list(tally.failures)
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "segue:num_requests_idle"):
        if metrics[name]:
            wrong.append(f"{name} is {metrics[name]:g} at the end")
    if metrics["segue:kv_blocks_free"] != metrics["segue:kv_blocks"]:
        wrong.append(
            f"{metrics['segue:kv_blocks'] - metrics['segue:kv_blocks_free']:g} KV blocks are still held"
        )
    middle = tally.resident_bytes[len(tally.resident_bytes) // 2]
    if tally.resident_bytes[-1] > middle + MAX_GROWTH_BYTES:
        wrong.append(f"memory grew from {middle / 1e6:.0f} MB to {tally.resident_bytes[-1] / 1e6:.0f} MB")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument(
        "--kv-blocks", type=int, default=400, help="for 200 streams, about a third of what they want"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    flags = (
        "--max-model-len",
        str(MAX_MODEL_LEN),
        "--num-kv-blocks",
        str(arguments.kv_blocks),
        "--no-access-log",
    )
    with serving(arguments.model, *flags) as (url, pid):
        host, port = url.removeprefix("http://").split(":")
        test = LoadTest(host, int(port), pid, arguments.seed)
        begin_s = time.perf_counter()
        asyncio.run(test.run(arguments.requests, arguments.streams))
        taken_s = time.perf_counter() - begin_s
        metrics = wait_for_idle(url)
    tally = test.tally
    wrong = check(tally, metrics)
    print(
        json.dumps(
            {
                "seconds": round(taken_s, 1),
                "outcomes": dict(tally.outcomes),
                "tokens_per_s": round(tally.num_tokens / taken_s),
                "first_event_s": {
                    "median": round(statistics.median(tally.first_event_s), 3),
                    "p99": round(statistics.quantiles(tally.first_event_s, n=100)[98], 3),
                },
                "preemptions": int(metrics["vllm:num_preemptions_total"]),
                "resident_mb": [round(each / 1e6) for each in tally.resident_bytes],
                "failures": len(wrong),
            },
            indent=2,
        )
    )
    for each in wrong[:20]:
        print(each, file=sys.stderr)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
