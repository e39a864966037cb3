"""Python's documentation: one sentence of one topic, asked for by what stands around it."""

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from blend_gateway.evaluation.generators.layout import header_tokens
from blend_gateway.evaluation.generators.musique import cut_around
from blend_gateway.evaluation.tasks import Sizes, Task, Variant, stratum
from blend_gateway.evaluation.texts import flat, prose_sentences

FAMILY = "python_topics"
_NUM_DISTRACTORS = 3
_PHRASE_WORDS = 4
_NUM_PHRASES = 6
"""Of each sentence, to pick distractors from."""
_MOST_CHARACTERS = 6
"""Of a token, on average over a text of this kind; about 4 in fact."""
_WORD = re.compile(r"(?<![\w\"*.'-])[a-z]{6,}(?![\w\"*'-])")
"""A word of the language, not of a program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Quiz:
    """What is asked about a sentence."""

    question: str
    begun: str
    wanted: str


def topics_task(topics: Mapping[str, str], number: int, *, seed: int, sizes: Sizes) -> Task:
    """Make a task of topics, one a document, each cut to its size at words.

    Even numbers ask how a sentence goes on, odd ones for a word left out of it. The sentence stands
    in one document alone. Order 0 is by name, 1 by name backwards, 2 shuffled, and then the needed
    document is moved to its depth.

    Args:
        topics: Name to text.
        number: Index within the cell; ``stratum(number)`` is the task's depth and order.
        seed: Of the whole evaluation.
        sizes: The prompt's length and its documents'.

    Raises:
        ValueError: There are fewer topics than documents wanted, or none has a sentence to ask for.
    """
    rng = random.Random(f"{FAMILY}/{seed}/{number}/{sizes.length}")
    depth, order = stratum(number)
    per_document = sizes.document_tokens + sizes.header_tokens
    num_documents = max(round((sizes.length - sizes.base_tokens) / per_document), 1)
    if num_documents > len(topics):
        raise ValueError(f"{num_documents} documents need as many topics, there are {len(topics)}")
    topics = _long_ones(topics, num_documents, sizes)
    for topic, sentence in _sentences(topics, rng):
        quiz = _quiz(topic, sentence, rng, asks_for_word=number % 2 == 1)
        names = _arrange(topic, list(topics), num_documents, depth, order, rng)
        if quiz is None:
            continue
        texts = _cut(topics, names, (topic, sentence), quiz, sizes, rng)
        distractors = _distractors(texts, quiz, rng, sizes)
        holders = [at for at, text in enumerate(texts) if sentence in flat(text)]
        if holders != [names.index(topic)] or len(distractors) < _NUM_DISTRACTORS:
            continue
        wrong = distractors[:_NUM_DISTRACTORS]
        return Task(
            family=FAMILY,
            variant=Variant.DIRECT,
            number=number,
            depth=depth,
            order=order,
            documents=tuple(texts),
            titles=tuple(names),
            question=quiz.question,
            answer=quiz.begun + quiz.wanted,
            candidates=tuple(quiz.begun + phrase for phrase in (quiz.wanted, *wrong)),
            needed=tuple(holders),
        )
    raise ValueError("none of the topics has a sentence to ask for")


def _long_ones(topics: Mapping[str, str], number: int, sizes: Sizes) -> dict[str, str]:
    """Topics that can fill a document, or at least so many of the longest."""
    by_length = sorted(topics, key=lambda name: (-len(topics[name]), name))
    least = _MOST_CHARACTERS * sizes.document_tokens
    names = [name for name in by_length if len(topics[name]) >= least]
    chosen = names if len(names) >= number else by_length[:number]
    return {name: topics[name] for name in sorted(chosen)}


def _sentences(topics: Mapping[str, str], rng: random.Random) -> Iterator[tuple[str, str]]:
    names = list(topics)
    rng.shuffle(names)
    for name in names:
        sentences = list(prose_sentences(topics[name]))
        rng.shuffle(sentences)
        for sentence in sentences[:3]:
            yield name, sentence


def _quiz(topic: str, sentence: str, rng: random.Random, *, asks_for_word: bool) -> _Quiz | None:
    if asks_for_word:
        found = [m for m in _WORD.finditer(sentence) if sentence.count(m.group()) == 1]
        if not found:
            return None
        word = rng.choice(found)
        blanked = f"{sentence[: word.start()]}____{sentence[word.end() :]}"
        return _Quiz(
            question=f"Which word is left out of this sentence of the documents? {blanked}",
            begun="The word that is left out is ",
            wanted=word.group(),
        )
    words = sentence.split()
    known = rng.randrange(8, len(words) - _PHRASE_WORDS)
    return _Quiz(
        question=(f"How does this sentence of the documents go on? {' '.join(words[:known])} ..."),
        begun="",
        wanted=" ".join(words[known : known + _PHRASE_WORDS]),
    )


def _arrange(
    topic: str, names: list[str], number: int, depth: float, order: int, rng: random.Random
) -> list[str]:
    others = rng.sample([name for name in names if name != topic], number - 1)
    if order < 2:
        others.sort(reverse=order == 1)
    others.insert(round(depth * (number - 1)), topic)
    return others


def _cut(
    topics: Mapping[str, str],
    names: list[str],
    needed: tuple[str, str],
    quiz: _Quiz,
    sizes: Sizes,
    rng: random.Random,
) -> list[str]:
    """Texts that together take the room, each around its topic's sentence or one of its places."""
    left = sizes.length - sizes.base_tokens - sizes.count(quiz.question)
    left -= header_tokens(names, sizes)
    texts = []
    for index, name in enumerate(names):
        text = topics[name]
        wanted = needed[1] if name == needed[0] else rng.choice(prose_sentences(text) or ("",))
        share = left // (len(names) - index)
        texts.append(cut_around(text, wanted, share, sizes.count))
        left -= sizes.count(texts[-1])
    return texts


def _distractors(texts: list[str], quiz: _Quiz, rng: random.Random, sizes: Sizes) -> list[str]:
    """Words or phrases of the documents that have the answer's number of tokens, or nearly."""
    pool: list[str] = []
    for text in texts:
        for sentence in prose_sentences(text):
            if quiz.begun:
                pool += [m.group() for m in _WORD.finditer(sentence)]
            else:
                words = sentence.split()
                starts = rng.sample(range(len(words) - _PHRASE_WORDS), _NUM_PHRASES)
                pool += [" ".join(words[start : start + _PHRASE_WORDS]) for start in starts]
    unlike = [phrase for phrase in dict.fromkeys(pool) if phrase not in quiz.question]
    unlike = [phrase for phrase in unlike if phrase != quiz.wanted]
    rng.shuffle(unlike)
    length = sizes.count(f" {quiz.wanted}")
    return sorted(unlike, key=lambda phrase: abs(sizes.count(f" {phrase}") - length))
