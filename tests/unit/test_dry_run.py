"""`--dry-run`: what it prints, what it refuses, and its memory beside plain arithmetic."""

import json
import re
import shutil

import pytest

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.commands.dry_run import GIB, dry_run, memory_table
from megatron_ddrp.config import Config
from megatron_ddrp.engine.build import deepspeed_settings
from megatron_ddrp.engine.layout import Setup
from megatron_ddrp.memory import Memory, cut_up, memory_of_rank, neediest_by_zero_stage
from megatron_ddrp.model import on_meta_device
from megatron_ddrp.run.devices import LISTED
from tests.refusals import refused, wrong_arguments


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


def run_dry(capsys, line):
    """Return what it prints, and the JSON at its end."""
    arguments = parse_arguments(["--dry-run", *line.split()])
    dry_run(arguments.config, arguments.world_size, arguments.device_memory)
    text = capsys.readouterr().out
    return text, json.loads(text.splitlines()[-1])


def of_rank(capsys, line):
    return run_dry(capsys, line)[1]["memory_per_rank"]


def test_every_setting_says_what_it_comes_to(capsys):
    for line in ("", "--position-encoding deberta", "--fp16 --world-size 2"):
        text, _ = run_dry(capsys, line)
        assert "None" not in text and "(s)" not in text
        assert "--ffn-hidden-size 3072" in text and f"--deberta-emd {'deberta' in line}" in text
        assert "--num-threads (torch chooses)" in text and "--save (none: nothing is saved)" in text
    text, _ = run_dry(capsys, "--global-batch-size 8 --micro-batch-size 4")
    assert "layout: 1 rank = 1 tensor x 1 pipeline x 1 data, ZeRO 1, fp32" in text and "2 micro-batches of 4" in text


def test_the_papers_base_model_is_the_default_and_flag_or_environment_give_the_world_size(capsys, monkeypatch):
    """With no data at all; 4,288 = (3 + 64) · 64 is the paper's own count."""
    for table, positions in (("shared", 4288), ("per-layer", 51456)):
        facts = run_dry(capsys, f"--relative-table {table}")[1]
        assert (facts["position_parameters"], facts["tokens_per_step"]) == (positions, 256 * 512)
        assert facts["world_size"] == 1
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert run_dry(capsys, "")[1]["world_size"] == 16
    assert run_dry(capsys, "--world-size 32")[1]["world_size"] == 32


def test_validation_of_another_kind_is_told_and_data_are_verified(capsys, prose_then_code, tiny_corpus, tmp_path):
    line = f"--vocab-file {tiny_corpus.vocab_file} --seq-length 48 --data-path"
    told = f"{prose_then_code}: the validation text is of another kind than the training text"
    assert run_dry(capsys, f"{line} {prose_then_code}")[0].count(told) == 1
    assert "of another kind" not in run_dry(capsys, f"{line} {tiny_corpus.prefix}")[0]
    for suffix in (".bin", ".idx", ".json"):
        shutil.copy(f"{tiny_corpus.prefix}{suffix}", tmp_path / f"d{suffix}")
    line = f"--data-path {tmp_path}/d --vocab-file {tiny_corpus.vocab_file} --verify-data"
    assert f"data verified: {tmp_path}/d as in the manifest" in run_dry(capsys, line)[0]
    data = bytearray((tmp_path / "d.bin").read_bytes())
    data[-2] ^= 1
    (tmp_path / "d.bin").write_bytes(data)
    refused("d.bin: SHA-256", run_dry, capsys, line)


def test_stages_cut_what_they_say(capsys):
    _, facts = run_dry(capsys, "--bf16 --world-size 16")
    parameters, memory = facts["parameters"], facts["memory_per_rank"]
    bytes_of_each = [memory[kind] / parameters for kind in ("weights", "gradients", "optimizer")]
    assert bytes_of_each == pytest.approx([2, 4, 12 / 16], rel=0.01)  # gradients are added up in fp32
    assert facts["memory_per_rank_bytes"] == sum(memory.values()) - memory["on_host"]
    by_stage = facts["memory_by_zero_stage"]
    assert list(by_stage) == ["0", "1", "2", "3"] and by_stage["0"] > by_stage["1"] > by_stage["2"]
    for line, stages in (("--fp16 --world-size 16", "123"), ("--pipeline-model-parallel-size 2 --world-size 2", "01")):
        assert "".join(run_dry(capsys, line)[1]["memory_by_zero_stage"]) == stages
    plain = of_rank(capsys, "--zero-stage 0 --world-size 16")
    assert plain["optimizer"] == pytest.approx(8 * parameters, rel=0.01) and plain["buffers"] == 0
    of_copies = of_rank(capsys, "--bf16 --zero-stage 0 --world-size 16")
    assert of_copies["buffers"] == pytest.approx(2 * parameters, rel=0.01)
    assert of_copies["activations_estimate"] < plain["activations_estimate"]
    assert {k: of_copies[k] - plain[k] for k in ("weights", "gradients", "optimizer") if of_copies[k] != plain[k]} == {}


