"""Heads that fine-tuning puts on an encoder, as transformers names them; no torch, because command lines read this."""

from __future__ import annotations

from typing import NamedTuple


class HeadForm(NamedTuple):
    """Form of a head, with its names in transformers and on the hub."""

    name: str
    """Suffix of the classes that have it and of the class that loads it, AutoModelFor…"""
    is_pooled: bool
    """True for one output per row, from BERT's pooler; False for one output per piece."""
    output: str
    """Name of its last layer."""
    pipeline: str
    """Name on the hub of the model's use."""


SEQUENCE = HeadForm("SequenceClassification", True, "classifier", "text-classification")
PIECES = HeadForm("TokenClassification", False, "classifier", "token-classification")
SPAN = HeadForm("QuestionAnswering", False, "qa_outputs", "question-answering")
HEAD_FORMS = (SEQUENCE, PIECES, SPAN)


class Labels(NamedTuple):
    """Labels of a head and its problem type, as in Hugging Face configurations."""

    names: tuple[str, ...]
    """Names of the outputs; empty for the two of an answer, which have no names."""
    problem_type: str | None
    """Loss of a sequence head in transformers: single_label_classification, multi_label_classification, regression."""
