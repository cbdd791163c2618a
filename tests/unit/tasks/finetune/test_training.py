"""One run: what it learns, what decides it, the schedule, deterministic operators, and ranks."""

from dataclasses import asdict, replace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import transformers
from sklearn.metrics import matthews_corrcoef
from torch import nn

from megatron_ddrp.config import ModelConfig
from megatron_ddrp.conversion.model_code import SEQUENCE
from megatron_ddrp.encoders.encoder import TrainedEncoder
from megatron_ddrp.encoders.rows import RowWriter, pad_batch
from megatron_ddrp.engine.build import names_without_decay
from megatron_ddrp.model import build_model
from megatron_ddrp.parallel.process_group import Ranks
from megatron_ddrp.tasks.finetune import training
from megatron_ddrp.tasks.finetune.runs import TuningRun
from megatron_ddrp.tasks.glue import TASKS

HIDDEN = 8


class BagOfPieces(nn.Module):
    """Hidden states of [CLS] = the mean of the row's embeddings; `calls` counts what it was asked."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, HIDDEN)
        self.dropout = nn.Dropout(0.1)
        self.rows_seen = []

    def forward(self, batch):
        valid = (batch.document_ids > 0).unsqueeze(-1)  # [batch, seq, 1]
        self.rows_seen += batch.sequence_ids[:, 0].tolist()
        hidden = self.dropout(self.embedding(batch.input_ids)) * valid
        return hidden.sum(1, keepdim=True) / valid.sum(1, keepdim=True) + 0 * hidden


def rows(count, seed, regression=False):
    """Rows of random pieces; class 1 ends in three pieces 19, a number is their count."""
    rng = np.random.default_rng(seed)
    pieces = [rng.integers(3, 19, rng.integers(3, 9)).tolist() for _ in range(count)]
    counts = rng.integers(0, 6 if regression else 2, count)
    writer = RowWriter(pad_id=0)
    for row, number in zip(pieces, counts, strict=True):
        writer.add(row + [19] * int(number) * (1 if regression else 3))
    return writer.rows(counts.astype(np.float64 if regression else np.int64))


def classifier(task, encoder, seed=1):
    torch.manual_seed(seed)
    return training.TaskModel(encoder, HIDDEN, SEQUENCE, max(1, len(TASKS[task].labels)))


def make_run(task="CoLA", seed=1, epochs=6, lr=3e-2, batch=8, micro=8, **more):
    return TuningRun(task, batch, lr, epochs, seed, 128, encoder="e", data="d", micro_batch_size=micro, **more)


def do(task="CoLA", seed=1, encoder=BagOfPieces, **more):
    torch.manual_seed(0)
    regression = task == "STS-B"
    train, dev = rows(96, 0, regression), {"dev": rows(41, 1, regression)}
    model = classifier(task, encoder(), seed)
    torch.rand(more.pop("drawn_before", 0))
    return dev["dev"], training.finetune(make_run(task, seed, **more), TASKS[task], model, train, dev)


def test_learns_a_separable_task_whose_score_is_the_metric_of_the_predictions():
    dev, result = do()
    scores, predictions = result.scores["dev"], result.predictions["dev"]
    assert scores[-1] > 0.8 and scores[-1] == matthews_corrcoef(dev.targets, predictions)
    assert result.steps == 6 * 12 and len(scores) == 6


def test_nothing_but_the_seed_fixes_a_run():
    """What torch's generator was left at by an earlier run must not matter."""
    found = [do("STS-B", 1, epochs=1), do("STS-B", 1, epochs=1, drawn_before=7), do("STS-B", 2, epochs=1)]
    number, again, other = (result.predictions["dev"] for _, result in found)
    assert number.dtype == np.float64 and (number == again).all() and (number != other).any()


def test_training_that_diverged_has_no_prediction_and_no_score():
    """Not the score of the first class, which argmax takes of nan."""
    _, result = do(lr=float("inf"), epochs=1)
    assert np.isnan(result.predictions["dev"]).all()
    assert result.scores["dev"] == [None]


def tuning(micro=8, dropout=0.0, **more):
    torch.manual_seed(0)
    encoder = BagOfPieces()
    encoder.dropout.p = dropout
    result = training.FineTuning(make_run(micro=micro, **more), TASKS["CoLA"], classifier("CoLA", encoder), rows(64, 0))
    result.model.head.dropout.p = dropout
    return result


