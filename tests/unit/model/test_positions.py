"""The encodings one by one: relative distances against the loop twin, the twins by hand, and what each refuses.

`--attention-init offsets` stands against loops from its formula. ALiBi with fixed and with learned slopes, the buckets
of T5 and of DeBERTa's version 2, how DDRP's D starts, and what does not decay. Whole models of every encoding stand
against their twins in test_bert.py and test_encoder.py.
"""

import math
import re

import pytest
import torch
from torch import nn

from megatron_ddrp.arguments import build_parser, parse_arguments
from megatron_ddrp.config import ENCODINGS, Config, ModelConfig, ObjectiveConfig, encoding_class
from megatron_ddrp.engine.build import build_optimizer, names_without_decay
from megatron_ddrp.engine.optimizers import OF_TABLES
from megatron_ddrp.model import build_model
from megatron_ddrp.model.attention import cpu
from megatron_ddrp.model.attention.backends import BACKENDS, attend_from
from megatron_ddrp.model.positions import LayerPositions, PositionTerms
from megatron_ddrp.model.positions.absolute import Rotation, relative_bucket, set_theta
from megatron_ddrp.model.positions.biases import Alibi, AlibiAsym, slopes
from megatron_ddrp.model.positions.tables import DIRECTION_INITS, Ddrp, DebertaV2, bucket
from megatron_ddrp.parallel.process_group import Ranks
from tests.reference import positions as twins
from tests.reference.positions import alibi_slopes, deberta_v2_buckets, deberta_v2_row, t5_bucket, turned
from tests.reference.tensors import random, seeded
from tests.refusals import refused, wrong_arguments
from tests.unit.model.attention_cases import answer, make_case, reference
from tests.unit.model.tiny import assert_equals_twin, encode, some_draws, tiny_batch, tiny_config, tiny_model

SEQ = 7
TABLED = [name for name in ENCODINGS if (own := encoding_class(name)).is_relative and own.relative_distance]
"""Encodings that `--relative-distance` acts on."""
LIMITED = [name for name in ENCODINGS if encoding_class(name).limits_length]


DISTANCES = {name: [1, 3, 4, SEQ, 12, 128] for name in TABLED} | {"deberta-v2": [2, 4, 6, 12, 128]}
"""Distances below, at and above the sequence; of `deberta-v2`, numbers of buckets, all, half and none of them wide."""


@pytest.mark.parametrize("name, distance", [(name, distance) for name in TABLED for distance in DISTANCES[name]])
def test_a_layer_with_any_relative_distance_equals_the_twin(name, distance):
    model = tiny_model(position_encoding=name, relative_distance=distance, num_layers=1, deberta_emd=False)
    batch = tiny_batch(lengths=(SEQ, 3))
    assert_equals_twin(model, batch, some_draws(batch, heads=((0, 2),)))


@pytest.mark.parametrize("distance", [1, 4, 5, 7, 8, 9, 10, 20, 32, 64, 128, 300, 512])
def test_buckets_equal_the_twin_far_beyond_the_last(distance):
    offsets = torch.arange(-600, 601)
    buckets = relative_bucket(offsets, distance)
    assert buckets.tolist() == [t5_bucket(offset, distance) for offset in offsets.tolist()]
    assert (buckets[offsets.abs() >= distance] % 16 == 15).all() and (distance < 9 or buckets.unique().numel() > 15)
    if distance == 64:
        assert not torch.equal(buckets, relative_bucket(offsets, 128))


@pytest.mark.parametrize("name", ["tupe-a", "tupe-r"])
def test_the_untied_bias_is_one_for_the_batch_unless_a_row_is_packed(name):
    config = tiny_config(position_encoding=name)
    encoding = encoding_class(name)(config)
    # Padding stands at position 0.
    for places, rows in ((range(SEQ), 1), ([0, 1, 2, 0, 0, 0, 0], 1), ([0, 1, 2, 0, 1, 2, 3], 2)):
        terms = encoding.terms(config, encoding(torch.tensor(places).expand(2, -1)))
        assert terms.bias.shape == (rows, 3, SEQ, SEQ)


@pytest.mark.parametrize("name", ENCODINGS)
def test_beyond_the_trained_length(name):
    """Relative encodings go on; the others say in one line what they were given and what they can take."""
    assert LIMITED == ["absolute", "tupe-a", "tupe-r"]
    batch = tiny_batch(lengths=(7,))
    refused("7 tokens.*--seq-length 6", encode, tiny_model(absolute_embedding=True, seq_length=6), batch)
    model = tiny_model(position_encoding=name, seq_length=6)
    if name not in LIMITED:
        assert encode(model, batch).isfinite().all()
        return
    assert "7" in str(refused("--seq-length 6", encode, model, batch))


