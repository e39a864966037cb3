"""The connector's series in vLLM's registry, registered and fed as vLLM does it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import REGISTRY, generate_latest
from tests.engine.test_mirror import KEY, REPORT, STORE, event, step

from blend_engine.protocol import FallbackReason, StoreEventKind

pytest.importorskip("vllm")

from vllm.config import DeviceConfig, KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from blend_engine.config import BlendConfig
from blend_engine.launch import kv_transfer_config

pytestmark = pytest.mark.vllm

LABELS = {"model_name": "m", "engine": "0"}


@pytest.fixture
def transfer() -> KVTransferConfig:
    return kv_transfer_config(BlendConfig(), is_hybrid=False)


@pytest.fixture
def prom(transfer: KVTransferConfig) -> Iterator[KVConnectorProm]:
    unregister_vllm_metrics()
    config = VllmConfig(device_config=DeviceConfig(device="cpu"), kv_transfer_config=transfer)
    yield KVConnectorProm(config, list(LABELS), {0: ["m", "0"], 1: ["m", "1"]})
    unregister_vllm_metrics()


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"vllm:{name}", {**LABELS, **labels})


def test_every_series_is_there_before_the_first_request(prom: Any) -> None:
    """A rate over a series that begins with its first event would miss that event."""
    assert value("blend_plans_total", fallback="none") == 0
    assert {value("blend_plans_total", fallback=str(each)) for each in FallbackReason} == {0}
    assert {value("blend_store_events_total", kind=str(each)) for each in StoreEventKind} == {0}
    assert value("blend_store_leases") == 0


def test_tokens_are_counted_by_where_their_kv_came_from(prom: Any) -> None:
    prom.observe(step(REPORT))
    prom.observe(step(REPORT, replace(REPORT, fallback_reason=None)))
    for source in ("prefix", "reused", "recomputed", "computed"):
        per_report = getattr(REPORT, f"{source}_tokens")
        assert value("blend_prompt_tokens_total", source=source) == 3 * per_report
    assert value("blend_plans_total", fallback="miss") == 2
    assert value("blend_plans_total", fallback="none") == 1


def test_the_store_is_shown_as_it_is_and_its_totals_only_grow(prom: Any) -> None:
    """Totals come whole with every step, also out of order, and are not added up."""
    for loaded, leases in ((5, 2), (9, 1), (7, 0)):
        prom.observe(step(store=replace(STORE, loaded_tokens=loaded, num_leases=leases)))
    assert value("blend_loaded_tokens_total") == 9
    assert value("blend_store_leases") == 0
    assert value("blend_store_bytes") == STORE.num_bytes
    prom.observe(step(event(StoreEventKind.STORED), event(StoreEventKind.EVICTED)), 0)
    assert value("blend_store_events_total", kind="evicted") == 1


def test_engines_are_kept_apart(prom: Any) -> None:
    """Each has a store of its own."""
    prom.observe(step(store=replace(STORE, loaded_tokens=5)), 1)
    prom.observe(step(store=replace(STORE, loaded_tokens=3)), 0)
    assert value("blend_loaded_tokens_total") == 3
    assert value("blend_loaded_tokens_total", engine="1") == 5


def test_no_series_says_whose_request_or_segment_it_was(prom: Any) -> None:
    """Labels come from closed sets: not the plan's id, not the segment's key."""
    prom.observe(step(REPORT, event(StoreEventKind.STORED, plan_id="plan-of-someone")))
    lines = [line for line in generate_latest().decode().splitlines() if "vllm:blend" in line]
    assert lines
    told = "\n".join(lines)
    assert "plan-of-someone" not in told
    assert REPORT.plan_id + '"' not in told
    assert KEY not in told


def test_another_engine_in_the_process_starts_anew(prom: Any, transfer: Any) -> None:
    """vLLM takes its series out of the registry first, and ours with them."""
    prom.observe(step(REPORT))
    unregister_vllm_metrics()
    config = VllmConfig(device_config=DeviceConfig(device="cpu"), kv_transfer_config=transfer)
    KVConnectorProm(config, list(LABELS), {0: ["m", "0"]})
    assert value("blend_prompt_tokens_total", source="computed") == 0


def test_vllms_log_line_sums_an_interval_up(transfer: Any) -> None:
    """vLLM accumulates statistics and writes them at its own pace."""
    logging = KVConnectorLogging(transfer)
    logging.observe(step(REPORT))
    logging.observe(step(REPORT, store=replace(STORE, num_segments=7)))
    lines: list[str] = []
    logging.log(lambda form, *arguments: lines.append(form % arguments))
    assert f"reused_tokens={2 * REPORT.reused_tokens}," in lines[0]
    assert "plans=2" in lines[0]
    assert "store_segments=7" in lines[0]
