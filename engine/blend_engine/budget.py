"""How much passes may add to a step, so that no other request waits long for its next token.

vLLM charges external tokens nothing, and a synchronous range is complete in its step however long
it is. So passes have a budget of their own, in fresh tokens of the whole model (token-layers over
layers): small passes run at once while it lasts, large ones in pieces over several steps.
"""

import math
from dataclasses import dataclass

from blend_engine.plan import Plan
from blend_engine.protocol import BlendParams, CompileParams, Policy

_PIECES_PER_STEP = 4


@dataclass(frozen=True, slots=True)
class PassBudget:
    """What a step allows.

    Args:
        step_tokens: Fresh tokens that all passes of one step compute together.
        piece_tokens: Tokens that an asynchronous pass computes in one call. It depends on settings
            alone, never on load, so that a pass computes the same bits whatever runs beside it.
    """

    step_tokens: int
    piece_tokens: int

    @classmethod
    def of_steps(cls, step_tokens: int, max_num_batched_tokens: int) -> "PassBudget":
        """A budget in pieces that fit one call of the model."""
        piece_tokens = max(1, min(step_tokens // _PIECES_PER_STEP, max_num_batched_tokens))
        return cls(step_tokens=step_tokens, piece_tokens=piece_tokens)

    @property
    def synchronous_tokens(self) -> int:
        """What synchronous passes may take of a step; one piece is left to asynchronous ones."""
        return self.step_tokens - self.piece_tokens


class StepSpending:
    """What the passes admitted to the step being built take of its budget."""

    def __init__(self, budget: PassBudget) -> None:
        self._budget = budget
        self._spent = 0

    def is_large(self, tokens: int) -> bool:
        """Whether a pass is spread over steps; a matter of its length alone."""
        return tokens > self._budget.synchronous_tokens

    def fits(self, tokens: int) -> bool:
        """Whether a small pass can join the step. The first one always can."""
        return self._spent + tokens <= self._budget.synchronous_tokens

    def take(self, tokens: int) -> None:
        """A small pass joins the step."""
        self._spent += tokens

    def end_step(self) -> int:
        """Start the next step.

        Returns:
            What this one has left for asynchronous passes; a piece at least.
        """
        left = self._budget.step_tokens - self._spent
        self._spent = 0
        return max(left, self._budget.piece_tokens)


def pass_tokens(plan: Plan, params: BlendParams | CompileParams, num_layers: int) -> int:
    """Fresh tokens of a pass if every load succeeds, the peek counted by its share of the layers.

    Args:
        plan: What is covered and what is loaded.
        params: Say what is recomputed.
        num_layers: Attention layers of the model.
    """
    if isinstance(params, CompileParams):
        # Cached blocks are not believed; and its pieces must not depend on what is cached.
        return plan.covered_end
    num_loaded = sum(hit.num_tokens for hit in plan.hits)
    num_fresh = plan.num_external_tokens - num_loaded
    blended = [hit for hit in plan.hits if hit.is_blended]
    num_blended = sum(hit.num_tokens for hit in blended)
    ratio = params.recompute_ratio
    if params.policy is Policy.NONE or not num_blended or ratio == 0.0:
        return num_fresh
    if params.policy is Policy.SINKS:
        return num_fresh + sum(hit.num_sinks(ratio) for hit in blended)
    num_selected = math.ceil(ratio * num_blended)
    if ratio == 1.0:
        return num_fresh + num_selected
    peeked_layers = min(params.check_layer, num_layers - 1)
    return num_fresh + num_selected + (num_fresh + num_blended) * peeked_layers // num_layers
