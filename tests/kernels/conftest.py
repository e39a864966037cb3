"""What the kernel tests share: seed, tolerances, rotation tables, NaN-filled memory."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

# One unit in the last place of bf16 is 2^-7 of the value, of fp16 2^-10, of fp32 2^-23.
#
# parity: two implementations of one formula, both in fp32 and rounded once. A fused multiply-add
# moves the fp32 value by about 2^-24 of the larger pair member (below 6 here), which can flip the
# final rounding: one unit in the last place, and the fp32 shift itself where terms cancel.
PARITY = {
    torch.float32: {"rtol": 2**-22, "atol": 2e-6},
    torch.float16: {"rtol": 2**-10, "atol": 2e-6},
    torch.bfloat16: {"rtol": 2**-7, "atol": 2e-6},
}
# law: keys that went to a position in two rotations against keys that went there in one.
# fp32: an angle near 2048 is known to 2^-13, three angles meet, pairs have lengths below 6.
# fp16, bf16: up to three roundings of a key (and, in the model's own rotation, of its table and
# of both products), each half a unit in the last place of a value below 6.
LAW = {
    torch.float32: {"rtol": 0.0, "atol": 3 * 2**-13 * 6},
    torch.float16: {"rtol": 0.0, "atol": 5 * 2**-11 * 6},
    torch.bfloat16: {"rtol": 0.0, "atol": 5 * 2**-8 * 6},
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "vllm: needs the vLLM package")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(42)


@pytest.fixture(autouse=True)
def _poison_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new memory with NaN, so that an output nobody wrote fails loudly."""

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: object, **kwargs: object) -> Tensor:
            made = make(*args, **kwargs)
            return made.fill_(float("nan")) if made.is_floating_point() else made

        return call

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))


@pytest.fixture
def assert_parity() -> Callable[[Tensor, Tensor], None]:
    """Compare two implementations of one formula."""
    return lambda got, want: torch.testing.assert_close(
        got, want, equal_nan=True, **PARITY[want.dtype]
    )


@pytest.fixture
def assert_law() -> Callable[[Tensor, Tensor], None]:
    """Compare keys that reached a position on two ways."""
    return lambda got, want: torch.testing.assert_close(got, want, **LAW[want.dtype])


@pytest.fixture
def make_table() -> Callable[..., Tensor]:
    """Return a function that makes an fp32 table `[P, R]`, cosines then sines."""

    def make(rotary_dim: int, num_rows: int = 4096, base: float = 10_000.0) -> Tensor:
        inv_freq_F = base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
        angle_PF = torch.arange(num_rows, dtype=torch.float32)[:, None] * inv_freq_F
        return torch.cat((angle_PF.cos(), angle_PF.sin()), dim=-1)

    return make
