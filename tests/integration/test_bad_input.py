"""A user's mistake costs one clear line: the right exit code, no traceback, nothing written and nothing lost.

No damaged file is silent or ends in a traceback: some of the cases of `python -m tests.endurance.damage`.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_ddrp.data.dataset.merging import shuffle
from megatron_ddrp.data.preprocess.pipeline import preprocess
from megatron_ddrp.errors import FAILURE, WRONG_ARGUMENTS
from tests.conftest import TinyCorpus
from tests.datasets import wordpiece_job
from tests.endurance.damage import verdict
from tests.endurance.damage.kinds import KINDS, all_cases
from tests.endurance.damage.readers import READERS, Ended, result_of
from tests.endurance.damage.verdict import Healthy, judge, plain_lines
from tests.integration.conftest import Flags, Train
from tests.integration.launch import ROOT, Result, environment, json_file, json_lines, lines, start_ranks
from tests.refusals import refused

PLUGIN = Path(__file__).with_name("plugin_encoding.py")


def assert_refused(result: Result, exit_code: int, *words: str) -> None:
    """Check that every rank ended with the code, and that they wrote one line in all, which holds the words."""
    assert result.exit_codes == [exit_code] * len(result.exit_codes), "\n".join(result.stderr)
    (said,) = (line for stderr in result.stderr for line in lines(stderr))
    assert said.startswith("pretrain_bert.py: error: ") and all(word in said for word in words), said


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file of a folder."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def copied_dataset(corpus: TinyCorpus, folder: Path, *suffixes: str) -> Path:
    """A dataset of our own to damage."""
    prefix = folder / "copied"
    for suffix in suffixes:
        shutil.copy(f"{corpus.prefix}{suffix}", f"{prefix}{suffix}")
    return prefix


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tensor-model-parallel-size", 2], "--tensor-model-parallel-size is 2 on rank 1 (host"),  # another grid
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
        files[name] = json_file(tmp_path / name, {"zero_optimization": {"reduce_bucket_size": number * 1000}})
    first = {"deepspeed_config": files["ONE"]} if "TWO" in words else {"verify_data": "DATA" in words}
    own = [files.get(word, word) for word in words]
    assert_refused(start_ranks(flags(save=tmp_path / "run", **first), 2, last_arguments=own), WRONG_ARGUMENTS, said)
    assert not (tmp_path / "run").exists()


def test_a_host_may_keep_its_copy_of_the_data_elsewhere(flags: Flags, tiny_corpus: TinyCorpus, tmp_path: Path) -> None:
    copy = copied_dataset(tiny_corpus, tmp_path, ".bin", ".idx")
    start_ranks(flags(train_iters=2), 2, last_arguments=["--data-path", copy]).check()


def test_what_cannot_be_trained_is_refused_and_changes_nothing(
    three_steps: Path, run: Path, tiny_corpus: TinyCorpus, train: Train, tmp_path: Path
) -> None:
    """One row of each place that refuses; all others are in tests/unit."""
    pieces = tiny_corpus.vocab_file.read_text(encoding="utf-8").splitlines(keepends=True)
    other, swapped = tmp_path / "other", tmp_path / "swapped"
    other.write_text("".join([*pieces, "unheard\n"]), encoding="utf-8")
    swapped.write_text("".join([*pieces[:-2], pieces[-1], pieces[-2]]), encoding="utf-8")
    of_swapped = preprocess(wordpiece_job(swapped, tmp_path / "of_swapped", tiny_corpus.text_file)).prefixes[0]
    no_manifest = copied_dataset(tiny_corpus, tmp_path, ".bin", ".idx")
    (tmp_path / "cut").mkdir()
    cut_off = copied_dataset(tiny_corpus, tmp_path / "cut", ".bin", ".idx", ".json")
    index = Path(f"{cut_off}.idx")
    index.write_bytes(index.read_bytes()[:-3])
    one, exported = tmp_path / "one" / "iter_0000001", tmp_path / "exported"
    for folder in (one, exported):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").touch()
    (one / "state.json").touch()
    shard = run / "iter_0000003" / "weights-00-of-01.safetensors"
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    for older in ("iter_0000001", "iter_0000002"):
        shutil.rmtree(run / older)
    before, resumed = contents(three_steps) | contents(run), {"save": three_steps, "load": three_steps}
    over = (f"--load {three_steps}", "another --save")
    rows: tuple[tuple[dict[str, Any], int, tuple[str, ...]], ...] = (
        ({"hidden_size": 33}, WRONG_ARGUMENTS, ("--hidden-size 33", "--num-attention-heads 4")),
        ({"global_batch_size": 10}, WRONG_ARGUMENTS, ("--global-batch-size is 10", "8 or 12")),
        ({"split": "90,-1"}, WRONG_ARGUMENTS, ("--split", "90,-1")),
        ({"data_path": "nowhere"}, FAILURE, ("nowhere",)),
        ({"vocab_file": "nowhere"}, FAILURE, ("nowhere",)),
        ({"vocab_file": other}, FAILURE, ("made by tokenizer", "preprocess")),
        ({"vocab_file": None, "data_path": no_manifest}, WRONG_ARGUMENTS, ("--vocab-file",)),
        ({"data_path": cut_off}, FAILURE, (str(index),)),  # for all that tests/unit/data/test_indexed_dataset.py knows
        # Checkpoints, metrics.jsonl and `latest` would be lost, afresh, from a third folder or from one of its own.
        ({"save": three_steps}, FAILURE, over),
        ({"save": three_steps, "load": tmp_path / "nowhere"}, FAILURE, over),
        ({"load": one, "save": one.parent}, FAILURE, ("one checkpoint", f"--load {one.parent}")),
        ({"load": exported}, FAILURE, ("Hugging Face folder", f"--from-hf {exported}")),  # it would count as empty
        (resumed | {"num_layers": 3}, FAILURE, ("another architecture", "--num-layers is 2 there and 3 here")),
        ({"load": three_steps, "vocab_file": swapped, "data_path": of_swapped}, FAILURE, ("2 of its pieces differ",)),
        ({"load": run, "save": run}, FAILURE, ("no complete checkpoint", f"iter_0000003: {shard.name}")),
    )
    for changes, exit_code, words in rows:
        error = refused("", train, **{"save": tmp_path / "new", "train_iters": 4, **changes})
        assert error.exit_code == exit_code and all(word in str(error) for word in words), (changes, str(error))
        assert not (tmp_path / "new").exists() and contents(three_steps) | contents(run) == before, changes


@pytest.mark.slow
def test_a_model_that_memory_does_not_hold(flags: Flags) -> None:
    result = start_ranks(flags(hidden_size=10**8), 2)
    assert_refused(result, FAILURE, "out of memory: DefaultCPUAllocator: can't allocate", "--hidden-size", "--dry-run")


@pytest.mark.slow
def test_verified_data(tiny_corpus: TinyCorpus, flags: Flags, tmp_path: Path) -> None:
    prefix = copied_dataset(tiny_corpus, tmp_path, ".bin", ".idx", ".json")
    arguments = flags(data_path=prefix, verify_data=True, train_iters=1, eval_interval=0)
    assert f"data verified: {prefix} as in the manifest" in start_ranks(arguments, 2).check().stdout[0]
    path = Path(f"{prefix}.bin")
    data = bytearray(path.read_bytes())
    data[100] ^= 1  # another id of the vocabulary
    path.write_bytes(data)
    assert_refused(start_ranks(arguments, 2), FAILURE, f"{path}: SHA-256", "changed since", "preprocess again")
    Path(f"{prefix}.json").unlink()
    words = ("--verify-data", f"{prefix}.json", "no such file")
    assert_refused(start_ranks(arguments, 2), WRONG_ARGUMENTS, *words)


CASES = len({kind.label for kind in KINDS})
"""One case of each row of the table; `make endurance` has all cases."""


@pytest.mark.slow
def test_no_damage_is_silent_or_ends_in_a_traceback(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    words = ["--cases", CASES, "--workers", 1, "--outcomes", tmp_path / "outcomes.jsonl"]
    command = [sys.executable, "-m", "tests.endurance.damage", *map(str, words)]
    ended = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=1200.0)
    assert ended.returncode == 0, ended.stderr
    outcomes = json_lines(tmp_path / "outcomes.jsonl")
    assert len(outcomes) == CASES
    assert {outcome["label"] for outcome in outcomes} == {kind.label for kind in KINDS}
    known = {verdict.REFUSED, verdict.TOLD, verdict.HARMLESS}
    assert {outcome["verdict"] for outcome in outcomes} - {verdict.UNDETECTABLE} == known


def test_another_result_is_silent_if_the_format_has_a_sum(tmp_path: Path) -> None:
    cases = {case.kind.has_sum: case for case in all_cases(1) if case.reader in ("finetune", "compare, rows")}
    for has_sum, expected in ((True, verdict.SILENT), (False, verdict.UNDETECTABLE)):
        healthy = Healthy(plain_lines(""), {"out": "another"})
        outcome = judge(cases[has_sum], tmp_path / "file", "", Ended(0, "", ""), tmp_path, healthy)
        assert outcome.verdict == expected and outcome.is_fault == has_sum


@pytest.mark.parametrize(
    ("exit_code", "written", "stdout", "stderr", "expected"),
    [
        (0, "right", "rows 1\n", "", verdict.HARMLESS),
        (0, "wrong", "rows 2\n", "", verdict.SILENT),
        (0, "older", "rows 1\n", "", verdict.SILENT),
        (0, "older", "", "skipped run/iter_0000004: weights are damaged\n", verdict.TOLD),
        (0, "wrong", "", "skipped run/iter_0000004: weights are damaged\n", verdict.SILENT),
        (1, "", "", "x.py: error: iter_0000004 is damaged\n", verdict.REFUSED),
        (1, "", "", "x.py: error: iter_0000004 is damaged\nx.py: error: again\n", verdict.NOISE),
        (1, "", "", "", verdict.NOISE),
        (1, "", "", "Traceback (most recent call last)\nValueError: x\n", verdict.TRACEBACK),
        (-11, "", "", "", verdict.TRACEBACK),
        (None, "", "", "", verdict.HANG),
    ],
)
def test_the_verdict(
    exit_code: int | None, written: str, stdout: str, stderr: str, expected: str, tmp_path: Path
) -> None:
    case = next(case for case in all_cases(1) if case.reader == "analyze attention-maps" and "weights" in case.name)
    results = {}
    for word in ("right", "older", written):
        (tmp_path / "out.json").write_text(word, encoding="utf-8")
        results[word] = result_of(READERS[case.reader], tmp_path, "")
    healthy, path = Healthy(plain_lines("rows 3\n"), results["right"], results["older"]), tmp_path / "weights-00-of-01"
    outcome = judge(case, path.with_suffix(".safetensors"), "", Ended(exit_code, stdout, stderr), tmp_path, healthy)
    assert outcome.verdict == expected
