"""What the tests ask of a real engine: prompts made of segments, full prefill, blending,
comparisons."""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blend_engine.connector import BlendConnector
from blend_engine.offline import compile_segment
from blend_engine.protocol import BlendParams, BlendReport, Policy, RequestParams
from blend_engine.segments import SegmentContext, SegmentSpan, segment_key

TENANT = "tests"
LITTLE_NOISE, MUCH_NOISE = 2**-5, 0.2
"""The first is one unit in the last place of a bf16 logit between 4 and 8. Full reuse of a moved
document changes a log-probability by about 0.8 on the tiny models."""


@dataclass(frozen=True)
class Prompt:
    """Token ids and where their segments stand."""

    ids: list[int]
    spans: tuple[SegmentSpan, ...]

    def segment(self, index: int) -> list[int]:
        """A segment's own ids."""
        return self.ids[self.spans[index].start : self.spans[index].end]


@dataclass(frozen=True)
class Answer:
    """First-token log-probabilities over the whole vocabulary, and the greedy continuation.

    Args:
        logprobs_V: Of the first token.
        token_ids: What was generated.
        leads: By how much each generated token was more likely than the next best.
        report: What was reused.
    """

    logprobs_V: Tensor
    token_ids: list[int]
    leads: list[float]
    report: BlendReport | None


def blend_params(
    prompt: Prompt, policy: Policy, ratio: float, *, check_layer: int = 1
) -> BlendParams:
    """What asks for reuse of a prompt's segments."""
    return BlendParams(
        plan_id=uuid.uuid4().hex,
        tenant=TENANT,
        segments=prompt.spans,
        policy=policy,
        recompute_ratio=ratio,
        check_layer=check_layer,
        approximate_salt=True,
    )


