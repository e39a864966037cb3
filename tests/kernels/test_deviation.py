"""Laws of `key_deviation` and `top_deviation_indices`."""

import pytest
import torch

from blend_kernels import KernelInputError, key_deviation, top_deviation_indices

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 3, 64), (1, 1, 64), (63, 3, 64), (1000, 8, 80)], ids=str)
def test_is_the_sum_of_squared_differences(shape, dtype):
    fresh, cached = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    got = key_deviation(fresh, cached)
    want = (fresh.double() - cached.double()).pow(2).sum((1, 2))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=0)


def test_equal_keys_deviate_by_nothing():
    fresh = torch.randn(63, 3, 64).bfloat16()
    assert torch.equal(key_deviation(fresh, fresh.clone()), torch.zeros(63))


def test_halves_of_the_heads_add_up():
    """Scores of tensor-parallel ranks may be summed."""
    fresh, cached = torch.randn(63, 8, 64), torch.randn(63, 8, 64)
    parts = key_deviation(fresh[:, :4], cached[:, :4]) + key_deviation(fresh[:, 4:], cached[:, 4:])
    torch.testing.assert_close(parts, key_deviation(fresh, cached), rtol=1e-6, atol=0)


def test_large_keys_do_not_overflow_in_half_precision():
    fresh = torch.full((2, 3, 64), 6e4, dtype=torch.float16)
    assert torch.isfinite(key_deviation(fresh, -fresh)).all()


@pytest.mark.parametrize(
    ("fresh", "cached", "message"),
    [
        (torch.zeros(4, 3, 64), torch.zeros(5, 3, 64), r"\(4, 3, 64\) .*\(5, 3, 64\)"),
        (torch.zeros(4, 3, 64), torch.zeros(4, 1, 64), r"\(4, 3, 64\) .*\(4, 1, 64\)"),
        (torch.zeros(4, 64), torch.zeros(4, 64), "3 dimensions, got 2"),
        (torch.zeros(4, 3, 64).long(), torch.zeros(4, 3, 64), "float32, got int64"),
        (torch.zeros(4, 3, 64), torch.zeros(4, 3, 64).char(), "float32, got int8"),
        (torch.zeros(4, 3, 64), torch.zeros(4, 3, 64, device="meta"), "'meta', .*'cpu'"),
    ],
)
def test_refuses_keys_that_do_not_match(fresh, cached, message):
    with pytest.raises(KernelInputError, match=message):
        key_deviation(fresh, cached)


@pytest.mark.parametrize("k", [0, 1, 31, 63])
def test_takes_the_highest_in_ascending_order(k):
    score_T = torch.randperm(63).float()
    got = top_deviation_indices(score_T, k)
    assert got.dtype == torch.int64
    assert got.tolist() == [t for t in range(63) if score_T[t] >= 63 - k]


def test_of_equal_scores_the_lower_position_is_taken():
    score_T = torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0, 3.0, 2.0])
    chosen = [top_deviation_indices(score_T, k).tolist() for k in range(8)]
    assert chosen == [
        [],
        [5],
        [1, 5],
        [1, 3, 5],
        [1, 3, 5, 6],
        [0, 1, 3, 5, 6],
        [0, 1, 2, 3, 5, 6],
        [0, 1, 2, 3, 4, 5, 6],
    ]


def test_many_ties_at_size():
    """Long rows take another sorting path than short ones."""
    assert top_deviation_indices(torch.ones(100_003), 1000).tolist() == list(range(1000))


def test_a_damaged_key_is_recomputed_first():
    score_T = torch.tensor([5.0, float("nan"), float("inf"), 1.0])
    assert top_deviation_indices(score_T, 2).tolist() == [1, 2]


@pytest.mark.parametrize("k", [-1, 64])
def test_refuses_a_count_out_of_range(k):
    with pytest.raises(KernelInputError, match=f"within 0 and 63, got {k}"):
        top_deviation_indices(torch.zeros(63), k)


@pytest.mark.parametrize("score", [torch.zeros(3, 3), torch.zeros(3).half()], ids=["2d", "fp16"])
def test_refuses_scores_that_are_not_one_fp32_row(score):
    with pytest.raises(KernelInputError, match="got"):
        top_deviation_indices(score, 1)


@pytest.mark.gpu
def test_selection_is_the_same_on_both_devices_and_never_waits():
    score_T = torch.randint(0, 50, (10_000,)).float()
    score_device_T = score_T.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = top_deviation_indices(score_device_T, 1500)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got.cpu(), top_deviation_indices(score_T, 1500))
