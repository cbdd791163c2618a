"""Subcommands of `megatron-ddrp analyze`. Each measures, prints a line per model, and writes a JSON and a figure."""

from __future__ import annotations

import argparse
import functools
import json
from dataclasses import asdict
from typing import Any

import torch

from megatron_ddrp.data.atomic import write_text
from megatron_ddrp.data.progress import progress
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError
from megatron_ddrp.lab.analysis import figures
from megatron_ddrp.lab.analysis.attention_maps import measure_maps, measure_triangles
from megatron_ddrp.lab.analysis.masked_places import count_found, count_pieces, frequent_pieces
from megatron_ddrp.lab.analysis.models import Snapshot, find_snapshots
from megatron_ddrp.lab.analysis.notes import analyze_notes, summary
from megatron_ddrp.lab.analysis.probe import PASSES as PROBE_PASSES
from megatron_ddrp.lab.analysis.probe import measure_probe, shuffle_text
from megatron_ddrp.lab.analysis.session import Output, Session, View
from megatron_ddrp.lab.analysis.similarity import measure_similarity, near_and_far, table_cosines
from megatron_ddrp.lab.analysis.space import PASSES, measure_space
from megatron_ddrp.lab.analysis.throughput import Setting, Timed, measure_throughput
from megatron_ddrp.model.gpus import named_device
from megatron_ddrp.pages import machine

GPU_TOKENS, CPU_TOKENS = 16384, 2048
"""Tokens per batch of a throughput measurement."""
DIGITS = 6
"""Decimal places of a map's cells in the JSON."""
PROBES = (("text", "probe", "probe_error"), ("shuffled", "shuffled", "shuffled_error"))
"""(name, key of the accuracy, key of its standard error) of both measurements of the probe."""


def report_similarity(arguments: argparse.Namespace) -> None:
    """Report f(S) and f(H) of every checkpoint."""
    session = Session(arguments, every_checkpoint=True)
    rows = []
    for view in session.views():
        found = measure_similarity(view.model, view.batches())
        rows.append(
            view.facts()
            | {
                "token_similarity": found.token_similarity,
                "head_similarity": found.head_similarity,
                "head_similarity_by_layer": found.head_similarity_by_layer,
            }
        )
    for row in rows:
        print(f"{_name(row)}: f(S) {row['token_similarity']:.4f} f(H) {row['head_similarity']:.4f}")
    session.write({"checkpoints": rows}, lambda path: figures.draw_similarity(rows, path))


def _name(row: dict[str, Any]) -> str:
    """Return the run and the step of a row."""
    return row["run"] + ("" if row["iteration"] is None else f" step {row['iteration']:,}")


def report_space(arguments: argparse.Namespace) -> None:
    """Report the geometry of every layer's hidden states at every checkpoint."""
    session = Session(arguments, every_checkpoint=True, load=Snapshot.load_any, passes=PASSES)
    rows = []
    for view in session.views():
        specials = torch.from_numpy(view.sentences.tokenizer.special_ids).to(view.device)
        found = measure_space(view.model, view.batches, specials)
        rows.append(view.facts() | {"tokens": found.tokens, "layers": [asdict(layer) for layer in found.layers]})
    for row in rows:
        last = row["layers"][-1]
        values = ", ".join(f"{name} {_shown(last[key])}" for key, name in figures.SPACE.items())
        print(f"{_name(row)}, layer {last['layer']}: {values}")
    session.write({"checkpoints": rows}, lambda path: figures.draw_space(rows, path))


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def report_masked_places(arguments: argparse.Namespace) -> None:
    """Report how often the masked piece is among the first guesses of the newest checkpoint of each folder."""
    session, guesses = Session(arguments, every_checkpoint=False, load=Snapshot.load_masked_lm), arguments.top_k
    counts = functools.cache(functools.partial(count_pieces, session.prefixes))  # once for all models of a vocabulary
    rows = []
    for view in session.views():
        tokenizer = view.sentences.tokenizer
        frequent = frequent_pieces(counts(tokenizer.vocab_size), tokenizer, guesses)
        places, found, by_frequency = count_found(view.model, view.batches(), tokenizer, frequent, arguments.seed)
        rows.append(view.facts() | {"places": places, "found": found, "found_by_frequency": by_frequency})
    for row in rows:
        print(
            f"{_name(row)}: the masked piece is among the first {guesses} in {row['found']} of {row['places']} held-out"
            f" places; it is one of the {guesses} most frequent pieces in {row['found_by_frequency']}"
        )
    result = {"top_k": guesses, "models": rows}
    session.write(result, lambda path: figures.draw_masked_places(rows, guesses, path))


def report_maps(arguments: argparse.Namespace) -> None:
    """Report the mean attention maps of one layer of one model."""
    session = Session(arguments, every_checkpoint=False)
    for view in session.views():  # one view: --load takes one folder
        sizes = view.model.config
        layer = sizes.num_layers if arguments.layer is None else arguments.layer
        _check_number("--layer", layer, sizes.num_layers)
        for head in arguments.head:
            _check_number("--head", head, sizes.num_attention_heads)
        view.sentences.keep_longest()
        maps = measure_maps(view.model, view.batches(), layer, arguments.head)
    for panel in maps:
        print(f"{panel.name}: {panel.up:.1%} to the right, {panel.down:.1%} to the left")
    facts = view.facts()
    panels = [asdict(panel) | {"map": panel.map.round(DIGITS).tolist()} for panel in maps]
    title = f"{facts['run']}, layer {layer}: mean over {facts['sentences']:,} sentences of {len(maps[0].map)} tokens"
    session.write(facts | {"layer": layer, "maps": panels}, lambda path: figures.draw_maps(maps, title, path))


