"""Laws of `rotate_keys` and `rotate_keys_`, and what they refuse."""

import pytest
import torch

from blend_kernels import KernelInputError, check_cos_sin, reference, rotate_keys, rotate_keys_

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
STYLES = [pytest.param(True, id="neox"), pytest.param(False, id="interleaved")]
# tokens, KV heads, head dim, rotary dims
SHAPES = [
    pytest.param(shape, id="T{}-H{}-D{}-R{}".format(*shape))
    for shape in [
        (1, 1, 64, 64),
        (63, 3, 64, 64),
        (1000, 8, 128, 128),
        (63, 8, 96, 24),
        (63, 1, 80, 32),
        (63, 2, 256, 64),
        (5, 3, 64, 2),
    ]
]


def bits(tensor):
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def rotate_exactly(k_THD, deltas_T, table_PR, *, is_neox):
    """The formula in fp64, from the same table, on complex numbers; rounded once."""
    rotary_dim = table_PR.shape[1]
    half = rotary_dim // 2
    rows_TR = table_PR.double()[deltas_T.abs()]
    turn_T1F = torch.complex(rows_TR[:, :half], rows_TR[:, half:] * deltas_T.sign()[:, None])
    turn_T1F = turn_T1F[:, None]
    out_THD = k_THD.double()
    rotary_THR = out_THD[..., :rotary_dim]
    first = slice(0, half) if is_neox else slice(0, None, 2)
    second = slice(half, None) if is_neox else slice(1, None, 2)
    moved_THF = torch.complex(rotary_THR[..., first], rotary_THR[..., second]) * turn_T1F
    rotary_THR[..., first], rotary_THR[..., second] = moved_THF.real, moved_THF.imag
    return out_THD.to(k_THD.dtype)


def random_moves(num_tokens, furthest=2047):
    return torch.randint(-furthest, furthest + 1, (num_tokens,))


