"""Tiny random models with attention that minds positions: one base, and two with a window."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.families import COMMON
from tests.models.weights import VOCABULARY, write_model
from transformers import AutoTokenizer

from blend_engine.quality.blending import Prompt
from blend_engine.quality.model import QualityModel

SLIDING = {
    **COMMON,
    "head_dim": 32,
    "sliding_window": 48,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
}
KINDS = {"llama": {**COMMON, "num_hidden_layers": 4}, "gemma3_text": SLIDING}


@pytest.fixture(scope="session", params=sorted(KINDS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder."""
    path = tmp_path_factory.mktemp(request.param)
    write_model(path, request.param, KINDS[request.param])
    return path


@pytest.fixture(scope="session")
def model(folder: Path) -> QualityModel:
    """It, in fp32 on the CPU."""
    return QualityModel(folder)


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Any:
    """Its tokenizer."""
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def prompt() -> Prompt:
    """A beginning, three documents with text between them, a question: 199 tokens."""
    generator = torch.Generator().manual_seed(7)
    ids_T = torch.randint(5, VOCABULARY, (199,), generator=generator)
    return Prompt(ids_T=ids_T, documents=((12, 70), (75, 100), (104, 180)))