def moments(one):
    return [one.optimizer.state[weight]["exp_avg"] for weight in one.weights.values()]


def test_a_batch_is_the_sum_of_its_micro_batches():
    """One pass over a batch or several, as the optimizer remembers their gradients; the second batch is short."""
    several = [tuning(micro) for micro in (8, 2, 3)]
    for one in several:
        one.step(np.arange(8))
        one.step(np.arange(8, 13))
        torch.testing.assert_close(moments(one), moments(several[0]), rtol=1e-4, atol=1e-7)
    assert all(moment.abs().sum() > 0 for moment in moments(several[0]))


def test_dropout_has_a_seed_of_seed_step_and_micro_batch(monkeypatch):
    def weights(**more):
        one = tuning(dropout=0.5, **more)
        one.step(np.arange(8))
        return one.model.head.classifier.weight.detach()

    assert (weights() == weights()).all()
    assert (weights() != weights(seed=2)).any()
    assert (weights(micro=4) != weights(micro=8)).any()
    drawn = []
    monkeypatch.setattr(training, "seed_draws", lambda seed, device: drawn.append(seed))
    for _ in range(2):
        one = tuning(micro=4, dropout=0.5)
        for _ in range(2):
            one.step(np.arange(8))
    assert drawn[:4] == drawn[4:] and len(set(drawn)) == 4


def test_weight_decay_spares_biases_and_the_gains_of_an_encoding_as_pretraining_does():
    one = tuning()
    decays = {id(p): group["weight_decay"] for group in one.optimizer.param_groups for p in group["params"]}
    assert {name: decays[id(weight)] for name, weight in one.weights.items()} == {
        "encoder.embedding.weight": 0.01,
        "head.pooler.dense.weight": 0.01,
        "head.pooler.dense.bias": 0.0,
        "head.classifier.weight": 0.01,
        "head.classifier.bias": 0.0,
    }
    ddrp = {"position_encoding": "ddrp"}
    for settings, expected in (
        (ddrp | {"relative_table": "shared"}, 1),
        (ddrp | {"relative_table": "per-layer"}, 2),
        ({"position_encoding": "t5"}, 0),
    ):
        config = ModelConfig(2, 8, 2, vocab_size=20, seq_length=16, **settings)
        model = training.TaskModel(TrainedEncoder(build_model(config)), 8, SEQUENCE, 2)
        one = training.FineTuning(make_run(), TASKS["CoLA"], model, rows(16, 0))
        decayed = {id(p) for group in one.optimizer.param_groups for p in group["params"] if group["weight_decay"]}
        spared = [place for place, weight in one.weights.items() if weight.ndim >= 2 and id(weight) not in decayed]
        assert spared == [place for place in one.weights if place.endswith(".position.direction")]
        before = names_without_decay(build_model(config))
        assert len(spared) == len([n for n in before if n.endswith(".position.direction")]) == expected


def test_gradients_are_clipped_to_a_norm_of_one():
    """Adam's step forgets a gradient's size; its first moment after one step is a tenth of the gradient."""
    for factor, is_clipped in ((1e3, True), (1e-3, False)):
        one = tuning()
        with torch.no_grad():
            one.model.head.classifier.weight.mul_(factor)
        one.step(np.arange(8))
        norm = 10 * torch.cat([moment.flatten() for moment in moments(one)]).norm().item()
        assert norm == pytest.approx(1, rel=1e-4) if is_clipped else 0 < norm < 0.99


def test_every_dev_row_is_scored_once_without_dropout():
    one, dev = tuning(dropout=0.1), rows(131, 3)
    first = one.predict(dev)
    assert sorted(one.model.encoder.rows_seen) == list(range(131))
    assert (one.predict(dev) == first).all()


def test_half_precision_computes_with_copies_of_fp32_weights():
    one = tuning(precision="bf16", lr=1e-4)
    begin = {name: weight.detach().clone() for name, weight in one.weights.items()}
    used = []
    one.model.head.classifier.register_forward_pre_hook(lambda module, _: used.append(module.weight.detach().clone()))
    for _ in range(3):
        one.step(np.arange(8))
    assert len(used) >= 3 and (used[0] == begin["head.classifier.weight"].bfloat16()).all()
    assert {weight.dtype for weight in used} == {torch.bfloat16}
    assert {parameter.dtype for parameter in one.model.parameters()} == {torch.float32}
    # Steps of 1e-4 at 1e-2 would be lost in bf16's eight bits.
    assert (one.weights["head.classifier.weight"] != begin["head.classifier.weight"]).all()


