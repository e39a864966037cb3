"""The connector's Prometheus series, registered with vLLM's own.

For whoever runs the connector under vLLM without the gateway; under it they stand beside the
gateway's on `/metrics`. Only what the connector itself sees: whose request it was stays unknown, so
a tenant cannot become a label. Names begin with ``vllm:``, since vLLM takes its series out of the
registry by that when another engine starts in the process.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import Counter, Gauge
from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from blend_engine.protocol import FallbackReason, StoreEventKind

_SOURCES = ("prefix", "reused", "recomputed", "computed")
_NO_FALLBACK = "none"
_GAUGES = {
    "num_bytes": ("blend_store_bytes", "Bytes of KV in the store."),
    "num_segments": ("blend_store_segments", "Segments in the store."),
    "num_leases": ("blend_store_leases", "Segments in use by running requests."),
}
_TOTALS = {
    "loaded_tokens": ("blend_loaded_tokens", "Tokens whose KV was written from the store."),
    "num_load_failures": ("blend_load_failures", "Segments whose KV could not be used."),
}
"""Of `StoreStats`, which counts from the engine's start on."""


class BlendPromMetrics(KVConnectorPromMetrics):
    """Feeds the series from `BlendStats`' data.

    Args:
        vllm_config: The engine's configuration.
        metric_types: vLLM's own classes of series, by prometheus_client's.
        labelnames: Labels that every series of vLLM has.
        per_engine_labelvalues: Their values, by engine.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._values = per_engine_labelvalues
        self._told: dict[tuple[int, str], int] = {}
        counter, gauge, labels = metric_types[Counter], metric_types[Gauge], list(labelnames)
        self._plans = counter(
            name="vllm:blend_plans",
            documentation="Requests with segments, by why some of them were computed.",
            labelnames=[*labels, "fallback"],
        )
        self._tokens = counter(
            name="vllm:blend_prompt_tokens",
            documentation="Prompt tokens of requests with segments, by where their KV came from.",
            labelnames=[*labels, "source"],
        )
        self._events = counter(
            name="vllm:blend_store_events",
            documentation="Segments stored, evicted, dropped, or not stored for a failure.",
            labelnames=[*labels, "kind"],
        )
        self._totals = {
            key: counter(name=f"vllm:{name}", documentation=text, labelnames=labels)
            for key, (name, text) in _TOTALS.items()
        }
        self._gauges = {
            key: gauge(
                name=f"vllm:{name}",
                documentation=text,
                labelnames=labels,
                multiprocess_mode="mostrecent",
            )
            for key, (name, text) in _GAUGES.items()
        }
        self._show_zeros()

    @override
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self._values[engine_idx]
        for report in transfer_stats_data.get("reports", ()):
            reason = report["fallback_reason"]
            self._plans.labels(
                *values, str(FallbackReason(reason)) if reason else _NO_FALLBACK
            ).inc()
            for source in _SOURCES:
                self._tokens.labels(*values, source).inc(report[f"{source}_tokens"])
        for event in transfer_stats_data.get("events", ()):
            self._events.labels(*values, str(StoreEventKind(event["kind"]))).inc()
        store = transfer_stats_data.get("store", {})
        for key, series in self._gauges.items():
            if key in store:
                series.labels(*values).set(store[key])
        for key, series in self._totals.items():
            told = self._told.get((engine_idx, key), 0)
            # Statistics of several steps may arrive merged or late; a total never falls.
            self._told[engine_idx, key] = total = max(told, store.get(key, 0))
            series.labels(*values).inc(total - told)

    def _show_zeros(self) -> None:
        """Series without a sample are absent, and a rate over them is none, not zero."""
        for values in self._values.values():
            for fallback in (_NO_FALLBACK, *FallbackReason):
                self._plans.labels(*values, str(fallback))
            for source in _SOURCES:
                self._tokens.labels(*values, source)
            for kind in StoreEventKind:
                self._events.labels(*values, str(kind))
            for series in (*self._totals.values(), *self._gauges.values()):
                series.labels(*values)
