"""The `--save` folder: which checkpoint is taken where something is damaged, no reader takes damage silently, one
writer holds it, and it keeps copies of plug-ins."""

import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from megatron_ddrp import checkpoint
from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.checkpoint import choose_checkpoint, fault, load_model, read_state, refuse_folders, write_state
from megatron_ddrp.checkpoint.weights import Form, write_tensors
from megatron_ddrp.commands.dry_run import dry_run
from megatron_ddrp.config import Config, save_config
from megatron_ddrp.conversion.to_huggingface import export_checkpoint
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from megatron_ddrp.encoders.encoder import load_encoder
from megatron_ddrp.lab.analysis.session import find_snapshots
from megatron_ddrp.model import build_model
from megatron_ddrp.run import run_folder
from megatron_ddrp.run.run_folder import LOCK, RunFolder
from tests.refusals import refused
from tests.unit.tasks.conftest import write_step

FILE = checkpoint.WEIGHTS
SIZES = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 16, "relative_distance": 4}


@pytest.fixture(scope="module")
def whole_run(tiny_corpus, tmp_path_factory):
    """A `--save` folder with three checkpoints of random weights and with sums."""
    folder = tmp_path_factory.mktemp("whole")
    tokenizer = build_tokenizer("BertWordPieceLowerCase", tiny_corpus.vocab_file)
    config = Config().replace(model={**SIZES, "vocab_size": tokenizer.vocab_size})
    for step in (2, 4, 6):
        torch.manual_seed(step)
        write_step(folder, step, dict(build_model(config.model, objective=config.objective).named_parameters()), config)
    save_config(config, folder)
    tokenizer.save(folder / checkpoint.TOKENIZER)
    return folder


@pytest.fixture
def run(whole_run, tmp_path):
    return shutil.copytree(whole_run, tmp_path / "run")


def flip(path):
    data = bytearray(path.read_bytes())
    data[-50] ^= 1
    path.write_bytes(bytes(data))


def chosen(folder, kinds=(checkpoint.MODEL,)):
    """Return (name of the checkpoint that readers take, the lines they tell)."""
    told = []
    return choose_checkpoint(folder, kinds, told.append).name, told


CONTENTS = {"blank": b" \n\n", "not-utf8": b"\xff\xfeiter_0000006\n", "outside": b"../x\n"}
CONTENTS |= {"long": b"iter_0000006" * 1000, "newer-missing": b"iter_0000009\n"}
"""Damage of the file `latest` → what it holds then."""


def damage_latest(pointer, damage):
    pointer.unlink(missing_ok=True)
    if damage == "link":
        pointer.symlink_to("nowhere")
    elif damage != "missing":
        pointer.write_bytes(CONTENTS[damage])


def test_a_dry_run_refuses_the_folders_that_a_run_would_refuse(run, tmp_path, tiny_corpus):
    data = f"--data-path {tiny_corpus.prefix} --vocab-file {tiny_corpus.vocab_file} --seq-length 48"
    for words, line in (
        (f"--load {tmp_path / 'strat'}", "strat: no such folder"),
        (f"--save {run}", "holds a run already"),
        (f"--load {run} {data}", "another architecture: --num-layers is 1 there and 12 here"),
    ):
        refused(line, dry_run, parse_arguments(["--dry-run", *words.split()]).config)


@pytest.mark.parametrize("damage", [*CONTENTS, "link", "missing"])
def test_a_damaged_latest_falls_back_to_the_newest_whole_checkpoint_and_is_no_fresh_start(damage, run, tmp_path):
    pointer, empty = run / checkpoint.LATEST, tmp_path / "empty"
    damage_latest(pointer, damage)
    name, (line,) = chosen(run)
    assert name == "iter_0000006" and line.startswith(f"{pointer} ") and "taking the newest whole checkpoint" in line
    refused("holds a run already", refuse_folders, run, None)
    refuse_folders(run, run)
    flip(run / "iter_0000006" / FILE)
    name, told = chosen(run)
    assert name == "iter_0000004" and len(told) == 2 and "skipped" in told[1]
    if damage != "missing":
        empty.mkdir()
        damage_latest(empty / checkpoint.LATEST, damage)
        for save, load in ((empty, empty), (None, empty), (empty, None)):
            refused(r"holds no checkpoint, and latest|holds a run already", refuse_folders, save, load)


