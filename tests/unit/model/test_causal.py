"""The causal phase: no token's output depends on what follows, in every encoding and backend; sums and gradients beside
the loop twins; nothing else of an objective acts.
"""

from __future__ import annotations

import pytest
import torch

from megatron_ddrp.config import ENCODINGS, ObjectiveConfig
from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.model.attention.backends import BACKENDS
from megatron_ddrp.model.stages import Draws, layout_of
from megatron_ddrp.objectives.contract import CausalLM, make_objective
from tests.unit.model.tiny import packed_batch, tiny_batch, tiny_model, twin_sums

NOTHING = Draws.none(2, 2)
LOCAL = {"local_attention": 4, "global_every": 2}
"""The second of two layers attends to the two tokens before."""
MODELS = {name: {"position_encoding": name} for name in ENCODINGS}
MODELS |= {f"{name}, local": {"position_encoding": name, **LOCAL} for name in ("deberta", "rope", "alibi")}
MODELS["deberta-v2, decoder"] = {"position_encoding": "deberta-v2", "deberta_emd": True, "layernorm_position": "pre"}
OTHER_HALF = {
    "bert-r": ("relative", slice(0, 4)),
    "ddrp": ("direction", slice(1, 2)),
    "deberta": ("relative", slice(0, 4)),
    "deberta-v2": ("relative", slice(0, 4)),
    "t5": ("relative", slice(16, 32)),
    "tupe-r": ("relative", slice(17, 32)),
    "alibi-asym": ("right", slice(0, 3)),
}
"""Encoding → its parameter with entries for following tokens, and these."""


def causal_batch(changed=None):
    """Two documents in the first row and one with padding in the second; each token predicts the next.

    With `changed` the token at that place of the first row is another one.
    """
    batch = packed_batch(tiny_batch(lengths=(4, 3, 5)), [[0, 1], [2]])
    labels = torch.full_like(batch.labels, IGNORED_LABEL)
    for row, documents in enumerate(batch.document_ids.tolist()):
        for place, (own, following) in enumerate(zip(documents, documents[1:], strict=False)):
            if own == following != 0:
                labels[row, place] = batch.input_ids[row, place + 1]
    if changed is not None:
        batch.input_ids[0, changed] = (batch.input_ids[0, changed] + 4) % 11
    return batch._replace(labels=labels)


def sums_of(model, batch):
    return model(batch, NOTHING, None, layout_of(batch, causal=True)).sums


def gradients_of(model, loss):
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return dict(zip(names, found, strict=True))


def with_backend(model, name):
    for layer in model.layers:
        layer.attention.backend = name
    return model


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_a_changed_token_changes_no_output_before_it_and_none_of_another_document(name, backend, monkeypatch):
    model, outputs, sums = with_backend(tiny_model(**MODELS[name]), backend), [], CausalLM.sums
    monkeypatch.setattr(CausalLM, "sums", lambda self, end: (outputs.append(end.predicted), sums(self, end))[1])
    for changed in (None, 0, 1, 3, 5):
        sums_of(model, causal_batch(changed))
    plain, *others = outputs
    predicting = [0, 1, 2, 4, 5]  # of the first row; the ends of its documents, 3 and 6, predict nothing
    for changed, other in zip((0, 1, 3, 5), others, strict=True):
        moved = ((other - plain).abs().amax(-1) > 1e-9).tolist()
        own_document = range(4) if changed < 4 else range(4, 7)
        reached = [place for place in predicting if place >= changed and place in own_document]
        assert moved == [place in reached for place in predicting] + [False] * 4
        unreached = [n for n, is_moved in enumerate(moved) if not is_moved]
        assert torch.equal(other[unreached], plain[unreached])


@pytest.mark.parametrize("name", MODELS)
def test_sums_and_gradients_equal_the_twins_and_following_entries_get_none(name):
    model, batch = tiny_model(**MODELS[name]), causal_batch()
    expected = twin_sums(model, batch, NOTHING, causal=True)[[0, 3]]
    wanted = gradients_of(model, expected[0])
    for backend in BACKENDS:
        sums = sums_of(with_backend(model, backend), batch)
        torch.testing.assert_close(sums, expected, rtol=1e-10, atol=1e-10)
        found = gradients_of(model, sums[0])
        for parameter, gradient in found.items():
            torch.testing.assert_close(gradient, wanted[parameter], rtol=1e-9, atol=1e-9, msg=parameter)
        encoding = MODELS[name]["position_encoding"]
        if encoding in OTHER_HALF:
            parameter, entries = OTHER_HALF[encoding]
            gradient = found[f"embeddings.position.{parameter}"]
            assert not gradient[entries].any(), "entries for following tokens learn"
            assert parameter == "right" or gradient.any()


@pytest.mark.parametrize("objective", ["mlm", "mth", "token-contrast", "head-disagreement"])
def test_every_objective_has_the_same_causal_phase(objective):
    config = ObjectiveConfig(objective=objective, objective_phases="clm:0.5")
    model, batch = tiny_model(objective=config), causal_batch()
    causal = make_objective(config).causal
    draws = causal.draw(batch.map(torch.Tensor.numpy), model.config, 1, 1)
    assert draws.token_mask.shape == (2, 1, 0) and draws.heads.shape == (2, 0) and draws.own is None
    sums = model(batch, draws, None, layout_of(batch, causal=True)).sums
    assert causal.sum_names == ("clm_loss", "clm_correct")
    torch.testing.assert_close(sums, twin_sums(model, batch, NOTHING, causal=True)[[0, 3]], rtol=1e-10, atol=1e-10)
    assert not torch.isclose(sums[0], twin_sums(model, batch, NOTHING)[0]), "the mask does nothing"
