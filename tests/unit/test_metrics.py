"""metrics.jsonl, whose rows survive damage and a full disk; the plateau of loss curves; and drawn learning curves."""

import json
import os
import re
import resource
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from megatron_ddrp.config import Config
from megatron_ddrp.run import metrics
from megatron_ddrp.run.callbacks import TensorBoard
from megatron_ddrp.run.log import MetricsLog
from megatron_ddrp.run.metrics import METRICS, MetricsFile, PlateauWatch, curve_of, onset, read_rows, smoothed
from megatron_ddrp.tasks.statistics import Score, curves_of, draw_learning_curves
from tests.refusals import refused, wrong_arguments

BAD_LINES = {"not-json": b'{"iteration": 2, "lo', "no-iteration": b'{"loss": 1.0}'}
BAD_LINES |= {"text": b'{"iteration": 2, "loss": "low"}', "nan": b'{"iteration": 2, "loss": NaN}'}
LEVEL = 7.0
STEP = metrics.WINDOW // 4
"""Tokens between two rows: the smoothed loss is the mean of four."""
LOW, HIGH = Score(0.5, 0.4, 0.6), Score(0.7, 0.6, 0.75)


def row(step):
    return {"iteration": step, "loss": 1.0 / step}


def write(folder, *lines):
    content = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    (folder / METRICS).write_bytes(b"".join(line + b"\n" for line in content))


def steps(folder):
    """Return the steps of the rows that readers see, who must not be told of damage."""
    return [row["iteration"] for row in read_rows(folder, pytest.fail)]


@pytest.mark.parametrize("bad", BAD_LINES.values(), ids=BAD_LINES)
def test_readers_leave_a_damaged_line_out_and_resuming_keeps_it_aside_and_every_row_before_it(bad, tmp_path):
    write(tmp_path, row(1), bad, row(3), row(4))
    told = []
    assert read_rows(tmp_path, told.append) == [row(1), row(3), row(4)]
    log = MetricsFile(tmp_path / METRICS, 3, told.append)
    log.write(row(4))
    log.close()
    assert steps(tmp_path) == [1, 3, 4] and (tmp_path / metrics.DAMAGED).read_bytes() == bad + b"\n"
    file = tmp_path / METRICS
    assert told == [f"{file}: left out 1 damaged line", f"{file}: moved 1 damaged line to {metrics.DAMAGED}"]
    MetricsFile(file, 4, pytest.fail).close()
    assert steps(tmp_path) == [1, 3, 4]


def test_a_notice_comes_once_however_often_the_file_is_read(tmp_path, capsys):
    write(tmp_path, b"x", row(1), b"y")
    assert read_rows(tmp_path) == read_rows(str(tmp_path)) == [row(1)]
    assert capsys.readouterr().err == f"{tmp_path / METRICS}: left out 2 damaged lines\n"


def test_lines_end_at_line_ends_alone_and_the_one_being_written_is_no_damage(tmp_path):
    write(tmp_path, row(1), row(2))
    with (tmp_path / METRICS).open("ab") as stream:
        stream.write(b'{"iteration": 3, "lo')
    assert steps(tmp_path) == [1, 2]
    write(tmp_path, row(1), row(2))
    content = (tmp_path / METRICS).read_bytes()
    (tmp_path / METRICS).write_bytes(content[:-1])
    assert steps(tmp_path) == [1, 2]
    MetricsFile(tmp_path / METRICS, 2, pytest.fail).close()
    assert (tmp_path / METRICS).read_bytes() == content
    write(tmp_path, '{"iteration": 1, "a\u2028b": 2}'.encode(), row(2))
    assert steps(tmp_path) == [1, 2]


def test_no_file_has_no_rows_and_a_folder_is_refused(tmp_path):
    assert steps(tmp_path) == []
    (tmp_path / METRICS).mkdir()
    for use in (lambda: read_rows(tmp_path), lambda: MetricsFile(tmp_path / METRICS, 0, pytest.fail)):
        refused("Is a directory", use)


