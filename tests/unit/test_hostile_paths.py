"""Impossible files and folders for every option that takes a path, made from the commands' dataclasses of options.

Each command line is whole but for one path. The command refuses it in one line that names it, and writes nothing beside
its output.
"""

import contextlib
import importlib
import io
import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from megatron_ddrp.cli import _plain_type
from megatron_ddrp.commands import COMMANDS
from megatron_ddrp.config import flag
from megatron_ddrp.data.atomic import object_sum
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from megatron_ddrp.errors import FAILURE, WRONG_ARGUMENTS, run_command
from megatron_ddrp.tasks.finetune import command as finetune
from tests.conftest import TinyCorpus
from tests.integration.conftest import TINY, command_line
from tests.integration.launch import start_ranks
from tests.unit.lab.compare.made_rows import full_rows
from tests.unit.tasks.conftest import sentences, write_bert, write_checkpoint
from tests.unit.test_hostile_words import Parsed, commands

FOLDERS, PREFIXES, FILES = ("DIR", "HF_DIR", "OUT"), ("P", "PREFIX", "IN", "PATH"), ("FILE", "F", "G", "T", "PLAN")
"""Metavars of options that take folders, either, and files; an ending may follow."""
WRITTEN = ("index_cache_dir", "output", "output_dir", "output_prefix", "rows", "save", "tensorboard_dir")
"""Options whose path a command makes: one that is missing or empty is right."""
DATASET = (".bin", ".idx", "_text_document.bin", "_text_document.idx")
"""Ends of the files that a prefix stands for."""
LENGTH = 5000
"""Characters of the long path."""


def kinds_of(name: str, option: Any) -> list[str]:
    """Return the kinds of hostile paths for an option; none if it takes no path."""
    metavar = option.rules.get("metavar", "").replace("[WEIGHT] ", "").partition(".")[0]
    if metavar not in FOLDERS + PREFIXES + FILES:
        assert _plain_type(option.hint) is not Path, name
        return []
    kinds = ["loop", "device", "through", "long"]
    kinds += ["folder"] * (metavar not in FOLDERS) + ["file"] * (metavar not in FILES)
    return kinds + ["missing", "empty"] * (name not in WRITTEN)


class World(NamedTuple):
    """Files that every command takes, and the hostile ones beside them."""

    folder: Path
    corpus: TinyCorpus

    def files(self, folder: Path) -> set[Path]:
        """Return all files that there are, also in a test's folder."""
        folders = (self.folder, folder, self.corpus.prefix.parent)
        return {path for each in folders for path in each.rglob("*")}

    def make_kept_model(self) -> None:
        """Fine-tune a model and keep it, on the first call."""
        out, kept = self.folder / "sweep", self.folder / "kept"
        if not kept.exists():
            assert finetune.main(command_line({**self.words("finetune"), "output_dir": out})) == 0
            next(path for path in (out / "models").iterdir() if path.is_dir()).rename(kept)

    def words(self, name: str) -> dict[str, Any]:
        """Return the options of a whole command line; a tuple is several words."""
        at, corpus = self.folder, self.corpus
        analysis = {"load": at / "run", "data_path": corpus.prefix, "output": at / "out.json", "device": "cpu"}
        sweep = {"load": at / "run", "output_dir": at / "out", "epochs": 1, "seeds": 1, "batch_size": 8, "lr": 1e-3}
        if name.startswith("analyze"):
            analysis |= {"lengths": 8, "tokens": 16} if name == "analyze throughput" else {}
            less = {"analyze throughput": "data_path", "analyze notes": "device"}.get(name)
            return {key: value for key, value in analysis.items() if key != less}
        return {
            "pretrain": TINY | {"data_path": corpus.prefix, "vocab_file": corpus.vocab_file, "save": at / "out"},
            "preprocess": {"input": corpus.text_file, "vocab_file": corpus.vocab_file, "output_prefix": at / "out"},
            "train-tokenizer": {"input": corpus.text_file, "vocab_size": 300, "output": at / "out.txt"},
            "dataset inspect": {"prefix": corpus.prefix},
            "dataset verify": {"prefix": corpus.prefix},
            "dataset merge": {"input": corpus.prefix, "output_prefix": at / "out"},
            "dataset shuffle": {"prefix": corpus.prefix, "output_prefix": at / "out"},
            "convert": {"load": at / "run", "output": at / "out"},
            "report": {"load": at / "run", "output_dir": at / "out"},
            "glue": sweep | {"data_dir": at / "glue", "tasks": "CoLA"},
            "finetune": sweep | {"train": at / "train.jsonl", "valid": at / "train.jsonl"},
            "finetune predict": {"load": at / "kept", "input": at / "train.jsonl", "output": at / "out.jsonl"},
            "minimal-pairs": {"data_dir": at / "pairs", "load": at / "run", "output_dir": at / "out"},
            "compare": {"plan": at / "plan.yaml", "output_dir": at / "out"},
        }[name]


