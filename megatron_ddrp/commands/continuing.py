"""The plan of `megatron-ddrp plan --load`: an encoder continued on a text, exported, and judged beside the old one.

The numbers are those of published work on continued pre-training, fitted to the text. `--run` writes the plan into
OUT/road.json and executes its commands in order. Each command writes one file or folder at its very end, whole or not
at all, so a command is finished if that exists.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ddrp import checkpoint
from megatron_ddrp.commands import PROGRAM
from megatron_ddrp.commands.functions import pretrain, run_command
from megatron_ddrp.commands.options import WARMUP, Plan, power_of_two
from megatron_ddrp.commands.planning import (
    ListedDevice,
    PresentDevice,
    Step,
    largest_micro_batch,
    launcher,
    memory,
)
from megatron_ddrp.config import Config, flag, flag_words
from megatron_ddrp.config.reading import refuse
from megatron_ddrp.config.run import config_of
from megatron_ddrp.conversion.from_huggingface import flags_of, local_folder, read_folder
from megatron_ddrp.conversion.model_card import model_settings, objective_settings
from megatron_ddrp.data.atomic import BrokenSeal, check_object, make_folder, seal_object, write_text
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset, TokenizerFlags
from megatron_ddrp.data.preprocess.pipeline import PreprocessConfig, estimate
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megatron_ddrp.errors import ASKED_TO_STOP, UserError, refusals_as_user_errors
from megatron_ddrp.foreign import read_object
from megatron_ddrp.model import count_parameters, on_meta_device
from megatron_ddrp.run.devices import SHARE
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


class Origin(NamedTuple):
    """The encoder that is continued."""

    folder: Path
    is_ours: bool
    """True for a folder of checkpoints, False for a Hugging Face folder."""
    config: Config
    tokenizer: Tokenizer


class Stage(NamedTuple):
    """One command of the road."""

    words: list[str]
    output: str
    """File or folder that exists when the command has finished."""


class Continued(NamedTuple):
    """The run that continues the encoder."""

    settings: dict[str, Any]
    """Its settings, without paths."""
    device: ListedDevice | PresentDevice
    tokens: float
    """Different tokens of the text."""
    length: int
    """Tokens per row."""
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

    Raises `UserError` for an encoder that does not fit or cannot be read, and for a road that another plan began.
    """
    if options.run:
        with refusals_as_user_errors(options.output_dir):
            make_folder(options.output_dir)
    record = options.output_dir / "road.json"
    given = {name: str(value) for name, value in vars(options).items() if name != "run"}
    if options.run and record.exists():
        road = read_road(record, given)
    else:
        origin = read_origin(options)
        tokens, task = count_tokens(options, origin.tokenizer), task_of(origin, options)
        if task:
            with contextlib.redirect_stdout(io.StringIO()):
                run_command("finetune", task | {"dry_run": True})
        run, places = fit(origin, tokens, options), places_of(origin, options)
        stages = stages_of(origin, run, places, options)
        print("\n".join([*describe(origin, run, options), *commands(stages, options)]), flush=True)
        settings = {**places, **run.settings}
        row = run.settings | {"seconds": run.seconds, "measured": run.step.is_measured, "memory_gib": run.gib}
        road = {"given": given, "plan": [settings, [row | {"largest_micro_batch": run.largest}]], "stages": stages}
        if options.run:
            write_text(record, json.dumps(seal_object(road), indent=2) + "\n")
    if options.run:
        follow([Stage(*stage) for stage in road["stages"]], road["plan"][0])
    return Plan(*road["plan"])


def read_road(record: Path, given: dict[str, str]) -> dict[str, Any]:
    """Return the road that an earlier `--run` with the same options began. Raises `UserError` for another one."""
    try:
        road = check_object(read_object(record), needs_sum=True)
    except BrokenSeal:
        raise UserError(f"{record}: damaged or edited: remove it, or give another --output-dir") from None
    for name, value in given.items():
        if road["given"].get(name) != value:
            refuse(
                f"{record} was begun with {flag(name)} {road['given'].get(name)}, not {value}: give the same, or "
                "another --output-dir"
            )
    return road


def read_origin(options: argparse.Namespace) -> Origin:
    """Read the encoder of `--load`. Raises `UserError` as `read_folder` does, and for a run that was trained."""
    folder = local_folder(options.load)
    if checkpoint.candidates(folder).paths and (path := checkpoint.newest(folder)):
        if not checkpoint.read_state(path).get(checkpoint.WEIGHTS_ONLY) or options.vocab_file:
            refuse(
                f"--load {folder}: a folder of ours must be an untrained import, and keeps its vocabulary: export it, "
                f"{PROGRAM} convert --load {folder} --output DIR, and give --load DIR"
            )
        config, tokenizer = checkpoint.read_config(path), load_tokenizer(path.parent / checkpoint.TOKENIZER)
        return Origin(folder, True, config, tokenizer)
    given = TokenizerFlags(vocab_file=options.vocab_file).build() if options.vocab_file else None
    read = read_folder(folder, None, given)
    if read.tokenizer is None:
        raise UserError(f"--load {folder}: it has no tokenizer: copy the model's vocab.txt or tokenizer.json there")
    return Origin(folder, False, Config(model=read.config, objective=read.objective), read.tokenizer)


