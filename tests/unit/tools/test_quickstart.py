"""The quickstart's stages, with commands that only say what they were asked, and the tools that make its text and task.

The real parsers read its flags. Prose is collected out of docstrings. Its own task is balanced, without giveaways, from
different documents, the same every time."""

import json
import os
import random
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.cli import parse_subcommand
from megatron_ddrp.lab.analysis.command import SUBCOMMANDS
from megatron_ddrp.tasks.finetune.command import parse_arguments as parse_finetune
from megatron_ddrp.tasks.finetune.options import TaskFiles
from megatron_ddrp.tasks.finetune.task_files import read_task
from tests.conftest import write_program
from tools import collect_documentation, swap_words
from tools.swap_words import make_task, sentences, swap

SCRIPT = Path(__file__).parents[3] / "examples" / "quickstart.sh"
STAGES = ["collect_documentation.py", "train_tokenizer.py", "preprocess_data.py", "pretrain_bert.py"]
STAGES += ["convert_checkpoint.py", "swap_words.py", "tasks.finetune", "tasks.finetune", "analyze.py"]
STAGES += ["training_report.py"]
STUB = 'echo "$(basename "$0") $*" >> "$CALLS"\n[[ -z ${FAIL:-} || "$*" != *"$FAIL"* ]]'


