"""The house: sizes of files and functions, who may import what, and the prose of docstrings."""

import ast
import graphlib
import itertools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from megatron_ddrp.config import ENCODINGS, OBJECTIVES
from tests.changed import module_of
from tests.endurance.faults import all_faults
from tests.endurance.lines import BOUNDS, ROOT, code_lines, part_of, source_files
from tests.sources import Trees

PACKAGE = "megatron_ddrp"
FILES = source_files()
TREES = Trees({file: ROOT / file for file in FILES})
MODULES = Trees({"/".join(file.parts[1:]): ROOT / file for file in FILES if file.parts[0] == PACKAGE})
"""Tree of each file of the package by its path in it, such as `model/bert.py`."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def size_of(file: Path) -> int:
    return code_lines((ROOT / file).read_text(encoding="utf-8"))


def num_parameters(function: Function) -> int:
    """Return how many parameters a caller sees: `self` and `cls` are left out."""
    given = function.args
    names = [parameter.arg for parameter in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    names += [parameter.arg for parameter in (given.vararg, given.kwarg) if parameter]
    return len(names) - (names[:1] in (["self"], ["cls"]))


@cache
def imported(tree: ast.Module) -> set[str]:
    """Return all dotted names that a module imports, `from a import b` as `a.b`, and uses as `torch.distributed`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute, so that this test can read them"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            names.add("torch.distributed")
    return names


SMALL = {
    "__main__.py": "the command starts without torch, and python -m needs the name",
    "commands/pretrain.py": "the command starts without torch",
    "data/batches/batch.py": "all that model/ may know of data/",
    "data/points.py": "tests alone arm it",
    "run/devices.py": "plan --help lists its devices without torch",
    "data/randomness.py": "data/ and lab/ draw by it",
    "tasks/finetune/kinds/regression.py": "the example of CONTRIBUTING.md",
    "tasks/minimal_pairs/command.py": "its --help starts without torch; scoring.py does the work",
}
"""Files of less than 60 lines of code, with their reason."""


def test_files_are_whole_and_few_and_none_is_over_600_lines() -> None:
    lengths = {str(file): len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in FILES}
    assert {name: length for name, length in lengths.items() if length > 600} == {}
    sizes = {"/".join(file.parts[1:]): size_of(file) for file in FILES if file.parts[0] == PACKAGE}
    small = [file for file, size in sizes.items() if size < 60 and not file.endswith("__init__.py")]
    assert sorted(small) == sorted(SMALL) and len(sizes) <= 180
    assert len([file for file in sizes if "/" not in file and file != "__init__.py"]) <= 8, "loose files"


def test_no_more_code_than_each_part_may_have_and_no_class_twice() -> None:
    """Room for what is planned stands in the bounds; `python -m tests.endurance.lines` counts."""
    counts: Counter[str] = Counter()
    for file in FILES:
        counts[part_of(file)] += size_of(file)
    assert {part: counts[part] for part, most in BOUNDS.items() if counts[part] > most} == {}

    # A public name of a class is one thing; files of exports repeat the training model's classes.
    own = {file: tree for file, tree in TREES.items() if not file.name.endswith("_ddrp.py")}
    names = Counter(node.name for tree in own.values() for node in tree.body if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1 and not name.startswith("_")] == []


def test_no_function_is_over_70_lines_or_has_over_8_parameters() -> None:
    nodes = ((file, node) for file, tree in TREES.items() for node in ast.walk(tree))
    functions = {f"{file}:{node.lineno} {node.name}": node for file, node in nodes if isinstance(node, Function)}
    lengths = {place: (node.end_lineno or 0) - node.lineno + 1 for place, node in functions.items()}
    assert {place: length for place, length in lengths.items() if length > 70} == {}
    # Triton's kernels are left out: their parameters are pointers, strides and sizes, one by one.
    kernels = {place for place, node in functions.items() if "jit" in " ".join(map(ast.unparse, node.decorator_list))}
    counts = {place: num_parameters(functions[place]) for place in functions.keys() - kernels}
    assert {place: count for place, count in counts.items() if count > 8} == {}


