"""ELECTRA (Clark et al., arXiv:2003.10555): masked LM trains a generator, replaced-token detection a discriminator.

    loss = MLM(generator) + 50 · RTD(discriminator)

`model/electra.py` has the model, `model/heads.py` the formulas of sampling and detection.
"""

from __future__ import annotations

from torch import Tensor

from megatron_ddrp.config import ModelConfig
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.model.electra import Discriminator, Electra, OfGenerator, SampleKeys, generator_config
from megatron_ddrp.model.heads import rtd_sums
from megatron_ddrp.model.stages import End
from megatron_ddrp.objectives.contract import Objective, Rate, Term, sample_keys


class ReplacedTokenDetection(Objective):
    """The generator's masked LM and the discriminator's detection of replaced tokens."""

    mask_share, random_share = 0.85, 0.0
    rates = (
        Rate("generator_accuracy", of="generator_correct", per="predicted"),
        Rate("rtd_accuracy", of="rtd_correct", per="tokens", label="rtd accuracy"),
        Rate("rtd_recall", of="replaced_found", per="replaced", label="recall"),
        Rate("replaced_share", of="replaced", per="tokens"),
    )
    generates = True
    exported = "replaced-token"
    left_out = (*Objective.left_out, "generator.")
    travelling = (SampleKeys, OfGenerator)

    @property
    def terms(self) -> tuple[Term, ...]:
        return (*super().terms, Term("rtd_loss", "tokens", "rtd", self.config.rtd_weight or 0.0))

    def build(self, config: ModelConfig, checkpoint_activations: bool = False) -> Discriminator:
        return Electra(config, self.config, self, checkpoint_activations)

    def generator_config(self, config: ModelConfig) -> ModelConfig:
        return generator_config(config, self.config)

    def draw_own(self, batch: Batch, seed: int, step: int) -> SampleKeys:
        return SampleKeys(sample_keys(batch.sequence_ids, batch.position_ids, seed, step))

    def own_sums(self, end: End) -> dict[str, Tensor]:
        generator = end.state.own
        inputs = end.state.inputs
        logits = end.head.logits(end.hidden, inputs.layout.runs)
        loss, correct, replaced, found = rtd_sums(logits, inputs.batch.labels)
        return {
            "lm_loss": generator.lm,
            "generator_correct": generator.correct,
            "rtd_loss": loss,
            "rtd_correct": correct,
            "replaced": replaced,
            "replaced_found": found,
        }
