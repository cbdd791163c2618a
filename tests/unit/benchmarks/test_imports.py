"""Scripts outside the package import modules that exist; a type checker takes the others for foreign ones."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_scripts_import_modules_that_exist():
    wrong, seen = [], 0
    for folder in ("benchmarks", "examples", "tools"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                module = node.module if isinstance(node, ast.ImportFrom) else None
                if module and module.startswith("megatron_ddrp."):
                    seen += 1
                    place = ROOT / module.replace(".", "/")
                    if not (place.is_dir() or place.with_suffix(".py").is_file()):
                        wrong.append(f"{file.relative_to(ROOT)}: {module}")
    assert seen > 50 and not wrong
