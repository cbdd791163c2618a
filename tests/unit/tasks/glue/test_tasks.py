"""The table of tasks against the official release, where that is at hand."""

import tarfile
from pathlib import Path

import pytest

from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.glue import PAPER_TASKS, TASKS, read_examples


def test_the_paper_averages_eight_tasks_without_wnli():
    assert PAPER_TASKS == ("RTE", "STS-B", "MRPC", "CoLA", "SST-2", "QNLI", "QQP", "MNLI")
    assert "WNLI" in TASKS


@pytest.mark.parametrize("task", TASKS.values(), ids=list(TASKS))
def test_rows_are_consistent(task):
    assert task.metric in KINDS[task.kind].metrics
    assert (task.kind == "regression") == (task.label_range is not None) == (not task.labels)
    assert list(task.labels) == sorted(task.labels)
    if task.columns is not None:
        assert {*task.text_columns, task.label_column} <= set(task.columns)


OFFICIAL = {
    ("CoLA", "train.tsv"): 8551,
    ("CoLA", "dev.tsv"): 1043,
    ("SST-2", "train.tsv"): 67349,
    ("SST-2", "dev.tsv"): 872,
    ("MRPC", "train.tsv"): 3668,
    ("MRPC", "dev.tsv"): 408,
    ("STS-B", "train.tsv"): 5749,
    ("STS-B", "dev.tsv"): 1500,
    ("RTE", "train.tsv"): 2490,
    ("RTE", "dev.tsv"): 277,
    ("QNLI", "dev.tsv"): 5463,
}


ARCHIVE = Path(__file__).resolve().parents[5] / "shared" / "data" / "glue.tar.xz"


@pytest.fixture(scope="module")
def official_files(tmp_path_factory):
    if not ARCHIVE.is_file():
        pytest.skip(f"the official files are not at hand ({ARCHIVE})")
    folder = tmp_path_factory.mktemp("official")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder / "glue"


def test_official_row_counts(official_files):
    def count(name, file):
        path = official_files / name / file
        return len(read_examples(TASKS[name], path, path.read_bytes(), TASKS[name].broken_rows))

    found = {(name, file): count(name, file) for name, file in OFFICIAL}
    assert found == OFFICIAL
    assert all(TASKS[name].dev_examples == rows for (name, file), rows in OFFICIAL.items() if file == "dev.tsv")
