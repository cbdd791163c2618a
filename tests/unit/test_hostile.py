"""Impossible numbers, texts, files and folders for every option of every command, made from the dataclasses of options.

A number outside its declared range is refused before any file is opened: the files that the command lines name do not
exist, and the error is about the option. A command line that is whole but for one path is refused in one line that
names the path, and nothing is written beside its output.
"""

import importlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_ddrp.cli import ArgumentParser, _plain_type, parse_sections, parse_subcommand
from megatron_ddrp.commands import COMMANDS
from megatron_ddrp.commands.pretrain import read_arguments
from megatron_ddrp.config import flag
from megatron_ddrp.config.reading import Option, options_of
from megatron_ddrp.data.atomic import object_sum
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from megatron_ddrp.errors import FAILURE, WRONG_ARGUMENTS, UserError
from megatron_ddrp.lab.analysis import probe
from megatron_ddrp.lab.compare import plan
from megatron_ddrp.tasks.finetune import command as finetune
from megatron_ddrp.tasks.finetune.options import TaskFiles, read_task_file
from tests.conftest import TinyCorpus
from tests.integration.conftest import TINY, command_line
from tests.integration.launch import start_ranks
from tests.unit.lab.compare.made_rows import full_rows
from tests.unit.tasks.conftest import sentences, write_bert, write_checkpoint

NUMBERS = ("0", "-1", "nan", "inf", "1e308", "1" + "0" * 30, "9" * 5000, "", "text", "½")
YAML_VALUES = (
    *("true", "''", "' '", "[]", "[a, b]", "[[a]]", "{a: b}", "{}", "!!set {a}", "!!binary aGk=", "&a [*a]"),
    *("*nowhere", "!!python/object/apply:os.system [x]", r'"\0"', r'"a\0b"', r'"\ud800"', "9" * 5000, "\0", "a: b: c"),
)
"""Values that no path, name, kind, metric or column of a task can have."""
YAML_FILES = (
    *("[]", "5", "text", "2020-01-01", "[a]: b", "? {a: b}\n: c", "1: a", "null: a", "train: a\ntrain: b"),
    *("- train: a", "\0", "\t", "---\na: b\n---\nc: d", "'': a", "<<: 5", "<<: {train: []}", "x" * 5000 + ": a"),
    *("? |\n  a\n  b\n: c", r'"\0": c', "!!set {a}", "train: a\n<<: {train: b}\nTRAIN: c", "Train: a", "train.x: a"),
    "&a {train: *a}",
)
"""Task files whose whole or whose keys are wrong."""
PLAN_SECTIONS = (plan.Budget, plan.CorpusPlan, plan.Analyses)


class Parsed(NamedTuple):
    """A command or subcommand, its options, and what reads its words."""

    name: str
    options: dict[str, Option]
    read: Callable[[Sequence[str]], Any]

    def with_required(self, but: str) -> list[str]:
        """Return words for the options that a command line must have, all of them names of nothing."""
        words = ["--text=nothing"] if self.name == "analyze space" and but != "data_path" else []
        for name, option in self.options.items():
            if option.default is MISSING and name != but:
                value = "100" if _plain_type(option.hint) in (int, float) else "no-such-thing"
                words += [value] if option.rules.get("positional") else [flag(name), value]
        return words


def commands() -> Iterator[Parsed]:
    for name, command in COMMANDS.items():
        module = importlib.import_module(command.module)
        subcommands = getattr(module, "SUBCOMMANDS", {})
        for sub, found in subcommands.items():
            read = partial(lambda own, sub, words: parse_subcommand("All.", own, [sub, *words]), subcommands, sub)
            yield Parsed(f"{name} {sub}", options_of(*found.sections), read)
        if sections := getattr(module, "SECTIONS", ()):
            own = read_arguments if name == "pretrain" else getattr(module, "parse_arguments", None)
            read = own or partial(lambda own, words: parse_sections(ArgumentParser(prog="tool"), own, words), sections)
            yield Parsed(name, options_of(*sections), read)


def is_within(text: str, kind: type, within: str) -> bool:
    """Return whether a text is a number of a range, read without the product's code."""
    try:
        value = kind(text)
    except ValueError:
        return False
    low, high = (float(bound) for bound in within[1:-1].split(","))
    above = value > low or (within[0] == "[" and value == low)
    return math.isfinite(value) and above and (value < high or (within[-1] == "]" and value == high))


