"""What documents are compiled behind: names, and the token ids they stand for.

    alone                     nothing
    ballast                   what the engine compiles `free` segments behind
    anchored                  the prompt's own beginning, up to its first document
    text:SOURCE:N[:K]         a chat's opening, N tokens of running text, a header
    framed:SOURCE:N:D[:K]     the same text as D documents under headers
    pairs                     the document before it in the prompt, in the place of a first one
    mean:NAME,NAME,...        the mean of several compiles (`+` for `:` inside)

SOURCE is `pydoc` (Python's own documentation), `own` (the engine's ballast, repeated) or `tokens`
(random ids); K picks another piece of it.
"""

import pydoc_data.topics
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from blend_engine import preamble as shipped
from blend_engine.quality.blending import Prompt
from blend_engine.quality.compiling import (
    CompiledDocument,
    Preamble,
    averaged,
    compile_documents,
    prepare_preamble,
)
from blend_engine.quality.model import QualityModel

_STRIDE = 7919
"""Tokens between the pieces of a source; a prime, so that few pieces begin alike."""


class UnknownContext(ValueError):
    """No such context."""


class Contexts:
    """Compiles a prompt's documents behind named contexts; computes each constant one once.

    Args:
        model: The model.
        tokenizer: Its Hugging Face tokenizer.
    """

    def __init__(self, model: QualityModel, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._prepared: dict[str, Preamble] = {}

    def compile(self, name: str, prompt: Prompt) -> list[CompiledDocument]:
        """A prompt's documents, behind the named context.

        Raises:
            UnknownContext: There is none of this name.
        """
        kind, _, rest = name.partition(":")
        documents = [prompt.ids_T[start:end] for start, end in prompt.documents]
        if kind == "mean":
            names = [each.replace("+", ":") for each in rest.split(",")]
            return averaged(self._model, [self.compile(each, prompt) for each in names])
        if kind == "pairs":
            return self._pairs(documents)
        if kind == "anchored":
            beginning = prompt.ids_T[: prompt.documents[0][0]]
            preamble = prepare_preamble(self._model, beginning)
        else:
            if name not in self._prepared:
                self._prepared[name] = prepare_preamble(self._model, self._ids(name))
            preamble = self._prepared[name]
        return compile_documents(self._model, documents, preamble)

    def _ids(self, name: str) -> Tensor:
        kind, *rest = name.split(":")
        try:
            constant = self._constant(kind, rest)
        except (KeyError, ValueError, IndexError) as error:
            raise UnknownContext(
                f"no context {name!r}: see blend_engine.quality.contexts"
            ) from error
        return torch.tensor(constant, dtype=torch.int64)

    def _constant(self, kind: str, rest: Sequence[str]) -> list[int]:
        if kind == "alone":
            return []
        if kind == "ballast":
            return shipped.ballast_ids(self._tokenizer)
        if kind == "text":
            source, length, *piece = rest
            text = self._text(source, int(length), int(piece[0]) if piece else 0)
            return [*self._opening, *text, *self._separator, *self._header(2)]
        if kind != "framed":
            raise KeyError(kind)
        source, length, count, *piece = rest
        text = self._text(source, int(length), int(piece[0]) if piece else 0)
        ids, size = list(self._opening), int(length) // int(count)
        for number in range(int(count)):
            ids += [*self._header(number + 1), *text[number * size : (number + 1) * size]]
            ids += self._separator
        return [*ids, *self._header(int(count) + 1)]

    def _pairs(self, documents: Sequence[Tensor]) -> list[CompiledDocument]:
        compiled = []
        for number, document in enumerate(documents):
            before = documents[number - 1].tolist()
            ids = [*self._opening, *self._header(1), *before, *self._separator, *self._header(2)]
            preamble = prepare_preamble(self._model, torch.tensor(ids))
            compiled += compile_documents(self._model, [document], preamble)
        return compiled

    def _text(self, source: str, length: int, piece: int) -> list[int]:
        if source == "tokens":
            generator = torch.Generator().manual_seed(piece)
            vocabulary = self._model.vocab_size
            random = torch.randint(vocabulary // 8, vocabulary, (length,), generator=generator)
            return [int(each) for each in random]
        ids = {"pydoc": self._pydoc, "own": self._own}[source]()
        first = piece * _STRIDE % len(ids)
        return (ids[first:] + ids * (1 + length // len(ids)))[:length]

    def _pydoc(self) -> list[int]:
        return self._pydoc_ids

    def _own(self) -> list[int]:
        return self._encode(" ".join(shipped.BALLAST))

    @cached_property
    def _pydoc_ids(self) -> list[int]:
        topics = pydoc_data.topics.topics
        long = [topics[name] for name in sorted(topics) if len(topics[name]) > 3000]
        return self._encode(" ".join(" ".join(long).split()))

    @cached_property
    def _opening(self) -> list[int]:
        return [*shipped.opening_ids(self._tokenizer), *self._separator]

    @cached_property
    def _separator(self) -> list[int]:
        return self._encode(shipped.SEPARATOR_TEXT)

    def _header(self, number: int) -> list[int]:
        return [*self._encode(shipped.document_header(number)), *self._separator]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))
