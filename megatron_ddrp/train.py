"""The training loop, as a paragraph."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from megatron_ddrp.checkpoint import TOKENIZER, refuse_folders
from megatron_ddrp.config import Config, save_config
from megatron_ddrp.corpus import Corpus
from megatron_ddrp.data.loader import BatchLoader, iterate
from megatron_ddrp.engine.build import build_engine
from megatron_ddrp.engine.checkpoint import Progress, load_checkpoint, load_imported_weights, save_checkpoint
from megatron_ddrp.engine.step import StepResult, evaluate, train_step
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError
from megatron_ddrp.log import Clock, MetricsLog, check_writers, progress_line, terms
from megatron_ddrp.model import build_model, count_parameters
from megatron_ddrp.model.attention import refusal, resolve_backend
from megatron_ddrp.model.positions import REGISTRY
from megatron_ddrp.parallel import process_group
from megatron_ddrp.parallel.process_group import Ranks, agree


def train(config: Config) -> None:
    """Run `config` to its last step (or to `--exit-interval`) on this rank; the others run the same."""
    ranks = process_group.start(config.parallel.distributed_timeout_minutes)
    if config.training.num_threads:
        torch.set_num_threads(config.training.num_threads)
    check_attention(config, ranks)
    folder, load = (Path(name) if name else None for name in (config.checkpoint.save, config.checkpoint.load))
    agree(lambda: refuse_folders(folder, load))
    corpus, loader, validation = agree(lambda: open_data(config, ranks))
    config = config.replace(model={"vocab_size": corpus.tokenizer.vocab_size})
    torch.manual_seed(config.training.seed)
    model = build_model(config.model, config.parallel.checkpoint_activations, config.objective)
    total, position = count_parameters(model)
    imported = load_imported_weights(model, load, config) if load else None
    engine = build_engine(model, config, ranks, loader.num_micro_batches)
    resumed = load_checkpoint(engine, load, config, ranks) if load and not imported else None
    progress = resumed or Progress()
    if folder and ranks.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_config(config, folder)
        corpus.tokenizer.save(folder / TOKENIZER)

    with MetricsLog(config, progress.iteration, active=ranks.rank == 0) as log:
        for note in corpus.notes:
            log.say(note)
        log.say(introduction(config, ranks, corpus, loader, total, position))
        log.say(where_we_start(config, resumed, imported))
        clock = Clock(progress.iteration, config.training.train_iters)
        to_do = config.training.train_iters - progress.iteration
        for micro_batches in iterate(loader, progress.consumed_samples, to_do):
            result = train_step(engine, micro_batches, config, ranks, progress.iteration + 1)
            progress = advance(progress, result, config)
            clock.count(result.counts.tokens)
            log_step(log, clock, result, progress, config)
            if validation and due(progress.iteration, config.logging.eval_interval, config):
                validate(engine, validation, log, progress, config, ranks)
                clock.pause()
            stops = progress.iteration == config.training.train_iters or exits(progress.iteration, config)
            if folder and (stops or progress.iteration % config.checkpoint.save_interval == 0):
                path = save_checkpoint(engine, folder, progress, config, ranks)
                log.say(f"saved {path}")
                clock.pause()
            if stops:
                break
    process_group.stop()


def check_attention(config: Config, ranks: Ranks) -> None:
    """Refuse an attention backend that cannot serve here, before anything is read."""
    model, dtypes = config.model, {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    dtype = dtypes[config.training.precision]
    reason = refusal(model.attention_backend, ranks.device, dtype, model.attention_dropout, model.head_dim)
    if reason:
        raise UserError(f"--attention-backend {model.attention_backend}: {reason}", WRONG_ARGUMENTS)


def open_data(config: Config, ranks: Ranks) -> tuple[Corpus, BatchLoader, BatchLoader | None]:
    """The corpus, the training loader and, where it is asked for, the validation loader."""
    check_writers(config)
    if config.parallel.deepspeed_config and not Path(config.parallel.deepspeed_config).is_file():
        raise UserError(f"--deepspeed-config {config.parallel.deepspeed_config}: no such file", WRONG_ARGUMENTS)
    corpus = Corpus.open(config)
    training = corpus.loader("train", ranks.rank, ranks.world_size)
    wants_validation = config.logging.eval_interval > 0 and config.logging.eval_iters > 0
    return corpus, training, corpus.loader("valid", ranks.rank, ranks.world_size) if wants_validation else None


def advance(progress: Progress, result: StepResult, config: Config) -> Progress:
    """One step further."""
    return replace(
        progress,
        iteration=progress.iteration + 1,
        consumed_samples=progress.consumed_samples + config.training.global_batch_size,
        consumed_tokens=progress.consumed_tokens + result.counts.tokens,
    )


def due(iteration: int, interval: int, config: Config) -> bool:
    """Whether something done every `interval` steps and at the last one is to be done now."""
    return iteration % interval == 0 or iteration == config.training.train_iters


def exits(iteration: int, config: Config) -> bool:
    """Whether `--exit-interval` ends the run here."""
    interval = config.checkpoint.exit_interval
    return interval is not None and iteration % interval == 0


def log_step(log: MetricsLog, clock: Clock, result: StepResult, progress: Progress, config: Config) -> None:
    """Log the first step, every `--log-interval`-th and the last."""
    if progress.iteration != 1 and not due(progress.iteration, config.logging.log_interval, config):
        return
    row = {
        "iteration": progress.iteration,
        "consumed_samples": progress.consumed_samples,
        "consumed_tokens": progress.consumed_tokens,
        **result.losses(config),
        "lr": result.lr,
        "grad_norm": result.grad_norm,
        **clock.read(),
    }
    log.write(row)
    log.say(progress_line(row, config.training.train_iters, clock.eta(progress.iteration)))


def validate(engine, loader: BatchLoader, log: MetricsLog, progress: Progress, config: Config, ranks: Ranks) -> None:
    """The losses on the same held-out samples with the same masks each time."""
    size = config.training.global_batch_size
    steps = min(config.logging.eval_iters, max(1, len(loader.samples) // size))
    losses = evaluate(engine, iterate(loader, 0, steps), config, ranks)
    log.write({"iteration": progress.iteration, **losses})
    log.say(f"step {progress.iteration}/{config.training.train_iters} | validation {terms(losses, 4, 'valid_')}")


def introduction(
    config: Config, ranks: Ranks, corpus: Corpus, loader: BatchLoader, parameters: int, position_parameters: int
) -> str:
    """What is about to run, in three lines, and one more for each corpus of a blend."""
    encoding = REGISTRY[config.model.position_encoding]
    backend, why = resolve_backend(
        config.model.attention_backend, ranks.device, encoding.in_logits, config.model.attention_dropout
    )
    data = corpus.describe(loader.samples, config.training.train_iters * config.training.global_batch_size)
    return (
        f"model: {config.model.position_encoding} + {config.objective.objective}, {parameters:,} parameters "
        f"({position_parameters:,} of positions), {backend} attention ({why}), {config.training.precision}\n"
        f"data for {config.training.train_iters:,} steps: {data}\n"
        f"layout: {ranks.world_size} rank(s) on {ranks.device.type}, ZeRO {config.parallel.zero_stage}, "
        f"{loader.num_micro_batches} x {config.training.micro_batch_size} sequences a rank and step"
    )


def where_we_start(config: Config, resumed: Progress | None, imported: Path | None) -> str:
    """Whether this run begins or goes on."""
    if resumed:
        done = resumed.iteration >= config.training.train_iters
        nothing = f"; nothing to do: --train-iters is {config.training.train_iters:,}" if done else ""
        return f"resumed from {config.checkpoint.load} at step {resumed.iteration:,}{nothing}"
    if imported:
        return f"weights from {imported}, optimizer fresh"
    return (
        f"{config.checkpoint.load} holds no checkpoint: starting afresh"
        if config.checkpoint.load
        else "starting afresh"
    )