@pytest.mark.parametrize("command", commands(), ids=lambda command: command.name)
def test_impossible_numbers_and_no_text_are_refused_by_their_option(command: Parsed, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrong = []
    for name, option in command.options.items():
        kind, within = _plain_type(option.hint), option.rules.get("within")
        is_number = kind in (int, float)
        if kind is bool or (is_number and within is None):
            continue
        for text in NUMBERS if is_number else ("", " ", "\t", "x" * 5000):
            given = text if option.rules.get("positional") and not is_number else f"{flag(name)}={text}"
            words = [*command.with_required(name), given]
            refused = None
            try:
                command.read(words)
            except UserError as error:
                refused = error
                assert "\n" not in str(error) and error.exit_code == WRONG_ARGUMENTS, (words, error)
            except BaseException as error:
                wrong.append(f"{flag(name)} {text[:40]!r}: {type(error).__name__}: {str(error)[:200]}")
                continue
            is_right = is_within(text, kind, within) if is_number else text.strip()
            if not is_right and (refused is None or (is_number and flag(name) not in str(refused))):
                wrong.append(f"{flag(name)} {text[:40]!r} is outside {within}: {refused}")
    assert wrong == [] and not list(tmp_path.iterdir())


def test_every_number_has_a_finite_range() -> None:
    options = [item for command in commands() for item in command.options.items()]
    for name, option in [*options, *options_of(*PLAN_SECTIONS).items()]:
        if _plain_type(option.hint) in (int, float) and "choices" not in option.rules:
            assert math.isfinite(float(option.rules["within"][1:-1].split(",")[1])), name


def test_every_task_file_with_an_impossible_value_or_wrong_keys_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "task.yaml"
    texts = {name: [f"{name}: {value}\n" for value in YAML_VALUES] for name in options_of(TaskFiles)}
    for name, files in (texts | {"": YAML_FILES}).items():
        taken = []
        for text in files:
            path.write_text(text, encoding="utf-8")
            try:
                read_task_file(path)
                taken.append(text)
            except UserError as error:
                assert "\n" not in str(error) and str(path) in str(error) and error.exit_code == WRONG_ARGUMENTS, text
        assert taken == [f"{name}: [a, b]\n"] * (name in ("test", "pretraining_text"))  # several files


FOLDERS, PREFIXES, FILES = ("DIR", "HF_DIR", "OUT"), ("P", "PREFIX", "IN", "PATH"), ("FILE", "F", "G", "T", "PLAN")
"""Metavars of options that take folders, either, and files; an ending may follow."""
WRITTEN = ("index_cache_dir", "output", "output_dir", "output_prefix", "rows", "save", "tensorboard_dir")
"""Options whose path a command makes: one that is missing or empty is right."""
DATASET = (".bin", ".idx", "_text_document.bin", "_text_document.idx")
"""Ends of the files that a prefix stands for."""


def kinds_of(name: str, option: Any) -> list[str]:
    """Return the kinds of hostile paths for an option; none if it takes no path."""
    metavar = option.rules.get("metavar", "").replace("[WEIGHT] ", "").replace("[NAME=]", "").partition(".")[0]
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
            **dict.fromkeys(("dataset inspect", "dataset verify"), {"prefix": corpus.prefix}),
            "dataset merge": {"input": corpus.prefix, "output_prefix": at / "out"},
            "dataset shuffle": {"prefix": corpus.prefix, "output_prefix": at / "out"},
            "plan": {"load": at / "bert", "input": corpus.text_file, "device": "t4"},
            "convert": {"load": at / "run", "output": at / "out"},
            "merge": {"load": (at / "run", at / "run"), "output": at / "out", "data_path": corpus.prefix},
            "report": {"load": at / "run", "output_dir": at / "out"},
            "glue": sweep | {"data_dir": at / "glue", "tasks": "CoLA"},
            "finetune": sweep | {"train": at / "train.jsonl", "valid": at / "train.jsonl"},
            "finetune predict": {"load": at / "kept", "input": at / "train.jsonl", "output": at / "out.jsonl"},
            "finetune evaluate": {"load": at / "kept", "input": at / "train.jsonl"},
            "minimal-pairs": {"data_dir": at / "pairs", "load": at / "run", "output_dir": at / "out"},
            "compare": {"plan": at / "plan.yaml", "output_dir": at / "out"},
        }[name]


