"""Runs of training in many layouts, one after the other in one process group: what test and endurance compare.

A run is the real thing without the script around it: the same loader, engine and step as `megatron_ddrp.train`.
"""

import faulthandler
import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.checkpoint import BESIDE, MODEL, OPTIMIZER, StoredTensors, newest
from megatron_ddrp.checkpoint.weights import load_notes, note_tensors
from megatron_ddrp.config import Config, ParallelConfig
from megatron_ddrp.corpus import Corpus
from megatron_ddrp.engine.build import build_engine
from megatron_ddrp.engine.checkpoint import Progress, load_checkpoint, save_checkpoint
from megatron_ddrp.engine.layout import Setup
from megatron_ddrp.engine.nonfinite import FiniteSteps
from megatron_ddrp.engine.proofs import GradientProof
from megatron_ddrp.engine.step import evaluate, training_inputs
from megatron_ddrp.model import build_model
from megatron_ddrp.objectives.electra import NoteDictionary
from megatron_ddrp.parallel import process_group
from megatron_ddrp.parallel.pipeline import local_parameters, split_dimension
from megatron_ddrp.parallel.process_group import Ranks, place_in_grid
from megatron_ddrp.run.launch import exit_without_teardown
from tests.integration.launch import start_ranks

TIMEOUT = 1800.0
"""Seconds until a group of runs is given up, and until ranks that wait for each other in one say where they are."""
RUN_TIMEOUT = 120.0

Work = Callable[[list[Any]], Any]
Rows = list[dict[str, float]]
"""Losses and gradient norm of each step; the last has the validation loss too."""
EXACT = ("iteration", "consumed_samples", "consumed_tokens", "lr")
"""Numbers of a row that every layout counts alike."""


def train_run(config: Config) -> Rows:
    """Train from `--load`, or the start, to `--train-iters` or `--exit-interval` on this rank and the others: the
    steps' losses and gradient norms, and the validation loss at the end, which is saved in `--save`."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    ranks = place_in_grid(device, config.parallel)
    corpus = Corpus.open(config)
    config = config.replace(model={"vocab_size": corpus.tokenizer.vocab_size})
    loader, validation = (corpus.loader(split, ranks.data_rank, ranks.data_size) for split in ("train", "valid"))
    torch.manual_seed(config.training.seed)
    setup = Setup.of(config, ranks)
    engine = build_engine(build_model(config.model, config.parallel.checkpoint_activations, config.objective), setup)
    files, rows, notes = config.checkpoint, list[Any](), None
    if config.objective.notes:
        notes = NoteDictionary(corpus.rare_words[0], config.model.hidden_size, config.objective)
    resumed = load_checkpoint(engine, Path(files.load), setup) if files.load else None
    if resumed and notes is not None:
        load_notes(notes, resumed.path)
    begin = resumed.progress.iteration if resumed else 0
    end = files.exit_interval or config.training.train_iters
    if config.training.gradient_proof:
        GradientProof(engine, setup, print)
    steps = FiniteSteps(engine, setup, print, notes)
    for step in range(begin + 1, end + 1):
        micro_batches = loader.step((step - 1) * config.training.global_batch_size)
        inputs = training_inputs(micro_batches, setup, step)
        result = steps.finish(steps.launch(inputs, step))
        rows.append({**result.losses, "grad_norm": result.grad_norm})
    if rows:
        rows[-1] |= evaluate(engine, [validation.step(0)], setup, notes)
    if files.save:
        kept = {} if notes is None else note_tensors(notes)
        save_checkpoint(engine, Path(files.save), Progress(end), setup, begin, kept)
    if config.parallel.zero_stage < 3:
        assert_replicas_agree(engine.module, config, ranks)
    forget_layout(engine)
    return rows


def assert_replicas_agree(module: torch.nn.Module, config: Config, ranks: Ranks) -> None:
    """Whoever holds the same (part of a) weight holds the same bits, along every axis, tied weights included."""
    digests: dict[tuple[str, int], str] = {}
    for name, parameter in local_parameters(module).items():
        part = 0 if split_dimension(name, config.model.encoding) is None else ranks.tensor_rank
        digests[name, part] = hashlib.sha256(parameter.detach().float().cpu().numpy().tobytes()).hexdigest()
    for of_rank in process_group.gather_objects(digests):
        for key, digest in of_rank.items():
            assert digests.setdefault(key, digest) == digest, f"{key[0]} differs between ranks"


def forget_layout(engine: Any = None) -> None:
    """Destroy an engine, if any, and the grid that DeepSpeed remembers for the whole process."""
    from deepspeed.utils import groups

    if engine is not None:
        engine.destroy()
    groups.mpu = None


def train_runs(world_size: int, command_lines: list[list[str]]) -> list[Rows]:
    """The runs of `pretrain_bert.py ARGUMENTS`, each on `world_size` ranks that all of them share."""
    return [of_ranks[0] for of_ranks in of_each_run(world_size, command_lines, _train)]


def _train(words: list[str]) -> Rows:
    return train_run(parse_arguments(words).config)


def of_each_run(world_size: int, runs: list[Any], act: Callable[[Any], Any]) -> list[list[Any]]:
    """Return, for each run, what `act`, a module's function, gives for it on each of the ranks that all runs share."""
    by_rank = run_ranks(world_size, partial(_act_on_all, act), runs, TIMEOUT)
    return [list(of_ranks) for of_ranks in zip(*by_rank, strict=True)]


