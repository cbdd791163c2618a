"""Lines of code by folder and by file: without docstrings, comments and blank lines, and without the tests.

    python -m tests.endurance.lines

Counts the Python files that git tracks, by folder and by part of the package; `tests/unit/test_house.py` holds the
bounds of the parts.
"""

import ast
import io
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

BOUNDS = {"core": 22_740, "tasks": 5_170, "lab": 4_250, "benchmarks": 2_160}
"""Part → most lines of code."""
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def source_files(root: Path = ROOT) -> list[Path]:
    """Return the Python files that git tracks under `root`, relative to it, without those of `tests/`."""
    tracked = subprocess.check_output(["git", "-C", str(root), "ls-files", "*.py"], text=True).splitlines()
    return [Path(name) for name in tracked if not name.startswith("tests/") and (root / name).exists()]


def code_lines(source: str) -> int:
    """Return the number of lines that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(lines)


def part_of(file: Path) -> str:
    """Return the part of the house that a file is in: core, tasks or lab of the package, or its first folder."""
    if file.parts[0] != "megatron_ddrp":
        return file.parts[0]
    return file.parts[1] if file.parts[1] in ("tasks", "lab") else "core"


def main() -> None:
    counts = {file: code_lines((ROOT / file).read_text(encoding="utf-8")) for file in source_files()}
    folders: Counter[str] = Counter()
    for file, lines in counts.items():
        folders["/".join(file.parts[:-1][:2]) or "."] += lines
    for folder, lines in folders.most_common():
        print(f"{lines:7,} {folder}")
    print(f"{sum(counts.values()):7,} lines of code in {len(counts)} files")
    for part, most in BOUNDS.items():
        print(f"{sum(lines for file, lines in counts.items() if part_of(file) == part):7,} of {most:,} in {part}")


if __name__ == "__main__":
    main()
