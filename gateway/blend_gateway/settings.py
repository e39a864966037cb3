"""The gateway's settings: frozen, validated once, handed on as arguments."""

import math
import secrets
from dataclasses import dataclass, field

from blend_engine.protocol import DEFAULT_CHECK_LAYER, Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one request, and one tenant, may ask for.

    Args:
        body_bytes: Bytes of a request body; more is a 413.
        json_depth: Nesting of a JSON body.
        messages: Messages of one chat request.
        choices: `n` of one chat request.
        grammar_chars: Characters of `structured_outputs` or `response_format`, as JSON.
        stop_chars: Characters of one text in `stop` or `bad_words`.
        documents_per_request: Documents of one chat request or registration.
        document_bytes: Bytes of one document's text, as UTF-8.
        title_chars: Characters of a document's title or id.
        metadata_pairs: Keys of a registered document's metadata.
        registered_documents: Documents one tenant may have registered.
        wait_s: Seconds a request may `?wait` for a document.
        warning_names: Field names listed in a warning header.
    """

    body_bytes: int = 8 << 20
    json_depth: int = 64
    messages: int = 2048
    choices: int = 16
    grammar_chars: int = 1 << 16
    stop_chars: int = 1024
    documents_per_request: int = 64
    document_bytes: int = 1 << 20
    title_chars: int = 512
    metadata_pairs: int = 16
    registered_documents: int = 10_000
    wait_s: float = 600.0
    warning_names: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything the gateway itself can be told; the engine's flags go to the engine.

    Args:
        host: Address to listen on.
        port: Port to listen on.
        policy: Which hit tokens a blended request recomputes unless it says otherwise.
        recompute_ratio: Budget of `policy`, in [0, 1].
        check_layer: Layer whose KV deviation `Policy.HKVD` ranks by.
        salt_secret: Key of the cache salts; random in every process.
        drain_s: Seconds that open streams get at shutdown.
        limits: See `Limits`.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    policy: Policy = Policy.SINKS
    recompute_ratio: float = 0.10
    check_layer: int = DEFAULT_CHECK_LAYER
    salt_secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    drain_s: int = 30
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        """Validate.

        Raises:
            ValueError: A number is out of range.
        """
        ratio = self.recompute_ratio
        if not (math.isfinite(ratio) and 0.0 <= ratio <= 1.0):
            raise ValueError(f"`recompute_ratio` must be in [0, 1], got {ratio!r}")
        if self.check_layer < 0:
            raise ValueError(f"`check_layer` must be >= 0, got {self.check_layer!r}")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"`port` must be in [0, 65535], got {self.port!r}")
