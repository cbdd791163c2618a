"""The house: sizes of files and functions, who may import what, and the prose of docstrings."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron_ddrp.config import ENCODINGS, OBJECTIVES
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
def functions() -> list[tuple[str, Function]]:
    """Return every function of the house with its place, `megatron_ddrp/train.py:31 train`."""
    nodes = ((file, node) for file, tree in TREES.items() for node in ast.walk(tree))
    return [(f"{file}:{node.lineno} {node.name}", node) for file, node in nodes if isinstance(node, Function)]


@cache
def size_of(file: Path) -> int:
    """Return the number of lines of code of a file."""
    return code_lines((ROOT / file).read_text(encoding="utf-8"))


def num_parameters(function: Function) -> int:
    """Return how many parameters a caller sees: `self` and `cls` are left out."""
    given = function.args
    names = [parameter.arg for parameter in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    names += [parameter.arg for parameter in (given.vararg, given.kwarg) if parameter]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def is_kernel(function: Function) -> bool:
    """Return whether Triton compiles the function: its parameters are pointers, strides and sizes, one by one."""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def module_name(file: Path) -> str:
    """`megatron_ddrp/model/__init__.py` → `megatron_ddrp.model`."""
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")


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


def import_graph(trees: Mapping[Path, ast.Module]) -> dict[str, set[str]]:
    """Return module → modules it imports, of those given, also inside functions and under `if TYPE_CHECKING:`."""
    modules = {module_name(file): imported(tree) for file, tree in trees.items()}
    return {
        module: {name if name in modules else name.rpartition(".")[0] for name in names} & modules.keys()
        for module, names in modules.items()
    }


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of one circle of imports, the first again at the end; none where there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_file_is_over_600_lines() -> None:
    lengths = {str(file): len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in FILES}
    assert {name: length for name, length in lengths.items() if length > 600} == {}


SMALL = {
    "__main__.py": "python -m megatron_ddrp",
    "commands/pretrain.py": "the command starts without torch",
    "data/batches/batch.py": "all that model/ may know of data/",
    "data/points.py": "tests alone arm it",
    "run/devices.py": "plan --help lists its devices without torch",
    "data/randomness.py": "data/ and lab/ draw by it",
    "tasks/finetune/kinds/regression.py": "the example of CONTRIBUTING.md",
    "tasks/minimal_pairs/command.py": "its --help starts without torch; scoring.py does the work",
}
"""Files of less than 60 lines of code, with their reason."""


def test_files_are_whole_and_few() -> None:
    sizes = {file: size_of(file) for file in FILES if file.parts[0] == PACKAGE}
    small = [file for file, size in sizes.items() if size < 60 and file.name != "__init__.py"]
    assert sorted("/".join(file.parts[1:]) for file in small) == sorted(SMALL)
    assert len(sizes) <= 180


def test_no_more_code_than_each_part_may_have() -> None:
    """Room for what is planned stands in the bounds; `python -m tests.endurance.lines` counts."""
    counts: Counter[str] = Counter()
    for file in FILES:
        counts[part_of(file)] += size_of(file)
    assert {part: counts[part] for part, most in BOUNDS.items() if counts[part] > most} == {}


def test_a_public_class_name_is_one_thing() -> None:
    """Files of exports keep the names of the training model's classes, which they repeat."""
    own = {file: tree for file, tree in TREES.items() if not file.name.endswith("_ddrp.py")}
    names = Counter(node.name for tree in own.values() for node in tree.body if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1 and not name.startswith("_")] == []


def test_no_function_is_over_70_lines() -> None:
    lengths = {place: (node.end_lineno or 0) - node.lineno + 1 for place, node in functions()}
    assert {place: length for place, length in lengths.items() if length > 70} == {}


def test_no_function_has_over_8_parameters() -> None:
    counts = {place: num_parameters(node) for place, node in functions() if not is_kernel(node)}
    assert {place: count for place, count in counts.items() if count > 8} == {}


def test_no_circle_of_imports() -> None:
    graph = import_graph({file: tree for file, tree in TREES.items() if file.parts[0] == PACKAGE})
    assert len(graph) > 100
    assert circle(graph) == []


def test_at_most_8_loose_files_in_the_package() -> None:
    loose = [str(file) for file in FILES if len(file.parts) == 2 and file.parts[0] == PACKAGE]
    assert len([name for name in loose if not name.endswith("__init__.py")]) <= 8, loose


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({"a": "import b", "b": "def f():\n    import a"}, {"a", "b"}),
        ({"a": "import b", "b": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a"}, {"a", "b"}),
        ({"a": "import b", "b": "try:\n    from a import x\nexcept ImportError:\n    pass"}, {"a", "b"}),
        ({"a": "from p import b", "p/__init__": "", "p/b": "import p.c", "p/c": "import a"}, {"a", "p.b", "p.c"}),
        ({"p/__init__": "from p.b import x", "p/b": "import p.c", "p/c": ""}, set()),
    ],
)
def test_the_finder_of_circles_sees_what_it_should(sources: dict[str, str], expected: set[str]) -> None:
    graph = import_graph({Path(f"{name}.py"): ast.parse(source) for name, source in sources.items()})
    assert set(circle(graph)) == expected


