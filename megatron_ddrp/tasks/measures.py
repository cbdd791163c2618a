"""Names and units of the measures of a run, in rows, in tables and in results.json."""

from __future__ import annotations

TRAINING_LOSS = "training masked-LM loss"
LOSS, STEP_SECONDS, TOKENS = "validation masked-LM loss", "seconds of a step", "tokens"
ONSET = "onset"
"""Tokens until a run left the plateau (`run/plateau.py`); of a run that did not, all of its tokens."""
TOKEN_SIMILARITY, HEAD_SIMILARITY, TRIANGLE, GLUE = "f(S)", "f(H)", "triangle share", "GLUE average"
FIRST_COMPONENT = "first component"
MINIMAL_PAIRS = "minimal pairs"
SPACE = {
    "cosine between sentences": "cosine_between",
    "cosine within, mean removed": "centred_cosine_within",
    "IsoScore": "isoscore",
    "effective rank": "effective_rank",
    FIRST_COMPONENT: "first_component",
    "kurtosis on the first component": "first_component_kurtosis",
}
"""Measure of the last layer → key in the JSON of `megatron-ddrp analyze space`."""
PROBE, SHUFFLED, RANDOM, COSINE = (
    "direction probe",
    "direction probe, shuffled",
    "direction probe, shuffled, random weights",
    "direction cosine",
)
"""Measures of direction: a linear probe of left and right on text, on shuffled text, where only positions can tell, on
shuffled text with random weights, and the cosine of the table's rows for offsets +k and −k."""
DIRECTION = {PROBE: (0, "probe"), SHUFFLED: (0, "shuffled"), RANDOM: (1, "shuffled"), COSINE: (0, "near")}
"""Measure → place among the models in the JSON of `megatron-ddrp analyze direction --random-init`, and key."""
INSIDE = (TOKEN_SIMILARITY, HEAD_SIMILARITY, TRIANGLE, *SPACE, *DIRECTION)
"""Measures of the tables about the inside of the models; all others are scores."""
NO_MEASURES = (TOKENS, STEP_SECONDS)
"""Values that stand in no table. Runs share the machine, so their steps are no measure of cost."""
SMALLER_IS_BETTER = (LOSS, ONSET, TOKEN_SIMILARITY, HEAD_SIMILARITY, FIRST_COMPONENT)
_SHOWN = {
    **dict.fromkeys((LOSS, TOKEN_SIMILARITY, HEAD_SIMILARITY, *SPACE), (1, 4)),
    **dict.fromkeys(DIRECTION, (1, 3)),
    "effective rank": (1, 1),
    ONSET: (1e-6, 2),
    TRIANGLE: (100, 1),
}
"""Measure → factor and digits; other measures are shares in points."""


def format_value(measure: str, value: float, sign: str = "") -> str:
    """Return a value of a measure; with `sign` "+" a difference."""
    factor, digits = _SHOWN.get(measure, (100, 2))
    return f"{factor * value:{sign}.{digits}f}"


def factor_of(measure: str) -> float:
    """Return the factor with which a measure is shown."""
    return _SHOWN.get(measure, (100, 2))[0]


def unit_of(measure: str) -> str:
    """Return the unit of a gain in brackets, with a space before it; empty for one without a unit."""
    units = {LOSS: " [nats]", TRAINING_LOSS: " [nats]", ONSET: " [million tokens]"}
    return units.get(measure, " [points]" if factor_of(measure) == 100 else "")
