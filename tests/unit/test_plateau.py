"""The plateau: the onset of curves, by definition and in the rows of docs/ladder, and the lines that a run prints."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ddrp.config import Config
from megatron_ddrp.lab.compare.rows import as_run
from megatron_ddrp.run.metrics import BELOW, WINDOW, PlateauWatch, curve_of, onset, stored_level
from megatron_ddrp.tasks.statistics import ONSET, TRAINING_LOSS

LEVEL = 7.0
STEP = WINDOW // 4
"""Tokens between two rows: the smoothed loss is the mean of four."""


def curve(*losses):
    return [((number + 1) * STEP, loss) for number, loss in enumerate(losses)]


def onset_in_loops(points, level):
    """The definition: the first tokens from which on no mean of the last `WINDOW` tokens lies above the bound.

    The very first tokens are no onset.
    """

    def mean(end):
        inside = [loss for tokens, loss in points if end - WINDOW < tokens <= end]
        return sum(inside) / len(inside)

    for tokens, _ in points:
        if all(mean(end) <= level - BELOW for end, _ in points if end >= tokens):
            return None if tokens == points[0][0] else tokens
    return None


@pytest.mark.parametrize(
    ("losses", "rows"),
    [
        ([9, 7, 7, 7, 7, 6.5], None),
        ([9, 7, 7, 7, 5, 5, 5, 5, 5, 5], 6),  # (7 + 7 + 5 + 5) / 4 is 6
        ([9, 7, 7, 7, 5, 5, 5, 5, 5, 8, 8, 8, 5, 5, 5, 5, 5], 15),  # it comes back
        ([5, 5, 5], None),  # a trained model
        ([5, 8, 8, 8, 8, 5, 5, 5, 5, 5], 8),  # one that came back
        ([9, 7, 5, 5, 5, 5, 8, 8.5], None),
        ([], None),
    ],
    ids=str,
)
def test_the_onset_is_the_first_smoothed_loss_that_stays_below(losses, rows):
    points = curve(*losses)
    assert onset(points, LEVEL) == (rows and rows * STEP) == onset_in_loops(points, LEVEL)


def ladder():
    path = Path(__file__).parents[2] / "docs" / "ladder" / "rows.jsonl"
    for line in path.read_text().splitlines():
        row = json.loads(line)
        yield row, row.get("curve") or row["curves"]["training masked-LM loss"]


def test_the_onsets_of_the_ladder_tell_the_encodings_apart():
    found = {}
    for row, points in ladder():
        assert onset(points, LEVEL) == onset_in_loops(points, LEVEL)
        if not row["check"] and not row["half"]:
            found.setdefault((row["model"], row["planned_tokens"]), []).append(onset(points, LEVEL))
    lowest, middle, highest = 4_194_304, 16_777_216, 67_108_864
    assert max(found["rope", lowest]) < min(one for one in found["ddrp", lowest] if one)
    assert max(found["rope", middle]) < min(found["ddrp", middle]) < max(found["ddrp", middle]) < 3_000_000
    for model in ("absolute", "nope", "t5"):
        assert set(found[model, lowest]) == {None}
    assert set(found["absolute", middle]) == {None}
    assert all(25_000_000 < one < 35_000_000 for one in found["absolute", highest])
    assert max(found["ddrp", highest]) < 5_000_000


def test_a_row_counts_a_run_that_never_left_with_all_its_tokens_and_no_arm_at_half_the_budget():
    row = {"run": "r", "model": "m", "encoding": "ddrp", "objective": "mlm", "seed": 1, "planned_tokens": 10**6}
    row |= {"values": {}, "tokens": 900_000, "curves": {TRAINING_LOSS: curve(9, 7, 5, 5, 5, 5)}}
    left, resting = as_run(row | {"unigram_loss": LEVEL}), as_run(row | {"unigram_loss": 4.0})
    assert (left.onset, left.values[ONSET]) == (5 * STEP, 5 * STEP)
    assert (resting.onset, resting.values[ONSET]) == (None, 900_000)
    assert ONSET not in as_run(row).values  # written by an earlier version
    assert ONSET not in as_run(row | {"unigram_loss": LEVEL, "half": True}).values
    assert ONSET not in as_run(row | {"unigram_loss": 11.0}).values  # trained weights, which were never on the plateau


def rows_of(points):
    return [{"iteration": n, "consumed_tokens": t, "lm_loss": loss} for n, (t, loss) in enumerate(points, 1)]


def lines_of(watch, points):
    return [line for row in rows_of(points) if (line := watch.line(row))]


def test_a_run_says_when_it_rests_when_it_leaves_and_when_it_comes_back():
    reached, left, back = lines_of(PlateauWatch(LEVEL), curve(9, 8, *[6.9] * 8, *[5] * 8, *[6.9] * 8))
    assert reached.startswith("the loss is down to the unigram level, 7.00: the plateau")
    assert left.startswith(f"the run has left the plateau after {12 * STEP:,} tokens")
    assert back == "the run is back on the plateau"


@pytest.mark.parametrize(
    ("losses", "count"),
    [
        ([9, 8, 8, 8], 0),
        ([6.9] * 9, 0),  # where a run begins is no news
        ([5] * 9, 0),
        ([9, *[6.9, 7.1] * 9], 1),  # noise around the level
        ([9, 8, *[6.9] * 6, *[5.9] * 5, *[6.1] * 5, *[5.9] * 5], 2),  # and below it
        ([9, 8, *[5] * 6], 2),
    ],
    ids=str,
)
def test_noise_says_nothing(losses, count):
    assert len(lines_of(PlateauWatch(LEVEL), curve(*losses))) == count


def test_rows_without_a_masked_lm_loss_are_left_out():
    rows = [{"iteration": 1, "valid_lm_loss": 3.0}, {"consumed_tokens": 5, "lm_loss": None}, {"consumed_tokens": 7}]
    assert curve_of(rows) == [] and not any(map(PlateauWatch(LEVEL).line, rows))


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
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in before))
    watch = PlateauWatch(LEVEL)
    watch.on_start(Config().replace(checkpoint={"save": str(tmp_path)}), len(before), SimpleNamespace())
    assert capsys.readouterr().out == ""
    for row in after:
        watch.on_step(row)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"the run has left the plateau after {13 * STEP:,} tokens")


def test_a_line_that_nobody_reads_ends_no_run(monkeypatch):
    """The line may be the first after the end of a terminal."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        watch = PlateauWatch(LEVEL)
        for row in rows_of(curve(9, 8, *[6.9] * 8)):
            watch.on_step(row)
        with pytest.raises(BrokenPipeError):
            print("the next line of the run, which says what to do then", flush=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # for the last flush


def test_a_folder_of_an_earlier_version_has_no_level(tmp_path):
    assert stored_level(tmp_path) is None
