"""Subcommands of `megatron-ddrp analyze`. Each measures, prints a line per model, and writes a JSON and a figure.

The measures of masked places (`count_found`) and of notes (`analyze_notes`) are here too.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ddrp.checkpoint import BESIDE, TOKENIZER, choose_checkpoint
from megatron_ddrp.checkpoint.weights import read_notes
from megatron_ddrp.data.atomic import write_text
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.batches.word_counts import RareWords, WordFinder
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset
from megatron_ddrp.data.dataset.verification import check_ids
from megatron_ddrp.data.progress import progress, track
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megatron_ddrp.encoders.masked_lm import PieceLogits
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError
from megatron_ddrp.lab.analysis import figures
from megatron_ddrp.lab.analysis.figures import (
    measure_maps,
    measure_similarity,
    measure_triangles,
    near_and_far,
    table_cosines,
)
from megatron_ddrp.lab.analysis.probe import (
    PASSES,
    Setting,
    Timed,
    measure_probe,
    measure_space,
    measure_throughput,
    shuffle_text,
)
from megatron_ddrp.lab.analysis.probe import PROBE_PASSES as PROBE_PASSES
from megatron_ddrp.lab.analysis.session import AnalysisFiles, Session, Snapshot, View, find_snapshots
from megatron_ddrp.model.fused import named_device
from megatron_ddrp.pages.markdown import hardware, versions


def count_pieces(prefixes: Iterable[str], vocab_size: int) -> NDArray[np.int64]:
    """Read some datasets in full and return the count of each piece, `[vocab_size]`.

    Raises `UserError` for an id outside the vocabulary.
    """
    counts = np.zeros(vocab_size, np.int64)
    for prefix in prefixes:
        for ids in IndexedDataset(prefix).chunks():
            check_ids(prefix, ids, vocab_size)
            counts += np.bincount(ids, minlength=vocab_size)
    return counts


def frequent_pieces(counts: NDArray[np.int64], tokenizer: Tokenizer, count: int) -> NDArray[np.int64]:
    """Return the ids of the `count` most frequent pieces, without special ones; `counts` are `[vocab_size]`."""
    counts = counts.copy()
    counts[tokenizer.special_ids] = -1
    return np.argsort(-counts, kind="stable")[:count]


def count_found(
    model: PieceLogits, batches: Iterable[Batch], tokenizer: Tokenizer, frequent: NDArray[np.int64], seed: int
) -> tuple[int, int, int]:
    """Mask one piece of each sentence, and try as many guesses as there are `frequent` pieces.

    Return the numbers of masked places, of those whose piece the model names, and of those whose piece is frequent.

    The place is drawn by the seed; special pieces such as [UNK] are never masked. The guess from frequencies alone
    names the most frequent pieces of the dataset at every place.
    """
    generator = np.random.default_rng(seed)
    places = by_model = by_frequency = 0
    for batch in batches:
        ids, lengths = batch.input_ids, batch.document_ids.sum(1)  # [sentences, seq], [sentences]
        for length in lengths.unique_consecutive().tolist():
            rows = ids[lengths == length, :length]
            maskable = ~np.isin(rows.cpu().numpy(), tokenizer.special_ids)  # [sentences, length]
            rows, maskable = rows[torch.from_numpy(maskable.any(1)).to(rows.device)], maskable[maskable.any(1)]
            where = [generator.choice(np.flatnonzero(row)) for row in maskable]
            if not where:
                continue
            place = torch.tensor(where, device=rows.device)
            masked = rows.gather(1, place[:, None])  # [sentences, 1]
            with torch.inference_mode():
                logits = model(rows.scatter(1, place[:, None], tokenizer.mask_id), place)[:, : tokenizer.vocab_size]
            guesses = logits.topk(len(frequent)).indices  # [sentences, guesses]
            places += len(where)
            by_model += int((guesses == masked).sum())
            by_frequency += int(np.isin(masked.cpu().numpy(), frequent).sum())
    return places, by_model, by_frequency


SENTENCE_ENDS = (".", "!", "?")


def analyze_notes(load: Path, data_path: str | None, words: Sequence[str], neighbours: int, documents: int) -> dict:
    """Return facts about a checkpoint's dictionary, and about the sentences of the dataset `data_path` if given.

    Raises `UserError` for one of `words` without a note.

    They are about the dictionary's rare words (Wu et al., arXiv:2008.01466), their frequency and similar words.
    """
    path = choose_checkpoint(load, (BESIDE,))
    rare, met, vectors = read_notes(path)
    tokenizer = load_tokenizer(path.resolve().parent / TOKENIZER)
    result: dict[str, Any] = {
        "checkpoint": str(path),
        "rare_words": len(rare),
        "words_with_a_note": len(met),
        "count_range": [int(rare.counts.min()), int(rare.counts.max())],
    }
    if data_path:
        result |= share_of_sentences(IndexedDataset(data_path), rare, tokenizer, documents)
    asked = list(words) or most_frequent(rare, met.tolist(), tokenizer)
    result["nearest"] = {
        word: nearest_notes(word, rare, met.tolist(), vectors, tokenizer, neighbours) for word in asked
    }
    return result


def share_of_sentences(
    dataset: IndexedDataset, rare: RareWords, tokenizer: Tokenizer, documents: int
) -> dict[str, Any]:
    """Count sentences, and those with a rare word, in the first `documents` documents. A ., ! or ? ends a sentence.

    Wu et al. find a rare word in about 20 % of sentences.
    """
    finder = WordFinder(tokenizer)
    ends = np.array([piece.strip("▁") in SENTENCE_ENDS for piece in tokenizer.pieces])
    sentences = with_one = 0
    low, high = 0, int(dataset.document_indices[min(documents, dataset.num_documents)])
    for sequence in track(range(low, high), "sequence"):
        ids = np.asarray(dataset[sequence], np.int64)
        if not len(ids):
            continue
        marks = finder.number(rare, ids[None], np.array([True]))[0] > 0
        number = np.concatenate([[0], np.cumsum(ends[ids[:-1]])])  # of each token's sentence
        sentences += int(number[-1]) + 1
        with_one += len(np.unique(number[marks]))
    share = with_one / max(1, sentences)
    return {"sentences": sentences, "sentences_with_a_rare_word": with_one, "share_of_sentences": share}


def most_frequent(rare: RareWords, met: list[int], tokenizer: Tokenizer, count: int = 5) -> list[str]:
    """Return the `count` most frequent alphabetic words with a note, by their counts in the training text."""
    by_count = sorted(met, key=lambda number: (-int(rare.counts[number - 1]), number))
    texts = (tokenizer.decode(rare.word(number)) for number in by_count)
    return list(itertools.islice((text for text in texts if re.fullmatch(r"[^\W\d_]{4,}", text)), count))


def nearest_notes(
    word: str, rare: RareWords, met: list[int], vectors: torch.Tensor, tokenizer: Tokenizer, count: int
) -> list[dict[str, Any]]:
    """Return the words whose notes have the largest cosine with the note of `word`.

    The mean of all notes is removed first: every note is an average of contexts, so with the part that all contexts
    share every cosine would be near 1. Raises `UserError` if `word` has no note.
    """
    numbers = {tuple(rare.word(number)): row for row, number in enumerate(met)}
    row = numbers.get(tuple(tokenizer.encode(word)))
    if row is None:
        some = ", ".join(most_frequent(rare, met, tokenizer))
        raise UserError(f"--words {word}: no note of this word; rare words with a note are {some}", WRONG_ARGUMENTS)
    vectors = vectors.float()
    directions = torch.nn.functional.normalize(vectors - vectors.mean(0), dim=-1)
    cosines = directions @ directions[row]
    cosines[row] = -2.0
    best = cosines.topk(min(count, len(met) - 1))
    return [
        {"word": tokenizer.decode(rare.word(met[other])), "cosine": cosine}
        for cosine, other in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]


def summary(result: dict[str, Any]) -> str:
    """Return the result of `analyze_notes` as lines of text."""
    low, high = result["count_range"]
    lines = [
        f"{result['rare_words']:,} rare words ({low:,} to {high:,} times in the training text), "
        f"{result['words_with_a_note']:,} with a note in {result['checkpoint']}"
    ]
    if "sentences" in result:
        lines.append(
            f"{result['share_of_sentences']:.1%} of {result['sentences']:,} sentences contain one "
            "(Wu et al., arXiv:2008.01466: about 20 %)"
        )
    for word, near in result["nearest"].items():
        lines.append(f"{word}: " + ", ".join(f"{other['word']} {other['cosine']:.2f}" for other in near))
    return "\n".join(lines)


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
    session.write({"checkpoints": rows}, lambda: figures.draw_similarity(rows))


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
        shown = ((name, last[key]) for key, name in figures.SPACE.items())
        values = ", ".join(f"{name} {'-' if value is None else format(value, '.4g')}" for name, value in shown)
        print(f"{_name(row)}, layer {last['layer']}: {values}")
    session.write({"checkpoints": rows}, lambda: figures.draw_space(rows))


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
    session.write(result, lambda: figures.draw_masked_places(rows, guesses))


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
    session.write(facts | {"layer": layer, "maps": panels}, lambda: figures.draw_maps(maps, title))


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
    session.write(result, lambda: figures.draw_triangles(shares, threshold))


def report_direction(arguments: argparse.Namespace) -> None:
    """Report how well the newest checkpoint of each folder tells left from right."""
    session = Session(arguments, every_checkpoint=False, passes=2 * PROBE_PASSES)
    rows = [view.facts() | _direction_fields(view, arguments.seed) for view in session.views()]
    for row in rows:
        cosine = "no table" if row["near"] is None else f"cosine {row['near']:.3f} near, {row['far']:.3f} far"
        margins = {key: "" if row[key] is None else f" ± {100 * row[key]:.2f}" for *_, key in PROBES}
        probes = (f"{name} {row[key]:.2%}{margins[error]}" for name, key, error in PROBES)
        print(f"{row['run']}: {cosine}; {', '.join(probes)}")
    session.write({"models": rows}, lambda: figures.draw_direction(rows))


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


def report_throughput(arguments: argparse.Namespace) -> None:
    """Report tokens per second and memory of encoders at inference, per row length."""
    output = AnalysisFiles(arguments.output)
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
        "hardware": hardware(),
        "versions": versions(),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "precision": "bf16" if arguments.bf16 else "fp32",
        "tokens_per_batch": tokens,
        "rounds": setting.rounds,
        "seed": setting.seed,
    }
    output.write(about | {"encoders": rows}, lambda: figures.draw_throughput(rows))


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
