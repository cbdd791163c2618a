"""Fine-tuning of one encoder on one task: its head, its training, and the model that is kept.

On a GPU the operators are deterministic, so that a run repeats bit for bit; where torch has no such operator, a line
says so.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from megatron_ddrp.checkpoint import is_checkpoint
from megatron_ddrp.conversion.families.contract import CARD, OWN_MODEL_TYPE, check_sums, whole_folder, write_sums
from megatron_ddrp.conversion.heads_ddrp import TaskHead
from megatron_ddrp.conversion.model_card import facts_table, loading_lines, render_card
from megatron_ddrp.conversion.model_code import HeadForm, write_model_code
from megatron_ddrp.conversion.to_huggingface import TunedHead, write_finetuned
from megatron_ddrp.conversion.tokenizer_files import write_tokenizer
from megatron_ddrp.data.atomic import Advance, silent, write_text
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.progress import progress
from megatron_ddrp.encoders.encoder import LoadedEncoder, TrainedEncoder
from megatron_ddrp.encoders.huggingface import FamilyModel, HuggingFaceEncoder, num_segments
from megatron_ddrp.encoders.rows import Encoded, dev_order, pad_batch
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import misfit, read_object
from megatron_ddrp.model.positions.contract import LayerPositions, PositionEncoding
from megatron_ddrp.model.stages import DTYPES, run_stage
from megatron_ddrp.parallel.pipeline import seed_draws
from megatron_ddrp.parallel.process_group import Ranks, sum_over_ranks
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.kinds.contract import Kind
from megatron_ddrp.tasks.finetune.runs import TuningRun
from megatron_ddrp.tasks.finetune.table_files import Task, TaskData
from megatron_ddrp.tasks.jobs import one_at_a_time

T = TypeVar("T")

_ALERT = re.compile(r"(\w+) does not have a deterministic implementation|not deterministic because it uses (CuBLAS)")
"""Torch's errors about an operator without a deterministic form; the second is about `CUBLAS_WORKSPACE_CONFIG`."""


def fix_workspace() -> None:
    """Give cuBLAS a workspace of a fixed size, without which its products are not deterministic.

    Call this before a process's first product of matrices on a GPU, which is when the variable is read. A user's value
    stays.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Let torch use deterministic operators alone on a GPU, and put its settings back afterwards.

    On a CPU nothing changes: its operators of training are deterministic at one number of threads.
    """
    if device.type != "cuda":
        yield
        return
    switches: Any = torch.utils.deterministic
    mode, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = switches.fill_uninitialized_memory
    # Under warn_only, attention would keep its backward passes with atomic additions.
    torch.use_deterministic_algorithms(True, warn_only=False)
    switches.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode, warn_only=warns)
        switches.fill_uninitialized_memory = fills


def with_fallback(compute: Callable[[], T]) -> T:
    """Return `compute()`; at an operator without a deterministic form say so, allow it, and call `compute` again.

    Such operators are then allowed until `deterministic` ends. What a call of `compute` did must not change the next.
    """
    try:
        return compute()
    except RuntimeError as error:
        alert = _ALERT.search(str(error))
        if alert is None:
            raise
        _tell(alert[1] or f"{alert[2]}, with this CUBLAS_WORKSPACE_CONFIG,")
    torch.use_deterministic_algorithms(True, warn_only=True)
    return compute()


@functools.cache
def _tell(operator: str) -> None:
    """Name an operator without a deterministic form, once per process, above the bar of a terminal."""
    (tqdm.write if sys.stderr.isatty() else print)(
        f"warning: torch's {operator} has no deterministic form on this device: results may differ between runs of "
        "one seed",
        file=sys.stderr,
    )


DROPOUT = 0.1
INIT_STD = 0.02


class TaskModel(nn.Module):
    """Encoder under a `TaskHead`.

    The head's weights are new in every run, even if a checkpoint has a pooler, so that a comparison measures only the
    encoders (appendix B of the DDRP+MTH paper).
    """

    def __init__(self, encoder: nn.Module, hidden_size: int, form: HeadForm, num_outputs: int):
        """Build the head. `encoder` maps a torch Batch to hidden states `[batch, seq, hidden_size]`."""
        super().__init__()
        self.encoder = encoder
        self.head = TaskHead(hidden_size, num_outputs, form.is_pooled, DROPOUT, form.output)
        for layer in self.head.modules():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=INIT_STD)
                nn.init.zeros_(layer.bias)

    def forward(self, batch: Batch) -> Tensor:
        """Return the outputs, float32: `[batch, num_outputs]` of a pooled head, else `[batch, seq, num_outputs]`."""
        return self.head(self.encoder(batch)).float()


