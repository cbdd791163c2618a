"""The plan of `megatron-ddrp plan --load`: an encoder continued on a text, exported, and judged beside the old one.

The numbers are those of published work on continued pre-training, fitted to the text. `--run` writes the plan into
OUT/road.json and executes its commands in order, `pretrain` in a process of its own, whose memory is the planned one.
Each command writes one file or folder at its very end, whole or not at all, so a command is finished if that exists.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ddrp import checkpoint
from megatron_ddrp.commands import PROGRAM
from megatron_ddrp.commands.functions import run_command
from megatron_ddrp.commands.options import WARMUP, Fill, Plan, fill_rows, power_of_two
from megatron_ddrp.commands.planning import (
    AnyDevice,
    ListedDevice,
    PresentDevice,
    Step,
    documents_of,
    largest_micro_batch,
    launcher,
    memory,
)
from megatron_ddrp.config import Config, flag_words
from megatron_ddrp.config.reading import refuse
from megatron_ddrp.config.run import config_of
from megatron_ddrp.conversion.from_huggingface import ReadFolder, flags_of, local_folder, read_folder, require_own
from megatron_ddrp.conversion.model_card import model_settings, objective_settings
from megatron_ddrp.data.atomic import make_folder, write_text
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset, TokenizerFlags, recorded_flags
from megatron_ddrp.data.preprocess.inputs import find_inputs
from megatron_ddrp.data.preprocess.pipeline import PreprocessConfig, estimate
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.errors import UserError, refusals_as_user_errors
from megatron_ddrp.foreign import read_object
from megatron_ddrp.model import count_parameters, on_meta_device
from megatron_ddrp.run.launch import guest
from megatron_ddrp.run.log import duration

PASSES = 4
"""Most passes over the text: four are nearly as good as new text (Muennighoff et al., arXiv:2305.16264)."""
MOST_STEPS = 12_500
"""Most steps: those of domain-adaptive RoBERTa (Gururangan et al., arXiv:2004.10964)."""
ROWS = (16, 256)
"""Fewest and most rows per step: BERT's smallest fine-tuning batch (arXiv:1810.04805), task-adaptive RoBERTa's."""
STEPS = 1000
"""Steps that a batch is chosen for, if it lies in `ROWS`."""
RATE = 5e-5
"""Peak rate, between BERT's advice for continuing, 2e-5 (the README of google-research/bert), and 1e-4 of task-adaptive
RoBERTa with 256 rows per step."""
VALIDATIONS, VALIDATED = 5, 256
"""Validations of the run, and rows of each."""
SEEDS = 5
"""Seeds of the task's training, per encoder."""


class Stage(NamedTuple):
    """One command of the road."""

    words: list[str]
    output: str
    """File or folder that exists when the command has finished."""


class Continued(NamedTuple):
    """The run that continues the encoder."""

    settings: dict[str, Any]
    """Its settings, without paths."""
    device: AnyDevice
    length: int
    """Tokens per row."""
    fill: Fill
    reason: str
    """Reason for the number of steps."""
    step: Step
    largest: int
    """Rows of the largest micro-batch that fits."""
    gib: float
    """Memory of a rank: measured, or estimated."""
    seconds: float
    """Time of the steps and the validations."""


def continue_encoder(options: argparse.Namespace) -> Plan:
    """Print the plan for the options of the command, with `--run` execute it, and return it.

    Raises `UserError` for an encoder that does not fit or cannot be read, and for a road that other options began, or
    these with a file of text, of a task or of a vocabulary that was written since.
    """
    record = options.output_dir / "road.json"
    given = shlex.join(flag_words((n, v) for n, v in vars(options).items() if n != "run" and v is not None))
    texts = [options.train, options.valid, TokenizerFlags.of(options).path, f"{options.data_path}.idx"]
    with contextlib.suppress(UserError), contextlib.redirect_stderr(io.StringIO()):  # what it says, preprocess says
        texts += [file.path for file in find_inputs(options.input or ())]
    stamps = {str(path): os.stat(path).st_mtime_ns for path in texts if path and os.path.exists(path)}
    if options.run:
        with refusals_as_user_errors(options.output_dir):
            make_folder(options.output_dir)
    begun = options.run and record.exists()
    road = read_object(record) if begun else plan_road(options) | {"given": given, "files": stamps}
    if road.get("given") != given:
        refuse(f"{record} was begun with {road.get('given')}: give the same options, or another --output-dir")
    if changed := [path for path, stamp in stamps.items() if road.get("files", stamps).get(path) != stamp]:
        refuse(f"{changed[0]} has changed since {record} was begun: give another --output-dir")
    if options.run and not begun:
        write_text(record, json.dumps(road, indent=2) + "\n")
    if options.run:
        follow([Stage(*stage) for stage in road["stages"]])
    return Plan(*road["plan"])


