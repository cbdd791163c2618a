"""The one attention against the loop twins, and each backend against the eager one, in values and in every gradient.

The synthetic terms use all that the contract allows, though no encoding of today asks for it. Tiles of query rows stand
against whole matrices, `spread` against an index gather, and `collect_values` as its exact adjoint.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from megatron_ddrp.model.attention import cpu as blocks
from megatron_ddrp.model.attention.backends import BACKENDS, eager_attention
from megatron_ddrp.model.attention.cpu import blocked_attention
from megatron_ddrp.model.attention.logits import allowed_pairs, attention_logits, collect_values, spread
from tests.reference import objectives
from tests.reference.attention import attend, within_window
from tests.reference.positions import clip, over_pairs
from tests.reference.tensors import assert_same, random
from tests.unit.model.attention_cases import answer, make_case

pytestmark = pytest.mark.usefixtures("torch_seed")
BATCH, HEADS, SEQ, DIM = 4, 3, 7, 4
DOCUMENT_IDS = [[1] * 7, [1] * 4 + [0] * 3, [1] * 2 + [0] * 5, [1] * 3 + [2] * 2 + [0] * 2]
NINE = [[1, 1, 1, 1, 2, 2, 2, 0, 0], [1] * 9]
assert_all_close = partial(torch.testing.assert_close, rtol=0, atol=1e-11)
ALL = {"tables": "QkV", "bias_batch": BATCH}
KINDS = {
    "content": {},
    "query-shared": {"tables": "q"},
    "query-per-head": {"tables": "Q"},
    "key-shared": {"tables": "k"},
    "key-per-head": {"tables": "K"},
    "bias-1": {"bias_batch": 1},
    "bias-shared": {"bias_batch": 1, "bias_heads": 1},
    "bias-batch": {"bias_batch": BATCH},
    "offset-shared": {"tables": "v"},
    "offset-per-head": {"tables": "V"},
    "all": ALL,
    "offset-not-compared": {"tables": "V", "biases_compared": False},
    "all-biases-not-compared": ALL | {"biases_compared": False},
}
"""Terms → how `make_case` makes them."""
exact_case = partial(make_case, head_dim=DIM, dtype=torch.float64)
"""An attention problem in float64."""


def problem(kind, **options):
    """Rows with padding and with two documents, and terms of a kind."""
    return exact_case(DOCUMENT_IDS, -4, 3, heads=HEADS, scale=0.6, **KINDS[kind], **options)


def loop_logits(query, key, terms):
    """The contract's formula, pair by pair: query, key `[b, h, s, d]` → `[b, h, s, s]`."""

    def entry(b, q, k, head, i, j):
        row, total = clip(i - j, terms.lowest, terms.highest) - terms.lowest, torch.dot(q, k)
        for vector, table in ((q, terms.query_table), (k, terms.key_table)):
            if table is not None:
                total = total + torch.dot(vector, table[head if len(table) > 1 else 0, row])
        total = total * terms.scale
        if terms.bias is not None:
            total = total + terms.bias.expand(-1, HEADS, -1, -1)[b if len(terms.bias) > 1 else 0, head, i, j]
        if terms.offset_bias is not None:
            total = total + terms.offset_bias[head if len(terms.offset_bias) > 1 else 0, row]
        return total

    return torch.stack([over_pairs(query[b], key[b], range(SEQ), partial(entry, b)) for b in range(BATCH)])


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_the_contract_formula(kind):
    case = problem(kind)
    arguments = case.query, case.key, case.terms
    inputs = [x for x in case.inputs if x is not case.value]
    assert_same(attention_logits(*arguments), loop_logits(*arguments), inputs)


