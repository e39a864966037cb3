import re

import pytest
from hypothesis import given, strategies as st

from blend_engine.protocol import BlendParams, Policy
from blend_gateway.salts import Tenant, blend_setting, derive_salt

SECRET = b"secret"


def salt(name: str, pool: str = "private", setting: str = "exact") -> str:
    return derive_salt(SECRET, Tenant(name=name, pool=pool), setting)


def test_a_salt_is_fit_for_vllm() -> None:
    assert re.fullmatch(r"[A-Za-z0-9_-]{43}", salt("default"))


def test_a_salt_does_not_change() -> None:
    assert salt("a") == salt("a")


def test_every_part_matters() -> None:
    salts = {salt("a"), salt("b"), salt("a", "shared"), salt("a", setting="sinks:0.1:1")}
    assert len(salts) == 4
    assert derive_salt(b"other", Tenant(name="a")) != salt("a")


@given(st.text(max_size=8), st.text(max_size=8), st.text(max_size=8), st.text(max_size=8))
def test_no_tenant_can_imitate_another(name: str, pool: str, name2: str, pool2: str) -> None:
    same = (name, pool) == (name2, pool2)
    assert (salt(name, pool) == salt(name2, pool2)) is same


@pytest.mark.parametrize(
    "other",
    [
        BlendParams(plan_id="p", tenant="t", segments=(), policy=Policy.HKVD),
        BlendParams(plan_id="p", tenant="t", segments=(), recompute_ratio=0.11),
        BlendParams(plan_id="p", tenant="t", segments=(), check_layer=2),
    ],
)
def test_requests_that_blend_by_other_rules_have_other_salts(other: BlendParams) -> None:
    mine = BlendParams(plan_id="q", tenant="t", segments=())
    assert blend_setting(mine) != blend_setting(other)
