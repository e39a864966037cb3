"""One prompt under one arm: cached documents, a selection recomputed, teacher-forced logits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blend_engine.quality.compiling import CompiledDocument
from blend_engine.quality.model import QualityModel, concatenated
from blend_engine.quality.state import KvState, Written


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Token ids and where the documents stand.

    Args:
        ids_T: The whole prompt.
        documents: Half-open ranges, in order.
    """

    ids_T: Tensor
    documents: tuple[tuple[int, int], ...]

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.ids_T)

    @property
    def question_start(self) -> int:
        """Where the last document ends."""
        return self.documents[-1][1]

    @property
    def reusable(self) -> Tensor:
        """Positions of all documents' tokens."""
        return concatenated(self.documents)

    @property
    def fresh(self) -> Tensor:
        """Positions of everything else."""
        is_fresh = torch.ones(self.num_tokens, dtype=torch.bool)
        is_fresh[self.reusable] = False
        return is_fresh.nonzero().flatten()


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Full prefill of one prompt and its greedy continuation.

    Args:
        state: Cache of prompt and continuation.
        continuation_S: Greedy token ids.
        logits_SV: The logits they were taken from, fp32.
        last: What leaves the last layer at the prompt's last token, ``[1, 1, D]``.
    """

    state: KvState
    continuation_S: Tensor
    logits_SV: Tensor
    last: Tensor


def full_prefill(
    model: QualityModel, prompt: Prompt, num_steps: int, *, num_slots: int | None = None
) -> Reference:
    """Compute everything, then decode greedily.

    Args:
        model: The model.
        prompt: The prompt.
        num_steps: Tokens to decode, at least 1.
        num_slots: Of the cache; as many as that takes by default.
    """
    total = num_slots or prompt.num_tokens + num_steps - 1
    state = model.state(torch.arange(total, device=model.device))
    hidden = model.run(prompt.ids_T, state, torch.arange(prompt.num_tokens))
    last = hidden[:, -1:].clone()
    steps = [model.logits(last)[0]]
    ids = [steps[0].argmax()]
    for index in range(num_steps - 1):
        slot = torch.tensor([prompt.num_tokens + index])
        hidden = model.run(ids[-1][None], state, slot)
        steps.append(model.logits(hidden)[0])
        ids.append(steps[-1].argmax())
    return Reference(
        state=state,
        continuation_S=torch.stack(ids).cpu(),
        logits_SV=torch.stack(steps),
        last=last,
    )


def loaded(
    model: QualityModel, prompt: Prompt, compiled: Sequence[CompiledDocument], num_slots: int
) -> KvState:
    """A cache that holds the documents where they stand in the prompt, and nothing else."""
    state = model.state(torch.arange(num_slots, device=model.device))
    for (start, end), document in zip(prompt.documents, compiled, strict=True):
        keys, values = document.at(model, start)
        state.k_LHND[:, :, start:end] = keys
        state.v_LHND[:, :, start:end] = values
    return state


Repair = Callable[[KvState, Tensor], Written]
"""Makes a cache's hook, given the cache as loaded and the slots that will be computed."""


def blend(
    model: QualityModel,
    prompt: Prompt,
    state: KvState,
    selected: Tensor,
    *,
    mask: Callable[[Tensor], Tensor] | None = None,
    repair: Repair | None = None,
) -> Tensor:
    """Compute the fresh tokens and the selected ones, in place of what the cache holds.

    Args:
        model: The model.
        prompt: The prompt.
        state: From `loaded`; changed.
        selected: Positions inside documents.
        mask: Another mask than the exact one, from the sorted positions.
        repair: What else changes in the cache, layer by layer.

    Returns:
        What leaves the last layer at the prompt's last token, ``[1, 1, D]``.
    """
    is_computed = torch.zeros(prompt.num_tokens, dtype=torch.bool)
    is_computed[prompt.fresh] = True
    is_computed[selected.cpu()] = True
    slots = is_computed.nonzero().flatten()
    hidden = model.run(
        prompt.ids_T[slots],
        state,
        slots,
        mask_QN=mask(slots) if mask else None,
        on_write=repair(state, slots) if repair else None,
    )
    return hidden[:, -1:]


def forced_logits(
    model: QualityModel, prompt: Prompt, state: KvState, last: Tensor, continuation_S: Tensor
) -> Tensor:
    """fp32 logits ``[S, V]`` of a continuation's tokens, each behind those before it.

    Args:
        model: The model.
        prompt: The prompt.
        state: Its cache; slots behind the prompt are overwritten.
        last: From `blend`.
        continuation_S: Ids; the last one is never fed.
    """
    first = model.logits(last)
    if len(continuation_S) == 1:
        return first
    slots = torch.arange(prompt.num_tokens, prompt.num_tokens + len(continuation_S) - 1)
    hidden = model.run(continuation_S[:-1], state, slots)
    return torch.cat([first, model.logits(hidden)])
