"""Throughput and memory at inference: what is measured, what is left out and why; no test relies on the clock."""

from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from megatron_ddrp.config.registry import PLUGINS
from megatron_ddrp.encoders.encoder import load_encoder
from megatron_ddrp.errors import UserError
from megatron_ddrp.lab.analysis import probe as throughput
from megatron_ddrp.lab.analysis.figures import draw_throughput
from megatron_ddrp.lab.analysis.probe import Setting, Speed, full_batch, measure_throughput
from megatron_ddrp.lab.analysis.session import find_snapshots
from megatron_ddrp.pages.plotting import save_figures

SETTING = Setting(torch.device("cpu"), tokens=50, rounds=4, bf16=False, seed=1)


def passes_of(monkeypatch, snapshots, lengths, peak=lambda timed, length, setting: 7, setting=SETTING):
    """Measure without a clock and without processes: (result, (encoder, rows, length) of each pass, advances)."""
    passes, advances, names = [], [], {}
    ticks = iter(range(10**6))

    def forward(encoder, batch, _):
        passes.append((names.setdefault(id(encoder), len(names)), *batch.input_ids.shape))

    monkeypatch.setattr(throughput, "peak_memory", peak)
    monkeypatch.setattr(throughput, "_forward", forward)
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: next(ticks) * 0.5)
    measured = measure_throughput(snapshots, lengths, setting, lambda: advances.append(1))
    return measured, passes, len(advances)


def test_encoders_take_turns_at_one_budget_of_tokens(run_folder, monkeypatch):
    snapshots = find_snapshots([run_folder, run_folder / "iter_0000010"], every=False)
    measured, passes, advances = passes_of(monkeypatch, snapshots, [8, 24])
    assert [(rows, length) for _, rows, length in passes] == [(6, 8)] * 10 + [(2, 24)] * 10
    for begin in (0, 10):
        rounds = np.array([name for name, *_ in passes[begin : begin + 10]]).reshape(5, 2)
        assert (np.sort(rounds, axis=1) == [0, 1]).all() and len({tuple(row) for row in rounds[1:]}) == 2
    assert advances == 2 * 2 * (SETTING.rounds + 1)
    first = measured[0].speeds[0]
    assert (first.length, first.rows, first.memory_bytes) == (8, 6, 7)
    assert first.tokens_per_second == first.lower_quartile == first.upper_quartile == 6 * 8 / 0.5
    assert measured[0].weight_bytes == sum(p.numel() * 4 for p in measured[0].encoder.module.parameters())


def test_quartiles_are_those_of_the_rounds():
    speed = throughput._speed(10, 3, np.array([1.0, 2.0, 3.0, 5.0, 6.0]), None)
    assert (speed.lower_quartile, speed.tokens_per_second, speed.upper_quartile) == (6.0, 10.0, 15.0)


def test_lengths_without_positions_or_memory_are_left_out_and_said(run_folder, monkeypatch):
    def peak(timed, length, setting):
        if length == 16:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes")
        return 7

    measured, _, advances = passes_of(monkeypatch, find_snapshots([run_folder], False), [8, 16, 25], peak)
    assert [speed.length for speed in measured[0].speeds] == [8]
    assert measured[0].left_out == {
        16: "not enough memory; give a smaller --tokens",
        25: "it has positions for 24 tokens",
    }
    assert advances == 3 * (SETTING.rounds + 1)


def test_another_fault_is_not_taken_for_a_want_of_memory(run_folder, monkeypatch):
    def peak(timed, length, setting):
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        passes_of(monkeypatch, find_snapshots([run_folder], False), [8], peak)


def test_batches_are_full_rows_of_pieces(run_folder):
    tokenizer = load_encoder(run_folder).tokenizer
    batch = full_batch(tokenizer, 3, 9, SETTING)
    assert batch.input_ids.shape == (3, 9) and (batch.document_ids == 1).all()
    assert (batch.input_ids[:, 0] == tokenizer.cls_id).all() and (batch.input_ids[:, -1] == tokenizer.sep_id).all()
    assert not np.isin(batch.input_ids[:, 1:-1], tokenizer.special_ids).any()
    assert batch.position_ids[2].tolist() == list(range(9))
    assert (full_batch(tokenizer, 3, 9, replace(SETTING, seed=2)).input_ids != batch.input_ids).any()


PLUGIN = """
from pathlib import Path
from megatron_ddrp.model.positions.absolute import Nope

class Mine(Nope):
    pass

ENCODINGS = {"mine": Mine}
Path(__file__).with_suffix(".loaded").touch()
"""


def test_the_command(run_folder, analyze_main, monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "plugin.py").write_text(PLUGIN)
    monkeypatch.setitem(PLUGINS, "of this process", tmp_path / "plugin.py")
    more = ("--lengths", 2000, 24, "--tokens", 48, "--rounds", 2)
    result = analyze_main("throughput", run_folder, tmp_path / "t.png", *more)
    [row] = result["encoders"]
    assert (result["device"], result["precision"], result["tokens_per_batch"]) == ("cpu", "fp32", 48)
    [speed] = row["lengths"]
    assert (row["run"], speed["length"], speed["rows"]) == ("ddrp", 24, 2)
    assert 0 < speed["lower_quartile"] <= speed["tokens_per_second"] <= speed["upper_quartile"]
    assert speed["memory_bytes"] is None or speed["memory_bytes"] >= 0
    assert row["left_out"] == [{"length": 2000, "reason": "it has positions for 24 tokens"}]
    assert (tmp_path / "plugin.loaded").exists()  # in the process that measures memory
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert "ddrp, length 2000: left out, it has positions for 24 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--lengths", 2), "--lengths is 2: it must be at least 3"),
        (("--rounds", 0), "--rounds is 0"),
        (("--tokens", 0), "--tokens is 0"),
    ],
)
def test_what_cannot_be_done_is_one_line(run_folder, analyze_main, tmp_path, more, message):
    with pytest.raises(UserError, match=message):
        analyze_main("throughput", run_folder, tmp_path / "x.json", *more)


def test_a_command_that_measures_nothing_says_so_and_writes_nothing(run_folder, analyze_main, tmp_path, capsys):
    with pytest.raises(UserError, match="no length could be measured"):
        analyze_main("throughput", run_folder, tmp_path / "x.json", "--lengths", 2000)
    assert "length 2000: left out, it has positions for 24 tokens" in capsys.readouterr().out
    assert not (tmp_path / "x.json").exists()


def test_the_figure_does_without_memory(tmp_path):
    pytest.importorskip("matplotlib")
    speed = Speed(64, 2, 100.0, 90.0, 110.0, None)
    save_figures(tmp_path, {"t.png": lambda: draw_throughput([{"run": "mine", "lengths": [asdict(speed)]}])})
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
