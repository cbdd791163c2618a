"""A user's mistake costs one clear line: the right exit code, no traceback, nothing written and nothing lost.

No damaged file is silent or ends in a traceback: some of the cases of `python -m tests.endurance.damage`.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_ddrp.data.dataset.merging import shuffle
from megatron_ddrp.engine.build import instead_of_fp16
from tests.conftest import TinyCorpus
from tests.endurance.damage.kinds import KINDS, all_cases, some_cases
from tests.endurance.damage.readers import READERS, Ended, result_of
from tests.endurance.damage.verdict import (
    HANG,
    HARMLESS,
    NOISE,
    REFUSED,
    SILENT,
    TOLD,
    TRACEBACK,
    UNDETECTABLE,
    Healthy,
    judge,
    plain_lines,
)
from tests.integration.conftest import Flags
from tests.integration.launch import ROOT, Result, environment, lines, start_ranks

WRONG_ARGUMENTS, FAILURE = 2, 1
PLUGIN = Path(__file__).with_name("plugin_encoding.py")


def assert_refused(result: Result, exit_code: int, *words: str) -> None:
    """Every rank ends with the code; one line in all, and it holds the words."""
    assert result.exit_codes == [exit_code] * len(result.exit_codes), "\n".join(result.stderr)
    said = [line for stderr in result.stderr for line in lines(stderr)]
    assert len(said) == 1, "\n".join(said)
    assert said[0].startswith("pretrain_bert.py: error: ")
    for word in words:
        assert word in said[0]


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file of a folder."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def refuse(flags: Flags, folder: Path, changes: dict[str, Any], exit_code: int, *words: str) -> None:
    """Run with wrong settings; the folder of the run must not come to be."""
    assert_refused(start_ranks(flags(save=folder / "run", **changes)), exit_code, *words)
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seed", 2], "--seed is 2 on rank 1 (host"),
        (["--tensor-model-parallel-size", 2], "--tensor-model-parallel-size is 2 on rank 1 (host"),  # another grid
        (["--data-path", "MIXED"], "the training data is 600 documents"),
        (["--data-path", "DATA", "MIXED"], "the training data is 600 documents"),
        (["--save", "elsewhere"], "--save is elsewhere on rank 1 (host"),
        (["--plugin", PLUGIN], "the code of plug-in 1 is"),
        (["--deepspeed_config", "TWO"], "zero_optimization.reduce_bucket_size of --deepspeed_config is 2000 on rank 1"),
    ],
    ids=lambda value: "-".join(map(str, value[:1] + value[2:])) if isinstance(value, list) else "",
)
def test_a_host_with_another_command_is_refused(
    words: list[Any], said: str, flags: Flags, tiny_corpus: TinyCorpus, tmp_path: Path
) -> None:
    files = {"DATA": tiny_corpus.prefix, "MIXED": shuffle(tmp_path / "mixed", str(tiny_corpus.prefix), 1).prefix}
    for number, name in enumerate(("ONE", "TWO"), 1):
        files[name] = tmp_path / name
        files[name].write_text(json.dumps({"zero_optimization": {"reduce_bucket_size": number * 1000}}))
    first = {"deepspeed_config": files["ONE"]} if "TWO" in words else {"verify_data": "DATA" in words}
    own = [files.get(word, word) for word in words]
    assert_refused(start_ranks(flags(save=tmp_path / "run", **first), 2, last_arguments=own), WRONG_ARGUMENTS, said)
    assert not (tmp_path / "run").exists()


def test_a_host_may_keep_its_copy_of_the_data_elsewhere(flags: Flags, tiny_corpus: TinyCorpus, tmp_path: Path) -> None:
    copy = copied_dataset(tiny_corpus, tmp_path, ".bin", ".idx")
    start_ranks(flags(train_iters=2), 2, last_arguments=["--data-path", copy]).check()


REFUSALS: list[tuple[dict[str, Any], int, tuple[str, ...]]] = [
    ({"hidden_size": 33}, WRONG_ARGUMENTS, ("--hidden-size 33", "--num-attention-heads 4")),
    ({"hidden_sizes": 32}, WRONG_ARGUMENTS, ("--hidden-sizes", "did you mean --hidden-size?")),
    ({"global_batch_size": 10}, WRONG_ARGUMENTS, ("--global-batch-size is 10", "8 or 12")),
    ({"split": "90,-1"}, WRONG_ARGUMENTS, ("--split", "90,-1")),
    ({"data_path": None}, WRONG_ARGUMENTS, ("--data-path is missing",)),
    ({"vocab_file": ""}, WRONG_ARGUMENTS, ("--vocab-file: got '', expected some text",)),
    ({"data_path": "nowhere"}, FAILURE, ("nowhere",)),
    ({"vocab_file": "nowhere"}, FAILURE, ("nowhere",)),
]
"""Settings, the exit code and words of the one line: one of each place that refuses; all others are in tests/unit."""


@pytest.mark.parametrize(("changes", "exit_code", "words"), REFUSALS, ids=lambda value: str(value)[:50])
def test_a_wrong_setting_is_refused(
    changes: dict[str, Any], exit_code: int, words: tuple[str, ...], flags: Flags, tmp_path: Path
) -> None:
    refuse(flags, tmp_path, changes, exit_code, *words)


def forbid_fp16_on_the_cpu() -> None:
    """Make DeepSpeed refuse it as on most CPUs; those with AVX512-FP16 or AMX-FP16 have it."""
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda self: False


def test_fp16_on_a_cpu_without_it(flags: Flags, tmp_path: Path) -> None:
    result = start_ranks(flags(save=tmp_path / "run", fp16=True), before=forbid_fp16_on_the_cpu)
    assert_refused(result, WRONG_ARGUMENTS, "--fp16: there is no GPU here", instead_of_fp16())
    assert not (tmp_path / "run").exists()


def test_vocabulary_of_another_dataset(tiny_corpus: TinyCorpus, flags: Flags, tmp_path: Path) -> None:
    vocab_file = tmp_path / "other.txt"
    vocab_file.write_text(tiny_corpus.vocab_file.read_text(encoding="utf-8") + "unheard\n", encoding="utf-8")
    refuse(flags, tmp_path, {"vocab_file": vocab_file}, FAILURE, "made by tokenizer", "preprocess")


def test_no_vocabulary_beside_a_dataset_that_names_none(tiny_corpus: TinyCorpus, flags: Flags, tmp_path: Path) -> None:
    without_manifest = copied_dataset(tiny_corpus, tmp_path, ".bin", ".idx")
    changes = {"vocab_file": None, "data_path": without_manifest}
    refuse(flags, tmp_path, changes, WRONG_ARGUMENTS, "--vocab-file")


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_model_that_memory_does_not_hold(world_size: int, flags: Flags) -> None:
    result = start_ranks(flags(hidden_size=10**8), world_size)
    assert_refused(result, FAILURE, "out of memory: DefaultCPUAllocator: can't allocate", "--hidden-size", "--dry-run")


def copied_dataset(corpus: TinyCorpus, folder: Path, *suffixes: str) -> Path:
    """A dataset of our own to damage."""
    prefix = folder / "copied"
    for suffix in suffixes:
        shutil.copy(f"{corpus.prefix}{suffix}", f"{prefix}{suffix}")
    return prefix


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ids_beyond_the_vocabulary(world_size: int, tiny_corpus: TinyCorpus, flags: Flags, tmp_path: Path) -> None:
    prefix = copied_dataset(tiny_corpus, tmp_path, ".bin", ".idx")  # no manifest that would tell sooner
    pieces = tiny_corpus.vocab_file.read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "short.txt").write_text("".join(pieces[:300]), encoding="utf-8")
    arguments = flags(data_path=prefix, vocab_file=tmp_path / "short.txt")
    result = start_ranks(arguments, world_size)
    assert_refused(result, FAILURE, "token ids from", "300 pieces")


def test_damaged_dataset(tiny_corpus: TinyCorpus, flags: Flags, tmp_path: Path) -> None:
    """One damage stands for all that tests/unit/data/test_indexed_dataset.py knows: a file that was cut off."""
    prefix = copied_dataset(tiny_corpus, tmp_path, ".bin", ".idx", ".json")
    path = Path(f"{prefix}.idx")
    path.write_bytes(path.read_bytes()[:-3])
    refuse(flags, tmp_path, {"data_path": prefix}, FAILURE, str(path))


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_verified_data(world_size: int, tiny_corpus: TinyCorpus, flags: Flags, tmp_path: Path) -> None:
    prefix = copied_dataset(tiny_corpus, tmp_path, ".bin", ".idx", ".json")
    arguments = flags(data_path=prefix, verify_data=True, train_iters=1, eval_interval=0)
    assert f"data verified: {prefix} as in the manifest" in start_ranks(arguments, world_size).check().stdout[0]
    path = Path(f"{prefix}.bin")
    data = bytearray(path.read_bytes())
    data[100] ^= 1  # another id of the vocabulary
    path.write_bytes(data)
    assert_refused(start_ranks(arguments, world_size), FAILURE, f"{path}: SHA-256", "changed since", "preprocess again")
    Path(f"{prefix}.json").unlink()
    words = ("--verify-data", f"{prefix}.json", "no such file")
    assert_refused(start_ranks(arguments, world_size), WRONG_ARGUMENTS, *words)


def test_deepspeed_file_decides_what_no_flag_does(flags: Flags, tmp_path: Path) -> None:
    path = tmp_path / "deepspeed.json"
    adam = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.25}}
    settings = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "optimizer": adam}
    path.write_text(json.dumps(settings | {"train_batch_size": "auto"}), encoding="utf-8")
    run = tmp_path / "run"
    result = start_ranks(flags(deepspeed_config=path, train_iters=1, save=run)).check()
    told = "--bf16 True, --zero-stage 2, --weight-decay 0.25, --optimizer adamw"
    assert result.stdout[0].splitlines()[0] == f"decided by --deepspeed-config {path}: {told}"
    assert "ZeRO 2" in result.stdout[0]
    stored = json.loads((run / "config.json").read_bytes())
    assert stored["parallel"]["decided_by_deepspeed_config"] == ["bf16", "zero_stage", "weight_decay", "optimizer"]
    assert (stored["training"]["bf16"], stored["optimizer"]["weight_decay"]) == (True, 0.25)
    again = start_ranks(["--config", run / "config.json", "--save", tmp_path / "again"]).check().stdout[0].splitlines()
    assert again[0] == f"--config {run / 'config.json'}: --save of that run not taken; give your own"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": 3}, ("another architecture", "--num-layers is 2 there and 3 here", "config.json has them all")),
        ({"position_encoding": "absolute"}, ("another architecture", "--position-encoding is ddrp")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_checkpoint_of_another_model(changes: dict[str, Any], words: tuple[str, ...], run: Path, flags: Flags) -> None:
    before = contents(run)
    arguments = flags(save=run, load=run, **{"train_iters": 4, **changes})
    assert_refused(start_ranks(arguments, world_size=2), FAILURE, *words)
    assert contents(run) == before


@pytest.mark.slow
def test_a_damaged_checkpoint_that_is_the_only_one(run: Path, flags: Flags) -> None:
    """All ranks stop with it, and nothing is overwritten. Each file's damage is in tests/unit/test_checkpoint.py."""
    for older in ("iter_0000001", "iter_0000002"):
        shutil.rmtree(run / older)
    shard = run / "iter_0000003" / "weights-00-of-01.safetensors"
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    before = contents(run)
    result = start_ranks(flags(save=run, load=run, train_iters=4), world_size=2)
    assert_refused(result, FAILURE, str(run), "no complete checkpoint", f"iter_0000003: {shard.name}")
    assert contents(run) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "exit_code"),
    [({"hidden_size": 33}, WRONG_ARGUMENTS), ({"vocab_file": "nowhere.txt"}, FAILURE), ({"bogus": 1}, WRONG_ARGUMENTS)],
    ids=["argument", "file", "flag"],
)
def test_two_ranks_say_it_once(changes: dict[str, Any], exit_code: int, flags: Flags) -> None:
    assert_refused(start_ranks(flags(**changes), world_size=2), exit_code)


