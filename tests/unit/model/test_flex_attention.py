"""FlexAttention on a CPU, uncompiled: forward as it is; backward with torch's refusal of CPU gradients lifted."""

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from megatron_ddrp.model.attention.backends import sdpa_attention
from megatron_ddrp.model.attention.gpu.flex_attention import flex_attention, why_not_flex
from tests.unit.model.attention_cases import answer, assert_answers_close, make_case, reference

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

PADDED = [[1] * 17, [1] * 9 + [0] * 8]
PACKED = [[1] * 5 + [2] * 7 + [3] * 3 + [0] * 2]
CASES = {
    "content": (PADDED, {}),
    "query table": (PADDED, {"tables": "q"}),
    "both tables a head": (PADDED, {"tables": "QK"}),
    "packed": (PACKED, {"tables": "qK"}),
    "bias": (PADDED, {"bias_batch": 1}),
    "offset bias": (PADDED, {"tables": "v"}),
    "packed offset bias a head": (PACKED, {"tables": "V"}),
    "everything": (PADDED, {"tables": "QkV", "bias_batch": 2}),
    "more than a block": ([[1] * 130], {"tables": "qk"}),
    "a row of padding": ([[1] * 6, [0] * 6], {"tables": "q"}),
}


@pytest.mark.parametrize("document_ids, options", CASES.values(), ids=CASES)
def test_equals_eager_in_float64(document_ids, options, monkeypatch):
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    case = make_case(document_ids, -4, 3, heads=2, **options)
    assert_answers_close(answer(case, flex_attention), reference(case), rtol=2e-5, atol=2e-5)


def test_half_precision_stays_near(monkeypatch):
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    case = make_case([[1] * 64], -1, 1, tables="q", dtype=torch.bfloat16)
    assert_answers_close(answer(case, flex_attention), reference(case), rtol=0.05, atol=0.05)


def test_cosine_is_that_of_the_other_backends(monkeypatch):
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    case = make_case(PADDED, -4, 3, tables="qkV", heads=3)
    attending = case.attending(heads=torch.tensor([0, 2]))
    torch.testing.assert_close(flex_attention(attending)[1], sdpa_attention(attending)[1])
    assert flex_attention(case.attending())[1] is None


def test_dropout_is_refused():
    case = make_case(PADDED, -4, 3)
    with pytest.raises(ValueError, match=r"has no dropout, got 0.1: use --attention-dropout 0 or another backend"):
        answer(case, flex_attention, 0.1)


@pytest.mark.parametrize(
    "device, dtype, dropout, head_dim, expected",
    [
        ("cuda", torch.bfloat16, 0.1, 64, "no dropout, got 0.1: use --attention-dropout 0"),
        ("cpu", torch.float32, 0.0, 64, "no backward pass on cpu"),
        ("cuda", torch.float64, 0.0, 64, "bfloat16, float16 or float32, got float64"),
        ("cuda", torch.float16, 0.0, 8, "heads of 16 and wider, got 8"),
        ("cuda", torch.float16, 0.0, 16, None),
    ],
)
def test_reasons_not_to_serve(device, dtype, dropout, head_dim, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    reason = why_not_flex(torch.device(device), dtype, dropout, head_dim)
    assert reason is None if expected is None else expected in reason


def test_old_gpu_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    reason = why_not_flex(torch.device("cuda"), torch.float16, 0.0, 64)
    assert reason is not None and "8.0 (A100) or newer, this GPU has 7.0: use sdpa" in reason
