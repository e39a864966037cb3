"""Arms of the evaluation: how documents are compiled, what is recomputed, what is mended.

An arm is written ``COMPILE/SELECT@RATIO/EXTRA``, as ``ballast/question@0.10`` or
``alone/none/unrotated``. RATIO is the charged ratio: what a check layer costs is part of it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blend_engine.quality import selecting
from blend_engine.quality.blending import Prompt, Reference, blend, loaded
from blend_engine.quality.compiling import CompiledDocument
from blend_engine.quality.gradual import Check, blend_gradually
from blend_engine.quality.model import QualityModel
from blend_engine.quality.repairing import shifted
from blend_engine.quality.state import KvState


class UnknownArm(ValueError):
    """No such arm; says what there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to serve a prompt.

    Args:
        name: As written.
        compile: Name of a way to compile.
        select: Name of a policy, with its arguments.
        ratio: Charged ratio in [0, 1].
        extra: A repair or a mutation; empty for neither.
    """

    name: str
    compile: str
    select: str
    ratio: float
    extra: str = ""


@dataclass(frozen=True, kw_only=True)
class Blended:
    """What an arm made of a prompt.

    Args:
        state: The cache, with slots behind the prompt to spare.
        last: What leaves the last layer at the prompt's last token, ``[1, 1, D]``.
        charged_ratio: Token-layers spent on documents over layers x documents' tokens.
        selected: Recomputed positions; None where a token may be recomputed in some layers only.
    """

    state: KvState
    last: Tensor
    charged_ratio: float
    selected: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What a policy may look at.

    Args:
        model: The model.
        prompt: The prompt.
        state: The cache as loaded.
        reference: Full prefill, for the oracle alone.
        compiled: The documents as loaded.
        seed: Of whatever is random.
    """

    model: QualityModel
    prompt: Prompt
    state: KvState
    reference: Reference
    compiled: Sequence[CompiledDocument]
    seed: int


Score = Callable[[Scene, Sequence[str]], tuple[Tensor, int]]
"""Scores over the documents' tokens, and the layers that were run on all of them to get it."""


def parse_arm(name: str) -> Arm:
    """Read an arm.

    Raises:
        UnknownArm: It is not one.
    """
    parts = name.split("/")
    if not 2 <= len(parts) <= 3:
        raise UnknownArm(f"an arm is COMPILE/SELECT@RATIO or COMPILE/SELECT@RATIO/EXTRA: {name!r}")
    select, _, ratio = parts[1].partition("@")
    kind = select.split(":")[0]
    if kind not in _POLICIES:
        raise UnknownArm(f"no policy {kind!r}; there are {', '.join(sorted(_POLICIES))}")
    extra = parts[2] if len(parts) == 3 else ""
    if extra and extra.split(":")[0] not in _EXTRAS:
        raise UnknownArm(f"no extra {extra!r}; there are {', '.join(sorted(_EXTRAS))}")
    try:
        value = float(ratio) if ratio else 0.0
    except ValueError as error:
        raise UnknownArm(f"no number: {ratio!r} in {name!r}") from error
    if not 0.0 <= value <= 1.0:
        raise UnknownArm(f"a ratio lies between 0 and 1: {name!r}")
    return Arm(name=name, compile=parts[0], select=select, ratio=value, extra=extra)


def run_arm(
    model: QualityModel,
    prompt: Prompt,
    arm: Arm,
    compiled: Sequence[CompiledDocument],
    reference: Reference,
    *,
    num_slots: int,
    seed: int = 0,
) -> Blended:
    """Serve a prompt by an arm, up to its last token.

    Args:
        model: The model.
        prompt: The prompt.
        arm: The arm.
        compiled: Its documents, compiled as the arm says.
        reference: Full prefill of the prompt.
        num_slots: Slots of the cache; the prompt's and those of what follows.
        seed: Of whatever is random.
    """
    state = loaded(model, prompt, _spoilt(arm, model, prompt, compiled), num_slots)
    kind, *arguments = arm.select.split(":")
    if kind == "gradual":
        last, charged = blend_gradually(model, prompt, state, _checks(model, arguments, arm.ratio))
        return Blended(state=state, last=last, charged_ratio=charged, selected=None)
    scene = Scene(
        model=model,
        prompt=prompt,
        state=state,
        reference=reference,
        compiled=compiled,
        seed=seed,
    )
    selected, num_checked = _POLICIES[kind](scene, arguments, arm.ratio)
    last = blend(
        model,
        prompt,
        state,
        selected,
        mask=(lambda slots: _bottom_right(slots, num_slots)) if arm.extra == "leaky" else None,
        repair=(
            shifted(model, prompt, selected, float(arm.extra.partition(":")[2] or 1))
            if arm.extra.startswith("shift")
            else None
        ),
    )
    share = len(selected) / len(prompt.reusable) + num_checked / model.num_layers
    return Blended(state=state, last=last, charged_ratio=share, selected=selected)


