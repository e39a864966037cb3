"""What plain rendering gives: the whole conversation to one string, the string to ids."""

import json
from typing import Any

from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

FRAGMENTS = [
    *(
        "the",
        " river",
        "Question:",
        "\n",
        "\n\n",
        "  ",
        " ",
        "\t",
        "<",
        ">",
        "|",
        "[",
        "]",
        "{",
        "}",
    ),
    *(
        "'",
        '"',
        "\\",
        "学习",
        "über",
        "e\u0301",
        "👩🏽\u200d🚀",
        "\u00a0",
        "12345",
        "don't",
        "</b>",
        "_",
    ),
]

SPECIALS = [
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>"),
    *("</tool_response>", "<s>", "</s>", "<unk>", "[INST]", "[/INST]", "<bos>", "<start_of_turn>"),
    *(
        "<|begin_of_text|>",
        "<|eot_id|>",
        "<|end|>",
        "<|User|>",
        "<|user|>",
        "<table>",
        "<file_sep>",
    ),
]


def texts(*, specials: bool = False, min_size: int = 0) -> st.SearchStrategy[str]:
    """Texts of words, blanks, punctuation and any Unicode; with specials, control tokens too."""
    pieces = st.one_of(
        st.sampled_from(FRAGMENTS + (SPECIALS if specials else [])),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    )
    return st.lists(pieces, min_size=min_size, max_size=12).map("".join)


def rendered(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], **arguments: Any
) -> str:
    """The template's output for string contents, tool arguments parsed as vLLM parses them."""
    conversation = []
    for message in messages:
        shown = {**message, "content": message.get("content") or ""}
        if "tool_calls" in message:
            shown["tool_calls"] = [
                {
                    **call,
                    "function": {
                        **call["function"],
                        "arguments": json.loads(call["function"]["arguments"]),
                    },
                }
                for call in message["tool_calls"]
            ]
        if "reasoning" in message:
            shown["reasoning_content"] = message["reasoning"]
        conversation.append(shown)
    arguments.setdefault("add_generation_prompt", True)
    return tokenizer.apply_chat_template(conversation, tokenize=False, **arguments)


def plain_ids(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], **arguments: Any
) -> list[int]:
    """Token ids as `vllm serve` makes them."""
    return tokenizer(rendered(tokenizer, messages, **arguments), add_special_tokens=False).input_ids


def representable(tokenizer: PreTrainedTokenizerFast, text: str) -> str:
    """The text without what the model has no tokens for: SmolLM2 lacks a few control bytes."""
    return "".join(
        character
        for character in text
        if tokenizer.backend_tokenizer.decode(
            tokenizer(f"a{character}", add_special_tokens=False).input_ids, False
        )
        == f"a{character}"
    )


def spells_control_token(tokenizer: PreTrainedTokenizerFast, text: str) -> bool:
    """Whether the model's tokenizer would find one; generated texts hold constants of our code."""
    return not control_ids(tokenizer).isdisjoint(
        tokenizer(text, add_special_tokens=False).input_ids
    )


def control_ids(tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """Ids that only a template may write. An unknown character gives `unk` whoever writes it."""
    return {
        token_id
        for content, token_id in tokenizer.get_added_vocab().items()
        if not content.replace("▁", " ").isspace() and content != "<unk>"
    }
