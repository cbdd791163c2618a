"""A tiny corpus of real text, the same wherever Python is: the language reference that pydoc carries."""

import argparse
import atexit
import gc
import inspect
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings

from megatron_ddrp.data.preprocess.pipeline import preprocess
from megatron_ddrp.errors import run_command
from megatron_ddrp.pages import plotting
from tests.datasets import wordpiece_job

settings.register_profile("untimed", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")  # by default a test fails if a busy machine is slow

NUM_DOCUMENTS = 600
NUM_WORDS = 500
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import and collect without looking for garbage, and look for none among the imported modules later: each look is
    half a second, and together they would be a third of the collection's time."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # or else what C++ holds is reported as leaked


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that have slow tests, then with those of few tests, which tend to be long ones: at the end
    all workers but one would be idle."""
    count, slow = Counter(item.path for item in items), {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in slow, count[item.path]))


@pytest.fixture(scope="module", autouse=True)
def same_draws() -> None:
    """Weights drawn without a seed are the same whatever ran before in this process: workers share files by time."""
    import torch

    torch.manual_seed(0)


class TinyCorpus(NamedTuple):
    """One corpus in the three forms that commands take."""

    text_file: Path
    """JSON lines, documents of 8 to some hundred tokens."""
    vocab_file: Path
    """WordPiece: special tokens, characters, the most frequent words."""
    prefix: Path
    """The preprocessed dataset, for `--data-path`."""


def documents() -> list[str]:
    """Paragraphs of prose in a fixed order: short and long ones, so that rows need padding and cutting."""
    paragraphs = (" ".join(p.split()) for name in sorted(topics) for p in topics[name].split("\n\n"))
    return [p for p in paragraphs if len(p.split()) >= 10][:NUM_DOCUMENTS]


def write_vocabulary(texts: list[str], path: Path, num_words: int = NUM_WORDS) -> Path:
    """A WordPiece vocabulary that spells every word: characters, their continuations, frequent words."""
    words = Counter(re.findall(r"[a-z]{2,}", " ".join(texts).lower()))
    characters = sorted({c for text in texts for c in text.lower() if not c.isspace()})
    frequent = sorted(words, key=lambda word: (-words[word], word))[:num_words]
    pieces = [*SPECIAL_TOKENS, *characters, *(f"##{c}" for c in characters), *frequent]
    path.write_text("\n".join(pieces) + "\n", encoding="utf-8")
    return path


def write_corpus(folder: Path) -> TinyCorpus:
    """Write the documents, their vocabulary and the dataset that is made of both into a folder."""
    texts = documents()
    text_file = folder / "corpus.jsonl"
    text_file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    vocab_file = write_vocabulary(texts, folder / "vocab.txt")
    prefix = preprocess(wordpiece_job(vocab_file, folder / "corpus", text_file)).prefixes[0]
    return TinyCorpus(text_file, vocab_file, Path(prefix))


def write_program(folder: Path, name: str, script: str) -> None:
    """Write a program for bash, to be found before others of its name."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/usr/bin/env bash\n{script}\n", encoding="utf-8")
    (folder / name).chmod(0o755)


def coarse_figure(figure: Any, ending: str, render: Callable[..., bytes] = plotting.render) -> bytes:
    """Return a figure's .png with few dots, and a line in place of its other files."""
    return render(figure, ending, 50) if ending == ".png" else f"a figure as {ending}".encode()


@pytest.fixture(autouse=True)
def coarse_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw each figure into its .png, with few dots: text and fonts of three full files cost a second a figure.

    `tests/unit/pages/test_markdown.py` writes them as a user's command does.
    """
    monkeypatch.setattr(plotting, "render", coarse_figure)


@pytest.fixture
def torch_seed() -> None:
    """Seed torch's own generator."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    """Written once a test process; treat it as read-only."""
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def prose_then_code(tiny_corpus: TinyCorpus, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of a dataset of 600 documents of prose and 40 of Python code, with which `--split 949,50,1` validates."""
    folder = tmp_path_factory.mktemp("prose_then_code")
    blocks = [block for block in inspect.getsource(argparse).split("\n\n") if len(block.split()) >= 10][:40]
    code = folder / "code.jsonl"
    code.write_text("".join(json.dumps({"text": block}) + "\n" for block in blocks), encoding="utf-8")
    job = wordpiece_job(tiny_corpus.vocab_file, folder / "both", tiny_corpus.text_file, code)
    return str(preprocess(job).prefixes[0])


class Ended(NamedTuple):
    """Exit code and output of a command that ran in this process."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run_tool(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Return a function that runs the `main` of a module with words of a command line, in this process."""

    def run(module: ModuleType, *words: Any) -> Ended:
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, words)])
        monkeypatch.setattr(os, "_exit", sys.exit)  # by which ranks end
        with pytest.raises(SystemExit) as end:
            run_command(module.main)
        return Ended(int(end.value.code or 0), *capfd.readouterr())

    return run
