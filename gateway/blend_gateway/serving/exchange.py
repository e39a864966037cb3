"""Exchange: one chat request on its way through vLLM's serving classes, and how it is carried.

vLLM hands its own request model from the route to the renderer to the generator. Ours is a subclass
that carries the exchange in a private attribute, so nothing is looked up in shared state.
"""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import PrivateAttr, ValidationError
from vllm.entrypoints.generate.base.protocol import StreamOptions
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.outputs import RequestOutput

from blend_gateway.assembler.documents import Document, Resolver
from blend_gateway.errors import InvalidRequest, UnsupportedField
from blend_gateway.outcome import Outcome, Plan
from blend_gateway.protocol import ChatCall
from blend_gateway.settings import Limits


@dataclass(slots=True, kw_only=True)
class Exchange:
    """What came in, what was planned, and what came of it.

    Args:
        call: The request.
        resolve: Finds registered documents.
        plan: Looks nothing up until the prompt exists.
        documents: The request's top-level documents, once they are read.
        outcome: Set once the first token exists.
        failure: What ended the generation after its first token.
    """

    call: ChatCall
    resolve: Resolver
    plan: Plan
    documents: tuple[Document, ...] = ()
    outcome: Outcome | None = None
    failure: Exception | None = None

    async def watch(self, outputs: AsyncIterator[RequestOutput]) -> AsyncGenerator[RequestOutput]:
        """Pass outputs on; keep the error that ends them, which vLLM turns into text."""
        try:
            async for output in outputs:
                yield output
        except Exception as error:
            self.failure = error
            raise


_UNTELLING = ("_type", "_parsing", "literal_error", "model_attributes_type")


class BlendChatRequest(ChatCompletionRequest):
    """vLLM's chat request, carrying ours."""

    _exchange: Exchange | None = PrivateAttr(default=None)

    @property
    def exchange(self) -> Exchange:
        """The exchange this request belongs to."""
        assert self._exchange is not None, "requests are made by `build_request`"
        return self._exchange


def build_request(exchange: Exchange, *, vocab_size: int, limits: Limits) -> BlendChatRequest:
    """Make vLLM's request from a call.

    Args:
        exchange: The request's exchange.
        vocab_size: Token ids beyond it are refused here; the engine would die of some of them.
        limits: Of one request.

    Raises:
        InvalidRequest: vLLM's model rejects a field, or a number is out of bounds.
    """
    call = exchange.call
    _check_sizes(call.payload, limits)
    if call.num_documents and call.payload.get("truncate_prompt_tokens") is not None:
        raise UnsupportedField(
            "`truncate_prompt_tokens` would cut documents away unsaid; send fewer of them",
            param="truncate_prompt_tokens",
        )
    request = _validate(call.payload)
    if request.n is not None and not 1 <= request.n <= limits.choices:
        raise InvalidRequest(
            f"`n` must be in [1, {limits.choices}], got {request.n}",
            param="n",
            code="invalid_value",
        )
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        _check_token_ids(getattr(request, name) or (), name, vocab_size)
    _check_token_ids([_bias_key(key) for key in request.logit_bias or {}], "logit_bias", vocab_size)
    request._exchange = exchange
    request.cache_salt = exchange.plan.salt
    if request.stream and call.num_documents and call.blend.report is True:
        asked = request.stream_options or StreamOptions()
        request.stream_options = asked.model_copy(update={"include_usage": True})
    return request


def _check_sizes(payload: Mapping[str, Any], limits: Limits) -> None:
    """Refuse what vLLM would work on for seconds, in the event loop or in the engine."""
    for name in ("structured_outputs", "response_format"):
        if len(json.dumps(payload.get(name))) > limits.grammar_chars:
            raise InvalidRequest(
                f"`{name}` must have at most {limits.grammar_chars} characters as JSON",
                param=name,
                code="invalid_value",
            )
    for name in ("stop", "bad_words"):
        value = payload.get(name)
        texts = [value] if isinstance(value, str) else value if isinstance(value, list) else []
        for text in texts:
            if isinstance(text, str) and len(text) > limits.stop_chars:
                raise InvalidRequest(
                    f"a text in `{name}` must have at most {limits.stop_chars} characters",
                    param=name,
                    code="invalid_value",
                )


def _validate(payload: dict[str, Any]) -> BlendChatRequest:
    try:
        request: BlendChatRequest = BlendChatRequest.model_validate(payload)
    except ValidationError as error:
        raise _first_error(error) from error
    except (AttributeError, KeyError, TypeError) as error:
        # vLLM's own validators reach into nested values before their types are checked.
        name = "structured_outputs"
        is_it = payload.get(name) is not None and not isinstance(payload[name], dict)
        raise InvalidRequest(
            "a nested field of the request has the wrong type",
            param=name if is_it else None,
            code="invalid_type",
        ) from error
    return request


def _bias_key(key: str) -> int:
    if key.isascii() and key.isdecimal():
        return int(key)
    raise InvalidRequest(
        f"`logit_bias` must map token ids to numbers, got the key {key[:64]!r}",
        param="logit_bias",
        code="invalid_value",
    )


def _check_token_ids(token_ids: Any, name: str, vocab_size: int) -> None:
    if len(token_ids) > vocab_size:
        raise InvalidRequest(
            f"`{name}` must have at most {vocab_size} entries", param=name, code="invalid_value"
        )
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"`{name}` must hold token ids in [0, {vocab_size}), got {token_id}",
                param=name,
                code="invalid_value",
            )


def _first_error(error: ValidationError) -> InvalidRequest:
    """The first telling one of pydantic's errors.

    A union has one for every branch; that a branch's type did not fit says the least.
    """
    errors: list[Any] = error.errors(include_url=False, include_input=False)
    details: Mapping[str, Any] = next(
        (each for each in errors if not each["type"].endswith(_UNTELLING)), errors[0]
    )
    param = ""
    for step in details["loc"][:2]:
        if isinstance(step, int):
            param += f"[{step}]"
        elif not param:
            param = str(step)
    return InvalidRequest(
        f"`{param}`: {details['msg']}" if param else details["msg"],
        param=param or None,
        code="invalid_value",
    )
