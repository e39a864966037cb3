"""Documents' KV, compiled behind whatever an experiment puts before them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blend_engine.quality.model import QualityModel
from blend_engine.quality.state import KvState


@dataclass(frozen=True, kw_only=True)
class CompiledDocument:
    """One document's keys, rotated for positions from `start` on, and its values.

    Args:
        k_LHTD: Keys.
        v_LHTD: Values.
        start: Position of its first token when it was compiled.
    """

    k_LHTD: Tensor
    v_LHTD: Tensor
    start: int

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.k_LHTD.shape[2]

    def at(self, model: QualityModel, start: int) -> tuple[Tensor, Tensor]:
        """Keys and values with the first token at `start`; a move of 0 copies."""
        if start == self.start:
            return self.k_LHTD, self.v_LHTD
        delta_T = torch.full((self.num_tokens,), start - self.start, dtype=torch.int64)
        return model.rotate(self.k_LHTD, delta_T), self.v_LHTD


@dataclass(frozen=True, kw_only=True)
class Preamble:
    """What stands before a document when it is compiled; its own KV is dropped.

    Args:
        state: Its keys and values.
        next_position: Where a document behind it begins.
        weight: How many times over each of its tokens counts in a document's attention, but for
            the first `num_sinks`; a longer preamble in small.
        num_sinks: Tokens that count once.
    """

    state: KvState
    next_position: int
    weight: float = 1.0
    num_sinks: int = 0


def prepare_preamble(
    model: QualityModel,
    ids_P: Tensor,
    *,
    positions_P: Tensor | None = None,
    next_position: int | None = None,
    weight: float = 1.0,
    num_sinks: int = 0,
) -> Preamble:
    """Compute a preamble.

    Args:
        model: The model.
        ids_P: Token ids; may be empty.
        positions_P: Increasing positions; from 0 by default.
        next_position: Right behind the last by default.
        weight: See `Preamble`.
        num_sinks: See `Preamble`.
    """
    length = len(ids_P)
    positions = torch.arange(length) if positions_P is None else positions_P
    state = model.state(positions.to(model.device))
    if length:
        model.run(ids_P, state, torch.arange(length))
    after = (int(positions[-1]) + 1 if length else 0) if next_position is None else next_position
    return Preamble(state=state, next_position=after, weight=weight, num_sinks=num_sinks)


def compile_documents(
    model: QualityModel,
    documents: Sequence[Tensor],
    preamble: Preamble,
    *,
    side_by_side: int | None = None,
) -> list[CompiledDocument]:
    """Compile each document right behind the preamble, none seeing another.

    Args:
        model: The model.
        documents: Ids of each.
        preamble: What they see.
        side_by_side: Documents in one run of the model; all on a GPU and one on a CPU by default.
    """
    group = side_by_side or (1 if model.device.type == "cpu" else len(documents))
    compiled: list[CompiledDocument] = []
    for first in range(0, len(documents), group):
        compiled += _compile_group(model, documents[first : first + group], preamble)
    return compiled


def _compile_group(
    model: QualityModel, documents: Sequence[Tensor], preamble: Preamble
) -> list[CompiledDocument]:
    before = preamble.state.num_slots
    lengths = [len(ids) for ids in documents]
    own = [preamble.next_position + torch.arange(length) for length in lengths]
    positions = torch.cat([preamble.state.positions_N.cpu(), *own]).to(model.device)
    state = model.state(positions)
    state.k_LHND[:, :, :before] = preamble.state.k_LHND
    state.v_LHND[:, :, :before] = preamble.state.v_LHND
    owner = torch.cat([torch.full((length,), index) for index, length in enumerate(lengths, 1)])
    owner_N = torch.cat([torch.zeros(before, dtype=torch.int64), owner]).to(model.device)
    slots = torch.arange(before, len(positions), device=model.device)
    allowed = (owner_N[None] == owner_N[slots][:, None]) | (owner_N[None] == 0)
    mask = allowed & (positions[None] <= positions[slots][:, None])
    if preamble.weight != 1.0:
        mask = _weighted(mask, preamble, before, model.dtype)
    model.run(torch.cat(list(documents)), state, slots, mask_QN=mask)
    compiled, at = [], before
    for length in lengths:
        rows = slice(at, at + length)
        compiled.append(
            CompiledDocument(
                k_LHTD=state.k_LHND[:, :, rows].clone(),
                v_LHTD=state.v_LHND[:, :, rows].clone(),
                start=preamble.next_position,
            )
        )
        at += length
    return compiled


def _weighted(mask: Tensor, preamble: Preamble, before: int, dtype: torch.dtype) -> Tensor:
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    bias[:, preamble.num_sinks : before] = math.log(preamble.weight)
    return bias.masked_fill(~mask, -torch.inf)


def averaged(
    model: QualityModel, versions: Sequence[Sequence[CompiledDocument]]
) -> list[CompiledDocument]:
    """The mean of several compiles of the same documents, keys moved to where the first stood."""
    result = []
    for document in zip(*versions, strict=True):
        start = document[0].start
        keys = torch.stack([each.at(model, start)[0].float() for each in document]).mean(0)
        values = torch.stack([each.v_LHTD.float() for each in document]).mean(0)
        result.append(
            CompiledDocument(
                k_LHTD=keys.to(model.dtype), v_LHTD=values.to(model.dtype), start=start
            )
        )
    return result