def output_layer(model: nn.Module) -> nn.Linear | None:
    """Return the layer that computes the single output of a model with a head; None for a head without such a layer."""
    inside = getattr(model, "encoder_prefix", "encoder.")
    heads = (layer for name, layer in model.named_modules() if not name.startswith(inside))
    found = [layer for layer in heads if isinstance(layer, nn.Linear) and layer.out_features == 1]
    return found[0] if len(found) == 1 and found[0].bias is not None else None


def build_model(encoder: LoadedEncoder, task: Task, run: TuningRun, device: torch.device) -> nn.Module:
    """Return a fresh copy of the encoder with a new head on the device. The run's seed determines its weights."""
    module, kind = encoder.fresh(run.seed, device), KINDS[task.kind]
    torch.manual_seed(run.seed_of("fine-tuning head"))
    if run.head == "family":
        assert encoder.family_model is not None
        return encoder.family_model(module, kind.head, kind.hub_labels(task)).to(device)
    return TaskModel(module, encoder.hidden_size, kind.head, kind.num_outputs(task)).to(device)


WARMUP = 0.1
WEIGHT_DECAY = 0.01
CLIP_NORM = 1.0
DEV_BATCH_SIZE = 64
_LAYER = re.compile(r"\.(?:layers?|h|blocks?|attentions|ffns|layer_norm[12])\.(\d+)\.")


@dataclass(frozen=True)
class RunResult:
    """Result of one run."""

    scores: dict[str, list[float | None]]
    """Development file → score after each epoch, of further files after the last one; None if it is undefined."""
    predictions: dict[str, Any]
    """Development or test file → the last epoch's predictions, from `FineTuning.predict`."""
    model: nn.Module
    """Fine-tuned model in fp32."""
    steps: int
    seconds: float


def learning_rate_factor(step: int, total: int) -> float:
    """Return the share of the peak learning rate at `step` (from 0) of `total`: linear warm-up, then decay to 0."""
    warmup = math.ceil(WARMUP * total)
    return (step + 1) / warmup if step < warmup else (total - step) / (total - warmup)


_ROWS_TO_SORT = 64
"""Number of batches whose shuffled rows are sorted by length together before they are cut into batches."""


