"""Every recipe parses, says at its top what it is, and its training command passes a dry run; Slurm has stand-ins."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.commands.pretrain import main
from megatron_ddrp.errors import UserError
from tests.integration.launch import run_program
from tests.refusals import wrong_arguments

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "examples").glob("*.sh"))
TRAINING = [path for path in RECIPES if path.name.startswith("pretrain_")]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_recipe_says_what_it_needs_and_its_help_shows_that_and_starts_nothing(path: Path, tmp_path: Path) -> None:
    head = path.read_text(encoding="utf-8").split("set -euo pipefail")[0]
    for word in ("hardware", "time", "result"):
        assert f"#   {word}" in head, f"{path.name} does not say its {word} on top"
    subprocess.run(["bash", "-n", str(path)], check=True)
    # `sed` is the only program that it finds.
    (tmp_path / "sed").symlink_to(shutil.which("sed") or "sed")
    command = [shutil.which("bash") or "bash", str(path)]
    shown = [
        subprocess.run([*command, word], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True)
        for word in ("-h", "--help")
    ]
    assert shown[0].stdout == shown[1].stdout and shown[0].stderr == ""
    lines = head.splitlines()[1:]
    words = [line.removeprefix("#").removeprefix(" ") for line in lines if not line.startswith("#SBATCH")]
    assert shown[0].stdout.splitlines() == words


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.name)
def test_a_training_recipe_runs_dry(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What its shell gives to `python` is read here and run in this process."""
    program, *words = words_for_python(path, tmp_path)
    assert program == "pretrain_bert.py"
    facts = dry_run(words, capsys)
    encoders = 1 + ("electra" in path.name)
    relative = 67 * 64 * encoders  # D and K^rd at head size 64; absolute positions are one for generator and model
    expected = {"pretrain_bert_tnf": 512 * 768, "pretrain_electra_tnf": 512 * 768, "pretrain_modern_base": 0}
    expected["pretrain_fast_cpu"] = 128 * 128 + 67 * 32  # absolute positions too, and heads of 32
    expected["pretrain_laptop_cpu"] = 0  # rotary positions
    assert facts["position_parameters"] == expected.get(path.stem, relative)
    assert not (tmp_path / "save").exists()
    assert_fits(facts, machine_of(path), path)
    given = ["--world-size", "4", "--device-memory", "81", "--micro-batch-size", "2"]
    parsed = parse_arguments(words_for_python(path, tmp_path, *given)[1:])
    assert (parsed.world_size, parsed.device_memory, parsed.config.training.micro_batch_size) == (4, 81, 2)


