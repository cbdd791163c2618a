"""The house's prose: docstrings open with plain words, so that each makes sense alone in an index or a tooltip."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.endurance.lines import ROOT, source_files

FOLDERS = (".",)
"""Folders of `megatron_ddrp/` that follow the rules; `.` is the whole package."""

CLAUSES = ("What", "Whether", "Which", "Who", "How", "Where", "When", "If", "That", "Those", "Neither", "None of")
PREPOSITIONS = ("Of", "By", "As", "For", "In", "On", "At", "To", "From", "With", "Without", "Under", "Beside")
ARTICLES = ("A", "An", "The", "This", "These", "Each", "Every", "All", "Any", "Some", "Our", "Its", "One", "Two")

OPENERS = {
    "function": (*CLAUSES, *PREPOSITIONS, *ARTICLES),
    "class": (*CLAUSES, *PREPOSITIONS, "The same"),
    "attribute": (*CLAUSES, *PREPOSITIONS, "The same"),
    "module": (*CLAUSES, *PREPOSITIONS, "The same"),
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


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_open_with_plain_words(folder: str) -> None:
    files = [file for file in source_files() if file.is_relative_to(Path("megatron_ddrp") / folder)]
    trees = {file: ast.parse((ROOT / file).read_text(encoding="utf-8")) for file in files}
    found = [docstring for file, tree in trees.items() for docstring in docstrings(tree, str(file))]
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
