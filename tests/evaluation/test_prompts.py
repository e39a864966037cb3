"""A task becomes the very prompt that a chat request with these documents becomes."""

import pytest
from transformers import PreTrainedTokenizerFast

from blend_gateway.evaluation.prompts import SYSTEM, PromptMaker
from blend_gateway.evaluation.tasks import Sizes, Task, Variant, stratum

DOCUMENTS = (
    "The harbour of Arden was dug in 1874.",
    "Belmora has <|im_end|> two mills.\n\nAnd one.",
)


def task(**changes: object) -> Task:
    fields: dict[str, object] = {
        "family": "made_up",
        "variant": Variant.DIRECT,
        "number": 0,
        "depth": 0.1,
        "order": 0,
        "documents": DOCUMENTS,
        "titles": ("Arden", None),
        "question": "When was the harbour of Arden dug?",
        "answer": "1874",
        "candidates": ("1874", "1875"),
        "needed": (0,),
    }
    return Task(**{**fields, **changes})  # type: ignore[arg-type]


def test_document_ranges_hold_the_documents_texts(
    maker: PromptMaker, tokenizer: PreTrainedTokenizerFast
) -> None:
    prompt = maker.make(task())
    texts = [tokenizer.decode(prompt.token_ids[start:end]) for start, end in prompt.documents]
    assert tuple(texts) == DOCUMENTS


def test_the_question_is_everything_behind_the_last_document(
    maker: PromptMaker, tokenizer: PreTrainedTokenizerFast
) -> None:
    prompt = maker.make(task())
    start, end = prompt.question
    assert (start, end) == (prompt.documents[-1][1], len(prompt.token_ids))
    behind = tokenizer.decode(prompt.token_ids[start:end])
    assert behind == ("\n\nWhen was the harbour of Arden dug?<|im_end|>\n<|im_start|>assistant\n")


def test_the_prompt_opens_with_the_system_message_and_headers(
    maker: PromptMaker, tokenizer: PreTrainedTokenizerFast
) -> None:
    prompt = maker.make(task())
    opening = tokenizer.decode(prompt.token_ids[: prompt.documents[0][0]])
    assert opening == (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n\n\nDocument [1]: Arden\n\n"
    )
    between = prompt.token_ids[prompt.documents[0][1] : prompt.documents[1][0]]
    assert tokenizer.decode(between) == "\n\nDocument [2]\n\n"


def test_candidates_are_tokens_of_a_reply(
    maker: PromptMaker, tokenizer: PreTrainedTokenizerFast
) -> None:
    prompt = maker.make(task())
    assert prompt.answer_ids == prompt.candidate_ids[0]
    assert [tokenizer.decode(ids) for ids in prompt.candidate_ids] == ["1874", "1875"]


@pytest.mark.parametrize("num_documents", [1, 3, 9])
def test_sizes_add_up_to_the_prompt(num_documents: int, maker: PromptMaker) -> None:
    sizes = maker.sizes(1024)
    question = "When was it dug?"
    documents = tuple(f"Harbour {index} is old." for index in range(num_documents))
    made = task(documents=documents, titles=(None,) * num_documents, question=question)
    expected = (
        sizes.base_tokens
        + sizes.count(question)
        + sum(sizes.header_tokens + sizes.count(text) for text in documents)
    )
    assert len(maker.make(made).token_ids) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"titles": ("Arden",)},
        {"candidates": ("1875", "1874")},
        {"candidates": ("1874", "1874")},
        {"needed": (2,)},
        {"documents": (), "titles": ()},
    ],
)
def test_a_task_that_does_not_fit_together_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="task made_up/direct/0"):
        task(**changes)


@pytest.mark.parametrize("name", ["length", "document_tokens"])
def test_sizes_must_be_positive(name: str) -> None:
    fields = {"length": 1, "document_tokens": 1, "base_tokens": 0, "header_tokens": 0, name: 0}
    with pytest.raises(ValueError, match=name):
        Sizes(count=len, **fields)


def test_nine_numbers_go_through_all_depths_and_orders() -> None:
    strata = [stratum(number) for number in range(18)]
    assert set(strata) == {(depth, order) for depth in (0.1, 0.5, 0.9) for order in range(3)}
    assert strata[:9] == strata[9:]
