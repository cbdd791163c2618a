"""Output folder of a conversion: written whole or not at all, and never over other work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from megatron_ddrp.data.atomic import atomic_folder
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError


def refuse_output(output: Path, overwrite: bool, replaceable: Callable[[Path], bool], kind: str) -> None:
    """Raise `UserError` before any work if `output` must not be replaced; an empty folder may be used.

    `replaceable` returns whether `--overwrite` may replace a folder; `kind` describes such folders in words.
    """
    if output.resolve() == Path.cwd():
        raise UserError(
            f"--output {output} is the current folder, which cannot be replaced: give the name of a new one",
            WRONG_ARGUMENTS,
        )
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not overwrite:
        raise UserError(f"--output {output} exists: choose another name, or give --overwrite", WRONG_ARGUMENTS)
    if not replaceable(output):
        raise UserError(
            f"--output {output} is not {kind}, and --overwrite replaces nothing else: choose another name",
            WRONG_ARGUMENTS,
        )


@contextmanager
def whole_folder(output: Path, check: Callable[[], object] = lambda: None) -> Iterator[Path]:
    """Provide a new folder of weights to write into, as `atomic_folder` does; its `check` runs before the renaming."""
    try:
        with atomic_folder(output, check) as folder:
            yield folder
    except SafetensorError as error:
        raise UserError(f"--output {output}: the weights cannot be written: {error}") from None
