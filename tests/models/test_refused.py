"""Families and configurations that are not blended: named at attach, then served exactly."""

import asyncio
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.machines import CUDA_BF16, on_machines
from tests.models.engine import Served, serving, start_async_engine
from tests.models.families import COMMON, ENCODER_DECODER, REFUSED, Family
from tests.models.weights import write_model
from tests.real.driver import Prompt, blend_params, max_logprob_difference, same_text

from blend_engine.protocol import FallbackReason, Policy
from blend_engine.segments import SegmentContext, SegmentSpan
from blend_gateway.cli import build_app
from blend_gateway.serve_options import parse_serve

SEGMENT = 96


def named(family: str) -> Family:
    return next(each for each in REFUSED if each.name == family)


def first_logprobs(answer: Any) -> dict[int, float]:
    return {each: entry.logprob for each, entry in answer.outputs[0].logprobs[0].items()}


refused = pytest.mark.parametrize(
    "served", on_machines(REFUSED, CUDA_BF16), indirect=True, scope="module"
)


@refused
def test_the_reason_names_the_cause(served: Served) -> None:
    """What an operator reads in the log."""
    assert served.refusal is not None
    assert served.family.reason in served.refusal


@refused
def test_requests_are_served_exactly(served: Served) -> None:
    """Blend parameters change nothing but the report, which says why."""
    driver = served.driver
    ids = served.ids(1, SEGMENT + 40)
    span = SegmentSpan(start=20, end=20 + SEGMENT, context=SegmentContext.FREE)
    prompt = Prompt(ids, (span,))
    driver.compile(prompt)
    assert driver.stored(SegmentContext.FREE, prompt.segment(0)) is None
    full = driver.full(ids, max_tokens=8)
    answer = driver.blend(prompt, Policy.SINKS, 0.1, max_tokens=8)
    assert same_text(full, answer, served.noise)
    assert max_logprob_difference(full, answer) < served.noise
    assert answer.report is not None
    assert answer.report.fallback_reason is FallbackReason.UNSUPPORTED_MODEL
    assert (answer.report.loaded_tokens, answer.report.computed_tokens) == (0, len(ids))
    assert not answer.report.approximate


@pytest.mark.parametrize(
    "served", [pytest.param(named("qwen2-audio"), id="qwen2-audio")], indirect=True, scope="module"
)
def test_a_request_with_sound_is_served_exactly(served: Served) -> None:
    """What the span covers beside the sound is asked for, and computed."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    sound_token = served.family.config["audio_token_index"]
    document = served.ids(2, SEGMENT)
    span = SegmentSpan(start=0, end=SEGMENT, context=SegmentContext.PREFIX)
    served.driver.compile_ids(SegmentContext.PREFIX, document)
    params = blend_params(Prompt(document, (span,)), Policy.SINKS, 0.1)
    answers, sounds = (
        [],
        (torch.zeros(16_000), torch.randn(16_000, generator=torch.Generator().manual_seed(0))),
    )
    for extra in ({}, {"kv_transfer_params": params.to_kv_transfer_params()}):
        for sound in sounds:
            prompt = TokensPrompt(
                prompt_token_ids=[*document, sound_token, *served.ids(3, 40)],
                multi_modal_data={"audio": (sound.numpy(), 16_000)},
                cache_salt=uuid.uuid4().hex,
            )
            sampling = SamplingParams(max_tokens=8, temperature=0.0, logprobs=5, extra_args=extra)
            answers.append(served.driver.llm.generate(prompt, sampling, use_tqdm=False)[0])
    silent, loud, silent_asked, loud_asked = [first_logprobs(answer) for answer in answers]
    assert silent != pytest.approx(loud, abs=served.noise)
    assert silent_asked == pytest.approx(silent, abs=served.noise)
    assert loud_asked == pytest.approx(loud, abs=served.noise)
    report = served.driver.report(params.plan_id)
    assert report is not None
    assert report.fallback_reason is FallbackReason.UNSUPPORTED_MODEL


def test_an_encoder_decoder_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    """The gateway's engine says why it does not start."""
    with pytest.raises(ValueError, match="encoder-decoder, and vLLM serves none with a KV conn"):
        asyncio.run(start_async_engine(ENCODER_DECODER, tmp_path))


def test_a_server_does_not_start_with_a_check_layer_that_is_not_there(tmp_path: Path) -> None:
    """It would be taken for the last layer, in silence."""
    write_model(tmp_path, "llama", COMMON)
    num_layers = COMMON["num_hidden_layers"]
    arguments = [str(tmp_path), "--blend-check-layer", str(num_layers), "--dtype", "float32"]
    command = parse_serve(arguments, prepare_demo=lambda: tmp_path)
    fatal: list[str] = []
    app = build_app(command, on_fatal=lambda: fatal.append("stop"))

    async def start() -> None:
        async with app.router.lifespan_context(app):
            await app.state.runtime.started.wait()

    asyncio.run(start())
    assert fatal == ["stop"]
    with pytest.raises(ValueError, match=r"`check_layer` must be in \[0, 2\]"):
        raise app.state.runtime.failure


def test_vllm_serves_no_encoder_decoder_beside_a_connector(tmp_path: Path) -> None:
    """Where this fails, vLLM has learnt it, and the refusal above can go."""
    with (
        pytest.raises(AssertionError, match="not currently supported with KV connectors"),
        serving(ENCODER_DECODER, tmp_path),
    ):
        pass


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lora_config": object()}, "LoRA"),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"parallel_config.pipeline_parallel_size": 2}, "pipeline parallel"),
        ({"parallel_config.tensor_parallel_size": 2}, "tensor parallel"),
        ({"parallel_config.data_parallel_size": 2}, "data parallel"),
        ({"model_config.use_mla": True}, "MLA"),
        ({"model_config.is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_config.is_multimodal_model": True}, "multimodal"),
        ({"model_config.is_hybrid": True}, "recurrent state"),
        ({"model_config.is_attention_free": True}, "no attention"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_configurations_are_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    """By the configuration alone, before any layer is looked at."""
    from blend_engine.attached import UnsupportedModel, attach

    config = SimpleNamespace(
        model_config=SimpleNamespace(),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, tensor_parallel_size=1, data_parallel_size=1
        ),
        lora_config=None,
        speculative_config=None,
    )
    for path, value in changes.items():
        *parents, name = path.split(".")
        holder = getattr(config, parents[0]) if parents else config
        setattr(holder, name, value)
    model: Any = None
    with pytest.raises(UnsupportedModel, match=reason):
        attach(model, config, SimpleNamespace(kv_cache_groups=[object()]), {})
