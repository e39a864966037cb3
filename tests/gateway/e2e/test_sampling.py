"""Options of sampling beside a document whose KV comes back."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from tests.gateway.e2e.asking import assert_adds_up, chat, register
from tests.gateway.e2e.texts import document

pytestmark = pytest.mark.vllm


def _is_a_greeting(text: str) -> bool:
    said = json.loads(text)
    return said.keys() == {"loud", "colour"} and said["colour"] in ("red", "green")


def _calls_greet(choice: Any) -> bool:
    (call,) = choice["message"]["tool_calls"]
    return call["function"]["name"] == "greet" and _is_a_greeting(call["function"]["arguments"])


def _has_alternatives(choice: Any) -> bool:
    steps = choice["logprobs"]["content"]
    return len(steps) == 12 and all(len(step["top_logprobs"]) == 3 for step in steps)


GREETING = {
    "type": "object",
    "properties": {"loud": {"type": "boolean"}, "colour": {"enum": ["red", "green"]}},
    "required": ["loud", "colour"],
    "additionalProperties": False,
}
GREET = {"type": "function", "function": {"name": "greet", "strict": True, "parameters": GREETING}}


@dataclass(frozen=True)
class Asked:
    """What a client asks of sampling, and what every choice of the answer must be."""

    fields: dict[str, Any]
    holds: Callable[[Any], bool]
    num_choices: int = 1


@pytest.mark.parametrize(
    "asked",
    [
        Asked({"n": 3, "seed": 5, "temperature": 1.0}, lambda choice: True, num_choices=3),
        Asked({"tools": [GREET], "tool_choice": "required", "max_tokens": 100}, _calls_greet),
        Asked(
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "greeting", "strict": True, "schema": GREETING},
                },
                "max_tokens": 100,
            },
            lambda choice: _is_a_greeting(choice["message"]["content"]),
        ),
        Asked({"top_logprobs": 3, "max_tokens": 12, "ignore_eos": True}, _has_alternatives),
    ],
    ids=["n", "tools", "json-schema", "logprobs"],
)
def test_whatever_is_asked_of_sampling_is_given_beside_a_hit(
    http: httpx.Client, asked: Asked
) -> None:
    """And with the whole document recomputed, the choices are those that nothing was reused for."""
    shown = register(http, text=document("sampled", 100))
    blends = ({}, {"recompute_ratio": 1.0}, {"mode": "off"})
    answers = []
    for blend in blends:
        fields = {"logprobs": True, **asked.fields, "blend": blend}
        answer = chat(http, "Which colour?", [{"document_id": shown["id"]}], **fields)
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert [choice["index"] for choice in body["choices"]] == list(range(asked.num_choices))
        assert all(asked.holds(choice) for choice in body["choices"])
        assert_adds_up(body)
        answers.append(body)
    statuses = [body["blend"]["documents"][0]["status"] for body in answers]
    assert statuses == ["hit", "hit", "off"]
    for blended, exact in zip(answers[1]["choices"], answers[2]["choices"], strict=True):
        steps = [each["logprobs"]["content"] for each in (blended, exact)]
        assert steps[0]
        for one, other in zip(*steps, strict=True):
            assert one["token"] == other["token"]
            assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-3)
