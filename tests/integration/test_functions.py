"""The commands as Python functions, called many times in this one process."""

import contextlib
import dataclasses
import errno
import gc
import hashlib
import inspect
import itertools
import json
import os
import random
import re
import signal
import sqlite3
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import length_hint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megatron_ddrp
from megatron_ddrp import convert, finetune, merge, minimal_pairs, preprocess, pretrain, train_tokenizer
from megatron_ddrp.checkpoint import newest, read_config
from megatron_ddrp.config import load_config
from megatron_ddrp.corpus import Corpus
from megatron_ddrp.errors import UserError
from megatron_ddrp.lab.compare.experiment import stop_on_sigterm
from megatron_ddrp.pages.plotting import figure_tools
from megatron_ddrp.run.callbacks import Callback, StopTraining
from megatron_ddrp.run.launch import guest
from megatron_ddrp.run.metrics import read_rows, stored_gap, stored_level
from tests.conftest import TinyCorpus, documents
from tests.integration.conftest import TINY, tiny_settings
from tests.integration.launch import json_file
from tests.refusals import refused

Settings = dict[str, Any]


@pytest.fixture
def settings(tiny_corpus: TinyCorpus) -> Settings:
    return tiny_settings(tiny_corpus) | {"train_iters": 6}


def state_of_process() -> list[Any]:
    """Return all that a run could change for other libraries, in a form that can be compared."""
    group = torch.distributed.distributed_c10d
    timeouts = [torch.distributed.is_initialized(), group.default_pg_timeout, group.default_pg_nccl_timeout]
    numbers = [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist(), torch.get_num_threads()]
    modes = [torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()]
    hooks = [list(sys.argv), sys.excepthook, torch.nn.functional.linear, list(warnings.filters)]
    variables = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    return [variables, handlers, *hooks, *numbers, *modes, *timeouts]


@pytest.fixture(autouse=True)
def process_is_left_as_it_was() -> Iterator[None]:
    before = state_of_process()
    yield
    after = state_of_process()
    assert [a for a, b in zip(before, after, strict=True) if a != b] == []


