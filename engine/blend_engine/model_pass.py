"""The blend pass: whole-model calls that fill a covered range of a request's paged cache.

    write rotated cached K, V of every layer for all hit tokens     (the backend's own update)
    with HKVD: call the model on the range up to the check layer    (the peek)
    call the model once on fresh + selected tokens

Each layer's own cache update overwrites the stale entries of the tokens it recomputes, so later
layers and tokens read fresh KV. A compile is the same call with nothing cached and capture on.
Architecture: CacheBlend (arXiv:2405.16444) section 4, with an exact positional mask.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.forward_context import set_forward_context

from blend_engine.attached import AttachedModel, cache_of
from blend_engine.attention_batch import BlockTable, build_metadata
from blend_engine.plan import Hit
from blend_engine.pool import StoredSegment
from blend_engine.selection import hit_positions
from blend_kernels import key_deviation, rotate_keys

_Result = TypeVar("_Result")

Work = Generator[int, None, _Result]
"""Work in pieces: it pauses after each, yielding the fresh tokens that the piece has cost."""

_Update = Callable[[Any, Tensor, Tensor, Any, Tensor], None]


class _PeekDone(Exception):
    """Ends a peek once the check layer's keys and values are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedHit:
    """One hit's cached KV, moved to where it stands in this prompt.

    Args:
        hit: Which part of the prompt it fills.
        k_LTHD: Rotated keys.
        v_LTHD: Values; a view of the stored slab where the cache is in host memory.
    """

    hit: Hit
    k_LTHD: Tensor
    v_LTHD: Tensor

    def at_layer(self, layer: int) -> "CheckedHit":
        """A copy of one layer, so that the others' memory can be given back."""
        return CheckedHit(
            hit=self.hit, k_THD=self.k_LTHD[layer].clone(), v_THD=self.v_LTHD[layer].clone()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedHit:
    """What a peek compares with: one hit's moved KV at the check layer."""

    hit: Hit
    k_THD: Tensor
    v_THD: Tensor


class ModelPass:
    """Runs the model on chosen tokens of one request.

    Args:
        attached: The model.
        vllm_config: The engine's configuration, for vLLM's forward context.
        token_ids: Prompt ids of the covered range's prefix, int32.
        block_ids: The request's blocks.
        piece_tokens: Tokens of one call of the model at most; what vLLM allows a step by default.
    """

    def __init__(
        self,
        attached: AttachedModel,
        vllm_config: Any,
        token_ids: NDArray[np.int32],
        block_ids: tuple[int, ...],
        piece_tokens: int | None = None,
    ) -> None:
        self._attached = attached
        self._vllm_config = vllm_config
        self._token_ids_T = torch.from_numpy(np.ascontiguousarray(token_ids))
        self._table = BlockTable(attached, block_ids)
        self._max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        if piece_tokens is not None:
            self._max_tokens = min(self._max_tokens, piece_tokens)

    def rotate(self, hit: Hit, stored: StoredSegment) -> LoadedHit:
        """Move a hit's keys from where they were compiled to where they stand now.

        Raises:
            RuntimeError: The device has no memory for them.
        """
        device = self._attached.device
        rows = slice(hit.offset, hit.offset + hit.num_tokens)
        k_LTHD = stored.k_LTHD[:, rows].to(device, non_blocking=True)
        v_LTHD = stored.v_LTHD[:, rows].to(device, non_blocking=True)
        delta = hit.start - (stored.start + hit.offset)
        return LoadedHit(hit=hit, k_LTHD=self._rotate_layers(k_LTHD, delta), v_LTHD=v_LTHD)

    def write(self, loaded: LoadedHit) -> None:
        """Write moved KV into the paged cache through each layer's own update."""
        slots_T = self._table.slots(torch.arange(loaded.hit.start, loaded.hit.end))
        for index, name in enumerate(self._attached.layer_names):
            layer = self._attached.layers[name]
            layer.impl.do_kv_cache_update(
                layer, loaded.k_LTHD[index], loaded.v_LTHD[index], cache_of(layer), slots_T
            )

    def peek(
        self, positions_T: Tensor, loaded: Sequence[CheckedHit], check_layer: int
    ) -> Work[Tensor]:
        """KV deviation of the loaded tokens at the check layer.

        Runs layers below `check_layer` on all of `positions_T`, in pieces, and stops each piece
        where the check layer would write its cache: that layer's attention and MLP never run here.

        Args:
            positions_T: All positions of the range: fresh and loaded, sorted.
            loaded: The cached KV to compare with, at least one; its positions are a subset.
            check_layer: Index of the check layer.

        Returns:
            fp32 score per loaded token: squared distance of keys plus that of values.
        """
        name = self._attached.layer_names[check_layer]
        loaded_T = hit_positions([piece.hit for piece in loaded])
        cached_k = torch.cat([piece.k_THD for piece in loaded])
        cached_v = torch.cat([piece.v_THD for piece in loaded])
        score_T = torch.zeros(len(loaded_T), device=self._attached.device)
        for piece_T in positions_T.split(self._max_tokens):
            seen: list[tuple[Tensor, Tensor]] = []
            with self._intercepting(name, seen):
                self._call(piece_T, skip_compiled=True)
            fresh_k, fresh_v = seen[0]
            in_piece = torch.isin(loaded_T, piece_T)
            rows = torch.searchsorted(piece_T, loaded_T[in_piece])
            score_T[in_piece] = key_deviation(fresh_k[rows], cached_k[in_piece]) + key_deviation(
                fresh_v[rows], cached_v[in_piece]
            )
            yield len(piece_T) * check_layer // self._attached.num_layers
        return score_T

    def compute(self, positions_T: Tensor, *, max_tokens: int | None = None) -> Work[None]:
        """Run the whole model on `positions_T`, in position-ordered pieces.

        Args:
            positions_T: int64, strictly increasing.
            max_tokens: A smaller length of a piece.
        """
        for piece_T in positions_T.split(min(max_tokens or self._max_tokens, self._max_tokens)):
            self._call(piece_T, skip_compiled=False)
            yield len(piece_T)

    def forward(self, positions_T: Tensor) -> Tensor:
        """As `compute`, for positions of one piece at most; returns their last hidden states."""
        hidden_TD = self._call(positions_T, skip_compiled=False)
        assert isinstance(hidden_TD, Tensor)
        # Padded where the model runs in captured sizes.
        return hidden_TD[: len(positions_T)].clone()

    def allocate(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Slabs for a segment's keys and values; pinned where the cache is on a GPU.

        Raises:
            RuntimeError: The host has no memory for them.
        """
        attached = self._attached
        key_dim, value_dim = attached.head_dims
        shape = (attached.num_layers, num_tokens, attached.num_kv_heads)
        pinned = attached.device.type == "cuda"
        return (
            torch.empty((*shape, key_dim), dtype=attached.kv_dtype, pin_memory=pinned),
            torch.empty((*shape, value_dim), dtype=attached.kv_dtype, pin_memory=pinned),
        )

    def compute_and_capture(
        self, positions_T: Tensor, start: int, slabs: tuple[Tensor, Tensor]
    ) -> Work[StoredSegment]:
        """As `compute`, keeping in `slabs` what the layers write from position `start` on.

        Args:
            positions_T: Everything to compute; the captured range lies inside.
            start: First position kept.
            slabs: From `allocate`; their length decides where the kept range ends.
        """
        end = start + slabs[0].shape[1]
        num_kept = 0
        for piece_T in positions_T.split(self._max_tokens):
            kept = (piece_T >= start) & (piece_T < end)
            rows_T = piece_T[kept] - start
            num_kept += len(rows_T)
            with self._capturing(slabs, kept, rows_T):
                self._call(piece_T, skip_compiled=False)
            yield len(piece_T)
        assert num_kept == end - start, "a compile must pass every token of its segment"
        return StoredSegment.seal(*slabs, start)

    def _rotate_layers(self, k_LTHD: Tensor, delta: int) -> Tensor:
        attached = self._attached
        if delta == 0:
            return k_LTHD
        deltas_T = torch.full((k_LTHD.shape[1],), delta, dtype=torch.int64, device=k_LTHD.device)
        if len(attached.tables) == 1:
            return self._rotate_keys(k_LTHD, deltas_T, 0)
        layers = [
            self._rotate_keys(k_THD, deltas_T, table)
            for k_THD, table in zip(k_LTHD, attached.table_of_layer, strict=True)
        ]
        return torch.stack(layers)

    def _rotate_keys(self, k_THD: Tensor, deltas_T: Tensor, table: int) -> Tensor:
        # The table was checked when the model was attached, and spans lie within `max_model_len`.
        return rotate_keys(
            k_THD,
            deltas_T,
            self._attached.tables[table],
            is_neox=self._attached.is_neox,
            check_values=False,
        )

    def _call(self, positions_T: Tensor, *, skip_compiled: bool) -> Any:
        attached = self._attached
        slots_T = self._table.slots(positions_T)
        metadata = build_metadata(attached, self._table, positions_T, slots_T)
        input_ids = self._token_ids_T[positions_T].to(attached.device)
        context = set_forward_context(
            metadata,
            self._vllm_config,
            num_tokens=len(positions_T),
            slot_mapping=dict.fromkeys(attached.layer_names, slots_T),
            skip_compiled=skip_compiled,
        )
        with context, suppress(_PeekDone):
            return attached.model(input_ids=input_ids, positions=positions_T.to(attached.device))
        return None

    @contextmanager
    def _intercepting(self, name: str, seen: list[tuple[Tensor, Tensor]]) -> Iterator[None]:
        def stop(layer: Any, key: Tensor, value: Tensor, cache: Any, slots: Tensor) -> None:
            # Padded on the GPU; the slot mapping is not.
            seen.append((key[: len(slots)], value[: len(slots)]))
            raise _PeekDone

        with _replacing_update(self._attached.layers[name].impl, lambda _: stop):
            yield

    @contextmanager
    def _capturing(
        self, slabs: tuple[Tensor, Tensor], kept: Tensor, rows_T: Tensor
    ) -> Iterator[None]:
        first, last = (int(rows_T[0]), int(rows_T[-1]) + 1) if len(rows_T) else (0, 0)
        picked = torch.nonzero(kept).flatten()

        def recorder(index: int) -> Callable[[_Update], _Update]:
            def wrap(original: _Update) -> _Update:
                def record(
                    layer: Any, key: Tensor, value: Tensor, cache: Any, slots: Tensor
                ) -> None:
                    original(layer, key, value, cache, slots)
                    source = picked.to(key.device)
                    slabs[0][index, first:last].copy_(key[source])
                    slabs[1][index, first:last].copy_(value[source])

                return record

            return wrap

        with ExitStack() as stack:
            for index, name in enumerate(self._attached.layer_names):
                stack.enter_context(
                    _replacing_update(self._attached.layers[name].impl, recorder(index))
                )
            yield


def finish(work: Work[_Result]) -> _Result:
    """Do all of a work at once."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: _Result = end.value
            return result


@contextmanager
def _replacing_update(impl: Any, wrap: Callable[[_Update], _Update]) -> Iterator[None]:
    """Shadow one instance's `do_kv_cache_update`; the class is untouched, nothing stays."""
    impl.do_kv_cache_update = wrap(impl.do_kv_cache_update)
    try:
        yield
    finally:
        del impl.do_kv_cache_update
