"""Some of the cases of `python -m tests.endurance.damage`, evenly over all kinds of files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.endurance.damage.kinds import KINDS, all_cases, some_cases
from tests.endurance.damage.readers import READERS, Ended, result_of
from tests.endurance.damage.verdict import (
    HANG,
    HARMLESS,
    NOISE,
    REFUSED,
    SILENT,
    TOLD,
    TRACEBACK,
    UNDETECTABLE,
    Healthy,
    judge,
    plain_lines,
)
from tests.integration.launch import ROOT, environment

CASES, SEED = 60, 0
LONGEST = 1200.0
"""Seconds; a case that hangs ends long before."""


@pytest.mark.slow
def test_no_damage_is_silent_or_ends_in_a_traceback(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    words = ["--cases", CASES, "--seed", SEED, "--workers", 1, "--outcomes", tmp_path / "outcomes.jsonl"]
    command = [sys.executable, "-m", "tests.endurance.damage", *map(str, words)]
    ended = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=LONGEST)
    assert ended.returncode == 0, ended.stderr
    outcomes = [json.loads(line) for line in (tmp_path / "outcomes.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(outcomes) == CASES
    assert {outcome["label"] for outcome in outcomes} == {kind.label for kind in KINDS}
    assert {outcome["verdict"] for outcome in outcomes} - {UNDETECTABLE} == {REFUSED, TOLD, HARMLESS}


def test_a_drawing_is_the_same_every_time() -> None:
    cases = all_cases(2)
    drawn = [case.name for case in some_cases(cases, CASES, SEED)]
    assert len(set(drawn)) == CASES
    assert drawn == [case.name for case in some_cases(all_cases(2), CASES, SEED)]
    assert drawn != [case.name for case in some_cases(cases, CASES, SEED + 1)]


def test_another_result_is_silent_if_the_format_has_a_sum(tmp_path: Path) -> None:
    cases = {case.kind.has_sum: case for case in all_cases(1) if case.reader in ("finetune", "compare, rows")}
    for has_sum, verdict in ((True, SILENT), (False, UNDETECTABLE)):
        healthy = Healthy(plain_lines(""), {"out": "another"})
        outcome = judge(cases[has_sum], tmp_path / "file", "", Ended(0, "", ""), tmp_path, healthy)
        assert outcome.verdict == verdict and outcome.is_fault == has_sum


@pytest.mark.parametrize(
    ("exit_code", "written", "stdout", "stderr", "verdict"),
    [
        (0, "right", "rows 1\n", "", HARMLESS),
        (0, "wrong", "rows 2\n", "", SILENT),
        (0, "older", "rows 1\n", "", SILENT),
        (0, "older", "", "skipped run/iter_0000004: weights are damaged\n", TOLD),
        (0, "wrong", "", "skipped run/iter_0000004: weights are damaged\n", SILENT),
        (1, "", "", "x.py: error: iter_0000004 is damaged\n", REFUSED),
        (1, "", "", "x.py: error: iter_0000004 is damaged\nx.py: error: again\n", NOISE),
        (1, "", "", "", NOISE),
        (1, "", "", "Traceback (most recent call last)\nValueError: x\n", TRACEBACK),
        (-11, "", "", "", TRACEBACK),
        (None, "", "", "", HANG),
    ],
)
def test_the_verdict(
    exit_code: int | None, written: str, stdout: str, stderr: str, verdict: str, tmp_path: Path
) -> None:
    case = next(case for case in all_cases(1) if case.reader == "analyze attention-maps" and "weights" in case.name)
    results = {}
    for word in ("right", "older", written):
        (tmp_path / "out.json").write_text(word, encoding="utf-8")
        results[word] = result_of(READERS[case.reader], tmp_path, "")
    healthy = Healthy(plain_lines("rows 3\n"), results["right"], results["older"])
    path = tmp_path / "weights-00-of-01.safetensors"
    assert judge(case, path, "", Ended(exit_code, stdout, stderr), tmp_path, healthy).verdict == verdict
