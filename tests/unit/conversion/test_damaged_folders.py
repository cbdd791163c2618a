"""Folders that somebody else wrote, or that broke on their way: every reader takes them, or says why in one line."""

import json
import os
import random
import shutil

import pytest

from megatron_ddrp.conversion.families.contract import SUMS
from megatron_ddrp.conversion.to_huggingface import export_checkpoint
from megatron_ddrp.errors import UserError
from tests.unit.conversion.conftest import READERS, write_checkpoint

DAMAGED = 40
"""Folders of each kind; some hundreds find nothing more."""
FILES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt",
    "model.safetensors",
)  # fmt: skip
STRANGE = (
    10**12, -1, 0, 2**31, 10**5, 10**400, 1.5, 1e308, float("nan"), float("inf"), True, None, "abc", "", "x" * 100_000,
    [], {}, [[]], {"a": {}}, ["c2p"], "../../x", 3,
)  # fmt: skip


def refused_in_one_line(settings, keys):
    """Return how many strange values `settings(key=value)` refuses, each in one line; it takes the others."""
    refused = 0
    for key in keys:
        for value in STRANGE:
            try:
                settings(**{key: value})
            except UserError as error:
                refused += 1
                assert "\n" not in str(error) and len(str(error)) < 1000, (key, value)
    return refused


def change_value(path, chance):
    """Put something strange at a random place of a JSON file."""
    top = json.loads(path.read_text())
    inside, places = top, []
    while isinstance(inside, (dict, list)) and inside:
        key = chance.choice(list(inside) if isinstance(inside, dict) else range(len(inside)))
        places.append((inside, key))
        inside = inside[key]
    where, key = chance.choice(places)
    where[key] = chance.choice(STRANGE)
    path.write_text(json.dumps(top))


def flip_bytes(path, chance):
    content = bytearray(path.read_bytes())
    for _ in range(chance.choice((1, 3, 30))):
        content[chance.randrange(min(len(content), chance.choice((8, 200, 5000))))] = chance.randrange(256)
    path.write_bytes(content)


def cut(path, chance):
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(len(content))])


def replace(path, chance):
    deep = "[" * 100_000
    path.write_text(chance.choice(("", "[]", "{}", "1", "null", '"x"', deep, '{"a":' * 5000, "\0" * 50)))


def make_folder(path, _):
    path.unlink()
    path.mkdir()


def remove(path, _):
    path.unlink()


def damage(folder, seed):
    """Damage one file of a folder; the same seed does the same."""
    chance = random.Random(seed)
    path = folder / chance.choice([name for name in FILES if (folder / name).exists()])
    kinds = [flip_bytes, cut, replace, make_folder, remove]
    kind = chance.choice([*kinds, *[change_value] * 5] if path.suffix == ".json" else kinds)
    kind(path, chance)
    return f"{kind.__name__} of {path.name}"


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="measures memory in /proc")
@pytest.mark.parametrize("encoding", ["absolute", "ddrp"])
def test_a_damaged_folder_is_taken_or_refused_in_one_line(tmp_path, tokenizer, offline, little_room, encoding):
    whole = tmp_path / "whole"
    export_checkpoint(write_checkpoint(tmp_path / "run", tokenizer, position_encoding=encoding), whole)
    (whole / SUMS).unlink()  # else nothing but sums would be tested
    refused = 0
    for seed in range(DAMAGED):
        folder = tmp_path / "damaged"
        shutil.copytree(whole, folder)
        what = damage(folder, seed)
        for name, read in READERS.items():
            try:
                read(folder)
            except UserError as error:
                refused += 1
                assert "\n" not in str(error) and len(str(error)) < 1000, (seed, what, name)
            except BaseException as error:
                raise AssertionError(f"{name}, seed {seed}, {what}") from error
        shutil.rmtree(folder)
    assert refused > DAMAGED
