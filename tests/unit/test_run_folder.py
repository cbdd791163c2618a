"""The `--save` folder while a run holds it: one writer, and copies of plug-ins."""

import pytest

from megatron_ddrp.config import Config
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from megatron_ddrp.errors import UserError
from megatron_ddrp.run import run_folder
from megatron_ddrp.run.run_folder import LOCK, RunFolder


@pytest.fixture
def home(tiny_corpus, tmp_path):
    tokenizer = build_tokenizer("BertWordPieceLowerCase", tiny_corpus.vocab_file)
    config = Config().replace(model={"vocab_size": tokenizer.vocab_size})
    with RunFolder(tmp_path / "run", config, tokenizer, 6.5) as home:
        yield home


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
    """A deleted lock is no longer this run's, so its end leaves the file of the next one."""
    (home.path / LOCK).unlink()
    (home.path / LOCK).write_text("another's")
    home.__exit__()
    assert (home.path / LOCK).read_text() == "another's"


def test_a_folder_that_cannot_be_made_is_answered_with_the_flag(home, tmp_path):
    (tmp_path / "file").write_text("")
    below = RunFolder(tmp_path / "file" / "run", home._config, home._tokenizer, 6.5)
    with pytest.raises(UserError, match="file/run: Not a directory; give --save a folder"), below:
        pass
