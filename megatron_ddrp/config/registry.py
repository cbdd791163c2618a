"""The registry of all that has a name on the command line and may come from a plug-in: name → place of its class.

The tables hold text, so that the command line and `--help` need no torch; a class is imported on first use.
`--plugin FILE.py` adds to them what the file names in dictionaries of the same names (docs/plugins.md):

    ENCODINGS = {"my-encoding": MyEncoding}     OPTIMIZERS = {"lion": Lion}     SCHEDULES = {"square": square}
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import itertools
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import RLock
from typing import Any

from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError, code_of_others

PLUGINS: dict[str, Path] = {}
"""Place in a table that a plug-in added → the plug-in's file."""
_LOADING = RLock()
"""Lock of a thread whose plug-ins are in the tables for a while."""


class NotRegistered(UserError):
    """Error for a name that this process does not know."""


class Registry(dict[str, str]):
    """Name → "module:Class", or "module:function", of one kind of extension."""

    def __init__(self, flag: str, base: str, places: Mapping[str, str], needs: str = "") -> None:
        """Keep the flag that takes the names, the place of the base of the classes, empty for functions, with the
        arguments of both, and the name of an attribute that each needs."""
        super().__init__(places)
        self.flag, self.needs = flag, needs
        self.base, _, self.takes = base.partition("(")

    def find(self, name: str) -> Any:
        """Return the class or function of a name. Raises `NotRegistered` for an unknown one."""
        if name not in self:
            raise NotRegistered(
                f"{self.flag} {name} is not known: expected one of {', '.join(self)}, or a name that --plugin FILE.py "
                "adds",
                WRONG_ARGUMENTS,
            )
        return _at(self[name])

    def has_own(self, name: str) -> bool:
        """Return whether a name is the package's: known, and not from a plug-in."""
        return name in self and self[name] not in PLUGINS

    def code(self, name: str) -> list[str]:
        """Return the SHA-256 of the plug-in that brought a name; none for the package's own and for unknown names."""
        file = PLUGINS.get(self.get(name, ""))
        return [code_sum(file)] if file else []

    def fault(self, found: Any) -> str | None:
        """Return the words for a value that a plug-in may not bring; None if it fits."""
        base = _at(self.base) if self.base else None
        kind = f"a class derived from {base.__name__}" if base else "a function"
        if not (isinstance(found, type) and issubclass(found, base) if base else inspect.isfunction(found)):
            return f"expected {kind}"
        if self.needs and not isinstance(getattr(found, self.needs, None), Collection):
            return f"expected {kind} with an attribute {self.needs}, a list"
        if missing := getattr(found, "__abstractmethods__", ()):
            return f"expected {kind} that defines {', '.join(sorted(missing))}"
        with suppress(TypeError):
            inspect.signature(found).bind(*filter(None, self.takes.rstrip(")").split(", ")))
            return None
        return f"expected {kind} that takes ({self.takes}" if self.takes else None


_POSITIONS = "megatron_ddrp.model.positions"
_OBJECTIVES = "megatron_ddrp.objectives"
_UNITS = "megatron_ddrp.data.batches.masking"
_OPTIMIZERS = "megatron_ddrp.engine.optimizers"
_KINDS = "megatron_ddrp.tasks.finetune.kinds"

_ENCODINGS = {
    "absolute": ("absolute:Absolute", "one learned vector per position, as in BERT"),
    "bert-r": ("tables:BertR", "relative embeddings in the keys"),
    "tupe-a": ("absolute:TupeA", "untied absolute positions (TUPE)"),
    "tupe-r": ("absolute:TupeR", "as tupe-a, and T5's bias"),
    "deberta": ("tables:Deberta", "disentangled attention, version 1"),
    "ddrp": ("tables:Ddrp", "the paper's: direction times distance"),
    "rope": ("absolute:Rope", "rotary positions"),
    "t5": ("biases:T5", "one learned number per head and bucket of distances"),
    "alibi": ("biases:Alibi", "a fixed slope per head"),
    "alibi-asym": ("biases:AlibiAsym", "learned slopes per head, left and right"),
    "deberta-v2": ("tables:DebertaV2", "disentangled attention, version 2, with logarithmic buckets"),
    "nope": ("absolute:Nope", "no positions, for comparison"),
}
"""Value of `--position-encoding` → (file and class in model/positions/, description for `--help`)."""

ENCODING_WORDS = "; ".join(f"{name}: {words}" for name, (_, words) in _ENCODINGS.items())
"""Description of every encoding for `--help`."""

