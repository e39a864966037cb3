"""A Hugging Face decoder driven layer by layer over an editable cache, with exact masks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

from blend_engine.quality.state import CacheView, KvState, Written, empty_state

_ATTENTION = "blendgate_exact"
_FULL = "full_attention"
_SLIDING = "sliding_attention"

Observer = Callable[[int, Tensor, Tensor, float], None]
"""Sees one attention call: layer, queries ``[H, Q, D]``, keys ``[Hkv, N, D]``, scale."""


class UnlikeModel(ValueError):
    """The model's own forward is not what this module's loop over its layers gives."""


class QualityModel:
    """Any decoder whose layers are called as Llama's are: Llama, Qwen, Mistral, Gemma 3 and kin.

    Args:
        folder: Of a Hugging Face model.
        device: Where to run.
        dtype: Of weights and cache.

    Raises:
        UnlikeModel: Calling the layers one by one does not give the model's own logits.
    """

    def __init__(self, folder: Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32):
        AttentionInterface.register(_ATTENTION, self._attention)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=_ATTENTION
        )
        self.model.to(device).eval().requires_grad_(False)
        self.device, self.dtype = torch.device(device), dtype
        self._text = self.model.model
        config = self.model.config.get_text_config()
        self.num_layers: int = config.num_hidden_layers
        self.num_kv_heads: int = config.num_key_value_heads
        self.num_heads: int = config.num_attention_heads
        self.vocab_size: int = config.vocab_size
        self.head_dim: int = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        kinds = getattr(config, "layer_types", None) or [_FULL] * self.num_layers
        self.layer_types: tuple[str, ...] = tuple(kinds)
        self._window: int | None = getattr(config, "sliding_window", None)
        self._observer: Observer | None = None
        self._check()

    def state(self, positions_N: Tensor) -> KvState:
        """An empty cache with a slot for each position."""
        return empty_state(
            self.num_layers, self.num_kv_heads, self.head_dim, positions_N, self.dtype
        )

    def embed(self, ids_Q: Tensor) -> Tensor:
        """Hidden states ``[1, Q, D]`` that enter layer 0."""
        return self._text.embed_tokens(ids_Q[None].to(self.device))  # type: ignore[no-any-return]

    def layers(
        self,
        hidden: Tensor,
        state: KvState,
        slots_Q: Tensor,
        *,
        mask_QN: Tensor | None = None,
        first: int = 0,
        last: int | None = None,
        on_write: Written | None = None,
    ) -> Tensor:
        """Run layers ``first`` to ``last`` (exclusive) on some slots.

        Args:
            hidden: ``[1, Q, D]``, what enters layer `first`.
            state: The cache; the slots' keys and values are overwritten.
            slots_Q: Strictly increasing slots of the tokens.
            mask_QN: True where a token may attend; by position (kv <= q) where not given.
            first: First layer.
            last: One past the last layer.
            on_write: See `CacheView`.

        Returns:
            What leaves the last of them, ``[1, Q, D]``.
        """
        slots_Q = slots_Q.to(self.device)
        positions_Q = state.positions_N[slots_Q]
        end = state.num_slots if mask_QN is not None else int(slots_Q[-1]) + 1
        masks = self._masks(state, positions_Q, mask_QN, end)
        rotary = {kind: self._rotary(hidden, positions_Q[None], kind) for kind in set(masks)}
        view = CacheView(state=state, slots_Q=slots_Q, end=end, on_write=on_write)
        for index in range(first, self.num_layers if last is None else last):
            kind = self.layer_types[index]
            out = self._text.layers[index](
                hidden,
                attention_mask=masks[kind],
                position_embeddings=rotary[kind],
                position_ids=positions_Q[None],
                past_key_values=view,
            )
            hidden = out if isinstance(out, Tensor) else out[0]
        return hidden

    def logits(self, hidden: Tensor, rows: slice | Tensor = slice(None)) -> Tensor:
        """fp32 next-token logits ``[R, V]`` of some rows of what left the last layer."""
        out = self.model.lm_head(self._text.norm(hidden[0, rows]))
        cap = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)
        logits: Tensor = (torch.tanh(out / cap) * cap if cap else out).float()
        return logits

    def run(
        self,
        ids_Q: Tensor,
        state: KvState,
        slots_Q: Tensor,
        *,
        mask_QN: Tensor | None = None,
        on_write: Written | None = None,
    ) -> Tensor:
        """All layers; returns what leaves the last."""
        hidden = self.embed(ids_Q)
        return self.layers(hidden, state, slots_Q, mask_QN=mask_QN, on_write=on_write)

    def rotate(self, k_LHND: Tensor, delta_N: Tensor) -> Tensor:
        """Rotated keys moved by some positions each, every layer by its own base; in fp32."""
        out = torch.empty_like(k_LHND)
        for kind in set(self.layer_types):
            picked = [index for index, each in enumerate(self.layer_types) if each == kind]
            out[picked] = self.rotate_layer(picked[0], k_LHND[picked], delta_N)
        return out

    def rotate_layer(self, layer: int, k_HND: Tensor, delta_N: Tensor) -> Tensor:
        """One layer's keys ``[..., N, D]`` moved by some positions each; in fp32."""
        frequency = self._frequencies(self.layer_types[layer]).double()
        angle_ND = delta_N.double().to(self.device)[:, None] * frequency
        cos, sin = angle_ND.cos().float(), angle_ND.sin().float()
        x, half = k_HND.float(), frequency.shape[0]
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
        return turned.to(k_HND.dtype)

    @contextmanager
    def observing(self, observer: Observer) -> Iterator[None]:
        """Show every attention call in it to `observer`."""
        self._observer = observer
        try:
            yield
        finally:
            self._observer = None

    def _masks(
        self, state: KvState, positions_Q: Tensor, mask_QN: Tensor | None, end: int
    ) -> dict[str, Tensor | None]:
        kv_N = state.positions_N[:end]
        if mask_QN is None and len(positions_Q) == end:
            base: Tensor | None = None  # everything, from the start: plainly causal
        elif mask_QN is None:
            base = kv_N[None] <= positions_Q[:, None]
        else:
            base = mask_QN[:, :end].to(self.device)
        masks: dict[str, Tensor | None] = {}
        for kind in set(self.layer_types):
            mask = base
            if kind == _SLIDING and self._window is not None:
                causal = kv_N[None] <= positions_Q[:, None] if base is None else base
                near = positions_Q[:, None] - kv_N[None] < self._window
                is_bias = causal.dtype is not torch.bool
                mask = causal.masked_fill(~near, -torch.inf) if is_bias else causal & near
            masks[kind] = mask
        return masks

    def _rotary(self, hidden: Tensor, positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        module = self._text.rotary_emb
        if hasattr(module, f"{kind}_inv_freq"):
            return module(hidden, positions, kind)  # type: ignore[no-any-return]
        return module(hidden, positions)  # type: ignore[no-any-return]

    def _frequencies(self, kind: str) -> Tensor:
        module = self._text.rotary_emb
        own = getattr(module, f"{kind}_inv_freq", None)
        return own if own is not None else module.inv_freq  # type: ignore[no-any-return]

    def _attention(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        scale = float(scaling if scaling is not None else query.shape[-1] ** -0.5)
        if self._observer is not None:
            self._observer(module.layer_idx, query[0], key[0], scale)
        group = query.shape[1] // key.shape[1]
        out = F.scaled_dot_product_attention(
            query,
            key.repeat_interleave(group, dim=1),
            value.repeat_interleave(group, dim=1),
            attn_mask=attention_mask,
            is_causal=attention_mask is None and query.shape[2] > 1,
            scale=scale,
        )
        return out.transpose(1, 2).contiguous(), None

    def _check(self) -> None:
        ids_T = torch.arange(7, 7 + 24, device=self.device) * 3 % self.vocab_size
        position_T = torch.arange(24, device=self.device)
        mine = self.logits(self.run(ids_T, self.state(position_T), position_T))
        causal = position_T[None] <= position_T[:, None]
        masks: Any = causal[None, None]
        if _SLIDING in self.layer_types:
            masks = {_FULL: masks, _SLIDING: masks}
        own = self.model(ids_T[None], attention_mask=masks, use_cache=False).logits[0].float()
        error = float((mine - own).abs().max() / own.abs().max())
        if not error < (1e-4 if self.dtype is torch.float32 else 0.05):
            raise UnlikeModel(f"layer by layer, logits are off by {error:.1e} of the largest")


def attention_from(query_HQD: Tensor, key_HND: Tensor, allowed_QN: Tensor, scale: float) -> Tensor:
    """Attention weights ``[H, Q, N]`` in fp32, of grouped heads."""
    group = query_HQD.shape[0] // key_HND.shape[0]
    keys = key_HND.repeat_interleave(group, dim=0).float()
    scores = torch.einsum("hqd,hnd->hqn", query_HQD.float(), keys) * scale
    return scores.masked_fill(~allowed_QN, -torch.inf).softmax(dim=-1)


def causal_allowed(state: KvState, slots_Q: Tensor) -> Tensor:
    """True where a slot may attend by position, ``[Q, N]``."""
    return state.positions_N[None] <= state.positions_N[slots_Q][:, None]


def concatenated(ranges: Sequence[tuple[int, int]]) -> Tensor:
    """All positions of some half-open ranges, int64."""
    parts = [torch.arange(start, end) for start, end in ranges]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
