"""The first program of docs/python.md as a user starts it, and a program of two ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ddrp.run.metrics import read_rows
from tests.conftest import TinyCorpus, documents
from tests.integration.conftest import TINY
from tests.integration.launch import ROOT, TIMEOUT, start_ranks

PLAIN = str.maketrans('",', "  ")
"""Map of characters that CSV would need quoted."""

ON_RANKS = """
import json, sys
from megatron_ddrp import pretrain

settings = json.loads(sys.argv[1])
first = pretrain(**settings, exit_interval=2)
second = pretrain(**settings)
print(f"{first.iteration} {second.iteration} {len(second.rows)}.")
"""


def run_program(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_first_program_of_the_page_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    program = page.split("```python\n")[1].split("```")[0]
    assert len(program.splitlines()) <= 40
    for name, begin, end in (("train", 0, 40), ("valid", 40, 60)):
        rows = "".join(f"{text.translate(PLAIN)[:60]},{len(text) % 2}\n" for text in documents()[begin:end])
        (tmp_path / f"{name}.csv").write_text(f"text,label\n{rows}", encoding="utf-8")
    (tmp_path / "texts.json").write_text(json.dumps(documents()), encoding="utf-8")
    own = 'import json\ntexts = json.load(open("texts.json"))\n'
    shown = (
        '\nprint(len(losses), vectors.shape, scores.page.count("|") > 10, len(scores.rows), sorted(scores.summary)[:1])'
    )
    shown += '\nprint(run.rows[0]["embedding_norm"] > 0, (folder / "config.json").exists())\n'
    program = program.replace("train_iters=300", "train_iters=6")
    (tmp_path / "program.py").write_text(own + program + shown, encoding="utf-8")
    lines = run_program([sys.executable, "program.py"], tmp_path).splitlines()
    assert lines[-1] == "True True"
    assert lines[-2].startswith("2 (2, 128) True 1 "), lines[-2]


@pytest.mark.slow
def test_ranks_of_a_launcher_train_twice_and_the_second_run_resumes(tiny_corpus: TinyCorpus, tmp_path: Path) -> None:
    data = {"data_path": str(tiny_corpus.prefix), "vocab_file": str(tiny_corpus.vocab_file), "save_interval": 2}
    run = str(tmp_path / "run")
    settings = TINY | data | {"train_iters": 4, "zero_stage": 1, "save": run, "load": run}
    (tmp_path / "program.py").write_text(ON_RANKS, encoding="utf-8")
    printed = start_ranks([json.dumps(settings)], 2, program=str(tmp_path / "program.py")).check().stdout
    assert [text.splitlines()[-1] for text in printed] == ["2 4 2.", "2 4 0."]
    assert [row["iteration"] for row in read_rows(tmp_path / "run")] == [1, 2, 3, 4]
