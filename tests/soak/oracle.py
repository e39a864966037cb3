"""The oracle: every admission alone, from the model's weights and the plan that was recorded of it.

It shares no code with the engine, so what is wrong in the same way with and without neighbours is
found as well. Where vLLM found an admission's first blocks in its own cache, the KV in them is what
the admission that filled them has by *its* plan; so admissions are replayed in their order, and
their KV is kept as long as a block of it can still be found.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tests.real.reference_model import ReferenceModel
from tests.soak.records import Admission, LoadedHit, PassRecord
from torch import Tensor

from blend_engine.protocol import Policy
from blend_engine.segments import SegmentContext

LOGIT_MARGIN = 1e-3
"""Two logits closer than this are a tie. fp32 answers of the engine and of the oracle differ by
about 1e-5; logits of the tiny model lie about 0.2 apart."""
SCORE_MARGIN = 1e-3
"""Deviations at the edge of HKVD's choice closer than this part of their value are a tie."""


@dataclass(slots=True)
class KV:
    """Keys and values ``[L, T, H, D]`` of a whole sequence."""

    keys: Tensor
    values: Tensor
    is_doubtful: bool = False
    """Whether the engine may have decided a tie otherwise, here or in blocks this stands on."""


@dataclass(slots=True)
class Verdict:
    """What an admission should have done.

    Args:
        wrong: Index of the first generated token that is neither the best nor tied with it.
        num_ties: Tokens that are not the best but tied.
        num_selected: Hit tokens that its pass recomputes.
        is_doubtful: Whether a tie in HKVD's choice may excuse a wrong token.
    """

    wrong: int | None
    num_ties: int
    num_selected: int
    is_doubtful: bool