def test_no_circle_of_imports() -> None:
    """Also inside functions and under `if TYPE_CHECKING:`; `prepare` names the modules of a circle."""
    modules = {module_of(f"{PACKAGE}/{file}"): imported(tree) for file, tree in MODULES.items()}
    assert len(modules) > 100
    own = {name: each | {part.rpartition(".")[0] for part in each - modules.keys()} for name, each in modules.items()}
    graphlib.TopologicalSorter({name: names & modules.keys() for name, names in own.items()}).prepare()
    # Between folders: loose files count as such, but `__init__` and `__main__` only pass on to what a user asks for.
    folders = {file: file.partition("/")[0].removesuffix(".py") for file in MODULES}
    graph = {folder: set() for folder in folders.values() if not folder.startswith("__")}
    for file, folder in folders.items():
        names = {name.split(".")[1] for name in imported(MODULES[file]) if name.startswith("megatron_ddrp.")}
        if folder in graph:
            graph[folder] |= names & graph.keys() - {folder}
    assert graph["tasks"] >= {"conversion", "pages"}
    graphlib.TopologicalSorter(graph).prepare()


def test_every_planned_fault_finds_its_line() -> None:
    assert [f"{fault.name}: {fault.misfit}" for fault in all_faults() if fault.misfit] == []


def importers(*prefixes):
    """Files that import one of `prefixes` or something inside it."""
    starts = tuple(f"{prefix}." for prefix in prefixes)
    return {file for file, tree in MODULES.items() if any(f"{name}.".startswith(starts) for name in imported(tree))}


def inside(*folders):
    return {file for file in MODULES if file.startswith(folders)}


