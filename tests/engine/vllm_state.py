"""What a model of vLLM keeps: blocks and their prefix cache, requests, steps under way."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.engine.traced_memory import Owner, PassTrace
from tests.engine.vllm_steps import Request

from blend_engine.messages import BlendAck, PassOrder, PassOutcome


class BlockPool:
    """Blocks with counted users; free ones keep their contents until they are given out again.

    Args:
        num_blocks: Blocks in all.
        block_size: Tokens per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._free = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self._published: dict[tuple[str, tuple[int, ...]], int] = {}
        self._name_of: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.num_users: Counter[int] = Counter()

    def hit(self, salt: str, token_ids: Sequence[int]) -> list[int]:
        """The longest run of published blocks that leaves a token to compute."""
        blocks = []
        for end in range(self._block_size, len(token_ids), self._block_size):
            block = self._published.get((salt, tuple(token_ids[:end])))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def take(self, shared: Sequence[int], num_new: int) -> list[int] | None:
        """Use blocks that were hit and new ones; None where too few are free."""
        if num_new > sum(block not in shared for block in self._free):
            return None
        for block in shared:
            self._free.pop(block, None)
        new = [self._free.popitem(last=False)[0] for _ in range(num_new)]
        for block in new:
            self._published.pop(self._name_of.pop(block, ("", ())), None)
        self.num_users.update([*shared, *new])
        return new

    def publish(self, salt: str, token_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """Let others hit the full blocks of `token_ids`."""
        for index in range(len(token_ids) // self._block_size):
            name = salt, tuple(token_ids[: (index + 1) * self._block_size])
            if name not in self._published and block_ids[index] not in self._name_of:
                self._published[name] = block_ids[index]
                self._name_of[block_ids[index]] = name

    @property
    def num_free(self) -> int:
        return len(self._free)

    def forget(self) -> None:
        """Let nobody hit what was published so far, as `reset_prefix_cache` does."""
        self._published.clear()
        self._name_of.clear()

    def release(self, block_ids: Sequence[int]) -> None:
        for block in reversed(block_ids):
            self.num_users[block] -= 1
            if self.num_users[block] == 0:
                self._free[block] = None


@dataclass(eq=False, slots=True)
class Live:
    """A request inside vLLM.

    Args:
        request: What the connector sees of it.
        tenant: Whose it is.
        salt: Whom it shares blocks with.
        num_outputs: Tokens to sample.
        tokens: Prompt and outputs, those that the scheduler has not heard of included.
        num_heard: How many tokens the scheduler knows.
        block_ids: What it holds.
        num_local: Tokens that it hit in others' blocks when it was admitted.
        num_computed: Tokens with KV once all steps built so far have run.
        num_in_flight: Steps with it that the scheduler has not heard of.
        is_known: Whether the workers have met it.
        is_loading: Whether it waits for an asynchronous pass.
        is_over: Whether it has ended or was aborted.
    """

    request: Request
    tenant: str
    salt: str
    num_outputs: int
    tokens: list[int] = field(default_factory=list)
    num_heard: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_local: int = 0
    num_computed: int = 0
    num_in_flight: int = 0
    is_known: bool = False
    is_loading: bool = False
    is_over: bool = False

    def __post_init__(self) -> None:
        assert self.request.prompt_token_ids
        self.tokens = list(self.request.prompt_token_ids)
        self.num_heard = len(self.tokens)

    @property
    def owner(self) -> Owner:
        return Owner(self.request.request_id, self.tenant)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids or ())

    @property
    def num_to_compute(self) -> int:
        """Tokens whose KV is still needed; nothing follows the last output."""
        return min(len(self.tokens), self.num_prompt + self.num_outputs - 1) - self.num_computed


@dataclass(frozen=True, slots=True)
class Ended:
    """A pass that has ended: with a trace, unless it was cancelled before it began."""

    live: Live
    order: PassOrder | None
    outcome: PassOutcome
    trace: PassTrace


@dataclass(slots=True)
class Step:
    """A step that was run and not heard of."""

    scheduled: list[Live]
    sampled: list[Live]
    ended: list[Ended]
    received: set[str]
    ack: BlendAck


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that was given blocks, and how many tokens a pass is to bring."""

    live: Live
    num_external: int
    is_async: bool
