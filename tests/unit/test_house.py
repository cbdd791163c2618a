"""The house's sizes: whole files, short functions, few parameters, no circle of imports, few loose files."""

from __future__ import annotations

import ast
import graphlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.endurance.faults import all_faults
from tests.endurance.lines import BOUNDS, ROOT, code_lines, part_of, source_files
from tests.sources import Trees

PACKAGE = "megatron_ddrp"
FILES = source_files()
TREES = Trees({file: ROOT / file for file in FILES})
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions() -> Iterator[tuple[str, Function]]:
    """Yield every function of the house with its place, `megatron_ddrp/train.py:31 train`."""
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, Function):
                yield f"{file}:{node.lineno} {node.name}", node


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


def imported_modules(tree: ast.Module, modules: set[str]) -> set[str]:
    """Return which of `modules` a module imports, also inside functions and under `if TYPE_CHECKING:`."""
    named = set()
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Import):
            named |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            inside = {f"{statement.module}.{alias.name}" for alias in statement.names}
            named |= inside if inside <= modules else inside | {str(statement.module)}
    return named & modules


def import_graph(trees: Mapping[Path, ast.Module]) -> dict[str, set[str]]:
    """Return module → modules it imports, of those given."""
    modules = {module_name(file): tree for file, tree in trees.items()}
    return {name: imported_modules(tree, set(modules)) for name, tree in modules.items()}


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
    "commands/plan.py": "its --help starts without torch; the plan itself is in dry_run.py",
    "commands/pretrain.py": "the command starts without torch",
    "conversion/configuration_ddrp.py": "a file of every export with its own code",
    "data/batches/batch.py": "all that model/ may know of data/",
    "data/points.py": "tests alone arm it",
    "run/devices.py": "plan --help lists its devices without torch",
    "data/randomness.py": "data/ and lab/ draw by it",
    "tasks/finetune/kinds/regression.py": "the example of CONTRIBUTING.md",
    "tasks/minimal_pairs/command.py": "its --help starts without torch; scoring.py does the work",
}
"""Files of less than 60 lines of code, with their reason."""


def test_files_are_whole_and_few() -> None:
    sizes = {file: code_lines((ROOT / file).read_text(encoding="utf-8")) for file in FILES if file.parts[0] == PACKAGE}
    small = [file for file, size in sizes.items() if size < 60 and file.name != "__init__.py"]
    assert sorted("/".join(file.parts[1:]) for file in small) == sorted(SMALL)
    assert len(sizes) <= 170


def test_no_more_code_than_each_part_may_have() -> None:
    """Room for what is planned stands in the bounds; `python -m tests.endurance.lines` counts."""
    counts: Counter[str] = Counter()
    for file in FILES:
        counts[part_of(file)] += code_lines((ROOT / file).read_text(encoding="utf-8"))
    assert {part: counts[part] for part, most in BOUNDS.items() if counts[part] > most} == {}


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
