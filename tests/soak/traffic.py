"""The stream: what is asked, by whom, under which setting, and who hangs up when. From a seed."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from tests.models.engine import random_ids

from blend_engine.protocol import BlendParams, Policy
from blend_engine.segments import SegmentContext, SegmentSpan

TENANTS = ("alice", "bob", "carol")
MIN_SEGMENT_TOKENS = 32

_NUM_DOCUMENTS, _NUM_SYSTEMS = 36, 4
_SETTINGS = (
    (Policy.NONE, 0.0, 1),
    (Policy.SINKS, 0.1, 1),
    (Policy.SINKS, 0.5, 1),
    (Policy.HKVD, 0.2, 1),
    (Policy.HKVD, 0.4, 2),
    (Policy.HKVD, 1.0, 1),
)
_MEMORY = 48
"""Earlier prompts that may be asked again or continued."""


LEAVES_IN_PASS = "p"
"""Ends the names of requests that are aborted while their pass is spread over steps."""


class Kind(Enum):
    """What a client does."""

    CHAT = auto()
    COMPILE = auto()
    DROP = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A leading segment or a document."""

    context: SegmentContext
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One client's wish.

    Args:
        name: Unique in the soak; vLLM's request id begins with it.
        kind: What it is.
        tenant: Who asks.
        token_ids: The prompt; of chats.
        segments: Spans that may be reused. Empty for a plain request, which carries no parameters.
        setting: Policy, ratio, check layer; None where the answer is to be exact.
        strict: Whether cold documents end it.
        max_tokens: Decoded at most, and without abort exactly.
        abort_after_s: Hang up that long after asking.
        abort_after_tokens: Hang up when so many tokens are there.
        segment: To compile or to drop.
    """

    name: str
    kind: Kind
    tenant: str
    token_ids: tuple[int, ...] = ()
    segments: tuple[SegmentSpan, ...] = ()
    setting: tuple[Policy, float, int] | None = None
    strict: bool = False
    max_tokens: int = 1
    abort_after_s: float | None = None
    abort_after_tokens: int | None = None
    segment: Segment | None = None

    @property
    def is_aborted(self) -> bool:
        """Whether the client means to hang up."""
        return self.abort_after_s is not None or self.abort_after_tokens is not None

    @property
    def salt(self) -> str:
        """Exact and blended requests, and tenants, never share vLLM's blocks."""
        return f"{self.tenant}/{self.setting or 'exact'}"

    @property
    def params(self) -> BlendParams | None:
        """What the engine is told besides the prompt."""
        if not self.segments:
            return None
        policy, ratio, check_layer = self.setting or (Policy.NONE, 0.0, 1)
        return BlendParams(
            plan_id=self.name,
            tenant=self.tenant,
            segments=self.segments,
            policy=policy,
            recompute_ratio=ratio,
            check_layer=check_layer,
            approximate_salt=self.setting is not None,
            strict=self.strict,
        )