def test_graphs_keep_outputs_and_gradients_of_four_shapes(capsys):
    line = "--bf16 --micro-batch-size 32 --global-batch-size 32"
    (_, kept), (_, off) = run_dry(capsys, line), run_dry(capsys, f"{line} --cuda-graphs off")
    outputs = 12 * 32 * 512 * 768 * 2
    graphs = kept["memory_per_rank"]["graphs"]
    assert graphs == pytest.approx(4 * 2 * outputs + 2 * kept["parameters"] / 12, rel=0.01)
    assert off["memory_per_rank"] == kept["memory_per_rank"] | {"graphs": 0}
    for without in (
        "--checkpoint-activations",
        "--zero-stage 2",
        "--zero-stage 3",
        "--pipeline-model-parallel-size 2 --world-size 2",
    ):
        assert of_rank(capsys, f"--bf16 {without}")["graphs"] == 0, without
    between = off["memory_per_rank_bytes"] / GIB + 0.1
    refused(r"--device-memory is .*: use .*--cuda-graphs off, ", run_dry, capsys, f"{line} --device-memory {between}")
    stage = {"zero_stage": 3, "checkpoint_activations": True}
    assert Config().replace(parallel=stage).graphs_fault == "--checkpoint-activations", "a lower stage has none either"


def test_buckets_are_within_bounds_and_none_larger_than_its_part(capsys):
    tiny = "--num-layers 1 --hidden-size 64 --num-attention-heads 2"
    for line, buffers in (
        (f"{tiny} --cuda-graphs off", 2 * 4 * 5_000_000),
        ("--cuda-graphs off", 2 * 4 * 32_000_000),
        ("", 4 * 32_000_000),
        ("--bf16 --zero-stage 2", (2 * 2 + 4) * 32_000_000),  # two in bf16, one as it is reduced
    ):
        assert of_rank(capsys, f"{line} --world-size 2")["buffers"] == buffers, line
    assert of_rank(capsys, tiny)["buffers"] == 4 * 5_000_000, "one rank overlaps nothing"
    large = "--bf16 --num-layers 48 --hidden-size 2560 --num-attention-heads 32 --pipeline-model-parallel-size 2"
    assert of_rank(capsys, f"{large} --world-size 2")["buffers"] == 4 * 500_000_000
    cut = of_rank(capsys, f"{large} --tensor-model-parallel-size 8 --world-size 16")
    assert cut["buffers"] == pytest.approx(2 * cut["weights"], rel=0.01)


def test_layouts_cut_what_they_say(capsys):
    line = "--bf16 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --world-size 16"
    text, facts = run_dry(capsys, line)
    assert "16 ranks = 4 tensor x 2 pipeline x 2 data" in text
    assert facts["data_parallel"] == 2 and facts["micro_batches_per_step"] == 16
    share = 2 * facts["parameters"] / 8
    assert share < facts["memory_per_rank"]["weights"] < 1.3 * share  # the tied matrix is on both ends


def test_sequence_parallelism_needs_less_and_one_rank_has_nothing_to_share(capsys):
    for tensor in (1, 2):
        line = f"--tensor-model-parallel-size {tensor} --world-size {tensor} --global-batch-size 8"
        (_, without), (text, facts) = run_dry(capsys, line), run_dry(capsys, f"{line} --sequence-parallel")
        saved = without["memory_per_rank"]["activations_estimate"] - facts["memory_per_rank"]["activations_estimate"]
        of_layer = (1 + 6) * 8 * 512 * 768 * 4  # what enters it, and what it keeps
        assert saved == (tensor - 1) * 12 * of_layer // 2
        layout = next(part for part in text.splitlines() if part.startswith("layout:"))
        ignored = "--sequence-parallel ignored: it needs --tensor-model-parallel-size 2 or more"
        assert layout.endswith(", sequence-parallel" if tensor == 2 else ignored)


