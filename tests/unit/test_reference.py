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
    """Return queries and keys."""
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

    def test_position_numbers_and_not_indices_count(self) -> None:
        (query, key), relative = pair(2, 4, 2), seeded(4, 2, seed=2)
        tables = DIRECTION, mat([5, 7], [11, 13], [17, 19])
        for scores, given in ((positions.ddrp_scores, tables), (positions.bert_r_scores, (relative,))):
            packed = scores(query, key, *given, [0, 1, 0, 1])
            close(packed[:, 2:, 2:], scores(query[:, 2:], key[:, 2:], *given, [0, 1]))
            assert not torch.allclose(packed, scores(query, key, *given, [1, 0, 1, 0]))

    def test_absolute_scores_equal_ddrp_without_its_table(self) -> None:
        query, key = pair(3, 5, 4)
        without = positions.ddrp_scores(query, key, torch.zeros(3, 4).double(), seeded(2, 4), list(range(5)))
        close(positions.absolute_scores(query, key), without)
        close(positions.absolute_scores(query, key), query @ key.mT / 2.0)

    def test_ddrp_gradients_exist_and_match_finite_differences(self) -> None:
        inputs = (*pair(1, 3, 2), seeded(3, 2, seed=2), seeded(2, 2, seed=3))
        assert torch.autograd.gradcheck(lambda q, k, d, r: positions.ddrp_scores(q, k, d, r, [0, 1, 2]), inputs)

    def test_bert_r_has_two_rows_a_distance_and_the_zeroth_right_of_the_clip(self) -> None:
        """r_s = 2: row 0 for i - j <= -2, 1 for -1, 2 for 0, 3 for 1 and beyond: the paper's 2·r_s rows."""
        query, key = torch.ones(1, 9, 1).double(), torch.zeros(1, 9, 1).double()
        scores = positions.bert_r_scores(query, key, mat([1], [10], [100], [1000]), list(range(9)))[0]
        assert scores[4].tolist() == [1000, 1000, 1000, 1000, 100, 10, 1, 1, 1]

    def test_a_product_table_makes_bert_r_ddrp(self) -> None:
        """DDRP's rows written out one by one, left clip unused, are a table of BERT-R."""
        (query, key), direction, distance = pair(2, 5, 4), seeded(3, 4, seed=2), seeded(3, 4)
        rows = [distance[2] * direction[1], distance[2] * direction[1], distance[1] * direction[1]]
        rows += [distance[0] * direction[0], distance[1] * direction[2], distance[2] * direction[2]]
        expected = positions.ddrp_scores(query, key, direction, distance, list(range(5)))
        close(positions.bert_r_scores(query, key, torch.stack(rows), list(range(5))), expected)


