"""Checks of Triton's kernels on a CPU, in a process of their own: test_backends.py runs this file.

The kernels' attention, dropout and comparison of heads beside eager attention; every encoding's terms at every length;
the kernels in CUDA graphs. The interpreter replaces Triton's functions when they are defined, so TRITON_INTERPRET=1
must stand before the first import of triton, and nothing compiled can be used beside it. To run a check alone:

    TRITON_INTERPRET=1 python -m pytest tests/unit/model/triton_kernels.py -k deberta"""

import dataclasses
import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_ddrp.config import ENCODINGS, ModelConfig, encoding_class
from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.model import graphs, heads, triton_loss
from megatron_ddrp.model.attention.backends import eager_attention
from megatron_ddrp.model.attention.gpu import triton_attention as module
from megatron_ddrp.model.attention.gpu.triton_attention import Facts, Tile, Tiles, plan_of, triton_attention
from megatron_ddrp.model.attention.logits import Attending
from megatron_ddrp.model.triton_loss import OPTIONS, sum_of_losses
from tests.reference import objectives
from tests.unit.model import test_graphs
from tests.unit.model.attention_cases import answer, assert_close, assert_one_mask, dropped_maps, make_case, reference


@pytest.fixture(autouse=True, scope="module")
def kernels_alone_take_time():
    """Leave out what takes the interpreter longer than the kernels' sums.

    A launch gives Triton's functions their meaning on a CPU; at every call of a helper the interpreter would look
    through all of them again, and once for each module of helpers is enough. It would also do every sum of whole
    numbers a second time in int64, to find overflows that it reports in its debug mode alone.
    """
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patched = set()
    call = interpreter.InterpretedFunction.__call__

    def call_helper(self, *args, **kwargs):
        if self.fn.__module__ in patched:
            return self.rewrite()(*args, **kwargs)
        patched.add(self.fn.__module__)
        return call(self, *args, **kwargs)

    options = interpreter.interpreter_builder.options
    with pytest.MonkeyPatch.context() as patch:
        unchecked = dataclasses.replace(options, sanitize_overflow=False)
        patch.setattr(interpreter.interpreter_builder, "options", unchecked)
        patch.setattr(interpreter.InterpretedFunction, "__call__", call_helper)
        yield


@pytest.fixture(autouse=True)
def new_memory_is_nan_and_no_plan_has_other_tiles():
    """So a value which a kernel does not write is noticed; some tests choose tiles of their own."""
    plan_of.cache_clear()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    plan_of.cache_clear()


CLOSE = {"rtol": 1.5e-5, "atol": 1.5e-5}
"""What fp32 leaves of sums over 128 dimensions and 130 tokens; sums over more are compared by their own size."""
PADDED = [[1] * 17, [1] * 9 + [0] * 8]
PACKED = [[1] * 5 + [2] * 7 + [3] * 3 + [0] * 2]
UNORDERED = [[0, 0, 7, 7, 7, 0, 2, 2, 2, 2, 2, 7, 7, 0, 0, 1, 1]]


