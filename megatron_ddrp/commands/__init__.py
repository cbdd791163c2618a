"""The commands of `megatron-ddrp`, one module each."""

from __future__ import annotations

from typing import NamedTuple

PROGRAM = "megatron-ddrp"


class Command(NamedTuple):
    """A command, its module, whose `main` runs it, and a line for the list of commands."""

    module: str
    summary: str
    on_ranks: bool = False
    """A launcher may start several ranks of this command."""


COMMANDS = {
    "pretrain": Command("megatron_ddrp.commands.pretrain", "pre-train an encoder, on one process or many ranks", True),
    "preprocess": Command("megatron_ddrp.commands.preprocess", "turn text into an indexed dataset"),
    "train-tokenizer": Command("megatron_ddrp.commands.train_tokenizer", "learn a vocabulary from text"),
    "dataset": Command("megatron_ddrp.commands.dataset", "inspect, verify, merge or shuffle indexed datasets"),
    "plan": Command("megatron_ddrp.commands.plan", "a model, steps and a rate for your text, device and hours"),
    "convert": Command("megatron_ddrp.commands.convert", "convert a checkpoint to a Hugging Face folder, or back"),
    "merge": Command("megatron_ddrp.commands.merge", "the weighted mean of checkpoints, or of Hugging Face folders"),
    "analyze": Command("megatron_ddrp.lab.analysis.command", "look inside encoders: attention, hidden states, speed"),
    "report": Command("megatron_ddrp.lab.run_report", "write a short report of a run, with its curves"),
    "glue": Command("megatron_ddrp.tasks.glue", "fine-tune encoders on GLUE over a grid and seeds", True),
    "finetune": Command("megatron_ddrp.tasks.finetune.command", "fine-tune encoders on your own tasks", True),
    "minimal-pairs": Command(
        "megatron_ddrp.tasks.minimal_pairs.command", "score masked language models without fine-tuning"
    ),
    "compare": Command("megatron_ddrp.lab.compare.command", "train and score a plan's models, write one page"),
}
