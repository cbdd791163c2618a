"""metrics.jsonl: damaged lines are kept aside and told, rows after them count, and a full disk loses none."""

import json
import os
import resource

import pytest
import torch

from megatron_ddrp.checkpoint import write_state
from megatron_ddrp.config import Config
from megatron_ddrp.engine.checkpoint import Progress, Resumed
from megatron_ddrp.errors import UserError
from megatron_ddrp.run.callbacks import TensorBoard
from megatron_ddrp.run.log import MetricsLog
from megatron_ddrp.run.metrics import DAMAGED, METRICS, MetricsFile, read_rows
from megatron_ddrp.train import open_log

BAD_LINES = {
    "not-json": b'{"iteration": 2, "lo',
    "not-utf8": b'{"iteration": 2, "l\xffss": 1.0}',
    "no-object": b"[2]",
    "no-iteration": b'{"loss": 1.0}',
    "text-iteration": b'{"iteration": "2"}',
    "text": b'{"iteration": 2, "loss": "low"}',
    "nan": b'{"iteration": 2, "loss": NaN}',
    "too-large": b'{"iteration": 2, "loss": 1e999}',
    "deep": b"[" * 100_000,
    "zeros": b"\0" * 40,
}


def row(step):
    return {"iteration": step, "loss": 1.0 / step}


def write(folder, *lines):
    """Write metrics.jsonl of rows and raw lines."""
    content = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    (folder / METRICS).write_bytes(b"".join(line + b"\n" for line in content))


def steps(folder):
    """Return the steps of the rows that readers see, who must not be told of damage."""
    return [row["iteration"] for row in read_rows(folder, pytest.fail)]


@pytest.mark.parametrize("bad", BAD_LINES.values(), ids=BAD_LINES)
def test_readers_leave_a_damaged_line_out_and_say_so(bad, tmp_path):
    write(tmp_path, row(1), bad, row(3))
    told = []
    assert read_rows(tmp_path, told.append) == [row(1), row(3)]
    assert told == [f"{tmp_path / METRICS}: left out 1 damaged line"]


def test_a_notice_comes_once_however_often_the_file_is_read(tmp_path, capsys):
    write(tmp_path, b"x", row(1), b"y")
    assert read_rows(tmp_path) == read_rows(str(tmp_path)) == [row(1)]
    assert capsys.readouterr().err == f"{tmp_path / METRICS}: left out 2 damaged lines\n"


@pytest.mark.parametrize("bad", BAD_LINES.values(), ids=BAD_LINES)
def test_resuming_keeps_a_damaged_line_aside_and_every_row_up_to_the_checkpoint(bad, tmp_path):
    write(tmp_path, row(1), bad, row(3), row(4))
    told = []
    log = MetricsFile(tmp_path / METRICS, 3, told.append)
    log.write(row(4))
    log.close()
    assert steps(tmp_path) == [1, 3, 4]
    assert (tmp_path / DAMAGED).read_bytes() == bad + b"\n"
    assert told == [f"{tmp_path / METRICS}: moved 1 damaged line to {DAMAGED}"]
    MetricsFile(tmp_path / METRICS, 4, pytest.fail).close()
    assert steps(tmp_path) == [1, 3, 4]


def test_the_line_being_written_is_no_damage_to_a_reader(tmp_path):
    write(tmp_path, row(1), row(2))
    with (tmp_path / METRICS).open("ab") as stream:
        stream.write(b'{"iteration": 3, "lo')
    assert steps(tmp_path) == [1, 2]


def test_a_row_whose_line_end_is_missing_counts(tmp_path):
    write(tmp_path, row(1), row(2))
    content = (tmp_path / METRICS).read_bytes()
    (tmp_path / METRICS).write_bytes(content[:-1])
    assert steps(tmp_path) == [1, 2]
    MetricsFile(tmp_path / METRICS, 2, pytest.fail).close()
    assert (tmp_path / METRICS).read_bytes() == content


def test_a_line_separator_of_unicode_is_no_line_end(tmp_path):
    write(tmp_path, '{"iteration": 1, "a\u2028b": 2}'.encode(), row(2))
    assert steps(tmp_path) == [1, 2]


def test_no_file_has_no_rows_and_a_folder_is_refused(tmp_path):
    assert steps(tmp_path) == []
    (tmp_path / METRICS).mkdir()
    for use in (lambda: read_rows(tmp_path), lambda: MetricsFile(tmp_path / METRICS, 0, pytest.fail)):
        with pytest.raises(UserError, match="Is a directory"):
            use()


