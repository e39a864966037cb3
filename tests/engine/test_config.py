"""Rules of `BlendConfig`: what is accepted, and how it travels through vLLM's configuration."""

import json
from dataclasses import FrozenInstanceError, fields

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from blend_engine.config import EXTRA_CONFIG_KEY, BlendConfig

CONFIGS = st.builds(
    BlendConfig,
    store_bytes=st.integers(0, 2**50),
    min_segment_tokens=st.integers(1, 2**20),
    compile_queue_depth=st.integers(1, 2**20),
    pass_budget_tokens=st.none() | st.integers(2, 2**20),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(CONFIGS)
def test_survives_the_way_through_vllms_configuration(config):
    """The engine process reads what the front end wrote, JSON on the way included."""
    wire = json.loads(json.dumps(config.to_extra_config()))
    assert BlendConfig.from_extra_config(wire) == config


def test_settings_are_a_known_list():
    """A setting appears here before it appears anywhere."""
    assert {field.name: field.default for field in fields(BlendConfig)} == {
        "store_bytes": 4 << 30,
        "min_segment_tokens": 32,
        "compile_queue_depth": 256,
        "pass_budget_tokens": None,
    }


@pytest.mark.parametrize("extra_config", [{}, {EXTRA_CONFIG_KEY: {}}, {"another": {"x": 1}}])
def test_says_nothing_means_defaults(extra_config):
    """Settings that are not given keep their defaults; other connectors' are not ours."""
    assert BlendConfig.from_extra_config(extra_config) == BlendConfig()


def test_one_setting_leaves_the_others():
    """A part of the settings is enough."""
    config = BlendConfig.from_extra_config({EXTRA_CONFIG_KEY: {"min_segment_tokens": 7}})
    assert config == BlendConfig(min_segment_tokens=7)


def test_unknown_setting_is_refused_by_name():
    """A misspelt setting is not ignored."""
    wire = {EXTRA_CONFIG_KEY: {"stroe_bytes": 1, "min_segment_tokens": 7}}
    with pytest.raises(ValueError, match=r"unknown blend settings: \['stroe_bytes'\]"):
        BlendConfig.from_extra_config(wire)


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("store_bytes", 0),
        ("min_segment_tokens", 1),
        ("compile_queue_depth", 1),
        ("pass_budget_tokens", 2),
    ],
)
def test_number_out_of_range_is_refused_by_name(name, least):
    """The least value is accepted, one below it is refused, also on its way through vLLM."""
    assert getattr(BlendConfig(**{name: least}), name) == least
    message = f"`{name}` must be >= {least}, got {least - 1}"
    with pytest.raises(ValueError, match=message):
        BlendConfig(**{name: least - 1})
    with pytest.raises(ValueError, match=message):
        BlendConfig.from_extra_config({EXTRA_CONFIG_KEY: {name: least - 1}})


def test_settings_do_not_change_under_way():
    """A configuration is fixed when the engine starts."""
    with pytest.raises(FrozenInstanceError):
        BlendConfig().store_bytes = 1  # type: ignore[misc]