class TestAttention:
    def test_weights_are_softmax_within_a_document_and_padding_is_zero(self) -> None:
        scores, value = mat([0, math.log(3)], [1000, 1000])[None], mat([4, 0], [0, 8])[None]
        close(attention.attend(scores, value, [1, 1]), mat([1, 6], [2, 4])[None])
        value = mat([1], [3], [10], [20], [99])[None]
        context = attention.attend(torch.zeros(1, 5, 5, dtype=torch.float64), value, [1, 1, 2, 2, 0])
        close(context, mat([2], [2], [15], [15], [0])[None])

    def test_layer_norm_exact_gelu_and_heads_of_columns_by_hand(self) -> None:
        normed = attention.layer_norm(mat([1, 3], [5, 5]), vec(2, 4), vec(10, 20), eps=3.0)
        close(normed, mat([10 - 2 * 0.5, 20 + 4 * 0.5], [10, 20]))  # variance 1, root of 1 + 3 = 2; variance 0
        phi_one = 0.8413447460685429  # the normal distribution below 1
        close(attention.gelu(vec(0, 1, -1)), vec(0, phi_one, -(1 - phi_one)))
        heads = attention.split_heads(mat([1, 2, 3, 4], [5, 6, 7, 8]), 2)
        close(heads, torch.stack([mat([1, 2], [5, 6]), mat([3, 4], [7, 8])]))

    @pytest.mark.parametrize("norm_first", [False, True])
    def test_bert_layer_is_the_one_of_torch(self, norm_first: bool) -> None:
        """An independent third party: torch's own encoder layer, absolute logits, one padded token."""
        params, hidden = layer_params(), seeded(5, 4)
        layer = torch.nn.TransformerEncoderLayer(
            4, 2, 6, dropout=0.0, activation="gelu", norm_first=norm_first, batch_first=True, dtype=torch.float64
        )
        names = {"self_attn.out_proj": "attention_output", "linear1": "ffn_in", "linear2": "ffn_out"}
        names |= {"norm1": "attention_norm", "norm2": "ffn_norm"}
        state = {f"{theirs}.{x}": params[f"{ours}.{x}"] for theirs, ours in names.items() for x in ("weight", "bias")}
        for x in ("weight", "bias"):
            state[f"self_attn.in_proj_{x}"] = torch.cat([params[f"{name}.{x}"] for name in ("query", "key", "value")])
        layer.load_state_dict(state)
        expected = layer(hidden[None], src_key_padding_mask=torch.tensor([[False] * 4 + [True]]))[0]
        position = "pre" if norm_first else "post"
        got = attention.bert_layer(hidden, params, positions.absolute_scores, [1, 1, 1, 1, 0], 2, 1e-5, position)
        close(got[:4], expected[:4])
        probe = seeded(4, 4, seed=70).detach()
        ours, theirs = ((x[:4] * probe).sum() for x in (got, expected))
        of_hidden, *gradients = torch.autograd.grad(ours, [hidden, *params.values()])
        close(of_hidden, torch.autograd.grad(theirs, hidden)[0])
        for name, gradient in zip(params, gradients, strict=True):
            assert name == "key.bias" or gradient.abs().max() > 1e-9, name  # a key's bias cancels in the softmax

    def test_unknown_layernorm_position_is_refused(self) -> None:
        with pytest.raises(ValueError, match="expected 'post' or 'pre'"):
            attention.bert_layer(seeded(1, 4), {}, positions.absolute_scores, [1], 2, layernorm_position="sandwich")


HEAD, ORTHOGONAL = mat([1, 2], [3, 4]), mat([4, 3], [-2, -1])


class TestMth:
    def test_tcd_is_the_mean_over_pairs_of_the_sampled_tokens(self) -> None:
        four = mat([1, 0], [99, 7], [2, 0], [0, 5])  # cosines 1, 0, 0; token 1 is not sampled
        close(objectives.tcd(mat([3, 4], [4, 3]), [0, 1]), 24 / 25)
        close(objectives.tcd(mat([1, 0], [-2, 0]), [0, 1]), -1.0)
        for sampled in ([0, 2, 3], [3, 0, 2]):
            close(objectives.tcd(four, sampled), 1 / 3)

    def test_hcd_of_identical_heads_is_one_and_of_orthogonal_heads_zero(self) -> None:
        for other, expected in ((5 * HEAD, 1.0), (ORTHOGONAL, 0.0)):
            close(objectives.hcd([torch.stack([HEAD, other])], [[0, 1]], [True, True]), expected)

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

    def test_batches_average_over_sequences_of_two_or_more_valid_tokens(self) -> None:
        valid = [[True, True], [True, False], [True, True]]
        hidden = [mat([1, 0], [1, 0]), mat([1, 0], [1, 0]), mat([3, 4], [4, 3])]
        close(objectives.tcd_batch(hidden, [[0, 1], [0], [0, 1]], valid), (1 + 24 / 25) / 2)
        scores = [[torch.stack([HEAD, other])] for other in (HEAD, HEAD, ORTHOGONAL)]
        close(objectives.hcd_batch(scores, [[0, 1]], valid), (1 + 0) / 2)
        close(objectives.tcd_batch([seeded(2, 3)], [[0]], [[True, False]]), 0.0)
        close(objectives.hcd_batch([[seeded(2, 2, 2)]], [[0, 1]], [[True, False]]), 0.0)
        with pytest.raises(AssertionError, match="padded token"):
            objectives.tcd_batch([seeded(3, 2)], [[0, 2]], [[True, True, False]])

    def test_gradients_match_finite_differences(self) -> None:
        assert torch.autograd.gradcheck(lambda x: objectives.tcd(x, [0, 2, 3]), (seeded(4, 3),))
        heads, valid = [[0, 1], [2, 0]], [True, False, True]
        assert torch.autograd.gradcheck(lambda x, y: objectives.hcd([x, y], heads, valid), pair(3, 3, 3))


