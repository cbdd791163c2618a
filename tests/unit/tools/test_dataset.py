"""tools/dataset.py as its users meet it: what it prints, what it exits with."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.commands import dataset as tool
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset
from megatron_ddrp.errors import run_command

TOOL = Path(tool.__file__)
SHARED_ASSETS = Path(__file__).parents[4] / "shared" / "data" / "small_assets.tar.xz"


@pytest.fixture
def command(monkeypatch, capsys):
    """`command(words…)` → (exit code, stdout, stderr)."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["dataset.py", *map(str, words)])
        with pytest.raises(SystemExit) as caught:
            run_command(tool.main)
        return (caught.value.code, *capsys.readouterr())

    return run


def test_inspect_shows_counts_lengths_and_text(tiny_corpus, command, tmp_path):
    dataset = IndexedDataset(tiny_corpus.prefix)
    lengths = sorted(map(len, dataset))
    flags = ("--vocab-file", tiny_corpus.vocab_file, "--documents", 2)
    code, out, err = command("inspect", tiny_corpus.prefix, *flags, "--output", tmp_path / "counts.json")
    assert code == 0 and not err
    assert f"600 documents, 600 sequences, {dataset.num_tokens:,} tokens as uint16" in out
    assert f"shortest {lengths[0]}" in out and f"50% {lengths[300]}" in out and f"longest {lengths[-1]}" in out
    first = json.loads(tiny_corpus.text_file.read_text(encoding="utf-8").splitlines()[0])["text"].lower()
    shown = out.split("document 0, ")[1].split(": ", 1)[1].split("\n")[0]
    assert shown.removesuffix(" …").replace(" ", "")[:60] == first.replace(" ", "")[:60]
    assert "document 1, " in out and "document 2, " not in out
    counts = json.loads((tmp_path / "counts.json").read_text())
    for low, high, count in counts["histogram"]:
        assert count == sum(low <= length <= high for length in lengths)
    assert sum(count for _, _, count in counts["histogram"]) == counts["documents"] == 600
    ids = " ".join(map(str, dataset[0][:3]))
    moved = tmp_path / tiny_corpus.prefix.name
    for suffix in (".bin", ".idx", ".json"):
        shutil.copy(f"{tiny_corpus.prefix}{suffix}", f"{moved}{suffix}")
    out = command("inspect", f"{moved}.idx", "--tokens", 3)[1]
    assert f": {ids} …" in out, "the vocabulary is not where the manifest says"
    assert "--tokenizer-type BertWordPieceLowerCase --vocab-file FILE --num-layers " in out
    assert "--save run --load run" in out


def test_inspect_finds_the_tokenizer_and_says_how_to_train(tiny_corpus, command):
    with_flags, without = (
        command("inspect", tiny_corpus.prefix, *flags)[1] for flags in (("--vocab-file", tiny_corpus.vocab_file), ())
    )
    assert without == with_flags
    words = shlex.split(without.splitlines()[-1].removeprefix("train on it: "))
    assert words[:2] == ["megatron-ddrp", "pretrain"]
    parsed = parse_arguments(words[2:]).config.data
    assert parsed.data_path == (str(tiny_corpus.prefix),)
    assert parsed.vocab_file is None, "the manifest names it"


def test_inspect_refuses_another_vocabulary(tiny_corpus, command, tmp_path):
    pieces = tiny_corpus.vocab_file.read_text(encoding="utf-8").splitlines()
    pieces[-1] = pieces[-1][::-1] + "x"
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    code, out, err = command("inspect", tiny_corpus.prefix, "--vocab-file", tmp_path / "vocab.txt")
    assert code == 1 and "the dataset was made by tokenizer" in err and err.count("\n") == 1 and not out


