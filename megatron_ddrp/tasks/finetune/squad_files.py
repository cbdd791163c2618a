"""SQuAD's nested JSON (Rajpurkar et al., arXiv:1606.05250; version 2 arXiv:1806.03822) as flat rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_ddrp.errors import UserError

_LAYOUT = (
    'expected SQuAD\'s {"data": [{"paragraphs": [{"context": …, "qas": [{"id": …, "question": …, "answers": …}]}]}]}'
)


def is_squad(value: Any) -> bool:
    """Return whether a JSON value has SQuAD's outer layout: articles with paragraphs under `data`."""
    articles = value.get("data") if isinstance(value, dict) else None
    return isinstance(articles, list) and any(isinstance(a, dict) and "paragraphs" in a for a in articles)


def questions(path: str, value: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield `question ID` and the cells id, question, context and answers of each question.

    `answers` is {"text": [str, …], "answer_start": [int, …]}, with empty lists for an unanswerable question; questions
    of a test set have no answers. Raises `UserError` for another layout.
    """
    place = "its first question"
    try:
        for article in value["data"]:
            for paragraph in article["paragraphs"]:
                for asked in paragraph["qas"]:
                    place = f"question {asked['id']}"
                    cells = {key: asked[key] for key in ("id", "question")} | {"context": paragraph["context"]}
                    if "answers" in asked:
                        cells["answers"] = flat_answers(asked["answers"])
                    yield place, cells
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}, at or after {place}: {_reason(error)}; {_LAYOUT}") from None


def flat_answers(answers: Any) -> dict[str, list[Any]]:
    """Return answers as {"text": […], "answer_start": […]}; `answers` may also be a list of {"text", "answer_start"}.

    Raises `KeyError` or `TypeError` for anything else.
    """
    if isinstance(answers, dict):
        return {"text": list(answers["text"]), "answer_start": list(answers["answer_start"])}
    return {key: [answer[key] for answer in answers] for key in ("text", "answer_start")}


def _reason(error: KeyError | TypeError) -> str:
    return f"no key {error}" if isinstance(error, KeyError) else "another layout"
