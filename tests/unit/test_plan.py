"""`megatron-ddrp plan`, FLOP against torch's count, the table of devices, and what a run says of its device;
with `--load` the plan of an encoder's continuation, and by `--run` the whole road with a tiny BERT."""

import dataclasses
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_ddrp import train
from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.checkpoint import newest, tag
from megatron_ddrp.commands import continuing
from megatron_ddrp.commands import options as advice
from megatron_ddrp.commands import planning as speed
from megatron_ddrp.commands.continuing import MOST_STEPS, PASSES, RATE, Stage, follow, run_alone
from megatron_ddrp.commands.options import EPOCHS, PLAIN, SHAPES, Fill, Shape, best_shape, recipe
from megatron_ddrp.commands.plan import main
from megatron_ddrp.commands.planning import FULL, PresentDevice
from megatron_ddrp.config import ENCODINGS, Config, ObjectiveConfig, flag_words, load_config
from megatron_ddrp.config.run import config_of
from megatron_ddrp.conversion.families import FAMILIES
from megatron_ddrp.conversion.from_huggingface import import_folder
from megatron_ddrp.data.batches.loader import ROW_MULTIPLE
from megatron_ddrp.data.batches.samples import SampleIndex
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset
from megatron_ddrp.data.preprocess.pipeline import preprocess
from megatron_ddrp.engine.build import check_device, choices, missing_graphs, other_choices, rows_for, unused_devices
from megatron_ddrp.engine.layout import Setup
from megatron_ddrp.memory import estimated_needs
from megatron_ddrp.model import build_model, graphs
from megatron_ddrp.model.stages import Draws
from megatron_ddrp.objectives.contract import make_objective
from megatron_ddrp.parallel.process_group import Ranks
from megatron_ddrp.run.devices import DEVICES, SHARE, device_named, why_not, with_chosen_backend
from megatron_ddrp.run.flops import flop_of_rows, flop_of_step, flop_per_token, step_seconds
from tests.conftest import TinyCorpus
from tests.datasets import wordpiece_job, write_dataset
from tests.refusals import refused, wrong_arguments
from tests.unit.model.tiny import tiny_batch, tiny_config
from tests.unit.tasks.conftest import sentences, write_bert

ROWS, LENGTH, PREDICTED = 3, 8, 2
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def planned(capsys, line):
    return main(line.split()), capsys.readouterr().out


def test_more_text_suggests_no_smaller_shape_and_repeated_text_is_worth_less() -> None:
    sizes = [advice.recipe_for_text(tokens)["hidden_size"] for tokens in map(int, (1e5, 1e6, 17e6, 50e6, 200e6, 1e9))]
    assert sizes == sorted(sizes) and sizes[2:5] == [384, 512, 768]
    for tokens, best in ((50e6, Shape(8, 512, 8)), (4e9, SHAPES[-1])):  # 12 x 768 is better by less than a tie
        assert best_shape(dict.fromkeys(SHAPES, 40 * tokens), tokens) == best
    # With few steps for the larger shape it loses, however many epochs the smaller one takes beyond the first few.
    small, large = SHAPES[1], SHAPES[4]
    assert best_shape({small: 1e9, large: 1e7}, 50e6) == small
    assert best_shape({small: 4e9, large: 1e9}, 50e6) == large


def test_the_batch_is_a_power_of_two_that_makes_many_steps_and_wide_models_get_half_the_rate() -> None:
    given = [(1e6, 1), (1e9, 1), (1e12, 1), (1e12, 8), (1e6, 64)]
    assert [advice.rows_per_rank(seen, 128, ranks) for seen, ranks in given] == [16, 256, 4096, 512, 1]
    rates = [recipe(Shape(2, width, 2), 1e6, 128, 16, 16, Fill(1, 128))["lr"] for width in (128, 512, 768, 1024)]
    assert rates == [1e-3, 1e-3, 5e-4, 5e-4]


