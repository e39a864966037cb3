"""Rules of `CompileQueue`: bounded, deduplicated, in order, deaf to one waiter that leaves."""

import asyncio
import gc
from collections.abc import Awaitable, Callable

import pytest

from blend_engine.compile_queue import CompileJob, CompileQueue
from blend_engine.ports import CompileOutcome
from blend_engine.segments import SegmentContext, SegmentKey

TIMEOUT_S = 10.0


def job(name: str) -> CompileJob:
    return CompileJob(
        key=SegmentKey(name), tenant="t", context=SegmentContext.FREE, token_ids=(1, 2, 3)
    )


class Engine:
    """Compiles one segment at a time, each as soon as the test lets it."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.num_running = 0
        self.ends: dict[str, asyncio.Future[CompileOutcome]] = {}

    async def run(self, job: CompileJob) -> CompileOutcome:
        self.started.append(job.key)
        self.num_running += 1
        assert self.num_running == 1, "compiles overlap"
        try:
            return await self._end(job.key)
        finally:
            self.num_running -= 1

    def finish(self, name: str) -> None:
        self._end(name).set_result(CompileOutcome(key=SegmentKey(name), ready=True))

    def fail(self, name: str, error: Exception) -> None:
        self._end(name).set_exception(error)

    def _end(self, name: str) -> asyncio.Future[CompileOutcome]:
        return self.ends.setdefault(name, asyncio.get_running_loop().create_future())


def with_queue(
    body: Callable[[CompileQueue, Engine], Awaitable[None]], *, max_depth: int = 8
) -> None:
    """Run `body` in a loop of its own; whatever waits too long fails."""

    async def main() -> None:
        engine = Engine()
        queue = CompileQueue(engine.run, max_depth=max_depth)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await body(queue, engine)
        finally:
            queue.close()

    asyncio.run(main())


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_outcome_reaches_the_waiter():
    """Whoever submits gets what the engine returned."""

    async def body(queue: CompileQueue, engine: Engine) -> None:
        waiter = queue.submit(job("a"))
        engine.finish("a")
        assert await waiter == CompileOutcome(key=SegmentKey("a"), ready=True)

    with_queue(body)


def test_jobs_run_one_at_a_time_in_order_of_arrival():
    """A compile starts when the one before it has ended."""

    async def body(queue: CompileQueue, engine: Engine) -> None:
        waiters = [queue.submit(job(name)) for name in "cab"]
        await settle()
        assert engine.started == ["c"]
        for name in "bac":
            engine.finish(name)
        await asyncio.gather(*waiters)
        assert engine.started == ["c", "a", "b"]

    with_queue(body)


def test_full_queue_refuses():
    """Jobs waiting and running together stay within the bound, and a free place is used again."""

    async def body(queue: CompileQueue, engine: Engine) -> None:
        first, second = queue.submit(job("a")), queue.submit(job("b"))
        await settle()
        assert queue.submit(job("c")) is None
        assert (len(queue), SegmentKey("c") in queue) == (2, False)
        engine.finish("a")
        await first
        await settle()
        third = queue.submit(job("c"))
        assert third is not None
        engine.finish("b")
        engine.finish("c")
        assert (await second).ready
        assert (await third).ready

    with_queue(body, max_depth=2)


@pytest.mark.parametrize("is_running", [False, True])
def test_same_key_is_one_job(is_running):
    """A segment that waits or runs is joined, even where the queue is full."""

    async def body(queue: CompileQueue, engine: Engine) -> None:
        first = queue.submit(job("a"))
        if is_running:
            await settle()
        second = queue.submit(job("a"))
        assert len(queue) == 1
        engine.finish("a")
        assert await first == await second
        assert engine.started == ["a"]

    with_queue(body, max_depth=1)


def test_finished_key_is_a_new_job():
    """A segment that was evicted since can be compiled again."""

    async def body(queue: CompileQueue, engine: Engine) -> None:
        engine.finish("a")
        await queue.submit(job("a"))
        await settle()
        await queue.submit(job("a"))
        assert engine.started == ["a", "a"]

    with_queue(body)


def test_membership_follows_the_job():
    """A key is in the queue from its submission to its end."""

    async def body(queue: CompileQueue, engine: Engine) -> None:
        assert SegmentKey("a") not in queue
        waiter = queue.submit(job("a"))
        assert SegmentKey("a") in queue
        await settle()
        assert SegmentKey("a") in queue
        engine.finish("a")
        await waiter
        await settle()
        assert SegmentKey("a") not in queue

    with_queue(body)


@pytest.mark.parametrize("is_running", [False, True])
def test_waiter_that_gives_up_does_not_end_the_job(is_running):
    """A client that disconnects costs the others who wait for the same segment nothing."""

    async def body(queue: CompileQueue, engine: Engine) -> None:
        async def wait() -> CompileOutcome:
            return await queue.submit(job("a"))

        one, other = asyncio.create_task(wait()), asyncio.create_task(wait())
        await (settle() if is_running else asyncio.sleep(0))
        one.cancel()
        await asyncio.wait([one])
        assert one.cancelled()
        assert SegmentKey("a") in queue
        engine.finish("a")
        assert (await other).ready

    with_queue(body)


def test_job_that_nobody_waits_for_still_runs():
    """A background compile needs no waiter."""

    async def body(queue: CompileQueue, engine: Engine) -> None:
        queue.submit(job("a")).cancel()
        engine.finish("a")
        await settle()
        assert engine.started == ["a"]

    with_queue(body)


def test_failure_reaches_all_waiters_and_the_queue_goes_on():
    """One compile that fails is the failure of those who wait for it, and of nobody else."""

    async def body(queue: CompileQueue, engine: Engine) -> None:
        waiters = [queue.submit(job("a")), queue.submit(job("a"))]
        behind = queue.submit(job("b"))
        engine.fail("a", RuntimeError("out of memory"))
        for waiter in waiters:
            with pytest.raises(RuntimeError, match="out of memory"):
                await waiter
        assert SegmentKey("a") not in queue
        engine.finish("b")
        assert (await behind).ready

    with_queue(body)


def test_queue_works_again_after_it_was_empty():
    """Jobs that come after a pause are run like the first."""

    async def body(queue: CompileQueue, engine: Engine) -> None:
        for name in "ab":
            engine.finish(name)
            assert (await queue.submit(job(name))).key == name
            await settle()
            assert len(queue) == 0

    with_queue(body)


def test_close_cancels_what_waits_and_what_runs():
    """Nobody waits for an engine that is gone."""

    async def body(queue: CompileQueue, engine: Engine) -> None:
        waiters = [queue.submit(job("a")), queue.submit(job("b"))]
        await settle()
        queue.close()
        assert len(queue) == 0
        await settle()
        assert all(waiter.cancelled() for waiter in waiters)
        assert engine.num_running == 0
        assert engine.started == ["a"]

    with_queue(body)


def test_close_of_an_idle_queue_is_quiet():
    """An engine that never compiled shuts down as well."""

    async def body(queue: CompileQueue, engine: Engine) -> None:
        queue.close()
        queue.close()
        assert engine.started == []

    with_queue(body)


def test_failure_that_nobody_waits_for_is_quiet():
    """A background compile that fails warns of no lost exception."""

    async def body(queue: CompileQueue, engine: Engine) -> None:
        warnings: list[str] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: warnings.append(context["message"])
        )
        queue.submit(job("a"))
        engine.fail("a", RuntimeError("out of memory"))
        await settle()
        gc.collect()
        assert warnings == []

    with_queue(body)


def test_job_that_the_engine_cancels_ends_for_its_waiters_and_the_queue_goes_on():
    """A compile whose request the engine cancels hangs neither its callers nor the others."""

    async def body(queue: CompileQueue, engine: Engine) -> None:
        first, behind = queue.submit(job("a")), queue.submit(job("b"))
        await settle()
        engine.ends["a"].cancel()
        await settle()
        assert first.done()
        engine.finish("b")
        await settle()
        assert behind.done()

    with_queue(body)


def test_jobs_let_go_end_or_never_run():
    """After `let_go` nothing of its keys is compiled: waiting jobs are told, a running one ends."""

    async def body(queue: CompileQueue, engine: Engine) -> None:
        running, waiting, other = (
            queue.submit(job("a")),
            queue.submit(job("b")),
            queue.submit(job("c")),
        )
        assert running is not None
        assert waiting is not None
        assert other is not None
        await settle()
        letting_go = asyncio.create_task(
            queue.let_go([SegmentKey("a"), SegmentKey("b"), SegmentKey("unknown")])
        )
        await settle()
        assert not letting_go.done(), "a running job was not waited for"
        engine.finish("a")
        await letting_go
        assert (await running).ready
        assert (await waiting).reason == "dropped"
        engine.finish("c")
        assert (await other).ready
        assert engine.started == ["a", "c"]

    with_queue(body)
