"""A tiny run with two checkpoints, and tools/analyze.py in this process."""

import json
import sys
from pathlib import Path

import pytest
import torch

from megatron_ddrp import checkpoint
from megatron_ddrp.config import Config
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from megatron_ddrp.lab.analysis import command as analyze
from megatron_ddrp.model import build_model

SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "seq_length": 24, "init_method_std": 0.3}


@pytest.fixture(scope="module")
def run_folder(tiny_corpus, tmp_path_factory):
    """A `--save` folder with checkpoints of steps 10 and 20, of random weights."""
    folder = tmp_path_factory.mktemp("runs") / "ddrp"
    tokenizer = build_tokenizer("BertWordPieceLowerCase", tiny_corpus.vocab_file)
    config = Config().replace(model={**SIZES, "vocab_size": tokenizer.vocab_size}, data={"split": "80,20,0"})
    for step in (10, 20):
        path = folder / checkpoint.tag(step)
        path.mkdir(parents=True)
        torch.manual_seed(step)
        files = {checkpoint.WEIGHTS: checkpoint.save_weights(dict(build_model(config.model).named_parameters()), path)}
        counts = {"iteration": step, "consumed_tokens": 100 * step}
        checkpoint.write_state(path, {**counts, "files": files, "config": config.to_dict()})
        checkpoint.mark_latest(folder, path.name)
    tokenizer.save(folder / checkpoint.TOKENIZER)
    return folder


@pytest.fixture
def analyze_main(monkeypatch, tiny_corpus):
    """`analyze_main("triangle", load=…, output=…)` in this process, on the tiny corpus or the texts of `more`."""

    def call(command, load, output, *more):
        loads = [str(folder) for folder in (load if isinstance(load, list) else [load])]
        data = [] if "--text" in more or command == "throughput" else ["--data-path", str(tiny_corpus.prefix)]
        words = [command, "--load", *loads, *data, "--output", str(output), "--device", "cpu", *map(str, more)]
        monkeypatch.setattr(sys, "argv", ["analyze.py", *words])
        analyze.main()
        return json.loads(Path(output).with_suffix(".json").read_text())

    return call
