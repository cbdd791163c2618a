"""Every attention backend on a CUDA device, against eager attention in float64.

A backend may be as far off as three times eager attention in the same number format, and a little. Needs no data.
"""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_ddrp.model.attention.backends import eager_attention, sdpa_attention
from megatron_ddrp.model.attention.gpu.triton_attention import triton_attention, why_not_triton
from tests.unit.model.attention_cases import answer, assert_one_mask, make_case, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:.*TensorFloat32.*"),
]

BACKENDS = {"sdpa": sdpa_attention, "triton": triton_attention}
DTYPES = {"bfloat16": (torch.bfloat16, 2e-2), "float16": (torch.float16, 3e-3), "float32": (torch.float32, 1e-4)}
LONG = [[1] * 512, [1] * 200 + [2] * 100 + [3] * 150 + [0] * 62]
CASES = {
    "content": (LONG, (0, 0), {"heads": 4, "head_dim": 64}),
    "ddrp": (LONG, (-63, 63), {"tables": "q", "heads": 4, "head_dim": 64}),
    "deberta": (LONG, (-64, 63), {"tables": "QK", "heads": 4, "head_dim": 64}),
    "tupe": (LONG, (0, 0), {"bias_batch": 1, "heads": 4, "head_dim": 64}),
    "t5": (LONG, (-127, 127), {"tables": "V", "heads": 4, "head_dim": 64}),
    "packed tupe": (LONG, (0, 0), {"bias_batch": 2, "heads": 4, "head_dim": 64}),
    "wide heads": (LONG, (-63, 63), {"tables": "qk", "heads": 2, "head_dim": 128}),
    "narrow heads": ([[1] * 130], (-4, 3), {"tables": "qk", "heads": 2, "head_dim": 16}),
    "odd length": ([[1] * 333, [1] * 77 + [0] * 256], (-40, 70), {"tables": "Qk", "heads": 2, "head_dim": 64}),
    "short": ([[1] * 17, [1] * 9 + [0] * 8], (-4, 3), {"tables": "qk", "heads": 2, "head_dim": 32}),
    "local": (LONG, (-63, 63), {"tables": "q", "heads": 4, "head_dim": 64, "window": 64}),
    "causal": (LONG, (-63, 63), {"tables": "q", "heads": 4, "head_dim": 64, "causal": True}),
    "causal content": (LONG, (0, 0), {"heads": 4, "head_dim": 64, "causal": True}),
    "local content": (LONG, (0, 0), {"heads": 4, "head_dim": 64, "window": 64}),
}


def skip_unless_served(name, case, dropout=0.0):
    reason = why_not_triton(case.attending(dropout).demand) if name == "triton" else None
    if reason:
        pytest.skip(reason)


def largest_errors(got, expected):
    """Of the context and of each gradient, relative to the largest expected number."""
    pairs = zip(got, expected, strict=True)
    return [((x.detach().cpu().double() - y).abs().max() / y.abs().max()).item() for x, y in pairs]


@pytest.mark.parametrize("dtype_name", DTYPES)
@pytest.mark.parametrize("case_name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_eager_in_float64(backend, case_name, dtype_name):
    dtype, allowance = DTYPES[dtype_name]
    if dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported():
        pytest.skip("this GPU has no bfloat16")
    ids, bounds, options = CASES[case_name]
    case = make_case(ids, *bounds, scale=0.1, **options).to("cuda", dtype)
    skip_unless_served(backend, case)
    expected = reference(case)
    eager = largest_errors(answer(case, eager_attention), expected)
    got = largest_errors(answer(case, BACKENDS[backend]), expected)
    for number, (error, baseline) in enumerate(zip(got, eager, strict=True)):
        assert error <= 3 * baseline + allowance, f"tensor {number}: {error:.2e}, eager {baseline:.2e}"


@pytest.mark.parametrize("case_name", ["ddrp", "deberta", "tupe"])
def test_triton_dropout_draws_one_mask_for_forward_and_backward(case_name):
    ids = [[1] * 128, [1] * 90 + [0] * 38]
    _, bounds, options = CASES[case_name]
    case = make_case(ids, *bounds, scale=0.1, **(options | {"head_dim": 128})).to("cuda", torch.float32)
    skip_unless_served("triton", case, 0.25)
    assert_one_mask(case, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_triton_repeats_bit_by_bit(dropout):
    ids, bounds, _ = CASES["deberta"]
    case = make_case(ids, *bounds, tables="QK", heads=4, head_dim=64, bias_batch=1).to("cuda", torch.float16)
    skip_unless_served("triton", case, dropout)
    answers = [answer(case, triton_attention, dropout, seed=seed) for seed in (1, 1, 2)]
    assert all(map(torch.equal, *answers[:2]))
    assert torch.equal(answers[0][0], answers[2][0]) == (dropout == 0)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("case_name", ["content", "ddrp", "tupe"])
def test_sdpa_is_served_by_the_efficient_kernel(case_name, dropout):
    """`sdpa_kernel` raises where torch would have fallen back to the path that stores all probabilities."""
    ids, bounds, options = CASES[case_name]
    case = make_case(ids, *bounds, **options).to("cuda", torch.float16)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        context, *_ = answer(case, sdpa_attention, dropout)
    assert context.isfinite().all()


def test_no_logits_are_stored():
    """Forward and backward stay below one matrix of logits a head: the fused kernel ran, not a fallback."""
    seq, heads = 4096, 32
    case = make_case([[1] * seq], -63, 63, tables="q", heads=heads, head_dim=64).to("cuda", torch.float16)
    skip_unless_served("triton", case)
    answer(case, triton_attention)  # compiles
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    answer(case, triton_attention)
    assert torch.cuda.max_memory_allocated() - before < heads * seq * seq * 2
