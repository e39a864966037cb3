"""Faults, thrown at random into the engine's own process while it serves."""

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from tests.soak.records import Injected

from blend_engine.index import SegmentIndex
from blend_engine.model_pass import ModelPass
from blend_engine.pass_run import PassRun
from blend_engine.pool import SegmentPool, StoredSegment

_LOADS = {"damaged": 0.04, "truncated": 0.04, "evicted": 0.04, "slow": 0.04, "no_memory": 0.04}
_CALL_WITHOUT_MEMORY, _WORKER_RAISES = 0.006, 0.04
_NO_SLAB, _COMPILE_FAILS, _STORE_FULL = 0.08, 0.08, 0.08
_LONGEST_DELAY_S = 0.02


class Faults:
    """What was thrown, by pass and by kind. Nothing is, until `is_armed`."""

    def __init__(self, seed: int) -> None:
        self.totals: Counter[str] = Counter()
        self.problems: list[str] = []
        self.is_armed = False
        self._random = random.Random(seed)
        self._injected: dict[int, Injected] = {}
        self._pass_id: int | None = None
        self._spoilt: set[str] = set()

    def take(self) -> dict[int, Injected]:
        """By pass, since the last call."""
        taken, self._injected = self._injected, {}
        return taken

    def install(self) -> None:
        """Put them where the engine calls."""
        for name in ("advance", "finish"):
            _wrap(PassRun, name, self._in_pass)
        _wrap(SegmentPool, "get", self._get)
        _wrap(SegmentPool, "put", self._renew)
        _wrap(SegmentPool, "free", self._renew)
        _wrap(SegmentIndex, "reserve", self._reserve)
        _wrap(ModelPass, "load" if hasattr(ModelPass, "load") else "rotate", self._move)
        _wrap(ModelPass, "allocate", self._allocate)
        _wrap(ModelPass, "_call", self._call)
        for name in ("peek", "compute"):
            _wrap(ModelPass, name, self._raise)
        _wrap(ModelPass, "compute_and_capture", self._fail_compile)

    def _in_pass(self, original: Any, run: PassRun, *arguments: Any) -> Any:
        self._pass_id = run.pass_id
        try:
            return original(run, *arguments)
        finally:
            self._pass_id = None

    @property
    def _here(self) -> Injected:
        """Of the pass that is running."""
        assert self._pass_id is not None
        return self._injected.setdefault(self._pass_id, Injected())

    def _happens(self, kind: str, chance: float) -> bool:
        if not self.is_armed or self._random.random() >= chance:
            return False
        self.totals[kind] += 1
        return True

    # Loads.

    def _get(self, original: Any, pool: SegmentPool, key: Any) -> StoredSegment | None:
        stored: StoredSegment | None = original(pool, key)
        if self._pass_id is None:
            return stored
        if stored is not None and key not in self._spoilt:
            if self._happens("slow", _LOADS["slow"]):
                time.sleep(self._random.uniform(0, _LONGEST_DELAY_S))
            for kind, spoil in _SPOILERS.items():
                if self._happens(kind, _LOADS[kind]):
                    spoil(pool, key, stored, self._random)
                    self._spoilt.add(key)
                    break
        stored = original(pool, key)
        if key in self._spoilt:
            self._here.bad_loads += 1
        elif stored is None:
            self.problems.append(f"pass {self._pass_id} loads what was given up")
        return stored

    def _renew(self, original: Any, pool: SegmentPool, key: Any, *arguments: Any) -> Any:
        self._spoilt.discard(key)
        return original(pool, key, *arguments)

    def _move(self, original: Any, run: ModelPass, *arguments: Any, **options: Any) -> Any:
        # What is spoilt is not to get as far as this; a second fault would hide that.
        if self._pass_id is not None and self._happens("no_memory", _LOADS["no_memory"]):
            self._here.bad_loads += 1
            raise MemoryError("no memory to move a segment")
        return original(run, *arguments, **options)

    # Model calls. A pass is repeated once: a second failure in a row would be vLLM's to bear.

    def _call(self, original: Any, run: ModelPass, *arguments: Any, **options: Any) -> Any:
        if self._may_raise and self._happens("call_without_memory", _CALL_WITHOUT_MEMORY):
            self._here.raised = True
            raise RuntimeError("out of memory")
        return original(run, *arguments, **options)

    def _raise(self, original: Any, run: ModelPass, *arguments: Any, **options: Any) -> Any:
        if self._may_raise and self._happens("worker_raises", _WORKER_RAISES):
            self._here.raised = True
            raise ValueError("a bug")
        return original(run, *arguments, **options)

    @property
    def _may_raise(self) -> bool:
        return self._pass_id is not None and not (self._here.raised or self._here.no_slab)

    # Compiles.

    def _allocate(self, original: Any, run: ModelPass, *arguments: Any) -> Any:
        if self._may_raise and self._happens("no_slab", _NO_SLAB):
            self._here.no_slab = True
            raise MemoryError("no memory for a slab")
        return original(run, *arguments)

    def _fail_compile(self, original: Any, run: ModelPass, *arguments: Any) -> Any:
        if self._may_raise and self._happens("compile_fails", _COMPILE_FAILS):
            self._here.raised = True
            raise RuntimeError("a compile fails")
        return original(run, *arguments)

    def _reserve(self, original: Any, index: SegmentIndex, *arguments: Any) -> Any:
        return not self._happens("store_full", _STORE_FULL) and original(index, *arguments)


def _damage(pool: SegmentPool, key: Any, stored: StoredSegment, draw: random.Random) -> None:
    slab = draw.choice((stored.k_LTHD, stored.v_LTHD))
    place = tuple(draw.randrange(size) for size in slab.shape)
    with torch.inference_mode():
        slab[place] += 1.0


def _truncate(pool: SegmentPool, key: Any, stored: StoredSegment, draw: random.Random) -> None:
    shorter = (stored.k_LTHD[:, :-1].clone(), stored.v_LTHD[:, :-1].clone())
    pool.put(key, StoredSegment.seal(*shorter, stored.start))


def _evict(pool: SegmentPool, key: Any, stored: StoredSegment, draw: random.Random) -> None:
    pool.free(key)


_SPOILERS = {"damaged": _damage, "truncated": _truncate, "evicted": _evict}


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    def wrapped(this: Any, *arguments: Any, **options: Any) -> Any:
        return around(original, this, *arguments, **options)

    setattr(owner, name, wrapped)
