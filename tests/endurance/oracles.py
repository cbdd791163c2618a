"""How equal each encoding is to its loop twin, in float64: whole models under masked LM, TCD and HCD, padded rows.

A difference is the largest over the three loss sums, or over every parameter's gradient, relative to the largest there.

    python -m tests.endurance.oracles    # print the table of docs/lab/agreement.md
"""

import torch
from torch import Tensor

from megatron_ddrp.config import ENCODINGS
from tests.unit.model.tiny import gradients, some_draws, tiny_batch, tiny_model, twin_sums

BACKBONES = {
    "BERT's": {},
    "modern": {
        **{"layernorm_position": "pre", "first_norm": False, "ffn": "geglu", "bias": False, "num_segments": 0},
        **{"local_attention": 4, "global_every": 2},
    },
}


def gap(ours: Tensor, twins: Tensor) -> float:
    """Return the largest difference relative to the largest value."""
    return float(((ours - twins).abs().max() / twins.abs().max().clamp_min(1e-12)).detach())


def differences(encoding: str, backbone: dict[str, object]) -> tuple[float, float]:
    """Return the worst differences of the loss sums and of the gradients."""
    model, batch = tiny_model(position_encoding=encoding, **backbone), tiny_batch(lengths=(6, 1, 3), seq=6)
    draws = some_draws(batch)
    expected, got = twin_sums(model, batch, draws), model(batch, draws).sums
    wanted, found = gradients(model, expected), gradients(model, got)
    learned = [name for name in wanted if wanted[name].abs().max() > 1e-9]  # key biases under content alone do not
    return gap(got, expected), max(gap(found[name], wanted[name]) for name in learned)


def main() -> None:
    torch.set_num_threads(1)
    names = [f"{backbone} backbone: {what}" for backbone in BACKBONES for what in ("losses", "gradients")]
    print(f"| encoding | {' | '.join(names)} |")
    print("|---" * (1 + len(names)) + "|")
    for encoding in ENCODINGS:
        cells = [f"{value:.0e}" for backbone in BACKBONES.values() for value in differences(encoding, backbone)]
        print(f"| `{encoding}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
