"""`tools/analyze.py self-similarity`."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_ddrp.analysis import figures
from megatron_ddrp.analysis.session import Session, describe
from megatron_ddrp.analysis.similarity import measure_similarity


def run(arguments: argparse.Namespace) -> None:
    """f(S) and f(H) of every checkpoint: JSON, figure, and a line for each."""
    session = Session(arguments, every_checkpoint=True)
    rows = []
    for viewed, done in session.views():
        batches = viewed.sentences.batches(arguments.batch_size)
        found = measure_similarity(viewed.model, batches, session.device, done)
        rows.append(
            describe(viewed)
            | {
                "token_similarity": found.token_similarity,
                "head_similarity": found.head_similarity,
                "head_similarity_by_layer": found.head_similarity_by_layer,
            }
        )
    for row in rows:
        step = "" if row["iteration"] is None else f" step {row['iteration']:,}"
        print(f"{row['run']}{step}: f(S) {row['token_similarity']:.4f} f(H) {row['head_similarity']:.4f}")

    def draw(path: Path) -> None:
        names = list(dict.fromkeys(row["run"] for row in rows))
        tokens, heads = (
            {name: [(row["iteration"], row[key]) for row in rows if row["run"] == name] for name in names}
            for key in ("token_similarity", "head_similarity")
        )
        figures.draw_similarity(tokens, heads, path)

    session.write({"checkpoints": rows}, draw)
