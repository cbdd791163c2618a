"""Settings of the objective: its terms, their weights and samples, masking, and notes of rare words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ddrp.config.model import ModelConfig
from megatron_ddrp.config.option import (
    COUNT,
    NOT_NEGATIVE,
    Number,
    Section,
    as_tuple,
    as_words,
    flag,
    option,
    own_numbers,
    refuse,
)
from megatron_ddrp.config.registry import MASKINGS, OBJECTIVES, objective_class
from megatron_ddrp.config.schedules import MaskRates, read_rates


@dataclass(frozen=True)
class ObjectiveConfig(Section):
    """Objective"""

    objective: str = option(
        "mth",
        "mlm: masked LM; mth: masked LM + TCD + HCD, the paper's; electra: a generator's masked LM + replaced-token "
        "detection by the model itself; token-contrast: masked LM + SimCTG's contrast of tokens; rtd: DeBERTaV3's "
        "replaced-token detection, whose gradient does not reach the generator's embedding; head-disagreement: masked "
        "LM + the disagreement of all heads of a layer",
        choices=OBJECTIVES,
    )
    objective_options: tuple[str, ...] = option(
        (),
        "the objective's own numbers, such as margin=0.5 (default: those that the objective declares)",
        nargs="+",
        metavar="NAME=NUMBER",
    )
    tcd_weight: float | None = option(
        None,
        "factor of TCD, the mean cosine between token representations, in the loss; alpha_1 in the paper's total loss "
        "L = L_MLM + alpha_1 L_TCD + alpha_2 L_HCD (eq. 19) (default: 1.0 under mth, else 0)",
        within=NOT_NEGATIVE,
    )
    hcd_weight: float | None = option(
        None,
        "factor of HCD, the mean cosine between the attention logits of heads, in the loss; alpha_2 in the paper "
        "(default: 0.01 under mth, else 0)",
        within=NOT_NEGATIVE,
    )
    tcd_tokens: int = option(
        50,
        "tokens that TCD samples per sequence (n' in the paper); 0 = all tokens, in closed form",
        within="[0, 2147483648)",
    )
    tcd_squared: bool = option(
        False,
        "TCD is the mean squared cosine, which two opposite poles of tokens do not lower, as they do the mean cosine "
        "(ours)",
    )
    hcd_heads: int = option(
        2,
        "heads that HCD samples per layer and step (m' in the paper); 0 = all heads, in closed form",
        within="[0, 2147483648)",
    )
    mask_prob: str | float = option(
        0.15,
        "share of the tokens of a sequence that training predicts; START:END changes the share in equal steps over "
        "--train-iters: 0.3:0.15 gained 0.46 points of GLUE over a constant 0.15 at the base size (arXiv:2305.15096; "
        "GPT-BERT, arXiv:2410.24159), ModernBERT keeps 0.3 (arXiv:2412.13663)",
        within="(0, 1)",
        read=read_rates,
        metavar="X[:Y]",
    )
    eval_mask_prob: float = option(
        0.15,
        "the same for validation, independent of --mask-prob, so that runs with different rates can be compared",
        within="(0, 1)",
    )
    masking: str = option(
        "whole-word",
        "unit of masking: whole words, single tokens, or n-grams of up to three words with p(n) proportional to 1/n",
        choices=MASKINGS,
    )
    rtd_weight: float | None = option(
        None, "factor of replaced-token detection in the loss (default: 50; under rtd 10)", within=NOT_NEGATIVE
    )
    generator_size: float = option(
        1 / 3,
        "heads of ELECTRA's generator as a share of the model's heads, rounded; its width follows (default: a third)",
        within="(0, 1]",
    )
    generator_embeddings: str = "shared"
    """Source of the generator's embeddings in ELECTRA: `shared`, all from the discriminator with their LayerNorm;
    `own`, absolute positions and LayerNorm of its own (only in older checkpoints)."""
    notes: bool = option(
        False, "Taking Notes on the Fly (arXiv:2008.01466): blend notes of past contexts into the input at rare words"
    )
    notes_min_count: int = option(100, "fewest occurrences of a rare word in the training text", within=COUNT)
    notes_max_count: int = option(500, "most occurrences of a rare word in the training text", within=COUNT)
    notes_window: int = option(
        16,
        "tokens on either side of a rare word whose hidden states make its note (k in the paper)",
        within="[0, 2147483648)",
    )
    notes_decay: float = option(
        0.1, "share of the new note when a word occurs again (gamma in the paper)", within="[0, 1]"
    )
    notes_mix: float = option(
        0.5, "share of the note in the input (lambda in the paper); 0 = plain training", within="[0, 1]"
    )
    notes_dtype: str = option("fp32", "type of the dictionary's rows in host memory", choices=("fp32", "bf16", "fp16"))

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "mask_prob", self.mask_rates.written)  # equal rates are stored alike
        object.__setattr__(self, "objective_options", as_tuple(self.objective_options))
        chosen = objective_class(self.objective)
        for name in ("tcd_weight", "hcd_weight", "rtd_weight"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(chosen, name))
        numbers = self.numbers(chosen.options)  # stored with the defaults, so that a changed default shows
        object.__setattr__(self, "objective_options", as_words(numbers))
        for name in ("tcd_tokens", "hcd_heads"):
            if getattr(self, name) == 1:
                refuse(f"{flag(name)} is {getattr(self, name)}: a cosine needs two; give 2 or more, or 0 for all")
        if self.notes_min_count > self.notes_max_count:
            refuse(
                f"--notes-min-count {self.notes_min_count} is above --notes-max-count {self.notes_max_count}: give a "
                "smaller one, or a larger --notes-max-count"
            )

    @property
    def mask_rates(self) -> MaskRates:
        """Masking rate of training at every step."""
        return MaskRates.parse(self.mask_prob)

    @property
    def generates(self) -> bool:
        """True if a generator replaces tokens and the model itself detects them (ELECTRA)."""
        return objective_class(self.objective).generates

    def generator_config(self, model: ModelConfig) -> ModelConfig | None:
        """Return the sizes of the generator trained beside a model; None without one."""
        return objective_class(self.objective)(self).generator_config(model)

    def generator_heads(self, num_attention_heads: int) -> int:
        """Return the number of heads of ELECTRA's generator: its share, rounded (halves to even), and at least one."""
        return max(1, round(num_attention_heads * self.generator_size))

    def cosine_heads(self, num_attention_heads: int) -> int:
        """Return the number of heads per layer whose logits HCD compares; 0 without HCD."""
        return (self.hcd_heads or num_attention_heads) if self.hcd_weight else 0

    @property
    def mask_shares(self) -> dict[str, float]:
        """Shares of the selected pieces that become [MASK] and a random piece, as arguments of a `Masker`."""
        chosen = objective_class(self.objective)
        return {"mask_share": chosen.mask_share, "random_share": chosen.random_share}

    def numbers(self, declared: Mapping[str, Number]) -> dict[str, float]:
        """Return the numbers that an objective declares, with `--objective-options` in place of their defaults."""
        return own_numbers(f"--objective {self.objective}", "objective_options", self.objective_options, declared)

    @property
    def notes_share(self) -> float:
        """Share λ of the note in the input; 0 without `--notes`."""
        return self.notes_mix if self.notes else 0.0
