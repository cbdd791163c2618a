"""runs.jsonl, files of predictions, and the table: medians, grid points, undefined scores, intervals."""

import json
import statistics
from dataclasses import asdict, replace

import numpy as np
import pytest

from megatron_ddrp.tasks.finetune import runs
from megatron_ddrp.tasks.finetune import tables as figure
from megatron_ddrp.tasks.finetune.metrics import drawn_rows
from megatron_ddrp.tasks.finetune.options import Search
from megatron_ddrp.tasks.finetune.runs import Items, RunStore, TuningRun, best_cells, read_predictions
from megatron_ddrp.tasks.finetune.tables import all_tables, differences, gains, page, summary, write_report
from megatron_ddrp.tasks.glue import GLUE, PAPER_ROWS, PAPER_TASKS, TASKS, main
from tests.refusals import refused
from tests.unit.tasks.conftest import finished, scored_folder


def row(task="RTE", score=0.5, seed=1, lr=1e-5, load="base", **more):
    run = TuningRun(task, 16, lr, 4, seed, 128, encoder="e" * 16, data="d" * 16, micro_batch_size=8)
    row = asdict(run) | {"load": load, "metric": TASKS[task].metric, "score": score or 0.0, "undefined": score is None}
    return row | {"best_epoch_score": score or 0.0, "train_examples": 2490, "dev_examples": 277} | more


def table(rows):
    cells = best_cells(rows, GLUE.order)
    return page(cells, GLUE, all_tables(cells, GLUE, Items(GLUE)))


