"""A run that was stopped or killed, started again by the same command, is the run never stopped, to the last bit; also
after Ctrl-C, with a blend of data, and beside a damaged `--save` folder.
"""

import functools
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ddrp.checkpoint import all_checkpoints, load_model, newest, read_state
from megatron_ddrp.data.preprocess.pipeline import preprocess
from megatron_ddrp.errors import FAILURE
from megatron_ddrp.parallel import process_group
from megatron_ddrp.run import loop
from megatron_ddrp.run.metrics import read_rows, stored_gap
from tests.conftest import TinyCorpus
from tests.datasets import wordpiece_job
from tests.integration.conftest import Flags, Told, Train
from tests.integration.launch import Hold, Result, armed, lines, run_program, start_ranks, steps_of, training_rows
from tests.integration.test_bad_input import contents, copied_dataset
from tests.refusals import refused

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
STEPS = 6


RUN = {"train_iters": STEPS, **DROPOUT}


def assert_same_run(folder: Path, reference: Path) -> None:
    """Equal rows, none missing or twice, and equal weights, to the last bit."""
    assert [row["iteration"] for row in training_rows(folder)] == list(range(1, STEPS + 1))
    assert training_rows(folder) == training_rows(reference)
    assert [newest(path) for path in (folder, reference)] == [x / f"iter_{STEPS:07d}" for x in (folder, reference)]
    (ours, _, _), (theirs, _, _) = load_model(folder), load_model(reference)
    for name, weight in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(name), weight), name


