"""A rank that computes wrong is found by a replay, named, and its step dropped; a replay changes nothing else."""

from __future__ import annotations

import functools
import math
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.graph_steps import train_emulated
from tests.integration.launch import lines, read_rows, start_ranks, training_rows
from tests.integration.test_graph_steps import MODEL, stored
from tests.integration.test_precision import scaling
from tests.integration.training_runs import TIMEOUT, run_ranks, train_runs
from tests.integration.wrong_ranks import Fault, runs_with_faults, start_wrong

Flags = Callable[..., list[str]]

HOST = socket.gethostname()

DROPOUT: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "train_iters": 4}
ELECTRA = {"objective": "electra", "generator_size": 0.5}
PIPELINE = {"pipeline_model_parallel_size": 2, "global_batch_size": 16}
LAYOUTS: list[dict[str, Any]] = [
    {"zero_stage": 0, "global_batch_size": 24},
    {"zero_stage": 0, "optimizer": "muon", "checkpoint_activations": True, "packing": True},
    {"notes": True, "notes_min_count": 4, "notes_max_count": 30, "notes_window": 5},
    {"zero_stage": 1, "bf16": True, "global_batch_size": 16},
    {"zero_stage": 2},
    {"zero_stage": 2, "offload_optimizer": "cpu"},
    {"tensor_model_parallel_size": 2},
    {"tensor_model_parallel_size": 2, "sequence_parallel": True} | ELECTRA,
    PIPELINE | {"zero_stage": 1, "bf16": True},
    PIPELINE | {"zero_stage": 0, "checkpoint_activations": True} | ELECTRA,
    ELECTRA,
    {"zero_stage": 3, "global_batch_size": 16},
]
"""Layouts of two ranks; ZeRO 3, which changes torch for good, comes last."""


def assert_replays_change_nothing(ranks: int, layouts: list[dict[str, Any]], flags: Flags, folder: Path) -> None:
    """Losses, norms and, with the last checkpoint, weights and moments are the same bits with replays and without."""
    command_lines = []
    for number, layout in enumerate(layouts):
        for interval in (None, 1):
            save = folder / f"{number}" / f"{interval}"
            command_lines.append(flags(**DROPOUT | layout, save=save, replay_interval=interval))
    runs = train_runs(ranks, command_lines)
    for number, layout in enumerate(layouts):
        assert runs[2 * number] == runs[2 * number + 1], layout
        off, on = (stored(folder / f"{number}" / interval) for interval in ("None", "1"))
        assert off.keys() == on.keys() and all(torch.equal(off[name], on[name]) for name in off), layout


def test_replays_on_one_rank_change_nothing(flags: Flags, tmp_path: Path) -> None:
    assert_replays_change_nothing(1, [{"zero_stage": 0, "global_batch_size": 12}], flags, tmp_path)


@pytest.mark.slow
def test_replays_change_nothing_in_any_layout(flags: Flags, tmp_path: Path) -> None:
    assert_replays_change_nothing(2, LAYOUTS, flags, tmp_path)


@pytest.mark.slow
def test_replays_by_graphs_change_nothing(flags: Flags, tmp_path: Path) -> None:
    """The captured micro-batch is computed again by the same graphs."""
    command_lines = [
        flags(**MODEL | {"save": tmp_path / f"{interval}", "micro_batch_size": 2, "replay_interval": interval})
        for interval in (None, 1)
    ]
    ((off, _), (on, used)) = run_ranks(1, train_emulated, command_lines, TIMEOUT)[0]
    assert on == off and len(used) == 1 and min(used[0]) >= 1
    before, after = stored(tmp_path / "None"), stored(tmp_path / "1")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


FAULTS: dict[str, tuple[dict[str, Any], Fault]] = {
    "activation": ({"zero_stage": 0}, Fault("activation", 1)),
    "gradient": ({"zero_stage": 0}, Fault("gradient", 0)),
    "bf16, of several micro-batches": ({"bf16": True, "global_batch_size": 24}, Fault("gradient", 1)),
    "fp16": ({"fp16": True, "zero_stage": 2}, Fault("activation", 0)),
    "in the replay": ({"zero_stage": 2}, Fault("activation", 1, number=1)),
    "offloaded": ({"zero_stage": 1, "offload_optimizer": "cpu"}, Fault("gradient", 1)),
    "offloaded, bf16": ({"bf16": True, "zero_stage": 2, "offload_optimizer": "cpu"}, Fault("gradient", 1)),
    "first part": (PIPELINE | {"zero_stage": 0}, Fault("gradient", 0)),
    "first part, bf16": (PIPELINE | {"bf16": True}, Fault("activation", 0)),
    "ZeRO 3": ({"zero_stage": 3, "hidden_size": 36}, Fault("gradient", 1)),
    "ZeRO 3, offloaded": ({"zero_stage": 3, "offload_optimizer": "cpu"}, Fault("activation", 1)),
}
"""Flags of two ranks and the fault; ZeRO 3 comes last."""


