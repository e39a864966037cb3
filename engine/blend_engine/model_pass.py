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
from math import prod
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


_CACHED_BYTES = 4 << 20
"""Keys and values moved at once on a CPU: what its caches still hold when they are written."""


class _PeekDone(Exception):
    """Ends a peek once the check layer's keys and values are known."""


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

    def load(self, hit: Hit, stored: StoredSegment, check_layer: int | None) -> CheckedHit | None:
        """Move a hit's KV to where it stands now and write it into the paged cache.

        Args:
            hit: Which part of the prompt it fills.
            stored: What was compiled, at the positions where it was compiled.
            check_layer: The layer that a peek will compare, where one will.

        Returns:
            That layer's moved KV.

        Raises:
            RuntimeError: The device has no memory for it.
        """
        slots_T = self._table.slots(torch.arange(hit.start, hit.end))
        checked = None
        for layers in self._layers_at_once(hit, stored):
            k_LTHD, v_LTHD = self.rotate(hit, stored, layers)
            for index, k_THD, v_THD in zip(layers, k_LTHD, v_LTHD, strict=True):
                self._write(index, k_THD, v_THD, slots_T)
                if index == check_layer:
                    # Copied, so that the other layers' memory can be given back.
                    checked = CheckedHit(hit=hit, k_THD=k_THD.clone(), v_THD=v_THD.clone())
        return checked

    def rotate(
        self, hit: Hit, stored: StoredSegment, layers: range | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys of some layers, all by default, moved to where the hit stands now; their values.

        Values are a view of the stored slab where the cache is in host memory, and so are keys that
        stay where they were.

        Raises:
            RuntimeError: The device has no memory for them.
        """
        device = self._attached.device
        layers = layers if layers is not None else range(self._attached.num_layers)
        picked = slice(layers.start, layers.stop), slice(hit.offset, hit.offset + hit.num_tokens)
        k_LTHD = stored.k_LTHD[picked].to(device, non_blocking=True)
        v_LTHD = stored.v_LTHD[picked].to(device, non_blocking=True)
        delta = hit.start - (stored.start + hit.offset)
        return self._rotate_layers(k_LTHD, delta, layers.start), v_LTHD

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

    def _layers_at_once(self, hit: Hit, stored: StoredSegment) -> Iterator[range]:
        """All layers on a GPU, where launches cost; on a CPU as many as stay in its caches."""
        num_layers = self._attached.num_layers
        step = num_layers
        if self._attached.device.type == "cpu":
            slabs = (stored.k_LTHD, stored.v_LTHD)
            token_bytes = sum(prod(slab.shape[2:]) * slab.element_size() for slab in slabs)
            step = max(1, _CACHED_BYTES // max(1, hit.num_tokens * token_bytes))
        for first in range(0, num_layers, step):
            yield range(first, min(first + step, num_layers))

    def _write(self, index: int, k_THD: Tensor, v_THD: Tensor, slots_T: Tensor) -> None:
        layer = self._attached.layers[self._attached.layer_names[index]]
        layer.impl.do_kv_cache_update(layer, k_THD, v_THD, cache_of(layer), slots_T)

    def _rotate_layers(self, k_LTHD: Tensor, delta: int, first_layer: int = 0) -> Tensor:
        attached = self._attached
        if delta == 0:
            return k_LTHD
        deltas_T = torch.full((k_LTHD.shape[1],), delta, dtype=torch.int64, device=k_LTHD.device)
        if len(attached.tables) == 1:
            return self._rotate_keys(k_LTHD, deltas_T, 0)
        tables = attached.table_of_layer[first_layer : first_layer + len(k_LTHD)]
        layers = [
            self._rotate_keys(k_THD, deltas_T, table)
            for k_THD, table in zip(k_LTHD, tables, strict=True)
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
