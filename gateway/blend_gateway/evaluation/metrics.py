"""What one arm does to one prompt, held against full prefill of the same prompt.

The reference continuation is what full prefill says greedily; both sides are teacher-forced through
it. S is steps, V the vocabulary. Logits come in fp32 and everything behind them is float64: a KL of
1e-7 is a difference of numbers near 10. Logits are not kept.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_DIGITS = 9
"""Significant digits that a measured figure keeps: more than fp32 logits carry, and what is written
to a report is then exactly what its figures were computed from."""


class DamagedLogits(ValueError):
    """Logits that are no distribution: NaN, positive infinity, or nothing finite in a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Likelihoods:
    """Log-likelihoods of whole answers behind the prompt, summed over their tokens, in nats.

    Args:
        answer: The gold answer's, None where the task has none.
        num_answer_tokens: Its length.
        candidates: Of the candidates, gold first; empty where there is nothing to rank.
        num_candidate_tokens: Their lengths.
    """

    answer: float | None = None
    num_answer_tokens: int = 0
    candidates: tuple[float, ...] = ()
    num_candidate_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.candidates) == len(self.num_candidate_tokens)
        scores = self.candidates if self.answer is None else (self.answer, *self.candidates)
        if not all(math.isfinite(score) for score in scores):
            raise DamagedLogits(f"log-likelihoods {scores!r}, expected finite ones")


NO_LIKELIHOODS = Likelihoods()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDeviations:
    """How far an arm is from full prefill in every layer; one number a layer, 0 is equal.

    Args:
        key: Relative L2 of K on the document tokens that were not recomputed.
        value: The same of V.
        attention: L2 distance of the last prompt token's attention weights.
    """

    key: tuple[float, ...] | None = None
    value: tuple[float, ...] | None = None
    attention: tuple[float, ...] | None = None


NO_DEVIATIONS = LayerDeviations()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One prompt under one arm.

    Args:
        kl: KL(full || arm) of every step over the full vocabulary, nats; inf where the arm rules
            out what full prefill does not.
        agrees: Whether the greedy token of a step is full prefill's.
        reference_nll: Negative log-likelihood of the reference's tokens, nats, one a token.
        charged_ratio: Fresh token-layers on document tokens over all of them.
        likelihoods: Of the answers.
        deviations: Per layer, where they were taken.
    """

    kl: tuple[float, ...]
    agrees: tuple[bool, ...]
    reference_nll: tuple[float, ...]
    charged_ratio: float
    likelihoods: Likelihoods = NO_LIKELIHOODS
    deviations: LayerDeviations = NO_DEVIATIONS

    def __post_init__(self) -> None:
        assert len(self.kl) == len(self.agrees) >= len(self.reference_nll) > 0

    @property
    def num_steps(self) -> int:
        """Teacher-forced steps."""
        return len(self.kl)

    @property
    def first_divergence(self) -> int:
        """The first step whose greedy token differs; the number of steps where none does."""
        return self.agrees.index(False) if False in self.agrees else len(self.agrees)

    @property
    def margin(self) -> float | None:
        """Gold's log-likelihood above the best other candidate's, None without another one.

        Gold is ranked first where it is positive; a tie is no win.
        """
        candidates = self.likelihoods.candidates
        return candidates[0] - max(candidates[1:]) if len(candidates) > 1 else None


class ReferenceLogits:
    """Full prefill's side of a prompt, against which any number of arms are measured.

    Args:
        logits_SV: fp32 logits of its steps.
        tokens: The reference continuation, one token a step; the last steps may be without one.
            What the logits say greedily where not given.

    Raises:
        DamagedLogits: They are no distribution.
    """

    def __init__(
        self, logits_SV: NDArray[np.float32], *, tokens: Sequence[int] | None = None
    ) -> None:
        self._logp_SV = log_softmax(logits_SV)
        self._p_SV = np.exp(self._logp_SV)
        self._rules_out_S = (self._p_SV == 0.0).any(axis=1)
        self._top_S = greedy(logits_SV)
        chosen = self._top_S if tokens is None else np.asarray(tokens, dtype=np.int64)
        if not 0 < len(chosen) <= len(self._top_S):
            raise ValueError(f"{len(chosen)} tokens for {len(self._top_S)} steps")
        self._tokens = chosen

    @property
    def tokens(self) -> tuple[int, ...]:
        """The reference continuation."""
        return tuple(int(token) for token in self._tokens)

    def measure(
        self,
        logits_SV: NDArray[np.float32],
        *,
        charged_ratio: float,
        likelihoods: Likelihoods = NO_LIKELIHOODS,
        deviations: LayerDeviations = NO_DEVIATIONS,
    ) -> Measured:
        """Hold an arm's logits of the same steps against the reference's.

        Raises:
            DamagedLogits: The arm's logits are no distribution.
            ValueError: They are of other steps or of another vocabulary.
        """
        if logits_SV.shape != self._logp_SV.shape:
            raise ValueError(f"logits {logits_SV.shape}, the reference has {self._logp_SV.shape}")
        top_S = _largest(logits_SV)
        kl, nll = [], []
        for step, row_V in enumerate(logits_SV):  # a step at a time stays in the processor's cache
            logq_V = _log_softmax_row(row_V, top_S[step])
            if step < len(self._tokens):
                nll.append(_rounded(max(0.0, -float(logq_V[self._tokens[step]]))))
            kl.append(_rounded(self._kl_(step, logq_V)))
        return Measured(
            kl=tuple(kl),
            agrees=tuple(bool(same) for same in greedy(logits_SV) == self._top_S),
            reference_nll=tuple(nll),
            charged_ratio=_rounded(charged_ratio),
            likelihoods=_rounded_likelihoods(likelihoods),
            deviations=_rounded_deviations(deviations),
        )

    def _kl_(self, step: int, logq_V: NDArray[np.float64]) -> float:
        """KL of a step; the arm's log-probabilities are overwritten."""
        p_V = self._p_SV[step]
        with np.errstate(invalid="ignore"):  # -inf on both sides, which is masked just below
            terms_V = np.subtract(self._logp_SV[step], logq_V, out=logq_V)
            terms_V *= p_V
        if self._rules_out_S[step]:
            # What the reference rules out costs nothing, whatever the arm thinks of it.
            terms_V[p_V == 0.0] = 0.0
        # A true KL is at least 0; the sum's rounding is not.
        return max(0.0, float(terms_V.sum()))


