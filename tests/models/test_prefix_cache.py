"""vLLM's own prefix cache beside the store: who shares blocks, and what is left to load."""

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from tests.models.engine import Served, found_in_cache, serving, with_document
from tests.models.families import BLENDED
from tests.real.driver import Answer, Prompt, blend_params, max_logprob_difference, same_text
from torch import Tensor

from blend_engine import pass_run
from blend_engine.protocol import BlendReport, Policy
from blend_engine.segments import SegmentContext, SegmentSpan
from blend_gateway.salts import EXACT, Tenant, blend_setting, derive_salt

BLOCK_SIZE = 32
DOCUMENT = 150
VISIBLE = 1e-2


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    family = replace(BLENDED[0], engine={"block_size": BLOCK_SIZE})
    with serving(family, tmp_path_factory.mktemp("model")) as started:
        assert started.refusal is None
        yield started


def whole_blocks(num_tokens: int) -> int:
    """What of a prompt vLLM can find again: its last token is always computed."""
    return (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


def report_of(answer: Answer) -> BlendReport:
    """The report, its counts added up."""
    report = answer.report
    assert report is not None
    counts = (report.prefix_tokens, report.reused_tokens, report.recomputed_tokens)
    assert sum(counts) + report.computed_tokens == report.prompt_tokens
    return report


def asked(
    served: Served, prompt: Prompt, setting: tuple[Policy, float] | None, salt: str
) -> Answer:
    """A prompt, blended or exact."""
    if setting is None:
        return served.driver.full(prompt.ids, max_tokens=6, salt=salt)
    return served.driver.blend(prompt, *setting, max_tokens=6, salt=salt)


def test_tenants_and_blend_settings_share_no_blocks(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One prompt, six salts of the gateway's: each computes its own blocks and hits them again.

    Whatever was served before, each answer is the one under a salt that nobody has used.
    """
    prompt = with_document(served, 1, served.ids(2, DOCUMENT), before=20, after_seed=3, after=25)
    served.driver.compile(prompt)
    settings = (None, (Policy.SINKS, 0.2), (Policy.NONE, 0.0))
    expected = [asked(served, prompt, setting, uuid.uuid4().hex) for setting in settings]
    assert max_logprob_difference(expected[0], expected[1]) > VISIBLE
    assert max_logprob_difference(expected[1], expected[2]) > VISIBLE
    found = found_in_cache(served, monkeypatch)
    secret = uuid.uuid4().bytes
    for tenant in (Tenant(name="a"), Tenant(name="b")):
        for setting, alone in zip(settings, expected, strict=True):
            name = blend_setting(blend_params(prompt, *setting)) if setting else EXACT
            salt = derive_salt(secret, tenant, name)
            first = asked(served, prompt, setting, salt)
            again = asked(served, prompt, setting, salt)
            assert found == [0, whole_blocks(len(prompt.ids))]
            found.clear()
            assert max_logprob_difference(alone, first) < served.noise
            assert max_logprob_difference(alone, again) < served.noise
            assert alone.token_ids == first.token_ids == again.token_ids


def test_under_one_salt_an_exact_request_gets_blended_blocks(served: Served) -> None:
    """The hazard is real, so the test above can fail."""
    prompt = with_document(served, 1, served.ids(2, DOCUMENT), before=20, after_seed=3, after=25)
    served.driver.compile(prompt)
    salt = uuid.uuid4().hex
    exact = served.driver.full(prompt.ids)
    served.driver.blend(prompt, Policy.NONE, 0.0, salt=salt)
    assert max_logprob_difference(exact, served.driver.full(prompt.ids, salt=salt)) > VISIBLE


@pytest.mark.parametrize(
    ("policy", "ratio"),
    [(Policy.NONE, 0.0), (Policy.SINKS, 0.2), (Policy.HKVD, 0.3), (Policy.SINKS, 1.0)],
)
def test_a_chat_hits_the_blocks_of_its_earlier_turns(
    served: Served, policy: Policy, ratio: float
) -> None:
    """Prompt and answer of every turn; a document is loaded once, then found in vLLM's memory."""
    driver, salt = served.driver, uuid.uuid4().hex
    turn = with_document(served, 10, served.ids(2, DOCUMENT), before=20, after_seed=11, after=25)
    driver.compile(turn)
    loaded = driver.scheduler.store_stats().loaded_tokens
    answer = driver.blend(turn, policy, ratio, max_tokens=24, salt=salt)
    assert driver.scheduler.store_stats().loaded_tokens == loaded + DOCUMENT
    for number in range(3):
        said = [*turn.ids, *answer.token_ids]
        turn = Prompt([*said, *served.ids(20 + number, 30)], turn.spans)
        answer = driver.blend(turn, policy, ratio, max_tokens=24, salt=salt)
        report = report_of(answer)
        assert report.prefix_tokens == whole_blocks(len(said))
        assert (report.loaded_tokens, report.fallback_reason) == (0, None)
        assert report.approximate
    assert driver.scheduler.store_stats().loaded_tokens == loaded + DOCUMENT
    alone = driver.blend(turn, policy, ratio, max_tokens=24)
    assert report_of(alone).loaded_tokens == DOCUMENT
    assert max_logprob_difference(alone, answer) < served.noise
    assert same_text(alone, answer, served.noise)
    if ratio == 1.0:
        full = driver.full(turn.ids, max_tokens=24)
        assert max_logprob_difference(full, answer) < served.noise
        assert same_text(full, answer, served.noise)


@pytest.mark.parametrize(("policy", "ratio"), [(Policy.SINKS, 1.0), (Policy.HKVD, 0.999)])
def test_vllms_memory_the_store_and_fresh_text_serve_one_prompt(
    served: Served, policy: Policy, ratio: float
) -> None:
    """Cached blocks, the rest of a leading segment, two documents, and what nobody has seen.

    Just below 1.0 HKVD peeks, and still recomputes all.
    """
    driver, salt = served.driver, uuid.uuid4().hex
    leading, documents = served.ids(30, 70), [served.ids(2, DOCUMENT), served.ids(31, 90)]
    ids, spans = list(leading), [SegmentSpan(start=0, end=70, context=SegmentContext.PREFIX)]
    for number, document in enumerate(documents):
        ids += served.ids(32 + number, 9)
        spans.append(
            SegmentSpan(start=len(ids), end=len(ids) + len(document), context=SegmentContext.FREE)
        )
        ids += document
    prompt = Prompt([*ids, *served.ids(34, 33)], tuple(spans))
    driver.compile(prompt)
    driver.full([*leading[:40], *served.ids(35, 40)], salt=salt)
    answer = driver.blend(prompt, policy, ratio, max_tokens=8, salt=salt)
    report = report_of(answer)
    assert report.prefix_tokens == 70
    assert report.loaded_tokens == (70 - 32) + DOCUMENT + 90
    assert (report.reused_tokens, report.recomputed_tokens) == (0, DOCUMENT + 90)
    assert report.computed_tokens == 9 + 9 + 33
    full = driver.full(prompt.ids, max_tokens=8)
    assert max_logprob_difference(full, answer) < served.noise
    assert same_text(full, answer, served.noise)


@pytest.mark.parametrize("check_layer", [0, 1, 2])
@pytest.mark.parametrize("cached", [1, 77, DOCUMENT - 1])
def test_a_document_that_begins_in_vllms_memory_is_compared_from_there_on(
    served: Served, cached: int, check_layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fresh and stored keys are those of the same tokens, however much of it is cached.

    The deviation of what is left equals that of the same tokens where nothing is cached; with all
    of them recomputed, the answer is full prefill's.
    """
    driver, salt = served.driver, uuid.uuid4().hex
    document = served.ids(2, DOCUMENT)
    before = 6 * BLOCK_SIZE - cached % BLOCK_SIZE
    prompt = with_document(served, 40, document, before=before, after_seed=41, after=20)
    driver.compile(prompt)
    scores = recorded_scores(monkeypatch)
    whole = report_of(driver.blend(prompt, Policy.HKVD, 0.999, check_layer=check_layer))
    assert whole.prefix_tokens == 0
    driver.full([*prompt.ids[: before + cached], *served.ids(42, 20)], salt=salt)
    answer = driver.blend(prompt, Policy.HKVD, 0.999, check_layer=check_layer, salt=salt)
    report = report_of(answer)
    assert report.prefix_tokens == before + cached
    assert report.recomputed_tokens == report.loaded_tokens == DOCUMENT - cached
    torch.testing.assert_close(scores[1], scores[0][cached:], rtol=1e-3, atol=1e-3)
    assert max_logprob_difference(driver.full(prompt.ids), answer) < served.noise


def recorded_scores(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What tokens are ranked by, per pass from here on."""
    scores: list[Tensor] = []
    original = pass_run.select_hkvd

    def recording(hits: Sequence[object], ratio: float, score_T: Tensor) -> Tensor:
        scores.append(score_T.clone())
        return original(hits, ratio, score_T)  # type: ignore[arg-type]

    monkeypatch.setattr(pass_run, "select_hkvd", recording)
    return scores
