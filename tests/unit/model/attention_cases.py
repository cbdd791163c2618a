"""Random attention problems, what a backend answers to each, and the eager float64 answer: the judge of all others."""

from dataclasses import dataclass

import torch

from megatron_ddrp.model.attention.backends import attention_map, eager_attention
from megatron_ddrp.model.attention.gpu.triton_attention import triton_attention
from megatron_ddrp.model.attention.logits import Attending
from megatron_ddrp.model.embeddings import document_mask
from megatron_ddrp.model.positions import PositionTerms


@dataclass
class Case:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    terms: PositionTerms
    document_ids: torch.Tensor
    window: int | None = None
    causal: bool = False

    @property
    def inputs(self):
        """Everything that takes a gradient."""
        return [self.query, self.key, self.value, *(x for x in self.terms.tensors if x is not None)]

    @property
    def counted(self):
        """A fixed random weight for each document of two tokens or more, and 0 for the others."""
        ids = self.document_ids.cpu()
        lengths = document_mask(ids, int(ids.max())).sum(-1)  # [batch, documents]
        return torch.randn(lengths.shape, generator=torch.Generator().manual_seed(2)) * (lengths > 1)

    def attending(self, dropout=0.0, heads=()):
        device = self.query.device
        vectors = self.query, self.key, self.value
        rest = torch.tensor(heads, dtype=torch.long, device=device), dropout, self.counted.to(device)
        return Attending(*vectors, self.terms, self.document_ids, *rest, window=self.window, causal=self.causal)

    @property
    def valid(self):
        """bool `[b, 1, s, 1]`."""
        return (self.document_ids > 0)[:, None, :, None]

    def to(self, *args):
        """The same numbers on another device or in another dtype, as leaves."""

        def move(x):
            return x.detach().to(*args).requires_grad_()

        moved = self.terms.map(lambda x, _: move(x))
        # Heads side by side in memory, as the projections leave them.
        query, key, value = (move(x.transpose(1, 2)).transpose(1, 2) for x in (self.query, self.key, self.value))
        return Case(query, key, value, moved, self.document_ids.to(query.device), self.window, self.causal)

    def weight(self):
        """A fixed random weight for each entry of the context of valid tokens."""
        weight = torch.randn(self.value.shape, generator=torch.Generator().manual_seed(1))
        return weight.to(self.value) * self.valid


def make_case(
    rows, lowest, highest, tables="", heads=1, head_dim=16, bias_batch=None, scale=0.3, dtype=torch.float32, **rest
):
    """`tables`: letters out of q, Q, k, K, v, V (query and key table, offset bias; capital = one per head).

    `rows`: document numbers; `bias_batch`: 1 or b; `rest`: `bias_heads`, 1 or all, whether biases are compared, the
    window, causal.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    ids = torch.tensor(rows)
    batch, seq = ids.shape
    offsets = highest - lowest + 1
    names = {"q": "query_table", "k": "key_table", "v": "offset_bias"}
    chosen = {}
    for letter in tables:
        shape = (offsets,) if letter in "vV" else (offsets, head_dim)
        chosen[names[letter.lower()]] = random(heads if letter.isupper() else 1, *shape)
    bias_heads = rest.pop("bias_heads", heads)
    chosen["bias"] = None if bias_batch is None else random(bias_batch, bias_heads, seq, seq)
    chosen["biases_compared"] = rest.pop("biases_compared", True)
    vectors = (random(batch, seq, heads, head_dim).transpose(1, 2) for _ in range(3))
    return Case(*vectors, PositionTerms(scale, **chosen, lowest=lowest, highest=highest), ids, **rest)


def answer(case, backend, dropout=0.0, heads=(), seed=0):
    """Context of the valid tokens, HCD's sum if heads are compared, and the gradients of a weighted sum of both."""
    torch.manual_seed(seed)
    context, cosine = backend(case.attending(dropout, heads))
    assert (cosine is None) == (len(heads) == 0)
    found = (context * case.valid,) if cosine is None else (context * case.valid, cosine)
    loss = (found[0] * case.weight()).sum() + sum(found[1:])
    return *found, *torch.autograd.grad(loss, case.inputs)


def reference(case):
    """Eager attention in float64, on the CPU."""
    return answer(case.to("cpu", torch.float64), eager_attention)


def dropped_maps(case, dropout, seed):
    """Return what dropout leaves of the kernels' probabilities, the context of unit vectors, for head_dim = seq."""
    torch.manual_seed(seed)
    unit = torch.eye(case.query.shape[-1], device=case.query.device).expand_as(case.value)
    return triton_attention(case.attending(dropout)._replace(value=unit))[0].detach().cpu()


def assert_one_mask(case, **tolerance):
    """Check that the kernels' passes drop the same, and the right share; return what they keep, `[b, h, s, s]`."""
    dropout, seed = 0.25, 5  # a whole number of 1/65536
    keep = dropped_maps(case, dropout, seed) > 0

    def masked(attending):
        return attention_map(attending) * keep / (1 - dropout) @ attending.value, None

    expected = answer(case.to("cpu", torch.float64), masked)
    assert_close(answer(case, triton_attention, dropout, seed=seed), expected, **tolerance)
    assert abs(keep[0].double().mean().item() - 0.75) < 5 * (0.25 * 0.75 / keep[0].numel()) ** 0.5
    return keep


def assert_close(got, expected, **tolerance):
    """`tolerance`: rtol and atol; every tensor is compared in the dtype of the expected one, on the CPU."""
    found = [x.detach().to(y) for x, y in zip(got, expected, strict=True)]
    torch.testing.assert_close(found, [y.detach() for y in expected], **tolerance)
