"""Token ids of documents, remembered by content: the same documents come back."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock


class TokenCache:
    """A bounded, thread-safe memory of what texts encode to, least recently used out first.

    Args:
        encode: Encodes a text. Called outside the lock, so two threads may do the same work once.
        max_tokens: Bound on all ids held; 4 bytes each.
    """

    def __init__(self, encode: Callable[[str], list[int]], max_tokens: int = 4_000_000) -> None:
        self._encode = encode
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._entries: OrderedDict[bytes, array[int]] = OrderedDict()
        self._lock = Lock()

    def encode(self, text: str) -> list[int]:
        """Encode a text, or remember what it encodes to."""
        key = hashlib.sha256(text.encode()).digest()
        with self._lock:
            known = self._entries.get(key)
            if known is not None:
                self._entries.move_to_end(key)
        if known is not None:
            return known.tolist()
        token_ids = self._encode(text)
        self._keep(key, array("I", token_ids))
        return token_ids

    def _keep(self, key: bytes, token_ids: "array[int]") -> None:
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = token_ids
            self._num_tokens += len(token_ids)
            while self._num_tokens > self._max_tokens:
                _, evicted = self._entries.popitem(last=False)
                self._num_tokens -= len(evicted)
