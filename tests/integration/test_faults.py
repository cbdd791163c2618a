"""What real clusters do to a run: signals, time limits, lost ranks, full disks, numbers that are not finite, and ranks
that compute wrong, which a replay finds; and steps by CUDA graphs, on an emulator.
"""

import math
import re
import resource
import signal
import socket
import subprocess
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ddrp.checkpoint import newest, read_state
from megatron_ddrp.engine import nonfinite
from megatron_ddrp.parallel.pipeline import whole_name
from tests.integration import launch
from tests.integration.conftest import DROPOUT, NOTES, PIPELINE, TENSOR, Flags, Told, Train
from tests.integration.inside_engines import Fault, Seen, run_with_fault, scaling, train_emulated
from tests.integration.launch import SCRIPT, TIMEOUT, Hold, armed, lines, start_ranks, steps_of, training_rows
from tests.integration.training_runs import assert_same_bits, of_each_run, tensors, train_runs


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_of_them_and_loses_nothing(flags: Flags, tmp_path: Path) -> None:
    whole, save = tmp_path / "whole", tmp_path / "run"
    start_ranks(flags(save=whole, **DROPOUT), 2).check()
    command = flags(save=save, load=save, **DROPOUT)
    told = start_ranks(command, 2, before=armed("step.logged=SIGINT@3", 1))
    assert told.exit_codes == [75] * 2
    assert [lines(text) for text in told.stderr] == [[], []]
    assert "holds no checkpoint: starting afresh" in told.stdout[0] and "stopped at step 3 by SIGINT" in told.stdout[0]
    assert newest(save) == save / "iter_0000003" and (save / "exit_code").read_text() == "75\n"
    assert f"resumed from {save} at step 3" in start_ranks(command, 2).check().stdout[0]
    assert training_rows(save) == training_rows(whole)
    assert_same_bits(save, whole)


def test_the_clock_stops_a_run(told: Told, tmp_path: Path) -> None:
    assert "stopped at step 1 by --exit-duration-in-mins\n" in told(save=tmp_path, exit_duration_in_mins=1e-6)
    assert read_state(newest(tmp_path))["iteration"] == 1 and (tmp_path / "exit_code").read_text() == "75\n"
    assert "resumed from" in told(save=tmp_path, load=tmp_path, exit_duration_in_mins=60)
    assert (tmp_path / "exit_code").read_text() == "0\n"
    assert "by --exit-duration-in-mins; nothing is saved without --save" in told(exit_duration_in_mins=1e-6)


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_with_one_line(flags: Flags, tmp_path: Path) -> None:
    result = start_ranks(flags(save=tmp_path, save_interval=2), 2, before=armed("step.logged=SIGKILL@3", 1))
    assert result.exit_codes == [1, -signal.SIGKILL]
    (line,) = lines(result.stderr[0])
    assert "rank 0 lost another rank: " in line and "Connection" in line
    assert newest(tmp_path) == tmp_path / "iter_0000002"
    assert not (tmp_path / "exit_code").exists()
    start_ranks(flags(save=tmp_path, load=tmp_path), 2).check()


@pytest.mark.slow
def test_a_silent_rank_ends_the_others_within_the_timeout(flags: Flags, tmp_path: Path) -> None:
    hold = Hold(tmp_path / "pipe")

    def wait_for_the_other(ranks: list[Any]) -> None:
        ranks[0].join(TIMEOUT)
        hold.release()

    words = flags(save=tmp_path / "run", distributed_timeout_minutes=0.1)
    result = start_ranks(words, 2, armed(f"step.logged={hold.action}@3", 1), wait_for_the_other)
    assert result.exit_codes == [1, 1]
    (line,) = lines(result.stderr[0])
    assert "rank 0 lost another rank: Timed out waiting 6000ms" in line
    assert len(lines(result.stderr[1])) == 1


