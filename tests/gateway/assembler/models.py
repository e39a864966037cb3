"""Small real tokenizers, trained here, with the traits of the families the assembler must serve."""

import random

from tests.gateway.assembler import templates
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

TEXT = """
the river runs slowly past old stone houses and a quiet market where people sell bread fish apples
honey cloth and tools user assistant system model document question answer function parameters name
arguments content weather in Paris today Conversation über naïve façade 学习 机器
人工 智能 привет мир 12 345 6789 // == <b> [x] {y} | _ don't it's
"""

GPT4_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def corpus() -> list[str]:
    """Lines to train on, the same every time."""
    rng = random.Random(42)
    lines = []
    for _ in range(1500):
        line = " ".join(rng.choices(TEXT.split(), k=rng.randint(3, 12)))
        lines.append(line + rng.choice(["", "\n", "\n\n", ". ", "  x", '", "']))
    return lines


def wrap(
    tokenizer: Tokenizer, template: str, bos: str | None = None, eos: str | None = None
) -> PreTrainedTokenizerFast:
    """As Hugging Face would load it."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, chat_template=template
    )


def control(*contents: str, rstrip: bool = False) -> list[AddedToken]:
    return [AddedToken(text, special=True, normalized=False, rstrip=rstrip) for text in contents]


def markup(*contents: str) -> list[AddedToken]:
    return [AddedToken(text, special=False, normalized=False) for text in contents]


def byte_level(pattern: str | None = None, *, ignore_merges: bool = False) -> Tokenizer:
    """GPT-2's kind; with a pattern, Llama 3's and Qwen's."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def llama3() -> PreTrainedTokenizerFast:
    """Byte-level, `ignore_merges`; both its post-processor and its template write BOS."""
    tokenizer = byte_level(GPT4_SPLIT, ignore_merges=True)
    tokenizer.add_special_tokens(
        control("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    )
    bos = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)]
    )
    return wrap(tokenizer, templates.LLAMA3, bos="<|begin_of_text|>", eos="<|eot_id|>")


def qwen3() -> PreTrainedTokenizerFast:
    """Byte-level with NFC, no BOS, and markup tokens that are not special."""
    tokenizer = byte_level(GPT4_SPLIT)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(control("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    tokenizer.add_tokens(
        markup(
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "<tool_response>",
            "</tool_response>",
        )
    )
    return wrap(tokenizer, templates.QWEN3, eos="<|im_end|>")


def deepseek() -> PreTrainedTokenizerFast:
    """Control tokens directly against text on both sides."""
    tokenizer = byte_level(GPT4_SPLIT)
    tokenizer.add_special_tokens(control("<|begin|>", "<|end|>", "<|User|>", "<|Assistant|>"))
    tokenizer.add_tokens(markup("<think>", "</think>"))
    return wrap(tokenizer, templates.DEEPSEEK_R1, bos="<|begin|>", eos="<|end|>")


def phi3() -> PreTrainedTokenizerFast:
    """Control tokens that take the blanks after them."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(
        control("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", rstrip=True)
    )
    return wrap(tokenizer, templates.PHI3, eos="<|end|>")


def _sentencepiece_bpe(special: list[str], extra: list[str] | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
    trainer = trainers.BpeTrainer(
        vocab_size=1100,
        special_tokens=[*special, *(f"<0x{byte:02X}>" for byte in range(256)), *(extra or [])],
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return _forget_added(tokenizer, {*special, *(extra or [])})


def _forget_added(tokenizer: Tokenizer, kept: set[str]) -> Tokenizer:
    """Byte tokens are of the model's vocabulary only, as in converted SentencePiece models."""
    import json

    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] in kept]
    return Tokenizer.from_str(json.dumps(spec))


def mistral() -> PreTrainedTokenizerFast:
    """Metaspace that prefixes a blank at the very start only; byte fallback; control tokens."""
    tokenizer = _sentencepiece_bpe(
        [
            "<unk>",
            "<s>",
            "</s>",
            "[INST]",
            "[/INST]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_CALLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return wrap(tokenizer, templates.MISTRAL, bos="<s>", eos="</s>")


def llama2() -> PreTrainedTokenizerFast:
    """The legacy normalizer, which puts a blank before every run of text."""
    tokenizer = _sentencepiece_bpe(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.pre_tokenizer = None
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    return wrap(tokenizer, templates.LLAMA2, bos="<s>", eos="</s>")


def gemma() -> PreTrainedTokenizerFast:
    """Runs of blanks and newlines as added tokens, and HTML tags too."""
    blanks = ["\n\n", "\n\n\n", "▁▁", "▁▁▁"]
    tokenizer = _sentencepiece_bpe(
        ["<pad>", "<unk>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
        [*blanks, "<table>", "</table>"],
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return wrap(tokenizer, templates.GEMMA, bos="<bos>", eos="<eos>")


def unigram() -> PreTrainedTokenizerFast:
    """T5's kind: control tokens are pieces of the model's own vocabulary, found by any text."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=600,
        special_tokens=["<unk>", "<|im_start|>", "<|im_end|>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return wrap(
        tokenizer,
        templates.PHI3.replace("'<|'", "'<|im_start|>'")
        .replace("'|>\\n'", "'\\n'")
        .replace("<|end|>", "<|im_end|>")
        .replace("<|assistant|>", "<|im_start|>assistant"),
        eos="<|im_end|>",
    )


FAMILIES = {
    "deepseek": deepseek,
    "gemma": gemma,
    "llama2": llama2,
    "llama3": llama3,
    "mistral": mistral,
    "phi3": phi3,
    "qwen3": qwen3,
    "unigram": unigram,
}
