"""Requests admitted in one step under one salt, where one hits blocks that the other has yet to
write."""

import uuid

import pytest
from tests.real.driver import Answer, Driver, Prompt, blend_params, max_logprob_difference
from tests.real.texts import fact_document, question

from blend_engine import flights
from blend_engine.protocol import Policy


def _plain_then_blended(driver: Driver) -> tuple[list[int], Prompt]:
    """A plain prompt of two blocks, and one that begins with it and ends with a stored document."""
    shared = driver.encode(fact_document(41, 14))
    document = driver.encode(fact_document(42, 3))
    driver.compile(driver.prompt([document], "x"))
    made = driver.prompt([document], question(41))
    span = made.spans[1]
    ids = shared + made.ids[made.spans[0].end :]
    moved = span.start - made.spans[0].end + len(shared)
    spans = (type(span)(start=moved, end=moved + span.num_tokens, context=span.context),)
    return shared + driver.encode(" And then?"), Prompt(ids, spans)


def _together(driver: Driver) -> tuple[Answer, Answer]:
    plain, blended = _plain_then_blended(driver)
    salt = uuid.uuid4().hex
    _, together = driver.generate_together(
        [(plain, None), (blended.ids, blend_params(blended, Policy.SINKS, 0.2))], salt=salt
    )
    solo = driver.blend(blended, Policy.SINKS, 0.2)
    return together, solo


def test_a_pass_computes_blocks_that_the_forward_has_yet_to_write(driver: Driver) -> None:
    """A plain request's blocks, hit in the step that schedules them, are fresh tokens of the
    pass."""
    together, solo = _together(driver)
    assert together.report is not None
    assert together.report.reused_tokens > 0
    assert max_logprob_difference(solo, together) < 1e-3


def test_without_the_rule_the_answer_is_wrong(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same pair, trusting those blocks: the hazard is real, so the test above can fail."""
    monkeypatch.setattr(flights, "fresh_ranges", lambda *_args, **_kwargs: ())
    together, solo = _together(driver)
    assert max_logprob_difference(solo, together) > 0.1


def test_two_blended_requests_of_one_step(driver: Driver) -> None:
    """The second hits blocks that the first one's pass fills, in schedule order."""
    documents = [driver.encode(fact_document(seed, 6)) for seed in (43, 44)]
    first = driver.prompt(documents, question(43))
    driver.compile(first)
    second = driver.prompt(documents, question(44) + " Say it in a few words.")
    salt = uuid.uuid4().hex
    answers = driver.generate_together(
        [
            (first.ids, blend_params(first, Policy.SINKS, 0.2)),
            (second.ids, blend_params(second, Policy.SINKS, 0.2)),
        ],
        salt=salt,
    )
    for prompt, together in zip((first, second), answers, strict=True):
        solo = driver.blend(prompt, Policy.SINKS, 0.2)
        assert max_logprob_difference(solo, together) < 1e-3
    assert driver.scheduler.store_stats().num_leases == 0