def small_files() -> None:
    """As on a disk that is full but for a few kilobytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_checkpoint(flags: Flags, tmp_path: Path) -> None:
    start_ranks(flags(save=tmp_path, exit_interval=2), 2).check()
    path = newest(tmp_path)
    before = tensors(path)
    command = flags(save=tmp_path, load=tmp_path, save_interval=1)
    full = start_ranks(command, 2, before=small_files)
    assert full.exit_codes == [1, 1]
    said = [line for line in full.stdout[0].splitlines() if "not saved" in line]
    assert [line.split(" not saved")[0] for line in said] == ["step 3", "step 4"]
    assert all("File too large; the last checkpoint is iter_0000002; training continues" in line for line in said)
    assert [len(lines(stderr)) for stderr in full.stderr] == [1, 0]
    assert "step 5 not saved" in full.stderr[0]
    assert newest(tmp_path) == path and not list(tmp_path.glob("*.tmp"))
    torch.testing.assert_close(tensors(path), before, rtol=0, atol=0)
    start_ranks(command, 2).check()
    assert [row["iteration"] for row in training_rows(tmp_path)] == [1, 2, 3, 4, 5]


def poison(steps: tuple[int, ...], how: str, tries: int = 2, rank: int = 0) -> None:
    """Spoil a layer's output or gradient, or the loss, in the first tries of some steps on a rank."""
    train_step = nonfinite.train_step
    tried = Counter[int]()

    def spoil(module: Any, inputs: Any, output: Any) -> Any:
        if how == "gradient":
            output.register_hook(lambda gradient: gradient * math.nan)
            return output
        if how == "loss":
            return output._replace(sums=output.sums + math.inf)
        return output * math.nan

    def poisoned_step(engine, micro_batches, setup, step, notes):  # type: ignore[no-untyped-def]
        tried[step] += 1
        if step not in steps or tried[step] > tries or setup.ranks.rank != rank:
            return train_step(engine, micro_batches, setup, step, notes)
        named = {whole_name(module): module for module in engine.module.modules()}
        module = engine.module if how == "loss" else named["layers.1.feed_forward.output"]
        with module.register_forward_hook(spoil):
            return train_step(engine, micro_batches, setup, step, notes)

    nonfinite.train_step = poisoned_step


@pytest.fixture
def poisoned_train(told: Told, monkeypatch: pytest.MonkeyPatch) -> Told:
    """`poisoned_train((3,), "output", 1, train_iters=4)`: what such a run in this process prints."""

    def run(steps: tuple[int, ...], how: str, tries: int = 2, **changes: Any) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(nonfinite, "train_step", nonfinite.train_step)  # which `poison` changes
            poison(steps, how, tries)
            return told(**changes)

    return run


CAUSES = {
    "output": "output of layers.1.feed_forward",
    "gradient": "gradient of the output of layers.1.feed_forward",
    "loss": "gradient of the output of head",
}
ON_RANKS = [
    (TENSOR | {"zero_stage": 1}, 2, 1),
    (PIPELINE | {"zero_stage": 0}, 2, 1),
    ({"zero_stage": 3}, 2, 1),
    (TENSOR | PIPELINE | {"zero_stage": 0}, 4, 2),
]


