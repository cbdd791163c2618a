"""Preprocessing: what is written and estimated, that workers do not matter, and that failures leave nothing behind."""

import gzip
import hashlib
import importlib.metadata
import json
import os
import signal
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import megatron_ddrp
from megatron_ddrp.commands import preprocess as preprocess_command
from megatron_ddrp.data import IndexedDataset
from megatron_ddrp.data.preprocess import pipeline
from megatron_ddrp.data.preprocess.documents import Partition
from megatron_ddrp.data.preprocess.pipeline import KeyCounts, PreprocessResult, estimate, preprocess
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from tests.datasets import wordpiece_job
from tests.refusals import refused, wrong_arguments
from tests.sentencepiece_models import train_model
from tests.unit.data.tokenizer_folders import byte_bpe, plain_bpe
from tests.unit.data.tokenizer_folders import write as write_tokenizer

VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "##s", ".", "on", "mat", "a"]
TEXTS = ["The cats sat.", "", "cat", "\u200b \n", "On the mat.\nA cat sat. The mat."]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "vocab.txt").write_text("".join(f"{piece}\n" for piece in VOCAB))
    lines = [json.dumps({"text": text, "title": "a mat"}) + "\n" for text in TEXTS]
    (tmp_path / "in.jsonl").write_text("".join(lines))
    return tmp_path


def config(folder, **changes):
    return wordpiece_job(folder / "vocab.txt", folder / "out" / "p", folder / "in.jsonl", **changes)


def sequences(prefix):
    return [" ".join(VOCAB[i] for i in ids) for ids in IndexedDataset(prefix)]


def outputs(folder):
    return {path.name: path.read_bytes() for path in sorted((folder / "out").iterdir())}


