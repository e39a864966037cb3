"""Read a made-up task's documents as a careful reader would, and answer its question.

Written against the sentences, not against the generators: each solver sees texts and the question
and nothing else of a task.
"""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

from blend_gateway.evaluation.texts import flat


class Unanswerable(Exception):
    """These documents do not say it."""


def one(pattern: str, text: str) -> str:
    """The only match's group; there must be exactly one."""
    found = re.findall(pattern, text)
    if len(found) != 1:
        raise Unanswerable(f"{len(found)} matches of {pattern!r}")
    answer: str = found[0]
    return answer


def table(pattern: str, text: str) -> dict[str, str]:
    """Key to value of all matches; no key may have two values."""
    found = re.findall(pattern, text)
    keyed = dict(found)
    assert len(keyed) == len(found), f"{pattern!r} states a key twice"
    return keyed


def look_up(keyed: dict[str, str], key: str) -> str:
    if key not in keyed:
        raise Unanswerable(f"nothing about {key!r}")
    return keyed[key]


def needle_single(texts: Sequence[str], question: str) -> str:
    text = " ".join(texts)
    place = one(r"the (\w+) archive", question)
    start = f"The access code of the {place} archive"
    whole = re.findall(rf"{start} is (\d{{6}})\.", text)
    if whole:
        return str(whole[0])
    return one(rf"{start} begins with (\d+)\.", text) + one(rf"{start} ends with (\d+)\.", text)


def archive_codes(texts: Sequence[str]) -> dict[str, str]:
    return table(r"The access code of the (\w+) archive is (\d+)\.", " ".join(texts))


def needle_multi_key(texts: Sequence[str], question: str) -> str:
    badge = re.search(r"the badge of (\w+ \w+) opens\?", question)
    if badge is None:
        return look_up(archive_codes(texts), one(r"the (\w+) archive\?", question))
    opens = table(r"The badge of (\w+ \w+) opens the (\w+) archive\.", " ".join(texts))
    return look_up(archive_codes(texts), look_up(opens, badge.group(1)))


def needle_multi_value(texts: Sequence[str], question: str) -> str:
    place = one(r"of the (\w+) archive,", question)
    found = re.findall(rf"One access code of the {place} archive is (\d+)\.", " ".join(texts))
    if len(found) != 3:
        raise Unanswerable(f"{len(found)} codes")
    return f"{found[0]}, {found[1]} and {found[2]}"


def needle_multi_query(texts: Sequence[str], question: str) -> str:
    known = archive_codes(texts)
    places = re.findall(r"the (\w+) archive", question)
    pairs = [f"{look_up(known, place)} for {place}" for place in places]
    return f"{pairs[0]}, {pairs[1]} and {pairs[2]}"


def variable_tracking(texts: Sequence[str], question: str) -> str:
    text = " ".join(texts)
    values = table(r"The value of counter (\w+) is (\d+)\.", text)
    sources = table(r"The value of counter (\w+) is that of counter (\w+)\.", text)
    name = one(r"counter (\w+)\?", question)
    while name not in values:
        name = look_up(sources, name)
    return values[name]


def alias(texts: Sequence[str], question: str) -> str:
    text = " ".join(texts)
    units = table(r"project (\w+) is unit (\w+)", text)
    budgets = table(r"unit (\w+) has (\d+) crowns", text)
    kind, name = re.findall(r"of (unit|project) (\w+)\?", question)[0]
    return look_up(budgets, name if kind == "unit" else look_up(units, name))


def override(texts: Sequence[str], question: str) -> str:
    notices = re.findall(
        r"Notice (\d+): from now on the weight limit on the (\w+) bridge is (\d+) tons\.",
        " ".join(texts),
    )
    asked = re.search(r"According to notice (\d+)", question)
    if asked is not None:
        found = [limit for name, _, limit in notices if name == asked.group(1)]
    else:
        bridge = one(r"limit on the (\w+) bridge now", question)
        found = [limit for _, at, limit in notices if at == bridge]
    if not found:
        raise Unanswerable("no notice")
    return str(found[-1])


def coreference(texts: Sequence[str], question: str) -> str:
    town = one(r"the town of (\w+)\?", question)
    explicit = table(r"In the town of (\w+) live (\d+) people\.", " ".join(texts))
    if town in explicit:
        return explicit[town]
    for before, text in pairwise(texts):
        if f"This document describes the town of {town}." in before:
            return one(
                r"In the town that the document before this one describes live (\d+) people\.", text
            )
    raise Unanswerable(town)


def recall(texts: Sequence[str], question: str) -> str:
    lists = re.findall(r"Pairs of words: ([^.]+)\.", " ".join(texts))
    paired = table(r"(\w+) with (\w+)", " ; ".join(lists))
    direct = re.search(r"paired with (\w+)\?", question)
    if direct is not None:
        return look_up(paired, direct.group(1))
    return look_up(paired, look_up(paired, one(r"Begin at the word (\w+),", question)))


def multi_document_qa(texts: Sequence[str], question: str) -> str:
    text = " ".join(texts)
    mayors = table(r"The mayor of (\w+) is (\w+ \w+)\.", text)
    towns = table(r"(\w+ \w+) was born in the town of (\w+)\.", text)
    years = table(r"(\w+ \w+) was born in the year (\d+) ", text)
    forms: list[tuple[str, Callable[[re.Match[str]], str]]] = [
        (r"mayor of (\w+)\?", lambda m: look_up(mayors, m[1])),
        (
            r"mayor of the town in which (\w+ \w+) was born\?",
            lambda m: look_up(mayors, look_up(towns, m[1])),
        ),
        (r"In which year was (\w+ \w+) born\?", lambda m: look_up(years, m[1])),
        (
            r"born first, (\w+ \w+) or (\w+ \w+)\?",
            lambda m: min(m.groups(), key=lambda person: look_up(years, person)),
        ),
    ]
    for pattern, answer in forms:
        match = re.search(pattern, question)
        if match is not None:
            return answer(match)
    raise AssertionError(f"no such question: {question!r}")


def python_topics(texts: Sequence[str], question: str) -> str:
    text = " ".join(flat(text) for text in texts)
    if "____" in question:
        before, after = question.split("documents? ", 1)[1].split("____")
        return one(rf"{re.escape(before)}(\w+){re.escape(after)}", text)
    known = re.escape(question.split("go on? ", 1)[1].removesuffix(" ..."))
    return one(rf"{known} (\S+ \S+ \S+ \S+)", text)


SOLVERS: dict[str, Callable[[Sequence[str], str], str]] = {
    "needle_single": needle_single,
    "needle_multi_key": needle_multi_key,
    "needle_multi_value": needle_multi_value,
    "needle_multi_query": needle_multi_query,
    "variable_tracking": variable_tracking,
    "alias": alias,
    "override": override,
    "coreference": coreference,
    "recall": recall,
    "multi_document_qa": multi_document_qa,
    "python_topics": python_topics,
}
