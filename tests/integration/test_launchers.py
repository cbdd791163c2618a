"""Training as a user starts it: each launcher, the installed package, the programs of the pages, the notebook.

Everything else is tested without them, faster.
"""

import base64
import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from email.parser import HeaderParser
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron_ddrp import __main__, __version__
from megatron_ddrp.commands import COMMANDS
from megatron_ddrp.commands.functions import as_command
from megatron_ddrp.commands.pretrain import read_arguments
from megatron_ddrp.run.metrics import read_rows
from megatron_ddrp.train import train
from tests.conftest import Ended, TinyCorpus, documents
from tests.integration.conftest import Flags, tiny_settings
from tests.integration.launch import ROOT, SCRIPT, TIMEOUT, free_port, json_file, run_command, start_ranks
from tests.integration.test_run_folder import COMPLETE, assert_complete

BIN = Path(sys.executable).parent
PATH = f"{BIN}:/usr/local/bin:/usr/bin:/bin"
"""A user's, with the environment active: the launchers start `python` by name."""


def launchers() -> dict[str, list[str]]:
    """A command line each for two ranks, up to the flags; tests/integration/test_run_folder.py trains on one."""
    deepspeed = [str(BIN / "deepspeed"), "--num_accelerators", "2", "--master_port", str(free_port())]
    torchrun = [str(BIN / "torchrun"), "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", "-x", "MASTER_ADDR=127.0.0.1"]
    return {
        "deepspeed": [*deepspeed, str(SCRIPT)],
        "torchrun": [*torchrun, "--master-port", str(free_port()), "--module", "megatron_ddrp", "pretrain"],
        "mpirun": [*mpirun, "-x", f"MASTER_PORT={free_port()}", sys.executable, str(SCRIPT)],
    }


@pytest.mark.slow
@pytest.mark.parametrize("launcher", launchers())
def test_every_launcher_trains(launcher: str, tiny_corpus: TinyCorpus, flags: Flags, tmp_path: Path) -> None:
    if launcher == "mpirun" and not shutil.which("mpirun", path=PATH):
        pytest.skip("needs Open MPI's mpirun")
    ended = run_command([*launchers()[launcher], *flags(save=tmp_path, **COMPLETE)], PATH=PATH)
    assert ended.returncode == 0, ended.stderr
    assert_complete(tmp_path, tiny_corpus)
    assert ended.stdout.count("step 5/5 | loss") == 1
    assert "layout: 2 ranks on cpu" in ended.stdout and "Traceback" not in ended.stderr


HEAVY = ("torch", "deepspeed", "transformers", "matplotlib", "scipy", "sklearn", "pyarrow")
"""Packages that take longer to import than `--help` may take."""


class Package(NamedTuple):
    """A built package and the folder that its wheel is installed into."""

    wheel: Path
    sdist: Path
    site: Path


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    pytest.importorskip("build", reason="the package is built by `build`, of the extra `dev`")
    folder = tmp_path_factory.mktemp("package")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder / "site")]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True, timeout=300)
    return Package(wheel, sdist, folder / "site")


