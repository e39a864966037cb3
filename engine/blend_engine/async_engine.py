"""BlendAsyncLLM: vLLM's async engine with the connector attached; the gateway's engine.

An `AsyncLLM`, so vLLM's serving classes take it as they take their own, and a
`blend_engine.ports.BlendEngine`. It replaces what vLLM counts as cached by what was really reused,
queues compiles of what missed, and knows what is resident.
"""

import logging
import uuid
from collections.abc import AsyncGenerator, Container, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, Self

import numpy as np
from typing_extensions import override
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.logger import init_logger
from vllm.outputs import RequestOutput
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from blend_engine.compile_queue import CompileJob, CompileQueue
from blend_engine.config import BlendConfig
from blend_engine.errors import ColdDocument, EngineBusy, EngineUnavailable, InvalidGrammar
from blend_engine.launch import (
    WORKER_EXTENSION,
    check_arguments,
    check_model,
    kv_transfer_config,
    load_in_thread,
)
from blend_engine.mirror import EngineMirror, MirrorStatLogger
from blend_engine.ports import CompileOutcome
from blend_engine.preamble import compile_prompt
from blend_engine.protocol import (
    DEFAULT_CHECK_LAYER,
    BlendParams,
    BlendReport,
    CompileParams,
    DropParams,
    SegmentStatus,
    StoreStats,
    check_request,
    parse_request_params,
)
from blend_engine.reporting import describe
from blend_engine.segments import SegmentContext, SegmentKey, segment_key

logger = init_logger(__name__)

_REPORT_TIMEOUT_S = 10.0
_COMPILE_PRIORITY = 1000
"""Behind every user's request: under the policy `priority` vLLM serves low numbers first."""


