"""Rows of every format, what each format keeps, every fault in one line, and memory that does not grow."""

import bz2
import gzip
import json
import os
import re
import threading
import tracemalloc

import pyarrow
import pytest
from pyarrow import parquet

from megatron_ddrp.data.preprocess.documents import iter_chunks, iter_documents
from megatron_ddrp.data.preprocess.inputs import InputFile, OpenInput
from megatron_ddrp.data.preprocess.records import parse_chunk
from megatron_ddrp.tasks.finetune.table_files import columns_of, conll_text, read_rows
from tests.refusals import refused

ROWS = [{"text": "Rain, soon.", "label": "weather"}, {"text": 'She said "no"\n\u2028twice', "label": "talk"}]


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


def cells(path, columns=()):
    return [row.cells for row in read_rows(path, columns)]


def places(path):
    """Return where each row is in its file, and its cells."""
    return [(row.where.removeprefix(f"{path}, "), row.cells) for row in read_rows(path)]


def fault(path, columns=()):
    error = refused(f"^{re.escape(path)}", lambda: list(read_rows(path, columns)))
    return str(error).removeprefix(path)


def test_csv_keeps_what_quotes_hold_and_tsv_has_no_quotes(write):
    quoted = ('"{text}","{label}"\r\n'.format(**{k: v.replace('"', '""') for k, v in row.items()}) for row in ROWS)
    path = write("a.csv", "\ufefftext,label\r\n" + "".join(quoted) + "\r\n" + "last,one")
    rows = [*ROWS, {"text": "last", "label": "one"}]
    assert places(path) == [*zip(("line 2", "line 3", "line 6"), rows, strict=True)]
    assert columns_of(path) == ["text", "label"]
    found = places(write("b.csv", "text\none\n\ntwo\n\n\n"))
    assert found == [("line 2", {"text": "one"}), ("line 3", {"text": ""}), ("line 4", {"text": "two"})]
    path = write("a.tsv", '\ufefftext\tlabel\r\n"open\x85 and\u2028 so on\tx\r\n\t""\n')
    assert cells(path) == [{"text": '"open\x85 and\u2028 so on', "label": "x"}, {"text": "", "label": '""'}]


LAYOUTS = {
    **{"bracket": "[{a},\n{b}]\n", "blank": " [ {a}\n,\r\n {b} ] ", "lines": "[\n{a},\n{b}\n]"},
    **{"after": "{a}\n\n{b}\n", "beside": "{a} {b}", "commas": "{a},{b}"},
    **{"carriage": "{a}\r{b}\r", "lists": "[{a}]\n[{b}]\n"},
}


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_texts_and_tables_read_json_in_any_layout(write, layout, indent):
    """Brackets, quotation marks and escapes inside the texts are text, whatever the size of the blocks."""
    rows = [{"text": 'a "]},{[\\', "of": {"text": [1, {}]}}, {"text": 'ü \u2028 \\\\"', "of": []}]
    first, second = (json.dumps(row, indent=indent, ensure_ascii=False) for row in rows)
    path = write("a.json", "\ufeff" + LAYOUTS[layout].replace("{a}", first).replace("{b}", second))
    assert cells(path) == rows
    assert [text for (text,) in iter_documents([path])] == [row["text"] for row in rows]
    for size in (1, 7, 40):
        with OpenInput(InputFile(path, path)) as opened:
            parts = [parse_chunk(chunk, ["text"])[0] for chunk in iter_chunks(opened, ["text"], size)]
        assert [text for part in parts for (text,) in part] == [row["text"] for row in rows]


def test_json_lines_and_lists_of_objects(write):
    lines = "\n\n".join(json.dumps(row) for row in ROWS)
    packs = {"a.jsonl": bytes, "a.json": bytes, "a.jsonl.gz": gzip.compress, "a.json.bz2": bz2.compress}
    for name, pack in packs.items():
        path = write(name, pack(lines.encode()))
        assert places(path) == [("line 1", ROWS[0]), ("line 3", ROWS[1])]
    many = [{"text": f"{number} " * 20, "label": number} for number in range(3000)]  # are read in parts
    for rows, indent in ((ROWS, None), (ROWS, 2), (many, None)):
        found = places(write("a.json", json.dumps(rows, indent=indent)))
        assert found == [(f"row {number}", row) for number, row in enumerate(rows, 1)]


UNUSED = ["NaN", "-Infinity", "1e999", "7" * 400, '"\\ud83d"', '["\\ud83d"]']


