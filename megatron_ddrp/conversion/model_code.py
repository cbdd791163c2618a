"""The code that travels with an exported model: modeling_ddrp.py and every file of ours that it imports, side by side.

Position encodings are computed there by the very files that training uses. transformers copies the files of a folder by
their relative imports and knows no subfolders, so `from megatron_ddrp.model.positions.ddrp import` becomes
`from .positions_ddrp import`. The registry of encodings is replaced by one that knows the model's own. The file
of a plug-in travels as positions_plugin.py.
"""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

from megatron_ddrp.config.registry import ENCODINGS, PLUGINS
from megatron_ddrp.errors import UserError

PACKAGE = "megatron_ddrp"
MODELING, REGISTRY = f"{PACKAGE}.conversion.modeling_ddrp", f"{PACKAGE}.config.registry"
TRAVELS = (
    f"{PACKAGE}.conversion.configuration_ddrp",
    f"{PACKAGE}.conversion.layers_ddrp",
    f"{PACKAGE}.model.positions",
    REGISTRY,
)
"""Modules and packages whose files may travel: they need nothing but torch, transformers and one another."""

REGISTRY_CODE = '''"""The position encoding of this model; written when it was exported."""

from .{file} import {name}


def encoding_class(name: str) -> type:
    """Return the class of the model's encoding."""
    return {value}
'''


def write_model_code(folder: Path, encoding: str) -> None:
    """Write the files of a model with a position encoding into a folder.

    Raises `UserError` where a file imports something of ours that cannot travel.
    """
    module, _, class_name = ENCODINGS[encoding].partition(":")
    name, value = ("ENCODINGS", "ENCODINGS[name]") if encoding in PLUGINS else (class_name, class_name)
    codes = {REGISTRY: REGISTRY_CODE.format(file=_file(module), name=name, value=value)}
    waiting = {MODELING, module}
    while waiting:
        travelling = waiting.pop()
        codes[travelling], imported = _travelling(travelling)
        waiting |= imported - set(codes)
    for travelling, code in codes.items():
        (folder / f"{_file(travelling)}.py").write_text(code, encoding="utf-8")


def _file(module: str) -> str:
    """Return the name of a module's file in an exported folder, without its ending."""
    if not module.startswith(f"{PACKAGE}."):
        return "positions_plugin"
    for package in (f"{PACKAGE}.conversion.", f"{PACKAGE}.model.", f"{PACKAGE}."):
        module = module.removeprefix(package)
    return module.replace(".", "_")


def _travelling(module: str) -> tuple[str, set[str]]:
    """Return a module's code with its imports of ours made relative, and the modules that these name."""
    source = Path(str(find_spec(module).origin))  # type: ignore[union-attr]
    code, imported = source.read_text(encoding="utf-8"), set()
    lines = code.splitlines(keepends=True)
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            _refuse(source, [alias.name for alias in node.names if _is_inside(alias.name, (PACKAGE,))])
        if isinstance(node, ast.ImportFrom) and node.module and _is_inside(node.module, (PACKAGE,)):
            _refuse(source, [] if _is_inside(node.module, TRAVELS) else [node.module])
            imported.add(node.module)
            start, end = lines[node.lineno - 1][: node.col_offset], lines[node.lineno - 1][node.col_offset :]
            lines[node.lineno - 1] = start + end.replace(node.module, f".{_file(node.module)}", 1)
    return "".join(lines), imported


def _is_inside(module: str, places: tuple[str, ...]) -> bool:
    return any(module == place or module.startswith(place + ".") for place in places)


def _refuse(source: Path, modules: list[str]) -> None:
    if modules:
        raise UserError(
            f"{source} imports {modules[0]}, so its encoding cannot be exported: an exported file may import of "
            f"{PACKAGE} only by `from {PACKAGE}.model.positions… import …`"
        )
