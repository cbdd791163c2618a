"""Random damage to a file, the same for the same seed."""

from __future__ import annotations

import random


def damaged(content: bytes, seed: int) -> bytes:
    """Return `content` with flipped bits, a changed or zeroed stretch, a piece missing, or something behind its end."""
    draw = random.Random(seed)
    place = draw.randrange(len(content))
    length = min(len(content) - place, draw.choice((1, 8, 64, 512)))
    stretch = content[place : place + length]
    changed = {
        "flip": bytes(byte ^ 1 << draw.randrange(8) for byte in stretch),
        "noise": draw.randbytes(length),
        "zeros": bytes(length),
        "gap": b"",
        "twice": stretch + stretch,
    }[draw.choice(("flip", "noise", "zeros", "gap", "twice"))]
    result = content[:place] + changed + content[place + length :]
    if result == content:  # noise that hit what was there, or zeros over zeros
        result = bytes([content[0] ^ 1]) + content[1:]
    return draw.choice((result, result, result, content[:place], content + draw.randbytes(length)))
