"""The weighted mean of models of one architecture and vocabulary, weight by weight, as one model of the same kind.

Checkpoints of a run at a constant learning rate circle around a better model than any of them, and their mean stands
close to it: it replaces a decay of the rate, or shows early what one would give. Give the last checkpoints, some
hundred steps apart, and compare the losses that are printed:

    megatron-ddrp merge --load run/iter_0008000 run/iter_0009000 run/iter_0010000 --output mean \\
        --data-path corpus_text_document

Folders for transformers, such as exports, or one model fine-tuned from several seeds, give such a folder:

    megatron-ddrp merge --load hf/seed1 hf/seed2 hf/seed3 --weights 2 1 1 --output hf/mean

The sum is made in float64, tensor by tensor, and rounded once to fp32. Settings and tokenizer are those of the first
model. Models of different seeds or vocabularies from the start have no useful mean: merge what grew from one model.
The mean of checkpoints has no optimizer state: convert, finetune and glue take it; pretrain --load begins at step 0.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import closing
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ddrp.cli import ArgumentParser, parse_sections
from megatron_ddrp.commands import PROGRAM
from megatron_ddrp.config.reading import NOT_NEGATIVE, Section, option, refuse
from megatron_ddrp.data.preprocess.pipeline import exit_on_sigterm
from megatron_ddrp.errors import UserError

if TYPE_CHECKING:
    from megatron_ddrp.config import Config


@dataclass(frozen=True)
class Merged(Section):
    """models"""

    load: tuple[Path, ...] = option(
        MISSING,
        "two or more: folders that megatron-ddrp pretrain --save wrote (the newest checkpoint), DIR/iter_N in them, or "
        "Hugging Face folders",
        nargs="+",
        metavar="DIR",
    )
    output: Path = option(MISSING, "folder to write", metavar="DIR")
    weights: tuple[float, ...] = option(
        (), "weight of each model, in their order (default: equal)", nargs="+", within=NOT_NEGATIVE, metavar="X"
    )
    overwrite: bool = option(
        False, "replace the output if it is a Hugging Face folder, or a checkpoint that no run trained"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.load) < 2:
            refuse(f"--load {self.load[0]}: one model has no mean; give two or more")
        if self.weights and len(self.weights) != len(self.load):
            refuse(f"--weights has {len(self.weights)} numbers for {len(self.load)} models: give one for each")
        if self.weights and not sum(self.weights):
            refuse("--weights are all 0: give one at least a weight above 0")


@dataclass(frozen=True)
class Measured(Section):
    """validation loss of each model and of the mean (default: not measured)"""

    data_path: tuple[str, ...] | None = option(
        None, "dataset of the models' vocabulary, as of megatron-ddrp pretrain", nargs="+", metavar="[WEIGHT] P"
    )
    split: str | None = option(
        None, "shares for training, validation and test; 0,1,0 uses every document (default: the run's, or 949,50,1)"
    )


SECTIONS = (Merged, Measured)


def validation_losses(path: Path, run: Config | None, data_path: Sequence[str], split: str | None) -> str:
    """Return a model's losses on validation text, as the log of its run shows them.

    Batches, masks and draws are those of the configuration `run`, of a checkpoint; without one, `path` is a Hugging
    Face folder, read with the default settings. Raise `UserError` for a folder without the head of its objective, or
    of a family that cannot be imported, and for data of another vocabulary.
    """
    import torch

    from megatron_ddrp import checkpoint
    from megatron_ddrp.config import Config, DataConfig, LoggingConfig
    from megatron_ddrp.conversion.from_huggingface import read_folder
    from megatron_ddrp.corpus import Corpus, dataset_prefixes
    from megatron_ddrp.data.batches.loader import iterate, validation_steps
    from megatron_ddrp.data.dataset.verification import open_dataset
    from megatron_ddrp.engine.layout import Setup
    from megatron_ddrp.engine.step import evaluate
    from megatron_ddrp.run.log import terms

    if run is None:
        read = read_folder(path)
        model, tokenizer, run = read.model, read.tokenizer, Config(model=read.config, objective=read.objective)
        if read.weights.initialised or tokenizer is None:
            raise UserError(f"--data-path: {path} has no loss without its head and tokenizer; leave --data-path out")
    else:
        model, tokenizer, _ = checkpoint.read_model(checkpoint.choose_checkpoint(path))
    data = DataConfig(data_path=tuple(data_path), split=split or run.data.split, packing=run.data.packing)
    config = Config(run.model, replace(run.objective, notes=False), data, run.training, checkpoint=run.checkpoint)
    corpus = Corpus(tokenizer, config, {each: open_dataset(each, tokenizer) for each in dataset_prefixes(config)}, ())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    setup, loader = Setup.planned(config, 1, device.type), corpus.loader("valid", 0, 1, device.type)
    most = run.logging.eval_iters or LoggingConfig().eval_iters
    steps = validation_steps(most, len(loader.samples), loader.global_batch_size)
    with closing(iterate(loader, 0, steps)) as stream:
        row = evaluate(model.to(device), stream, setup)
    return f" | validation {terms(row, setup.objective.labels, 4, 'valid_')}"


def main(words: Sequence[str] | None = None) -> None:
    options = parse_sections(ArgumentParser(description=__doc__), SECTIONS, words)
    exit_on_sigterm()  # so that an unfinished folder is removed
    from megatron_ddrp.conversion.merging import Mean, refuse_existing

    refuse_existing(options.output, options.overwrite)
    mean = Mean(options.load, options.weights or (1.0,) * len(options.load))
    run = mean.sources[0].run

    def losses(path: Path) -> str:
        return validation_losses(path, run, options.data_path, options.split) if options.data_path else ""

    for source, (name, share) in zip(mean.sources, mean.shares, strict=True):
        print(f"{share:7.2%} of {name}{losses(source.path)}", flush=True)
    mean.write(options.output, options.overwrite)
    print(f"mean → {options.output}{losses(options.output)}")
    if run:
        folder = shlex.quote(str(options.output))
        print(f"next: {PROGRAM} convert --load {folder} --output {folder}_hf; finetune and glue take --load too")
