"""One folder with a healthy file of every kind, made by the commands themselves.

texts.jsonl, other.jsonl, vocab.txt                input
data/corpus_text_document.*, other_text_document.*  datasets, with the caches that training puts beside them
run/, other/                                       training runs, stopped at step 4 of 6; run/ has two checkpoints
export/, plain/                                    Hugging Face folders of ours: with model code, and a plain BERT
bert/                                              a BERT that transformers wrote
glue_data/, glue/                                  a task, and a finished sweep over three seeds
packed/texts.jsonl.*                               the texts, once in each packing
hf/, sp.model                                      tokenizers of tokenizers and of SentencePiece
tone/                                              a task file and its rows
kept/, kept_bert/                                  its kept models, of an encoder of ours and of the BERT
pairs/, scores/                                    minimal pairs, and the finished scores of the BERT
plan.yaml, compare/                                a comparison of one run, whose row is still to be written
rows/                                              rows of a made-up comparison, with their bootstrap samples
"""

import bz2
import gzip
import json
import lzma
import random
import shutil
from pathlib import Path

import numpy as np
import yaml
import zstandard

from megatron_ddrp.data.atomic import check_object, seal_object
from megatron_ddrp.lab.compare.rows import write_samples
from megatron_ddrp.tasks.statistics import MINIMAL_PAIRS
from tests.conftest import SPECIAL_TOKENS, documents, write_vocabulary
from tests.endurance.damage.readers import CLOCK, COMPARE, DATASET, FINETUNE, RUN, SAVED, SCORE, SWEEP, Command, run_all
from tests.integration.conftest import command_line
from tests.integration.launch import json_file, json_lines
from tests.unit.lab.compare.made_rows import gain_rows
from tests.unit.tasks.conftest import write_bert

NUM_TEXTS = 160
"""Documents of each of the two datasets."""
PACKERS = {"gz": lambda data: gzip.compress(data, mtime=0), "xz": lzma.compress, "bz2": bz2.compress}
PACKERS["zst"] = zstandard.ZstdCompressor(write_checksum=True).compress
PLAN = {
    "models": [{"name": "BERT", "encoding": "absolute", "objective": "mlm"}],
    "seeds": 1,
    "budget": {"steps": 4},
    "corpus": {"data_path": [DATASET], "vocab_file": "vocab.txt"},
    "model": {"num-layers": 1, "hidden-size": 16, "num-attention-heads": 2, "seq-length": 32},
    "training": {"micro-batch-size": 4, "global-batch-size": 4, "lr": 1e-3, "eval-iters": 1},
}
PLAIN = {"position_encoding": "absolute", "layernorm_position": "post"}


def make_sample(folder: Path) -> Path:
    """Fill `folder`; returns it. Raises RuntimeError where a command fails."""
    texts = documents()[: 2 * NUM_TEXTS]
    folder.mkdir()
    write_vocabulary(texts, folder / "vocab.txt", num_words=200)
    for name, part in (("texts", texts[:NUM_TEXTS]), ("other", texts[NUM_TEXTS:])):
        json_file(folder / f"{name}.jsonl", [{"text": text} for text in part])
    _write_task(folder / "glue_data" / "CoLA", texts)
    for name, output in (("texts", "corpus"), ("other", "other")):
        files = f"--input {name}.jsonl --vocab-file vocab.txt --output-prefix data/{output}"
        _run(folder, "tools/preprocess_data.py", files)
    other = {"save": "other", "seed": 7, "data_path": "data/other_text_document"}
    for changes in ({}, other, PLAIN | {"save": "absolute"}):
        _run(folder, "pretrain_bert.py", *command_line(RUN | {"exit_interval": SAVED} | changes))
    for run, export in (("run", "export"), ("other", "other_export"), ("absolute", "plain")):
        _run(folder, f"tools/convert_checkpoint.py --load {run} --output {export}")
    shutil.rmtree(folder / "absolute")
    pieces = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    bert = write_bert(folder / "bert", pieces[len(SPECIAL_TOKENS) :], hidden=32, max_length=32) / "config.json"
    values = json.loads(bert.read_text(encoding="utf-8")) | {"initializer_range": 0.02}  # whose absence changes nothing
    bert.write_text(json.dumps(values, indent=2), encoding="utf-8")
    _run(folder, SWEEP)
    _write_tokenizers_and_texts(folder)
    _write_kept_models(folder, texts)
    _write_pairs(folder / "pairs", texts)
    _run(folder, SCORE)
    _write_comparison(folder)
    _stop_clocks(folder)
    return folder