def count_tokens(options: argparse.Namespace, tokenizer: Tokenizer) -> float:
    """Return the tokens of the text: as given, of the dataset, or estimated from a part of the input.

    Raises `UserError` for an input that `preprocess` would refuse.
    """
    if options.input is None:
        return options.tokens or IndexedDataset(options.data_path).num_tokens
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        flags = flags_of(tokenizer, Path(folder))._asdict()
        found = estimate(PreprocessConfig(options.input, f"{folder}/text", **flags))
    if not found.by_key[0].tokens:
        raise UserError(f"--input {' '.join(options.input)}: no token in it: give files with text")
    return options.tokens or found.factor * found.by_key[0].tokens


def fit(origin: Origin, tokens: float, options: argparse.Namespace) -> Continued:
    """Return the run that fits the text, the device and the hours. Raises `UserError` if no step fits."""
    listed, ranks, vocab_size = options.device, options.world_size, origin.tokenizer.vocab_size
    device = ListedDevice(listed, ranks) if listed else PresentDevice(vocab_size)
    model, longest = origin.config.model, origin.config.model.seq_length
    length = min(options.seq_length, longest)
    fixed = objective_settings(origin.config.objective) | model_settings(model) | {"packing": True}
    fixed |= {"seq_length_phases": (f"{length}:1",)} if length < longest else {}
    fixed |= {device.precision: True} if device.precision != "fp32" else {}

    def config_at(rows: int, size: int) -> Config:
        batch = {"micro_batch_size": size, "global_batch_size": rows * ranks}
        config = config_of(fixed | batch).with_vocabulary(vocab_size)
        return config.of_phase(config.phases[0])

    on_meta = on_meta_device(config_at(1, 1).model, config_at(1, 1).objective)
    largest = largest_micro_batch(on_meta, config_at, ranks, device)
    if not largest:
        needed = memory(on_meta, config_at(1, 1), ranks, device)
        raise UserError(
            f"--load {origin.folder} does not fit: one row of {length} tokens needs {needed:.1f} GiB by estimate, of "
            f"which {device.name} has {device.memory:,.0f}: give a shorter --seq-length or a larger --device"
        )

    def step_of(per_rank: int) -> Step:
        return device.fastest(config_at(per_rank, 1), min(largest, per_rank))

    per_rank = power_of_two(ROWS[1] / ranks)
    seen = min(PASSES * tokens, options.hours * 3600 / step_of(per_rank).seconds * per_rank * ranks * length)
    per_rank = power_of_two(min(max(seen / STEPS / length, ROWS[0]), ROWS[1]) / ranks)
    step, rows = step_of(per_rank), per_rank * ranks
    validations = VALIDATIONS * max(1, VALIDATED // rows) * step.validation
    limits = {
        f"{PASSES} passes over the text": max(1, int(PASSES * tokens / (rows * length))),
        "as for RoBERTa (Gururangan et al.)": MOST_STEPS,
        f"as many as fit into {options.hours:g} h": int((options.hours * 3600 - validations) / step.seconds),
    }
    reason = min(limits, key=lambda each: limits[each])
    if (steps := limits[reason]) < 1:
        raise UserError(f"no step of {rows} rows fits into {options.hours:g} hours on {device.name}: give more --hours")
    interval = math.ceil(steps / VALIDATIONS)
    schedule = {"train_iters": steps, "lr": RATE, "lr_warmup_fraction": WARMUP}
    output = {"eval_interval": interval, "eval_iters": max(1, VALIDATED // rows), "save_interval": interval}
    batch = {"micro_batch_size": step.micro_batch, "global_batch_size": rows}
    gib = step.gib or memory(on_meta, config_at(step.micro_batch, step.micro_batch), ranks, device)
    settings = fixed | batch | schedule | output | {"keep_last": 1}
    return Continued(settings, device, tokens, length, reason, step, largest, gib, steps * step.seconds + validations)


def describe(origin: Origin, run: Continued, options: argparse.Namespace) -> list[str]:
    """Return the numbers of the run as lines, each with its reason."""
    model, settings, device = origin.config.model, run.settings, run.device
    rows, steps, size = (settings[name] for name in ("global_batch_size", "train_iters", "micro_batch_size"))
    parameters = count_parameters(on_meta_device(model, origin.config.objective))[0]
    how = (
        "measured here by four steps and a validation"
        if run.step.is_measured
        else f"FLOP at {SHARE:.0%} of the published peak, not measured"
    )
    lines = {
        "encoder": f"{origin.folder}: {model.position_encoding} positions, {model.num_layers} layers x "
        f"{model.hidden_size}, {origin.tokenizer.vocab_size:,} pieces, {parameters / 1e6:,.1f} M parameters",
        "text": f"{run.tokens:,.0f} tokens, read {steps * rows * run.length / run.tokens:.3g} times",
        "device": f"{options.world_size} x {device.name} ({device.memory:,.0f} GiB), {device.precision}",
        "rows": f"{run.length} tokens, packed; the encoder takes up to {model.seq_length} (--seq-length)",
        "batch": f"{rows} rows, in micro-batches of {size}, of which up to {run.largest} fit",
        "steps": f"{steps:,}: {run.reason}",
        "rate": f"{RATE:g} after a warm-up of {WARMUP:.0%}: between 2e-5 (BERT) and 1e-4 (RoBERTa); try these two too",
        "memory": f"{run.gib:.2f} GiB, {'measured' if run.step.is_measured else 'by estimate'}",
        "time": f"{duration(max(1.0, run.seconds))} for the steps and their validations: {how}",
    }
    return [f"{label + ':':<9} {line}" for label, line in lines.items()]


def places_of(origin: Origin, options: argparse.Namespace) -> dict[str, str]:
    """Return the paths of the run as settings: its data, the import that it begins with, and its folder."""
    out = options.output_dir
    start = origin.folder if origin.is_ours else out / "start"
    data = options.data_path or f"{out / 'text'}_text_document"
    return {"data_path": data, "load": str(start), "save": str(out / "continued")}


def task_of(origin: Origin, options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of `finetune` for the unchanged encoder; empty without a task."""
    if options.train is None:
        return {}
    files = {"train": options.train, "valid": options.valid, "output_dir": options.output_dir / "scores"}
    return {**files, "seeds": SEEDS, "load": origin.folder}


def stages_of(origin: Origin, run: Continued, places: dict[str, str], options: argparse.Namespace) -> list[Stage]:
    """Return the commands from the encoder to the export and to the scores of both encoders."""
    out, start, save = options.output_dir, places["load"], places["save"]
    vocabulary = flag_words([("vocab_file", options.vocab_file)]) if options.vocab_file else []
    convert = Stage(["convert", "--from-hf", str(origin.folder), *vocabulary, "--output", start], start)
    tokenizer = flags_of(origin.tokenizer, Path(start) / checkpoint.TOKENIZER).words()
    text = ["--input", *(options.input or ["corpus.jsonl"]), "--output-prefix", str(out / "text")]
    preprocess = Stage(["preprocess", *text, *tokenizer], f"{places['data_path']}.json")
    last = Path(save) / checkpoint.tag(run.settings["train_iters"])
    training = Stage(["pretrain", *flag_words((places | run.settings).items())], str(last))
    export = Stage(["convert", "--load", save, "--output", str(out / "encoder")], str(out / "encoder"))
    task = flag_words(task_of(origin, options).items())
    judge = Stage(["finetune", *task, save], str(out / "scores" / "table.json"))
    return [
        *[convert] * (not origin.is_ours),
        *[preprocess] * (not options.data_path),
        *(training, export),
        *[judge] * bool(task),
    ]


def commands(stages: Sequence[Stage], options: argparse.Namespace) -> list[str]:
    """Return the commands as lines, and what is left to do."""
    starts = {"pretrain": launcher(options.world_size)}
    lines = [f"  {starts.get(words[0], PROGRAM)} {shlex.join(words)}" for words, _ in stages]
    judge = "to judge it beside the unchanged encoder, give --train and --valid, the rows of a task"
    use = (
        f'from megatron_ddrp import load_encoder; print(load_encoder("{options.output_dir}/encoder").pool(["A text."]))'
    )
    return [
        "commands, one after the other, as --run does; a stopped pretrain resumes with --load as its --save:",
        *lines,
        *[judge] * (options.train is None),
        f"then serve it, such as by: python -c {shlex.quote(use)}",
    ]


def follow(stages: Sequence[Stage], settings: dict[str, Any]) -> None:
    """Run the commands in this process, without those that have finished; `settings` are those of `pretrain`.

    Raises `UserError` where a command fails, or where pre-training was asked to stop.
    """
    for number, (words, output) in enumerate(stages, 1):
        name = f"== {number} of {len(stages)}, {words[0]}"
        if Path(output).exists():
            print(f"{name}: done before, {output}", flush=True)
            continue
        print(f"{name}\n$ {PROGRAM} {shlex.join(words)}", flush=True)
        if words[0] != "pretrain":
            run_command(words[0], {}, words[1:])
            continue
        has_begun = checkpoint.holds_run(Path(settings["save"]))
        if pretrain(**settings | ({"load": settings["save"]} if has_begun else {})).stopped:
            raise UserError("stopped before the last step: the same command resumes", ASKED_TO_STOP)