def plan_road(options: argparse.Namespace) -> dict[str, Any]:
    """Print the plan for the options, and return it with its stages."""
    flags, generator = TokenizerFlags.of(options), options.generator and local_folder(options.generator)
    tokenizer = None if flags == TokenizerFlags() else flags.build()
    read = read_folder(local_folder(options.load), generator, tokenizer)
    read.weights.ours.clear()
    read = replace(read, model=on_meta_device(read.config, read.objective))  # the measured memory is that of a run
    tokenizer = require_own(read.tokenizer, read.source)
    out = options.output_dir
    task = {"train": options.train, "valid": options.valid, "seeds": SEEDS, "output_dir": out / "scores"}
    task = task | {"load": read.source} if options.train else {}
    if task:
        with contextlib.redirect_stdout(io.StringIO()):
            run_command("finetune", task | {"dry_run": True})
    tokens, documents = count_text(options, tokenizer)
    run, data = fit(read, tokens, documents, options), options.data_path or f"{out / 'text'}_text_document"
    origin = {"from_hf": read.source} | ({"generator": generator} if generator else {})
    start, save, encoder = (str(out / name) for name in ("start", "continued", "encoder"))
    settings = {"data_path": data, "load": start, "save": save} | run.settings
    made_by = flags_of(tokenizer, Path(start) / checkpoint.TOKENIZER).words()
    text = ["--input", *(options.input or ["corpus.jsonl"]), "--output-prefix", str(out / "text"), *made_by]
    last = Path(save) / checkpoint.tag(run.settings["train_iters"])
    stages = [
        Stage(["convert", *flag_words(origin.items()), *flags.words(), "--output", start], start),
        *[Stage(["preprocess", *text], f"{data}.json")] * (not options.data_path),
        Stage(["pretrain", *flag_words(settings.items())], str(last)),
        Stage(["convert", "--load", save, "--output", encoder], encoder),
        *[Stage(["finetune", *flag_words(task.items()), save], str(out / "scores" / "table.json"))] * bool(task),
    ]
    starts = {"pretrain": launcher(options.world_size)}
    use = f'from megatron_ddrp import load_encoder; print(load_encoder("{encoder}").pool(["A text."]))'
    lines = [
        *describe(read, tokens, run, options),
        "commands, one after the other, as --run does; a stopped pretrain resumes with --load as its --save:",
        *(f"  {starts.get(words[0], PROGRAM)} {shlex.join(words)}" for words, _ in stages),
        *["to judge it beside the unchanged encoder, give --train and --valid, the rows of a task"] * (not task),
        f"then use it: python -c {shlex.quote(use)}",
        f"or serve it: {PROGRAM} convert --onnx {encoder} --output {out / 'served'}",
    ]
    print("\n".join(lines), flush=True)
    row = {"seconds": run.seconds, "measured": run.step.gib is not None, "memory_gib": run.gib}
    return {"plan": [settings, [settings | row | {"largest_micro_batch": run.largest}]], "stages": stages}


def count_text(options: argparse.Namespace, tokenizer: Tokenizer) -> tuple[float, float]:
    """Return the tokens and the documents of the text: as given, of the dataset, or estimated from a part of the input.

    Tokens that are given are in documents as long as those of the dataset or the input; there are 0 if nobody knows.

    Of an input whose vocabulary does not fit it warns. Raises `UserError` for one that `preprocess` would refuse.
    """
    if options.input is None:
        made_by = recorded_flags(options.data_path) if options.data_path else TokenizerFlags()
        if made_by.path and os.path.exists(made_by.path) and made_by.build().vocab_size != tokenizer.vocab_size:
            refuse(
                f"--data-path {options.data_path}: made with {' '.join(made_by.words())}, of another size than the "
                "vocabulary of --load: give this vocabulary by the same flags, or the text by --input"
            )
        tokens = options.tokens or IndexedDataset(options.data_path).num_tokens
        return tokens, documents_of(options.data_path, tokens)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        flags = flags_of(tokenizer, Path(folder))._asdict()
        try:
            found = estimate(PreprocessConfig(options.input, "text", **flags))
        except UserError as error:  # which may name flags of preprocess
            raise UserError(f"{error}; or preprocess the text with other flags, and give --data-path") from None
    found.warn()
    if not found.by_key[0].tokens:
        raise UserError(f"--input {' '.join(options.input)}: no token in it: give files with text")
    tokens = options.tokens or found.factor * found.by_key[0].tokens
    return tokens, tokens * found.by_key[0].documents / found.by_key[0].tokens


