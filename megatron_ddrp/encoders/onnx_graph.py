"""ONNX graphs of encoders and fine-tuned models: written from a Hugging Face folder, compared with it at once, and run.

A graph takes rows of any number and any length up to the model's longest. It computes what the folder's model does: the
scores of a head that fine-tuning added, otherwise the last hidden states. The modules of a sentence encoder
(sentence-transformers' modules.json) are part of its graph, so that it also gives one vector per text.
"""

from __future__ import annotations

import logging
import shlex
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from megatron_ddrp.checkpoint import holds_run, is_checkpoint
from megatron_ddrp.conversion.families import contract
from megatron_ddrp.conversion.model_code import HEAD_FORMS
from megatron_ddrp.conversion.origin import MODULES, pooling_of, read_modules
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.encoders.encoder import load_encoder
from megatron_ddrp.encoders.huggingface import foreign_inputs, head_outputs, load_with_head, num_segments
from megatron_ddrp.encoders.masked_lm import POOLINGS, pool_rows
from megatron_ddrp.errors import UserError, need_packages
from megatron_ddrp.foreign import reading

GRAPH, INT8 = "onnx/model.onnx", "onnx/model_int8.onnx"
"""Files of an output folder, where users of ONNX look for them."""
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
OUTPUTS = ("logits", "start_logits", "end_logits", "last_hidden_state")
"""Names of inputs and outputs, as in transformers; a model has some of them."""
VECTOR = "sentence_embedding"
"""Output of a sentence encoder, `[batch, hidden]`, as sentence-transformers calls it."""
COPIED = ("*.json", "*.txt", "*.model", "*.py", "*/config.json")
"""Patterns of the files that servers read beside a graph: settings, tokenizer, code, modules."""
PROBED = (2, 7, contract.LONGEST)
"""Lengths of the rows on which a graph is compared with the model, at most the model's own."""


class Served(nn.Module):
    """Model of transformers, or ours, and the modules of a sentence encoder behind it, as one function of tensors."""

    def __init__(self, model: nn.Module, behind: list[str]):
        """Keep the model; `behind` comes from `modules_behind`: empty for a model that is no sentence encoder."""
        super().__init__()
        self.model, self.behind = model, behind

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        """Return the outputs by name for some of `INPUTS`, int64 `[batch, seq]` each."""
        output = self.model(**dict(zip(INPUTS, inputs, strict=False)))
        found = {name: output[name] for name in OUTPUTS if name in output}
        for module in self.behind:
            states, lengths = found["last_hidden_state"], inputs[1].sum(1)
            found[VECTOR] = normalize(found[VECTOR]) if module == "normalize" else pool_rows(states, lengths, module)
        return found


def modules_behind(folder: Path) -> list[str]:
    """Return the pooling that a folder's modules.json names, cls, max or mean, and "normalize" if that follows.

    There are none without the file. Raises `UserError` for other poolings, and for modules with weights of their own.
    """
    files, left_out = read_modules(folder)
    kinds = [module["type"].rpartition(".")[2] for module in files.get(MODULES, ())]
    how = [pooling_of(files)] if "Pooling" in kinds else []
    for what in [*left_out, *(f"{name} pooling" for name in how if name not in POOLINGS)]:
        raise UserError(f"{folder / MODULES}: {what} has no form in a graph, which takes one pooling, cls, max or mean")
    return how + ["normalize"] * ("Normalize" in kinds)


def read_served(folder: Path) -> tuple[Served, list[dict[str, Tensor]]]:
    """Return the function of a folder's model, and rows to compare it on, in sets of one length.

    Raises `UserError` as loading an encoder does, and for a checkpoint.
    """
    if holds_run(folder) or is_checkpoint(folder):
        raise UserError(f"--onnx {folder}: a checkpoint; export it first: convert --load {folder} --output EXPORT")
    values = contract.read_config_file(folder)
    kind, named = contract.model_type(folder / "config.json", values), str(values.get("architectures"))
    form = next((form for form in HEAD_FORMS if f"For{form.name}'" in named), None)
    if form:
        model, weights, longest = load_with_head(folder, kind, form)
        if weights.missing:
            raise UserError(f"--onnx {folder}: it lacks the weight {min(weights.missing)}; copy it again")
    else:
        encoder: Any = load_encoder(folder)
        model, longest = encoder.module.model, encoder.max_length
    sizes = model.config.pad_token_id or 0, model.config.vocab_size, num_segments(model.config)
    rows = [contract.probe_rows(seq, *sizes) for seq in sorted({min(seq, longest) for seq in PROBED})]
    return Served(model.eval(), [] if form else modules_behind(folder)), rows