def test_half_precision_leaves_rotary_frequencies_as_they_are():
    config = transformers.ModernBertConfig(
        vocab_size=9, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2, max_position_embeddings=16,
    )  # fmt: skip
    rotary = transformers.ModernBertModel(config)
    before = {name: buffer.clone() for name, buffer in rotary.named_buffers() if buffer.is_floating_point()}
    one = training.FineTuning(make_run(precision="bf16"), TASKS["CoLA"], classifier("CoLA", rotary), rows(8, 0))
    one.finish()
    assert before and all((dict(rotary.named_buffers())[name] == buffer).all() for name, buffer in before.items())


def test_the_output_layer_of_a_head_is_not_one_of_the_encoders():
    """ESM predicts contacts by a layer of one output inside its encoder."""
    model = torch.nn.Module()
    model.encoder, model.head = torch.nn.Module(), torch.nn.Linear(3, 1)
    model.encoder.contacts = torch.nn.Linear(3, 1)
    assert training.output_layer(model) is model.head


def test_layerwise_decay_divides_the_rate_by_depth_and_it_rises_for_a_tenth_and_falls_to_zero():
    one = tuning(layerwise_lr_decay=0.5, lr=1.0)
    one.step(np.arange(8))
    rate = training.learning_rate_factor(0, one.total)
    rates = {id(p): group["lr"] for group in one.optimizer.param_groups for p in group["params"]}
    names = ("head.classifier.weight", "head.pooler.dense.bias", "encoder.embedding.weight")
    assert [rates[id(one.weights[name])] for name in names] == [rate, rate, 0.5 * rate]
    depths = {"encoder.model.embeddings.token.weight": 0, "encoder.model.embeddings.position.distance": 0}
    depths |= {"encoder.model.layers.0.attention.query.weight": 1, "encoder.model.encoder.layer.1.output.dense.bias": 2}
    depths |= {"pooler.weight": 3, "head.classifier.bias": 3, "encoder.head.final_norm.weight": 2}
    depths |= {"encoder.model.norm.weight": 2, "encoder.LayerNorm.bias": 2, "encoder.embeddings.LayerNorm.bias": 0}
    depths |= {f"encoder.{part}.1.weight": 2 for part in ("attentions", "ffns", "layer_norm1")}  # XLM's names
    assert training.layer_depths(depths) == depths
    factors = [training.learning_rate_factor(step, 100) for step in range(100)]
    assert max(factors) == factors[9] == factors[10] == training.learning_rate_factor(0, 1) == 1.0
    assert factors[0] == pytest.approx(0.1) and 0 < factors[-1] < 0.02
    assert np.allclose(np.diff(factors[:10]), 0.1)
    assert np.allclose(np.diff(factors[10:]), -1 / 90)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_numbers_of_any_size_are_learned_and_the_model_returns_them(precision):
    """Prices: a thousand times the steps of this rate would not reach 300,000."""
    torch.manual_seed(0)
    counted = (rows(96, 0, True), rows(41, 1, True))
    prices, dev = (replace(each, targets=300_000 + 20_000 * each.targets) for each in counted)

    def learned(run):
        return training.finetune(run, TASKS["STS-B"], classifier("STS-B", BagOfPieces()), prices, {"dev": dev})

    result = learned(make_run("STS-B", precision=precision, scales_labels=True))
    predicted = result.predictions["dev"]
    assert result.scores["dev"][-1] > 0.7
    assert np.sqrt(np.mean((predicted - dev.targets) ** 2)) < 0.7 * dev.targets.std()
    batch = pad_batch(dev, np.arange(len(dev))).map(torch.from_numpy)
    with torch.no_grad():
        told = result.model.eval()(batch)[:, 0].double().numpy()
    np.testing.assert_allclose(told, predicted, rtol=1e-6 if precision == "fp32" else 0.01)
    assert learned(make_run("STS-B")).predictions["dev"].max() < 10_000


def test_scaled_labels_identify_a_run_and_raw_ones_keep_their_names():
    assert make_run().name == "CoLA-b8-lr0.03-e6-s1-8d77ed38fc41"
    assert make_run(scales_labels=True).name != make_run().name
    assert TuningRun.of_row({k: v for k, v in asdict(make_run()).items() if k != "scales_labels"}) == make_run()


GPU = torch.device("cuda")


