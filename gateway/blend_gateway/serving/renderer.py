"""BlendRenderer: vLLM's online renderer with our assembler in it."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from typing_extensions import override
from vllm.inputs import TokensPrompt
from vllm.renderers.hf import HfRenderer, resolve_chat_template
from vllm.renderers.online_renderer import OnlineRenderer

from blend_engine.ports import BlendEngine
from blend_gateway.assembler import AssembledPrompt, Assembler
from blend_gateway.assembler.errors import TemplateError
from blend_gateway.errors import ContextLengthExceeded, InvalidRequest
from blend_gateway.planning import Prompt, PromptDocument, make_plan
from blend_gateway.registration import check_document
from blend_gateway.serving.exchange import BlendChatRequest, Exchange
from blend_gateway.settings import Settings

_NOT_OURS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "documents",
        "tokenize",
        "tools",
    }
)
"""Template arguments that vLLM merges in and that the assembler takes by name or makes itself."""


class BlendRenderer(OnlineRenderer):
    """Renders chats to token ids whose documents are spans, and plans what becomes of them.

    Args:
        engine: Says what is resident.
        settings: Defaults of blending, and the secret of the salts.
        on_assembled: Called with the seconds an assembly took.
        content_format: How templates get content; None to find out.
        online_renderer_arguments: As `OnlineRenderer`.
    """

    def __init__(
        self,
        *,
        engine: BlendEngine,
        settings: Settings,
        on_assembled: Callable[[float], None],
        **online_renderer_arguments: Any,
    ) -> None:
        super().__init__(**online_renderer_arguments)
        self._engine = engine
        self._settings = settings
        self._on_assembled = on_assembled
        # One thread: tokenizing is CPU work that must not hold up the event loop.
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="assembler")
        self._assembler = self._make_assembler()

    @override
    async def preprocess_chat(
        self,
        request: Any,
        messages: Any,
        default_template: str | None,
        default_template_content_format: Any,
        default_template_kwargs: dict[str, Any] | None,
        tool_dicts: list[dict[str, Any]] | None = None,
        parser: Any = None,
        *,
        skip_mm_cache: bool = False,
    ) -> Any:
        """As vLLM's, with the assembler's token ids.

        vLLM takes ids that come with the request instead of rendering, and does everything else it
        does with a request, so its own code runs for tools and reasoning.
        """
        prompt = await self._assemble(request, default_template_kwargs, tool_dicts)
        if prompt is not None:
            prompt = self._fit(prompt, request)
            request.exchange.plan = make_plan(
                request.exchange.call, prompt, self._engine, self._settings
            )
            request.cache_salt = request.exchange.plan.salt
            request.kv_transfer_params = {"prompt_token_ids": prompt.token_ids}
        conversation, inputs = await super().preprocess_chat(
            request,
            messages if prompt is None else [],
            default_template,
            default_template_content_format,
            default_template_kwargs,
            tool_dicts,
            parser,
            skip_mm_cache=skip_mm_cache,
        )
        params = request.exchange.plan.params
        request.kv_transfer_params = None if params is None else params.to_kv_transfer_params()
        if request.return_prompt_text and prompt is not None:
            inputs[0]["prompt"] = self.renderer.get_tokenizer().decode(prompt.token_ids)
        return conversation, inputs

    @override
    def _make_request_with_harmony(self, request: Any, should_include_tools: bool = True) -> Any:
        """As vLLM's; its messages have no place for documents."""
        self._refuse_documents(request.exchange)
        return super()._make_request_with_harmony(request, should_include_tools)

    async def encode_document(self, text: str) -> list[int]:
        """Tokenize a document's text exactly as in a prompt.

        Raises:
            InvalidRequest: This model's prompts take no documents.
        """
        if self._assembler is None:
            raise self._no_documents("documents")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._assembler.encode_document, text)

    def close(self) -> None:
        """Stop the assembler's thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _make_assembler(self) -> Assembler | None:
        """None where prompts are not made by a Jinja template and a fast tokenizer."""
        if self.use_harmony or not isinstance(self.renderer, HfRenderer):
            return None
        content_format = self.chat_template_content_format
        try:
            return Assembler(
                self.renderer.get_tokenizer(),
                self.chat_template or self._fallback_template(),
                None if content_format == "auto" else content_format,
            )
        except TemplateError:
            return None

    def _fallback_template(self) -> str | None:
        """What vLLM renders with where the tokenizer has no template; None where it has one."""
        tokenizer = self.renderer.get_tokenizer()
        try:
            tokenizer.get_chat_template()
        except ValueError:
            fallback: str | None = resolve_chat_template(
                tokenizer, None, None, model_config=self.model_config
            )
            return fallback
        return None

    async def _assemble(
        self,
        request: BlendChatRequest,
        default_kwargs: dict[str, Any] | None,
        tool_dicts: list[dict[str, Any]] | None,
    ) -> Prompt | None:
        """The prompt; None where vLLM must render it itself, which it does without documents."""
        exchange = request.exchange
        if self._assembler is None:
            self._refuse_documents(exchange)
            return None
        self._check_length(request)
        started = time.perf_counter()
        loop = asyncio.get_running_loop()
        assembled = await loop.run_in_executor(
            self._threads, self._run_assembler, request, default_kwargs, tool_dicts
        )
        self._on_assembled(time.perf_counter() - started)
        if assembled is None:
            self._refuse_documents(exchange)
            return None
        for index, document in enumerate(assembled.documents):
            check_document(document, f"documents[{index}]", self._settings.limits)
        return _to_prompt(assembled)

    def _run_assembler(
        self,
        request: BlendChatRequest,
        default_kwargs: dict[str, Any] | None,
        tool_dicts: list[dict[str, Any]] | None,
    ) -> AssembledPrompt | None:
        assert self._assembler is not None
        exchange = request.exchange
        params = request.build_chat_params(None, "auto").with_defaults(default_kwargs)
        kwargs = params.chat_template_kwargs
        return self._assembler.assemble(
            exchange.call.messages,
            exchange.documents,
            tool_dicts,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            chat_template_kwargs={k: v for k, v in kwargs.items() if k not in _NOT_OURS},
            resolve=exchange.resolve,
        )

    def _check_length(self, request: BlendChatRequest) -> None:
        """Refuse what cannot fit before it is tokenized: that holds up every other request.

        Raises:
            ContextLengthExceeded: There are more characters than the context can hold.
        """
        limit = self.model_config.max_model_len * self.renderer.get_tokenizer().max_chars_per_token
        call, resolve = request.exchange.call, request.exchange.resolve
        registered = [document for each in call.document_ids if (document := resolve(each))]
        num_chars = call.num_chars + sum(len(each.text or "") for each in registered)
        if num_chars > limit:
            raise ContextLengthExceeded(
                f"this model's maximum context length is {self.model_config.max_model_len} tokens; "
                f"{num_chars} characters cannot fit",
                param="messages",
            )

    def _fit(self, prompt: Prompt, request: BlendChatRequest) -> Prompt:
        """Truncate as the request asks, and check the length.

        Raises:
            vllm.exceptions.VLLMValidationError: The prompt does not fit the model.
        """
        tokenizer = self.renderer.get_tokenizer()
        tok_params = request.build_tok_params(self.model_config)
        fitted = tok_params.apply_post_tokenization(
            tokenizer, TokensPrompt(prompt_token_ids=prompt.token_ids)
        )
        num_kept, num_tokens = len(fitted["prompt_token_ids"]), len(prompt.token_ids)
        if num_kept == num_tokens:
            return prompt
        if num_kept == 0:
            raise InvalidRequest(
                "`truncate_prompt_tokens` leaves no prompt",
                param="truncate_prompt_tokens",
                code="invalid_value",
            )
        side = request.truncation_side or tokenizer.truncation_side
        start = num_tokens - num_kept if side == "left" else 0
        return prompt.cut(start, start + num_kept)

    def _refuse_documents(self, exchange: Exchange) -> None:
        if exchange.call.num_documents:
            raise self._no_documents("documents")

    @staticmethod
    def _no_documents(param: str) -> InvalidRequest:
        return InvalidRequest(
            "this model's prompt format has no place for documents; put their text into a message",
            param=param,
            code="unsupported_parameter",
        )


def _to_prompt(assembled: AssembledPrompt) -> Prompt:
    documents = []
    for segment, document in zip(assembled.document_segments, assembled.documents, strict=True):
        label: dict[str, Any]
        if document.document_id is not None:
            label = {"document_id": document.document_id}
        else:
            label = {"id": document.id}
        documents.append(PromptDocument(start=segment.start, end=segment.end, label=label))
    return Prompt(
        token_ids=assembled.token_ids,
        leading_end=0 if assembled.leading is None else assembled.leading.end,
        documents=tuple(documents),
    )
