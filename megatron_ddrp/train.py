"""Set-up of a training run: data, model, engine, checkpoint, logs; then the loop (`run/loop.py`)."""

from __future__ import annotations

import platform
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch

from megatron_ddrp.checkpoint import newest, read_state, refuse_folders
from megatron_ddrp.checkpoint.weights import load_notes
from megatron_ddrp.config import Config
from megatron_ddrp.config.registry import OPTIMIZERS, code_sum, package_sum, plugin_files
from megatron_ddrp.config.run import settings_of_all_ranks
from megatron_ddrp.config.translation import flatten_keys, load_file
from megatron_ddrp.corpus import Corpus, tokenizer_flags, verify_data, with_tokenizer
from megatron_ddrp.data.batches.loader import BatchLoader, count_micro_batches
from megatron_ddrp.data.batches.samples import split_documents
from megatron_ddrp.engine.build import (
    allow_tf32,
    build_engine,
    check_device,
    choices,
    missing_graphs,
    other_choices,
    precision_remarks,
    release,
    rows_for,
    unused_devices,
)
from megatron_ddrp.engine.checkpoint import Progress, Resumed, changed_tokenizer, check_stored, load_checkpoint
from megatron_ddrp.engine.layout import deepspeed_version, read_settings
from megatron_ddrp.engine.proofs import GradientProof
from megatron_ddrp.errors import allocations_as_user_errors, refusals_as_user_errors
from megatron_ddrp.memory import need_less_memory
from megatron_ddrp.model import Encoder, build_model, count_parameters
from megatron_ddrp.objectives.electra import NoteDictionary
from megatron_ddrp.parallel import process_group
from megatron_ddrp.parallel.process_group import Ranks, agree, agree_on_long_work, gather_objects, refuse_differences
from megatron_ddrp.run.callbacks import Callback, Callbacks, callbacks_of
from megatron_ddrp.run.launch import StopRequests, is_launched
from megatron_ddrp.run.log import MetricsLog
from megatron_ddrp.run.loop import TrainingRun, bound_kernel_caches, keep_freed_memory
from megatron_ddrp.run.metrics import PlateauWatch
from megatron_ddrp.run.run_folder import RunFolder, find_unshared, sole_writer

WithData: TypeAlias = Callable[[Config], Config]


class Trained(NamedTuple):
    """Result of a run."""

    code: int
    """0, or `ASKED_TO_STOP` if a stop was requested before the last step."""
    iteration: int
    """Steps of the run so far."""


