"""One folder with a healthy file of every kind, made by the commands themselves.

texts.jsonl, other.jsonl, vocab.txt                input
data/corpus_text_document.*, other_text_document.*  datasets, with the caches that training puts beside them
run/, other/                                       training runs, stopped at step 4 of 6; run/ has two checkpoints
export/, plain/                                    Hugging Face folders of ours: with model code, and a plain BERT
bert/                                              a BERT that transformers wrote
glue_data/, glue/                                  a task, and a finished sweep over three seeds
again.unfinished/                                  a preprocessing that was stopped
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

from megatron_ddrp.tasks.finetune.runs import RunStore
from tests.conftest import documents, write_vocabulary
from tests.endurance.damage.readers import CLOCK, PREPROCESS, READERS, RUN, SAVED
from tests.endurance.damage.running import Command, run_one
from tests.integration.conftest import command_line

NUM_TEXTS = 160
"""Documents of each of the two datasets."""
PLAIN = {"position_encoding": "absolute", "layernorm_position": "post"}


def make_sample(folder: Path) -> Path:
    """Fill `folder`; returns it. Raises RuntimeError where a command fails."""
    texts = documents()[: 2 * NUM_TEXTS]
    folder.mkdir()
    write_vocabulary(texts, folder / "vocab.txt", num_words=200)
    for name, part in (("texts", texts[:NUM_TEXTS]), ("other", texts[NUM_TEXTS:])):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in part)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    _write_task(folder / "glue_data" / "CoLA", texts)
    for name, output in (("texts", "corpus"), ("other", "other")):
        _run(folder, "tools/preprocess_data.py", "--input", f"{name}.jsonl", *PREPROCESS[:3], f"data/{output}")
    stopped = {"exit_interval": SAVED}
    _run(folder, "pretrain_bert.py", *command_line(RUN | stopped))
    other = {"save": "other", "seed": 7, "data_path": "data/other_text_document"}
    _run(folder, "pretrain_bert.py", *command_line(RUN | stopped | other))
    _run(folder, "pretrain_bert.py", *command_line(RUN | PLAIN | stopped | {"save": "absolute"}))
    for run, export in (("run", "export"), ("other", "other_export"), ("absolute", "plain")):
        _run(folder, "tools/convert_checkpoint.py", "--load", run, "--output", export)
    shutil.rmtree(folder / "absolute")
    _run(folder, "-m", "tests.endurance.damage.foreign_bert", "vocab.txt", "bert")
    _run(folder, *READERS["glue, resumed"].words)
    _stop_clocks(folder)
    preprocess = [word.format(home=folder) for word in READERS["preprocess, resumed"].words]
    _run(folder, *preprocess, stop_after=3, exit_code=143)
    return folder


def _run(folder: Path, *words: str, stop_after: int | None = None, exit_code: int = 0) -> None:
    streams = [folder.with_name(f"sample.{stream}") for stream in ("stdout", "stderr")]
    ended = run_one(Command(words, folder, *streams, stop_after))
    if ended.exit_code != exit_code:
        raise RuntimeError(f"{' '.join(words)} ended with {ended.exit_code}\n{ended.stdout}\n{ended.stderr}")


def _stop_clocks(folder: Path) -> None:
    """Put fixed times into the logs, so that a case damages the same bytes in every sample."""
    metrics = folder / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    stopped = [{name: 0.25 if name in CLOCK else value for name, value in row.items()} for row in rows]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in stopped), encoding="utf-8")
    path = folder / "glue" / "runs.jsonl"
    runs = RunStore(path).rows
    path.unlink()
    for run in runs:
        RunStore(path).append(run | {"seconds": 0.25})


def _write_task(folder: Path, texts: list[str]) -> None:
    """A CoLA of a few rows whose labels are random."""
    folder.mkdir(parents=True)
    generator = random.Random(0)
    sentences = [" ".join(text.split()[:6]) for text in texts]
    for name, rows in (("train", sentences[:40]), ("dev", sentences[40:60])):
        lines = [f"made\t{generator.randrange(2)}\t\t{row}" for row in rows]
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