class Traffic:
    """Draws requests."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._documents = [
            _segment(SegmentContext.FREE, 1000 + index, self._random.randint(20, 150))
            for index in range(_NUM_DOCUMENTS)
        ]
        self._systems = [
            _segment(SegmentContext.PREFIX, 2000 + index, length)
            for index, length in enumerate((20, 40, 66, 101)[:_NUM_SYSTEMS])
        ]
        self._earlier: list[Request] = []

    def draw(self, num_requests: int) -> Iterator[Request]:
        """The stream."""
        for number in range(num_requests):
            name = f"r{number:06d}"
            chance = self._random.random()
            if chance < 0.06:
                yield self._on_segment(name, Kind.COMPILE)
            elif chance < 0.075:
                yield self._on_segment(name, Kind.DROP)
            else:
                yield self._chat(name)

    def _on_segment(self, name: str, kind: Kind) -> Request:
        segment = self._random.choice([*self._documents, *self._systems])
        return Request(name=name, kind=kind, tenant=self._tenant(), segment=segment)

    def _chat(self, name: str) -> Request:
        draw = self._random
        chance = draw.random()
        if self._earlier and chance < 0.3:
            request = self._again(draw.choice(self._earlier))
        elif chance < 0.45:
            request = self._plain()
        else:
            request = self._with_documents()
        request = replace(request, name=name, max_tokens=self._length())
        if len(self._earlier) == _MEMORY:
            self._earlier.pop(draw.randrange(_MEMORY))
        self._earlier.append(request)
        if draw.random() < 0.2:
            return self._hung_up(request)
        return request

    def _length(self) -> int:
        draw = self._random
        return draw.randint(40, 90) if draw.random() < 0.1 else draw.randint(1, 10)

    def _hung_up(self, request: Request) -> Request:
        chance = self._random.random()
        if chance < 0.3 and request.segments:
            return replace(request, name=request.name + LEAVES_IN_PASS, abort_after_s=3.0)
        if chance < 0.7:
            return replace(request, abort_after_s=self._random.uniform(0.0, 2.0))
        more = request.max_tokens + 5
        return replace(
            request, max_tokens=more, abort_after_tokens=self._random.randrange(1, more - 2)
        )

    def _again(self, earlier: Request) -> Request:
        """The same, the same with more behind it, or the same under another setting."""
        chance = self._random.random()
        if chance < 0.35:
            return earlier
        if chance < 0.75 and len(earlier.token_ids) < 500:
            return replace(earlier, token_ids=(*earlier.token_ids, *self._text(5, 60)))
        if not earlier.segments:
            return replace(earlier, tenant=self._tenant())
        setting = None if earlier.setting is None else self._random.choice(_SETTINGS)
        return replace(earlier, tenant=self._tenant(), setting=setting)

    def _plain(self) -> Request:
        """A chat without documents, with or without a leading segment that may be reused."""
        ids, spans = self._opening()
        is_bare = self._random.random() < 0.5
        return Request(
            name="",
            kind=Kind.CHAT,
            tenant=self._tenant(),
            token_ids=(*ids, *self._text(5, 120)),
            segments=() if is_bare else tuple(spans),
        )

    def _with_documents(self) -> Request:
        draw = self._random
        ids, spans = self._opening()
        for number in range(draw.choice((1, 1, 2, 2, 3))):
            # The head of the list is asked for most.
            index = min(int(draw.expovariate(1 / 8)), _NUM_DOCUMENTS - 1)
            document = self._documents[index].token_ids
            ids += random_ids(3000 + number, 7)
            spans.append(_span(SegmentContext.FREE, len(ids), document))
            ids += document
        ids += self._text(3, 50)
        mode = draw.choices(("auto", "strict", "off"), (8, 1, 1))[0]
        is_off = mode == "off"
        return Request(
            name="",
            kind=Kind.CHAT,
            tenant=self._tenant(),
            token_ids=tuple(ids),
            segments=tuple(spans[:1] if is_off else spans),
            setting=None if is_off else draw.choice(_SETTINGS),
            strict=mode == "strict",
        )

    def _opening(self) -> tuple[list[int], list[SegmentSpan]]:
        system = self._random.choice(self._systems).token_ids
        return list(system), [_span(SegmentContext.PREFIX, 0, system)]

    def _tenant(self) -> str:
        return self._random.choices(TENANTS, (6, 3, 1))[0]

    def _text(self, least: int, most: int) -> list[int]:
        return random_ids(self._random.randrange(1 << 30), self._random.randint(least, most))


def _segment(context: SegmentContext, seed: int, length: int) -> Segment:
    return Segment(context=context, token_ids=tuple(random_ids(seed, length)))


def _span(context: SegmentContext, start: int, token_ids: Sequence[int]) -> SegmentSpan:
    return SegmentSpan(start=start, end=start + len(token_ids), context=context)
