"""A user's plug-in: an encoding with a learned number for all heads and fixed slopes by head."""

import torch
from torch import nn

from megatron_ddrp.model.positions import PositionEncoding, PositionTerms


class Slopes(PositionEncoding):
    """B[h,i,j] = gain · −2^−(h+1) · min(|i − j|, r_s), one learned gain."""

    is_relative = True
    relative_distance = 16
    by_head = {"slopes": 0}

    def __init__(self, config):
        super().__init__(config)
        self.reach = config.relative_distance
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("slopes", -(2.0 ** -torch.arange(1.0, config.num_attention_heads + 1)))

    def forward(self, position_ids):
        distances = torch.arange(-self.reach, self.reach + 1, device=self.slopes.device).abs()
        return (self.gain * self.slopes.unsqueeze(1) * distances,)

    @staticmethod
    def terms(config, tensors):
        reach = config.relative_distance
        return PositionTerms(config.head_dim**-0.5, offset_bias=tensors[0], lowest=-reach, highest=reach)


ENCODINGS = {"slopes": Slopes}
