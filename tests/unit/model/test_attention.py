"""The one attention against the loop twins, and each backend against the eager one, in values and in every gradient.

The synthetic terms use all that the contract allows, though no encoding of today asks for it. Tiles of query rows stand
against whole matrices, `spread` against an index gather, and `collect_values` as its exact adjoint.
"""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch

from megatron_ddrp.model.attention import cpu as blocks
from megatron_ddrp.model.attention.backends import BACKENDS, eager_attention
from megatron_ddrp.model.attention.cpu import blocked_attention
from megatron_ddrp.model.attention.logits import Attending, allowed_pairs, attention_logits, collect_values, spread
from megatron_ddrp.model.embeddings import document_mask
from megatron_ddrp.model.positions import PositionTerms
from tests.reference import objectives
from tests.reference.attention import attend, dot, within_window
from tests.reference.positions import clip
from tests.reference.tensors import assert_same, random

pytestmark = pytest.mark.usefixtures("torch_seed")
BATCH, HEADS, SEQ, DIM = 4, 3, 7, 4
DOCUMENT_IDS = torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [1] * 2 + [0] * 5, [1] * 3 + [2] * 2 + [0] * 2])
NINE = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 0, 0], [1] * 9])
NONE = torch.empty(0, dtype=torch.long)
assert_all_close = partial(torch.testing.assert_close, rtol=0, atol=1e-11)
LOWEST, HIGHEST = -4, 3
ROWS = HIGHEST - LOWEST + 1
TERMS = {
    "content": {},
    "query-shared": {"query_table": (1, ROWS, DIM)},
    "query-per-head": {"query_table": (HEADS, ROWS, DIM)},
    "key-shared": {"key_table": (1, ROWS, DIM)},
    "key-per-head": {"key_table": (HEADS, ROWS, DIM)},
    "bias-1": {"bias": (1, HEADS, SEQ, SEQ)},
    "bias-shared": {"bias": (1, 1, SEQ, SEQ)},
    "bias-batch": {"bias": (BATCH, HEADS, SEQ, SEQ)},
    "offset-shared": {"offset_bias": (1, ROWS)},
    "offset-per-head": {"offset_bias": (HEADS, ROWS)},
}
TERMS["all"] = TERMS["query-per-head"] | TERMS["key-shared"] | TERMS["bias-batch"] | TERMS["offset-per-head"]
TERMS |= {"offset-not-compared": TERMS["offset-per-head"], "all-biases-not-compared": TERMS["all"]}


def loop_logits(query, key, terms):
    """The contract's formula, pair by pair: query, key `[b, h, s, d]` → `[b, h, s, s]`."""
    entries = []
    for b, h, i, j in itertools.product(range(BATCH), range(HEADS), range(SEQ), range(SEQ)):
        row = clip(i - j, terms.lowest, terms.highest) - terms.lowest
        entry = dot(query[b, h, i], key[b, h, j])
        for vector, table in ((query[b, h, i], terms.query_table), (key[b, h, j], terms.key_table)):
            if table is not None:
                entry = entry + dot(vector, table[h if len(table) > 1 else 0, row])
        entry = entry * terms.scale
        if terms.bias is not None:
            entry = entry + terms.bias.expand(-1, HEADS, -1, -1)[b if len(terms.bias) > 1 else 0, h, i, j]
        if terms.offset_bias is not None:
            entry = entry + terms.offset_bias[h if len(terms.offset_bias) > 1 else 0, row]
        entries.append(entry)
    return torch.stack(entries).reshape(BATCH, HEADS, SEQ, SEQ)


def tensors_of(terms):
    return [x for x in terms.tensors if x is not None]


def problem(kind):
    """Return query, key and value, whose heads are neighbours in memory as the projections leave them, the terms, and
    everything that takes a gradient."""
    vectors = [random(BATCH, SEQ, HEADS, DIM).transpose(1, 2) for _ in range(3)]
    tables = {name: random(*shape) for name, shape in TERMS[kind].items()}
    compared = not kind.endswith("-not-compared")
    terms = PositionTerms(0.6, **tables, lowest=LOWEST, highest=HIGHEST, biases_compared=compared)
    return vectors, terms, [*vectors, *tensors_of(terms)]


