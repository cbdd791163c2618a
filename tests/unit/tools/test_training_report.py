"""The report of a run: what it says of the curves, and that it can be looked at."""

import json
import math

import pytest

from megatron_ddrp.commands.report import (
    draw_losses,
    main,
    panels,
    read_metrics,
    read_text,
    report,
    series,
    unigram_level,
)
from megatron_ddrp.errors import UserError
from tests.datasets import write_dataset

ROWS = [
    {"iteration": 1, "loss": 9.5, "lm_loss": 9.0, "tcd_loss": 0.5, "hcd_loss": 0.1, "step_time": 0.2},
    {"iteration": 100, "valid_lm_loss": 7.0},
    {"iteration": 100, "loss": 6.6, "lm_loss": 6.5, "tcd_loss": 0.1, "hcd_loss": 0.0, "step_time": 0.4},
    {"iteration": 200, "valid_lm_loss": 6.0},
]
ELECTRA = [
    {"iteration": 1, "lm_loss": 9.0, "rtd_loss": 0.7},
    {
        "iteration": 100,
        "valid_lm_loss": 6.0,
        "valid_rtd_loss": 0.3,
        "valid_rtd_accuracy": 0.91,
        "valid_rtd_recall": 0.25,
        "valid_replaced_share": 0.125,
    },
]


def test_series_hold_what_was_logged():
    assert series(ROWS, "valid_lm_loss") == [(100, 7.0), (200, 6.0)]
    assert series(ROWS, "rtd_loss") == []


def test_the_report_says_where_the_loss_ended():
    text = report(
        ROWS, {"runs/bert": ROWS[:2]}, 6.5, "# GLUE development scores\n\n| encoder |\n", "Mind this.", "one\ntwo\n"
    )
    assert "| masked LM, validation | 7.000 | 6.000 | 200 |" in text
    assert "| masked LM, validation of runs/bert | 7.000 | 7.000 | 100 |" in text
    assert "unigram level of this corpus is 6.500 nats; the last validation loss lies 0.500 nats below it" in text
    assert "Median time of a step: 0.300 s." in text
    assert "\n## Fine-tuning\n\nMind this.\n\n### GLUE development scores\n\n| encoder |\n\n## Commands" in text
    assert "```\none\ntwo\n```" in text
    assert "| torch |" in text


def test_names_and_commands_are_shown_as_they_stand():
    text = report(ROWS, {"<script>|x": ROWS[:2]}, None, None, None, "echo '```' '<b>'\n")
    assert r"| masked LM, validation of &lt;script&gt;\|x | 7.000 | 7.000 | 100 |" in text
    assert "\n````\necho '```' '<b>'\n````\n" in text


def test_a_run_that_did_not_learn_is_told_so():
    assert "1.000 nats above it" in report(ROWS, {}, 5.0, None, None, None)


def test_an_electra_run_is_measured_by_the_majority():
    text = report(ELECTRA, {}, None, None, None, None)
    assert "| RTD accuracy, validation | 0.910 | 0.910 | 100 |" in text
    assert "| majority: every token an original | 0.875 | 0.875 | 100 |" in text
    assert list(panels(ELECTRA)) == ["RTD accuracy", "recall"]
    assert list(panels(ROWS)) == ["mean cosine"]


@pytest.mark.parametrize(
    "rows", [ROWS, ELECTRA, [{"iteration": 1, "lm_loss": 9.0}]], ids=["mth", "electra", "one plain step"]
)
def test_the_figure_is_a_png(tmp_path, rows):
    pytest.importorskip("matplotlib")
    draw_losses(rows, {"another": ROWS, "of one step": ROWS[:1]}, 6.5, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_the_unigram_level_is_the_entropy_of_the_pieces(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr("megatron_ddrp.data.dataset.indexed_dataset.CHUNK_TOKENS", chunk)
    write_dataset(tmp_path / "p", [[[1, 1]], [[7, 5]]])
    assert unigram_level(tmp_path / "p") == pytest.approx(0.5 * math.log(2) + 2 * 0.25 * math.log(4))


@pytest.mark.parametrize("flag", ["--scores-dir", "--glue-dir"])
def test_scores_come_from_a_folder_of_fine_tuning_or_glue(tmp_path, monkeypatch, flag):
    pytest.importorskip("matplotlib")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "table.md").write_text("# Fine-tuning scores\n")
    words = ["--load", str(tmp_path), flag, str(tmp_path), "--output-dir", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["training_report.py", *words])
    main()
    assert "\n### Fine-tuning scores\n" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.parametrize(("content", "message"), [(b"a\xff", "byte 1 is not UTF-8"), (b" \n", "is empty")])
def test_a_damaged_table_of_scores_is_named(tmp_path, content, message):
    (tmp_path / "table.md").write_bytes(content)
    with pytest.raises(UserError, match=f"table.md.*{message}"):
        read_text(tmp_path / "table.md")


@pytest.mark.parametrize(("content", "message"), [(None, "no such file"), ("", "is empty"), ("{", "is empty")])
def test_metrics_that_cannot_be_read_are_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        read_metrics(tmp_path)


def test_metrics_are_read(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert read_metrics(tmp_path) == ROWS
    assert not capsys.readouterr().err
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 7, "lo')  # what a run has half written
    assert read_metrics(tmp_path) == ROWS
    assert capsys.readouterr().err == f"{tmp_path / 'metrics.jsonl'}: left out the half line at its end\n"
