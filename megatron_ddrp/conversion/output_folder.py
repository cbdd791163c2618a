"""A folder that conversion writes: there whole or not at all, and never in place of something else's work."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError


def refuse_output(output: Path, overwrite: bool, replaceable: Callable[[Path], bool], kind: str) -> None:
    """Raise `UserError` before any work where `output` must stay as it is; an empty folder may be used.

    `replaceable` says whether a folder is what `--overwrite` may replace, `kind` calls it in words.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not overwrite:
        raise UserError(f"--output {output} exists: choose another name, or give --overwrite", WRONG_ARGUMENTS)
    if not replaceable(output):
        raise UserError(
            f"--output {output} is no {kind}, and --overwrite replaces nothing else: choose another name",
            WRONG_ARGUMENTS,
        )


@contextmanager
def whole_folder(output: Path) -> Iterator[Path]:
    """Give a new folder to write into. It takes the name `output` if all goes well, else it is removed."""
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