def test_every_planned_fault_finds_its_line() -> None:
    assert [f"{fault.name}: {fault.misfit}" for fault in all_faults() if fault.misfit] == []


def test_parameters_are_counted_without_self() -> None:
    tree = ast.parse("class A:\n    def f(self, a, *b, c=1, **d): pass\ndef g(a, /, b): pass")
    counts = [num_parameters(node) for node in ast.walk(tree) if isinstance(node, Function)]
    assert sorted(counts) == [2, 4]


def importers(*prefixes):
    """Files that import one of `prefixes` or something inside it."""
    return {
        file
        for file, tree in MODULES.items()
        if any(name == prefix or name.startswith(prefix + ".") for name in imported(tree) for prefix in prefixes)
    }


def inside(*folders):
    return {file for file in MODULES if file.startswith(folders)}


def test_the_reader_sees_what_it_should():
    assert len(MODULES) > 30
    source = (
        "import torch.nn\ndef f():\n    from torch import distributed\n    import a.b as c\n    torch.distributed.x()"
    )
    assert imported(ast.parse(source)) == {"torch.nn", "torch.distributed", "a.b"}
    assert importers("torch") >= {"model/bert.py", "model/positions/tables.py"}


def named_outside(names, *folders):
    """(file, text) of every text in the code that is one of `names`, outside of some folders."""
    return {
        (file, node.value)
        for file, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in names
        if not file.startswith(folders)
    }


def test_no_encodings_name_outside_its_file_and_the_configuration():
    """Exceptions: conversion says which encodings another format can hold; a comparison names the paper's models, and
    the plan the model that it suggests."""
    offenders = named_outside(ENCODINGS, "config/", "model/positions/", "conversion/", "tasks/", "lab/")
    assert offenders == {("commands/options.py", "rope")}


def test_no_objectives_name_where_it_could_decide_something():
    """Exceptions: the model built without an objective is a masked LM; a comparison names the paper's, a plan one."""
    offenders = named_outside(OBJECTIVES, "config/", "objectives/", "conversion/", "tasks/", "lab/")
    assert offenders == {("model/bert.py", "mlm"), ("commands/options.py", "mlm")}


@pytest.mark.parametrize(
    ("module", "folders"),
    [
        ("torch.distributed", ["parallel/"]),
        ("deepspeed", ["engine/"]),
        # Core, then tasks (evaluation), then lab (experiments): each imports what stands before it. The table of
        # commands and the registry name the upper two as strings, which are read when somebody asks for them.
        ("megatron_ddrp.lab", ["lab/"]),
        ("megatron_ddrp.tasks", ["tasks/", "lab/"]),
    ],
)
def test_some_folders_alone_import_it(module, folders):
    assert importers(module) - inside(*folders) == set()
    assert importers(module) & inside(folders[-1])


@pytest.mark.parametrize(
    ("modules", "folders"),
    [
        (["torch"], ["data/"]),
        (["deepspeed", "torch.distributed", "megatron_ddrp.parallel"], ["model/", "objectives/", "data/"]),
        (["megatron_ddrp.engine"], ["model/", "objectives/", "data/", "parallel/"]),
        (["megatron_ddrp.train"], ["data/", "model/", "parallel/"]),
        (["megatron_ddrp.model", "megatron_ddrp.objectives"], ["data/"]),
    ],
)
def test_some_folders_do_not_import_it(modules, folders):
    assert importers(*modules) & inside(*folders) == set()


def test_the_model_knows_one_device_and_no_files():
    allowed = {"config", "model", "data.batches.batch", "errors"}
    for file in inside("model/"):
        own = {n.removeprefix("megatron_ddrp.") for n in imported(MODULES[file]) if n.startswith("megatron_ddrp")}
        assert all(any(n == a or n.startswith(a + ".") for a in allowed) for n in own), (file, own)


def test_encoders_know_no_trainer_and_no_jobs():
    allowed = ("checkpoint", "config", "conversion", "data", "encoders", "errors", "foreign", "model")
    for file in inside("encoders/"):
        own = {n.split(".")[1] for n in imported(MODULES[file]) if n.startswith("megatron_ddrp.")}
        assert own <= {*allowed, "load_encoder"}, file