def test_the_planned_models_export_as_a_plain_family_and_the_papers_method_is_two_flags(capsys):
    """Whole exports of such models are in tests/unit/conversion; here that the plan's settings are of their family."""
    for shape in SHAPES:
        config = config_of(recipe(shape, 1e6, 128, 16, 16, Fill(1, 128))).with_vocabulary(32000)
        assert (config.model.position_encoding, config.objective.objective) == ("rope", "mlm")
        assert FAMILIES["modernbert"].refusal(config.model, "masked-lm") is None
    _, text = planned(capsys, "--tokens 50M --device t4 --max-layers 2")
    (paper,) = re.findall(r"the paper's method: (.*) behind a command", text)
    config = parse_arguments([*shlex.split(text.splitlines()[-1])[2:], *shlex.split(paper)]).config
    assert (config.model.position_encoding, config.objective.objective) == ("ddrp", "mth")


def gigabytes(config: Config) -> float:
    return estimated_needs(Setup.planned(config, 1, "cuda"))[1].total / 2**30


def test_the_largest_micro_batch_fits_and_the_next_one_does_not(capsys):
    plan, _ = planned(capsys, "--tokens 50M --vocab-size 32000 --device rtx-3060 --max-layers 4")
    for row in plan.rows:
        shape = {name: row[name] for name in ("num_layers", "hidden_size", "num_attention_heads")}
        shape |= {"seq_length": 128, "bf16": True, "attention_backend": "triton", **PLAIN}
        largest, needs = row["largest_micro_batch"], {}
        for rows in (largest, 2 * largest, row["micro_batch_size"]):
            sizes = {"micro_batch_size": rows, "global_batch_size": rows}
            words = ["--dry-run", "--vocab-size", "32000", *flag_words((shape | sizes).items())]
            needs[rows] = gigabytes(parse_arguments(words).config)
        assert needs[largest] <= FULL * 12 < needs[2 * largest]
        assert needs[row["micro_batch_size"]] == pytest.approx(row["memory_gib"])


@pytest.mark.parametrize("device", ["rtx-3060", "t4"])
def test_the_printed_commands_are_pretrains_and_end_in_time(capsys, device):
    plan, text = planned(capsys, f"--tokens 50M --vocab-size 32000 --device {device} --hours 3 --max-layers 6")
    command = shlex.split(text.splitlines()[-1])
    config = parse_arguments(command[2:]).config
    assert command[:2] == ["megatron-ddrp", "pretrain"] and why_not(config, DEVICES[device]) is None
    assert config.training.precision == ("bf16" if DEVICES[device].is_recent else "fp16")
    assert config.training.train_iters == plan.settings["train_iters"]
    trial = re.search(r"for lr in (\S+) (\S+) (\S+); do (.*); done", text)
    assert trial and [float(trial[n]) for n in (1, 2, 3)] == [config.optimizer.lr * f for f in (0.5, 1, 2)]
    assert parse_arguments(shlex.split(trial[4].replace("$lr", "1e-3"))[2:]).config.training.train_iters >= 200
    assert all(0 < row["seconds"] <= 3 * 3600 and row["epochs"] <= EPOCHS for row in plan.rows)
    assert all(row["seconds"] > 2.9 * 3600 or row["epochs"] > EPOCHS - 1 for row in plan.rows)
    assert "loss" not in text.replace("lowest validation loss", "")
    assert "0.000 s" not in text and not re.search(r"\b0s|\b0 hours|unknown", text)


def test_ranks_share_the_batch_and_the_launcher_is_named(capsys):
    line = "--tokens 2B --device a100 --hours 1 --max-layers 4 --world-size"
    (one, _), (eight, on_eight), (_, on_many) = (planned(capsys, f"{line} {ranks}") for ranks in (1, 8, 16))
    assert on_eight.splitlines()[-1].lstrip().startswith("deepspeed --num_gpus 8 --module megatron_ddrp ")
    assert on_many.splitlines()[-1].lstrip().startswith("deepspeed --hostfile hosts ")
    assert eight.rows[1]["epochs"] > 4 * one.rows[1]["epochs"]


