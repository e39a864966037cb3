"""An editable KV cache: any token's keys and values can be read, moved and overwritten."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Written = Callable[[int, Tensor, Tensor], None]


@dataclass(kw_only=True)
class KvState:
    """Keys and values of one sequence, every layer, each token in a slot of its own.

    A slot is where a token is kept; its position is what RoPE has turned its key by. In a prompt
    the two are one; when several documents are compiled side by side they are not.

    Args:
        k_LHND: Rotated keys.
        v_LHND: Values.
        positions_N: Position of each slot's token, int64.
    """

    k_LHND: Tensor
    v_LHND: Tensor
    positions_N: Tensor

    @property
    def num_slots(self) -> int:
        """N."""
        return self.positions_N.shape[0]

    def clone(self) -> "KvState":
        """A copy that shares nothing."""
        return KvState(
            k_LHND=self.k_LHND.clone(),
            v_LHND=self.v_LHND.clone(),
            positions_N=self.positions_N.clone(),
        )


@dataclass(kw_only=True)
class CacheView:
    """What a Hugging Face attention layer takes for its cache: writes some slots, returns all.

    Args:
        state: The cache.
        slots_Q: Slots of the tokens that are computed.
        end: Slots at or past it are not returned; nothing computed may attend to them.
        on_write: Called behind each write with the layer's index and the keys and values written,
            ``[H, Q, D]``; may edit the state.
    """

    state: KvState
    slots_Q: Tensor
    end: int
    on_write: Written | None = None
    _: Any = field(default=None, repr=False)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """As `transformers.Cache.update`, for a batch of one."""
        k_HND, v_HND = self.state.k_LHND[layer_idx], self.state.v_LHND[layer_idx]
        k_HND[:, self.slots_Q] = key_states[0].to(k_HND.dtype)
        v_HND[:, self.slots_Q] = value_states[0].to(v_HND.dtype)
        if self.on_write is not None:
            self.on_write(layer_idx, key_states[0], value_states[0])
        return k_HND[None, :, : self.end], v_HND[None, :, : self.end]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """As `transformers.Cache`; positions are always given, so it decides nothing."""
        return int(self.slots_Q[0]) if layer_idx >= 0 else 0


def empty_state(
    num_layers: int, num_kv_heads: int, head_dim: int, positions_N: Tensor, dtype: torch.dtype
) -> KvState:
    """Slots that hold zeros."""
    shape = (num_layers, num_kv_heads, len(positions_N), head_dim)
    device = positions_N.device
    return KvState(
        k_LHND=torch.zeros(shape, dtype=dtype, device=device),
        v_LHND=torch.zeros(shape, dtype=dtype, device=device),
        positions_N=positions_N,
    )