def fit(read: ReadFolder, tokens: float, documents: float, options: argparse.Namespace) -> Continued:
    """Return the run that fits the text, the device and the hours. Raises `UserError` if no step fits."""
    ranks, longest, pieces = options.world_size, read.config.seq_length, read.config.vocab_size
    device = ListedDevice(options.device, ranks) if options.device else PresentDevice(pieces)
    length = min(options.seq_length, longest)
    fill = fill_rows(tokens, documents, length)
    fixed = objective_settings(read.objective) | model_settings(read.config) | {"packing": True}
    fixed |= {"seq_length_phases": (f"{length}:1",)} if length < longest else {}
    fixed |= {device.precision: True} if device.precision != "fp32" else {}

    def config_at(rows: int, size: int) -> Config:
        config = config_of(fixed | {"micro_batch_size": size, "global_batch_size": rows * ranks})
        return config.of_phase(config.last_phase).with_vocabulary(pieces)

    def step_of(rows: int) -> Step:
        return device.fastest(config_at(rows, 1), min(largest, rows))

    if not (largest := largest_micro_batch(read.model, config_at, ranks, device)):
        raise UserError(
            f"--load {read.source} does not fit: one row of {length} tokens needs "
            f"{memory(read.model, config_at(1, 1), ranks, device):.1f} GiB by estimate, of which {device.name} has "
            f"{device.memory:.1f}: give a shorter --seq-length or a larger --device"
        )
    per_rank = power_of_two(ROWS[1] / ranks)
    seen = min(PASSES * tokens, options.hours * 3600 / step_of(per_rank).seconds * per_rank * ranks * fill.tokens)
    per_rank = power_of_two(min(max(seen / STEPS / fill.tokens, ROWS[0]), ROWS[1]) / ranks)
    step, rows = step_of(per_rank), per_rank * ranks
    batches = max(1, VALIDATED // rows)
    validations = VALIDATIONS * batches * step.seconds / 3  # a third of a step's products
    limits = {
        f"{PASSES} passes over the text": max(1, int(PASSES * tokens / (rows * fill.tokens))),
        "as for RoBERTa (Gururangan et al.)": MOST_STEPS,
        f"as many as fit into {options.hours:g} h": int((options.hours * 3600 - validations) / step.seconds),
    }
    reason = min(limits, key=lambda each: limits[each])
    if (steps := limits[reason]) < 1:
        raise UserError(f"no step of {rows} rows fits into {options.hours:g} hours on {device.name}: give more --hours")
    interval, size = math.ceil(steps / VALIDATIONS), step.micro_batch
    settings = {"micro_batch_size": size * fill.sequences, "global_batch_size": rows * fill.sequences}
    settings |= {"train_iters": steps, "lr": RATE, "lr_warmup_fraction": WARMUP}
    settings |= {"eval_interval": interval, "eval_iters": batches, "save_interval": interval, "keep_last": 1}
    gib = step.gib or memory(read.model, config_at(size, size), ranks, device)
    seconds = steps * step.seconds + validations
    return Continued(fixed | settings, device, length, fill, reason, step, largest, gib, seconds)


def describe(read: ReadFolder, tokens: float, run: Continued, options: argparse.Namespace) -> list[str]:
    """Return the numbers of the run as lines, each with its reason."""
    model, device = read.config, run.device
    steps, many, row_tokens = run.settings["train_iters"], *run.fill
    rows, size = (run.settings[name] // many for name in ("global_batch_size", "micro_batch_size"))
    packed = f"packed, {many} documents each, which the command counts" if many > 1 else "packed"
    how = "measured here" if run.step.gib else "estimated"
    lines = {
        "encoder": f"{read.source}: {model.position_encoding} positions, {model.num_layers} layers x "
        f"{model.hidden_size}, {model.vocab_size:,} pieces, {count_parameters(read.model)[0]:,} parameters",
        "text": f"{tokens:,.0f} tokens, read {steps * rows * row_tokens / tokens:.3g} times",
        "device": f"{options.world_size} x {device.name} ({device.memory:,.0f} GiB), {device.precision}",
        "rows": f"{run.length} tokens, {packed}; the encoder takes up to {model.seq_length} (--seq-length)",
        "batch": f"{rows} rows, in micro-batches of {size}, of which up to {run.largest} fit",
        "steps": f"{steps:,}: {run.reason}",
        "rate": f"{RATE:g} after a warm-up of {WARMUP:.0%}: between 2e-5 (BERT) and 1e-4 (RoBERTa); try these two too",
        "memory": f"{run.gib:.2f} GiB, {how}",
        "time": f"{duration(max(1.0, run.seconds))} for the steps and their validations, {how}",
    }
    return [f"{label + ':':<9} {line}" for label, line in lines.items()]


def follow(stages: Sequence[Stage]) -> None:
    """Run the commands without those that have finished. Raises `UserError` where one fails or is stopped."""
    for number, (words, output) in enumerate(stages, 1):
        name = f"== {number} of {len(stages)}, {words[0]}"
        if Path(output).exists():
            print(f"{name}: done before, {output}", flush=True)
            continue
        place, save = (words.index(each) + 1 if each in words else 0 for each in ("--load", "--save"))
        if save and checkpoint.holds_run(Path(words[save])):
            words[place] = words[save]
        print(f"{name}\n$ {PROGRAM} {shlex.join(words)}", flush=True)
        run_alone(words) if save else run_command(words[0], {}, words[1:])


def run_alone(words: Sequence[str]) -> None:
    """Run a command in a process of its own. Raises `UserError` if it fails; a request to stop reaches it first."""
    with guest(), subprocess.Popen([sys.executable, "-m", __package__.partition(".")[0], *words]) as child:
        signal.signal(signal.SIGINT, lambda *_: None)  # the terminal sends it to both
        signal.signal(signal.SIGTERM, lambda number, _: child.send_signal(number))
        child.wait()
    if code := child.returncode:
        raise UserError(f"{words[0]} ended with exit code {code}: the same command resumes it", max(1, code))
