"""GLUE: the table of tasks, its files, and the command, end to end on tiny tasks and encoders, with its submission."""

import json
import re
import shutil
import tarfile
import zipfile

import numpy as np
import pytest

from megatron_ddrp.data.tokenizers.tokenizer import FIRST, SECOND, RowForm, usual_rows
from megatron_ddrp.encoders.encoder import load_encoder
from megatron_ddrp.encoders.rows import dev_order, pad_batch, truncate
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.table_files import Example
from megatron_ddrp.tasks.finetune.training import train_order
from megatron_ddrp.tasks.glue import TASKS, main, read_examples, read_task, read_test, write_test_predictions
from tests.datasets import SHARED
from tests.refusals import refused, wrong_arguments
from tests.unit.tasks.conftest import arguments, rows, write_bert


class WordTokenizer:
    """A piece a word: its length plus 10."""

    pad_id, cls_id, sep_id = 0, 1, 2
    vocab_size = 100
    rows = usual_rows(1, 2)

    def encode_batch(self, texts):
        return [[10 + len(word) for word in text.split()] for text in texts]


def encode(task, examples, tokenizer, max_length):
    return KINDS[task.kind].encode(task, examples, tokenizer, max_length)


def row_of(encoded, number):
    """(pieces, segments) of a row, as a batch has them."""
    batch = pad_batch(encoded, np.array([number]))
    return batch.input_ids[0].tolist(), batch.segment_ids[0].tolist()


COLA = 'gj04\t1\t\tHe said "go" and left.\ngj04\t0\t*\tHe said go and left\x85 .\n'
STSB = "index\tsentence1\tsentence2\tscore\n0\tA plane.\tAn air plane.\t4.750\n1\tA man.\tA dog.\t0.000"
RTE = "index\tsentence1\tsentence2\tlabel\n0\ta b c\td e\tentailment\n1\tf\tg\tnot_entailment\n"


def write(folder, task, **files):
    (folder / task).mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / task / f"{name}.tsv").write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def test_tasks_are_read_as_released(tmp_path):
    """CoLA has no header; quotes stay; labels of STS-B are floats; MNLI scores the matched file first."""

    def read(task, train, **dev):
        return read_task(TASKS[task], write(tmp_path, task, train=train, **dev or {"dev": train}))

    data = read("CoLA", COLA)
    assert list(data.train) == [(('He said "go" and left.',), 1), (("He said go and left\x85 .",), 0)]
    assert list(data.dev) == ["dev"]
    text = 'id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t1\t2\t"What is ""it""?\tb"\t0\n'
    assert list(read("QQP", text).train) == [(('"What is ""it""?', 'b"'), 0)]
    data = read("STS-B", STSB)
    assert [example.label for example in data.train] == [4.75, 0.0]
    assert encode(data.task, data.train, WordTokenizer(), 32).targets.dtype == np.float64
    text = "index\tsentence1\tsentence2\tgold_label\n0\ta\tb\tneutral\n"
    data = read("MNLI", text, dev_matched=text, dev_mismatched=text)
    assert list(data.dev) == ["dev_matched", "dev_mismatched"]
    data = read("RTE", RTE)
    assert read("RTE", RTE, dev=RTE.replace("\tf\t", "\tF\t")).digest != data.digest
    encoded = encode(data.task, data.train, WordTokenizer(), 32)
    assert row_of(encoded, 0) == ([1, 11, 11, 11, 2, 11, 11, 2], [0, 0, 0, 0, 0, 1, 1, 1])
    assert row_of(encoded, 1) == ([1, 11, 2, 11, 2], [0, 0, 0, 1, 1])
    assert encoded.targets.tolist() == [0, 1]


