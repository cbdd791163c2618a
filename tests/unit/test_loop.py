"""Steps of a run: what the loop launches, logs, saves and tries again, with numbers that are read late or at once; bit
sums of weights; and no wait for the device in a micro-batch.

Whole replays are in tests/integration/test_faults.py. Tests of waits run whole steps on torch's "meta" device: its
tensors have no data, so that whatever would make the host wait for a GPU raises. `Watch` sees what that device allows.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ddrp.config import ENCODINGS, OBJECTIVES, Config, ObjectiveConfig
from megatron_ddrp.config.registry import package_sum
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.batches.word_counts import RareWords
from megatron_ddrp.engine import nonfinite
from megatron_ddrp.engine import step as engine_step
from megatron_ddrp.engine.checkpoint import Progress, resumed_progress
from megatron_ddrp.engine.layout import GradientClipping, Setup
from megatron_ddrp.engine.proofs import bit_sum, refuse_other_weights
from megatron_ddrp.engine.step import StepResult, training_inputs
from megatron_ddrp.model import on_meta_device
from megatron_ddrp.model.attention.gpu import triton_attention
from megatron_ddrp.objectives.electra import NoteDictionary
from megatron_ddrp.parallel.process_group import Ranks
from megatron_ddrp.run import log, loop
from megatron_ddrp.run.callbacks import Callbacks
from megatron_ddrp.run.flops import StepProfile
from megatron_ddrp.run.launch import StopRequests
from megatron_ddrp.train import shared_by_ranks, where_we_start
from tests.refusals import refused
from tests.unit.model.tiny import packed_batch, tiny_batch, tiny_config

RANKS = Ranks(0, 1, torch.device("cpu"))
SHORT = {"training": {"train_iters": 6, "global_batch_size": 2}, "logging": {"log_interval": 1, "eval_interval": 0}}
CONFIG = Config().replace(checkpoint={"save": "run", "save_interval": 4}, **SHORT)
EVERY_FOUR = {"log_interval": 4}
META = torch.device("meta")
RANKS_OF_META = Ranks(0, 1, META)
WORDS = RareWords(np.arange(3, dtype=np.uint64), np.full(3, 9), np.arange(3), np.arange(1, 4))


class Training:
    """A `TrainingRun` whose steps give chosen gradient norms; `events` is what happened, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, late: bool, norms: Any = None, **settings: Any) -> None:
        self.events: list[str] = []
        self.rows: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self.saves: list[tuple[int, int]] = []
        self.norms = {step: iter(values) for step, values in (norms or {}).items()}
        self.requests, self.asks_after, self.is_quiet = StopRequests(None), 0, False
        monkeypatch.setattr(nonfinite, "train_step", self.train_step)
        monkeypatch.setattr(nonfinite, "gather_objects", lambda item: [item])
        monkeypatch.setattr(loop, "reads_late", lambda setup: late)
        monkeypatch.setattr(loop, "iterate", lambda loader, consumed, steps, *_: ([] for _ in range(steps)))
        monkeypatch.setattr(loop, "largest_over_ranks", lambda number, device: number)
        monkeypatch.setattr(loop, "largest_on_device", lambda number, device: torch.tensor(number))
        monkeypatch.setattr(loop.TrainingRun, "save", lambda run, folder, *given, must: self.save(*given))
        log = SimpleNamespace(say=self.say, write=self.write, callbacks=Callbacks(), is_quiet=lambda: self.is_quiet)
        engine = SimpleNamespace(module=torch.nn.Identity(), optimizer=None)
        setup = Setup(CONFIG.replace(**settings), RANKS)
        self.run = loop.TrainingRun(setup, engine, log, Path("run"), None)  # type: ignore[arg-type]

    def train_step(self, engine: Any, micro_batches: Any, setup: Setup, step: int, notes: Any) -> Any:
        self.events.append(f"launch {step}")
        if step == self.asks_after:
            self.requests.received = 15
        norm = next(self.norms.get(step, iter(())), float(step))
        objective = setup.objective
        sums = torch.full((len(objective.sum_names),), 10.0 * step, dtype=torch.float64)
        counts = torch.full((len(objective.counts),), 5)
        return StepResult(0.1, sums, torch.tensor(norm), counts, objective)

    def write(self, row: dict[str, Any], event: str) -> None:
        self.events.append(f"row {row['iteration']}")
        self.rows.append(row)

    def say(self, line: str) -> None:
        self.lines.append(line)
        if "finite" in line:
            self.events.append(line.split(":")[0])

    def save(self, progress: Progress, since: int) -> int:
        self.events.append(f"save {progress.iteration}")
        self.saves.append((since, progress.iteration))
        return progress.iteration

    def numbers(self, *names: str) -> list[tuple[Any, ...]]:
        return [tuple(row[name] for name in names) for row in self.rows]

    def __call__(self, begin: Progress | None = None) -> tuple[Progress, int]:
        return self.run.steps(SimpleNamespace(), None, begin or Progress(), self.requests)  # type: ignore[arg-type]


