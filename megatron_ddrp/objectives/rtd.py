"""Replaced-token detection as in DeBERTaV3 (He et al., arXiv:2111.09543, section 3; released code).

    loss = MLM(generator) + λ · RTD(discriminator),  λ = `--rtd-weight`, 10 as in the released code

The selected pieces always become [MASK]. `model/rtd.py` has the model and its shared embedding.

Departure: one backward pass and one optimizer step train both models. The released code by default steps the generator
first and the discriminator next. So our E_D uses E_G from before the step.
"""

from __future__ import annotations

from megatron_ddrp.config import ModelConfig
from megatron_ddrp.model.electra import Discriminator
from megatron_ddrp.model.rtd import DisentangledElectra, half_as_deep
from megatron_ddrp.objectives.electra import ReplacedTokenDetection


class DisentangledDetection(ReplacedTokenDetection):
    """ELECTRA's two losses, for models that share an embedding without training it in two directions."""

    mask_share, random_share = 1.0, 0.0
    rtd_weight = 10.0
    exported = "contextual-replaced-token"

    def build(self, config: ModelConfig, checkpoint_activations: bool = False) -> Discriminator:
        return DisentangledElectra(config, self, checkpoint_activations)

    def generator_config(self, config: ModelConfig) -> ModelConfig:
        return half_as_deep(config)
