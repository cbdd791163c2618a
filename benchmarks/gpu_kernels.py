"""Attention by itself for the GPU report: forward and backward on full rows, and each of our Triton kernels.

TFLOP/s of a whole call are those of plain attention, which has 2 products forward and 5 backward, in its time: what
position terms, HCD and dropout cost lowers them. Those of a kernel are of its own products.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu_device import DTYPES, kernel_seconds, precision
from gpu_groups import Bench, Row, Sizes, noted
from gpu_others import DISENTANGLED
from measure import DEVICE, time_rounds
from torch import Tensor, nn

from megatron_ddrp.config import ModelConfig, encoding_class
from megatron_ddrp.model.attention.attending import Attending
from megatron_ddrp.model.attention.backends import backend_function, resolve_backend

PRODUCTS = 7
COMPARED = 2
"""Heads in HCD, as in the recipe."""

Call = Callable[[], list[Tensor]]
"""Type of a forward pass; it returns what has a gradient."""

TRITON_PRODUCTS = {
    "forward_kernel": 2,  # Q·Kᵀ, P·V
    "query_gradient_kernel": 3,  # Q·Kᵀ again, dO·Vᵀ, dA·K
    "key_gradient_kernel": 4,  # both again, dAᵀ·Q, Pᵀ·dO
    "bias_gradient_kernel": 2,  # both again
    "compare_kernel": 1,  # Q·Kᵀ for the sum of heads (three and more heads are multiplied once more)
    "pull_kernel": 1,  # Q·Kᵀ
}
"""Triton kernel → its products of `[seq, head_dim]` and `[head_dim, seq]` per head."""

OF_SOME_HEADS = {"compare_kernel", "pull_kernel"}
"""HCD's kernels, of the compared heads alone."""


def leaf(*shape: int) -> Tensor:
    """Return a random tensor on the device that has a gradient."""
    return torch.randn(*shape, device=DEVICE, dtype=DTYPES[precision()], requires_grad=True)


def vectors(sizes: Sizes) -> list[Tensor]:
    """Return query, key and value `[batch, heads, seq, head_dim]`."""
    batch, seq, heads = sizes.tokens // sizes.usual_length, sizes.usual_length, sizes.heads
    return [leaf(batch, seq, heads, sizes.hidden // heads).transpose(1, 2) for _ in range(3)]


def torchs(sizes: Sizes) -> Call:
    """Return torch's attention, which is its flash kernel in half precision on GPUs that have it."""
    query, key, value = vectors(sizes)
    return lambda: [F.scaled_dot_product_attention(query, key, value, dropout_p=0.1)]


def ours(encoding: str, compared: int, sizes: Sizes) -> Call:
    """Return our attention with an encoding's terms, by the backend that a run would choose."""
    shape: dict[str, Any] = {"hidden_size": sizes.hidden, "num_attention_heads": sizes.heads}
    config = ModelConfig(position_encoding=encoding, num_layers=1, seq_length=sizes.usual_length, **shape)
    module = encoding_class(encoding)(config)
    maps = [nn.Linear(config.hidden_size, config.hidden_size) for _ in range(2)]
    tensors = module.layer_part(config).of_layer(module(torch.arange(sizes.usual_length)[None]), *maps)
    terms = module.terms(config, tensors).by_offset.map(lambda x, _: leaf(*x.shape))
    query, key, value = vectors(sizes)
    documents = torch.ones(query.shape[0], query.shape[2], dtype=torch.long, device=DEVICE)
    counted, heads = documents[:, :1].float(), torch.arange(compared, device=DEVICE)
    attending = Attending(query, key, value, terms, documents, heads, 0.1, counted)
    attend = backend_function(resolve_backend("auto", attending.demand, in_logits=True)[0])
    return lambda: [output for output in attend(attending) if output is not None]


def flashdebertas(sizes: Sizes) -> Call:
    """Return the attention of `flashdeberta`, which has no dropout."""
    ops, buckets = importlib.import_module("flashdeberta.ops.flash_attention"), DISENTANGLED["position_buckets"]
    query, key, value = vectors(sizes)
    tables = [leaf(1, sizes.heads, 2 * buckets, query.shape[-1]) for _ in range(2)]
    words = (None, *tables, False, (3 * query.shape[-1]) ** -0.5, buckets, sizes.usual_length)
    return lambda: [ops.flash_attention_with_disentangled(query, key, value, *words)]


def disentangled_flashs(sizes: Sizes) -> Call:
    """Return the attention of `disentangled-flash` with its projections, which it does not come without."""
    package = importlib.import_module("disentangled_flash")
    shape = {"hidden_size": sizes.hidden, "num_attention_heads": sizes.heads}
    config = importlib.import_module("disentangled_flash._reference").DebertaAttentionConfig(**shape)
    module = package.TritonTrainingDisentangledSelfAttention(config).to(DEVICE, DTYPES[precision()]).train()
    hidden = leaf(sizes.tokens // sizes.usual_length, sizes.usual_length, sizes.hidden)
    mask = torch.ones(hidden.shape[:2], device=DEVICE, dtype=torch.long)
    table = leaf(2 * config.position_buckets, sizes.hidden)
    return lambda: [module(hidden, mask, rel_embeddings=table)[0]]


CALLS: dict[str, Callable[[Sizes], Call]] = {
    "torch": torchs,
    "ours, ddrp": partial(ours, "ddrp", 0),
    "ours, ddrp with HCD": partial(ours, "ddrp", COMPARED),
    "ours, deberta": partial(ours, "deberta", 0),
    "flashdeberta": flashdebertas,
    "disentangled-flash, with its projections": disentangled_flashs,
}


def kernels(bench: Bench) -> None:
    """Time every call of attention, and on a GPU the kernels of ours."""
    sizes = bench.sizes
    product = 2 * sizes.tokens * sizes.usual_length * sizes.hidden  # FLOP, of all heads
    for name, start in CALLS.items():
        row: Row = {"name": name, "micro_batch": f"{sizes.tokens // sizes.usual_length} x {sizes.usual_length}"}
        with noted([row]):
            call = start(sizes)
            gradients = [torch.ones_like(output) for output in call()]

            def run(call: Call = call, gradients: list[Tensor] = gradients) -> None:
                torch.autograd.backward(call(), gradients)

            milliseconds = float(min(time_rounds({name: run}, sizes.rounds)[name])) * 1e3
            row |= {"ms": milliseconds, "tflops": PRODUCTS * product / milliseconds / 1e9}
        bench.write(row)
        for kernel, seconds in (kernel_seconds(run) if "ms" in row else {}).items():
            if kernel in TRITON_PRODUCTS:
                share = COMPARED / sizes.heads if kernel in OF_SOME_HEADS else 1.0
                tflops = TRITON_PRODUCTS[kernel] * share * product / seconds / 1e12
                bench.write({"name": name, "part": kernel, "ms": seconds * 1e3, "tflops": tflops})
