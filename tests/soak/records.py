"""What the engine's process writes down while the soak runs, for the process that checks it."""

from dataclasses import dataclass, field

from blend_engine.protocol import Policy
from blend_engine.segments import SegmentContext


@dataclass(slots=True, kw_only=True)
class LoadedHit:
    """A stored segment, or what is left of it, that a pass was told to load."""

    start: int
    end: int
    offset: int
    segment_tokens: int
    segment_index: int
    context: SegmentContext


@dataclass(slots=True, kw_only=True)
class PassRecord:
    """A pass as it was ordered, and what became of it.

    Args:
        pass_id: The order's.
        covered_end: One past the last position that it fills.
        num_hazards: Tokens of vLLM's own hit that it computes for itself, since their blocks are
            written only in the same step.
        hits: To be loaded.
        policy: Which of their tokens are recomputed.
        ratio: How many.
        check_layer: By the deviation of which layer.
        captured: For a compile, whether the segment is stored; None before the end.
        error: Why not.
        failed: Segments that were computed after all; None before the end.
        counts: Reused, recomputed and exact tokens as the worker counted them.
    """

    pass_id: int
    covered_end: int
    num_hazards: int
    hits: list[LoadedHit]
    policy: Policy
    ratio: float
    check_layer: int
    is_compile: bool
    captured: bool | None = None
    error: str | None = None
    failed: tuple[int, ...] | None = None
    counts: tuple[int, int, int] = (0, 0, 0)


@dataclass(slots=True, kw_only=True)
class Admission:
    """A request from where vLLM gave it blocks to its end or its preemption.

    Args:
        number: In order of admission.
        request_id: Whose it is.
        salt: Under which vLLM looks for blocks.
        num_preemptions: How often it was preempted before.
        token_ids: Prompt and, once it has ended, all that was generated.
        num_known: How many of them were there at the start; the others were sampled meanwhile.
        num_local: Tokens found in vLLM's own cache.
        origins: Per block of those, by which admission it was filled.
        blocks: Its blocks.
        pass_record: The pass that filled what follows, if there was one.
        compiles: Tenant, context and ids of the segment, where it makes one.
    """

    number: int
    request_id: str
    salt: str
    num_preemptions: int
    token_ids: list[int]
    num_known: int
    num_local: int
    blocks: list[int]
    num_external: int = 0
    origins: list[int] = field(default_factory=list)
    pass_record: PassRecord | None = None
    compiles: tuple[str, SegmentContext, tuple[int, ...]] | None = None
    is_over: bool = False


@dataclass(slots=True, kw_only=True)
class Injected:
    """What was done to one pass.

    Args:
        bad_loads: Hits whose stored KV was spoilt, or for which there was no memory.
        raised: Whether the model call was made to raise, so that no hit could be used.
        no_slab: Whether there was no memory for a compile's slab.
    """

    bad_loads: int = 0
    raised: bool = False
    no_slab: bool = False


@dataclass(slots=True, kw_only=True)
class Chapter:
    """All of that since the last time.

    Args:
        admissions: In order of admission; all of them have ended.
        injected: By pass.
        totals: How many faults of each kind were injected since the start.
        kept: Admissions whose blocks may still be found in vLLM's cache.
        problems: What must not be, in words.
        num_preemptions: Since the start.
    """

    admissions: list[Admission]
    injected: dict[int, Injected]
    totals: dict[str, int]
    kept: set[int]
    problems: list[str]
    num_preemptions: int


@dataclass(slots=True, kw_only=True)
class Rest:
    """The engine when nothing runs. All that is in `left` should be empty or zero.

    Args:
        left: What is held of requests, by name.
        rss_bytes: Memory of the process.
        load_failures: As counted by the engine.
        evictions: As counted by the engine.
    """

    left: dict[str, str]
    rss_bytes: int
    load_failures: int
    evictions: int