def test_shapes_that_do_not_fit_are_counted_and_a_shape_leaves_a_part_of_the_memory_free(capsys, monkeypatch):
    """`share` of the memory is what one row per micro-batch of the second shape needs."""
    line, l4 = "--tokens 50M --vocab-size 32000 --device l4 --max-layers 4", DEVICES["l4"]
    row = planned(capsys, line)[0].rows[1]
    settings = recipe(SHAPES[1], 1, 128, row["global_batch_size"], 1, Fill(1, 128)) | {"bf16": True}
    config = config_of(settings).with_vocabulary(32000)
    needed = gigabytes(with_chosen_backend(config, l4))
    for share, count in ((FULL - 0.01, 2), (FULL + 0.01, 1)):
        monkeypatch.setitem(DEVICES, "l4", dataclasses.replace(l4, memory=needed / share))
        assert len(planned(capsys, line)[0].rows) == count
    monkeypatch.setitem(DEVICES, "l4", dataclasses.replace(l4, memory=1.0))
    plan, text = planned(capsys, "--tokens 50M --device l4")
    assert [row["hidden_size"] for row in plan.rows] == [128, 256, 384, 512][: len(plan.rows)]
    assert f"{5 - len(plan.rows)} larger shapes do not fit" in text


def test_what_is_here_is_measured_and_the_rest_has_its_speed(capsys, monkeypatch):
    """The second shape would take longer than the patience. The whole road below measures in earnest."""
    monkeypatch.setattr(speed, "SHAPES", (Shape(1, 16, 2), Shape(2, 32, 2)))
    monkeypatch.setattr(speed, "PATIENCE", 0.0)
    monkeypatch.setattr(PresentDevice, "_measure", lambda self, config, size: speed.Step(size, 1.0, 0.5))
    plan, text = planned(capsys, "--tokens 5M --vocab-size 200 --hours 1 --seq-length 16")
    assert [row["measured"] for row in plan.rows] == [True, False]
    assert "measured here, three steps per shape; ~: at the last measured shape's FLOP/s" in text
    assert all(row["step_seconds"] > 0 for row in plan.rows)


def test_the_median_of_the_steps_after_the_first_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.accumulate((5.0, 1.0, 9.0, 2.0))

    def run(config: Any, callbacks: Any) -> Any:
        for number in range(1, 1 + config.training.train_iters):
            callbacks[0].on_step({"peak_memory_gib": number / 2})
        return type("Trained", (), {"code": 0})

    monkeypatch.setattr(speed, "train", run)
    monkeypatch.setattr(PresentDevice, "_random_text", "nowhere")
    device = PresentDevice(200, lambda: next(ticks))
    config = parse_arguments(["--seq-length", "16", "--global-batch-size", "4", "--dry-run"]).config
    assert device.fastest(config, 1) == (1, 4 * 2.0, 2.0)
    # Rows of a step are a power of two, and so are those of a micro-batch, whatever their length.
    monkeypatch.setattr(PresentDevice, "_measure", lambda self, config, size: speed.Step(size, 1.0, None))
    config = config.replace(model={"seq_length": 384}, training={"global_batch_size": 16})
    assert PresentDevice(200).fastest(config, 16).micro_batch == 4


def test_a_datasets_vocabulary_is_that_of_the_plan(tiny_corpus, capsys) -> None:
    for more, pieces in (
        ("", len(tiny_corpus.vocab_file.read_text(encoding="utf-8").splitlines())),
        (" --vocab-size 8192", "8,192"),
    ):
        _, text = planned(capsys, f"--tokens 50M --device t4 --max-layers 2 --data-path {tiny_corpus.prefix}{more}")
        assert f"different tokens, {pieces} pieces" in text
    assert "30,522 pieces" in planned(capsys, "--tokens 50M --device t4 --max-layers 2 --data-path nowhere")[1]


def test_the_command_behind_a_dataset_fits_its_tokens(tiny_corpus: Any) -> None:
    words = shlex.split(advice.training_command(str(tiny_corpus.prefix), 17_000_000, 40_000))
    config = parse_arguments(words[2:]).config
    assert (config.model.num_layers, config.model.hidden_size) == (6, 384)
    assert config.data.packing and config.model.layernorm_position == "pre" and config.logging.eval_interval
    one_document = shlex.split(advice.training_command(str(tiny_corpus.prefix), 17_000_000, 1))
    assert parse_arguments(one_document[2:]).config.logging.eval_interval == 0
    assert recipe(SHAPES[0], 10, 128, 16, 16, Fill(1, 128))["train_iters"] == 1


