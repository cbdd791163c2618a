"""Small runs, datasets and tasks that the protocols write, in this process and without DeepSpeed."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from megatron_ddrp import checkpoint
from megatron_ddrp.checkpoint.weights import Form
from megatron_ddrp.config import Config, save_config
from megatron_ddrp.conversion import to_huggingface
from megatron_ddrp.data.preprocess.pipeline import preprocess
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer, build_tokenizer
from megatron_ddrp.engine import checkpoint as engine_checkpoint
from megatron_ddrp.engine.layout import Setup
from megatron_ddrp.model import build_model
from megatron_ddrp.run.metrics import MetricsFile
from tests.conftest import documents, write_vocabulary
from tests.crash.recording import tree_of
from tests.datasets import wordpiece_job

SIZES = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 32}
SIZES |= {"position_encoding": "absolute", "layernorm_position": "post"}
RANK: Any = SimpleNamespace(rank=0, data_rank=0, tensor_rank=0, pipeline_rank=0, pipeline_size=1, world_size=1)
TASK = "train: train.jsonl\nvalid: valid.jsonl\ntext-column: said\nlabel-column: tone\nmetric: accuracy\n"


class WholeTensors:
    """A model's own tensors in place of a DeepSpeed engine's; the moments are the weights again."""

    all_moments = ("exp_avg",)

    def __init__(self, model: Any, *_: Any) -> None:
        self.weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def _entries(self, moments: Sequence[str | None]) -> dict[str, torch.Tensor]:
        return {f"{m}/{name}" if m else name: weight for m in moments for name, weight in self.weights.items()}

    def forms(self, moments: Sequence[str | None]) -> dict[str, Form]:
        return {name: Form.of(weight) for name, weight in self._entries(moments).items()}

    def whole(self, moments: Sequence[str | None]) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._entries(moments).items()


def alone() -> Any:
    """Return a context in which this process saves without DeepSpeed and without a process group."""
    replaced = {
        "agree": lambda action: action(),
        "gather_objects": lambda item: [item],
        "HeldState": WholeTensors,
        "state_of": SimpleNamespace(
            create_moments=lambda _: None, get_step=lambda _: 1, get_loss_scaler=lambda _: None
        ),
        "layout": lambda *_: {"ranks": 1, "tensor": 1, "pipeline": 1, "zero_stage": 0, "precision": "fp32"},
    }
    return mock.patch.multiple(engine_checkpoint, **replaced)


class Sample:
    """Inputs in a folder, and what is made of them."""

    def __init__(self, folder: Path) -> None:
        """Write the inputs. From now on this process leaves out the check of exports, which costs a second each."""
        to_huggingface.check_export = lambda *_: "not checked"
        self.folder, texts = folder, documents()[:60]
        folder.mkdir(parents=True)
        self.vocabulary = write_vocabulary(texts, folder / "vocab.txt", num_words=60)
        for name, part in (("a", texts[:30]), ("b", texts[30:])):
            rows = [{"text": text, "title": " ".join(text.split()[:3])} for text in part]
            _write_lines(folder / f"{name}.jsonl", rows)
        for name, part in (("train", texts[:8]), ("valid", texts[8:12])):
            tones = [("glad", "sad")[number % 2] for number in range(len(part))]
            rows = [{"said": " ".join(t.split()[:4]), "tone": tone} for t, tone in zip(part, tones, strict=True)]
            _write_lines(folder / f"{name}.jsonl", rows)
        (folder / "tone.yaml").write_text(TASK, encoding="utf-8")
        self.tokenizer: Tokenizer = build_tokenizer("BertWordPieceLowerCase", self.vocabulary)
        self.config = Config().replace(model={**SIZES, "vocab_size": self.tokenizer.vocab_size})
        self._models: dict[int, Any] = {}
        self.run, self.older = self.make_run(folder / "run", [2]), self.make_run(folder / "older", [4])
        for name in "ab":
            self.preprocess(folder / "data" / name, name)

    def preprocess(
        self, prefix: Path, text: str = "a", keys: Sequence[str] = ("text",), overwrite: bool = False
    ) -> None:
        """Preprocess one of the two texts."""
        settings = {"json_keys": tuple(keys), "overwrite": overwrite}
        preprocess(wordpiece_job(self.vocabulary, prefix, self.folder / f"{text}.jsonl", **settings))

    def model(self, step: int) -> Any:
        """Return the model of a step."""
        if step not in self._models:
            torch.manual_seed(step)
            self._models[step] = build_model(self.config.model, objective=self.config.objective)
        return self._models[step]

    def save(self, run: Path, step: int, since: int, keep_last: int = 0) -> None:
        """Save the model of a step as a run does."""
        progress = engine_checkpoint.Progress(step, step * 8, step * 99)
        config = self.config.replace(checkpoint={"keep_last": keep_last})
        with alone():
            engine_checkpoint.save_checkpoint(self.model(step), run, progress, Setup(config, RANK), since)

    def make_run(self, run: Path, steps: Sequence[int]) -> Path:
        """Write a run with some checkpoints and a row of metrics per step."""
        run.mkdir(parents=True)
        save_config(self.config, run)
        self.tokenizer.save(run / "tokenizer")
        for before, step in zip((0, *steps), steps, strict=False):
            self.save(run, step, before)
        write_rows(run, 0, steps[-1])
        return run

    def is_equal(self, path: Path, step: int) -> bool:
        """Return whether a checkpoint holds the weights of a step, to the last bit."""
        stored = checkpoint.StoredTensors(path)
        return all(torch.equal(stored[name], weight) for name, weight in self.model(step).named_parameters())


def write_rows(run: Path, since: int, until: int) -> None:
    """Append rows to metrics.jsonl for the steps after `since`, and sync them, as a run does before it saves."""
    with contextlib.closing(MetricsFile(run / "metrics.jsonl", since, lambda _: None)) as file:
        for step in range(since + 1, until + 1):
            file.write({"iteration": step, "loss": 9.0 - step / 7})
        file.sync()


def files_in(folder: Path) -> dict[str, bytes]:
    """Return path → content of all files below a folder."""
    return {path: content for path, content in tree_of(folder).items() if content is not None}


def _write_lines(path: Path, rows: Sequence[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
