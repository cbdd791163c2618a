"""Labels as people write them in tables: what is refused, what is warned of, and which of two is positive."""

import pytest

from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks.finetune.cells import Cell
from megatron_ddrp.tasks.finetune.task import Task
from megatron_ddrp.tasks.finetune.task_files import read_task
from megatron_ddrp.tasks.finetune.task_options import TaskFiles


@pytest.fixture
def read(tmp_path):
    """Read a task whose rows have these labels."""

    def read(labels, **more):
        path = tmp_path / "train.csv"
        path.write_text("text,label\n" + "".join(f'x,"{label}"\n' for label in labels))
        return read_task(TaskFiles(train=path, valid=path, **more))

    return read


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
    assert Task("t", "f1", "multi-label", ("a", "b")).score_name == "f1"