def test_a_precision_that_this_machine_lacks_is_a_warning(capsys, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(CPU_Accelerator, "is_fp16_supported", lambda self: False)  # newer CPUs have it
    text, facts = run_dry(capsys, "--fp16")
    assert text.startswith("warning: a run on this machine would be refused: --fp16: there is no GPU here")
    assert facts["parameters"] > 0
    assert "warning" not in run_dry(capsys, "--bf16")[0]


def test_offloaded_state_is_on_the_host(capsys, tmp_path):
    settings = tmp_path / "ds.json"
    settings.write_text('{"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 1000}}')
    text, facts = run_dry(capsys, f"--bf16 --deepspeed-config {settings}")
    memory = facts["memory_per_rank"]
    assert memory["optimizer"] == 0 and memory["buffers"] == 4 * 1000
    assert memory["on_host"] == pytest.approx(12 * facts["parameters"], rel=0.01) and "in host memory" in text
    both = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    settings.write_text(json.dumps({"zero_optimization": both}))
    memory = of_rank(capsys, f"--bf16 --zero-stage 3 --deepspeed-config {settings}")
    assert memory["on_host"] == pytest.approx(14 * facts["parameters"], rel=0.01)
    assert memory["weights"] < 0.01 * memory["on_host"]


def test_the_notes_dictionary_is_on_the_host(capsys, tiny_corpus):
    before = sorted(tiny_corpus.prefix.parent.iterdir())
    data = f"--data-path {tiny_corpus.prefix} --vocab-file {tiny_corpus.vocab_file} --hidden-size 192"
    line = f"{data} --notes --notes-min-count 3 --notes-max-count 9"
    text, facts = run_dry(capsys, line)
    assert facts["notes"] > 20 and facts["memory_per_rank"]["on_host"] == facts["notes"] * 192 * 4
    assert f"notes: {facts['notes']} words" in text and "in host memory" in text
    half = run_dry(capsys, f"{line} --notes-dtype bf16")[1]
    assert half["memory_per_rank"]["on_host"] == facts["notes"] * 192 * 2
    assert half["memory_per_rank_bytes"] == run_dry(capsys, data)[1]["memory_per_rank_bytes"]
    assert sorted(tiny_corpus.prefix.parent.iterdir()) == before


def test_less_is_needed_by_recomputation_smaller_micro_batches_and_lower_rates(capsys):
    lines = ("", "--micro-batch-size 4", "--checkpoint-activations")
    whole, half, recomputed = (of_rank(capsys, line)["activations_estimate"] for line in lines)
    assert half == pytest.approx(whole / 2, rel=0.01) and recomputed < whole / 4
    rates = ("0.3", "0.3:0.15", "0.15:0.3", "0.15", "0.3 --objective-phases clm:0.1")
    found = [of_rank(capsys, f"--mask-prob {rate}")["activations_estimate"] for rate in rates]
    assert found[0] == found[1] == found[2] > found[3]
    every_token = found[4] - found[0]
    assert every_token == pytest.approx(0.7 / 0.15 * (found[0] - found[3]), rel=1e-2)


def test_what_does_not_fit_or_divide_is_one_line_and_assumptions_go_with_a_dry_run(capsys):
    for line, message in {
        "--tensor-model-parallel-size 2 --world-size 3": "2 x --pipeline-model-parallel-size 1 = 2 does not divide",
        "--world-size 7": "--global-batch-size is 256: expected a multiple .* 7 data-parallel ranks",
        "--device-memory 2 --bf16": r"a rank needs about \d+\.\d GiB, --device-memory is 2 .*--checkpoint-activations",
    }.items():
        wrong_arguments(message, run_dry, capsys, line)
    wrong_arguments("--world-size needs --dry-run", parse_arguments, ["--world-size", "2"])
    assert capsys.readouterr().out == ""


def planned(config, data_size, micro_batches=1):
    """Return the setup of so many data-parallel ranks, of which each has so many micro-batches of one row."""
    batch = {"micro_batch_size": 1, "global_batch_size": data_size * micro_batches}
    world_size = data_size * config.parallel.pipeline_model_parallel_size
    return Setup.planned(config.replace(training=batch), world_size, "cuda")


@pytest.mark.parametrize("settings", [{}, {"bf16": True}, {"fp16": True}])
def test_the_neediest_rank_is_found_without_a_look_at_every_rank(settings):
    """Without bf16 ranks differ at ZeRO 2: a parameter across a cut keeps its whole gradient on both sides."""
    small = {"hidden_size": 32, "num_layers": 3, "num_attention_heads": 2, "vocab_size": 90}
    config = Config().replace(model=small, training=settings)
    model, differing = on_meta_device(config.model, config.objective), 0
    for size in (1, 2, 3, 5, 8, 64, 200):
        setup = planned(config, size)
        needs = neediest_by_zero_stage(model, setup)
        for stage, settings_of in ((stage, deepspeed_settings(setup, 9**9)) for stage in needs):
            (part,) = cut_up(model, setup)
            every = {memory_of_rank(part, setup, stage, settings_of, rank).gradients for rank in range(size)}
            assert needs[stage].gradients == max(every)
            differing += len(every) > 1
    assert differing == (0 if "bf16" in settings else 6)
    assert neediest_by_zero_stage(model, planned(config, 2 * 10**9))  # hours, rank by rank


def test_device_memory_is_a_bound(capsys):
    needed = run_dry(capsys, "")[1]["memory_per_rank_bytes"] / GIB
    assert run_dry(capsys, f"--device-memory {needed * 1.01}")[1]["memory_per_rank_bytes"] > 0
    refused("--device-memory is", run_dry, capsys, f"--device-memory {needed * 0.99}")
    by_stage = run_dry(capsys, "--bf16 --world-size 16")[1]["memory_by_zero_stage"]
    between = (by_stage["1"] + by_stage["2"]) / 2 / GIB
    line = f"--bf16 --world-size 16 --device-memory {between}"
    refused("use --zero-stage 2, --cuda-graphs off, a smaller", run_dry, capsys, line)


def test_it_estimates_the_step_on_known_gpus_and_shows_none_as_0(capsys):
    shape = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --train-iters 7200 --micro-batch-size 4"
    shape += " --world-size 8 --global-batch-size 64"
    text, facts = run_dry(capsys, f"{shape} --fp16")
    assert "estimated, not measured" in text and re.search(r"\n +H100 +[\d.e-]+ +\d+s +0\.\d", text)
    estimate = facts["estimates"]["h100"]
    assert estimate["hours"] == pytest.approx(2 * estimate["step_seconds"])
    _, facts = run_dry(capsys, f"{shape} --bf16")
    assert list(facts["estimates"]) == [name for name, device in LISTED.items() if device.is_recent]
    shape = "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --vocab-size 100"
    text, _ = run_dry(capsys, f"{shape} --train-iters 1 --fp16 --micro-batch-size 1 --global-batch-size 1")
    rows = [line.split() for line in text.splitlines() if line.split()[:1] and line.split()[0].lower() in LISTED]
    assert len(rows) == len(LISTED)
    assert not any(word.strip("s%").rstrip("0.") == "" for row in rows for word in row if word != "%")


def test_a_model_for_longer_rows_needs_memory_and_time_for_those_of_the_run(capsys):
    """The last phase counts; rotary positions have no weights, so that the models are the same."""
    line = "--position-encoding rope --micro-batch-size 4 --bf16 --world-size 2 --seq-length"
    lengths = ("128", "512 --seq-length-phases 128:1", "512", "512 --seq-length-phases 128:0.5")
    short, alone, *others = (run_dry(capsys, f"{line} {rows}")[1] for rows in lengths)
    needed = [each["memory_by_zero_stage"]["1"] for each in (short, *others)]
    assert short == alone and needed[0] < min(needed[1:])
    seconds, hours = ([one["estimates"]["h200"][name] for one in others] for name in ("step_seconds", "hours"))
    assert seconds[0] == seconds[1] and hours[1] == pytest.approx((short["estimates"]["h200"]["hours"] + hours[0]) / 2)


def test_a_vocabulary_size_needs_no_data_and_a_dry_run(capsys):
    shape = "--num-layers 1 --hidden-size 8 --num-attention-heads 2"
    small, large = (run_dry(capsys, f"{shape} --vocab-size {size}")[1]["parameters"] for size in (1000, 8000))
    assert large - small == 7000 * (8 + 1)  # embeddings and biases
    for words in ("--vocab-size 1000", "--dry-run --vocab-size 1000 --vocab-file v.txt"):
        wrong_arguments("--vocab-size .*leave it out", parse_arguments, words.split())


def test_a_stage_holds_as_many_micro_batches_as_follow_it_and_as_there_are_and_the_table_is_in_mib():
    config = Config().replace(parallel={"pipeline_model_parallel_size": 4})
    model = on_meta_device(config.model, config.objective)
    for micro_batches, in_flight in ((2, [2, 2, 2, 1]), (8, [4, 3, 2, 1])):
        assert [part.in_flight for part in cut_up(model, planned(config, 1, micro_batches))] == in_flight
    names = ("weights", "gradients", "optimizer", "activations_estimate", "buffers", "graphs")
    memory = Memory(**{name: number * 1000 * 1024**2 for number, name in enumerate(names, 1)})
    *_, row = memory_table({1: memory}, 1)
    assert row.split() == ["1", "*", "1,000", "2,000", "3,000", "4,000", "5,000", "6,000", "21,000"]