def run_installed(package: Package, *words: object) -> str:
    """Run a command line where the installed wheel is found and the checkout is not; return what it prints."""
    path = f"{package.site / 'bin'}:{BIN}:/usr/bin:/bin"
    done = run_command(words, PYTHONPATH=str(package.site), PATH=path)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_package_holds_what_it_should_and_indexes_take_it(package: Package) -> None:
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
    with tarfile.open(package.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = ("README.md", "LICENSE", "Makefile", "docs/data.md", "examples/quickstart.sh", "pretrain_bert.py")
    others = ("tests/integration/test_launchers.py", "tools/preprocess_data.py", "tasks/glue/__main__.py")
    assert {*tracked, *others} <= names
    assert not [name for name in names if name.startswith((".venv", ".hypothesis", "quickstart/"))]
    words = [sys.executable, "-m", "twine", "check", "--strict", str(package.wheel), str(package.sdist)]
    subprocess.run(words, check=True, capture_output=True, timeout=120)


@pytest.mark.slow
def test_the_main_job_runs_from_the_wheel(package: Package, flags: Flags, tmp_path: Path) -> None:
    assert run_installed(package, "megatron-ddrp", "--version") == f"megatron-ddrp {__version__}\n"
    place = "import megatron_ddrp; print(megatron_ddrp.__file__)"
    assert str(package.site) in run_installed(package, "python", "-c", place)
    words = flags(train_iters=2, save=tmp_path / "run")
    assert f"saved {tmp_path}/run/iter_0000002" in run_installed(package, "megatron-ddrp", "pretrain", *words)
    run_installed(package, "megatron-ddrp", "convert", "--load", tmp_path / "run", "--output", tmp_path / "hf")
    assert (tmp_path / "hf" / "model.safetensors").is_file()


def test_help_of_every_command_imports_nothing_heavy() -> None:
    """`--help` takes as long as its imports do: a tenth of a second without these packages, seconds with them."""
    program = (
        "import contextlib, importlib, io, sys\n"
        "from megatron_ddrp.__main__ import COMMANDS, build_parser\n"
        "for name, command in COMMANDS.items():\n"
        "    sys.argv = [f'megatron-ddrp {name}', '--help']\n"
        "    shown = io.StringIO()\n"
        "    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):\n"
        "        importlib.import_module(command.module).main()\n"
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
def test_a_wrong_command_line_ends_in_one_line(words: list[str], message: str, run_tool: Callable[..., Ended]) -> None:
    done = run_tool(__main__, *words)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


def example_of(page: str, begin: str) -> str:
    """Return the code block of a page that begins with these words."""
    return (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").split(begin)[1].split("```")[0]


def write_tables(folder: Path, labels: str) -> None:
    """Write train.csv and valid.csv of a task with two labels."""
    for name, part in (("train", documents()[:40]), ("valid", documents()[40:60])):
        rows = "".join(f"{re.sub('[^a-z ]', '', text.lower())[:60]},{labels[len(text) % 2]}\n" for text in part)
        (folder / f"{name}.csv").write_text(f"text,label\n{rows}", encoding="utf-8")


ON_RANKS = """
import json, os, sys
from megatron_ddrp import pretrain

settings = json.loads(sys.argv[1])
first = pretrain(**settings, exit_interval=2, tensor_model_parallel_size=2)
second = pretrain(**settings)
files = len(os.listdir("/proc/self/fd"))
pretrain(**settings | {"train_iters": 5})
print(f"{first.iteration} {second.iteration} {len(second.rows)} {len(os.listdir('/proc/self/fd')) <= files}.")
"""


@pytest.mark.slow
def test_the_first_program_of_the_page_runs(tmp_path: Path) -> None:
    program = example_of("python", "```python\n")
    assert len(program.splitlines()) <= 40
    write_tables(tmp_path, "01")
    own = f"texts = {documents()!r}\n"
    shown = '\nprint(len(losses), vectors.shape, scores.page.count("|") > 10, len(scores.rows), [*scores.summary][:1])'
    shown += '\nprint(run.rows[0]["embedding_norm"] > 0, (folder / "config.json").exists())\n'
    program = program.replace("train_iters=300", "train_iters=6")
    (tmp_path / "program.py").write_text(own + program + shown, encoding="utf-8")
    words = [sys.executable, "program.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr[-3000:]
    *_, scored, trained = done.stdout.splitlines()
    assert trained == "True True"
    assert scored.startswith("2 (2, 128) True 1 "), scored


@pytest.mark.slow
def test_ranks_of_a_launcher_train_thrice_in_two_layouts_and_keep_no_more_files(
    tiny_corpus: TinyCorpus, tmp_path: Path
) -> None:
    own = {"train_iters": 4, "zero_stage": 1, "save_interval": 2, "save": tmp_path / "run", "load": tmp_path / "run"}
    settings = json.dumps(tiny_settings(tiny_corpus) | own, default=str)
    (tmp_path / "program.py").write_text(ON_RANKS, encoding="utf-8")
    printed = start_ranks([settings], 2, program=str(tmp_path / "program.py")).check().stdout
    assert [text.splitlines()[-1] for text in printed] == ["2 4 2 True.", "2 4 0 True."]
    assert [row["iteration"] for row in read_rows(tmp_path / "run")] == [1, 2, 3, 4, 5]


NOTEBOOK = ROOT / "examples" / "first_encoder.ipynb"
STEPS = 4


def test_the_notebook_is_stored_without_outputs():
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 10
    assert [cell["outputs"] for cell in cells if cell["outputs"] or cell["execution_count"]] == []


@pytest.mark.slow
def test_the_notebook_runs_from_text_to_filled_masks_and_plots(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="needs pip install nbclient")
    pytest.importorskip("ipykernel", reason="needs pip install ipykernel")
    for package in ("transformers", "matplotlib"):
        pytest.importorskip(package)
    import nbformat

    monkeypatch.setenv("FIRST_ENCODER_STEPS", str(STEPS))
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert f"step {STEPS}/{STEPS} | validation" in printed
    assert printed.count("%") >= 4 * 5, "five candidates for each of four masks"
    figures = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert len(figures) == 3 and all(len(base64.b64decode(figure)) > 5000 for figure in figures)
    shown = next(output.data["text/plain"] for output in outputs if "TextEncoder" in str(output.get("data")))
    assert "ddrp positions, 2 layers x 128" in shown
    assert (tmp_path / "first_encoder" / "huggingface" / "model.safetensors").is_file()


SMALL = {
    **{r"--vocab-size 8192": "--vocab-size 500", r"--train-iters \d+": "--train-iters 4"},
    **{r"--hidden-size 128": "--hidden-size 32", r"--eval-iters 40": "--eval-iters 1"},
    **{r"--seeds 3\b": "--seeds 2", r"--epochs 4": "--epochs 1"},
}
"""Pattern of a flag of the page → what the test gives; each occurs."""


@pytest.mark.slow
def test_the_worked_example_leads_from_text_to_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = documents()
    for name, part in (("general", texts), ("field", texts[: len(texts) // 2])):
        json_file(tmp_path / f"{name}.jsonl", [{"text": text} for text in part])
    write_tables(tmp_path, "ab")
    monkeypatch.chdir(tmp_path)
    script = example_of("domain", "<!-- worked example -->\n```bash\n")
    for pattern, small in SMALL.items():
        script, count = re.subn(pattern, small, script)
        assert count, pattern
    shape = re.findall(r'SHAPE="([^"]*)"', script)[0]
    lines = [line.replace("$SHAPE", shape) for line in script.splitlines() if line.startswith("megatron-ddrp ")]
    commands = [shlex.split(line)[1:] for line in lines]
    for name, *words in commands:
        with as_command(name, words):
            if name == "pretrain":  # its `main` ends the process group for good
                train(read_arguments(words).config)
            else:
                importlib.import_module(COMMANDS[name].module).main(words)
    assert len(commands) == 16
    table = Path("scores", "table.md").read_text(encoding="utf-8")
    assert all(f"| {name}" in table for name in ("general", "scratch", "continued", "continued_new"))
    assert "not told apart" in table or "better" in table or "worse" in table
    assert {"config.json", "model.safetensors", "README.md"} <= {path.name for path in Path("my-encoder").iterdir()}