REFUSED = [
    ({"position_encoding": "nope", "relative_distance": 64}, "^--.* 64 with .* nope, .*: leave the d"),
    *(({"relative_distance": number}, f"^.* deberta-v2: .*got .* {number}: choose") for number in (1, 3, 255)),
    ({"position_encoding": "rope", "hidden_size": 15, "num_attention_heads": 3}, "^--.* rope: .* heads 5 wide: choose"),
    ({"attention_init": "offsets", "position_encoding": "ddrp"}, "give --absolute-embedding"),
    ({"attention_init": "offsets", "position_encoding": "absolute", "embedding_size": 6}, "--embedding-size"),
]
TOO_SHORT = {"query_table": (1, 3, 4), "key_table": (2, 3, 4), "offset_bias": (2, 3)}


def test_settings_that_no_encoding_can_have_and_tables_whose_rows_are_not_the_offsets_are_refused():
    error = wrong_arguments(".", parse_arguments, ["--position-encoding", "tupe"])
    assert all(re.search(rf"['\s]{name}[',) ]", str(error)) for name in ENCODINGS)
    for settings, message in REFUSED:
        refused(message, ModelConfig, **{"position_encoding": "deberta-v2"} | settings)
    for field, shape in TOO_SHORT.items():
        with pytest.raises(ValueError, match="a table of 3 rows for the 5 offsets lowest = -2 … highest = 2"):
            PositionTerms(1.0, lowest=-2, highest=2, **{field: torch.zeros(shape)})
    for lowest, highest in [(1, 3), (-3, -1)]:
        with pytest.raises(AssertionError, match="offset 0"):
            PositionTerms(1.0, lowest=lowest, highest=highest)


def test_the_twin_of_rotary_positions_turns_as_complex_numbers_do():
    vector, rates = seeded(8), 10000.0 ** (-torch.arange(4).double() / 4)
    for place in (0, 1, 7, 511):
        numbers = torch.complex(vector[:4], vector[4:]) * torch.exp(1j * place * rates)
        expected = torch.cat((numbers.real, numbers.imag))
        torch.testing.assert_close(turned(vector, place), expected, rtol=0, atol=1e-12)


def test_theta_is_the_configured_one_until_training_sets_another_and_local_layers_keep_their_own():
    vector = seeded(1, 1, 1, 4)
    for local_theta in (9.0, None):
        own = {"rope_theta": 100.0, "local_rope_theta": local_theta, "local_attention": 4, "global_every": 2}
        model = tiny_model(position_encoding="rope", **own)
        for theta in (100.0, 7.0):
            found = [layer.layer_position.rotate(vector, torch.tensor([[3]])).flatten() for layer in model.layers]
            expected = [turned(vector.flatten(), 3, each) for each in (theta, local_theta or theta)]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
            set_theta(model, 7.0)


def test_bfloat16_is_rotated_with_one_rounding():
    rotation = Rotation(tiny_config(position_encoding="rope"))
    states, places = seeded(1, 2, 512, 64).bfloat16(), torch.arange(512)[None]
    got, exact = rotation.rotate(states, places), rotation.rotate(states.double(), places)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-3)  # the tables of angles are in fp32


SIZES = {"position_encoding": "absolute", "hidden_size": 32, "num_attention_heads": 4, "seq_length": 40}
OFFSETS = (-1, 1, -2, 2)
"""The place, beside its own, that each head attends to first."""


def frequency(pair: int) -> float:
    return math.pi / 10 ** ((pair + 0.5) / 16)


def added(head: int, offset: int) -> torch.Tensor:
    """Return what the formula adds to the 8 rows of a head in W^Q, or with offset 0 to those in W^K."""
    rows = torch.zeros(8, 32, dtype=torch.float64)
    for place, pair in enumerate(range(head, 16, 4)):
        cos, sin = math.cos(frequency(pair) * offset), math.sin(frequency(pair) * offset)
        turn = torch.tensor([[cos, sin], [-sin, cos]], dtype=torch.float64)
        rows[2 * place : 2 * place + 2, 2 * pair : 2 * pair + 2] = 1.5 * turn
    return rows


