"""The recipes for Slurm job arrays, with stand-ins for Slurm's commands."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.unit.test_examples import ROOT, run_script

SBATCH = """
array=() job=JOB
while [[ $1 == --* ]]; do
    [[ $1 == --array=* ]] && array=(${1#--array=})
    [[ $1 == --dependency=* ]] && echo "$1" >> "$LOG"
    shift
done
export SLURM_JOB_ID=1
for range in "${array[@]}"; do
    for task in $(seq "${range%-*}" "${range#*-}"); do
        SLURM_ARRAY_TASK_ID=$task bash "$@" >> "$LOG" 2>&1 || exit 1
    done
done
[[ ${#array[@]} -gt 0 ]] || bash "$@" >> "$LOG" 2>&1 || exit 1
echo 4711
"""


def write_program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/usr/bin/env bash\n{script}\n", encoding="utf-8")
    (folder / name).chmod(0o755)


def test_an_array_of_parts_and_its_merge_give_the_files_of_one_run(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    write_program(programs, "sbatch", SBATCH)
    write_program(programs, "megatron-ddrp", f'exec "{sys.executable}" -m megatron_ddrp "$@"')
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n")
    lines = [json.dumps({"text": "a b c d " * (n % 7), "title": "e f"}) + "\n" for n in range(40)]
    (tmp_path / "text.jsonl").write_text("".join(lines))
    log = tmp_path / "log"
    settings = {"INPUT": str(tmp_path / "*.jsonl"), "VOCAB": str(tmp_path / "vocab.txt"), "LOG": str(log)}
    settings |= {"PYTHONPATH": str(ROOT), "SLURM_CPUS_PER_TASK": "1"}
    for name, parts in (("parts", "2"), ("once", "1")):
        settings |= {"PREFIX": str(tmp_path / name), "PARTS": parts}
        recipe = ROOT / "examples" / "preprocess_slurm.sh"
        done = run_script(recipe, settings, "--json-keys", "text", "title", in_front=programs)
        assert done.returncode == 0, log.read_text()
        assert done.stdout.splitlines() == ["parts: 4711", "merge: 4711"]
    assert log.read_text().count("--dependency=afterok:4711\n") == 2
    for key in ("text", "title"):
        for suffix in ("bin", "idx"):
            parts, once = (tmp_path / f"{name}_{key}_document.{suffix}" for name in ("parts", "once"))
            assert parts.read_bytes() == once.read_bytes()


def test_sweeps_and_comparisons_are_arrays_of_commands_that_do_not_wait(tmp_path: Path) -> None:
    write_program(tmp_path / "bin", "megatron-ddrp", 'echo "$*"')
    settings = {"DATA": "glue", "LOAD": "a b", "OUT": "out", "PLAN": "plan.yaml"}
    told = {
        name: run_script(ROOT / "examples" / f"{name}_slurm.sh", settings, "--bf16", in_front=tmp_path / "bin").stdout
        for name in ("glue", "compare")
    }
    assert told["glue"] == "glue --data-dir glue --load a b --output-dir out --workers 1 --no-wait --bf16\n"
    assert told["compare"] == "compare plan.yaml --output-dir out --workers 1 --no-wait --bf16\n"
