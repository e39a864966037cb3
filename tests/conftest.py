"""What holds for every test."""

import pytest


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked `gpu` say so where there is no such device."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
