"""Tiny masked LMs with random weights, and minimal pairs of their words."""

import json

import pytest

from tests.unit.conversion.conftest import WORDS, write_checkpoint
from tests.unit.tasks.conftest import tokenizer_of

PAIRS = [
    ("the cat sings.", "the cat sing."),
    ("red dogs run, birds sing.", "red dogs runs, birds sing."),
    ("the bird runs.", "the birds runs."),
    ("blue cats sing.", "cats blue sing."),
    ("the dog runsing.", "the dog runing the."),
]
"""With the pieces of `WORDS`: `sings` is sing ##s, `runsing` run ##s ##ing."""


def write_pairs(folder, pairs=PAIRS, uid="toy", **more):
    """A file of minimal pairs as BLiMP has them; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"sentence_good": good, "sentence_bad": bad, "UID": uid, **more} for good, bad in pairs]
    (folder / f"{uid}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return tokenizer_of(tmp_path_factory.mktemp("pieces"), WORDS)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory, tokenizer):
    """Folders that training saved, by their position encoding; deberta has a mask decoder."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        name: write_checkpoint(folder / name, tokenizer, "mlm", position_encoding=name)
        for name in ("absolute", "ddrp", "deberta")
    }
