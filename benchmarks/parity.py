"""Differences between transformers and our models after a conversion, for every family, head and direction.

Each model is tiny, all its weights are drawn from normal(0, 0.3), and rows of three lengths are padded on the right. A
difference is the largest over the hidden states behind the embeddings and every layer, or over the logits, relative to
the largest value there.

    python benchmarks/parity.py            # print the table
    python benchmarks/parity.py --write    # put it into docs/lab/agreement.md
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pages import write_table
from torch import Tensor, nn

from megatron_ddrp import checkpoint
from megatron_ddrp.config import Config, ModelConfig, ObjectiveConfig
from megatron_ddrp.conversion.families import FAMILIES, Family
from megatron_ddrp.conversion.families.contract import exported_class
from megatron_ddrp.conversion.from_huggingface import import_folder
from megatron_ddrp.conversion.to_huggingface import export_checkpoint
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer, build_tokenizer
from megatron_ddrp.model import build_model
from megatron_ddrp.pages.markdown import Table

WORDS = ["red", "green", "blue", "cat", "dog", "bird", "run", "sing", "##s", "##ing", "the", ",", "."]
BERTS, FAIRSEQS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
VOCABULARIES = (
    [*BERTS, *WORDS],
    [*FAIRSEQS, *WORDS],
    [*FAIRSEQS, *WORDS, "\u2581red"],
    ["<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", *WORDS, "<s>", "</s>", "\u2581red", "<mask>"],
)
"""Pieces of vocab.txt; a family gets the first by which its models are told from those of other families."""
SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48, "seq_length": 24}
LENGTHS = (24, 13, 2)
OBJECTIVES = {"masked-lm": "mlm", "replaced-token": "electra", "contextual-replaced-token": "rtd"}
DTYPES = {torch.float32: "fp32", torch.float64: "fp64"}


class Differences(NamedTuple):
    """Worst differences of one model in one precision, relative to the largest value."""

    hidden_states: float
    logits: float | None = None
    """None where transformers has no class with the head."""

    @property
    def all(self) -> list[float]:
        """Both differences, or that of the hidden states alone."""
        return [self.hidden_states] if self.logits is None else [self.hidden_states, self.logits]


class Case(NamedTuple):
    """A family with one of its heads."""

    family: Family
    head: str

    def __str__(self) -> str:
        return f"{self.family.model_type}, {self.head}"


CASES = [Case(family, head) for family in FAMILIES.values() for head in family.head_modules if head in OBJECTIVES]


def example(case: Case, folder: Path) -> tuple[ModelConfig, Tokenizer]:
    """Return a tiny model of the case's family and a tokenizer that fits it; its vocab.txt is written into `folder`."""
    settings = SIZES | {name: allowed[0] for name, allowed in case.family.fields.items()}
    settings |= {"embedding_size": 16} if "embedding_size" in case.family.sizes else {}
    if "local_attention" in case.family.sizes.values():
        settings |= {"num_layers": 4, "local_attention": 10, "rope_theta": 50.0, "local_rope_theta": 5.0}
    settings |= {"relative_distance": 4} if ModelConfig(**settings).relative_distance else {}
    config = ModelConfig(**settings)
    folder.mkdir(exist_ok=True)
    for pieces in VOCABULARIES:
        (folder / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
        tokenizer = build_tokenizer("BertWordPieceLowerCase", folder / "vocab.txt")
        if case.family.fits(config, tokenizer):
            return ModelConfig(**settings | {"vocab_size": len(pieces)}), tokenizer
    raise AssertionError(f"no vocabulary of the parity table fits {case}")


def draw(model: nn.Module) -> None:
    """Draw every weight of a model anew, so that each acts."""
    torch.manual_seed(3)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)


def write_run(case: Case, folder: Path) -> Path:
    """Write a random model of ours as a training run, and return its folder."""
    config, tokenizer = example(case, folder)
    whole = Config(model=config, objective=ObjectiveConfig(OBJECTIVES[case.head]))
    model = build_model(config, objective=whole.objective)
    draw(model)
    path = checkpoint.save_weights_only({n: p.detach() for n, p in model.named_parameters()}, whole, folder)
    tokenizer.save(folder / checkpoint.TOKENIZER)
    checkpoint.mark_latest(folder, path.name)
    return folder


