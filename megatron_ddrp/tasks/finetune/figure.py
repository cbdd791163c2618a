"""Figure table.png: scores of all seeds and their median, by task, with encoders side by side."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from megatron_ddrp.tasks.finetune.cells import Cells


def draw(encoders: dict[str, Cells], tasks: list[str], title: str, path: Path) -> None:
    """Draw the result of `best_cells`, with the tasks in this order."""
    figure, axes = plt.subplots(figsize=(max(4.8, 1.2 * len(tasks) + 1), 3.6), layout="constrained")
    for number, (name, cells) in enumerate(encoders.items()):
        shift = (number - (len(encoders) - 1) / 2) * 0.8 / len(encoders)
        colour = f"C{number % 10}"
        for task, cell in cells.items():
            place = tasks.index(task) + shift
            scores = [100 * score for score in cell.scores]
            axes.plot([place] * len(scores), scores, "o", color=colour, alpha=0.45, markersize=4)
            axes.plot(place, 100 * cell.median, "_", color=colour, markersize=18, markeredgewidth=2)
        axes.plot([], [], "o", color=colour, label=name)
    axes.set_xticks(range(len(tasks)), tasks)
    axes.set_xlim(-0.5, len(tasks) - 0.5)
    axes.set_ylabel("development score x 100")
    axes.set_title(f"{title}\nseeds (dots) and their median (bars)", fontsize=9)
    axes.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside lower center", fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