def test_no_circle_of_imports_between_folders():
    """Loose files count as folders, except `__init__` and `__main__`, which only pass on to what a user asks for."""
    folders = {name: Path(name).parts[0].removesuffix(".py") for name in MODULES}
    graph = {folder: set() for folder in folders.values() if not folder.startswith("__")}
    for file in MODULES:
        names = {name.split(".")[1] for name in imported(MODULES[file]) if name.startswith("megatron_ddrp.")}
        if folders[file] in graph:
            graph[folders[file]] |= names & graph.keys() - {folders[file]}
    assert graph["tasks"] >= {"conversion", "pages"}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the folders of a circle


def test_no_global_state_and_no_global_args():
    for file, tree in MODULES.items():
        assert not any(isinstance(node, ast.Global) for node in ast.walk(tree)), file
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            assert "args" not in {target.id.lower() for target in targets if isinstance(target, ast.Name)}, file


def test_no_module_of_odds_and_ends():
    assert not [file for file in MODULES if file.endswith(("utils.py", "helpers.py", "common.py", "misc.py"))]


LIGHT = (
    "config.registry",
    "arguments",
    "commands.dataset",
    "commands.preprocess",
    "tasks.finetune.command",
    "lab.compare.command",
    "data.batches.loader",
    "run.metrics",
)


def test_light_modules_start_without_torch() -> None:
    code = (
        "import importlib, sys\n"
        "for module in sys.argv[1:]:\n"
        "    importlib.import_module(f'megatron_ddrp.{module}')\n"
        "    assert 'torch' not in sys.modules, module"
    )
    done = subprocess.run([sys.executable, "-c", code, *LIGHT], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


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


class Docstring(NamedTuple):
    """A docstring with its place, `model/bert.py:23`."""

    place: str
    kind: str
    """Key of `OPENERS`."""
    text: str


def docstrings(tree: ast.Module, file: str) -> Iterator[Docstring]:
    """Yield the docstrings of a module, its classes and functions, and the strings below assignments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield Docstring(f"{file}:{getattr(node, 'lineno', 1)}", kind_of(node), text)
            for before, after in zip(node.body, node.body[1:], strict=False):
                if isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr):
                    value = after.value
                    if isinstance(value, ast.Constant) and isinstance(value.value, str):
                        yield Docstring(f"{file}:{after.lineno}", "attribute", value.value)


def kind_of(node: ast.AST) -> str:
    """Return the kind of the docstring of a module, class or function; properties count as attributes."""
    if isinstance(node, ast.Module):
        return "module"
    if isinstance(node, ast.ClassDef):
        return "class"
    is_property = any("property" in ast.unparse(decorator) for decorator in getattr(node, "decorator_list", []))
    return "attribute" if is_property else "function"


def fault(docstring: Docstring) -> str | None:
    """Return the rule that a docstring breaks, or None."""
    opener = next((word for word in OPENERS[docstring.kind] if re.match(rf"{word}\b", docstring.text)), None)
    if opener:
        return f"a {docstring.kind} must not open with {opener!r}"
    if docstring.kind == "function" and not VERB.match(docstring.text):
        return "a function must open with a verb"
    riddle = next((phrase for phrase in RIDDLES if re.search(rf"\b{phrase}\b", docstring.text)), None)
    return f"no docstring says {riddle!r}" if riddle else None


def test_docstrings_open_with_plain_words() -> None:
    found = [docstring for file, tree in MODULES.items() for docstring in docstrings(tree, file)]
    assert len(found) > 20
    faults = [f"{each.place}: {reason}: {each.text.splitlines()[0]}" for each in found if (reason := fault(each))]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("kind", "text", "is_refused"),
    [
        ("function", "Return the loss.", False),
        ("function", "Whether a path is a checkpoint.", True),
        ("function", "The newest checkpoint.", True),
        ("function", "`[batch, seq]` → `[batch]`.", True),
        ("function", "Assign ranks to stages.", False),  # begins with "As", which is no word of its own here
        ("function", "Print a line for whoever looks on.", True),
        ("class", "A layer of the encoder.", False),
        ("class", "What a layer reads.", True),
        ("attribute", "True if padding is cut.", False),
        ("attribute", "Whether padding is cut.", True),
        ("module", "The same for GPUs.", True),
    ],
)
def test_faults_are_seen(kind: str, text: str, is_refused: bool) -> None:
    assert (fault(Docstring("", kind, text)) is not None) == is_refused


def test_every_kind_of_docstring_is_found() -> None:
    source = '"""M."""\nX = 1\n"""A."""\nclass C:\n    """K."""\n    @property\n    def p(self):\n        """P."""\n'
    source += 'def f():\n    """F."""\n'
    found = {(each.kind, each.text) for each in docstrings(ast.parse(source), "m.py")}
    assert found == {("module", "M."), ("attribute", "A."), ("class", "K."), ("attribute", "P."), ("function", "F.")}
