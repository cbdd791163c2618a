"""`--attention-init offsets` against loops from its formula, and what it makes heads attend to."""

import math

import pytest
import torch

from megatron_ddrp.config import Config, ObjectiveConfig
from megatron_ddrp.errors import UserError
from megatron_ddrp.model.encoder import GAIN
from tests.unit.model.tiny import tiny_config, tiny_model

SIZES = {"position_encoding": "absolute", "hidden_size": 24, "num_attention_heads": 3, "seq_length": 40}
OFFSETS = (-1, 1, -2)


def frequency(pair: int) -> float:
    return math.pi / 10 ** ((pair + 0.5) / 12)


def added(head: int, offset: int) -> list[list[float]]:
    """Return what the formula adds to the 8 rows of a head in W^Q, or with offset 0 to those in W^K."""
    rows = [[0.0] * 24 for _ in range(8)]
    for place, pair in enumerate(range(head, 12, 3)):
        turn = frequency(pair) * offset
        rows[2 * place][2 * pair], rows[2 * place][2 * pair + 1] = math.cos(turn), math.sin(turn)
        rows[2 * place + 1][2 * pair], rows[2 * place + 1][2 * pair + 1] = -math.sin(turn), math.cos(turn)
    return [[GAIN * x for x in row] for row in rows]


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
        for pair in range(12):
            wave = [f(frequency(pair) * place + pair) * math.sqrt(2) * 0.4 for f in (math.sin, math.cos)]
            assert table[place, 2 * pair : 2 * pair + 2].tolist() == pytest.approx(wave, abs=1e-5)
    for name in maps:
        for head, offset in enumerate(OFFSETS):
            rows = slice(8 * head, 8 * head + 8)
            difference = ours.get_parameter(name)[rows] - plain.get_parameter(name)[rows]
            expected = torch.tensor(added(head, offset if "query" in name else 0), dtype=torch.float64)
            torch.testing.assert_close(difference, expected, rtol=0, atol=1e-6)


def test_each_head_attends_to_its_offset():
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "seq_length": 128, "init_method_std": 0.05}
    model = tiny_model(attention_init="offsets", **SIZES | sizes)
    positions = torch.nn.functional.layer_norm(model.embeddings.absolute.weight, (128,))
    for layer in model.layers:
        query, key = layer.attention.query.weight, layer.attention.key.weight
        for head, offset in enumerate((-1, 1, -2, 2)):
            rows = slice(32 * head, 32 * head + 32)
            logits = (positions @ query[rows].T) @ (positions @ key[rows].T).T  # [places, places]
            places = [place for place in range(128) if 0 <= place + offset < 128]
            assert logits[places].argmax(1).tolist() == [place + offset for place in places]
            others = logits[places].clone()
            others[range(len(places)), [place + offset for place in places]] = -math.inf
            assert (others.amax(1) < 0.85 * logits[places].amax(1)).all()


def test_any_width_has_a_start():
    tiny_model(attention_init="offsets", **SIZES | {"hidden_size": 9, "num_attention_heads": 3})


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"position_encoding": "ddrp"}, "give --absolute-embedding"),
        ({"position_encoding": "absolute", "embedding_size": 6}, "--embedding-size"),
    ],
)
def test_it_is_refused_without_positions_that_heads_can_read(changes, remedy):
    with pytest.raises(UserError, match=remedy):
        tiny_config(attention_init="offsets", **changes)
    tiny_config(attention_init="offsets", position_encoding="ddrp", absolute_embedding=True)
    assert Config().model.attention_init == "normal"