def named_outside(names, *folders):
    """(file, text) of every text in the code that is one of `names`, outside of some folders."""
    trees = ((file, tree) for file, tree in MODULES.items() if not file.startswith(folders))
    texts = {(file, node.value) for file, tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return {(file, text) for file, text in texts if text in names}


def test_no_encodings_or_objectives_name_where_it_could_decide_something():
    """Exceptions: conversion says which encodings another format can hold, the model built without an objective is a
    masked LM, a comparison names the paper's models, and the plan the model that it suggests."""
    free = ("config/", "conversion/", "tasks/", "lab/")
    assert named_outside(ENCODINGS, "model/positions/", *free) == {("commands/options.py", "rope")}
    of_objectives = {("model/bert.py", "mlm"), ("commands/options.py", "mlm")}
    assert named_outside(OBJECTIVES, "objectives/", *free) == of_objectives


ALONE = {
    "torch.distributed": ["parallel/"],
    "deepspeed": ["engine/"],
    # Core, then tasks (evaluation), then lab (experiments): each imports what stands before it. The table of commands
    # and the registry name the upper two as strings, which are read when somebody asks for them.
    "megatron_ddrp.lab": ["lab/"],
    "megatron_ddrp.tasks": ["tasks/", "lab/"],
}
KNOWN_TO_BOTH = ("config.", "errors.", "model.")
KNOWN = {
    "model/": ("data.batches.batch.",),
    "encoders/": ("checkpoint.", "conversion.", "data.", "encoders.", "foreign.", "load_encoder."),
}
"""Folder → what else it may import of the package."""


def test_some_folders_alone_import_it_and_others_do_not():
    for module, folders in ALONE.items():
        assert importers(module) - inside(*folders) == set(), module
        assert importers(module) & inside(folders[-1]), module
    for modules, folders in (
        (["torch"], ["data/"]),
        (["deepspeed", "torch.distributed", "megatron_ddrp.parallel"], ["model/", "objectives/", "data/"]),
        (["megatron_ddrp.engine"], ["model/", "objectives/", "data/", "parallel/"]),
        (["megatron_ddrp.train"], ["data/", "model/", "parallel/"]),
        (["megatron_ddrp.model", "megatron_ddrp.objectives"], ["data/"]),
    ):
        assert importers(*modules) & inside(*folders) == set(), modules


@pytest.mark.parametrize("folder", KNOWN)
def test_the_model_knows_one_device_and_no_files_and_encoders_no_trainer_and_no_jobs(folder):
    for file in inside(folder):
        own = {name.partition(".")[2] for name in imported(MODULES[file]) if name.startswith(PACKAGE)}
        assert [name for name in own if not f"{name}.".startswith((*KNOWN[folder], *KNOWN_TO_BOTH))] == [], file


def test_no_global_state_no_global_args_and_no_module_of_odds_and_ends():
    for file, tree in MODULES.items():
        assert not any(isinstance(node, ast.Global) for node in ast.walk(tree)), file
        targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
        assert "args" not in {target.id.lower() for target in targets if isinstance(target, ast.Name)}, file
        assert not file.endswith(("utils.py", "helpers.py", "common.py", "misc.py"))


LIGHT = ("config.registry", "arguments", "commands.dataset", "commands.preprocess", "tasks.finetune.command")
LIGHT += ("lab.analysis.command", "lab.compare.command", "data.batches.loader", "run.metrics")
IMPORT = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(f"megatron_ddrp.{module}")
    assert "torch" not in sys.modules, module
"""


def test_light_modules_start_without_torch() -> None:
    subprocess.run([sys.executable, "-c", IMPORT, *LIGHT], cwd=ROOT, check=True, timeout=60)


CLAUSES = ("What", "Whether", "Which", "Who", "How", "Where", "When", "If", "That", "Those", "Neither", "None of")
PREPOSITIONS = ("Of", "By", "As", "For", "In", "On", "At", "To", "From", "With", "Without", "Under", "Beside")
ARTICLES = ("A", "An", "The", "This", "These", "Each", "Every", "All", "Any", "Some", "Our", "Its", "One", "Two")

OPENERS = {
    "function": (*CLAUSES, *PREPOSITIONS, *ARTICLES),
    **dict.fromkeys(("class", "attribute", "module"), (*CLAUSES, *PREPOSITIONS, "The same")),
}
"""Kind of a docstring → words that it must not open with. Functions open with a verb ("Return", "Write"); classes,
attributes, properties and modules with a noun phrase. A predicate's attribute opens with "True if"."""

RIDDLES = ("whoever", "is told", "are told", "is had", "what is", "what was", "goes on with", "passed over")
"""Phrases that no docstring contains."""

VERB = re.compile(r"[A-Z][a-z-]+\b")
"""Beginning of a function's docstring: a word, not a formula, a shape or a name in code."""


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yield line, kind (a key of `OPENERS`) and text of each docstring, also of strings below assignments."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | Function):
            continue
        if text := ast.get_docstring(node):
            is_property = any("property" in ast.unparse(each) for each in getattr(node, "decorator_list", []))
            kind = {ast.Module: "module", ast.ClassDef: "class"}.get(type(node), "function")
            yield getattr(node, "lineno", 1), "attribute" if is_property else kind, text
        for pair in itertools.pairwise(node.body):
            match pair:
                case (ast.Assign() | ast.AnnAssign(), ast.Expr(ast.Constant(str(text))) as below):
                    yield below.lineno, "attribute", text


def test_docstrings_open_with_plain_words() -> None:
    found, faults = 0, []
    for file, tree in MODULES.items():
        for line, kind, text in docstrings(tree):
            found += 1
            wrong = [f"a {kind} opens with {word}" for word in OPENERS[kind] if re.match(rf"{word}\b", text)]
            wrong += [phrase for phrase in RIDDLES if re.search(rf"\b{phrase}\b", text)]
            wrong += ["a function opens with no verb"] if kind == "function" and not VERB.match(text) else []
            faults += [f"{file}:{line}: {words}" for words in wrong]
    assert found > 20 and not faults, "\n".join(faults)
