"""Import of a Hugging Face folder as a folder for `--load` in pre-training, and the command that resumes from it.

Such folders have no optimizer state, so the checkpoint holds weights only, at iteration 0.

Download of a model by its name on the Hugging Face hub, such as `FacebookAI/roberta-base`.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_ddrp import checkpoint
from megatron_ddrp.config import Config, save_config
from megatron_ddrp.conversion.exported_folder import refuse_output, whole_folder
from megatron_ddrp.conversion.huggingface_folder import ReadFolder, read_folder
from megatron_ddrp.conversion.training_record import model_flags, objective_flags
from megatron_ddrp.conversion.weight_files import INDEX, PICKLED_WEIGHTS, SAFE_WEIGHTS
from megatron_ddrp.data.dataset.manifest import TokenizerFlags
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.errors import UserError

NO_TOKENIZER = (
    "none: the folder has no vocab.txt or tokenizer.json; give the model's own to megatron-ddrp pretrain (to write it: "
    "AutoTokenizer.from_pretrained(HF_DIR).save_pretrained(HF_DIR))"
)


CONTINUED = ("--lr", "5e-5", "--lr-warmup-fraction", "0.06", "--train-iters", "12500")
"""Flags of continued training. The rate lies between BERT's advice, 2e-5 (the README of google-research/bert), and 1e-4
of task-adaptive RoBERTa with as many rows per step; warm-up and steps are those of domain-adaptive RoBERTa (Gururangan
et al., arXiv:2004.10964)."""


@dataclass(frozen=True)
class Import(ReadFolder):
    """A folder that was read and written as a checkpoint."""

    output: Path

    def summary(self) -> str:
        """Return a few lines about weights loaded, left out and initialised, and the commands to continue with."""
        model, tokenizer, loaded = self.config, self.tokenizer, self.weights.ours.values()
        groups = Counter(name.rpartition(".")[0] or name for name in self.weights.left_out)
        left_out = [f"{group} ({count})" for group, count in groups.items()]
        if self.embedded_pieces > model.vocab_size:
            left_out.append(f"{self.embedded_pieces - model.vocab_size} rows beyond the tokenizer's vocabulary")
        flags = self._tokenizer_flags()
        command = ["megatron-ddrp", "pretrain", "--data-path", "corpus_text_document"]
        command += ["--load", str(self.output), "--save", "run"]
        command += [*flags, *objective_flags(self.objective), *model_flags(model), *CONTINUED]
        training = shlex.join(command)
        preprocessing = ["megatron-ddrp", "preprocess", "--input", "FILE", "--output-prefix", "corpus", *flags]
        lines = {
            "loaded": f"{self.source}: {model.position_encoding} positions, {model.num_layers} layers x "
            f"{model.hidden_size}, {sum(t.numel() for t in loaded):,} parameters in {len(loaded)} tensors",
            "left out": ", ".join(left_out) or "nothing",
            "initialised": "; ".join(self.weights.initialised) or "nothing",
            "tokenizer": f"{tokenizer.tokenizer_type}, {tokenizer.vocab_size:,} pieces"
            if tokenizer
            else self._missing(),
            **({"vocabulary": self.transfer.summary()} if self.transfer else {}),
            "wrote": f"{self.output}: weights without optimizer state",
            **({"next": shlex.join(preprocessing), "then": training} if flags else {"next": training}),
            "rate": "5e-5 is usual for continued training; try 2e-5 and 1e-4 too, and fewer steps for little text",
        }
        return "\n".join(f"{label + ':':<13}{line}" for label, line in lines.items())

    def _missing(self) -> str:
        """Return what to do about a folder without a tokenizer."""
        return NO_TOKENIZER + (
            f"; its padding must have the id {self.padding_id}" if self.padding_id is not None else ""
        )

    def _tokenizer_flags(self) -> list[str]:
        if self.tokenizer is None:
            return []
        kind, name, path = self.tokenizer.tokenizer_type, self.tokenizer.file_name, self.output / checkpoint.TOKENIZER
        return TokenizerFlags(kind).with_path(str(path if kind == "HuggingFace" else path / name)).words()


def import_folder(
    source: Path,
    output: Path,
    overwrite: bool = False,
    generator: Path | None = None,
    tokenizer: Tokenizer | None = None,
) -> Import:
    """Write the model of a Hugging Face folder as a checkpoint folder with one checkpoint, iteration 0.

    For an ELECTRA discriminator `source`, `generator` is the folder of its generator; without it a new one is drawn.
    Both may be names on the hub. With a `tokenizer`, the model gets its vocabulary instead of its own.

    `output` is written whole or not at all. Raise `UserError` if the model's family is not in the registry, if a weight
    is missing or does not fit, or if `output` exists and may not be replaced.
    """
    refuse = partial(refuse_output, output, overwrite, _is_import, "an untrained import")
    refuse()
    read = read_folder(local_folder(source), None if generator is None else local_folder(generator), tokenizer)
    with whole_folder(output, refuse) as folder:
        whole = Config(model=read.config, objective=read.objective)
        tensors = dict(read.model.named_parameters()) | checkpoint.persistent_buffers(read.model)
        path = checkpoint.save_weights_only(
            {name: t.detach() for name, t in tensors.items()}, whole, folder, read.head_settings
        )
        save_config(whole, folder)
        if read.tokenizer:
            read.tokenizer.save(folder / checkpoint.TOKENIZER)
        checkpoint.mark_latest(folder, path.name)
    return Import(**vars(read), output=output)


def _is_import(folder: Path) -> bool:
    """Return whether a folder holds an import and nothing from training."""
    try:
        newest = checkpoint.newest(folder)
        return newest is not None and bool(checkpoint.read_state(newest).get(checkpoint.WEIGHTS_ONLY))
    except UserError:
        return False


HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
"""Pattern of a name on the hub: one or two parts, and not a path such as ./x, /x or a/b/c."""
SETTINGS = ("*.json", "*.txt", "*.model")
"""Files of settings and tokenizers. Code is never downloaded."""


def local_folder(given: Path) -> Path:
    """Return `given` if it is a folder, else a downloaded copy of the hub's model with that name.

    Prefers safetensors to a pickle. Raise `UserError` with the command that downloads the folder if the download fails.
    """
    if given.exists() or not HUB_NAME.fullmatch(str(given)):
        return given
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        folder = Path(snapshot_download(str(given), allow_patterns=[*SETTINGS, *_files(SAFE_WEIGHTS)]))
        if not any((folder / name).is_file() for name in (SAFE_WEIGHTS, SAFE_WEIGHTS + INDEX)):
            folder = Path(snapshot_download(str(given), allow_patterns=[*SETTINGS, *_files(PICKLED_WEIGHTS)]))
    except ImportError:
        raise _advice(given, "huggingface_hub is not installed") from None
    except Exception as error:  # errors of the hub's library and of the network libraries below it
        raise _advice(given, str(error).strip().split("\n")[0][:200] or type(error).__name__) from None
    return folder


def _files(name: str) -> tuple[str, str]:
    """Return the patterns of the file `name` and of its shards, as transformers names them."""
    return name, "-*.".join(name.rsplit(".", 1))


def _advice(name: Path, reason: str) -> UserError:
    return UserError(
        f"there is no folder {name}, and no model of that name can be downloaded from the hub ({reason}): run "
        f"`hf download {name} --local-dir DIR` on a machine with a network, then give DIR"
    )
