"""Resampling of prompts: the same draws for every arm and every figure of a cell.

B is resamples, n prompts, C columns. The first row of whatever has ``B + 1`` of them is the sample
itself, so that a figure and its resamples are one computation.
"""

import hashlib
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 4000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure with its bootstrap interval.

    Args:
        value: None where it is undefined.
        low: Lower end of the interval; -inf where undefined or not bounded by the data.
        high: Upper end; inf likewise.
    """

    value: float | None
    low: float = -math.inf
    high: float = math.inf


UNDEFINED = Estimate(value=None)


def draw_counts(
    num_prompts: int, *, seed: int, name: str, num_resamples: int = NUM_RESAMPLES
) -> NDArray[np.float64]:
    """How often each prompt is in each resample, ``[B + 1, n]``.

    The draws depend on the seed, on the cell's name and on nothing else: other cells and other arms
    change no interval.
    """
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    source = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big")))
    drawn_BN = source.integers(0, num_prompts, size=(num_resamples, num_prompts))
    flat = drawn_BN + num_prompts * np.arange(num_resamples)[:, None]
    counts = np.bincount(flat.ravel(), minlength=num_resamples * num_prompts)
    counts_BN = counts.reshape(num_resamples, num_prompts).astype(np.float64)
    return np.concatenate([np.ones((1, num_prompts)), counts_BN])


def resampled_sums(
    counts_BN: NDArray[np.float64], columns_NC: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Sums over each resample, ``[B + 1, C]``; infinite values stay infinite, and absent ones out.

    No BLAS: its results may depend on the number of threads.
    """
    infinite_NC = np.isinf(columns_NC)
    finite_NC = np.where(infinite_NC, 0.0, columns_NC)
    sums: NDArray[np.float64] = np.einsum("bn,nc->bc", counts_BN, finite_NC)
    if infinite_NC.any():
        signs_NC = np.where(infinite_NC, np.sign(columns_NC), 0.0)
        hits = np.einsum("bn,nc->bc", counts_BN, signs_NC)
        sums = np.where(hits > 0, np.inf, np.where(hits < 0, -np.inf, sums))
    return sums


def estimate(values_B: NDArray[np.float64], *, confidence: float = CONFIDENCE) -> Estimate:
    """Percentile interval of a figure over its resamples; NaN is undefined.

    An undefined resample counts against both ends. So an interval is unbounded as soon as more of
    them are undefined than lie outside of it.
    """
    value = float(values_B[0])
    if math.isnan(value):
        return UNDEFINED
    resampled_B = values_B[1:]
    undefined_B = np.isnan(resampled_B)
    # Order statistics, not interpolation between them: the ends may be infinite.
    tail = int((1.0 - confidence) / 2 * len(resampled_B) + 1e-9)
    low = np.sort(np.where(undefined_B, -np.inf, resampled_B))[tail]
    high = np.sort(np.where(undefined_B, np.inf, resampled_B))[len(resampled_B) - 1 - tail]
    return Estimate(value=value, low=float(low), high=float(high))