@pytest.mark.slow
def test_a_flipped_bit_names_its_rank_and_drops_the_step(flags: Flags, tmp_path: Path) -> None:
    scale = scaling(tmp_path / "scale.json", initial_scale_power=8)
    runs = []
    for layout, fault in FAULTS.values():
        own = {"deepspeed_config": scale} if "fp16" in layout else {}
        runs.append((flags(**DROPOUT | layout | own, replay_interval=2), fault))
    for (name, (_, fault)), ranks in zip(FAULTS.items(), runs_with_faults(2, runs), strict=True):
        for seen in ranks:
            (line,) = (line for line in seen.lines if " skipped, " in line)
            differing = r"gradient of layers\.0\.feed_forward\.output\.(weight|bias)"
            if fault.kind == "activation":
                differing = "output" if "first part" in name else "loss"
            who = rf"the {differing} of rank {fault.rank} \(host {HOST}\) differs when computed again"
            assert re.fullmatch(f"step 2 skipped, parameters and optimizer unchanged: {who}", line), (name, line)
            assert seen.kept and seen.error == "", name
            assert [*map(math.isfinite, seen.norms)] == [True, False, True, True], (name, seen.norms)


@pytest.mark.slow
def test_tensor_parallel_ranks_that_share_a_fault_are_all_named(flags: Flags) -> None:
    words = flags(**DROPOUT, tensor_model_parallel_size=2, replay_interval=1)
    for seen in runs_with_faults(2, [(words, Fault("activation", 1))])[0]:
        (line,) = (line for line in seen.lines if " skipped, " in line)
        assert "the loss of rank 0" in line and "; the loss of rank 1" in line and seen.kept


@pytest.mark.slow
def test_a_flipped_weight_ends_the_run(flags: Flags) -> None:
    """It stays between steps, so both passes agree; the rank beside it holds the same weight."""
    layouts: list[dict[str, Any]] = [{"zero_stage": 0}, {"bf16": True}, {"tensor_model_parallel_size": 2}]
    runs = [(flags(**layout, replay_interval=2), Fault("embeddings.norm.weight", 1)) for layout in layouts]
    for layout, ranks in zip(layouts, runs_with_faults(2, runs), strict=True):
        for seen in ranks:
            assert seen.error == (
                f"rank 0 (host {HOST}) and rank 1 (host {HOST}) hold other bits of embeddings.norm.weight than the "
                "ranks that share it: a weight has changed by itself; write the name of a checkpoint of step 0 or "
                "earlier into DIR/latest, resume, and leave out a host that is named again"
            ), layout


def test_a_run_goes_on_after_one_fault_and_ends_after_several_in_a_row(flags: Flags, tmp_path: Path) -> None:
    """Behind a dropped step every step is replayed, so the next fault is found in the next step."""
    once, often = tmp_path / "once", tmp_path / "often"
    run = {"replay_interval": 2, "max_skipped_steps": 2}
    before = functools.partial(start_wrong, Fault("activation", 1))
    start_ranks(flags(save=once, **run), 2, before=before).check()
    norms = [row["grad_norm"] for row in read_rows(once)]
    assert len(norms) == 5 and norms[1] is None and None not in norms[2:]
    before = functools.partial(start_wrong, Fault("activation", 1, again=1))
    ended = start_ranks(flags(save=often, **run), 2, before=before)
    assert ended.exit_codes == [1, 1]
    (line,) = lines(ended.stderr[0])
    assert "2 steps in a row were computed wrong, the last of them step 3: the loss of rank 1 (host " in line
    assert "resume from the last checkpoint without the host that computes wrong" in line
    assert [row["iteration"] for row in training_rows(often)] == [1, 2]
