"""BlendServingChat: vLLM's chat serving, with our outcome in its answers."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from typing_extensions import override
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.outputs import RequestOutput

from blend_engine.ports import BlendEngine
from blend_gateway.errors import RequestFailed
from blend_gateway.outcome import Outcome, unreported, with_report, without_report
from blend_gateway.serving.exchange import BlendChatRequest, Exchange


class BlendServingChat(OpenAIServingChat):
    """vLLM's chat serving whose streams begin only when their first token exists.

    So whatever keeps a request from starting is still an HTTP error, and headers can say what was
    reused.

    Args:
        blend_engine: The engine, as the gateway sees it.
        arguments: As `OpenAIServingChat`.
    """

    def __init__(self, *, blend_engine: BlendEngine, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._blend_engine = blend_engine

    @override
    async def chat_completion_stream_generator(
        self,
        request: BlendChatRequest,
        result_generator: AsyncGenerator[RequestOutput, None],
        *arguments: Any,
        **keywords: Any,
    ) -> AsyncGenerator[str, None]:
        """As vLLM's; raises what happens before the first token instead of sending it."""
        exchange = request.exchange
        async with aclosing(result_generator):
            outputs = await _with_first(result_generator)
            exchange.outcome = await self.outcome_of(exchange)
            events = super().chat_completion_stream_generator(
                request, exchange.watch(outputs), *arguments, **keywords
            )
            async with aclosing(events):
                async for event in events:
                    yield event

    async def outcome_of(self, exchange: Exchange) -> Outcome:
        """What came of a request; its first token exists."""
        plan = exchange.plan
        if plan.params is None:
            return without_report(plan)
        report = await self._blend_engine.report(plan.params.plan_id)
        if report is None:
            return unreported(plan)
        compiling = [self._blend_engine.is_compiling(document.key) for document in plan.documents]
        return with_report(plan, report, compiling)


async def _with_first(
    outputs: AsyncGenerator[RequestOutput, None],
) -> AsyncIterator[RequestOutput]:
    """Wait for the first output, then give all of them.

    Raises:
        RequestFailed: There is none.
    """
    first = await anext(outputs, None)
    if first is None:
        raise RequestFailed("the engine gave no answer")
    return _chain(first, outputs)


async def _chain(
    first: RequestOutput, rest: AsyncGenerator[RequestOutput, None]
) -> AsyncIterator[RequestOutput]:
    yield first
    async for output in rest:
        yield output
