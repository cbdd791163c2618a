"""Download of a model by its name on the Hugging Face hub, such as `FacebookAI/roberta-base`."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_ddrp.conversion.weight_files import INDEX, PICKLED_WEIGHTS, SAFE_WEIGHTS
from megatron_ddrp.errors import UserError

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
"""Pattern of a name on the hub: one or two parts, and not a path such as ./x, /x or a/b/c."""
SETTINGS = ("*.json", "*.txt", "*.model")
"""Files of settings and tokenizers. Code is never downloaded."""


def local_folder(given: Path) -> Path:
    """Return `given` if it is a folder, else a downloaded copy of the hub's model with that name.

    Prefers safetensors to a pickle. Raise `UserError` with the command that downloads the folder if the download fails.
    """
    if given.exists() or not HUB_NAME.fullmatch(str(given)):
        return given
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        folder = Path(snapshot_download(str(given), allow_patterns=[*SETTINGS, *_files(SAFE_WEIGHTS)]))
        if not any((folder / name).is_file() for name in (SAFE_WEIGHTS, SAFE_WEIGHTS + INDEX)):
            folder = Path(snapshot_download(str(given), allow_patterns=[*SETTINGS, *_files(PICKLED_WEIGHTS)]))
    except ImportError:
        raise _advice(given, "huggingface_hub is not installed") from None
    except Exception as error:  # errors of the hub's library and of the network libraries below it
        raise _advice(given, str(error).strip().split("\n")[0][:200] or type(error).__name__) from None
    return folder


def _files(name: str) -> tuple[str, str]:
    """Return the patterns of the file `name` and of its shards, as transformers names them."""
    return name, "-*.".join(name.rsplit(".", 1))


def _advice(name: Path, reason: str) -> UserError:
    return UserError(
        f"there is no folder {name}, and no model of that name can be downloaded from the hub ({reason}): run "
        f"`hf download {name} --local-dir DIR` on a machine with a network, then give DIR"
    )