@pytest.mark.parametrize("objective", ["mlm", "electra", "rtd"])
def test_the_start_is_the_random_one_with_the_terms_of_the_formula(objective):
    settings = ObjectiveConfig(objective=objective)
    plain = tiny_model(objective=settings, **SIZES)
    ours = tiny_model(objective=settings, attention_init="offsets", **SIZES)
    changed = {n for n, p in plain.named_parameters() if not torch.equal(p, ours.get_parameter(n))}
    maps = {f"layers.{n}.attention.{name}.weight" for n in range(2) for name in ("query", "key")}
    assert changed == {"embeddings.absolute.weight", *maps}
    table = ours.get_parameter("embeddings.absolute.weight")
    for place in range(40):
        for pair in range(16):
            wave = [f(frequency(pair) * place + pair) * math.sqrt(2) * 0.4 for f in (math.sin, math.cos)]
            assert table[place, 2 * pair : 2 * pair + 2].tolist() == pytest.approx(wave, abs=1e-5)
    for name in maps:
        for head, offset in enumerate(OFFSETS):
            rows = slice(8 * head, 8 * head + 8)
            difference = ours.get_parameter(name)[rows] - plain.get_parameter(name)[rows]
            expected = added(head, offset if "query" in name else 0)
            torch.testing.assert_close(difference, expected, rtol=0, atol=1e-6)


def test_any_absolute_embedding_of_any_width_can_start_so_if_asked():
    tiny_config(attention_init="offsets", position_encoding="ddrp", absolute_embedding=True)
    tiny_model(attention_init="offsets", **SIZES | {"hidden_size": 9, "num_attention_heads": 3})
    assert Config().model.attention_init == "normal"


