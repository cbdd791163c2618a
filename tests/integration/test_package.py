"""The installed package: what the wheel holds, and the main job from it in a folder without a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from email.parser import HeaderParser
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron_ddrp import __version__
from megatron_ddrp.commands import COMMANDS
from tests.conftest import TinyCorpus
from tests.integration.launch import ROOT, free_port

pytest.importorskip("build", reason="the package is built by `build`, of the extra `dev`")

BIN = Path(sys.executable).parent
HEAVY = ("torch", "deepspeed", "transformers", "matplotlib", "scipy", "sklearn", "pyarrow")
"""Packages that take longer to import than `--help` may take."""


class Package(NamedTuple):
    """A built package and the folder that its wheel is installed into."""

    wheel: Path
    sdist: Path
    site: Path


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    folder = tmp_path_factory.mktemp("package")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder / "site")]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True, timeout=300)
    return Package(wheel, sdist, folder / "site")


@pytest.fixture
def command(package: Package, tmp_path: Path) -> Callable[..., str]:
    """Run a command line in an empty folder, where the installed wheel is found and the checkout is not."""
    environment = os.environ | {"PYTHONPATH": str(package.site), "PATH": f"{package.site / 'bin'}:{BIN}:/usr/bin:/bin"}

    def run(*words: object) -> str:
        done = subprocess.run(
            [str(word) for word in words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.slow
def test_the_wheel_holds_one_package_and_one_command(package: Package) -> None:
    with zipfile.ZipFile(package.wheel) as archive:
        names = set(archive.namelist())
        texts = {Path(name).name: archive.read(name).decode() for name in names if ".dist-info/" in name}
    assert {name.split("/")[0] for name in names} == {"megatron_ddrp", f"megatron_ddrp-{__version__}.dist-info"}
    files = [file for file in (ROOT / "megatron_ddrp").rglob("*") if file.suffix in (".py", ".jinja", ".typed")]
    assert {file.relative_to(ROOT).as_posix() for file in files} <= names
    assert texts["entry_points.txt"] == "[console_scripts]\nmegatron-ddrp = megatron_ddrp.__main__:main\n"
    facts = HeaderParser().parsestr(texts["METADATA"])
    assert facts["License-Expression"] == "Apache-2.0" and facts.get_all("Classifier") and facts.get_all("Project-URL")
    assert "](docs/" not in facts.get_payload() and "# megatron_ddrp" in facts.get_payload()


@pytest.mark.slow
def test_the_source_archive_holds_docs_examples_and_tests(package: Package) -> None:
    with tarfile.open(package.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = ("README.md", "LICENSE", "Makefile", "docs/data.md", "examples/quickstart.sh", "pretrain_bert.py")
    assert {
        *tracked,
        "tests/integration/test_package.py",
        "tools/preprocess_data.py",
        "tasks/glue/__main__.py",
    } <= names
    assert not [name for name in names if name.startswith((".venv", ".hypothesis", "quickstart/"))]


@pytest.mark.slow
def test_package_indexes_take_it(package: Package) -> None:
    words = [sys.executable, "-m", "twine", "check", "--strict", str(package.wheel), str(package.sdist)]
    subprocess.run(words, check=True, capture_output=True, timeout=120)


@pytest.mark.slow
def test_the_main_job_runs_from_the_wheel(
    command: Callable[..., str], package: Package, tiny_corpus: TinyCorpus, tmp_path: Path
) -> None:
    assert command("megatron-ddrp", "--version") == f"megatron-ddrp {__version__}\n"
    assert str(package.site) in command("python", "-c", "import megatron_ddrp; print(megatron_ddrp.__file__)")
    text = tiny_corpus.text_file
    printed = command("megatron-ddrp", "train-tokenizer", "--input", text, "--vocab-size", 300, "--output", "vocab.txt")
    assert "next: megatron-ddrp preprocess" in printed
    data = ("--vocab-file", "vocab.txt", "--tokenizer-type", "BertWordPieceLowerCase")
    command("megatron-ddrp", "preprocess", "--input", text, "--output-prefix", "corpus", *data)
    size = ("--num-layers", 1, "--hidden-size", 16, "--num-attention-heads", 2, "--seq-length", 32)
    batch = ("--micro-batch-size", 2, "--global-batch-size", 4, "--train-iters", 2, "--eval-iters", 1)
    run = ("--data-path", "corpus_text_document", *data, *size, *batch, "--save", "run", "--load", "run")
    launcher = ("deepspeed", "--num_accelerators", "2", "--master_port", free_port(), "--module", "megatron_ddrp")
    assert "layout: 2 ranks" in command(*launcher, "pretrain", *run)
    command("megatron-ddrp", "convert", "--load", "run", "--output", "hf")
    assert (tmp_path / "hf" / "model.safetensors").is_file()


def test_help_of_every_command_imports_nothing_heavy() -> None:
    """`--help` takes as long as its imports do: a tenth of a second without these packages, seconds with them."""
    program = (
        "import contextlib, io, sys\n"
        "from megatron_ddrp.__main__ import COMMANDS, _main_of, build_parser\n"
        "for name, command in COMMANDS.items():\n"
        "    sys.argv = [f'megatron-ddrp {name}', '--help']\n"
        "    shown = io.StringIO()\n"
        "    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):\n"
        "        _main_of(command)()\n"
        "    assert shown.getvalue().startswith('usage: megatron-ddrp'), name\n"
        f"print([name for name in {HEAVY} if name in sys.modules])\n"
    )
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["preproces"], "invalid choice: 'preproces'"),
        ([], "the following arguments are required: COMMAND"),
        (["pretrain", "--num-layer", "3"], "megatron-ddrp pretrain: error: unrecognized arguments: --num-layer 3"),
        (["--local_rank=0", "pretrain", "--num-layers", "x"], "megatron-ddrp pretrain: error: argument --num-layers"),
        (["--local-rank=0", "pretrain", "--num-layers", "x"], "megatron-ddrp pretrain: error: argument --num-layers"),
    ],
)
def test_a_wrong_command_line_ends_in_one_line(words: list[str], message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megatron_ddrp", *words], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_the_list_of_commands_names_each_with_a_line() -> None:
    words = [sys.executable, "-m", "megatron_ddrp", "--help"]
    shown = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert all(f"  {name} " in shown and command.summary in shown for name, command in COMMANDS.items())