def _run(folder: Path, *words: str) -> None:
    """Run a command, given in pieces of its line."""
    streams = [folder.with_name(f"sample.{stream}") for stream in ("stdout", "stderr")]
    ((_, ended),) = run_all([(None, Command(tuple(" ".join(words).split()), folder, *streams))], 1)
    if ended.exit_code:
        raise RuntimeError(f"{' '.join(words)} ended with {ended.exit_code}\n{ended.stdout}\n{ended.stderr}")


def _stop_clocks(folder: Path) -> None:
    """Put fixed times into the logs, so that a case damages the same bytes in every sample."""
    metrics = folder / "run" / "metrics.jsonl"
    rows = json_lines(metrics)
    json_file(metrics, [{name: 0.25 if name in CLOCK else value for name, value in row.items()} for row in rows])
    for path in (folder / name for name in ("glue/runs.jsonl", "scores/scores.jsonl", "compare/jobs.jsonl")):
        json_file(path, [seal_object(check_object(row) | {"seconds": 0.25}) for row in json_lines(path)])


def _write_tokenizers_and_texts(folder: Path) -> None:
    (folder / "packed").mkdir()
    texts = (folder / "texts.jsonl").read_bytes()
    for suffix, pack in PACKERS.items():
        (folder / "packed" / f"texts.jsonl.{suffix}").write_bytes(pack(texts))
    (folder / "hf").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(folder / "plain" / name, folder / "hf" / name)
    words = "--input texts.jsonl --type sentencepiece --vocab-size 150 --output sp.model"
    _run(folder, "-m megatron_ddrp train-tokenizer", words)


def _write_kept_models(folder: Path, texts: list[str]) -> None:
    """Fine-tune two encoders on a task of a few rows whose labels are random, and keep their models."""
    generator = random.Random(1)
    rows = [{"said": " ".join(text.split()[:6]), "tone": generator.choice(["glad", "sad"])} for text in texts[:60]]
    for name, part in (("train", rows[:40]), ("valid", rows[40:50]), ("new", rows[50:])):
        json_file(folder / "tone" / f"{name}.jsonl", part)
    facts = {"train": "train.jsonl", "valid": "valid.jsonl", "text-column": "said", "label-column": "tone"}
    (folder / "tone" / "tone.yaml").write_text(yaml.safe_dump(facts | {"metric": "macro-f1"}), encoding="utf-8")
    for encoder, kept in (("run", "kept"), ("bert", "kept_bert")):
        _run(folder, FINETUNE, encoder)
        (model,) = (folder / "out" / "models").iterdir()
        model.rename(folder / kept)
        shutil.rmtree(folder / "out")


def _write_pairs(folder: Path, texts: list[str]) -> None:
    for number, name in enumerate(("order", "repeat")):
        words = [text.split()[:3] for text in texts[number * 8 :][:8]]
        pairs = [{"sentence_good": " ".join(row), "sentence_bad": " ".join(reversed(row))} for row in words]
        json_file(folder / f"{name}.jsonl", pairs)


def _write_comparison(folder: Path) -> None:
    """Do the only run of a plan, and write rows with their samples as other comparisons would."""
    (folder / "plan.yaml").write_text(yaml.safe_dump(PLAN), encoding="utf-8")
    _run(folder, COMPARE)
    (folder / "compare" / "rows.jsonl").unlink()
    rows = gain_rows({"ddrp": (0.1,)}, (2,), measure=MINIMAL_PAIRS)
    json_file(folder / "rows" / "rows.jsonl", list(map(seal_object, rows)))
    for number, row in enumerate(rows):
        values = np.random.default_rng(number).normal(row["values"][MINIMAL_PAIRS], 0.01, 50)
        write_samples(folder / "rows", row, {MINIMAL_PAIRS: values})


def _write_task(folder: Path, texts: list[str]) -> None:
    """A CoLA of a few rows whose labels are random."""
    folder.mkdir(parents=True)
    generator = random.Random(0)
    sentences = [" ".join(text.split()[:6]) for text in texts]
    for name, rows in (("train", sentences[:40]), ("dev", sentences[40:60])):
        lines = [f"made\t{generator.randrange(2)}\t\t{row}" for row in rows]
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