@pytest.mark.parametrize("value", UNUSED, ids=["nan", "infinity", "large", "digits", "surrogate", "inside"])
def test_what_json_forbids_is_refused_only_in_the_columns_that_are_read(write, value):
    path = write("a.jsonl", f'{{"text": "a", "other": {value}}}\n')
    assert [row.cells["text"] for row in read_rows(path, ["text"])] == ["a"]
    assert columns_of(path) == ["text", "other"]
    if "ud83d" in value:
        assert ", line 1: key 'other' has half a surrogate pair" in fault(path, ["other"])


def test_the_first_line_of_excel_names_the_separator(write):
    row = {"text": "a", "label": "x"}
    for line in ("sep=,", '"sep=,"', "sep=,,", "SEP=, "):  # also as programs save it again
        assert cells(write("a.csv", f"{line}\r\ntext,label\r\na,x\r\n")) == [row]
    assert places(write("a.tsv", "\ufeffsep=\t\r\ntext\tlabel\r\na\tx\r\n")) == [("line 3", row)]
    assert fault(write("a.csv", "sep=;\na;b\n1;2\n")).startswith(", line 1: semicolon-separated")


TAGGED = "{first}1 CD O\n# # O\n\n# SYM O\nx NN B-X\n"


@pytest.mark.parametrize(
    "first", ["#id 3 x\n", "# id domain=en\n", "# newdoc\n", "# id 3\tdomain=en\n", "# text = 1 # .\n", "# id 3 x\n"]
)
def test_a_comment_in_conll_is_refused_by_its_line(write, first):
    assert fault(write("a.conll", TAGGED.format(first=first))).startswith(", line 1: a comment, expected only tokens")
    later = TAGGED.format(first="a NN O\n\n" + first)
    assert fault(write("a.conll", later)).startswith(", line 3: a comment, expected only tokens with tags; remove")


def test_a_first_column_of_conll_that_counts_the_words_is_refused(write):
    numbered = "1 Ab B-X O\n2 cd O O\n\n"
    assert fault(write("a.conll", "1 Ab O O\n\n" + numbered)).startswith(", line 3: the first column counts the words;")
    assert len(cells(write("a.conll", numbered.replace(" O\n", "\n").replace("1 Ab", "x Ab")))) == 1
    assert len(cells(write("a.conll", "Ab NN O\ncd NN O\n\n1 CD O\n2 CD O\n"))) == 2, (
        "a row of numbers behind a sentence"
    )


def test_parquet(write, tmp_path):
    columns = {"n": list(range(1300)), "tags": [["B-A", "O"]] * 1300, "text": [None, *["ü"] * 1299]}
    path = str(tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table(columns), path)
    rows = list(read_rows(path, ["tags", "n"]))
    assert [row.cells["n"] for row in rows] == columns["n"]
    assert rows[0].cells == {"n": 0, "tags": ["B-A", "O"], "text": None}
    assert rows[1299].where == f"{path}, row 1300"
    assert ": damaged, or not a Parquet file" in fault(write("b.parquet", "PAR1 no"))
    assert fault(write("c.parquet.gz", "")) == ": compressed Parquet; uncompress the file"
    assert fault(path, ["txt"]) == ", row 1: no column 'txt', it has n, tags, text; did you mean 'text'?"
    texts = pyarrow.array(["a"])
    parquet.write_table(pyarrow.Table.from_arrays([texts] * 3, ["text", "label", "text"]), path)
    assert fault(path) == ": column 'text' is twice in the header; rename one"
    struct = pyarrow.StructArray.from_arrays([texts] * 2, ["t", "t"])
    parquet.write_table(pyarrow.Table.from_arrays([struct], ["answers"]), path)
    assert "duplicate field names" in fault(path)


CONLL = "-DOCSTART- -X- -X- O\n\nEU NNP B-NP B-ORG\nrejects VBZ B-VP O\n\n\nPeter NNP B-NP B-PER\r\n \nlast X X O"


