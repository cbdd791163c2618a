"""Runs that are killed, stopped or out of disk: the same command goes on, and ends with the same bytes."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_ddrp.data.dataset.unfinished import PARTS
from megatron_ddrp.data.preprocess import pipeline as preprocess_module
from megatron_ddrp.data.preprocess.pipeline import PreprocessConfig, preprocess
from megatron_ddrp.errors import UserError

ROOT = Path(__file__).parents[3]
KILLS = 10
PROGRAM = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT)!r})
from megatron_ddrp.data.preprocess import pipeline as preprocess
preprocess.CHUNK_BYTES, preprocess.CHECKPOINT_SECONDS = 8_000, 0.0
sys.argv[0] = {str(ROOT / "tools" / "preprocess_data.py")!r}
if __name__ == "__main__":
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def job(tmp_path, tiny_corpus):
    """Input of some hundred chunks in two files, and the command that preprocesses it into a given folder."""
    lines = tiny_corpus.text_file.read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text("".join(lines * 3), encoding="utf-8")
    (tmp_path / "in" / "b.jsonl").write_text("".join(lines[::-1]), encoding="utf-8")
    (tmp_path / "run.py").write_text(PROGRAM)

    def command(folder, *flags):
        vocabulary = ["--vocab-file", str(tiny_corpus.vocab_file)]
        files = ["--input", str(tmp_path / "in"), "--output-prefix", str(tmp_path / folder / "p")]
        return [sys.executable, str(tmp_path / "run.py"), *files, *vocabulary, *flags]

    return command


def files_in(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


@pytest.fixture
def whole(job, tmp_path):
    """The files of a run that nothing disturbed."""
    subprocess.run(job("whole"), check=True, timeout=60, capture_output=True)
    files = files_in(tmp_path / "whole")
    assert sorted(files) == ["p_text_document.bin", "p_text_document.idx", "p_text_document.json"]
    return files


def chunks_done(folder):
    """Chunks that the unfinished run in a folder has made safe; 0 without one."""
    try:
        return json.loads((folder / "p.unfinished" / "job.json").read_bytes())["state"]["chunks"]
    except FileNotFoundError:  # not begun, or ended: the file of a run that goes on may go at any moment
        return 0


def published(folder):
    """Whether only the renaming was left to do in the unfinished run of a folder."""
    return json.loads((folder / "p.unfinished" / "job.json").read_bytes())["published"]


@pytest.mark.slow
def test_killed_at_random_moments_the_same_command_ends_with_the_same_bytes(job, tmp_path, whole):
    chance = random.Random(4)
    kills, resumed = 0, 0
    for number in range(KILLS):  # a run may end before it is killed
        folder = tmp_path / f"killed{number}"
        while True:
            before = chunks_done(folder)
            process = subprocess.Popen(
                job(folder.name, "--workers", str(1 + number % 2)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            wanted = before + chance.randrange(60)
            while process.poll() is None and kills < KILLS and chunks_done(folder) < wanted:
                time.sleep(0.002)
            if kills < KILLS:
                time.sleep(chance.random() * 0.02)
                process.kill()
            if process.wait(timeout=60) == 0:
                break
            kills += 1
            if (folder / "p_text_document.idx").exists():  # killed after the last renaming: the dataset is whole
                break
            resumed += chunks_done(folder) > 0
            assert chunks_done(folder) >= before, "what was done is not done again"
            named = list(folder.glob("p_text_document.*"))
            assert not named or published(folder), "nothing unfinished has a name"
        assert files_in(folder) == whole
        if kills == KILLS:
            break
    assert kills == KILLS and resumed >= KILLS // 2


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_keeps_what_is_done(job, tmp_path, whole, stop):
    for number in range(5):
        folder = tmp_path / f"stopped{number}"
        process = subprocess.Popen(
            job(folder.name, "--workers", "2"),
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            # A shell's background job ignores Ctrl-C on purpose, and hands that down: to this test, and from it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        while chunks_done(folder) < 5 and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(stop)
        _, printed = process.communicate(timeout=60)
        if process.returncode != 0:  # else the run ended before the signal came, as on a busy machine it may
            break
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[stop], printed.decode()
    assert "the same command resumes from there" in printed.decode() and "Traceback" not in printed.decode()
    assert chunks_done(folder) >= 5
    done = subprocess.run(job(folder.name), check=True, timeout=60, capture_output=True)
    assert files_in(folder) == whole and "afresh" not in done.stderr.decode()


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(job, tmp_path, whole):
    limit = len(whole["p_text_document.bin"]) // 2
    full = subprocess.run(
        job("full"),
        timeout=60,
        capture_output=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    printed = full.stderr.decode()
    assert full.returncode == 1 and printed.count("\n") == 1 and "File too large; make room" in printed
    assert chunks_done(tmp_path / "full") > 10 and not list((tmp_path / "full").glob("p_text_document.*"))
    subprocess.run(job("full"), check=True, timeout=60, capture_output=True)
    assert files_in(tmp_path / "full") == whole


@pytest.fixture
def config(tmp_path, tiny_corpus, monkeypatch):
    """A job in this process, of many chunks, each one made safe."""
    monkeypatch.setattr(preprocess_module, "CHUNK_BYTES", 20_000)
    monkeypatch.setattr(preprocess_module, "CHECKPOINT_SECONDS", 0.0)
    (tmp_path / "in.jsonl").write_bytes(tiny_corpus.text_file.read_bytes())

    def make(**changes):
        settings = {
            "input": (str(tmp_path / "in.jsonl"),),
            "output_prefix": str(tmp_path / "out" / "p"),
            "tokenizer_type": "BertWordPieceLowerCase",
            "vocab_file": str(tiny_corpus.vocab_file),
        }
        return PreprocessConfig(**(settings | changes))

    return make


class Killed(BaseException):
    """What no handler sees."""


def interrupt(monkeypatch, config, after):
    """Run a job in this process and drop dead after so many chunks."""
    add = preprocess_module._Run._add

    def count(run, chunk):
        if run.result.chunks == after:
            raise Killed
        add(run, chunk)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(preprocess_module._Run, "_add", count)
        preprocess(config)


@pytest.mark.parametrize("number", range(4))
def test_dying_between_two_renamings_is_mended_too(config, tmp_path, monkeypatch, number):
    preprocess(config(json_keys=("text",)))
    expected = files_in(tmp_path / "out")
    calls = 0
    replace = os.replace

    def count(source, target):
        nonlocal calls
        if os.path.dirname(target) == str(tmp_path / "out"):
            calls += 1
            if calls > number:
                raise Killed
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", count)
        if number < 3:
            with pytest.raises(Killed):
                preprocess(config(overwrite=True))
            assert not {"p_text_document.idx"} & set(files_in_or_none(tmp_path / "out"))
        else:
            preprocess(config(overwrite=True))
    preprocess(config(overwrite=number == 3))
    assert files_in(tmp_path / "out") == expected


def files_in_or_none(folder):
    return [path.name for path in folder.iterdir() if path.is_file()]


@pytest.mark.parametrize("change", ["input", "vocabulary", "flag", "damage"])
def test_leftovers_of_another_command_are_never_mixed_in(config, tmp_path, monkeypatch, tiny_corpus, capsys, change):
    interrupt(monkeypatch, config(), after=3)
    assert chunks_done(tmp_path / "out") == 3
    changed = config()
    if change == "input":
        lines = (tmp_path / "in.jsonl").read_bytes().splitlines(keepends=True)
        (tmp_path / "in.jsonl").write_bytes(b"".join(lines[::-1]))
    elif change == "vocabulary":
        pieces = tiny_corpus.vocab_file.read_text(encoding="utf-8").splitlines()
        (tmp_path / "vocab.txt").write_text("\n".join([*pieces[:5], *pieces[:4:-1]]), encoding="utf-8")
        changed = config(vocab_file=str(tmp_path / "vocab.txt"))
    elif change == "flag":
        changed = config(append_eod=True)
    else:
        os.truncate(tmp_path / "out" / "p.unfinished" / "0.ids", 10)
    preprocess(changed)
    assert "starting afresh" in capsys.readouterr().err
    afresh = files_in(tmp_path / "out")
    preprocess(PreprocessConfig(**{**changed.__dict__, "overwrite": True}))
    assert files_in(tmp_path / "out") == afresh and chunks_done(tmp_path / "out") == 0


@pytest.mark.parametrize("name", ["0.ids", "0.sizes", "0.documents", "job.json"])
def test_damaged_leftovers_are_not_built_upon(config, tmp_path, monkeypatch, capsys, name):
    preprocess(config())
    expected = files_in(tmp_path / "out")
    for seed in range(8):
        interrupt(monkeypatch, config(overwrite=True), after=3)
        path = tmp_path / "out" / "p.unfinished" / name
        kept = json.loads((path.parent / "job.json").read_bytes())["written"][0]
        lengths = dict(zip(PARTS, (length for length, _ in kept), strict=True))
        content = bytearray(path.read_bytes())
        chance = random.Random(seed)
        content[chance.randrange(lengths.get(name.removeprefix("0."), len(content)))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
        capsys.readouterr()
        preprocess(config(overwrite=True))
        assert f"{path.parent}: damaged" in capsys.readouterr().err, seed
        assert files_in(tmp_path / "out") == expected, seed


def test_a_bad_record_keeps_what_is_done_for_on_error_skip(config, tmp_path, monkeypatch):
    lines = (tmp_path / "in.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "in.jsonl").write_bytes(b"".join([*lines[:400], b"[]\n", *lines[400:]]))
    with pytest.raises(UserError, match=r"in\.jsonl:401: a JSON list.*--on-error skip"):
        preprocess(config())
    done = chunks_done(tmp_path / "out")
    assert done > 3
    seen = []
    parse = preprocess_module.ChunkTokenizer.__call__
    with monkeypatch.context() as patch:
        patch.setattr(preprocess_module.ChunkTokenizer, "__call__", lambda self, c: seen.append(c) or parse(self, c))
        result = preprocess(config(on_error="skip"))
    assert result.skipped == 1 and ":401:" in result.first_skipped and len(seen) == result.chunks - done
    once = files_in(tmp_path / "out")
    preprocess(config(on_error="skip", overwrite=True))
    assert files_in(tmp_path / "out") == once
    interrupt(monkeypatch, config(on_error="skip", overwrite=True), after=result.chunks - 1)
    with pytest.raises(UserError, match="has skipped records; add --on-error skip"):
        preprocess(config(overwrite=True))


@pytest.mark.parametrize("kind", ["a file", "a folder", "a link", "a link for a folder"])
def test_files_of_others_in_the_folder_are_not_touched(config, tmp_path, kind):
    folder, mine = Path(config().unfinished_folder), tmp_path / "mine"
    folder.parent.mkdir(exist_ok=True)
    mine.mkdir()
    (mine / "notes").write_text("mine")
    if kind == "a link for a folder":
        folder.symlink_to(mine)
    else:
        folder.mkdir()
        make = {"a file": shutil.copy, "a folder": shutil.copytree, "a link": lambda a, b: b.symlink_to(a)}[kind]
        make(mine if kind == "a folder" else mine / "notes", folder / ("lock" if kind == "a link" else "notes"))
    before = [(path.name, path.is_symlink()) for path in folder.iterdir()]
    with pytest.raises(UserError, match="was not written by this command, .*: move it away, or choose another prefix"):
        preprocess(config())
    assert [(path.name, path.is_symlink()) for path in folder.iterdir()] == before
    assert (mine / "notes").read_text() == "mine"


def test_a_dangling_link_in_place_of_a_dataset_counts_as_there(config, tmp_path):
    Path(config().unfinished_folder).parent.mkdir(exist_ok=True)
    link = Path(f"{config().prefixes[0]}.bin")
    link.symlink_to(tmp_path / "nothing")
    with pytest.raises(UserError, match="exists already"):
        preprocess(config())
    assert link.is_symlink()


def test_two_processes_do_not_write_the_same_datasets(config, tmp_path):
    from megatron_ddrp.data.dataset.unfinished import UnfinishedDatasets

    settings = config()
    with (
        UnfinishedDatasets(settings.unfinished_folder, settings.prefixes, "<u2", {}),
        pytest.raises(UserError, match="another process is writing here"),
    ):
        preprocess(settings)
