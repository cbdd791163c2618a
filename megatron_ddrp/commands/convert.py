"""Training checkpoint ↔ Hugging Face folder, with equal hidden states and logits; Hugging Face folder → ONNX.

From Hugging Face (--from-hf): a folder with config.json, weights (model.safetensors or pytorch_model.bin, also in
shards) and tokenizer becomes a folder that megatron-ddrp pretrain --load resumes from, with the command that this one
prints. Families: BERT, RoBERTa, XLM-R, CamemBERT, ELECTRA (discriminator or generator), DeBERTa (v1 to v3), ModernBERT,
NomicBERT, EuroBERT (210m) and our own exports. A name on the hub works if huggingface_hub is installed and there is a
network. Code in a folder is never run.

    megatron-ddrp convert --from-hf FacebookAI/roberta-base --output start
    megatron-ddrp convert --from-hf electra-base-discriminator --generator electra-base-generator \\
        --output start

Another vocabulary (--from-hf with --vocab-file or --tokenizer-model): a piece that both vocabularies have keeps its
embedding, any other begins as the mean of the old pieces that spell it. So an encoder moves to the words of a domain or
language, and is trained further from there.

    megatron-ddrp convert --from-hf bert-base-uncased --vocab-file law_vocab.txt --output start

To Hugging Face (--load): a model that transformers has an equal for leaves as that one, by default as the family that
it came from, and a sentence encoder with its pooling and normalization. Every other model brings its own small model
files, which transformers runs only when asked to by trust_remote_code=True. DeBERTa's enhanced mask decoder goes into
the masked-LM model alone.

    megatron-ddrp convert --load checkpoints/base --output hf/base
    megatron-ddrp convert --load checkpoints/base/iter_0100000 --output hf/base-100k

The folder has a model card, README.md, with the run's data, losses, settings and command, and no path of this machine.
Complete it before you publish the folder by the command that is printed.

    megatron-ddrp convert --load checkpoints/base --output hf/base --license apache-2.0 --language en

Both directions list the weights loaded, left out and initialised.

To ONNX (--onnx): an export, a model that finetune kept or any folder of an encoder becomes a graph for rows of any
number and length, beside the settings and the tokenizer that servers read. The graph gives the scores of the model's
head, or hidden states and the vector of a sentence encoder, and it is compared with the model at once. The command
prints how to score a kept model, its graph and the one of --int8 side by side.

    megatron-ddrp convert --onnx OUT/models/TASK-… --output served --int8
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path

from megatron_ddrp.cli import ArgumentParser, parse_sections
from megatron_ddrp.commands.options import GivenTokenizer
from megatron_ddrp.config import flag
from megatron_ddrp.config.reading import Section, option, refuse
from megatron_ddrp.data.dataset.indexed_dataset import TokenizerFlags
from megatron_ddrp.data.preprocess.pipeline import exit_on_sigterm
from megatron_ddrp.data.tokenizers.tokenizer import TOKENIZER_TYPES
from megatron_ddrp.data.tokenizers.vocabulary import warn_of_vocabulary

BELONGS_TO = {
    **dict.fromkeys(("generator", "tokenizer_type", "vocab_file", "tokenizer_model"), "from_hf"),
    **dict.fromkeys(("family", "license", "language"), "load"),
    "int8": "onnx",
}
"""Flag → the input that it needs."""


@dataclass(frozen=True)
class ConvertInput(Section):
    """input, --load, --from-hf or --onnx"""

    load: Path | None = option(
        None,
        "a folder that megatron-ddrp pretrain --save wrote (its newest checkpoint), or one DIR/iter_N in it",
        metavar="DIR",
    )
    from_hf: Path | None = option(
        None, "a Hugging Face folder, or a name on the hub: config.json, weights and tokenizer", metavar="HF_DIR"
    )
    onnx: Path | None = option(
        None, "a Hugging Face folder: an export, a model that finetune kept, or a downloaded encoder", metavar="HF_DIR"
    )
    generator: Path | None = option(
        None,
        "with --from-hf of an ELECTRA discriminator: the folder of its generator (default: a new one is drawn)",
        metavar="HF_DIR",
    )
    family: str | None = option(
        None,
        "with --load: the kind of folder, such as roberta, or megatron_ddrp, ours (default: as the model is)",
        metavar="MODEL_TYPE",
    )

    def __post_init__(self) -> None:
        if [self.load, self.from_hf, self.onnx].count(None) != 2:
            refuse("one of the arguments --load --from-hf --onnx is required, and only one")


@dataclass(frozen=True)
class OtherVocabulary(GivenTokenizer):
    """another vocabulary, with --from-hf (default: the folder's own)"""

    tokenizer_type: str | None = option(
        None, f"kind of vocabulary (default: {TOKENIZER_TYPES[0]})", choices=TOKENIZER_TYPES
    )


@dataclass(frozen=True)
class OutputFolder(Section):
    """output"""

    output: Path = option(
        MISSING,
        "folder to write: weights, configuration and tokenizer, as a Hugging Face folder for --load, as a checkpoint "
        "for --from-hf, and with a graph in place of weights for --onnx",
        metavar="DIR",
    )
    overwrite: bool = option(
        False,
        "replace the output if it is a Hugging Face folder (--load), an untrained import (--from-hf), or a folder with "
        "a graph (--onnx)",
    )


@dataclass(frozen=True)
class Card(Section):
    """model card, with --load"""

    license: str | None = option(
        None,
        "the hub's identifier of the model's license, such as apache-2.0 (default: the card says unknown)",
        metavar="ID",
    )
    language: tuple[str, ...] | None = option(
        None, "languages of the text, such as en or ja", nargs="+", metavar="CODE"
    )


@dataclass(frozen=True)
class Graphs(Section):
    """graphs, with --onnx"""

    int8: bool = option(False, "write a second graph, with weights of 8 bits: a quarter of the size")


SECTIONS = (ConvertInput, OtherVocabulary, OutputFolder, Card, Graphs)


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse_sections(ArgumentParser(description=__doc__), SECTIONS, words)
    exit_on_sigterm()  # so that an unfinished folder is removed
    for name, other in BELONGS_TO.items():
        if getattr(arguments, name) not in (None, False) and getattr(arguments, other) is None:
            refuse(f"{flag(name)} needs {flag(other)}: leave it out")
    if arguments.from_hf:
        from megatron_ddrp.conversion.from_huggingface import import_folder
        from megatron_ddrp.conversion.tokenizer_files import refuse_other_ids

        if arguments.tokenizer_type == "HuggingFace":
            refuse_other_ids(arguments.tokenizer_model)
        flags = TokenizerFlags.of(arguments)
        tokenizer = None if flags == TokenizerFlags() else flags.build()
        imported = import_folder(
            arguments.from_hf, arguments.output, arguments.overwrite, arguments.generator, tokenizer
        )
        print(imported.summary(), flush=True)
        for line in warn_of_vocabulary(imported.tokenizer) if imported.tokenizer else ():
            print(line, file=sys.stderr)
        if imported.warning:
            print(imported.warning, file=sys.stderr)
    elif arguments.onnx:
        from megatron_ddrp.encoders.onnx_graph import export_onnx

        print(export_onnx(arguments.onnx, arguments.output, arguments.int8, arguments.overwrite))
    else:
        from megatron_ddrp.conversion.model_card import Publishing
        from megatron_ddrp.conversion.to_huggingface import export_checkpoint

        publishing = Publishing(arguments.license, arguments.language or ())
        exported = export_checkpoint(
            arguments.load, arguments.output, arguments.overwrite, arguments.family, publishing
        )
        print(exported.summary())