def test_the_twins_by_hand():
    assert alibi_slopes(2) == [2**-4, 2**-8] and alibi_slopes(8) == [2**-k for k in range(1, 9)]
    rest = [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    assert alibi_slopes(12) == pytest.approx([2**-k for k in range(1, 9)] + rest, rel=1e-15)
    query = torch.tensor([[[2.0], [3.0]]], dtype=torch.float64)
    table = torch.arange(32, dtype=torch.float64)[:, None]
    assert twins.t5_scores(query, query, table, [0, 9], 128).tolist() == [[[4.0, 6.0 + 24], [6.0 + 8, 9.0]]]


def test_slopes_equal_the_twins_for_whole_models_and_for_parts_and_the_bias_is_exact_in_every_precision():
    for heads in (1, 2, 3, 4, 5, 6, 12, 16, 20, 25):
        got = slopes(torch.arange(heads), heads)
        torch.testing.assert_close(got, torch.tensor(alibi_slopes(heads), dtype=torch.float64), rtol=1e-14, atol=0)
        part = slopes(torch.arange(heads // 2, heads), heads)
        assert torch.equal(part.float(), got[heads // 2 :].float())
    offset = torch.arange(-699, 700)  # at lengths beyond the trained one
    exact = torch.stack([-slope * offset.abs().double() for slope in alibi_slopes(8)])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        encoding = Alibi(ModelConfig(position_encoding="alibi", num_attention_heads=8, seq_length=16)).to(dtype)
        (bias,) = encoding(torch.zeros(2, 700, dtype=torch.long))
        assert bias.dtype == torch.float32 and torch.equal(bias.double(), exact)


@pytest.mark.parametrize("backend", [*BACKENDS, "attend_from"])
def test_every_backend_takes_the_wide_bias_with_narrow_queries(backend):
    config = tiny_config(position_encoding="alibi", num_attention_heads=4, hidden_size=16)
    case, encoding = make_case([[1] * 300], 0, 0, heads=4, head_dim=4, dtype=torch.bfloat16), Alibi(config)
    case.terms = encoding.terms(config, encoding(case.document_ids))
    expected, *_ = reference(case)
    if backend == "attend_from":
        vectors, places = (case.query, case.key, case.value), torch.arange(300)[None]
        got = attend_from(*vectors, case.terms, places, case.document_ids, 0.0)
    else:
        got, _ = BACKENDS[backend](case.attending())
    assert got.dtype == torch.bfloat16
    assert (got.double() - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.parametrize("heads", [4, 12, 16])
def test_learned_slopes_start_as_the_symmetric_ones_and_give_a_bias_in_fp32_in_every_precision(heads):
    places = torch.arange(100)[None]
    config = ModelConfig(position_encoding="alibi-asym", num_attention_heads=heads, hidden_size=192)
    (ours,), (symmetric,) = AlibiAsym(config)(places), Alibi(config)(places)
    assert ours.dtype == torch.float32 and ours.shape == (heads, 199) and ours[:, 99].eq(0).all()
    torch.testing.assert_close(ours, symmetric, rtol=2e-6, atol=0)
    encoding = AlibiAsym(config).bfloat16()
    (bias,) = encoding(places)
    bias.sum().backward()
    assert bias.dtype == torch.float32 and encoding.left.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(("table", "place"), [("shared", "embeddings"), ("per-layer", "layers.1")])
def test_weight_decay_spares_slopes_and_directions_and_no_other_table(table, place):
    for encoding, spared in (("alibi-asym", {"left", "right"}), ("ddrp", {"direction"}), ("t5", set())):
        names = names_without_decay(build_model(tiny_config(position_encoding=encoding, relative_table=table)))
        own = f"{place}.position."
        assert {name.removeprefix(own) for name in names if name.startswith(own)} == spared, encoding


RELEASED = [(256, 512), (128, 512), (32, 128), (256, 1024), (64, 512)]


@pytest.mark.parametrize("number, longest", [*RELEASED, (8, 7), (8, 32), (2, 9), (4, 5), (6, 4), (12, 7)])
def test_buckets_equal_the_twin_those_of_transformers_and_larger_distances_have_the_last(number, longest):
    offset, table = torch.arange(-longest - 50, longest + 51), deberta_v2_buckets(number, longest)
    found = bucket(offset, number, longest)
    assert (found + number).tolist() == [deberta_v2_row(x, number, table) for x in offset.tolist()]
    if (number, longest) in RELEASED:
        modeling = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")
        theirs = modeling.make_log_bucket_position(offset[51:-51], number, longest)
        assert found[51:-51].tolist() == theirs.long().tolist()


def test_a_row_reads_no_more_of_the_table_than_its_offsets_need():
    encoding = DebertaV2(tiny_config(position_encoding="deberta-v2", relative_distance=8, seq_length=7))
    for length in (1, 3, 7, 12):
        states, table_row = encoding(torch.zeros(1, length, dtype=torch.long))
        needed = encoding.norm(encoding.relative)[bucket(torch.arange(1 - length, length), 8, 7) + 8]
        assert torch.equal(states[table_row], needed)
        assert states.shape == (int(table_row.max()) + 1, 12) and table_row.min() == 0


NEAR = torch.arange(-99, 100).abs().clamp(max=30)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("row", [bucket(torch.arange(-99, 100), 16, 100) + 15, NEAR, 30 - NEAR])
def test_tiles_and_runs_of_keys_that_read_some_buckets_alone_equal_the_whole(row, window, monkeypatch):
    monkeypatch.setattr(cpu, "RUN_OF_KEYS", 16)
    monkeypatch.setattr(cpu, "TILE_ELEMENTS", 1)
    rows = [[1] * 100, [1] * 71 + [0] * 29]
    case = make_case(rows, 0, 0, heads=2, head_dim=4, dtype=torch.float64, window=window)
    case.terms = PositionTerms(0.3, random(2, 31, 4), random(2, 31, 4), lowest=-99, highest=99, table_row=row)
    found = (answer(case, BACKENDS[backend], heads=(0, 1)) for backend in ("eager", "blocked"))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


def test_d_is_drawn_with_the_mean_and_the_deviation_of_its_start():
    action = next(a for a in build_parser()._actions if a.dest == "direction_init")
    starts = {"ones": (1, 0.02), "spread": (1, 0.5), "free": (0, 1), "embedding": (0, 0.02)}
    assert set(action.choices) == set(DIRECTION_INITS) == set(starts)
    for start, (mean, deviation) in starts.items():
        torch.manual_seed(0)
        direction = Ddrp(ModelConfig(direction_init=start)).direction
        count = direction.numel()
        assert abs(direction.mean() - mean) < 5 * deviation / count**0.5
        assert abs(direction.std() - deviation) < 5 * deviation / (2 * count) ** 0.5


class Part(LayerPositions):
    gains = frozenset({"factor"})

    def __init__(self, config):
        super().__init__(config)
        self.factor, self.other = (nn.Parameter(torch.ones(3)) for _ in range(2))


def test_weight_decay_spares_norms_of_any_name_and_the_gains_of_a_layer_part():
    parts = {"scaling": nn.LayerNorm(3), "squares": nn.RMSNorm(3), "map": nn.Linear(3, 3), "part": Part(ModelConfig())}
    expected = {"scaling.weight", "scaling.bias", "squares.weight", "map.bias", "part.factor"}
    assert names_without_decay(nn.ModuleDict(parts)) == expected


def test_in_a_causal_phase_a_stage_of_a_pipeline_without_tables_has_as_many_groups():
    """ZeRO sums the norms of all stages group by group, and would wait for the group that is missing."""
    config = Config().replace(objective={"objective": "mlm", "objective_phases": "clm:0.5"})
    alone = []
    for encoding in ("bert-r", "nope"):
        model = tiny_model(position_encoding=encoding)
        groups = build_optimizer(model, config, Ranks(0, 1, torch.device("cpu"))).param_groups
        assert sum(len(group["params"]) for group in groups) == len(list(model.parameters())) and len(groups) == 3
        alone.append([groups[2]["weight_decay"], groups[2].get(OF_TABLES), len(groups[2]["params"])])
    assert alone == [[0.01, True, 1], [0.01, False, 1]]
