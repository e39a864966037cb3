"""From an assembled prompt to what the engine is told: which spans, which policy, which salt."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blend_engine.ports import BlendEngine
from blend_engine.protocol import BlendParams, FallbackReason, Policy
from blend_engine.segments import SegmentContext, SegmentSpan, segment_key
from blend_gateway.outcome import Plan, PlannedDocument, cold_documents
from blend_gateway.protocol import BlendMode, ChatCall, check_ratio
from blend_gateway.salts import blend_setting, derive_salt
from blend_gateway.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDocument:
    """A document's place in a prompt: the half-open token range ``[start, end)``."""

    start: int
    end: int
    label: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt's token ids, and where its reusable spans are.

    Args:
        token_ids: The whole prompt.
        leading_end: End of the leading segment, which starts at 0; 0 where there is none.
        documents: In order of place.
    """

    token_ids: list[int]
    leading_end: int = 0
    documents: tuple[PromptDocument, ...] = ()

    def cut(self, start: int, end: int) -> "Prompt":
        """What is left after truncation to ``[start, end)``; a span that is cut into is lost."""
        return Prompt(
            token_ids=self.token_ids[start:end],
            leading_end=self.leading_end if start == 0 and self.leading_end <= end else 0,
            documents=tuple(
                replace(document, start=document.start - start, end=document.end - start)
                for document in self.documents
                if start <= document.start and document.end <= end
            ),
        )


def make_plan(call: ChatCall, prompt: Prompt, engine: BlendEngine, settings: Settings) -> Plan:
    """Decide how a prompt goes to the engine.

    Raises:
        InvalidRequest: It asks for a share to recompute, and the server's policy is `none`.
        DocumentCold: Strict mode, and a document's KV is not resident.
    """
    if call.blend.policy is None and call.blend.mode is not BlendMode.OFF:
        check_ratio(settings.policy, call.blend.recompute_ratio, whose=" of this server")
    exact_salt = derive_salt(settings.salt_secret, call.tenant)
    documents = tuple(_looked_up(call, prompt, engine))
    refusal = _refusal(call, engine)
    if refusal is not None:
        plan = Plan(
            salt=exact_salt,
            documents=tuple(replace(document, segment_index=None) for document in documents),
            fallback_reason=refusal if documents else None,
        )
        if call.blend.mode is BlendMode.STRICT and documents:
            raise cold_documents(documents, range(len(documents)), because=str(refusal))
        return plan
    spans = _spans(prompt, documents, engine)
    has_short = any(document.segment_index is None for document in documents)
    plan = Plan(
        salt=exact_salt,
        documents=documents,
        fallback_reason=FallbackReason.TOO_SHORT if has_short else None,
    )
    if not spans:
        return plan
    blends = any(document.segment_index is not None for document in documents)
    params = _params(call, spans, settings, blends=blends)
    if params.strict:
        _require_resident(documents, engine)
    if blends:
        salt = derive_salt(settings.salt_secret, call.tenant, blend_setting(params))
        return replace(plan, salt=salt, params=params)
    return replace(plan, params=params)


def _refusal(call: ChatCall, engine: BlendEngine) -> FallbackReason | None:
    """Why nothing at all is looked up for this request."""
    if call.blend.mode is BlendMode.OFF:
        return FallbackReason.OFF
    if engine.unsupported_reason is not None:
        return FallbackReason.UNSUPPORTED_MODEL
    if call.payload.get("prompt_logprobs") is not None:
        return FallbackReason.PROMPT_LOGPROBS
    return None


def _looked_up(call: ChatCall, prompt: Prompt, engine: BlendEngine) -> Sequence[PlannedDocument]:
    """The prompt's documents; those long enough get the index of their span."""
    index = int(_has_leading(prompt, engine))
    planned = []
    for document in prompt.documents:
        num_tokens = document.end - document.start
        is_long = num_tokens >= engine.min_segment_tokens
        token_ids = prompt.token_ids[document.start : document.end]
        planned.append(
            PlannedDocument(
                label=document.label,
                num_tokens=num_tokens,
                key=segment_key(call.tenant.name, SegmentContext.FREE, token_ids),
                segment_index=index if is_long else None,
            )
        )
        index += is_long
    return planned


def _spans(
    prompt: Prompt, documents: Sequence[PlannedDocument], engine: BlendEngine
) -> tuple[SegmentSpan, ...]:
    spans = []
    if _has_leading(prompt, engine):
        spans.append(SegmentSpan(start=0, end=prompt.leading_end, context=SegmentContext.PREFIX))
    for place, planned in zip(prompt.documents, documents, strict=True):
        if planned.segment_index is not None:
            spans.append(SegmentSpan(start=place.start, end=place.end, context=SegmentContext.FREE))
    return tuple(spans)


def _has_leading(prompt: Prompt, engine: BlendEngine) -> bool:
    return prompt.leading_end >= engine.min_segment_tokens


def _params(
    call: ChatCall, spans: tuple[SegmentSpan, ...], settings: Settings, *, blends: bool
) -> BlendParams:
    asked = call.blend
    policy = settings.policy if asked.policy is None else asked.policy
    ratio = settings.recompute_ratio if asked.recompute_ratio is None else asked.recompute_ratio
    return BlendParams(
        plan_id=uuid.uuid4().hex,
        tenant=call.tenant.name,
        segments=spans,
        policy=policy,
        recompute_ratio=0.0 if policy is Policy.NONE else ratio,
        check_layer=settings.check_layer,
        approximate_salt=blends,
        strict=asked.mode is BlendMode.STRICT,
    )


def _require_resident(documents: Sequence[PlannedDocument], engine: BlendEngine) -> None:
    """Strict mode's first look, before anything is computed.

    Raises:
        DocumentCold: A document's KV is not resident.
    """
    cold = [
        index
        for index, document in enumerate(documents)
        if document.segment_index is not None and not engine.is_resident(document.key)
    ]
    if cold:
        raise cold_documents(documents, cold)
