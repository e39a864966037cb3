"""From a task to the token ids that the product itself would send to the model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blend_gateway.assembler import AssembledPrompt, Assembler, Document
from blend_gateway.assembler.template import ChatTokenizer
from blend_gateway.evaluation.tasks import Sizes, Task

SYSTEM = (
    "You answer questions about the documents that you are given. Answer in one short sentence,"
    " with what the documents say and nothing else."
)
"""The system message of every evaluation prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPrompt:
    """A task as token ids.

    Args:
        task: What it was made of.
        token_ids: The whole prompt, the assistant's turn opened.
        documents: Half-open token ranges of the documents' texts, in order.
        question: Half-open token range of everything behind the last document.
        answer_ids: The right answer's tokens, as the reply would begin.
        candidate_ids: The same for every candidate; the answer is the first.
    """

    task: Task
    token_ids: tuple[int, ...]
    documents: tuple[tuple[int, int], ...]
    question: tuple[int, int]
    answer_ids: tuple[int, ...]
    candidate_ids: tuple[tuple[int, ...], ...]


class PromptMaker:
    """Assembles tasks as a chat request with top-level documents is assembled.

    Args:
        tokenizer: The model's Hugging Face fast tokenizer. Only read.
        system: The system message.
        chat_template: As `Assembler` takes it; None for the tokenizer's own.
        template_arguments: More arguments for the chat template.

    Raises:
        TemplateError: The tokenizer has no Rust backend.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        system: str = SYSTEM,
        chat_template: str | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self._assembler = Assembler(tokenizer, chat_template)
        self._system = system
        self._template_arguments = template_arguments

    def count(self, text: str) -> int:
        """Tokens of a document's text, wherever it stands."""
        return len(self._assembler.encode_text(text))

    def sizes(self, length: int, document_tokens: int = 256) -> Sizes:
        """What generators need to know to meet a length in this model's tokens.

        Args:
            length: The whole prompt's tokens.
            document_tokens: A document's tokens.
        """
        text = "A sentence."
        one, two = (
            len(self._assemble([Document(text=text)] * number, text).token_ids) for number in (1, 2)
        )
        num_text_tokens = self.count(text)
        header_tokens = two - one - num_text_tokens
        return Sizes(
            length=length,
            document_tokens=document_tokens,
            count=self.count,
            base_tokens=one - header_tokens - 2 * num_text_tokens,
            header_tokens=header_tokens,
        )

    def make(self, task: Task) -> EvalPrompt:
        """Assemble one task.

        Raises:
            AssemblyError: The model's chat template cannot take documents.
        """
        documents = [
            Document(text=text, title=title)
            for text, title in zip(task.documents, task.titles, strict=True)
        ]
        assembled = self._assemble(documents, task.question)
        spans = tuple((segment.start, segment.end) for segment in assembled.document_segments)
        candidate_ids = tuple(tuple(self._assembler.encode_text(c)) for c in task.candidates)
        return EvalPrompt(
            task=task,
            token_ids=tuple(assembled.token_ids),
            documents=spans,
            question=(spans[-1][1], len(assembled.token_ids)),
            answer_ids=candidate_ids[0],
            candidate_ids=candidate_ids,
        )

    def _assemble(self, documents: list[Document], question: str) -> AssembledPrompt:
        assembled = self._assembler.assemble(
            [
                {"role": "system", "content": self._system},
                {"role": "user", "content": question},
            ],
            documents,
            chat_template_kwargs=self._template_arguments,
        )
        assert assembled is not None, "with documents the assembler returns a prompt or raises"
        return assembled
