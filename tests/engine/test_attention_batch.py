"""Batches of scattered positions: which slots they write and which keys each query sees."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import ForwardContext, get_forward_context

from blend_engine.attention_batch import BlockTable, build_metadata
from blend_engine.model_pass import ModelPass, finish

pytestmark = pytest.mark.vllm


def attached_of(*, block_size: int = 4, blocks_per_kv_block: int = 1, **more: Any) -> Any:
    """A model whose only builder hands back what it was given."""
    builder = SimpleNamespace(build=lambda _prefix, common: common)
    return SimpleNamespace(
        block_size=block_size,
        blocks_per_kv_block=blocks_per_kv_block,
        device=torch.device("cpu"),
        groups=[SimpleNamespace(names=("layer",), builder=builder)],
        layer_names=("layer",),
        **more,
    )


def test_a_query_sees_the_keys_up_to_its_own_position() -> None:
    """Each run of positions ends its keys where it ends itself: at its last query, included."""
    attached = attached_of()
    table = BlockTable(attached, [7, 3, 5])
    positions_T = torch.tensor([0, 1, 5, 8, 9, 10])
    common = build_metadata(attached, table, positions_T, table.slots(positions_T))["layer"]
    assert common.causal
    assert common.query_start_loc.tolist() == [0, 2, 3, 6]
    assert common.seq_lens.tolist() == [2, 6, 11]
    assert common.block_table_tensor.tolist() == [[7, 3, 5]] * 3
    assert common.slot_mapping.tolist() == [28, 29, 13, 20, 21, 22]


def test_blocks_larger_than_the_kernels_are_cut_into_the_kernels() -> None:
    """vLLM may count in blocks of several kernel blocks; a token's slot is the same in both."""
    positions_T = torch.arange(24)
    large = BlockTable(attached_of(block_size=12), [3, 1])
    small = BlockTable(attached_of(block_size=4, blocks_per_kv_block=3), [3, 1])
    assert small.row.tolist() == [9, 10, 11, 3, 4, 5]
    assert small.slots(positions_T).tolist() == large.slots(positions_T).tolist()


def test_a_pass_runs_outside_captured_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph replays the batch it was captured with; scattered positions are none of those."""
    seen: list[ForwardContext] = []

    def model(**_inputs: Any) -> None:
        seen.append(get_forward_context())

    run = ModelPass(attached_of(model=model), VllmConfig(), torch.arange(8).int().numpy(), (1, 2))
    finish(run.compute(torch.tensor([0, 5])))
    assert [context.cudagraph_runtime_mode for context in seen] == [CUDAGraphMode.NONE]