class TestLosses:
    def test_masked_lm_sums_over_predicted_tokens(self) -> None:
        logits = mat([0, 0, 0, 0], [9, 9, 9, 9], [0, math.log(2), 0, 0])
        close(objectives.masked_lm(logits, torch.tensor([3, -100, 1])), math.log(4) + math.log(5 / 2))
        close(objectives.masked_lm(logits, torch.tensor([-100, -100, -100])), 0.0)

    def test_huge_logits_and_a_padded_vocabulary(self) -> None:
        logits = mat([1e4, 1e4, -math.inf]).requires_grad_()
        loss = objectives.masked_lm(logits, torch.tensor([0]))
        close(loss, math.log(2))
        close(torch.autograd.grad(loss, logits)[0], mat([-0.5, 0.5, 0]))

    def test_gradient_is_softmax_minus_one_hot_on_predicted_rows_only(self) -> None:
        logits = seeded(3, 4)
        (gradient,) = torch.autograd.grad(objectives.masked_lm(logits, torch.tensor([2, -100, 0])), logits)
        expected = logits.softmax(-1) - mat([0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0])
        close(gradient, (expected * mat([1], [0], [1])).detach())

    def test_global_mean_is_not_a_mean_of_means(self) -> None:
        close(objectives.global_mean([vec(6)[0], vec(2)[0], vec(0)[0]], [3, 1, 0]), 2.0)
        close(objectives.global_mean([vec(3)[0], vec(5)[0]], [3, 1]), 2.0)  # the mean of means would be 3
        close(objectives.global_mean([vec(0)[0]], [0]), 0.0)


def bucket_by_counting(offset: int) -> int:
    """T5's map without a logarithm: bucket 8 + n begins at distance 8·16^(n/8), hence distance² at 64·2^n."""
    distance = abs(offset)
    if distance >= 8:
        distance = 8 + sum(distance * distance >= 64 * 2**n for n in range(1, 8))
    return distance + (16 if offset > 0 else 0)


UNTIED = {"norm.weight": mat([1, 1])[0], "norm.bias": mat([0, 0])[0]}


