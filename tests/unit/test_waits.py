"""Nothing in a micro-batch waits for the device, and a step's numbers are read at once.

Whole steps run on torch's "meta" device: its tensors have no data, so that whatever would make the host wait for a GPU
(reading a number, `nonzero`, an index by a mask, a copy to the host) raises. `Watch` sees what that device allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ddrp.config import ENCODINGS, OBJECTIVES, Config, ObjectiveConfig
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.batches.word_counts import RareWords
from megatron_ddrp.engine import step as engine_step
from megatron_ddrp.engine.layout import GradientClipping, Setup
from megatron_ddrp.engine.step import training_inputs
from megatron_ddrp.model import on_meta_device
from megatron_ddrp.model.attention.gpu import triton_attention
from megatron_ddrp.objectives.electra import NoteDictionary
from megatron_ddrp.parallel.process_group import Ranks
from tests.unit.model.tiny import packed_batch, tiny_batch, tiny_config

META = torch.device("meta")
RANKS = Ranks(0, 1, META)
WORDS = RareWords(np.arange(3, dtype=np.uint64), np.full(3, 9), np.arange(3), np.arange(1, 4))


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
        self.own_clipping = GradientClipping(module, 1.0, RANKS)

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


@pytest.mark.parametrize("by_triton", [False, True], ids=["sdpa", "triton"])
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_step_waits_for_its_numbers_alone(
    encoding: str, objective: str, by_triton: bool, watched: tuple[Watch, list[int]]
) -> None:
    # Every encoding × objective meets both backends, once with notes and once without; neighbours in turn.
    notes = (list(ENCODINGS).index(encoding) + list(OBJECTIVES).index(objective) + by_triton) % 2 == 1
    backend = "triton" if by_triton else "sdpa"
    watch, waits = watched
    # Triton's kernels take heads of at least 16.
    sizes = {"num_layers": 1, "hidden_size": 48, "attention_dropout": 0.1}
    model = tiny_config(position_encoding=encoding, attention_backend=backend, **sizes)
    config = Config(model=model, objective=ObjectiveConfig(objective=objective, notes=notes))
    dictionary = NoteDictionary(WORDS, model.hidden_size, config.objective) if notes else None
    setup = Setup(config, RANKS)
    inputs = training_inputs([micro_batch()], setup, 1)
    engine = Engine(on_meta_device(model, config.objective).train())
    result = engine_step.train_step(engine, inputs, setup, 1, dictionary)
    assert len(waits) == notes, "only notes are read before the next step"
    assert (result.grad_norm, result.counts["tokens"], result.losses["loss"]) == (0, 0, 0) and len(waits) == 1
    assert watch.operations > 100 and watch.blocking_copies == 0


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.sum() > 0),
        lambda x: x.tolist(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.cpu(),
    ],
    ids=["item", "bool", "tolist", "nonzero", "index by a mask", "copy to the host"],
)
def test_the_device_refuses_to_be_waited_for(wait: Any) -> None:
    # torch refuses some waits on its meta device by a NotImplementedError of its own
    with pytest.raises((RuntimeError, NotImplementedError), match="meta|Meta"):
        wait(torch.ones(3, device=META))


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