def _act_on_all(act: Callable[[Any], Any], runs: list[Any]) -> list[Any]:
    given = []
    for run in runs:
        faulthandler.dump_traceback_later(RUN_TIMEOUT, exit=True)
        given.append(act(run))
    faulthandler.cancel_dump_traceback_later()
    return given


def run_ranks(world_size: int, work: Work, runs: list[Any], timeout: float, context: Any = None) -> list[Any]:
    """Return the result of `work(runs)`, a module's function, on each rank; `context` is that of `start_ranks`."""
    ended = start_ranks([], world_size, context=context, program=partial(_be_rank, work, runs), timeout=timeout)
    return [json.loads(text.splitlines()[-1]) for text in ended.check().stdout]


def _be_rank(work: Work, runs: list[Any]) -> None:
    with exit_without_teardown():
        process_group.start(ParallelConfig(distributed_timeout_minutes=2))
        given = json.dumps(work(runs))
        process_group.stop()
        print(f"\n{given}")


def largest_differences(rows: Rows, reference: Rows) -> dict[str, float]:
    """For each loss and the gradient norm, the largest relative difference over the steps."""
    differences: dict[str, float] = {}
    for row, expected in zip(rows, reference, strict=True):
        assert row.keys() == expected.keys()
        for name, value in expected.items():
            difference = abs(row[name] - value) / max(abs(value), 1e-30)
            differences[name] = max(differences.get(name, 0.0), difference)
    return differences


def tensors(path: Path | None, *kinds: str) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, or those of some kinds."""
    found = [StoredTensors(path, kind) for kind in kinds or (MODEL, OPTIMIZER, BESIDE)]
    return {name: stored[name].clone() for stored in found for name in stored.names}


def assert_same_bits(folder: Path, reference: Path, case: str = "") -> None:
    """Check that the newest checkpoints of two runs hold the same bits: weights, moments, notes."""
    ours, theirs = (tensors(newest(path)) for path in (folder, reference))
    assert len(ours) > 50, case
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, msg=lambda difference: f"{case}: {difference}")


def assert_near(rows: Rows, reference: Rows, near_0: float, case: str = "") -> None:
    """Check that counts are equal, and losses and norms to 1e-5 of their own, or to `near_0`: HCD passes through 0."""
    assert len(rows) == len(reference) > 0, case
    for row, expected in zip(rows, reference, strict=True):
        near = {key: x if key in EXACT else pytest.approx(x, rel=1e-5, abs=near_0) for key, x in expected.items()}
        assert row == near, case
