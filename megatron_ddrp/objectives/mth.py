"""MTH = MLM + α1·TCD + α2·HCD ("Better Pre-Training by Reducing Representation Confusion", eq. 17–19)."""

from megatron_ddrp.objectives.mlm import MaskedLM


class Mth(MaskedLM):
    """Masked LM with the paper's weights of TCD and HCD (appendix A)."""

    tcd_weight, hcd_weight = 1.0, 0.01
