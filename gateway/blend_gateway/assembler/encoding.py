"""A fast tokenizer seen three ways: text only, control tokens only, and text in mid-prompt.

All are copies made once. The shared tokenizer's own switches are state that other threads see, so
they are never touched.
"""

import json
import secrets
from collections.abc import Iterable
from typing import Any, cast

from tokenizers import Tokenizer

from blend_gateway.assembler.errors import TemplateError

Spec = dict[str, Any]


class TextEncoders:
    """Encode text and find control tokens, the two apart.

    A control token is any added token but blanks and plain words. In text none is ever matched:
    their names in the copies are random, so no text can spell one, neither by the added vocabulary
    nor through the model's own vocabulary or merges.

    Attributes:
        control_tokens: Token content to id.

    Args:
        backend: The `tokenizers.Tokenizer` behind a fast tokenizer. Only read.

    Raises:
        TemplateError: The tokenizer cannot be copied with all its ids in place.
    """

    def __init__(self, backend: Tokenizer) -> None:
        spec = json.loads(backend.to_str())
        self.control_tokens: dict[str, int] = {
            token["content"]: token["id"] for token in spec["added_tokens"] if not is_plain(token)
        }
        self._finder = Tokenizer.from_str(json.dumps(_finder_spec(spec, self.control_tokens)))
        # By id: the token text of a match includes the blanks it swallowed.
        self._found_ids: dict[int, int] = {
            found: token_id
            for content, token_id in self.control_tokens.items()
            if (found := self._finder.token_to_id(content)) is not None
        }
        names = {content: secrets.token_hex(16) for content in self.control_tokens}
        text_spec = _rename(spec, names)
        later_spec = _without_first_prefix(text_spec)
        inner_spec = _without_prefix(text_spec)
        self._first = _tokenizer(text_spec)
        self._later = self._first if later_spec == text_spec else _tokenizer(later_spec)
        self._inner = self._later if inner_spec == later_spec else _tokenizer(inner_spec)
        for token in spec["added_tokens"]:
            name = names.get(token["content"], token["content"])
            if self._first.token_to_id(name) != token["id"]:
                raise TemplateError(
                    f"this model's tokenizer cannot be copied: token {token['content']!r} would"
                    " not keep its id",
                    "tokenizer_unsupported",
                )

    def encode_run(self, text: str, *, is_first: bool) -> list[int]:
        """Encode what stands between two control tokens, as the model's tokenizer would there.

        Args:
            text: The run.
            is_first: Whether the prompt begins with it.
        """
        return _ids(self._first if is_first else self._later, text)

    def encode(self, text: str) -> list[int]:
        """Encode text that stands anywhere: nothing is put in front of it."""
        return _ids(self._inner, text)

    def find_control_tokens(self, rendered: str) -> list[tuple[int, int, int]]:
        """Match control tokens as the model's tokenizer does.

        Returns:
            ``(start, end, token id)`` in characters, in order. A token that swallows the blanks
            beside it covers them.
        """
        encoding = self._finder.encode(rendered, add_special_tokens=False)
        return [
            (start, end, self._found_ids[found])
            for found, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
            if found in self._found_ids
        ]


def is_plain(token: Spec) -> bool:
    """Whether an added token means nothing but its text: blanks, or a word that is not special.

    Gemma and GPT-NeoX keep runs of blanks or newlines as added tokens.
    """
    bare = token["content"].replace("\u2581", " ")
    is_word = all(character.isalnum() or character.isspace() for character in bare)
    return bare.isspace() or (is_word and not token["special"])


def _tokenizer(spec: Spec) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(spec))


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def _finder_spec(spec: Spec, control_tokens: Iterable[str]) -> Spec:
    """A tokenizer that knows the control tokens and takes everything else as unknown."""
    wanted = set(control_tokens)
    unknown = secrets.token_hex(16)
    return {
        **spec,
        "truncation": None,
        "padding": None,
        "added_tokens": [token for token in spec["added_tokens"] if token["content"] in wanted],
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {unknown: 0}, "unk_token": unknown},
    }


def _rename(spec: Spec, names: dict[str, str]) -> Spec:
    """Give control tokens other names wherever the tokenizer keeps them, at the same ids."""
    added = [
        {**token, "content": names.get(token["content"], token["content"])}
        for token in spec["added_tokens"]
    ]
    return {
        **spec,
        "truncation": None,
        "padding": None,
        "post_processor": None,
        "added_tokens": added,
        "model": _rename_model(spec["model"], names),
    }


def _rename_model(model: Spec, names: dict[str, str]) -> Spec:
    vocab = model["vocab"]
    renamed = {**model}
    if isinstance(vocab, list):  # Unigram: its unknown token is an index
        renamed["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
        return renamed
    renamed["vocab"] = {names.get(piece, piece): token_id for piece, token_id in vocab.items()}
    if model.get("unk_token") is not None:
        renamed["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        renamed["merges"] = [merge for merge in model["merges"] if not _touches(merge, names)]
    return renamed


def _touches(merge: str | list[str], names: dict[str, str]) -> bool:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left in names or right in names or left + right in names


def _without_first_prefix(spec: Spec) -> Spec:
    """For runs that do not begin the prompt: Metaspace's scheme `first` looks at offset 0."""

    def change(part: Spec) -> Spec | None:
        if part["type"] == "Metaspace" and part.get("prepend_scheme") == "first":
            return {**part, "prepend_scheme": "never"}
        return part

    return {**spec, "pre_tokenizer": _change_parts(spec["pre_tokenizer"], change, "pretokenizers")}


def _without_prefix(spec: Spec) -> Spec:
    """For text inside a run: no blank is put before it, as none would be in one piece."""

    def change(part: Spec) -> Spec | None:
        if part["type"] == "Metaspace":
            return {**part, "prepend_scheme": "never"}
        if part["type"] == "ByteLevel":
            return {**part, "add_prefix_space": False}
        return part

    def drop_prepend(part: Spec) -> Spec | None:
        return None if part["type"] == "Prepend" else part

    return {
        **spec,
        "normalizer": _change_parts(spec["normalizer"], drop_prepend, "normalizers"),
        "pre_tokenizer": _change_parts(spec["pre_tokenizer"], change, "pretokenizers"),
    }


def _change_parts(part: Spec | None, change: Any, nested: str) -> Spec | None:
    if part is None:
        return None
    if part["type"] == "Sequence":
        inner = [_change_parts(item, change, nested) for item in part[nested]]
        return {**part, nested: [item for item in inner if item is not None]}
    return cast("Spec | None", change(part))
