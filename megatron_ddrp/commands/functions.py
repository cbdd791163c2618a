"""The commands as Python functions: a keyword is a flag, with underscores.

    from megatron_ddrp import pretrain

    run = pretrain(texts=texts, vocab_file="vocab.txt", num_layers=4, train_iters=1000, save="run", load="run")
    [row["loss"] for row in run.rows if "loss" in row], run.load_encoder().pool(["A text."])

A function reads its keywords through the command's own parser, so names, types, ranges, defaults, `config="f.yaml"`
and `plugin="f.py"` are those of the command line. A mistake raises `UserError`. The process is left as it was found.
Signatures and docstrings come from the options of the commands, so that `help()` and editors list them.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from megatron_ddrp.cli import PLUGIN_HELP
from megatron_ddrp.commands import COMMANDS, PROGRAM
from megatron_ddrp.commands.options import Plan
from megatron_ddrp.commands.pretrain import read_arguments, rehearse
from megatron_ddrp.config import Config
from megatron_ddrp.config.reading import Option, flag_words, options_of
from megatron_ddrp.data.preprocess.inputs import texts_as_file
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError, allocations_as_user_errors
from megatron_ddrp.foreign import parse_json, read_json
from megatron_ddrp.run.launch import guest, launched_world_size

Function = TypeVar("Function", bound=Callable[..., Any])
Rows = list[dict[str, Any]]


def takes_flags_of(name: str, plugins: bool = True) -> Callable[[Function], Function]:
    """Return a decorator that gives a function the signature of a command's flags, and its docstring their help.

    The command's module lists its dataclasses of options as `SECTIONS`; with `plugins` there is --plugin beside them.
    """
    options = options_of(*importlib.import_module(COMMANDS[name].module).SECTIONS)
    if plugins:
        options["plugin"] = Option(str | Sequence[str] | None, {"help": PLUGIN_HELP}, None)

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        flags = [
            inspect.Parameter(
                keyword,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if option.default is MISSING else option.default,
                annotation=option.hint,
            )
            for keyword, option in options.items()
            if keyword not in signature.parameters
        ]
        function.__signature__ = signature.replace(parameters=[*own, *flags])  # type: ignore[attr-defined]
        words = "\n".join(f"    {flag.name}: {options[flag.name].rules['help']}" for flag in flags)
        function.__doc__ = f"{inspect.getdoc(function)}\n\nKeywords, the flags of `megatron-ddrp {name}`:\n{words}\n"
        return function

    return decorate


@dataclass(frozen=True)
class Run:
    """A run of `pretrain`."""

    path: Path | None
    """Its `save` folder."""
    iteration: int
    """Steps of the run so far."""
    stopped: bool
    """True if it was asked to stop before its last step; the same call with `load` resumes."""
    rows: Rows
    """Rows of metrics.jsonl from this call; none on other ranks than rank 0."""

    def load_encoder(self, **settings: Any) -> Any:
        """Return the newest encoder, as `megatron_ddrp.load_encoder` does. Raises `UserError` without `save`."""
        from megatron_ddrp.encoders.text_encoder import load_encoder

        if self.path is None:
            raise UserError("the run kept nothing: give pretrain save= with a folder")
        return load_encoder(self.path, **settings)


@dataclass(frozen=True)
class Results:
    """The output folder of a command that scores encoders; a notebook shows its page."""

    path: Path
    """Its `output_dir`."""
    page: str
    """Table or page, in Markdown."""
    rows: Rows
    """One dictionary per finished run or score."""
    summary: dict[str, Any]
    """The page's numbers."""

    def _repr_markdown_(self) -> str:
        return self.page