@pytest.fixture
def quickstart(tmp_path):
    """A function that runs the script and returns (exit code, output, calls of this start)."""
    for name in ("python", "deepspeed"):
        write_program(tmp_path / "bin", name, STUB)

    def run(**variables):
        calls = tmp_path / "calls"
        calls.write_text("")
        path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environment = {"PATH": path, "CALLS": str(calls), "OUT": str(tmp_path / "out"), **variables}
        done = subprocess.run(["bash", str(SCRIPT)], env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr, calls.read_text().splitlines()

    return run


def stages(calls):
    return [next(stage for stage in STAGES if stage in call) for call in calls]


def test_runs_every_stage_once_and_again_for_another_command_and_all_that_follow(quickstart, tmp_path):
    code, output, calls = quickstart()
    assert (code, stages(calls)) == (0, STAGES)
    assert output.rstrip().endswith(f"The report: {tmp_path}/out/report/report.md")
    commands = (tmp_path / "out" / "commands.txt").read_text().splitlines()
    assert [" ".join(shlex.split(line)) for line in commands] == calls
    words = {stage: call.split(stage, 1)[1].split() for stage, call in zip(stages(calls), calls, strict=True)}
    config = parse_arguments(words["pretrain_bert.py"]).config  # the real parsers take its flags
    assert (config.model.position_encoding, config.objective.objective) == ("ddrp", "mth")
    assert config.checkpoint.save == config.checkpoint.load
    places = parse_subcommand("", SUBCOMMANDS, words["analyze.py"])
    assert (places.command, places.load) == ("masked-places", (Path(config.checkpoint.save),))
    options = parse_finetune(words["tasks.finetune"])
    (tasks,) = options.suite.read.args
    assert options.random_init and [task.task_name for task in tasks] == ["word-order"]
    code, _, calls = quickstart()
    assert (code, calls) == (0, [])
    stale = tmp_path / "out" / "checkpoint"
    stale.mkdir()
    assert stages(quickstart(STEPS="7")[2]) == STAGES[3:]
    assert not stale.exists()
    quickstart(STEPS="8", FAIL="convert_checkpoint.py")  # a kill after a change leaves nothing stale as done
    assert stages(quickstart(STEPS="8")[2]) == STAGES[4:]


def test_goes_on_where_it_failed_keeps_what_is_there_and_notices_a_changed_or_missing_corpus(quickstart, tmp_path):
    code, output, calls = quickstart(FAIL="pretrain_bert.py")
    assert code != 0 and "The report" not in output and stages(calls) == STAGES[:4]
    checkpoint = tmp_path / "out" / "checkpoint"
    checkpoint.mkdir()
    code, _, calls = quickstart()
    assert (code, stages(calls)) == (0, STAGES[3:]) and checkpoint.exists()
    corpus, out = tmp_path / "my corpus.jsonl", str(tmp_path / "another")
    for text in ("one", "two"):
        corpus.write_text(text)
        assert stages(quickstart(CORPUS=str(corpus), OUT=out)[2]) == STAGES[1:]
        assert quickstart(CORPUS=str(corpus), OUT=out)[2] == []
    line = "quickstart: error: CORPUS=no-such-file.jsonl is not a readable file\n"
    assert quickstart(CORPUS="no-such-file.jsonl", OUT=out) == (1, line, [])


def test_paragraphs_of_docstrings_lose_markup_code_and_headings_and_tests_are_no_documentation(tmp_path):
    text = """Short title.

    Return the :class:`~x.Reader` that ``open`` made for this
    file, or *None* where there is no such file at all.

    Args:
        path: the name of the file that is to be opened and then read to its end

    >>> open("x").read()  # this example has many words in it but is code
    'text'

    ======  ======================================
    name    what it means to those who read tables
    ======  ======================================

    expr ::= a grammar rule that has a good many words in its line
    """
    assert list(collect_documentation.paragraphs(text)) == [
        "Return the x.Reader that open made for this file, or None where there is no such file at all.",
        "path: the name of the file that is to be opened and then read to its end",
    ]
    for name in ("a.py", "test/b.py", "site-packages/c.py", "d/e.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [str(path.relative_to(tmp_path)) for path in collect_documentation.modules(tmp_path)] == ["a.py", "d/e.py"]
    path, function = tmp_path / "a.py", '    def f(self):\n        """Three."""\n'
    path.write_text(f'"""One."""\nclass A:\n    """Two."""\n{function}x = "no docstring"\n')
    assert list(collect_documentation.docstrings(path)) == ["One.", "Two.", "Three."]
    path.write_text("this is not Python")
    assert list(collect_documentation.docstrings(path)) == []


def test_whole_sources_until_there_is_enough_and_no_paragraph_twice(monkeypatch):
    first, second, third = (f"A paragraph of prose that has some more words, {n}" for n in ("one", "two", "three"))
    of_a = [("a.py", [first, second]), ("b.py", [second]), ("c.py", [f"{first}\n\n{third}"])]
    sources = [("a", of_a), ("d", [("d.py", [first + " more"])])]
    monkeypatch.setattr(collect_documentation, "sources", lambda packages: sources)
    documents, used = collect_documentation.collect([], megabytes=1e-4)
    assert used == ["a"]
    assert sorted(document["title"] for document in documents) == ["a.py", "c.py"]
    assert {document["text"] for document in documents} == {f"{first}\n{second}", third}
    assert collect_documentation.collect([], megabytes=1)[1] == ["a", "d"]


def test_the_command_needs_no_torch_names_packages_that_are_not_installed_and_skips_usual_ones(tmp_path, run_tool):
    out, words = tmp_path / "corpus.jsonl", ["--megabytes", "0.1", "--packages"]
    code = """
import runpy, sys
del sys.argv[0]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    assert "torch" not in sys.modules
"""
    tool = collect_documentation.__file__
    subprocess.run([sys.executable, "-c", code, tool, "--output", out, *words], check=True)
    assert all(set(json.loads(line)) == {"title", "text"} for line in out.read_text().splitlines())
    out, names = tmp_path / "none.jsonl", ["nosuch", "json", "nosuch.sub", "json.nosuch", "sys.sub", "this", ".x"]
    done = run_tool(collect_documentation, "--output", out, *words, *names)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not out.exists()
    named = "--packages nosuch nosuch.sub json.nosuch sys.sub this .x"
    assert f"{named}: no package that is installed in this Python" in done.stderr
    found = [name for name, _ in collect_documentation.sources(("nosuch.sub", "nosuch", "json"))]
    assert found[-1] == "json" and not {"nosuch.sub", "nosuch"} & {*found}


def corpus():
    """Documents of six sentences, each of which names the number of its document."""
    rng = random.Random(0)
    nouns = ["parser", "table", "reader", "socket", "thread", "buffer", "module", "client", "server", "window"]
    verbs = ["returns", "opens", "closes", "copies", "checks", "joins", "splits", "sorts"]
    words = nouns, verbs, nouns, nouns, verbs
    form = "The {} {} a {} number NUMBERx before the {}, {} Python."
    texts = (" ".join(form.format(*map(rng.choice, words)) for _ in range(6)) for _ in range(80))
    return [text.replace("NUMBER", str(number)) for number, text in enumerate(texts)]


def test_sentences_are_whole_prose_of_6_to_30_words_and_a_swap_moves_two_inner_words_that_differ():
    text = "Too short. This one has as many words as are needed.\nMany " + "words " * 40 + "end.\n"
    text += "Code = x[1] + y[2] is not a sentence of prose.\nThis line has no full stop in it"
    assert sentences(text) == ["This one has as many words as are needed."]
    sentence = "Opens the file, reads every Line and closes it quietly."
    for seed in range(50):
        old, new = sentence.split(), swap(sentence, random.Random(seed)).split()
        first, second = [index for index in range(len(old)) if old[index] != new[index]]
        assert (old[first], old[second]) == (new[second], new[first])
        assert not {0, 2, 5, len(old) - 1} & {first, second}  # first, with a comma, with a capital, last
    assert swap("Very much much much much much.", random.Random(0)) is None


def test_every_sentence_comes_once_as_it_is_and_once_changed_in_one_of_the_files(tmp_path, monkeypatch):
    train, dev = make_task(corpus(), train=100, dev=30, seed=1)
    assert (len(train), len(dev)) == (100, 30)
    real, bags = {sentence for text in corpus() for sentence in sentences(text)}, []
    for rows in (train, dev):
        found = Counter((" ".join(sorted(sentence.split())), label) for sentence, label in rows)
        bags.append({words for words, _ in found})
        assert found == Counter((words, label) for words in bags[-1] for label in ("real", "swapped"))
        assert all((sentence in real) == (label == "real") for sentence, label in rows)
    assert bags[0].isdisjoint(bags[1])
    assert make_task(corpus(), 100, 30, 1) == (train, dev) != make_task(corpus(), 100, 30, 2)
    of_train, of_dev = (  # documents
        {word for sentence, _ in rows for word in sentence.split() if word.endswith("x")}
        for rows in make_task(corpus(), train=1000, dev=40, seed=1)
    )
    assert of_train and of_dev and not of_train & of_dev
    path, out = tmp_path / "corpus.txt", tmp_path / "word-order"
    path.write_text("\n\n".join(corpus()))
    sizes = ["--train-rows", "100", "--dev-rows", "20"]
    monkeypatch.setattr("sys.argv", ["swap_words.py", "--input", str(path), "--output-dir", str(out), *sizes])
    swap_words.main()
    data = read_task(TaskFiles(train=out / "train.csv", valid=out / "valid.csv"))
    assert (data.task.name, data.task.metric, data.task.labels) == ("word-order", "accuracy", ("real", "swapped"))
    assert data.baseline == 0.5 and (len(data.train), len(data.dev["valid"])) == (100, 20)