def test_a_wrong_folder_or_a_file_is_no_fresh_start_and_a_killed_run_may_start_again(run, tmp_path):
    """A restart names one folder twice, which need not exist; an empty folder starts afresh."""
    theirs, new, empty = (tmp_path / name for name in ("theirs", "new", "empty"))
    (theirs / "iter_0005000" / "mp_rank_00").mkdir(parents=True)
    (theirs / "latest_checkpointed_iteration.txt").write_text("5000")
    empty.mkdir()
    of_megatron = f"{theirs} holds checkpoints of Megatron-LM, which are not read"
    refused(f"--save {of_megatron}", refuse_folders, theirs, None)
    refused(f"--load {of_megatron}", refuse_folders, None, theirs)
    for save in (None, new):
        for file in ("latest", f"iter_0000002/{FILE}", "config.json"):
            words = f"--load {run / file} is a file: give the folder of a run, such as {run},"
            refused(words, refuse_folders, save, run / file)
        words = f"--load {tmp_path / 'strat'}: no such folder: .* leave --load out"
        refused(words, refuse_folders, save, tmp_path / "strat")
        refuse_folders(save, empty)
    refuse_folders(new, new)
    save_config(Config(), empty)
    (empty / "metrics.jsonl").write_text("")
    refuse_folders(empty, empty)
    save_config(Config().replace(checkpoint={"save": str(empty), "load": str(run)}), empty)  # a branch, killed early
    line = f"{empty} holds no checkpoint yet; its run began from {run}: give --load {run}"
    refused(line, refuse_folders, empty, empty)
    (run / checkpoint.LATEST).unlink()
    (run / checkpoint.LATEST).mkdir()
    refused("latest is not a file: remove it", choose_checkpoint, run)


def test_going_back_to_an_older_checkpoint_is_told(run):
    checkpoint.mark_latest(run, "iter_0000002")
    name, (line,) = chosen(run)
    assert name == "iter_0000002" and "leaving newer iter_0000004, iter_0000006 alone" in line
    assert checkpoint.last_name(run) == "iter_0000002"


def names_of(paths):
    return [path.name for path in paths]


def test_names_sort_by_number(run):
    for name, step in (("iter_9999999", 9_999_999), ("iter_10000000", 10_000_000)):
        path = shutil.copytree(run / "iter_0000006", run / name)
        write_state(path, read_state(run / "iter_0000006") | {"iteration": step})
        checkpoint.mark_latest(run, name)
    names = ["iter_10000000", "iter_9999999", "iter_0000006", "iter_0000004", "iter_0000002"]
    assert names_of(checkpoint.candidates(run).paths) == names and chosen(run) == ("iter_10000000", [])
    snapshots = find_snapshots([run], every=True)
    assert [snapshot.iteration for snapshot in snapshots] == [2, 4, 6, 9_999_999, 10_000_000]
    checkpoint.prune(run, 2, "iter_10000000", milestone_interval=4)
    assert names_of(checkpoint.all_checkpoints(run)) == [*names[:2], "iter_0000004"]
    checkpoint.mark_latest(run, "iter_9999999")
    assert names_of(checkpoint.candidates(run).paths) == ["iter_9999999", "iter_0000004"]


def test_pruning_deletes_checkpoints_alone(run):
    mine = ["iter_0000001_of_mine", "iter_0000001_of_mine.tmp"]
    for name in (*mine, "iter_0000007.tmp", "iter_0000007.old.tmp"):
        (run / name).mkdir()
    checkpoint.prune(run, 1, "iter_0000004")
    assert sorted(names_of(run.glob("iter_*"))) == [*mine, "iter_0000004", "iter_0000006"]


@pytest.mark.parametrize("named", ["iter_0000004", "iter_1", "iter_0000002", ""])
def test_a_run_that_goes_back_replaces_what_it_passes(run, named):
    """A run was stopped at step 5, which the next one, from step 4 on, does not save, whatever `latest` says then."""
    state = read_state(run / "iter_0000006")
    (run / "iter_0000006").rename(run / "iter_0000005")
    checkpoint.mark_latest(run, named)
    (run / "iter_0000008").mkdir()
    for since, step in ((4, 6), (6, 7)):
        (temporary := run / f"iter_000000{step}.tmp").mkdir()
        checkpoint.complete(temporary, state | {"iteration": step}, since)
    names = ["iter_0000008", "iter_0000007", "iter_0000006", "iter_0000004", "iter_0000002"]
    assert names_of(checkpoint.all_checkpoints(run)) == names


