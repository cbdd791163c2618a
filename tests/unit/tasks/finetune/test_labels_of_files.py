"""Labels as people write them in tables: what is refused, what is warned of, and which of two is positive."""

import hashlib
import json

import pytest

from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.options import TaskFiles
from megatron_ddrp.tasks.finetune.runs import Cell
from megatron_ddrp.tasks.finetune.table_files import Task
from megatron_ddrp.tasks.finetune.task_files import read_task


@pytest.fixture
def read(tmp_path):
    """Read a task whose rows have these labels."""

    def read(labels, **more):
        path = tmp_path / "train.csv"
        path.write_text("text,label\n" + "".join(f'x,"{label}"\n' for label in labels))
        return read_task(TaskFiles(train=path, valid=path, **more))

    return read


@pytest.fixture
def read_lists(tmp_path):
    """Read a task whose rows have these lists as labels."""

    def read_lists(labels):
        path = tmp_path / "train.jsonl"
        path.write_text("".join(json.dumps({"text": "x", "labels": each}) + "\n" for each in labels))
        return read_task(TaskFiles(train=path, valid=path))

    return read_lists


def fault(read, *labels, **more):
    with pytest.raises(UserError) as refused:
        read(labels, **more)
    assert "\n" not in str(refused.value)
    return str(refused.value).rpartition("/")[2]


def test_a_list_in_a_table_is_no_label(read):
    told = fault(read, "A|B", '[""A"", ""B""]', kind="multi-label")
    assert told == 'train.csv, line 3: label is \'["A", "B"]\', expected labels with | between them, such as A|B'


def test_numbers_with_a_decimal_comma_are_no_classes(read):
    told = "train.csv: labels look like numbers with a decimal comma, such as 1,5; write 1.5, or name the kind by "
    assert fault(read, "1,5", "2,5").startswith(told)
    assert read(["1,5", "2,5"], kind="classification").task.labels == ("1,5", "2,5")
    assert read(["1,5", "x"]).task.labels == ("1,5", "x")
    told = fault(read, "1,5", kind="regression")
    assert told == "train.csv, line 2: label is '1,5', expected a number such as 1.5, with a decimal point"


@pytest.mark.parametrize(
    ("labels", "order"),
    [
        (["+1", "-1"], ("-1", "+1")),
        (["1", "-1"], ("-1", "1")),
        (["1.0", "-1.0"], ("-1.0", "1.0")),
        (["+1", "+0"], ("+0", "+1")),
        (["1e0", "-1e0"], ("-1e0", "1e0")),
        (["10", "+9", "-10"], ("-10", "+9", "10")),
        ([str(10**20 + 1), str(10**20)], (str(10**20), str(10**20 + 1))),
        (["+1", "-1", "x"], ("+1", "-1", "x")),
    ],
)
def test_labels_that_are_numbers_are_sorted_by_size(read, labels, order):
    data = read(labels, kind="classification", **({"metric": "f1"} if len(order) == 2 else {}))
    assert data.task.labels == order
    if len(order) == 2:
        assert data.facts[0].startswith(f"classification, f1 of {order[1]!r}; ")


def test_a_label_that_float32_does_not_hold_is_refused(read):
    told = fault(read, "1.5", "1e39", kind="regression")
    assert told == "train.csv, line 3: label is '1e39', expected at most 3.40282e+38 in size; use another unit"


@pytest.mark.parametrize("pair", [("A", "A "), ("O\u0308ff", "\u00d6ff")])
def test_labels_that_look_alike_are_warned_of(read, pair):
    (told,) = (fact for fact in read(["B", *pair]).facts if "Unicode" in fact)
    assert told.startswith("WARNING, labels that differ only in blanks or Unicode form are different classes: ")
    assert all(ascii(label) in told for label in pair) and told.isascii()
    assert not any("Unicode" in fact for fact in read(["B", "A", "a"]).facts)


