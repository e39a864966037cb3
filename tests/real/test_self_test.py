"""The start-up self-test passes on a right engine and refuses a wrong one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.real.driver import Driver, max_logprob_difference
from tests.real.mutations import rotated_by_one_more, without_rotation
from tests.real.texts import fact_document

from blend_engine import model_pass
from blend_engine.attached import UnsupportedModel
from blend_engine.model_pass import ModelPass
from blend_engine.self_test import check_model

Mutation = Callable[[pytest.MonkeyPatch], None]


def check(driver: Driver) -> None:
    worker = driver.worker
    assert worker._attached is not None
    check_model(worker._attached, worker._vllm_config, worker._kv_cache_config.num_blocks)


def write_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ModelPass, "_write", lambda run, index, k, v, slots: None)


def write_values_as_keys(patch: pytest.MonkeyPatch) -> None:
    def wrong(run: ModelPass, index: int, k: Any, v: Any, slots: Any) -> None:
        original(run, index, v, v, slots)

    original = ModelPass._write
    patch.setattr(ModelPass, "_write", wrong)


def skip_the_rotation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(model_pass, "rotate_keys", without_rotation)


def rotate_by_one_too_many(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(model_pass, "rotate_keys", rotated_by_one_more)


def pair_neighbours(patch: pytest.MonkeyPatch) -> None:
    original = model_pass.rotate_keys

    def wrong(k: Any, deltas: Any, table: Any, **options: Any) -> Any:
        return original(k, deltas, table, **{**options, "is_neox": not options["is_neox"]})

    patch.setattr(model_pass, "rotate_keys", wrong)


def see_the_next_token(patch: pytest.MonkeyPatch) -> None:
    from blend_engine import attention_batch

    original = attention_batch._runs

    def wrong(positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        starts, ends = original(positions_T)
        if len(starts) == 1:
            return starts, ends
        return starts + 1, ends + 1

    patch.setattr(attention_batch, "_runs", wrong)


def fail_in_a_pass(patch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: Any) -> None:
        raise RuntimeError("no kernel for this head size")

    patch.setattr(ModelPass, "_write", failing)


def test_it_passes(driver: Driver) -> None:
    check(driver)


@pytest.mark.parametrize(
    "mutate",
    [
        write_nothing,
        write_values_as_keys,
        skip_the_rotation,
        rotate_by_one_too_many,
        pair_neighbours,
        see_the_next_token,
        fail_in_a_pass,
    ],
)
def test_it_refuses_a_wrong_engine(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, mutate: Mutation
) -> None:
    mutate(monkeypatch)
    with pytest.raises(UnsupportedModel, match="self-test"):
        check(driver)


def test_a_model_that_fails_midway_is_left_as_it_was(driver: Driver) -> None:
    """Refused with the cause, no layer half patched, and what it computes is what it was."""
    attached = driver.worker._attached
    assert attached is not None
    ids = driver.encode(fact_document(60, 2))
    full = driver.full(ids, max_tokens=4)

    def failing(*_arguments: Any) -> None:
        raise RuntimeError("no kernel for this layer")

    hook = attached.model.model.layers[7].mlp.register_forward_pre_hook(failing)
    try:
        with pytest.raises(UnsupportedModel, match=r"self-test: .*no kernel for this layer"):
            check(driver)
    finally:
        hook.remove()
    for layer in attached.layers.values():
        assert "do_kv_cache_update" not in vars(layer.impl)
    again = driver.full(ids, max_tokens=4)
    assert again.token_ids == full.token_ids
    assert max_logprob_difference(full, again) < 1e-4
    check(driver)