def size_and_hash(path):
    return {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def test_one_document_one_sequence_without_specials(folder):
    result = preprocess(config(folder))
    [prefix] = result.prefixes
    assert prefix.endswith("/out/p_text_document")
    assert sequences(prefix) == ["the cat ##s sat .", "cat", "on the mat . a cat sat . the mat ."]
    dataset = IndexedDataset(prefix)
    assert dataset.document_indices.tolist() == [0, 1, 2, 3] and dataset.dtype == np.uint16
    fingerprint = build_tokenizer("BertWordPieceLowerCase", folder / "vocab.txt").fingerprint
    counts = {"documents": 3, "sequences": 3, "tokens": 17, "unknown_tokens": 0, "empty_documents": 2, "skipped": 0}
    assert dataset.manifest == counts | {
        "files": {suffix: size_and_hash(Path(f"{prefix}.{suffix}")) for suffix in ("bin", "idx")},
        "dtype": "uint16",
        "tokenizer": {"type": "BertWordPieceLowerCase", "fingerprint": fingerprint, "vocab_size": len(VOCAB)},
        "tokenizer_path": "../vocab.txt",
        "json_key": "text",
        "append_eod": False,
        "sentence_splitter": None,
        "tokenizer_library": f"tokenizers {importlib.metadata.version('tokenizers')}",
        "inputs": [{"name": "in.jsonl", **size_and_hash(folder / "in.jsonl")}],
        "version": megatron_ddrp.__version__,
    }
    assert result.summary().startswith("3 documents, 17 tokens, 2 empty documents left out, 0.00% unknown pieces, ")
    result = preprocess(config(folder, append_eod=True, json_keys=("text", "title"), overwrite=True))
    text, title = map(sequences, result.prefixes)
    assert text[1] == "cat [SEP]" and len(text) == 3 and title == ["a mat [SEP]"] * 5
    result = PreprocessResult(["p"], [KeyCounts(documents=1, tokens=2)], text_bytes=8_000_000, seconds=2.0)
    assert ", 4.0 MB/s → p.{bin,idx,json}" in result.summary()


def test_unknown_pieces_are_counted_and_many_are_told_loudly(folder, capsys):
    words = {"few": "the cat " * 99 + "dog dog", "many": "the cat " * 98 + "dog cow pig"}  # 1.00 and 1.5 %
    lines = [json.dumps(words) + "\n", json.dumps({"few": "cat", "many": "the dog"}) + "\n"]
    (folder / "words.jsonl").write_text("".join(lines))
    done = preprocess(config(folder, input=(str(folder / "words.jsonl"),), json_keys=("few", "many")))
    counts = [IndexedDataset(prefix).manifest["unknown_tokens"] for prefix in done.prefixes]
    assert counts == [2, 4] and [key.tokens for key in done.by_key] == [201, 201]
    assert "1.49% unknown pieces" in done.summary()  # 6 of 402
    [warning] = capsys.readouterr().err.rpartition("\r")[2].splitlines()  # on a busy machine a bar stands before it
    assert f"warning: {done.prefixes[1]}: 4 of 201 tokens (2.0%) are unknown pieces" in warning


def test_sentences_are_sequences_grouped_into_documents_and_punkts_own_across_line_breaks_and_cases(folder):
    punkt = pytest.importorskip("nltk.tokenize.punkt")
    [prefix] = preprocess(config(folder, split_sentences=True, append_eod=True)).prefixes
    assert prefix.endswith("p_text_sentence")
    expected = ["the cat ##s sat . [SEP]", "cat [SEP]", "on the mat .", "a cat sat .", "the mat . [SEP]"]
    dataset = IndexedDataset(prefix)
    assert sequences(prefix) == expected and dataset.document_indices.tolist() == [0, 1, 2, 5]
    kind = dataset.manifest["sentence_splitter"]
    assert kind.startswith("punkt-")
    text = "The cat sat\non the mat. a cat. THE MAT.\n\nThe cat e.g. the mat. On 3.5 mats.\nA cat"
    (folder / "in.jsonl").write_text(json.dumps({"text": text}) + "\n")
    [prefix] = preprocess(config(folder, split_sentences=True, overwrite=True)).prefixes
    splitter = punkt.PunktTokenizer("english") if kind == "punkt-english" else punkt.PunktSentenceTokenizer()
    tokenizer = build_tokenizer("BertWordPieceLowerCase", folder / "vocab.txt")
    expected = [tokenizer.encode(sentence) for sentence in splitter.tokenize(text)]
    assert [ids.tolist() for ids in IndexedDataset(prefix)] == expected and len(expected) > 3


@pytest.mark.parametrize("kind", ["byte-level", "characters with blanks", "SentencePiece without a first blank"])
def test_sentences_have_the_ids_of_the_whole_text(folder, kind):
    """Without the blank of its first word, a sentence's first word is joined to the last one of the sentence before."""
    pytest.importorskip("nltk")
    text = "The cat sat. A mat \u00e9 \U0001f680.  The cat!\nOn a mat. \U0001f680\U0001f680 it sat."
    (folder / "in.jsonl").write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": " "}) + "\n")
    if kind.startswith("SentencePiece"):
        options = {"add_dummy_prefix": False, "remove_extra_whitespaces": False, "byte_fallback": True}
        options |= {"model_type": "bpe", "vocab_size": 285}
        model = train_model(folder / "m.model", ["the cat sat. on a mat"] * 9, **options)
        flags = {"tokenizer_type": "SentencePiece", "tokenizer_model": str(model)}
    else:
        made = byte_bpe() if kind == "byte-level" else plain_bpe(sorted({*text}))
        flags = {"tokenizer_type": "HuggingFace", "tokenizer_model": str(write_tokenizer(folder / "hf", made))}
    of_kind = {**flags, "vocab_file": None, "append_eod": True}
    [whole] = preprocess(config(folder, **of_kind)).prefixes
    [split] = preprocess(config(folder, **of_kind, split_sentences=True)).prefixes
    sentences = [ids.tolist() for ids in IndexedDataset(split)]
    documents = IndexedDataset(split).document_indices.tolist()
    joined = [sum(sentences[low:high], []) for low, high in zip(documents, documents[1:], strict=False)]
    assert joined == [ids.tolist() for ids in IndexedDataset(whole)] and len(sentences) > 4
    pieces = build_tokenizer(flags["tokenizer_type"], tokenizer_model=flags["tokenizer_model"]).pieces
    first = "".join(pieces[i] for i in sentences[0])
    assert first.replace("\u2581", " ").replace("\u0120", " ").strip().endswith("he cat sat.")


def test_a_large_vocabulary_is_stored_in_int32(folder):
    with (folder / "vocab.txt").open("a") as stream:
        stream.writelines(f"w{i}\n" for i in range(len(VOCAB), 65_500))
    (folder / "in.jsonl").write_text('{"text": "w65499 cat"}\n')
    dataset = IndexedDataset(preprocess(config(folder)).prefixes[0])
    assert dataset.dtype == np.int32 and dataset[0].tolist() == [65_499, 6]


def test_bytes_depend_on_neither_workers_nor_chunks(folder, monkeypatch):
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": TEXTS[i % 5] * (i % 7)}) + "\n" for i in range(300)))
    preprocess(config(folder))
    one = outputs(folder)
    monkeypatch.setattr(pipeline, "CHUNK_BYTES", 500)
    for workers in (1, 2):
        preprocess(config(folder, workers=workers, overwrite=True))
        assert outputs(folder) == one and len(one) == 3


def test_a_fault_in_a_worker_stops_with_its_line_and_leaves_nothing(folder):
    with (folder / "in.jsonl").open("a") as stream:
        stream.write("{bad\n")
    refused(r"in\.jsonl:6: not JSON", preprocess, config(folder, workers=2))
    assert outputs(folder) == {}
    refused(r"in\.jsonl:6: not JSON", estimate, config(folder))
    found, result = (action(config(folder, on_error="skip")) for action in (estimate, preprocess))
    assert (found.skipped, found.first_skipped, found.by_key) == (1, result.first_skipped, result.by_key)
    assert result.skipped == 1 and IndexedDataset(result.prefixes[0]).manifest["skipped"] == 1
    assert "1 unreadable records skipped (first: " in result.summary()


def test_existing_output_stays_unless_overwrite_and_impossible_settings_are_refused(folder):
    preprocess(config(folder))
    before = outputs(folder)
    refused(r"p_text_document\.bin: exists already; give --overwrite", preprocess, config(folder))
    (folder / "in.jsonl").write_text('{"text": ""}\n')
    refused("no text to tokenize.*1 empty documents, 0 records skipped", preprocess, config(folder, overwrite=True))
    assert outputs(folder) == before
    (folder / "in.jsonl").write_text('{"body": "a"}\n')
    reason = r"1 records skipped, the first because of .*in\.jsonl:1: no key 'text', it has body"
    refused(reason, preprocess, config(folder, overwrite=True, on_error="skip"))
    link = folder / "out" / "p_title_document.bin"
    link.symlink_to("nothing")
    refused(f"{link.name}: exists already", preprocess, config(folder, json_keys=("title",)))
    assert link.is_symlink()
    wrong_arguments("given twice", config, folder, json_keys=("a", "a"))
    wrong_arguments("--json-keys a/b: expected a key without /", config, folder, json_keys=("text", "a/b"))


def test_named_pipes_process_substitutions_and_standard_input_are_read(folder, capfd, monkeypatch):
    data, pipe, copy = gzip.compress((folder / "in.jsonl").read_bytes()), folder / "pipe", folder / "copy"
    copy.write_bytes(data)
    expected = Path(preprocess(config(folder)).prefixes[0] + ".bin").read_bytes()
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(data,))
    writer.start()
    of_shell, end = os.pipe()
    os.write(end, data)
    os.close(end)
    waiting = f"{pipe}: a pipe; waiting for its writer\n"
    with copy.open("rb") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        for given, told in ((pipe, waiting), (f"/dev/fd/{of_shell}", ""), ("-", "")):
            [prefix] = preprocess(config(folder, input=(str(given),), overwrite=True)).prefixes
            assert Path(f"{prefix}.bin").read_bytes() == expected and capfd.readouterr().err == told
    writer.join()
    os.close(of_shell)