Build = Callable[..., Training]


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Build:
    """Return a function that makes a run, given whether numbers are read late and the gradient norms of some steps."""
    return partial(Training, monkeypatch)


@pytest.fixture(params=[False, True], ids=["at once", "late"])
def late(request: pytest.FixtureRequest) -> bool:
    return request.param


def test_late_numbers_are_read_behind_the_next_launch_but_before_a_checkpoint_and_are_the_same(training: Build) -> None:
    rows = []
    for late in (False, True):
        made = training(late)
        assert made() == (Progress(6, 12, 30), 0) and made.saves == [(0, 4), (4, 6)]
        rows.append(made.numbers("iteration", "consumed_samples", "consumed_tokens", "lm_loss", "grad_norm"))
    assert made.events[:7] == ["launch 1", "launch 2", "row 1", "launch 3", "row 2", "launch 4", "row 3"]
    assert made.events[7:] == ["row 4", "save 4", "launch 5", "launch 6", "row 5", "row 6", "save 6"]
    assert rows[0] == rows[1] and [row[-1] for row in rows[0]] == [1, 2, 3, 4, 5, 6]
    assert rows[0][2][3] == 6.0  # 10 · 3 ÷ 5


def test_the_step_after_the_head_alone_waits_until_the_encoder_need_not_rest_again(training, monkeypatch) -> None:
    """A step that is not finite is tried again, with the encoder as it was: at rest."""
    made = training(True, {2: (math.nan, 1.0)}, training={"new_head_iters": 2}, checkpoint={"load": "run"})
    monkeypatch.setattr(nonfinite, "rest_or_learn", lambda _, step, last: made.events.append(f"rest {step <= last}"))
    made()
    tried = ["launch 2", "row 1", "launch 2", "step 2", "row 2"]
    assert made.events[:10] == ["rest True", "launch 1", "rest True", *tried, "rest False", "launch 3"]


def test_a_request_ends_the_run_at_its_step_or_one_later_and_before_the_first_step_there(late, training: Build) -> None:
    made, last = training(late), 3 if late else 2
    made.asks_after = 2
    progress, request = made()
    assert (progress.iteration, request) == (last, 15) and made.events[-2:] == [f"row {last}", f"save {last}"]
    made = training(late)
    made.requests.received = 10
    assert made() == (Progress(), 10) and made.events == []


