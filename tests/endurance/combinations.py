"""Settings drawn at random: does a run resume, leave and come back, and train alike on several ranks?

    python -m tests.endurance.combinations [--draws 200] [--first 0] [--ranks 1 2 4]

Each draw takes some flags with some values, out of what a run can have; settings that `pretrain` refuses do not count.
On one rank, a run that was stopped and resumed has the rows of one that was not, to the last bit, and an export of it,
imported and exported again, gives the same vectors. On more ranks, the losses and gradient norms of a drawn layout are
those of one process, in half of the draws from a checkpoint of that process on: the pairs of layout, objective and
option beside the selections in tests/integration/test_layouts.py and test_layout_changes.py. Failures are printed with
their settings, and the exit code is then 1. A draw takes about two seconds.
"""

import argparse
import math
import sys
import tempfile
import traceback
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from tqdm import tqdm

from megatron_ddrp import convert, load_encoder, pretrain
from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.commands.functions import given_words
from megatron_ddrp.config import ENCODINGS
from megatron_ddrp.errors import UserError
from tests.endurance.layouts import make_corpus
from tests.integration.launch import without_times
from tests.integration.training_runs import train_runs

ALWAYS: dict[str, list[Any]] = {
    "position_encoding": list(ENCODINGS),
    "objective": ["mlm", "mth", "mlm", "mth", "electra", "rtd", "token-contrast", "head-disagreement"],
    "num_layers": [1, 2, 3],
    "hidden_size": [16, 24, 32],
    "num_attention_heads": [2, 4],
    "seq_length": [16, 24, 32, 48],
    "micro_batch_size": [2, 4],
    "eval_interval": [2, 3, 100],
}
SOMETIMES: dict[str, tuple[float, list[Any]]] = {
    "ffn": (0.3, ["geglu", "swiglu"]),
    "norm": (0.2, ["rmsnorm"]),
    "bias": (0.2, [False]),
    "embedding_norm": (0.1, [False]),
    "embedding_size": (0.15, [8, 16]),
    "num_segments": (0.3, [0, 1]),
    "layernorm_position": (0.5, ["pre"]),
    "attention_init": (0.1, ["offsets"]),
    "relative_distance": (0.2, [3, 8]),
    "relative_table": (0.2, ["per-layer"]),
    "absolute_embedding": (0.2, [True, False]),
    "local_attention": (0.15, [4, 8]),
    "attention_backend": (0.4, ["eager", "blocked", "sdpa"]),
    "objective_phases": (0.3, ["clm:0.5", "clm:0.7", "clm:1"]),
    "tcd_tokens": (0.3, [0, 5]),
    "hcd_heads": (0.3, [0, 2]),
    "tcd_squared": (0.2, [True]),
    "mask_prob": (0.3, ["0.4:0.2", "0.3"]),
    "masking": (0.3, ["token", "ngram"]),
    "notes": (0.2, [True]),
    "packing": (0.4, [True]),
    "seq_length_phases": (0.25, [["8:0.5"], ["8:0.34", "12:0.7"], ["12:1"]]),
    "optimizer": (0.2, ["muon"]),
    "lr_decay_style": (0.4, ["cosine", "constant", "inverse-square-root", "wsd"]),
    "lr_warmup_iters": (0.2, [2]),
    "zero_stage": (0.7, [0, 0, 1, 2, 3]),
    "checkpoint_activations": (0.2, [True]),
    "log_similarity": (0.15, [True]),
    "clip_grad": (0.1, [0.0, 0.5]),
}
"""Flag → share of the draws that give it, and its values there."""
ON_ONE_RANK: dict[str, tuple[float, list[Any]]] = {
    "bf16": (0.3, [True]),
    "hidden_dropout": (0.2, [0.0]),
    "replay_interval": (0.15, [2]),
}
LAYOUTS = {2: ("tensor", "pipeline", "data", "sequence"), 4: ("tensor pipeline", "tensor data", "sequence pipeline")}
"""Ranks → axes with two ranks each; a sequence is cut over the tensor-parallel ones."""
BOUND = 3e-5
"""Largest relative difference between layouts, beyond `NEAR_0`."""
NEAR_0 = 2e-6


class Refused(Exception):
    """A draw that `pretrain` does not take."""


def draw(random: Random, flags: dict[str, tuple[float, list[Any]]]) -> dict[str, Any]:
    """Return the settings of a run of six steps."""
    settings = {name: random.choice(values) for name, values in ALWAYS.items()}
    settings |= {name: random.choice(values) for name, (share, values) in flags.items() if random.random() < share}
    settings |= {"notes_min_count": 5, "notes_max_count": 50} if "notes" in settings else {}
    rows = settings["micro_batch_size"] * random.choice([1, 2, 3])
    return settings | {"train_iters": 6, "global_batch_size": rows, "lr": 1e-3, "eval_iters": 1, "split": "8,2,0"}


