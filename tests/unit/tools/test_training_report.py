"""The report of a run: what it says of the curves, and that it can be looked at."""

import json
import math
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest

from megatron_ddrp.config import Config, ObjectiveConfig, save_config
from megatron_ddrp.lab import run_report
from megatron_ddrp.objectives.contract import make_objective
from megatron_ddrp.pages import plotting
from megatron_ddrp.run.metrics import store_level
from tests.datasets import write_dataset
from tests.refusals import refused

ROWS = [
    {"iteration": 1, "loss": 9.5, "lm_loss": 9.0, "tcd_loss": 0.5, "hcd_loss": 0.1, "step_time": 0.2},
    {"iteration": 100, "valid_lm_loss": 7.0},
    {"iteration": 100, "loss": 6.6, "lm_loss": 6.5, "tcd_loss": 0.1, "hcd_loss": 0.0, "step_time": 0.4},
    {"iteration": 200, "valid_lm_loss": 6.0},
]
VALIDATED = {"iteration": 100, "valid_lm_loss": 6.0, "valid_rtd_loss": 0.3, "valid_rtd_accuracy": 0.91}
VALIDATED |= {"valid_rtd_recall": 0.25, "valid_replaced_share": 0.125}
ELECTRA = [{"iteration": 1, "lm_loss": 9.0, "rtd_loss": 0.7}, VALIDATED]


def text_of(rows, beside=None, **extras):
    """Return the page of one run, or of a run and others beside it."""
    runs = {"runs/own": rows, **(beside or {})}
    facts = {name: run_report.facts(Path("nowhere"), rows) for name, rows in runs.items()}
    return run_report.page(runs, facts, {"Curves": "l.png"}, **extras)


def test_series_and_running_means_hold_what_was_logged_and_few_points_are_drawn_as_points():
    assert run_report.Curve("", "lm_loss", factor=100).training_curve(ROWS) == [(1, 900.0), (100, 650.0)]
    values = [(10, 1.0), (20, 2.0), (30, 6.0), (40, 1.0)]
    assert run_report.running_mean(values, 3) == [(20, 3.0), (30, 3.0)]
    assert run_report.running_mean(values[:2], 3) == []
    # a line through one point is invisible, and one through three is short
    for points, marker in ((1, "."), (3, "."), (4, None)):
        axis, values = MagicMock(), [(step, 1.0) for step in range(points)]
        plotting.draw_line(axis, plotting.Line(values, {"color": "b"}))
        assert axis.plot.call_args.kwargs.get("marker") == marker
        plotting.draw_line(axis, plotting.Line(values, {"marker": "s"}))
        assert axis.plot.call_args.kwargs["marker"] == "s", "a run's own marker stays"


def test_the_report_says_when_the_run_left_the_plateau(tmp_path):
    losses = [9.0, 6.9, 5.5, 5.4]
    rows = [{"iteration": n, "consumed_tokens": n * 10**6, "lm_loss": loss} for n, loss in enumerate(losses, 1)]
    assert "plateau" not in dict(run_report.facts(tmp_path, rows))  # a run of an earlier version
    store_level(tmp_path, 7.0)
    for part, told in (
        (rows, "left after 3,000,000 tokens"),
        (rows[:2], "not left yet (docs/lab/plateau.md)"),
        (rows[2:], "below it from its first row on (docs/lab/plateau.md)"),  # so begins an imported encoder
    ):
        assert dict(run_report.facts(tmp_path, part))["plateau"] == told


def test_the_report_says_where_the_loss_ended():
    scores = "# GLUE development scores\n\n| encoder |\n"
    text = text_of(ROWS, unigram=6.5, scores=scores, remark="Mind this.", commands="one\ntwo\n")
    for line in (
        "| masked-LM loss (nats), training | 9.000 | 6.500 | 100 |",
        "| masked-LM loss (nats), validation | 7.000 | 6.000 | 200 |",
        "| perplexity, validation | 1,097 | 403 | 200 |",
        "| HCD: mean cosine of heads, training | 0.100 | 0.000 | 100 |",
        "unigram level of this corpus is 6.500 nats; the last validation loss is 0.500 nats below it",
        "\n## Fine-tuning\n\nMind this.\n\n### GLUE development scores\n\n| encoder |\n\n## Commands",
        "```\none\ntwo\n```",
        "| torch |",
    ):
        assert line in text
    assert "1.000 nats above it" in text_of(ROWS, unigram=5.0)
    text = text_of(ELECTRA)  # which is measured by the majority
    assert "| RTD accuracy (%), validation | 91.000 | 91.000 | 100 |" in text
    assert "| majority: every token an original (%) | 87.500 | 87.500 | 100 |" in text
    own, theirs = (run_report.logged_panels(run_report.LEARNING, {"": rows}) for rows in (ROWS, ELECTRA))
    assert [panel.training for panel in own] == ["tcd_loss", "hcd_loss"]
    assert [panel.validation for panel in theirs] == ["valid_rtd_loss", "valid_rtd_accuracy", "valid_rtd_recall"]