def test_a_step_that_fails_ends_the_thread_that_reads_ahead(late: bool, training: Build, monkeypatch) -> None:
    """The error still holds the loop's frame here, so that nothing but the loop itself can have closed the stream."""
    made, ends = training(late), []

    def stream(*_: Any) -> Iterator[list[Any]]:
        try:
            yield []
        finally:
            ends.append("closed")

    monkeypatch.setattr(loop, "iterate", stream)
    monkeypatch.setattr(nonfinite, "train_step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        made()
    assert ends == ["closed"] and caught.tb is not None


def test_a_profile_begins_and_ends_between_two_steps(training: Build, monkeypatch) -> None:
    """No step that is still being computed is in it, and none of its own is left out."""
    made = training(True, logging={"profile": True, "profile_step_start": 1, "profile_step_end": 3})
    monkeypatch.setattr(StepProfile, "begin", lambda self, step: made.events.append(f"begin? {step}"))
    monkeypatch.setattr(StepProfile, "finish", lambda self, step: made.events.append(f"end? {step}") or [])
    made()
    assert made.events[:5] == ["begin? 1", "launch 1", "row 1", "end? 1", "begin? 2"]
    assert made.events[5:11] == ["launch 2", "begin? 3", "launch 3", "row 2", "row 3", "end? 3"]


def test_the_memory_of_a_row_is_the_largest_of_the_ranks(training: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """This rank's peak is 1, 3 and 2 GiB, another one's twice as much."""
    made, peaks = training(False), itertools.cycle((1, 3, 2))
    monkeypatch.setattr(loop, "peak_memory_bytes", lambda device: next(peaks) * 2**30)
    monkeypatch.setattr(loop, "largest_over_ranks", lambda number, device: 2 * number)
    made()
    assert made.numbers("peak_memory_gib")[:3] == [(2.0,), (6.0,), (4.0,)]


def test_rates_are_those_of_all_steps_when_checkpoints_fall_between_rows(training: Build, monkeypatch) -> None:
    """A step takes 2 s and 5 tokens here, a checkpoint 100 s."""
    made = training(False, logging={"log_interval": 6}, checkpoint={"save_interval": 5})
    now = [0.0]

    def taking(seconds: float, call: Callable[..., Any], *given: Any) -> Any:
        now[0] += seconds
        return call(*given)

    monkeypatch.setattr(log.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(nonfinite, "train_step", partial(taking, 2, made.train_step))
    monkeypatch.setattr(made, "save", partial(taking, 100, made.save))
    made()
    assert "save 5" in made.events and made.numbers("step_time", "tokens_per_second") == [(2.0, 2.5)] * 2


def test_a_row_holds_the_mean_since_the_row_before_and_a_quiet_run_shows_its_numbers(late, training, monkeypatch):
    """Between two rows a line takes part in nothing that other ranks would have to join."""
    shown, asked = [], []
    for quiet in (False, True):
        made = training(late, logging=EVERY_FOUR)
        made.is_quiet = quiet
        monkeypatch.setattr(loop, "peak_memory_bytes", lambda device: asked.append(device) or 2**30)
        assert made() == (Progress(6, 12, 30), 0)
        found = [re.match(r"step (\d)/6 .*\(mlm (\S+) .* eta", line) for line in made.lines]
        shown.append({int(line[1]): float(line[2]) for line in found if line})
        # A step's sum is 10 · step and its count 5: 2 · step, and the mean of steps 2 to 4, and of 5 and 6.
        assert made.numbers("iteration", "lm_loss", "grad_norm") == [(1, 2.0, 1), (4, 6.0, 4), (6, 11.0, 6)]
    assert shown == [{1: 2, 4: 6, 6: 11}, {1: 2, 2: 4, 3: 5, 4: 6, 5: 10, 6: 11}] and len(asked) == 6


def test_a_run_that_stopped_between_two_rows_writes_the_rows_of_the_whole_one(late: bool, training: Build) -> None:
    rows = []
    for last in (6, 3):
        made = training(late, logging=EVERY_FOUR, checkpoint={"exit_interval": last})
        progress, _ = made()
        made(Progress.from_state(json.loads(json.dumps(asdict(progress)))))
        rows.append(made.numbers("iteration", "lm_loss", "loss"))
    assert rows[0] == rows[1] and len(rows[0]) == 3


def test_skipped_steps_and_sums_of_another_objective_are_left_out_of_the_mean(training: Build) -> None:
    made = training(False, {3: [math.nan] * 2, 5: [math.inf] * 2, 6: [math.inf] * 2}, logging=EVERY_FOUR)
    made()
    # Of steps 1, and 2 and 4; of skipped steps alone, the last one's own.
    assert made.numbers("lm_loss") == [(2.0,), (6.0,), (12.0,)]
    made = training(False)
    made(Progress(2, 4, 10, {"of_another_objective": 1e9}))
    assert made.numbers("lm_loss") == [(6.0,), (8.0,), (10.0,), (12.0,)]


def test_a_step_that_was_not_finite_is_tried_again_and_steps_that_stay_so_end_the_run(late, training: Build) -> None:
    made = training(late, {2: [math.nan, 7.0]})
    made()
    around = [event for event in made.events[made.events.index("launch 2") :] if event != "row 1"]
    assert around[: 4 + late] == ["launch 2", *["launch 3"] * late, "launch 2", "step 2", "row 2"]
    assert made.numbers("grad_norm") == [(1,), (7,), (3,), (4,), (5,), (6,)]
    made = training(late, dict.fromkeys(range(2, 7), [math.inf] * 2), training={"max_skipped_steps": 2})
    refused("2 steps in a row were not finite, the last of them step 3", made)
    assert ("launch 4" in made.events) == late


class FakeReplay:
    """Replay that finds a fault in some steps; it notes the steps that were replayed."""

    steps: list[int] = []
    faulty: tuple[int, ...] = ()

    def __init__(self, engine: Any, setup: Setup, step: int) -> None:
        self.steps.append(step)
        self.fault = f"rank 1 in {step}" if step in self.faulty else ""

    def __enter__(self) -> FakeReplay:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def replays(training: Build, monkeypatch: pytest.MonkeyPatch) -> Build:
    """Return a function that makes a run whose replays find a fault in some steps."""
    monkeypatch.setattr(nonfinite, "Replay", FakeReplay)
    monkeypatch.setattr(FakeReplay, "steps", [])

    def make(late: bool, faulty: tuple[int, ...], **settings: int) -> Training:
        monkeypatch.setattr(FakeReplay, "faulty", faulty)
        return training(late, {step: [math.nan] for step in faulty}, training=settings)

    return make


@pytest.mark.parametrize(("faulty", "replayed"), [((), [2, 4, 6]), ((2,), [2, 3, 4, 6]), ((2, 3), [2, 3, 4, 6])])
def test_every_step_is_replayed_until_one_has_no_fault(faulty, replayed, late: bool, replays: Build) -> None:
    made = replays(late, faulty, replay_interval=2, max_skipped_steps=3)
    assert made()[0].iteration == 6 and FakeReplay.steps == replayed
    skipped = [f"step {step} skipped, parameters and optimizer unchanged: rank 1 in {step}" for step in faulty]
    assert [line for line in made.lines if "skipped" in line] == skipped
    assert [event for event in made.events if event.startswith("launch")] == [f"launch {n}" for n in range(1, 7)]


def test_replays_that_stay_different_end_the_run(replays: Build) -> None:
    made = replays(True, (4, 5), replay_interval=4, max_skipped_steps=2)
    refused("2 steps in a row were computed wrong, the last of them step 5: rank 1 in 5;", made)


SYNCHRONOUS = [("cuda", {"training": {"fp16": True}}, False), ("cuda", {"objective": {"notes": True}}, False)]


@pytest.mark.parametrize(("device", "changes", "late"), [("cpu", {}, False), ("cuda", {}, True), *SYNCHRONOUS])
def test_who_reads_late(device: str, changes: dict[str, Any], late: bool) -> None:
    assert nonfinite.reads_late(Setup(Config().replace(**changes), Ranks(0, 1, torch.device(device)))) == late


@pytest.mark.parametrize("change", [{"tcd_weight": 2.0}, {"objective": "mlm", "tcd_weight": None, "hcd_weight": None}])
def test_a_row_never_mixes_two_objectives(change: dict[str, Any]) -> None:
    """A run that resumes under another objective logs the mean since the resume."""
    checkpoint, sums = Path("run/iter_0000003"), {"lm_loss": 6.0, "tcd_loss": 0.0, "tokens": 9}
    state = asdict(Progress(iteration=3, since_logged=sums))
    stored = Config.from_dict(json.loads(json.dumps(CONFIG.to_dict())))
    same, changed = (CONFIG.replace(objective=c, optimizer={"lr": 2e-3}) for c in ({}, change))
    assert resumed_progress(checkpoint, state, stored, same).since_logged == sums
    progress = resumed_progress(checkpoint, state, stored, changed)
    assert (progress.iteration, progress.since_logged, progress.started_from) == (3, {}, None)


def test_the_start_says_that_nothing_is_saved() -> None:
    assert where_we_start(Config(), None) == "starting afresh; nothing is saved without --save"
    assert where_we_start(CONFIG, None) == "starting afresh"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_flipped_bit_changes_the_sum(dtype: torch.dtype) -> None:
    size = dtype.itemsize
    for bit in range(8 * size):
        numbers = torch.linspace(-3, 3, 12, dtype=dtype).view(3, 4).t()
        before = bit_sum(numbers)
        flat = numbers.t().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[size]).view(-1)
        flat[5] ^= 1 << bit if bit < 8 * size - 1 else -(1 << bit)
        assert bit_sum(numbers) != before, bit


def test_the_sum_depends_on_no_order_or_strides_and_weights_of_one_rank_are_accepted() -> None:
    numbers = torch.randn(5, 7)
    assert bit_sum(numbers) == bit_sum(numbers.t()) == bit_sum(numbers.flip(0)) == bit_sum(numbers.clone())
    assert bit_sum(torch.ones(()).expand(3, 4)) == 12 * bit_sum(torch.ones(()))
    refuse_other_weights(told(4, 4, 4), 0)
    refuse_other_weights([("host0", {}), ("host1", {})], 0)


def told(*sums: int) -> list[tuple[str, dict[str, int]]]:
    """Return what ranks tell about two weights, of which the second is theirs alone."""
    return [(f"host{rank}", {"norm.weight": own, f"part {rank}": rank}) for rank, own in enumerate(sums)]


OTHERS = {
    (4, 5): "rank 0 (host host0) and rank 1 (host host1) hold",
    (4, 4, 5): "rank 2 (host host2) holds",
    (6, 4, 4, 4, 5): "rank 0 (host host0) and rank 4 (host host4) hold",
}


@pytest.mark.parametrize(("sums", "named"), OTHERS.items())
def test_a_majority_of_ranks_is_right(sums: tuple[int, ...], named: str) -> None:
    words = f"^{re.escape(named)} other bits of norm.weight than the ranks that share it: "
    refusal = refused(words, refuse_other_weights, told(*sums), 7)
    assert "a checkpoint of step 7 or earlier into DIR/latest" in str(refusal) and refusal.agreed


class Watch(TorchDispatchMode):
    """Counts operations on the device, and copies to it for which the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.blocking_copies = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default):
            assert all(index is None or index.dtype != torch.bool for index in args[1]), "the meta device allows a mask"
        result = func(*args, **(kwargs or {}))
        devices = {x.device.type for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)}
        self.operations += "meta" in devices
        if devices == {"cpu", "meta"} and func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            self.blocking_copies += not ((kwargs or {}).get("non_blocking") or args[2:] == (True,))
        return result


class Engine:
    """What `train_step` uses of DeepSpeed's engine. No optimizer steps: torch's does not know the device."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.optimizer = module, SimpleNamespace(param_groups=[])
        self.own_clipping = GradientClipping(module, 1.0, RANKS_OF_META)

    def __call__(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.own_clipping(self.optimizer)


class CopyOfZeros:
    """`HostCopy` of a tensor without data. Reading it is a wait if the device got work after the last one."""

    def __init__(self, tensor: Tensor, watch: Watch, waits: list[int]) -> None:
        self.on_device, self.watch, self.waits = tensor.device == META, watch, waits
        self.copy = torch.zeros(tensor.shape, dtype=tensor.dtype).numpy() if self.on_device else tensor.numpy()

    def read(self) -> np.ndarray:
        if self.on_device and self.watch.operations not in self.waits:
            self.waits.append(self.watch.operations)
        return self.copy


@pytest.fixture
def gpu_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the package take its GPU's paths, without kernels, a compiler or pinned memory."""
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: tensor.device == META), raising=False)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(triton_attention, "why_not_triton", lambda *_: None)
    monkeypatch.setattr(triton_attention, "launch", lambda *_: None)
    monkeypatch.setattr(engine_step, "seed_dropout", lambda *_: None)


@pytest.fixture
def watched(gpu_paths: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Watch, list[int]]]:
    """A mode that is on, and the waits for a step's numbers."""
    waits: list[int] = []
    with Watch() as watch:
        monkeypatch.setattr(engine_step, "HostCopy", lambda tensor: CopyOfZeros(tensor, watch, waits))
        yield watch, waits