@dataclass
class Oracle:
    """Replays admissions in their order.

    Args:
        model: The weights.
        ballast: Ids that `free` segments are compiled behind.
        block_size: Tokens per block of vLLM's cache.
    """

    model: ReferenceModel
    ballast: list[int]
    block_size: int
    _kv: dict[int, KV] = field(default_factory=dict)
    _canonical: dict[tuple[SegmentContext, tuple[int, ...]], KV] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path, ballast: list[int], block_size: int) -> "Oracle":
        return cls(ReferenceModel.load(folder), ballast, block_size)

    def forget(self, kept: set[int]) -> None:
        """Drop the KV of all other admissions."""
        self._kv = {number: kv for number, kv in self._kv.items() if number in kept}

    @torch.inference_mode()
    def replay(self, admission: Admission) -> Verdict:
        """Replay one; those whose blocks it stands on were replayed before."""
        ids = torch.tensor(admission.token_ids)
        kv = self._empty(len(ids))
        self._take_blocks(kv, admission)
        fresh = torch.zeros(len(ids), dtype=torch.bool)
        fresh[admission.num_local :] = True
        num_selected = 0
        if admission.pass_record is not None:
            num_selected = self._load(kv, admission.pass_record, ids, fresh)
        hidden = self._forward(ids, torch.nonzero(fresh).flatten(), kv)
        self._kv[admission.number] = kv
        num_new = len(ids) - admission.num_known
        if num_new == 0:
            return Verdict(None, 0, num_selected, kv.is_doubtful)
        # The last token has no successor to be checked.
        wrong, num_ties = self._check(hidden[-num_new - 1 : -1], ids[admission.num_known :])
        return Verdict(wrong, num_ties, num_selected, kv.is_doubtful)

    def _check(self, hidden_SD: Tensor, token_ids: Tensor) -> tuple[int | None, int]:
        logits_SV = self.model._norm(hidden_SD, "model.norm.weight")
        logits_SV = logits_SV @ self.model.weights["lm_head.weight"].T
        behind = logits_SV.amax(dim=-1) - logits_SV.gather(1, token_ids[:, None])[:, 0]
        # NaN is wrong, too.
        wrong = torch.nonzero(~(behind < LOGIT_MARGIN)).flatten()
        return (int(wrong[0]) if len(wrong) else None), int(
            ((behind > 0) & (behind < LOGIT_MARGIN)).sum()
        )

    def _take_blocks(self, kv: KV, admission: Admission) -> None:
        for index, origin in enumerate(admission.origins):
            source = self._kv[origin]
            rows = slice(index * self.block_size, (index + 1) * self.block_size)
            kv.keys[:, rows] = source.keys[:, rows]
            kv.values[:, rows] = source.values[:, rows]
            kv.is_doubtful |= source.is_doubtful

    def _load(self, kv: KV, record: PassRecord, ids: Tensor, fresh: Tensor) -> int:
        """Load, select; `fresh` then names what is left to compute."""
        hits = [hit for hit in record.hits if hit.segment_index not in (record.failed or ())]
        for hit in hits:
            self._load_hit(kv, hit, ids)
            fresh[hit.start : hit.end] = False
        blended = [hit for hit in hits if hit.context is not SegmentContext.PREFIX]
        selected = self._select(kv, record, blended, ids, fresh) if blended else []
        fresh[selected] = True
        return len(selected)

    def _load_hit(self, kv: KV, hit: LoadedHit, ids: Tensor) -> None:
        first = hit.start - hit.offset
        segment = tuple(ids[first : first + hit.segment_tokens].tolist())
        canonical = self.canonical(hit.context, segment)
        rows = slice(hit.offset, hit.offset + hit.end - hit.start)
        moved_from = len(self.ballast) if hit.context is SegmentContext.FREE else 0
        delta = torch.full((rows.stop - rows.start,), first - moved_from)
        for layer in range(self.model.num_layers):
            keys = canonical.keys[layer, rows]
            kv.keys[layer, hit.start : hit.end] = self.model.rotate(keys, delta)
        kv.values[:, hit.start : hit.end] = canonical.values[:, rows]

    def canonical(self, context: SegmentContext, segment: tuple[int, ...]) -> KV:
        """A segment's KV where it is compiled: a function of its ids only."""
        known = self._canonical.get((context, segment))
        if known is None:
            before = self.ballast if context is SegmentContext.FREE else []
            ids = torch.tensor([*before, *segment])
            whole = self._empty(len(ids))
            self._forward(ids, torch.arange(len(ids)), whole)
            part = slice(len(before), None)
            known = KV(whole.keys[:, part].clone(), whole.values[:, part].clone())
            self._canonical[context, segment] = known
        return known

    def _select(
        self, kv: KV, record: PassRecord, hits: Sequence[LoadedHit], ids: Tensor, fresh: Tensor
    ) -> list[int]:
        positions = [at for hit in hits for at in range(hit.start, hit.end)]
        if record.policy is Policy.NONE or record.ratio == 0.0:
            return []
        if record.policy is Policy.SINKS:
            return [
                at
                for hit in hits
                for at in range(hit.start, hit.end)
                if at - hit.start + hit.offset < math.ceil(record.ratio * hit.segment_tokens)
            ]
        if record.ratio == 1.0:
            return positions
        return self._highest(kv, record, positions, ids, fresh)

    def _highest(
        self, kv: KV, record: PassRecord, positions: list[int], ids: Tensor, fresh: Tensor
    ) -> list[int]:
        layer = min(record.check_layer, self.model.num_layers - 1)
        loaded = torch.tensor(positions)
        cached = kv.keys[layer, loaded].clone(), kv.values[layer, loaded].clone()
        in_range = fresh.clone()
        in_range[record.covered_end :] = False
        in_range[loaded] = True
        keys, values = self._forward_to(ids, torch.nonzero(in_range).flatten(), kv, layer)
        score = (keys[loaded] - cached[0]).square().sum((1, 2))
        score += (values[loaded] - cached[1]).square().sum((1, 2))
        count = math.ceil(record.ratio * len(positions))
        order = score.argsort(descending=True, stable=True)
        if count < len(order):
            edge, next_one = score[order[count - 1]], score[order[count]]
            kv.is_doubtful |= bool(edge - next_one <= SCORE_MARGIN * edge)
        return [int(at) for at in loaded[order[:count]]]

    # The model.

    def _empty(self, length: int) -> KV:
        model = self.model
        shape = (model.num_layers, length, model.num_kv_heads, model.head_dim)
        return KV(torch.full(shape, torch.nan), torch.full(shape, torch.nan))

    def _forward(self, ids: Tensor, positions: Tensor, kv: KV) -> Tensor:
        """Compute `positions` in place of what `kv` holds there; their last hidden states."""
        hidden = self.model.weights["model.embed_tokens.weight"][ids[positions]]
        for layer in range(self.model.num_layers):
            hidden = self._layer(layer, hidden, positions, kv)
        return hidden

    def _forward_to(
        self, ids: Tensor, positions: Tensor, kv: KV, stop: int
    ) -> tuple[Tensor, Tensor]:
        """As `_forward` for the layers below `stop`; the keys and values that it would have there.

        Rows are prompt positions; NaN where nothing was computed.
        """
        model = self.model
        hidden = model.weights["model.embed_tokens.weight"][ids[positions]]
        for layer in range(stop):
            hidden = self._layer(layer, hidden, positions, kv)
        x = model._norm(hidden, f"model.layers.{stop}.input_layernorm.weight")
        keys = torch.full_like(kv.keys[stop], torch.nan)
        values = torch.full_like(keys, torch.nan)
        keys[positions] = model.rotate(model._heads(stop, "k", x, model.num_kv_heads), positions)
        values[positions] = model._heads(stop, "v", x, model.num_kv_heads)
        return keys, values

    def _layer(self, layer: int, hidden: Tensor, positions: Tensor, kv: KV) -> Tensor:
        model = self.model
        x = model._norm(hidden, f"model.layers.{layer}.input_layernorm.weight")
        query = model.rotate(model._heads(layer, "q", x, model.num_heads), positions)
        key = model._heads(layer, "k", x, model.num_kv_heads)
        kv.keys[layer, positions] = model.rotate(key, positions)
        kv.values[layer, positions] = model._heads(layer, "v", x, model.num_kv_heads)
        end = int(positions[-1]) + 1
        group = model.num_heads // model.num_kv_heads
        seen_k, seen_v = (
            each[layer, :end].repeat_interleave(group, dim=1).transpose(0, 1)
            for each in (kv.keys, kv.values)
        )
        is_seen = torch.arange(end) <= positions[:, None]
        scores = torch.bmm(query.transpose(0, 1), seen_k.transpose(1, 2)) / model.head_dim**0.5
        scores.masked_fill_(~is_seen, -torch.inf)
        # A position that nobody has filled yet must not spoil those that do not look at it.
        out = torch.bmm(scores.softmax(dim=-1), seen_v.nan_to_num()).transpose(0, 1)
        weight = model.weights[f"model.layers.{layer}.self_attn.o_proj.weight"]
        hidden = hidden + out.flatten(1) @ weight.T
        return hidden + model._mlp(layer, hidden)