def test_errors_name_file_line_and_expectation(tmp_path):
    for task, train, dev, words in (
        ("RTE", RTE, None, r"dev\.tsv: no such file; RTE needs train\.tsv, dev\.tsv"),
        ("RTE", RTE, RTE.replace("\tnot_entailment", ""), r"dev\.tsv, line 3: 3 columns, expected 4"),
        ("RTE", RTE, RTE.replace("\tentailment", "\tyes"), r"line 2: label 'yes', expected one of entailment, not_ent"),
        ("STS-B", STSB, STSB.replace("4.750", "5.2"), "line 2: label '5.2', expected a number from 0 to 5"),
        ("STS-B", STSB, STSB.replace("4.750", "high"), "line 2: label 'high', expected a number from 0 to 5"),
    ):
        write(tmp_path, task, train=train, **({"dev": dev} if dev else {}))
        error = refused(words, read_task, TASKS[task], tmp_path)
        assert str(tmp_path / task / "dev.tsv") in str(error)


def test_a_missing_task_is_answered_with_the_tasks_there_and_nearby(tmp_path):
    """First the folder's own tasks, then those of a folder in it or around it, then the official site."""
    glue = write(write(tmp_path / "data" / "glue", "RTE", train=RTE, dev=RTE), "CoLA", train=COLA, dev=COLA)
    write(glue, "STS-B", train=STSB)
    for folder, remedy in (
        (glue, "; complete there: --tasks RTE CoLA"),
        (glue.parent, f"; use --data-dir {glue}, which has RTE, CoLA"),
        (glue / "STS-B", f"; use --data-dir {glue}, which has RTE, CoLA"),
        (tmp_path, "; get the files from gluebenchmark.com/tasks"),
        (tmp_path / "missing", "; get the files from gluebenchmark.com/tasks"),
    ):
        refused(f"{re.escape(remedy)}$", read_task, TASKS["STS-B"], folder)


def test_a_few_broken_rows_of_qqp_are_left_out(tmp_path):
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    text = header + "1\t1\t2\ta\tb\t0\n" + "2\t3\t4\tc\n" + "3\t5\t6\td\te\t1\n"
    path, raw = tmp_path / "train.tsv", text.encode()
    assert read_examples(TASKS["QQP"], path, raw, 1) == [(("a", "b"), 0), (("d", "e"), 1)]
    refused("line 3: 4 columns", read_examples, TASKS["QQP"], path, raw)


def test_the_tokenizer_decides_the_separators_and_segments_of_rows():
    funnel = RowForm(((1, 2), (FIRST, 0), (2, 0)), ((1, 2), (FIRST, 0), (2, 0), (SECOND, 1), (2, 1)))
    t5 = RowForm(((FIRST, 0), (2, 0)), ((FIRST, 0), (2, 0), (SECOND, 0), (2, 0)))
    for form, pair, segments, single in (
        (usual_rows(1, 2, True), [1, 11, 11, 2, 2, 11, 11, 2], [0] * 8, [1, 11, 11, 11, 2]),
        (funnel, [1, 11, 11, 11, 2, 11, 11, 2], [2, 0, 0, 0, 0, 1, 1, 1], [1, 11, 11, 11, 2]),
        (t5, [11, 11, 11, 2, 11, 11, 2], [0] * 7, [11, 11, 11, 2]),
    ):
        tokenizer = WordTokenizer()
        tokenizer.rows = form
        encoded = encode(TASKS["RTE"], [Example(("a b c", "d e"), 0)], tokenizer, 8)
        assert row_of(encoded, 0) == (pair, segments)
        assert row_of(encode(TASKS["SST-2"], [Example(("a b c",), 0)], tokenizer, 8), 0)[0] == single


def test_test_sets_have_headers_and_no_labels_and_a_missing_one_is_named(tmp_path):
    """MNLI has two, and the diagnostic one where it is."""
    write(tmp_path, "CoLA", test="index\tsentence\n0\tShe left.\n1\tLeft she.\n")
    found = read_test(TASKS["CoLA"], tmp_path)
    assert list(found) == ["CoLA.tsv"] and [row.texts for row in found["CoLA.tsv"]] == [("She left.",), ("Left she.",)]
    assert np.isnan(encode(TASKS["CoLA"], found["CoLA.tsv"], WordTokenizer(), 16).targets).all()
    text = "index\tsentence1\tsentence2\n0\ta\tb\n"
    write(tmp_path, "MNLI", test_matched=text, test_mismatched=text)
    assert list(read_test(TASKS["MNLI"], tmp_path)) == ["MNLI-m.tsv", "MNLI-mm.tsv"]
    write(tmp_path, "diagnostic", diagnostic=text)
    assert list(read_test(TASKS["MNLI"], tmp_path)) == ["MNLI-m.tsv", "MNLI-mm.tsv", "AX.tsv"]
    said = r"test\.tsv: no such file; --predict-test needs"
    refused(said, read_test, TASKS["RTE"], write(tmp_path, "RTE", train=RTE))


