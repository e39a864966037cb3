"""Random weights whose attention looks at some tokens more than at others.

As they come from `from_config`, weights are so small that every token attends to all alike and no
position matters. Here queries and keys are large enough for a wrong rotation to change the answer.
"""

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 512
_ATTENTION = ("q_proj", "k_proj", "qkv", "query_key_value", "Wqkv", "q_norm", "k_norm")
_ATTENTION_GAIN = 1.6


def write_model(
    folder: Path, model_type: str, settings: Mapping[str, Any], architecture: str = ""
) -> None:
    """Weights, configuration and tokenizer, as a Hugging Face folder.

    Args:
        folder: Where to.
        model_type: Of its configuration.
        settings: What the configuration says.
        architecture: Name of its class in Transformers, where it is no causal language model.
    """
    import transformers

    settings = {"vocab_size": VOCABULARY, "pad_token_id": 0, **settings}
    config = transformers.AutoConfig.for_model(model_type, **settings)
    torch.manual_seed(0)
    if architecture:
        model = getattr(transformers, architecture)(config)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, weight in model.named_parameters():
        _fill(name, weight.data)
    model.save_pretrained(folder)
    _write_tokenizer(folder)


def write_audio_processor(folder: Path) -> None:
    """What turns half a minute of sound into Qwen2-Audio's input; `<unk>` stands for the sound."""
    from safetensors.torch import load_file, save_file
    from transformers import PreTrainedTokenizerFast, Qwen2AudioProcessor, WhisperFeatureExtractor

    Qwen2AudioProcessor(
        # vLLM's schema has this length only.
        WhisperFeatureExtractor(feature_size=80, chunk_length=30),
        PreTrainedTokenizerFast.from_pretrained(folder),
        audio_token="<unk>",
        audio_bos_token="<s>",
        audio_eos_token="</s>",
    ).save_pretrained(folder)
    # Transformers 5.19 writes one `model.` more than it reads, or vLLM knows.
    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file(
        {
            name.replace("language_model.model.model.", "language_model.model."): weights[name]
            for name in weights
        },
        path,
    )


def write_feature_extractor(folder: Path) -> None:
    """What turns a second of sound into Whisper's input."""
    from transformers import WhisperFeatureExtractor

    WhisperFeatureExtractor(feature_size=80, chunk_length=1).save_pretrained(folder)


def quantize_w8a8(folder: Path) -> None:
    """Turn a written model into compressed-tensors W8A8: int8 weights with one scale per row."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = load_file(path)
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        scale = weights[name].abs().amax(dim=1, keepdim=True) / 127
        weights[name] = (weights[name] / scale).round().to(torch.int8)
        weights[f"{name}_scale"] = scale
    save_file(weights, path)
    config = json.loads((folder / "config.json").read_text())
    eight_bits = {"num_bits": 8, "type": "int", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**eight_bits, "strategy": "channel", "dynamic": False},
                "input_activations": {**eight_bits, "strategy": "token", "dynamic": True},
            }
        },
    }
    (folder / "config.json").write_text(json.dumps(config))


def quantize_awq(folder: Path, group_size: int = 64) -> None:
    """Turn a written model into AWQ's 4-bit format: one scale and one zero per group of inputs."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = {name: weight.half() for name, weight in load_file(path).items()}
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        weight_GIO = weights.pop(name).float().T.unflatten(0, (-1, group_size))
        low, high = weight_GIO.amin(1, keepdim=True), weight_GIO.amax(1, keepdim=True)
        scale = (high - low) / 15
        zero = (-low / scale).round().clamp(0, 15)
        quantized = (weight_GIO / scale + zero).round().clamp(0, 15)
        module = name.removesuffix(".weight")
        weights[f"{module}.qweight"] = _packed_by_eight(quantized.flatten(0, 1))
        weights[f"{module}.qzeros"] = _packed_by_eight(zero.squeeze(1))
        weights[f"{module}.scales"] = scale.squeeze(1).half().contiguous()
    save_file(weights, path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": group_size,
        "zero_point": True,
    }
    (folder / "config.json").write_text(json.dumps(config))


def _packed_by_eight(nibbles_IO: torch.Tensor) -> torch.Tensor:
    """Eight neighbouring columns in one int32, in the order of AWQ's kernels."""
    nibbles = nibbles_IO.to(torch.int64).unflatten(1, (-1, 8))
    packed = torch.zeros(nibbles.shape[:2], dtype=torch.int64)
    for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        packed |= nibbles[:, :, column] << (4 * place)
    return packed.to(torch.int32).contiguous()


def _fill(name: str, weight: torch.Tensor) -> None:
    gain = _ATTENTION_GAIN if any(part in name for part in _ATTENTION) else 1.0
    if weight.ndim >= 2 and "conv" not in name and "A_log" not in name:
        is_table = "embed" in name or "wte" in name
        scale = 1.0 if is_table else gain * weight.shape[-1] ** -0.5
        weight.normal_(0.0, scale)
    elif weight.ndim == 1:
        # Norm weights around what they were, 1 or (Gemma) 0; biases around 0.
        weight.add_(torch.randn_like(weight) * 0.2)


def _write_tokenizer(folder: Path) -> None:
    """Byte pairs learnt from the ballast's own source, so that the ballast stays short."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from blend_engine import preamble

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([inspect.getsource(preamble)], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