CASES = {
    "shorter than a tile": ([[1] * 5], (-4, 3), {"tables": "qk"}),
    "one bin for everything": ([[1] * 5], (0, 0), {"tables": "qk"}),
    "two bins and no band": ([[1] * 5], (0, 1), {"tables": "qk"}),
    "query table a head": (PADDED, (-3, 4), {"tables": "Qk", "heads": 2, "head_dim": 24}),
    "packed": (PACKED, (-4, 3), {"tables": "qK", "heads": 2}),
    "documents in any order": (UNORDERED, (-4, 3), {"tables": "qk"}),
    "a row of padding": ([[1] * 6, [0] * 6], (-2, 2), {"tables": "qk"}),
    "bias a sequence": (PADDED, (-4, 3), {"tables": "qk", "bias_batch": 2, "heads": 2}),
    "bias that heads share": (PADDED, (0, 0), {"bias_batch": 1, "bias_heads": 1, "heads": 2}),
    "offset bias": (PADDED, (-4, 3), {"tables": "v", "heads": 2}),
    "offset bias a head, packed": (PACKED, (-9, 5), {"tables": "V", "heads": 2}),
    "offset bias with tables": (PADDED, (-4, 3), {"tables": "qKV", "bias_batch": 1, "heads": 2}),
    "offset bias over whole tiles": ([[1] * 130], (-4, 3), {"tables": "V", "heads": 2}),
    "band holds everything": ([[1] * 64], (-63, 63), {"tables": "qk"}),
    "wide heads": ([[1] * 64], (-4, 3), {"tables": "qk", "head_dim": 128, "scale": 0.1}),  # 0.3 is for 16: near 1/√d
    "whole tiles in each bin": ([[1] * 130], (-4, 3), {"tables": "qk"}),
    "lopsided band": ([[1] * 130], (-40, 70), {"tables": "qk"}),
    "long packed": ([[1] * 70 + [2] * 60], (-4, 3), {"tables": "qk", "bias_batch": 1}),
    "documents in any order, whole tiles": ([[3] * 32 + [1] * 32 + [3] * 32 + [2] * 32], (-4, 3), {"tables": "qk"}),
    "window, content": (PADDED, (0, 0), {"heads": 2, "window": 3}),
    "window, itself alone": (PACKED, (-4, 3), {"tables": "qk", "window": 0}),
    "window beside the band": (PACKED, (-2, 1), {"tables": "qKV", "heads": 2, "window": 4}),
    "window over more than the row": (PADDED, (-4, 3), {"tables": "q", "window": 40}),
    "window of tiles": ([[1] * 50 + [2] * 80], (-40, 70), {"tables": "qk", "window": 33}),
    "causal, content": (PADDED, (0, 0), {"heads": 2, "causal": True}),
    "causal, packed": (PACKED, (-4, 3), {"tables": "qKV", "heads": 2, "causal": True}),
    "causal, without rows for following keys": ([[1] * 130], (0, 129), {"tables": "qV", "heads": 2, "causal": True}),
    "causal window of tiles": ([[1] * 50 + [2] * 80], (-40, 70), {"tables": "qk", "window": 33, "causal": True}),
    "causal, bias": ([[1] * 130], (-4, 3), {"tables": "k", "bias_batch": 1, "causal": True}),
    "window of tiles, bins": ([[1] * 130], (-4, 3), {"tables": "qk", "bias_batch": 1, "window": 40}),
}


def both(case):
    return answer(case, triton_attention), reference(case)


def assert_close_by_size(got, expected, share=1e-5):
    """fp32 leaves errors of sums in proportion to the largest number."""
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=0, atol=share * max(1.0, y.abs().max().item()))


@pytest.mark.parametrize("document_ids, bounds, options", CASES.values(), ids=CASES)
def test_equals_eager_in_float64(document_ids, bounds, options):
    assert_close(*both(make_case(document_ids, *bounds, **options)), **CLOSE)


@pytest.mark.parametrize("options", [{"tables": "qk"}, {"tables": "V"}, {"bias_batch": 1}, {}], ids=str)
def test_full_rows_need_no_documents(options):
    """Of rows that are known to be full and consist of whole tiles, the kernels do not read the documents."""
    case = make_case([[1] * 64], -20, 13, **options)

    def full(attending):
        attending = attending._replace(layout=SimpleNamespace(full=True))
        assert plan_of(Facts.of(attending)).full
        return triton_attention(attending._replace(document_ids=attending.document_ids * 0))

    assert all(map(torch.equal, *(answer(case, backend, 0.2) for backend in (triton_attention, full))))
    ragged = make_case([[1] * 80], -4, 3).attending()._replace(layout=SimpleNamespace(full=True))
    assert not plan_of(Facts.of(ragged)).full


