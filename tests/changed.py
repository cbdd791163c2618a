"""Tests of what changed, for `make check`: `python -m tests.changed` prints their files.

A test counts if it imports or names a changed file, itself or through other files; a name is a string such as
`"docs"`, `"python.md"` or `"megatron_ddrp.train"`. Changed is what differs from the merge base with main, or, on main,
from HEAD. `make test` remains the judge: what a test reads by a pattern alone is not seen here.
"""

import ast
import subprocess
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path

from megatron_ddrp.commands import COMMANDS
from megatron_ddrp.config.registry import TABLES

ROOT = Path(__file__).resolve().parents[1]
OF_ALL_SOURCES = ("test_house", "test_pages")
"""Tests in tests/unit/ that read every file; they always run."""
CHANGE_ALL = {"pyproject.toml", "tests/conftest.py"}
ON_FIRST_USE = [(name, key, place) for name, table in TABLES.items() for key, place in table.items()]
ON_FIRST_USE += [("COMMANDS", name, command.module) for name, command in COMMANDS.items()]
"""Table, name in it and module that is imported on first use: tests that name one of the first two count, none else."""
parse = cache(ast.parse)
"""Whoever asks for many files again and again, as the run of all faults does, parses and walks each once."""


def changed_files() -> set[str]:
    """Return the files that differ from the merge base with main, or from HEAD, those unknown to git included."""
    bases = (_git("merge-base", "HEAD", branch) for branch in ("origin/main", "main"))
    base = next(filter(None, bases), ["HEAD"])[0]
    return {*_git("diff", "--name-only", base), *_git("ls-files", "--others", "--exclude-standard")}


def _git(*words: str) -> list[str]:
    """Return the lines of a git command; none if it fails."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()


def affected_tests(changed: Collection[str], sources: Mapping[str, str]) -> list[str]:
    """Return the files of tests for changed files, given the text of every Python file by its path."""
    reached = set(changed)
    if reached & CHANGE_ALL:
        return ["tests"]
    trees = {file: parse(text) for file, text in sources.items()}
    package = {file for file in trees if file.startswith("megatron_ddrp/")}
    tests = {file for file in trees if Path(file).name.startswith("test_") and "/cluster/" not in file}
    modules = frozenset(map(module_of, trees))
    needs = {file: {*imports_of(tree, modules)} for file, tree in trees.items()}
    for file in trees.keys() - package:
        needs[file] |= _strings(trees[file])
    for file in tests:
        needs[file] |= {name for name in _conftests(file, trees) if _fixtures(trees[name]) & _parameters(trees[file])}
    loose = {name for file in reached for name in _loose_names(file)}
    changed_modules = set(map(module_of, changed))
    loose |= {word for *words, place in ON_FIRST_USE if place.partition(":")[0] in changed_modules for word in words}
    reached |= {file for file in tests if needs[file] & loose}
    others = {Path(file).name for file in changed if not file.endswith(".py")}  # such as templates of pages
    reached |= {file for file in package if _strings(trees[file]) & others}
    new = reached
    while new:
        names = {name for file in new for name in (file, module_of(file))}
        new = {file for file in trees.keys() - reached if needs[file] & names}
        reached |= new
    return sorted((reached | {f"tests/unit/{name}.py" for name in OF_ALL_SOURCES}) & tests)


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _loose_names(file: str) -> set[str]:
    """Return the strings by which a test may read a file: the file's name and folders, or of Python the first folder
    alone. An `__init__.py` runs for every module of its package."""
    parts = Path(file).parts
    names = {parts[0], parts[-1], module_of(file)} if file.endswith(".py") else {*parts}
    return names - {"tests", "__init__.py"}


@cache
def imports_of(tree: ast.Module, modules: frozenset[str]) -> set[str]:
    """Return the names of modules that a file imports, and the names that it takes from them."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            inside = {f"{node.module}.{name}" for name in names}
            found |= inside if inside <= modules else inside | names | {str(node.module)}
    return found


@cache
def _strings(tree: ast.Module) -> set[str]:
    """Return a file's strings, and the parts of paths among them."""
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {part for text in strings for part in (text, *text.split("/"))}


def _conftests(file: str, known: Iterable[str]) -> set[str]:
    """Return the known files of fixtures for a file of tests."""
    return {f"{folder}/conftest.py" for folder in Path(file).parents} & set(known)


@cache
def _fixtures(tree: ast.Module) -> set[str]:
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@cache
def _parameters(tree: ast.Module) -> set[str]:
    return {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}


def main() -> None:
    """Print the files, one per line."""
    files = _git("ls-files", "--cached", "--others", "--exclude-standard", "*.py")
    sources = {file: (ROOT / file).read_text(encoding="utf-8") for file in files if (ROOT / file).exists()}
    print(*affected_tests(changed_files(), sources), sep="\n")


if __name__ == "__main__":
    main()
