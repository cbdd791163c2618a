"""A run that was stopped or killed, started again by the same command, is the run never stopped, to the last bit; also
after Ctrl-C and beside a damaged `--save` folder.
"""

import functools
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ddrp.checkpoint import all_checkpoints, newest, read_state
from megatron_ddrp.data.dataset.merging import shuffle
from megatron_ddrp.parallel import process_group
from megatron_ddrp.run import loop
from megatron_ddrp.run.metrics import read_rows
from tests.conftest import TinyCorpus
from tests.integration.conftest import DROPOUT, Flags, Told, Train
from tests.integration.launch import Hold, armed, json_file, lines, start_ranks, steps_of, training_rows
from tests.integration.test_bad_input import copied_dataset
from tests.integration.training_runs import assert_same_bits

STEPS = 6
RUN = {"train_iters": STEPS, **DROPOUT}


def assert_same_run(folder: Path, reference: Path) -> None:
    """Check that rows are equal, none missing or twice, and so are weights and moments, to the last bit."""
    assert [row["iteration"] for row in training_rows(folder)] == list(range(1, STEPS + 1))
    assert training_rows(folder) == training_rows(reference)
    assert [newest(path) for path in (folder, reference)] == [x / f"iter_{STEPS:07d}" for x in (folder, reference)]
    assert_same_bits(folder, reference)


