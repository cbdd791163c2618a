"""A run that is trained again, and its comparison with its row. Training is made up here; test_tasks.py trains."""

from dataclasses import replace

import pytest

from megatron_ddrp.lab.compare.command import main
from megatron_ddrp.lab.compare.experiment import Runner
from megatron_ddrp.lab.compare.measures import PlanJobs, make_row
from megatron_ddrp.lab.compare.rows import RunRow
from megatron_ddrp.tasks.statistics import LOSS, TRAINING_LOSS
from tests.refusals import refused, wrong_arguments
from tests.unit.lab.compare.conftest import finish_run, record

NAME = "course-bert-mth-half-the-budget-1235-"
CURVES = {TRAINING_LOSS: [[9, 7.0], [500, 6.28571]], LOSS: [[2000, 5.12346]]}
RUN = RunRow("course-m-1", "m", "rope", "mlm", 1, 2048, {LOSS: 5.123456789}, hardware="Some CPU", curves=CURVES)


def test_equal_losses_are_equal_to_the_last_digit_at_whatever_tokens_the_row_has_them():
    told = "equal to the last digit: 3 of 3 points and the validation loss 5.123456789"
    at_other_tokens = {name: [[at + 1, loss] for at, loss in points] for name, points in CURVES.items()}
    assert RUN.check_equal(RUN) == replace(RUN, curves=at_other_tokens).check_equal(RUN) == told


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"curves": CURVES | {TRAINING_LOSS: [[9, 7.0], [500, 6.28562]]}}, f"2 of 3 .* 9e-05, {TRAINING_LOSS} at 500 "),
        ({"curves": CURVES | {LOSS: []}}, "2 of 3 points are; .* the row has nothing; only this machine has nothing;"),
        ({"curves": CURVES | {LOSS: [*CURVES[LOSS], [2001, 5.0]]}}, "3 of 4 points are; largest difference 0, "),
        ({"values": {LOSS: 5.123456788}}, "3 of 3 .* 5.123456788 in the row, 5.123456789 here, difference 1e-09; only"),
        (
            {"values": {LOSS: 5.0}, "hardware": "", "versions": {"torch": "1"}},
            "untold hardware, torch 1; .* has Some CPU;",
        ),
    ],
)
def test_what_differs_is_named_with_its_place_and_the_machines(changes, told):
    refused(f"^not equal: .*{told}", replace(RUN, **changes).check_equal, RUN)


def test_one_run_trains_beside_the_first_and_others_are_refused(
    values, tiny_corpus, write, open_work, write_rows, tmp_path, monkeypatch, capsys
):
    values["corpus"] = {"input": [str(tiny_corpus.text_file)], "vocab_file": str(tiny_corpus.vocab_file)}
    work, trained = open_work(values), []
    plan = write(values | {"minimal_pairs": {"data_dir": "nowhere"}})
    run = next(run for run in work.runs if run.job.name.startswith(NAME))
    finish_run(work, run, 5.123456789)
    row = make_row(work, run)
    rows = write_rows([row | {"run": f"{NAME[:-2]}4-0"}, row | {"values": {LOSS: 1.0}}, row])

    def train(runner, jobs):
        trained.append([job.kind for job in jobs])
        again = PlanJobs(work.plan, runner.folder, runner.store)
        for job in jobs[:-1]:
            record(again, job)
        finish_run(again, next(run for run in again.runs if run.job == jobs[-1]), 5.123456789)

    def reproduce(name, rows=rows):
        words = ["--reproduce", name, "--rows", str(rows), "--output-dir", str(tmp_path / "out")]
        return main([str(plan), *words])

    monkeypatch.setattr(Runner, "run", train)
    before = rows.read_bytes()
    assert reproduce(NAME) == 0 and trained == [["dataset", "dataset", "course"]]
    assert capsys.readouterr().out.endswith(" 3 of 3 points and the validation loss 5.123456789\n")
    assert len([*tmp_path.glob("out/reproduced/courses/*")]) == 1 and not [*tmp_path.glob("out/**/rows.jsonl")]
    assert row["hardware"] == "2 cores of Some CPU, 1 thread" and rows.read_bytes() == before
    wrong_arguments("'course-brt': 0 runs of .* fit; give one of .*4-0, course-bert-mth", reproduce, "course-brt")
    wrong_arguments("'course': 2 runs of .*rows.jsonl fit; give one of .*4-0, .*1235-", reproduce, "course")
    wrong_arguments("4-0 is no run of .*plan.yaml; it had another text", reproduce, f"{NAME[:-2]}4-0")
    wrong_arguments(": 0 runs of .* fit", reproduce, NAME, write_rows([row | {"values": {}}]))
