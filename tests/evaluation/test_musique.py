"""The loader's form, and what becomes of the real file where it is at hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from blend_gateway.evaluation.generators.musique import ShortForm, cut_around, musique_task
from blend_gateway.evaluation.prompts import PromptMaker
from blend_gateway.evaluation.texts import MusiqueRow, bare, load_musique

PASSAGES = ("arden is a port .", "belmora lies inland . its mayor is a. p. brandt .", "corvale")


def row(**changes: Any) -> dict[str, Any]:
    passages = [{"title": "", "text": f" {text} "} for text in PASSAGES]
    return {"question": "Who leads it? ", "answers": ["A.P. Brandt"], "ctxs": passages, **changes}


def write(folder: Path, content: Any) -> Path:
    path = folder / "rows.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_rows_are_read_and_holders_found(tmp_path: Path) -> None:
    (read,) = load_musique(write(tmp_path, [row()]))
    assert read.question == "Who leads it?"
    assert read.passages == tuple((None, text) for text in PASSAGES)
    assert read.holders() == (1,)


@pytest.mark.parametrize(
    "content",
    [{}, [], [1], [row(answers=[])], [row(ctxs=[])], [row(question=None)], [row(ctxs=[{}])]],
)
def test_another_form_is_refused(content: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rows\.json"):
        load_musique(write(tmp_path, content))


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("tokens", [3, 5, 9, 400])
def test_a_cut_keeps_the_phrase_and_no_more_than_asked(tokens: int) -> None:
    text = " ".join(f"w{index}," for index in range(50)) + " a. p. brandt . " + "end " * 50
    cut = cut_around(text, "A.P. Brandt", tokens, words)
    assert words(cut) == min(tokens, words(text))
    assert cut in text
    assert tokens < 5 or bare("a p brandt") in bare(cut)


def test_a_cut_without_the_phrase_keeps_the_beginning() -> None:
    assert cut_around("one two three", "four", 2, words) == "one two"


def test_whole_prompts_are_as_long_as_known(
    musique: tuple[MusiqueRow, ...], maker: PromptMaker
) -> None:
    lengths = []
    for number in range(0, 75, 5):
        task = musique_task(musique, number, seed=0, count=maker.count)
        assert task.documents == tuple(text for _, text in musique[number].passages)
        assert task.order == 0
        assert task.needed == musique[number].holders()
        lengths.append(len(maker.make(task).token_ids))
    assert 5_500 < sum(lengths) / len(lengths) < 6_300


def test_short_prompts_keep_the_answer(musique: tuple[MusiqueRow, ...], maker: PromptMaker) -> None:
    short = ShortForm(passages=5, tokens=100)
    for number in range(0, 75, 3):
        task = musique_task(musique, number, seed=0, count=maker.count, short=short)
        assert len(task.documents) == 5
        assert all(95 <= maker.count(text) <= 100 for text in task.documents)
        assert len(task.needed) >= min(len(musique[number].holders()), 5)


def test_orders_permute_the_same_passages(
    musique: tuple[MusiqueRow, ...], maker: PromptMaker
) -> None:
    tasks = [musique_task(musique, 4 + 75 * k, seed=1, count=maker.count) for k in range(3)]
    assert [task.order for task in tasks] == [0, 1, 2]
    assert len({task.documents for task in tasks}) == 3
    assert len({tuple(sorted(task.documents)) for task in tasks}) == 1
    again = musique_task(musique, 4 + 75, seed=1, count=maker.count)
    assert again == tasks[1]
    with pytest.raises(ValueError, match="below 225"):
        musique_task(musique, 225, seed=1, count=maker.count)


def test_distractors_are_other_answers_of_like_length(
    musique: tuple[MusiqueRow, ...], maker: PromptMaker
) -> None:
    for number in range(0, 75, 7):
        task = musique_task(musique, number, seed=0, count=maker.count)
        assert len(task.candidates) == 4
        assert bare(task.answer) not in [bare(text) for text in task.candidates[1:]]
