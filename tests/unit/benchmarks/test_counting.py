"""What the fake GPU counts, against counts by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

Toys = dict[str, dict[str, Any]]
BF16 = 2


@pytest.fixture(scope="module")
def toys() -> Toys:
    """Launches (name, bytes, FLOP, kind, whether backward) and waits of each toy."""
    script = Path(__file__).with_name("counted_toys.py")
    finished = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=400)
    return json.loads(finished.stdout)


def test_two_layers(toys: Toys) -> None:
    """x `[4, 8]`, maps 8 → 16 → 8: every product has 2·4·8·16 FLOP."""
    x, weight, inner, product = 4 * 8 * BF16, 8 * 16 * BF16, 4 * 16 * BF16, 2 * 4 * 8 * 16
    forward = [launch[:4] for launch in toys["two_layers"]["launches"] if not launch[4]]
    assert forward[:3] == [
        ["addmm", x + weight + 16 * BF16 + inner, product, "half"],
        ["gelu", 2 * inner, 0, "pointwise"],
        ["addmm", inner + weight + 8 * BF16 + x, product, "half"],
    ]
    backward = [launch[:3] for launch in toys["two_layers"]["launches"] if launch[4]]
    assert [flop for name, _, flop in backward if name == "mm"] == [product] * 3  # x wants no gradient
    assert ["gelu_backward", 3 * inner, 0] in backward
    assert toys["two_layers"]["waits"] == []


def test_views_are_free_and_repeated_elements_count_once(toys: Toys) -> None:
    full, row, gathered = 4 * 8 * BF16, 8 * BF16, 5 * 8 * BF16
    assert [launch[:2] for launch in toys["views_and_strides"]["launches"]] == [
        ["add", full + row + full],
        ["add_", 2 * full + row],
        ["embedding", 5 * 8 + 2 * gathered],
    ]


def test_waits_are_recorded_and_stand_ins_let_the_program_go_on(toys: Toys) -> None:
    wanted = ["_local_scalar_dense", "_local_scalar_dense", "nonzero", "index by a mask", "_to_copy"]
    assert toys["waits"]["waits"] == wanted


def test_a_compiled_function_is_one_launch_each_way(toys: Toys) -> None:
    x, weight = 4 * 8 * BF16, 8 * BF16
    forward, backward = toys["compiled"]["launches"]
    assert forward[1:] == [x + weight + x, 0, "pointwise", False]
    assert backward[1:] == [x + weight + x + x + weight, 0, "pointwise", True]


def test_attention_counts_two_products_forward_and_five_backward(toys: Toys) -> None:
    product = 2 * (2 * 3) * 16 * 16 * 8
    flop = [launch[2] for launch in toys["attention"]["launches"] if launch[3] == "attention"]
    assert flop == [2 * product, 5 * product]


def test_a_layer_of_the_flagship_stays_lean(toys: Toys) -> None:
    """At most 60 launches forward and backward; HCD adds at most 5 % of the bytes and 10 % of the launches; no wait."""
    plain, flagship = toys["layers"]["mlm"], toys["layers"]["mth"]
    assert sum(flagship["layer_launches"]) <= 60
    assert sum(flagship["layer_launches"]) <= 1.1 * sum(plain["layer_launches"])
    assert flagship["layer_bytes"] <= 1.05 * plain["layer_bytes"]
    assert flagship["waits"] == 0
