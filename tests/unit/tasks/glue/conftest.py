"""A tiny task and a tiny Hugging Face encoder, made on the spot."""

import json
from dataclasses import asdict

import numpy as np
import pytest

from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.runs import RunStore, TuningRun, count_undefined, write_predictions
from megatron_ddrp.tasks.glue import TASKS

WORDS = ["red", "green", "blue", "cat", "dog", "bird", "runs", "sleeps", "sings"]


def sentences(count, seed):
    """Random sentences of three words; the label says whether the first word is a colour."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        words = [WORDS[index] for index in rng.choice(len(WORDS), 3)]
        rows.append((" ".join(words), int(WORDS.index(words[0]) < 3)))
    return rows


def finished(run, score=0.5, **more):
    """A line of runs.jsonl as a sweep leaves it; a score of None is an undefined one."""
    row = asdict(run) | {"load": "e", "metric": TASKS[run.task].metric, "score": score, "epoch_scores": [score]}
    return count_undefined(row | {"train_examples": 9, "dev_examples": 9, "seconds": 1.0} | more)


def scored_folder(folder, predictions, task="CoLA", **more):
    """An output folder with one run per entry of `predictions` (numbers `[examples]`; the labels are 0, 1, 0, 1, …)."""
    store = RunStore(folder / "runs.jsonl")
    for seed, predicted in enumerate(predictions, 1):
        run = TuningRun(task, 16, 1e-5, 4, seed, 128, **{"encoder": "e", "data": "d", "micro_batch_size": 8} | more)
        targets, predicted = np.arange(len(predicted)) % 2.0, np.array(predicted, dtype=float)
        path = folder / "predictions" / f"{run.name}.tsv"
        write_predictions(path, TASKS[task], {"dev": (targets, predicted)})
        score = KINDS[TASKS[task].kind].metrics[TASKS[task].metric].value(targets, predicted)
        facts = {"load": run.encoder, "dev_examples": len(predicted)}
        store.append(finished(run, score, **facts))
    return folder


@pytest.fixture
def glue_dir(tmp_path):
    folder = tmp_path / "glue" / "CoLA"
    folder.mkdir(parents=True)
    for name, count, seed in (("train", 64, 0), ("dev", 21, 1)):
        lines = [f"made\t{label}\t\t{text}" for text, label in sentences(count, seed)]
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    return tmp_path / "glue"


@pytest.fixture
def three_tasks(glue_dir):
    """`glue_dir` with a regression, a task of two development files, and test sets."""
    from itertools import cycle

    shapes = {
        "STS-B": ("score", {"train": 64, "dev": 21, "test": 13}, cycle(["0.000", "2.500", "4.750"])),
        "MNLI": (
            "gold_label",
            {"train": 64, "dev_matched": 21, "dev_mismatched": 17, "test_matched": 13, "test_mismatched": 13},
            cycle(["neutral", "entailment", "contradiction"]),
        ),
    }
    for task, (label_column, files, labels) in shapes.items():
        (glue_dir / task).mkdir()
        for seed, (name, count) in enumerate(files.items()):
            labelled = not name.startswith("test")
            lines = ["\t".join(["index", "sentence1", "sentence2"] + [label_column] * labelled)]
            for index, (text, _) in enumerate(sentences(count, seed)):
                lines.append("\t".join([str(index), text, "red cat"] + [next(labels)] * labelled))
            (glue_dir / task / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    lines = [f"{index}\t{text}" for index, (text, _) in enumerate(sentences(13, 9))]
    (glue_dir / "CoLA" / "test.tsv").write_text("\n".join(["index\tsentence", *lines]) + "\n")
    return glue_dir


@pytest.fixture
def bert_folder(tmp_path):
    return write_bert(tmp_path / "bert")


def write_bert(folder):
    """Write a BERT of transformers with random weights, and its vocabulary; return its folder."""
    transformers = pytest.importorskip("transformers")
    import torch

    torch.manual_seed(0)
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    config = transformers.BertConfig(
        vocab_size=len(pieces),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        initializer_range=0.2,
    )
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))
    return folder


@pytest.fixture(params=["absolute", "ddrp"])
def checkpoint_folder(tmp_path, request):
    """What pretrain_bert.py --save leaves: a tiny model of this project with random weights, and its tokenizer."""
    from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer

    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    return write_checkpoint(tmp_path / "run", build_tokenizer("BertWordPieceLowerCase", vocabulary), request.param)


def write_checkpoint(folder, tokenizer, position_encoding):
    """Write a run's folder with a tiny model of random weights that knows 16 positions; return it."""
    import torch

    from megatron_ddrp import checkpoint
    from megatron_ddrp.config import Config, save_config
    from megatron_ddrp.model import build_model

    path = folder / checkpoint.tag(3)
    path.mkdir(parents=True)
    tokenizer.save(folder / checkpoint.TOKENIZER)
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 16}
    config = Config().replace(
        model={
            **sizes,
            "vocab_size": tokenizer.vocab_size,
            "position_encoding": position_encoding,
            "init_method_std": 0.2,
        }
    )
    torch.manual_seed(0)
    files = {checkpoint.WEIGHTS: checkpoint.save_weights(dict(build_model(config.model).named_parameters()), path)}
    checkpoint.write_state(path, {"iteration": 3, "files": files, "config": config.to_dict()})
    save_config(config, folder)
    checkpoint.mark_latest(folder, path.name)
    return folder


def save_again(folder):
    """Write the next checkpoint of a run's folder, with other weights, as a run does that still trains."""
    import torch

    from megatron_ddrp import checkpoint

    newest = checkpoint.newest(folder)
    model, _, config = checkpoint.read_model(newest)
    weights = {name: weight + torch.rand_like(weight) for name, weight in model.named_parameters()}
    step = checkpoint.read_state(newest)["iteration"] + 1
    path = folder / checkpoint.tag(step)
    path.mkdir()
    files = {checkpoint.WEIGHTS: checkpoint.save_weights(weights, path)}
    checkpoint.write_state(path, {"iteration": step, "files": files, "config": config.to_dict()})
    checkpoint.mark_latest(folder, path.name)


@pytest.fixture
def training_run(checkpoint_folder, monkeypatch):
    """A run's folder that gets a new checkpoint after each one that is loaded; the first one is iter_0000003."""
    from megatron_ddrp.encoders import encoder

    read_model = encoder.read_model

    def read(path):
        found = read_model(path)
        save_again(checkpoint_folder)
        return found

    monkeypatch.setattr(encoder, "read_model", read)
    return checkpoint_folder
