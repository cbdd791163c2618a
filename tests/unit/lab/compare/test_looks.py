"""Space and throughput in a comparison: their jobs, and their tables on the page."""

import json

import pytest

from megatron_ddrp.tasks.statistics import SPACE
from tests.unit.lab.compare.conftest import experiment_of, finish_run, record, write_page


@pytest.fixture
def work(values, open_work):
    values["analyses"] = {"space": 10, "throughput": [16, 32]}
    values["seeds"] = 2
    work = open_work(values)
    for run in work.runs:
        finish_run(work, run, 6.5)
    return work


def jobs(work, kind):
    return [measure for measure in work.measures if measure.job.kind == kind]


def write(work, measure, found):
    measure.job.output.parent.mkdir(parents=True, exist_ok=True)
    measure.job.output.write_text(json.dumps(found))
    record(work, measure.job)


def finish_space(work):
    for measure in jobs(work, "space"):
        layer = dict.fromkeys(SPACE.values(), work.plan.seeds.index(measure.run.seed) / 10) | {"isoscore": None}
        rows = [{"iteration": step, "layers": [{}, layer]} for step in measure.run.checkpoints]
        write(work, measure, {"checkpoints": [*rows, {"iteration": 999, "layers": [{}]}]})


def finish_throughput(work):
    [measure] = jobs(work, "throughput")
    timed = [run for run in work.runs if run.job.name in measure.job.needs]
    encoders = []
    for number, run in enumerate(timed, 1):
        row = {"rows": 4, "tokens_per_second": 1000.0 * number, "lower_quartile": 900.0, "upper_quartile": 4100.0}
        lengths = [row | {"length": 16, "memory_bytes": 1000 * number * 2**20}]
        lengths += [row | {"length": 32, "memory_bytes": None}] * (number == 1)
        encoders.append({"checkpoint": str(run.folder / "iter_0000040"), "lengths": lengths})
    write(work, measure, {"encoders": encoders})


def test_space_looks_into_every_run_of_the_full_budget(work):
    full = [run for run in work.runs if not run.half]
    assert [measure.run for measure in jobs(work, "space")] == full
    command = jobs(work, "space")[0].job.command
    assert command[:5] == ("megatron-ddrp", "analyze", "space", "--load", str(full[0].folder))
    assert command[command.index("--sentences") + 1] == "10"


def test_one_job_times_all_models_of_the_first_seed_beside_each_other(work):
    [measure] = jobs(work, "throughput")
    timed = [run for run in work.runs if run.seed == work.plan.seeds[0] and not run.half]
    command = measure.job.command
    assert measure.job.needs == tuple(run.job.name for run in timed) and len(timed) == 2
    assert command[4 : command.index("--lengths")] == tuple(str(run.folder) for run in timed)
    assert command[command.index("--lengths") + 1 : command.index("--output")] == ("16", "32")
    order = [job.name for job in experiment_of(work).jobs()]
    assert all(order.index(measure.job.name) > order.index(name) for name in measure.job.needs)


def test_the_page_has_a_table_of_each(work):
    finish_space(work)
    finish_throughput(work)
    text = write_page(work)
    assert "| BERT (MLM) | 0.0500 ± 0.0707 | 0.0500 ± 0.0707 | 0.1 ± 0.1 |" in text
    assert "| model | row length | tokens/s | quartiles | MiB |" in text
    assert "| BERT (MLM) | 16 | 1,000 | 900 to 4,100 | 1,000 |\n| BERT (MLM) | 32 | 1,000 | 900 to 4,100 |  |" in text
    assert "| BERT (MTH) | 16 | 2,000 | 900 to 4,100 | 2,000 |" in text


def test_without_their_jobs_the_page_has_neither(work):
    text = write_page(work)
    assert "row length" not in text and "Inside the models" not in text