def micro_batch() -> Batch:
    """Return arrays: a row of two documents and a padded row, with rare words."""
    batch = packed_batch(tiny_batch(lengths=(7, 4, 2)), [[0], [1, 2]]).map(Tensor.numpy)
    note_ids = np.zeros_like(batch.labels)
    note_ids[:, 1] = (1, 2)
    return batch._replace(note_ids=note_ids)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_step_waits_for_its_numbers_alone(encoding: str, objective: str, watched) -> None:
    """Every encoding and every objective meets both backends, each with notes and without."""
    place = list(ENCODINGS).index(encoding) + 3 * list(OBJECTIVES).index(objective)
    (watch, waits), backend, notes = watched, ("sdpa", "triton")[place % 2], place // 2 % 2 == 1
    sizes = {"num_layers": 1, "hidden_size": 48, "attention_dropout": 0.1}  # Triton's kernels take heads of at least 16
    model = tiny_config(position_encoding=encoding, attention_backend=backend, **sizes)
    config = Config(model=model, objective=ObjectiveConfig(objective=objective, notes=notes))
    dictionary = NoteDictionary(WORDS, model.hidden_size, config.objective) if notes else None
    setup = Setup(config, RANKS_OF_META)
    inputs = training_inputs([micro_batch()], setup, 1)
    engine = Engine(on_meta_device(model, config.objective).train())
    result = engine_step.train_step(engine, inputs, setup, 1, dictionary)
    assert len(waits) == notes, "only notes are read before the next step"
    assert (result.grad_norm, result.counts["tokens"], result.losses["loss"]) == (0, 0, 0) and len(waits) == 1
    assert watch.operations > 100 and watch.blocking_copies == 0


def test_the_watch_sees_masks_and_copies_that_wait() -> None:
    x = torch.ones(3, device=META)
    with Watch(), pytest.raises(AssertionError, match="a mask"):
        x[x > 0] = torch.zeros(1, device=META)  # a number would be filled in without a wait
    with Watch() as watch:
        torch.ones(3).to(META, non_blocking=True)
        assert watch.blocking_copies == 0
        torch.ones(3).to(META)
        torch.empty(3, device=META).copy_(torch.ones(3))
    assert watch.blocking_copies == 2


def test_ranks_compare_the_code_and_the_deepspeed_file(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 1}}')
    configs = (CONFIG.replace(parallel={"deepspeed_config": path}) for path in (None, str(file)))
    plain, with_file = (shared_by_ranks(Setup.of(config, RANKS)) for config in configs)
    assert plain == {"--compile auto": "plain layers", "the code of megatron_ddrp": package_sum()}
    assert len(package_sum()) == 64
    assert with_file == plain | {"zero_optimization.stage of --deepspeed_config": "1"}
