"""Set-up of a training run: data, model, engine, checkpoint, logs; then the loop (`run/loop.py`)."""

from __future__ import annotations

import math
import platform
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from megatron_ddrp.checkpoint import NEW_HEAD, WEIGHTS_ONLY, newest, read_state, refuse_folders
from megatron_ddrp.checkpoint.weights import load_notes
from megatron_ddrp.config import Config
from megatron_ddrp.config.registry import code_sum, package_sum, plugin_files
from megatron_ddrp.config.run import settings_of_all_ranks
from megatron_ddrp.config.training import HEAD_ITERS
from megatron_ddrp.config.translation import flatten_keys
from megatron_ddrp.corpus import Corpus, tokenizer_flags, validated_splits, verify_data, with_tokenizer
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
from megatron_ddrp.engine.checkpoint import Progress, Resumed, changed_tokenizer, check_start, load_checkpoint
from megatron_ddrp.engine.layout import Setup, deepspeed_version
from megatron_ddrp.engine.proofs import GradientProof
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError, allocations_as_user_errors, refusals_as_user_errors
from megatron_ddrp.memory import need_less_memory
from megatron_ddrp.model import Encoder, build_model, count_parameters
from megatron_ddrp.model.fused import compiles
from megatron_ddrp.objectives.electra import NoteDictionary
from megatron_ddrp.parallel import process_group
from megatron_ddrp.parallel.process_group import Ranks, agree, agree_on_long_work, gather_objects, refuse_differences
from megatron_ddrp.run.callbacks import Callback, Callbacks, callbacks_of
from megatron_ddrp.run.launch import StopRequests, is_launched
from megatron_ddrp.run.log import MetricsLog
from megatron_ddrp.run.loop import TrainingRun, prepare_cpu
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
    setup, own_callbacks = agree(partial(prepare, config, ranks))
    if with_data:
        check_without_data(setup)
        setup = replace(setup, config=with_data(setup.config))
    data = open_data(setup)
    setup, model = agree(partial(allocate, setup, data.corpus))
    about_model = [introduction(setup, data.corpus, data.loader, count_parameters(model))]
    about_model += setup.config.optimizer.chosen.remarks(model)
    with ExitStack() as stack:
        stack.enter_context(allocations_as_user_errors(partial(need_less_memory, setup)))
        engine = build_engine(model, setup)
        stack.callback(release, engine)
        start = resume(engine, setup, data.corpus)
        remarks = remarks_of_ranks(setup, (*data.remarks, *start.remarks, *open_folder(setup, data, stack)))
        first = ranks.rank == 0
        listeners = Callbacks([PlateauWatch(data.level), *own_callbacks, *callbacks] if first else [], requests)
        before, logged_every = start.progress.iteration, None if start.resumed is None else start.resumed.log_interval
        log = agree(lambda: stack.enter_context(MetricsLog(setup.config, before, first, logged_every, listeners)))
        for line in (*remarks, *about_model, where_we_start(setup.config, start.resumed)):
            log.say(line)
        agree(lambda: listeners.start(setup.config, start.progress.iteration, engine.module))
        if setup.config.training.gradient_proof:
            GradientProof(engine, setup, log.say)
        run = TrainingRun(setup, engine, log, setup.config.checkpoint.folders[0], start.notes)
        progress, request = run.steps(data.loader, data.validation, start.progress, requests)
        return Trained(run.end(progress, request), progress.iteration)


def prepare(config: Config, ranks: Ranks) -> tuple[Setup, list[Callback]]:
    """Prepare this process; return the setup of the run, and the callbacks that flags and plug-ins name.

    Raises `UserError` for all that can be refused before the data are opened.
    """
    if config.training.num_threads:
        torch.set_num_threads(config.training.num_threads)
    if ranks.device.type == "cpu":
        prepare_cpu()
    allow_tf32(config.training.tf32, ranks.device)
    check_device(config, ranks.device)
    save, load = config.checkpoint.folders
    refuse_folders(save, load)
    callbacks = callbacks_of(config.logging)
    setup = Setup.of(config, ranks)
    state = read_state(path) if (path := newest(load)) else {}
    return setup.replace(training={"new_head_iters": new_head_iters(config, state)}), callbacks