def numbers_held() -> int:
    """Elements of all tensors that Python still knows, each storage once; other tests leave some without a storage."""
    gc.collect()
    storages = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has deprecated objects that complain when they are looked at
        for each in gc.get_objects():
            if isinstance(each, torch.Tensor):
                with contextlib.suppress(RuntimeError, NotImplementedError):  # fake, sparse
                    storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes() // 4
    return sum(storages.values())


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of the newest checkpoint's tensors, by file; its state.json names the folder of its run."""
    path = newest(folder)
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name != "state.json")
    return {str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def callback(**events: Callable[..., Any]) -> Callback:
    """A callback that does these things at its events."""
    return type("Own", (Callback,), {name: staticmethod(act) for name, act in events.items()})()


def at(step: int, act: Callable[[], Any]) -> Callable[[Any], Any]:
    """Return a callback that calls `act` at the row of the step `step`."""
    return lambda row: act() if row["iteration"] == step else None


def fail(error: BaseException) -> Any:
    raise error


def test_runs_of_one_process_are_equal_at_every_zero_stage_and_keep_no_memory(settings: Settings) -> None:
    ends, held = [], []
    before = numbers_held()
    for stage in (1, 0, 1, 3, 2):
        run = pretrain(**settings, zero_stage=stage)
        assert (run.path, run.iteration, run.stopped) == (None, 6, False)
        assert [row["iteration"] for row in run.rows] == [1, 2, 3, 4, 5, 6]
        ends.append(run.rows[-1]["loss"])
        held.append(numbers_held() - before)
    assert ends == pytest.approx([ends[0]] * 5, rel=1e-5) and ends[0] == ends[2]
    assert max(held) < 1000, f"numbers held after each run: {held}"


EARLY = {"zero_stage": 1, "save_interval": 2, "hidden_dropout": 0.1, "train_iters": 4}


@pytest.fixture(scope="module")
def whole(tiny_corpus: TinyCorpus, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A finished run: read only."""
    return pretrain(**tiny_settings(tiny_corpus) | EARLY, save=tmp_path_factory.mktemp("whole") / "run")


ENDINGS: dict[str, tuple[Callable[[], Any], bool]] = {
    "StopTraining": (lambda: fail(StopTraining()), True),
    "signal": (lambda: signal.raise_signal(signal.SIGTERM), True),
    "error": (lambda: fail(ZeroDivisionError("mine")), False),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_run_that_ended_early_resumes_to_the_bit(ending: str, whole: Any, settings: Settings, tmp_path: Path) -> None:
    corpus = Corpus.open(load_config(whole.path))
    assert stored_level(whole.path) == pytest.approx(corpus.unigram_loss, abs=1e-5) and corpus.unigram_loss > 1
    assert stored_gap(whole.path) == pytest.approx(corpus.validation_gap, abs=1e-5)
    (act, stopped), ended = ENDINGS[ending], list[bool]()
    early = callback(on_step=at(3, act), on_end=lambda: ended.append(True))
    own = settings | EARLY | {"save": tmp_path / "own", "load": tmp_path / "own"}
    if stopped:
        run = pretrain(**own, callbacks=[early])
        assert run.stopped and run.iteration == 3
    else:
        with pytest.raises(ZeroDivisionError, match="^mine$"):
            pretrain(**own, callbacks=[early])
    assert ended == [True]
    resumed = pretrain(**own)
    assert (resumed.iteration, resumed.stopped) == (4, False)
    assert hashes(tmp_path / "own") == hashes(whole.path)
    assert resumed.rows[-1]["loss"] == whole.rows[-1]["loss"]


def test_a_stop_at_a_checkpoint_is_one_there(settings: Settings, tmp_path: Path) -> None:
    own = settings | EARLY | {"save": tmp_path / "own", "keep_last": 1}
    run = pretrain(**own, callbacks=[callback(on_checkpoint=lambda path: fail(StopTraining()))])
    assert run.stopped and run.iteration == 2 and newest(tmp_path / "own") == tmp_path / "own" / "iter_0000002"


def test_an_error_about_a_checkpoint_reaches_the_caller_and_deletes_none(settings: Settings, tmp_path: Path) -> None:
    """It comes with the third one: those before it, also milestones, and its own stay, and the run resumes there."""
    mine, seen = UserError("mine"), list[str]()

    def score(path: Path) -> None:
        seen.append(path.name)
        if len(seen) == 3:
            raise mine

    own = settings | {"save": tmp_path / "run", "load": tmp_path / "run", "save_interval": 1, "milestone_interval": 2}
    own |= {"keep_last": 2, "train_iters": 5}
    assert refused("mine", pretrain, **own, callbacks=[callback(on_checkpoint=score)]) is mine
    left = sorted(path.name for path in (tmp_path / "run").glob("iter_*"))
    assert left == ["iter_0000002", "iter_0000003"] == seen[1:]
    assert [row["iteration"] for row in pretrain(**own).rows] == [4, 5]
    assert sorted(path.name[-1] for path in (tmp_path / "run").glob("iter_*")) == ["2", "4", "5"]


EVENTS = ["on_start", "columns", "on_step", "on_validation", "on_checkpoint", "on_end"]
ERRORS = [RuntimeError("cannot allocate my thing"), MemoryError("mine"), UserError("mine"), BrokenPipeError("mine")]


@pytest.mark.parametrize(
    ("event", "error"),
    list(zip(EVENTS, itertools.cycle(ERRORS), strict=False)),
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_an_error_of_a_callback_stays_its_own(event: str, error: Exception, settings: Settings, tmp_path: Path) -> None:
    own = callback(**{event: lambda *_: fail(error)})
    with pytest.raises(type(error)) as raised:
        pretrain(**settings | {"train_iters": 1, "eval_interval": 1, "save": tmp_path / "run"}, callbacks=[own])
    assert raised.value is error


def test_the_functions_work_in_a_callback(settings: Settings, tmp_path: Path) -> None:
    """The run around them gives the same numbers, and each gives the results that it gives alone."""
    rows = [{"text": text, "label": number % 2} for number, text in enumerate(documents()[:8])]
    table = json_file(tmp_path / "table.jsonl", rows)
    json_file(tmp_path / "pairs" / "order.jsonl", {"sentence_good": "a good line", "sentence_bad": "a line good"})
    files = {"train": table, "valid": table, "seeds": 1, "epochs": 1}
    found: list[Any] = []

    def score(path: Path) -> None:
        out = tmp_path / f"out{len(found)}"
        (row,) = finetune(**files, load=path, output_dir=out / "tasks").rows
        (pairs,) = minimal_pairs(data_dir=tmp_path / "pairs", load=path, workers=1, output_dir=out / "pairs").rows
        run = pretrain(texts=documents(), **settings | {"train_iters": 1, "data_path": None})
        found.append((row["score"], pairs["good"], run.rows[-1]["loss"]))

    own = settings | {"train_iters": 2, "save_interval": 2, "hidden_dropout": 0.1}
    alone = pretrain(**own, save=tmp_path / "alone")
    with_functions = pretrain(**own, save=tmp_path / "run", callbacks=[callback(on_checkpoint=score)])
    assert [row["loss"] for row in with_functions.rows] == [row["loss"] for row in alone.rows]
    score(with_functions.path / "iter_0000002")  # type: ignore[operator]
    assert found[0] == found[1]


class Norm(Callback):
    """A column of its own."""

    def __init__(self, name: str = "embedding_norm") -> None:
        self.name = name

    def on_start(self, config: Any, iteration: int, model: Any) -> None:
        self.weight = next(model.parameters())

    def columns(self) -> dict[str, float]:
        return {self.name: self.weight.detach().norm()}


def test_a_callback_sees_the_run_and_adds_a_column(settings: Settings, tmp_path: Path) -> None:
    events = list[str]()
    notes = callback(
        on_start=lambda config, iteration, model: events.append(f"start {iteration}"),
        on_step=lambda row: events.append(f"step {row.pop('iteration')}"),  # from a copy of its own
        on_validation=lambda row: events.append(f"validation {row['iteration']}"),
        on_checkpoint=lambda path: events.append(path.name),
        on_end=lambda: events.append("end"),
    )
    settings |= {"train_iters": 2, "log_interval": 1, "eval_interval": 2, "save": tmp_path / "run"}
    run = pretrain(**settings, callbacks=[notes, Norm()])
    assert events == ["start 0", "step 1", "step 2", "validation 2", "iter_0000002", "end"]
    rows = read_rows(tmp_path / "run")
    assert rows == json.loads(json.dumps(run.rows))
    assert [row.get("embedding_norm", 0) > 0 for row in rows] == [True, True, False]


def test_all_signals_and_timeouts_are_set_back() -> None:
    """`process_is_left_as_it_was` compares them."""
    with guest():
        stop_on_sigterm()
        assert signal.getsignal(signal.SIGHUP) != signal.SIG_DFL


NO_LIST = "callbacks=.*: expected a list of objects of classes derived from Callback"
NO_NAME = "columns.. gave .*; expected a name of its own"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        *(({"callbacks": given}, NO_LIST) for given in (Norm(), [Norm], None, 5, "Norm", [None], {"norm": Norm()})),
        *(({"callbacks": [callback(columns=lambda x=x: x)]}, f"Own.{NO_NAME}") for x in ([1.0], "loss", 5)),
        *(({"callbacks": [Norm(name)]}, f"Norm.{NO_NAME}") for name in ("loss", 3)),
        ({"num_layrs": 2}, "did you mean --num-layers"),
        ({"num_layers": "two"}, "invalid int value"),
        ({"vocab_file": "nowhere.txt"}, "nowhere.txt"),
        ({"texts": ["A text."]}, "texts and data_path exclude each other"),
        ({"save": b"run"}, "save=b'run': expected a text, a path, a number"),
        ({"lr": {1e-3}}, "lr={0.001}: expected a text"),
    ],
)
def test_a_mistake_is_one_error_of_one_line(change: Settings, line: str, settings: Settings) -> None:
    refused(line, pretrain, **settings | change)


def test_only_the_main_thread_may_run(settings: Settings) -> None:
    with ThreadPoolExecutor() as pool:
        refused("main thread", pool.submit(pretrain, **settings).result)


def assert_same_dataset(prefix: str | Path, corpus: TinyCorpus) -> None:
    for ending in (".bin", ".idx"):
        assert Path(f"{prefix}{ending}").read_bytes() == Path(f"{corpus.prefix}{ending}").read_bytes()


def test_a_refused_call_takes_no_text_and_texts_become_the_dataset_that_the_command_writes(
    whole: Any, tiny_corpus: TinyCorpus, settings: Settings, tmp_path: Path
) -> None:
    texts = iter(documents())
    (tmp_path / "there.txt").write_text("mine")
    run = {name: value for name, value in settings.items() if name != "data_path"} | {"save": tmp_path / "new"}
    there, loaded = tmp_path / "there.txt", {"load": whole.path}
    wrongs = [{"num_layers": 0}, {"callbacks": None}, {"vocab_file": "nowhere.txt"}, {"global_batch_size": 7}]
    wrongs += [{"fp16": True, "attention_backend": "triton"}, {"tensorboard_dir": there}, {"deepspeed_config": there}]
    wrongs += [{"save": whole.path}, {"save": there}, {"split": "most"}, {"load": tmp_path / "nowhere"}]
    wrongs += [loaded | {"hidden_size": 64}, loaded | {"optimizer": "muon", "zero_stage": 0}]
    for wrong in (*wrongs, loaded | {"dry_run": True, "num_attention_heads": 5}):
        refused("", pretrain, texts=texts, **run | wrong)
    own = {"vocab_file": tiny_corpus.vocab_file, "output_prefix": tmp_path / "own"}
    wrongs = [{"vocab_file": "nowhere.txt"}, {"workers": 0}, {"json_keys": {"a"}}, {"partition": "1/2"}]
    for more in (*wrongs, {"output_prefix": str(tiny_corpus.prefix).removesuffix("_text_document")}):
        refused("", preprocess, texts=texts, **own | more)
    for more in ({"vocab_size": 3}, {"vocab_size": 10**9}, {"output": there}, {"type": "letters"}):
        refused("", train_tokenizer, texts=texts, **{"vocab_size": 300, "output": tmp_path / "vocab.txt"} | more)
    assert length_hint(texts) == len(documents())
    rows = ({"text": text, "id": number} for number, text in enumerate(documents()))
    for name, given in (("own", texts), ("rows", rows)):
        (prefix,) = preprocess(texts=given, **own | {"output_prefix": tmp_path / name})
        assert_same_dataset(prefix, tiny_corpus)


@pytest.mark.parametrize("kind", ["run", "dataset", "wordpiece", "sentencepiece"])
def test_an_interrupt_reaches_a_source_that_sleeps_and_two_end_a_run(
    kind: str, tiny_corpus: TinyCorpus, settings: Settings, tmp_path: Path
) -> None:
    """The source waits in this thread, as one that sleeps does, until the signal has come."""

    def slow() -> Iterator[str]:
        yield "A text."
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the source goes on")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run in the background
    twice = callback(on_step=at(2, lambda: [signal.raise_signal(signal.SIGINT) for _ in range(2)]))
    try:
        with pytest.raises(KeyboardInterrupt):
            if kind == "run":
                pretrain(**settings, callbacks=[twice])
            elif kind == "dataset":
                preprocess(texts=slow(), output_prefix=tmp_path / "own", vocab_file=tiny_corpus.vocab_file)
            else:
                train_tokenizer(texts=slow(), type=kind, vocab_size=300, output=tmp_path / "own")
    finally:
        signal.signal(signal.SIGINT, before)
    assert not list(tmp_path.iterdir())


MINE = BrokenPipeError("mine"), UserError("mine"), ZeroDivisionError("mine"), RuntimeError("cannot allocate mine")


@pytest.mark.parametrize("error", [*MINE, OSError(errno.ENOSPC, "mine")], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("reader", ["stop", "skip", "pretrain", "wordpiece", "sentencepiece"])
def test_an_error_of_the_texts_stays_their_own_and_nothing_is_left(
    reader: str, error: Exception, tiny_corpus: TinyCorpus, tmp_path: Path
) -> None:
    def texts() -> Iterator[str]:
        yield from documents()[: 3 if reader == "pretrain" else None]
        raise error

    words, vocabulary = (error.args, getattr(error, "filename", None)), {"vocab_file": tiny_corpus.vocab_file}
    with pytest.raises(type(error)) as raised:
        if reader in ("stop", "skip"):
            preprocess(texts=texts(), output_prefix=tmp_path / "own", on_error=reader, **vocabulary)
        elif reader == "pretrain":
            pretrain(texts=texts(), **TINY | vocabulary)
        else:
            train_tokenizer(texts=texts(), vocab_size=300, type=reader, output=tmp_path / "own")
    assert raised.value is error and words == (error.args, getattr(error, "filename", None))
    assert not list(tmp_path.iterdir())


def test_texts_are_taken_in_the_thread_of_the_caller(tmp_path: Path) -> None:
    """So a cursor of sqlite works, and a source may call the functions itself."""
    database = sqlite3.connect(":memory:")
    database.execute("create table texts(text)")
    database.executemany("insert into texts values(?)", [(text,) for text in documents()])

    def rows() -> Iterator[str]:
        train_tokenizer(texts=documents(), vocab_size=300, output=tmp_path / "inner.txt")
        yield from (text for (text,) in database.execute("select text from texts"))

    outer = train_tokenizer(texts=rows(), vocab_size=300, output=tmp_path / "outer.txt")
    assert outer.read_bytes() == (tmp_path / "inner.txt").read_bytes()


@pytest.mark.parametrize(
    ("texts", "line"),
    [
        ("corpus.txt", "texts=.corpus.txt.: expected a list of texts or rows; a file is given by input"),
        (5, "texts=5: expected a list of texts or rows; a file is given by input"),
        (Path("corpus.txt"), "expected a list of texts or rows; a file is given by input"),
        *((given, "expected a list of texts") for given in (list, np.array("A text."))),
        *((given, "no text to tokenize") for given in ([], iter([]))),
        ({"text": ["A text."]}, "texts is a table .dict., expected a list of texts; give one of its columns"),
        (["A text.", 3], "text 2 is 3: expected a string, or a row with a string for 'text'"),
        ([{"body": "A text."}], "text 1 is {'body': 'A text.'}"),
    ],
)
def test_texts_that_are_none_are_refused(texts: Any, line: str, tiny_corpus: TinyCorpus, tmp_path: Path) -> None:
    refused(line, preprocess, texts=texts, output_prefix=tmp_path / "own", vocab_file=tiny_corpus.vocab_file)
    assert not list(tmp_path.iterdir())


def test_a_table_of_pyarrow_is_refused_and_its_column_is_read(tiny_corpus: TinyCorpus, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table, own = pyarrow.table({"text": documents()}), {"vocab_file": tiny_corpus.vocab_file}
    for wrong, words in ((table, "texts is a table .Table."), (table.to_batches(), "text 1 is .*: expected a string")):
        refused(words, preprocess, texts=wrong, output_prefix=tmp_path / "own", **own)
    assert preprocess(texts=table["text"], output_prefix=tmp_path / "own", **own)
    assert_same_dataset(tmp_path / "own_text_document", tiny_corpus)


def test_texts_are_read_when_the_settings_are_known(tiny_corpus: TinyCorpus, tmp_path: Path) -> None:
    """Nothing is written for a wrong keyword or a dry run, and a file of settings may have the folder and the
    vocabulary."""
    lines = {"save": str(tmp_path / "run") + "/", "vocab-file": str(tiny_corpus.vocab_file)}
    own = TINY | {"config": json_file(tmp_path / "run.yaml", lines)}
    refused("num.layer", pretrain, texts=documents(), num_layer=2, **own)
    pretrain(texts=documents(), dry_run=True, **own)
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]
    run = pretrain(texts=documents(), **own | {"train_iters": 1})
    with torch.random.fork_rng():
        assert run.load_encoder().encode("A text.").shape[1] == TINY["hidden_size"]
    assert pretrain(texts=documents(), **own | {"train_iters": 1, "load": tmp_path / "run"}).rows == []
    assert {"run", "run-texts_text_document.bin"} <= {path.name for path in tmp_path.iterdir()}


def test_a_merge_prints_logged_losses(settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A validation is 256 rows: 32 batches of the run, or one of an export, so that their losses are equal."""
    every = {"eval_interval": 3, "save_interval": 3, "eval_iters": 32, "lr_decay_style": "constant", "split": "3,1,0"}
    rows = pretrain(**settings | every, save=tmp_path / "run").rows
    phases = {"position_encoding": "rope", "seq_length_phases": ["8:0.4:20000", "16:1:500000"]}
    rotary = {name: value for name, value in settings.items() if name != "relative_distance"} | every | phases
    short = pretrain(**rotary, save=tmp_path / "short").rows
    runs, of_short = ([tmp_path / run / f"iter_000000{step}" for step in (3, 6)] for run in ("run", "short"))
    exports = [convert(load=run, output=tmp_path / f"hf{number}") for number, run in enumerate(runs)]

    def printed(load: list[Path], **more: Any) -> list[float]:
        capsys.readouterr()
        merge(load=load, output=tmp_path / f"{load[0].parent.name}_mean", data_path=settings["data_path"], **more)
        return [float(loss) for loss in re.findall(r"validation mlm (\d\.\d{4})", capsys.readouterr().out)]

    def logged(rows: Any) -> list[float]:
        return [round(row["valid_lm_loss"], 4) for row in rows if "valid_lm_loss" in row]

    losses = printed(runs)
    assert losses[:2] == logged(rows) and printed(of_short)[:2] == logged(short)
    config = read_config(tmp_path / "short_mean" / "iter_0000000")
    assert (config.model.rope_theta, config.phases[0].seq_length) == (500_000, 16), "of the phase of the checkpoints"
    assert losses[1] < losses[2] < losses[0]
    assert printed(exports, split="3,1,0") == pytest.approx(losses, abs=1.1e-4)
    again = pretrain(**settings | {"train_iters": 1}, load=tmp_path / "run_mean")
    assert again.rows[0]["lm_loss"] < rows[0]["lm_loss"]
    assert "mean/iter_0000000, optimizer" in capsys.readouterr().out
    vocab = train_tokenizer(texts=documents(), vocab_size=300, output=tmp_path / "other.txt")
    (other,) = preprocess(texts=documents(), output_prefix=tmp_path / "other", vocab_file=vocab)
    refused("other_text_document", merge, load=runs, output=tmp_path / "none", data_path=other)
    assert not (tmp_path / "none").exists()


def test_settings_of_matplotlib_are_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"font.size": 20, "figure.dpi": 60}):
        before = matplotlib.rcParams.copy()
        with guest():
            figure_tools()
            matplotlib.rcParams["font.size"] = 7
        assert matplotlib.rcParams.copy() == before
    with matplotlib.rc_context():
        matplotlib.rc_file_defaults()
        before = matplotlib.rcParams.copy()
        monkeypatch.delitem(sys.modules, "matplotlib")
        with guest():  # whose block imports it first
            monkeypatch.setitem(sys.modules, "matplotlib", matplotlib)
            figure_tools()
        assert matplotlib.rcParams.copy() == before


@pytest.mark.parametrize("name", sorted({*megatron_ddrp.__all__} - {"__version__", "load_encoder"}))
def test_a_function_lists_the_flags_of_its_command(name: str) -> None:
    function = getattr(megatron_ddrp, name)
    parameters = inspect.signature(function).parameters
    assert len(parameters) > 5
    flags = [flag for flag in parameters if flag not in ("texts", "callbacks", "plan")]
    assert all(f"\n    {flag}: " in function.__doc__ for flag in flags)
    assert dataclasses.is_dataclass(megatron_ddrp.commands.functions.Run)
