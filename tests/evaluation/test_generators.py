"""Every task can be solved from what it needs, stands where it says, and is as long as asked."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.evaluation.fingerprint import fingerprint
from tests.evaluation.solvers import SOLVERS, Unanswerable
from transformers import PreTrainedTokenizerFast

from blend_gateway.evaluation.generators import NEEDS_MUSIQUE, VARIANTS, generate
from blend_gateway.evaluation.prompts import PromptMaker
from blend_gateway.evaluation.tasks import Task, Variant, stratum
from blend_gateway.evaluation.texts import MusiqueRow

CELLS = [
    pytest.param(family, variant, id=f"{family}-{variant}")
    for family, variants in VARIANTS.items()
    if family not in NEEDS_MUSIQUE
    for variant in variants
]
DERIVED = [
    cell
    for cell in CELLS
    if cell.values[1] is Variant.DERIVED
    and cell.values[0] != "override"  # needs their order: a test of its own
]
NUMBERS = range(12)
"""All strata, all hops and all numbers of notices."""


def tasks(
    maker: PromptMaker, family: str, variant: Variant, length: int = 1500, seed: int = 0
) -> Iterator[Task]:
    for number in NUMBERS:
        yield generate(family, variant, number, seed=seed, sizes=maker.sizes(length, 200))


def solve(task: Task, places: list[int]) -> str:
    return SOLVERS[task.family]([task.documents[place] for place in places], task.question)


def everywhere(task: Task) -> list[int]:
    return list(range(len(task.documents)))


@pytest.mark.parametrize(("family", "variant"), CELLS)
def test_the_answer_follows_from_the_documents(
    family: str, variant: Variant, maker: PromptMaker
) -> None:
    for task in tasks(maker, family, variant):
        assert task.answer.endswith(solve(task, everywhere(task))), task.question


@pytest.mark.parametrize(("family", "variant"), CELLS)
def test_what_is_needed_suffices(family: str, variant: Variant, maker: PromptMaker) -> None:
    for task in tasks(maker, family, variant):
        assert task.answer.endswith(solve(task, sorted(task.needed))), task.question
        assert variant is Variant.DERIVED or len(task.needed) == 1


@pytest.mark.parametrize(("family", "variant"), DERIVED)
def test_a_derived_answer_needs_each_of_its_documents(
    family: str, variant: Variant, maker: PromptMaker
) -> None:
    for task in tasks(maker, family, variant):
        assert len(task.needed) >= 2
        for left_out in task.needed:
            with pytest.raises(Unanswerable):
                solve(task, [place for place in everywhere(task) if place != left_out])


def test_the_latest_notice_wins_and_another_order_has_another_answer(maker: PromptMaker) -> None:
    counts = set()
    for task in tasks(maker, "override", Variant.DERIVED):
        assert list(task.needed) == sorted(task.needed)
        counts.add(len(task.needed))
        stale = task.candidates[1].split()[-1]
        assert solve(task, list(task.needed[:-1])) == stale, "the value that held before"
        assert not task.answer.endswith(solve(task, everywhere(task)[::-1]))
    assert counts == {2, 3, 4}


def test_chains_of_counters_have_one_to_four_hops(maker: PromptMaker) -> None:
    chains = [len(task.needed) - 1 for task in tasks(maker, "variable_tracking", Variant.DERIVED)]
    assert chains[:4] == [1, 2, 3, 4]


@pytest.mark.parametrize(("family", "variant"), CELLS)
def test_the_same_arguments_give_the_same_task_and_others_another(
    family: str, variant: Variant, maker: PromptMaker
) -> None:
    first = list(tasks(maker, family, variant))
    assert first == list(tasks(maker, family, variant))
    assert all(a != b for a, b in zip(first, tasks(maker, family, variant, seed=1), strict=True))
    assert len({(task.documents, task.question) for task in first}) == len(first)


def test_tasks_do_not_depend_on_the_process() -> None:
    """Another hash seed, and so another order of any set, changes nothing."""
    prints = []
    for hash_seed in ("1", "2"):
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONHASHSEED": hash_seed,
        }
        run = subprocess.run(
            [sys.executable, "-m", "tests.evaluation.fingerprint"],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        prints.append(run.stdout.strip())
    assert prints == [fingerprint()] * 2


@pytest.mark.parametrize("length", [1024, 2048, 4096, 8000])
@pytest.mark.parametrize(("family", "variant"), CELLS)
def test_prompts_have_the_length_asked_for(
    family: str, variant: Variant, length: int, maker: PromptMaker
) -> None:
    for number in range(2):
        task = generate(family, variant, number, seed=0, sizes=maker.sizes(length))
        assert abs(len(maker.make(task).token_ids) - length) <= 0.02 * length


@pytest.mark.parametrize("document_tokens", [128, 256, 512])
@pytest.mark.parametrize("family", ["needle_multi_key", "python_topics"])
def test_documents_have_the_size_asked_for(
    family: str, document_tokens: int, maker: PromptMaker
) -> None:
    sizes = maker.sizes(4096, document_tokens)
    task = generate(family, Variant.DIRECT, 0, seed=0, sizes=sizes)
    counts = [maker.count(text) for text in task.documents]
    assert all(abs(count - document_tokens) <= 0.15 * document_tokens for count in counts)


@pytest.mark.parametrize(("family", "variant"), CELLS)
def test_the_first_needed_document_stands_at_its_depth(
    family: str, variant: Variant, maker: PromptMaker
) -> None:
    strata = set()
    for task in tasks(maker, family, variant, length=4096):
        assert (task.depth, task.order) == stratum(task.number)
        strata.add((task.depth, task.order))
        last = len(task.documents) - 1
        reach = last - len(task.needed) + 1
        in_order = variant is Variant.DERIVED and family in ("override", "needle_multi_value")
        place = min(task.depth * last, reach) if in_order else task.depth * last
        slack = 2.5 if family == "coreference" else 1.5  # its documents come in pairs
        assert abs(task.needed[0] - place) <= slack, (task.needed, last, task.depth)
    assert len(strata) == 9


def test_orders_permute_what_is_needed(maker: PromptMaker) -> None:
    """Of three codes the later two stand in order, reversed, or either way."""
    seen: dict[int, set[bool]] = {0: set(), 1: set(), 2: set()}
    sizes = maker.sizes(2048, 128)
    for number in range(108):
        task = generate("needle_multi_query", Variant.DERIVED, number, seed=0, sizes=sizes)
        seen[task.order].add(task.needed[1] < task.needed[2])
    assert seen == {0: {True}, 1: {False}, 2: {True, False}}


@pytest.mark.parametrize("family", ["alias", "multi_document_qa", "variable_tracking"])
def test_what_comes_second_in_the_reasoning_stands_on_both_sides(
    family: str, maker: PromptMaker
) -> None:
    sizes = maker.sizes(2048, 128)
    needed = [
        generate(family, Variant.DERIVED, number, seed=0, sizes=sizes).needed
        for number in range(1, 73, 6)
    ]
    assert {first < second for first, second, *_ in needed} == {True, False}


@pytest.mark.parametrize(("family", "variant"), CELLS)
def test_candidates_are_wrong_answers_of_the_same_form(
    family: str, variant: Variant, maker: PromptMaker
) -> None:
    for task in tasks(maker, family, variant):
        assert len(task.candidates) >= 2
        lengths = [len(ids) for ids in maker.make(task).candidate_ids]
        slack = 2 if family == "python_topics" else 0
        assert max(lengths) - min(lengths) <= slack, task.candidates
        solved = solve(task, everywhere(task))
        assert not any(wrong.endswith(solved) for wrong in task.candidates[1:])


@pytest.mark.parametrize("family", [family for family in SOLVERS if family != "python_topics"])
def test_twins_share_their_world(family: str, maker: PromptMaker) -> None:
    """The two variants of a number are about the same values."""
    for direct, derived in zip(
        tasks(maker, family, Variant.DIRECT), tasks(maker, family, Variant.DERIVED), strict=True
    ):
        names = [set(re.findall(r"\d{3,}", " ".join(task.documents))) for task in (direct, derived)]
        if family == "needle_single":
            assert {"".join(direct.answer.split()[-1:])} == names[0]
            assert direct.answer == derived.answer
        else:
            assert names[0] == names[1]


@pytest.mark.parametrize("family", [family for family in SOLVERS if family != "python_topics"])
def test_filler_is_varied_and_says_nothing(family: str, maker: PromptMaker) -> None:
    task = generate(family, Variant.DERIVED, 5, seed=0, sizes=maker.sizes(8000))
    sentences = [s for text in task.documents for s in re.split(r"(?<=\.) ", text)]
    assert len(set(sentences)) >= 0.98 * len(sentences)
    blank = [text for place, text in enumerate(task.documents) if place not in task.needed]
    assert not any(SOLVERS[family]([text], task.question) for text in blank if solvable(task, text))


def solvable(task: Task, text: str) -> bool:
    try:
        SOLVERS[task.family]([text], task.question)
    except Unanswerable:
        return False
    return True


@pytest.mark.parametrize(("family", "variant"), CELLS)
def test_document_ranges_hold_the_documents(
    family: str, variant: Variant, maker: PromptMaker, tokenizer: PreTrainedTokenizerFast
) -> None:
    task = next(tasks(maker, family, variant))
    prompt = maker.make(task)
    texts = [tokenizer.decode(prompt.token_ids[a:b]) for a, b in prompt.documents]
    assert tuple(texts) == task.documents
    assert prompt.question == (prompt.documents[-1][1], len(prompt.token_ids))
    assert task.question in tokenizer.decode(prompt.token_ids[slice(*prompt.question)])


def test_needed_facts_stand_anywhere_in_their_documents(maker: PromptMaker) -> None:
    """Not always at the beginning, which some policies recompute anyway."""
    places = []
    for number in range(40):
        task = generate("needle_single", Variant.DIRECT, number, seed=0, sizes=maker.sizes(1024))
        text = task.documents[task.needed[0]]
        places.append(text.index("access code") / len(text))
    assert min(places) < 0.2
    assert max(places) > 0.7
    assert 0.3 < sum(places) / len(places) < 0.7


@pytest.mark.parametrize(
    ("family", "variant", "complaint"),
    [
        ("needle", Variant.DIRECT, "`family` 'needle'"),
        ("musique", Variant.DIRECT, "`variant`"),
        ("musique", Variant.DERIVED, "needs the rows"),
    ],
)
def test_what_there_is_not_is_refused(
    family: str, variant: Variant, complaint: str, maker: PromptMaker
) -> None:
    with pytest.raises(ValueError, match=complaint):
        generate(family, variant, 0, seed=0, sizes=maker.sizes(1024))


@pytest.mark.parametrize("family", ["needle_multi_key", "python_topics"])
def test_a_length_without_room_is_refused(family: str, maker: PromptMaker) -> None:
    with pytest.raises(ValueError, match=r"no room|sentence to ask"):
        generate(family, Variant.DIRECT, 0, seed=0, sizes=maker.sizes(120, 16))


def test_musique_comes_whole_or_short(musique: tuple[MusiqueRow, ...], maker: PromptMaker) -> None:
    sizes = maker.sizes(1280)
    for number in (0, 7, 80):
        whole, short = (
            generate(family, Variant.DERIVED, number, seed=0, sizes=sizes, rows=musique)
            for family in sorted(NEEDS_MUSIQUE)
        )
        assert (whole.family, short.family) == ("musique", "musique_short")
        assert whole.question == short.question
        assert len(whole.documents) == 10
        assert len(short.documents) == 5
        assert abs(len(maker.make(short).token_ids) - 1280) <= 0.02 * 1280