def test_a_run_is_not_laid_over_another_one(flags: Flags, tmp_path: Path) -> None:
    """Neither afresh nor from a third folder: checkpoints, metrics.jsonl and `latest` of the first would be lost."""
    run, other = tmp_path / "run", tmp_path / "other"
    start_ranks(flags(save=run, train_iters=1)).check()
    before = contents(tmp_path)
    for load in ({}, {"load": other}):
        assert_refused(start_ranks(flags(save=run, train_iters=1, **load)), FAILURE, f"--load {run}", "another --save")
    assert contents(tmp_path) == before


def test_load_of_what_is_no_run_is_told_the_way(flags: Flags, tmp_path: Path) -> None:
    """A checkpoint of the run itself would be laid over, and a Hugging Face folder would count as empty."""
    one, exported = tmp_path / "run" / "iter_0000001", tmp_path / "exported"
    for folder in (one, exported):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").touch()
    (one / "state.json").touch()
    command = flags(load=one, save=one.parent)
    assert_refused(start_ranks(command), FAILURE, "one checkpoint", f"--load {one.parent}")
    assert_refused(start_ranks(flags(load=exported)), FAILURE, "Hugging Face folder", f"--from-hf {exported}")


CASES, SEED = len({kind.label for kind in KINDS}), 0
"""One case of each row of the table; `make endurance` has all cases."""
LONGEST = 1200.0
"""Seconds; a case that hangs ends long before."""


