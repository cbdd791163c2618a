"""The flags of a model that trains in a second."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ddrp import pretrain
from megatron_ddrp.commands.functions import Run, given_words
from megatron_ddrp.config import ENCODINGS, encoding_class
from tests.conftest import TinyCorpus
from tests.integration.hosts import Host, two_hosts

Flags = Callable[..., list[str]]
Train = Callable[..., Run]
Told = Callable[..., str]

TINY: dict[str, Any] = {
    **{"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 32},
    **{"relative_distance": 8, "hidden_dropout": 0.0, "attention_dropout": 0.0, "tcd_tokens": 6},
    **{"micro_batch_size": 4, "global_batch_size": 8, "train_iters": 5, "lr": 1e-3},
    **{"lr_warmup_fraction": 0.2, "log_interval": 1, "eval_interval": 0, "split": "90,10,0"},
}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
TENSOR, PIPELINE = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
NOTES = {"notes": True, "notes_min_count": 4, "notes_max_count": 30, "notes_window": 5}


def command_line(flags: dict[str, Any]) -> list[str]:
    """`{"train_iters": 5, "bf16": True, "packing": False}` → `--train-iters 5 --bf16 --no-packing`, without None."""
    return given_words(fitting(flags))


def fitting(flags: dict[str, Any]) -> dict[str, Any]:
    """Without a distance beside an encoding that refuses it."""
    name = flags.get("position_encoding", "ddrp")
    refuses = name in ENCODINGS and encoding_class(name).relative_distance is None
    return flags | {"relative_distance": None} if refuses else flags


def tiny_settings(corpus: TinyCorpus) -> dict[str, Any]:
    """The flags of a tiny run on its corpus."""
    return TINY | {"data_path": corpus.prefix, "vocab_file": corpus.vocab_file}


@pytest.fixture(scope="session")
def train(tiny_corpus: TinyCorpus) -> Train:
    """`train(train_iters=9, bf16=True)`: a tiny run with some settings changed, in this process, without a start."""
    import torch

    torch.set_num_threads(1)  # as ranks have, whose numbers are the same to the last bit
    return lambda **changes: pretrain(**fitting(tiny_settings(tiny_corpus) | changes))


@pytest.fixture(scope="session")
def flags(tiny_corpus: TinyCorpus) -> Flags:
    """`flags(train_iters=9, bf16=True)`: the command line of a tiny run with some settings changed."""
    return lambda **changes: command_line(tiny_settings(tiny_corpus) | changes)


@pytest.fixture
def told(train: Train, capsys: pytest.CaptureFixture[str]) -> Told:
    """`told(train_iters=9)`: what such a run in this process prints."""

    def said(**changes: Any) -> str:
        capsys.readouterr()
        train(**changes)
        return capsys.readouterr().out

    return said


@pytest.fixture(scope="session")
def three_steps(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of its steps 1, 2 and 3."""
    folder = tmp_path_factory.mktemp("three")
    train(save=folder, train_iters=3, save_interval=1)
    return folder


@pytest.fixture
def run(three_steps: Path, tmp_path: Path) -> Path:
    """A copy of that run to damage."""
    return Path(shutil.copytree(three_steps, tmp_path / "run"))


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts with a network between them, made of namespaces."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(two_hosts())
        except OSError as error:
            pytest.skip(f"needs root and ip, to make network namespaces: {error}")
        yield made
