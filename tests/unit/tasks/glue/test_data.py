"""The table of tasks, and reading, encoding and batching of GLUE's files."""

import re
import tarfile

import numpy as np
import pytest

from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.data.tokenizers.tokenizer import FIRST, SECOND, RowForm, usual_rows
from megatron_ddrp.encoders.rows import dev_order, pad_batch, train_order, truncate
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.table_files import Example
from megatron_ddrp.tasks.glue import PAPER_TASKS, TASKS, read_examples, read_task, read_test
from tests.datasets import SHARED
from tests.refusals import refused


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


def texts_of(examples):
    return [example.texts for example in examples]


COLA = 'gj04\t1\t\tHe said "go" and left.\ngj04\t0\t*\tHe said go and left\x85 .\n'
STSB = "index\tsentence1\tsentence2\tscore\n0\tA plane.\tAn air plane.\t4.750\n1\tA man.\tA dog.\t0.000"
RTE = "index\tsentence1\tsentence2\tlabel\n0\ta b c\td e\tentailment\n1\tf\tg\tnot_entailment\n"


SCORE = r"line 2: label .* expected a number from 0 to 5"


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


BAD_FILES = [
    ("RTE", RTE, RTE.replace("sentence2", "sentence_2"), r"dev\.tsv, line 2: no column 'sentence2', it has index"),
    ("RTE", RTE, RTE.replace("\tnot_entailment", ""), r"dev\.tsv, line 3: 3 columns, expected 4"),
    ("RTE", RTE, RTE.replace("\tentailment", "\tyes"), r"line 2: label 'yes', expected one of entailment, not_ent"),
    ("RTE", RTE, None, r"dev\.tsv: no such file; RTE needs train\.tsv, dev\.tsv"),
    *(("STS-B", STSB, STSB.replace("4.750", label), SCORE) for label in ("5.2", "nan", "high", "")),
]


def test_errors_name_file_line_and_expectation(tmp_path):
    for number, (task, train, dev, words) in enumerate(BAD_FILES):
        folder = write(tmp_path / str(number), task, train=train, **({"dev": dev} if dev else {}))
        error = refused(words, read_task, TASKS[task], folder)
        assert str(folder / task / "dev.tsv") in str(error)


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
    assert texts_of(read_examples(TASKS["QQP"], path, raw, 1)) == [("a", "b"), ("d", "e")]
    refused("line 3: 4 columns", read_examples, TASKS["QQP"], path, raw)


FUNNEL = RowForm(((1, 2), (FIRST, 0), (2, 0)), ((1, 2), (FIRST, 0), (2, 0), (SECOND, 1), (2, 1)))
T5 = RowForm(((FIRST, 0), (2, 0)), ((FIRST, 0), (2, 0), (SECOND, 0), (2, 0)))


def test_the_tokenizer_decides_the_separators_and_segments_of_rows():
    for rows, pair, segments, single in (
        (usual_rows(1, 2, True), [1, 11, 11, 2, 2, 11, 11, 2], [0] * 8, [1, 11, 11, 11, 2]),
        (FUNNEL, [1, 11, 11, 11, 2, 11, 11, 2], [2, 0, 0, 0, 0, 1, 1, 1], [1, 11, 11, 11, 2]),
        (T5, [11, 11, 11, 2, 11, 11, 2], [0] * 7, [11, 11, 11, 2]),
    ):
        tokenizer = WordTokenizer()
        tokenizer.rows = rows
        encoded = encode(TASKS["RTE"], [Example(("a b c", "d e"), 0)], tokenizer, 8)
        assert row_of(encoded, 0) == (pair, segments)
        assert row_of(encode(TASKS["SST-2"], [Example(("a b c",), 0)], tokenizer, 8), 0)[0] == single


def test_test_sets_have_headers_and_no_labels_and_a_missing_one_is_named(tmp_path):
    """MNLI has two, and the diagnostic one where it is."""
    write(tmp_path, "CoLA", test="index\tsentence\n0\tShe left.\n1\tLeft she.\n")
    found = read_test(TASKS["CoLA"], tmp_path)
    assert list(found) == ["CoLA.tsv"] and texts_of(found["CoLA.tsv"]) == [("She left.",), ("Left she.",)]
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
    assert len(encoded.pieces) / sum(len(rows) * max(encoded.lengths[rows]) for rows in order) > 0.85
    for rows in dev_order(encoded, 8):
        batch = pad_batch(encoded, rows)
        lengths = [len(row_of(encoded, row)[0]) for row in rows]
        assert batch.input_ids.shape == (len(rows), max(lengths))
        assert (batch.document_ids.sum(axis=1) == lengths).all()
        assert (batch.labels == IGNORED_LABEL).all()
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            assert batch.input_ids[index, :length].tolist() == row_of(encoded, row)[0]
            assert batch.position_ids[index].tolist() == [*range(length), *[0] * (max(lengths) - length)]
            assert encoded.targets[row] == row % 2


def test_the_table_of_tasks_is_consistent_and_the_paper_averages_eight_without_wnli():
    for task in TASKS.values():
        assert task.metric in KINDS[task.kind].metrics, task
        assert (task.kind == "regression") == (task.label_range is not None) == (not task.labels), task
        assert list(task.labels) == sorted(task.labels), task
        assert task.columns is None or {*task.text_columns, task.label_column} <= set(task.columns), task
    assert PAPER_TASKS == ("RTE", "STS-B", "MRPC", "CoLA", "SST-2", "QNLI", "QQP", "MNLI") and "WNLI" in TASKS


OFFICIAL = {
    **{("CoLA", "train.tsv"): 8551, ("CoLA", "dev.tsv"): 1043, ("SST-2", "train.tsv"): 67349},
    **{("SST-2", "dev.tsv"): 872, ("MRPC", "train.tsv"): 3668, ("MRPC", "dev.tsv"): 408},
    **{("STS-B", "train.tsv"): 5749, ("STS-B", "dev.tsv"): 1500, ("RTE", "train.tsv"): 2490},
    **{("RTE", "dev.tsv"): 277, ("QNLI", "dev.tsv"): 5463},
}


def test_official_row_counts(tmp_path):
    archived = SHARED / "glue.tar.xz"
    if not archived.is_file():
        pytest.skip(f"the official files are not at hand ({archived})")
    with tarfile.open(archived) as archive:
        archive.extractall(tmp_path, filter="data")
    found = {}
    for name, file in OFFICIAL:
        path = tmp_path / "glue" / name / file
        found[name, file] = len(read_examples(TASKS[name], path, path.read_bytes(), TASKS[name].broken_rows))
    assert found == OFFICIAL
    assert all(TASKS[name].dev_examples == rows for (name, file), rows in OFFICIAL.items() if file == "dev.tsv")
