"""The pass against the plain PyTorch reference: every key and value it writes, at every layer."""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from tests.real.driver import Driver, Prompt
from tests.real.mutations import rotated_by_one_more, without_rotation
from tests.real.reference_model import ReferenceModel
from tests.real.texts import fact_document, question
from torch import Tensor

from blend_engine import attention_batch, model_pass
from blend_engine.model_pass import ModelPass, Work
from blend_engine.protocol import Policy
from blend_engine.segments import SegmentContext

TOLERANCE = 2e-3
"""fp32 over 30 layers, in another order of sums; keys of this model reach 60."""


@pytest.fixture(scope="module")
def reference(driver: Driver) -> ReferenceModel:
    """The same weights, read apart."""
    return ReferenceModel.load(driver.model)


@pytest.fixture
def prompt(driver: Driver) -> Prompt:
    """Two short documents, compiled, of which the second stands last before the question."""
    documents = [driver.encode(fact_document(seed, 2)) for seed in (31, 32)]
    made = driver.prompt(documents, question(31))
    driver.compile(made)
    return made


@contextmanager
def _recording(driver: Driver) -> Iterator[dict[str, Any]]:
    """Everything that passes through each layer's cache update while a pass computes."""
    attached = driver.worker._attached
    assert attached is not None
    written: dict[str, Any] = {"keys": {}, "values": {}}
    real_compute = ModelPass.compute

    def compute(self: ModelPass, positions_T: Tensor) -> Work[None]:
        def recorder(index: int) -> Any:
            def wrap(original: Any) -> Any:
                def record(layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
                    original(layer, key, value, cache, slots)
                    written["keys"][index] = key.cpu().clone()
                    written["values"][index] = value.cpu().clone()

                return record

            return wrap

        with ExitStack() as stack:
            for index, name in enumerate(attached.layer_names):
                impl = attached.layers[name].impl
                stack.enter_context(model_pass._replacing_update(impl, recorder(index)))
            yield from real_compute(self, positions_T)
        written["positions"] = positions_T.clone()

    patch = pytest.MonkeyPatch()
    patch.setattr(ModelPass, "compute", compute)
    try:
        yield written
    finally:
        patch.undo()


def _cached(
    driver: Driver, reference: ReferenceModel, prompt: Prompt, length: int
) -> tuple[Tensor, Tensor]:
    """The store's KV where this prompt has it, moved by the reference's own RoPE."""
    shape = (reference.num_layers, length, reference.num_kv_heads, reference.head_dim)
    keys, values = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    for index, span in enumerate(prompt.spans):
        stored = driver.stored(span.context, prompt.segment(index))
        assert stored is not None
        move = torch.full((span.num_tokens,), span.start - stored.start)
        for layer in range(reference.num_layers):
            keys[layer, span.start : span.end] = reference.rotate(stored.k_LTHD[layer], move)
        values[:, span.start : span.end] = stored.v_LTHD
    return keys, values


def _largest_error(driver: Driver, reference: ReferenceModel, prompt: Prompt) -> float:
    with _recording(driver) as written:
        driver.blend(prompt, Policy.SINKS, 0.3)
    positions = written["positions"]
    length = int(prompt.spans[-1].end)
    assert len(positions) < length, "something was reused"
    keys, values = reference.run(
        torch.tensor(prompt.ids[:length]),
        positions,
        *_cached(driver, reference, prompt, length),
    )
    errors = [
        (written[name][layer] - expected[layer, positions]).abs().max()
        for name, expected in (("keys", keys), ("values", values))
        for layer in range(reference.num_layers)
    ]
    return float(torch.stack(errors).nan_to_num(torch.inf).max())


def test_pass_equals_the_reference(
    driver: Driver, reference: ReferenceModel, prompt: Prompt
) -> None:
    """Fresh and selected tokens get the keys and values of the definition, at every layer."""
    assert _largest_error(driver, reference, prompt) < TOLERANCE


@pytest.mark.parametrize("mutation", [without_rotation, rotated_by_one_more])
def test_wrong_rotation_is_caught(
    driver: Driver,
    reference: ReferenceModel,
    prompt: Prompt,
    mutation: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reference notices keys that were not moved, or moved one position too far."""
    monkeypatch.setattr(model_pass, "rotate_keys", mutation)
    assert _largest_error(driver, reference, prompt) > 10 * TOLERANCE


def test_seeing_later_tokens_is_caught(
    driver: Driver, reference: ReferenceModel, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bottom-right mask over the pruned batch, as other systems use, is not the definition."""

    def one_run(positions_T: Tensor) -> tuple[Tensor, Tensor]:
        end = positions_T[-1:] + 1
        return end - len(positions_T), end

    monkeypatch.setattr(attention_batch, "_runs", one_run)
    assert _largest_error(driver, reference, prompt) > 10 * TOLERANCE


def test_layer_zero_keys_moved_equal_those_computed_there(driver: Driver) -> None:
    """At layer 0 a key depends on token and position alone, so moving it must be exact."""
    ids = driver.encode(fact_document(33, 2))
    driver.compile_ids(SegmentContext.FREE, ids)
    driver.compile_ids(SegmentContext.PREFIX, ids)
    far = driver.stored(SegmentContext.FREE, ids)
    near = driver.stored(SegmentContext.PREFIX, ids)
    attached = driver.worker._attached
    assert attached is not None
    run = ModelPass(attached, driver.worker._vllm_config, torch.tensor(ids).int().numpy(), (0,))
    moved = run._rotate_layers(far.k_LTHD[:1].to(attached.device), near.start - far.start)
    assert far.start > 200
    torch.testing.assert_close(moved[0].cpu(), near.k_LTHD[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(far.v_LTHD[0], near.v_LTHD[0], atol=1e-4, rtol=1e-4)
    back = run._rotate_layers(moved, far.start - near.start)
    torch.testing.assert_close(back.cpu(), far.k_LTHD[:1], atol=1e-4, rtol=1e-4)


def test_check_layer_one_runs_on_selected_tokens_only(driver: Driver, prompt: Prompt) -> None:
    """The peek ends before layer 1's attention: its MLP sees fresh and selected tokens alone."""
    attached = driver.worker._attached
    assert attached is not None
    layers = attached.model.model.layers
    seen: dict[int, list[int]] = {0: [], 1: []}
    hooks = [
        layers[index].mlp.register_forward_hook(
            lambda _module, args, _out, index=index: seen[index].append(len(args[0]))
        )
        for index in seen
    ]
    try:
        report = driver.blend(prompt, Policy.HKVD, 0.2, check_layer=1).report
    finally:
        for hook in hooks:
            hook.remove()
    assert report is not None
    span_end = prompt.spans[-1].end
    all_tokens = span_end - report.prefix_tokens
    fresh = all_tokens - report.reused_tokens - report.recomputed_tokens
    tail = len(prompt.ids) - span_end
    assert seen[0] == [all_tokens, fresh + report.recomputed_tokens, tail]
    assert seen[1] == [fresh + report.recomputed_tokens, tail]
    blended = report.reused_tokens + report.recomputed_tokens
    layers_spent = blended + 30 * report.recomputed_tokens
    assert report.charged_ratio == pytest.approx(layers_spent / (30 * blended))


def test_nothing_stays_on_the_cache_update(driver: Driver, prompt: Prompt) -> None:
    """After a compile and a peek every layer has its own method again."""
    driver.compile_ids(SegmentContext.FREE, driver.encode(f"Nonce {random.random()}"))
    driver.blend(prompt, Policy.HKVD, 0.2)
    attached = driver.worker._attached
    assert attached is not None
    for layer in attached.layers.values():
        assert "do_kv_cache_update" not in vars(layer.impl)