LENGTHS = {"sentences": [25], "of all lengths": [9, 25, 60, 130, 400, 1000], "articles": [420], "books": [60_000]}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_a_plan_reads_the_text_as_often_as_it_says(lengths: list[int], tmp_path: Path, capsys: Any) -> None:
    """Also if a row holds several documents: batches are counted in sequences, and the rows are as full as planned."""
    documents = lengths * (60_000 // sum(lengths))
    dataset = write_dataset(tmp_path / "text", [[np.zeros(length)] for length in documents])
    samples = SampleIndex(dataset, (0, len(documents)), 128)
    plain = advice.recipe_for_text(dataset.num_tokens, dataset.num_documents)
    plan, _ = planned(capsys, f"--tokens {dataset.num_tokens} --device t4 --data-path {tmp_path}/text")
    for settings in (plain, plan.settings):
        sequences = settings["train_iters"] * settings["global_batch_size"]
        assert sequences / len(samples) == pytest.approx(EPOCHS, rel=0.1)
    row = plain["micro_batch_size"] / 16 * (2 + samples.num_tokens / len(samples))
    assert 64 < row <= 128


def configuration(encoding, objective="mlm", **changes):
    settings = {"objective": objective, "mask_prob": PREDICTED / LENGTH, "generator_size": 0.5}
    sizes = {"seq_length": LENGTH, "relative_distance": 3, "attention_backend": "eager", "hidden_size": 24}
    if encoding == "deberta-v2":  # so many buckets that each offset has its own; eager attention multiplies by each
        sizes["relative_distance"] = 2 * LENGTH
    model = tiny_config(position_encoding=encoding, **sizes | changes)
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
    return 2 * 2 * rows * model.hidden_size**2 * (3 * model.num_layers + forward_only)


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


GENERATING = [(encoding, name) for encoding in ("ddrp", "deberta") for name in ("electra", "rtd")]


@pytest.mark.parametrize("encoding, objective", [*((encoding, "mlm") for encoding in ENCODINGS), *GENERATING])
def test_the_closed_forms_equal_what_torch_counts(encoding, objective):
    config = configuration(encoding, objective)
    assert flop_of_rows(config, [(ROWS, LENGTH)]) + once_per_batch(config) == pytest.approx(counted(config), rel=1e-12)


def test_each_part_of_the_model_has_its_own_term():
    """Leaving a part out of the model takes its term, and no other, from torch's count."""
    tokens, whole, plain = ROWS * LENGTH, configuration("ddrp"), configuration("absolute")
    assert flop_per_token(whole).tables * tokens == counted(whole) - counted(plain)
    small, large = configuration("absolute", vocab_size=128), configuration("absolute", vocab_size=256)
    assert (flop_per_token(large).head - flop_per_token(small).head) * tokens == counted(large) - counted(small)
    deeper = flop_per_token(configuration("absolute", num_layers=3))
    layer = (counted(configuration("absolute", num_layers=3)) - counted(plain)) / tokens
    assert (deeper.linear + deeper.attention) / 3 == layer
    wider = flop_per_token(configuration("absolute", ffn_hidden_size=11))
    assert wider.linear - flop_per_token(plain).linear == 2 * 6 * 2 * 24


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
    assert flop_per_token(configuration("deberta", local_attention=2000, **base)) == whole


def test_a_causal_phase_counts_half_of_the_pairs_and_a_head_for_every_token():
    whole, phased = configuration("ddrp"), configuration("ddrp").replace(objective={"objective_phases": "clm:0.5"})
    plain, causal, mean = flop_per_token(whole), flop_per_token(whole, causal=1.0), flop_per_token(phased)
    assert (causal.attention, causal.tables) == (plain.attention / 2, plain.tables / 2)
    assert causal.linear == plain.linear and causal.head == pytest.approx(plain.head * LENGTH / PREDICTED)
    assert mean.total == pytest.approx((plain.total + causal.total) / 2)
    setup = Setup(phased, Ranks(0, 1, torch.device("cpu")))
    batch = SimpleNamespace(input_ids=np.zeros((ROWS, LENGTH)))
    steps = [flop_of_step(setup.at(step), [batch]) for step in (1, phased.training.train_iters)]
    assert steps == [each.total * ROWS * LENGTH for each in (causal, plain)]


def test_offsets_and_rows_that_are_not_there_count_not():
    few = flop_per_token(configuration("deberta-v2", relative_distance=4))
    assert few.tables / flop_per_token(configuration("deberta-v2")).tables == 7 / 15
    config = configuration("ddrp")  # a table of 5 rows
    assert flop_per_token(config, 2).tables == flop_per_token(config).tables * 3 / 5


def test_a_step_takes_its_flop_at_a_share_of_the_peak_and_older_devices_refuse_bf16() -> None:
    base = Config().replace(training={"micro_batch_size": 32, "global_batch_size": 4096, "fp16": True})
    seconds = flop_per_token(base).total * 4096 * 512 / (64 * 989.4e12 * SHARE)
    assert step_seconds(base, 64, DEVICES["h100"]) == pytest.approx(seconds)
    recomputed = base.replace(parallel={"checkpoint_activations": True})
    assert step_seconds(recomputed, 64, DEVICES["h100"]) == pytest.approx(4 / 3 * seconds)
    bf16 = base.replace(training={"fp16": False, "bf16": True})
    for device in DEVICES.values():
        assert why_not(base, device) is None and (why_not(bf16, device) is None) == device.is_recent


def test_a_devices_peak_is_found_by_its_name() -> None:
    for kind, peaks in {
        ("bf16", True): {
            **{"NVIDIA A100-SXM4-80GB": 312, "NVIDIA A10": 125, "NVIDIA A40": 149.7, "NVIDIA L4": 121},
            **{"NVIDIA L40S": 362.05, "NVIDIA GeForce RTX 4090": 165.2, "NVIDIA H100 80GB HBM3": 989.4},
            **{"NVIDIA H100 PCIe": 756, "AMD Instinct MI300X": 1307.4, "NVIDIA A10G": None, "NVIDIA L40": None},
            **{"NVIDIA GeForce RTX 4090 Laptop GPU": None, "NVIDIA GeForce RTX 4090 D": None},
        },
        ("fp16", True): {"Tesla V100-SXM2-32GB": 125, "NVIDIA H200": 989.4},
        ("fp32", True): {"Tesla V100-PCIE-16GB": 14, "NVIDIA A100 80GB PCIe": 156},
        ("fp32", False): {"NVIDIA A100-PCIE-40GB": 19.5, "NVIDIA B200": None},
    }.items():
        devices = {name: device_named(name) for name in peaks}
        assert {name: device and device.tflops(*kind) for name, device in devices.items()} == peaks, kind


def test_one_process_beside_several_gpus_is_told_how_to_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for devices, ranks in ((8, 8), (1, 1), (0, 1), (8, 1)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda devices=devices: devices)
        told = "".join(unused_devices(ranks))
        assert bool(told) == (devices > ranks)
    assert told.startswith("1 of 8 GPUs used; to use all: deepspeed --module megatron_ddrp pretrain")


def test_replays_need_a_cpu_or_graphs_and_graphs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config().replace(training={"replay_interval": 100}, model={"attention_backend": "sdpa", "compile": "off"})
    check_device(config, CPU)
    monkeypatch.setattr(graphs, "is_nvidia", lambda device: device.type == "cuda")
    check_device(config, GPU)
    line = r"^--replay-interval 100: on GPUs .* \(--cuda-graphs off\); leave it out$"
    refused(line, check_device, config.replace(parallel={"cuda_graphs": "off"}), GPU)
    for setting in ("off", "auto"):
        asked = Config().replace(parallel={"cuda_graphs": setting})
        check_device(asked, CPU)
        assert missing_graphs(asked, CPU) == () and rows_for(asked, CPU) == "cpu"
        assert "graphs" not in choices(asked, CPU)
    line = "^--cuda-graphs on: CUDA graphs need an NVIDIA GPU, got cpu; use --cuda-graphs off$"
    wrong_arguments(line, check_device, Config().replace(parallel={"cuda_graphs": "on"}), CPU)


def test_a_rank_whose_device_chooses_otherwise_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow, slower = "triton attention, bf16", "sdpa attention, bf16", "eager attention, bf16"
    assert other_choices([fast, fast]) == []
    assert other_choices([fast, slower, *[slow] * 3, fast, slow]) == [f"rank 1: {slower}", f"ranks 2–4, 6: {slow}"]
    monkeypatch.setattr(train, "gather_objects", lambda own: [own, slow])
    corpus, loader = SimpleNamespace(summary=lambda *_: "text"), SimpleNamespace(samples=8, num_micro_batches=1)
    lines = train.introduction(Setup(Config(), Ranks(0, 2, CPU)), corpus, loader, (10, 1)).splitlines()
    assert lines[0].endswith(choices(Config(), CPU)) and lines[1] == f"rank 1: {slow}"


def test_rows_under_graphs_have_few_lengths() -> None:
    says = ("--cuda-graphs auto: off, no graph holds the layers of --zero-stage 3",)
    for parallel, multiple, missing in (
        ({}, 64, ()),
        ({"cuda_graphs": "off"}, 16, ()),
        ({"zero_stage": 3}, 16, says),
        ({"zero_stage": 3, "cuda_graphs": "off"}, 16, ()),
    ):
        config = Config().replace(parallel=parallel)
        assert (missing_graphs(config, GPU), ROW_MULTIPLE[rows_for(config, GPU)]) == (missing, multiple), parallel
    assert ROW_MULTIPLE[rows_for(Config(), CPU)] == 8


@pytest.fixture
def bert(tiny_corpus: TinyCorpus, tmp_path: Path) -> Path:
    """A Hugging Face folder of a BERT for rows of up to 32 tokens, with the pieces of the corpus."""
    pieces = tiny_corpus.vocab_file.read_text(encoding="utf-8").split("\n")[5:-1]
    return write_bert(tmp_path / "theirs", pieces, max_length=32)


@pytest.fixture
def extend(bert, tmp_path, capsys, monkeypatch):
    """A function that plans to continue the BERT, and returns the plan and what was printed."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: (main(["--load", str(bert), *map(str, words)]), "".join(capsys.readouterr()))


def test_batch_and_steps_follow_the_text_and_the_hours(extend):
    for tokens, rows, steps, reason in (
        (100_000, 16, PASSES * 100_000 // (16 * 32), "4 passes"),
        (1_000_000, 64, PASSES * 1_000_000 // (64 * 32), "4 passes"),
        (10, 16, 1, "4 passes"),
        (10**10, 256, MOST_STEPS, "RoBERTa"),
    ):
        plan, text = extend("--tokens", tokens, "--device", "t4", "--hours", 24)
        assert [(row["global_batch_size"], row["train_iters"]) for row in plan.rows] == [(rows, steps)]
        assert reason in text and plan.settings["lr"] == RATE
    plan, text = extend("--tokens", 10**10, "--device", "t4", "--hours", 1e-5)
    (row,) = plan.rows
    assert "fit into 1e-05 h" in text and plan.settings["lr"] == RATE
    assert 0 < row["train_iters"] < MOST_STEPS and 0.5 * 3600 * 1e-5 < row["seconds"] <= 3600 * 1e-5


def test_the_pretrain_command_is_the_encoder_on_rows_of_the_asked_length(extend, bert):
    plan, text = extend("--tokens", "1M", "--device", "a100", "--seq-length", 16, "--world-size", 2)
    (line,) = (line for line in text.splitlines() if line.startswith("  ") and " pretrain " in line)
    launcher, words = line.split(" pretrain ")
    config = parse_arguments(shlex.split(words)).config
    assert launcher.split() == ["deepspeed", "--num_gpus", "2", "--module", "megatron_ddrp"]
    numbers = {name: plan.settings[name] for name in ("train_iters", "micro_batch_size", "global_batch_size")}
    assert config == config.replace(training=numbers, optimizer={"lr": RATE})
    assert config.model.seq_length == 32 and config.last_phase.seq_length == 16
    assert config.training.precision == "bf16" and config.data.packing
    assert f"{plan.rows[0]['memory_gib']:.2f} GiB, estimated" in text
    read = import_folder(bert, bert.parent / "imported")
    assert re.search(r"[\d,]+ parameters", read.summary())[0] == re.search(r"[\d,]+ parameters", text)[0]
    assert config.replace(model={"vocab_size": read.config.vocab_size}).model == read.config


def test_a_mistake_too_little_time_or_an_encoder_that_does_not_fit_is_one_line(extend, bert, tiny_corpus, monkeypatch):
    for words, message in {
        "--device l4": "--tokens",
        "--tokens 2,5M --device l4": "a number such as 50M",
        "--tokens 0 --device l4": r"--tokens is 0\.0",
        "--tokens 50M --device rtx-306": "rtx-3060",
        "--tokens 50M --world-size 2": "--world-size needs --device",
        "--tokens 50M --device l4 --hours 0": "--hours is 0",
        "--tokens 50M --device l4 --output-dir x": "--output-dir needs --load",
        "--tokens 1M --device t4 --run": "--run needs --load",
        "--load {bert} --run --tokens 1M": "--load needs a text: give --input FILE",
        "--load {bert} --device t4": "--load needs a text",
        "--load {bert} --run --device t4 --input {text}": "leave --device out",
        "--load {bert} --input {text} --data-path d": "--input and --data-path exclude each other",
        "--load {bert} --tokens 1M --vocab-size 8192": "--vocab-size is for a new model",
        "--load {bert} --tokens 1M --train {text}": "--train and --valid belong together",
        "--tokens 1M --device t4 --vocab-file {text}": "--vocab-file needs --load",
    }.items():
        wrong_arguments(message, main, words.format(bert=bert, text=tiny_corpus.text_file).split())
    too_little = ["--tokens", "50M", "--device", "t4", "--hours", "0.00001"]
    refused("200 steps on T4 in 1e-05 hours.*more --hours", main, too_little)
    monkeypatch.setitem(DEVICES, "l4", dataclasses.replace(DEVICES["l4"], memory=0.001))
    refused("does not fit: one row of 32 tokens needs .* L4 has 0", extend, "--tokens", "1M", "--device", "l4")
    refused("no step of 16 rows fits into 1e-09 hours", extend, "--tokens", "1B", "--device", "t4", "--hours", "1e-9")


def test_the_text_is_counted_or_estimated(extend, tiny_corpus):
    """The corpus is small enough that the estimate reads all of it; its dataset has the vocabulary of the flag."""
    vocabulary = f"--vocab-file {tiny_corpus.vocab_file}"
    plan, by_dataset = extend("--data-path", tiny_corpus.prefix, *vocabulary.split(), "--device", "t4")
    _, by_input = extend("--input", tiny_corpus.text_file, "--device", "t4")
    first, second = (re.findall("^text:.*", text, re.MULTILINE)[0] for text in (by_dataset, by_input))
    assert first == second
    dataset = IndexedDataset(tiny_corpus.prefix)
    samples = len(SampleIndex(dataset, (0, dataset.num_documents), 32))
    read = plan.settings["train_iters"] * plan.settings["global_batch_size"] / samples
    assert read == pytest.approx(PASSES, rel=0.1)
    Path("short.jsonl").write_text((json.dumps({"text": "the " * 9}) + "\n") * 2000)
    plan, text = extend("--input", "short.jsonl", "--device", "t4")
    assert "packed, 2 documents each, which the command counts" in text and "warning" not in text
    Path("other.jsonl").write_text(json.dumps({"text": "ж " * 999}) + "\n")
    told = extend("--input", "other.jsonl", "--device", "t4")[1]
    assert "(100.0%) are unknown pieces: the vocabulary does not" in told
    assert plan.settings["train_iters"] * plan.settings["global_batch_size"] / 2000 == pytest.approx(PASSES, rel=0.1)
    assert " preprocess " not in by_dataset and f" {vocabulary} --output road/start" in by_dataset
    Path("keys.jsonl").write_text('{"content": "the"}\n')
    refused(
        "no key 'text'.*; or preprocess the text with other flags, and give --data-path",
        extend,
        "--input",
        "keys.jsonl",
    )
    Path("larger.txt").write_text(tiny_corpus.vocab_file.read_text() + "zz\n")
    made = preprocess(wordpiece_job("larger.txt", "larger", tiny_corpus.text_file)).prefixes[0]
    line = "made with .*--vocab-file larger.txt, of another size than the vocabulary of --load"
    wrong_arguments(line, extend, "--data-path", made, "--device", "t4")


def test_a_road_knows_the_files_of_a_folder_and_the_vocabulary_again(extend, tiny_corpus, monkeypatch):
    monkeypatch.setattr(continuing, "plan_road", lambda _: {"stages": [], "plan": [{}, []]})
    for folder in ("text", "other"):
        Path(folder).mkdir()
        Path(folder, "a.txt").write_text("a b\n")
    Path("vocab.txt").write_text(tiny_corpus.vocab_file.read_text())
    words = ("--input", "text", "oth*/*.txt", "--vocab-file", "vocab.txt", "--run")
    for changed in ("text/a.txt", "other/a.txt", "vocab.txt"):
        extend(*words, "--output-dir", f"road-{Path(changed).parent.name}")
        os.utime(changed, (0, 0))
        refused(f"{changed} has changed since", extend, *words, "--output-dir", f"road-{Path(changed).parent.name}")
    Path("text", "b.txt").write_text("more\n")
    extend(*words, "--output-dir", "again")
    Path("text", "a.txt").unlink()
    extend(*words, "--output-dir", "again")  # what was read may go


def test_the_whole_road_by_one_command_which_skips_what_is_finished(extend, bert, tiny_corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "DOCUMENTS", 20)
    monkeypatch.setattr(continuing, "SEEDS", 1)
    monkeypatch.setattr(continuing, "ROWS", (64, 64))
    for name in ("train", "valid"):
        rows = [{"text": text, "label": label} for text, label in sentences(24, 0)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--input", tiny_corpus.text_file, "--train", "train.jsonl", "--valid", "valid.jsonl", "--run")
    plan, text = extend(*words)
    (row,), out, continued = plan.rows, tmp_path / "road", tmp_path / "road" / "continued"
    trained = load_config(continued)
    assert newest(continued) == continued / tag(row["train_iters"]) and row["measured"]
    assert trained.training.global_batch_size == 64 and trained.optimizer.lr == RATE
    assert (continued / "metrics.jsonl").read_text().count('"valid_lm_loss"') == 5
    assert {str(bert), "road/continued"} == json.loads((out / "scores" / "table.json").read_text())["encoders"].keys()
    assert (out / "encoder" / "model.safetensors").exists() and text.count("\n$ megatron-ddrp ") == 5
    again, second = extend(*words)
    assert again.settings == plan.settings and second.count("done before") == 5 and "$" not in second
    refused("was begun with .* --hours 24.0 .*: give the same options", extend, *words, "--hours", 1)
    os.utime("train.jsonl", (0, 0))
    refused("train.jsonl has changed since .*road.json was begun: give another --output-dir", extend, *words)


def test_a_stopped_run_is_resumed_from_its_own_folder(bert, tmp_path, monkeypatch):
    ran: list[list[str]] = []
    monkeypatch.setattr(continuing, "run_alone", ran.append)
    start, save = str(tmp_path / "start"), str(tmp_path / "run")
    words = ["pretrain", "--load", start, "--save", save]
    follow([Stage([*words], str(tmp_path / "run" / tag(9)))])
    import_folder(bert, tmp_path / "run")  # stands for a checkpoint of the run
    follow([Stage([*words], str(tmp_path / "run" / tag(9)))])
    assert ran == [words, ["pretrain", "--load", save, "--save", save]]


def test_a_request_to_stop_reaches_the_child_and_its_end_is_an_error(tmp_path, monkeypatch):
    """The child inherits that the signal is blocked, and waits for it."""

    class Child(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
            os.kill(os.getpid(), signal.SIGTERM)
            return super().wait(timeout)

    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\nimport os, signal\nsignal.sigwait([signal.SIGTERM])\nos._exit(75)\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(subprocess, "Popen", Child)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    line = "pretrain ended with exit code 75: the same command resumes it"
    assert refused(line, run_alone, ["pretrain"]).exit_code == 75
