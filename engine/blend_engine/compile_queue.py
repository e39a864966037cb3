"""CompileQueue: bounded, deduplicated, one compile at a time, in the front-end process.

Owns the order of background compiles; the engine sees each as an ordinary request of low priority.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from blend_engine.errors import EngineUnavailable
from blend_engine.ports import CompileOutcome
from blend_engine.segments import SegmentContext, SegmentKey


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileJob:
    """A segment to compile."""

    key: SegmentKey
    tenant: str
    context: SegmentContext
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class _Pending:
    job: CompileJob
    done: asyncio.Future[CompileOutcome]


class CompileQueue:
    """Jobs in order of arrival; the same key twice is one job.

    Args:
        run: Compiles one segment in the engine. What it raises reaches the waiters.
        max_depth: Jobs waiting or running at most.
    """

    def __init__(
        self, run: Callable[[CompileJob], Awaitable[CompileOutcome]], *, max_depth: int
    ) -> None:
        self._run = run
        self._max_depth = max_depth
        self._pending: dict[SegmentKey, _Pending] = {}
        self._worker: asyncio.Task[None] | None = None
        self._running: SegmentKey | None = None
        self._is_closed = False

    def __len__(self) -> int:
        """Jobs waiting or running."""
        return len(self._pending)

    def __contains__(self, key: SegmentKey) -> bool:
        """Whether the segment waits or runs."""
        return key in self._pending

    def submit(self, job: CompileJob) -> asyncio.Future[CompileOutcome] | None:
        """Queue a job, or join the one of the same key.

        Returns:
            The outcome to come, shielded from the caller; None where the queue is full.
        """
        pending = self._pending.get(job.key)
        if pending is None:
            if self._is_closed or len(self._pending) >= self._max_depth:
                return None
            pending = _Pending(job=job, done=asyncio.get_running_loop().create_future())
            # An outcome that nobody waits for must not warn about a lost exception.
            pending.done.add_done_callback(_retrieve)
            self._pending[job.key] = pending
            if self._worker is None or self._worker.done():
                self._worker = asyncio.create_task(self._work())
        shielded = asyncio.shield(pending.done)
        shielded.add_done_callback(_retrieve)
        return shielded

    async def let_go(self, keys: Iterable[SegmentKey]) -> None:
        """Forget jobs that wait, and let a running one end: nothing of `keys` is stored later."""
        wanted = set(keys)
        running = None
        if self._running is not None and self._running in wanted:
            running = self._pending.get(self._running)
        # Waiting jobs first: the loop takes up the next one as soon as the running one ends.
        for key in (wanted & self._pending.keys()) - {self._running}:
            pending = self._pending.pop(key)
            pending.done.set_result(CompileOutcome(key=key, ready=False, reason="dropped"))
        if running is not None:
            await asyncio.wait([running.done])

    def close(self) -> None:
        """Stop; jobs that wait are cancelled, and later ones refused."""
        self._is_closed = True
        if self._worker is not None:
            self._worker.cancel()
        for pending in self._pending.values():
            pending.done.cancel()
        self._pending.clear()

    async def _work(self) -> None:
        while self._pending:
            key, pending = next(iter(self._pending.items()))
            self._running = key
            try:
                outcome = await self._run(pending.job)
            except asyncio.CancelledError:
                if self._is_closed:
                    raise
                # The engine's request was cancelled, not this loop; the jobs behind it go on.
                if not pending.done.done():
                    pending.done.set_exception(EngineUnavailable("the compile was cancelled"))
            except Exception as error:  # noqa: BLE001 - handed to whoever waits, whatever it is
                if not pending.done.done():
                    pending.done.set_exception(error)
            else:
                if not pending.done.done():
                    pending.done.set_result(outcome)
            finally:
                self._pending.pop(key, None)
                self._running = None


def _retrieve(future: asyncio.Future[CompileOutcome]) -> None:
    if not future.cancelled():
        future.exception()
