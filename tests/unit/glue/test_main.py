"""The command, end to end on a tiny task and encoder."""

import json
import subprocess
import sys

import pytest

from megatron_ddrp.errors import UserError
from tasks.glue.__main__ import main, parse_arguments


def arguments(glue_dir, folder, out, *more):
    words = ["--tasks", "CoLA", "--data-dir", str(glue_dir), "--load", str(folder), "--output-dir", str(out)]
    return [*words, "--grid", "quick", "--seeds", "2", "--lr", "1e-2", "--batch-size", "8", "--epochs", "10", *more]


def rows(out):
    return [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]


def test_runs_are_recorded_and_not_repeated(glue_dir, bert_folder, tmp_path, capsys):
    out = tmp_path / "out"
    main(arguments(glue_dir, bert_folder, out))
    first = rows(out)
    assert [(row["task"], row["seed"], row["dev_examples"], row["metric"]) for row in first] == [
        ("CoLA", 1, 21, "matthews"),
        ("CoLA", 2, 21, "matthews"),
    ]
    assert first[0]["steps"] == 10 * 8
    assert first[0]["score"] > 0.5
    assert "| encoder | CoLA |\n" in (out / "table.md").read_text()

    (out / "runs.jsonl").write_text(json.dumps(first[1]) + "\n")  # as if seed 1 had been killed
    capsys.readouterr()
    main(arguments(glue_dir, bert_folder, out))
    assert "1 of 2 runs to do" in capsys.readouterr().out
    second = rows(out)
    assert second[0] == first[1]
    assert {**second[1], "seconds": 0} == {**first[0], "seconds": 0}


def test_random_weights_are_runs_of_their_own(glue_dir, bert_folder, tmp_path):
    out = tmp_path / "out"
    for more in ([], ["--random-init"]):
        main(arguments(glue_dir, bert_folder, out, "--epochs", "1", *more))
    assert [row["load"] for row in rows(out)] == [str(bert_folder)] * 2 + [f"{bert_folder}, random weights"] * 2
    assert len({row["encoder"] for row in rows(out)}) == 2


def test_bad_data_stops_before_the_encoder_is_loaded(glue_dir, tmp_path):
    path = glue_dir / "CoLA" / "dev.tsv"
    path.write_text("made\t2\t\tred cat runs\n")
    with pytest.raises(UserError, match=r"dev\.tsv, line 1: label '2', expected one of 0, 1"):
        main(arguments(glue_dir, tmp_path / "no-such-encoder", tmp_path / "out"))


def test_a_foreign_folder_is_refused(glue_dir, tmp_path):
    with pytest.raises(UserError, match="neither a training checkpoint nor a Hugging Face folder"):
        main(arguments(glue_dir, tmp_path, tmp_path / "out"))


def test_a_tokenizer_larger_than_its_model_is_refused(glue_dir, bert_folder, tmp_path):
    with (bert_folder / "vocab.txt").open("a") as stream:
        stream.write("more\n")
    with pytest.raises(UserError, match="15 pieces and its model embeds 14"):
        main(arguments(glue_dir, bert_folder, tmp_path / "out"))


@pytest.mark.parametrize(
    "wrong", [["--seeds", "0"], ["--lr", "-1"], ["--tasks", "XNLI"], ["--grid", "large"], ["--max-seq-length", "4"]]
)
def test_wrong_arguments_exit_with_2(glue_dir, tmp_path, wrong, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_arguments(arguments(glue_dir, tmp_path, tmp_path, *wrong))
    assert stopped.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_command_line_needs_no_torch():
    code = "import sys\nfrom tasks.glue.__main__ import parse_arguments\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
