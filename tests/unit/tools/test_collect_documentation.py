"""Prose out of docstrings."""

import json
import subprocess
import sys
from pathlib import Path

from tools.collect_documentation import collect, docstrings, main, modules, paragraphs, sources

TOOL = Path(__file__).parents[3] / "tools" / "collect_documentation.py"


def test_paragraphs_lose_markup_code_and_headings():
    text = """Short title.

    Return the :class:`~x.Reader` that ``open`` made for this
    file, or *None* where there is no such file at all.

    Args:
        path: the name of the file that is to be opened and then read to its end

    >>> open("x").read()  # this example has many words in it but is code
    'text'

    ======  ======================================
    name    what it means to those who read tables
    ======  ======================================

    expr ::= a grammar rule that has a good many words in its line
    """
    assert list(paragraphs(text)) == [
        "Return the x.Reader that open made for this file, or None where there is no such file at all.",
        "path: the name of the file that is to be opened and then read to its end",
    ]


def test_docstrings_of_module_class_and_function(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        '"""One."""\nclass A:\n    """Two."""\n    def f(self):\n        """Three."""\nx = "no docstring"\n'
    )
    assert list(docstrings(path)) == ["One.", "Two.", "Three."]
    path.write_text("this is not Python")
    assert list(docstrings(path)) == []


def test_tests_are_no_documentation(tmp_path):
    for name in ("a.py", "test/b.py", "site-packages/c.py", "d/e.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [path.relative_to(tmp_path).as_posix() for path in modules(tmp_path)] == ["a.py", "d/e.py"]


def test_whole_sources_until_there_is_enough_and_no_paragraph_twice(monkeypatch):
    first, second, third = (
        "A paragraph of prose that has some more words, " + word for word in ("one", "two", "three")
    )
    monkeypatch.setattr(
        "tools.collect_documentation.sources",
        lambda packages: [
            ("a", [("a.py", [first, second]), ("b.py", [second]), ("c.py", [f"{first}\n\n{third}"])]),
            ("d", [("d.py", [first + " more"])]),
        ],
    )
    documents, used = collect([], megabytes=1e-4)
    assert used == ["a"]
    assert sorted(document["title"] for document in documents) == ["a.py", "c.py"]
    assert {document["text"] for document in documents} == {f"{first}\n{second}", third}
    assert collect([], megabytes=1)[1] == ["a", "d"]


def test_packages_that_are_not_installed_are_named(tmp_path):
    out = tmp_path / "corpus.jsonl"
    words = [sys.executable, str(TOOL), "--output", str(out), "--megabytes", "0.1", "--packages"]
    names = ["nosuch", "json", "nosuch.sub", "json.nosuch", "sys.sub", "this", ".x"]
    done = subprocess.run([*words, *names], capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and not out.exists()
    assert (
        "--packages nosuch nosuch.sub json.nosuch sys.sub this .x: no package that is installed in this Python"
        in done.stderr
    )


def test_usual_packages_that_are_not_installed_are_skipped(monkeypatch, tmp_path, capsys):
    def names_only(packages, megabytes):
        return [{"title": "a", "text": "b"}], [name for name, _ in sources(packages)]

    monkeypatch.setattr("tools.collect_documentation.PACKAGES", ("nosuch.sub", "nosuch", "json"))
    monkeypatch.setattr("tools.collect_documentation.collect", names_only)
    monkeypatch.setattr(sys, "argv", ["tool", "--output", str(tmp_path / "corpus.jsonl")])
    main()
    printed = capsys.readouterr().out
    assert printed.endswith(", json\n") and "nosuch" not in printed


def test_the_command_needs_no_torch_and_writes_json_lines(tmp_path):
    out = tmp_path / "corpus.jsonl"
    code = f"""
import runpy, sys
sys.argv = ["tool", "--output", {str(out)!r}, "--packages", "--megabytes", "0.1"]
try:
    runpy.run_path({str(TOOL)!r}, run_name="__main__")
finally:
    assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert all(set(json.loads(line)) == {"title", "text"} for line in out.read_text().splitlines())