TILINGS = [
    Tiles(Tile(128, 64, 4, 1), Tile(128, 64, 4, 1), Tile(64, 64, 4, 1), Tile(64, 32, 4, 1)),
    Tiles(Tile(64, 64, 4, 1), Tile(128, 32, 4, 1), Tile(32, 64, 4, 1), Tile(64, 32, 4, 1)),
]


@pytest.mark.parametrize("chosen", TILINGS, ids=["hopper", "ampere"])
@pytest.mark.parametrize("distance", [16, 32, 64, 128])
def test_every_distance_with_every_tile(distance, chosen, monkeypatch):
    monkeypatch.setattr(module, "tiles", lambda *_: chosen)
    case = make_case([[1] * 200 + [2] * 72], -distance, distance - 1, tables="qk", scale=0.25)
    assert_close_by_size(*both(case))


@pytest.mark.parametrize("options", [{"tables": "qkV", "bias_batch": 1}, {"bias_batch": 2}, {"tables": "qk"}], ids=str)
def test_the_gradient_of_the_logits_is_stored_in_parts(options, monkeypatch):
    case = make_case(PADDED, -4, 3, heads=3, **options)
    whole = answer(case, triton_attention)
    for pairs in (4, 1):  # of three heads and two rows of 32 tokens
        monkeypatch.setattr(module, "PART_BYTES", pairs * 32 * 32 * 4)
        assert all(map(torch.equal, whole, answer(case, triton_attention)))


def test_a_window_of_hundreds_of_places_reaches_both_its_ends(monkeypatch):
    """A tile's queries and their window together are more than the 512 places that any row is looked through for."""
    monkeypatch.setattr(module, "tiles", lambda *_: Tiles(*(Tile(256, 64, 4, 1),) * 4))
    case = make_case([[1] * 470], -4, 3, tables="q", window=200)
    with torch.no_grad():
        case.query.zero_()  # so that every key in reach counts
    assert_close_by_size(*both(case))


def test_keys_out_of_reach_are_not_read():
    case = make_case([[1] * 130], -4, 3, tables="q", window=20)
    with torch.no_grad():
        case.key[:, :, 64:], case.value[:, :, 64:] = torch.nan, torch.nan
    context, _ = triton_attention(case.attending())
    assert context[:, :, :32].isfinite().all() and context[:, :, 64:].isnan().all()


def test_half_precision_stays_near_and_an_offset_bias_is_read_in_fp32():
    """Far away ALiBi subtracts hundreds, where half precision knows no fractions."""
    step = torch.finfo(torch.float16).eps
    case = make_case(PADDED, -4, 3, tables="qk", heads=2, dtype=torch.float16)  # the interpreter multiplies no bfloat16
    got, expected = both(case)
    assert {x.dtype for x in got} == {torch.float16}
    assert_close(got, expected, rtol=8 * step, atol=8 * step)
    case = make_case(PADDED, -16, 16, tables="V", heads=2, dtype=torch.float16)
    case.terms = case.terms.map(lambda x, _: (x.detach().float() - 255).requires_grad_())
    assert_close(*both(case), rtol=8 * step, atol=8 * step)


def test_nothing_is_written_for_an_offset_bias_that_does_not_learn(monkeypatch):
    case = make_case(PADDED, -4, 3, tables="V", heads=2)
    expected = answer(case, triton_attention)
    case.terms = case.terms.map(lambda x, _: x.detach())
    monkeypatch.setattr(module.Offsets, "empty", lambda *_: pytest.fail("the gradient of P is written"))
    context, _ = triton_attention(case.attending())
    gradients = torch.autograd.grad((context * case.weight()).sum(), case.inputs[:3])
    assert all(map(torch.equal, gradients, expected[1:4]))