def new_head_iters(config: Config, state: Mapping[str, Any]) -> int | None:
    """Return the first steps that train the head alone, in a run that begins from a checkpoint's state, {} without one.

    A resumed run keeps its number. Raises `UserError` if a number is given and there is no checkpoint.
    """
    given = config.training.new_head_iters
    if given and not state:
        raise UserError(
            f"--new-head-iters {given}: --load {config.checkpoint.load} holds no encoder that could rest; leave it out",
            WRONG_ARGUMENTS,
        )
    if given is not None or not state:
        return given
    if state.get(WEIGHTS_ONLY):
        return min(HEAD_ITERS, math.ceil(config.training.train_iters / 5)) if state.get(NEW_HEAD) else None
    return Config.from_dict(state["config"]).training.new_head_iters


def check_without_data(setup: Setup) -> None:
    """Raise `UserError` for what would be refused behind the data, as far as that needs none, on one rank."""
    config, (save, load) = setup.config, setup.config.checkpoint.folders
    count_micro_batches(config.training.global_batch_size, config.training.micro_batch_size, setup.ranks.data_size)
    split_documents(1, config.data.split or "1")
    tokenizer = tokenizer_flags(with_tokenizer(config, ())).build()
    with refusals_as_user_errors(save), sole_writer(save) if save and save.exists() else nullcontext():
        pass
    check_start(load, config, tokenizer)


class Data(NamedTuple):
    """Data of a run."""

    corpus: Corpus
    loader: BatchLoader
    validation: dict[str, BatchLoader]
    """Split → loader of text that the run validates on: `valid` and, with `--other-data-path`, `other`."""
    level: float
    """Unigram level of the training text, in nats; 0 on other ranks than rank 0."""
    gap: float | None
    """`Corpus.validation_gap`; None on other ranks than rank 0."""
    remarks: list[str]
    """Lines for the user."""


def open_data(setup: Setup) -> Data:
    """Open the data on every rank; a collective call. Raises `UserError` if the ranks have other data or code."""
    config, ranks, first = setup.config, setup.ranks, setup.ranks.rank == 0
    verified: Sequence[str] = agree_on_long_work(partial(verify_data, config) if ranks.first_on_host else tuple)

    def open_here() -> tuple[Data, dict[str, str]]:
        corpus = Corpus.open(config)
        place = (ranks.data_rank, ranks.data_size, rows_for(config, ranks.device))
        validation = {split: corpus.loader(split, *place) for split in validated_splits(config)}
        loader, level = corpus.loader("train", *place), corpus.unigram_loss if first else 0.0
        remarks = [*verified, *corpus.remarks, *(corpus.split_remarks() if first else ())]
        data = Data(corpus, loader, validation, level, corpus.validation_gap if first else None, remarks)
        return data, corpus.description | shared_by_ranks(setup) if ranks.world_size > 1 else {}

    data, own = agree(open_here)
    if ranks.world_size > 1:
        refuse_differences(own)
    return data


def allocate(setup: Setup, corpus: Corpus) -> tuple[Setup, Encoder]:
    """Return the setup with the tokenizer's vocabulary, and the whole model, initialised."""
    config = corpus.config.with_vocabulary(corpus.tokenizer.vocab_size)
    torch.manual_seed(config.training.seed)
    return replace(setup, config=config), allocate_model(config)


class Start(NamedTuple):
    """Place at which a run starts."""

    resumed: Resumed | None
    progress: Progress
    notes: NoteDictionary | None
    """Dictionary of `--notes`."""
    remarks: list[str]
    """Lines for the user about what has changed, and about the notes."""


def resume(engine: Any, setup: Setup, corpus: Corpus) -> Start:
    """Fill the engine from the checkpoint of `--load`, if there is one; return where to start. A collective call."""
    load = setup.config.checkpoint.folders[1]
    resumed = load_checkpoint(engine, load, setup) if load else None

    def take_up() -> Start:
        progress = resumed.progress if resumed else Progress()
        changes = changed_tokenizer(resumed.path, corpus.tokenizer) if resumed else []
        changes += corpus.changes(progress.datasets)
        objective, notes = setup.config.objective, None
        if objective.notes:
            notes = NoteDictionary(corpus.rare_words[0], setup.config.model.hidden_size, objective)
            size = notes.size_bytes / 2**20
            changes += [f"notes: {corpus.rare_words[1]}; dictionary {size:,.1f} MiB of host memory per rank"]
            if resumed and not resumed.weights_only:
                load_notes(notes, resumed.path)
        return Start(resumed, replace(progress, datasets=corpus.contents), notes, changes)

    return agree(take_up)


