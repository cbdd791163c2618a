"""Masked language modelling (Devlin et al., arXiv:1810.04805): cross entropy on the predicted tokens only."""

from megatron_ddrp.objectives.contract import Objective


class MaskedLM(Objective):
    """Masked LM; `--tcd-weight` and `--hcd-weight` add the terms of MTH."""