FILES_OF_WORLD = ("bert", "rows.jsonl", "train.jsonl", "vocab.txt")
SLOW = {"pretrain", "compare", "finetune predict", "finetune evaluate"}
SLOW |= {"analyze direction", "analyze space", "analyze throughput"}
"""Commands whose refusals take more than milliseconds, or whose line needs what takes seconds to make."""
LEFT_OUT = {*(("analyze notes", name, "") for name in ("data_path", "output")), ("plan", "data_path", "")}
"""Paths that are read after notes, which the world's run lacks, and one that a plan only prints."""
BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    ("preprocess", "tokenizer_model"): {"tokenizer_type": "HuggingFace", "vocab_file": None},
    ("pretrain", "train_data_path"): {"data_path": None, "split": None, "valid_data_path": "no-such"},
    ("pretrain", "valid_data_path"): {"data_path": None, "split": None, "train_data_path": "corpus"},
    ("pretrain", "other_data_path"): {"eval_interval": 1},
    ("pretrain", "tokenizer_model"): {"tokenizer_type": "HuggingFace", "vocab_file": None},
    ("pretrain", "index_cache_dir"): {"notes": True},
    **{(f"dataset {sub}", "tokenizer_model"): {"tokenizer_type": "HuggingFace"} for sub in ("inspect", "verify")},
    ("convert", "from_hf"): {"load": None},
    ("convert", "onnx"): {"load": None},
    **{("convert", name): {"load": None, "from_hf": "bert"} for name in ("generator", "vocab_file")},
    ("convert", "tokenizer_model"): {"load": None, "from_hf": "bert", "tokenizer_type": "HuggingFace"},
    ("plan", "train"): {"valid": "train.jsonl"},
    ("plan", "valid"): {"train": "train.jsonl"},
    ("plan", "output_dir"): {"run": True, "device": None},
    ("analyze space", "text"): {"data_path": None},
    ("finetune", "task_file"): {"train": None, "valid": None},
    ("finetune", "report"): {"train": None, "valid": None, "load": None},
    ("glue", "report"): {"load": None, "data_dir": None},
    ("compare", "data_path"): {"vocab_file": "vocab.txt"},
    **{("compare", name): {"plan": "rows.jsonl"} for name in ("tables", "claims")},
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
    models = [{"name": "BERT", "encoding": "absolute", "objective": "mlm"}]
    corpus = {"data_path": [str(tiny_corpus.prefix)], "vocab_file": str(tiny_corpus.vocab_file)}
    plan = {"models": models, "seeds": 1, "budget": {"steps": 4}, "corpus": corpus}
    plan |= {"model": {"num-layers": 1, "hidden-size": 16, "num-attention-heads": 2, "seq-length": 32}}
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
        if kind in ("empty", "file"):
            each.write_text("" if kind == "empty" else "text\n")
        elif kind == "folder":
            each.mkdir()
        elif kind in ("loop", "device"):
            each.symlink_to(each if kind == "loop" else "/dev/full")
    if kind == "through":
        (folder / kind).write_text("text\n")
        return folder / kind / f"x{model.suffix}"
    return Path("x" * 5000 + model.suffix) if kind == "long" else path


def cases() -> Iterator[Any]:
    for command in commands():
        for name, option in command.options.items():
            for kind in kinds_of(name, option):
                if {(command.name, name, ""), (command.name, name, kind)} & LEFT_OUT:
                    continue
                marks = pytest.mark.slow if command.name in SLOW else ()
                yield pytest.param(command, name, kind, id=f"{command.name} {flag(name)} {kind}", marks=marks)


@pytest.mark.parametrize(("command", "name", "kind"), cases())
def test_an_impossible_path_is_refused(command, name, kind, world, tmp_path, run_tool, monkeypatch, capfd):
    """The memory of `analyze throughput`, measured in a process of its own before it writes, is left out."""
    monkeypatch.setattr(probe, "peak_memory", lambda *_: None)
    words = dict(world.words(command.name))
    if command.name.startswith("finetune "):
        world.make_kept_model()
        capfd.readouterr()
    for other, value in BESIDE.get((command.name, name), {}).items():
        known = {"corpus": world.corpus.prefix} | {each: world.folder / each for each in FILES_OF_WORLD}
        words[other] = known.get(value, value)
    path = words[name] = hostile(tmp_path / "hostile", kind, Path(str(words.get(name) or name)))
    before = world.files(tmp_path)
    given = [words.pop(key) for key in command.options if key in words and command.options[key].rules.get("positional")]
    given = [word for each in given for word in (each if isinstance(each, tuple) else (each,))]
    program, *given = [*command.name.split(), *map(str, given), *command_line(words)]
    if program == "pretrain":  # its process group is of a whole process
        result = start_ranks([program, *given], world_size=None, program="megatron_ddrp")
        code, line = result.exit_codes[0], result.stderr[0]
    else:
        monkeypatch.chdir(tmp_path)
        code, out, line = run_tool(importlib.import_module(COMMANDS[program].module), *given)
        line = line or out.splitlines(keepends=True)[-1]  # `dataset verify` writes to standard output
    assert code in (FAILURE, WRONG_ARGUMENTS), (code, line)
    assert line.count("\n") == 1 and (": error: " in line or "finding" in line), line
    assert path.name[:40] in line or flag(name) in line or kind == "empty", line
    assert world.files(tmp_path) == before