def open_folder(setup: Setup, data: Data, stack: ExitStack) -> list[str]:
    """Open the `--save` folder on rank 0 until `stack` ends; return lines about it for the user. A collective call."""
    (folder, load), home = setup.config.checkpoint.folders, None
    if folder and setup.ranks.rank == 0:
        home = RunFolder(folder, setup.config, data.corpus.tokenizer, data.level, data.gap)
    agree(lambda: stack.enter_context(home or nullcontext()))
    return [*find_unshared(folder, load is not None, setup.ranks), *(home.remarks if home else ())]


def remarks_of_ranks(setup: Setup, own: Sequence[str]) -> list[str]:
    """Return the remarks of all ranks, and those on versions and devices, each line once; a collective call."""
    config, device = setup.config, setup.ranks.device
    own = [*own, *precision_remarks(config, device), *missing_graphs(config, device)]
    of_ranks = [remark for remarks in gather_objects(own) for remark in remarks]
    return list(dict.fromkeys([*other_versions(), *of_ranks, *unused_devices(setup.ranks.world_size)]))


def allocate_model(config: Config) -> Encoder:
    """Return the whole model, initialised. Raises `UserError` if the memory is too small."""
    with allocations_as_user_errors(
        "every rank first builds the whole model in host memory: use a smaller --hidden-size or fewer --num-layers; "
        "--dry-run prints the memory that a rank needs"
    ):
        return build_model(config.model, config.parallel.checkpoint_activations, config.objective)


def shared_by_ranks(setup: Setup) -> dict[str, str]:
    """Return what all ranks must share: name → value: keys of the DeepSpeed file, --compile, sums of the code.

    The keys of paths are left out: a node may have its own disk. Compiled layers give their gradients in another order
    than plain ones, and DeepSpeed takes one order for granted.
    """
    keys, plugins = flatten_keys(setup.deepspeed), plugin_files()
    read = {f"{key} of --deepspeed_config": str(value) for key, value in keys.items() if not key.endswith("_path")}
    compiled = compiles(choice := setup.config.model.compile, setup.ranks.device)
    read[f"--compile {choice}"] = "compiled layers" if compiled else "plain layers"
    with refusals_as_user_errors():
        read["the code of megatron_ddrp"] = package_sum()
        return read | {f"the code of plug-in {number}": code_sum(file) for number, file in enumerate(plugins, 1)}


def other_versions() -> list[str]:
    """Return a line per host whose Python, torch or DeepSpeed has another version than rank 0's; a collective call."""
    own = f"Python {platform.python_version()}, torch {torch.__version__}, DeepSpeed {deepspeed_version()}"
    (_, first), *others = gather_objects((socket.gethostname(), own))
    return [f"host {host} has {theirs}; rank 0 has {first}" for host, theirs in dict(others).items() if theirs != first]


def introduction(setup: Setup, corpus: Corpus, loader: BatchLoader, sizes: tuple[int, int]) -> str:
    """Return three lines about the run, and more for a blend and for ranks whose devices made another choice.

    `sizes` comes from `count_parameters`. A collective call.
    """
    config, ranks, (parameters, position_parameters) = setup.config, setup.ranks, sizes
    chosen = gather_objects(choices(config, ranks.device))
    chosen_lines = "\n".join((chosen[0], *other_choices(chosen)))
    data = corpus.summary(loader.samples, config.training.train_iters * config.training.global_batch_size)
    objective = config.objective.objective
    if in_phase := config.objective.causal_steps(config.training.train_iters):
        objective = f"clm up to step {in_phase:,}, then {objective}"
    return (
        f"model: {config.model.position_encoding} + {objective}, {parameters:,} parameters "
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
    begin, rests = resumed.progress.iteration + 1 if resumed else 1, config.training.new_head_iters or 0
    if begin <= rests:
        unsaved += f"\nsteps {begin:,} to {rests:,} train the head alone, and the encoder rests (--new-head-iters)"
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
