"""Deterministic operators in fine-tuning, and the fallback at an operator that has no deterministic form."""

import numpy as np
import pytest
import torch
from torch import nn

from megatron_ddrp.conversion.model_code import SEQUENCE
from megatron_ddrp.encoders.rows import RowWriter
from megatron_ddrp.tasks.finetune import training
from megatron_ddrp.tasks.finetune.runs import TuningRun
from megatron_ddrp.tasks.finetune.table_files import Task
from megatron_ddrp.tasks.finetune.training import TaskModel

GPU = torch.device("cuda")


def settings():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


@pytest.fixture(autouse=True)
def settings_of_before():
    before = settings()
    training._tell.cache_clear()
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch.utils.deterministic.fill_uninitialized_memory = before[2]


class PutBackward(torch.autograd.Function):
    """The identity, with a backward pass through `put_`, which torch has no deterministic form of on any device."""

    @staticmethod
    def forward(ctx, given):
        return given.clone()

    @staticmethod
    def backward(ctx, gradient):
        places = torch.arange(gradient.numel())
        return torch.zeros_like(gradient).put_(places, gradient.flatten())


class Encoder(nn.Module):
    """Means of embeddings with dropout; the embedding's backward pass ends before that of `put_` fails."""

    def __init__(self, puts):
        super().__init__()
        self.puts = puts
        self.embedding, self.after = nn.Embedding(20, 8), nn.Linear(8, 8)

    def forward(self, batch):
        hidden = nn.functional.dropout(self.embedding(batch.input_ids), 0.1, self.training)
        return self.after(PutBackward.apply(hidden) if self.puts else hidden)


def tune(puts, precision="fp32"):
    """Do one run of 3 epochs in micro-batches of half a batch; return its weights and predictions."""
    torch.manual_seed(0)
    writer = RowWriter(0)
    random = np.random.default_rng(0)
    for length in random.integers(3, 9, 16):
        writer.add(random.integers(1, 20, length).tolist())
    rows = writer.rows(np.arange(16) % 2)
    run = TuningRun("t", 8, 1e-2, 3, 1, 8, encoder="e", data="d", micro_batch_size=4, precision=precision)
    task = Task(name="t", kind="classification", labels=("a", "b"), metric="accuracy")
    result = training.finetune(run, task, TaskModel(Encoder(puts), 8, SEQUENCE, 2), rows, {"dev": rows})
    return result.model.state_dict(), result.predictions["dev"]


def test_the_bar_of_a_run_counts_the_batches_of_training_and_of_every_prediction(monkeypatch):
    """3 epochs of 2 steps, and after each epoch one batch of 16 development rows, 64 at most."""
    shown = []

    class Bar:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def update(self, count=1):
            shown[0]["moved"] += count

    def made(unit, total, doing, show):
        shown.append({"unit": unit, "total": total, "doing": doing, "show": show, "moved": 0})
        return Bar()

    monkeypatch.setattr(training, "progress", made)
    tune(puts=False)
    assert shown == [{"unit": "batch", "total": 9, "doing": "t seed 1", "show": True, "moved": 9}]


@pytest.mark.parametrize("before", [(False, False, True), (True, True, False), (True, False, True)])
def test_settings_are_put_back_as_they_were(before):
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch.utils.deterministic.fill_uninitialized_memory = before[2]
    with pytest.raises(KeyError), training.deterministic(GPU):
        assert settings() == (True, False, False)
        raise KeyError
    assert settings() == before
    with training.deterministic(torch.device("cpu")):
        assert settings() == before


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_at_an_operator_without_a_deterministic_form_begins_anew(precision, monkeypatch, capsys):
    expected, predicted = tune(puts=False, precision=precision)
    monkeypatch.setattr(training, "deterministic", lambda device, real=training.deterministic: real(GPU))
    before = settings()
    for _ in range(2):
        with pytest.warns(UserWarning, match="put_ does not have a deterministic implementation"):
            weights, again = tune(puts=True, precision=precision)
        assert all(torch.equal(weights[name], weight) for name, weight in expected.items())
        assert again.tolist() == predicted.tolist()
    told = capsys.readouterr().err
    assert told == (
        "warning: torch's put_ has no deterministic form on this device: results may differ between runs of one seed\n"
    )
    assert settings() == before


def test_cublas_without_a_fixed_workspace_is_named_and_other_errors_pass(capsys):
    asked = []

    def product():
        asked.append(torch.is_deterministic_algorithms_warn_only_enabled())
        if not asked[-1]:
            raise RuntimeError(
                "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or "
                "`at::Context::setDeterministicAlgorithms(true)`, but this operation is not deterministic because it "
                "uses CuBLAS and you have CUDA >= 10.2."
            )
        return 3

    with training.deterministic(GPU):
        assert training.with_fallback(product) == 3 and asked == [False, True]
        with pytest.raises(RuntimeError, match="out of memory"):
            training.with_fallback(lambda: (_ for _ in ()).throw(RuntimeError("CUDA out of memory")))
    assert "torch's CuBLAS, with this CUBLAS_WORKSPACE_CONFIG, has no" in capsys.readouterr().err


def test_a_workspace_of_the_user_stays(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    training.fix_workspace()
    assert training.os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    training.fix_workspace()
    assert training.os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