def settings():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


@pytest.fixture(autouse=True)
def settings_of_before():
    before = settings()
    training._tell.cache_clear()
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch.utils.deterministic.fill_uninitialized_memory = before[2]


class PutBackward(torch.autograd.Function):
    """The identity, with a backward pass through `put_`, which torch has no deterministic form of on any device."""

    @staticmethod
    def forward(ctx, given):
        return given.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.zeros_like(gradient).put_(torch.arange(gradient.numel()), gradient.flatten())


class Puts(BagOfPieces):
    """The gradients of the head are there before the backward pass of `put_` fails."""

    def forward(self, batch):
        return PutBackward.apply(super().forward(batch))


def test_the_bar_of_a_run_counts_the_batches_of_training_and_of_every_prediction(monkeypatch):
    """3 epochs of 12 steps, and after each epoch one batch of 41 development rows, 64 at most."""
    made = MagicMock()
    monkeypatch.setattr(training, "progress", made)
    monkeypatch.setattr(training.multiprocessing, "parent_process", lambda: None)  # also where the tests run in a fork
    do(epochs=3)
    made.assert_called_once_with("batch", 39, "CoLA seed 1", show=True)
    bar = made.return_value.__enter__.return_value
    assert sum(moved.args[0] if moved.args else 1 for moved in bar.update.call_args_list) == 39


def test_settings_are_put_back_as_they_were():
    for before in ((False, False, True), (True, True, False), (True, False, True)):
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = before[2]
        with pytest.raises(KeyError), training.deterministic(GPU):
            assert settings() == (True, False, False)
            raise KeyError
        assert settings() == before
        with training.deterministic(torch.device("cpu")):
            assert settings() == before


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_at_an_operator_without_a_deterministic_form_begins_anew(precision, monkeypatch, capsys):
    shape = {"epochs": 1, "micro": 4, "precision": precision}
    _, expected = do(**shape)
    monkeypatch.setattr(training, "deterministic", lambda device, real=training.deterministic: real(GPU))
    before = settings()
    for _ in range(2):
        with pytest.warns(UserWarning, match="put_ does not have a deterministic implementation"):
            _, again = do(encoder=Puts, **shape)
        for one, other in zip(again.model.parameters(), expected.model.parameters(), strict=True):
            assert torch.equal(one, other)
        assert again.predictions["dev"].tolist() == expected.predictions["dev"].tolist()
    told = "torch's put_ has no deterministic form on this device: results may differ between runs of one seed\n"
    assert capsys.readouterr().err == f"warning: {told}"
    assert settings() == before


def test_cublas_without_a_fixed_workspace_is_named_and_other_errors_pass(capsys):
    asked = []

    def product():
        asked.append(torch.is_deterministic_algorithms_warn_only_enabled())
        if not asked[-1]:
            raise RuntimeError(
                "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or "
                "`at::Context::setDeterministicAlgorithms(true)`, but this operation is not deterministic because it "
                "uses CuBLAS and you have CUDA >= 10.2."
            )
        return 3

    with training.deterministic(GPU):
        assert training.with_fallback(product) == 3 and asked == [False, True]
        with pytest.raises(RuntimeError, match="out of memory"):
            training.with_fallback(lambda: (_ for _ in ()).throw(RuntimeError("CUDA out of memory")))
    assert "torch's CuBLAS, with this CUBLAS_WORKSPACE_CONFIG, has no" in capsys.readouterr().err


def test_a_workspace_of_the_user_stays(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    training.fix_workspace()
    assert training.os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    training.fix_workspace()
    assert training.os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_a_rank_without_a_micro_batch_steps_in_fp16(monkeypatch):
    """Rank 0 has the only micro-batch of the step, and gradients."""
    own = []
    monkeypatch.setattr(training, "sum_over_ranks", lambda summed: own.append(summed) or summed + 1)
    config = ModelConfig(num_layers=1, hidden_size=32, num_attention_heads=2, seq_length=16, vocab_size=100)
    model = training.TaskModel(TrainedEncoder(build_model(config)), 32, SEQUENCE, 2)
    run = make_run(lr=1e-5, micro=4, precision="fp16")
    tuning = training.FineTuning(run, TASKS["CoLA"], model, rows(8, 0), Ranks(1, 2, torch.device("cpu")))
    tuning.step(np.arange(4))
    assert tuning.steps == 1 and not own[0].any(), "this rank adds nothing"
