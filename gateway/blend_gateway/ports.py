"""What the routes need of the serving side; `blend_gateway.serving` is the real one."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from blend_engine.ports import BlendEngine
from blend_gateway.assembler.documents import Resolver
from blend_gateway.outcome import Outcome
from blend_gateway.protocol import ChatCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer, and what came of the request's documents."""

    body: dict[str, Any]
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class EventStream:
    """A streamed answer whose first token exists.

    Args:
        events: Server-sent events, complete with ``data:`` and the blank line. Close it to abort.
        outcome: What came of the request's documents.
    """

    events: AsyncGenerator[str, None]
    outcome: Outcome


class ChatBackend(Protocol):
    """Answers chat requests. Raises `GatewayError` and the engine's own errors, nothing else."""

    @property
    def engine(self) -> BlendEngine:
        """The engine behind it."""

    async def chat(self, call: ChatCall, resolve: Resolver) -> Completion | EventStream:
        """Answer one request; cancel the call, or close the stream, to abort it."""

    async def encode_document(self, text: str) -> Sequence[int]:
        """Tokenize a document's text exactly as a chat request does."""

    async def models(self) -> dict[str, Any]:
        """OpenAI's list of models, each with a `blend` object."""

    async def check_health(self) -> None:
        """Raise where the engine is dead.

        Raises:
            EngineDown: It is.
        """

    def metrics_exposition(self) -> bytes:
        """VLLM's series in Prometheus' text format."""

    def close(self) -> None:
        """Stop the engine."""
