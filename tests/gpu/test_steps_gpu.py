"""One training step of every encoding, objective and attention backend in bf16, against eager attention in fp32 on the
CPU: the loss and gradient norms."""

import dataclasses
import re
from itertools import product
from typing import Any

import pytest
import torch

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.config import ENCODINGS, OBJECTIVES, Config, ModelConfig
from megatron_ddrp.corpus import Corpus
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.engine.build import check_device
from megatron_ddrp.engine.layout import Setup, WeightedLoss
from megatron_ddrp.engine.step import move_tensors, training_inputs
from megatron_ddrp.errors import UserError
from megatron_ddrp.model import build_model
from megatron_ddrp.model.heads import masked_lm_sum
from megatron_ddrp.model.stages import DTYPES
from megatron_ddrp.objectives.contract import count, make_objective
from megatron_ddrp.parallel.process_group import Ranks
from tests.gpu.conftest import ON_BOTH, half_precision, on_devices
from tests.integration.conftest import Flags

LOSS, NORM = 1e-3, 0.1
"""Relative tolerances of the loss and of gradient norms. SDPA in bf16 on a CPU is off by 2e-4 and 0.031 at most."""

SCALE = 1024.0
"""Factor of the loss in the backward pass, so that gradients in fp16 do not underflow."""

SIZES: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "seq_length": 128}

(CHOICES,) = (f.metadata["choices"] for f in dataclasses.fields(ModelConfig) if f.name == "attention_backend")
BACKENDS = [name for name in CHOICES if name not in ("auto", "eager", "blocked")]
"""Those that a GPU trains with."""

CHANGES: dict[str, dict[str, Any]] = {
    "all heads": {"hcd_heads": 0},
    "packed": {"packing": True},
    "packed, all heads": {"packing": True, "hcd_heads": 0},
    "rows without padding": {"global_batch_size": 64},  # four of these rows are full
    "compiled": {"compile": "on"},
}


def last_micro_batch(config: Config) -> tuple[Config, Batch]:
    """Return the configuration with the vocabulary's size, and the loader's micro-batch of the longest rows (numpy)."""
    corpus = Corpus.open(config)
    return config.replace(model={"vocab_size": corpus.tokenizer.vocab_size}), corpus.loader("train", 0, 1).step(0)[-1]


def loss_and_norms(config: Config, arrays: Batch, device: str, dtype: torch.dtype) -> tuple[float, float, float]:
    """Return the loss of a freshly initialised model, its gradient's norm, and the norm of the part that passed through
    the softmax: that of queries, keys and positions. All in fp32."""
    objective = make_objective(config.objective)
    torch.manual_seed(1)
    model = build_model(config.model, objective=config.objective).to(device, dtype)
    counts = dict(zip(objective.counts, count(objective, [arrays]).tolist(), strict=True))
    weights = torch.zeros(len(objective.sum_names), device=device)
    for number, term in enumerate(objective.terms):
        weights[number] = term.weight / max(1, counts[term.per])
    (micro_batch,) = training_inputs([arrays], Setup(config, Ranks(0, 1, torch.device(device))), 1)
    loss = WeightedLoss(weights)(model(*move_tensors(micro_batch.inputs, torch.device(device))))
    (loss * SCALE).backward()
    norms = {name: w.grad.float().norm() / SCALE for name, w in model.named_parameters() if w.grad is not None}
    of_softmax = [norm for name, norm in norms.items() if re.search(r"query|key|position", name)]
    return loss.item(), torch.stack([*norms.values()]).norm().item(), torch.stack(of_softmax).norm().item()


def assert_step_is_close(words: list[str], backend: str, device: str) -> None:
    """Compare a step with a backend in half precision to eager attention in fp32 on the CPU, or skip."""
    precision = half_precision(device)
    try:
        config = parse_arguments([*words, f"--{precision}", "--attention-backend", backend]).config
        check_device(config, torch.device(device))
    except UserError as refused:
        pytest.skip(str(refused))
    config, arrays = last_micro_batch(config)
    loss, norm, softmax_norm = loss_and_norms(config, arrays, device, DTYPES[precision])
    eager = config.replace(model={"attention_backend": "eager", "compile": "off"})
    expected = loss_and_norms(eager, arrays, "cpu", torch.float32)
    assert loss == pytest.approx(expected[0], rel=LOSS)
    assert norm == pytest.approx(expected[1], rel=NORM)
    assert softmax_norm == pytest.approx(expected[2], rel=NORM)


STEPS_ON_CPU = [("ddrp", "mth", "sdpa"), ("tupe-r", "electra", "sdpa"), ("absolute", "mlm", "triton")]
CHANGES_ON_CPU = [("ddrp", "sdpa", "packed, all heads"), ("absolute", "sdpa", "rows without padding")]


@pytest.mark.parametrize(
    "device, encoding, objective, backend", on_devices(product(ENCODINGS, OBJECTIVES, BACKENDS), STEPS_ON_CPU)
)
def test_a_step_equals_fp32_on_the_cpu(device: str, encoding: str, objective: str, backend: str, flags: Flags) -> None:
    assert_step_is_close(flags(**SIZES, position_encoding=encoding, objective=objective), backend, device)


@pytest.mark.parametrize(
    "device, encoding, backend, change", on_devices(product(("absolute", "ddrp"), BACKENDS, CHANGES), CHANGES_ON_CPU)
)
def test_heads_rows_and_compiled_layers(device: str, encoding: str, backend: str, change: str, flags: Flags) -> None:
    assert_step_is_close(flags(**SIZES, position_encoding=encoding, **CHANGES[change]), backend, device)


@pytest.mark.parametrize("device", ON_BOTH)
def test_the_loss_of_a_whole_vocabulary_in_half_precision(device: str) -> None:
    """Beside float64; the padding of the vocabulary has no part in it."""
    dtype = DTYPES[half_precision(device)]
    logits = torch.randn(300, 30592, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[:, 30522:] = -torch.inf
    labels = torch.arange(300) * 101
    loss, exact = (x.detach().requires_grad_() for x in (logits.to(device), logits.double()))
    got, expected = masked_lm_sum(loss, labels.to(device)), masked_lm_sum(exact, labels)
    torch.testing.assert_close(got.cpu().double(), expected, rtol=1e-5, atol=0)
    for total in (got, expected):
        (SCALE * total).backward()
    assert loss.grad is not None and loss.grad.dtype == dtype
    torch.testing.assert_close(loss.grad.cpu().double(), exact.grad, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