def test_the_runs_that_count():
    scores = (0.1, 0.9, 0.5, 0.6, 0.6, 0.2)  # of three seeds at two points
    two_points = [row(score=score, seed=n % 3, lr=(1e-5, 2e-5)[n // 3]) for n, score in enumerate(scores)]
    for rows, expected in (
        # New weights in an old folder are another row, and one encoder under two paths is one.
        ([row(), row(score=0.7, encoder="f" * 16)], {"base (eeeeeeee)": [0.5], "base (ffffffff)": [0.7]}),
        ([row(load="runs/a"), row(score=0.7, seed=2, load="/data/runs/a")], {"/data/runs/a": [0.5, 0.7]}),
        # Other data, fewer rows, the same run in two folders.
        ([row(score=0.9), row(score=0.1, data="x")], {"base": [0.1]}),
        ([row(score=0.9, seed=2), row(score=0.1, max_train_examples=100)], {"base": [0.1]}),
        ([row(), row()], {"base": [0.5]}),
        # All seeds beat a lucky one; the best median.
        ([row(seed=seed) for seed in range(5)] + [row(score=0.9, lr=3e-5)], {"base": [0.5] * 5}),
        (two_points, {"base": [0.6, 0.6, 0.2]}),
    ):
        cells, text = best_cells(rows), table(rows)
        assert {name: tasks["RTE"].scores for name, tasks in cells.items()} == expected
        for name, scores in expected.items():
            assert f"| {name} | {100 * cells[name]['RTE'].median:.2f} |" in text
            assert cells[name]["RTE"].median == statistics.median(scores)


def test_runs_under_other_conditions_than_most_are_left_out_and_counted():
    """One quick run on fewer rows must not hide five on all, in any order of the folders."""
    whole, quick = [row(score=0.9, seed=seed) for seed in range(5)], [row(score=0.6, max_train_examples=100)]
    for rows in (whole + quick, quick + whole):
        cells = best_cells(rows)["base"]["RTE"]
        assert cells.scores == [0.9] * 5 and cells.left_out == 1
        assert "RTE: runs on other files, row lengths or row counts are left out: 1 of base" in table(rows)
    assert "are left out" not in table(whole) and best_cells(quick)["base"]["RTE"].left_out == 0


def test_undefined_scores_count_as_0_and_are_marked():
    rows = [row("CoLA", score, seed) for seed, score in enumerate((None, 0.2, 0.4))]
    cells, text = best_cells(rows), table(rows)
    assert cells["base"]["CoLA"].median == pytest.approx(0.2)
    assert "| base | 20.00 (1 undefined) |" in text
    assert "| base | CoLA | matthews | 20.00 | 0.00 to 40.00 |  | 20.00 | 3 | 1 |" in text
    assert summary(cells, GLUE, Items(GLUE))["encoders"]["base"]["tasks"]["CoLA"]["undefined"] == 1
    assert "| base | 0.00 (1 undefined) |" in table([row("CoLA", None)])
    assert best_cells([row("CoLA", None), row("CoLA", 0.0, lr=2e-5)])["base"]["CoLA"].undefined == 0
    rows = [row("CoLA", score, seed) for seed, score in enumerate((0.1, None, 0.3))]
    rows += [row("CoLA", 0.1, seed, load="r", encoder="r") for seed in range(3)]
    assert differences(best_cells(rows), Items(GLUE))[0].seeds.values == pytest.approx([0.0, -0.1, 0.2])


def test_collapsed_seeds_count_in_the_choice_of_the_grid_point():
    for points, expected in (
        ({1e-5: (0.50, None, None, None, None), 2e-5: (0.45,) * 5}, 2e-5),  # one seed at 0.50 beside four collapsed
        ({1e-5: (0.50, 0.50, 0.50, None, None), 2e-5: (0.45,) * 5}, 1e-5),
        ({1e-5: (-0.1, -0.1, -0.1), 2e-5: (None, None, None)}, 2e-5),  # worse than a constant guess
    ):
        rows = [row("CoLA", score, seed, lr) for lr, scores in points.items() for seed, score in enumerate(scores)]
        assert best_cells(rows)["base"]["CoLA"].rows[0]["lr"] == expected


def test_what_stands_beside_a_score_and_names_are_shown_and_not_run():
    cells = best_cells([row(beside={"em": 0.3, "own": 0.1}), row(seed=2, beside={"em": 0.4})])
    assert cells["base"]["RTE"].beside == {"em": [0.3, 0.4]}
    rows = [row("MNLI", 0.5, other_scores={"dev_mismatched": 0.25}, other_undefined=[])]
    assert "| base | MNLI (dev_mismatched) | accuracy | 25.00 |" in table(rows)
    rows = [row(score=0.4 + seed / 10, seed=seed, load=load, encoder=load) for seed in (1, 2) for load in ("<i>|", "b")]
    assert table(rows).count(r"&lt;i&gt;\|") == 3


def full(seed=1, mismatched=0.9):
    """Runs of all tasks of the paper; the second file of MNLI has a score of its own."""
    of_mnli = {"other_scores": {"dev_mismatched": mismatched}, "other_undefined": []}
    scores = [(task, 0.1 * number, of_mnli if task == "MNLI" else {}) for number, task in enumerate(PAPER_TASKS)]
    return [row(task, score, seed, **more) for task, score, more in scores]


def test_averages_of_8_and_9_columns_need_all_of_them_and_are_never_mixed():
    def average(rows):
        return GLUE.means(best_cells(rows)["base"])["average of 8"]

    assert GLUE.means(best_cells(full())["base"]) == pytest.approx({"average of 8": 0.35, "average of 9": 3.7 / 9})
    rows = [{k: v for k, v in row.items() if k != "other_scores"} for row in full()]
    assert GLUE.means(best_cells(rows)["base"])["average of 9"] is None
    text = table(full())
    assert "| encoder | RTE | STS-B | MRPC | CoLA | SST-2 | QNLI | QQP | MNLI | average of 8 | average of 9 |" in text
    assert "| base | MNLI (mean of both) | accuracy | 80.00 |" in text
    rows = [row(task, 0.1 * number) for number, task in enumerate(PAPER_TASKS)]
    assert average(rows) == average([*rows, row("WNLI", 1.0)]) == pytest.approx(0.35)
    assert average(rows[1:]) is None
    assert "average of 8 |\n| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n" not in table(rows[1:])
    assert average([*rows[:3], row("CoLA", None), *rows[4:]]) == pytest.approx(0.35 - 0.3 / 8)


def test_averages_are_those_of_medians_over_the_seeds():
    """The averages are neither those of a single seed nor means."""
    by_seed = {1: (0.2, 0.9), 2: (0.9, 0.2), 3: (0.1, 0.8), 4: (0.4, 0.5)}
    rows = [one | {"score": score} for seed, (score, other) in by_seed.items() for one in full(seed, mismatched=other)]
    expected = {"average of 8": 0.3, "average of 9": (8 * 0.3 + 0.65) / 9}
    assert GLUE.means(best_cells(rows)["base"]) == pytest.approx(expected)


def test_the_difference_is_the_mean_over_the_common_tasks_paired_by_seed():
    rows = []
    for seed, (first, second) in enumerate(((0.5, 0.4), (0.7, 0.5), (0.6, 0.5))):
        rows += [row("RTE", first, seed), row("CoLA", 0.2, seed)]
        rows += [row(t, s, seed, load="r", encoder="r") for t, s in (("RTE", second), ("CoLA", 0.1), ("MRPC", 0.9))]
    (found,) = differences(best_cells(rows), Items(GLUE))
    assert (found.first, found.second, found.tasks) == ("base", "r", ["RTE", "CoLA"])
    assert found.seeds.values == pytest.approx([0.1, 0.15, 0.1])
    assert "## Differences" in table(rows)


def test_runs_on_fewer_training_rows_have_no_difference_and_shorter_rows_are_named():
    few = {"load": "few", "encoder": "f", "max_train_examples": 20, "train_examples": 20}
    short = {"load": "short", "encoder": "s", "max_seq_length": 16}
    rows = [row(score=0.5, seed=seed, **more) for seed in (1, 2) for more in ({}, few, short)]
    assert [(pair.first, pair.second) for pair in differences(best_cells(rows), Items(GLUE))] == [("base", "short")]
    text = table(rows)
    assert "RTE: few had 20 training rows, base 2,490; the scores are not comparable" in text
    assert "RTE: short read rows of up to 16 pieces, base of up to 128; the differences include this" in text
    assert "| epochs | row length | train examples |" in text
    assert "| 4 | 16 | 2490 | 277 |" in text


def random_twin(task, score, seed=1, **more):
    return row(task, score, seed, load="base, random weights", encoder="r" * 16, **more)


def test_one_seed_tells_what_pretraining_gains_under_equal_conditions():
    rows = [row("RTE", 0.7), row("MRPC", 0.6), random_twin("RTE", 0.55), row("RTE", 0.9, load="other", encoder="o")]
    ((*_, difference),) = gains(best_cells(rows))
    assert difference == pytest.approx(0.15)
    assert "| base | RTE | accuracy | 70.00 | 55.00 | +15.00 |" in table(rows)
    (found,) = summary(best_cells(rows), GLUE, Items(GLUE))["gains"]
    assert (found["task"], found["pretrained"], found["random"]) == ("RTE", 0.7, 0.55)
    assert "against random weights" not in table(rows[:2])
    assert gains(best_cells([row("RTE", 0.7), random_twin("RTE", 0.5)]))
    assert not gains(best_cells([row("RTE", 0.7), random_twin("RTE", 0.5, max_train_examples=100)]))
    for own, of_twin in ((None, 0.1), (0.4, None)):
        rows = [row("CoLA", own), random_twin("CoLA", of_twin)]
        ((*_, difference),) = gains(best_cells(rows))
        assert difference is None
        line = next(line for line in table(rows).splitlines() if line.startswith("| base | CoLA | matthews |"))
        assert "(1 undefined)" in line and line.endswith("| undefined |")


def test_the_papers_rows_are_marked_and_average_as_printed_and_its_runs_are_480_a_checkpoint():
    for name, scores, average_of_8 in PAPER_ROWS:
        assert statistics.fmean(scores) == pytest.approx(average_of_8, abs=0.011), name
    text = table([row(dev_examples=21)])
    assert "(paper)" not in text, "scores on other data are not for the same table"
    assert "| 21 (official: 277) |" in text
    text = table([row()])
    assert "| DDRP (MTH) 1M steps (paper) | 75.09 |" in text
    assert text.index("Scores printed in the paper") > text.index("| base |")
    assert len(Search().points) * Search().seeds * 8 == 480
    assert Search(grid="quick").points == (runs.Point(32, 3e-5, 4),)


def test_the_report_is_text_numbers_and_a_figure_and_names_what_is_below_a_constant_guess(tmp_path):
    text = write_report({tmp_path: full() + full(2)}, tmp_path, GLUE)
    assert (tmp_path / "table.md").read_text() in text
    data = json.loads((tmp_path / "table.json").read_text())
    assert data["encoders"]["base"]["tasks"]["STS-B"]["scores"] == [0.1, 0.1]
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")
    tables = {path.name for path in (tmp_path / "tables").iterdir()}
    assert tables == {f"{name}.{ending}" for name in ("scores", "runs", "paper") for ending in ("csv", "tex")}
    folder = scored_folder(tmp_path / "out", [1 - LABELS + 0.1 * LABELS], "STS-B")
    rows = [row | {"folder": str(folder)} for row in RunStore(folder / "runs.jsonl")]
    assert Items(GLUE).guess(best_cells(rows)["e"]["STS-B"]) == 0.0
    assert "-100.00 (below a constant guess)" in write_report({folder: rows}, tmp_path / "table", GLUE)


def drawn(rows, title="GLUE"):
    """Return the figure of some rows."""
    cells = best_cells(rows, GLUE.order)
    return figure.draw(cells, runs.task_order(cells, GLUE.order), title)


def test_an_undefined_score_is_a_cross_at_the_edge_and_not_a_dot_at_0_and_the_legend_says_as_what_it_counts():
    (axes,) = drawn([row(score=score, seed=seed) for seed, score in enumerate((None, 0.8, 0.9))]).axes
    dots, cross = axes.lines
    assert list(dots.get_ydata()) == [80, 90]
    assert cross.get_marker() == "x" and list(cross.get_ydata()) == [figure.BOTTOM]
    assert cross.get_transform() == axes.get_xaxis_transform()
    assert 60 < axes.get_ylim()[0] < 80
    undefined = [row(score=None), row(score=0.8, seed=2)]
    worst = [row("CoLA", -1.0, undefined=True), row("CoLA", -0.5, seed=2)]
    for rows, value in ((undefined, "0"), (worst, "-100"), (undefined + worst, "-100 or 0")):
        (legend,) = drawn(rows).legends
        assert legend.get_texts()[-1].get_text() == f"undefined, counts as {value}"


def test_the_figure_has_its_whole_title_and_short_names():
    title = "Development scores of a task with a name that is far longer than any figure of one task is wide"
    picture = drawn([row(load=f"/data/runs/{name}/export", encoder=name) for name in ("ddrp", "bert")], title)
    (axes,), (legend,) = picture.axes, picture.legends
    assert axes.get_title().replace("\n", " ") == title and "\n" in axes.get_title()
    assert [text.get_text() for text in legend.get_texts()] == ["ddrp", "bert", "seed", "median"]


def test_a_cell_has_only_the_runs_that_were_asked_for_if_there_are_any():
    old = [row(score=0.7, seed=seed) for seed in (1, 2, 3)]
    new = [row(score=0.2, seed=seed, lr=2e-5) for seed in (1, 2)]
    beside = [row("CoLA", 0.3), row("CoLA", 0.4, lr=2e-5), row(score=0.6, load="other", encoder="o" * 16)]
    rows = [*old, *new, *beside]
    assert best_cells(rows)["base"]["RTE"].scores == [0.7] * 3
    cells = best_cells(rows, asked=map(TuningRun.of_row, new))
    assert cells["base"]["RTE"].scores == [0.2] * 2 and cells["base"]["RTE"].rows[0]["lr"] == 2e-5
    assert (cells["base"]["CoLA"].scores, cells["other"]["RTE"].scores) == ([0.4], [0.6])
    assert best_cells(rows, asked=[TuningRun.of_row(old[0])])["base"]["RTE"].scores == [0.7]
    assert best_cells(rows, asked=[TuningRun.of_row(row(lr=9.0))])["base"]["RTE"].scores == [0.7] * 3  # not done yet
    rows = [row(score=0.2, data="a"), row(score=0.7, data="b")]
    assert best_cells(rows, asked=[TuningRun.of_row(rows[0])])["base"]["RTE"].scores == [0.2]


def test_encoders_with_other_files_are_not_compared_in_silence():
    rows = [row(score=0.5, seed=seed, data="a") for seed in (1, 2)]
    alike = [row(score=0.6, seed=seed, data="a", load="new", encoder="f") for seed in (1, 2)]
    unlike = [one | {"data": "b"} for one in alike]
    assert len(differences(best_cells(rows + alike), Items(GLUE))) == 1
    assert "are not comparable" not in table(rows + alike)
    assert "| base | new | 1 | 2 | -10.00 | equal seeds: no spread | exploratory |\n" in table(rows + alike)
    assert not differences(best_cells(rows + unlike), Items(GLUE))
    assert "RTE: new had other files, labels or another metric than base" in table(rows + unlike)


ROWS = 60
LABELS = np.arange(ROWS) % 2.0


def test_the_table_has_intervals_over_items_and_words_as_far_as_the_predictions_are_known(tmp_path, monkeypatch):
    """Three encoders with three seeds: two are right in about 90 % of the rows, one in 30 %."""
    stores, samples = {}, {}
    for name, share, first in (("good", 0.9, 0), ("alike", 0.9, 3), ("bad", 0.3, 6)):
        draws = [np.random.default_rng(seed).random(ROWS) for seed in range(first, first + 3)]
        found = [np.where(draw < share, LABELS, 1 - LABELS) for draw in draws]
        folder = scored_folder(tmp_path / name, found, "RTE", encoder=name)
        stores[folder] = RunStore(folder / "runs.jsonl")
        drawn = drawn_rows("RTE", ROWS)  # [samples, rows]; the shares of right rows are `[seeds, samples]`
        samples[name] = np.array([[np.repeat(one == LABELS, counts).mean() for counts in drawn] for one in found])

    def told():
        return json.loads((tmp_path / "out" / "table.json").read_text())

    def interval(shares):
        return pytest.approx(np.quantile(shares, (0.025, 0.975)).tolist())

    text = write_report(stores, tmp_path / "out", GLUE)
    good, alike, bad = samples.values()
    cell, judgements = told()["encoders"]["good"]["tasks"]["RTE"], ["not told apart", "better", "better"]
    assert cell["over_items"] == interval(np.median(good, axis=0)) and cell["constant_guess"] == 0.5
    same, far, _ = told()["differences"]
    assert same["over_items"] == interval((good - alike).mean(axis=0))
    assert far["over_items"] == interval((good - bad).mean(axis=0))
    assert [pair["judgement"] for pair in told()["differences"]] == judgements
    assert "(below a constant guess) |" in text and text.count("below a constant guess") == 1
    assert "| (constant guess) | 50.00 |" in text
    assert ",better\n" in (tmp_path / "out" / "tables" / "differences.csv").read_text()
    cell = best_cells(row | {"folder": str(folder)} for folder, store in stores.items() for row in store)["good"]["RTE"]
    assert Items(GLUE).of_cell(cell)
    with monkeypatch.context() as patched:
        patched.setattr(runs, "MOST_RESAMPLED", ROWS - 1)
        assert Items(GLUE).of_cell(cell) is None, "a file of too many rows has no interval"
    folder, store = next(iter(stores.items()))
    (folder / "predictions" / f"{TuningRun.of_row(next(iter(store))).name}.tsv").unlink()
    write_report(stores, tmp_path / "out", GLUE)
    assert [pair["over_items"] is None for pair in told()["differences"]] == [True, True, False]
    assert told()["encoders"]["good"]["tasks"]["RTE"]["over_items"] is None
    assert [pair["judgement"] for pair in told()["differences"]] == judgements


@pytest.fixture
def out(tmp_path):
    return scored_folder(tmp_path / "out", [[0, 1, 0, 0], [1, 1, 0, 1], [1, 1, 1, 1]])


def report(out, capsys):
    """(exit code, standard error, table.md) of `--report`."""
    code = main(["--report", str(out), "--output-dir", str(out.parent / "table")])
    return code, capsys.readouterr().err, (out.parent / "table" / "table.md").read_text()


def test_whole_lines_are_shown_with_and_without_sums_and_a_changed_one_is_left_out_and_named(out, capsys):
    """Earlier versions wrote no sums, and later ones a sum of the predictions."""
    code, said, text = report(out, capsys)
    assert (code, said) == (0, "") and "Damage" not in text
    assert "| e | CoLA | matthews | 57.74 | 0.00 to 57.74 | 0.00 to 100.00 | 57.74 | 3 | 1 |" in text
    path = out / "runs.jsonl"
    content = path.read_text()
    own = [{k: v for k, v in json.loads(line).items() if k != "crc32"} for line in content.splitlines()]
    for more in ({}, {"predictions_crc32": "00000000"}):
        path.write_text("".join(json.dumps(row | more) + "\n" for row in own))
        assert report(out, capsys) == (0, "", text)
    assert '"score": 0.577' in content
    path.write_text(content.replace('"score": 0.577', '"score": 0.977', 1))
    code, said, text = report(out, capsys)
    assert code == 1 and f"{path}, line 1: changed since it was written" in said and len(said.splitlines()) == 1
    assert "| 2 | 1 |" in text and "## Damage found" in text


def test_a_report_covers_several_folders_and_one_without_runs_is_refused(tmp_path):
    folders = [scored_folder(tmp_path / name, [[0, 1, 0, 0]], encoder=name) for name in ("one", "two")]
    words = ["--report", *map(str, folders), "--output-dir", str(tmp_path / "both")]
    main(words)
    text = (tmp_path / "both" / "table.md").read_text()
    assert "| one | CoLA |" in text and "| two | CoLA |" in text
    refused("no runs.jsonl in it", main, ["--report", str(tmp_path), *words[-2:]])
    (folders[1] / "runs.jsonl").write_text("")
    refused("two: no finished run in its runs.jsonl", main, words)


def test_damaged_predictions_are_refused_and_half_a_line_is_none(out, capsys):
    (path,) = (out / "predictions").glob("*-s1-*.tsv")
    content = path.read_text()
    for old, new, reason in (
        ("dev\t1\t", "dev\t7\t", "dev: row 7 is at the place of row 1"),
        ("\tprediction\t", "\tguess\t", "its first line is"),
        *(("dev\t0\t0\t0", "dev\t0\tx\t0", "x"), ("dev\t0\t0\t0", "dev\t0", "not enough values")),
    ):
        assert old in content
        with pytest.raises(ValueError, match=reason):
            read_predictions(content.replace(old, new, 1).encode(), TASKS["CoLA"])
    with (out / "runs.jsonl").open("a") as stream:
        stream.write('{"task": "Co')
    code, said, _ = report(out, capsys)
    assert code == 0 and len(said.splitlines()) == 1 and "its last line is cut off" in said


def test_predictions_are_read_as_they_were_written(tmp_path):
    for task in ("CoLA", "STS-B", "MNLI"):
        classes = len(TASKS[task].labels)
        values = np.arange(7.0) % classes if classes else np.linspace(0, 5.0, 7)
        predicted = values[::-1].copy()
        predicted[2] = np.nan
        sides = {"a": (values, predicted), "b": (values[:3], values[:3])}
        runs.write_predictions(tmp_path / "x.tsv", TASKS[task], sides)
        found = read_predictions((tmp_path / "x.tsv").read_bytes(), TASKS[task])
        assert list(found) == ["a", "b"]
        for name, side in sides.items():
            np.testing.assert_array_equal(found[name], side)


RUN = TuningRun("RTE", 16, 1e-5, 4, 1, max_seq_length=128, encoder="aa", data="bb", micro_batch_size=8)


def test_finished_runs_are_found_again_and_an_unfinished_last_line_is_cut_off(tmp_path):
    store = RunStore(tmp_path / "out" / "runs.jsonl")
    assert RUN.name not in store
    store.append(finished(RUN))
    others = ({"seed": 2}, {"lr": 2e-5}, {"encoder": "ab"}, {"data": "c"})
    for known in (store, RunStore(store.path)):
        assert RUN.name in known and not any(replace(RUN, **other).name in known for other in others)
    whole = store.path.read_bytes()
    store.path.write_bytes(whole + whole[:20])
    store = RunStore(store.path)
    assert len(store.rows) == 1
    store.append(finished(replace(RUN, seed=2)))
    assert [row["seed"] for row in RunStore(store.path)] == [1, 2]


def test_lines_of_earlier_versions_count_an_undefined_score_as_0(tmp_path):
    """They had null for it, left it out of the best epoch, and carried no sum."""
    path, keys = tmp_path / "runs.jsonl", ("score", "undefined", "best_epoch_score")
    old = finished(RUN) | {"score": None, "best_epoch_score": None, "best_epoch": None, "epoch_scores": [None, None]}
    del old["undefined"]
    other = finished(replace(RUN, seed=2)) | {"score": -0.1, "best_epoch_score": -0.1, "epoch_scores": [-0.1, None]}
    other |= {"other_scores": {"dev_mismatched": None}}
    path.write_text("".join(json.dumps(row) + "\n" for row in (old, other)))
    store = RunStore(path)
    assert [[row[key] for key in keys] for row in store] == [[0.0, True, 0.0], [-0.1, False, 0.0]]
    _, second = store
    assert (second["other_scores"], second["other_undefined"]) == ({"dev_mismatched": 0.0}, ["dev_mismatched"])
    assert RUN.name in store


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "runs.jsonl"
    store = RunStore(path)
    for seed in (1, 2, 3):
        store.append(finished(replace(RUN, seed=seed)))
    first, whole, last = path.read_bytes().splitlines(keepends=True)
    unsummed = whole[: whole.index(b', "crc32"')] + b"}\n"
    damaged = [
        *(whole.replace(b'"score": 0.5', b'"score": 0.9'), whole.replace(b'"load": "e"', b'"load": "f"')),
        *(whole.replace(b"RTE", b"R\xffE"), unsummed.replace(b'"lr": 1e-05', b'"lr": []')),
        *(unsummed.replace(b'"RTE"', b'"RTF"'), unsummed.replace(b'"score": 0.5', b'"score": NaN')),
        unsummed.replace(b'"epoch_scores": [0.5]', b'"epoch_scores": []'),
        *(b"\n", b"[]\n", b'{"task": "RTE"}\n', b"[" * 100_000 + b"\n"),
    ]
    assert not {whole, unsummed} & {*damaged}
    for line in damaged:
        content, told = first + line + last, []
        path.write_bytes(content)
        refused(r"runs\.jsonl, line 2: ", RunStore, path, tasks=TASKS)
        assert path.read_bytes() == content
        assert [row["seed"] for row in RunStore(path, told.append, TASKS)] == [1, 3]
        assert len(told) == 1 and "line 2: " in told[0]