def log_softmax(logits_SV: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-probabilities ``[S, V]`` in float64; a logit of -inf has none.

    Raises:
        DamagedLogits: NaN, +inf, or a step without a finite logit.
    """
    if logits_SV.ndim != 2 or not logits_SV.size:
        raise ValueError(f"logits of shape {logits_SV.shape}, expected [steps, vocabulary]")
    top_S = _largest(logits_SV)
    return np.stack(
        [_log_softmax_row(row_V, top) for row_V, top in zip(logits_SV, top_S, strict=True)]
    )


def _largest(logits_SV: NDArray[np.float32]) -> list[float]:
    """The largest logit of every step, which a distribution has to have."""
    top_S = logits_SV.max(axis=1)
    if not np.isfinite(top_S).all():
        step = int(np.flatnonzero(~np.isfinite(top_S))[0])
        raise DamagedLogits(f"the largest logit of step {step} is {float(top_S[step])!r}")
    top: list[float] = top_S.astype(np.float64).tolist()
    return top


def _log_softmax_row(row_V: NDArray[np.float32], top: float) -> NDArray[np.float64]:
    shifted_V = row_V.astype(np.float64)
    shifted_V -= top
    shifted_V -= math.log(float(np.exp(shifted_V).sum()))
    return shifted_V


def greedy(logits_SV: NDArray[np.float32]) -> NDArray[np.int64]:
    """The greedy token of every step; of equal logits, the lowest token id."""
    tokens_S: NDArray[np.int64] = np.argmax(logits_SV, axis=1).astype(np.int64)
    return tokens_S


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _rounded_likelihoods(given: Likelihoods) -> Likelihoods:
    return Likelihoods(
        answer=None if given.answer is None else _rounded(given.answer),
        num_answer_tokens=given.num_answer_tokens,
        candidates=tuple(_rounded(value) for value in given.candidates),
        num_candidate_tokens=given.num_candidate_tokens,
    )


def _rounded_deviations(given: LayerDeviations) -> LayerDeviations:
    def each(values: tuple[float, ...] | None) -> tuple[float, ...] | None:
        return None if values is None else tuple(_rounded(value) for value in values)

    return LayerDeviations(
        key=each(given.key), value=each(given.value), attention=each(given.attention)
    )