def words_of(settings: dict[str, Any]) -> list[str]:
    """Return the command line. Raises `Refused`; what ends a run later is no refusal, but a failure."""
    words = given_words(settings)
    try:
        parse_arguments(words)
    except UserError as error:
        raise Refused from error
    return words


def on_one_rank(random: Random, data: dict[str, Any], folder: Path) -> str:
    """Stop, resume, export and import a run; return what went wrong, or nothing."""
    settings, stop = data | draw(random, SOMETIMES | ON_ONE_RANK) | {"log_interval": 1}, random.randint(1, 5)
    words_of(settings)
    whole = pretrain(**settings, save=folder / "whole").rows
    parts = [*pretrain(**settings, save=folder / "parts", exit_interval=stop).rows]
    parts += pretrain(**settings, save=folder / "parts", load=folder / "parts").rows
    if without_times(parts) != without_times(whole):
        return f"{settings}\nstopped at step {stop}:\n{parts}\nnot stopped:\n{whole}"
    convert(load=folder / "whole", output=folder / "export")
    convert(from_hf=folder / "export", output=folder / "imported")
    convert(load=folder / "imported", output=folder / "again")
    one, other = (load_encoder(folder / name).pool(["words of a text", "a"]) for name in ("export", "again"))
    return "" if np.allclose(one, other, atol=1e-5) else f"{settings}\nother vectors after an import"


def on_more_ranks(random: Random, data: dict[str, Any], folder: Path, ranks: int) -> str:
    """Train on one rank and on several; return what went wrong, or nothing."""
    axes = random.choice(LAYOUTS[ranks])
    settings = data | draw(random, SOMETIMES) | {"hidden_dropout": 0.0, "attention_dropout": 0.0, "eval_interval": 6}
    layout: dict[str, Any] = {"zero_stage": settings.get("zero_stage", random.choice([0, 1]))}
    if "tensor" in axes or "sequence" in axes:
        layout |= {"tensor_model_parallel_size": 2, "sequence_parallel": "sequence" in axes}
    if "pipeline" in axes:
        settings["num_layers"] = random.choice([2, 3, 4])
        layout |= {"pipeline_model_parallel_size": 2, "zero_stage": min(1, layout["zero_stage"])}
    if "data" in axes:
        settings["global_batch_size"] = 2 * settings["micro_batch_size"]
    begin, single = random.choice([0, 3]), settings | {"zero_stage": 0}
    alone = [words_of(single)]
    if begin:
        alone.append(words_of(single | {"exit_interval": begin, "save": folder}))
        layout["load"] = folder
    together = words_of(settings | layout)
    try:
        one, many = train_runs(1, alone)[0][begin:], train_runs(ranks, [together])[0]
    except AssertionError as error:
        return f"{settings | layout}\n{error}"
    steps = enumerate(zip(one, many, strict=True), begin + 1)
    pairs = [(step, name, value, theirs[name]) for step, (ours, theirs) in steps for name, value in ours.items()]
    wrong = [pair for pair in pairs if not math.isclose(*pair[2:], rel_tol=BOUND, abs_tol=NEAR_0)]
    return f"{settings | layout}\n(step, name, on one rank, on {ranks}): {wrong[:5]}" if wrong else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=200, help="draws for each number of ranks (default: 200)")
    parser.add_argument("--first", type=int, default=0, help="number of the first draw (default: 0)")
    parser.add_argument("--ranks", nargs="+", type=int, choices=(1, 2, 4), default=[1, 2, 4])
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        data = make_corpus(Path(folder))
        draws = [(ranks, number) for ranks in arguments.ranks for number in range(arguments.draws)]
        for ranks, number in tqdm(draws, unit="draw"):
            random, told = Random(f"{ranks} {arguments.first + number}"), StringIO()
            try:
                with tempfile.TemporaryDirectory() as runs, redirect_stdout(told), redirect_stderr(told):
                    given = random, data, Path(runs)
                    wrong = on_one_rank(*given) if ranks == 1 else on_more_ranks(*given, ranks)
            except Refused:
                counts["refused"] += 1
                continue
            except Exception:
                wrong = f"{told.getvalue()[-2000:]}\n{traceback.format_exc()}"
            counts["wrong" if wrong else "right"] += 1
            if wrong:
                tqdm.write(f"--ranks {ranks} --first {arguments.first + number} --draws 1\n{wrong}\n")
    print(", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    return int(bool(counts["wrong"] or not counts["right"]))


if __name__ == "__main__":
    sys.exit(main())
