"""Closed standard streams, and streams that cannot hold every character: no command ends in a traceback for them."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ddrp import __main__ as entry
from megatron_ddrp.data.progress import progress
from megatron_ddrp.errors import UserError, run_command
from tests.datasets import write_dataset

ROOT = Path(__file__).parents[2]
ASCII = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


SCRIPTS = sorted(
    path
    for path in (*ROOT.glob("*.py"), *ROOT.glob("tools/*.py"), *ROOT.glob("tasks/**/*.py"))
    if "__main__" in path.read_text(encoding="utf-8")
)


def ascii_stream() -> io.TextIOWrapper:
    """A stream as Python opens it in an ASCII locale."""
    return io.TextIOWrapper(io.BytesIO(), encoding="ascii")


def said_to(stream: io.TextIOWrapper) -> bytes:
    """The bytes that were printed to one."""
    stream.flush()
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue()


@pytest.fixture
def no_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks end by `os._exit`, which would end the tests."""

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)


@pytest.mark.usefixtures("no_exit")
@pytest.mark.parametrize("words", [[], *([name] for name in entry.COMMANDS)], ids=str)
@pytest.mark.parametrize("closed", ["none", "stdout", "stderr", "both"])
def test_help_and_refusals_of_every_command(words: list[str], closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for flag, code in (("--help", 0), ("--no-such-flag", 2)):
        streams = {"stdout": ascii_stream(), "stderr": ascii_stream()}
        for name, stream in streams.items():
            monkeypatch.setattr(sys, name, None if closed in (name, "both") else stream)
        monkeypatch.setattr(sys, "argv", ["megatron-ddrp", *words, flag])
        with pytest.raises(SystemExit) as end:
            entry.main()
        assert end.value.code == code
        said = {name: said_to(stream) for name, stream in streams.items()}
        expected = "stdout" if flag == "--help" else "stderr"
        for name, text in said.items():
            assert bool(text) == (name == expected and closed not in (name, "both")), (name, text)
            assert b"Traceback" not in text


@pytest.mark.parametrize("closed", [("stdout",), ("stderr",), ("stdout", "stderr"), ("stdin", "stdout", "stderr")])
def test_words_for_a_closed_stream_go_nowhere(closed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    streams = {"stdin": io.StringIO(), "stdout": ascii_stream(), "stderr": ascii_stream()}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, None if name in closed else stream)

    def main() -> None:
        assert sys.stdin.read() == ""
        print("α → β \udce9")
        print("warning: α", file=sys.stderr)
        with progress(" rows", 3, "α") as bar:
            bar.update(3)
        raise UserError("α is wrong", 2)

    with pytest.raises(SystemExit) as end:
        run_command(main, "tool")
    assert end.value.code == 2
    for name, line in (
        ("stdout", b"\\u03b1 \\u2192 \\u03b2 \\udce9\n"),
        ("stderr", b"tool: error: \\u03b1 is wrong\n"),
    ):
        if name not in closed:
            stream = streams[name]
            assert isinstance(stream, io.TextIOWrapper) and said_to(stream).endswith(line)


@pytest.mark.parametrize("redirection", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-", ""])
def test_a_command_succeeds_and_writes_its_files_alone(redirection: str, tmp_path: Path) -> None:
    """A library's words for a closed stream must not go into the file that has got its number."""
    prefix = write_dataset(tmp_path / "text_document", [[[5, 6, 7]]] * 3).prefix
    code = (
        "import os, sys\n"
        "from megatron_ddrp.errors import run_command\n"
        "from megatron_ddrp.data.atomic import atomic_file\n"
        "def main():\n"
        "    with atomic_file(sys.argv[1]) as file:\n"
        "        os.system('echo spoken; echo spoken >&2')\n"
        "        file.write(b'written')\n"
        "    print('→', open(sys.argv[0]).read())  # as libraries read their files, in the locale's encoding\n"
        "run_command(main)\n"
    )
    (tmp_path / "program.py").write_text(code, encoding="utf-8")
    inspect = [sys.executable, "-m", "megatron_ddrp", "dataset", "inspect", prefix]
    for words in ([sys.executable, str(tmp_path / "program.py"), str(tmp_path / "output")], inspect):
        command = ["bash", "-c", f'"$@" {redirection}', "bash", *words]
        done = subprocess.run(
            command, env=os.environ | ASCII | {"PYTHONPATH": str(ROOT)}, capture_output=True, cwd=ROOT, timeout=60
        )
        assert done.returncode == 0 and b"Error" not in done.stderr, done.stderr
        assert bool(done.stdout) == (">&-" not in redirection.replace("2>&-", ""))
    assert (tmp_path / "output").read_bytes() == b"written"


def test_a_stream_that_takes_no_more_is_one_line_and_exit_code_1() -> None:
    code = "from megatron_ddrp.errors import run_command; run_command(lambda: print('said'), 'tool')"
    command = ["bash", "-c", '"$@" > /dev/full', "bash", sys.executable, "-c", code]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stderr) == (1, "tool: error: standard output: No space left on device\n")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_every_script_ends_in_the_one_entry(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "run(" in text or "run_command(" in text
