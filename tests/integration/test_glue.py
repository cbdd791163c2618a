"""The fine-tuning command as a user starts it: on ranks, with workers, killed, and on the official data."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ddrp.conversion.from_huggingface import import_folder
from megatron_ddrp.errors import WRONG_ARGUMENTS
from tests.integration.launch import ROOT, Hold, armed, run_command, start_ranks

pytestmark = pytest.mark.slow
SHARED = ROOT.parent / "shared" / "data" / "glue.tar.xz"
WORDS = ["red", "green", "blue", "cat", "dog", "bird", "runs", "sleeps", "sings"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A made-up CoLA of odd sizes, and a BERT with dropout that learns it."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("glue")
    rng = np.random.default_rng(0)
    for task in ("CoLA", "STS-B"):
        (folder / "data" / task).mkdir(parents=True)
    for name, count in (("train", 61), ("dev", 37)):
        cola, sts = [], ["index\tsentence1\tsentence2\tscore"]
        for index in range(count):
            words = rng.choice(len(WORDS), rng.integers(2, 6))
            text = " ".join(WORDS[word] for word in words)
            cola.append(f"made\t{int(words[0] < 3)}\t\t{text}")
            sts.append(f"{index}\t{text}\tred cat\t{(words < 3).sum()}.000")
        (folder / "data" / "CoLA" / f"{name}.tsv").write_text("\n".join(cola) + "\n")
        (folder / "data" / "STS-B" / f"{name}.tsv").write_text("\n".join(sts) + "\n")
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=len(pieces), max_position_embeddings=16, initializer_range=0.2, **sizes)
    transformers.BertModel(config).save_pretrained(folder / "bert")
    (folder / "bert" / "vocab.txt").write_text("\n".join(pieces) + "\n")
    return folder


def command(folder: Path, out: Path, *more: str) -> list[str]:
    """What follows `python -m tasks.glue`; later words win."""
    words = ["--tasks", "CoLA", "STS-B", "--data-dir", folder / "data", "--load", folder / "bert", "--output-dir", out]
    words += ["--grid", "quick", "--seeds", "1", "--lr", "1e-2", "--batch-size", "8", "--epochs", "8", *more]
    return [str(word) for word in words]


def rows(out: Path) -> list[dict]:
    """Lines of runs.jsonl by name, without what depends on the clock."""
    found = [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]
    return sorted(
        ({k: v for k, v in row.items() if k not in ("seconds", "crc32")} for row in found),
        key=lambda row: row["predictions"],
    )


def predictions(out: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted((out / "predictions").glob("*.tsv"))}


def run(words: list[str], ranks: int | None = None) -> str:
    """Standard output of `python -m tasks.glue WORDS`, or of rank 0 under a launcher; it must end well."""
    return start_ranks(words, ranks, program="tasks.glue").check().stdout[0]


def launched(words: list[str]) -> subprocess.CompletedProcess[str]:
    """`python -m tasks.glue WORDS` on two ranks of the real torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    command_line = [sys.executable, *launcher, sys.executable, "-m", "tasks.glue", *words]
    return run_command(command_line, PYTHONPATH=str(ROOT))


def sweep_alone(folder: Path, out: Path, *more: str) -> Path:
    """The sweep by one process; the encoder must learn."""
    run(command(folder, out, *more))
    assert [row["dev_examples"] for row in rows(out)] == [37, 37]
    assert all(row["score"] is not None and row["score"] > 0.3 for row in rows(out))
    return out


@pytest.fixture(scope="module")
def alone(folder):
    return sweep_alone(folder, folder / "alone")


@pytest.fixture(scope="module")
def ours_alone(folder):
    """Of the same encoder as a checkpoint of ours: its workers need not import transformers."""
    import_folder(folder / "bert", folder / "ours")
    return sweep_alone(folder, folder / "ours alone", "--load", str(folder / "ours"))


def test_one_and_two_ranks_have_the_same_scores(folder, alone):
    """To the last digit of the regression's predictions, with dropout and an odd number of rows."""
    said = run(command(folder, folder / "ranks"), ranks=2)
    assert said.count("plan:") == 1
    assert rows(folder / "ranks") == rows(alone)
    assert predictions(folder / "ranks") == predictions(alone)


