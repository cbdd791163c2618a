"""No tensor of `[batch, heads, seq, seq]` or `[batch, 1, seq, seq]` arises on the path of the Triton kernels."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ddrp.config import ENCODINGS, encoding_class
from megatron_ddrp.model.attention.gpu import triton_attention
from tests.unit.model.tiny import some_draws, tiny_batch, tiny_model

BATCH, SEQ = 2, 23

pytest.importorskip("triton")


class Shapes(TorchDispatchMode):
    """Collects the shapes of all results."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        self.seen |= {tuple(x.shape) for x in tree_leaves(results) if isinstance(x, torch.Tensor)}
        return results


def pairs_of_rows(backend, encoding, **options):
    """Return the shapes with an entry for each pair of tokens of each row, in a training step with HCD."""
    sizes = {"attention_dropout": 0.1, "seq_length": SEQ}
    model = tiny_model(position_encoding=encoding, attention_backend=backend, **sizes, **options)
    model = model.float().train()
    batch = tiny_batch((SEQ, SEQ - 2), SEQ)
    with Shapes() as shapes:
        model(batch, some_draws(batch)).sums.sum().backward()
    return {shape for shape in shapes.seen if len(shape) > 3 and shape[0] == BATCH and shape[-2:] == (SEQ, SEQ)}


IN_LOGITS = [(name, {}) for name in ENCODINGS if encoding_class(name).in_logits]
LOCAL = {"local_attention": 4, "global_every": 2}


@pytest.mark.parametrize("encoding, options", [*IN_LOGITS, ("ddrp", LOCAL)])
def test_no_logits_are_stored(encoding, options, monkeypatch):
    monkeypatch.setattr(triton_attention, "why_not_triton", lambda *_: None)
    monkeypatch.setattr(triton_attention, "launch", lambda *_: None)  # the kernels work on tiles
    assert pairs_of_rows("triton", encoding, **options) == set()
    assert pairs_of_rows("eager", encoding, **options)