def test_truncation_takes_from_the_longer_side():
    sides = [[1, 2, 3, 4, 5], [6, 7]]
    truncate(sides, 5)
    assert sides == [[1, 2, 3], [6, 7]]
    truncate(sides, 3)
    assert sides == [[1, 2], [6]]


def test_rows_are_ordered_and_every_one_comes_exactly_once_padded_to_the_longest_of_its_batch():
    rng = np.random.default_rng(0)
    examples = [Example((" ".join("x" * rng.integers(1, 30)),), float(index % 2)) for index in range(101)]
    encoded = encode(TASKS["SST-2"], examples, WordTokenizer(), 24)
    for order in (train_order(encoded, 8, seed=1, epoch=0), dev_order(encoded, 8)):
        assert sorted(np.concatenate(order)) == list(range(101))
        assert max(map(len, order)) == 8
    first, again, *others = (
        np.concatenate(train_order(encoded, 8, *draw)).tolist() for draw in ((1, 0), (1, 0), (1, 1), (2, 0))
    )
    assert first == again and first not in others
    order = train_order(encoded, 8, seed=0, epoch=0)
    assert len(encoded.pieces) / sum(len(each) * max(encoded.lengths[each]) for each in order) > 0.85
    for order in dev_order(encoded, 8):
        batch = pad_batch(encoded, order)
        lengths = [len(row_of(encoded, row)[0]) for row in order]
        assert batch.input_ids.shape == (len(order), max(lengths))
        assert (batch.document_ids.sum(axis=1) == lengths).all()
        for index, (row, length) in enumerate(zip(order, lengths, strict=True)):
            assert batch.input_ids[index, :length].tolist() == row_of(encoded, row)[0]
            assert batch.position_ids[index].tolist() == [*range(length), *[0] * (max(lengths) - length)]


def test_the_table_of_tasks_is_consistent():
    for task in TASKS.values():
        assert task.metric in KINDS[task.kind].metrics, task
        assert (task.kind == "regression") == (task.label_range is not None) == (not task.labels), task
        assert list(task.labels) == sorted(task.labels), task
        assert task.columns is None or {*task.text_columns, task.label_column} <= set(task.columns), task


def test_official_row_counts(tmp_path):
    archived = SHARED / "glue.tar.xz"
    if not archived.is_file():
        pytest.skip(f"the official files are not at hand ({archived})")
    with tarfile.open(archived) as archive:
        archive.extractall(tmp_path, filter="data")
    sizes_of = {"CoLA": (8551, 1043), "SST-2": (67349, 872), "MRPC": (3668, 408), "STS-B": (5749, 1500)}
    for name, sizes in (sizes_of | {"RTE": (2490, 277)}).items():
        data = read_task(TASKS[name], tmp_path / "glue")
        assert (len(data.train), len(data.dev["dev"])) == sizes, name
        assert TASKS[name].dev_examples == sizes[1]
    path = tmp_path / "glue" / "QNLI" / "dev.tsv"  # without a training file
    assert len(read_examples(TASKS["QNLI"], path, path.read_bytes())) == TASKS["QNLI"].dev_examples == 5463


QUICK = ("--epochs", "1", "--seeds", "1", "--predict-test")