def _check_number(flag: str, number: int, largest: int) -> None:
    if not 1 <= number <= largest:
        raise UserError(f"{flag} is {number}: this model has 1 to {largest}", WRONG_ARGUMENTS)


def report_triangles(arguments: argparse.Namespace) -> None:
    """Report Algorithm 1 for the newest checkpoint of each folder."""
    threshold = arguments.threshold
    session = Session(arguments, every_checkpoint=False)
    rows = []
    for view in session.views():
        layers = measure_triangles(view.model, view.batches(), threshold)
        by_layer = [{"layer": number} | asdict(layer) for number, layer in enumerate(layers, 1)]
        rows.append(view.facts() | {"share": layers[-1].share, "layers": by_layer})
    for row in rows:
        print(f"{row['run']}: {row['share']:.2%} of {row['sentences']:,} sentences in the last layer")
    shares = {row["run"]: [layer["share"] for layer in row["layers"]] for row in rows}
    result = {"threshold": threshold, "models": rows}
    session.write(result, lambda path: figures.draw_triangles(shares, threshold, path))


def report_direction(arguments: argparse.Namespace) -> None:
    """Report how well the newest checkpoint of each folder tells left from right."""
    session = Session(arguments, every_checkpoint=False, passes=2 * PROBE_PASSES)
    rows = [view.facts() | _direction_fields(view, arguments.seed) for view in session.views()]
    for row in rows:
        cosine = "no table" if row["near"] is None else f"cosine {row['near']:.3f} near, {row['far']:.3f} far"
        probes = (f"{name} {row[key]:.2%}{_margin(row[error])}" for name, key, error in PROBES)
        print(f"{row['run']}: {cosine}; {', '.join(probes)}")
    session.write({"models": rows}, lambda path: figures.draw_direction(rows, path))


def _direction_fields(view: View, seed: int) -> dict[str, Any]:
    """Measure a model, and return the fields of its row about cosines of the table and about the probe."""
    text = measure_probe(view.model, view.batches)
    shuffled = measure_probe(view.model, lambda: shuffle_text(view.batches(), seed))
    cosines = table_cosines(view.model)
    near, far = near_and_far(cosines)

    def by(key: str, ours: list[float | None], theirs: list[float | None]) -> list[dict[str, Any]]:
        pairs = zip(ours, theirs, strict=True)
        return [{key: number, "probe": own, "shuffled": other} for number, (own, other) in enumerate(pairs, 1)]

    return {
        "cosines": cosines,
        "near": near,
        "far": far,
        "probe": text.accuracy,
        "probe_error": text.error,
        "shuffled": shuffled.accuracy,
        "shuffled_error": shuffled.error,
        "layers": by("layer", text.by_layer, shuffled.by_layer),
        "distances": by("distance", text.by_distance, shuffled.by_distance),
    }


def _margin(error: float | None) -> str:
    return "" if error is None else f" ± {100 * error:.2f}"


def report_throughput(arguments: argparse.Namespace) -> None:
    """Report tokens per second and memory of encoders at inference, per row length."""
    output = Output(arguments.output)
    lengths = sorted(set(arguments.lengths))
    device = named_device(arguments.device, f"--device {arguments.device}")
    tokens = arguments.tokens or (GPU_TOKENS if device.type == "cuda" else CPU_TOKENS)
    setting = Setting(device, tokens, arguments.rounds, arguments.bf16, arguments.seed)
    snapshots = find_snapshots(arguments.load, every=False)
    with progress("pass", len(snapshots) * len(lengths) * (setting.rounds + 1)) as bar:
        measured = measure_throughput(snapshots, lengths, setting, bar.update)
    rows = [_throughput_row(timed) for timed in measured]
    for row in rows:
        print("\n".join(_throughput_lines(row)))
    if not any(row["lengths"] for row in rows):
        raise UserError("no length could be measured, for the reasons above: give shorter --lengths or fewer --tokens")
    about = {
        "analysis": arguments.command,
        "hardware": machine.hardware(),
        "versions": machine.versions(),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "precision": "bf16" if arguments.bf16 else "fp32",
        "tokens_per_batch": tokens,
        "rounds": setting.rounds,
        "seed": setting.seed,
    }
    output.write(about | {"encoders": rows}, lambda path: figures.draw_throughput(rows, path))


def _throughput_row(timed: Timed) -> dict[str, Any]:
    return {
        "run": timed.snapshot.run,
        "checkpoint": str(timed.snapshot.path),
        "weight_bytes": timed.weight_bytes,
        "lengths": [asdict(speed) for speed in timed.speeds],
        "left_out": [{"length": length, "reason": reason} for length, reason in timed.left_out.items()],
    }


def _throughput_lines(row: dict[str, Any]) -> list[str]:
    lines = []
    for speed in row["lengths"]:
        low, median, high = (speed[key] for key in ("lower_quartile", "tokens_per_second", "upper_quartile"))
        memory = "" if speed["memory_bytes"] is None else f", {speed['memory_bytes'] / 2**20:,.0f} MiB"
        lines.append(f"length {speed['length']}: {median:,.0f} tokens/s ({low:,.0f} to {high:,.0f}){memory}")
    lines += [f"length {left['length']}: left out, {left['reason']}" for left in row["left_out"]]
    return [f"{row['run']}, {line}" for line in lines]


def report_notes(arguments: argparse.Namespace) -> None:
    """Report the contents of a run's note dictionary."""
    if arguments.output and arguments.output.suffix != ".json":
        raise UserError(f"--output {arguments.output}: expected a name that ends in .json", WRONG_ARGUMENTS)
    result = analyze_notes(
        arguments.load, arguments.data_path, arguments.words, arguments.neighbours, arguments.documents
    )
    if arguments.output:
        write_text(arguments.output, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    print(summary(result))