def test_a_stopped_command_takes_its_unfinished_files_away(folder, run_tool, monkeypatch):
    monkeypatch.setattr(pipeline, "name_faults", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    words = ("--input", folder / "in.jsonl", "--output-prefix", folder / "out" / "p", "--vocab-file")
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # or a fault would end this process
    assert run_tool(preprocess_command, *words, folder / "vocab.txt").returncode == 143
    signal.signal(signal.SIGTERM, handler)
    assert outputs(folder) == {}


@pytest.fixture
def job(tiny_corpus, tmp_path):
    """Return a function of files and changes: the settings that preprocess them by the tiny corpus's vocabulary."""
    return partial(wordpiece_job, tiny_corpus.vocab_file, tmp_path / "out")


def test_what_is_read_whole_is_counted_exactly_parts_take_their_own_bytes(job, tiny_corpus, tmp_path, capsys):
    settings = job(tiny_corpus.text_file)
    found, parts = estimate(settings), [estimate(job(tiny_corpus.text_file, partition=Partition(n, 2))) for n in (1, 2)]
    assert not list(tmp_path.iterdir())
    assert found.factor == 1 and found.read_bytes == found.total_bytes == tiny_corpus.text_file.stat().st_size
    assert found.by_key == preprocess(settings).by_key
    found.warn()
    assert found.token_bytes == 2 and found.seconds > 0 and not found.skipped
    assert "warning" not in capsys.readouterr().err
    assert sum(part.by_key[0].tokens for part in parts) == found.by_key[0].tokens
    assert sum(part.total_bytes for part in parts) == found.total_bytes
    refused("--dry-run: - can be read only once; give a file", estimate, job("-"))
    refused("out_text_document.bin: exists already", estimate, settings)


@pytest.mark.parametrize("packed", [False, True])
def test_a_part_of_some_files_stands_for_all(job, tiny_corpus, tmp_path, monkeypatch, packed):
    for name, value in (("BLOCK_BYTES", 1 << 12), ("FILES", 2), ("CHUNKS", 3)):
        monkeypatch.setattr(pipeline, name, value)
    data, files = tiny_corpus.text_file.read_bytes(), []
    for number in range(5):
        files.append(tmp_path / f"{number}.jsonl{'.gz' * packed}")
        files[-1].write_bytes(gzip.compress(data) if packed else data)
    found, exact = estimate(job(*files)), preprocess(job(*files)).total("tokens")
    assert (found.files, found.read_files) == (5, 2) and 0 < found.by_key[0].tokens < exact / 5
    if not packed:  # of a packed file, whole blocks are read before their text comes out
        assert found.by_key[0].tokens * found.factor == pytest.approx(exact, rel=0.25)


def test_the_command_prints_what_comes(tiny_corpus, tmp_path, run_tool, monkeypatch):
    strange = tmp_path / "strange.jsonl"
    strange.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("日本 " * 50, "the")), encoding="utf-8")
    words = ["--vocab-file", tiny_corpus.vocab_file, "--output-prefix", tmp_path / "out", "--workers", 2, "--dry-run"]
    monkeypatch.setattr(pipeline, "time", SimpleNamespace(monotonic=lambda: 0.0))  # also on a busy machine
    _, out, err = run_tool(preprocess_command, "--input", strange, *words)
    first, document, dataset, last = out.splitlines()
    assert first == "input: 1 file, 0.0 MB; read: all"
    assert document.startswith("first document: [UNK] [UNK]") and document.endswith("… (100 tokens)")
    prefix = f"{tmp_path}/out_text_document"
    assert dataset == f"{prefix}.{{bin,idx,json}}: 2 documents, 101 tokens, 0.0 MB; 99.01% unknown pieces"
    assert last == "time: about 0s with --workers 2; nothing written"
    assert err.startswith(f"warning: {prefix}: ") and [path.name for path in tmp_path.iterdir()] == ["strange.jsonl"]