@pytest.mark.parametrize("bounds", [(-4, 3), (-20, 30)], ids=str)
def test_dropout_draws_one_mask_for_forward_and_backward(bounds):
    case = make_case([[1] * 40, [1] * 33 + [0] * 7], *bounds, tables="qkV", heads=2, head_dim=40, bias_batch=1)
    keep = assert_one_mask(case, **CLOSE)
    assert not torch.equal(keep[0, 0], keep[0, 1]), "heads share a mask"
    assert not torch.equal(keep[0, :, :33], keep[1, :, :33]), "sequences share a mask"
    for lines in (keep[0, 0].double(), keep[0, 0].double().T):
        assert len(torch.unique(lines, dim=0)) == len(lines), "rows or columns repeat"


def test_dropout_drops_its_share_and_every_entry_for_itself_whatever_the_tiles(monkeypatch):
    case = make_case([[1] * 64], -4, 3, tables="q", head_dim=64, scale=0.01)
    exact = round(0.1 * module.DROPOUT_STEPS) / module.DROPOUT_STEPS
    dropped = torch.stack([dropped_maps(case, 0.1, seed)[0, 0] == 0 for seed in range(8)])  # [8, 64, 64]
    assert abs(dropped.double().mean().item() - exact) < 4 * (0.1 * 0.9 / dropped.numel()) ** 0.5
    for lag in (1, 2, 3, 8, 16):  # in a row, the two columns of one hash among them, and in a column
        for both_dropped in (dropped[..., lag:] & dropped[..., :-lag], dropped[:, lag:] & dropped[:, :-lag]):
            deviation = (exact**2 * (1 - exact**2) / both_dropped.numel()) ** 0.5
            assert abs(both_dropped.double().mean().item() - exact**2) < 4.5 * deviation, lag
    torch.testing.assert_close(dropped_maps(case, 0.1, 0).sum(-1).mean().item(), 1.0, rtol=0, atol=0.03)
    case = make_case([[1] * 40], -4, 3, tables="q", head_dim=40)
    before = dropped_maps(case, 0.3, 7)
    assert not torch.equal(before, dropped_maps(case, 0.3, 8))
    monkeypatch.setattr(module, "tiles", lambda *_: Tiles(*(Tile(16, 64, 4, 1),) * 4))
    torch.testing.assert_close(dropped_maps(case, 0.3, 7), before)


def test_runs_repeat_bit_by_bit_also_under_activation_checkpointing():
    case = make_case(PADDED, -4, 3, tables="qk", heads=2, bias_batch=1)

    def checkpointed(attending):
        def run(*vectors):
            return triton_attention(Attending(*vectors, *attending[3:]))[0]

        return checkpoint(run, *attending[:3], use_reentrant=False), None

    answers = [answer(case, backend, 0.2) for backend in (triton_attention, triton_attention, checkpointed)]
    assert all(map(torch.equal, answers[0] * 2, answers[1] + answers[2]))


def test_padding_gives_zero_and_is_not_read():
    case = make_case(PADDED, -4, 3, tables="qk", heads=2)
    context, _ = triton_attention(case.attending())
    padding = ~case.valid.expand_as(context)
    assert context[padding].eq(0).all()
    gradients = torch.autograd.grad(context.square().sum(), case.inputs)
    assert all(x[padding].eq(0).all() and x.isfinite().all() for x in gradients[:3])
    with torch.no_grad():
        for x in (case.query, case.key, case.value):
            x[padding] = 1e6
    assert torch.equal(triton_attention(case.attending())[0], context)