TWO_BLOCKS = 2 * HEADS * SEQ**2
TILED = [
    *((None, False, SEQ, 0, TWO_BLOCKS), (None, False, SEQ, SEQ, TWO_BLOCKS), (None, False, 3, 0, 1)),
    *((None, False, 1, SEQ, 1), (0, False, 1, SEQ, 1), (1, False, 2, 0, 1), (3, False, 3, SEQ, 1)),
    *((SEQ - 1, False, 5, 0, 1), (None, True, 2, SEQ, 1), (2, True, 3, 0, 1)),
]
"""Window, causal, rows per tile, longest row whose pairs are kept, elements per block."""


@pytest.mark.parametrize("heads", [[], [1, 2], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "backend, window, causal, tile_rows, kept, block_elements",
    [*(("blocked", *sizes) for sizes in TILED), *(("sdpa", *sizes) for sizes in TILED[3:])],
)
def test_backends_equal_eager(backend, window, causal, tile_rows, kept, block_elements, kind, heads, monkeypatch):
    sizes = {"KEPT_LENGTH": kept, "SMALLEST_TILE": tile_rows, "BLOCK_ELEMENTS": block_elements}
    for name, size in (sizes | {"TILE_ELEMENTS": 1}).items():
        monkeypatch.setattr(blocks, name, size)
    case = problem(kind, window=window, causal=causal)
    assert_all_close(*(answer(case, BACKENDS[name], heads=heads) for name in (backend, "eager")))


EVERYWHERE = [("content", None, False), ("all", None, False), ("all-biases-not-compared", None, False)]
WINDOWS = [("content", 2, False), ("all", 1, False), ("content", None, True), ("all", None, True), ("all", 2, True)]


@pytest.mark.parametrize("kind, window, causal", EVERYWHERE + WINDOWS)
def test_context_and_cosine_of_eager_attention_equal_the_twins(kind, window, causal):
    case = problem(kind, window=window, causal=causal)
    query, key, value, terms = case.query, case.key, case.value, case.terms
    attending = case.attending(heads=(0, 2))
    context, _ = eager_attention(attending._replace(terms=terms.within(window, True)) if causal else attending)
    logits = loop_logits(query, key, terms)
    rows = zip(logits, value, DOCUMENT_IDS, strict=True)
    slow = torch.stack([attend(within_window(a, window, causal), v, ids) for a, v, ids in rows])
    assert_same(context * case.valid, slow, case.inputs)
    if causal:
        return
    documents = [(0, 1), (1, 1), (2, 1), (3, 1), (3, 2)]  # row and number
    if not terms.biases_compared:
        logits = loop_logits(query, key, replace(terms, bias=None, offset_bias=None))
    fast, slow = [], []
    for row, n in documents:
        slow.append(objectives.hcd([logits[row]], [[0, 2]], [number == n for number in DOCUMENT_IDS[row]], [window]))
        counted = torch.zeros(BATCH, 2)
        counted[row, n - 1] = 1
        fast.append(eager_attention(attending._replace(counted=counted))[1])
    compared = [x for x in case.inputs if x is not value]
    assert_same(torch.stack(fast), torch.stack(slow), compared, may_be_unused=not terms.biases_compared)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["content", "all"])
