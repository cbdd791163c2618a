"""The `--save` folder while a run holds it: one writer, and what was deleted is written again."""

import shutil
import subprocess
import sys

import pytest

from megatron_ddrp.config import Config, load_config
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer, load_tokenizer
from megatron_ddrp.errors import UserError
from megatron_ddrp.run import run_folder
from megatron_ddrp.run.plateau import stored_level
from megatron_ddrp.run.run_folder import LOCK, RunFolder


@pytest.fixture
def home(tiny_corpus, tmp_path):
    tokenizer = build_tokenizer("BertWordPieceLowerCase", tiny_corpus.vocab_file)
    config = Config().replace(model={"vocab_size": tokenizer.vocab_size})
    with RunFolder(tmp_path / "run", config, tokenizer, 6.5) as home:
        yield home


@pytest.mark.parametrize(
    ("deleted", "written"),
    [
        ((), []),
        (("lock",), ["lock"]),
        (("config.json",), ["config.json"]),
        (("tokenizer",), ["tokenizer"]),
        (("tokenizer/vocab.txt", "config.json"), ["config.json", "tokenizer"]),
        (("unigram.json",), ["unigram.json"]),
        ((".",), ["lock", "config.json", "unigram.json", "tokenizer"]),
    ],
    ids=str,
)
def test_what_was_deleted_is_written_again(deleted, written, home):
    for name in deleted:
        path = home.path / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert home.restore() == written
    assert home.restore() == []
    assert load_tokenizer(home.path / "tokenizer").vocab_size == load_config(home.path).model.vocab_size
    assert (home.path / LOCK).is_file() and stored_level(home.path) == 6.5


@pytest.mark.parametrize("kind", ["a file", "a link"])
def test_a_lock_of_others_is_not_touched(home, tmp_path, kind):
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    theirs.mkdir()
    mine.write_text("mine")
    (theirs / LOCK).hardlink_to(mine) if kind == "a file" else (theirs / LOCK).symlink_to(mine)
    with (
        pytest.raises(UserError, match="not the lock of a run|Too many levels"),
        RunFolder(theirs, home._config, home._tokenizer, 6.5),
    ):
        pass
    assert mine.read_text() == "mine" and [path.name for path in theirs.iterdir()] == [LOCK]


HOLD = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"


def test_plug_ins_of_one_file_name_are_kept_beside_each_other(home, tmp_path, monkeypatch):
    """Only code that a plug-in no longer has is one that has changed."""
    files = [tmp_path / name / "mine.py" for name in ("a", "b")]
    for number, file in enumerate(files):
        file.parent.mkdir()
        file.write_text(f"# {number}")
    monkeypatch.setattr(run_folder, "plugin_files", lambda: files)
    told = []
    for text in ("# 0", "# 0", "# changed"):
        files[0].write_text(text)
        with RunFolder(tmp_path / "own", home._config, home._tokenizer, 6.5) as own:
            told.append(own.remarks)
    kept = {path.name: path.read_text() for path in (tmp_path / "own" / "plugins").iterdir()}
    assert kept == {"mine.py": "# 0", "mine-2.py": "# 1", "mine-3.py": "# changed"}
    line = "--plugin mine.py: changed since the run began; its new code is kept as plugins/mine-3.py"
    assert told == [[], [], [line]]


def test_a_folder_that_another_run_has_taken_is_left_to_it(home):
    (home.path / LOCK).unlink()
    (home.path / "config.json").unlink()
    command = [sys.executable, "-c", HOLD, str(home.path / LOCK)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        for _ in range(2):
            with pytest.raises(UserError, match="is being written by another run"):
                home.restore()
        assert not (home.path / "config.json").exists()
    assert home.restore() == ["lock", "config.json"]


def test_a_folder_that_cannot_be_made_is_answered_with_the_flag(home, tmp_path):
    (tmp_path / "file").write_text("")
    below = RunFolder(tmp_path / "file" / "run", home._config, home._tokenizer, 6.5)
    with pytest.raises(UserError, match="file/run: Not a directory; give --save a folder"), below:
        pass
