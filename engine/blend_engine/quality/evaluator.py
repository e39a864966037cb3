"""Prompts under arms: teacher-forced logits, likelihoods of answers, what the budget was."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blend_engine.quality.arms import Arm, Blended, run_arm
from blend_engine.quality.blending import Prompt, Reference, forced_logits, full_prefill
from blend_engine.quality.contexts import Contexts
from blend_engine.quality.model import QualityModel, attention_from, causal_allowed
from blend_engine.quality.state import KvState


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One prompt under one arm. Log-probabilities are in nats.

    Args:
        arm: Its name; "full" for full prefill.
        logits_SV: fp32 next-token logits along the reference's greedy continuation.
        continuation: That continuation's ids.
        candidate_logprobs: Summed log-likelihood of each candidate as the reply's beginning.
        charged_ratio: Fresh token-layers on documents over layers x documents' tokens.
        key_deviation_L: Relative L2 distance, per layer, of the keys that were not recomputed.
        value_deviation_L: As that, of values.
        attention_deviation_L: L2 distance, per layer, of the last token's attention.
    """

    arm: str
    logits_SV: NDArray[np.float32]
    continuation: tuple[int, ...]
    candidate_logprobs: tuple[float, ...]
    charged_ratio: float
    key_deviation_L: tuple[float, ...]
    value_deviation_L: tuple[float, ...]
    attention_deviation_L: tuple[float, ...]


class Evaluator:
    """Runs prompts under arms.

    Args:
        model: The model.
        tokenizer: Its Hugging Face tokenizer, for the contexts.
    """

    def __init__(self, model: QualityModel, tokenizer: Any) -> None:
        self._model = model
        self._contexts = Contexts(model, tokenizer)

    @torch.no_grad()
    def outcomes(
        self,
        token_ids: Sequence[int],
        documents: Sequence[tuple[int, int]],
        arms: Sequence[Arm],
        *,
        num_steps: int,
        candidates: Sequence[Sequence[int]] = (),
        seed: int = 0,
    ) -> Iterator[Outcome]:
        """Full prefill first, then every arm.

        Args:
            token_ids: The prompt.
            documents: Half-open ranges of the documents' tokens, in order.
            arms: What to try. Those of one context share its compile.
            num_steps: Teacher-forced steps, at least 1.
            candidates: Token ids of answers to rate.
            seed: Of whatever is random.
        """
        model = self._model
        prompt = Prompt(ids_T=torch.tensor(list(token_ids)), documents=tuple(documents))
        spare = max([num_steps, *(len(ids) for ids in candidates)])
        reference = full_prefill(model, prompt, num_steps, num_slots=prompt.num_tokens + spare)
        answers = [torch.tensor(list(ids)) for ids in candidates]
        truth = Blended(
            state=reference.state, last=reference.last, charged_ratio=1.0, selected=None
        )
        attention = _last_attention(model, prompt, reference.state)
        yield self._outcome("full", prompt, truth, reference, answers, attention)
        compiled = {
            name: self._contexts.compile(name, prompt) for name in {a.compile for a in arms}
        }
        for arm in arms:
            blended = run_arm(
                model,
                prompt,
                arm,
                compiled[arm.compile],
                reference,
                num_slots=prompt.num_tokens + spare,
                seed=seed,
            )
            yield self._outcome(arm.name, prompt, blended, reference, answers, attention)

    def _outcome(
        self,
        name: str,
        prompt: Prompt,
        blended: Blended,
        reference: Reference,
        answers: Sequence[Tensor],
        attention_LN: Tensor,
    ) -> Outcome:
        model, state, last = self._model, blended.state, blended.last
        keys, values = _relative_deviation(state, reference.state, prompt, blended.selected)
        seen = _last_attention(model, prompt, state)
        logits = forced_logits(model, prompt, state, last, reference.continuation_S)
        return Outcome(
            arm=name,
            logits_SV=logits.cpu().numpy(),
            continuation=tuple(int(each) for each in reference.continuation_S),
            candidate_logprobs=tuple(
                _logprob(forced_logits(model, prompt, state, last, ids), ids) for ids in answers
            ),
            charged_ratio=blended.charged_ratio,
            key_deviation_L=keys,
            value_deviation_L=values,
            attention_deviation_L=tuple((seen - attention_LN).norm(dim=1).tolist()),
        )


def _logprob(logits_SV: Tensor, ids_S: Tensor) -> float:
    picked = logits_SV.double().log_softmax(-1).cpu().gather(1, ids_S[:, None])
    return float(picked.sum())


def _relative_deviation(
    state: KvState, truth: KvState, prompt: Prompt, selected: Tensor | None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Of what was not recomputed; of all documents' tokens where that differs between layers."""
    reusable = prompt.reusable
    left = torch.ones(len(reusable), dtype=torch.bool)
    if selected is not None:
        left = ~torch.isin(reusable, selected.cpu())
    rows = reusable[left].to(state.k_LHND.device)
    found = []
    for mine, other in ((state.k_LHND, truth.k_LHND), (state.v_LHND, truth.v_LHND)):
        right = other[:, :, rows].float().flatten(1)
        off = mine[:, :, rows].float().flatten(1) - right
        found.append(tuple((off.norm(dim=1) / right.norm(dim=1).clamp_min(1e-12)).tolist()))
    return found[0], found[1]


def _last_attention(model: QualityModel, prompt: Prompt, state: KvState) -> Tensor:
    """Attention of the prompt's last token, heads averaged, fp32 ``[L, T]``."""
    last = torch.tensor([prompt.num_tokens - 1], device=model.device)
    rows: list[Tensor] = []

    def observe(_: int, query: Tensor, key: Tensor, scale: float) -> None:
        allowed = causal_allowed(state, last)[:, : key.shape[1]]
        rows.append(attention_from(query, key, allowed, scale)[:, 0].mean(0))

    with model.observing(observe):
        model.run(prompt.ids_T[-1:], state, last.cpu())
    return torch.stack(rows)