FILES_OF_WORLD = ("bert", "rows.jsonl", "vocab.txt")
SLOW = (
    "pretrain",
    "compare",
    "finetune predict",
    *(f"analyze {each}" for each in ("direction", "space", "throughput")),
)
"""Commands whose refusals take more than milliseconds, or whose line needs what takes seconds to make."""
LEFT_OUT = {
    *(("analyze notes", name, "") for name in ("data_path", "output")),
    ("plan", "data_path", ""),
}
"""Paths that are read after notes, which the world's run lacks, and one that a plan only prints."""
BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    ("preprocess", "tokenizer_model"): {"tokenizer_type": "HuggingFace", "vocab_file": None},
    ("pretrain", "train_data_path"): {"data_path": None, "split": None, "valid_data_path": "no-such"},
    ("pretrain", "valid_data_path"): {"data_path": None, "split": None, "train_data_path": "corpus"},
    ("pretrain", "tokenizer_model"): {"tokenizer_type": "HuggingFace", "vocab_file": None},
    ("pretrain", "index_cache_dir"): {"notes": True},
    ("dataset inspect", "tokenizer_model"): {"tokenizer_type": "HuggingFace"},
    ("dataset verify", "tokenizer_model"): {"tokenizer_type": "HuggingFace"},
    ("convert", "from_hf"): {"load": None},
    ("convert", "generator"): {"load": None, "from_hf": "bert"},
    ("convert", "vocab_file"): {"load": None, "from_hf": "bert"},
    ("convert", "tokenizer_model"): {"load": None, "from_hf": "bert", "tokenizer_type": "HuggingFace"},
    ("analyze space", "text"): {"data_path": None},
    ("finetune", "task_file"): {"train": None, "valid": None},
    ("finetune", "report"): {"train": None, "valid": None, "load": None},
    ("glue", "report"): {"load": None, "data_dir": None},
    ("compare", "data_path"): {"vocab_file": "vocab.txt"},
    ("compare", "tables"): {"plan": "rows.jsonl"},
    ("compare", "claims"): {"plan": "rows.jsonl"},
}
"""Command and option → what else its line needs, so that the path is read; names are files of the world."""


