"""The judges judged: the slow twins in `tests/reference` against values worked out by hand, and by `transformers`."""

import math

import pytest
import torch
from torch import Tensor

from tests.reference import attention, objectives, positions
from tests.reference.tensors import seeded


def vec(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def mat(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def close(got: Tensor, expected: Tensor | float) -> None:
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def pair(*shape: int) -> tuple[Tensor, Tensor]:
    return seeded(*shape), seeded(*shape, seed=1)


DIRECTION = mat([1, 10], [2, 20], [3, 30])  # same place, key to the right, key to the left
DISTANCE_2 = mat([5, 7], [11, 13])  # r_s = 2: distance 0, distance 1 and beyond
QUERY, KEY = mat([1, 0], [0, 2])[None], mat([4, 6], [8, 9])[None]


class TestPositions:
    def test_ddrp_row_is_clipped_to_r_s_distances_and_keeps_the_direction_beyond_them(self) -> None:
        assert [positions.clip(x, -1, 1) for x in (-3, -2, -1, 0, 1, 2, 3)] == [-1, -1, -1, 0, 1, 1, 1]
        for i, j, expected in (
            (4, 4, (1 * 5, 10 * 7)),
            (4, 5, (2 * 11, 20 * 13)),
            (5, 4, (3 * 11, 30 * 13)),
            (0, 9, (2 * 11, 20 * 13)),  # clipped to distance r_s - 1 = 1
            (9, 0, (3 * 11, 30 * 13)),
        ):
            close(positions.ddrp_row(DIRECTION, DISTANCE_2, i, j), vec(*expected))
        direction, distance = mat([1], [2], [3]), mat([1], [10], [100])  # r_s = 3: distances 0, 1, 2 and no row for 3
        rows = [positions.ddrp_row(direction, distance, 4, j).item() for j in range(9)]
        assert rows == [300, 300, 300, 30, 1, 20, 200, 200, 200]

    def test_scores_by_hand(self) -> None:
        expected = mat([4 + 5, 8 + 22], [2 * (6 + 390), 2 * (9 + 70)]) / math.sqrt(2)
        close(positions.ddrp_scores(QUERY, KEY, DIRECTION, DISTANCE_2, [0, 1]), expected[None])
        close(positions.absolute_scores(QUERY, KEY), (mat([4, 8], [12, 18]) / math.sqrt(2))[None])
        relative = mat([0, 0], [5, 7], [11, 13], [17, 19])  # i - j = -1 is row 1, 0 row 2, 1 row 3
        expected = mat([4 + 11, 8 + 5], [2 * (6 + 19), 2 * (9 + 13)]) / math.sqrt(2)
        close(positions.bert_r_scores(QUERY, KEY, relative, [0, 1]), expected[None])

    def test_bert_r_has_two_rows_a_distance_and_the_zeroth_right_of_the_clip(self) -> None:
        """r_s = 2: row 0 for i - j <= -2, 1 for -1, 2 for 0, 3 for 1 and beyond: the paper's 2·r_s rows."""
        query, key = torch.ones(1, 9, 1).double(), torch.zeros(1, 9, 1).double()
        scores = positions.bert_r_scores(query, key, mat([1], [10], [100], [1000]), list(range(9)))[0]
        assert scores[4].tolist() == [1000, 1000, 1000, 1000, 100, 10, 1, 1, 1]


class TestAttention:
    def test_weights_are_softmax_within_a_document_and_padding_is_zero(self) -> None:
        scores, value = mat([0, math.log(3)], [1000, 1000])[None], mat([4, 0], [0, 8])[None]
        close(attention.attend(scores, value, [1, 1]), mat([1, 6], [2, 4])[None])
        value = mat([1], [3], [10], [20], [99])[None]
        context = attention.attend(torch.zeros(1, 5, 5, dtype=torch.float64), value, [1, 1, 2, 2, 0])
        close(context, mat([2], [2], [15], [15], [0])[None])


class TestMth:
    def test_tcd_is_the_mean_over_pairs_of_the_sampled_tokens(self) -> None:
        four = mat([1, 0], [99, 7], [2, 0], [0, 5])  # cosines 1, 0, 0; token 1 is not sampled
        close(objectives.tcd(mat([3, 4], [4, 3]), [0, 1]), 24 / 25)
        close(objectives.tcd(mat([1, 0], [-2, 0]), [0, 1]), -1.0)
        for sampled in ([0, 2, 3], [3, 0, 2]):
            close(objectives.tcd(four, sampled), 1 / 3)
        poles = mat([1, 0], [-1, 0], [1, 0], [-1, 0])
        close(objectives.tcd(poles, [0, 1, 2, 3]), -1 / 3)
        close(objectives.tcd(poles, [0, 1, 2, 3], power=2), 1.0)  # a square knows no sign

    def test_hcd_of_identical_heads_is_one_and_of_orthogonal_heads_zero(self) -> None:
        head = mat([1, 2], [3, 4])
        for other, expected in ((5 * head, 1.0), (mat([4, 3], [-2, -1]), 0.0)):
            close(objectives.hcd([torch.stack([head, other])], [[0, 1]], [True, True]), expected)

    def test_hcd_takes_the_sampled_heads_of_each_layer_and_the_mean_over_layers(self) -> None:
        a, b = mat([1, 0], [0, 0]), mat([0, 0], [0, 1])
        first, second = torch.stack([a, b, a]), torch.stack([-a, b, a])
        close(objectives.hcd([first, second], [[0, 2], [2, 1]], [True, True]), (1 + 0) / 2)
        close(objectives.hcd([first, second], [[0, 1, 2], [0, 2]], [True, True]), (1 / 3 - 1) / 2)

    def test_padding_never_enters_hcd(self) -> None:
        garbage = 1e6
        a = mat([1, garbage, 2], [garbage, -garbage, garbage], [3, garbage, 4])
        b = mat([4, -garbage, 3], [garbage, garbage, 1], [-2, 5, -1])
        close(objectives.flatten_head(a, [True, False, True]), vec(1, 2, 3, 4))
        close(objectives.hcd([torch.stack([a, b])], [[0, 1]], [True, False, True]), 0.0)


class TestTupe:
    def test_the_bucket_is_t5s(self) -> None:
        modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
        offsets = torch.arange(-600, 601)
        theirs = modeling.T5Attention._relative_position_bucket(offsets, True, 32, 128)
        assert [positions.t5_bucket(offset) for offset in offsets.tolist()] == theirs.tolist()

    def test_rows_16_and_32_serve_cls_alone(self) -> None:
        assert not {positions.t5_bucket(offset) for offset in range(-600, 601)} & {16, 32}
        rows = [[positions.tupe_bucket(i, j) for j in range(4)] for i in range(4)]
        assert rows == [[16, 16, 16, 16], [32, 0, 17, 18], [32, 1, 0, 17], [32, 2, 1, 0]]

    def test_position_term_by_hand(self) -> None:
        """LayerNorm of a pair (a > b) is (1, -1), of (a < b) (-1, 1); U^Q weighs both, U^K adds a bias."""
        params = {"table": mat([9, 5], [2, 4], [7, 6], [1, 8])}  # p: (1,-1), (-1,1), (1,-1), (-1,1)
        params |= {"norm.weight": mat([1, 1])[0], "norm.bias": mat([0, 0])[0]}
        params |= {"query.weight": mat([3, 0], [0, 5]), "query.bias": mat([0, 0])[0]}
        params |= {"key.weight": mat([1, 0], [0, 1]), "key.bias": mat([10, 0])[0]}
        # asking rows: (3,-5), (-3,5), (3,-5), (-3,5); asked rows: (11,-1), (9,1), (11,-1), (9,1)
        theta1, theta2 = 33 + 5, -27 + 5
        expected = mat([theta1, theta1, theta1], [theta2, 33 + 5, 27 - 5], [theta2, -33 - 5, -27 + 5])
        close(positions.tupe_position_term(params, [0, 1, 2], 1, eps=0.0), expected[None] / math.sqrt(2 * 2))

    def test_both_terms_have_the_scale_of_two_and_the_bias_is_added_unscaled(self) -> None:
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("norm.weight", "norm.bias", "query.bias", "key.bias"), (4,))
        shapes |= {"table": (8, 4), "query.weight": (4, 4), "key.weight": (4, 4), "buckets": (33, 2)}
        params = {name: seeded(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
        (query, key), places = pair(2, 3, 2), [0, 1, 2]
        with_bias = positions.tupe_scores(query, key, params, places)
        buckets = params.pop("buckets")
        without = positions.tupe_scores(query, key, params, places)
        content = without - positions.tupe_position_term(params, places, 2)
        close(content, query @ key.mT / 2.0)  # sqrt(2 · 2)
        rows = [16, 16, 16, 32, 0, 17, 32, 1, 0]
        close(with_bias - without, buckets[rows].T.reshape(2, 3, 3))


class TestDeberta:
    PARAMS = {"table": mat([1], [10], [100], [1000]), "key.weight": mat([2])}
    PARAMS |= {"query.weight": mat([3]), "query.bias": mat([7])[0]}

    def test_both_terms_read_the_row_of_i_minus_j(self) -> None:
        """k = 2: rows 0..3 for i - j = -2 and below, -1, 0, 1 and above."""
        ones, zeros, places = torch.ones(1, 5, 1).double(), torch.zeros(1, 5, 1).double(), list(range(5))
        rows = mat([100, 10, 1, 1, 1], [1000, 100, 10, 1, 1], [1000, 1000, 100, 10, 1])
        c2p = positions.deberta_scores(ones, zeros, self.PARAMS, places)[0]
        close(c2p[:3], 2 * rows / math.sqrt(3))
        p2c = positions.deberta_scores(zeros, ones, self.PARAMS, places)[0]
        close(p2c[:3], (3 * rows + 7) / math.sqrt(3))

    @pytest.mark.parametrize("span", [2, 3, 5, 8])
    def test_scores_are_those_of_transformers(self, span: int) -> None:
        """The span below, at and above the sequence: their position terms, added to the content term."""
        modeling = pytest.importorskip("transformers.models.deberta.modeling_deberta")
        sizes = {"hidden_size": 12, "num_attention_heads": 3, "max_relative_positions": span}
        kinds = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
        kinds |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        configuration = pytest.importorskip("transformers").DebertaConfig(**sizes, **kinds)
        torch.manual_seed(0)
        theirs = modeling.DisentangledSelfAttention(configuration).double().eval()
        params = {"table": seeded(2 * span, 12), "key.weight": theirs.pos_proj.weight}
        params |= {"query.weight": theirs.pos_q_proj.weight, "query.bias": theirs.pos_q_proj.bias}
        (query, key), place, scale = pair(3, 6, 4), torch.arange(6), math.sqrt(3 * 4)
        offsets = place[:, None] - place
        bias = theirs.disentangled_att_bias(query[None] / scale, key[None], offsets, params["table"], 3)[0]
        expected = bias + query @ key.mT / scale
        got = positions.deberta_scores(query, key, params, list(range(6)))
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)  # its square roots are float32

    def test_the_decoder_is_the_last_layer_twice_asked_by_places(self) -> None:
        """In torch's words, one head, two documents and a padded place: post norm, no shortcut taken."""
        shapes = dict.fromkeys(("query", "key", "value", "attention_output"), (4, 4))
        shapes |= {"ffn_in": (6, 4), "ffn_out": (4, 6)}
        params = {f"{name}.weight": seeded(*shape, seed=10 + i) for i, (name, shape) in enumerate(shapes.items())}
        params |= {f"{name}.bias": seeded(shape[0], seed=30 + i) for i, (name, shape) in enumerate(shapes.items())}
        for i, name in enumerate(("attention_norm", "ffn_norm")):
            params |= {f"{name}.weight": seeded(4, seed=50 + i), f"{name}.bias": seeded(4, seed=60 + i)}
        hidden, absolute = seeded(6, 4), seeded(3, 4, seed=1)
        documents, places = [1, 1, 1, 2, 2, 0], [0, 1, 2, 0, 1, 0]
        layer = hidden, absolute, params, positions.absolute_scores
        got = positions.enhanced_mask_decoder(*layer, documents, places, [1, 4], 1, 1e-5)
        same = torch.tensor(documents)[:, None] == torch.tensor(documents)

        def linear(name: str, x: Tensor) -> Tensor:
            return torch.nn.functional.linear(x, params[f"{name}.weight"], params[f"{name}.bias"])

        def norm(name: str, x: Tensor) -> Tensor:
            return torch.nn.functional.layer_norm(x, (4,), params[f"{name}.weight"], params[f"{name}.bias"], 1e-5)

        asking = hidden + absolute[places]
        for _ in range(2):
            logits = linear("query", asking) @ linear("key", hidden).mT / 2.0
            context = logits.masked_fill(~same, -math.inf).softmax(-1) @ linear("value", hidden)
            asking = norm("attention_norm", asking + linear("attention_output", context))
            inner = torch.nn.functional.gelu(linear("ffn_in", asking))
            asking = norm("ffn_norm", asking + linear("ffn_out", inner))
        close(got, asking[[1, 4]])
