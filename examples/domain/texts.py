"""Turn the rated sentences of vaderSentiment 3.3.2 into text of a field without labels and tables of a task.

    python examples/domain/texts.py vaderSentiment-3.3.2.tar.gz OUT

The package's source archive (MIT licence; C. J. Hutto and E. Gilbert, "VADER", ICWSM 2014) holds sentences from film
reviews, product reviews, newspaper editorials and tweets. Each was rated by 15 to 99 people, mostly 20 or fewer,
from -4, negative, to 4, positive; the task is to predict the mean. The field is film reviews:

    OUT/field.jsonl                 8,000 of its sentences, one per document, without ratings
    OUT/train.csv, OUT/valid.csv    600 and 400 more, with their ratings
    OUT/test-films.csv, …           1,000 of each of the four fields, drawn by chance

No sentence stands in two of these files. One line per field says how well the people agree: the mean correlation of one
half of the raters with the other, and from it (Spearman and Brown) the highest correlation with the mean of all that a
prediction can be expected to reach.
"""

from __future__ import annotations

import argparse
import ast
import csv
import io
import json
import math
import random
import tarfile
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np

FIELDS = {
    "films": "movieReviewSnippets",
    "products": "amazonReviewSnippets",
    "editorials": "nytEditorialSnippets",
    "tweets": "tweets",
}
"""Field → first part of the names of its files in the archive."""
UNLABELLED, TRAIN, VALID, TEST = 8000, 600, 400, 1000
"""Film sentences without ratings, for training and for validation; sentences of each field for the test."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    seen: set[str] = set()
    with tarfile.open(arguments.archive) as package:
        inner = package.extractfile("vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz")
        with tarfile.open(fileobj=inner) as archive:
            for field, name in FIELDS.items():
                rows = [row for row in read_rows(archive, name) if not (row[0] in seen or seen.add(row[0]))]
                half, ceiling = agreement(read_ratings(archive, name))
                print(f"{field}: {len(rows)} sentences; raters: half with half {half:.3f}, at most {ceiling:.3f}")
                write_field(arguments.output, field, rows)


def read_rows(archive: tarfile.TarFile, name: str) -> list[tuple[str, float]]:
    """Return each sentence of a field with its mean rating."""
    lines = _lines(archive, f"{name}_GroundTruth.txt")
    return [(" ".join(text.split()), float(mean)) for _, mean, text in (line.split("\t", 2) for line in lines)]


def read_ratings(archive: tarfile.TarFile, name: str) -> list[list[int]]:
    """Return the ratings of each sentence of a field."""
    return [ast.literal_eval(line.split("\t")[3]) for line in _lines(archive, f"{name}_anonDataRatings.txt")]


def _lines(archive: tarfile.TarFile, name: str) -> Iterable[str]:
    path = f"hutto_ICWSM_2014/{name}"
    member = archive.extractfile(path) if path in archive.getnames() else None
    if member is None:
        raise SystemExit(f"error: {name} is no file of the archive; give the source archive of vaderSentiment 3.3.2")
    lines = io.TextIOWrapper(member, "utf-8-sig", errors="replace").read().splitlines()
    return (line for line in lines if line.strip())


def agreement(ratings: list[list[int]], draws: int = 100) -> tuple[float, float]:
    """Return the mean correlation of two random halves of each sentence's raters, and the ceiling of a prediction.

    With r between halves, the mean of all raters has the reliability 2 r / (1 + r), and no prediction is expected to
    correlate with it by more than the root of that.
    """
    generator, found = np.random.default_rng(0), []
    for _ in range(draws):
        shuffled = [generator.permutation(row) for row in ratings]
        halves = [(row[: len(row) // 2].mean(), row[len(row) // 2 :].mean()) for row in shuffled]
        found.append(float(np.corrcoef(np.array(halves).T)[0, 1]))
    half = sum(found) / draws
    return half, math.sqrt(2 * half / (1 + half))


def write_field(output: Path, field: str, rows: list[tuple[str, float]]) -> None:
    """Write the files of one field; see the module."""
    random.Random(0).shuffle(rows)
    if field == "films":
        rest = iter(rows)
        unlabelled, train, valid = ([*islice(rest, size)] for size in (UNLABELLED, TRAIN, VALID))
        rows = [*rest]
        documents = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text, _ in unlabelled)
        (output / "field.jsonl").write_text("".join(documents), encoding="utf-8")
        write_table(output / "train.csv", train)
        write_table(output / "valid.csv", valid)
    write_table(output / f"test-{field}.csv", rows[:TEST])


def write_table(path: Path, rows: list[tuple[str, float]]) -> None:
    """Write sentences and mean ratings as a table with the columns `text` and `label`."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *((text, f"{mean:.4f}") for text, mean in rows)])


if __name__ == "__main__":
    main()
