"""FLOP by closed forms against torch's count over a real forward and backward pass; peaks of devices by name."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_ddrp.config import ENCODINGS, Config, ObjectiveConfig
from megatron_ddrp.model import build_model
from megatron_ddrp.model.stages import Draws
from megatron_ddrp.objectives.contract import make_objective
from megatron_ddrp.run.flops import TokenFlop, flop_of_rows, flop_per_token
from tests.unit.model.tiny import tiny_batch, tiny_config

ROWS, LENGTH, PREDICTED = 3, 8, 2
SIZES = {"seq_length": LENGTH, "relative_distance": 3, "attention_backend": "eager", "hidden_size": 24}
OF_ENCODING = {"deberta-v2": {"relative_distance": 2 * LENGTH}}
"""With so many buckets each offset has its own; eager attention multiplies by each offset in any case."""


def configuration(encoding, objective="mlm", **changes):
    settings = {"objective": objective, "mask_prob": PREDICTED / LENGTH, "generator_size": 0.5}
    sizes = SIZES | OF_ENCODING.get(encoding, {}) | changes
    model = tiny_config(position_encoding=encoding, **sizes)
    return Config(model=model, objective=ObjectiveConfig(**settings))


def counted(config):
    """FLOP that torch counts for a batch without padding whose share of predicted tokens is the configuration's."""
    torch.manual_seed(0)
    model = build_model(config.model, objective=config.objective)
    batch = tiny_batch((LENGTH,) * ROWS, LENGTH, predicted=PREDICTED)
    own = make_objective(config.objective).draw(batch.map(lambda x: x.numpy()), config.model, 0, 1).own
    with FlopCounterMode(display=False) as counter:
        model(batch, Draws.none(ROWS, config.model.num_layers)._replace(own=own)).sums.sum().backward()
    return counter.get_total_flops()


def of_projected_tables(model, forward_only=0):
    """FLOP of the projections of DeBERTa's table, which no token pays for: trained once a layer."""
    rows = 2 * LENGTH - 1 if model.position_encoding == "deberta-v2" else 2 * model.relative_distance
    products = 2 * 2 * rows * model.hidden_size**2
    return products * (3 * model.num_layers + forward_only)


def once_per_batch(config):
    """FLOP of an encoding's own products, which the closed forms leave out."""
    model, rows = config.model, LENGTH + 1
    if config.model.position_encoding.startswith("tupe"):
        return 6 * (2 * rows * model.hidden_size**2 + rows**2 * model.hidden_size)
    if config.model.position_encoding == "deberta-v2":
        return of_projected_tables(model)
    if config.model.position_encoding != "deberta":
        return 0
    if config.objective.generates:
        return of_projected_tables(model) + of_projected_tables(config.objective.generator_config(model))
    return of_projected_tables(model, forward_only=1)  # the last layer's, whose ordinary output nobody reads


CASES = [(encoding, "mlm") for encoding in ENCODINGS] + [
    (encoding, name) for encoding in ("ddrp", "deberta") for name in ("electra", "rtd")
]


@pytest.mark.parametrize(("encoding", "objective"), CASES)
def test_the_closed_forms_equal_what_torch_counts(encoding, objective):
    config = configuration(encoding, objective)
    assert flop_of_rows(config, [(ROWS, LENGTH)]) + once_per_batch(config) == pytest.approx(counted(config), rel=1e-12)


def test_offsets_that_share_a_bucket_count_once():
    few = flop_per_token(configuration("deberta-v2", relative_distance=4))
    assert few.tables / flop_per_token(configuration("deberta-v2")).tables == 7 / 15


def test_each_part_of_the_model_has_its_own_term():
    """Leaving a part out of the model takes its term, and no other, from torch's count."""
    tokens, whole = ROWS * LENGTH, configuration("ddrp")
    plain = configuration("absolute")
    assert flop_per_token(whole).tables * tokens == counted(whole) - counted(plain)
    small, large = configuration("absolute", vocab_size=128), configuration("absolute", vocab_size=256)
    assert (flop_per_token(large).head - flop_per_token(small).head) * tokens == counted(large) - counted(small)
    deeper = flop_per_token(configuration("absolute", num_layers=3))
    layer = (counted(configuration("absolute", num_layers=3)) - counted(plain)) / tokens
    assert (deeper.linear + deeper.attention) / 3 == layer
    wider = flop_per_token(configuration("absolute", ffn_hidden_size=11))
    assert wider.linear - flop_per_token(plain).linear == 2 * 6 * 2 * 24


def test_a_base_model_at_512_tokens_takes_588_mflop_per_token_and_7_per_table():
    plain = Config().replace(model={"position_encoding": "absolute", "relative_distance": None})
    plain = plain.replace(objective={"objective": "mlm", "tcd_weight": None, "hcd_weight": None})
    assert flop_per_token(plain).total / 1e6 == pytest.approx(588, abs=0.5)
    assert flop_per_token(Config()).tables / 1e6 == pytest.approx(7.0, abs=0.1)


def test_short_rows_meet_few_rows_of_a_table():
    config = configuration("ddrp")  # a table of 5 rows
    assert flop_per_token(config, 2).tables == flop_per_token(config).tables * 3 / 5


def test_local_layers_count_the_keys_of_their_window():
    base = {"seq_length": 512, "relative_distance": 64, "num_layers": 4}
    whole = flop_per_token(configuration("deberta", **base))
    local = flop_per_token(configuration("deberta", local_attention=20, global_every=3, **base))
    # Layers 0 and 3 are global, the last one counts a third: its ordinary output is the decoder's input at best.
    assert local.attention / whole.attention == pytest.approx((4 / 3 * 512 + 2 * 21) / (10 / 3 * 512))
    assert local.tables / whole.tables == pytest.approx((4 / 3 * 128 + 2 * 21) / (10 / 3 * 128))
    assert (local.linear, local.head, local.mask_decoder) == (whole.linear, whole.head, whole.mask_decoder)
    last = flop_per_token(configuration("deberta", local_attention=20, global_every=2, **base))
    assert last.mask_decoder < whole.mask_decoder
    wide = flop_per_token(configuration("deberta", local_attention=2000, **base))
    assert wide == whole


def test_terms_add_up():
    assert TokenFlop(1, 2, 3, 4, 5, 6).total == 21