def exported(case: Case, folder: Path) -> tuple[Any, Any]:
    """Return (model of transformers, model of ours): ours was exported."""
    run = write_run(case, folder / "run")
    export = export_checkpoint(run, folder / "hf", family_name=case.family.model_type)
    return _load(folder / "hf"), checkpoint.load_model(export.source)[0]


def imported(case: Case, folder: Path) -> tuple[Any, Any]:
    """Return (model of transformers, model of ours): ours was imported from transformers' own folder.

    The folder of a family with code of ours is an export, since transformers has no other.
    """
    if case.family.has_code:
        theirs, _ = exported(case, folder)
    else:
        config, tokenizer = example(case, folder / "hf")
        settings = case.family.folder_settings(config, case.head, tokenizer)
        (folder / "hf" / "config.json").write_text(json.dumps(settings))
        model_class = exported_class(folder / "hf", settings["architectures"][0])
        theirs = model_class(model_class.config_class.from_pretrained(folder / "hf")).eval()
        draw(theirs)
        theirs.save_pretrained(folder / "hf")
    import_folder(folder / "hf", folder / "imported")
    return theirs, checkpoint.load_model(folder / "imported")[0]


def _load(folder: Path) -> Any:
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    return exported_class(folder, name).from_pretrained(folder).eval()


@torch.no_grad()
def compare(theirs: Any, ours: Any, pad_id: int) -> Differences:
    """Return the worst differences over three rows of different lengths, each with padding on the right."""
    config, place = ours.config, torch.arange(max(LENGTHS))
    mask = (place < torch.tensor(LENGTHS)[:, None]).long()
    ids = torch.randint(config.vocab_size - 1, mask.shape, generator=torch.Generator().manual_seed(0))
    ids = torch.where(mask > 0, ids + (ids >= pad_id), pad_id)
    segments = (place >= torch.tensor([[9], [5], [1]])).long() * mask * (config.num_segments > 1)
    types = {"token_type_ids": segments} if config.num_segments > 1 else {}
    output = theirs(input_ids=ids, attention_mask=mask, output_hidden_states=True, **types)
    states: list[Tensor] = []
    stages = (ours.embeddings, *ours.layers)
    hooks = [stage.register_forward_hook(lambda _, __, state: states.append(state.hidden)) for stage in stages]
    states[-1:] = [ours.encode(ids, segments, mask, place * mask)]
    for hook in hooks:
        hook.remove()
    pairs = zip(output.hidden_states, states, strict=True)
    of_states = max(_gap(*pair, mask.bool()) for pair in pairs)
    if not hasattr(output, "logits"):  # transformers has the encoder, and no class for its head
        return Differences(of_states)
    logits = ours.head.logits(states[-1])
    logits = logits if output.logits.dim() == 2 else logits[..., : config.vocab_size]
    return Differences(of_states, _gap(output.logits, logits, mask.bool()))


def _gap(theirs: Tensor, ours: Tensor, valid: Tensor) -> float:
    return float((theirs[valid] - ours[valid]).abs().max() / ours[valid].abs().max())


def rows() -> Iterator[list[str]]:
    """Yield the table's rows."""
    for case in CASES:
        for direction, convert in (("from transformers", imported), ("to transformers", exported)):
            with tempfile.TemporaryDirectory() as folder:
                theirs, ours = convert(case, Path(folder))
            pad_id = theirs.config.pad_token_id
            found = [compare(theirs.to(dtype), ours.to(dtype), pad_id) for dtype in DTYPES]
            cells = [" / ".join("–" if x is None else f"{x:.0e}" for x in pair) for pair in zip(*found, strict=True)]
            yield [str(case), direction, *cells]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into docs/lab/agreement.md")
    write = parser.parse_args().write
    names = " / ".join(DTYPES.values())
    header = ["family, head", "direction", f"hidden states, {names}", f"logits, {names}"]
    table = str(Table(header, list(rows()), wordy=(1, 2, 3)))
    if write:
        write_table("lab/agreement.md", "parity", table)
    print(table)


if __name__ == "__main__":
    main()
