"""Every recipe parses, says at its top what it is, and its training command passes a dry run; Slurm has stand-ins."""

import itertools
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

import megatron_ddrp
from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.commands.pretrain import main
from megatron_ddrp.errors import UserError
from megatron_ddrp.lab.compare import command as compare
from megatron_ddrp.tasks.finetune.runs import TuningRun, predictions_file
from tests import datasets
from tests.conftest import SPECIAL_TOKENS, write_program

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "examples").glob("*.sh"))
TRAINING = [path for path in RECIPES if path.name.startswith("pretrain_")]
Machine = namedtuple("Machine", ["count", "devices", "is_gpu", "gigabytes"])
SLURM = ROOT / "examples" / "pretrain_ddrp_base_slurm.sh"
IN_A_JOB = {"SLURM_JOB_ID": "20007", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_recipe_says_what_it_needs_and_its_help_shows_that_and_starts_nothing(path: Path, tmp_path: Path) -> None:
    head = path.read_text(encoding="utf-8").split("set -euo pipefail")[0]
    assert [word for word in ("hardware", "time", "result") if f"#   {word}" not in head] == []
    subprocess.run(["bash", "-n", str(path)], check=True)
    (tmp_path / "sed").symlink_to(shutil.which("sed") or "sed")  # the only program that it finds
    lines = [line for line in head.splitlines()[1:] if not line.startswith("#SBATCH")]
    for word in ("-h", "--help"):
        command, variables = [shutil.which("bash") or "bash", str(path), word], {"PATH": str(tmp_path)}
        shown = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
        assert shown.stdout.splitlines() == [line.removeprefix("#").removeprefix(" ") for line in lines]
        assert shown.stderr == ""


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.name)
def test_a_training_recipe_runs_dry(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What its shell gives to `python` is read here and run in this process."""
    program, *words = words_for_python(path, tmp_path)
    assert program == "pretrain_bert.py"
    facts = dry_run(words, capsys)
    relative = 67 * 64 * (1 + ("electra" in path.name))  # D and K^rd at head size 64, per encoder
    expected = {"pretrain_bert_tnf": 512 * 768, "pretrain_electra_tnf": 512 * 768}  # one for generator and model
    expected |= dict.fromkeys(("pretrain_modern_base", "pretrain_laptop_cpu", "pretrain_fast_cpu"), 0)  # rotary ones
    assert facts["position_parameters"] == expected.get(path.stem, relative)
    assert not (tmp_path / "save").exists()
    assert_fits(facts, machine_of(path), path)
    given = ["--world-size", "4", "--device-memory", "81", "--micro-batch-size", "2"]
    parsed = parse_arguments(words_for_python(path, tmp_path, *given)[1:])
    assert (parsed.world_size, parsed.device_memory, parsed.config.training.micro_batch_size) == (4, 81, 2)
    for program in ("python", "deepspeed", "srun"):  # the last two would train
        write_program(tmp_path / "bin", program, f"exit {2 * (program == 'python')}")
    refused = run_script(path, files_of_recipe(tmp_path) | {"DRY_RUN": "1"}, in_front=tmp_path / "bin")
    assert (refused.returncode, refused.stdout) == (2, "")


def dry_run(words, capsys):
    """Return what `pretrain_bert.py --dry-run` prints as JSON. Raises `UserError` for what it refuses."""
    capsys.readouterr()
    assert main(words) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_settings_in_yaml_are_those_of_the_recipe_and_run_dry(tmp_path, capsys):
    recipe = ROOT / "examples" / "pretrain_ddrp_base_8gpu.sh"
    words = words_for_python(recipe, tmp_path)[1:]
    settings = ROOT / "examples" / "pretrain_base.yaml"
    paths = words[: words.index("--split")] + words[words.index("--save") : words.index("--load") + 2]
    flags = ["--config", str(settings), *paths]
    assert parse_arguments(flags).config == parse_arguments(words).config
    facts = dry_run([*flags, "--dry-run", "--world-size", "8"], capsys)
    assert facts["train_iters"] == 1_000_000
    assert_fits(facts, machine_of(settings), recipe)


def machine_of(path: Path) -> Machine:
    """Return what a recipe names on top, in the line that begins `hardware`."""
    line = r"#   hardware +(?:(one|\d+) (?:machines?|nodes) with )?(\d+) (GPUs?|CPU cores) .*?(\d+) GB"
    found = re.search(line, path.read_text(encoding="utf-8"))
    assert found, f"{path.name} names no machine"
    count, devices, kind, gigabytes = found.groups(default="one")
    return Machine(1 if count == "one" else int(count), int(devices), kind != "CPU cores", int(gigabytes))


def assert_fits(facts: dict, machine: Machine, path: Path) -> None:
    """Every GPU has its rank, tensor-parallel neighbours share a machine, and a tenth of the memory is left."""
    devices = machine.count * machine.devices
    assert facts["world_size"] == devices if machine.is_gpu else facts["world_size"] <= devices
    assert machine.devices % facts["tensor_parallel"] == 0
    assert facts["memory_per_rank_bytes"] < 0.9 * machine.gigabytes * 2**30
    text = path.read_text(encoding="utf-8")
    for other in re.findall(r"RECIPE=(examples/\w+\.sh)", text):  # a recipe that runs another
        text += (ROOT / other).read_text(encoding="utf-8")
    assert f'--device-memory {machine.gigabytes} "${{ARGS[@]}}"\n' in text
    assert not ("--num_gpus" in text and machine.is_gpu) or f"--num_gpus {machine.devices} " in text
    if "\n#SBATCH" in text:
        assert f"--nodes={machine.count}\n" in text and f"--ntasks-per-node={machine.devices}\n" in text
    if hostfile := re.search(r"HOSTFILE:-(examples/\w+)", text):
        slots = re.findall(r"^\S+ slots=(\d+)$", (ROOT / hostfile[1]).read_text(encoding="utf-8"), re.MULTILINE)
        assert slots == [str(machine.devices)] * machine.count


def run_slurm(tmp_path, environment, *words, rank="exit 75", dry="exit 0"):
    """Run the Slurm recipe with stand-ins for its commands; `rank` and `dry` are what a rank and a dry run do."""
    for name, script in {
        "sbatch": 'echo "sbatch $*"',
        "srun": 'echo "srun $SLURM_NTASKS $SLURM_NTASKS_PER_NODE $1 $2"; shift 2; "$@"',
        "scontrol": 'if [[ $1 == show ]]; then echo node1; else echo "scontrol $*"; fi',
        "python": f'if [[ " $* " == *" --dry-run "* ]]; then printf "%s\\0" "$@" > {tmp_path}/dry; {dry}; fi; '
        f'echo "$MASTER_ADDR:$MASTER_PORT python $*"; {rank}',
    }.items():
        write_program(tmp_path / "stubs", name, script)
    given = files_of_recipe(tmp_path) | {"SLURM_SUBMIT_DIR": str(ROOT), **environment}
    return run_script(SLURM, given, *words, in_front=tmp_path / "stubs")


def checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict:
    """Do the `dry_run` that the Slurm recipe asked for."""
    program, *words = (tmp_path / "dry").read_text().split("\0")[:-1]
    assert program == "pretrain_bert.py"
    return dry_run(words, capsys)


def test_the_slurm_recipe_starts_the_ranks_and_queues_itself_again(tmp_path: Path) -> None:
    done = run_slurm(tmp_path, IN_A_JOB | {"SLURM_CPUS_PER_TASK": "6"}, "--seed", "7")
    step, started, queued = done.stdout.splitlines()
    assert step == "srun 16 8 --kill-on-bad-exit=1 --cpus-per-task=6"
    assert started.startswith("node1:20007 python pretrain_bert.py --data-path ")
    assert started.endswith(" --seed 7") and "--dry-run" not in started
    assert (done.returncode, queued) == (75, "scontrol requeue 20007")


NODES = {
    "32 8": {"SLURM_NNODES": "4"},
    "12 4": {"SLURM_NNODES": "3", "SLURM_GPUS_PER_NODE": "4"},
    "2 2": {"SLURM_NNODES": "1", "SLURM_GPUS_PER_NODE": "v100:2"},
    "12 6": {"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "6"},
}


@pytest.mark.parametrize("ranks", NODES)
def test_the_slurm_recipe_has_the_ranks_of_its_nodes(ranks, tmp_path):
    done = run_slurm(tmp_path, IN_A_JOB | NODES[ranks], rank="exit 0")
    assert done.returncode == 0 and done.stdout.startswith(f"srun {ranks} --kill-on-bad-exit=1 ")


@pytest.mark.parametrize("rank, code", [("143", 75), ("137", 0), ("137", 137), ("2", 2), ("0", 0)])
@pytest.mark.parametrize("flags", ["", "--save {}", "--save={}"])
def test_the_slurm_recipe_follows_the_code_of_the_run(rank, code, flags, tmp_path):
    """`srun` reports a rank that it killed, and an earlier job has left a code in the folder."""
    save = tmp_path / "own"
    save.mkdir()
    (save / "exit_code").write_text("75\n")
    writes = "" if str(code) == rank else f'mkdir -p "{save}"; echo {code} > "{save}/exit_code"; '
    variables = {} if flags else {"SAVE": str(save)}
    done = run_slurm(tmp_path, IN_A_JOB | variables, *flags.format(save).split(), rank=f"{writes}exit {rank}")
    assert done.returncode == code and ("scontrol requeue 20007" in done.stdout) == (code == 75)


LARGE = "--micro-batch-size 256 --global-batch-size 4096"
QUEUED = [
    ({"NODES": "4", "GPUS": "4"}, "--seed 7", "--nodes=4 --ntasks-per-node=4 --gpus-per-node=4"),
    ({"NODES": "3"}, "", ""),
    ({"NODES": "3", "DRY_RUN": "1"}, "", ""),
    ({}, "--no-such-flag", ""),
    ({}, LARGE, ""),
    ({"DEVICE_MEMORY": "800"}, LARGE, "--nodes=2 --ntasks-per-node=8 --gpus-per-node=8"),
]


@pytest.mark.parametrize("variables, words, queued", QUEUED)
def test_the_slurm_recipe_queues_only_what_a_dry_run_accepts(variables, words, queued, tmp_path, capsys):
    done = run_slurm(tmp_path, variables, *words.split())
    if queued:
        assert checked(tmp_path, capsys)
        last = done.stdout.splitlines()[-1]
        assert last == f"sbatch {queued} examples/pretrain_ddrp_base_slurm.sh {words}", done.stderr
        return
    with pytest.raises((UserError, SystemExit)) as refusal:  # argparse has printed its line
        checked(tmp_path, capsys)
    assert getattr(refusal.value, "exit_code", None) == 2 or getattr(refusal.value, "code", None) == 2
    # In the shell: with a stand-in that refuses, and where no import of torch is needed, with the real program.
    as_a_user = f'exec {sys.executable} "$@"' if words == "--no-such-flag" else "echo refused >&2; exit 2"
    done = run_slurm(tmp_path, variables, *words.split(), dry=as_a_user)
    assert done.returncode == 2 and "sbatch" not in done.stdout and len(done.stderr.splitlines()) == 1, done.stderr


def test_seeds_are_an_array_of_runs_with_folders_of_their_own_and_no_flag_that_they_would_share(tmp_path, capsys):
    done = run_slurm(tmp_path, {"SEEDS": "1-5%2"}, "--lr", "2e-4")
    assert checked(tmp_path, capsys)
    queued = "sbatch --array=1-5%2 --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 examples/pretrain_ddrp_base_slurm.sh"
    assert done.stdout.splitlines()[-1] == f"{queued} --lr 2e-4", done.stderr
    assert "array: seeds 1-5%2, each on 2 nodes, saved in " in done.stderr
    folder, of_array = tmp_path / "save-seed3", {"SLURM_ARRAY_JOB_ID": "20005", "SLURM_ARRAY_TASK_ID": "3"}
    rank = f"mkdir -p {folder}; echo 75 > {folder / 'exit_code'}; exit 143"
    done = run_slurm(tmp_path, IN_A_JOB | of_array, "--lr", "2e-4", rank=rank)
    _, started, requeued = done.stdout.splitlines()
    assert f" --save {folder} --load {folder} --seed 3 --lr 2e-4" in started
    assert (done.returncode, requeued) == (75, "scontrol requeue 20005_3")  # this task alone
    for flag in ("--seed", "--save", "--load"):  # all seeds would share it
        for variables in ({"SEEDS": "1-5"}, IN_A_JOB | {"SLURM_ARRAY_TASK_ID": "3"}):
            done = run_slurm(tmp_path, variables, f"{flag}=7")
            assert (done.returncode, done.stdout) == (2, "") and f"{flag} beside SEEDS" in done.stderr


RUNS = {"backbones": 72, "cpu-hours": 24, "gpu-30min": 42, "measures": 20, "paper": 38, "ladder": 194}
RUNS |= {"plateau": 103, "fast": 72, "novels": 6, "depth": 33, "recipe-rates": 28, "recipe": 32, "row-lengths": 15}
"""Trainings of each plan."""


@pytest.mark.parametrize("plan", sorted((ROOT / "examples" / "compare").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_ready_comparison_runs_dry(plan: Path, tmp_path: Path, run_tool) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "a b c d e f g h"}\n')
    for task in ("RTE", "STS-B", "MRPC", "CoLA", "SST-2", "QNLI", "QQP", "MNLI"):
        (tmp_path / "glue" / task).mkdir(parents=True)
    (tmp_path / "pairs").mkdir()
    (tmp_path / "pairs" / "order.jsonl").write_text('{"sentence_good": "a b", "sentence_bad": "b a"}\n')
    environment = {"OUT": str(tmp_path / "out"), "GLUE": str(tmp_path / "glue"), "DRY_RUN": "1"}
    environment["PAIRS"] = str(tmp_path / "pairs") if plan.stem in ("measures", "ladder", "fast") else "none"
    flags, corpus = [], {"CORPUS": str(text)}
    if plan.stem == "paper":  # takes a dataset that is there
        flags, corpus = ["--data-path", write_dataset(tmp_path), "--vocab-file", write_vocabulary(tmp_path)], {}
    script = ROOT / "examples" / "compare.sh"
    module, *words = words_of_script(script, environment | corpus, tmp_path, str(plan), *flags)
    assert module == "tasks.compare"
    done = run_tool(compare, *words)
    assert done.returncode == 0, done.stderr
    trainings = re.findall(r"^  \$.* megatron[-_]ddrp pretrain (.*)$", done.stdout, re.MULTILINE)
    assert len(trainings) == RUNS[plan.stem] and re.search(rf"^ +{len(trainings)} x run$", done.stdout, re.MULTILINE)
    assert not (tmp_path / "out").exists()
    for line in {re.sub(r"--(seed|save|load) \S+", "", line) for line in trainings}:
        assert parse_arguments(shlex.split(line)).config.training.train_iters > 1


def test_the_papers_corpus_is_built_from_wikipedia_and_books(tmp_path: Path) -> None:
    wiki, books = tmp_path / "wiki" / "AA", tmp_path / "books"
    wiki.mkdir(parents=True)
    books.mkdir()
    head, body = '<doc id="{0}" url="u" title="T{0}">', "The article number {0} is about birds and towns."
    article = f"{head}\nT{{0}}\n\n{body}\n\n</doc>\n"
    (wiki / "wiki_00").write_text("".join(article.format(number) for number in range(20)))
    (books / "one.txt").write_text("It was a dark night.\n\nThe town lay still, and birds slept.\n" * 5)
    environment = {"WIKI": str(wiki.parent), "BOOKS": str(books), "OUT": str(tmp_path / "out"), "WORKERS": "1"}
    script = ROOT / "examples" / "build_paper_corpus.sh"
    done = run_script(script, environment | {"VOCAB_SIZE": "120"})
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "out" / "paper_text_document.json").read_text())
    assert facts["documents"] == 21 and facts["shuffled"] == 1234  # the book is one
    for missing in ("WIKI", "BOOKS"):
        done = run_script(script, environment | {missing: str(tmp_path / "nowhere")})
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
        assert f"{missing}={tmp_path / 'nowhere'}: no such" in done.stderr


def run_script(path, environment, *words, in_front=""):
    """Run a script that finds programs `in_front` and beside this Python first."""
    folders = [in_front, Path(sys.executable).parent, os.environ["PATH"]]
    variables = os.environ | {"PATH": os.pathsep.join(filter(None, map(str, folders)))} | environment
    return subprocess.run(["bash", str(path), *words], env=variables, capture_output=True, text=True, timeout=120)


def files_of_recipe(tmp_path: Path) -> dict[str, str]:
    return {"DATA": write_dataset(tmp_path), "VOCAB": write_vocabulary(tmp_path), "SAVE": str(tmp_path / "save")}


def words_for_python(path: Path, tmp_path: Path, *flags: str) -> list[str]:
    """Return the words after `python` in the command of a recipe under DRY_RUN=1, given more flags."""
    return words_of_script(path, files_of_recipe(tmp_path) | {"DRY_RUN": "1"}, tmp_path, *flags)


def words_of_script(path: Path, environment: dict[str, str], tmp_path: Path, *words: str) -> list[str]:
    """Return the program or module that a script starts with `python`, and its words."""
    write_program(tmp_path / "bin", "python", "[[ $1 != -m ]] || shift\nprintf '%s\\0' \"$@\"")
    done = run_script(path, environment, *words, in_front=tmp_path / "bin")
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\0")[:-1]


def write_vocabulary(folder: Path) -> str:
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *"abcdefgh"]) + "\n")
    return str(folder / "vocab.txt")


def write_dataset(folder: Path) -> str:
    """Write documents of 40 tokens: eight words, often enough for the notes of rare words and not too often."""
    documents = [[[5 + i % 8 for i in range(40)]]] * 30
    return datasets.write_dataset(folder / "corpus_text_document", documents).prefix


SBATCH = """
array=() job=JOB
while [[ $1 == --* ]]; do
    [[ $1 == --array=* ]] && array=(${1#--array=})
    [[ $1 == --dependency=* ]] && echo "$1" >> "$LOG"
    shift
done
export SLURM_JOB_ID=1
for range in "${array[@]}"; do
    for task in $(seq "${range%-*}" "${range#*-}"); do
        SLURM_ARRAY_TASK_ID=$task bash "$@" >> "$LOG" 2>&1 || exit 1
    done
done
[[ ${#array[@]} -gt 0 ]] || bash "$@" >> "$LOG" 2>&1 || exit 1
echo 4711
"""


def test_an_array_of_parts_and_its_merge_give_the_files_of_one_run(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    write_program(programs, "sbatch", SBATCH)
    write_program(programs, "megatron-ddrp", f'exec "{sys.executable}" -m megatron_ddrp "$@"')
    lines = [json.dumps({"text": "a b c d " * (n % 7), "title": "e f"}) + "\n" for n in range(40)]
    (tmp_path / "text.jsonl").write_text("".join(lines))
    log, recipe = tmp_path / "log", ROOT / "examples" / "preprocess_slurm.sh"
    settings = {"INPUT": str(tmp_path / "*.jsonl"), "VOCAB": write_vocabulary(tmp_path), "LOG": str(log)}
    settings |= {"PYTHONPATH": str(ROOT), "SLURM_CPUS_PER_TASK": "1"}
    for name, parts in (("parts", "2"), ("once", "1")):
        settings |= {"PREFIX": str(tmp_path / name), "PARTS": parts}
        done = run_script(recipe, settings, "--json-keys", "text", "title", in_front=programs)
        assert done.returncode == 0, log.read_text()
        assert done.stdout.splitlines() == ["parts: 4711", "merge: 4711"]
    assert log.read_text().count("--dependency=afterok:4711\n") == 2
    for end in ("text_document.bin", "text_document.idx", "title_document.bin", "title_document.idx"):
        assert (tmp_path / f"parts_{end}").read_bytes() == (tmp_path / f"once_{end}").read_bytes()


def test_sweeps_and_comparisons_are_arrays_of_commands_that_do_not_wait(tmp_path: Path) -> None:
    write_program(tmp_path / "bin", "megatron-ddrp", 'echo "$*"')
    settings = {"DATA": "glue", "LOAD": "a b", "OUT": "out", "PLAN": "plan.yaml"}
    for name, words in (("glue", "--data-dir glue --load a b"), ("compare", "plan.yaml")):
        recipe = ROOT / "examples" / f"{name}_slurm.sh"
        told = run_script(recipe, settings, "--bf16", in_front=tmp_path / "bin").stdout
        assert told == f"{name} {words} --output-dir out --workers 1 --no-wait --bf16\n"


SHOW = """
echo "$TRITON_CACHE_DIR $TORCHINDUCTOR_CACHE_DIR ${DS_ENV_FILE:-none}"
[[ ! -f ${DS_ENV_FILE:-} ]] || cat "$DS_ENV_FILE"
"""


def launch(name: str, tmp_path: Path, **given: str) -> list[str]:
    """Run a recipe whose launcher shows what it was given; return its lines."""
    for program in ("deepspeed", "python"):
        write_program(tmp_path / "bin", program, SHOW)
    for folder in ("home", "tmp"):
        (tmp_path / folder).mkdir()
    (tmp_path / "home" / ".deepspeed_env").write_text("OMP_NUM_THREADS=4\n")
    given |= {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "HOME": f"{tmp_path}/home", "TMPDIR": f"{tmp_path}/tmp"}
    words = ["bash", str(ROOT / "examples" / name)]
    return subprocess.run(words, env=given, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize("name", ["pretrain_ddrp_base_16gpu.sh", "pretrain_ddrp_3.9b_64gpu.sh"])
def test_caches_on_local_disks_and_the_interface_reach_all_machines(name: str, tmp_path: Path) -> None:
    shown, *sent = launch(name, tmp_path, GLOO_SOCKET_IFNAME="eth1", TRITON_CACHE_DIR="/scratch/triton")
    local = f"/tmp/torchinductor_{os.getuid()}"
    assert shown.startswith(f"/scratch/triton {local} /")
    caches = {"TRITON_CACHE_DIR=/scratch/triton", f"TORCHINDUCTOR_CACHE_DIR={local}"}
    assert set(sent) == {"GLOO_SOCKET_IFNAME=eth1", "OMP_NUM_THREADS=4", *caches}
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_file_of_the_user_stays_and_ranks_of_slurm_write_none(tmp_path: Path) -> None:
    own = tmp_path / "mine"
    own.write_text("A=1\n")
    shown, *rest = launch("pretrain_ddrp_3.9b_64gpu.sh", tmp_path, DS_ENV_FILE=str(own))
    assert shown.endswith(str(own)) and rest == ["A=1"]
    (tmp_path / "slurm").mkdir()
    [of_rank] = launch("pretrain_ddrp_base_16gpu.sh", tmp_path / "slurm", LAUNCHER="python")
    assert of_rank == f"/tmp/triton_{os.getuid()} /tmp/torchinductor_{os.getuid()} none"


def test_parts_of_an_example_are_paired_by_seed(tmp_path, monkeypatch, capsys):
    """The encoder is stood in for by one whose vectors turn by an angle of the folder's own."""
    losses = {"constant": (4.5, 4.6, 4.4), "decay": (4.3, 4.4, 4.1), "mlm": (5.0, 5.1, 5.2), "detour": (5.1, 5.1, 5.1)}
    losses |= {"head-0": (7.5, 7.6, 7.7), "head-25": (7.1, 7.3, 7.2)}
    for name, seed in itertools.product(losses, (1, 2, 3)):
        folder = tmp_path / f"{name}-{seed}"
        folder.mkdir()
        rows = [{"valid_lm_loss": 9.0}, {"valid_lm_loss": losses[name][seed - 1]}, {"lm_loss": 1.0}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "exit_code").write_text("0\n")
        merged = f" 16.67% of x | validation mlm 8.0000\nmean → mean-{seed} | validation mlm {4.35 + seed / 100:.4f}\n"
        (tmp_path / f"mean-{seed}.log").write_text(merged)
    table = "text,label\n" + "".join(f'"a, {i}",1\n' for i in range(9))
    (tmp_path / "test-films.csv").write_text(table)
    vectors = np.random.default_rng(1).normal(size=(9, 4))

    def encoder(folder: Path) -> SimpleNamespace:
        noise = 0.0 if folder.name == "minilm" else 0.1 if folder.name.startswith("head-25") else 1.0
        noisy = vectors + noise * np.random.default_rng(7).normal(size=(9, 4))
        return SimpleNamespace(pool=lambda texts, **_: noisy * (texts[0] == "a, 0"))

    monkeypatch.setattr(megatron_ddrp, "load_encoder", encoder)
    monkeypatch.setattr(sys, "argv", ["parts.py", str(tmp_path)])
    runpy.run_path(str(ROOT / "examples" / "domain" / "parts.py"), run_name="__main__")
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    found = {name: (float(gain), [float(end) for end in ends.split(" to ")]) for name, _, _, gain, ends in rows}
    for first, other, part in (
        ("decay", "constant", "decay"),
        ("detour", "mlm", "causal"),
        ("head-25", "head-0", "head"),
    ):
        gains = np.subtract(losses[first], losses[other])
        gain, ends = next(value for name, value in found.items() if part in name and "loss" in name)
        assert gain == pytest.approx(gains.mean(), abs=6e-4)
        assert ends == pytest.approx(stats.t.interval(0.95, 2, gains.mean(), stats.sem(gains)), abs=6e-4)
    assert found["loss of the mean, beside the decay"][0] == pytest.approx(4.37 - np.mean(losses["decay"]), abs=6e-4)
    with_head, without = map(float, rows[-1][1:3])
    assert 1 > with_head > without > 0 and len(rows) == 6


def test_gains_of_an_example_are_means_over_pairs_of_seeds_with_both_intervals(tmp_path, monkeypatch, capsys):
    """Against Pearson's correlation by numpy, and a gain that the same rows always have."""
    draws, rows, scores = np.random.default_rng(1), [], {}
    (tmp_path / "predictions").mkdir()
    labels = draws.normal(size=60)
    for seed, (name, noise) in itertools.product((1, 2, 3), (("theirs", 1.0), ("mlm", 0.5))):
        load = name if name == "theirs" else f"{name}-{seed}"
        point = {"batch_size": 16, "micro_batch_size": 8, "lr": 5e-5, "epochs": 4, "seed": seed, "max_seq_length": 64}
        predictions = labels + noise * draws.normal(size=60)
        scores[name, seed] = 100 * np.corrcoef(predictions, labels)[0, 1]
        numbers = list(zip(predictions, labels, strict=True))
        lines = [f"{file}\t{i}\t{p}\t{a}" for file in ("dev", "films") for i, (p, a) in enumerate(numbers)]
        score = scores[name, seed] / 100
        facts = {"name": "domain", "metric": "pearson", "kind": "regression", "labels": []}
        scored = {"score": score, "other_scores": {"films": score}, "other_undefined": [], "facts": facts}
        rows.append({"task": "domain", "load": f"runs/{load}", "encoder": load, "data": "d", **point, **scored})
        file = predictions_file(tmp_path, TuningRun.of_row(rows[-1]))
        file.write_text("\n".join(["file\tindex\tprediction\tlabel", *lines]) + "\n")
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(sys, "argv", ["gains.py", str(tmp_path), "theirs", "mlm"])
    runpy.run_path(str(ROOT / "examples" / "domain" / "gains.py"), run_name="__main__")
    cells = capsys.readouterr().out.splitlines()[-1].strip("| ").split(" | ")
    found = np.array([scores["mlm", seed] - scores["theirs", seed] for seed in (1, 2, 3)])
    of_theirs = np.mean([scores["theirs", seed] for seed in (1, 2, 3)])
    assert cells[:4] == ["mlm", "films", f"{of_theirs:.1f}", f"{found.mean():+.1f}"]
    by_seeds, (low, high) = ([float(each) for each in cell.split(" to ")] for cell in cells[4:6])
    assert by_seeds == pytest.approx(stats.t.interval(0.95, 2, found.mean(), stats.sem(found)), abs=0.051)
    assert low < found.mean() < high and cells[6] == "3"