class Driver:
    """A loaded engine."""

    def __init__(self, llm: Any, model: Path) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.llm = llm
        self.model = model
        self.tokenizer = llm.get_tokenizer()
        connector = get_kv_transfer_group()
        assert isinstance(connector, BlendConnector)
        self.worker = connector.worker
        scheduler_side = llm.llm_engine.engine_core.engine_core.scheduler.connector
        assert isinstance(scheduler_side, BlendConnector)
        self.scheduler = scheduler_side.scheduler
        self._reports: dict[str, BlendReport] = {}
        self._record_reports()

    def encode(self, text: str) -> list[int]:
        """Ids without special tokens added."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def prompt(
        self, documents: Sequence[Sequence[int]], question: str, system: str = "Answer briefly."
    ) -> Prompt:
        """Leading segment, documents, question, in the chat template's layout."""
        separator = self.encode("\n\n")
        ids = self.encode(f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>")
        spans = [SegmentSpan(start=0, end=len(ids), context=SegmentContext.PREFIX)]
        ids += self.encode("user\n")
        for number, document in enumerate(documents, 1):
            ids += separator + self.encode(f"Document [{number}]") + separator
            start = len(ids)
            ids += document
            spans.append(SegmentSpan(start=start, end=len(ids), context=SegmentContext.FREE))
            ids += separator
        ids += self.encode(question + "<|im_end|>\n<|im_start|>assistant\n")
        return Prompt(ids, tuple(spans))

    def compile(self, prompt: Prompt) -> None:
        """Store every non-empty segment of a prompt that is not stored yet."""
        for index, span in enumerate(prompt.spans):
            ids = prompt.segment(index)
            if ids and self.stored(span.context, ids) is None:
                self.compile_ids(span.context, ids)

    def compile_ids(self, context: SegmentContext, ids: list[int]) -> None:
        """Store one segment."""
        compile_segment(self.llm, tenant=TENANT, context=context, token_ids=ids)

    def stored(self, context: SegmentContext, ids: Sequence[int]) -> Any:
        """The worker's slab of a segment."""
        return self.worker.pool.get(segment_key(TENANT, context, ids))

    def forget_all(self) -> None:
        """Empty the store, the way a drop does."""
        index = self.scheduler._index
        index.drop(list(index._entries))
        self.full(self.encode("Hello"))

    def full(self, ids: list[int], *, max_tokens: int = 1, salt: str | None = None) -> Answer:
        """Full prefill by vLLM alone."""
        return self._generate(ids, None, max_tokens, salt)

    def blend(
        self,
        prompt: Prompt,
        policy: Policy,
        ratio: float,
        *,
        check_layer: int = 1,
        max_tokens: int = 1,
        salt: str | None = None,
    ) -> Answer:
        """Reuse what is stored of a prompt."""
        params = blend_params(prompt, policy, ratio, check_layer=check_layer)
        return self._generate(prompt.ids, params, max_tokens, salt)

    def report(self, plan_id: str) -> BlendReport | None:
        """What the scheduler role reported on a plan."""
        return self._reports.get(plan_id)

    def generate_together(
        self, requests: Sequence[tuple[list[int], BlendParams | None]], *, salt: str
    ) -> list[Answer]:
        """Requests admitted in one step, under one salt."""
        return self._generate_many(requests, [salt] * len(requests), max_tokens=1)

    def generate_all(
        self, requests: Sequence[tuple[list[int], BlendParams | None]], *, max_tokens: int
    ) -> list[Answer]:
        """Requests in one stream, each under a salt of its own; none ends early."""
        salts = [uuid.uuid4().hex for _ in requests]
        return self._generate_many(requests, salts, max_tokens=max_tokens, ignore_eos=True)

    def add(
        self,
        ids: Sequence[int],
        params: RequestParams | None = None,
        *,
        max_tokens: int = 1,
        salt: str | None = None,
    ) -> str:
        """Hand in one request and leave the steps to the caller; returns its name."""
        from vllm.inputs import TokensPrompt

        request_id = uuid.uuid4().hex
        self.llm.llm_engine.add_request(
            request_id,
            TokensPrompt(prompt_token_ids=list(ids), cache_salt=salt or request_id),
            _sampling(params, max_tokens, ignore_eos=True),
        )
        return request_id

    def ask(
        self,
        ids: Sequence[int],
        params: RequestParams | None = None,
        *,
        salt: str | None = None,
        max_tokens: int = 1,
        **sampling: Any,
    ) -> Any:
        """One request with sampling parameters of its own; returns what vLLM answered."""
        from vllm.inputs import TokensPrompt

        prompt = TokensPrompt(prompt_token_ids=list(ids), cache_salt=salt or uuid.uuid4().hex)
        options = _sampling(params, max_tokens, **sampling)
        return self.llm.generate(prompt, options, use_tqdm=False)[0]

    def noise(self, ids: list[int]) -> float:
        """Bound for two right answers of this engine: four times what vLLM itself differs by.

        vLLM alone computes the prompt at once, and with a beginning of it already cached: the same
        sums in batches of other shapes.
        """
        whole = self.full(ids)
        largest = 0.0
        for part in (3, 5, 7):
            salt = uuid.uuid4().hex
            self.full(ids[: len(ids) * part // 8], salt=salt)
            largest = max(largest, max_logprob_difference(whole, self.full(ids, salt=salt)))
        assert largest < MUCH_NOISE, "nothing can be told from a wrong answer here"
        return max(4 * largest, LITTLE_NOISE)

    def _generate(
        self, ids: list[int], params: BlendParams | None, max_tokens: int, salt: str | None
    ) -> Answer:
        salts = [salt or uuid.uuid4().hex]
        return self._generate_many([(ids, params)], salts, max_tokens=max_tokens)[0]

    def _generate_many(
        self,
        requests: Sequence[tuple[list[int], BlendParams | None]],
        salts: Sequence[str],
        *,
        max_tokens: int,
        ignore_eos: bool = False,
    ) -> list[Answer]:
        from vllm.inputs import TokensPrompt

        outputs = self.llm.generate(
            [
                TokensPrompt(prompt_token_ids=ids, cache_salt=salt)
                for (ids, _), salt in zip(requests, salts, strict=True)
            ],
            [_sampling(params, max_tokens, ignore_eos=ignore_eos) for _, params in requests],
            use_tqdm=False,
        )
        return [
            self._answer(output, params)
            for output, (_, params) in zip(outputs, requests, strict=True)
        ]

    def _answer(self, output: Any, params: BlendParams | None) -> Answer:
        completion = output.outputs[0]
        first = completion.logprobs[0]
        logprobs_V = torch.full((len(first),), -torch.inf)
        ids = torch.tensor(list(first))
        logprobs_V[ids] = torch.tensor([entry.logprob for entry in first.values()])
        report = self._reports.get(params.plan_id) if params else None
        leads = [_lead(step) for step in completion.logprobs]
        return Answer(logprobs_V, list(completion.token_ids), leads, report)

    def _record_reports(self) -> None:
        take = self.scheduler.take_stats

        def recording() -> Any:
            stats = take()
            for wire in stats.data.get("reports", ()) if stats else ():
                report = BlendReport.from_wire(json.loads(json.dumps(wire)))
                self._reports[report.plan_id] = report
            return stats

        self.scheduler.take_stats = recording


def _sampling(params: RequestParams | None, max_tokens: int, **changes: Any) -> Any:
    from vllm import SamplingParams

    extra = {"kv_transfer_params": params.to_kv_transfer_params()} if params else None
    greedy = {"temperature": 0.0, "logprobs": -1, "seed": 0}
    return SamplingParams(max_tokens=max_tokens, extra_args=extra, **{**greedy, **changes})


def _lead(step: Any) -> float:
    best, second = sorted((entry.logprob for entry in step.values()), reverse=True)[:2]
    return float(best - second)


def same_text(reference: Answer, other: Answer, noise: float) -> bool:
    """Whether the greedy continuations are equal up to the reference's first near-tie.

    Noise moves both candidates' log-probabilities, so a lead of less than twice as much is a tie.
    """
    pairs = zip(reference.token_ids, other.token_ids, reference.leads, strict=True)
    for expected, found, lead in pairs:
        if expected != found:
            return lead < 2 * noise
    return True


def kl_divergence(reference: Answer, other: Answer) -> float:
    """KL from full prefill's first-token distribution to the other's, in nats."""
    p, q = reference.logprobs_V.double(), other.logprobs_V.double()
    return float((p.exp() * (p - q)).sum())


def max_logprob_difference(one: Answer, other: Answer) -> float:
    """Largest absolute difference of first-token log-probabilities."""
    return float((one.logprobs_V - other.logprobs_V).abs().max())
