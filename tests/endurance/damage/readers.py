"""The commands that read the sample's files, as a user types them in its folder, what each gives, and how they are run.

They run in processes that are forked with the slow imports done: a case costs its own work alone."""

import hashlib
import json
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ddrp.pages.plotting import FORMATS
from tests.integration.conftest import TINY, command_line
from tests.integration.launch import PRELOADED, be_program, fork_server, redirect_streams, text_of

CLOCK = ("tokens_per_second", "step_time", "peak_memory_gib", "seconds", "crc32")
"""What two equal runs have different: times, memory, and the sum of a row that holds one."""
DATASET, STEPS, SAVED = "data/corpus_text_document", 6, 4
RUN = TINY | {
    **{"hidden_size": 16, "num_attention_heads": 2, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    **{"notes": True, "notes_min_count": 4, "notes_max_count": 30, "train_iters": STEPS, "eval_interval": 2},
    **{"eval_iters": 2, "save_interval": 2, "data_path": DATASET, "vocab_file": "vocab.txt", "save": "run"},
}
"""Flags of the run whose folder is damaged: dropout, validation and notes, so that every kind of file is there."""
RESUME = " ".join(["pretrain_bert.py", *command_line(RUN), "--load run"])
ONE_TASK = "--tasks CoLA --data-dir glue_data --batch-size 8 --lr 1e-2"
QUICK = f"{ONE_TASK} --epochs 1 --seeds 1 --max-train-examples 16 --output-dir out"
FEW = f"--sentences 16 --split 0,1,0 --data-path {DATASET} --output out.json"
FINETUNE = "-m megatron_ddrp finetune --task-file tone/tone.yaml --batch-size 8 --lr 1e-2"
FINETUNE += " --epochs 1 --seeds 1 --workers 1 --output-dir out --load"
SWEEP = f"-m tasks.glue {ONE_TASK} --load bert --epochs 2 --seeds 3 --output-dir glue"
VOCABULARY = "--vocab-file vocab.txt"
TOKENIZED = "out/all*.bin out/all*.idx"


class Reader(NamedTuple):
    """One command and where its result lies."""

    name: str
    words: tuple[str, ...]
    """A script of the repository or `-m` and a module, then the arguments."""
    results: tuple[str, ...]
    """Patterns of the files that it writes; its standard output counts as well where this is empty."""

    @property
    def takes_run(self) -> bool:
        """Whether it reads the training run's folder, where an older checkpoint may serve."""
        return "run" in self.words

    @property
    def checks(self) -> bool:
        """Whether it is there to find damage: silence about it is wrong even if nothing else is."""
        return self.name == "dataset verify"


GLUE, IMPORT, ANALYZE = "-m tasks.glue --load", "tools/convert_checkpoint.py --output out --from-hf", "tools/analyze.py"
PREDICT = "-m megatron_ddrp finetune predict --input tone/new.jsonl --output labelled.jsonl --load"
SCORE = "-m megatron_ddrp minimal-pairs --data-dir pairs --load bert --workers 1 --output-dir scores"
REPORT = f"tools/training_report.py --load run --data-path {DATASET} --scores-dir glue --output-dir out"
COMPARE = "-m megatron_ddrp compare plan.yaml --output-dir compare"
MERGE = "tools/dataset.py merge --output-prefix out/all"
TOKENIZE = "tools/preprocess_data.py --output-prefix out/all --input"
TOKENIZE_BY = f"{TOKENIZE} texts.jsonl --tokenizer-type"
PACKED = " ".join(f"packed/texts.jsonl.{suffix}" for suffix in ("gz", "xz", "zst", "bz2"))
LINES: dict[str, tuple[str, str]] = {
    "training": (RESUME, f"run/metrics.jsonl run/iter_{STEPS:07d}/* run/tokenizer/* run/latest"),
    "training --verify-data": (f"{RESUME} --verify-data", f"run/metrics.jsonl run/iter_{STEPS:07d}/*.safetensors"),
    "convert --load": ("tools/convert_checkpoint.py --load run --output out", "out/**/*"),
    "convert --from-hf": (f"{IMPORT} bert", "out/**/*"),
    "convert --from-hf, our export": (f"{IMPORT} plain", "out/**/*"),
    "glue --load": (f"{GLUE} run {QUICK}", "out/**/*"),
    "glue --load, our export": (f"{GLUE} export {QUICK}", "out/**/*"),
    "glue --load, a BERT": (f"{GLUE} bert {QUICK}", "out/**/*"),
    "glue, resumed": (SWEEP, "glue/table.*"),
    "glue --report": ("-m tasks.glue --report glue --output-dir out", "out/table.*"),
    "analyze attention-maps": (f"{ANALYZE} attention-maps --load run {FEW}", "out.json"),
    "analyze self-similarity": (f"{ANALYZE} self-similarity --load run {FEW}", "out.json"),
    "analyze, our export": (f"{ANALYZE} attention-maps --load export {FEW}", "out.json"),
    "analyze, a BERT": (f"{ANALYZE} self-similarity --load bert {FEW}", "out.json"),
    "analyze notes": (f"{ANALYZE} notes --load run --data-path {DATASET} --output out.json", "out.json"),
    "report": (REPORT, "out/report.md"),
    "dataset inspect": (f"tools/dataset.py inspect {DATASET} {VOCABULARY}", ""),
    "dataset verify": (f"tools/dataset.py verify {DATASET} {VOCABULARY}", ""),
    "dataset merge": (f"{MERGE} data/other_text_document {DATASET}", "out/all.bin out/all.idx"),
    "preprocess": (f"{TOKENIZE} texts.jsonl {VOCABULARY}", TOKENIZED),
    "preprocess, packed": (f"{TOKENIZE} {PACKED} {VOCABULARY}", TOKENIZED),
    "preprocess, HuggingFace": (f"{TOKENIZE_BY} HuggingFace --tokenizer-model hf", TOKENIZED),
    "preprocess, SentencePiece": (f"{TOKENIZE_BY} SentencePiece --tokenizer-model sp.model", TOKENIZED),
    "finetune": (f"{FINETUNE} bert --no-keep-models", "out/table.json out/runs.jsonl"),
    "predict": (f"{PREDICT} kept", "labelled.jsonl"),
    "predict, a BERT": (f"{PREDICT} kept_bert", "labelled.jsonl"),
    "glue --load, a kept model": (f"{GLUE} kept {QUICK}", "out/**/*"),
    "minimal-pairs, resumed": (SCORE, "scores/results.json scores/table.md"),
    "compare --page-only": (f"{COMPARE} --page-only", "compare/results.json compare/page.md compare/rows.jsonl"),
    "compare, rows": ("-m megatron_ddrp compare rows/rows.jsonl --output-dir out", "out/results.json out/page.md"),
}
"""Name → the words, and the patterns of results."""
READERS = {name: Reader(name, tuple(words.split()), tuple(results.split())) for name, (words, results) in LINES.items()}


def result_of(reader: Reader, folder: Path, stdout: str) -> dict[str, Any]:
    """Return what a reader left in `folder`: by file, the rows of JSON lines without the clock, else a hash."""
    if not reader.results:
        return {"standard output": stdout.splitlines()}
    files = sorted({path for pattern in reader.results for path in folder.glob(pattern) if path.is_file()})
    left_out = (*FORMATS, ".lock")
    return {str(path.relative_to(folder)): _content(path) for path in files if path.suffix not in left_out}


def _content(path: Path) -> Any:
    if path.suffix != ".jsonl":
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return sorted(map(_without_clock, path.read_text(encoding="utf-8", errors="replace").splitlines()))


def _without_clock(line: str) -> str:
    try:
        row = json.loads(line)
    except ValueError:
        return line
    return json.dumps({k: v for k, v in row.items() if k not in CLOCK}) if isinstance(row, dict) else line


LIMIT = 120.0
"""Seconds after which a command counts as hanging: a hundred times what the slowest of them takes."""

MORE_PRELOADED = [
    *("transformers", "transformers.models.bert.modeling_bert", "transformers.models.bert.tokenization_bert"),
    *("matplotlib.pyplot", "scipy.stats", "megatron_ddrp.lab.analysis.reports"),
    *("megatron_ddrp.conversion.from_huggingface", "megatron_ddrp.conversion.to_huggingface"),
    *("megatron_ddrp.data.preprocess.pipeline", "megatron_ddrp.tasks.finetune.figure"),
    *("megatron_ddrp.tasks.finetune.workers", "tests.endurance.damage.readers"),
]
CHUNK_BYTES = 1 << 13
"""Size of preprocessing's chunks here, so that a small text has several."""


class Command(NamedTuple):
    """Words as in `Reader.words`, the folder to run in, and files for the two streams."""

    words: tuple[str, ...]
    folder: Path
    stdout: Path
    stderr: Path


class Ended(NamedTuple):
    """Exit code and output of a command that has ended; the exit code is None where it had to be killed."""

    exit_code: int | None
    stdout: str
    stderr: str


def run_all(commands: Iterable[tuple[Any, Command]], workers: int) -> Iterator[tuple[Any, Ended]]:
    """Run some commands at a time; yield (label, how it ended) in the order in which they end."""
    context = fork_server([*PRELOADED, *MORE_PRELOADED])
    waiting, running = iter(commands), {}
    while True:
        while len(running) < workers and (item := next(waiting, None)) is not None:
            label, command = item
            process = context.Process(target=_perform, args=(command,))
            process.start()
            running[process] = label, command, time.monotonic() + LIMIT
        if not running:
            return
        multiprocessing.connection.wait([process.sentinel for process in running], timeout=1.0)
        for process, (label, command, deadline) in list(running.items()):
            late = process.is_alive() and time.monotonic() > deadline
            if late:
                os.killpg(process.pid, signal.SIGKILL)
            if late or not process.is_alive():
                process.join()
                del running[process]
                stdout, stderr = map(text_of, (command.stdout, command.stderr))
                yield label, Ended(None if late else process.exitcode, stdout, stderr)


def _perform(command: Command) -> None:
    """Be the command, from here to the end of this process."""
    os.setsid()
    redirect_streams(command.stdout, command.stderr)
    os.chdir(command.folder)
    import torch
    import tqdm

    from megatron_ddrp.data.preprocess import pipeline as preprocess

    torch.set_num_threads(1)
    tqdm.tqdm.set_lock(threading.RLock())  # its own holds a semaphore that nobody frees when this process exits
    preprocess.CHUNK_BYTES = CHUNK_BYTES
    program, *words = command.words[1:] if command.words[0] == "-m" else command.words
    be_program(program, words)
