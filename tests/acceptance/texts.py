"""The texts of the reports that the project was created from, or as long and of the same kind."""

from tests.real.texts import fact_document

SYSTEM = "You are a careful assistant. Use the document to answer, and keep it short."
FIRST_QUESTION = "Who keeps bees?"
SECOND_QUESTION = "Which of the people in the document lives in Corvale, and what was found there?"
LONG_DOCUMENT = fact_document(7, 63)
"""About 2,300 tokens."""
DOCUMENTS = {name: fact_document(seed, 9) for seed, name in enumerate(("a", "b", "c", "d"), 60)}
"""About 360 tokens each."""

BILINGUAL_SYSTEM = "你是一个简洁、专业的中文助手"
PASSAGES = (
    "Passage 1: 人工智能是计算机科学的一个分支。",
    "Passage 2: 机器学习是人工智能的核心技术。",
    "Passage 3: 深度学习是机器学习的一个分支。",
)
BILINGUAL_QUESTION = "\n\nQuestion: 什么是人工智能？\nAnswer:"  # noqa: RUF001 - as reported
BILINGUAL_TEXT = "你好" + "".join(PASSAGES) + BILINGUAL_QUESTION

DOSSIER = (
    "Reference dossier 4815162342.\n\n"
    + "The quick brown fox jumps over the lazy dog near the riverbank. " * 260
)
"""About 3,650 tokens."""