def test_f1_of_two_classes_names_the_positive_one(read):
    data = read(["ja", "nein"], metric="f1")
    assert data.facts[0] == "classification, f1 of 'nein'; text from text, label from label"
    assert data.task.metric == "f1"
    assert Cell("t", [{"metric": "f1", "facts": data.task.facts}]).score_name == "f1 of 'nein'"
    assert Cell("MRPC", [{"metric": "f1"}]).score_name == "f1"
    assert KINDS["multi-label"].score_name(Task("t", "f1", "multi-label", ("a", "b"))) == "f1"


@pytest.fixture
def read_tags(tmp_path):
    """Read a task whose training rows are `train`, and whose validation rows are `valid`: tags with blanks between."""

    def read_tags(train, valid, metric="seqeval-strict"):
        paths = [tmp_path / f"{name}.jsonl" for name in ("train", "valid")]
        for path, rows in zip(paths, (train, valid), strict=True):
            tags = [[tag if tag == "O" else f"{tag}-PER" for tag in row.split()] for row in rows]
            path.write_text("".join(json.dumps({"tokens": ["x"] * len(row), "tags": row}) + "\n" for row in tags))
        return read_task(TaskFiles(*paths, metric=metric))

    read_tags.folder = tmp_path
    return read_tags


@pytest.mark.parametrize(
    ("train", "valid", "scheme", "broken"),
    [
        ("O B I B", "B I O B B", "IOB2", ""),
        ("B I O", "B I O I I B", "IOB2", "1 of 2, such as I- I- B-"),
        ("O I E E", "I E O E", "IOE2", ""),
        ("O I E", "I E O E I", "IOE2", "1 of 2, such as E- I-"),
        ("B I E S O", "S O B E", "IOBES", ""),
        ("B I E S O", "S I O I I", "IOBES", "2 of 2"),
        ("B I L U O", "B O U", "BILOU", "1 of 2"),
        ("O B I", "O O", "IOB2", ""),
    ],
)  # fmt: skip
def test_the_plan_names_the_scheme_of_tags_and_counts_what_breaks_it(read_tags, train, valid, scheme, broken):
    facts = read_tags([train], [valid]).facts
    assert facts[0] == f"tokens, seqeval-strict ({scheme}); text from tokens, label from tags"
    told = [fact for fact in facts if "break the rules" in fact]
    count, _, example = broken.partition(",")
    told_count = (
        f"valid: WARNING, {count} groups of neighbouring tags of one type break the rules of {scheme},{example}"
    )
    assert len(told) == bool(broken) and all(fact.startswith(told_count) for fact in told)


@pytest.mark.parametrize(
    ("train", "valid", "metric", "reason"),
    [
        ("O B I", "I O I I B O I", "seqeval-strict", "valid.jsonl: its tags are of IOB1, for which --metric seqeval-"),
        ("O I E", "I O I E I O I", "seqeval-strict", "valid.jsonl: its tags are of IOE1, for which --metric seqeval-"),
        ("O I", "I O", "seqeval-strict", "train.jsonl: tags with I- have no strict rules, expected IOB2 (B- I-), IOE2"),
        ("B I E L", "B E", "seqeval-strict", "train.jsonl: tags with B- E- I- L- have no strict rules, expected IOB2"),
        ("O B M E", "O", "seqeval-strict", "train.jsonl: tag 'M-PER', expected O, or B- or I- and a type, such as"),
        (
            "O B M E",
            "O",
            "seqeval",
            "train.jsonl: tag 'M-PER', expected O, or B- or I- and a type, such as B-PER (also",
        ),
        ("B L U O", "B", "seqeval", "train.jsonl: tags of BILOU have only strict rules; use --metric seqeval-strict"),
    ],
)
def test_tags_without_rules_are_refused_by_name(read_tags, train, valid, metric, reason):
    with pytest.raises(UserError) as refused:
        read_tags([train], [valid], metric)
    assert reason in str(refused.value) and "\n" not in str(refused.value)


def test_runs_that_earlier_versions_scored_by_other_rules_are_done_again(read_tags):
    """They scored all tags as IOB2, and the digest of a task was that of its facts, columns and files."""
    for rows, is_same in ((["B I O"], True), (["B E O"], False)):
        data = read_tags(rows, rows)
        before = hashlib.sha256(json.dumps([data.task.facts, list(data.columns)]).encode())
        before.update(2 * hashlib.sha256((read_tags.folder / "train.jsonl").read_bytes()).digest())
        assert (data.digest == before.hexdigest()) == is_same


