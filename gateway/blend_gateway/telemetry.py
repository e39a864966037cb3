"""Our own Prometheus series. vLLM's stand beside them on `/metrics`; none of ours is one of theirs.

A blended hit is an `external` prefix cache hit to vLLM, so dashboards need series that tell prefix,
reused, recomputed and computed tokens apart. Label values come from closed sets; a client's text
never becomes one.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from blend_engine.protocol import StoreStats
from blend_gateway.outcome import Outcome

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_FAST_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

_RATIOS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """What is read off the engine and the registry at every scrape."""

    store: Callable[[], StoreStats]
    compile_queue_depth: Callable[[], int]
    documents: Callable[[], Mapping[str, int]]
    is_supported: Callable[[], bool]


class Metrics:
    """The series of one gateway process, in a registry of their own."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self.registry = registry
        self.blend_requests = Counter(
            "blend_requests_total",
            "Chat requests answered, by blend mode and by what came of it.",
            ("mode", "outcome"),
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "blend_prompt_tokens_total",
            "Prompt tokens of reported requests, by where their KV came from.",
            ("source",),
            registry=registry,
        )
        self.request_documents = Counter(
            "blend_request_documents_total",
            "Documents of chat requests, by what became of them.",
            ("status",),
            registry=registry,
        )
        self.charged_ratio = Histogram(
            "blend_charged_ratio",
            "Computation spent on reused and recomputed tokens, of blended requests; 1 saves none.",
            buckets=_RATIOS,
            registry=registry,
        )
        self.fallbacks = Counter(
            "blend_fallback_total",
            "Requests with documents that were computed in part or whole, by reason.",
            ("reason",),
            registry=registry,
        )
        self.assemble_seconds = Histogram(
            "blend_assemble_seconds",
            "Seconds from a parsed request to its prompt's token ids.",
            buckets=_FAST_SECONDS,
            registry=registry,
        )
        self.time_to_first_token_seconds = Histogram(
            "blend_time_to_first_token_seconds",
            "Seconds from the last byte of a streamed request to its first token.",
            ("path",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.warm_seconds = Histogram(
            "blend_warm_seconds",
            "Seconds that compiles of registered documents took in the engine.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.requests = Counter(
            "gateway_requests_total",
            "HTTP requests, by route template and status code.",
            ("route", "code"),
            registry=registry,
        )
        self.rejections = Counter(
            "gateway_rejections_total",
            "HTTP requests answered with an error, by its code in the body.",
            ("reason",),
            registry=registry,
        )
        self.inflight = Gauge(
            "gateway_inflight", "HTTP requests being answered now.", registry=registry
        )

    def watch(self, view: EngineView) -> None:
        """Add the series that are read off the engine."""
        self.registry.register(_EngineCollector(view))

    def count_outcome(self, mode: str, outcome: Outcome) -> None:
        """Count one answered chat request."""
        self.blend_requests.labels(mode, outcome.header_status).inc()
        if outcome.plan.documents and outcome.fallback_reason is not None:
            self.fallbacks.labels(str(outcome.fallback_reason)).inc()
        for status in outcome.statuses:
            self.request_documents.labels(str(status)).inc()
        report = outcome.report
        if report is None:
            return
        if report.reused_tokens or report.recomputed_tokens:
            self.charged_ratio.observe(report.charged_ratio)
        self.prompt_tokens.labels("prefix").inc(report.prefix_tokens)
        self.prompt_tokens.labels("reused").inc(report.reused_tokens)
        self.prompt_tokens.labels("recomputed").inc(report.recomputed_tokens)
        self.prompt_tokens.labels("computed").inc(report.computed_tokens)

    def observe_first_token(self, outcome: Outcome, seconds: float) -> None:
        """Time one stream's first token, apart for what its prompt was made of."""
        report = outcome.report
        if outcome.applied:
            path = "blend"
        elif report is not None and report.prefix_tokens:
            path = "prefix"
        else:
            path = "full"
        self.time_to_first_token_seconds.labels(path).observe(seconds)

    def exposition(self) -> bytes:
        """The series in Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    def __init__(self, view: EngineView) -> None:
        self._view = view

    @override
    def collect(self) -> Iterable[Metric]:
        store = self._view.store()
        used = GaugeMetricFamily(
            "blend_store_bytes", "Bytes of KV in the store, by tier.", labels=("tier",)
        )
        used.add_metric(("host",), store.num_bytes)
        yield used
        budget = GaugeMetricFamily(
            "blend_store_budget_bytes", "Bytes the store may hold, by tier.", labels=("tier",)
        )
        budget.add_metric(("host",), store.budget_bytes)
        yield budget
        yield GaugeMetricFamily(
            "blend_store_segments", "Segments in the store.", value=store.num_segments
        )
        yield GaugeMetricFamily(
            "blend_store_leases", "Segments in use by running requests.", value=store.num_leases
        )
        evictions = CounterMetricFamily(
            "blend_evictions", "Segments evicted from the store.", labels=("tier", "reason")
        )
        evictions.add_metric(("host", "budget"), store.num_evictions)
        yield evictions
        yield CounterMetricFamily(
            "blend_load_failures",
            "Segments whose KV could not be used.",
            value=store.num_load_failures,
        )
        yield CounterMetricFamily(
            "blend_loaded_tokens",
            "Tokens whose KV was written from the store into the engine's.",
            value=store.loaded_tokens,
        )
        yield GaugeMetricFamily(
            "blend_model_supported",
            "1 where the model is blended, 0 where it is served exactly only.",
            value=float(self._view.is_supported()),
        )
        yield GaugeMetricFamily(
            "blend_warm_queue_depth",
            "Compiles waiting or running.",
            value=self._view.compile_queue_depth(),
        )
        documents = GaugeMetricFamily(
            "blend_documents", "Registered documents, by status.", labels=("status",)
        )
        for status, count in self._view.documents().items():
            documents.add_metric((str(status),), count)
        yield documents
