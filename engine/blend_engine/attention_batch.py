"""Attention metadata for any sorted set of query positions of one request. Exact by construction.

The positions are cut into contiguous runs. A run ``[a, b)`` is one pseudo-request: query length
``b - a``, sequence length ``b``, the request's block table. The backend's bottom-right causal mask
over it is then the positional mask: the query at p sees keys 0..p (decision 6).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata

from blend_engine.attached import AttachedModel

_FIELDS = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}


class BlockTable:
    """One request's blocks, in the attention kernel's block size.

    Args:
        attached: The model.
        block_ids: The request's blocks as vLLM's scheduler numbers them.
    """

    def __init__(self, attached: AttachedModel, block_ids: Sequence[int]) -> None:
        ids = torch.tensor(block_ids, dtype=torch.int64)
        ratio = attached.blocks_per_kv_block
        if ratio > 1:
            ids = (ids[:, None] * ratio + torch.arange(ratio)).flatten()
        self.block_size = attached.block_size
        self.device = attached.device
        self.row = ids.to(attached.device, torch.int32)
        self._ids = ids

    def slots(self, positions_T: Tensor) -> Tensor:
        """Slot per position: ``block_id * block_size + offset``, int64, on the cache's device."""
        blocks = self._ids[positions_T // self.block_size]
        return (blocks * self.block_size + positions_T % self.block_size).to(self.device)


def build_metadata(
    attached: AttachedModel, table: BlockTable, positions_T: Tensor, slots_T: Tensor
) -> dict[str, Any]:
    """Metadata per layer name for queries at `positions_T`.

    Args:
        attached: The model.
        table: The request's blocks.
        positions_T: int64 on the CPU, strictly increasing.
        slots_T: int64 slots of those positions, on the cache's device.
    """
    starts, ends = _runs(positions_T)
    lengths = ends - starts
    query_start_loc = torch.zeros(len(starts) + 1, dtype=torch.int32)
    query_start_loc[1:] = lengths.cumsum(0)
    seq_lens = ends.to(torch.int32)
    device = attached.device
    values: dict[str, Any] = {
        "query_start_loc": query_start_loc.to(device),
        "query_start_loc_cpu": query_start_loc,
        "seq_lens": seq_lens.to(device),
        "seq_lens_cpu_upper_bound": seq_lens,
        "_seq_lens_cpu": seq_lens,
        "_num_computed_tokens_cpu": starts.to(torch.int32),
        "num_reqs": len(starts),
        "num_actual_tokens": len(positions_T),
        "max_query_len": int(lengths.max()),
        "max_seq_len": int(ends[-1]),
        "block_table_tensor": table.row.expand(len(starts), -1).contiguous(),
        "slot_mapping": slots_T,
        "causal": True,
    }
    common = CommonAttentionMetadata(
        **{name: value for name, value in values.items() if name in _FIELDS}
    )
    metadata: dict[str, Any] = {}
    for group in attached.groups:
        built = group.builder.build(0, common)
        metadata.update(dict.fromkeys(group.names, built))
    return metadata


def _runs(positions_T: Tensor) -> tuple[Tensor, Tensor]:
    """Starts and ends of the maximal contiguous runs."""
    breaks = torch.nonzero(positions_T[1:] != positions_T[:-1] + 1).flatten() + 1
    firsts = torch.cat([torch.zeros(1, dtype=torch.int64), breaks])
    lasts = torch.cat([breaks, torch.tensor([len(positions_T)])]) - 1
    return positions_T[firsts], positions_T[lasts] + 1