class TestTupe:
    def test_the_bucket_is_found_by_counting(self) -> None:
        for offset in range(-600, 601):
            assert positions.t5_bucket(offset) == bucket_by_counting(offset), offset

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
        params = UNTIED | {"table": mat([9, 5], [2, 4], [7, 6], [1, 8])}  # p: (1,-1), (-1,1), (1,-1), (-1,1)
        params |= {"query.weight": mat([3, 0], [0, 5]), "query.bias": mat([0, 0])[0]}
        params |= {"key.weight": mat([1, 0], [0, 1]), "key.bias": mat([10, 0])[0]}
        # asking rows: (3,-5), (-3,5), (3,-5), (-3,5); asked rows: (11,-1), (9,1), (11,-1), (9,1)
        theta1, theta2 = 33 + 5, -27 + 5
        expected = mat([theta1, theta1, theta1], [theta2, 33 + 5, 27 - 5], [theta2, -33 - 5, -27 + 5])
        close(positions.tupe_position_term(params, [0, 1, 2], 1, eps=0.0), expected[None] / math.sqrt(2 * 2))

    @staticmethod
    def params(rows: int = 8, width: int = 4) -> dict[str, Tensor]:
        shapes: dict[str, tuple[int, ...]] = {"table": (rows, width), "norm.weight": (width,), "norm.bias": (width,)}
        shapes |= {"query.weight": (width, width), "query.bias": (width,)}
        shapes |= {"key.weight": (width, width), "key.bias": (width,), "buckets": (33, 2)}
        return {name: seeded(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}

    def test_both_terms_have_the_scale_of_two_and_the_bias_is_added_unscaled(self) -> None:
        (query, key), params, places = pair(2, 3, 2), self.params(), [0, 1, 2]
        with_bias = positions.tupe_scores(query, key, params, places)
        buckets = params.pop("buckets")
        without = positions.tupe_scores(query, key, params, places)
        content = without - positions.tupe_position_term(params, places, 2)
        close(content, query @ key.mT / 2.0)  # sqrt(2 · 2)
        rows = [16, 16, 16, 32, 0, 17, 32, 1, 0]
        close(with_bias - without, buckets[rows].T.reshape(2, 3, 3))

    def test_every_document_of_a_packed_row_has_its_own_cls(self) -> None:
        (query, key), params = pair(2, 5, 2), self.params()
        packed = positions.tupe_scores(query, key, params, [0, 1, 2, 0, 1])
        close(packed[:, :3, :3], positions.tupe_scores(query[:, :3], key[:, :3], params, [0, 1, 2]))
        close(packed[:, 3:, 3:], positions.tupe_scores(query[:, 3:], key[:, 3:], params, [0, 1]))

    def test_every_row_of_the_table_counts_once_its_place_occurs(self) -> None:
        params = self.params()
        term = positions.tupe_position_term(params, [0, 1, 2], 2)
        (gradient,) = torch.autograd.grad((term * seeded(2, 3, 3, seed=9)).sum(), params["table"])
        assert gradient.abs().sum(1).gt(1e-9).tolist() == [True] * 4 + [False] * 4


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

    def test_scores_by_hand(self) -> None:
        q_rows, k_rows = {-1: 20, 0: 200, 1: 2000}, {-1: 37, 0: 307, 1: 3007}
        first = [2 * 11 + 2 * q_rows[0] + 11 * k_rows[0], 2 * 13 + 2 * q_rows[-1] + 13 * k_rows[-1]]
        second = [5 * 11 + 5 * q_rows[1] + 11 * k_rows[1], 5 * 13 + 5 * q_rows[0] + 13 * k_rows[0]]
        scores = positions.deberta_scores(mat([2], [5])[None], mat([11], [13])[None], self.PARAMS, [0, 1])
        close(scores, mat(first, second)[None] / math.sqrt(3))

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

    def test_the_layer_asked_by_its_own_input_is_self_attention(self) -> None:
        params, hidden = layer_params(), seeded(4, 4)
        for order in ("post", "pre"):
            arguments = hidden, params, positions.absolute_scores, [1, 1, 1, 0], 2, 1e-5, order
            close(attention.bert_layer(*arguments, queries=hidden), attention.bert_layer(*arguments))

    def test_the_decoder_is_the_last_layer_twice_asked_by_places(self) -> None:
        """In torch's words, one head, two documents and a padded place: post norm, no shortcut taken."""
        params, hidden, absolute = layer_params(), seeded(6, 4), seeded(3, 4, seed=1)
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


def layer_params(width: int = 4, inner: int = 6) -> dict[str, Tensor]:
    shapes = dict.fromkeys(("query", "key", "value", "attention_output"), (width, width))
    shapes |= {"ffn_in": (inner, width), "ffn_out": (width, inner)}
    params: dict[str, Tensor] = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        params |= {f"{name}.weight": seeded(*shape, seed=10 + seed), f"{name}.bias": seeded(shape[0], seed=30 + seed)}
    for seed, name in enumerate(("attention_norm", "ffn_norm")):
        params |= {f"{name}.weight": seeded(width, seed=50 + seed), f"{name}.bias": seeded(width, seed=60 + seed)}
    return params