class BlendAsyncLLM(AsyncLLM):
    """vLLM's engine, blending. Make it with `start`."""

    blend_config: BlendConfig
    _mirror: EngineMirror
    _queue: CompileQueue
    _unanswered: list[set[SegmentKey]]
    """Per request without a first token: what was dropped since it came."""

    @classmethod
    async def start(
        cls,
        engine_args: AsyncEngineArgs,
        config: BlendConfig,
        *,
        check_layer: int = DEFAULT_CHECK_LAYER,
        usage_context: UsageContext = UsageContext.OPENAI_API_SERVER,
    ) -> Self:
        """Start the engine, attach the model, and learn whether it can be blended.

        Args:
            engine_args: vLLM's engine arguments; the connector is added to them.
            config: The connector's settings.
            check_layer: The check layer that requests will name.
            usage_context: Passed through to vLLM.

        Raises:
            ValueError: The arguments name another connector or worker extension or leave no
                statistics, the model is an encoder-decoder or has no such layer, or vLLM refuses
                them.
        """
        check_arguments(engine_args)
        model_config = engine_args.create_model_config()
        check_model(model_config, check_layer=check_layer)
        is_hybrid = model_config.is_hybrid
        engine_args.kv_transfer_config = kv_transfer_config(config, is_hybrid=is_hybrid)
        engine_args.worker_extension_cls = WORKER_EXTENSION
        mirror = EngineMirror()
        vllm_config = engine_args.create_engine_config(usage_context)
        engine = await load_in_thread(
            lambda: cls.from_vllm_config(
                vllm_config,
                usage_context=usage_context,
                stat_loggers=[lambda _config, _index: MirrorStatLogger(mirror)],
                enable_log_requests=engine_args.enable_log_requests,
                disable_log_stats=engine_args.disable_log_stats,
            )
        )
        assert isinstance(engine, cls)
        engine.blend_config = config
        engine._mirror = mirror
        engine._queue = CompileQueue(engine._compile, max_depth=config.compile_queue_depth)
        engine._unanswered = []
        await engine._attach()
        return engine

    # The gateway's port.

    @property
    def unsupported_reason(self) -> str | None:
        """Why this model is served without blending; None where it is blended."""
        return self._mirror.unsupported_reason

    @property
    def min_segment_tokens(self) -> int:
        """Shorter segments are neither compiled nor looked up."""
        return self.blend_config.min_segment_tokens

    @property
    def compile_queue_depth(self) -> int:
        """Compiles waiting or running now."""
        return len(self._queue)

    def is_resident(self, key: SegmentKey) -> bool:
        """Whether the segment's KV is in the store; a hint that the scheduler may overrule."""
        return self._mirror.is_resident(key)

    def is_compiling(self, key: SegmentKey) -> bool:
        """Whether a compile of the segment is queued or running."""
        return key in self._queue

    def store_stats(self) -> StoreStats:
        """The store as last heard from the engine."""
        return self._mirror.store

    async def report(self, plan_id: str) -> BlendReport | None:
        """The report of a plan, once its first token is there; None where there will be none."""
        return await self._mirror.wait_for_report(plan_id, _REPORT_TIMEOUT_S)

    async def compile(
        self, *, tenant: str, context: SegmentContext, token_ids: Sequence[int]
    ) -> CompileOutcome:
        """Make a segment's KV unless it is resident; waits for the end.

        Raises:
            EngineUnavailable: The engine died.
            EngineBusy: Its queue is full.
        """
        job = _job(tenant, context, token_ids)
        refusal = self._refusal(job)
        if refusal is not None:
            return refusal
        outcome = self._queue.submit(job)
        if outcome is None:
            return CompileOutcome(key=job.key, ready=False, reason="queue_full")
        return await outcome

    def compile_in_background(
        self, *, tenant: str, context: SegmentContext, token_ids: Sequence[int]
    ) -> bool:
        """Queue a compile; False where the queue is full. Already queued or resident: True."""
        return self._submit(_job(tenant, context, token_ids))

    async def drop(self, keys: Sequence[SegmentKey]) -> None:
        """Remove segments from the store; returns when leases are gone and the KV is, too.

        Raises:
            EngineUnavailable: The engine died.
            EngineBusy: Its queue is full; the segments may still be there.
        """
        # A request that missed them before must not bring them back.
        for dropped in self._unanswered:
            dropped.update(keys)
        await self._queue.let_go(keys)
        params = DropParams(plan_id=uuid.uuid4().hex, keys=tuple(keys))
        await self._run_one_token([0], params.plan_id, params.to_kv_transfer_params(), priority=0)

    # vLLM's engine client.

    @override
    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `AsyncLLM.generate`, with true cached counts, and compiles of what missed.

        Raises:
            InvalidBlendParams: The blend parameters are malformed, or do not fit the request.
            ColdDocument: Strict mode met a segment without KV.
            InvalidGrammar: What the answer is constrained to cannot be compiled.
        """
        params = _blend_params(sampling_params)
        if params is not None:
            self._check_request(params, prompt)
        stream = super().generate(prompt, sampling_params, request_id, **kwargs)
        report: BlendReport | None = None
        dropped: set[SegmentKey] = set()
        self._unanswered.append(dropped)
        is_first = True
        try:
            async for output in stream:
                if is_first:
                    is_first = False
                    _check_grammar(sampling_params, output)
                    if params is not None:
                        report = await self.report(params.plan_id)
                        self._follow_up(params, report, output.prompt_token_ids or [], dropped)
                    self._forget(dropped)
                if report is not None:
                    output.num_cached_tokens = report.cached_tokens
                yield output
        finally:
            self._forget(dropped)
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("request %s: %s", request_id, describe(params, report))
            await stream.aclose()

    @override
    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the compile queue and the engine."""
        queue = getattr(self, "_queue", None)
        if queue is not None:
            queue.close()
        super().shutdown(timeout)

    # Inside.

    async def _attach(self) -> None:
        (reason, *_) = await self.collective_rpc("blend_attach")
        self._mirror.unsupported_reason = reason
        # The scheduler role learns from the acknowledgement of a step, so one step is run.
        await self._run_one_token([0], uuid.uuid4().hex, None, priority=0)

    def _check_request(self, params: BlendParams, prompt: Any) -> None:
        """Refuse here what the scheduler role would serve without blending and without a report."""
        read = prompt.get if isinstance(prompt, Mapping) else partial(getattr, prompt)
        token_ids = read("prompt_token_ids", None)
        check_request(
            params,
            num_layers=self.model_config.get_total_num_hidden_layers(),
            cache_salt=read("cache_salt", None),
            prompt_tokens=None if token_ids is None else len(token_ids),
        )

    def _follow_up(
        self,
        params: BlendParams,
        report: BlendReport | None,
        prompt_ids: Sequence[int],
        dropped: Container[SegmentKey],
    ) -> None:
        if report is None:
            if params.strict:
                # Nothing says that the documents' KV was used, so strict mode cannot answer.
                raise ColdDocument(_documents(params))
            return
        lost = (SegmentStatus.MISS, SegmentStatus.FAILED)
        cold = [
            index
            for index, status in enumerate(report.segments)
            if status in (*lost, SegmentStatus.TOO_LARGE) and index in _documents(params)
        ]
        if params.strict and cold:
            raise ColdDocument(cold)
        for index, status in enumerate(report.segments):
            if status not in lost:
                continue
            span = params.segments[index]
            job = _job(params.tenant, span.context, prompt_ids[span.start : span.end])
            if job.key not in dropped:
                self._submit(job)

    def _forget(self, dropped: set[SegmentKey]) -> None:
        """The request has its first token, or ends without one."""
        self._unanswered = [each for each in self._unanswered if each is not dropped]

    def _submit(self, job: CompileJob) -> bool:
        return self._refusal(job) is not None or self._queue.submit(job) is not None

    def _refusal(self, job: CompileJob) -> CompileOutcome | None:
        """An outcome known without asking the engine."""
        if self.unsupported_reason is not None:
            return CompileOutcome(key=job.key, ready=False, reason="unsupported_model")
        if len(job.token_ids) < self.min_segment_tokens:
            return CompileOutcome(key=job.key, ready=False, reason="too_short")
        if self.is_resident(job.key):
            return CompileOutcome(key=job.key, ready=True)
        return None

    async def _compile(self, job: CompileJob) -> CompileOutcome:
        prompt_ids, span = compile_prompt(self.get_tokenizer(), job.context, job.token_ids)
        if len(prompt_ids) >= self.model_config.max_model_len:
            return CompileOutcome(key=job.key, ready=False, reason="too_long")
        params = CompileParams(plan_id=uuid.uuid4().hex, tenant=job.tenant, segment=span)
        await self._run_one_token(
            prompt_ids,
            params.plan_id,
            params.to_kv_transfer_params(),
            priority=_COMPILE_PRIORITY,
        )
        failure = self._mirror.take_compile_failure(params.plan_id)
        ready = failure is None and self.is_resident(job.key)
        reason = None if ready else failure or "evicted"
        logger.debug(
            "compile %s: tokens=%d %s", params.plan_id, span.num_tokens, reason or "stored"
        )
        return CompileOutcome(key=job.key, ready=ready, reason=reason)

    async def _run_one_token(
        self,
        prompt_ids: list[int],
        request_id: str,
        kv_transfer_params: dict[str, Any] | None,
        *,
        priority: int,
    ) -> None:
        extra_args = {"kv_transfer_params": kv_transfer_params} if kv_transfer_params else None
        sampling_params = SamplingParams(
            max_tokens=1, temperature=0.0, detokenize=False, extra_args=extra_args
        )
        if self.scheduler_config.policy != "priority":
            priority = 0
        # A salt of its own: canonical KV is computed from the first token on, never from cached
        # blocks.
        prompt = TokensPrompt(prompt_token_ids=prompt_ids, cache_salt=request_id)
        try:
            stream = super().generate(prompt, sampling_params, request_id, priority=priority)
            async for _ in stream:
                pass
        except EngineDeadError as error:
            raise EngineUnavailable("the engine died") from error
        except Exception as error:
            # vLLM's own error says so by this attribute, where its version has a limit.
            if getattr(error, "http_status", None) == HTTPStatus.SERVICE_UNAVAILABLE:
                raise EngineBusy("the engine's queue is full") from error
            raise


def _job(tenant: str, context: SegmentContext, token_ids: Sequence[int]) -> CompileJob:
    return CompileJob(
        key=segment_key(tenant, context, np.asarray(token_ids, dtype=np.int64)),
        tenant=tenant,
        context=context,
        token_ids=tuple(token_ids),
    )


def _documents(params: BlendParams) -> list[int]:
    return [
        index
        for index, span in enumerate(params.segments)
        if span.context is not SegmentContext.PREFIX
    ]


def _check_grammar(sampling_params: Any, output: RequestOutput) -> None:
    """Tell a grammar that vLLM could not compile from its other failures.

    It says "error" of all of them; this is the only one before the first token of a request that
    has a grammar.

    Raises:
        InvalidGrammar: It was that.
    """
    if getattr(sampling_params, "structured_outputs", None) is None:
        return
    if any(each.finish_reason == "error" and not each.token_ids for each in output.outputs):
        raise InvalidGrammar("what the answer is to be constrained to cannot be compiled")


def _blend_params(sampling_params: Any) -> BlendParams | None:
    extra_args = getattr(sampling_params, "extra_args", None) or {}
    params = parse_request_params(extra_args.get("kv_transfer_params"))
    return params if isinstance(params, BlendParams) else None