def assert_equals_eager(backend, kind, heads, window=None, causal=False):
    """Compare a backend's context, cosine and gradients with those of eager attention."""
    vectors, terms, inputs = problem(kind)
    arguments = *vectors, terms, torch.tensor(heads, dtype=torch.long), inputs, DOCUMENT_IDS, window, causal
    (*got, gradients), (*wanted, expected) = (run_backend(name, *arguments) for name in (backend, "eager"))
    assert_all_close((*got, *gradients), (*wanted, *expected))
    assert (got[1] is None) == (not heads)


def run_backend(name, query, key, value, terms, heads, inputs, document_ids=DOCUMENT_IDS, window=None, causal=False):
    """Context of the valid tokens, cosine of the documents that count, weighted, and the gradients of both together."""
    counts = document_mask(document_ids, int(document_ids.max())).sum(-1) > 1  # [batch, documents]
    generator = torch.Generator().manual_seed(1)
    counted = torch.randn(counts.shape, generator=generator, dtype=torch.float32) * counts
    attending = Attending(query, key, value, terms, document_ids, heads, 0.0, counted, window=window, causal=causal)
    context, cosine = BACKENDS[name](attending)
    context = context * (document_ids > 0)[:, None, :, None]  # what stands at padding is nobody's business
    loss = (context * torch.randn(context.shape, generator=generator).to(context.dtype)).sum()
    if cosine is not None:
        assert cosine.shape == ()
        loss = loss + cosine
    return context, cosine, torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("kind", TERMS)
def test_logits_equal_the_contract_formula(kind):
    (query, key, _), terms, inputs = problem(kind)
    assert_same(attention_logits(query, key, terms), loop_logits(query, key, terms), [*inputs[:2], *inputs[3:]])


TWO_BLOCKS = 2 * HEADS * SEQ**2
TILED = [
    *((None, False, SEQ, 0, TWO_BLOCKS), (None, False, SEQ, SEQ, TWO_BLOCKS), (None, False, 3, 0, 1)),
    *((None, False, 1, SEQ, 1), (0, False, 1, SEQ, 1), (1, False, 2, 0, 1), (3, False, 3, SEQ, 1)),
    *((SEQ - 1, False, 5, 0, 1), (None, True, 2, SEQ, 1), (2, True, 3, 0, 1)),
]
"""Window, causal, rows per tile, longest row whose pairs are kept, elements per block."""


