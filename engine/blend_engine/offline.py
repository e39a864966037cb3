"""The connector under plain `vllm.LLM`, without the gateway.

llm = LLM("model", **blend_llm_kwargs(BlendConfig()))
attach(llm)
compile_segment(llm, tenant="me", context=SegmentContext.PREFIX, token_ids=ids)
llm.generate({"prompt_token_ids": ids + question}, SamplingParams(
    extra_args={"kv_transfer_params": BlendParams(...).to_kv_transfer_params()}))

A prompt with documents needs a `cache_salt` of requests that blend alike: without one every other
request could be handed its blended blocks, so it is served without blending.
"""

import uuid
from collections.abc import Sequence
from typing import Any

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from blend_engine.config import BlendConfig
from blend_engine.launch import WORKER_EXTENSION, kv_transfer_config
from blend_engine.preamble import compile_prompt
from blend_engine.protocol import CompileParams
from blend_engine.segments import SegmentContext


def blend_llm_kwargs(config: BlendConfig, *, is_hybrid: bool = False) -> dict[str, Any]:
    """Keyword arguments for `vllm.LLM`.

    Args:
        config: The connector's settings.
        is_hybrid: Whether the model mixes attention with recurrent layers.
    """
    return {
        "kv_transfer_config": kv_transfer_config(config, is_hybrid=is_hybrid),
        "worker_extension_cls": WORKER_EXTENSION,
    }


def attach(llm: LLM) -> str | None:
    """Hand the model to the connector and let its scheduler role hear of it.

    Returns:
        None, or why this model is served without blending.
    """
    (reason, *_) = llm.collective_rpc("blend_attach")
    # The scheduler role learns from the acknowledgement of a step, so one step is run.
    llm.generate(TokensPrompt(prompt_token_ids=[0]), SamplingParams(max_tokens=1), use_tqdm=False)
    assert reason is None or isinstance(reason, str)
    return reason


def compile_segment(
    llm: LLM, *, tenant: str, context: SegmentContext, token_ids: Sequence[int]
) -> None:
    """Make a segment's KV and keep it in the connector's store."""
    prompt_ids, span = compile_prompt(llm.get_tokenizer(), context, token_ids)
    params = CompileParams(plan_id=uuid.uuid4().hex, tenant=tenant, segment=span)
    llm.generate(
        # A salt of its own: canonical KV is computed from the first token on, never from cached
        # blocks.
        TokensPrompt(prompt_token_ids=prompt_ids, cache_salt=params.plan_id),
        SamplingParams(
            max_tokens=1, extra_args={"kv_transfer_params": params.to_kv_transfer_params()}
        ),
        use_tqdm=False,
    )