def test_padding_is_not_read_and_empty_rows_holes_and_extreme_logits_stay_finite(backend, kind):
    case, attention = problem(kind), BACKENDS[backend]
    vectors = case.query, case.key, case.value
    expected = answer(case, attention, heads=(0, 1))
    padding = ~case.valid.expand_as(case.query)
    assert all(gradient[padding].eq(0).all() for gradient in expected[2:5])
    with torch.no_grad():
        for x in vectors:
            x[padding] = 1e6
    assert_all_close(answer(case, attention, heads=(0, 1))[:2], expected[:2], atol=1e-12)
    case = problem(kind)
    case.document_ids = torch.tensor([[0] * SEQ, [1] + [0] * 6, [0, 1, 1, 0, 1, 1, 0], [2] * SEQ])
    found = answer(case, attention, heads=(1, 2))
    assert all(x.isfinite().all() for x in found)
    assert_all_close(found[:2], answer(case, eager_attention, heads=(1, 2))[:2])
    with torch.no_grad():
        for x in (case.query, case.key):
            x *= 1e4
    case.document_ids = torch.tensor(DOCUMENT_IDS)
    assert all(x.isfinite().all() for x in answer(case, attention, heads=(0, 1)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["query-shared", "key-per-head", "offset-per-head"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_lower_precision_stays_near_float64(backend, kind, dtype, tolerance):
    case = problem(kind).to(torch.bfloat16)  # the same numbers in every precision
    exact = answer(case.to(torch.float64), eager_attention, heads=(0, 2))
    low = answer(case.to(dtype), BACKENDS[backend], heads=(0, 2))
    assert [x.dtype for x in low] == [dtype, torch.float32, *[dtype] * len(case.inputs)]
    for got, expected in zip(low, exact, strict=True):
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
    case = exact_case([[1] * num_keys] * 2, lowest, highest, tables="QkV", heads=TILE_HEADS, window=window)
    assert_all_close(*(answer(case, backend, heads=(0, 1)) for backend in (blocked_attention, eager_attention)))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_second_backward_pass_finds_what_the_first_one_used(dropout):
    case = exact_case(NINE, -3, 2, tables="qk", heads=TILE_HEADS)
    context, cosine = blocked_attention(case.attending(dropout, (0, 2)))
    loss = context.sin().sum() + cosine
    assert_all_close(*(torch.autograd.grad(loss, case.inputs, retain_graph=True) for _ in range(2)), atol=1e-12)


def test_training_goes_on_after_scoring_in_inference_mode():
    case = exact_case(NINE, -3, 2, tables="qk", heads=TILE_HEADS)
    with torch.inference_mode():
        scored, _ = blocked_attention(case.attending(heads=(0, 2)))
    context, *rest = answer(case, blocked_attention, heads=(0, 2))
    assert torch.equal(context, scored * case.valid) and all(x.isfinite().all() for x in rest)


def kept_by(case, heads=()):
    """The tensors that blocked attention keeps for its backward pass, and the context."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        context, _ = blocked_attention(case.attending(heads=heads))
    return kept, context


def test_keys_out_of_reach_are_neither_read_nor_kept():
    length, window, rows = 400, 20, blocks.SMALLEST_TILE
    case = exact_case([[1] * length], 0, 0, heads=TILE_HEADS, window=window)
    with torch.no_grad():
        case.key[:, :, 200:], case.value[:, :, 200:] = torch.nan, torch.nan
    kept, context = kept_by(case)
    assert context[:, :, : 200 - rows - window].isfinite().all() and context[:, :, 200:].isnan().all()
    inputs = 3 * TILE_HEADS * length * DIM + length
    assert sum(x.numel() for x in kept) - inputs <= TILE_HEADS * length * (rows + 2 * window)
    assert TILE_HEADS * length * (rows + 2 * window) < TILE_HEADS * length**2 // 5


def test_pairs_wait_for_the_backward_pass_up_to_a_length_only_and_hcd_keeps_none(monkeypatch):
    case = exact_case([[1] * 40] * 2, -3, 2, tables="qk", heads=TILE_HEADS)
    plain, compared = (sum(x.numel() for x in kept_by(case, heads)[0]) for heads in ((), (0, 2)))
    assert plain > 2 * TILE_HEADS * 40**2 and compared < plain + 40**2 / 2
    case = exact_case([[1] * 9] * 2, 0, 0, heads=TILE_HEADS)
    for kept_length, pairs in ((8, 0), (9, 2 * TILE_HEADS * 9 * 9)):
        monkeypatch.setattr(blocks, "KEPT_LENGTH", kept_length)
        kept, _ = kept_by(case)
        assert sum(x.numel() for x in kept if x.shape[-1] == 9 and x.is_floating_point()) == pairs
        with torch.no_grad():
            assert not kept_by(case)[0]


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
        torch.randn(1, 1, 6, 8).expand(2, 3, 6, 8),
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
