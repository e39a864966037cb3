"""Every Triton kernel agrees with its PyTorch reference.

On a CPU the kernels run under Triton's interpreter, which must be chosen before Triton is first
imported: test_triton_interpreted.py runs this file in a process of its own.
"""

import pytest
import torch

from blend_kernels import key_deviation, reference, rotate_keys, rotate_keys_
from blend_kernels._triton_kernels import is_interpreted

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# layers (0: no such dimension), tokens, KV heads, head dim, rotary dims
SHAPES = [
    pytest.param(shape, id="L{}-T{}-H{}-D{}-R{}".format(*shape))
    for shape in [
        (0, 1, 1, 64, 64),
        (0, 63, 3, 64, 64),
        (0, 1000, 2, 128, 128),
        (2, 63, 3, 96, 24),
        (0, 33, 5, 80, 32),
        (0, 63, 3, 64, 2),
        (0, 0, 3, 64, 64),
    ]
]
STYLES = [pytest.param(True, id="neox"), pytest.param(False, id="interleaved")]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cpu" and not is_interpreted():
        pytest.skip("run with the interpreter by test_triton_interpreted.py")
    return request.param


def bits(tensor):
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def make_inputs(shape, dtype, make_table, device):
    num_layers, num_tokens, num_heads, head_dim, rotary_dim = shape
    layers = (num_layers,) if num_layers else ()
    k = torch.randn(*layers, num_tokens, num_heads, head_dim).to(dtype)
    deltas_T = torch.randint(-2047, 2048, (num_tokens,))
    deltas_T[::5] = 0
    return k.to(device), deltas_T.to(device), make_table(rotary_dim).to(device)


@pytest.mark.parametrize("is_neox", STYLES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_rotate_keys(shape, dtype, is_neox, device, make_table, assert_parity):
    k, deltas_T, table_PR = make_inputs(shape, dtype, make_table, device)
    before = k.clone()
    want = reference.rotate_keys(k, deltas_T, table_PR, is_neox=is_neox)

    got = rotate_keys(k, deltas_T, table_PR, is_neox=is_neox, backend="triton")
    assert torch.equal(k, before)
    assert_parity(got, want)

    rotate_keys_(k, deltas_T, table_PR, is_neox=is_neox, backend="triton")
    assert torch.equal(k, got)
    is_still = deltas_T == 0
    rotary_dim = table_PR.shape[1]
    assert torch.equal(bits(k)[..., is_still, :, :], bits(before)[..., is_still, :, :])
    assert torch.equal(bits(k)[..., rotary_dim:], bits(before)[..., rotary_dim:])


@pytest.mark.parametrize("is_neox", STYLES)
def test_distance_zero_copies_bit_for_bit(is_neox, device, make_table):
    k = torch.randn(4, 3, 64, dtype=torch.bfloat16)
    k[1, :, 0:4], k[2, :, 0:40] = -0.0, float("inf")
    bits(k)[3] = -5
    k = k.to(device)
    deltas_T = torch.zeros(4, dtype=torch.int64, device=device)
    table_PR = make_table(64).to(device)
    got = rotate_keys(k, deltas_T, table_PR, is_neox=is_neox, backend="triton")
    assert torch.equal(bits(got), bits(k))


def test_strided_inputs(device, make_table, assert_parity):
    """A slice of packed K|V, every second distance of a row, a slice of a wider table."""
    kv = torch.randn(2, 63, 3, 128).to(device)
    k, before = kv[..., :64], kv.clone()
    deltas_T = torch.randint(-2047, 2048, (126,), dtype=torch.int32).to(device)[::2]
    table_PR = torch.cat((make_table(64), torch.full((4096, 8), float("nan"))), -1).to(device)
    table_PR = table_PR[:, :64]
    want = reference.rotate_keys(k, deltas_T, table_PR, is_neox=True)
    assert_parity(rotate_keys(k, deltas_T, table_PR, is_neox=True, backend="triton"), want)
    rotate_keys_(k, deltas_T, table_PR, is_neox=True, backend="triton")
    assert_parity(k.contiguous(), want)
    assert torch.equal(kv[..., 64:], before[..., 64:])


def test_a_distance_without_a_row_gives_nan(device, make_table):
    """Unchecked, it neither reads behind the table nor passes for a key."""
    k = torch.randn(4, 3, 64, device=device)
    deltas_T = torch.tensor([99, 100, -100, -(2**63)], device=device)
    table_PR = make_table(64, num_rows=100).to(device)
    rotate_keys_(k, deltas_T, table_PR, is_neox=True, backend="triton", check_values=False)
    assert torch.isfinite(k[0]).all()
    assert torch.isnan(k[1:]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 3, 64), (1, 1, 64), (63, 3, 80), (1000, 2, 128)], ids=str)
def test_key_deviation(shape, dtype, device):
    fresh, cached = torch.randn(shape).to(device, dtype), torch.randn(shape).to(device)
    got = key_deviation(fresh, cached, backend="triton")
    assert got.dtype == torch.float32
    # Sums of positive terms in another order.
    torch.testing.assert_close(got, reference.key_deviation(fresh, cached), rtol=1e-5, atol=0)


def test_key_deviation_of_strided_keys(device):
    kv = torch.randn(63, 3, 128).to(device)
    fresh, cached = kv[..., :64], kv[..., 64:]
    got = key_deviation(fresh, cached, backend="triton")
    torch.testing.assert_close(got, reference.key_deviation(fresh, cached), rtol=1e-5, atol=0)


@pytest.mark.gpu
def test_the_unchecked_path_never_waits_for_the_device(make_table):
    k, deltas_T, table_PR = make_inputs((2, 63, 3, 64, 64), torch.bfloat16, make_table, "cuda")
    rotate_keys_(k, deltas_T, table_PR, is_neox=True)
    key_deviation(k[0], k[1])
    torch.cuda.set_sync_debug_mode("error")
    try:
        rotate_keys_(k, deltas_T, table_PR, is_neox=True, check_values=False)
        key_deviation(k[0], k[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_keys_of_one_segment_larger_than_int32_offsets(make_table):
    """Layer and token offsets are computed in 64 bits."""
    k = torch.zeros(33, 65_536, 8, 128, dtype=torch.bfloat16, device="cuda")
    k[-1, -1] = torch.randn(8, 128)
    deltas_T = torch.full((65_536,), -7, device="cuda")
    table_PR = make_table(128).cuda()
    want = reference.rotate_keys(k[-1, -1:], deltas_T[-1:], table_PR, is_neox=True)
    rotate_keys_(k, deltas_T, table_PR, is_neox=True)
    assert (k[-1, -1:] - want).abs().max() <= 2**-7 * want.abs().max()
