"""Whole layers and whole models against the loop twin, in sums, hidden states and every parameter's gradient."""

import pytest
import torch

from megatron_ddrp.model import blocked, build_model
from megatron_ddrp.model.attention import BACKENDS
from megatron_ddrp.objectives.mth import Draws
from tests.unit.model.tiny import some_draws, tiny_batch, tiny_config, tiny_model, twin_encode, twin_sums

WEIGHTS = torch.tensor([0.7, 1.3, 0.9], dtype=torch.float64)


def gradients(model, sums):
    parameters = dict(model.named_parameters())
    values = torch.autograd.grad((sums * WEIGHTS).sum(), list(parameters.values()))
    return dict(zip(parameters, values, strict=True))


@pytest.mark.parametrize(
    "encoding, order, relative_table",
    [
        ("absolute", "post", "shared"),
        ("absolute", "pre", "shared"),
        ("ddrp", "post", "shared"),
        ("ddrp", "pre", "per-layer"),
    ],
)
def test_model_equals_the_twin(encoding, order, relative_table, monkeypatch):
    monkeypatch.setattr(blocked, "BLOCK_ELEMENTS", 2 * 3 * 7**2)
    model = tiny_model(position_encoding=encoding, layernorm_position=order, relative_table=relative_table)
    batch = tiny_batch(lengths=(6, 1, 3), seq=6)
    draws = some_draws(batch)
    expected = twin_sums(model, batch, draws)
    assert expected.abs().min() > 1e-3
    expected_gradients = gradients(model, expected)
    for backend in BACKENDS:
        for layer in model.layers:
            layer.attention.backend = backend
        sums = model(batch, draws)
        torch.testing.assert_close(sums, expected, rtol=1e-10, atol=1e-10, msg=lambda text, b=backend: f"{b}: {text}")
        for name, gradient in gradients(model, sums).items():
            torch.testing.assert_close(
                gradient, expected_gradients[name], rtol=1e-9, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}"
            )


@pytest.mark.parametrize("encoding", ["absolute", "ddrp"])
def test_hidden_states_of_the_valid_tokens_equal_the_twin(encoding):
    model = tiny_model(position_encoding=encoding)
    batch = tiny_batch(lengths=(5, 2), seq=6)
    hidden = model.encode(batch.input_ids, batch.segment_ids, batch.document_ids, batch.position_ids)
    for row, length in enumerate((5, 2)):
        expected, _ = twin_encode(model, batch, row)
        torch.testing.assert_close(hidden[row, :length], expected[:length], rtol=0, atol=1e-10)


@pytest.mark.parametrize("encoding", ["absolute", "ddrp"])
def test_a_packed_row_gives_the_hidden_states_of_its_documents(encoding):
    model = tiny_model(position_encoding=encoding).eval()
    ids = torch.tensor([[3, 4, 5, 6, 7, 0]])
    documents, positions = torch.tensor([[1, 1, 1, 2, 2, 0]]), torch.tensor([[0, 1, 2, 0, 1, 0]])
    zeros = torch.zeros_like(ids)
    packed = model.encode(ids, zeros, documents, positions)
    for part in (slice(0, 3), slice(3, 5)):
        alone = model.encode(
            ids[:, part], zeros[:, part], torch.ones_like(ids[:, part]), torch.arange(part.stop - part.start)[None]
        )
        torch.testing.assert_close(packed[:, part], alone, rtol=0, atol=1e-11)


def test_sums_do_not_depend_on_how_the_batch_is_cut_or_padded():
    model = tiny_model()
    batch = tiny_batch(lengths=(7, 4, 2, 1))
    draws = some_draws(batch)
    whole = model(batch, draws)
    parts = torch.zeros_like(whole)
    for row, length in enumerate((7, 4, 2, 1)):
        alone = batch.map(lambda field, row=row, length=length: field[row : row + 1, :length])
        parts = parts + model(alone, Draws(draws.token_mask[row : row + 1, :length], draws.heads))
    torch.testing.assert_close(parts, whole, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("relative_table", ["shared", "per-layer"])
def test_activation_checkpointing_changes_nothing(relative_table, dropout):
    config = tiny_config(relative_table=relative_table, hidden_dropout=dropout, attention_dropout=dropout)
    batch = tiny_batch()
    draws = some_draws(batch)
    results = []
    for checkpoint_activations in (False, True):
        model = build_model(config, checkpoint_activations).double()
        model.load_state_dict(tiny_model(relative_table=relative_table).state_dict())
        torch.manual_seed(3)
        sums = model(batch, draws)
        results.append((sums, gradients(model, sums)))
    (plain, plain_gradients), (recomputed, recomputed_gradients) = results
    assert torch.equal(plain, recomputed)
    for name, gradient in plain_gradients.items():
        assert torch.equal(gradient, recomputed_gradients[name]), name


def test_activation_checkpointing_really_recomputes(monkeypatch):
    model = build_model(tiny_config(), checkpoint_activations=True)
    calls = []
    original = model.layers[0].feed_forward.forward
    monkeypatch.setattr(model.layers[0].feed_forward, "forward", lambda hidden: calls.append(1) or original(hidden))
    batch = tiny_batch()
    model(batch, some_draws(batch)).sum().backward()
    assert len(calls) == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_one_token_count_for_nothing(backend):
    """One token's heads are single numbers, whose cosines of 1 or -1 must not enter; row by row, lest they cancel."""
    model = tiny_model(attention_backend=backend)
    for seed in range(4):
        batch = tiny_batch(lengths=(1,), seed=seed, predicted=0)
        assert model(batch, some_draws(batch)).eq(0).all()


def test_terms_that_are_switched_off_are_zero():
    model, batch = tiny_model(), tiny_batch()
    sums = model(batch, Draws.none(3, 2))
    assert sums[0] > 0 and sums[1] == 0 and sums[2] == 0
    torch.testing.assert_close(sums, twin_sums(model, batch, Draws.none(3, 2)), rtol=1e-11, atol=1e-11)