def train_order(encoded: Encoded, batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """Return batches of row numbers for one epoch: every row once, shuffled, rows of similar length together."""
    random = np.random.default_rng([seed, epoch])
    lengths = encoded.lengths
    shuffled = random.permutation(len(encoded))
    pool = batch_size * _ROWS_TO_SORT
    pools = [shuffled[start : start + pool] for start in range(0, len(shuffled), pool)]
    rows = np.concatenate([part[np.argsort(lengths[part], kind="stable")] for part in pools])
    batches = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    return [batches[index] for index in random.permutation(len(batches))]


class FineTuning:
    """A model in training, as in appendix B of the DDRP+MTH paper.

    `step` trains on one batch; `predict` may be called at any time before `finish`.

    The optimizer is AdamW with β = (0.9, 0.999), eps 1e-6 and weight decay 0.01 (not on biases, LayerNorms and, as in
    pre-training, gains of a position encoding). The rate warms up linearly over a tenth of the steps, then decays
    linearly to 0; gradients are clipped at norm 1. The task's kind defines the loss.

    With `TuningRun.scales_labels` the loss of a regression sees (label − mean) / standard deviation, both of the
    training rows, because a learning rate of 1e-5 never reaches prices or years. Predictions are on the scale of the
    labels, and after the last step the output layer contains that scale.

    A batch is the sum of its micro-batches. The run alone determines a micro-batch: its rows, its padding and its
    dropout, which is drawn from (seed, step, micro-batch). Ranks share the micro-batches and the development rows, so
    the run has the same score on any number of ranks.
    """

    def __init__(self, run: TuningRun, task: Task, model: nn.Module, train: Encoded, ranks: Ranks | None = None):
        """Prepare to train `model` in place, on its device, on `train`; `ranks` is None in a single process.

        `model` maps a torch Batch to the outputs of the task's kind. The run's seed determines the order of the rows
        and dropout.
        """
        self.run, self.task, self.model, self.train = run, task, model, train
        self.kind = KINDS[task.kind]
        self.rank, self.world_size = (ranks.rank, ranks.world_size) if ranks else (0, 1)
        self.device = next(model.parameters()).device
        self.weights = dict(self.model.named_parameters())
        self.compute_dtype = None if run.precision == "fp32" else DTYPES[run.precision]
        self.output = output_layer(model) if run.scales_labels else None
        self.mean, self.deviation = 0.0, 1.0  # of the labels; equal labels have a deviation of 1
        if self.output:
            self.mean, self.deviation = float(train.targets.mean()), float(train.targets.std()) or 1.0
        self.optimizer = _optimizer(self.weights, run.layerwise_lr_decay, model)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=run.precision == "fp16")
        self.scaler.scale(torch.zeros((), device=self.device))  # makes its scale, also on a rank without a micro-batch
        self.total = run.epochs * math.ceil(len(train) / run.batch_size)
        self.steps = 0

    def order(self, epoch: int) -> list[np.ndarray]:
        """Return the row numbers of each batch of an epoch."""
        return train_order(self.train, self.run.batch_size, self.run.seed, epoch)

    def step(self, rows: np.ndarray) -> None:
        """Do one optimizer step on the rows with these numbers."""
        self.model.train()
        with_fallback(partial(self._compute_gradients, rows))
        if self.world_size > 1:
            self._sum_gradients()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.weights.values(), CLIP_NORM)
        for group in self.optimizer.param_groups:
            group["lr"] = self.run.lr * group["share"] * learning_rate_factor(self.steps, self.total)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.steps += 1

    @torch.no_grad()
    def finish(self) -> None:
        """Fold the scale of the labels into the output layer, after the last step."""
        if layer := self.output:
            layer.weight.mul_(self.deviation)
            layer.bias.mul_(self.deviation).add_(self.mean)

    def batches(self, encoded: Encoded) -> list[np.ndarray]:
        """Return the row numbers of each batch of a file that this rank predicts."""
        return dev_order(encoded, DEV_BATCH_SIZE)[self.rank :: self.world_size]

    @torch.inference_mode()
    def predict(self, encoded: Encoded, advance: Advance = silent) -> Any:
        """Return the predictions of all rows in the form that the task's metric takes.

        A row gets nan if one of its outputs is not finite. Calls `advance` with 1 after each batch.
        """
        self.model.eval()
        outcomes, times_scored = with_fallback(
            partial(compute_outcomes, self.kind, encoded, self.batches(encoded), self._outputs, advance)
        )
        if self.world_size > 1:
            flat = np.concatenate([outcomes.reshape(len(outcomes), -1), times_scored[:, None]], axis=1)
            summed = sum_over_ranks(torch.from_numpy(flat).to(self.device)).cpu().numpy()  # [outcomes, values + 1]
            outcomes, times_scored = summed[:, :-1].reshape(outcomes.shape), summed[:, -1]
        assert (times_scored == 1).all(), "each outcome must be computed exactly once"
        if self.output:
            outcomes = self.deviation * outcomes + self.mean
        return self.kind.predictions(self.task, encoded, outcomes)

    def _outputs(self, encoded: Encoded, rows: np.ndarray) -> Tensor:
        return run_stage(self.model, batch_of(encoded, rows, self.device), self.compute_dtype)

    def _compute_gradients(self, rows: np.ndarray) -> None:
        """Set the gradients to those of this rank's micro-batches; whatever they were before does not matter."""
        self.optimizer.zero_grad(set_to_none=True)
        size, size_of_batch = self.run.micro_batch_size, max(1, self.kind.size(self.train, rows))
        for number, start in enumerate(range(0, len(rows), size)):
            if number % self.world_size != self.rank:
                continue
            micro = rows[start : start + size]
            seed_draws(self.run.seed_of("fine-tuning dropout", self.steps, number), self.device)
            labels = self.kind.targets(self.train, micro)
            if self.output:
                labels = (labels - self.mean) / self.deviation
            targets = torch.from_numpy(labels).to(self.device)
            loss = self.kind.loss_sum(self._outputs(self.train, micro), targets) / size_of_batch
            self.scaler.scale(loss).backward()

    def _sum_gradients(self) -> None:
        """Sum every gradient over ranks, in one reduction."""
        parameters = list(self.weights.values())
        # A rank without a micro-batch has no gradients; an unused parameter has none on any rank.
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        used = torch.tensor([float(p.grad is not None) for p in parameters], device=self.device)
        summed = sum_over_ranks(torch.cat([used, *(gradient.reshape(-1) for gradient in gradients)]))
        used, flat = summed.split([len(parameters), len(summed) - len(parameters)])
        parts = flat.split([parameter.numel() for parameter in parameters])
        for parameter, part, count in zip(parameters, parts, used.tolist(), strict=True):
            parameter.grad = part.view_as(parameter) if count else None


