"""Values of a run on bootstrap samples of its test items, in `items/RUN-DIGEST.npz` beside the rows.

They show the effect of other test sentences. All runs are scored on the same samples, so that differences are paired.
The files may be missing; then a difference has no interval over items.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ddrp.data.atomic import write_bytes
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import reading
from megatron_ddrp.tasks.jobs.store import digest

Samples = Mapping[str, np.ndarray]
"""Measure → value on each sample, `[samples]`."""


def samples_file(folder: Path, row: Mapping[str, Any]) -> Path:
    """Return the file of a row's samples; another measurement of the same run has another file."""
    return folder / "items" / f"{row['run']}-{digest(list(row.get('jobs', [])))}.npz"


def read_samples(folder: Path, row: Mapping[str, Any]) -> Samples:
    """Return the samples of a row; none if their file is missing or damaged."""
    try:
        file = samples_file(folder, row)
        with reading(file), np.load(file, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except UserError:
        return {}


def write_samples(folder: Path, row: Mapping[str, Any], samples: Samples) -> None:
    """Store the samples of a row."""
    stream = io.BytesIO()
    np.savez_compressed(stream, **dict(samples))  # type: ignore[arg-type]
    path = samples_file(folder, row)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, stream.getvalue())
