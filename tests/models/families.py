"""The families: a configuration each, small enough to be written and served in seconds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.machines import CPU, CUDA_BF16, CUDA_FP16, CUDA_FP32, Machine
from tests.models.weights import (
    VOCABULARY,
    quantize_awq,
    quantize_w8a8,
    write_audio_processor,
    write_feature_extractor,
)


@dataclass(frozen=True)
class Family:
    """One model family.

    Args:
        name: In test ids.
        model_type: Of its Hugging Face configuration.
        config: What the configuration says.
        reason: A part of the refusal; empty where the family is blended.
        engine: Further arguments of the engine.
        finish: Changes the written folder.
        is_hybrid: Whether it mixes attention with recurrent layers.
        num_ropes: Different RoPEs among its layers.
        architecture: Name of its class in Transformers, where it is no causal language model.
        machines: Names of those that it can run on.
        machine: The one that it runs on.
    """

    name: str
    model_type: str
    config: Mapping[str, Any]
    reason: str = ""
    engine: Mapping[str, Any] = field(default_factory=dict)
    finish: Callable[[Path], None] | None = None
    is_hybrid: bool = False
    num_ropes: int = 1
    architecture: str = ""
    machines: tuple[str, ...] = (CPU.name, CUDA_FP32.name, CUDA_BF16.name)
    machine: Machine = CPU


COMMON = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings}}


def _family(name: str, model_type: str, reason: str = "", **config: Any) -> Family:
    return Family(name, model_type, {**COMMON, **config}, reason)


BLENDED = (
    _family("llama", "llama"),
    Family(
        "llama-w8a8",
        "llama",
        COMMON,
        finish=quantize_w8a8,
        # vLLM's CUDA kernels for it give no fp32.
        machines=(CPU.name, CUDA_BF16.name),
    ),
    Family(
        "llama-awq",
        "llama",
        {**COMMON, "intermediate_size": 256},
        finish=quantize_awq,
        machines=(CUDA_FP16.name,),
    ),
    Family(
        "llama-fp8", "llama", COMMON, engine={"quantization": "fp8"}, machines=(CUDA_BF16.name,)
    ),
    _family(
        "llama-llama3-rope",
        "llama",
        **_rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=128,
        ),
    ),
    _family("llama-linear-rope", "llama", **_rope("linear", factor=4.0)),
    _family(
        "llama-yarn", "llama", **_rope("yarn", factor=4.0, original_max_position_embeddings=256)
    ),
    _family("qwen2", "qwen2"),
    _family("qwen3", "qwen3", head_dim=32),
    _family("mistral", "mistral", sliding_window=None),
    _family("phi3", "phi3"),
    _family("stablelm", "stablelm", num_attention_heads=2, partial_rotary_factor=0.25),
    _family(
        "granite",
        "granite",
        embedding_multiplier=3.0,
        attention_multiplier=0.25,
        residual_multiplier=0.5,
        logits_scaling=2.0,
    ),
    _family("olmo2", "olmo2"),
    _family("gpt-neox", "gpt_neox", num_attention_heads=2, rotary_pct=0.25),
    _family("cohere", "cohere", tie_word_embeddings=True, logit_scale=1.0),
    Family(
        "gemma3",
        "gemma3_text",
        {
            **COMMON,
            "num_hidden_layers": 4,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        num_ropes=2,
    ),
    Family(
        "mixtral",
        "mixtral",
        {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2},
        # In half precision, rounding alone sends tokens to other experts.
        machines=(CPU.name, CUDA_FP32.name),
    ),
)

REFUSED = (
    Family(
        "cohere2",
        "cohere2",
        {
            **COMMON,
            "num_hidden_layers": 4,
            "tie_word_embeddings": True,
            "logit_scale": 1.0,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        "moved keys of layer 1",
    ),
    Family(
        "lfm2",
        "lfm2",
        {
            **COMMON,
            "num_hidden_layers": 2,
            "layer_types": ["conv", "full_attention"],
            "conv_dim": 128,
            "conv_dim_out": 128,
            "block_dim": 128,
            "block_ff_dim": 192,
            "block_auto_adjust_ff_dim": False,
        },
        "recurrent state",
        is_hybrid=True,
    ),
    Family(
        "opt",
        "opt",
        {
            "hidden_size": 128,
            "word_embed_proj_dim": 128,
            "ffn_dim": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 1024,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        "no rotary embedding",
    ),
    Family(
        "bloom",
        "bloom",
        {"hidden_size": 128, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
        "ALiBi",
    ),
    _family(
        "deepseek-v2",
        "deepseek_v2",
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=64,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        reason="MLA",
    ),
    Family(
        "mistral-window",
        "mistral",
        {**COMMON, "sliding_window": 64},
        "KV cache kind SlidingWindowSpec",
    ),
    Family(
        "phi3-longrope",
        "phi3",
        {
            **COMMON,
            "original_max_position_embeddings": 512,
            **_rope("longrope", short_factor=[1.0] * 16, long_factor=[2.0] * 16),
        },
        "LongRoPE",
    ),
    Family(
        "mamba2",
        "mamba2",
        {
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 32,
            "n_groups": 1,
            "state_size": 16,
            "expand": 2,
        },
        "no attention",
    ),
    Family(
        "granite-hybrid",
        "granitemoehybrid",
        {
            **COMMON,
            "num_hidden_layers": 2,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 192,
            "position_embedding_type": "rope",
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
            "mamba_expand": 2,
        },
        "recurrent state",
        # vLLM's CPU stand-in for Mamba 2 keeps no states to cache.
        {"enable_prefix_caching": False},
        is_hybrid=True,
    ),
    Family(
        "qwen2-audio",
        "qwen2_audio",
        {
            "text_config": {
                **COMMON,
                "model_type": "qwen2",
                "vocab_size": VOCABULARY,
            },
            "audio_config": {
                "num_mel_bins": 80,
                "d_model": 64,
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 96,
                "max_source_positions": 1500,
            },
            "audio_token_index": 3,
        },
        "multimodal",
        finish=write_audio_processor,
        machines=(CPU.name,),
        architecture="Qwen2AudioForConditionalGeneration",
    ),
    Family("lora", "llama", COMMON, "LoRA", {"enable_lora": True, "max_lora_rank": 8}),
    Family(
        "speculative",
        "llama",
        COMMON,
        "speculative decoding",
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 2,
                "prompt_lookup_max": 3,
            }
        },
    ),
)

ENCODER_DECODER = Family(
    "whisper",
    "whisper",
    {
        "num_mel_bins": 80,
        "d_model": 128,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 192,
        "decoder_ffn_dim": 192,
        "max_source_positions": 50,
        "max_target_positions": 768,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    },
    finish=write_feature_extractor,
    # So that the connector at least gets as far as the scheduler: its caches differ in kind.
    is_hybrid=True,
    architecture="WhisperForConditionalGeneration",
)