@takes_flags_of("pretrain")
def pretrain(*, texts: Iterable[Any] | None = None, callbacks: Sequence[Any] = (), **settings: Any) -> Run:
    """Pre-train in this process, or on the ranks of the launcher that runs this script.

    Data are a dataset on the disk (`data_path`), or `texts`: strings, or rows with a key `text`, such as a
    `datasets.Dataset`; they are preprocessed first, beside `save` or in a temporary folder.
    `callbacks` are objects of classes derived from `megatron_ddrp.run.callbacks.Callback`.
    """
    from megatron_ddrp.run.callbacks import RowList, checked_callbacks

    words, members = given_words(settings), checked_callbacks(callbacks)
    if texts is not None and settings.get("data_path") is not None:
        raise UserError("texts and data_path exclude each other: give one of them", WRONG_ARGUMENTS)
    if texts is not None and launched_world_size() > 1:
        raise UserError("texts are for one process: before the launch, call preprocess and give its data_path")
    with as_command("pretrain", words), ExitStack() as stack:
        arguments = read_arguments(words if texts is None else [*words, "--data-path", "texts"])
        if arguments.dry_run:  # which takes no text
            data = {"data_path": None if texts is not None else arguments.config.data.data_path}
            rehearse(replace(arguments, config=arguments.config.replace(data=data)))
            return Run(None, 0, False, [])
        from megatron_ddrp.train import train

        kept = RowList()
        with_data = None if texts is None else partial(with_texts, texts, stack)
        trained = train(arguments.config, [kept, *members], with_data)
    save = arguments.config.checkpoint.save
    return Run(Path(save) if save else None, trained.iteration, bool(trained.code), kept.rows)


@takes_flags_of("preprocess", plugins=False)
def preprocess(*, texts: Iterable[Any] | None = None, **settings: Any) -> list[str]:
    """Write indexed datasets from `input` files or from `texts`, and return their prefixes, for `data_path`.

    `texts` are strings, or rows with the keys `json_keys`, such as a `datasets.Dataset`.
    """
    with input_of(texts, settings) as given:
        result = run_command("preprocess", given)
    return [] if result is None else list(result.prefixes)


@takes_flags_of("train-tokenizer", plugins=False)
def train_tokenizer(*, texts: Iterable[Any] | None = None, **settings: Any) -> Path:
    """Learn a vocabulary from `input` files or from `texts`, as `preprocess` takes them; return its file."""
    with input_of(texts, settings) as given:
        run_command("train-tokenizer", given)
    return path_of(settings, "output")


@takes_flags_of("plan", plugins=False)
def plan(**settings: Any) -> Plan:
    """Print a model, steps and a rate for a text; return them: `pretrain(**plan(tokens="50M").settings)`."""
    found: Plan = run_command("plan", settings)
    return found


@takes_flags_of("convert")
def convert(**settings: Any) -> Path:
    """Convert a checkpoint to a Hugging Face folder, or back; return the folder."""
    run_command("convert", settings)
    return path_of(settings, "output")


@takes_flags_of("merge")
def merge(**settings: Any) -> Path:
    """Write the weighted mean of checkpoints or of Hugging Face folders; return its folder."""
    run_command("merge", settings)
    return path_of(settings, "output")


@takes_flags_of("finetune")
def finetune(**settings: Any) -> Results:
    """Fine-tune encoders on your own tasks."""
    return results_of("finetune", settings, "table.md", "runs.jsonl", "table.json")


@takes_flags_of("glue")
def glue(**settings: Any) -> Results:
    """Fine-tune encoders on GLUE over a grid and seeds."""
    return results_of("glue", settings, "table.md", "runs.jsonl", "table.json")


@takes_flags_of("minimal-pairs")
def minimal_pairs(**settings: Any) -> Results:
    """Score masked language models on minimal pairs, without fine-tuning."""
    return results_of("minimal-pairs", settings, "table.md", "scores.jsonl", "results.json")


