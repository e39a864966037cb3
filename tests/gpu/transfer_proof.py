"""Whether a prompt's KV, kept outside the GPU and brought back, gives what computing it gives.

One engine per process and mode. A prompt is computed, then asked for again, and this time its KV
must come from where the mode keeps it; each mode counts the tokens that it moves, so that an equal
text cannot mean that nothing was moved. vLLM's own prefix caching is off, or it would answer the
second request by itself. The method is that of a public report on a connector that moves tokens and
brings back others: https://github.com/LMCache/LMCache/issues/4463.

A prompt whose beginning is cached is computed in batches of other shapes than a whole one, so in
bf16 two right texts may part where two tokens are nearly as likely. What that does is measured:
in the mode `prefix-cache` the beginning is kept by vLLM itself, on the GPU, and moved nowhere. In
fp32 the texts must be equal.

    python tests/gpu/transfer_proof.py baseline     --model DIR --out baseline.json
    python tests/gpu/transfer_proof.py prefix-cache --model DIR --out prefix-cache.json
    python tests/gpu/transfer_proof.py ours         --model DIR --out ours.json
    python tests/gpu/transfer_proof.py table baseline.json prefix-cache.json ours.json ...

Exit status 1: the two texts differ, or nothing was moved.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

ROOT = Path(__file__).parents[2]
NEW_TOKENS = 32
NUM_TIMED = 5
CHUNK = 256
"""Tokens that the offloading connectors move at once."""

HEADING = "Reference dossier 4815162342.\n\n"
SENTENCE = "The quick brown fox jumps over the lazy dog near the riverbank. "
QUESTION = "\n\nQuestion: Summarize the passage in one sentence.\nAnswer:"


class Engine:
    """vLLM alone, in this process; the modes below say how KV is kept outside it."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        from vllm import LLM

        self.llm = LLM(
            str(chosen.model),
            dtype=chosen.dtype,
            max_model_len=8192,
            max_logprobs=-1,
            seed=0,
            **{"enable_prefix_caching": False, **self.connector(), **chosen.engine},
        )
        self.leading = self._encode(HEADING + SENTENCE * chosen.sentences)
        self.ids = self.leading + self._encode(QUESTION)

    def connector(self) -> dict[str, Any]:
        """Arguments for the engine."""
        return {}

    def keep(self) -> None:
        """Once the prompt was computed: have its KV kept."""

    def reuse(self) -> dict[str, Any]:
        """What a request says to be served from what is kept."""
        return {}

    def moved_tokens(self) -> int:
        """Tokens whose KV was brought back so far."""
        return 0

    def warm_up(self) -> None:
        """Another prompt of the same length: kernels are compiled, pools are filled."""
        for _ in range(2):
            self.ask(self.ids[::-1], {}, NEW_TOKENS)

    def ask(
        self, ids: list[int], extra: dict[str, Any], max_tokens: int, logprobs: int | None = None
    ) -> Any:
        """One greedy request."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        (output,) = self.llm.generate(
            TokensPrompt(prompt_token_ids=ids),
            SamplingParams(
                max_tokens=max_tokens, temperature=0.0, logprobs=logprobs, extra_args=extra or None
            ),
            use_tqdm=False,
        )
        return output

    def _encode(self, text: str) -> list[int]:
        return list(self.llm.get_tokenizer().encode(text, add_special_tokens=False))


class PrefixCache(Engine):
    """vLLM's own cache keeps the dossier where it was computed: the control for rounding."""

    @override
    def connector(self) -> dict[str, Any]:
        return {"enable_prefix_caching": True}

    @override
    def keep(self) -> None:
        self.llm.reset_prefix_cache()
        self.ask(self.leading, {}, 1)


