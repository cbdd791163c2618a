"""`tools/analyze.py attention-maps`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from megatron_ddrp.analysis import figures
from megatron_ddrp.analysis.attention_maps import AttentionMap, measure_maps
from megatron_ddrp.analysis.session import Session, Viewed, describe
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError

DIGITS = 6


def run(arguments: argparse.Namespace) -> None:
    """The mean maps of one layer of one model: JSON, figure, and a line for each."""
    session = Session(arguments, every_checkpoint=False)
    [(viewed, maps, layer)] = [(v, *_measure(arguments, session, v, done)) for v, done in session.views()]
    for panel in maps:
        print(f"{panel.name}: {panel.up:.1%} to the right, {panel.down:.1%} to the left")
    about = describe(viewed)
    panels = [{"name": m.name, "up": m.up, "down": m.down, "map": m.map.round(DIGITS).tolist()} for m in maps]
    title = f"{about['run']}, layer {layer}: mean over {about['sentences']:,} sentences of {len(maps[0].map)} tokens"
    result = about | {"layer": layer, "maps": panels}
    session.write(result, lambda path: figures.draw_maps(maps, title, path))


def _measure(
    arguments: argparse.Namespace, session: Session, viewed: Viewed, done: Callable[[int], object]
) -> tuple[list[AttentionMap], int]:
    """The maps, and the number of the layer."""
    model = viewed.config.model
    layer = model.num_layers if arguments.layer is None else arguments.layer
    for flag, number, largest in (
        ("--layer", layer, model.num_layers),
        *(("--head", head, model.num_attention_heads) for head in arguments.head),
    ):
        if not 1 <= number <= largest:
            raise UserError(f"{flag} is {number}: this model has 1 to {largest}", WRONG_ARGUMENTS)
    viewed.sentences.keep_longest()
    batches = viewed.sentences.batches(arguments.batch_size)
    return measure_maps(viewed.model, batches, session.device, layer, arguments.head, done), layer