def test_inspect_tells_the_share_of_unknown_pieces(tiny_corpus, command, tmp_path):
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{tiny_corpus.prefix}{suffix}", tmp_path / f"d{suffix}")
    manifest = IndexedDataset(tiny_corpus.prefix).manifest
    tokens = manifest["tokens"]
    for unknown, expected in ((tokens // 200, "0.50% unknown pieces"), (tokens // 20, "5.00% unknown pieces")):
        (tmp_path / "d.json").write_text(json.dumps(manifest | {"unknown_tokens": unknown}))
        code, out, _ = command("inspect", tmp_path / "d", "--output", tmp_path / "counts.json")
        assert code == 0 and expected in out
        assert ("warning: this dataset: " in out) == (unknown == tokens // 20)
        assert json.loads((tmp_path / "counts.json").read_text())["unknown_tokens"] == unknown
    del manifest["unknown_tokens"]  # as an earlier version wrote it
    (tmp_path / "d.json").write_text(json.dumps(manifest))
    assert "unknown pieces: not recorded" in command("inspect", tmp_path / "d")[1]


def test_inspect_draws_the_lengths(tiny_corpus, command, tmp_path):
    pytest.importorskip("matplotlib")
    assert command("inspect", tiny_corpus.prefix, "--output", tmp_path / "lengths.png")[0] == 0
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")


def test_verify_passes_what_is_sound_and_fails_what_is_not(tiny_corpus, command, tmp_path):
    code, out, _ = command("verify", tiny_corpus.prefix, "--vocab-file", tiny_corpus.vocab_file)
    assert code == 0 and "sound; 600 documents" in out and "SHA-256 as in the manifest" in out
    code, out, _ = command(
        "verify", tiny_corpus.prefix, "--vocab-file", tiny_corpus.vocab_file, "--tokenizer-type", "BertWordPieceCase"
    )
    assert code == 1 and "made by tokenizer BertWordPieceLowerCase" in out and out.endswith("1 finding\n")
    for suffix in (".bin", ".idx"):
        Path(f"{tmp_path}/a{suffix}").write_bytes(Path(f"{tiny_corpus.prefix}{suffix}").read_bytes()[:-1])
    code, out, _ = command("verify", tmp_path / "a")
    assert code == 1 and f"{tmp_path}/a.idx: " in out and "document indices" in out


@pytest.mark.parametrize("name", ["test_text_document", "fim_text_document", "test_samples_mmap_text_sentence"])
def test_megatrons_own_files_are_sound(tmp_path, command, name):
    if not SHARED_ASSETS.exists():
        pytest.skip("Megatron's own dataset files are not at hand")
    import tarfile

    with tarfile.open(SHARED_ASSETS) as archive:
        for suffix in (".bin", ".idx"):
            member = next(m for m in archive.getnames() if m.endswith(f"indexed/{name}{suffix}"))
            (tmp_path / (name + suffix)).write_bytes(archive.extractfile(member).read())
    code, out, _ = command("verify", tmp_path / name)
    assert code == 0 and "sound" in out
    assert command("merge", "--output-prefix", tmp_path / "again", tmp_path / name)[0] == 0
    for suffix in (".bin", ".idx"):
        assert (tmp_path / ("again" + suffix)).read_bytes() == (tmp_path / (name + suffix)).read_bytes()


def test_merge_says_what_came_out(tiny_corpus, command, tmp_path):
    for suffix in (".bin", ".idx", ".json"):
        shutil.copy(f"{tiny_corpus.prefix}{suffix}", tmp_path / f"more{suffix}")
    code, out, _ = command("merge", "--output_prefix", tmp_path / "all", tiny_corpus.prefix, tmp_path / "more")
    assert code == 0 and out.startswith("2 datasets, 1,200 documents, ")
    assert command("verify", tmp_path / "all", "--vocab-file", tiny_corpus.vocab_file)[0] == 0
    code, _, err = command("merge", "--output-prefix", tmp_path / "all", tiny_corpus.prefix)
    assert code == 1 and err.count("\n") == 1 and "exists already; give --overwrite" in err


@pytest.mark.parametrize(
    ("words", "exit_code", "complaint"),
    [
        (("inspect", "none"), 1, "none.idx: No such file"),
        (("verify", "none"), 1, "none.idx: No such file"),
        (("merge", "--output-prefix", "x", "none"), 1, "none.bin: No such file"),
        (("inspect", "empty"), 1, "empty.idx: 0 bytes, expected at least the 34 of a header"),
        (("inspect", "foreign"), 1, "foreign.idx: starts with b'Lorem ips', expected b'MMIDIDX"),
        (("inspect", "foreign", "--output", "x.pdf"), 2, "--output x.pdf: expected a name that ends in .json or .png"),
        (("inspect", "foreign", "--documents", "-1"), 2, "--documents is -1: it must be at least 0"),
        (("verify", "empty", "--tokenizer-type", "SentencePiece"), 2, "needs --tokenizer-model"),
        (("verify",), 2, "required: P"),
        ((), 2, "required: COMMAND"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, command, words, exit_code, complaint):
    monkeypatch.chdir(tmp_path)
    for suffix in (".bin", ".idx"):
        Path(f"empty{suffix}").touch()
        Path(f"foreign{suffix}").write_bytes(b"Lorem ipsum dolor sit amet, consectetur adipisci")
    code, out, err = command(*words)
    assert code == exit_code and complaint in err and err.count("\n") == 1 and not out
    assert {path.name for path in tmp_path.iterdir()} == {"empty.bin", "empty.idx", "foreign.bin", "foreign.idx"}


def test_starts_without_torch():
    program = f"import runpy, sys; runpy.run_path({str(TOOL)!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def test_shuffle_prints_what_it_wrote(tiny_corpus, command, tmp_path):
    words = ("shuffle", f"{tiny_corpus.prefix}.idx", "--output-prefix", tmp_path / "mixed")
    assert command(*words)[1:] == (f"600 documents, shuffled by seed 1234 → {tmp_path}/mixed.{{bin,idx}}\n", "")
    code, out, err = command(*words, "--seed", 5)
    assert (code, out) == (1, "") and "mixed.bin: exists already; give --overwrite" in err
    first = (tmp_path / "mixed.bin").read_bytes()
    assert command(*words, "--seed", 5, "--overwrite")[0] == 0
    second = (tmp_path / "mixed.bin").read_bytes()
    assert sorted(first) == sorted(second) and first != second
    code, _, err = command("shuffle", tmp_path / "none", "--output-prefix", tmp_path / "more")
    assert code != 0 and len(err.splitlines()) == 1 and "none.bin" in err
