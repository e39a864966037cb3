"""What holds for every test."""

import pytest

_FOLDERS_WITH_ENGINES = ("tests/real/", "tests/models/", "tests/gpu/", "tests/soak/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever runs a real engine needs vLLM."""
    for item in items:
        if any(folder in str(item.path) for folder in _FOLDERS_WITH_ENGINES):
            item.add_marker(pytest.mark.vllm)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked `gpu` say so where there is no such device."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
