"""The table of objectives has every objective, with the weights of its class."""

import re
from pathlib import Path

from megatron_ddrp.config import OBJECTIVES, objective_class

PAGE = Path(__file__).parents[2] / "docs" / "objectives.md"


def test_every_objective_has_its_row_with_its_weights():
    rows = dict(re.findall(r"^\| `([a-z]\S+)` \| (.+?) \| .+ \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert sorted(rows) == sorted(OBJECTIVES)
    for name, formula in rows.items():
        own = objective_class(name)
        weights = {"TCD": own.tcd_weight, "HCD": own.hcd_weight, "RTD": own.rtd_weight * own.generates}
        for term, weight in weights.items():
            found = re.search(rf"(?:([\d.]+)·)?{term}", formula)
            assert weight == (float(found[1] or 1) if found else 0), (name, term)
