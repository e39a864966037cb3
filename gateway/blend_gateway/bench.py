"""`blendgate bench`: time to first token of the arms, over HTTP, side by side in one run.

TTFT runs from the last byte of the request to the first content token, at the client. The arms take
turns within every round, so that what else the machine does falls on all alike. No table is printed
unless every request did what its arm says: all documents hit, at the arm's ratio.

On a CPU vLLM's worker is in a process of its own by default, which costs every step some hundredths
of a second: little for a full prefill, but a tenth of what the fast arms of a small model take. The
command line therefore puts it into the engine's process, unless told otherwise, and the table says
where it was.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from blend_gateway.bench_texts import document_text, question_text
from blend_gateway.local_server import ServerDidNotStart, local_server

_REQUEST_TIMEOUT_S = 900.0
_SYSTEM = "Answer the question from the documents, in one sentence."


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to serve the same prompt.

    Args:
        name: As printed.
        blend: The request's `blend` object.
    """

    name: str
    blend: dict[str, Any]

    @property
    def reuses(self) -> bool:
        """Whether documents' KV is used at all."""
        return bool(self.blend["mode"] != "off")


ARMS = (
    Arm(name="full prefill", blend={"mode": "off"}),
    Arm(name="full reuse", blend={"mode": "strict", "policy": "none"}),
    Arm(
        name="HKVD 0.15",
        blend={"mode": "strict", "policy": "hkvd", "recompute_ratio": 0.15},
    ),
    Arm(
        name="sinks 0.08",
        blend={"mode": "strict", "policy": "sinks", "recompute_ratio": 0.08},
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One timed request. Seconds; tokens."""

    ttft_s: float
    prompt_tokens: int
    blend: dict[str, Any]


class ArmFailed(RuntimeError):
    """A request did not do what its arm says, so no number of this run is printed."""


def main(arguments: Sequence[str], *, machine: str) -> int:
    """Run the benchmark and print its table.

    Args:
        arguments: The command line's.
        machine: What the figures hold for, a line under the table of a server started here.

    Returns:
        0; 1 where an arm failed and nothing was printed.
    """
    options = _parse(arguments)
    try:
        if options.url:
            samples = _measure(options.url, options)
        else:
            with _server(options.serve) as url:
                samples = _measure(url, options)
    except (ArmFailed, ServerDidNotStart, httpx.HTTPError) as error:
        sys.stderr.write(f"blendgate bench: {error}\n")
        return 1
    sys.stdout.write(_table(samples) + ("" if options.url else f"\n{machine}\n"))
    if options.json:
        Path(options.json).write_text(json.dumps(_as_json(samples), indent=2) + "\n")
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="blendgate bench", description=__doc__)
    parser.add_argument("--url", help="A running server; by default one is started.")
    parser.add_argument("--documents", type=int, default=3, help="Documents in a prompt.")
    parser.add_argument(
        "--sentences", type=int, default=28, help="Sentences in a document, 26 tokens each."
    )
    parser.add_argument("--rounds", type=int, default=5, help="Timed requests of each arm.")
    parser.add_argument("--json", help="File for every sample.")
    parser.add_argument("serve", nargs="*", help="After --: flags for the server that is started.")
    options = parser.parse_args(list(arguments))
    for name in ("documents", "sentences", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if options.url and options.serve:
        parser.error("server flags have no effect with --url")
    return options


@contextmanager
def _server(flags: Sequence[str]) -> Iterator[str]:
    """A server of its own, without vLLM's prefix cache, so that full prefill is full."""
    sys.stderr.write("starting a server ...\n")
    with tempfile.TemporaryFile() as log:
        try:
            with local_server(["--no-enable-prefix-caching", *flags], log) as url:
                yield url
        except (ArmFailed, ServerDidNotStart):
            log.seek(0)
            sys.stderr.write(log.read()[-4000:].decode(errors="replace"))
            raise


def _measure(url: str, options: argparse.Namespace) -> dict[str, list[Sample]]:
    texts = [document_text(seed, options.sentences) for seed in range(options.documents)]
    samples: dict[str, list[Sample]] = {arm.name: [] for arm in ARMS}
    with httpx.Client(base_url=url, timeout=_REQUEST_TIMEOUT_S) as client:
        for number, text in enumerate(texts, 1):
            sys.stderr.write(f"compiling document {number} of {len(texts)} ...\n")
            made = client.post("/v1/documents", params={"wait": 600}, json={"text": text})
            if made.json().get("status") != "ready":
                raise ArmFailed(f"document {number} was not compiled: {made.text}")
        # One untimed request of each arm; its leading segment is compiled before the first round.
        for round_number in range(-1, options.rounds):
            sys.stderr.write(f"round {round_number + 1} of {options.rounds} ...\n")
            for arm in ARMS:
                sample = _request(client, arm, texts, question_text(round_number + 1))
                _check(arm, sample)
                if round_number >= 0:
                    samples[arm.name].append(sample)
    return samples


def _request(client: httpx.Client, arm: Arm, texts: Sequence[str], question: str) -> Sample:
    body = {
        "messages": [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": question},
        ],
        "documents": list(texts),
        "blend": arm.blend,
        "max_tokens": 1,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    ttft_s = None
    final: dict[str, Any] = {}
    started = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise ArmFailed(f"{arm.name}: {response.read().decode(errors='replace')}")
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise ArmFailed(f"{arm.name}: {chunk['error']}")
            if ttft_s is None and _has_content(chunk):
                ttft_s = time.perf_counter() - started
            if chunk.get("usage"):
                final = chunk
    if ttft_s is None or "blend" not in final:
        raise ArmFailed(f"{arm.name}: the stream ended without a token or without its report")
    return Sample(
        ttft_s=ttft_s, prompt_tokens=final["usage"]["prompt_tokens"], blend=final["blend"]
    )


def _has_content(chunk: dict[str, Any]) -> bool:
    return any(
        choice["delta"].get("content") or choice.get("finish_reason")
        for choice in chunk.get("choices", ())
    )


def _check(arm: Arm, sample: Sample) -> None:
    """Raise where a request did not do what its arm says."""
    blend = sample.blend
    statuses = {document["status"] for document in blend["documents"]}
    if statuses != {"hit" if arm.reuses else "off"}:
        raise ArmFailed(f"{arm.name}: documents were {sorted(statuses)}")
    wanted = float(arm.blend.get("recompute_ratio", 0.0))
    # Ratios are rounded up to whole tokens, for sinks in each document.
    if not wanted <= blend["recompute_ratio"] + 1e-9 <= wanted + 0.02:
        raise ArmFailed(
            f"{arm.name}: recomputed {blend['recompute_ratio']:.3f} of documents, not {wanted}; "
            "with --url, the server needs --no-enable-prefix-caching"
        )


def _table(samples: dict[str, list[Sample]]) -> str:
    tokens = samples[ARMS[0].name][0].prompt_tokens
    base_s = _median_s(samples[ARMS[0].name])
    rounds = len(samples[ARMS[0].name])
    lines = [
        f"TTFT over HTTP, {tokens} prompt tokens, medians of {rounds} rounds (min to max)",
        "",
        "| arm | TTFT | against full prefill | recomputed | charged |",
        "|---|---|---|---|---|",
    ]
    for arm in ARMS:
        times_s = [sample.ttft_s for sample in samples[arm.name]]
        blend = samples[arm.name][-1].blend
        lines.append(
            f"| {arm.name} | {_median_s(samples[arm.name]):.2f} s "
            f"({min(times_s):.2f} to {max(times_s):.2f}) "
            f"| {base_s / _median_s(samples[arm.name]):.1f}x "
            f"| {blend['recompute_ratio']:.1%} | {blend['charged_ratio']:.1%} |"
        )
    return "\n".join(lines) + "\n"


def _median_s(samples: Sequence[Sample]) -> float:
    return statistics.median(sample.ttft_s for sample in samples)


def _as_json(samples: dict[str, list[Sample]]) -> dict[str, Any]:
    return {
        name: [
            {
                "ttft_s": sample.ttft_s,
                "prompt_tokens": sample.prompt_tokens,
                "blend": sample.blend,
            }
            for sample in arm
        ]
        for name, arm in samples.items()
    }
