"""A Llama GGUF file to the folder that vLLM and transformers load.

The output is fp32. A Q4_1 value is ``scale * q + minimum``: the product of an fp16 scale and four
bits is exact in fp32, and the one addition rounds the same on every machine, so the weights have
one right checksum and a conversion gone wrong shows.

transformers reads GGUF, too, but may keep the weights packed or fetch kernels for them, depending
on its version and on what else is installed. NumPy gives the same bits without a copy of PyTorch.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

WEIGHTS_FILE = "model.safetensors"

_CONTROL_TOKEN = 3  # `tokenizer.ggml.token_type` of special tokens

_BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class UnsupportedGguf(ValueError):
    """The GGUF file is not one this conversion knows to be right for."""


def convert(gguf_file: Path, folder: Path, *, progress: Callable[[str], None]) -> None:
    """Write weights, config, tokenizer and chat template of `gguf_file` into `folder`.

    Args:
        gguf_file: A Llama-architecture model with a byte-level BPE tokenizer.
        folder: An existing folder; files of the same names are overwritten.
        progress: Called with one line before each long step.

    Raises:
        UnsupportedGguf: Another architecture, tokenizer or tensor than the above.
    """
    from gguf import GGUFReader

    reader = GGUFReader(gguf_file)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    for name, known in (
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "smollm"),
    ):
        if metadata.get(name) != known:
            raise UnsupportedGguf(f"`{name}` is {metadata.get(name)!r}, expected {known!r}")

    progress(f"Dequantizing {len(reader.tensors)} tensors")
    weights = dict(_weights(reader.tensors, metadata))
    progress(f"Writing {sum(w.nbytes for w in weights.values()) / 1e6:.0f} MB of weights")
    _write_weights(weights, folder / WEIGHTS_FILE)
    _write_json(folder / "config.json", _config(metadata, tied="lm_head.weight" not in weights))
    _write_json(folder / "generation_config.json", _token_ids(metadata))
    _write_tokenizer(metadata, folder)


def _weights(
    tensors: list[Any], metadata: dict[str, Any]
) -> Iterator[tuple[str, np.ndarray[Any, np.dtype[np.float32]]]]:
    """Names and fp32 values as `LlamaForCausalLM` has them; nothing for tied output weights."""
    from gguf.quants import dequantize

    heads = {
        "attn_q": metadata["llama.attention.head_count"],
        "attn_k": metadata["llama.attention.head_count_kv"],
    }
    for tensor in tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if tensor.name in _OUTER_TENSORS:
            yield _OUTER_TENSORS[tensor.name], values
            continue
        prefix, layer, part, kind = (*tensor.name.split("."), "", "", "")[:4]
        if prefix != "blk" or part not in _BLOCK_TENSORS or kind != "weight":
            raise UnsupportedGguf(f"unknown tensor {tensor.name!r}")
        if part in heads:
            values = _halves_rotary(values, heads[part])
        yield f"model.layers.{layer}.{_BLOCK_TENSORS[part]}.weight", values


def _halves_rotary(
    weight: np.ndarray[Any, np.dtype[np.float32]], heads: int
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Rows from GGUF's RoPE order (pairs side by side) to transformers' (halves of each head)."""
    rows, columns = weight.shape
    paired = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows, columns)


def _write_weights(weights: dict[str, np.ndarray[Any, np.dtype[np.float32]]], path: Path) -> None:
    from safetensors.numpy import save_file

    save_file(weights, path, metadata={"format": "pt"})


def _config(metadata: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    hidden = metadata["llama.embedding_length"]
    heads = metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": metadata["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": metadata["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": metadata["llama.rope.freq_base"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        **_token_ids(metadata),
    }


def _token_ids(metadata: dict[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def _write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    # What the name "smollm" stands for. Without the split at digits, a run of spaces before a
    # number takes other ids than the model was trained on.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type == _CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        f"{name}_token": tokens[metadata[f"tokenizer.ggml.{field}_token_id"]]
        for name, field in (
            ("bos", "bos"),
            ("eos", "eos"),
            ("unk", "unknown"),
            ("pad", "padding"),
        )
    }
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": metadata["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            **named,
        },
    )
    template: str = metadata["tokenizer.chat_template"]
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
