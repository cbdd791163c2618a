"""`tools/analyze.py triangle`."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from megatron_ddrp.analysis import figures
from megatron_ddrp.analysis.session import Session, describe
from megatron_ddrp.analysis.triangle import measure_triangles
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError


def run(arguments: argparse.Namespace) -> None:
    """Algorithm 1 for the newest checkpoint of each folder: JSON, figure, and a line for each."""
    threshold = arguments.threshold
    if not 0 < threshold <= 1:
        raise UserError(f"--threshold is {threshold}: it must lie in (0, 1]", WRONG_ARGUMENTS)
    session = Session(arguments, every_checkpoint=False)
    rows = []
    for viewed, done in session.views():
        batches = viewed.sentences.batches(arguments.batch_size)
        layers = measure_triangles(viewed.model, batches, session.device, threshold, done)
        by_layer = [{"layer": number} | asdict(layer) for number, layer in enumerate(layers, 1)]
        rows.append(describe(viewed) | {"share": layers[-1].share, "layers": by_layer})
    for row in rows:
        print(f"{row['run']}: {row['share']:.2%} of {row['sentences']:,} sentences in the last layer")
    shares = {row["run"]: [layer["share"] for layer in row["layers"]] for row in rows}
    result = {"threshold": threshold, "models": rows}
    session.write(result, lambda path: figures.draw_triangles(shares, threshold, path))
