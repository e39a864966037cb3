"""The demo model's own tokenizer, and the file of questions where it lies beside the project."""

from functools import lru_cache
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from blend_gateway import demo_model
from blend_gateway.evaluation.prompts import PromptMaker
from blend_gateway.evaluation.texts import MusiqueRow, load_musique

MUSIQUE = Path(__file__).parents[3] / "shared" / "data" / "musique_75.json"


@lru_cache(maxsize=1)
def demo_tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(demo_model.prepare(progress=print))


@lru_cache(maxsize=1)
def demo_maker() -> PromptMaker:
    return PromptMaker(demo_tokenizer())


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return demo_tokenizer()


@pytest.fixture(scope="session")
def maker() -> PromptMaker:
    return demo_maker()


@pytest.fixture(scope="session")
def musique() -> tuple[MusiqueRow, ...]:
    if not MUSIQUE.exists():
        pytest.skip("the questions are not part of the project: needs ../shared/data")
    return load_musique(MUSIQUE)