@pytest.mark.slow
def test_no_damage_is_silent_or_ends_in_a_traceback(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    words = ["--cases", CASES, "--seed", SEED, "--workers", 1, "--outcomes", tmp_path / "outcomes.jsonl"]
    command = [sys.executable, "-m", "tests.endurance.damage", *map(str, words)]
    ended = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=LONGEST)
    assert ended.returncode == 0, ended.stderr
    outcomes = [json.loads(line) for line in (tmp_path / "outcomes.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(outcomes) == CASES
    assert {outcome["label"] for outcome in outcomes} == {kind.label for kind in KINDS}
    assert {outcome["verdict"] for outcome in outcomes} - {UNDETECTABLE} == {REFUSED, TOLD, HARMLESS}


def test_a_drawing_is_the_same_every_time() -> None:
    cases = all_cases(2)
    drawn = [case.name for case in some_cases(cases, CASES, SEED)]
    assert len(set(drawn)) == CASES
    assert drawn == [case.name for case in some_cases(all_cases(2), CASES, SEED)]
    assert drawn != [case.name for case in some_cases(cases, CASES, SEED + 1)]


def test_another_result_is_silent_if_the_format_has_a_sum(tmp_path: Path) -> None:
    cases = {case.kind.has_sum: case for case in all_cases(1) if case.reader in ("finetune", "compare, rows")}
    for has_sum, verdict in ((True, SILENT), (False, UNDETECTABLE)):
        healthy = Healthy(plain_lines(""), {"out": "another"})
        outcome = judge(cases[has_sum], tmp_path / "file", "", Ended(0, "", ""), tmp_path, healthy)
        assert outcome.verdict == verdict and outcome.is_fault == has_sum


@pytest.mark.parametrize(
    ("exit_code", "written", "stdout", "stderr", "verdict"),
    [
        (0, "right", "rows 1\n", "", HARMLESS),
        (0, "wrong", "rows 2\n", "", SILENT),
        (0, "older", "rows 1\n", "", SILENT),
        (0, "older", "", "skipped run/iter_0000004: weights are damaged\n", TOLD),
        (0, "wrong", "", "skipped run/iter_0000004: weights are damaged\n", SILENT),
        (1, "", "", "x.py: error: iter_0000004 is damaged\n", REFUSED),
        (1, "", "", "x.py: error: iter_0000004 is damaged\nx.py: error: again\n", NOISE),
        (1, "", "", "", NOISE),
        (1, "", "", "Traceback (most recent call last)\nValueError: x\n", TRACEBACK),
        (-11, "", "", "", TRACEBACK),
        (None, "", "", "", HANG),
    ],
)
def test_the_verdict(
    exit_code: int | None, written: str, stdout: str, stderr: str, verdict: str, tmp_path: Path
) -> None:
    case = next(case for case in all_cases(1) if case.reader == "analyze attention-maps" and "weights" in case.name)
    results = {}
    for word in ("right", "older", written):
        (tmp_path / "out.json").write_text(word, encoding="utf-8")
        results[word] = result_of(READERS[case.reader], tmp_path, "")
    healthy = Healthy(plain_lines("rows 3\n"), results["right"], results["older"])
    path = tmp_path / "weights-00-of-01.safetensors"
    assert judge(case, path, "", Ended(exit_code, stdout, stderr), tmp_path, healthy).verdict == verdict