def test_conll_and_a_sign_that_begins_comments_elsewhere(write):
    expected = [
        {"tokens": ["EU", "rejects"], "tags": ["B-ORG", "O"]},
        {"tokens": ["Peter"], "tags": ["B-PER"]},
        {"tokens": ["last"], "tags": ["O"]},
    ]
    for name in ("a.conll", "a.txt"):
        assert places(write(name, CONLL)) == [*zip(("line 3", "line 7", "line 9"), expected, strict=True)]
    found = cells(write("b.conll", "New York\tO\n\u00a0x\u2028\tB-A\n"))
    assert found == [{"tokens": ["New York", "\u00a0x\u2028"], "tags": ["O", "B-A"]}]
    assert cells(write("c.conll", "only\ntokens\n\nhere\n")) == [{"tokens": ["only", "tokens"]}, {"tokens": ["here"]}]
    written = write("d.conll", "".join(conll_text(row["tokens"], row["tags"]) for row in expected))
    assert cells(written) == expected
    found = cells(write("a.conll", TAGGED.format(first="#hashtag NN B-tag\n")))
    assert [row["tokens"] for row in found] == [["#hashtag", "1", "#"], ["#", "x"]]
    assert cells(write("a.conll", "#one\ntwo\n\n#\n")) == [{"tokens": ["#one", "two"]}, {"tokens": ["#"]}]
    found = cells(write("a.conll", "# SYM\nnext X\n\n# #\n"))
    assert [row["tags"] for row in found] == [["SYM", "X"], ["#"]]


def test_conllu_gives_words_and_parts_of_speech(write):
    first = ["# text = vámonos", "1-2\tvámonos" + "\t_" * 8]
    words = [word + "\t_" * 6 for word in ("1\tvamos\tir\tVERB", "2\tnos\tyo\tPRON", "2.1\tx\tx\tX")]
    path = write("a.conllu", "\n".join([*first, *words, ""]))
    assert places(path) == [("line 3", {"tokens": ["vamos", "nos"], "tags": ["VERB", "PRON"]})]
    assert fault(write("b.conllu", "EU B-ORG\n")).startswith(", line 1: 1 columns, expected the 10 of CoNLL-U")


QUESTIONS = [
    {"id": "q1", "question": "Who?", "answers": [{"text": "Ada", "answer_start": 0}] * 2},
    {"id": "q2", "question": "When?", "answers": [], "is_impossible": True},
    {"id": "q3", "question": "Why?"},
]
CONTEXT = {"context": "Ada wrote it."}
ASKED = {"title": "U", "paragraphs": [CONTEXT | {"qas": QUESTIONS}]}
SQUAD = {"version": "v2.0", "data": [{"title": "T", "paragraphs": []}, ASKED]}


def test_squad(write):
    several = ({"text": ["Ada", "Ada"], "answer_start": [0, 0]}, {"text": [], "answer_start": []})
    flat = [{"id": row["id"], "question": row["question"]} | CONTEXT for row in QUESTIONS]
    flat[:2] = [row | {"answers": answers} for row, answers in zip(flat[:2], several, strict=True)]
    for indent in (None, 1):
        found = places(write("dev-v2.0.json", json.dumps(SQUAD, indent=indent)))
        assert found == [(f"question {row['id']}", row) for row in flat]
    assert cells(write("flat.jsonl", "\n".join(map(json.dumps, flat)))) == flat


