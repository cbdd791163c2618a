"""The table of position encodings says what the classes say."""

import re
from pathlib import Path

from megatron_ddrp.config import ENCODINGS, ModelConfig, encoding_class
from megatron_ddrp.model import count_parameters, on_meta_device

PAGE = Path(__file__).parents[2] / "docs" / "encodings.md"


def encoding_rows():
    """Return name → (parameters, words on `--relative-distance`), as docs/encodings.md has them."""
    text = PAGE.read_text(encoding="utf-8")
    return {
        name: (int(parameters.replace(",", "")), distance)
        for name, parameters, distance in re.findall(r"^\| `(.+?)` \| .+ \| ([\d,]+) \| (.+?) \| .+ \|$", text, re.M)
    }


def test_every_encoding_has_its_row_with_its_parameters_and_its_distance():
    rows = encoding_rows()
    assert list(rows) == list(ENCODINGS)
    for name, (parameters, distance) in rows.items():
        assert count_parameters(on_meta_device(ModelConfig(position_encoding=name)))[1] == parameters, name
        own = encoding_class(name)
        unread = "refused" if own.relative_distance is None else "unused"
        expected = str(own.relative_distance) if own.is_relative and own.relative_distance else unread
        assert distance.split(",")[0] == expected, name