ENCODINGS = Registry(
    "--position-encoding",
    f"{_POSITIONS}:PositionEncoding(config)",
    {name: f"{_POSITIONS}.{place}" for name, (place, _) in _ENCODINGS.items()},
)
OBJECTIVES = Registry(
    "--objective",
    f"{_OBJECTIVES}.contract:Objective(config)",
    {
        "mlm": f"{_OBJECTIVES}.masked:MaskedLM",
        "mth": f"{_OBJECTIVES}.masked:Mth",
        "electra": f"{_OBJECTIVES}.electra:ReplacedTokenDetection",
        "token-contrast": f"{_OBJECTIVES}.masked:TokenContrast",
        "rtd": f"{_OBJECTIVES}.electra:DisentangledDetection",
        "head-disagreement": f"{_OBJECTIVES}.masked:HeadDisagreement",
    },
)
MASKINGS = Registry(
    "--masking",
    f"{_UNITS}:Masking()",
    {"whole-word": f"{_UNITS}:WholeWord", "token": f"{_UNITS}:Token", "ngram": f"{_UNITS}:Ngram"},
)
OPTIMIZERS = Registry(
    "--optimizer",
    f"{_OPTIMIZERS}:Optimizer",
    {"adamw": f"{_OPTIMIZERS}:AdamW", "muon": f"{_OPTIMIZERS}:Muon"},
    "moments",
)
SCHEDULES = Registry(
    "--lr-decay-style",
    "(step, warmup, last, config)",
    {
        name: f"megatron_ddrp.engine.optimizers:{name.replace('-', '_')}"
        for name in ("linear", "cosine", "constant", "inverse-square-root", "wsd")
    },
)
CALLBACKS = Registry("--plugin", "megatron_ddrp.run.callbacks:Callback()", {})
METRICS = Registry("--metric", "(labels, predictions)", {}, needs="kinds")
"""Metrics of plug-ins; the package's stand in each kind of task."""
KINDS = Registry(
    "--kind",
    f"{_KINDS}.contract:Kind()",
    {
        "classification": f"{_KINDS}.sequences:Classification",
        "multi-label": f"{_KINDS}.sequences:MultiLabel",
        "regression": f"{_KINDS}.regression:Regression",
        "tokens": f"{_KINDS}.tokens:Tokens",
        "qa": f"{_KINDS}.tokens:QuestionAnswering",
    },
)
"""Kinds of tasks. The last one that is likely for a file is its kind, if the command line does not name one."""

TABLES = {
    "ENCODINGS": ENCODINGS,
    "OBJECTIVES": OBJECTIVES,
    "MASKINGS": MASKINGS,
    "OPTIMIZERS": OPTIMIZERS,
    "SCHEDULES": SCHEDULES,
    "CALLBACKS": CALLBACKS,
    "METRICS": METRICS,
    "KINDS": KINDS,
}
"""Name of a dictionary in a plug-in → the table that it adds to."""

encoding_class, objective_class = ENCODINGS.find, OBJECTIVES.find


def code_sum(file: Path) -> str:
    """Return the SHA-256 of a plug-in, which tells results of its code from those of another."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def package_sum() -> str:
    """Return the SHA-256 of the package's own Python files and their names."""
    package = Path(__file__).parents[1]
    lines = [f"{file.relative_to(package)} {code_sum(file)}\n" for file in sorted(package.rglob("*.py"))]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def plugin_files() -> tuple[Path, ...]:
    """Return the files of all loaded plug-ins, in the order of loading."""
    return tuple(dict.fromkeys(PLUGINS.values()))


@contextmanager
def plugins_forgotten_after() -> Iterator[None]:
    """Forget at the end of the block the plug-ins that it loads."""
    tables: tuple[dict[str, Any], ...] = (PLUGINS, *TABLES.values())
    before = [set(table) for table in tables]
    try:
        yield
    finally:
        with _LOADING:
            for table, names in zip(tables, before, strict=True):
                for name in table.keys() - names:
                    del table[name]


@contextmanager
def plugins_within(files: Iterable[Path]) -> Iterator[None]:
    """Load plug-ins for the block alone. Threads take turns, as the tables are those of the process."""
    with _LOADING, plugins_forgotten_after():
        for file in files:
            load_plugin(file)
        yield


def _at(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def load_plugin(path: Path) -> None:
    """Run a Python file and add what it names to the tables.

    Loading the same file twice has no further effect. Raises `UserError` if the file cannot be run, adds nothing, or
    uses a name that is already taken.
    """
    path = path.resolve()
    if path in PLUGINS.values():
        return
    brought = []
    module = _run(path)
    for table_name, table in TABLES.items():
        named = getattr(module, table_name, {})
        if not isinstance(named, Mapping) or not all(isinstance(name, str) for name in named):
            raise _refusal(path, f"{table_name} is {named!r:.60}: expected a dictionary, name → class or function")
        for name, found in named.items():
            if name in table:
                raise _refusal(path, f"{table_name} names {name!r}, which is taken: choose another name")
            if expected := table.fault(found):
                raise _refusal(path, f"{table_name}[{name!r}] is {found!r:.60}: {expected}")
            kept = found if table.base else code_of_others()(found)
            setattr(module, f"{table_name}.{name}", kept)  # two classes may have the same __name__
            brought.append((table, name, f"{module.__name__}:{table_name}.{name}"))
    if not brought:
        raise _refusal(path, f"adds nothing: expected one of {', '.join(TABLES)} = {{name: class}} in it")
    for table, name, place in brought:
        table[name] = place
        PLUGINS[place] = path


def _run(path: Path) -> Any:
    """Import a file as a module and return it."""
    names = (f"megatron_ddrp_plugin_{number}_{path.stem}" for number in itertools.count())
    name = next(free for free in names if free not in sys.modules)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise _refusal(path, "cannot be read: expected a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _refusal(path, f"{type(error).__name__}: {error}") from error
    return module


def _refusal(path: Path, reason: str) -> UserError:
    return UserError(f"--plugin {path}: {reason}", WRONG_ARGUMENTS)