@pytest.mark.parametrize("is_neox", STYLES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_complex_numbers_in_fp64(shape, dtype, is_neox, make_table, assert_parity):
    """One rotation in fp32, rounded once: at most one unit in the last place from the truth."""
    num_tokens, num_heads, head_dim, rotary_dim = shape
    k_THD = torch.randn(num_tokens, num_heads, head_dim).to(dtype)
    deltas_T = random_moves(num_tokens)
    table_PR = make_table(rotary_dim)
    want = rotate_exactly(k_THD, deltas_T, table_PR, is_neox=is_neox)
    before = k_THD.clone()

    got = rotate_keys(k_THD, deltas_T, table_PR, is_neox=is_neox)
    assert torch.equal(k_THD, before)
    assert_parity(got, want)
    assert torch.equal(bits(got[..., rotary_dim:]), bits(k_THD[..., rotary_dim:]))

    rotate_keys_(k_THD, deltas_T, table_PR, is_neox=is_neox)
    assert torch.equal(k_THD, got)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_index_dtypes_agree(index_dtype, make_table):
    k_THD, deltas_T = torch.randn(63, 3, 64), random_moves(63)
    want = rotate_keys(k_THD, deltas_T, make_table(64), is_neox=True)
    got = rotate_keys(k_THD, deltas_T.to(index_dtype), make_table(64), is_neox=True)
    assert torch.equal(got, want)


@pytest.mark.parametrize("is_neox", STYLES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_distance_zero_copies_bit_for_bit(dtype, is_neox, make_table):
    """Zeros keep their sign and NaNs their payload, also beside tokens that move."""
    k_THD = torch.randn(8, 3, 64).to(dtype)
    k_THD[1, :, 0:4], k_THD[2, :, 0:40] = -0.0, float("inf")
    bits(k_THD)[3] = -3 if dtype == torch.float32 else -5
    before = k_THD.clone()
    deltas_T = torch.tensor([0, 0, 0, 0, 7, 0, -7, 0])
    rotate_keys_(k_THD, deltas_T, make_table(64), is_neox=is_neox)
    is_still = deltas_T == 0
    assert torch.equal(bits(k_THD)[is_still], bits(before)[is_still])
    assert not torch.equal(k_THD[~is_still], before[~is_still])

    got = rotate_keys(before, torch.zeros_like(deltas_T), make_table(64), is_neox=is_neox)
    assert torch.equal(bits(got), bits(before))
    assert got.data_ptr() != before.data_ptr()


@pytest.mark.parametrize("is_neox", STYLES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_there_and_back_is_the_identity(dtype, is_neox, make_table, assert_law):
    k_THD, deltas_T = torch.randn(1000, 3, 64).to(dtype), random_moves(1000)
    there = rotate_keys(k_THD, deltas_T, make_table(64), is_neox=is_neox)
    back = rotate_keys(there, -deltas_T, make_table(64), is_neox=is_neox)
    assert_law(back, k_THD)


@pytest.mark.parametrize("is_neox", STYLES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_moves_compose_to_their_sum(dtype, is_neox, make_table, assert_law):
    k_THD = torch.randn(1000, 3, 64).to(dtype)
    first_T, second_T = random_moves(1000, 1000), random_moves(1000, 1000)
    step = rotate_keys(k_THD, first_T, make_table(64), is_neox=is_neox)
    step = rotate_keys(step, second_T, make_table(64), is_neox=is_neox)
    assert_law(step, rotate_keys(k_THD, first_T + second_T, make_table(64), is_neox=is_neox))


@pytest.mark.parametrize("is_neox", STYLES)
def test_a_common_move_keeps_every_dot_product(is_neox, make_table):
    """Attention inside a segment does not change when the whole segment moves."""
    k_THD = torch.randn(63, 3, 64)
    deltas_T = torch.full((63,), -777)
    moved_THD = rotate_keys(k_THD, deltas_T, make_table(64), is_neox=is_neox)
    before = torch.einsum("thd,shd->hts", k_THD, k_THD)
    after = torch.einsum("thd,shd->hts", moved_THD, moved_THD)
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("is_neox", STYLES)
def test_layers_share_moves_and_table(is_neox, make_table):
    k_LTHD, deltas_T = torch.randn(5, 63, 3, 64), random_moves(63)
    want = torch.stack([rotate_keys(k, deltas_T, make_table(64), is_neox=is_neox) for k in k_LTHD])
    assert torch.equal(rotate_keys(k_LTHD, deltas_T, make_table(64), is_neox=is_neox), want)
    rotate_keys_(k_LTHD, deltas_T, make_table(64), is_neox=is_neox)
    assert torch.equal(k_LTHD, want)


def test_packed_values_are_not_touched(make_table):
    """Keys may be a slice of a packed K|V tensor."""
    kv_THC = torch.randn(63, 3, 128)
    before = kv_THC.clone()
    deltas_T = random_moves(63)
    want = rotate_keys(before[..., :64], deltas_T, make_table(64), is_neox=True)
    rotate_keys_(kv_THC[..., :64], deltas_T, make_table(64), is_neox=True)
    assert torch.equal(kv_THC[..., :64], want)
    assert torch.equal(kv_THC[..., 64:], before[..., 64:])


@pytest.mark.parametrize("shape", [(0, 3, 64), (5, 0, 3, 64), (0, 7, 3, 64), (7, 0, 64)], ids=str)
def test_nothing_to_move(shape, make_table):
    k_THD = torch.randn(shape)
    deltas_T = random_moves(shape[-3])
    assert rotate_keys(k_THD, deltas_T, make_table(64), is_neox=True).shape == shape
    rotate_keys_(k_THD, deltas_T, make_table(64), is_neox=True)


def test_every_row_of_the_table_can_be_reached(make_table, assert_parity):
    k_THD, deltas_T = torch.randn(2, 1, 64), torch.tensor([-99, 99])
    table_PR = make_table(64, num_rows=100)
    got = rotate_keys(k_THD, deltas_T, table_PR, is_neox=True)
    assert_parity(got, rotate_exactly(k_THD, deltas_T, table_PR, is_neox=True))


REFUSED = {
    "k has 2 dimensions": ({"k": torch.zeros(4, 64)}, "3 or 4 dimensions, got 2"),
    "k is int": ({"k": torch.zeros(4, 3, 64, dtype=torch.int32)}, "bfloat16 .*, got int32"),
    "k is fp64": ({"k": torch.zeros(4, 3, 64).double()}, "float32, got float64"),
    "k is transposed": ({"k": torch.zeros(4, 64, 3).mT}, "stride 1 .*, got 3"),
    "too few deltas": ({"deltas": torch.zeros(3).long()}, "size 3 .*asks for 4"),
    "deltas per head": ({"deltas": torch.zeros(4, 3).long()}, "1 dimensions, got 2"),
    "float deltas": ({"deltas": torch.zeros(4)}, "int32 or int64, got float32"),
    "deltas elsewhere": ({"deltas": torch.zeros(4, device="meta").long()}, "'meta', .*'cpu'"),
    "table elsewhere": ({"table": torch.zeros(9, 64, device="meta")}, "'meta', .*'cpu'"),
    "bf16 table": ({"table": torch.zeros(9, 64).bfloat16()}, "float32, got bfloat16"),
    "odd table": ({"table": torch.zeros(9, 63)}, r"even, .*got \(9, 63\)"),
    "empty table": ({"table": torch.zeros(0, 64)}, r"one row .*got \(0, 64\)"),
    "transposed table": ({"table": torch.zeros(64, 9).T}, "stride 1"),
    "wide table": ({"table": torch.zeros(9, 128)}, "128 columns, .*head dim 64"),
    "move too far ahead": (
        {"deltas": torch.tensor([0, 0, 0, 4096])},
        "-4095 and 4095.* 0 to 4096",
    ),
    "move too far back": ({"deltas": torch.tensor([0, -4096, 0, 1])}, "got -4096 to 1"),
}


@pytest.mark.parametrize("rotate", [rotate_keys, rotate_keys_, reference.rotate_keys])
@pytest.mark.parametrize("case", REFUSED)
def test_refuses_with_both_sides_in_the_message(case, rotate, make_table):
    changed, message = REFUSED[case]
    inputs = {"k": torch.zeros(4, 3, 64), "deltas": torch.zeros(4).long(), "table": make_table(64)}
    inputs |= changed
    with pytest.raises(KernelInputError, match=message):
        rotate(*inputs.values(), is_neox=True)


def test_refuses_to_overwrite_shared_memory(make_table):
    k_THD = torch.zeros(4, 1, 64).expand(4, 3, 64)
    with pytest.raises(KernelInputError, match=r"expanded view.*strides"):
        rotate_keys_(k_THD, torch.ones(4).long(), make_table(64), is_neox=True)


@pytest.mark.parametrize("backend", ["cuda", ""])
def test_refuses_an_unknown_backend(backend, make_table):
    with pytest.raises(KernelInputError, match="'auto', 'torch' or 'triton', got"):
        rotate_keys(
            torch.zeros(1, 1, 64),
            torch.ones(1).long(),
            make_table(64),
            is_neox=True,
            backend=backend,
        )


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        pytest.param(lambda table: table * 1.1386, "got cos in .1.138", id="magnitude-factor"),
        pytest.param(lambda table: table[1:], "row 0 .*sin in", id="shifted-by-a-row"),
        pytest.param(lambda table: table.roll(32, 1), "row 0", id="sines-first"),
        pytest.param(lambda table: table * float("nan"), "row 0", id="nan"),
    ],
)
def test_refuses_a_table_that_does_not_start_at_the_identity(spoil, message, make_table):
    table_PR = spoil(make_table(64)).contiguous()
    with pytest.raises(KernelInputError, match=message):
        rotate_keys(torch.zeros(1, 1, 64), torch.ones(1).long(), table_PR, is_neox=True)
    with pytest.raises(KernelInputError, match=message):
        check_cos_sin(table_PR)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_check_cos_sin_refuses_a_table_rounded_on_its_way(dtype, make_table):
    check_cos_sin(make_table(64))
    with pytest.raises(KernelInputError, match="within 1e-05 of 1 everywhere, got"):
        check_cos_sin(make_table(64).to(dtype).float())