def test_each_run_has_its_lines_and_its_losss_own_name_and_names_stand_as_they_are():
    text = text_of(ROWS, {"runs/bert": ROWS[:2]})
    assert "| masked-LM loss (nats), training of runs/own | 9.000 | 6.500 | 100 |" in text
    assert "| masked-LM loss (nats), training of runs/bert | 9.000 | 9.000 | 1 |" in text
    assert "| masked-LM loss (nats), validation of runs/bert | 7.000 | 7.000 | 100 |" in text
    text = text_of(ROWS, {"<script>|x": ROWS[:2]}, commands="echo '```' '<b>'\n")
    assert r"| masked-LM loss (nats), validation of &lt;script&gt;\|x | 7.000 | 7.000 | 100 |" in text
    assert "\n````\necho '```' '<b>'\n````\n" in text
    assert run_report.loss_panel({"b": ELECTRA}).label == "generator's loss [nats]"
    assert run_report.loss_panel({"a": ROWS, "b": ELECTRA}).label == "masked-LM loss (ELECTRA: the generator's) [nats]"
    text = text_of(ROWS, {"electra": [row | {"valid_lm_loss": 6.0} for row in ELECTRA]})
    assert "| masked-LM loss (nats), validation of runs/own |" in text
    assert "| generator's loss (nats), validation of electra |" in text
    assert "generator's loss (nats), validation of runs/own" not in text


def test_the_head_tells_what_was_trained_and_for_how_long(tmp_path):
    rows = [
        {"iteration": 1, "lm_loss": 9.0, "step_time": 2.0, "consumed_tokens": 90, "peak_memory_gib": 0.75},
        {"iteration": 10, "lm_loss": 8.0, "step_time": 1.0, "consumed_tokens": 1100, "peak_memory_gib": 0.5},
    ]
    assert run_report.training_seconds(rows) == 2.0 + 9 * 1.0
    branch = [rows[1] | {"iteration": step, "consumed_tokens": 100 * step} for step in (901, 902, 903)]
    told = dict(run_report.facts(tmp_path, branch))
    assert (told["time of all steps"], told["throughput"]) == ("3s", "100 tokens per second")
    assert dict(run_report.facts(tmp_path, rows)) == {
        **{"steps": "10", "tokens seen, without padding": "1,100", "throughput": "100 tokens per second"},
        **{"time per step": "1.500 s (median)", "time of all steps": "11s", "peak memory of a rank": "0.75 GiB"},
    }
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 16, "vocab_size": 100}
    config = Config().replace(model=sizes | {"relative_distance": 4}, training={"global_batch_size": 32})
    save_config(config, tmp_path)
    found = dict(run_report.facts(tmp_path, rows))
    expected = {"model": "ddrp + mth", "steps": "10 of 1,000,000", "size": "1 layer x 8, 2 heads, 100 pieces"}
    expected |= {"batch": "32 sequences x 16 tokens = up to 512 per step"}
    assert {name: found[name] for name in expected} == expected
    assert int(found["parameters"].split(" ")[0].replace(",", "")) > 100 * 8
    save_config(config.replace(training={"seq_length_phases": ("8:1",)}), tmp_path)  # of a model for longer rows
    assert dict(run_report.facts(tmp_path, rows))["batch"] == "32 sequences x 8 tokens = up to 256 per step"
    (tmp_path / "config.json").write_text("{")
    assert dict(run_report.facts(tmp_path, rows))["model"].startswith("unknown: ")


def test_runs_beside_have_training_and_validation_curves_in_a_figure(tmp_path):
    runs = {"runs/own": ROWS, "runs/bert": ROWS[:2], "runs/tnf": ROWS}
    styles = run_report.styles_of(runs)
    lines = run_report.panel_of(run_report.loss_panel(runs), runs, styles).lines
    own, bert, tnf = (thin["color"] for thin, _ in styles.values())
    curves = [(line.style["color"], len(line.points)) for line in lines]
    assert curves == [(own, 2), (own, 2), (bert, 1), (bert, 1), (tnf, 2), (tnf, 2)]
    assert len({own, bert, tnf}) == 3
    pytest.importorskip("matplotlib")
    of_one_row = {name: [{"iteration": 1, "lm_loss": loss}] for name, loss in (("plain", 9.0), ("diverged", 1e5))}
    for name, rows in {"mth": ROWS, "electra": ELECTRA, **of_one_row}.items():
        runs = {"own": rows, "another": ROWS, "of one step": ROWS[:1]}
        plotting.save_figures(tmp_path, {f"{name}.png": partial(run_report.draw_losses, runs, 6.5)})
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG"), name


