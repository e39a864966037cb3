"""Runs of the Triton tests that need a process of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from blend_kernels._triton_kernels import is_interpreted

HERE = Path(__file__).parent

COMPILE_ALL = """
import itertools
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from blend_kernels import _triton_kernels as kernels

def build(kernel, pointers, constants):
    signature = {name: pointers.get(name, "i32") for name in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))

DTYPES = ("*bf16", "*fp16", "*fp32")
for dtype, is_neox, in_place in itertools.product(DTYPES, (True, False), (True, False)):
    build(
        kernels._rotate_keys_kernel,
        {"k_ptr": dtype, "out_ptr": dtype, "deltas_ptr": "*i64", "cos_sin_ptr": "*fp32"},
        {"NUM_FREQS": 12, "FREQ_STRIDE": 1 if is_neox else 2, "PAIR_STRIDE": 12 if is_neox else 1,
         "IS_IN_PLACE": in_place, "BLOCK_T": 32, "BLOCK_F": 16},
    )
for dtype in DTYPES:
    build(
        kernels._key_deviation_kernel,
        {"fresh_ptr": dtype, "cached_ptr": "*bf16", "score_ptr": "*fp32"},
        {"HEAD_DIM": 80, "BLOCK_T": 32, "BLOCK_D": 128},
    )
"""


def run_python(arguments: list[str], *, is_interpreted: bool) -> subprocess.CompletedProcess[str]:
    interpret = ["TRITON_INTERPRET=1"] if is_interpreted else []
    path = "PYTHONPATH=" + os.pathsep.join(path for path in sys.path if path)
    command = ["env", "-u", "TRITON_INTERPRET", path, *interpret, sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.mark.skipif(is_interpreted(), reason="test_triton.py runs in this process")
def test_kernels_agree_with_the_reference_under_the_interpreter():
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu"]
    done = run_python([*arguments, str(HERE / "test_triton.py")], is_interpreted=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d\d passed", done.stdout), done.stdout
    assert "skipped" not in done.stdout, done.stdout


def test_kernels_compile_for_gpus_without_having_one():
    done = run_python(["-c", COMPILE_ALL], is_interpreted=False)
    assert done.returncode == 0, done.stderr


def test_cpu_tensors_need_no_triton():
    """The package imports, and moves keys on a CPU, where Triton is not installed."""
    code = """
import sys
sys.modules["triton"] = None
import torch, blend_kernels
table = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
k = torch.tensor([[[1.0, 2.0]]])
moved = blend_kernels.rotate_keys(k, torch.tensor([1]), table, is_neox=True)
assert moved.tolist() == [[[-2.0, 1.0]]], moved
assert blend_kernels.key_deviation(k, moved).tolist() == [10.0]
try:
    blend_kernels.rotate_keys(k, torch.tensor([1]), table, is_neox=True, backend="torch")
finally:
    assert sys.modules["triton"] is None
"""
    done = run_python(["-c", code], is_interpreted=False)
    assert done.returncode == 0, done.stderr


def test_asking_for_triton_on_a_cpu_names_the_way_out():
    code = """
import torch, blend_kernels
k = torch.zeros(1, 1, 2)
try:
    blend_kernels.key_deviation(k, k, backend="triton")
except blend_kernels.KernelInputError as error:
    assert "TRITON_INTERPRET=1" in str(error) and "'cpu'" in str(error), error
else:
    raise SystemExit("not refused")
"""
    done = run_python(["-c", code], is_interpreted=False)
    assert done.returncode == 0, done.stderr