@pytest.fixture(scope="module")
def undisturbed(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody stopped. How often a run saves or validates changes no row."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train(**RUN, save=folder)
    return folder


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_stopped_and_restarted(ranks: int, flags: Flags, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    start_ranks(flags(**RUN, save=whole), ranks).check()
    command = flags(**RUN, save=parts, load=parts, exit_interval=STEPS // 2)
    first = start_ranks(command, ranks).check()
    assert "holds no checkpoint: starting afresh" in first.stdout[0]
    assert [row["iteration"] for row in training_rows(parts)] == list(range(1, STEPS // 2 + 1))
    second = start_ranks(command, ranks).check()
    assert f"resumed from {parts} at step {STEPS // 2}" in second.stdout[0]
    assert_same_run(parts, whole)


def test_data_that_changed_since_the_checkpoint_are_told(told: Told, tiny_corpus: TinyCorpus, tmp_path: Path) -> None:
    """Reordered documents change the sum of a dataset. Without a manifest only the sizes are compared."""
    prefix = copied_dataset(tiny_corpus, tmp_path, ".bin", ".idx", ".json")
    run = {"save": tmp_path / "run", "load": tmp_path / "run", "data_path": prefix, "exit_interval": 2, **RUN}

    def changed(**changes: Any) -> list[str]:
        return [x for x in told(**run | changes).splitlines() if x.startswith(f"data {prefix}: another content")]

    assert changed() == changed() == []
    shuffle = ["dataset", "shuffle", prefix, "--output-prefix", prefix, "--overwrite", "--seed", "3"]
    assert run_program("megatron_ddrp", *shuffle).returncode == 0
    (line,) = changed()
    before, after = re.findall(r"documents, [\d,]+ tokens, SHA-256 ([0-9a-f]{12})", line)
    assert before != after and "validation text may have been trained on" in line
    Path(f"{prefix}.json").unlink()
    assert changed(train_iters=8) == []


def test_stopped_between_two_logged_steps(train: Train, tmp_path: Path) -> None:
    """The sums since the last row are in the checkpoint."""
    every = RUN | {"log_interval": 10, "train_iters": 20}
    for _ in range(2):
        train(**every, save=tmp_path, load=tmp_path, exit_interval=15)
    assert [row["iteration"] for row in training_rows(tmp_path)] == [1, 10, 20]
    assert training_rows(tmp_path) == steps_of(train(**every).rows)


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


def test_loading_from_another_folder_leaves_it_alone(three_steps: Path, train: Train, tmp_path: Path) -> None:
    before = contents(three_steps)
    train(save=tmp_path, load=three_steps, train_iters=5)
    assert [row["iteration"] for row in training_rows(tmp_path)] == [4, 5]
    assert contents(three_steps) == before


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


def interrupted(arguments: list[str], times: int) -> Result:
    """A run without a launcher that gets SIGINT so many times in its third step."""
    return start_ranks(arguments, None, before=armed(",".join(["step.logged=SIGINT@3"] * times)))


def test_one_interrupt_saves_to_resume_from_and_two_end_at_once(train: Train, flags: Flags, tmp_path: Path) -> None:
    command = flags(save=tmp_path, load=tmp_path, save_interval=2)
    for _ in range(2):  # without saving
        ended = interrupted(command, 2)
        assert ended.exit_codes == [130]
        assert ended.stderr[0].splitlines()[1:] == ["pretrain_bert.py: error: interrupted"]
        assert newest(tmp_path) == tmp_path / "iter_0000002"
    ended = interrupted(command, 1)
    assert ended.exit_codes == [75], ended.stderr
    assert ended.stderr == ["SIGINT: stopping after this step; once more ends at once, without saving\n"]
    assert "stopped at step 3 by SIGINT\n" in ended.stdout[0]
    assert newest(tmp_path) == tmp_path / "iter_0000003"
    start_ranks(command).check()
    assert training_rows(tmp_path) == steps_of(train().rows)


def test_without_a_folder_it_says_that_nothing_is_saved(flags: Flags) -> None:
    ended = interrupted(flags(), 1)
    assert ended.exit_codes == [75]
    assert "stopped at step 3 by SIGINT; nothing is saved without --save" in ended.stdout[0]


def signal_late(number: signal.Signals) -> None:
    """Send a signal while the last files are written, and while the other ranks are awaited after that."""
    for module, name in ((loop, "note_exit_code"), (process_group, "stop")):
        setattr(module, name, functools.partial(after_a_signal, number, getattr(module, name)))


def after_a_signal(number: signal.Signals, call: Callable[..., Any], *arguments: object) -> Any:
    signal.raise_signal(number)
    return call(*arguments)


LATE = {
    number.name: functools.partial(signal_late, number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
}
LATE["SIGTERM in the last step"] = armed("step.logged=SIGTERM@5")


@pytest.mark.parametrize("late", LATE)
def test_a_signal_in_the_last_step_or_after_it_changes_nothing(late: str, flags: Flags, tmp_path: Path) -> None:
    start_ranks(flags(save=tmp_path), before=LATE[late]).check()
    assert (tmp_path / "exit_code").read_text() == "0\n" and not (tmp_path / "lock").exists()


def signal_early(number: signal.Signals) -> None:
    """Send a signal to the last rank before it meets the others; under nohup it would ignore SIGHUP."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if os.environ["RANK"] == "1":
        process_group.start = functools.partial(after_a_signal, number, process_group.start)  # type: ignore[assignment]


@pytest.mark.slow
def test_a_signal_before_the_first_step_ends_all_ranks_there(flags: Flags, tmp_path: Path) -> None:
    command = flags(save=tmp_path, load=tmp_path)
    for number in (signal.SIGUSR1, signal.SIGHUP):
        ended = start_ranks(command, 2, before=functools.partial(signal_early, number))
        assert ended.exit_codes == [75, 75], ended.stderr
        assert f"stopped at step 0 by {number.name}\n" in ended.stdout[0]
        assert (tmp_path / "exit_code").read_text() == "75\n" and newest(tmp_path) is None
    start_ranks(command, 2).check()
    assert (tmp_path / "exit_code").read_text() == "0\n"


def lose_the_readers(number: signal.Signals, step: int) -> None:
    """Let the system refuse all output, as after the end of a terminal or a login node, and signal at a step."""
    reader, writer = os.pipe()
    os.close(reader)
    for stream in (1, 2):
        os.dup2(writer, stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    armed(f"step.logged={number.name}@{step}")()


@pytest.mark.slow
def test_ranks_whose_output_nobody_reads_save(flags: Flags, tmp_path: Path) -> None:
    command = flags(save=tmp_path, load=tmp_path, objective="mlm")  # which a line says has settings without effect
    for step, number in ((2, signal.SIGTERM), (3, signal.SIGHUP)):
        ended = start_ranks(command, 2, functools.partial(lose_the_readers, number, step))
        assert ended.exit_codes == [75, 75]
        assert (tmp_path / "exit_code").read_text() == "75\n"
        assert newest(tmp_path) == tmp_path / f"iter_{step:07d}"
    assert f"resumed from {tmp_path} at step 3" in start_ranks(command, 2).check().stdout[0]
    assert [row["iteration"] for row in training_rows(tmp_path)] == [1, 2, 3, 4, 5]


def notices(stdout: str) -> list[str]:
    """The notices before the first step."""
    return [line for line in stdout.splitlines() if " latest" in line or "/latest" in line or "skipped" in line]


@pytest.mark.slow
def test_a_damaged_latest_never_begins_afresh(run: Path, train: Train, flags: Flags) -> None:
    """tests/unit/test_checkpoint.py knows all that it may hold."""
    (run / "latest").write_bytes(b"\xff\xfe\n")
    before = contents(run)
    assert refused("holds a run already", train, save=run, train_iters=4).exit_code == FAILURE
    assert contents(run) == before
    rows = training_rows(run)
    result = start_ranks(flags(save=run, load=run, train_iters=4, keep_last=2), world_size=2).check()
    (line,) = notices(result.stdout[0])
    assert "taking the newest whole checkpoint" in line
    assert f"resumed from {run} at step 3" in result.stdout[0]
    assert training_rows(run)[:3] == rows and len(training_rows(run)) == 4
    assert [path.name for path in all_checkpoints(run)] == ["iter_0000004", "iter_0000003"]


@pytest.mark.slow
def test_two_ranks_pass_a_damaged_state_over_together(run: Path, flags: Flags) -> None:
    path = run / "iter_0000003" / "state.json"
    state = json.loads(path.read_text(encoding="utf-8")) | {"consumed_samples": 5}
    path.write_text(json.dumps(state), encoding="utf-8")
    result = start_ranks(flags(save=run, load=run, train_iters=4), world_size=2).check()
    (line,) = notices(result.stdout[0])
    assert line.startswith(f"skipped {run / 'iter_0000003'}: state.json is damaged (CRC-32 ")
    assert "at step 2" in result.stdout[0] and [lines(stderr) for stderr in result.stderr] == [[], []]


def changed_at_step_three(words: list[str], ranks: int, change: Callable[[], object]) -> Result:
    """Run `pretrain_bert.py` and do something while rank 0 is held after its third step."""
    with tempfile.TemporaryDirectory() as folder:
        hold = Hold(Path(folder) / "pipe")

        def during(processes: list[Any]) -> None:
            hold.next_process(processes[0].sentinel)
            change()
            hold.release()

        return start_ranks(words, ranks, armed(f"step.logged={hold.action}@3", 0), during)


@pytest.mark.slow
def test_a_folder_deleted_on_the_way_gets_checkpoints_to_resume_from(flags: Flags, tmp_path: Path) -> None:
    """Its other files are back once the run resumes."""
    folder = tmp_path / "run"
    changed_at_step_three(flags(save=folder, save_interval=2), 1, lambda: shutil.rmtree(folder)).check()
    names = {path.name for path in folder.iterdir()}
    assert names == {"iter_0000004", "iter_0000005", "latest", "exit_code"}
    result = start_ranks(flags(save=folder, load=folder, train_iters=6)).check()
    assert "metrics.jsonl: the rows after step 0 up to step 5 are missing" in result.stdout[0]
    assert {"config.json", "tokenizer", "unigram.json"} < {path.name for path in folder.iterdir()}
    assert [row["iteration"] for row in training_rows(folder)] == [6]


@pytest.mark.slow
def test_a_folder_that_became_a_file_ends_the_run_with_a_line(flags: Flags, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def replace_by_a_file() -> None:
        shutil.rmtree(folder)
        folder.touch()

    result = changed_at_step_three(flags(save=folder, save_interval=4), 2, replace_by_a_file)
    assert result.exit_codes == [1, 1]
    (line,) = (line for line in result.stdout[0].splitlines() if "not saved" in line)
    fault = f"{folder / 'iter_0000004.tmp'}: Not a directory"
    assert line == f"step 4 not saved: {fault}; the last checkpoint is none; training continues"
    (line,) = lines(result.stderr[0])
    assert f"step 5 not saved: {folder / 'iter_0000005.tmp'}: Not a directory" in line and lines(result.stderr[1]) == []


@pytest.fixture(scope="module")
def second(tiny_corpus: TinyCorpus, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another dataset of the same tokenizer."""
    folder = tmp_path_factory.mktemp("second")
    lines = tiny_corpus.text_file.read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "second.jsonl").write_text("".join(lines[5::6]), encoding="utf-8")
    job = wordpiece_job(tiny_corpus.vocab_file, folder / "second", folder / "second.jsonl")
    return str(preprocess(job).prefixes[0])


def blend(first: object, second: str, **changes: Any) -> dict[str, Any]:
    """A run whose training data are two parts of the first corpus to one of the second."""
    data = {"train_data_path": ("2", str(first), "1", second), "valid_data_path": second, "other_data_path": second}
    own = {"data_path": None, "split": None, "eval_interval": 4, "eval_iters": 2, "packing": True, "masking": "ngram"}
    return own | data | changes


def test_a_resumed_blend_is_the_run_never_stopped(
    tiny_corpus: TinyCorpus, second: str, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = blend(tiny_corpus.prefix, second, train_iters=6)
    whole = train(**run).rows
    resumed = [row for stop in (3, None) for row in train(**run, save=tmp_path, load=tmp_path, exit_interval=stop).rows]
    said = capsys.readouterr().out
    assert "66.67% " in said and second in said
    assert steps_of(resumed) == steps_of(whole)
    validations = [[row for row in rows if "valid_lm_loss" in row] for rows in (whole, resumed)]
    assert validations[0] == validations[1] and len(validations[0]) == 2
    assert all(row["other_lm_loss"] == row["valid_lm_loss"] for row in validations[0])


def test_one_rank_tells_of_validation_of_another_kind(prose_then_code: str, flags: Flags, tmp_path: Path) -> None:
    validated = {"split": "949,50,1", "eval_interval": 1, "eval_iters": 1}
    result = start_ranks(flags(data_path=prose_then_code, save=tmp_path, train_iters=1, **validated), 2).check()
    told = f"{prose_then_code}: the validation text is of another kind than the training text"
    assert [text.count(told) for text in result.stdout] == [1, 0]
    assert f"off by {stored_gap(tmp_path):.2f} nats" in result.stdout[0]