def test_perplexities_are_few_and_round_and_the_unigram_level_is_the_entropy_of_the_pieces(tmp_path, monkeypatch):
    for lowest, highest, ticks in (
        (5, 2e4, [10, 100, 1000, 10_000]),
        (40, 400, [50, 100, 200]),
        (2100, 3900, [2500, 3000, 3500]),
        (2100, 2900, [2200, 2400, 2600, 2800]),
        (2110, 2410, [2200, 2300, 2400]),
    ):
        assert run_report.perplexity_ticks(lowest, highest) == pytest.approx(ticks)
    ranges = [(10**low, 10 ** (low + width)) for low in np.linspace(0, 1, 50) for width in np.linspace(0.05, 3.9, 200)]
    assert max(len(run_report.perplexity_ticks(*limits)) for limits in ranges) <= 8
    write_dataset(tmp_path / "p", [[[1, 1]], [[7, 5]]])
    for chunk in (1, 2, 100):
        monkeypatch.setattr("megatron_ddrp.data.dataset.indexed_dataset.CHUNK_TOKENS", chunk)
        assert run_report.unigram_level(tmp_path / "p") == pytest.approx(0.5 * math.log(2) + 2 * 0.25 * math.log(4))


def test_the_cosines_of_training_stand_beside_those_of_validation_and_speed_is_drawn_where_it_was_logged(tmp_path):
    """TCD's is f(S) and HCD's f(H); every other term's validation has its own name."""
    terms = make_objective(ObjectiveConfig(objective="mth")).terms
    similarities = {term.name: term.similarity for term in terms if term.similarity}
    assert similarities == {"tcd_loss": "token_similarity", "hcd_loss": "head_similarity"}
    for panel in run_report.LEARNING:
        assert panel.validation == similarities.get(panel.training, f"valid_{panel.training}"), panel.label
    rows = [{"iteration": step, "peak_memory_gib": gib} for step, gib in ((1, 0.5), (2, 0.75), (3, 0.25))]
    (memory,) = run_report.logged_panels(run_report.SPEED, {"own": rows})
    assert memory.label == "peak memory [GiB]" and memory.training_curve(rows) == [(1, 0.5), (2, 0.75), (3, 0.25)]
    pytest.importorskip("matplotlib")
    assert run_report.draw_speed({"own": ELECTRA}) is None
    rows = [{"iteration": step, "lr": 1e-3, "grad_norm": 1.0} for step in (1, 2)]
    plotting.save_figures(tmp_path, {"speed.png": lambda: run_report.draw_speed({"own": rows})})
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def write_metrics(folder, rows):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_no_run_is_dropped_in_silence_and_damaged_files_are_named(tmp_path, capsys):
    own, other, odd = (write_metrics(tmp_path / name, ROWS) for name in ("own", "other", "odd"))
    write_metrics(odd, [{"iteration": 1, "lr": 0.1}])
    assert list(run_report.read_runs(own, [other, odd, tmp_path / "x" / ".." / "own"])) == [own, other, odd]
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("own: left out, it is in the report already")
    assert second == f"{odd / 'metrics.jsonl'}: no losses in it; the figure has no curve of this run"
    refused("--beside takes the --save folder", run_report.read_runs, own, [tmp_path / "nothing"])
    file, table = write_metrics(tmp_path, ROWS) / "metrics.jsonl", tmp_path / "table.md"
    assert run_report.read_metrics(tmp_path) == ROWS
    assert not capsys.readouterr().err
    file.write_text(file.read_text() + '{"iteration": 7, "lo')  # what a run has half written
    assert run_report.read_metrics(tmp_path) == ROWS
    assert capsys.readouterr().err == f"{file}: left out the half line at its end\n"
    for content in (b"", b"{"):
        file.write_bytes(content)
        refused("is empty", run_report.read_metrics, tmp_path)
    file.unlink()
    refused("no such file", run_report.read_metrics, tmp_path)
    for content, message in ((b"a\xff", "table.md.*byte 1 is not UTF-8"), (b" \n", "table.md.*is empty")):
        table.write_bytes(content)
        refused(message, run_report.read_words, table)


def test_scores_come_from_a_folder_of_fine_tuning_or_glue(tmp_path):
    pytest.importorskip("matplotlib")
    write_metrics(tmp_path, ROWS)
    (tmp_path / "table.md").write_text("# Fine-tuning scores\n")
    run_report.main(["--load", str(tmp_path), "--scores-dir", str(tmp_path), "--output-dir", str(tmp_path / "out")])
    assert "\n### Fine-tuning scores\n" in (tmp_path / "out" / "report.md").read_text()
