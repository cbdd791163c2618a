"""A user's plug-in: an objective with a number, a rate and a module of its own."""

from torch import nn

from megatron_ddrp.config import Number
from megatron_ddrp.objectives.contract import Objective, Rate, Term


class Counting(Objective):
    """Masked LM, and the length of each sequence ÷ 100 read from its first token by a linear map of its own."""

    options = {"weight": Number(0.5, "[0, inf)")}
    rates = (Rate("mean_length", of="length", per="sequences", label="length"),)

    @property
    def terms(self):
        return (*super().terms, Term("count_loss", "sequences", "count", self.numbers["weight"]))

    def modules(self, hidden_size):
        return nn.Linear(hidden_size, 1)

    def own_sums(self, end):
        lengths = (end.state.inputs.batch.document_ids > 0).sum(-1)
        guesses = end.head.own(end.hidden[:, 0]).squeeze(-1)
        count = (guesses.float() - lengths / 100).pow(2)[lengths > 1].sum()
        return {**super().own_sums(end), "count_loss": count, "length": lengths[lengths > 1].sum()}


OBJECTIVES = {"counting": Counting}