@pytest.mark.parametrize(
    ("how", "settings", "ranks", "place"),
    [
        ("output", {"zero_stage": 0}, 1, 0),
        ("output", {"zero_stage": 1, "bf16": True}, 1, 0),
        ("output", {"zero_stage": 2, "checkpoint_activations": True}, 1, 0),
        ("output", {"zero_stage": 3, "offload_optimizer": "cpu"}, 1, 0),
        ("gradient", {"zero_stage": 0}, 1, 0),
        ("gradient", {"zero_stage": 1, "offload_optimizer": "cpu"}, 1, 0),
        ("loss", {"zero_stage": 0}, 1, 0),
        ("loss", {"zero_stage": 2, "offload_optimizer": "cpu", "bf16": True}, 1, 0),
        *(pytest.param("output", *row, marks=pytest.mark.slow) for row in ON_RANKS),
        *(pytest.param("gradient", *row, marks=pytest.mark.slow) for row in ON_RANKS[-1:]),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_a_step_that_is_not_finite_changes_nothing(
    how: str, settings: dict[str, Any], ranks: int, place: int, flags: Flags, poisoned_train: Told, tmp_path: Path
) -> None:
    """Every rank hears of the module by its name in the whole model, and of the rank where it arose."""
    run = {"save": tmp_path, "save_interval": 1, "train_iters": 4, **settings}
    if ranks == 1:
        said = poisoned_train((3,), how, **run)
    else:
        said = start_ranks(flags(**run), ranks, before=partial(poison, (3,), how, rank=place)).check().stdout[0]
    (line,) = (line for line in said.splitlines() if " skipped, " in line)
    assert line.startswith(f"step 3 skipped, parameters and optimizer unchanged: {CAUSES[how]}")
    assert f" on rank {place} is the first" in line
    paths = [tmp_path / f"iter_000000{step}" for step in (2, 3, 4)]
    before, after, later = map(tensors, paths)
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert not all(torch.equal(later[name], tensor) for name, tensor in before.items())
    states = list(map(read_state, paths))
    assert [state["optimizer_step"] for state in states] == [2, 2, 3]
    assert states[1]["consumed_samples"] == 3 * 8, "the data of the step are behind us"


def test_a_passing_fault_is_mended_by_the_second_try(train: Train, poisoned_train: Told, tmp_path: Path) -> None:
    said = poisoned_train((3,), "output", 1, save=tmp_path, **DROPOUT)
    assert "step 3: not finite, but finite when tried again: taken" in said
    assert training_rows(tmp_path) == steps_of(train(**DROPOUT).rows)


SUPERVISOR = SCRIPT.parent / "examples" / "run_forever.sh"


def supervise(folder: Path, commands: str, *more: str) -> subprocess.Popen[bytes]:
    """Start `run_forever.sh` around a stand-in for training: `commands` of the shell, with $D the folder."""
    words: list[Any] = ["bash", SUPERVISOR, "bash", "-c", commands, "run", "--save", folder, "--load", folder, *more]
    variables = launch.environment() | {"D": str(folder), "BACKOFF": "0"}
    return subprocess.Popen(words, env=variables, stderr=subprocess.PIPE)


@pytest.mark.parametrize(
    ("commands", "code", "starts"),
    [
        ("test $(wc -l < $D/starts) -ge 4 && echo 0 > $D/exit_code || kill -9 $$", 0, 4),
        ("test $(wc -l < $D/starts) -lt 3 || echo 0 > $D/exit_code", 0, 3),
        *(("exit 75", 75, 1), ("exit 2", 2, 1), ("exit 1", 1, 5), ("echo 75 > $D/exit_code; exit 1", 75, 1)),
        ("wc -l < $D/starts > $D/latest; test $(wc -l < $D/starts) -ge 9 && echo 0 > $D/exit_code", 0, 9),
    ],
    ids=["kills", "lost-ssh", "asked", "arguments", "gives-up", "torchrun", "progress"],
)
def test_run_forever_knows_the_codes(commands: str, code: int, starts: int, tmp_path: Path) -> None:
    supervisor = supervise(tmp_path, f"echo >> $D/starts; {commands}")
    supervisor.communicate(timeout=60)
    assert supervisor.returncode == code
    assert len((tmp_path / "starts").read_text()) == starts


def test_run_forever_hands_on_what_it_is_told(tmp_path: Path) -> None:
    hold = Hold(tmp_path / "pipe")
    supervisor = supervise(tmp_path, "trap 'kill %1; exit 75' TERM; echo $$ > $D/pipe; sleep 30 & wait")
    hold.next_process()
    supervisor.send_signal(signal.SIGTERM)
    supervisor.communicate(timeout=20)
    assert supervisor.returncode == 75


def test_run_forever_wants_one_folder(tmp_path: Path) -> None:
    supervisor = supervise(tmp_path, "exit 0", "--load", str(tmp_path / "other"))
    _, stderr = supervisor.communicate(timeout=20)
    assert supervisor.returncode == 2 and b"--save and --load" in stderr


MODEL = {"seq_length": 16, "hidden_size": 16, "attention_backend": "sdpa", "train_iters": 4, **DROPOUT}
GRAPH_LAYOUTS: dict[str, dict[str, Any]] = {
    "bf16, ZeRO 0, Muon": {"bf16": True, "zero_stage": 0, "optimizer": "muon"},
    "bf16, ZeRO 1": {"bf16": True, "zero_stage": 1},
    "fp32, ZeRO 0": {"zero_stage": 0},
    "fp32, ZeRO 1": {"zero_stage": 1},
    "bf16, replays": {"bf16": True, "replay_interval": 1},
    "fp32, replays": {"replay_interval": 1},
    "notes": NOTES,
    "electra, packing": {"objective": "electra", "generator_size": 0.5, "packing": True},
}


@pytest.mark.slow
def test_steps_with_graphs_are_those_without(flags: Flags, tmp_path: Path) -> None:
    lines = []
    for name, layout in GRAPH_LAYOUTS.items():
        for graphs in ("off", "on"):
            settings = {"micro_batch_size": 2, "save": tmp_path / name / graphs, "cuda_graphs": graphs}
            lines.append(flags(**MODEL | layout | settings))
    answers = [answer for (answer,) in of_each_run(1, lines, train_emulated)]
    added = {}
    for name, (off, none, *_), (on, used, added[name], _) in zip(
        GRAPH_LAYOUTS, answers[::2], answers[1::2], strict=True
    ):
        assert on == off, name
        assert none == [] and len(used) == 1 and min(used[0]) >= 1, (name, used)
        assert_same_bits(tmp_path / name / "on", tmp_path / name / "off", name)
    by_graphs = ["bf16, ZeRO 0, Muon", "bf16, ZeRO 1", "fp32, ZeRO 0", "bf16, replays"]
    assert [name for name in added if added[name]] == by_graphs


@pytest.mark.slow
def test_ranks_that_replay_different_steps_sum_the_same_gradients(flags: Flags) -> None:
    """DeepSpeed fills its buckets in the order of the gradients, if it reduces them during the backward pass."""
    layout = MODEL | {"objective": "mlm", "bf16": True, "zero_stage": 1, "packing": True, "train_iters": 6}
    lines = [flags(**layout, cuda_graphs=graphs) for graphs in ("off", "on")]
    (off, _), ((on, _, _, of_one), (_, _, _, of_other)) = of_each_run(2, lines, train_emulated)
    assert on == off[0] and set(of_one) != set(of_other), (of_one, of_other)


HOST = socket.gethostname()

REPLAYED: dict[str, Any] = DROPOUT | {"train_iters": 4}
ELECTRA, OFFLOADED = {"objective": "electra", "generator_size": 0.5}, {"offload_optimizer": "cpu"}
LAYOUTS: list[dict[str, Any]] = [
    {"zero_stage": 0, "global_batch_size": 24},
    {"zero_stage": 0, "optimizer": "muon", "checkpoint_activations": True, "packing": True},
    NOTES,
    {"zero_stage": 1, "bf16": True, "global_batch_size": 16},
    {"zero_stage": 2} | OFFLOADED,
    TENSOR | {"sequence_parallel": True} | ELECTRA,
    PIPELINE | {"zero_stage": 1, "bf16": True, "global_batch_size": 16},
    PIPELINE | {"zero_stage": 0, "checkpoint_activations": True, "global_batch_size": 16} | ELECTRA,
    {"zero_stage": 3, "global_batch_size": 16},
]
"""Layouts of two ranks; ZeRO 3, which changes torch for good, comes last."""


@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [(1, [{"zero_stage": 0, "global_batch_size": 12}]), pytest.param(2, LAYOUTS, marks=pytest.mark.slow)],
    ids=["one rank", "any layout"],
)
def test_replays_change_nothing(ranks: int, layouts: list[dict[str, Any]], flags: Flags, tmp_path: Path) -> None:
    """Losses, norms and, with the last checkpoint, weights and moments are the same bits with replays and without."""
    command_lines = []
    for number, layout in enumerate(layouts):
        for interval in (None, 1):
            save = tmp_path / f"{number}" / f"{interval}"
            command_lines.append(flags(**REPLAYED | layout, save=save, replay_interval=interval))
    runs = train_runs(ranks, command_lines)
    for number, layout in enumerate(layouts):
        assert runs[2 * number] == runs[2 * number + 1], layout
        assert_same_bits(tmp_path / f"{number}" / "1", tmp_path / f"{number}" / "None", str(layout))


REPLAYED_2 = REPLAYED | {"replay_interval": 2}
FAULTS: dict[str, tuple[dict[str, Any], Fault]] = {
    "weight": ({"zero_stage": 0, "replay_interval": 2}, Fault("embeddings.norm.weight", 1)),
    "weight, bf16": ({"bf16": True, "replay_interval": 2}, Fault("embeddings.norm.weight", 1)),
    "weight, tensor 2": (TENSOR | {"replay_interval": 2}, Fault("embeddings.norm.weight", 1)),
    "shared": (REPLAYED | TENSOR | {"replay_interval": 1}, Fault("activation", 1)),
    "activation": (REPLAYED_2 | {"zero_stage": 0}, Fault("activation", 1)),
    "gradient": (REPLAYED_2 | {"zero_stage": 0}, Fault("gradient", 0)),
    "bf16, of several micro-batches": (REPLAYED_2 | {"bf16": True, "global_batch_size": 24}, Fault("gradient", 1)),
    "fp16": (REPLAYED_2 | {"fp16": True, "zero_stage": 2}, Fault("activation", 0)),
    "in the replay": (REPLAYED_2 | {"zero_stage": 2}, Fault("activation", 1, number=1)),
    "offloaded": (REPLAYED_2 | OFFLOADED | {"zero_stage": 1}, Fault("gradient", 1)),
    "offloaded, bf16": (REPLAYED_2 | OFFLOADED | {"bf16": True, "zero_stage": 2}, Fault("gradient", 1)),
    "first part": (REPLAYED_2 | PIPELINE | {"zero_stage": 0, "global_batch_size": 16}, Fault("gradient", 0)),
    "first part, bf16": (REPLAYED_2 | PIPELINE | {"bf16": True, "global_batch_size": 16}, Fault("activation", 0)),
    "ZeRO 3": (REPLAYED_2 | {"zero_stage": 3, "hidden_size": 36}, Fault("gradient", 1)),
    "ZeRO 3, offloaded": (REPLAYED_2 | OFFLOADED | {"zero_stage": 3}, Fault("activation", 1)),
}
"""Flags of two ranks and the fault; ZeRO 3 comes last."""


@pytest.mark.slow
def test_a_flipped_bit_names_its_rank_and_drops_the_step_or_ends_the_run(flags: Flags, tmp_path: Path) -> None:
    """A weight's stays between steps, so both passes agree; the rank beside it holds the same weight. Tensor-parallel
    ranks that share a fault are all named."""
    scale = {"deepspeed_config": scaling(tmp_path / "scale.json", initial_scale_power=8)}
    runs = [(flags(**layout | (scale if "fp16" in layout else {})), fault) for layout, fault in FAULTS.values()]
    for (name, (_, fault)), ranks in zip(FAULTS.items(), of_each_run(2, runs, run_with_fault), strict=True):
        for seen in (Seen(*each) for each in ranks):
            if name.startswith("weight"):
                assert seen.error == (
                    f"rank 0 (host {HOST}) and rank 1 (host {HOST}) hold other bits of embeddings.norm.weight than the "
                    "ranks that share it: a weight has changed by itself; write the name of a checkpoint of step 0 or "
                    "earlier into DIR/latest, resume, and leave out a host that is named again"
                ), name
                continue
            (line,) = (line for line in seen.lines if " skipped, " in line)
            if name == "shared":
                assert "the loss of rank 0" in line and "; the loss of rank 1" in line and seen.kept
                continue
            differing = r"gradient of layers\.0\.feed_forward\.output\.(weight|bias)"
            if fault.kind == "activation":
                differing = "output" if "first part" in name else "loss"
            who = rf"the {differing} of rank {fault.rank} \(host {HOST}\) differs when computed again"
            assert re.fullmatch(f"step 2 skipped, parameters and optimizer unchanged: {who}", line), (name, line)
            assert seen.kept and seen.error == "", name
            assert [*map(math.isfinite, seen.norms)] == [True, False, True, True], (name, seen.norms)
