"""CUDA graphs off and on for the GPU report: the recipe's own steps, their gradient norms, and what should change.

Norms of all steps are compared bit for bit, after two runs without graphs were compared in the same way: where those
differ, graphs cannot be judged by bits. An arm starts from the same seed and sees the same rows.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from gpu_device import kernel_seconds, peak_gib, release_memory, start_peak, wait_for_device, waits_during
from gpu_groups import Bench, Row, noted, timing
from gpu_training import FLAGSHIP, PLAIN, Arm, Training, arm

FIRST = 3
"""Steps before those that are timed: they compile kernels and capture graphs."""
OFF, AGAIN, ON = "off", "off, again", "on"


class Verdict(NamedTuple):
    """Outcome of a comparison of graphs off and on."""

    kind: str
    """"faster", "slower", "different" or "unknown"."""
    line: str


def decide(bench: Bench) -> None:
    """Train the flagship, plain BERT and the flagship on packed rows, off and on; write what should change."""
    verdicts: list[Verdict] = []
    for (encoding, objective), rows in ((FLAGSHIP, "full"), (PLAIN, "full"), (FLAGSHIP, "packed")):
        base = arm(bench.sizes.usual_length, encoding, objective, rows)
        verdicts.append(compare(base, (OFF, AGAIN, ON), bench))
        if verdicts[-1].kind == "different":  # are captured compiled regions at fault?
            compare(arm(base.length, encoding, objective, rows, compile="off"), (OFF, ON), bench)
    bench.write({"name": "to change", "verdict": conclusion(verdicts)})


def compare(base: Arm, ways: tuple[str, ...], bench: Bench) -> Verdict:
    """Train an arm in each way; write a row of each and the verdict."""
    rows: dict[str, Row] = {}
    for way in ways:
        made = base._replace(graphs=way.partition(",")[0])
        rows[way] = {"name": f"{base.name}, graphs {way}", "rows": base.rows, "length": base.length}
        before = start_peak()
        with noted([rows[way]]):
            running = made.start(bench, bench.sizes.tokens)
            try:
                rows[way] |= figures_of(running, bench.sizes.steps)
            finally:
                running.close()
        rows[way]["peak_gib"] = peak_gib(before)
        release_memory()
        bench.write(rows[way])
    found = verdict(rows)
    bench.write({"name": base.name, "rows": base.rows, "verdict": found.line})
    return found._replace(line=f"{base.name}, {base.rows} rows: {found.line}")


def figures_of(running: Training, steps: int) -> Row:
    """Return the times of so many steps, the norms of all of them, and the waits and kernels of two more."""
    host, whole, norms = list[float](), list[float](), list[str]()

    def step() -> None:
        wait_for_device()
        began = time.perf_counter()
        running.step()
        host.append(time.perf_counter() - began)

    def finish() -> None:
        wait_for_device()
        norms.append(float(running.engine.get_global_grad_norm()).hex())

    for _ in range(FIRST + steps):
        began = time.perf_counter()
        step()
        wait_for_device()
        whole.append(time.perf_counter() - began)
        finish()
    timed, count = np.array(whole[FIRST:]), len(running.done[-1].shapes)
    row = timing(running, timed)
    waits = waits_during(step)
    finish()
    kernel_ms = sum(kernel_seconds(step).values()) * 1e3 / count
    finish()
    row |= {"host_ms": float(np.median(host[FIRST:-2])) * 1e3 / count, "norms": norms}
    row["compile_seconds"] = sum(whole[:FIRST]) - FIRST * float(np.median(timed))
    row["waits"] = ", ".join(f"{place} ({number})" for place, number in Counter(waits).items()) or "none"
    return row | ({"kernel_ms": kernel_ms, "busy": kernel_ms / row["ms"]} if kernel_ms else {"waits": None})


def verdict(rows: Mapping[str, Row]) -> Verdict:
    """Judge the rows of an arm, by way: off, on and maybe off again."""
    for row in rows.values():
        if "note" in row:
            return Verdict("unknown", f"not decided, {row['name']}: {row['note']}")
    off, on = rows[OFF], rows[ON]
    if AGAIN in rows and (step := first_difference(off, rows[AGAIN])):
        return Verdict("unknown", f"not decided: two runs without graphs have other gradient norms from step {step} on")
    if step := first_difference(off, on):
        return Verdict("different", f"graphs change the gradient norm from step {step} on")
    times = f"{on['ms']:.2f} ms per micro-batch instead of {off['ms']:.2f}"
    kind = "faster" if on["ms"] < off["ms"] else "slower"
    return Verdict(kind, f"gradient norms of all {len(off['norms'])} steps equal bit for bit; graphs take {times}")


def first_difference(one: Row, other: Row) -> int:
    """Return the first step whose gradient norms differ, 0 if none does."""
    pairs = zip(one["norms"], other["norms"], strict=True)
    return next((step for step, (x, y) in enumerate(pairs, start=1) if x != y), 0)


def conclusion(verdicts: list[Verdict]) -> str:
    """Return what the verdicts ask to change; the first is the flagship's on full rows."""
    if not_decided := [found.line for found in verdicts if found.kind == "unknown"]:
        return f"nothing; {not_decided[0]}"
    against = [found.line for found in verdicts if found.kind == "different"]
    against += [verdicts[0].line] * (verdicts[0].kind == "slower")
    if against:
        return f"the default of --cuda-graphs to off: {against[0]}"
    return "nothing: --cuda-graphs auto has the same norms in less time"