@pytest.fixture
def disk_of():
    """`disk_of(n)`: from here on no file of this process grows beyond n bytes; without n, the limit is off."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size=before[0]):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    yield limit
    limit()


def test_rows_wait_for_a_full_disk(tmp_path, disk_of):
    told = []
    log = MetricsFile(tmp_path / METRICS, 0, told.append)
    log.write(row(1))
    size = (tmp_path / METRICS).stat().st_size
    disk_of(size + 10)  # so that a part of the next row would fit
    log.write(row(2))
    log.write(row(3))
    assert (tmp_path / METRICS).stat().st_size == size, "half a line was left"
    disk_of()
    assert told == [f"{tmp_path / METRICS}: File too large; its rows wait in memory and training goes on"]
    log.write(row(4))
    log.close()
    assert told[1:] == [f"{tmp_path / METRICS}: written again, with the 2 rows that had to wait"]
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_rows_that_waited_in_vain_are_told(tmp_path, disk_of):
    told = []
    log = MetricsFile(tmp_path / METRICS, 0, told.append)
    disk_of(10)
    log.write(row(1))
    log.close()
    assert told[1:] == [f"{tmp_path / METRICS}: File too large; rows lost: 1"]


def test_a_number_that_is_not_finite_is_none(tmp_path):
    log = MetricsFile(tmp_path / METRICS, 0, pytest.fail)
    log.write({"iteration": 1, "grad_norm": float("inf")})
    log.close()
    assert read_rows(tmp_path, pytest.fail) == [{"iteration": 1, "grad_norm": None}]


@pytest.mark.parametrize(
    ("kept", "start", "interval", "missing"),
    [
        ((1, 2, 3, 4), 4, 1, None),
        ((1, 10, 20), 25, 10, None),
        ((1,), 9, 10, None),
        ((), 0, 1, None),
        ((1, 2), 4, 1, "2 up to step 4"),
        ((1, 10), 25, 10, "10 up to step 20"),
        ((), 9, 10, "0 up to step 1"),
        (None, 4, 1, "0 up to step 4"),
    ],
)
def test_rows_that_are_missing_at_a_resume_are_told(kept, start, interval, missing, tmp_path, capsys):
    if kept is not None:
        write(tmp_path, *map(row, kept))
    config = Config().replace(
        checkpoint={"save": str(tmp_path), "load": str(tmp_path)}, logging={"log_interval": interval}
    )
    with MetricsLog(config, start, active=True):
        pass
    told = f"{tmp_path / METRICS}: the rows after step {missing} are missing\n" if missing else ""
    assert capsys.readouterr().out == told


@pytest.mark.parametrize(
    ("before", "kept", "now", "missing"),
    [
        (10, (1, 10), 5, None),
        (5, (1, 5, 10, 15), 10, None),
        (5, (1, 5, 10), 10, "10 up to step 15"),
        (10, (1,), 5, "1 up to step 10"),
    ],
)
def test_rows_up_to_a_resume_were_due_at_the_interval_of_the_checkpoint(before, kept, now, missing, tmp_path, capsys):
    write(tmp_path, *map(row, kept))
    config = Config().replace(
        checkpoint={"save": str(tmp_path), "load": str(tmp_path)}, logging={"log_interval": before}
    )
    path = tmp_path / "iter_0000015"
    path.mkdir()
    write_state(path, {"iteration": 15, "config": config.to_dict()})
    with open_log(config.replace(logging={"log_interval": now}), Resumed(Progress(15), path, ()), active=True):
        pass
    told = f"{tmp_path / METRICS}: the rows after step {missing} are missing\n" if missing else ""
    assert capsys.readouterr().out == told


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("notes.txt", "Not a directory"),
        ("notes.txt/board", "Not a directory"),
        ("loop/board", "Too many levels of symbolic links"),
        ("x" * 300, "File name too long"),
    ],
    ids=["file", "below-a-file", "loop", "long"],
)
def test_a_tensorboard_folder_that_cannot_be_is_refused_before_a_run_begins(name, reason, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError) as refusal:
        TensorBoard(f"{tmp_path}/{name}")
    line = f"--tensorboard-dir {tmp_path}/{name}: cannot be written: {reason}; give a folder that can be"
    assert (str(refusal.value), refusal.value.exit_code) == (line, 2)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    TensorBoard(f"{tmp_path}/new/board")
    assert not (tmp_path / "new").exists(), "the run makes it when it starts"


def test_a_run_that_goes_on_in_another_folder_misses_no_rows(tmp_path, capsys):
    config = Config().replace(checkpoint={"save": str(tmp_path), "load": str(tmp_path / "source")})
    with MetricsLog(config, 4, active=True):
        pass
    assert not capsys.readouterr().out


def test_tensorboard_keeps_the_steps_before_a_resume_and_drops_those_after_it(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for start, steps, loss in ((0, (1, 2, 3, 4), 5.0), (2, (3,), 6.0)):  # the second run resumes after step 2
        board = TensorBoard(str(tmp_path))
        board.on_start(Config(), start, torch.nn.Linear(1, 1))
        for step in steps:
            board.on_step({"iteration": step, "loss": loss})
        board.on_end()
    read = events.EventAccumulator(str(tmp_path))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [(1, 5.0), (2, 5.0), (3, 6.0)]


def test_a_run_that_saves_goes_on_without_its_reader(tmp_path, monkeypatch):
    """The reader goes when the ssh of a host ends; the rows are in the folder."""
    for save in (tmp_path, None):
        reader, writer = os.pipe()
        os.close(reader)
        with open(writer, "w", encoding="utf-8") as stream:
            monkeypatch.setattr("sys.stdout", stream)
            config = Config().replace(checkpoint={"save": str(save) if save else None})
            with MetricsLog(config, 0, active=True) as log:
                if save is None:
                    with pytest.raises(BrokenPipeError):
                        log.say("nobody has a row of this run")
                else:
                    log.say("lost")
                    log.write({"iteration": 1, "loss": 2.0}, "on_step")
                    log.say("lost too")
            os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # for the last flush
    assert [row["iteration"] for row in read_rows(tmp_path)] == [1]