@pytest.fixture
def disk_of():
    """`disk_of(n)`: from here on no file of this process grows beyond n bytes; without n, the limit is off."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size=before[0]):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    yield limit
    limit()


def test_rows_wait_for_a_full_disk_and_may_wait_in_vain(tmp_path, disk_of):
    told, file = [], tmp_path / METRICS
    log = MetricsFile(file, 0, told.append)
    log.write(row(1))
    size = file.stat().st_size
    disk_of(size + 10)  # so that a part of the next row would fit
    log.write(row(2))
    log.write(row(3))
    assert file.stat().st_size == size, "half a line was left"
    disk_of()
    assert told == [f"{file}: File too large; its rows wait in memory and training goes on"]
    log.write(row(4))
    log.close()
    assert told[1:] == [f"{file}: written again, with the 2 rows that had to wait"]
    assert steps(tmp_path) == [1, 2, 3, 4]
    file.unlink()
    log = MetricsFile(file, 0, told.append)
    disk_of(10)
    log.write(row(1))
    log.close()
    disk_of()
    assert told[3:] == [f"{file}: File too large; rows lost: 1"]


def test_a_number_that_is_not_finite_is_none(tmp_path):
    log = MetricsFile(tmp_path / METRICS, 0, pytest.fail)
    log.write({"iteration": 1, "grad_norm": float("inf")})
    log.close()
    assert read_rows(tmp_path, pytest.fail) == [{"iteration": 1, "grad_norm": None}]


def told_at_a_resume(capsys, folder, kept, start, interval, before=None, source=None):
    """Return the step after which rows are missing, as a run says it that resumes a folder; None if it says nothing."""
    if kept is not None:
        write(folder, *map(row, kept))
    folders = {"save": str(folder), "load": str(source or folder)}
    config = Config().replace(checkpoint=folders, logging={"log_interval": interval})
    with MetricsLog(config, start, True, before):
        pass
    line = capsys.readouterr().out
    found = re.fullmatch(rf"{re.escape(str(folder / METRICS))}: the rows after step (.+) are missing\n", line)
    assert bool(found) == bool(line)
    return found and found[1]


RESUMES = [
    ((1, 2, 3, 4), 4, 1, None, None),
    ((1, 10, 20), 25, 10, None, None),
    ((1,), 9, 10, None, None),
    ((), 0, 1, None, None),
    ((1, 2), 4, 1, None, "2 up to step 4"),
    ((), 9, 10, None, "0 up to step 1"),
    (None, 4, 1, None, "0 up to step 4"),
    ((1, 10), 15, 5, 10, None),
    ((1, 5, 10), 15, 10, 5, "10 up to step 15"),
]


@pytest.mark.parametrize(("kept", "start", "interval", "before", "missing"), RESUMES)
def test_rows_that_are_missing_at_a_resume_are_told(kept, start, interval, before, missing, tmp_path, capsys):
    """Rows up to a resume were due at the interval `before` of the checkpoint; another folder misses none."""
    assert told_at_a_resume(capsys, tmp_path, kept, start, interval, before) == missing
    (tmp_path / "other").mkdir()
    assert told_at_a_resume(capsys, tmp_path / "other", None, 4, 1, source=tmp_path) is None


def test_a_tensorboard_folder_that_cannot_be_is_refused_before_a_run_begins(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for folder in (tmp_path / "notes.txt", tmp_path / "notes.txt" / "board"):
        line = f"--tensorboard-dir {folder}: cannot be written: Not a directory; give a folder that can be"
        wrong_arguments(f"^{line}$", TensorBoard, str(folder))
    TensorBoard(f"{tmp_path}/new/board")
    assert not (tmp_path / "new").exists(), "the run makes it when it starts"


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


@contextmanager
def no_reader(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        yield
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # for the last flush


def test_a_run_that_saves_goes_on_without_its_reader(tmp_path, monkeypatch):
    """The reader goes when the ssh of a host ends; the rows are in the folder."""
    saving = Config().replace(checkpoint={"save": str(tmp_path)})
    with no_reader(monkeypatch), MetricsLog(saving, 0, active=True) as log:
        log.say("lost")
        log.write({"iteration": 1, "loss": 2.0}, "on_step")
        log.say("lost too")
    with no_reader(monkeypatch), MetricsLog(Config(), 0, active=True) as log, pytest.raises(BrokenPipeError):
        log.say("nobody has a row of this run")
    assert steps(tmp_path) == [1]


def curve(*losses):
    return [((number + 1) * STEP, loss) for number, loss in enumerate(losses)]


ONSETS = [
    ([9, 7, 7, 7, 7, 6.5], None),
    ([9, 7, 7, 7, 5, 5, 5, 5, 5, 5], 6),  # (7 + 7 + 5 + 5) / 4 is 6
    ([9, 7, 7, 7, 5, 5, 5, 5, 5, 8, 8, 8, 5, 5, 5, 5, 5], 15),  # it comes back
    ([5, 5, 5], None),  # a trained model
    ([5, 8, 8, 8, 8, 5, 5, 5, 5, 5], 8),  # one that came back
    ([9, 7, 5, 5, 5, 5, 8, 8.5], None),
    ([], None),
]


@pytest.mark.parametrize(("losses", "rows"), ONSETS, ids=str)
def test_the_onset_is_the_first_smoothed_loss_that_stays_below(losses, rows):
    points = curve(*losses)
    assert onset(points, LEVEL) == (rows and rows * STEP)


def test_a_point_weighs_as_much_as_the_tokens_that_it_is_a_mean_of():
    """A run that logs its first steps one by one, and then more rarely, leaves when its tokens do."""
    points = [(1_000 * n, 9.0) for n in range(1, 51)] + [(60_000, 5.0), (120_000, 5.0), (180_000, 5.0)]
    assert [loss for _, loss in smoothed(points)][-1] == pytest.approx((50 * 9 + 130 * 5) / 180)
    assert onset(points, LEVEL + 0.2) == 180_000
    assert "has left the plateau after 180,000 tokens" in lines_of(PlateauWatch(LEVEL + 0.2), points)[-1]
    branch = [(5_000_000, 9.0), (5_150_000, 5.0), (5_210_000, 5.0)]
    assert [loss for _, loss in smoothed(branch)] == [9.0, pytest.approx((4 * 9 + 3 * 5) / 7), 5.0]


def rows_of(points):
    return [{"iteration": n, "consumed_tokens": t, "lm_loss": loss} for n, (t, loss) in enumerate(points, 1)]


def lines_of(watch, points):
    return [line for row in rows_of(points) if (line := watch.line(row))]


def test_a_run_says_when_it_rests_when_it_leaves_and_when_it_comes_back():
    reached, left, back = lines_of(PlateauWatch(LEVEL), curve(9, 8, *[6.9] * 8, *[5] * 8, *[6.9] * 8))
    assert reached.startswith("the loss is down to the unigram level, 7.00: the plateau")
    assert left.startswith(f"the run has left the plateau after {12 * STEP:,} tokens")
    assert back == "the run is back on the plateau"


NOISE = [
    ([9, 8, 8, 8], 0),
    ([6.9] * 9, 0),  # where a run begins is no news
    ([5] * 9, 0),
    ([9, *[6.9, 7.1] * 9], 1),  # noise around the level
    ([9, 8, *[6.9] * 6, *[5.9] * 5, *[6.1] * 5, *[5.9] * 5], 2),  # and below it
    ([9, 8, *[5] * 6], 2),
]


@pytest.mark.parametrize(("losses", "count"), NOISE, ids=str)
def test_noise_says_nothing(losses, count):
    assert len(lines_of(PlateauWatch(LEVEL), curve(*losses))) == count


def test_rows_without_a_masked_lm_loss_and_folders_of_an_earlier_version_have_no_level_and_no_gap(tmp_path):
    rows = [{"iteration": 1, "valid_lm_loss": 3.0}, {"consumed_tokens": 5, "lm_loss": None}, {"consumed_tokens": 7}]
    assert curve_of(rows) == [] and not any(map(PlateauWatch(LEVEL).line, rows))
    assert metrics.stored_level(tmp_path) is metrics.stored_gap(tmp_path) is None
    metrics.store_level(tmp_path, 6.5)
    assert (metrics.stored_level(tmp_path), metrics.stored_gap(tmp_path)) == (6.5, None)
    metrics.store_level(tmp_path, 6.5, -0.01)
    assert (metrics.stored_level(tmp_path), metrics.stored_gap(tmp_path)) == (6.5, -0.01)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), None])
def test_a_row_without_a_finite_loss_changes_nothing(odd):
    """A step may diverge, before the onset, at it or after it."""
    losses = [9, 8, *[6.9] * 8, *[5] * 8]
    for place in range(len(losses) + 1):
        with_it = curve(*losses[:place], odd, *losses[place:])
        without = [point for point in with_it if point[1] is not odd]
        assert lines_of(PlateauWatch(LEVEL), with_it) == lines_of(PlateauWatch(LEVEL), without)
        assert curve_of(rows_of(with_it)) == without


def test_a_resumed_run_knows_where_it_was(tmp_path, capsys):
    before, after = rows_of(curve(9, 8, *[6.9] * 8)), rows_of(curve(9, 8, *[6.9] * 8, 6.9, 5, 5, 5, 5))[10:]
    write(tmp_path, *before)
    watch = PlateauWatch(LEVEL)
    watch.on_start(Config().replace(checkpoint={"save": str(tmp_path)}), len(before), SimpleNamespace())
    assert capsys.readouterr().out == ""
    for row in after:
        watch.on_step(row)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"the run has left the plateau after {13 * STEP:,} tokens")


def test_a_line_that_nobody_reads_ends_no_run(monkeypatch):
    """The line may be the first after the end of a terminal."""
    with no_reader(monkeypatch):
        watch = PlateauWatch(LEVEL)
        for row in rows_of(curve(9, 8, *[6.9] * 8)):
            watch.on_step(row)
        with pytest.raises(BrokenPipeError):
            print("the next line of the run, which says what to do then", flush=True)


def test_checkpoints_of_one_run_have_a_curve_and_others_draw_nothing() -> None:
    scores = {"runs/a/iter_0000200": HIGH, "runs/a/iter_0000100": LOW, "runs/b/iter_0000100": LOW, "bert-base": HIGH}
    scores |= {"iter_0000002": HIGH, "iter_0000001": LOW, "runs/c/iter_0000100, random weights": LOW}
    assert curves_of(scores) == {"runs/a": [(100, LOW), (200, HIGH)], ".": [(1, LOW), (2, HIGH)]}
    assert draw_learning_curves([("RTE", {"a/iter_0000001": LOW, "b": HIGH})], "none") is None


def test_a_panel_shows_each_run_with_its_bands() -> None:
    pytest.importorskip("matplotlib")
    scores = {"a/iter_0000001": LOW, "a/iter_0000002": HIGH, "b/iter_0000001": HIGH, "b/iter_0000003": LOW}
    of_a = {name: score for name, score in scores.items() if name[0] == "a"}
    panels = [("CoLA", scores), ("RTE", of_a), ("QQP", {}), ("MNLI", scores), ("WNLI", scores)]
    figure = draw_learning_curves(panels, "seeds")
    axes = [axis for axis in figure.axes if axis.axison]
    assert [axis.get_title() for axis in axes] == ["CoLA", "RTE", "MNLI", "WNLI"]
    first, second = axes[0].lines
    assert [list(values) for values in first.get_data()] == [[1, 2], [50, 70]]
    assert list(second.get_xdata()) == [1, 3] and len(axes[1].lines) == 1
    ends = {(x, round(y)) for x, y in axes[0].collections[0].get_paths()[0].vertices}
    assert ends == {(1, 40), (1, 60), (2, 60), (2, 75)}
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b", "seeds"]