def test_wrong_arguments_and_bad_data_are_refused_before_the_encoder_is_loaded(glue_dir, out, tmp_path, monkeypatch):
    for wrong, said in (
        ("--bf16 --fp16", "--bf16 and --fp16 exclude each other"),
        ("--start-from-task MNLI", "MNLI: --tasks must name at least one of RTE, MRPC, STS-B"),
    ):
        wrong_arguments(said, main, arguments(glue_dir, tmp_path, out, *wrong.split()))
    wrong_arguments("--data-dir is needed", main, ["--output-dir", str(out), "--load", "x"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    said = "--fp16 needs a GPU; leave --fp16 out"
    wrong_arguments(said, main, arguments(glue_dir, tmp_path, out, "--fp16"))
    (glue_dir / "CoLA" / "dev.tsv").write_text("made\t2\t\tred cat runs\n")
    said = r"dev\.tsv, line 1: label '2', expected one of 0, 1"
    refused(said, main, arguments(glue_dir, tmp_path / "no-such-encoder", out))


def test_the_best_epoch_is_told_and_the_submission_has_glues_format(three_tasks, bert_folder, out, capsys):
    """A test set is predicted anew once it has changed."""
    tasks = ["--tasks", "CoLA", "STS-B", "MNLI"]
    command = arguments(three_tasks, bert_folder, out, "--epochs", "2", *tasks, "--predict-test")
    main(command)
    said = capsys.readouterr().out
    wanted = "the server also wants RTE.tsv, MRPC.tsv, SST-2.tsv, QNLI.tsv, QQP.tsv, AX.tsv, WNLI.tsv"
    assert wanted in said and "test predictions [" in said
    for row in rows(out):
        assert [*row.get("other_scores", {})] == ["dev_mismatched"] * (row["task"] == "MNLI")
        assert row["epoch_scores"][-1] == row["score"] and row["metric"] == TASKS[row["task"]].metric
        assert row["epoch_scores"][row["best_epoch"] - 1] == row["best_epoch_score"] == max(row["epoch_scores"])
    of_mnli = {"contradiction", "entailment", "neutral"}
    labels = {"CoLA.tsv": {"0", "1"}, "MNLI-m.tsv": of_mnli, "MNLI-mm.tsv": of_mnli, "STS-B.tsv": None}
    files = archived(out / "submission")
    assert sorted(files) == sorted(labels)
    for name, text in files.items():
        assert text == (out / "submission" / name).read_bytes()
        indices, told = zip(*(line.split("\t") for line in text.decode().splitlines()), strict=True)
        assert indices == ("index", *map(str, range(13))) and told[0] == "prediction"
        assert {*told[1:]} <= labels[name] if labels[name] else all(0 <= float(one) <= 5 for one in told[1:])
    best = max((row for row in rows(out) if row["task"] == "MNLI"), key=lambda row: row["score"])
    assert json.loads((out / "submission" / "MNLI.json").read_text())["dev_score"] == best["score"]
    main(command)
    assert "test predictions [" not in capsys.readouterr().out
    path = three_tasks / "CoLA" / "test.tsv"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:8]))
    main(command)
    assert "test predictions [1/1]" in capsys.readouterr().out
    assert len(archived(out / "submission")["CoLA.tsv"].splitlines()) == 8


