"""VllmBackend: the chat backend over vLLM's serving classes and our engine."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from prometheus_client import generate_latest
from starlette.requests import Request
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.parser.metrics import init_parser_metrics
from vllm.renderers.chat_utils import load_chat_template
from vllm.v1.metrics.prometheus import get_prometheus_registry

from blend_engine.errors import ColdDocument
from blend_engine.ports import BlendEngine
from blend_gateway.assembler.documents import Resolver, parse_documents
from blend_gateway.errors import RequestFailed
from blend_gateway.outcome import Plan, cold_segments
from blend_gateway.ports import Completion, EventStream
from blend_gateway.protocol import ChatCall
from blend_gateway.salts import derive_salt
from blend_gateway.serving.chat import BlendServingChat
from blend_gateway.serving.exchange import Exchange, build_request
from blend_gateway.serving.failures import from_error_event, from_error_info, translate
from blend_gateway.serving.options import ServingOptions
from blend_gateway.serving.renderer import BlendRenderer
from blend_gateway.settings import Settings
from blend_gateway.sse import finish_events

_INTERNAL_RESPONSE_FIELDS = ("kv_transfer_params", "ec_transfer_params")


class VllmBackend:
    """Answers chats through `OpenAIServingChat` and `BlendRenderer`.

    Args:
        client: The engine as vLLM's serving classes see it.
        engine: The same engine as the gateway sees it.
        options: Set-up of the serving classes.
        settings: The gateway's settings.
        on_assembled: Called with the seconds an assembly took.
    """

    def __init__(
        self,
        client: EngineClient,
        engine: BlendEngine,
        options: ServingOptions,
        settings: Settings,
        *,
        on_assembled: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._client = client
        self._engine = engine
        self._settings = settings
        self._vocab_size: int = client.model_config.get_vocab_size()
        if options.tool_call_parser is not None:
            init_parser_metrics(model_name=options.served_model_names[0])
        self._models = OpenAIServingModels(
            engine_client=client,
            base_model_paths=[
                BaseModelPath(name=name, model_path=options.model)
                for name in options.served_model_names
            ],
        )
        shared: dict[str, Any] = {
            "request_logger": None,
            "chat_template": load_chat_template(options.chat_template),
            "chat_template_content_format": options.chat_template_content_format,
            "default_chat_template_kwargs": dict(options.default_chat_template_kwargs),
            "enable_auto_tools": options.enable_auto_tool_choice,
            "exclude_tools_when_tool_choice_none": options.exclude_tools_when_tool_choice_none,
            "tool_parser": options.tool_call_parser,
            "tool_strict_level": options.tool_strict_level,
            "reasoning_parser": options.reasoning_parser,
        }
        self._renderer = BlendRenderer(
            engine=engine,
            settings=settings,
            on_assembled=on_assembled,
            model_config=client.model_config,
            renderer=client.renderer,
            **shared,
        )
        self._chat = BlendServingChat(
            blend_engine=engine,
            engine_client=client,
            models=self._models,
            response_role=options.response_role,
            online_renderer=self._renderer,
            return_tokens_as_token_ids=options.return_tokens_as_token_ids,
            enable_prompt_tokens_details=True,
            **shared,
        )

    @property
    def engine(self) -> BlendEngine:
        """The engine behind it."""
        return self._engine

    async def chat(self, call: ChatCall, resolve: Resolver) -> Completion | EventStream:
        """Answer one request; cancel the call, or close the stream, to abort it.

        Raises:
            GatewayError: The request cannot be answered.
            BlendError: Neither, for a reason of the engine's.
        """
        exchange = Exchange(
            call=call,
            resolve=resolve,
            plan=Plan(salt=derive_salt(self._settings.salt_secret, call.tenant)),
        )
        try:
            return await self._answer(exchange)
        except ColdDocument as error:
            # The registry thought it warm; the engine, which knows, found it gone.
            raise cold_segments(exchange.plan, error.segment_indices) from error
        except Exception as error:
            translated = translate(error)
            if translated is error:
                raise
            raise translated from error

    async def _answer(self, exchange: Exchange) -> Completion | EventStream:
        call = exchange.call
        exchange.documents = parse_documents(call.documents)
        request = build_request(
            exchange,
            vocab_size=self._vocab_size,
            limits=self._settings.limits,
        )
        result = await self._chat.create_chat_completion(
            request, _traced_request(call.trace_headers)
        )
        if isinstance(result, ErrorResponse):
            raise from_error_info(result.error)
        if isinstance(result, ChatCompletionResponse):
            return await self._completion(exchange, result)
        return await self._event_stream(exchange, result)

    async def _completion(self, exchange: Exchange, response: ChatCompletionResponse) -> Completion:
        outcome = await self._chat.outcome_of(exchange)
        body = response.model_dump(mode="json")
        for name in _INTERNAL_RESPONSE_FIELDS:
            body.pop(name, None)
        outcome.add_to(body, reports=exchange.call.blend.reports)
        return Completion(body=body, outcome=outcome)

    async def _event_stream(
        self, exchange: Exchange, events: AsyncGenerator[str, None]
    ) -> EventStream:
        try:
            first = await anext(events, None)
        except BaseException:
            await events.aclose()
            raise
        if first is None or exchange.outcome is None:
            await events.aclose()
            raise RequestFailed("the engine gave no answer")

        def error_of(body: dict[str, Any]) -> Exception:
            if exchange.failure is not None:
                return translate(exchange.failure)
            return from_error_event(body)

        return EventStream(
            events=finish_events(
                first,
                events,
                exchange.outcome,
                reports=exchange.call.blend.reports,
                error_of=error_of,
            ),
            outcome=exchange.outcome,
        )

    async def encode_document(self, text: str) -> Sequence[int]:
        """Tokenize a document's text exactly as a chat request does."""
        return await self._renderer.encode_document(text)

    async def models(self) -> dict[str, Any]:
        """OpenAI's list of models, each with a `blend` object."""
        listed: dict[str, Any] = (await self._models.show_available_models()).model_dump()
        for card in listed["data"]:
            card["owned_by"] = "blendgate"
            for name in ("permission", "root"):  # the latter is a path on this machine
                card.pop(name, None)
        return listed

    async def check_health(self) -> None:
        """Raise where the engine is dead.

        Raises:
            EngineDown: It is.
        """
        try:
            await self._client.check_health()
        except Exception as error:
            raise translate(error) from error

    def metrics_exposition(self) -> bytes:
        """VLLM's series in Prometheus' text format."""
        return generate_latest(get_prometheus_registry())

    def close(self) -> None:
        """Stop the engine."""
        self._renderer.close()
        self._client.shutdown()


def _traced_request(trace_headers: Mapping[str, str]) -> Request | None:
    """The only part of the HTTP request that vLLM gets to see.

    From any other header it would take priorities, session and request ids.
    """
    if not trace_headers:
        return None
    headers = [(name.encode(), value.encode()) for name, value in trace_headers.items()]
    return Request({"type": "http", "headers": headers})