def _checks(model: QualityModel, arguments: Sequence[str], ratio: float) -> list[Check]:
    """Two check layers, 1 and a third of the way up: twice the rest's ratio goes on in between."""
    second = int(arguments[0]) if arguments else max(2, model.num_layers // 3)
    num_layers = model.num_layers
    # 2 L0 layers for all, then (second - 1) layers at 2r, the others at r.
    rest = (ratio * num_layers - 2) / (2 * (second - 1) + num_layers - second - 1)
    if rest <= 0:
        raise UnknownArm(f"a charged ratio of {ratio} does not pay for the first two layers")
    return [Check(layer=1, ratio=min(1.0, 2 * rest)), Check(layer=second, ratio=min(1.0, rest))]


def _spoilt(
    arm: Arm, model: QualityModel, prompt: Prompt, compiled: Sequence[CompiledDocument]
) -> Sequence[CompiledDocument]:
    """The documents as a wrong build would load them, where the arm is a mutation."""
    if arm.extra == "unrotated":
        starts = [start for start, _ in prompt.documents]
        pairs = zip(compiled, starts, strict=True)
        return [
            CompiledDocument(k_LHTD=each.k_LHTD, v_LHTD=each.v_LHTD, start=start)
            for each, start in pairs
        ]
    offsets = {"plus_one": -1, "wrong_delta": 17}
    if arm.extra in offsets:
        return [
            CompiledDocument(
                k_LHTD=each.k_LHTD, v_LHTD=each.v_LHTD, start=each.start + offsets[arm.extra]
            )
            for each in compiled
        ]
    if arm.extra == "swapped":
        return _swapped(compiled)
    return compiled


def _swapped(compiled: Sequence[CompiledDocument]) -> list[CompiledDocument]:
    """Each document's KV filled from the next one's, repeated or cut to its length."""
    result = []
    for index, each in enumerate(compiled):
        other = compiled[(index + 1) % len(compiled)]
        rows = torch.arange(each.num_tokens, device=each.k_LHTD.device) % other.num_tokens
        result.append(
            CompiledDocument(
                k_LHTD=other.k_LHTD[:, :, rows], v_LHTD=other.v_LHTD[:, :, rows], start=other.start
            )
        )
    return result


def _bottom_right(slots: Tensor, num_slots: int) -> Tensor:
    """The mask of both reference implementations: rank instead of position.

    The i-th of M computed tokens sees keys up to N - M + i, so also tokens behind itself.
    """
    end = int(slots[-1]) + 1
    seen_to = end - len(slots) + torch.arange(len(slots))
    mask = torch.zeros(len(slots), num_slots, dtype=torch.bool)
    mask[:, :end] = torch.arange(end)[None] <= seen_to[:, None]
    return mask


Policy = Callable[[Scene, Sequence[str], float], tuple[Tensor, int]]


def _ranked(score: Score, *, size: int = 1) -> Policy:
    def policy(scene: Scene, arguments: Sequence[str], ratio: float) -> tuple[Tensor, int]:
        score_R, num_checked = score(scene, arguments)
        left = max(0.0, ratio - num_checked / scene.model.num_layers)
        if size > 1:
            return selecting.top_blocks(scene.prompt, score_R, left, size), num_checked
        return selecting.top_tokens(scene.prompt, score_R, left), num_checked

    return policy


def _none(scene: Scene, arguments: Sequence[str], ratio: float) -> tuple[Tensor, int]:
    return scene.prompt.reusable[:0], 0


def _sinks(scene: Scene, arguments: Sequence[str], ratio: float) -> tuple[Tensor, int]:
    if arguments:
        return selecting.first_tokens(scene.prompt, int(arguments[0])), 0
    return selecting.first_shares(scene.prompt, ratio), 0


def _hkvd(scene: Scene, arguments: Sequence[str]) -> tuple[Tensor, int]:
    what = arguments[0] if arguments else "kv"
    layer = int(arguments[1]) if len(arguments) > 1 else 1
    keys, values = selecting.check_layer_deviation(scene.model, scene.prompt, scene.state, layer)
    return {"k": keys, "v": values, "kv": keys + values}[what], layer


def _question(scene: Scene, arguments: Sequence[str]) -> tuple[Tensor, int]:
    share = float(arguments[0]) if arguments else 0.25
    layers = range(max(1, round(share * scene.model.num_layers)))
    found = selecting.question_attention(scene.model, scene.prompt, scene.state, layers)
    return found.mean(0), 0


def _random(scene: Scene, arguments: Sequence[str]) -> tuple[Tensor, int]:
    generator = torch.Generator().manual_seed(scene.seed)
    return torch.rand(len(scene.prompt.reusable), generator=generator), 0


def _oracle(scene: Scene, arguments: Sequence[str]) -> tuple[Tensor, int]:
    """What the question truly attends to, times how far its value is off."""
    model, prompt, truth = scene.model, scene.prompt, scene.reference.state
    asked = selecting.question_attention(model, prompt, truth, range(model.num_layers))
    return asked.mean(0) * selecting.deviation(scene.state, truth, prompt)[1].mean(0), 0


_POLICIES: Mapping[str, Policy] = {
    "none": _none,
    "all": lambda scene, arguments, ratio: (scene.prompt.reusable, 0),
    "sinks": _sinks,
    "hkvd": _ranked(_hkvd),
    "gradual": _none,
    "question": _ranked(_question),
    "question_blocks": _ranked(_question, size=16),
    "random": _ranked(_random),
    "oracle": _ranked(_oracle),
}
"""`gradual` is a pass of its own; see `run_arm`."""

_EXTRAS = frozenset({"shift", "unrotated", "plus_one", "wrong_delta", "swapped", "leaky"})
