"""What Prometheus reads. A metric has vLLM's name where it means the same, else one that begins with "segue:"."""

import time
from collections import Counter as Tally
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from segue.answers.outputs import Delta, RequestOutput
from segue.contract.reports import EngineStats
from segue.engine.config import EngineConfig
from segue.sample.params import SamplingParams

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_N = (1, 2, 5, 10, 20)


class Metrics:
    """Of one server. For its event loop."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._engine = _EngineMetrics(self._labels)
        self._registry.register(self._engine)
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of all requests.")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens of all answers.")
        self._cache_queries = self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self._cache_hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._success = Counter(
            "vllm:request_success",
            "Answers that ended, by how.",
            [*self._labels, "finished_reason"],
            registry=self._registry,
        )
        self._cancelled = self._counter("segue:requests_cancelled", "Requests whose client went away.")
        self._failed = self._counter("segue:requests_failed", "Requests that ended with an error.")
        self._first_token_s = self._histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_S
        )
        self._between_tokens_s = self._histogram(
            "vllm:inter_token_latency_seconds", "Between the outputs of an answer.", _TOKEN_S
        )
        self._request_s = self._histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the end.", _REQUEST_S
        )
        self._per_token_s = self._histogram(
            "vllm:request_time_per_output_token_seconds", "A request's mean after the first token.", _TOKEN_S
        )
        self._request_prompt_tokens = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS
        )
        self._request_generation_tokens = self._histogram(
            "vllm:request_generation_tokens", "Tokens of a request's answers.", _TOKENS
        )
        self._request_n = self._histogram("vllm:request_params_n", "The parameter n.", _N)
        self._request_max_tokens = self._histogram(
            "vllm:request_params_max_tokens", "The parameter max_tokens.", _TOKENS
        )
        self._http = Counter(
            "segue:http_requests",
            "HTTP requests by route and status.",
            ["method", "path", "status"],
            registry=self._registry,
        )

    def request_started(self, params: SamplingParams, prompt_tokens: int) -> "RequestSeen":
        """To be told what becomes of it."""
        self._prompt_tokens.inc(prompt_tokens)
        self._request_prompt_tokens.observe(prompt_tokens)
        self._request_n.observe(params.n)
        if params.max_tokens is not None:
            self._request_max_tokens.observe(params.max_tokens)
        return RequestSeen(self)

    def http_request(self, method: str, path: str, status: int) -> None:
        """`path` is a route, not what the client wrote: there must not be many of them."""
        self._http.labels(method, path, str(status)).inc()

    def exposition(self, stats: EngineStats | None, config: EngineConfig) -> bytes:
        """The text for Prometheus. Without stats, when the engine is gone, its metrics are left out."""
        self._engine.stats = stats
        self._engine.config = config
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, list(self._labels), registry=self._registry).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(
            name, text, list(self._labels), registry=self._registry, buckets=tuple(buckets)
        ).labels(**self._labels)

    # --- for RequestSeen --------------------------------------------------------------------------------------

    def took(self, num_tokens: int, since_last_s: float | None) -> None:
        self._generation_tokens.inc(num_tokens)
        if since_last_s is not None:
            self._between_tokens_s.observe(since_last_s)

    def answered(self, output: RequestOutput, now_s: float) -> None:
        times = output.times
        num_tokens = sum(len(answer.token_ids) for answer in output.outputs)
        self._request_s.observe(now_s - times.arrival_s)
        self._request_generation_tokens.observe(num_tokens)
        if times.time_to_first_token_s is not None:
            self._first_token_s.observe(times.time_to_first_token_s)
        if times.decode_s is not None and num_tokens > len(output.outputs):
            self._per_token_s.observe(times.decode_s / (num_tokens - len(output.outputs)))
        self._cache_queries.inc(len(output.prompt_token_ids))
        self._cache_hits.inc(output.num_cached_tokens)
        for reason, count in Tally(str(answer.finish_reason) for answer in output.outputs).items():
            self._success.labels(**self._labels, finished_reason=reason).inc(count)

    def cancelled(self) -> None:
        self._cancelled.inc()

    def failed(self) -> None:
        self._failed.inc()


class RequestSeen:
    """One request, while it runs."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._last_s: dict[int, float] = {}
        """When each answer had its last output."""
        self._has_ended = False

    def took(self, delta: Delta, now_s: float) -> None:
        last_s = self._last_s.get(delta.index)
        self._last_s[delta.index] = now_s
        self._metrics.took(len(delta.token_ids), None if last_s is None else now_s - last_s)

    def ended(self, output: RequestOutput) -> None:
        self._has_ended = True
        self._metrics.answered(output, time.perf_counter())

    def failed(self) -> None:
        """It ended with an error."""
        self._has_ended = True
        self._metrics.failed()

    def close(self) -> None:
        """However it ended."""
        if not self._has_ended:
            self._has_ended = True
            self._metrics.cancelled()


class _EngineMetrics:
    """The engine's own numbers, of the moment they are read."""

    def __init__(self, labels: dict[str, str]) -> None:
        self.stats: EngineStats | None = None
        self.config: EngineConfig | None = None
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        stats, config = self.stats, self.config
        if stats is None or config is None:
            return
        held = stats.num_kv_blocks - stats.num_free_blocks
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        yield self._one(gauge, "vllm:num_requests_running", "Requests in steps.", stats.num_running)
        yield self._one(gauge, "vllm:num_requests_waiting", "Requests to be admitted.", stats.num_waiting)
        yield self._one(gauge, "segue:num_requests_idle", "Requests that wait for input.", stats.num_idle)
        yield self._one(
            gauge,
            "vllm:kv_cache_usage_perc",
            "Share of KV blocks in use; 1 is all.",
            held / stats.num_kv_blocks,
        )
        yield self._one(gauge, "segue:kv_blocks", "KV blocks.", stats.num_kv_blocks)
        yield self._one(gauge, "segue:kv_blocks_free", "Free ones, cached included.", stats.num_free_blocks)
        yield self._one(gauge, "segue:kv_blocks_cached", "Free and a prefix hit.", stats.num_cached_blocks)
        yield self._one(counter, "vllm:num_preemptions", "Requests that lost blocks.", stats.num_preemptions)
        yield self._one(counter, "segue:engine_steps", "Steps.", stats.num_steps)
        yield self._one(
            counter,
            "segue:engine_restarts",
            "How often the engine's process was started again.",
            stats.num_restarts,
        )
        yield self._one(
            counter,
            "segue:computed_tokens",
            "Tokens computed, recomputed and rejected ones included.",
            stats.num_computed_tokens,
        )
        yield self._one(
            counter, "vllm:spec_decode_num_draft_tokens", "Drafts verified.", stats.num_draft_tokens
        )
        yield self._one(
            counter, "vllm:spec_decode_num_accepted_tokens", "Drafts kept.", stats.num_accepted_tokens
        )
        info = gauge(
            "vllm:cache_config_info",
            "What the KV cache is.",
            labels=["block_size", "num_gpu_blocks", "engine"],
        )
        info.add_metric([str(config.block_size), str(config.num_kv_blocks), "0"], 1)
        yield info

    def _one(
        self,
        family: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        value: float,
    ) -> Metric:
        metric = family(name, text, labels=list(self._labels))
        metric.add_metric(list(self._labels.values()), value)
        return metric
