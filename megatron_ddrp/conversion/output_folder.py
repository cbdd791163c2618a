"""Output folder of a conversion: written whole or not at all, and never over other work."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError


def refuse_output(output: Path, overwrite: bool, replaceable: Callable[[Path], bool], kind: str) -> None:
    """Raise `UserError` before any work if `output` must not be replaced; an empty folder may be used.

    `replaceable` returns whether `--overwrite` may replace a folder; `kind` describes such folders in words.
    """
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
def whole_folder(output: Path) -> Iterator[Path]:
    """Provide a new folder to write into. It is renamed to `output` on success and removed on failure."""
    temporary, replaced = (output.with_name(output.name + suffix) for suffix in (".tmp", ".replaced"))
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        shutil.rmtree(replaced, ignore_errors=True)
        if output.exists():
            os.replace(output, replaced)
        os.replace(temporary, output)
        shutil.rmtree(replaced, ignore_errors=True)
    except SafetensorError as error:
        raise UserError(f"--output {output}: the weights cannot be written: {error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
