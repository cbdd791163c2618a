"""A tiny run with two checkpoints, an export and an encoder of another family, and tools/analyze.py in this process."""

import json
from pathlib import Path

import pytest
import torch

from megatron_ddrp import checkpoint
from megatron_ddrp.config import Config
from megatron_ddrp.conversion.to_huggingface import export_checkpoint
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from megatron_ddrp.lab.analysis import command as analyze
from megatron_ddrp.model import build_model
from tests.unit.model.tiny import twin_encode, twin_last_norm
from tests.unit.tasks.conftest import write_step

SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "seq_length": 24, "init_method_std": 0.3}


def save_run(folder, tokenizer, *steps, **changes):
    """A `--save` folder with checkpoints of these steps, of random weights of a tiny model with `changes`."""
    sizes = {**SIZES, "vocab_size": tokenizer.vocab_size, **changes}
    config = Config().replace(model=sizes, data={"split": "80,20,0"})
    for step in steps:
        with torch.random.fork_rng([]):
            torch.manual_seed(step)
            write_step(folder, step, dict(build_model(config.model).named_parameters()), config)
    tokenizer.save(folder / checkpoint.TOKENIZER)
    return folder


@pytest.fixture(scope="session")
def run_folder(corpus_tokenizer, tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("runs") / "ddrp", corpus_tokenizer, 10, 20)


@pytest.fixture(scope="session")
def exported(run_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports") / "export"
    export_checkpoint(run_folder, folder)
    return folder


@pytest.fixture(scope="session")
def corpus_tokenizer(tiny_corpus):
    return build_tokenizer("BertWordPieceLowerCase", tiny_corpus.vocab_file)


@pytest.fixture
def analyze_main(tiny_corpus):
    """`analyze_main("triangle", load=…, output=…)` in this process, on the tiny corpus or the texts of `more`."""

    def call(command, load, output, *more):
        loads = [str(folder) for folder in (load if isinstance(load, list) else [load])]
        data = [] if "--text" in more or command == "throughput" else ["--data-path", str(tiny_corpus.prefix)]
        words = [command, "--load", *loads, *data, "--output", str(output), "--device", "cpu", *map(str, more)]
        analyze.main(words)
        return json.loads(Path(output).with_suffix(".json").read_text())

    return call


@pytest.fixture(scope="session")
def albert(tmp_path_factory):
    """A folder of a family that this project does not know, with a vocabulary of its own."""
    import transformers

    folder = tmp_path_factory.mktemp("encoders") / "albert"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "of", *"abcdefghijklmnopqrstuvwxyz"]
    words += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 20, "num_hidden_layers": 3}
    sizes |= {"embedding_size": 8, "max_position_embeddings": 20, "vocab_size": len(words), "pad_token_id": 0}
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        transformers.AlbertModel(transformers.AlbertConfig(**sizes)).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    return folder


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG")


@torch.no_grad()
def twin_sentences(model, batch, compared=False):
    """Of each sentence the last hidden states `[n, D]` and the logits of each layer `[heads, n, n]`, from loops."""
    hidden, logits = [], []
    for row, n in enumerate((batch.document_ids > 0).sum(1).tolist()):
        _, states, scores = twin_encode(model, batch, row, compared)
        hidden.append(twin_last_norm(model, states)[:n])
        logits.append([layer[:, :n, :n] for layer in scores])
    return hidden, logits
