"""Seeded sampling on CPUs: a prompt that takes several steps must not cost the engine's life.

vLLM samples from every prompt in every step and, where the prompt goes on, takes the draw back by
rewinding the generator of its seed. Generators on CPUs cannot be rewound: vLLM 0.32 raises, and its
engine is dead for everybody. Here the draw is not made.
"""

from typing import Any

import numpy as np


def draw_only_for_finished_prompts(model_runner: Any) -> None:
    """Keep the generators of unfinished prompts out of a CPU runner's sampling.

    Such a row is drawn for without its seed, and the draw is thrown away; its generator is as it
    was when the prompt is complete, as it is where vLLM can rewind.
    """
    if model_runner.device.type != "cpu" or not hasattr(model_runner, "discard_request_mask"):
        return  # also vLLM's second runner, which draws from seeds without generators
    sample = model_runner.sample_tokens

    def sample_tokens(grammar_output: Any) -> Any:
        batch = model_runner.input_batch
        unfinished = np.flatnonzero(model_runner.discard_request_mask.np[: batch.num_reqs])
        kept = {
            row: batch.generators.pop(row) for row in unfinished.tolist() if row in batch.generators
        }
        try:
            return sample(grammar_output)
        finally:
            batch.generators.update(kept)

    model_runner.sample_tokens = sample_tokens
