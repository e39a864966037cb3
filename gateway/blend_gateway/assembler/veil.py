"""Stand-ins for untrusted strings while a chat template renders.

A template may trim its input, dump it as JSON, or look for markup in it, and then writes control
tokens of its own around it. Rendered with stand-ins, whatever is not a stand-in is the template's.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from blend_gateway.assembler.documents import Document, is_unicode
from blend_gateway.assembler.errors import MessageError

Form = Callable[[str], str]


def _raw(text: str) -> str:
    return text


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_ascii(text: str) -> str:
    return json.dumps(text)[1:-1]


_PROBE = '"\u00e9'
"""Part of every stand-in: how it comes out says how the template writes strings at that place."""

_FORMS: Mapping[str, Form] = {form(_PROBE): form for form in (_raw, _json, _json_ascii)}


@dataclass(frozen=True, slots=True)
class Leaf:
    """A place in a rendering where an untrusted text stands."""

    start: int
    end: int
    index: int
    form: Form


@dataclass(frozen=True, slots=True)
class DocumentMark:
    """A place in a rendering where a document stands."""

    start: int
    end: int
    index: int


class Veil:
    """The untrusted strings of one request and the stand-ins they were given.

    Not shared between requests: the stand-ins are random, so no caller can write one.

    Args:
        markup: Characters that control tokens are made of, besides letters, digits and blanks.
    """

    def __init__(self, markup: frozenset[str]) -> None:
        self.texts: list[str] = []
        self.documents: list[Document] = []
        self.leading: set[int] = set()
        self._markup = markup
        self._open = f"Q{secrets.token_hex(12)}x"
        self._close = f"x{secrets.token_hex(12)}Q"
        middles = "|".join(re.escape(middle) for middle in _FORMS)
        self._pattern = re.compile(f"{self._open}([td])([0-9]+)k({middles}){self._close}")

    def cover(self, text: str, param: str, *, is_leading: bool = False) -> str:
        """Hide an untrusted text. Outer blanks stay, so that a template can trim them.

        Args:
            text: The text; empty and blank ones need no cover.
            param: Its path in the request, for errors.
            is_leading: Whether it may stand inside the leading segment.

        Raises:
            MessageError: The text is not encodable as UTF-8.
        """
        if not is_unicode(text):
            raise MessageError(f"`{param}` must not contain lone surrogates", param, "invalid_text")
        core = text.strip()
        if not core:
            return text
        index = len(self.texts)
        self.texts.append(core)
        if is_leading:
            self.leading.add(index)
        start = len(text) - len(text.lstrip())
        return text[:start] + self._stand_in("t", index) + text[start + len(core) :]

    def cover_if_markup(self, text: str, param: str, *, is_leading: bool = False) -> str:
        """Hide a text that holds markup; a name or a type stays for the template to see."""
        if is_unicode(text) and self._markup.isdisjoint(text):
            return text
        return self.cover(text, param, is_leading=is_leading)

    def cover_tree(self, value: Any, param: str, *, is_leading: bool = False) -> Any:
        """Hide whatever holds markup in a tree of plain data, keys included."""
        if isinstance(value, str):
            return self.cover_if_markup(value, param, is_leading=is_leading)
        if isinstance(value, Mapping):
            return {
                self.cover_if_markup(str(key), param, is_leading=is_leading): self.cover_tree(
                    item, f"{param}.{key}", is_leading=is_leading
                )
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [
                self.cover_tree(item, f"{param}[{index}]", is_leading=is_leading)
                for index, item in enumerate(value)
            ]
        return value

    def place(self, document: Document) -> str:
        """Hide a whole document."""
        self.documents.append(document)
        return self._stand_in("d", len(self.documents) - 1)

    def find(self, rendered: str) -> list[Leaf | DocumentMark] | None:
        """Where the stand-ins stand, in order; None where the template has altered one."""
        found: list[Leaf | DocumentMark] = []
        for match in self._pattern.finditer(rendered):
            kind, index, middle = match.groups()
            if kind == "d":
                found.append(DocumentMark(match.start(), match.end(), int(index)))
            else:
                found.append(Leaf(match.start(), match.end(), int(index), _FORMS[middle]))
        # In any case of letters, so that a copy in capitals does not pass for ordinary text.
        shown = rendered.casefold()
        opened, closed = shown.count(self._open.casefold()), shown.count(self._close.casefold())
        return found if opened == closed == len(found) else None

    def fill(self, rendered: str, texts: list[str]) -> str:
        """Put texts in place of their stand-ins; documents stay hidden."""

        def replacement(match: re.Match[str]) -> str:
            kind, index, middle = match.groups()
            return match.group() if kind == "d" else _FORMS[middle](texts[int(index)])

        return self._pattern.sub(replacement, rendered)

    def fill_tree(self, value: Any, texts: list[str]) -> Any:
        """`fill` every string of a tree of plain data."""
        if isinstance(value, str):
            return self.fill(value, texts)
        if isinstance(value, Mapping):
            return {
                self.fill(str(key), texts): self.fill_tree(item, texts)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self.fill_tree(item, texts) for item in value]
        return value

    def inert_texts(self, special: re.Pattern[str]) -> list[str]:
        """The texts with every special string in them overwritten."""
        return [special.sub(lambda match: "x" * len(match.group()), text) for text in self.texts]

    def _stand_in(self, kind: str, index: int) -> str:
        return f"{self._open}{kind}{index}k{_PROBE}{self._close}"


def longest_first(strings: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds any of the strings, the longest where several begin."""
    ordered = sorted(set(strings), key=len, reverse=True)
    return re.compile("|".join(re.escape(string) for string in ordered) or "(?!)")
