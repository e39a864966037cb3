"""What the engine refuses before it loads anything."""

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm.engine.arg_utils import AsyncEngineArgs

from blend_engine.config import BlendConfig
from blend_engine.launch import WORKER_EXTENSION, check_arguments, kv_transfer_config

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("taken", "name"),
    [
        ({"disable_log_stats": True}, "disable_log_stats"),
        ({"kv_transfer_config": kv_transfer_config(BlendConfig())}, "kv_transfer_config"),
        ({"worker_extension_cls": WORKER_EXTENSION}, "worker_extension_cls"),
    ],
)
def test_arguments_that_blending_cannot_go_with_are_refused(tmp_path: Path, taken, name):
    """Without statistics every request would wait for a report that never comes."""
    check_arguments(AsyncEngineArgs(model=str(tmp_path)))
    with pytest.raises(ValueError, match=name):
        check_arguments(AsyncEngineArgs(model=str(tmp_path), **taken))
