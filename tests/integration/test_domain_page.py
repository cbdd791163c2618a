"""The worked example of docs/domain.md, in one process, on little text and with few steps."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest

from megatron_ddrp.commands import COMMANDS
from megatron_ddrp.commands.functions import as_command
from megatron_ddrp.commands.pretrain import read_arguments
from megatron_ddrp.train import train
from tests.conftest import documents
from tests.integration.launch import ROOT

SMALL = {
    r"--vocab-size 8192": "--vocab-size 500",
    r"--train-iters \d+": "--train-iters 4",
    r"--hidden-size 128": "--hidden-size 32",
    r"--eval-iters 40": "--eval-iters 1",
    r"--seeds 3\b": "--seeds 2",
    r"--epochs 4": "--epochs 1",
}
"""Pattern of a flag of the page → what the test gives; each occurs."""


def worked_example() -> list[list[str]]:
    """Return the words of the page's commands, made small."""
    page = (ROOT / "docs" / "domain.md").read_text(encoding="utf-8")
    script = page.split("<!-- worked example -->\n```bash\n")[1].split("```")[0]
    for pattern, small in SMALL.items():
        script, count = re.subn(pattern, small, script)
        assert count, pattern
    shape = re.findall(r'SHAPE="([^"]*)"', script)[0]
    lines = [line for line in script.splitlines() if line.startswith("megatron-ddrp ")]
    return [shlex.split(line.replace("$SHAPE", shape))[1:] for line in lines]


@pytest.mark.slow
def test_the_worked_example_leads_from_text_to_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = documents()
    for name, part in (("general", texts), ("field", texts[: len(texts) // 2])):
        rows = "".join(json.dumps({"text": text}) + "\n" for text in part)
        (tmp_path / f"{name}.jsonl").write_text(rows, encoding="utf-8")
    for name, part in (("train", texts[:40]), ("valid", texts[40:60])):
        rows = "".join(f"{re.sub('[^a-z ]', '', text.lower())[:60]},{'ab'[len(text) % 2]}\n" for text in part)
        (tmp_path / f"{name}.csv").write_text(f"text,label\n{rows}", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    commands = worked_example()
    for name, *words in commands:
        with as_command(name, words):
            if name == "pretrain":  # its `main` ends the process group for good
                train(read_arguments(words).config)
            else:
                importlib.import_module(COMMANDS[name].module).main(words)
    assert len(commands) == 16
    table = Path("scores", "table.md").read_text(encoding="utf-8")
    assert all(f"| {name}" in table for name in ("general", "scratch", "continued", "continued_new"))
    assert "not told apart" in table or "better" in table or "worse" in table
    assert {"config.json", "model.safetensors", "README.md"} <= {path.name for path in Path("my-encoder").iterdir()}
