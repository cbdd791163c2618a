"""Tiny tasks, encoders and runs of fine-tuning, made on the spot."""

import json
from dataclasses import asdict
from itertools import cycle

import numpy as np
import pytest
import torch

from megatron_ddrp import checkpoint
from megatron_ddrp.config import Config, save_config
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from megatron_ddrp.encoders import encoder
from megatron_ddrp.model import build_model
from megatron_ddrp.tasks.finetune import command
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.runs import RunStore, TuningRun, count_undefined, write_predictions
from megatron_ddrp.tasks.glue import TASKS

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["red", "green", "blue", "cat", "dog", "bird", "runs", "sleeps", "sings"]
KINDS_BY_WORD = {"red": "colour", "green": "colour", "blue": "colour", "cat": "animal", "dog": "animal"}
GLANCE = ["--lr", "1e-3", "--epochs", "1", "--seeds", "1"]


def words(folder, load, out, *more):
    """Return the command line of `finetune` for the files `train.jsonl` and `valid.jsonl` of a folder."""
    files = ["--train", folder / "train.jsonl", "--valid", folder / "valid.jsonl"]
    return [str(word) for word in (*files, "--load", load, "--output-dir", out, *more)]


def rows(out):
    """Return the rows of runs.jsonl in an output folder."""
    return [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]


def arguments(glue_dir, folder, out, *more):
    """Return the command line of `glue` for two seeds on CoLA; later words win."""
    words = ["--tasks", "CoLA", "--data-dir", str(glue_dir), "--load", str(folder), "--output-dir", str(out)]
    return [*words, "--grid", "quick", "--seeds", "2", "--lr", "1e-2", "--batch-size", "8", "--epochs", "10", *more]


def model_of(out):
    """Return the folder of the only model that a sweep kept."""
    (folder,) = (path for path in (out / "models").iterdir() if path.is_dir())
    return folder


def sentences(count, seed):
    """Random sentences of three words; the label says whether the first word is a colour."""
    rng = np.random.default_rng(seed)
    drawn = (rng.choice(len(WORDS), 3) for _ in range(count))
    return [(" ".join(WORDS[index] for index in indices), int(indices[0] < 3)) for indices in drawn]


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


def predict(model, source, output):
    """Predict the rows of a file with a kept model; return the path of the output."""
    command.main(["predict", "--load", str(model), "--input", str(source), "--output", str(output)])
    return output


@pytest.fixture
def out(tmp_path):
    """The output folder of a command."""
    return tmp_path / "out"


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
    of_mnli = {"train": 64, "dev_matched": 21, "dev_mismatched": 17, "test_matched": 13, "test_mismatched": 13}
    shapes = {
        "STS-B": ("score", {"train": 64, "dev": 21, "test": 13}, cycle(["0.000", "2.500", "4.750"])),
        "MNLI": ("gold_label", of_mnli, cycle(["neutral", "entailment", "contradiction"])),
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


def write_topics(folder):
    """Write a task of three labels by the first word, and a test file without labels; return their folder."""
    folder.mkdir()
    for name, count, seed in (("train", 64, 0), ("valid", 21, 1), ("new", 9, 2)):
        texts = [text for text, _ in sentences(count, seed)]
        rows = [{"text": text, "label": KINDS_BY_WORD.get(text.split()[0], "other")} for text in texts]
        if name == "new":
            rows = [{"id": number, "text": text} for number, text in enumerate(texts)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def topics(tmp_path):
    return write_topics(tmp_path / "topics")


@pytest.fixture
def bert_folder(tmp_path):
    return write_bert(tmp_path / "bert")


def write_bert(folder, words=WORDS, hidden=16, max_length=16, spread=0.2):
    """Write a BERT of transformers with one layer and random weights, and its vocabulary; return its folder."""
    import transformers

    torch.manual_seed(0)
    pieces = [*SPECIAL, *words]
    sizes = {"hidden_size": hidden, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 2 * hidden}
    sizes |= {"vocab_size": len(pieces), "max_position_embeddings": max_length, "initializer_range": spread}
    transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))
    return folder


def tokenizer_of(folder, pieces, kind="BertWordPieceLowerCase"):
    """Write the vocabulary of a WordPiece tokenizer into a folder and return the tokenizer."""
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL, *pieces]) + "\n")
    return build_tokenizer(kind, folder / "vocab.txt")


@pytest.fixture(params=["absolute", "ddrp"])
def checkpoint_folder(tmp_path, request):
    """What pretrain_bert.py --save leaves: a tiny model of this project with random weights, and its tokenizer."""
    return write_checkpoint(tmp_path / "run", tokenizer_of(tmp_path, WORDS), request.param)


def write_checkpoint(folder, tokenizer, position_encoding):
    """Write a run's folder with a tiny model of random weights that knows 16 positions; return it."""
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 16, "init_method_std": 0.2}
    sizes |= {"vocab_size": tokenizer.vocab_size, "position_encoding": position_encoding}
    config = Config().replace(model=sizes)
    torch.manual_seed(0)
    write_step(folder, 3, dict(build_model(config.model).named_parameters()), config)
    tokenizer.save(folder / checkpoint.TOKENIZER)
    save_config(config, folder)
    return folder


def write_step(folder, step, weights, config):
    """Write a checkpoint, the newest one, into a run's folder."""
    path = folder / checkpoint.tag(step)
    path.mkdir(parents=True)
    files = {checkpoint.WEIGHTS: checkpoint.save_weights(weights, path)}
    checkpoint.write_state(path, {"iteration": step, "files": files, "config": config.to_dict()})
    checkpoint.mark_latest(folder, path.name)


@pytest.fixture
def training_run(checkpoint_folder, monkeypatch):
    """A run's folder that gets a checkpoint of other weights after each that is loaded; iter_0000003 is the first."""
    read_model = encoder.read_model

    def read(path):
        found = read_model(path)
        newest = checkpoint.newest(checkpoint_folder)
        model, _, config = checkpoint.read_model(newest)
        weights = {name: weight + torch.rand_like(weight) for name, weight in model.named_parameters()}
        write_step(checkpoint_folder, checkpoint.read_state(newest)["iteration"] + 1, weights, config)
        return found

    monkeypatch.setattr(encoder, "read_model", read)
    return checkpoint_folder
