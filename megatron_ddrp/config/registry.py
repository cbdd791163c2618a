"""The registry of position encodings and objectives: for each name that a flag accepts, the place of its class.

The tables hold text, so that the command line and `--help` need no torch; a class is imported on first use.
`--plugin FILE.py` adds the classes of a file to them. Such a file names its classes in one or both of these tables:

    ENCODINGS = {"my-encoding": MyEncoding}     # subclasses of megatron_ddrp.model.positions.PositionEncoding
    OBJECTIVES = {"my-objective": MyObjective}  # subclasses of megatron_ddrp.objectives.contract.Objective
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError

_POSITIONS = "megatron_ddrp.model.positions"

_ENCODINGS = {
    "absolute": ("absolute:Absolute", "one learned vector per position, as in BERT"),
    "bert-r": ("bert_r:BertR", "relative embeddings in the keys"),
    "tupe-a": ("tupe:TupeA", "untied absolute positions (TUPE)"),
    "tupe-r": ("tupe:TupeR", "as tupe-a, and T5's bias"),
    "deberta": ("deberta:Deberta", "disentangled attention, version 1"),
    "ddrp": ("ddrp:Ddrp", "the paper's: direction times distance"),
    "rope": ("rope:Rope", "rotary positions"),
    "t5": ("t5:T5", "one learned number per head and bucket of distances"),
    "alibi": ("alibi:Alibi", "a fixed slope per head"),
    "alibi-asym": ("alibi_asym:AlibiAsym", "learned slopes per head, left and right"),
    "deberta-v2": ("deberta_v2:DebertaV2", "disentangled attention, version 2, with logarithmic buckets"),
    "nope": ("nope:Nope", "no positions, for comparison"),
}
"""Value of `--position-encoding` → (file and class in model/positions/, description for `--help`)."""

ENCODINGS = {name: f"{_POSITIONS}.{place}" for name, (place, _) in _ENCODINGS.items()}
"""Value of `--position-encoding` → "module:Class"."""

ENCODING_WORDS = "; ".join(f"{name}: {words}" for name, (_, words) in _ENCODINGS.items())
"""Description of every encoding for `--help`."""

OBJECTIVES = {
    "mlm": "megatron_ddrp.objectives.mlm:MaskedLM",
    "mth": "megatron_ddrp.objectives.mth:Mth",
    "electra": "megatron_ddrp.objectives.electra:ReplacedTokenDetection",
    "token-contrast": "megatron_ddrp.objectives.token_contrast:TokenContrast",
    "rtd": "megatron_ddrp.objectives.rtd:DisentangledDetection",
    "head-disagreement": "megatron_ddrp.objectives.head_disagreement:HeadDisagreement",
}
"""Value of `--objective` → "module:Class"."""

PLUGINS: dict[str, Path] = {}
"""Value in `ENCODINGS` or `OBJECTIVES` that a plug-in added → the plug-in's file."""

_BASES = {
    "ENCODINGS": f"{_POSITIONS}:PositionEncoding",
    "OBJECTIVES": "megatron_ddrp.objectives.contract:Objective",
}
"""Name of a table → base class of its classes."""


class NotRegistered(UserError):
    """Error for the name of an encoding or objective that this process does not know."""


def plugin_files(encoding: str, objective: str) -> tuple[Path, ...]:
    """Return the plug-ins that brought an encoding and an objective, each file once; empty for those of the package."""
    places = ENCODINGS.get(encoding, ""), OBJECTIVES.get(objective, "")
    return tuple(dict.fromkeys(PLUGINS[place] for place in places if place in PLUGINS))


def encoding_class(name: str) -> Any:
    """Return the class of a position encoding; raise `UserError` for an unknown name."""
    return _find_class(name, ENCODINGS, "--position-encoding")


def objective_class(name: str) -> Any:
    """Return the class of an objective; raise `UserError` for an unknown name."""
    return _find_class(name, OBJECTIVES, "--objective")


def _find_class(name: str, table: dict[str, str], flag: str) -> Any:
    if name not in table:
        raise NotRegistered(
            f"{flag} {name} is not known: expected one of {', '.join(table)}, or a name that --plugin FILE.py adds",
            WRONG_ARGUMENTS,
        )
    return _class_at(table[name])


def _class_at(place: str) -> Any:
    module, _, class_name = place.partition(":")
    return getattr(importlib.import_module(module), class_name)


def load_plugin(path: Path) -> None:
    """Run a Python file and add the encodings and objectives that it names to the tables.

    Loading the same file twice has no further effect. Raises `UserError` if the file cannot be run, adds nothing, or
    uses a name that is already taken.
    """
    path = path.resolve()
    if path in PLUGINS.values():
        return
    brought = []
    module = _run(path)
    for table_name, table in (("ENCODINGS", ENCODINGS), ("OBJECTIVES", OBJECTIVES)):
        for name, own_class in getattr(module, table_name, {}).items():
            if name in table:
                raise _refusal(path, f"{table_name} names {name!r}, which is taken: choose another name")
            base = _class_at(_BASES[table_name])
            if not (isinstance(own_class, type) and issubclass(own_class, base)):
                wanted = f"expected a class derived from {base.__name__}"
                raise _refusal(path, f"{table_name}[{name!r}] is {own_class!r:.60}: {wanted}")
            setattr(module, f"{table_name}.{name}", own_class)  # two classes may have the same __name__
            brought.append((table, name, f"{module.__name__}:{table_name}.{name}"))
    if not brought:
        raise _refusal(path, "adds nothing: expected ENCODINGS = {name: class} or OBJECTIVES = {name: class} in it")
    for table, name, place in brought:
        table[name] = place
        PLUGINS[place] = path


def _run(path: Path) -> Any:
    """Import a file as a module and return it."""
    name = f"megatron_ddrp_plugin_{len(PLUGINS)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise _refusal(path, "cannot be read: expected a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _refusal(path, f"{type(error).__name__}: {error}") from error
    return module


def _refusal(path: Path, reason: str) -> UserError:
    return UserError(f"--plugin {path}: {reason}", WRONG_ARGUMENTS)