def test_workers_share_a_sweep_and_a_second_start_does_nothing(folder, alone):
    said = run(command(folder, folder / "workers", "--workers", "2"))
    assert "[2/2]" in said
    assert rows(folder / "workers") == rows(alone)
    again = run(command(folder, folder / "workers", "--workers", "2"))
    assert "0 of 2 runs to do" in again
    assert rows(folder / "workers") == rows(alone)


def test_a_killed_worker_does_no_harm_where_the_other_does_its_runs(folder, ours_alone):
    """It is killed with a lease, while the other holds one too."""
    out, hold = folder / "one killed", Hold(folder / "pipe")

    def kill_a_worker(commands: list[Any]) -> None:
        workers = [hold.next_process(commands[0].sentinel) for _ in range(2)]
        os.kill(workers[0], signal.SIGKILL)
        hold.release()

    words = command(folder, out, "--load", str(folder / "ours"), "--workers", "2")
    points = armed(f"job.leased={hold.action}")
    start_ranks(words, None, points, kill_a_worker, program="tasks.glue").check()
    assert rows(out) == rows(ours_alone)
    assert (out / "table.md").is_file()


def test_killed_commands_end_as_one_undisturbed(folder, ours_alone):
    """Workers must go with a killed parent, and the leases that they held must be free."""
    out = folder / "killed"
    words = command(folder, out, "--load", str(folder / "ours"), "--workers", "2")
    for point in ("job.leased", "job.appended"):
        hold = Hold(folder / f"pipe of {point}")

        def kill(commands: list[Any], hold: Hold = hold) -> None:
            hold.next_process(commands[0].sentinel)
            commands[0].kill()

        killed = start_ranks(words, None, armed(f"{point}={hold.action}"), kill, program="tasks.glue")
        assert killed.exit_codes == [-signal.SIGKILL], "it ended by itself, so this proves nothing"
        hold.release()
    run(words)
    assert rows(out) == rows(ours_alone)
    assert predictions(out) == predictions(ours_alone)


def test_bad_data_on_ranks_is_told_once(folder, tmp_path):
    (tmp_path / "data" / "CoLA").mkdir(parents=True)
    for name in ("train", "dev"):
        text = (folder / "data" / "CoLA" / f"{name}.tsv").read_text()
        (tmp_path / "data" / "CoLA" / f"{name}.tsv").write_text(text.replace("\t1\t", "\t7\t", 1))
    result = launched(command(folder, tmp_path / "out", "--data-dir", str(tmp_path / "data"), "--tasks", "CoLA"))
    assert result.returncode != 0
    assert result.stderr.count("label '7', expected one of 0, 1") == 1
    assert not (tmp_path / "out" / "runs.jsonl").exists()


def test_ranks_with_other_runs_are_refused(folder, tmp_path):
    words = command(folder, tmp_path / "out", "--tasks", "CoLA")
    ended = start_ranks(words, 2, program="tasks.glue", last_arguments=["--lr", "0.25"])
    assert ended.exit_codes == [WRONG_ARGUMENTS] * 2, ended.stderr
    assert "-lr0.25-" in "".join(ended.stderr) and "".join(ended.stderr).count("run 1 is CoLA-") == 1


def test_two_ranks_train_on_fewer_rows_than_a_batch(folder):
    run(command(folder, folder / "few", "--max-train-examples", "3", "--epochs", "1", "--tasks", "CoLA"), ranks=2)
    (row,) = rows(folder / "few")
    assert (row["train_examples"], row["steps"]) == (3, 1)


OFFICIAL = {"CoLA": 1043, "SST-2": 872, "MRPC": 408, "STS-B": 1500, "RTE": 277}


def test_the_official_development_sets_are_scored_whole(folder, tmp_path):
    if not SHARED.is_file():
        pytest.skip(f"the official files are not at hand ({SHARED})")
    import tarfile

    with tarfile.open(SHARED) as archive:
        archive.extractall(tmp_path, filter="data")
    words = command(folder, tmp_path / "out", "--seeds", "1", "--epochs", "1", "--max-train-examples", "32")
    run([*words, "--data-dir", str(tmp_path / "glue"), "--tasks", *OFFICIAL])
    found = rows(tmp_path / "out")
    assert {row["task"]: row["dev_examples"] for row in found} == OFFICIAL
    for row in found:
        lines = (tmp_path / "out" / row["predictions"]).read_text().splitlines()
        assert len(lines) == 1 + OFFICIAL[row["task"]]