def dry_run(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return what `pretrain_bert.py --dry-run` prints as JSON. Raises `UserError` for what it refuses."""
    capsys.readouterr()
    assert main(words) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_settings_in_yaml_are_those_of_the_recipe_and_run_dry(tmp_path, capsys):
    recipe = ROOT / "examples" / "pretrain_ddrp_base_8gpu.sh"
    program, *words = words_for_python(recipe, tmp_path)
    settings = ROOT / "examples" / "pretrain_base.yaml"
    data = words[: words.index("--split")]
    flags = ["--config", str(settings), *data, *words[words.index("--save") : words.index("--load") + 2]]
    assert parse_arguments(flags).config == parse_arguments(words).config
    facts = dry_run([*flags, "--dry-run", "--world-size", "8"], capsys)
    assert facts["train_iters"] == 1_000_000
    assert_fits(facts, machine_of(settings), recipe)


class Machine(NamedTuple):
    """What a recipe names on top."""

    count: int
    devices: int
    is_gpu: bool
    gigabytes: int


def machine_of(path: Path) -> Machine:
    """From the line that begins `hardware`."""
    line = re.search(r"#   hardware +(.*)", path.read_text(encoding="utf-8"))
    assert line, path.name
    found = re.match(r"(?:(one|\d+) (?:machines?|nodes) with )?(\d+) (GPUs?|CPU cores) .*?(\d+) GB", line[1])
    assert found, f"{path.name} names no machine: {line[1]}"
    count, devices, kind, gigabytes = found.groups(default="one")
    return Machine(1 if count == "one" else int(count), int(devices), kind != "CPU cores", int(gigabytes))


def assert_fits(facts: dict[str, Any], machine: Machine, path: Path) -> None:
    """Every GPU has its rank, tensor-parallel neighbours share a machine, and a tenth of the memory is left."""
    devices = machine.count * machine.devices
    assert facts["world_size"] == devices if machine.is_gpu else facts["world_size"] <= devices
    assert machine.devices % facts["tensor_parallel"] == 0
    assert facts["memory_per_rank_bytes"] < 0.9 * machine.gigabytes * 2**30
    text = path.read_text(encoding="utf-8")
    for other in re.findall(r"RECIPE=(examples/\w+\.sh)", text):  # a recipe that runs another
        text += (ROOT / other).read_text(encoding="utf-8")
    assert f'--device-memory {machine.gigabytes} "${{ARGS[@]}}"\n' in text
    if "--num_gpus" in text and machine.is_gpu:
        assert f"--num_gpus {machine.devices} " in text
    if "\n#SBATCH" in text:
        assert f"--nodes={machine.count}\n" in text and f"--ntasks-per-node={machine.devices}\n" in text
    hostfile = re.search(r"HOSTFILE:-(examples/\w+)", text)
    if hostfile:
        slots = re.findall(r"^\S+ slots=(\d+)$", (ROOT / hostfile[1]).read_text(encoding="utf-8"), re.MULTILINE)
        assert slots == [str(machine.devices)] * machine.count


def test_every_kind_of_machine_has_its_recipe_whose_launcher_writes_no_log() -> None:
    machines = {machine_of(path) for path in TRAINING}
    sizes = {machine.count * machine.devices for machine in machines if machine.is_gpu}
    assert {1, 8, 16, 64} <= sizes and any(not machine.is_gpu for machine in machines)
    assert Machine(2, 8, True, 32) in machines  # the paper's 16 V100
    assert any("\n#SBATCH" in path.read_text(encoding="utf-8") for path in TRAINING)
    for path in RECIPES:
        starts = re.findall(r"\bdeepspeed --[a-z]+", path.read_text(encoding="utf-8"))
        assert set(starts) <= {"deepspeed --quiet"}, path.name


def test_a_recipe_that_does_not_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    """The first start is that of a user; the second gives the same words to this process."""
    script = ROOT / "examples" / "pretrain_ddrp_base_8gpu.sh"
    too_large = ("--micro-batch-size", "256", "--global-batch-size", "2048")
    done = run_script(script, environment_of_recipe(tmp_path), *too_large)
    assert done.returncode == 2 and "a rank needs about" in done.stderr and len(done.stderr.splitlines()) == 1
    _, *words = words_for_python(script, tmp_path, "--pipeline-model-parallel-size", "3")
    wrong_arguments("does not divide the number of ranks, 8", main, words)


SLURM = ROOT / "examples" / "pretrain_ddrp_base_slurm.sh"
IN_A_JOB = {"SLURM_JOB_ID": "20007", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2"}


def run_slurm(
    tmp_path: Path, environment: dict[str, str], *words: str, rank: str = "exit 75", dry: str = "exit 0"
) -> subprocess.CompletedProcess[str]:
    """The Slurm recipe with stand-ins for its commands; `rank` and `dry` are what a rank and a dry run do."""
    for name, script in {
        "sbatch": 'echo "sbatch $*"',
        "srun": 'echo "srun $SLURM_NTASKS $SLURM_NTASKS_PER_NODE $1 $2"; shift 2; "$@"',
        "scontrol": 'if [[ $1 == show ]]; then echo node1; else echo "scontrol $*"; fi',
        "python": f'if [[ " $* " == *" --dry-run "* ]]; then printf "%s\\0" "$@" > {tmp_path}/dry; {dry}; fi; '
        f'echo "$MASTER_ADDR:$MASTER_PORT python $*"; {rank}',
    }.items():
        write_program(tmp_path / "stubs", name, script)
    given = {"DATA": write_dataset(tmp_path), "VOCAB": write_vocabulary(tmp_path), "SAVE": str(tmp_path / "save")}
    given |= {"SLURM_SUBMIT_DIR": str(ROOT), **environment}
    return run_script(SLURM, given, *words, in_front=tmp_path / "stubs")


def words_of_dry_run(tmp_path: Path) -> list[str]:
    """Return what the Slurm recipe gave to `pretrain_bert.py` for its dry run."""
    program, *words = (tmp_path / "dry").read_text().split("\0")[:-1]
    assert program == "pretrain_bert.py"
    return words


def test_the_slurm_recipe_starts_the_ranks_and_queues_itself_again(tmp_path: Path) -> None:
    done = run_slurm(tmp_path, IN_A_JOB | {"SLURM_CPUS_PER_TASK": "6"}, "--seed", "7")
    step, started, queued = done.stdout.splitlines()
    assert step == "srun 16 8 --kill-on-bad-exit=1 --cpus-per-task=6"
    assert started.startswith("node1:20007 python pretrain_bert.py --data-path ")
    assert started.endswith(" --seed 7") and "--dry-run" not in started
    assert (done.returncode, queued) == (75, "scontrol requeue 20007")


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        ({"SLURM_NNODES": "4"}, "32 8"),
        ({"SLURM_NNODES": "3", "SLURM_GPUS_PER_NODE": "4"}, "12 4"),
        ({"SLURM_NNODES": "1", "SLURM_GPUS_PER_NODE": "v100:2"}, "2 2"),
        ({"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "6"}, "12 6"),
    ],
)
def test_the_slurm_recipe_has_the_ranks_of_its_nodes(variables: dict[str, str], ranks: str, tmp_path: Path) -> None:
    done = run_slurm(tmp_path, IN_A_JOB | variables, rank="exit 0")
    assert done.returncode == 0 and done.stdout.startswith(f"srun {ranks} --kill-on-bad-exit=1 ")


@pytest.mark.parametrize(
    ("rank", "code"),
    [
        ('mkdir -p "$SAVE"; echo 75 > "$SAVE/exit_code"; exit 143', 75),
        ('mkdir -p "$SAVE"; echo 0 > "$SAVE/exit_code"; exit 137', 0),
        ("exit 137", 137),
        ("exit 2", 2),
        ("exit 0", 0),
    ],
)
@pytest.mark.parametrize("as_flag", [(), ("--save",), ("--save=",)])
def test_the_slurm_recipe_follows_the_code_of_the_run(rank, code, as_flag, tmp_path):
    """`srun` reports a rank that it killed, and an earlier job has left a code in the folder."""
    save = tmp_path / "own"
    save.mkdir()
    (save / "exit_code").write_text("75\n")
    flags = {(): (), ("--save",): ("--save", str(save)), ("--save=",): (f"--save={save}",)}[as_flag]
    variables = {} if as_flag else {"SAVE": str(save)}
    done = run_slurm(tmp_path, IN_A_JOB | variables, *flags, rank=rank.replace("$SAVE", str(save)))
    assert done.returncode == code and ("scontrol requeue 20007" in done.stdout) == (code == 75)


LARGE = ("--micro-batch-size", "256", "--global-batch-size", "4096")


@pytest.mark.parametrize(
    ("variables", "words", "queued"),
    [
        ({"NODES": "4", "GPUS": "4"}, ("--seed", "7"), "--nodes=4 --ntasks-per-node=4 --gpus-per-node=4"),
        ({"NODES": "3"}, (), ""),
        ({"NODES": "3", "DRY_RUN": "1"}, (), ""),
        ({}, ("--micro-batch-size", "32"), ""),
        ({}, ("--no-such-flag",), ""),
        ({}, LARGE, ""),
        ({"DEVICE_MEMORY": "800"}, LARGE, "--nodes=2 --ntasks-per-node=8 --gpus-per-node=8"),
    ],
)
def test_the_slurm_recipe_queues_only_what_a_dry_run_accepts(variables, words, queued, tmp_path, capsys):
    done = run_slurm(tmp_path, variables, *words)
    if queued:
        assert dry_run(words_of_dry_run(tmp_path), capsys)
        last = done.stdout.splitlines()[-1]
        assert last == " ".join(["sbatch", queued, "examples/pretrain_ddrp_base_slurm.sh", *words]), done.stderr
        return
    try:
        main(words_of_dry_run(tmp_path))
    except UserError as refusal:
        assert refusal.exit_code == 2
    except SystemExit as ended:  # argparse has printed its line
        assert ended.code == 2
    else:
        pytest.fail("the dry run accepts it")
    # In the shell: with a stand-in that refuses, and where no import of torch is needed, with the real program.
    as_a_user = f'exec {sys.executable} "$@"' if words == ("--no-such-flag",) else "echo refused >&2; exit 2"
    done = run_slurm(tmp_path, variables, *words, dry=as_a_user)
    assert done.returncode == 2 and "sbatch" not in done.stdout and len(done.stderr.splitlines()) == 1, done.stderr


def test_seeds_are_an_array_of_runs_with_folders_of_their_own(tmp_path, capsys):
    done = run_slurm(tmp_path, {"SEEDS": "1-5%2"}, "--lr", "2e-4")
    assert dry_run(words_of_dry_run(tmp_path), capsys)
    queued = "sbatch --array=1-5%2 --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 examples/pretrain_ddrp_base_slurm.sh"
    assert done.stdout.splitlines()[-1] == f"{queued} --lr 2e-4", done.stderr
    assert "array: seeds 1-5%2, each on 2 nodes, saved in " in done.stderr
    rank = f"mkdir -p {tmp_path / 'save-seed3'}; echo 75 > {tmp_path / 'save-seed3' / 'exit_code'}; exit 143"
    of_array = {"SLURM_ARRAY_JOB_ID": "20005", "SLURM_ARRAY_TASK_ID": "3"}
    done = run_slurm(tmp_path, IN_A_JOB | of_array, "--lr", "2e-4", rank=rank)
    _, started, requeued = done.stdout.splitlines()
    folder = tmp_path / "save-seed3"
    assert f" --save {folder} --load {folder} --seed 3 --lr 2e-4" in started
    assert (done.returncode, requeued) == (75, "scontrol requeue 20005_3")  # this task alone


@pytest.mark.parametrize("flag", ["--seed", "--save", "--load"])
def test_a_flag_that_all_seeds_would_share_is_refused(flag: str, tmp_path: Path) -> None:
    for variables in ({"SEEDS": "1-5"}, IN_A_JOB | {"SLURM_ARRAY_TASK_ID": "3"}):
        done = run_slurm(tmp_path, variables, f"{flag}=7")
        assert done.returncode == 2 and not done.stdout and f"{flag} beside SEEDS" in done.stderr


@pytest.mark.parametrize("plan", sorted((ROOT / "examples" / "compare").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_ready_comparison_runs_dry(plan: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "a b c d e f g h"}\n')
    for task in ("RTE", "STS-B", "MRPC", "CoLA", "SST-2", "QNLI", "QQP", "MNLI"):
        (tmp_path / "glue" / task).mkdir(parents=True)
    (tmp_path / "pairs").mkdir()
    (tmp_path / "pairs" / "order.jsonl").write_text('{"sentence_good": "a b", "sentence_bad": "b a"}\n')
    environment = {"OUT": str(tmp_path / "out"), "CORPUS": str(text), "GLUE": str(tmp_path / "glue"), "DRY_RUN": "1"}
    environment["PAIRS"] = str(tmp_path / "pairs") if plan.stem in ("measures", "ladder", "fast") else "none"
    flags = []
    if plan.stem == "paper":  # takes a dataset that is there
        del environment["CORPUS"]
        flags = ["--data-path", write_dataset(tmp_path), "--vocab-file", write_vocabulary(tmp_path)]
    module, *words = words_of_script(ROOT / "examples" / "compare.sh", environment, tmp_path, str(plan), *flags)
    assert module == "tasks.compare"
    done = run_program(module, *words)
    assert done.returncode == 0, done.stderr
    commands = [line for line in done.stdout.splitlines() if line.startswith("  $ ")]
    trainings = [line for line in commands if " megatron-ddrp pretrain " in line or " megatron_ddrp pretrain " in line]
    expected = {"backbones": 72, "cpu-hours": 24, "gpu-30min": 42, "measures": 20, "paper": 38, "ladder": 194}
    expected |= {"plateau": 103, "fast": 72, "novels": 6, "depth": 33, "recipe-rates": 24}
    assert len(trainings) == expected[plan.stem]
    assert re.search(rf"^ +{len(trainings)} x run$", done.stdout, re.MULTILINE)
    assert not (tmp_path / "out").exists()
    for line in {re.sub(r"--(seed|save|load) \S+", "", line) for line in trainings}:
        words = shlex.split(line)
        words = words[words.index("pretrain") + 1 :]
        assert parse_arguments(words).config.training.train_iters > 1


def test_the_papers_corpus_is_built_from_wikipedia_and_books(tmp_path: Path) -> None:
    wiki, books = tmp_path / "wiki" / "AA", tmp_path / "books"
    wiki.mkdir(parents=True)
    books.mkdir()
    article = (
        '<doc id="{0}" url="u" title="T{0}">\nT{0}\n\nThe article number {0} is about birds and towns.\n\n</doc>\n'
    )
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


def run_script(
    path: Path, environment: dict[str, str], *words: str, in_front: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """A script that finds programs `in_front` and beside this Python first."""
    folders = [*([in_front] if in_front else []), Path(sys.executable).parent, os.environ["PATH"]]
    return subprocess.run(
        ["bash", str(path), *words],
        env={**os.environ, "PATH": os.pathsep.join(map(str, folders)), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def environment_of_recipe(tmp_path: Path) -> dict[str, str]:
    """Return the variables of a recipe under DRY_RUN=1, on a dataset of its own."""
    files = {"DATA": write_dataset(tmp_path), "VOCAB": write_vocabulary(tmp_path), "SAVE": str(tmp_path / "save")}
    return files | {"DRY_RUN": "1"}


def words_for_python(path: Path, tmp_path: Path, *flags: str) -> list[str]:
    """The words after `python` in the command of a recipe under DRY_RUN=1, given more flags."""
    return words_of_script(path, environment_of_recipe(tmp_path), tmp_path, *flags)


def words_of_script(path: Path, environment: dict[str, str], tmp_path: Path, *words: str) -> list[str]:
    """Return the program or module that a script starts with `python`, and its words."""
    write_program(tmp_path / "bin", "python", "[[ $1 != -m ]] || shift\nprintf '%s\\0' \"$@\"")
    done = run_script(path, environment, *words, in_front=tmp_path / "bin")
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\0")[:-1]


def write_vocabulary(folder: Path) -> str:
    """Write the special tokens and eight letters as a vocabulary; return its path."""
    path = folder / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]) + "\n")
    return str(path)


def write_dataset(folder: Path) -> str:
    """Thirty documents of 40 tokens: eight words, each often enough for the notes of rare words and not too often."""
    from tests.datasets import write_dataset

    return write_dataset(folder / "corpus_text_document", [[[5 + i % 8 for i in range(40)]]] * 30).prefix


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


def write_program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/usr/bin/env bash\n{script}\n", encoding="utf-8")
    (folder / name).chmod(0o755)


def test_an_array_of_parts_and_its_merge_give_the_files_of_one_run(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    write_program(programs, "sbatch", SBATCH)
    write_program(programs, "megatron-ddrp", f'exec "{sys.executable}" -m megatron_ddrp "$@"')
    lines = [json.dumps({"text": "a b c d " * (n % 7), "title": "e f"}) + "\n" for n in range(40)]
    (tmp_path / "text.jsonl").write_text("".join(lines))
    log = tmp_path / "log"
    settings = {"INPUT": str(tmp_path / "*.jsonl"), "VOCAB": write_vocabulary(tmp_path), "LOG": str(log)}
    settings |= {"PYTHONPATH": str(ROOT), "SLURM_CPUS_PER_TASK": "1"}
    for name, parts in (("parts", "2"), ("once", "1")):
        settings |= {"PREFIX": str(tmp_path / name), "PARTS": parts}
        recipe = ROOT / "examples" / "preprocess_slurm.sh"
        done = run_script(recipe, settings, "--json-keys", "text", "title", in_front=programs)
        assert done.returncode == 0, log.read_text()
        assert done.stdout.splitlines() == ["parts: 4711", "merge: 4711"]
    assert log.read_text().count("--dependency=afterok:4711\n") == 2
    for key in ("text", "title"):
        for suffix in ("bin", "idx"):
            parts, once = (tmp_path / f"{name}_{key}_document.{suffix}" for name in ("parts", "once"))
            assert parts.read_bytes() == once.read_bytes()


def test_sweeps_and_comparisons_are_arrays_of_commands_that_do_not_wait(tmp_path: Path) -> None:
    write_program(tmp_path / "bin", "megatron-ddrp", 'echo "$*"')
    settings = {"DATA": "glue", "LOAD": "a b", "OUT": "out", "PLAN": "plan.yaml"}
    told = {
        name: run_script(ROOT / "examples" / f"{name}_slurm.sh", settings, "--bf16", in_front=tmp_path / "bin").stdout
        for name in ("glue", "compare")
    }
    assert told["glue"] == "glue --data-dir glue --load a b --output-dir out --workers 1 --no-wait --bf16\n"
    assert told["compare"] == "compare plan.yaml --output-dir out --workers 1 --no-wait --bf16\n"


SHOW = """
echo "$TRITON_CACHE_DIR $TORCHINDUCTOR_CACHE_DIR ${DS_ENV_FILE:-none}"
[[ ! -f ${DS_ENV_FILE:-} ]] || cat "$DS_ENV_FILE"
"""


def launch(name: str, tmp_path: Path, **variables: str) -> list[str]:
    """Run a recipe whose launcher shows what it was given; return its lines."""
    for program in ("deepspeed", "python"):
        write_program(tmp_path / "bin", program, SHOW)
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    home.mkdir()
    temporary.mkdir()
    (home / ".deepspeed_env").write_text("OMP_NUM_THREADS=4\n")
    surroundings = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "HOME": str(home), "TMPDIR": str(temporary)}
    words = ["bash", str(ROOT / "examples" / name)]
    return subprocess.run(
        words, env=surroundings | variables, capture_output=True, text=True, check=True
    ).stdout.splitlines()


@pytest.mark.parametrize("name", ["pretrain_ddrp_base_16gpu.sh", "pretrain_ddrp_3.9b_64gpu.sh"])
def test_caches_on_local_disks_and_the_interface_reach_all_machines(name: str, tmp_path: Path) -> None:
    shown, *sent = launch(name, tmp_path, GLOO_SOCKET_IFNAME="eth1", TRITON_CACHE_DIR="/scratch/triton")
    local = f"/tmp/torchinductor_{os.getuid()}"
    assert shown.startswith(f"/scratch/triton {local} /")
    caches = {"TRITON_CACHE_DIR=/scratch/triton", f"TORCHINDUCTOR_CACHE_DIR={local}"}
    assert set(sent) == {"GLOO_SOCKET_IFNAME=eth1", "OMP_NUM_THREADS=4", *caches}
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_file_of_the_user_stays_and_ranks_of_slurm_write_none(tmp_path: Path) -> None:
    own = tmp_path / "mine"
    own.write_text("A=1\n")
    shown = launch("pretrain_ddrp_3.9b_64gpu.sh", tmp_path, DS_ENV_FILE=str(own))
    assert shown[0].endswith(str(own)) and shown[1:] == ["A=1"]
    (tmp_path / "slurm").mkdir()
    [of_rank] = launch("pretrain_ddrp_base_16gpu.sh", tmp_path / "slurm", LAUNCHER="python")
    assert of_rank == f"/tmp/triton_{os.getuid()} /tmp/torchinductor_{os.getuid()} none"
