"""Stands in for our worker extension: brings journal and faults into the engine's own process.

vLLM imports the extension by name wherever it starts a worker, so this works whatever way the
process is started. The worker and the scheduler role have to share it: `UniProcExecutor`.
"""

import ctypes
import gc
import logging
import os
import pickle
from typing import Any

from tests.soak.faults import Faults
from tests.soak.journal import Journal
from tests.soak.records import Chapter, Rest
from tests.soak.traffic import LEAVES_IN_PASS
from typing_extensions import override
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from blend_engine.connector import BlendConnector
from blend_engine.extension import BlendWorkerExtension
from blend_engine.messages import BlendAck
from blend_engine.scheduler import BlendScheduler

EXTENSION = "tests.soak.inside.SoakExtension"

_journal = Journal()
_faults: list[Faults] = []
_vllm_scheduler: list[Any] = []


class SoakExtension(BlendWorkerExtension):
    """Ours, and what the soak asks of the engine's process, by name."""

    @override
    def blend_attach(self) -> str | None:
        _listen(_journal, self.model_runner.vllm_config.cache_config.block_size)
        return super().blend_attach()

    def soak_arm(self, seed: int) -> None:
        """Throw faults from here on."""
        # Every fault is a warning with its traceback.
        logging.getLogger("blend_engine").setLevel(logging.ERROR)
        _faults.append(Faults(seed))
        _faults[0].install()
        _faults[0].is_armed = True

    def soak_chapter(self) -> bytes:
        """A pickled `Chapter`."""
        faults = _faults[0]
        admissions = _journal.take()
        problems = _journal.problems + faults.problems
        _journal.problems, faults.problems = [], []
        chapter = Chapter(
            admissions=admissions,
            injected=faults.take(),
            totals=dict(faults.totals),
            kept=_journal.kept,
            problems=problems,
            num_preemptions=_journal.num_preemptions,
        )
        return pickle.dumps(chapter)

    def soak_rest(self) -> bytes:
        """A pickled `Rest`."""
        assert _journal.role is not None
        stats = _journal.role.store_stats()
        return pickle.dumps(
            Rest(
                left={name: repr(what) for name, what in _left(_journal.role).items() if what},
                rss_bytes=resident_bytes(),
                load_failures=stats.num_load_failures,
                evictions=stats.num_evictions,
            )
        )


def resident_bytes() -> int:
    """Memory of this process, once what is free is given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _left(role: BlendScheduler) -> dict[str, Any]:
    connector = get_kv_transfer_group()
    assert isinstance(connector, BlendConnector)
    worker, index = connector.worker, role._index
    vllm = _vllm_scheduler[0]
    pool = vllm.kv_cache_manager.block_pool
    return {
        "leases": role.store_stats().num_leases,
        "flights": len(role._flights),
        "admitted passes": role._admitted,
        "cancellations": role._flights._cancelled,
        "evicted, not told": index._evicted,
        "tracked requests": list(role._requests._requests),
        "followed blocks": list(role._blocks._blocks),
        "reserved": [key for key in index._entries if index.is_reserved(key)],
        "worker's passes": list(worker._sliced),
        "unsaid outcomes": worker._outcomes,
        "unsaid arrivals": worker._received,
        "pool unlike index": set(worker.pool._segments) - set(index._entries),
        "over budget": max(0, index.num_bytes - role._config.store_bytes),
        "vLLM's requests": list(vllm.requests),
        "blocks held": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
    }


def _hang_up_in_passes(vllm: Any, role: BlendScheduler | None) -> None:
    """Abort, as a client's abort would, those who are to leave while their pass is under way.

    No client can tell when that is.
    """
    flights = role._flights._flights.values() if role is not None else ()
    leaving = [
        flight.admitted.request_id
        for flight in flights
        if flight.is_started
        and not flight.is_cancelled
        and flight.admitted.request_id.split("-")[0].endswith(LEAVES_IN_PASS)
    ]
    if leaving:
        vllm.finish_requests(leaving, RequestStatus.FINISHED_ABORTED)


def _listen(journal: Journal, block_size: int) -> None:
    """Between vLLM's scheduler and our role."""
    asked, admitted, built, heard, ended = (
        BlendScheduler.get_num_new_matched_tokens,
        BlendScheduler.update_state_after_alloc,
        BlendScheduler.build_connector_meta,
        BlendScheduler.update_connector_output,
        BlendScheduler.request_finished,
    )

    schedule = Scheduler.schedule

    def note(this: Any, *arguments: Any, **options: Any) -> Any:
        _vllm_scheduler[:] = [this]
        _hang_up_in_passes(this, journal.role)
        return schedule(this, *arguments, **options)

    Scheduler.schedule = note

    def ask(this: BlendScheduler, request: Any, num_computed: int) -> Any:
        journal.role = this
        journal.asked(request, num_computed)
        return asked(this, request, num_computed)

    def admit(this: BlendScheduler, request: Any, block_ids: Any, num_external: int) -> None:
        journal.admitted(request, list(block_ids), num_external)
        admitted(this, request, block_ids, num_external)

    def build(this: BlendScheduler, scheduler_output: Any) -> Any:
        metadata = built(this, scheduler_output)
        journal.stepped(scheduler_output, metadata, block_size)
        return metadata

    def hear(this: BlendScheduler, connector_output: Any) -> None:
        ack = getattr(connector_output, "kv_connector_worker_meta", None)
        if isinstance(ack, BlendAck):
            journal.acknowledged(ack.outcomes)
        heard(this, connector_output)

    def end(this: BlendScheduler, request: Any) -> None:
        journal.finished(request)
        ended(this, request)

    for original, replacement in (
        (asked, ask), (admitted, admit), (built, build), (heard, hear), (ended, end)
    ):  # fmt: skip
        setattr(BlendScheduler, original.__name__, replacement)