@pytest.fixture(scope="module")
def world(tiny_corpus: TinyCorpus, tmp_path_factory: pytest.TempPathFactory) -> World:
    at = tmp_path_factory.mktemp("world")
    run = write_checkpoint(at / "run", build_tokenizer("BertWordPieceLowerCase", tiny_corpus.vocab_file), "ddrp")
    (run / "metrics.jsonl").write_text(json.dumps({"iteration": 3, "loss": 1.0, "lm_loss": 1.0}) + "\n")
    write_bert(at / "bert")
    rows = [{"text": text, "label": label} for text, label in sentences(24, 0)]
    (at / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (at / "glue" / "CoLA").mkdir(parents=True)
    for part in ("train", "dev"):
        (at / "glue" / "CoLA" / f"{part}.tsv").write_text("".join(f"m\t{y}\t\t{x}\n" for x, y in sentences(9, 0)))
    (at / "pairs").mkdir()
    (at / "pairs" / "a.jsonl").write_text(json.dumps({"sentence_good": "red cat", "sentence_bad": "cat red"}) + "\n")
    plan = {
        "models": [{"name": "BERT", "encoding": "absolute", "objective": "mlm"}],
        "seeds": 1,
        "budget": {"steps": 4},
        "corpus": {"data_path": [str(tiny_corpus.prefix)], "vocab_file": str(tiny_corpus.vocab_file)},
        "model": {"num-layers": 1, "hidden-size": 16, "num-attention-heads": 2, "seq-length": 32},
    }
    rows = [json.loads(json.dumps(row)) for row in full_rows()]
    sealed = [json.dumps(row | {"crc32": object_sum(row)}) for row in rows]
    (at / "rows.jsonl").write_text("".join(f"{line}\n" for line in sealed))
    (at / "plan.yaml").write_text(json.dumps(plan))
    shutil.copy(tiny_corpus.vocab_file, at / "vocab.txt")
    return World(at, tiny_corpus)


def hostile(folder: Path, kind: str, model: Path) -> Path:
    """Make an impossible path of a kind, with the suffix of a right path and those of datasets, and return it."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{kind}{model.suffix}"
    for each in (path, *(Path(f"{path}{suffix}") for suffix in DATASET)):
        match kind:
            case "empty":
                each.touch()
            case "folder":
                each.mkdir()
            case "file":
                each.write_text("text\n")
            case "loop":
                each.symlink_to(each)
            case "device":
                each.symlink_to("/dev/full")
    if kind == "through":
        (folder / kind).write_text("text\n")
    return (
        folder / "through" / f"x{model.suffix}"
        if kind == "through"
        else (Path("x" * LENGTH + model.suffix) if kind == "long" else path)
    )


def cases() -> Iterator[Any]:
    for command in commands():
        for name, option in command.options.items():
            for kind in kinds_of(name, option):
                if {(command.name, name, ""), (command.name, name, kind)} & LEFT_OUT:
                    continue
                marks = pytest.mark.slow if command.name in SLOW else ()
                yield pytest.param(command, name, kind, id=f"{command.name} {flag(name)} {kind}", marks=marks)


@pytest.mark.parametrize(("command", "name", "kind"), cases())
def test_an_impossible_path_is_refused(command: Parsed, name: str, kind: str, world: World, tmp_path: Path) -> None:
    words = dict(world.words(command.name))
    if command.name == "finetune predict":
        world.make_kept_model()
    for other, value in BESIDE.get((command.name, name), {}).items():
        known = {"corpus": world.corpus.prefix} | {each: world.folder / each for each in FILES_OF_WORLD}
        words[other] = known.get(value, value)
    path = hostile(tmp_path / "hostile", kind, Path(str(words.get(name) or name)))
    before = world.files(tmp_path)
    code, line = outcome(command, words | {name: path}, tmp_path)
    assert code in (FAILURE, WRONG_ARGUMENTS), (code, line)
    assert line.count("\n") == 1 and (": error: " in line or "finding" in line), line
    assert path.name[:40] in line or flag(name) in line or kind == "empty", line
    assert world.files(tmp_path) == before


def words_of(command: Parsed, options: dict[str, Any]) -> list[str]:
    """Return the words of a command line, with the command's name."""
    words, flags = command.name.split(), {}
    for key, value in options.items():
        if key in command.options and command.options[key].rules.get("positional"):
            words += map(str, value if isinstance(value, tuple) else (value,))
        else:
            flags[key] = value
    return [*words, *command_line(flags)]


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Work in a folder; `contextlib.chdir` exists from Python 3.11 on."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def outcome(command: Parsed, options: dict[str, Any], folder: Path) -> tuple[Any, str]:
    """Run a command in this process and in a folder. Return its exit code and what it wrote to standard error.

    `dataset verify` writes to standard output; then return the last line of that.
    """
    argv, stderr, stdout = words_of(command, options), io.StringIO(), io.StringIO()
    if command.name == "pretrain":  # its process group is of a whole process
        result = start_ranks(argv, world_size=None, program="megatron_ddrp")
        return result.exit_codes[0], result.stderr[0]
    with (
        inside(folder),
        mock.patch.object(sys, "argv", argv),
        contextlib.redirect_stderr(stderr),
        contextlib.redirect_stdout(stdout),
        pytest.raises(SystemExit) as end,
    ):
        run_command(importlib.import_module(COMMANDS[argv[0]].module).main)
    return end.value.code, stderr.getvalue() or stdout.getvalue().splitlines(keepends=True)[-1]


def real_starts() -> Iterator[Any]:
    """Yield a path of each command, in turns a number of it, and files of YAML with wrong keys."""
    numbers = itertools.cycle(("nan", "1e308", "-1", "1" + "0" * 30, "text"))
    for turn, (name, of_command) in enumerate(itertools.groupby(cases(), lambda case: case.values[0].name)):
        found = list(of_command)
        command, option, kind = found[turn % len(found)].values
        yield pytest.param(command, {}, option, kind, id=f"{name} {option} {kind}")
        bounded = [key for key, each in command.options.items() if "within" in each.rules]
        if bounded:
            yield pytest.param(command, {bounded[turn % len(bounded)]: next(numbers)}, "", "", id=f"{name} number")


@pytest.mark.slow
@pytest.mark.parametrize(("command", "numbers", "name", "kind"), real_starts())
def test_a_real_start_ends_in_one_line(
    command: Parsed, numbers: dict[str, str], name: str, kind: str, world: World, tmp_path: Path
) -> None:
    words = world.words(command.name) | numbers
    if name:
        words[name] = hostile(tmp_path / "hostile", kind, Path(str(words.get(name) or name)))
    assert_one_line(words_of(command, words))


@pytest.mark.slow
@pytest.mark.parametrize("text", ["[]", "null: a", "nowhere: 1", "train: [a, b]\nvalid: 5", "? {a: b}\n: c", "&a [*a]"])
@pytest.mark.parametrize("words", [("finetune", "--load", "x", "--task-file"), ("compare",), ("pretrain", "--config")])
def test_a_real_start_with_a_hostile_yaml_file_ends_in_one_line(
    words: tuple[str, ...], text: str, tmp_path: Path
) -> None:
    file = tmp_path / "hostile.yaml"
    file.write_text(text, encoding="utf-8")
    out = ("--save", tmp_path / "out") if words[0] == "pretrain" else ("--output-dir", tmp_path / "out")
    assert_one_line([*words, file, *out])
    assert not (tmp_path / "out").exists()


def assert_one_line(words: Sequence[object]) -> None:
    """Start the command as a process: one line on standard error, but for the verdicts of `dataset verify`."""
    result = start_ranks(words, world_size=None, program="megatron_ddrp")
    assert result.exit_codes[0] in (FAILURE, WRONG_ARGUMENTS), result
    assert "Traceback" not in result.stderr[0]
    lines = result.stderr[0].splitlines()
    assert len(lines) == 1 and lines[0].startswith("megatron-ddrp "), result
