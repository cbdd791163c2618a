"""`--predict-test`: a submission has the predictions of one encoder."""

import json
import zipfile

import numpy as np
import pytest
import torch

from megatron_ddrp.tasks.glue import TASKS, main, write_test_predictions
from tests.unit.tasks.glue.test_main import arguments

QUICK = ("--epochs", "1", "--seeds", "1", "--predict-test")


@pytest.fixture
def other_folder(bert_folder, tmp_path):
    """`bert_folder` with other weights."""
    import shutil

    from transformers import BertForMaskedLM

    folder = shutil.copytree(bert_folder, tmp_path / "other")
    model = BertForMaskedLM.from_pretrained(folder)
    torch.nn.init.normal_(model.bert.embeddings.word_embeddings.weight)
    model.save_pretrained(folder)
    return folder


def archived(folder):
    with zipfile.ZipFile(folder / "submission.zip") as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_server_gets_numbers_within_the_range_and_names_of_classes(tmp_path):
    """STS-B's scores are 0 to 5; a row without a prediction gets 0."""
    write_test_predictions(tmp_path / "STS-B.tsv", TASKS["STS-B"], np.array([-0.25, 2.5, 5.125, np.nan, np.inf]))
    index, prediction = zip(
        *(line.split("\t") for line in (tmp_path / "STS-B.tsv").read_text().splitlines()), strict=True
    )
    assert index == ("index", "0", "1", "2", "3", "4")
    assert prediction[0] == "prediction" and [float(one) for one in prediction[1:]] == [0, 2.5, 5, 0, 5]
    write_test_predictions(tmp_path / "RTE.tsv", TASKS["RTE"], np.array([1, 0]))
    assert (tmp_path / "RTE.tsv").read_text() == "index\tprediction\n0\tnot_entailment\n1\tentailment\n"


def test_a_second_encoder_gets_a_submission_of_its_own(three_tasks, bert_folder, other_folder, tmp_path, capsys):
    out = tmp_path / "out"
    main(arguments(three_tasks, bert_folder, out, *QUICK, "--tasks", "CoLA", "STS-B"))
    first, plain = archived(out / "submission"), out / "submission"
    assert f"test predictions of {bert_folder}: written to {plain / 'submission.zip'};" in capsys.readouterr().out
    main(arguments(three_tasks, other_folder, out, *QUICK, "--tasks", "STS-B"))
    assert archived(plain) == first
    (second,) = out.glob("submission-*")
    assert list(archived(second)) == ["STS-B.tsv"] and archived(second)["STS-B.tsv"] != first["STS-B.tsv"]
    told = f"{second / 'submission.zip'}; {plain} keeps those of another encoder"
    assert f"test predictions of {other_folder}: written to {told}" in capsys.readouterr().out
    owners = [json.loads((folder / "encoder.json").read_text()) for folder in (plain, second)]
    assert [owner["name"] for owner in owners] == [str(bert_folder), str(other_folder)]
    assert second.name == f"submission-{owners[1]['encoder']}"
    main(arguments(three_tasks, bert_folder, out, *QUICK, "--tasks", "MNLI"))
    assert archived(plain).keys() == first.keys() | {"MNLI-m.tsv", "MNLI-mm.tsv"}


@pytest.mark.parametrize("several", [False, True])
def test_tasks_that_start_from_another_share_the_submission(three_tasks, bert_folder, other_folder, tmp_path, several):
    out = tmp_path / "out"
    tasks = ["--tasks", "CoLA", "STS-B", "--start-from-task", "MNLI"]
    loads = [str(bert_folder), *[str(other_folder)] * several]
    main(arguments(three_tasks, bert_folder, out, *QUICK, *tasks, "--load", *loads))
    folders = list(out.glob("submission*"))
    assert len(folders) == 1 + several
    for folder in folders:
        assert sorted(archived(folder)) == ["CoLA.tsv", "MNLI-m.tsv", "MNLI-mm.tsv", "STS-B.tsv"]
    assert {json.loads((folder / "encoder.json").read_text())["name"] for folder in folders} == set(loads)


def test_a_test_set_that_changed_is_predicted_anew(three_tasks, bert_folder, tmp_path, capsys):
    out, path = tmp_path / "out", three_tasks / "CoLA" / "test.tsv"
    command = arguments(three_tasks, bert_folder, out, *QUICK)
    main(command)
    assert "test predictions [1/1]" in capsys.readouterr().out
    main(command)
    assert "test predictions [" not in capsys.readouterr().out
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:8]))
    main(command)
    assert "test predictions [1/1]" in capsys.readouterr().out
    assert len(archived(out / "submission")["CoLA.tsv"].splitlines()) == 8
