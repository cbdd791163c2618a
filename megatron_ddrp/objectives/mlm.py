"""Masked language modelling (Devlin et al., arXiv:1810.04805): cross entropy on the predicted tokens only."""

from torch import Tensor

from megatron_ddrp.model.stages import End
from megatron_ddrp.objectives.contract import Objective, Rate


class MaskedLM(Objective):
    """Masked LM and its accuracy; `--tcd-weight` and `--hcd-weight` add the terms of MTH."""

    rates = (Rate("lm_accuracy", of="lm_correct", per="predicted"),)

    def own_sums(self, end: End) -> dict[str, Tensor]:
        """Return the loss and the number of tokens whose likeliest piece is the right one."""
        logits, labels = end.head.logits(end.predicted), end.state.inputs.predicted_labels
        return {"lm_loss": end.head.lm_sum(logits, labels), "lm_correct": (end.head.best(logits) == labels).sum()}
