"""TCD and HCD in closed form against the loop twins: sampled and whole, with padding, short rows and zero vectors."""

from functools import partial

import pytest
import torch

from megatron_ddrp.model import embeddings as similarity
from tests.reference import mth as twin
from tests.reference.tensors import assert_same, random

pytestmark = pytest.mark.usefixtures("torch_seed")
LENGTHS = (7, 4, 2, 1, 0)
COUNTED = 3
"""Rows of `LENGTHS` with at least two valid tokens."""
SEQ, HIDDEN, HEADS, DIM = 7, 6, 4, 3
VALID = torch.arange(SEQ) < torch.tensor(LENGTHS)[:, None]
DOCUMENTS = VALID.unsqueeze(1)
COSINES = {1: similarity.token_cosine, 2: partial(similarity.token_cosine, squared=True)}
ALLOWED = (VALID.unsqueeze(-1) & VALID.unsqueeze(-2)).unsqueeze(1)


def loop_hcd(query, key, heads, scale=1.0):
    """The twin on the logits of rows that count: `[COUNTED]`."""
    logits = query @ key.transpose(-1, -2) * scale
    return torch.stack([twin.hcd([logits[row]], [heads], VALID[row].tolist()) for row in range(COUNTED)])


@pytest.mark.parametrize("tokens", [2, 3, 50])
@pytest.mark.parametrize("power", [1, 2])
def test_tcd_equals_the_twin(tokens, power):
    hidden = random(len(LENGTHS), SEQ, HIDDEN)
    token_mask = VALID.long()
    if tokens < 50:  # the last ones, so that the sample is not simply a prefix
        token_mask = token_mask * (VALID.flip(-1).cumsum(-1).flip(-1) <= tokens)
    fast = COSINES[power](hidden, token_mask.unsqueeze(1)).squeeze(1)
    assert fast.shape == (len(LENGTHS),) and fast[COUNTED:].eq(0).all()
    samples = [token_mask[row].nonzero().flatten().tolist() for row in range(COUNTED)]
    slow = torch.stack([twin.tcd(hidden[row], samples[row], power) for row in range(COUNTED)])
    assert_same(fast[:COUNTED], slow, [hidden], atol=1e-12)
    # Rows with fewer than two tokens and tokens outside the sample get no gradient at all.
    (gradient,) = torch.autograd.grad(fast.sum(), hidden)
    marked = (token_mask > 0) & (torch.tensor(LENGTHS) >= 2)[:, None]
    assert gradient.isfinite().all() and gradient[~marked].eq(0).all() and gradient[marked].abs().sum(-1).gt(0).all()


@pytest.mark.parametrize("heads", [[0, 1], [1, 3], [0, 2, 3], [0, 1, 2, 3]], ids=str)
def test_hcd_of_content_by_grams_equals_the_twin(heads):
    query, key = random(len(LENGTHS), HEADS, SEQ, DIM), random(len(LENGTHS), HEADS, SEQ, DIM)
    gram = similarity.content_gram(query[:, heads], key[:, heads], DOCUMENTS, 0.3).squeeze(1)
    assert_same(similarity.cosine_of_gram(gram)[:COUNTED], loop_hcd(query, key, heads), [query, key], atol=1e-12)
    logits = query[:, heads] @ key[:, heads].transpose(-1, -2) * 0.3
    inner = logits.masked_fill(~ALLOWED, 0).flatten(2) @ logits.masked_fill(~ALLOWED, 0).flatten(2).transpose(1, 2)
    torch.testing.assert_close(gram, inner, rtol=0, atol=1e-12)


def test_hcd_of_all_content_heads_equals_the_twin():
    query, key = random(len(LENGTHS), HEADS, SEQ, DIM), random(len(LENGTHS), HEADS, SEQ, DIM)
    fast = similarity.content_cosine_of_all(query, key, DOCUMENTS).squeeze(1)
    assert_same(fast[:COUNTED], loop_hcd(query, key, list(range(HEADS))), [query, key], atol=1e-12)


@pytest.mark.parametrize("heads", [[1, 3], [0, 1, 2, 3]], ids=str)
def test_hcd_of_logits_equals_the_twin(heads):
    logits = random(len(LENGTHS), HEADS, SEQ, SEQ)
    fast = similarity.logits_cosine(logits[:, heads], ALLOWED, DOCUMENTS).squeeze(1)
    slow = [twin.hcd([logits[row]], [heads], VALID[row].tolist()) for row in range(COUNTED)]
    assert_same(fast[:COUNTED], torch.stack(slow), [logits], atol=1e-12)


def test_the_three_closed_forms_agree():
    query, key = random(len(LENGTHS), HEADS, SEQ, DIM), random(len(LENGTHS), HEADS, SEQ, DIM)
    by_gram = similarity.cosine_of_gram(similarity.content_gram(query, key, DOCUMENTS, 0.7)).squeeze(1)
    by_sum = similarity.content_cosine_of_all(query, key, DOCUMENTS).squeeze(1)
    by_logits = similarity.logits_cosine(query @ key.transpose(-1, -2), ALLOWED, DOCUMENTS).squeeze(1)
    torch.testing.assert_close(by_sum[:4], by_gram[:4], rtol=0, atol=1e-12)  # one token still has a 1×1 head
    torch.testing.assert_close(by_logits[:4], by_gram[:4], rtol=0, atol=1e-12)


