"""A whole comparison in real processes: killed without mercy, resumed, and the page of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.launch import Hold, Result, armed, start_ranks

pytestmark = pytest.mark.slow

STEPS = 48
TIMEOUT = 400.0
"""Seconds, on a machine that others use too."""


def compare(plan: Path, out: Path, *words: object, **harm: Any) -> Result:
    """Run `python -m tasks.compare`; its jobs are processes of their own. `harm` is for `start_ranks`."""
    return start_ranks([plan, "--output-dir", out, *words], None, program="tasks.compare", timeout=TIMEOUT, **harm)


def results_of(out: Path) -> list[dict[str, Any]]:
    """The gains in results.json."""
    return json.loads((out / "results.json").read_text())["gains"]


def test_a_comparison_killed_in_a_run_resumes_and_ends_with_its_page(tiny_corpus, tmp_path):
    plan, out, pairs = tmp_path / "plan.yaml", tmp_path / "out", tmp_path / "pairs"
    pairs.mkdir()
    words = [word for word in tiny_corpus.vocab_file.read_text().split() if word.isalpha()][-40:]
    rows = [{"sentence_good": " ".join(words[i:][:4]), "sentence_bad": " ".join(words[i::-1][:4])} for i in range(18)]
    (pairs / "order.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "models": [
            {"name": "BERT (MLM)", "encoding": "absolute", "objective": "mlm"},
            {"name": "DDRP (MTH)", "encoding": "ddrp", "objective": "mth"},
        ],
        "seeds": 1,
        "budget": {"steps": STEPS},
        "checkpoints": 3,
        "corpus": {"input": [str(tiny_corpus.text_file)], "vocab_file": str(tiny_corpus.vocab_file), "shuffle": True},
        "model": {"num-layers": 1, "hidden-size": 16, "num-attention-heads": 2, "seq-length": 32},
        "training": {"micro-batch-size": 4, "global-batch-size": 4, "lr": 1e-3, "eval-iters": 1},
        "minimal_pairs": {"data_dir": str(pairs)},
        "analyses": {"self-similarity": 8},
    }
    plan.write_text(yaml.safe_dump(values), encoding="utf-8")

    hold = Hold(tmp_path / "pipe")

    def kill_in_a_run(drivers: list[Any]) -> None:
        hold.next_process(drivers[0].sentinel)
        drivers[0].kill()
        hold.release()

    compare(plan, out, before=armed(f"step.logged={hold.action}@18"), during=kill_in_a_run)
    began = {row["job"]: row["started"] for row in map(json.loads, (out / "jobs.jsonl").read_text().splitlines())}
    assert not any(name.startswith("course") for name in began), "the kill came too late to test anything"

    compare(plan, out).check()
    rows = [json.loads(line) for line in (out / "jobs.jsonl").read_text().splitlines()]
    assert len({row["job"] for row in rows}) == len(rows) == 2 + 2 + 2 + 2
    assert {row["job"]: row["started"] for row in rows}.items() >= began.items()  # the dataset was not made again
    logs = "".join(path.read_text() for path in out.glob("logs/course*.log"))
    assert "resumed from" in logs
    for folder in out.glob("courses/*"):
        logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        trained = [row["iteration"] for row in logged if "lm_loss" in row]
        assert trained == list(range(1, STEPS + 1)), "a step is missing, or stands there twice"
        assert {path.name for path in folder.glob("iter_*")} >= {f"iter_{n:07d}" for n in (16, 32, 48)}
    page = (out / "page.html").read_text()
    assert "Missing" not in page and page.count("<img") == 5
    (difference,) = [
        row for row in results_of(out) if row["measure"] == "minimal pairs" and row["first"] == "DDRP (MTH)"
    ]
    assert difference["over_seeds"] is None and difference["over_items"] is not None
    assert difference["n"] == 1 and difference["judgement"] is None and -1 <= difference["mean"] <= 1
    assert len((out / "rows.jsonl").read_text().splitlines()) == 2

    seen = {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")}
    assert "0 of 0 jobs to do" in compare(plan, out).check().stdout[0]
    assert seen == {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")}


def test_two_rungs_of_a_plug_in_become_two_rows_that_need_no_folder(tiny_corpus, tmp_path):
    plan, rows = tmp_path / "ladder.yaml", tmp_path / "rows.jsonl"
    values = {
        "plugins": [str(Path(__file__).with_name("plugin_encoding.py"))],
        "models": [{"name": "slopes, MTH", "encoding": "slopes", "objective": "mth"}],
        "rungs": [{"budget": {"tokens": 1024}}, {"budget": {"tokens": 4096}}],
        "seeds": 1,
        "checkpoints": 1,
        "corpus": {"data_path": [str(tiny_corpus.prefix)], "vocab_file": str(tiny_corpus.vocab_file)},
        "model": {"num-layers": 1, "hidden-size": 16, "num-attention-heads": 2, "seq-length": 32},
        "training": {"micro-batch-size": 4, "global-batch-size": 4, "lr": 1e-3, "eval-iters": 1},
        "analyses": {"direction": 8},
        "workers": 2,
    }
    plan.write_text(yaml.safe_dump(values), encoding="utf-8")
    compare(plan, tmp_path / "out", "--rows", rows).check()
    lower, higher = sorted(map(json.loads, rows.read_text().splitlines()), key=lambda row: row["steps"])
    assert (lower["steps"], higher["steps"]) == (8, 32) and lower["planned_tokens"] == 1024
    assert higher["values"]["validation masked-LM loss"] < lower["values"]["validation masked-LM loss"]
    assert (
        0 <= higher["values"]["direction probe, shuffled"] <= 1
        and len(higher["curves"]["training masked-LM loss"]) == 32
    )
    assert "1,024 tokens" in (tmp_path / "out" / "page.md").read_text()
    assert "0 of 0 jobs to do" in compare(plan, tmp_path / "elsewhere", "--rows", rows).check().stdout[0]
    assert (tmp_path / "elsewhere" / "page.html").is_file() and not (tmp_path / "elsewhere" / "courses").exists()
