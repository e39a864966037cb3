"""Tokenizers are built once for the session: SmolLM2's own, and one of each family."""

from functools import cache, lru_cache

import pytest
from tests.gateway.assembler import models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from blend_gateway import demo_model
from blend_gateway.assembler import Assembler


@lru_cache(maxsize=1)
def smollm2() -> PreTrainedTokenizerFast:
    """The tokenizer of the demo model as it is served."""
    return AutoTokenizer.from_pretrained(demo_model.prepare(progress=print))


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