class Ours(Engine):
    """The dossier is compiled as a leading segment, and loaded by a pass."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        sys.path.insert(0, str(ROOT))
        from tests.real.driver import Driver

        from blend_engine.offline import attach

        super().__init__(chosen)
        reason = attach(self.llm)
        if reason is not None:
            sys.exit(f"blending is off: {reason}")
        self._driver = Driver(self.llm, chosen.model)

    @override
    def connector(self) -> dict[str, Any]:
        from blend_engine.config import BlendConfig
        from blend_engine.offline import blend_llm_kwargs

        return blend_llm_kwargs(BlendConfig(min_segment_tokens=1, store_bytes=8 << 30))

    @override
    def keep(self) -> None:
        from blend_engine.segments import SegmentContext

        self._driver.compile_ids(SegmentContext.PREFIX, self.leading)

    @override
    def reuse(self) -> dict[str, Any]:
        from tests.real.driver import Prompt, blend_params

        from blend_engine.protocol import Policy
        from blend_engine.segments import SegmentContext, SegmentSpan

        span = SegmentSpan(start=0, end=len(self.leading), context=SegmentContext.PREFIX)
        params = blend_params(Prompt(self.ids, (span,)), Policy.SINKS, 0.1)
        return {"kv_transfer_params": params.to_kv_transfer_params()}

    @override
    def moved_tokens(self) -> int:
        return self._driver.scheduler.store_stats().loaded_tokens


class Offloading(Engine):
    """A connector that stores what was computed, behind the answer, by itself."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self._loads: list[int] = []
        self.count_loads()
        super().__init__(chosen)

    def count_loads(self) -> None:
        """Wrap the one call with which the connector brings KV back."""
        raise NotImplementedError

    @override
    def keep(self) -> None:
        for _ in range(3):
            self.ask(self.leading[:3], {}, 2)
            time.sleep(0.2)

    @override
    def moved_tokens(self) -> int:
        return sum(self._loads)


class VllmOffload(Offloading):
    """vLLM's own connector."""

    @override
    def connector(self) -> dict[str, Any]:
        from vllm.config import KVTransferConfig

        extra = {"cpu_bytes_to_use": 8 << 30, "block_size": CHUNK}
        return {
            "kv_transfer_config": KVTransferConfig(
                kv_connector="OffloadingConnector",
                kv_role="kv_both",
                kv_connector_extra_config=extra,
            )
        }

    @override
    def count_loads(self) -> None:
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        prepare_load = CPUOffloadingManager.prepare_load

        def counting(this: Any, keys: Any, *arguments: Any) -> Any:
            self._loads.append(CHUNK * len(keys))
            return prepare_load(this, keys, *arguments)

        CPUOffloadingManager.prepare_load = counting


class LmCache(Offloading):
    """LMCache inside the engine's process."""

    @override
    def connector(self) -> dict[str, Any]:
        from vllm.config import KVTransferConfig

        return {
            "kv_transfer_config": KVTransferConfig(
                kv_connector="LMCacheConnectorV1", kv_role="kv_both"
            )
        }

    @override
    def count_loads(self) -> None:
        from lmcache.v1.gpu_connector import gpu_connectors

        for name in ("VLLMPagedMemGPUConnectorV2", "VLLMPagedMemGPUConnectorV3"):
            self._count(getattr(gpu_connectors, name))

    def _count(self, connector: Any) -> None:
        to_gpu = connector.to_gpu

        def counting(this: Any, memory: Any, start: int, end: int, **options: Any) -> Any:
            self._loads.append(end - start)
            return to_gpu(this, memory, start, end, **options)

        connector.to_gpu = counting


MODES = {
    "baseline": Engine,
    "prefix-cache": PrefixCache,
    "ours": Ours,
    "vllm-offload": VllmOffload,
    "lmcache": LmCache,
}