@pytest.mark.parametrize("checkpoint_folder", ["ddrp"], indirect=True)
def test_some_tasks_start_from_the_best_model_of_another(three_tasks, bert_folder, checkpoint_folder, out, capsys):
    loads = [str(bert_folder), str(checkpoint_folder)]
    more = [*QUICK, "--tasks", "CoLA", "STS-B", "--start-from-task", "MNLI", "--load", *loads]
    main(arguments(three_tasks, bert_folder, out, *more, "--dry-run"))
    printed = capsys.readouterr().out
    for told in (
        *(f"{bert_folder}, from MNLI", "missing: none; not used:", "new in every run: the task's head"),
        "2 encoders x 1 task x 1 grid point x 1 seed = 2 runs on",
        "CoLA      2 runs of 64 train, 21 dev",
        f"  time left: not known until the first run of {bert_folder} is finished",
    ):
        assert told in printed
    assert not out.exists()
    main(arguments(three_tasks, bert_folder, out, *more))
    found = {(row["task"], row["load"], row["encoder"]) for row in rows(out)}
    expected = {(task, load) for task in ("CoLA", "MNLI") for load in loads}
    assert {(task, load) for task, load, _ in found} == expected | {("STS-B", f"{load}, from MNLI") for load in loads}
    assert len({encoder for *_, encoder in found}) == 4
    assert f"| {bert_folder}, from MNLI |" in (out / "table.md").read_text()
    folders = list(out.glob("submission*"))
    assert [sorted(archived(folder)) for folder in folders] == 2 * [
        ["CoLA.tsv", "MNLI-m.tsv", "MNLI-mm.tsv", "STS-B.tsv"]
    ]
    assert {json.loads((folder / "encoder.json").read_text())["name"] for folder in folders} == {*loads}
    (out / "runs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(out)[:-1]))
    capsys.readouterr()
    main(arguments(three_tasks, bert_folder, out, *more))
    assert "1 of 2 runs to do" in capsys.readouterr().out and len(rows(out)) == 6
    main(arguments(three_tasks, bert_folder, out, *more, "--lr", "1e-5"))
    shown = json.loads((out / "table.json").read_text())["encoders"][str(bert_folder)]["tasks"]
    assert {task: cell["point"]["lr"] for task, cell in shown.items()} == {"CoLA": 1e-5, "MNLI": 1e-5}
    shutil.rmtree(out / "models")
    reason = f"--start-from-task MNLI: the best run of {bert_folder}, MNLI-.*, kept no model in"
    refused(reason, main, arguments(three_tasks, bert_folder, out, *more))


def test_the_flags_of_training_reach_the_run(glue_dir, bert_folder, out, capsys):
    """32 training rows are half as many steps as all 64, and 3, fewer than a batch, are one step per epoch."""
    flags = ["--seeds", "1", "--epochs", "1", "--layerwise-lr-decay", "0.5", "--micro-batch-size", "3", "--random-init"]
    command = arguments(glue_dir, bert_folder, out, *flags, "--max-seq-length", "500")
    for more in ([], ["--max-train-examples", "32"], ["--max-train-examples", "3", "--epochs", "2"]):
        main([*command, *more])
    found = rows(out)
    assert [(row["train_examples"], row["steps"]) for row in found] == [(64, 8), (32, 4), (3, 2)]
    assert "1 runs of 3 train, 21 dev" in capsys.readouterr().out
    assert {(row["layerwise_lr_decay"], row["micro_batch_size"]) for row in found} == {(0.5, 3)}
    assert {row["load"] for row in found} == {f"{bert_folder}, random weights"}
    assert {row["max_seq_length"] for row in found} == {load_encoder(bert_folder).max_length} != {500}


def archived(folder):
    with zipfile.ZipFile(folder / "submission.zip") as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_server_gets_numbers_within_the_range_and_names_of_classes(tmp_path):
    """STS-B's scores are 0 to 5; a row without a prediction gets 0."""
    path = tmp_path / "x.tsv"
    write_test_predictions(path, TASKS["STS-B"], np.array([-0.25, 2.5, 5.125, np.nan, np.inf]))
    header, *lines = (line.split("\t") for line in path.read_text().splitlines())
    assert header == ["index", "prediction"] and [line[0] for line in lines] == ["0", "1", "2", "3", "4"]
    assert [float(line[1]) for line in lines] == [0, 2.5, 5, 0, 5]
    write_test_predictions(path, TASKS["RTE"], np.array([1, 0]))
    assert path.read_text() == "index\tprediction\n0\tnot_entailment\n1\tentailment\n"


def test_a_second_encoder_gets_a_submission_of_its_own(three_tasks, bert_folder, out, tmp_path, capsys):
    other, plain = write_bert(tmp_path / "other", spread=0.3), out / "submission"
    main(arguments(three_tasks, bert_folder, out, *QUICK))
    first = archived(plain)
    main(arguments(three_tasks, other, out, *QUICK))
    (second,) = out.glob("submission-*")
    assert archived(plain) == first and archived(second).keys() == first.keys() == {"CoLA.tsv"}
    told = f"{second / 'submission.zip'}; {plain} keeps those of another encoder"
    assert f"test predictions of {other}: written to {told}" in capsys.readouterr().out
    owner = json.loads((second / "encoder.json").read_text())
    assert (owner["name"], f"submission-{owner['encoder']}") == (str(other), second.name)
    main(arguments(three_tasks, bert_folder, out, *QUICK, "--tasks", "STS-B"))
    assert archived(plain).keys() == {"CoLA.tsv", "STS-B.tsv"}