def test_a_save_that_fails_removes_no_older_checkpoint(run, monkeypatch):
    (run / "iter_0000007.tmp").mkdir()
    monkeypatch.setattr(checkpoint.folder, "mark_latest", Mock(side_effect=OSError("disk full")))
    with pytest.raises(OSError, match="full"):
        checkpoint.complete(run / "iter_0000007.tmp", read_state(run / "iter_0000006"), 2)
    assert {"iter_0000004", "iter_0000006"} <= {*names_of(checkpoint.all_checkpoints(run))}


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "exit_code"])
@pytest.mark.parametrize("load", [False, True])
def test_a_run_does_not_replace_the_files_of_others(tmp_path, name, load):
    (tmp_path / name).write_text('{"model_type": "bert"}')
    refused(f"--save .* holds {name}, which no run wrote", refuse_folders, tmp_path, tmp_path if load else None)


DAMAGES = [
    Path.unlink,
    lambda file: file.write_text(""),
    lambda file: file.write_text("3"),
    lambda file: file.write_text(file.read_text().replace('"iteration": 6', '"iteration": 5')),
    lambda file: file.write_text(file.read_text().replace("crc32", "other")),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_passed_over(damage, run):
    damage(run / "iter_0000006" / checkpoint.STATE)
    name, (line,) = chosen(run)
    assert name == "iter_0000004" and line.startswith(f"skipped {run / 'iter_0000006'}: state.json is ")


def test_a_state_of_another_step_or_version_is_refused(run):
    path, state = run / "iter_0000006", read_state(run / "iter_0000006")
    for changes, reason in (
        ({"iteration": 5}, "iteration is 5 in a folder named iter_0000006"),
        ({"config": {"model": 3}}, "the configuration is not an object"),
        ({"config": {"modle": {}}}, "unknown section 'modle'"),
        ({"config": {"model": {"num_layers": "two"}}}, "model setting num_layers is 'two': a wrong type"),
        ({"config": {"model": {"num_layers": 0}}}, "--num-layers is 0"),
    ):
        write_state(path, state | changes)
        assert reason in (fault(path) or "")


def python(folder):
    from megatron_ddrp import load_encoder as load

    with pytest.warns(UserWarning, match=r"skipped .*; loaded iter_0000004$") as told:
        load(folder, device="cpu")
    assert told[0].filename == __file__
    return str(told[0].message)


def analysis_of_all(folder):
    assert find_snapshots([folder], every=True)[-1].iteration == 4


OF_ONE = {
    "load_model": load_model,
    "convert": lambda folder: export_checkpoint(folder, folder.parent / "hf"),
    "glue": lambda folder: load_encoder(folder).origin,
    "analyze": lambda folder: find_snapshots([folder], every=False),
}
"""Readers that also take one checkpoint by its name."""
READERS = OF_ONE | {"analyze-all": analysis_of_all}


@pytest.mark.parametrize("reader", [*READERS.values(), python], ids=[*READERS, "python"])
def test_every_reader_passes_a_changed_file_over_and_says_so(reader, run, capsys):
    flip(run / "iter_0000006" / FILE)
    told = str(reader(run)) + capsys.readouterr().err
    assert told.count(f"skipped {run / 'iter_0000006'}: {FILE} has the CRC-32 ") == 1


@pytest.mark.parametrize("reader", READERS)
def test_readers_refuse_where_nothing_is_whole_and_a_damaged_checkpoint_that_was_named(reader, run, capsys):
    for path in checkpoint.all_checkpoints(run):
        flip(path / FILE)
    refused(r"holds no complete checkpoint \(iter_0000006: .*iter_0000002: ", READERS[reader], run)
    assert capsys.readouterr().err == ""
    if reader in OF_ONE:
        named = run / "iter_0000006"
        refused(re.escape(f"--load {named}: "), READERS[reader], named)
        (named / "state.json").unlink()
        refused(re.escape(f"--load {named}: "), READERS[reader], named)


def test_only_the_files_that_the_caller_reads_are_checked_against_their_sums(run):
    path, file = run / "iter_0000006", "optimizer-00-of-01.safetensors"
    state, moments = read_state(path), {"moment": torch.ones(99)}
    facts = write_tensors(path / file, {n: Form.of(m) for n, m in moments.items()}, moments.items())
    write_state(path, state | {"files": state["files"] | {file: facts}})
    both = (checkpoint.MODEL, checkpoint.OPTIMIZER)
    assert chosen(run, both) == chosen(path, both) == ("iter_0000006", [])
    flip(path / file)
    assert chosen(run) == chosen(path) == ("iter_0000006", [])
    name, (line,) = chosen(run, both)
    assert name == "iter_0000004" and f"{file} has the CRC-32" in line
    refused(f"--load {path}: {file} has the CRC-32", chosen, path, both)


def test_weights_come_from_the_checkpoint_before_and_ranks_share_the_sums(run, whole_run):
    flip(run / "iter_0000006" / FILE)
    (ours, _, _), (theirs, _, _) = load_model(run), load_model(whole_run / "iter_0000004")
    assert all(torch.equal(w, theirs.get_parameter(name)) for name, w in ours.named_parameters())
    path = run / "iter_0000006"
    faults = [fault(path, (checkpoint.MODEL,), part, 2) for part in (0, 1)]
    assert faults[0] and "CRC-32" in faults[0] and faults[1] is None
    assert fault(path, (checkpoint.OPTIMIZER,)) is None


def test_a_model_that_was_trained_by_a_gpu_backend_is_read_for_any_device(run):
    path, state = run / "iter_0000006", read_state(run / "iter_0000006")
    state["config"]["model"]["attention_backend"] = "triton"
    write_state(path, state)
    model, _, config = load_model(run)
    assert config.model.attention_backend == model.config.attention_backend == "auto"


def test_a_checkpoint_that_is_named_is_the_only_candidate_and_must_be_there(run, tmp_path):
    """A run that is to branch off it never starts afresh instead."""
    for name in ("iter_0000002", "iter_0000003"):
        assert checkpoint.candidates(run / name).paths == [run / name]
    refused("iter_0000003: missing or incomplete", checkpoint.newest, run / "iter_0000003")
    refuse_folders(tmp_path / "branch", run / "iter_0000002")
    refused("one checkpoint of --save", refuse_folders, run, run / "iter_0000002")


@pytest.fixture
def folder_of(tiny_corpus):
    tokenizer = build_tokenizer("BertWordPieceLowerCase", tiny_corpus.vocab_file)
    config = Config().replace(model={"vocab_size": tokenizer.vocab_size})
    return lambda path: RunFolder(path, config, tokenizer, 6.5)


def test_locks_of_others_are_not_touched_and_what_cannot_be_made_is_answered_with_the_flag(folder_of, tmp_path):
    """A deleted lock is no longer this run's, so its end leaves the file of the next one."""
    mine = tmp_path / "mine"
    mine.write_text("mine")
    for name, link in (("hard", Path.hardlink_to), ("soft", Path.symlink_to)):
        theirs = tmp_path / name
        theirs.mkdir()
        link(theirs / LOCK, mine)
        refused("not the lock of a run|Too many levels", folder_of(theirs).__enter__)
        assert mine.read_text() == "mine" and names_of(theirs.iterdir()) == [LOCK]
    with folder_of(tmp_path / "run"):
        (tmp_path / "run" / LOCK).unlink()
        (tmp_path / "run" / LOCK).write_text("another's")
    assert (tmp_path / "run" / LOCK).read_text() == "another's"
    refused("mine/run: Not a directory; give --save a folder", folder_of(mine / "run").__enter__)


def test_plug_ins_of_one_file_name_are_kept_beside_each_other(folder_of, tmp_path, monkeypatch):
    """Only code that a plug-in no longer has is one that has changed."""
    files = [tmp_path / name / "mine.py" for name in ("a", "b")]
    for number, file in enumerate(files):
        file.parent.mkdir()
        file.write_text(f"# {number}")
    monkeypatch.setattr(run_folder, "plugin_files", lambda: files)
    told = []
    for text in ("# 0", "# 0", "# changed"):
        files[0].write_text(text)
        with folder_of(tmp_path / "own") as own:
            told.append(own.remarks)
    kept = {path.name: path.read_text() for path in (tmp_path / "own" / "plugins").iterdir()}
    assert kept == {"mine.py": "# 0", "mine-2.py": "# 1", "mine-3.py": "# changed"}
    line = "--plugin mine.py: changed since the run began; its new code is kept as plugins/mine-3.py"
    assert told == [[], [], [line]]