@contextmanager
def silence() -> Iterator[None]:
    """Let no library log or warn in the block: those that export and quantize report their own progress."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


class OnnxModel:
    """Graph in ONNX runtime, on the CPU, with as many threads as torch has."""

    def __init__(self, path: Path):
        """Load the graph. Raises `UserError` if onnxruntime is not installed or cannot load it."""
        need_packages(f"{path}, a graph in ONNX,", "onnxruntime")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 4  # a failure is an exception too
        with reading(path, "onnxruntime cannot load it: {error}"):
            self.session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
        self.inputs = [each.name for each in self.session.get_inputs()]
        widths = {each.name: each.shape[-1] for each in self.session.get_outputs()}
        self.outputs = [*widths]
        self.config = SimpleNamespace(num_segments=len(self.inputs) - 1, num_labels=widths.get("logits", 2))
        """Facts that a model of transformers has in its configuration."""

    def run(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs by name for inputs by name, int64 `[batch, seq]` each."""
        found = self.session.run(None, {name: rows[name].cpu().numpy() for name in self.inputs})
        return dict(zip(self.outputs, map(torch.from_numpy, found), strict=True))

    def __call__(self, batch: Batch) -> Tensor:
        """Return the outputs of the head as `FamilyModel` does."""
        return head_outputs(self.run(foreign_inputs(self.config, batch)))


@torch.no_grad()
def gap_of(graph: OnnxModel, served: Served, rows: list[dict[str, Tensor]]) -> float:
    """Return the largest difference of a graph's outputs from the model's outside the padding.

    It is relative to the largest output if that is above 1. Both rows of a set are computed together, and the padded
    one by itself.
    """
    gaps = []
    for some in (*rows, *({name: tensor[1:] for name, tensor in both.items()} for both in rows)):
        found, valid = graph.run(some), some["attention_mask"].bool()
        for name, ours in served(*some.values()).items():
            differs, size = (found[name] - ours).abs(), ours.abs()
            if ours.shape[:2] == valid.shape and name != VECTOR:
                differs, size = differs[valid], size[valid]
            gaps.append(float(differs.max() / size.max().clamp_min(1)))
    return max(gaps)


def export_onnx(folder: Path, output: Path, int8: bool = False, overwrite: bool = False) -> str:
    """Write the graph of a Hugging Face folder's model into the new folder `output`; return a summary for the user.

    The folder also has the settings, tokenizer and code of `folder`. With `int8` there is a second graph, in which the
    weights of matrix products and embeddings have 8 bits. `output` is written whole or not at all. Raises `UserError`
    if the model cannot be read or exported, or if the graph's outputs differ by more than `TOLERANCE`.
    """
    need_packages("--onnx", "onnx", "onnxscript", "onnxruntime")
    is_ours = (lambda old: (old / GRAPH).is_file()), "a folder with a graph"
    refuse = partial(contract.refuse_output, output, overwrite, *is_ours)
    refuse()
    served, rows = read_served(folder)
    inputs, free = rows[0], {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    with torch.no_grad():
        names = [*served(*inputs.values())]
    with contract.whole_folder(output, refuse) as new:
        for path in {path for pattern in COPIED for path in folder.glob(pattern)} - {folder / contract.SUMS}:
            (new / path.relative_to(folder)).parent.mkdir(exist_ok=True)
            shutil.copy(path, new / path.relative_to(folder))
        (new / GRAPH).parent.mkdir(exist_ok=True)
        with silence(), reading(f"--onnx {folder}", "torch cannot export it: {error}"):
            shapes = {"inputs": tuple(dict(free) for _ in inputs)}
            given: dict[str, Any] = {"input_names": [*inputs], "output_names": names, "dynamic_shapes": shapes}
            program: Any = torch.onnx.export(served, tuple(inputs.values()), dynamo=True, verbose=False, **given)
            program.save(new / GRAPH)
        gap = gap_of(OnnxModel(new / GRAPH), served, rows)
        if not gap <= contract.TOLERANCE:
            raise UserError(f"--onnx {folder}: the graph's outputs differ from the model's by {gap:.1e}; report it")
        size = (new / GRAPH).stat().st_size
        lines = [
            f"wrote:   {output / GRAPH}, {size / 1e6:.1f} MB: {', '.join(inputs)} → {', '.join(names)}",
            f"checked: outputs of onnxruntime and torch differ by {gap:.1e} at most, for rows of up to "
            f"{max(each['input_ids'].shape[1] for each in rows)} pieces",
        ]
        if int8:
            from onnxruntime.quantization import quantize_dynamic

            with silence():
                quantize_dynamic(new / GRAPH, new / INT8, per_channel=True)
            lines.append(f"int8:    {output / INT8}, {(new / INT8).stat().st_size / size:.2f} of the size")
        if hasattr(served.model.config, "finetuned"):
            load = shlex.join(map(str, (folder, *(output / graph for graph in (GRAPH, INT8)[: 1 + int8]))))
            lines.append(f"next:    megatron-ddrp finetune evaluate --load {load} --input LABELLED")
        contract.write_sums(new)
    return "\n".join(lines)