@pytest.mark.parametrize("heads", [[], [1, 2], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("kind", TERMS)
@pytest.mark.parametrize(
    "backend, window, causal, tile_rows, kept_length, block_elements",
    [*(("blocked", *sizes) for sizes in TILED), *(("sdpa", *sizes) for sizes in TILED[3:])],
)
def test_backends_equal_eager(
    backend, window, causal, tile_rows, kept_length, block_elements, kind, heads, monkeypatch
):
    sizes = {"KEPT_LENGTH": kept_length, "SMALLEST_TILE": tile_rows, "BLOCK_ELEMENTS": block_elements}
    for name, size in (sizes | {"TILE_ELEMENTS": 1}).items():
        monkeypatch.setattr(blocks, name, size)
    assert_equals_eager(backend, kind, heads, window, causal)


EVERYWHERE = [("content", None, False), ("all", None, False), ("all-biases-not-compared", None, False)]
WINDOWS = [("content", 2, False), ("all", 1, False), ("content", None, True), ("all", None, True), ("all", 2, True)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind, window, causal", EVERYWHERE + WINDOWS)
def test_context_and_cosine_equal_the_twins(backend, kind, window, causal):
    (query, key, value), terms, inputs = problem(kind)
    reached, heads = terms.within(window, True) if causal else terms, NONE if causal else torch.tensor([0, 2])
    attending = Attending(query, key, value, reached, DOCUMENT_IDS, heads, window=window, causal=causal)
    context, _ = BACKENDS[backend](attending)
    logits = loop_logits(query, key, terms)
    rows = zip(logits, value, DOCUMENT_IDS, strict=True)
    slow = torch.stack([attend(within_window(a, window, causal), v, ids.tolist()) for a, v, ids in rows])
    assert_same(context * (DOCUMENT_IDS > 0)[:, None, :, None], slow, inputs)
    if causal:
        return
    documents = [(0, 1), (1, 1), (2, 1), (3, 1), (3, 2)]  # row and number
    if not terms.biases_compared:
        logits = loop_logits(query, key, replace(terms, bias=None, offset_bias=None))
    fast, slow = [], []
    for row, n in documents:
        slow.append(objectives.hcd([logits[row]], [[0, 2]], (DOCUMENT_IDS[row] == n).tolist(), [window]))
        counted = torch.zeros(BATCH, 2)
        counted[row, n - 1] = 1
        fast.append(BACKENDS[backend](attending._replace(counted=counted))[1])
    compared = [x for x in inputs if x is not value]
    assert_same(torch.stack(fast), torch.stack(slow), compared, may_be_unused=not terms.biases_compared)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["content", "all"])
def test_padding_is_not_read_and_empty_rows_holes_and_extreme_logits_stay_finite(backend, kind):
    inputs, terms, _ = problem(kind)
    heads = torch.tensor([0, 1])
    context, cosine, gradients = run_backend(backend, *inputs, terms, heads, inputs)
    padding = (DOCUMENT_IDS == 0)[:, None, :, None].expand_as(inputs[0])
    assert all(gradient[padding].eq(0).all() for gradient in gradients)
    with torch.no_grad():
        for x in inputs:
            x[padding] = 1e6
    assert_all_close(run_backend(backend, *inputs, terms, heads, inputs)[:2], (context, cosine), atol=1e-12)
    document_ids = torch.tensor([[0] * SEQ, [1] + [0] * 6, [0, 1, 1, 0, 1, 1, 0], [2] * SEQ])
    vectors, terms, inputs = problem(kind)
    arguments = *vectors, terms, torch.tensor([1, 2]), inputs, document_ids
    context, cosine, gradients = run_backend(backend, *arguments)
    assert all(x.isfinite().all() for x in (context, cosine, *gradients))
    assert_all_close((context, cosine), run_backend("eager", *arguments)[:2])
    with torch.no_grad():
        for x in vectors[:2]:
            x *= 1e4
    context, cosine, gradients = run_backend(backend, *vectors, terms, heads, inputs)
    assert all(x.isfinite().all() for x in (context, cosine, *gradients))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["query-shared", "key-per-head", "offset-per-head"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_lower_precision_stays_near_float64(backend, kind, dtype, tolerance):
    vectors, terms, inputs = problem(kind)
    heads = torch.tensor([0, 2])
    for x in inputs:
        x.data = x.data.to(torch.bfloat16).double()  # the same numbers in every precision
    exact = run_backend("eager", *vectors, terms, heads, inputs)
    low_terms = terms.map(lambda x, _: x.detach().to(dtype).requires_grad_())
    low_vectors = [x.detach().to(dtype).requires_grad_() for x in vectors]
    low = [*low_vectors, *tensors_of(low_terms)]
    context, cosine, gradients = run_backend(backend, *low_vectors, low_terms, heads, low)
    assert [x.dtype for x in (context, cosine, *gradients)] == [dtype, torch.float32, *[dtype] * len(inputs)]
    for got, expected in zip((context, cosine, *gradients), (*exact[:2], *exact[2]), strict=True):
        assert (got.double() - expected).norm() <= tolerance * expected.norm()


def test_blocks_cover_the_batch_in_order_within_the_budget(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", 3 * 2 * 16)
    document_ids = (torch.arange(8) < torch.tensor([4, 2, 4, 8, 1, 0, 3])[:, None]).long()
    parts = list(blocks.cut(document_ids, 2))
    found = [(block.rows.start, block.rows.stop, block.length, block.unmasked) for block in parts]
    assert found == [(0, 3, 4, False), (3, 4, 8, True), (4, 7, 3, False)]  # one full document needs no mask
    whole = blocks.QueryTile(slice(0, None), slice(0, None))
    assert parts[1].forbidden_pairs(whole) is None
    for block in (parts[0], parts[2]):
        ids = document_ids[block.rows, : block.length]
        assert torch.equal(~block.forbidden_pairs(whole), allowed_pairs(ids))


TILE_HEADS = 4
SIZES = [(1, 1), (7, 3), (7, 1), (16, 8), (16, 2), (16, 5), (40, 5), (40, 40)]


@pytest.mark.parametrize("lowest, highest", [(-2, 2), (-4, 3), (0, 0), (-9, 9), (-20, 19)])
@pytest.mark.parametrize("num_keys, tile_rows, window", [*((*size, None) for size in SIZES), (40, 5, 7), (40, 16, 3)])
def test_every_range_of_offsets_in_tiles_of_every_size(monkeypatch, lowest, highest, num_keys, tile_rows, window):
    monkeypatch.setattr(blocks, "TILE_ELEMENTS", 1)
    monkeypatch.setattr(blocks, "SMALLEST_TILE", tile_rows)
    vectors = [random(2, TILE_HEADS, num_keys, DIM) for _ in range(3)]
    rows = highest - lowest + 1
    tables = [random(TILE_HEADS, rows, DIM), random(1, rows, DIM), None]
    terms = PositionTerms(0.5, *tables, lowest=lowest, highest=highest, offset_bias=random(TILE_HEADS, rows))
    document_ids = torch.ones(2, num_keys, dtype=torch.long)
    weight = torch.randn(2, TILE_HEADS, num_keys, DIM, dtype=torch.float64)
    answers = []
    for backend in (blocked_attention, eager_attention):
        context, cosine = backend(Attending(*vectors, terms, document_ids, torch.arange(2), window=window))
        loss = (context * weight).sum() + (cosine.sum() if num_keys > 1 else 0)
        answers.append((context, cosine, *torch.autograd.grad(loss, [*vectors, *tensors_of(terms)])))
    assert_all_close(*answers)


def nine_places():
    """Query, key and value of `NINE`, and terms with two tables."""
    vectors = [random(2, 9, TILE_HEADS, DIM).transpose(1, 2) for _ in range(3)]
    return vectors, PositionTerms(0.5, random(1, 6, DIM), random(1, 6, DIM), lowest=-3, highest=2)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_second_backward_pass_finds_what_the_first_one_used(dropout):
    vectors, terms = nine_places()
    heads, counted = torch.tensor([0, 2]), torch.ones(2, 2)
    context, cosine = blocked_attention(Attending(*vectors, terms, NINE, heads, dropout, counted))
    loss, inputs = context.sin().sum() + cosine, [*vectors, *tensors_of(terms)]
    assert_all_close(*(torch.autograd.grad(loss, inputs, retain_graph=True) for _ in range(2)), atol=1e-12)


def test_training_goes_on_after_scoring_in_inference_mode():
    vectors, terms = nine_places()

    def run():
        context, cosine = blocked_attention(Attending(*vectors, replace(terms), NINE, torch.tensor([0, 2])))
        return context.sum() + cosine.sum()

    with torch.inference_mode():
        scored = run()
    assert torch.equal(run(), scored)
    assert all(x.isfinite().all() for x in torch.autograd.grad(run(), [*vectors, *tensors_of(terms)]))


def kept_by(vectors, terms=None, heads=(), window=None):
    """The tensors that blocked attention keeps for its backward pass over full rows, and the context."""
    kept, ids = [], torch.ones(len(vectors[0]), vectors[0].shape[2], dtype=torch.long)
    attending = Attending(*vectors, terms or PositionTerms(0.5), ids, torch.tensor(heads).long(), window=window)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        context, _ = blocked_attention(attending)
    return kept, context


def test_keys_out_of_reach_are_neither_read_nor_kept():
    length, window, rows = 400, 20, blocks.SMALLEST_TILE
    query, key, value = (random(1, TILE_HEADS, length, DIM) for _ in range(3))
    with torch.no_grad():
        key[:, :, 200:], value[:, :, 200:] = torch.nan, torch.nan
    kept, context = kept_by((query, key, value), window=window)
    assert context[:, :, : 200 - rows - window].isfinite().all() and context[:, :, 200:].isnan().all()
    inputs = 3 * TILE_HEADS * length * DIM + length
    assert sum(x.numel() for x in kept) - inputs <= TILE_HEADS * length * (rows + 2 * window)
    assert TILE_HEADS * length * (rows + 2 * window) < TILE_HEADS * length**2 // 5


def test_pairs_wait_for_the_backward_pass_up_to_a_length_only_and_hcd_keeps_none(monkeypatch):
    vectors = [random(2, TILE_HEADS, 40, DIM) for _ in range(3)]
    terms = PositionTerms(0.5, random(1, 6, DIM), random(1, 6, DIM), lowest=-3, highest=2)
    plain, compared = (sum(x.numel() for x in kept_by(vectors, terms, heads)[0]) for heads in ((), (0, 2)))
    assert plain > 2 * TILE_HEADS * 40**2 and compared < plain + 40**2 / 2
    vectors = [random(2, TILE_HEADS, 9, DIM) for _ in range(3)]
    for kept_length, pairs in ((8, 0), (9, 2 * TILE_HEADS * 9 * 9)):
        monkeypatch.setattr(blocks, "KEPT_LENGTH", kept_length)
        kept, _ = kept_by(vectors)
        assert sum(x.numel() for x in kept if x.shape[-1] == 9 and x.is_floating_point()) == pairs
        with torch.no_grad():
            assert not kept_by(vectors)[0]


BOUNDS = [(0, 0), (-1, 1), (-2, 1), (-3, 3), (-4, 3), (-6, 4), (-1, 6), (0, 5), (-5, 0), (-20, 20)]


def gather(per_offset, lowest, highest):
    """The definition: entry (i, j) is column clip(i − j, lowest, highest) − lowest."""
    n = per_offset.shape[-2]
    place = torch.arange(n)
    column = (place[:, None] - place).clamp(lowest, highest) - lowest
    return per_offset.gather(-1, column.expand(*per_offset.shape[:-2], n, n))


@pytest.mark.parametrize("lowest, highest", BOUNDS)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 19])
def test_spread_equals_a_gather_in_values_and_gradients_and_collect_is_its_adjoint(n, lowest, highest):
    per_offset, per_pair = random(2, 3, n, highest - lowest + 1), random(2, 3, n, n)
    assert_same(spread(per_offset, lowest, highest), gather(per_offset, lowest, highest), [per_offset], atol=1e-12)
    assert torch.equal(spread(per_offset, lowest, highest), gather(per_offset, lowest, highest))
    left = (spread(per_offset, lowest, highest) * per_pair).sum()
    right = (per_offset * collect_values(per_pair, highest - lowest + 1, highest)).sum()
    torch.testing.assert_close(left, right, rtol=0, atol=1e-11)


def test_memory_layout_does_not_matter_and_inputs_are_left_alone():
    for per_offset in (
        torch.randn(2, 6, 3, 8).transpose(1, 2),  # heads after the sequence in memory
        torch.randn(2, 3, 8, 6).transpose(-1, -2),
        torch.randn(2, 3, 6, 8).flip(-1)[..., ::1],
        torch.randn(1, 1, 6, 8).expand(2, 3, 6, 8),
        torch.randn(2, 3, 12, 16)[..., ::2, ::2],
        torch.randn(6, 2, 3, 8).movedim(0, 2),
    ):
        assert torch.equal(spread(per_offset, -4, 3), gather(per_offset, -4, 3)), per_offset.stride()
    per_pair = torch.randn(2, 6, 3, 6).transpose(1, 2)
    assert torch.equal(collect_values(per_pair, 8, 3), collect_values(per_pair.contiguous(), 8, 3))
    per_offset, per_pair = torch.randn(2, 6, 8), torch.randn(2, 6, 6)
    copies = per_offset.clone(), per_pair.clone()
    spread(per_offset, -4, 3).add_(1.0)
    collect_values(per_pair, 8, 3).add_(1.0)
    assert torch.equal(per_offset, copies[0]) and torch.equal(per_pair, copies[1])


@pytest.mark.parametrize("dtype, rounding", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_half_precision_moves_exactly_and_sums_in_fp32(dtype, rounding):
    per_offset = torch.randn(2, 40, 31).to(dtype)
    assert torch.equal(spread(per_offset, -15, 15), gather(per_offset, -15, 15))
    per_pair = torch.randn(2, 400, 400)
    per_pair = (per_pair - per_pair.mean(-1, keepdim=True)).to(dtype)  # rows that cancel, as softmax gradients do
    exact = collect_values(per_pair.double(), 31, 15)
    # One rounding at the end of each sum, not a difference of rounded sums.
    torch.testing.assert_close(collect_values(per_pair, 31, 15).double(), exact, rtol=2 * rounding, atol=1e-3)
    ends = collect_values(torch.randn(8, 40, 40).to(dtype), 2 * 60 - 1, 59)[..., [0, -1]]
    assert ends.abs().max() < 1e-4, "offsets that do not occur have no gradient"


def test_bounds_without_a_row_for_offset_zero_are_refused():
    for lowest, highest in [(1, 3), (-3, -1)]:
        with pytest.raises(AssertionError, match="offset 0"):
            spread(torch.zeros(4, 3), lowest, highest)
        with pytest.raises(AssertionError, match="offset 0"):
            PositionTerms(1.0, lowest=lowest, highest=highest)
    with pytest.raises(AssertionError):
        spread(torch.zeros(4, 6), -3, 3)