def test_known_values():
    same, opposite = torch.ones(1, 2, 3, 3), torch.ones(1, 2, 3, 3) * torch.tensor([1.0, -2.0])[:, None, None]
    everything = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    one_document = torch.ones(1, 1, 3, dtype=torch.bool)
    assert similarity.logits_cosine(same, everything, one_document) == pytest.approx(1)
    assert similarity.logits_cosine(opposite, everything, one_document) == pytest.approx(-1)
    hidden = torch.tensor([[[1.0, 0], [0, 2], [3, 0]]])
    assert similarity.token_cosine(hidden, torch.ones(1, 1, 3, dtype=torch.long)) == pytest.approx(1 / 3)
    assert similarity.token_cosine(hidden, torch.tensor([[[1, 1, 0]]])) == pytest.approx(0)


def test_squared_cosines_know_two_poles_from_an_even_spread():
    def both(vectors):
        vectors = torch.tensor(vectors, dtype=torch.float64).unsqueeze(0)
        everything = torch.ones(1, 1, vectors.shape[1], dtype=torch.long)
        return [cosine(vectors, everything).item() for cosine in COSINES.values()]

    assert both([[1.0, 0], [-1, 0], [1, 0], [-1, 0]]) == pytest.approx([-1 / 3, 1])  # least, and most
    assert both([[1.0, 0], [-1, 0], [0, 1], [0, -1]]) == pytest.approx([-1 / 3, (4 - 2) / (2 * 3)])  # Welch's bound
    assert both([[2.0, 0, 0], [0, 3, 0], [0, 0, -4]]) == pytest.approx([0, 0])  # fewer tokens than dimensions


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_vectors_give_finite_values_and_gradients(dtype):
    hidden = torch.zeros(2, 4, 3, dtype=dtype, requires_grad=True)
    query = torch.zeros(2, 2, 4, 3, dtype=dtype, requires_grad=True)
    valid = torch.ones(2, 4, dtype=torch.bool)
    allowed = (valid.unsqueeze(-1) & valid.unsqueeze(-2)).unsqueeze(1)
    documents = valid.unsqueeze(1)
    values = [
        similarity.token_cosine(hidden, documents.long()),
        similarity.token_cosine(hidden, documents.long(), squared=True),
        similarity.cosine_of_gram(similarity.content_gram(query, query, documents, 1.0)),
        similarity.content_cosine_of_all(query, query, documents),
        similarity.logits_cosine(query @ query.transpose(-1, -2), allowed, documents),
    ]
    for value in values:
        assert value.isfinite().all()
        value.sum().backward()
    assert hidden.grad.isfinite().all() and query.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("power", [1, 2])
def test_half_precision_is_reduced_in_fp32(dtype, power):
    hidden = (torch.randn(2, 300, 64) * 30).to(dtype)  # squares beyond fp16
    mask = torch.ones(2, 1, 300, dtype=torch.long)
    got = COSINES[power](hidden, mask)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), COSINES[power](hidden.double(), mask), rtol=0, atol=1e-6)


@pytest.mark.parametrize("cosine", COSINES.values())
def test_scale_of_the_vectors_does_not_matter(cosine):
    hidden = random(2, SEQ, HIDDEN)
    mask = torch.ones(2, 1, SEQ, dtype=torch.long)
    factors = torch.rand(2, SEQ, 1, dtype=torch.float64) * 100 + 0.01
    torch.testing.assert_close(cosine(hidden * factors, mask), cosine(hidden, mask))


def test_documents_of_a_packed_row_count_as_rows_of_their_own():
    """Documents of 4 and 3 tokens in one row, and the same two in rows of their own: every form, with gradients."""
    lengths, seq = (4, 3), 8
    document_ids = torch.tensor([[1] * 4 + [2] * 3 + [0]])
    documents = similarity.document_mask(document_ids, 2)  # [1, 2, seq]
    allowed = (documents.unsqueeze(-1) & documents.unsqueeze(-2)).any(1, keepdim=True)
    hidden, query, key = random(1, seq, HIDDEN), random(1, HEADS, seq, DIM), random(1, HEADS, seq, DIM)

    def forms(hidden, query, key, documents, allowed):
        some = slice(0, 2)
        logits = query @ key.transpose(-1, -2)
        return torch.stack(
            (
                similarity.token_cosine(hidden, documents.long()),
                similarity.token_cosine(hidden, documents.long(), squared=True),
                similarity.cosine_of_gram(similarity.content_gram(query[:, some], key[:, some], documents, 1.0)),
                similarity.content_cosine_of_all(query, key, documents),
                similarity.logits_cosine(logits[:, some], allowed, documents),
            )
        )  # [forms, batch, documents]

    packed = forms(hidden, query, key, documents, allowed)[:, 0]  # [forms, 2]
    alone, start = [], 0
    for length in lengths:
        part = slice(start, start + length)
        ones = torch.ones(1, 1, length, dtype=torch.bool)
        everything = torch.ones(1, 1, length, length, dtype=torch.bool)
        alone.append(forms(hidden[:, part], query[:, :, part], key[:, :, part], ones, everything)[:, 0, 0])
        start += length
    assert_same(packed, torch.stack(alone, dim=1), [hidden, query, key], atol=1e-12)