def run(chosen: argparse.Namespace) -> dict[str, Any]:
    """Compute, keep, ask again, compare, time."""
    engine = MODES[chosen.command](chosen)
    engine.warm_up()
    computed = engine.ask(engine.ids, {}, NEW_TOKENS, -1)
    engine.keep()
    before = engine.moved_tokens()
    again = engine.ask(engine.ids, engine.reuse(), NEW_TOKENS, -1)
    moved = engine.moved_tokens() - before
    if chosen.command == "prefix-cache":
        moved = again.num_cached_tokens
    seconds = []
    for _ in range(NUM_TIMED):
        extra = engine.reuse()
        started = time.perf_counter()
        engine.ask(engine.ids, extra, 1)
        seconds.append(time.perf_counter() - started)
    return {
        "mode": chosen.command,
        "prompt_tokens": len(engine.ids),
        "moved_tokens": moved,
        "vllm_cached_tokens": again.num_cached_tokens,
        "computed_text": computed.outputs[0].text,
        "text": again.outputs[0].text,
        "computed_ids": list(computed.outputs[0].token_ids),
        "ids": list(again.outputs[0].token_ids),
        "computed_leads": [lead(step) for step in computed.outputs[0].logprobs],
        "computed_logprobs": first_logprobs(computed).tolist(),
        "logprobs": first_logprobs(again).tolist(),
        "first_token_ms": 1000 * statistics.median(seconds),
        "all_first_token_ms": [1000 * each for each in seconds],
        "times_moved": (engine.moved_tokens() - before) / moved if moved else 0,
    }


def first_logprobs(output: Any) -> Tensor:
    """Of the first token, over the whole vocabulary."""
    first = output.outputs[0].logprobs[0]
    logprobs_V = torch.full((len(first),), -torch.inf, dtype=torch.float64)
    logprobs_V[torch.tensor(list(first))] = torch.tensor(
        [entry.logprob for entry in first.values()], dtype=torch.float64
    )
    return logprobs_V


def lead(step: Any) -> float:
    """By how much the chosen token is more likely than the next best, in nats."""
    best, second = sorted((entry.logprob for entry in step.values()), reverse=True)[:2]
    return float(best - second)


def parting(reference: dict[str, Any], result: dict[str, Any]) -> str:
    """Where a text leaves the reference's, and how clearly the reference preferred its own."""
    pairs = zip(reference["computed_ids"], result["ids"], strict=False)
    for place, (expected, found) in enumerate(pairs):
        if expected != found:
            return f"token {place}, lead {reference['computed_leads'][place]:.3f}"
    return "never"


def matches(result: dict[str, Any]) -> bool:
    """Equal texts, and KV that was moved where the mode keeps some."""
    has_moved = result["moved_tokens"] > 0 or result["mode"] == "baseline"
    return bool(result["text"] == result["computed_text"] and has_moved)


def table(results: list[dict[str, Any]]) -> str:
    """All modes in Markdown; the first result is what the others are compared with."""
    lines = [
        "| mode | tokens moved | text as computed | leaves the first mode's text at"
        " | first-token KL | largest log-probability difference | first token, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        p = torch.tensor(results[0]["computed_logprobs"], dtype=torch.float64)
        q = torch.tensor(result["logprobs"], dtype=torch.float64)
        cells = [
            result["mode"],
            f"{result['moved_tokens']:,} of {result['prompt_tokens']:,}",
            "yes" if result["text"] == result["computed_text"] else "**no**",
            parting(results[0], result),
            f"{float((p.exp() * (p - q)).sum()):.2e}",
            f"{float((p - q).abs().max()):.2e}",
            f"{result['first_token_ms']:.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", *(f"{each['mode']}: {each['text']!r}" for each in results)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for mode in MODES:
        command = commands.add_parser(mode)
        command.add_argument("--model", type=Path, required=True)
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--dtype", default="bfloat16")
        command.add_argument("--sentences", type=int, default=260, help="length of the prompt")
        command.add_argument("--engine", type=json.loads, default={}, help="JSON, for vllm.LLM")
    commands.add_parser("table").add_argument("results", type=Path, nargs="+")
    chosen = parser.parse_args()
    if chosen.command == "table":
        print(table([json.loads(path.read_text()) for path in chosen.results]))
        return
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.update(LMCACHE_CHUNK_SIZE=str(CHUNK), LMCACHE_LOCAL_CPU="True")
    os.environ["LMCACHE_MAX_LOCAL_CPU_SIZE"] = "8"
    result = run(chosen)
    chosen.out.write_text(json.dumps(result))
    print(table([result]))
    sys.stdout.flush()
    # Some connectors keep threads that never end.
    os._exit(0 if matches(result) else 1)


if __name__ == "__main__":
    main()