UNQUOTED = "; a quotation mark may be unclosed, or not doubled inside a cell"
ONE_OBJECT = "; expected one object per line"
ENDINGS = ".jsonl, .json, .ndjson, .csv, .tsv, .parquet, .conll, .txt, .conllu, or"
LAYOUT = ", at or after its first question: another layout; expected SQuAD's"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", "", ": no rows, expected at least one"),
        ("a.jsonl", '{"a": 1}\n{"a": ', f", line 2: not JSON (Expecting value at column 7){ONE_OBJECT}"),
        ("a.jsonl", "3\n", ", line 1: a JSON int, expected one object per line"),
        ("a.json", '[{"a": 1}, 2]', ", row 2: a JSON int, expected one object per line"),
        ("a.json", "[" * 100_000, ": not JSON (a list is not closed"),
        ("a.json", '[{"a": ' + "[" * 100_000, ": not JSON (maximum recursion depth exceeded"),
        ("a.json", '[{"a": 1}]]', ": not JSON (a list is not closed, or closed twice"),
        ("a.json", '[{"a": 1},\n{"a": 2', ": not JSON (Expecting ',' delimiter: line 2 column 8 (char 18)); mend"),
        ("a.json", '[{"a": 1}] more', ": not JSON (Expecting value: line 1 column 12 (char 11))"),
        ("a.json", '{\n"a": 1\n}\n{\n"a":: 2\n}\n', ": not JSON (Expecting value: line 5 column 5 (char"),
        ("a.csv", "text,label\ra,x\rb,y\r", r": its lines end in \r alone; convert them: tr '\r' '\n'"),
        ("a.csv", "text,label\ra,x\nb,y\n", r", line 1: a line that ends in \r alone; convert it: tr '\r' '\n'"),
        ("a.csv", "text,a\n".encode("utf-16-le"), ": in UTF-16LE, expected UTF-8"),
        ("a.csv", " text ,label\n1,2\n", ", line 2: no column 'text', it has ' text ', label; did you mean ' text '?"),
        ("a.tsv", b"text\na\nb\xff\n", ", line 3: not UTF-8 (byte 0xff); save it as UTF-8"),
        ("a.csv", b"text\n\xe4", ", line 2: not UTF-8 (byte 0xe4); save it as UTF-8"),
        ("a.csv", "a,b\n1,2\n3\n", ", line 3: 1 columns, expected 2 (a, b); the row is cut off or not comma-separated"),
        ("a.tsv", "a\tb\n1\t2\t3\n", ", line 2: 3 columns, expected 2 (a, b); the row is cut off or not tab-separated"),
        ("a.csv", "a;b\nc, d;e\n", ", line 1: semicolon-separated; save it with commas, or as .tsv with tabs"),
        ("a.csv", "a\tb\nc\td\n", ", line 1: tab-separated; save it with commas, or as .tsv with tabs"),
        ("a.csv", "a,b,a\n1,2,3\n", ", line 1: column 'a' is twice in the header; rename one"),
        ("a.jsonl", '{"a": 1}\n{"a": 1, "a": 1}', ", line 2: key 'a' is twice in one object; remove one"),
        ("a.jsonl", '{"b": 1, "\\u0062": 2}', ", line 1: key 'b' is twice in one object; remove one"),
        ("a.json", '[{"a": 1}, {"a": 1, "a": 2}]', ", row 2: key 'a' is twice in one object; remove one"),
        ("a.json", '{"data": [{"paragraphs": [], "paragraphs": []}]}', ", line 1: key 'paragraphs' is twice in one"),
        ("a.csv", 'a,b\n1,2\n3,"4\n\n', f", line 3: unexpected end of data{UNQUOTED}"),
        ("a.csv", 'a,b\n1,"2"x\n', f", line 2: ',' expected after '\"'{UNQUOTED}"),
        ("a.conll", "a O\nb X O\n", ", line 2: 3 columns, expected 2 as in the lines before: a token first, its tag"),
        ("a.json", '{"data": [{"paragraphs": 1}]}', LAYOUT),
        ("a.json", json.dumps(SQUAD).replace("Why?", "").replace("question", "Q"), ", at or after question q1: no key"),
        ("a.doc", "", f": expected a name that ends in {ENDINGS}"),
    ],
)
def test_faults_name_file_and_line(write, name, content, expected):
    columns = ["text"] if "no column" in expected else []
    assert fault(write(name, content), columns).startswith(expected)


def test_columns_that_a_row_lacks_and_files_that_are_none_are_refused(write, tmp_path):
    lines = write("a.jsonl", '{"text": 1}\n{"txt": 1}')
    assert fault(lines, ["text"]) == ", line 2: no column 'text', it has txt; did you mean 'txt'?"
    assert fault(str(tmp_path / "none.csv")) == ": No such file or directory; give a readable file"
    (tmp_path / "folder.csv").mkdir()
    assert fault(str(tmp_path / "folder.csv")) == ": Is a directory; give a readable file"


WORDS = "some words " * 100
PIPED = [
    ("a.jsonl", "", f'{{"text": "{WORDS}", "label": 1}}\n'),
    ("a.csv", "text,label\n", f'"{WORDS}",1\n'),
    ("a.conll", "", f"{WORDS}\tO\n\n"),
]


@pytest.mark.parametrize(("name", "header", "row"), PIPED)
def test_rows_of_a_pipe_are_read_in_constant_memory(tmp_path, name, header, row):
    """16 MB in all, of which Python holds a few blocks of a megabyte at a time."""
    path, count = tmp_path / name, 16_000_000 // len(row)
    os.mkfifo(path)

    def generate():
        with open(path, "w") as pipe:
            pipe.write(header)
            for _ in range(count):
                pipe.write(row)

    writer = threading.Thread(target=generate)
    writer.start()
    rows = read_rows(str(path))
    next(rows)
    tracemalloc.start()
    try:
        assert 1 + sum(1 for _ in rows) == count
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
        writer.join()