@pytest.mark.parametrize("vector", [[1, 0, 0], [0, 0], [True, False, True], [1, 1]])
def test_a_vector_of_0_and_1_is_no_list_of_labels(read_lists, vector):
    assert read_lists([[3, 1], [1], [], [0]]).task.labels == ("0", "1", "3")
    with pytest.raises(UserError, match=r"train\.jsonl, line 2: label is .*, a vector of 0 and 1; write a list of the"):
        read_lists([[1], vector])


def test_vectors_of_two_classes_are_no_lists_of_labels(read_lists):
    """Read as lists, [0, 1] and [1, 0] both have the labels 0 and 1, and a model that always says both is perfect."""
    with pytest.raises(UserError, match=r"train\.jsonl: every row has the labels 0 and 1, as vectors of 0 and 1 do"):
        read_lists([[0, 1], [1, 0]])
    assert read_lists([[0, 1], [1]]).task.labels == ("0", "1")
    assert read_lists([["a", "b"]]).task.labels == ("a", "b")


@pytest.fixture
def read_two(tmp_path):
    """Read a task from the texts of a training and a validation file."""

    def read_two(train, valid, ending=".csv", **more):
        paths = [tmp_path / f"{name}{ending}" for name in ("train", "valid")]
        for path, text in zip(paths, (train, valid), strict=True):
            path.write_text(text)
        return read_task(TaskFiles(*paths, **more))

    return read_two


@pytest.mark.parametrize(
    ("metric", "train", "valid", "is_told"),
    [
        ("matthews", "no yes", "yes yes", True),
        ("f1", "no yes", "no no", True),
        ("f1", "no yes", "no yes", False),
        ("accuracy", "no yes", "yes yes", False),
        ("pearson", "1.5 2.5", "2.5 2.5", True),
        ("spearman", "1.5 2.5", "1.5", True),
        ("pearson", "1.5 2.5", "1.5 3.5", False),
    ],
)
def test_labels_on_which_no_model_has_a_score_are_warned_of(read_two, metric, train, valid, is_told):
    kind = "regression" if "." in train else "classification"
    rows = ["text,label\n" + "".join(f"x,{label}\n" for label in labels.split()) for labels in (train, valid)]
    told = f"valid: WARNING, no model scores above 0 by {metric} on its labels: they are all alike, or none is positive"
    assert (told in read_two(*rows, metric=metric, kind=kind).facts) == is_told


@pytest.mark.parametrize("metric", ["seqeval", "seqeval-strict"])
def test_validation_tags_without_an_entity_are_warned_of(read_tags, metric):
    for valid, is_told in (["O O"], True), (["O B"], False):
        facts = read_tags(["O B I"], valid, metric).facts
        assert any(f"no model scores above 0 by {metric}" in fact for fact in facts) == is_told


def test_decimals_behind_the_rows_of_the_guess_are_no_classes(read):
    whole = [str(number % 5) for number in range(1000)]
    told = "train.csv: labels look like whole numbers in the first rows and like 2.5 in later ones; name the kind by "
    assert fault(read, *whole, "2.5").startswith(told)
    assert len(read([*whole, "2.5"], kind="classification").task.labels) == 6
    assert read([*whole, "2.5"], kind="regression").task.labels == ()


def test_whole_numbers_with_a_point_are_said_to_be_no_classes(read):
    """pandas writes whole numbers so once one of them was missing."""
    told = "valid: all labels are whole numbers; if they are classes, name another --kind than regression"
    assert told in read(["1.0", "0.0"]).facts
    assert told not in read(["1.0", "0.5"]).facts and told not in read(["1.0", "0.0"], kind="regression").facts


