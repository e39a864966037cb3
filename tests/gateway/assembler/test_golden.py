"""Without documents and special strings the ids are the model's own tokenizer's."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from tests.gateway.assembler.conftest import assembler_of, tokenizer_of
from tests.gateway.assembler.reference import plain_ids, rendered, spells_control_token, texts
from transformers import PreTrainedTokenizerFast

from blend_gateway.assembler import Assembler

SYSTEM = {"role": "system", "content": "  You answer the question.\n"}
USER = {"role": "user", "content": "What is the weather in Paris today?"}
ASSISTANT = {"role": "assistant", "content": "\n\nIt's 12 degrees, über cold.  "}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "abcdef012",
            "type": "function",
            "function": {
                "name": "weather",
                "arguments": '{"place": "Paris \\"N\\"\\n", "days": 2, "deep": {"a": ["é", null]}}',
            },
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "abcdef012", "content": '{"now": "12\\u00b0", "x": "/"}'}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Get the "weather" of a place -> text. Use it < 3 times | once.',
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "enum": ["Paris", "<b>"]}},
                "required": ["place"],
            },
        },
    }
]

SHAPES: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "blank user": [{"role": "user", "content": "  \n"}],
    "empty user": [{"role": "user", "content": ""}],
    "blanks around": [{"role": "user", "content": "\n  the river \n\n"}],
    "system": [SYSTEM, USER],
    "history": [SYSTEM, USER, ASSISTANT, USER],
    "unicode": [
        {"role": "user", "content": "学习 e\u0301 👩🏽\u200d🚀 привет\u00a0\u2028x\u0000y"}
    ],
    "almost special": [{"role": "user", "content": "<|im_end| > <think < [INST </ s> |im_end|>"}],
}
TOOL_SHAPES = {
    "call": [USER, CALL, RESULT],
    "call and answer": [SYSTEM, USER, CALL, RESULT, ASSISTANT, USER],
}
KNOWS_TOOLS = ("qwen3", "llama3", "mistral")


@pytest.mark.parametrize("shape", SHAPES)
def test_ids_equal_the_tokenizers_own(
    shape: str, assembler: Assembler, tokenizer: PreTrainedTokenizerFast
) -> None:
    prompt = assembler.assemble(SHAPES[shape])
    assert prompt is not None
    assert prompt.token_ids == plain_ids(tokenizer, SHAPES[shape])


@pytest.mark.parametrize("shape", TOOL_SHAPES)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("family", KNOWS_TOOLS)
def test_tool_calls_and_results_go_through(family: str, shape: str, tools: Any) -> None:
    messages = TOOL_SHAPES[shape]
    prompt = assembler_of(family).assemble(messages, tools=tools)
    assert prompt is not None
    assert prompt.token_ids == plain_ids(tokenizer_of(family), messages, tools=tools)


@pytest.mark.parametrize("ending", ["The river", "The river ", "The river \n", "  "])
def test_a_final_message_can_be_continued(
    ending: str, assembler: Assembler, tokenizer: PreTrainedTokenizerFast
) -> None:
    messages = [USER, {"role": "assistant", "content": ending}]
    arguments = {"add_generation_prompt": False, "continue_final_message": True}
    prompt = assembler.assemble(messages, **arguments)
    assert prompt is not None
    assert prompt.token_ids == plain_ids(tokenizer, messages, **arguments)


def test_template_arguments_reach_the_template() -> None:
    prompt = assembler_of("qwen3").assemble(
        [USER], chat_template_kwargs={"enable_thinking": False, "unknown": 1}
    )
    assert prompt is not None
    expected = plain_ids(tokenizer_of("qwen3"), [USER], enable_thinking=False)
    assert prompt.token_ids == expected
    assert prompt.token_ids != plain_ids(tokenizer_of("qwen3"), [USER])


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_conversation_without_special_strings(family: str, data: st.DataObject) -> None:
    plain = texts().filter(lambda text: not spells_control_token(tokenizer_of(family), text))
    system = data.draw(st.none() | plain)
    turns = data.draw(st.lists(st.tuples(plain, plain), max_size=2))
    messages = [] if system is None else [{"role": "system", "content": system}]
    for question, answer in turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    messages.append({"role": "user", "content": data.draw(plain)})
    prompt = assembler_of(family).assemble(messages)
    assert prompt is not None
    assert prompt.token_ids == plain_ids(tokenizer_of(family), messages)


@pytest.mark.parametrize("system", [None, "", "You answer the question."])
def test_beginning_of_sequence_stands_once_or_not_at_all(
    system: str | None, assembler: Assembler, tokenizer: PreTrainedTokenizerFast, family: str
) -> None:
    messages = [] if system is None else [{"role": "system", "content": system}]
    prompt = assembler.assemble([*messages, USER], documents=())
    assert prompt is not None
    writes_it = bool(tokenizer.bos_token) and rendered(tokenizer, [USER]).startswith(
        tokenizer.bos_token
    )
    if family == "smollm2":
        assert tokenizer.bos_token == "<|im_start|>", "which it also opens every turn with"
    else:
        assert prompt.token_ids.count(tokenizer.bos_token_id) == int(writes_it)
    assert (prompt.token_ids[0] == tokenizer.bos_token_id) == writes_it


REASONED = "<think>\nThe river is old.\n</think>\n\nIt runs slowly."


@pytest.mark.parametrize(
    "answer", [REASONED, REASONED + "\n", "no</think>yes", "<think>\n\n</think>\n\nyes"]
)
@pytest.mark.parametrize("family", ["qwen3", "deepseek"])
@pytest.mark.parametrize("is_last", [True, False])
def test_reasoning_in_history_is_split_as_the_template_does(
    family: str, answer: str, is_last: bool
) -> None:
    messages = [USER, {"role": "assistant", "content": answer}, *([] if is_last else [USER])]
    prompt = assembler_of(family).assemble(messages)
    assert prompt is not None
    assert prompt.token_ids == plain_ids(tokenizer_of(family), messages)


def test_reasoning_in_its_own_field_goes_through() -> None:
    messages = [USER, {"role": "assistant", "content": "Yes.", "reasoning": "\nIt is so.\n"}]
    prompt = assembler_of("qwen3").assemble(messages)
    assert prompt is not None
    assert prompt.token_ids == plain_ids(tokenizer_of("qwen3"), messages)
