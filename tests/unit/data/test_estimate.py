"""`preprocess --dry-run`: exact where it reads everything, near where it reads a part, and nothing is written."""

import gzip
import json
import sys
from types import SimpleNamespace

import pytest

from megatron_ddrp.commands.preprocess import main
from megatron_ddrp.data.preprocess import pipeline as estimate_module
from megatron_ddrp.data.preprocess.documents import Partition
from megatron_ddrp.data.preprocess.pipeline import PreprocessConfig, estimate, preprocess
from megatron_ddrp.errors import UserError


def config(corpus, folder, *files, **changes):
    options = {"vocab_file": str(corpus.vocab_file), "tokenizer_type": "BertWordPieceLowerCase"} | changes
    return PreprocessConfig(input=tuple(map(str, files)), output_prefix=str(folder / "out"), **options)


def test_what_is_read_whole_is_counted_exactly(tiny_corpus, tmp_path):
    settings = config(tiny_corpus, tmp_path, tiny_corpus.text_file)
    found = estimate(settings)
    assert not list(tmp_path.iterdir())
    assert found.factor == 1 and found.read_bytes == found.total_bytes == tiny_corpus.text_file.stat().st_size
    assert found.by_key == preprocess(settings).by_key
    assert found.token_bytes == 2 and found.seconds > 0 and not found.skipped and not found.warnings


@pytest.mark.parametrize("packed", [False, True])
def test_a_part_of_some_files_stands_for_all(tiny_corpus, tmp_path, monkeypatch, packed):
    for name, value in (("BLOCK_BYTES", 1 << 12), ("FILES", 2), ("CHUNKS", 3)):
        monkeypatch.setattr(estimate_module, name, value)
    data, files = tiny_corpus.text_file.read_bytes(), []
    for number in range(5):
        files.append(tmp_path / f"{number}.jsonl{'.gz' * packed}")
        files[-1].write_bytes(gzip.compress(data) if packed else data)
    found = estimate(config(tiny_corpus, tmp_path, *files))
    exact = preprocess(config(tiny_corpus, tmp_path, *files)).total("tokens")
    assert (found.files, found.read_files) == (5, 2) and 0 < found.by_key[0].tokens < exact / 5
    if not packed:  # of a packed file, whole blocks are read before their text comes out
        assert found.by_key[0].tokens * found.factor == pytest.approx(exact, rel=0.25)


def test_parts_take_their_own_bytes(tiny_corpus, tmp_path):
    parts = [estimate(config(tiny_corpus, tmp_path, tiny_corpus.text_file, partition=Partition(n, 2))) for n in (1, 2)]
    whole = estimate(config(tiny_corpus, tmp_path, tiny_corpus.text_file))
    assert sum(part.by_key[0].tokens for part in parts) == whole.by_key[0].tokens
    assert sum(part.total_bytes for part in parts) == whole.total_bytes


def test_faults_are_named_by_their_line_and_stop_unless_skipped(tiny_corpus, tmp_path):
    lines = tiny_corpus.text_file.read_text(encoding="utf-8").splitlines()
    broken = tmp_path / "broken.jsonl"
    broken.write_text("\n".join([lines[0], "{", *lines[1:]]), encoding="utf-8")
    with pytest.raises(UserError, match=r"broken\.jsonl:2: "):
        estimate(config(tiny_corpus, tmp_path, broken))
    found = estimate(config(tiny_corpus, tmp_path, broken, on_error="skip"))
    assert len(found.skipped) == 1 and found.skipped[0].startswith(f"{broken}:2: ")
    assert found.by_key[0].documents == 600


def test_mistakes_are_refused(tiny_corpus, tmp_path):
    with pytest.raises(UserError, match="--dry-run: - can be read only once; give a file"):
        estimate(config(tiny_corpus, tmp_path, "-"))
    settings = config(tiny_corpus, tmp_path, tiny_corpus.text_file)
    preprocess(settings)
    with pytest.raises(UserError, match="out_text_document.bin: exists already"):
        estimate(settings)


def test_the_command_prints_what_comes(tiny_corpus, tmp_path, capsys, monkeypatch):
    strange = tmp_path / "strange.jsonl"
    strange.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("日本 " * 50, "the")), encoding="utf-8")
    words = ["--vocab-file", tiny_corpus.vocab_file, "--output-prefix", tmp_path / "out", "--workers", 2, "--dry-run"]
    monkeypatch.setattr(sys, "argv", ["preprocess", "--input", str(strange), *map(str, words)])
    monkeypatch.setattr(estimate_module, "time", SimpleNamespace(monotonic=lambda: 0.0))  # also on a busy machine
    main()
    out, err = capsys.readouterr()
    first, document, dataset, last = out.splitlines()
    assert first == "input: 1 file, 0.0 MB; read: all"
    assert document.startswith("first document: [UNK] [UNK]") and document.endswith("… (100 tokens)")
    prefix = f"{tmp_path}/out_text_document"
    assert dataset == f"{prefix}.{{bin,idx,json}}: 2 documents, 101 tokens, 0.0 MB; 99.01% unknown pieces"
    assert last == "time: about 0s with --workers 2; nothing written"
    assert err.startswith(f"warning: {prefix}: ") and [path.name for path in tmp_path.iterdir()] == ["strange.jsonl"]
