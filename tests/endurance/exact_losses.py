"""Whether two commits compute the same to the last bit: losses, gradient norms, notes and weights of 27 runs.

    python -m tests.endurance.exact_losses BASE [HEAD] [--only WORD …]

BASE and HEAD are commits; without HEAD it is the working tree. Each trains 5 steps of every run on the tests' tiny
corpus, preprocessed here, with its own `pretrain_bert.py`, side by side on this machine. One row per run says SAME or
the first difference; exits 1 if there is one. A metric that only HEAD writes is no difference.
"""

import argparse
import contextlib
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.numpy import load_file

from tests.endurance.layouts import make_corpus
from tests.integration.conftest import DROPOUT, NOTES, PIPELINE, TENSOR, TINY, command_line
from tests.integration.launch import ROOT, environment, json_file, read_rows, without_times
from tests.integration.test_gradients import ZERO_3_OF_ALL

COMMON = TINY | {"train_iters": 5, "eval_interval": 5, "eval_iters": 1, "zero_stage": 1}
MLM: dict[str, Any] = {"position_encoding": "absolute", "objective": "mlm"}
MTH: dict[str, Any] = {"position_encoding": "ddrp", "objective": "mth"}
ELECTRA: dict[str, Any] = {"position_encoding": "ddrp", "objective": "electra", "generator_size": 0.5}
DEBERTA: dict[str, Any] = {"position_encoding": "deberta", "objective": "mlm"}
RECOMPUTED: dict[str, Any] = {"checkpoint_activations": True, **DROPOUT}
SEQUENCE: dict[str, Any] = TENSOR | {"sequence_parallel": True}
ZERO_3: dict[str, Any] = {"zero_stage": 3}

ONE_PROCESS: dict[str, dict[str, Any]] = {
    "mlm": MLM,
    "mth": MTH,
    "electra": ELECTRA,
    "packing": MTH | {"packing": True},
    "recomputation": MTH | RECOMPUTED,
    "notes": MTH | NOTES,
    "deberta, mask decoder": DEBERTA,
    "ddrp, a table per layer": MTH | {"relative_table": "per-layer"},
    "pre-LN": MTH | {"layernorm_position": "pre"},
    "bf16": MTH | {"bf16": True},
    **{backend: MTH | {"attention_backend": backend} for backend in ("eager", "sdpa", "blocked")},
    "logged similarities": DEBERTA | {"log_similarity": True},
}
TWO_RANKS: dict[str, dict[str, Any]] = {
    "PP 2, recomputation": MTH | PIPELINE | RECOMPUTED,
    "PP 2, packing": MTH | PIPELINE | {"packing": True},
    "PP 2, electra, notes": ELECTRA | NOTES | PIPELINE,
    "PP 2, bf16": MTH | PIPELINE | {"bf16": True},
    "TP 2": MTH | TENSOR,
    "TP 2, sequence": MTH | SEQUENCE,
    "TP 2, sequence, electra, notes": ELECTRA | NOTES | SEQUENCE,
    "DP 2, ZeRO 2": MTH | {"zero_stage": 2},
    "ZeRO 3, mth": MTH | ZERO_3,
    "ZeRO 3, electra, notes": ELECTRA | NOTES | ZERO_3,
    "ZeRO 3, recomputation": MTH | ZERO_3 | RECOMPUTED,
    "ZeRO 3, bf16": MTH | ZERO_3 | {"bf16": True},
    "ZeRO 3, nothing stays gathered": MTH | ZERO_3 | {"deepspeed_config": "threshold.json"},
}


class Run(NamedTuple):
    """One of the runs: its name, how many ranks it has, its flags."""

    name: str
    ranks: int
    flags: dict[str, Any]


RUNS = [Run(name, ranks, runs[name]) for ranks, runs in ((1, ONE_PROCESS), (2, TWO_RANKS)) for name in runs]


@contextlib.contextmanager
def source_tree(commit: str | None) -> Iterator[Path]:
    """Yield a folder with the files of a commit, the working tree itself for None."""
    if commit is None:
        yield ROOT
        return
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", commit], check=True, stdout=subprocess.PIPE).stdout
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
        yield Path(folder)


def start(tree: Path, run: Run, data: dict[str, Any], folder: Path) -> subprocess.Popen[bytes]:
    """Start a run that saves into `folder`, by the code of `tree`; its standard error goes to `FOLDER.stderr`."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(run.ranks)] * (run.ranks > 1)
    arguments = command_line({**COMMON, **data, **run.flags, "save": folder})
    with Path(f"{folder}.stderr").open("wb") as stream:
        command = [sys.executable, *launcher, str(tree / "pretrain_bert.py"), *arguments]
        place: dict[str, Any] = {"env": environment() | {"PYTHONPATH": str(tree)}, "cwd": folder.parent}
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stream, **place)


def exact_values(folder: Path) -> dict[str, str]:
    """Return all that a run computed, name → exact text: each metric of each step, a hash of each stored tensor."""
    values: dict[str, str] = {}
    for row in without_times(read_rows(folder)):
        for key, value in row.items():
            values[f"step {row['iteration']}: {key}"] = value.hex() if isinstance(value, float) else repr(value)
    for path in sorted(folder.glob("iter_*/*.safetensors")):
        for name, tensor in load_file(path).items():
            values[f"{path.name}: {name}"] = hashlib.sha256(tensor.tobytes()).hexdigest()[:16]
    return values


def first_difference(base: Path, head: Path) -> str | None:
    """Return the first value of the run in `base` that is another one in `head`, None if there is none."""
    for folder in (base, head):
        if not (folder / "metrics.jsonl").exists():
            error = Path(f"{folder}.stderr").read_text(encoding="utf-8").strip().splitlines()
            return f"{folder.parent.name} failed: {error[-1] if error else 'no message'}"
    ours, theirs = exact_values(head), exact_values(base)
    assert len(theirs) > 50, f"{base} holds {len(theirs)} values: the run was not whole"
    for name, value in theirs.items():
        if ours.get(name) != value:
            return f"{name} was {value}, is {ours.get(name, 'missing')}"
    return None


def compare(base: Path, head: Path, runs: list[Run], folder: Path) -> int:
    """Make the runs in both trees, print a row for each, and return how many differ."""
    data, trees, different = make_corpus(folder), {"base": base, "head": head}, 0
    for side in trees:
        json_file(folder / side / "threshold.json", ZERO_3_OF_ALL)
    for number, run in enumerate(runs):
        saves = [folder / side / f"run{number}" for side in trees]
        processes = [start(tree, run, data, save) for tree, save in zip(trees.values(), saves, strict=True)]
        try:
            codes = [process.wait(600) for process in processes]
        finally:
            for process in processes:
                process.terminate()
        difference = first_difference(*saves)
        if difference is None and any(codes):
            difference = f"the exit codes are {codes[0]} and {codes[1]}"
        different += difference is not None
        print(f"{run.ranks} rank{'s' * (run.ranks > 1):1} {run.name:32} {difference or 'SAME'}", flush=True)
    return different


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", metavar="BASE", help="commit to compare with")
    parser.add_argument("head", metavar="HEAD", nargs="?", help="commit to compare; default the working tree")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="only the runs with one of these words in the name")
    given = parser.parse_args()
    runs = [run for run in RUNS if not given.only or any(word in run.name for word in given.only)]
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder, source_tree(given.base) as base, source_tree(given.head) as head:
        different = compare(base, head, runs, Path(folder))
    print(f"{len(runs) - different} of {len(runs)} runs are the same to the last bit")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