@takes_flags_of("compare", plugins=False)
def compare(plan: Any, **settings: Any) -> Results:
    """Train and score the models of a plan, or take files of rows, and write one page."""
    plans = given_words({"plan": [*plan] if isinstance(plan, Iterator) else plan})[1:]
    found = results_of("compare", settings, "page.md", "rows.jsonl", "results.json", plans)
    files = [file for file in plans if file.endswith(".jsonl")] or [*filter(None, [settings.get("rows")])]
    rows = {row["run"]: row for file in files for row in rows_in(Path(file))}  # a later row of a run is its new one
    return replace(found, rows=list(rows.values())) if files else found


@takes_flags_of("report")
def report(**settings: Any) -> Path:
    """Write a short report of a run, with its curves; return its page."""
    run_command("report", settings)
    return path_of(settings, "output_dir") / "report.md"


def results_of(
    name: str, settings: Mapping[str, Any], page: str, rows: str, summary: str, words: Iterable[str] = ()
) -> Results:
    """Run a command and return what its folder has, also from an earlier run; a missing file counts as empty.

    Raises `UserError` on several ranks, where its runs would end their script.
    """
    if launched_world_size() > 1:
        raise UserError(f"{name} is for one process: on ranks, start the command {PROGRAM} {name} by the launcher")
    run_command(name, settings, words)
    folder = path_of(settings, "output_dir")
    text, numbers = folder / page, folder / summary
    return Results(
        folder,
        text.read_text(encoding="utf-8") if text.exists() else "",
        rows_in(folder / rows),
        read_json(numbers) if numbers.exists() else {},
    )


def rows_in(path: Path) -> Rows:
    """Return the rows of a file of JSON lines, without half a line at its end; none if there is no such file."""
    return [parse_json(line) for line in path.read_bytes().split(b"\n")[:-1] if line] if path.exists() else []


def run_command(name: str, settings: Mapping[str, Any], words: Iterable[str] = ()) -> Any:
    """Run a command in this process and return what its `main` gives. Raises `UserError` where the command fails."""
    words = [*words, *given_words(settings)]
    with as_command(name, words):
        result = importlib.import_module(COMMANDS[name].module).main(words)
    if isinstance(result, int) and result:
        raise UserError(f"{name} ended with exit code {result}: the lines that it printed say why", result)
    return result


@contextmanager
def as_command(name: str, words: Sequence[str]) -> Iterator[None]:
    """Let messages and model cards name the command and its words inside the block; the process is left as it was."""
    before = sys.argv
    sys.argv = [f"{PROGRAM} {name}", *words]
    try:
        with guest(), allocations_as_user_errors():
            yield
    finally:
        sys.argv = before


def given_words(settings: Mapping[str, Any]) -> list[str]:
    """Return keywords as words of a command line; None stands for a flag that is not given."""
    return flag_words((name, value) for name, value in settings.items() if value is not None)


def path_of(settings: Mapping[str, Any], name: str) -> Path:
    """Return the path that a keyword names, as the command line reads it."""
    return Path(given_words({name: settings[name]})[1])


@contextmanager
def input_of(texts: Iterable[Any] | None, settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the keywords of a command that reads text, with `texts` as its `input`."""
    if texts is None:
        yield dict(settings)
        return
    if settings.get("input") is not None:
        raise UserError("texts and input exclude each other: give one of them", WRONG_ARGUMENTS)
    _, *keys = given_words({"json_keys": settings.get("json_keys") or "text"})
    with texts_as_file(texts, keys) as path:
        yield {**settings, "input": path}


def with_texts(texts: Any, stack: ExitStack, config: Config) -> Config:
    """Return the configuration with the texts as its data, preprocessed with the tokenizer of the run.

    They lie beside `save`; without it, in a temporary folder that the stack removes.
    """
    save, temporary = config.checkpoint.save, stack.enter_context(tempfile.TemporaryDirectory())
    prefix = f"{Path(save)}-texts" if save else f"{temporary}/texts"
    tokenizer = {name: getattr(config.data, name) for name in ("vocab_file", "tokenizer_type", "tokenizer_model")}
    made = preprocess(texts=texts, output_prefix=prefix, overwrite=True, **tokenizer)
    return config.replace(data={"data_path": tuple(made)})