def train(
    config: Config,
    callbacks: Sequence[Callback] = (),
    with_data: WithData | None = None,
    requests: StopRequests | None = None,
) -> Trained:
    """Train on this rank; every rank runs the same code. The process group stays.

    `with_data` makes the data of a run of one rank and returns `config` with them. What needs none is refused before.
    """
    requests = requests or StopRequests(config.checkpoint.exit_duration_in_mins, alone=not is_launched()).heed()
    ranks = process_group.start(config.parallel, settings_of_all_ranks(config))
    if config.training.num_threads:
        torch.set_num_threads(config.training.num_threads)
    if ranks.device.type == "cpu":
        keep_freed_memory()
        bound_kernel_caches()
    allow_tf32(config.training.tf32, ranks.device)
    agree(lambda: check_device(config, ranks.device))
    folder, load = (Path(name) if name else None for name in (config.checkpoint.save, config.checkpoint.load))
    agree(lambda: refuse_folders(folder, load))
    own_callbacks = agree(lambda: callbacks_of(config.logging))
    agree(lambda: read_settings(config.parallel, ranks.device.type))
    config = agree(lambda: with_stored_layout(config, load))
    if with_data:
        check_without_data(config, ranks, folder, load)
        config = with_data(config)
    verified = agree_on_long_work(partial(verify_data, config) if ranks.first_on_host else tuple)
    corpus, loader, validation = agree(lambda: open_data(config, ranks))
    if ranks.world_size > 1:
        refuse_differences(agree(lambda: corpus.description | contents_of_files(config)))
    config = agree(lambda: corpus.config.with_vocabulary(corpus.tokenizer.vocab_size))
    torch.manual_seed(config.training.seed)
    model = agree(lambda: allocate_model(config))
    sizes = count_parameters(model)
    about_optimizer = OPTIMIZERS.find(config.optimizer.optimizer).remarks(model)
    advice = partial(need_less_memory, config, ranks.world_size, ranks.device.type)
    first = ranks.rank == 0
    with ExitStack() as stack:
        stack.enter_context(allocations_as_user_errors(advice))
        engine = build_engine(model, config, ranks, loader.num_micro_batches)
        stack.callback(release, engine)
        resumed = load_checkpoint(engine, load, config, ranks) if load else None
        progress = resumed.progress if resumed else Progress()
        changes = agree(lambda: changed_tokenizer(resumed.path, corpus.tokenizer) if resumed else [])
        changes += agree(lambda: corpus.changes(progress.datasets))
        progress = replace(progress, datasets=corpus.contents)
        notes = open_notes(config, corpus)
        if notes is not None and resumed and not resumed.weights_only:
            agree(lambda: load_notes(notes, resumed.path))
        level = agree(lambda: corpus.unigram_loss if first else 0.0)
        home = RunFolder(folder, config, corpus.tokenizer, level) if folder and first else None
        agree(lambda: stack.enter_context(home or nullcontext()))
        at_home = [*find_unshared(folder, load is not None, ranks), *(home.remarks if home else ())]
        listeners = Callbacks([PlateauWatch(level), *own_callbacks, *callbacks] if first else [], requests)
        log = agree(lambda: stack.enter_context(open_log(config, resumed, first, listeners)))
        shifted = agree(lambda: corpus.split_remarks() if first else [])
        own = (*verified, *corpus.remarks, *changes, *shifted, *at_home, *precision_remarks(config, ranks.device))
        own += missing_graphs(config, ranks.device)
        remarks = remarks_of_ranks(own)
        first_lines = introduction(config, ranks, corpus, loader, sizes)
        for line in (*remarks, *unused_devices(ranks.world_size), first_lines, *about_optimizer, *about(notes, corpus)):
            log.say(line)
        log.say(where_we_start(config, resumed))
        agree(lambda: listeners.start(config, progress.iteration, engine.module))
        if config.training.gradient_proof:
            GradientProof(engine, config, ranks, log.say)
        run = TrainingRun(config, ranks, engine, log, folder, notes)
        progress, request = run.steps(loader, validation, progress, requests)
        return Trained(run.end(progress, request), progress.iteration)


def check_without_data(config: Config, ranks: Ranks, folder: Path | None, load: Path | None) -> None:
    """Raise `UserError` for what would be refused behind the data, as far as that needs none, on one rank."""
    count_micro_batches(config.training.global_batch_size, config.training.micro_batch_size, ranks.data_size)
    split_documents(1, config.data.split or "1")
    tokenizer = tokenizer_flags(with_tokenizer(config, ())).build()
    with refusals_as_user_errors(folder), sole_writer(folder) if folder and folder.exists() else nullcontext():
        pass
    if path := newest(load) if load else None:
        check_stored(path, config.with_vocabulary(tokenizer.vocab_size))
        changed_tokenizer(path, tokenizer)


def open_log(config: Config, resumed: Resumed | None, active: bool, callbacks: Callbacks | None = None) -> MetricsLog:
    """Return the log of a run. Its earlier rows were written at the `--log-interval` stored in the checkpoint."""
    if resumed is None:
        return MetricsLog(config, 0, active, None, callbacks)
    stored = Config.from_dict(read_state(resumed.path)["config"])
    return MetricsLog(config, resumed.progress.iteration, active, stored.logging.log_interval, callbacks)


def remarks_of_ranks(own: Sequence[str]) -> list[str]:
    """Return the remarks of all ranks and on versions that differ, each line once; a collective call."""
    return list(dict.fromkeys([*other_versions(), *(remark for remarks in gather_objects(own) for remark in remarks)]))


def with_stored_layout(config: Config, load: Path | None) -> Config:
    """Return `config` with the layout of a checkpoint's generator, for which there is no flag."""
    path = newest(load) if load and config.objective.generates else None
    if path is None:
        return config
    stored = Config.from_dict(read_state(path)["config"]).objective
    return config.replace(objective={"generator_embeddings": stored.generator_embeddings})


def allocate_model(config: Config) -> Encoder:
    """Return the whole model, initialised. Raises `UserError` if the memory is too small."""
    with allocations_as_user_errors(
        "every rank first builds the whole model in host memory: use a smaller --hidden-size or fewer --num-layers; "
        "--dry-run prints the memory that a rank needs"
    ):
        return build_model(config.model, config.parallel.checkpoint_activations, config.objective)