COMPARED = {
    "two of three heads": (PADDED, (-4, 3), {"tables": "qk", "heads": 3}, [0, 2]),
    "all of three heads": (PADDED, (-4, 3), {"tables": "qKV", "heads": 3}, [0, 1, 2]),
    "content, packed": (PACKED, (-4, 3), {"heads": 4}, [1, 3]),
    "three of four, packed, whole tiles": ([[1] * 20 + [2] * 16], (-4, 3), {"tables": "q", "heads": 4}, [0, 1, 3]),
    "bias": (PADDED, (0, 0), {"bias_batch": 1, "heads": 2}, [0, 1]),
    "bias a sequence": (PADDED, (-4, 3), {"tables": "QV", "bias_batch": 2, "heads": 3}, [1, 2]),
    "documents in any order": (UNORDERED, (-4, 3), {"tables": "qk", "heads": 2}, [0, 1]),
    "window, packed": ([[1] * 24 + [2] * 16], (-2, 1), {"tables": "q", "heads": 2, "window": 5}, [0, 1]),
    "without offset bias": (PACKED, (-4, 3), {"tables": "V", "heads": 3, "biases_compared": False}, [0, 2]),
}


@pytest.mark.parametrize("document_ids, bounds, options, heads", COMPARED.values(), ids=COMPARED)
def test_heads_are_compared_as_by_eager(document_ids, bounds, options, heads):
    """HCD's sum and gradients, alone and beside those of the context, which dropout changes and the sum does not."""
    dropout, case = 0.25, make_case(document_ids, *bounds, **options)

    def compared(case, backend, dropout=0.0):
        _, cosine = backend(case.attending(dropout, heads))
        return cosine, *torch.autograd.grad(cosine, case.inputs, allow_unused=True, materialize_grads=True)

    alone = compared(case, triton_attention, dropout)
    assert_close(alone, compared(case.to("cpu", torch.float64), eager_attention), **CLOSE)
    (_, *of_context), (_, _, *together) = (answer(case, triton_attention, dropout, chosen) for chosen in ((), heads))
    wanted = [without + part for without, part in zip(of_context, alone[1:], strict=True)]
    torch.testing.assert_close(together, wanted, rtol=1e-4, atol=1e-5)


def test_heads_compared_in_half_precision_stay_near():
    """T is stored in half precision too."""
    case = make_case(PADDED, -4, 3, tables="q", heads=3, dtype=torch.float16)
    answers = []
    for problem, backend in ((case, triton_attention), (case.to("cpu", torch.float64), eager_attention)):
        _, cosine = backend(problem.attending(heads=(0, 2)))
        inputs = [x for x in problem.inputs if x is not problem.value]
        answers.append((cosine, *torch.autograd.grad(1000 * cosine, inputs)))
    assert_close_by_size(*answers, 16 * torch.finfo(torch.float16).eps)


