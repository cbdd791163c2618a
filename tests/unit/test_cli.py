"""Flags: underscores for dashes either way round, one line for wrong arguments, defaults in the help."""

from dataclasses import MISSING, dataclass
from pathlib import Path

import pytest

from megatron_ddrp.cli import ArgumentParser, Subcommand, parse_sections, parse_subcommand
from megatron_ddrp.commands import COMMANDS, functions
from megatron_ddrp.config.reading import Section, option
from megatron_ddrp.errors import UserError


def parser():
    made = ArgumentParser(prog="tool")
    made.add_argument("--vocab-file", help="vocabulary")
    made.add_argument("--deepspeed_config", help="file")
    made.add_argument("--steps", type=int, default=7, help="how many")
    made.add_argument("--fast", action="store_true", help="hurry")
    made.add_argument("words", nargs="*")
    return made


@pytest.mark.parametrize("flag", ["--vocab-file", "--vocab_file"])
@pytest.mark.parametrize("other", ["--deepspeed_config", "--deepspeed-config"])
def test_both_spellings_with_and_without_equals(flag, other):
    parsed = parser().parse_args([flag, "a_b-c", f"{other}=d_e-f"])
    assert (parsed.vocab_file, parsed.deepspeed_config) == ("a_b-c", "d_e-f")


def test_words_after_a_double_dash_stay_as_they_are():
    assert parser().parse_args(["--", "--vocab_file"]).words == ["--vocab_file"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--vocab-fil", "x"], "unrecognized arguments: --vocab-fil; did you mean --vocab-file?"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--vocab-file"], "argument --vocab-file: expected one argument"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_2(arguments, complaint, capsys):
    with pytest.raises(UserError) as caught:
        parser().parse_args(arguments)
    assert caught.value.exit_code == 2 and str(caught.value) == f"{complaint} (see tool --help)"
    assert capsys.readouterr() == ("", "")


def test_a_misspelt_required_flag_is_answered_with_the_right_one():
    made = ArgumentParser(prog="tool")
    made.hints = {"pieces": "use --vocab-size"}
    made.add_argument("--vocab-size", required=True)
    made.add_argument("--output", required=True)
    for given, said in (
        (["--vocab_sise", "4000"], "; --vocab_sise is unknown: did you mean --vocab-size?"),
        (["--pieces=4000", "--", "--xyz"], "; --pieces is unknown: use --vocab-size"),
        (["--qqq", "--output", "x"], "; --qqq is unknown"),
        ([], ""),
    ):
        with pytest.raises(UserError) as caught:
            made.parse_args(given)
        missing = "--vocab-size" if "--output" in given else "--vocab-size, --output"
        complaint = f"the following arguments are required: {missing}{said} (see tool --help)"
        assert str(caught.value) == complaint


def test_help_shows_the_defaults_that_say_something():
    text = parser().format_help()
    assert "how many (default: 7)" in text
    assert "None" not in text and "False" not in text


def test_subcommands_share_the_rules():
    made = ArgumentParser(prog="tool")
    made.add_subparsers(dest="command").add_parser("merge").add_argument("--output-prefix")
    assert made.parse_args(["merge", "--output_prefix", "a"]).output_prefix == "a"


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(("word", "nearest"), [("preproces", "preprocess"), ("analyse", "analyze"), ("x", None)])
def test_a_misspelt_choice_is_answered_with_the_nearest_one(word, nearest, several):
    made = ArgumentParser(prog="tool")
    if several:
        commands = made.add_subparsers(metavar="COMMAND")
        for name in ("preprocess", "analyze"):
            commands.add_parser(name)
    else:
        made.add_argument("command", choices=["preprocess", "analyze"])
    with pytest.raises(UserError) as caught:
        made.parse_args([word])
    said = str(caught.value)
    assert f"invalid choice: '{word}'" in said and len(said.splitlines()) == 1
    assert ("did you mean" in said) is bool(nearest) and (nearest is None or f"; did you mean {nearest}?" in said)


@dataclass(frozen=True)
class Words(Section):
    """words"""

    name: str = option(MISSING, "text")
    folder: Path | None = option(None, "path")
    files: tuple[Path, ...] = option((), "paths", nargs="+")
    place: str = option("here", "positional", positional=True, nargs="?")
    size: int = option(1, "number", within="[1, 10]")


@pytest.mark.parametrize("words", [["--name", ""], ["--folder", " "], ["--files", "a", ""], ["", "--name", "a"]])
def test_an_empty_word_is_no_text_and_no_path(words):
    given = words if "--name" in words else ["--name", "a", *words]
    with pytest.raises(UserError, match=r"got '.?', expected some text") as refused:
        parse_sections(ArgumentParser(prog="tool"), (Words,), given)
    assert refused.value.exit_code == 2


def test_options_become_values_of_their_types_with_defaults():
    parsed = parse_sections(ArgumentParser(prog="tool"), (Words,), ["--name", "a", "--files", "b", "c"])
    assert (parsed.name, parsed.files) == ("a", (Path("b"), Path("c")))
    assert (parsed.folder, parsed.place, parsed.size) == (None, "here", 1)
    with pytest.raises(UserError, match=r"--size is 11: it must lie in \[1, 10\] \(see tool --help\)"):
        parse_sections(ArgumentParser(prog="tool"), (Words,), ["--name", "a", "--size", "11"])


def test_a_subcommand_has_options_of_its_own():
    subcommands = {"first": Subcommand("one", "One.", (Words,)), "second": Subcommand("two", "Two.", ())}
    parsed = parse_subcommand("All.", subcommands, ["first", "--name", "a", "there"], plugins=False)
    assert (parsed.command, parsed.name, parsed.place) == ("first", "a", "there")
    with pytest.raises(UserError, match="unrecognized arguments: --name a"):
        parse_subcommand("All.", subcommands, ["second", "--name", "a"], plugins=False)


@pytest.mark.parametrize("name", ["finetune", "glue", "minimal-pairs", "compare"])
def test_a_function_whose_command_ended_with_a_code_raises_it(name, tmp_path, monkeypatch):
    monkeypatch.setattr(f"{COMMANDS[name].module}.main", lambda words: 3)
    function, words = getattr(functions, name.replace("-", "_")), ["plan.yaml"] if name == "compare" else []
    with pytest.raises(UserError, match=f"{name} ended with exit code 3") as error:
        function(*words, output_dir=tmp_path)
    assert error.value.exit_code == 3


def test_a_comparison_of_rows_returns_the_newest_row_of_each_run(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{COMMANDS['compare'].module}.main", lambda words: 0)
    older, newer = tmp_path / "older.jsonl", tmp_path / "newer.jsonl"
    older.write_text('{"run": "a", "loss": 1}\n{"run": "a", "loss": 2}\n{"run": "b", "loss": 3}\n')
    newer.write_text('{"run": "b", "loss": 4}\n')
    rows = functions.compare([older, newer], output_dir=tmp_path / "page").rows
    assert rows == [{"run": "a", "loss": 2}, {"run": "b", "loss": 4}]