def batch_of(encoded: Encoded, rows: np.ndarray, device: torch.device) -> Batch:
    """Return some rows as a torch Batch on a device."""
    return pad_batch(encoded, rows).map(lambda field: torch.from_numpy(field).to(device, non_blocking=True))


def compute_outcomes(
    kind: Kind,
    encoded: Encoded,
    batches: Iterable[np.ndarray],
    outputs: Callable[[Encoded, np.ndarray], Tensor],
    advance: Advance = silent,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the outcomes of the rows in `batches`, with those of other rows blank, and how often each was computed.

    `outputs` returns the model's outputs for some rows. Calls `advance` with 1 after each batch.
    """
    outcomes = kind.blank(encoded)
    times_scored = np.zeros(len(outcomes))
    for rows in batches:
        places, values = kind.outcomes(outputs(encoded, rows), encoded, rows)
        outcomes[places] = values.cpu().numpy()
        times_scored[places] += 1
        advance(1)
    return outcomes, times_scored


def finetune(
    run: TuningRun,
    task: Task,
    model: nn.Module,
    train: Encoded,
    dev: dict[str, Encoded],
    ranks: Ranks | None = None,
    test: dict[str, Encoded] | None = None,
) -> RunResult:
    """Train for one run, score the first file of `dev` after each epoch and all after the last one; predict `test`."""
    start = time.perf_counter()
    tuning = FineTuning(run, task, model, train, ranks)
    scores: dict[str, list[float | None]] = {name: [] for name in dev}
    predictions: dict[str, Any] = {}
    is_worker = multiprocessing.parent_process() is not None
    first, *rest = (len(tuning.batches(rows)) for rows in (*dev.values(), *(test or {}).values()))
    shown, name = not (is_worker or tuning.rank), f"{run.task} seed {run.seed}"
    with (
        deterministic(tuning.device),
        progress("batch", tuning.total + run.epochs * first + sum(rest), name, show=shown) as bar,
    ):
        for epoch in range(run.epochs):
            for rows in tuning.order(epoch):
                tuning.step(rows)
                bar.update()
            for name, encoded in islice(dev.items(), len(dev) if epoch == run.epochs - 1 else 1):
                predictions[name] = tuning.predict(encoded, bar.update)
                scores[name].append(tuning.kind.score(task.metric, encoded.answers, predictions[name]))
        for name, encoded in (test or {}).items():
            predictions[name] = tuning.predict(encoded, bar.update)
    assert tuning.steps == tuning.total
    tuning.finish()
    return RunResult(scores, predictions, model, tuning.steps, time.perf_counter() - start)


def layer_depths(names: Iterable[str], encoder: str = "encoder.") -> dict[str, int]:
    """Return parameter name → depth: 0 for embeddings and shared parameters, i + 1 for layer i and the norm behind the
    last one, then the head.

    The names of the encoder's parameters begin with `encoder`. A pooler in the encoder belongs to the head.
    """
    found = {name: _LAYER.search(f".{name}") for name in names}
    top = max((int(match[1]) for match in found.values() if match), default=-1) + 2

    def depth(name: str, match: re.Match[str] | None) -> int:
        if match:
            return int(match[1]) + 1
        if not name.startswith(encoder) or ".pooler." in name:
            return top
        return top - 1 if "norm" in name.lower() and "embed" not in name else 0

    return {name: depth(name, match) for name, match in found.items()}


def _optimizer(weights: dict[str, nn.Parameter], layerwise_lr_decay: float, model: nn.Module) -> torch.optim.AdamW:
    """Return AdamW. A group's `share` is its factor on the rate: layerwise_lr_decay^(layers below the head)."""
    depths = layer_depths(weights, getattr(model, "encoder_prefix", "encoder."))
    top = max(depths.values())
    gains = {
        f"{place}.{gain}"
        for place, module in model.named_modules()
        if isinstance(module, (PositionEncoding, LayerPositions))
        for gain in module.gains
    }
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in weights.items():
        # Biases and LayerNorm parameters are vectors; weights, embeddings and some gains are matrices.
        decay = WEIGHT_DECAY if parameter.ndim >= 2 and name not in gains else 0.0
        share = layerwise_lr_decay ** (top - depths[name])
        groups.setdefault((decay, share), []).append(parameter)
    listed = [{"params": p, "weight_decay": decay, "share": share} for (decay, share), p in groups.items()]
    return torch.optim.AdamW(listed, lr=0.0, betas=(0.9, 0.999), eps=1e-6, fused=True)


FINETUNED = "finetuned"
"""Key in config.json of the facts about task and run."""
SHORTEST_ROW = 4
"""Number of special pieces of a pair."""


def model_name(task: Task, encoder: LoadedEncoder) -> str:
    """Return the name of the best model of an encoder on a task, and of the lock of its folders."""
    return f"{task.name}-{encoder.fingerprint[:8]}"


def model_folder(output: Path, task: Task, encoder: LoadedEncoder, data: str) -> Path:
    """Return the folder of the best model of an encoder on a task with the fingerprint `data`.

    The first data of a task get OUT/models/NAME, other data OUT/models/NAME-DATA.
    """
    plain = output / "models" / model_name(task, encoder)
    own = plain.with_name(f"{plain.name}-{data[:8]}")
    found = (folder for folder in (plain, own) if (facts := read_facts(folder)) and facts["data"] == data)
    return next(found, own if plain.exists() else plain)


def keep_if_best(
    output: Path, encoder: LoadedEncoder, data: TaskData, run: TuningRun, model: nn.Module, row: dict[str, Any]
) -> None:
    """Write a run's model into OUT = `output` unless there is a better one for the same data. A lock makes others wait.

    A model that diverged is not written. For each encoder, task and data of a task the disk has the model of the best
    run so far: the run with the highest score; among equal scores, the run whose name comes first.

    The folder's config.json has the key "finetuned" with the facts that `megatron-ddrp finetune predict` needs: the
    task, its columns, the length of a row, and the run.
    """
    if not all(weight.isfinite().all() for weight in model.parameters()):
        return
    with one_at_a_time(output, model_name(data.task, encoder)):
        folder = model_folder(output, data.task, encoder, run.data)
        folder.parent.mkdir(parents=True, exist_ok=True)
        facts = {
            "task": data.task.facts,
            "columns": list(data.columns) if data.columns else None,
            "max_seq_length": run.max_seq_length,
            "data": run.data,
            "run": run.name,
            "score": row["score"],
        }
        before = read_facts(folder)
        is_whole = (folder / CARD).is_file()  # the last file of a kept model: the run of a killed command comes again
        if before and (_rank(before), is_whole) >= (_rank(facts), True):
            return
        form = write_model(encoder, model, data.task, facts, folder)
        write_text(folder / CARD, finetuned_card(folder, encoder, data.task, form, run, row))


_FACTS: dict[str, Any] = {
    "task": {"name": str, "metric": str, "kind": str, "labels": Sequence[str]},
    "columns": tuple[str, str | None, str] | None,
    "run": str,
    "data": str,
    "max_seq_length": Annotated[int, f"[{SHORTEST_ROW}, inf)"],
    "score": float,
}
"""Key of the facts about task and run in a fine-tuned folder's config.json → type hint of its value."""


def read_facts(folder: Path) -> dict[str, Any] | None:
    """Return the facts about task and run in a fine-tuned folder's config.json.

    None for any other folder, also for one whose config.json is damaged.
    """
    path = folder / "config.json"
    try:
        check_sums(folder, path.name)
        facts = read_object(path).get(FINETUNED) if path.is_file() else None
    except UserError:
        return None
    return facts if not misfit(facts, _FACTS) and facts and facts["task"]["kind"] in KINDS else None


def better_run(rows: Iterable[dict[str, Any]], encoder: LoadedEncoder, data: TaskData, folder: Path) -> str | None:
    """Return the name of the best of `rows` on a task if the model in `folder` is not its own; None otherwise.

    A run with --no-keep-models keeps none, and a kept model may have been deleted.
    """
    wanted, facts = (encoder.fingerprint, data.task.name, data.fingerprint), read_facts(folder)
    own = [row for row in rows if (row["encoder"], row["task"], row["data"]) == wanted]
    best = max(own, key=lambda row: row["score"], default=None)
    return TuningRun.of_row(best).name if best and (facts is None or best["score"] > facts["score"]) else None


def _rank(facts: dict[str, Any]) -> tuple[float, list[int]]:
    return facts["score"], [-ord(letter) for letter in facts["run"]]


def write_model(
    encoder: LoadedEncoder, model: nn.Module, task: Task, facts: dict[str, Any], folder: Path
) -> HeadForm | None:
    """Write a fine-tuned model as a Hugging Face folder, and return the form of the head that it has there.

    If our head is on an encoder of transformers, only the encoder is written: no class of its family has our head. The
    form is None then. A failure leaves no partial folder.
    """
    kind = KINDS[task.kind]
    if isinstance(model, FamilyModel):
        _write_family_model(encoder, model.model, kind.head, facts, folder)
        return kind.head
    assert isinstance(model, TaskModel)
    if isinstance(model.encoder, HuggingFaceEncoder):
        _write_family_model(encoder, model.encoder.model, None, facts, folder)
        return None
    assert isinstance(model.encoder, TrainedEncoder)
    tuned = TunedHead(model.head, kind.head, kind.hub_labels(task))
    write_finetuned(model.encoder.model, encoder.tokenizer, tuned, folder, {FINETUNED: facts})
    return kind.head


def _write_family_model(
    encoder: LoadedEncoder, model: Any, form: HeadForm | None, facts: dict[str, Any], folder: Path
) -> None:
    setattr(model.config, FINETUNED, facts)
    states = {name: tensor.to("cpu", torch.float32) for name, tensor in model.state_dict().items()}
    with whole_folder(folder) as new:
        write_tokenizer(encoder.tokenizer, new, encoder.max_length, num_segments(model.config))
        if model.config.model_type == OWN_MODEL_TYPE:
            write_model_code(new, model.config.position_encoding)
            classes = {"AutoConfig": "configuration_ddrp.DdrpConfig", "AutoModel": "modeling_ddrp.DdrpModel"}
            if form:
                classes[f"AutoModelFor{form.name}"] = f"modeling_ddrp.DdrpFor{form.name}"
            model.config.auto_map = classes
        model.save_pretrained(new, state_dict=states)
        write_sums(new)


def finetuned_card(
    folder: Path, encoder: LoadedEncoder, task: Task, form: HeadForm | None, run: TuningRun, row: dict[str, Any]
) -> str:
    """Return the card of the model in `folder`, which `run` gave, with its line of runs.jsonl `row`.

    `form` is that of the folder's head, None for a folder that holds the encoder alone.
    """
    has_code = (folder / "modeling_ddrp.py").exists()
    metadata = {
        "library_name": "transformers",
        "pipeline_tag": form.pipeline if form else "feature-extraction",
        "tags": ["megatron-ddrp", task.kind],
        "metrics": [task.metric],
    }
    baseline = row.get("baseline")
    metric = KINDS[task.kind].score_name(task) if "facts" in row else task.metric  # GLUE's rows have no facts
    facts = {
        "base model": base_name(encoder.folder),
        "task": f"{task.name}, {task.kind}",
        "labels": ", ".join(task.labels) or "none",
        f"score ({metric})": f"{row['score']:.4f} on {row['dev_examples']:,} development examples",
        **({} if baseline is None else {"score of always the most frequent label": f"{baseline:.4f}"}),
        "batch size, learning rate, epochs": f"{run.batch_size}, {run.lr:g}, {run.epochs}",
        "seed": str(run.seed),
        "longest row": f"{run.max_seq_length} pieces",
    }
    return render_card(
        "finetuned_card.md.jinja",
        folder.name,
        metadata,
        loading_lines(folder.name, f"AutoModelFor{form.name}" if form else "AutoModel", has_code),
        has_code,
        base=base_name(encoder.folder),
        task=task.name,
        facts=facts_table(facts),
    )


def base_name(folder: Path) -> str:
    """Return the name of an encoder's folder; of one checkpoint, that of its run as well."""
    place = folder.resolve()
    return f"{place.parent.name}/{place.name}" if is_checkpoint(place) else place.name