@pytest.fixture(scope="module")
def undisturbed(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody stopped. How often a run saves or validates changes no row."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train(**RUN, save=folder)
    return folder


def test_data_that_changed_since_the_checkpoint_are_told(told: Told, tiny_corpus: TinyCorpus, tmp_path: Path) -> None:
    """Reordered documents change the sum of a dataset. Without a manifest only the sizes are compared."""
    prefix = copied_dataset(tiny_corpus, tmp_path, ".bin", ".idx", ".json")
    run = {"save": tmp_path / "run", "load": tmp_path / "run", "data_path": prefix, "exit_interval": 2, **RUN}

    def changed(**changes: Any) -> list[str]:
        return [x for x in told(**run | changes).splitlines() if x.startswith(f"data {prefix}: another content")]

    assert changed() == changed() == []
    shuffle(prefix, str(prefix), 3, overwrite=True)
    (line,) = changed()
    before, after = re.findall(r"documents, [\d,]+ tokens, SHA-256 ([0-9a-f]{12})", line)
    assert before != after and "validation text may have been trained on" in line
    Path(f"{prefix}.json").unlink()
    assert changed(train_iters=8) == []


def test_validating_and_saving_change_nothing_and_dropout_is_on(
    undisturbed: Path, train: Train, tmp_path: Path
) -> None:
    """Else the tests above would prove nothing about it."""
    train(**RUN, save=tmp_path, eval_interval=1, eval_iters=2, save_interval=2)
    assert_same_run(tmp_path, undisturbed)
    assert sum("valid_lm_loss" in row for row in read_rows(tmp_path)) == STEPS
    for ours, theirs in zip(training_rows(undisturbed), steps_of(train(train_iters=STEPS).rows), strict=True):
        assert ours["lm_loss"] != theirs["lm_loss"]


LAST_WHOLE = {"checkpoint.tensors": 2, "checkpoint.renamed": 2, "checkpoint.moved_away": 2, "checkpoint.latest": 4}
"""Point of a save → the last checkpoint after kills there and at the points before, all in step 4."""


def test_killed_at_each_point_of_a_save(undisturbed: Path, flags: Flags, tmp_path: Path) -> None:
    """With the weights and without the optimizer's state, around the renaming, and before older checkpoints go."""
    command = flags(**RUN, save=tmp_path, load=tmp_path, save_interval=2)
    for name, last in LAST_WHOLE.items():
        ended = start_ranks(command, before=armed(f"{name}=SIGKILL@4"))
        assert ended.exit_codes == [-signal.SIGKILL], name
        assert newest(tmp_path) == tmp_path / f"iter_{last:07d}", name
    assert list(tmp_path.glob("iter_*.tmp"))
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as stream:
        stream.write('{"iteration": 5, "lo')  # the row that a kill cut off
    assert "at step 4" in start_ranks(command).check().stdout[0]
    assert_same_run(tmp_path, undisturbed)
    assert not list(tmp_path.glob("*.tmp")), "leftovers of the killed run stay for ever"


def test_a_finished_run_started_again_changes_nothing_and_goes_on_under_more_steps(run: Path, train: Train) -> None:
    def state() -> dict[str, Any]:
        return read_state(newest(run))  # type: ignore[arg-type]

    rows, before = read_rows(run), state()
    train(save=run, load=run, train_iters=3)
    assert read_rows(run) == rows and state() == before
    train(save=run, load=run, train_iters=5)
    assert [row["iteration"] for row in training_rows(run)] == [1, 2, 3, 4, 5]
    assert state()["consumed_samples"] == 5 * 8


def test_changed_settings_are_told_at_a_resume(told: Told, tmp_path: Path) -> None:
    told(save=tmp_path, exit_interval=1)
    changes = {"lr": 2e-3, "mask_prob": 0.2, "save_interval": 3, "exit_interval": 2}
    said = told(save=tmp_path, load=tmp_path, **changes).splitlines()
    place = said.index(f"resumed from {tmp_path} at step 1")
    assert [line for line in said[:place] if " → " in line] == ["--mask-prob: 0.15 → 0.2", "--lr: 0.001 → 0.002"]
    assert " → " not in told(save=tmp_path, load=tmp_path, **changes, log_interval=9)
    rarely = tmp_path / "rarely"
    told(save=rarely, exit_interval=3, log_interval=2)
    assert "are missing" not in told(save=rarely, load=rarely, exit_interval=4, log_interval=1)  # 3 was not due then


def test_one_interrupt_saves_to_resume_from_and_two_end_at_once(train: Train, flags: Flags, tmp_path: Path) -> None:
    command = flags(save=tmp_path, load=tmp_path, save_interval=2)
    interrupt = "step.logged=SIGINT@3"
    ended = start_ranks(command, None, armed(f"{interrupt},{interrupt}"))
    assert ended.exit_codes == [130]
    assert ended.stderr[0].splitlines()[1:] == ["pretrain_bert.py: error: interrupted"]
    assert newest(tmp_path) == tmp_path / "iter_0000002"
    ended = start_ranks(command, None, armed(interrupt))
    assert ended.exit_codes == [75], ended.stderr
    assert ended.stderr == ["SIGINT: stopping after this step; once more ends at once, without saving\n"]
    assert "stopped at step 3 by SIGINT\n" in ended.stdout[0]
    assert newest(tmp_path) == tmp_path / "iter_0000003"
    start_ranks(command).check()
    assert training_rows(tmp_path) == steps_of(train().rows)


def after_a_signal(number: signal.Signals, call: Callable[..., Any], *arguments: object) -> Any:
    signal.raise_signal(number)
    return call(*arguments)


def signal_late() -> None:
    """Send a signal while the last files are written, and while the other ranks are awaited after that."""
    for module, name in ((loop, "note_exit_code"), (process_group, "stop")):
        setattr(module, name, functools.partial(after_a_signal, signal.SIGTERM, getattr(module, name)))


def test_a_signal_in_the_last_step_and_after_it_changes_nothing(flags: Flags, tmp_path: Path) -> None:
    start_ranks(flags(save=tmp_path), before=armed("step.logged=SIGTERM@5", then=signal_late)).check()
    assert (tmp_path / "exit_code").read_text() == "0\n" and not (tmp_path / "lock").exists()


def signal_early() -> None:
    """Send a signal to the last rank before it meets the others; under nohup it would ignore this one."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if os.environ["RANK"] == "1":
        process_group.start = functools.partial(after_a_signal, signal.SIGHUP, process_group.start)  # type: ignore


@pytest.mark.slow
def test_a_signal_before_the_first_step_ends_all_ranks_there(flags: Flags, tmp_path: Path) -> None:
    command = flags(save=tmp_path, load=tmp_path)
    ended = start_ranks(command, 2, before=signal_early)
    assert ended.exit_codes == [75, 75], ended.stderr
    assert "stopped at step 0 by SIGHUP\n" in ended.stdout[0]
    assert (tmp_path / "exit_code").read_text() == "75\n" and newest(tmp_path) is None
    start_ranks(command, 2).check()
    assert (tmp_path / "exit_code").read_text() == "0\n"


def lose_the_readers() -> None:
    """Let the system refuse all output and signal at a step, as at the end of a terminal or a login node."""
    reader, writer = os.pipe()
    os.close(reader)
    for stream in (1, 2):
        os.dup2(writer, stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    armed("step.logged=SIGHUP@3")()


@pytest.mark.slow
def test_ranks_whose_output_nobody_reads_save(flags: Flags, tmp_path: Path) -> None:
    command = flags(save=tmp_path, load=tmp_path, objective="mlm")  # which a line says has settings without effect
    ended = start_ranks(command, 2, lose_the_readers)
    assert ended.exit_codes == [75, 75]
    assert (tmp_path / "exit_code").read_text() == "75\n"
    assert newest(tmp_path) == tmp_path / "iter_0000003"
    assert f"resumed from {tmp_path} at step 3" in start_ranks(command, 2).check().stdout[0]
    assert [row["iteration"] for row in training_rows(tmp_path)] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_two_ranks_pass_a_damaged_latest_and_a_damaged_state_over_together(run: Path, flags: Flags) -> None:
    """tests/unit/test_checkpoint.py knows all that they may hold."""
    (run / "latest").write_bytes(b"\xff\xfe\n")
    json_file(run / "iter_0000003" / "state.json", read_state(run / "iter_0000003") | {"consumed_samples": 5})
    rows = training_rows(run)
    result = start_ranks(flags(save=run, load=run, train_iters=4, keep_last=2), world_size=2).check()
    of_latest, of_state = (line for line in result.stdout[0].splitlines() if "/latest" in line or "skipped" in line)
    assert "taking the newest whole checkpoint" in of_latest
    assert of_state.startswith(f"skipped {run / 'iter_0000003'}: state.json is damaged (CRC-32 ")
    assert f"resumed from {run} at step 2" in result.stdout[0]
    assert [lines(stderr) for stderr in result.stderr] == [[], []]
    assert training_rows(run)[:2] == rows[:2] and len(training_rows(run)) == 4
    assert [path.name for path in all_checkpoints(run)] == ["iter_0000004", "iter_0000002"]


@pytest.mark.slow
def test_a_folder_deleted_on_the_way_gets_checkpoints_to_resume_from(flags: Flags, tmp_path: Path) -> None:
    """Its other files are back once the run resumes."""
    folder, hold = tmp_path / "run", Hold(tmp_path / "pipe")

    def delete(ranks: list[Any]) -> None:
        hold.next_process(ranks[0].sentinel)
        shutil.rmtree(folder)
        hold.release()

    start_ranks(flags(save=folder, save_interval=2), 1, armed(f"step.logged={hold.action}@3"), delete).check()
    names = {path.name for path in folder.iterdir()}
    assert names == {"iter_0000004", "iter_0000005", "latest", "exit_code"}
    result = start_ranks(flags(save=folder, load=folder, train_iters=6)).check()
    assert "metrics.jsonl: the rows after step 0 up to step 5 are missing" in result.stdout[0]
    assert {"config.json", "tokenizer", "unigram.json"} < {path.name for path in folder.iterdir()}
    assert [row["iteration"] for row in training_rows(folder)] == [6]
