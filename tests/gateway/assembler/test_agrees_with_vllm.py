"""The ids are those of vLLM's own renderer: its message parsing, its rendering, its tokenizing."""

import copy
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.assembler.conftest import ALL, assembler_of, tokenizer_of
from tests.gateway.assembler.test_golden import (
    ASSISTANT,
    CALL,
    RESULT,
    SHAPES,
    SYSTEM,
    TOOL_SHAPES,
    TOOLS,
    USER,
)
from transformers import LlamaConfig

from blend_gateway.assembler import TemplateError

pytestmark = pytest.mark.vllm

PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": " the "}, {"type": "text", "text": "river\n"}],
}
MESSAGES: dict[str, list[dict[str, Any]]] = {
    **SHAPES,
    **TOOL_SHAPES,
    "parts": [PARTS],
    "strings as parts": [{"role": "user", "content": ["the", "river"]}],
    "parts everywhere": [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        PARTS,
        {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]},
        USER,
    ],
    "tool result in parts": [USER, CALL, {**RESULT, "content": PARTS["content"]}],
    "no arguments": [
        USER,
        {
            **CALL,
            "tool_calls": [
                {"id": "abcdef012", "type": "function", "function": {"name": "w", "arguments": ""}}
            ],
        },
        RESULT,
    ],
    "broken arguments": [
        USER,
        {
            **CALL,
            "tool_calls": [
                {"id": "abcdef012", "type": "function", "function": {"name": "w", "arguments": "{"}}
            ],
        },
        RESULT,
    ],
    "developer": [{"role": "developer", "content": "Be brief."}, USER],
    "developer late": [SYSTEM, USER, ASSISTANT, {"role": "developer", "content": "Now!"}, USER],
    "named": [{**USER, "name": "Ann"}],
    "reasoning": [USER, {"role": "assistant", "content": "Yes.", "reasoning": "It is."}, USER],
    "reasoning inline": [USER, {"role": "assistant", "content": "<think>\nA\n</think>\n\nB"}, USER],
}


Rendering = Callable[[str, list[dict[str, Any]], Any], list[int]]


@pytest.fixture(scope="session")
def vllm_ids(tmp_path_factory: pytest.TempPathFactory) -> Rendering:
    """Renders and tokenizes with vLLM, for a family's tokenizer beside a small model's config."""
    from vllm.config import ModelConfig
    from vllm.renderers.chat_utils import parse_chat_messages
    from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template

    @lru_cache
    def model_config(family: str) -> ModelConfig:
        folder: Path = tmp_path_factory.mktemp(family)
        tokenizer_of(family).save_pretrained(folder)
        tokenizer_of(family).name_or_path = str(folder)  # vLLM remembers templates by it
        LlamaConfig(
            architectures=["LlamaForCausalLM"], vocab_size=len(tokenizer_of(family))
        ).save_pretrained(folder)
        return ModelConfig(model=str(folder), tokenizer=str(folder), dtype="float32")

    def render(family: str, messages: list[dict[str, Any]], tools: Any) -> list[int]:
        config, tokenizer = model_config(family), tokenizer_of(family)
        content_format = resolve_chat_template_content_format(
            chat_template=None,
            tools=tools,
            given_format="auto",
            tokenizer=tokenizer,
            model_config=config,
        )
        conversation, _, _ = parse_chat_messages(messages, config, content_format=content_format)
        rendered = safe_apply_chat_template(
            config,
            tokenizer,
            conversation,
            tools=tools,
            tokenize=False,
            add_generation_prompt=True,
            continue_final_message=False,
        )
        return tokenizer(rendered, add_special_tokens=False).input_ids

    return render


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("shape", MESSAGES)
@pytest.mark.parametrize("family", ALL)
def test_ids_equal_vllms(family: str, shape: str, tools: Any, vllm_ids: Rendering) -> None:
    from vllm.exceptions import VLLMValidationError

    messages = MESSAGES[shape]
    try:
        expected = vllm_ids(family, copy.deepcopy(messages), tools)
    except VLLMValidationError:
        with pytest.raises(TemplateError) as caught:
            assembler_of(family).assemble(messages, tools=tools)
        assert caught.value.code == "chat_template_rejected"
        return
    prompt = assembler_of(family).assemble(messages, tools=tools)
    assert prompt is not None
    assert prompt.token_ids == expected