def open_data(config: Config, ranks: Ranks) -> tuple[Corpus, BatchLoader, BatchLoader | None]:
    """Return the corpus, the training loader and, if the run validates, the validation loader."""
    corpus = Corpus.open(config)
    place = (ranks.data_rank, ranks.data_size, rows_for(config, ranks.device))
    validation = corpus.loader("valid", *place) if config.logging.validates else None
    return corpus, corpus.loader("train", *place), validation


def contents_of_files(config: Config) -> dict[str, str]:
    """Return what all ranks must share: name → value of each key of the DeepSpeed file, and the sums of the code.

    The keys of paths are left out: a node may have its own disk.
    """
    path, plugins = config.parallel.deepspeed_config, plugin_files()
    keys = flatten_keys(load_file(path)) if path else {}
    read = {f"{key} of --deepspeed_config": str(value) for key, value in keys.items() if not key.endswith("_path")}
    with refusals_as_user_errors():
        read["the code of megatron_ddrp"] = package_sum()
        return read | {f"the code of plug-in {number}": code_sum(file) for number, file in enumerate(plugins, 1)}


def other_versions() -> list[str]:
    """Return a line per host whose Python, torch or DeepSpeed has another version than rank 0's; a collective call."""
    own = f"Python {platform.python_version()}, torch {torch.__version__}, DeepSpeed {deepspeed_version()}"
    (_, first), *others = gather_objects((socket.gethostname(), own))
    return [f"host {host} has {theirs}; rank 0 has {first}" for host, theirs in dict(others).items() if theirs != first]


def open_notes(config: Config, corpus: Corpus) -> NoteDictionary | None:
    """Return an empty dictionary for the rare words of the corpus; None without `--notes`."""
    if not config.objective.notes:
        return None
    return NoteDictionary(corpus.rare_words[0], config.model.hidden_size, config.objective)


def about(notes: NoteDictionary | None, corpus: Corpus) -> list[str]:
    """Return a line about the dictionary of notes; no line without one."""
    if notes is None:
        return []
    size = notes.size_bytes / 2**20
    return [f"notes: {corpus.rare_words[1]}; dictionary {size:,.1f} MiB of host memory per rank"]


def introduction(config: Config, ranks: Ranks, corpus: Corpus, loader: BatchLoader, sizes: tuple[int, int]) -> str:
    """Return three lines about the run, and more for a blend and for ranks whose devices made another choice.

    `sizes` comes from `count_parameters`. A collective call.
    """
    parameters, position_parameters = sizes
    chosen = gather_objects(choices(config, ranks.device))
    chosen_lines = "\n".join((chosen[0], *other_choices(chosen)))
    data = corpus.summary(loader.samples, config.training.train_iters * config.training.global_batch_size)
    return (
        f"model: {config.model.position_encoding} + {config.objective.objective}, {parameters:,} parameters "
        f"({position_parameters:,} of positions), {chosen_lines}\n"
        f"data for {config.training.train_iters:,} steps: {data}\n"
        f"layout: {ranks.world_size} rank{'s' * (ranks.world_size > 1)} on {ranks.device.type} = "
        f"{ranks.tensor_size} tensor x {ranks.pipeline_size} pipeline x {ranks.data_size} data, "
        f"ZeRO {config.parallel.zero_stage}, {loader.num_micro_batches} x {config.training.micro_batch_size} sequences "
        f"per rank and step{config.parallel.sequence_note}"
    )


def where_we_start(config: Config, resumed: Resumed | None) -> str:
    """Return how the run starts: afresh, from weights, or from a checkpoint."""
    unsaved = "" if config.checkpoint.save else "; nothing is saved without --save"
    if resumed is None:
        nothing_there = f"{config.checkpoint.load} holds no checkpoint: " if config.checkpoint.load else ""
        return f"{nothing_there}starting afresh{unsaved}"
    if resumed.weights_only:
        line = f"weights from {resumed.path}, optimizer fresh"
    else:
        iteration = resumed.progress.iteration
        done = iteration >= config.training.train_iters
        nothing = f"; nothing to do: --train-iters is {config.training.train_iters:,}" if done else ""
        line = f"resumed from {config.checkpoint.load} at step {iteration:,}{nothing}"
    return "\n".join((*resumed.remarks, line + unsaved))