TILE_ROWS = 256
LENGTHS = (1, 17, TILE_ROWS - 1, TILE_ROWS, TILE_ROWS + 1, 2 * TILE_ROWS + 1)
HEAD_SIZES = (64, 80, 96, 128)
LAYOUTS = {
    "whole": lambda seq: [1] * seq,
    "left padding": lambda seq: [0] * (seq // 3) + [1] * (seq - seq // 3),
    "packed": lambda seq: [1] * (seq - seq // 2) + [2] * (seq // 3) + [0] * (seq // 2 - seq // 3),
}


def terms_of(encoding, seq, head_dim, heads=1):
    """The terms of an encoding for a row of `seq` tokens."""
    sizes = {"hidden_size": heads * head_dim, "num_attention_heads": heads, "seq_length": max(3, seq)}
    config = ModelConfig(position_encoding=encoding, num_layers=1, **sizes)
    positions = encoding_class(encoding)(config)
    maps = [torch.nn.Linear(heads * head_dim, heads * head_dim) for _ in range(2)]
    tensors = positions.layer_part(config).of_layer(positions(torch.arange(seq)[None]), *maps)
    return positions.terms(config, tensors)


def kernels_of(encoding):
    """Return the terms of an encoding and their shapes; encodings that agree in them are the same to the kernels."""
    terms = terms_of(encoding, 17, 64).by_offset
    return terms.lowest, terms.highest, *(None if x is None else x.shape for x in terms.tensors)


DISTINCT = list({kernels_of(name): name for name in reversed(ENCODINGS)}.values())
"""The first encoding of each group that is the same to the kernels."""


@pytest.mark.parametrize("number, seq", enumerate(LENGTHS))
@pytest.mark.parametrize("encoding", DISTINCT)
def test_every_encoding_at_every_length(encoding, number, seq, monkeypatch):
    """Each encoding's own terms, with random numbers in them; head sizes and layouts in turns."""
    place = DISTINCT.index(encoding)
    head_dim, layout = HEAD_SIZES[(place + number) % 4], list(LAYOUTS.values())[(place + number // 2) % 3]
    monkeypatch.setattr(module, "tiles", lambda *_: Tiles(*(Tile(TILE_ROWS, TILE_ROWS, 4, 1),) * 4))
    terms = terms_of(encoding, seq, head_dim)
    case = make_case([layout(seq)], 0, 0, head_dim=head_dim)
    generator = torch.Generator().manual_seed(seq)
    case.terms = terms.map(lambda x, _: torch.randn(x.shape, generator=generator).requires_grad_())
    assert_close_by_size(*both(case))


@pytest.mark.parametrize("encoding", ["ddrp", "tupe-a"])
def test_graphs_repeat_the_kernels_to_the_last_bit(encoding, monkeypatch):
    """On the emulator of graphs, which notes launches too."""
    monkeypatch.setattr(graphs, "WARM_UP", 0)
    config = test_graphs.config_of(encoding, attention_backend="triton", num_layers=1)
    test_graphs.assert_equal_with_graphs(config, [test_graphs.rows_of(5)] * 4, [1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("pieces", [1, 13, 16, 35])
def test_the_loss_of_predicted_tokens_and_its_gradient(pieces, dtype, monkeypatch):
    """Beside the loops of the reference in float64; one label is ignored, and the last pieces are padding."""
    monkeypatch.setitem(OPTIONS, "BLOCK_N", 16)
    generator = torch.Generator().manual_seed(pieces)
    logits = (3 * torch.randn(5, pieces, generator=generator)).to(dtype)
    logits[:, pieces - pieces // 4 :] = -torch.inf
    labels = torch.randint(pieces - pieces // 4, (5,), generator=generator)
    labels[3] = IGNORED_LABEL
    kept, exact = labels != IGNORED_LABEL, logits.double().requires_grad_()
    expected = objectives.masked_lm(exact[kept], labels[kept])
    logits.requires_grad_()
    loss = sum_of_losses(logits, labels)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    (7 * loss).backward()
    (7 * expected).backward()
    assert logits.grad.dtype == dtype and logits.grad[3].eq(0).all()
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=4 * torch.finfo(dtype).eps, atol=7e-6)


def test_what_is_not_finite_makes_the_loss_so():
    logits = torch.zeros(2, 6)
    for value in (torch.nan, torch.inf):
        logits[1, 2] = value
        assert not sum_of_losses(logits, torch.zeros(2, dtype=torch.long)).isfinite()
    assert sum_of_losses(logits[:1], torch.tensor([6])).isnan(), "there are six pieces"
    assert sum_of_losses(logits[:0], torch.empty(0, dtype=torch.long)) == 0


@pytest.mark.parametrize(("dtype", "launches"), [(torch.float16, 2), (torch.float32, 0)])
def test_logits_in_half_precision_take_the_kernels_where_layers_compile(dtype, launches, monkeypatch):
    counted = mock.Mock(wraps=triton_loss.launch)
    monkeypatch.setattr(triton_loss, "launch", counted)
    monkeypatch.setattr(heads, "is_nvidia", lambda _: True)
    logits, labels = torch.randn(4, 6).to(dtype).requires_grad_(), torch.tensor([0, 5, IGNORED_LABEL, 2])
    for expected in (0, launches):
        monkeypatch.setattr(heads, "compiles", lambda *_, answer=bool(expected): answer)
        (gradient,) = torch.autograd.grad(heads.masked_lm_sum(logits, labels), logits)
        assert counted.call_count == expected and gradient.dtype == dtype