def test_quotation_marks_that_a_program_has_put_into_a_tsv_are_warned_of(read_two):
    rows = 'text\tlabel\n"He said ""no""."\tA\n"open\tB\n"whole"\tA\n"a" and "b"\tB\n'
    told = "train: WARNING, 1 rows have texts in quotation marks with doubled marks inside; in .tsv they are text"
    assert [fact[: len(told)] for fact in read_two(rows, rows + "x\tA\n", ".tsv").facts if "marks" in fact] == [
        told,
        told.replace("train", "valid"),
    ]
    rows = 'text,label\n"""He said """"no"""".""",A\nx,B\n'  # quoted again, so that the marks are text here too
    assert not any("marks" in fact for fact in read_two(rows, rows).facts)


@pytest.mark.parametrize(
    ("labels", "is_told"),
    [("-1 0 1 2", True), ("-1 0 1 2 3", True), ("-1 0 1", False), ("0 1 2 3", False), ("-2 -1 0 1", False)],
)
def test_the_mark_of_rows_without_a_label_is_no_silent_class(read, labels, is_told):
    """SNLI has it; three labels from -1 may be a scale from negative to positive."""
    told = "WARNING, label -1 is how Hugging Face's datasets mark rows without a label; it is a class here: remove "
    assert (f"{told}these rows" in read(labels.split()).facts) == is_told
    told_of_a_scale = told.replace("remove", "unless the labels are a scale, remove") + "these rows"
    assert (told_of_a_scale in read(labels.split()).facts) == (set(labels.split()) == {"-1", "0", "1"})


@pytest.mark.parametrize(
    ("header", "read_as"),
    [
        ("index,question,sentence,label", "question + sentence"),
        ("index,sentence,question,label", "question + sentence"),
        ("index,question,context,label", "question + context"),
        ("index,sentence,other,label", "sentence"),
        ("index,question,other,label", "question"),
        ("text,question,sentence,label", "text"),
    ],
)
def test_a_question_and_its_sentence_are_a_pair(read_two, header, read_as):
    """GLUE's QNLI has these columns, and its sentences alone do not decide the labels."""
    rows = header + "\n0,x,y,A\n1,z,w,B\n"
    assert f"text from {read_as}, label" in read_two(rows, rows).facts[0]


def test_a_test_file_that_is_the_validation_file_is_told(read_two, tmp_path):
    rows = "text,label\nx,A\ny,B\n"
    facts = read_two(rows, rows + "z,A\n", test=tmp_path / "valid.csv").facts
    assert [fact for fact in facts if "same file" in fact] == [
        "test: WARNING, the same file as valid; its score says nothing about new rows"
    ]


def test_words_have_no_second_text_and_their_tags_may_be_ner_tags(read_two):
    rows = json.dumps({"tokens": ["red", "cat"], "ner_tags": ["B-A", "O"], "label": "x", "more": "a text"}) + "\n"
    data = read_two(rows, rows, ".jsonl")
    assert data.facts[0] == "tokens, seqeval; text from tokens, label from ner_tags"
    with pytest.raises(UserError, match=r"line 1: --text-pair-column more: words have no second text; leave the flag"):
        read_two(rows, rows, ".jsonl", text_pair_column="more")


def test_a_score_of_a_plug_ins_metric_has_a_name_without_it():
    facts = Task("own", "kappa", "classification", ("a", "b")).facts
    row = {"task": "own", "score": 0.5, "dev_examples": 1, "metric": "own", "facts": facts | {"kind": "own"}}
    assert Cell("own", [row]).score_name == "own"


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"text_column": "label"}, "column 'label' is --text-column and --label-column at once"),
        ({"label_column": "text"}, "column 'text' is --text-column and --label-column at once"),
        ({"text_pair_column": "label"}, "column 'label' is --text-pair-column and --label-column at once"),
        ({"text_pair_column": "text"}, "column 'text' is --text-column and --text-pair-column at once"),
        ({"text_column": "x", "label_column": "x", "kind": "tokens"}, "column 'x' is --text-column and --label-column"),
        (
            {"text_pair_column": "question", "kind": "qa", "text_column": "question"},
            "column 'question' is --text-column",
        ),
    ],
)
def test_a_column_with_two_uses_is_refused(read, columns, told):
    with pytest.raises(UserError, match=told) as refused:
        read(["A", "B"], **columns)
    assert refused.value.exit_code == 2
