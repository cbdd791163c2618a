"""Model code that exports carry, and the names of heads that fine-tuning puts on an encoder.

Command lines read the names, so this module does not import torch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from megatron_ddrp.config.registry import ENCODINGS, PLUGINS
from megatron_ddrp.data.atomic import content_sum, object_sum
from megatron_ddrp.errors import UserError


class HeadForm(NamedTuple):
    """Form of a head that fine-tuning puts on an encoder, with its names in transformers and on the hub."""

    name: str
    """Suffix of the classes that have it and of the class that loads it, AutoModelFor…"""
    is_pooled: bool
    """True for one output per row, from BERT's pooler; False for one output per piece."""
    output: str
    """Name of its last layer."""
    pipeline: str
    """Name on the hub of the model's use."""


SEQUENCE = HeadForm("SequenceClassification", True, "classifier", "text-classification")
PIECES = HeadForm("TokenClassification", False, "classifier", "token-classification")
SPAN = HeadForm("QuestionAnswering", False, "qa_outputs", "question-answering")
HEAD_FORMS = (SEQUENCE, PIECES, SPAN)


class Labels(NamedTuple):
    """Labels of a head and its problem type, as in Hugging Face configurations."""

    names: tuple[str, ...]
    """Names of the outputs; empty for the two of an answer, which have no names."""
    problem_type: str | None
    """Loss of a sequence head in transformers: single_label_classification, multi_label_classification, regression."""


OURS = "megatron_ddrp."
REGISTRY, CONFIGURATION = OURS + "config.registry", OURS + "conversion.configuration_ddrp"
MODELING = OURS + "conversion.modeling_ddrp"
HEADS, LAYERS = OURS + "conversion.heads_ddrp", OURS + "conversion.layers_ddrp"
TRAVELS = (CONFIGURATION, HEADS, LAYERS, OURS + "model.positions", REGISTRY)
"""Modules and packages whose files may be copied: they import only torch, transformers and one another."""

REGISTRY_CODE = '''"""The position encoding of this model; written when it was exported."""

from .positions import PositionEncoding
from .{file} import {imported}


def encoding_class(name: str) -> type[PositionEncoding]:
    """Return the class of the model's encoding, `name`."""
    return {value}
'''

MODELING_END = """

# From a local folder, transformers 4 copies only the files that this file imports.
{imports}

# save_pretrained of older transformers writes the code of registered classes only.
DdrpModel.register_for_auto_class("AutoModel")
DdrpForMaskedLM.register_for_auto_class("AutoModelForMaskedLM")
DdrpForPreTraining.register_for_auto_class("AutoModelForPreTraining")
DdrpForContextualPreTraining.register_for_auto_class("AutoModelForPreTraining")
DdrpForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")
DdrpForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
DdrpForQuestionAnswering.register_for_auto_class("AutoModelForQuestionAnswering")
"""


def write_model_code(folder: Path, encoding: str) -> None:
    """Write the code of a model with a position encoding into a folder: modeling_ddrp.py and our files that it imports.

    Exports compute position encodings with the same files as training. transformers copies the files of a folder by
    their relative imports and does not support subfolders, so `from megatron_ddrp.model.positions.tables import`
    becomes `from .positions_tables import`. transformers 4 copies only what modeling_ddrp.py itself imports, so that
    imports every file of the folder. encoding_NAME.py replaces the registry of all encodings and has the model's own
    only.

    One process may load several folders, and transformers distinguishes neither modules of the same name nor models of
    the same configuration class. So files of the same name hold the same code in every folder. There are two
    exceptions: modeling_ddrp.py, which is loaded anew, and configuration_ddrp.py, which ends with a sum of all other
    files.

    Raise `UserError` if a file imports a module of this package that cannot be copied.
    """
    module, _, class_name = ENCODINGS[encoding].partition(":")
    slug, imported, value = re.sub(r"\W", "_", encoding), class_name, class_name
    if ENCODINGS[encoding] in PLUGINS:
        slug = f"{slug}_{content_sum(PLUGINS[ENCODINGS[encoding]].read_bytes())}"
        imported, value = "ENCODINGS", "ENCODINGS[name]"
    codes = {REGISTRY: REGISTRY_CODE.format(file=_file(module, slug), imported=imported, value=value)}
    waiting = {MODELING, OURS + "model.positions", module}
    while waiting:
        travelling = waiting.pop()
        codes[travelling], found = _read_module(travelling, slug)
        waiting |= found - set(codes)
    others = sorted(_file(travelling, slug) for travelling in set(codes) - {MODELING})
    codes[MODELING] += MODELING_END.format(imports="\n".join(f"from .{file} import __name__ as _" for file in others))
    codes[CONFIGURATION] += f"\n# Sum of this folder's code: {object_sum(codes)}\n"
    for travelling, code in codes.items():
        (folder / f"{_file(travelling, slug)}.py").write_text(code, encoding="utf-8")


def _file(module: str, slug: str) -> str:
    """Return the name of a module's file in an exported folder, without its suffix."""
    if module == REGISTRY:
        return f"encoding_{slug}"
    if not module.startswith(OURS):
        return f"positions_{slug}"
    return module.removeprefix(OURS).removeprefix("conversion.").removeprefix("model.").replace(".", "_")


def _read_module(module: str, slug: str) -> tuple[str, set[str]]:
    """Return a module's code with relative imports of this package's modules, and the names of these modules."""
    source = Path(str(find_spec(module).origin))  # type: ignore[union-attr]
    code, imported = source.read_text(encoding="utf-8"), set()
    lines = code.splitlines(keepends=True)
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            _refuse(source, (alias.name for alias in node.names), ())
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(OURS):
            name, row = str(node.module), node.lineno - 1
            _refuse(source, (name,), TRAVELS)
            imported.add(name)
            start, end = lines[row][: node.col_offset], lines[row][node.col_offset :]
            lines[row] = start + end.replace(name, f".{_file(name, slug)}", 1)
    return "".join(lines), imported


def _refuse(source: Path, modules: Iterable[str], allowed: tuple[str, ...]) -> None:
    """Raise `UserError` for the first module of this package that is neither allowed nor inside an allowed one."""
    for module in modules:
        inside = any(f"{module}.".startswith(f"{place}.") for place in allowed)
        if f"{module}.".startswith(OURS) and not inside:
            raise UserError(
                f"{source} imports {module}, so its encoding cannot be exported: from megatron_ddrp it may import only "
                "with `from megatron_ddrp.model.positions… import …`"
            )
