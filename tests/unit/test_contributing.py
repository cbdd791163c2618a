"""The recipes of CONTRIBUTING.md are the repository's own lines."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def added_lines():
    """Yield (file, line) for every line that a diff of CONTRIBUTING.md adds."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for block in re.findall(r"```diff\n(.*?)```", text, flags=re.DOTALL):
        file = None
        for line in block.splitlines():
            if line.startswith("+++ b/"):
                file = line.removeprefix("+++ b/")
            elif line.startswith("+"):
                yield file, line[1:]


def test_every_added_line_is_in_the_file_that_its_diff_names():
    added = list(added_lines())
    assert {file for file, _ in added} >= {
        "megatron_ddrp/config/registry.py",
        "megatron_ddrp/model/positions/biases.py",
        "megatron_ddrp/objectives/masked.py",
        "megatron_ddrp/tasks/finetune/metrics.py",
        "megatron_ddrp/tasks/glue.py",
    }
    texts = {file: (ROOT / file).read_text(encoding="utf-8").splitlines() for file in {file for file, _ in added}}
    assert [line for file, line in added if line not in texts[file]] == []


def test_the_encoding_is_whole():
    """The recipe shows the whole class."""
    shown = [line for file, line in added_lines() if file == "megatron_ddrp/model/positions/biases.py"]
    text = (ROOT / "megatron_ddrp/model/positions/biases.py").read_text(encoding="utf-8")
    (whole,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == "T5")
    assert "\n".join(shown) == ast.get_source_segment(text, whole)


def test_the_kind_of_task_is_whole():
    """All code of the file stands in the recipe."""
    name = "megatron_ddrp/tasks/finetune/kinds/regression.py"
    shown = ast.parse("\n".join(line for file, line in added_lines() if file == name))
    whole = ast.parse((ROOT / name).read_text(encoding="utf-8"))
    for node in ast.walk(whole):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:]
    assert ast.unparse(shown) == ast.unparse(whole)
