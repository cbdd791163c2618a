"""The 12 phenomena of BLiMP's 67 paradigms (Warstadt et al., 2020), from the beginnings of their names."""

from __future__ import annotations

_BEGINNINGS = {
    "anaphor agreement": ("anaphor_",),
    "argument structure": (
        "animate_subject_", "causative", "drop_argument", "inchoative", "intransitive", "passive_", "transitive",
    ),
    "binding": ("principle_A_",),
    "control and raising": (
        "existential_there_object_", "existential_there_subject_", "expletive_it_", "tough_vs_raising_",
    ),
    "determiner-noun agreement": ("determiner_noun_agreement_",),
    "ellipsis": ("ellipsis_",),
    "filler-gap": ("wh_questions_", "wh_vs_that_"),
    "irregular forms": ("irregular_past_participle_",),
    "island effects": (
        "adjunct_island", "complex_NP_island", "coordinate_structure_", "left_branch_island_", "sentential_subject_island",
        "wh_island",
    ),
    "NPI licensing": ("matrix_question_npi_", "npi_present_", "only_npi_", "sentential_negation_npi_"),
    "quantifiers": ("existential_there_quantifiers_", "superlative_quantifiers_"),
    "subject-verb agreement": ("distractor_agreement_", "irregular_plural_", "regular_plural_"),
}  # fmt: skip


def phenomenon(uid: str) -> str | None:
    """Return the phenomenon of a paradigm; None for a paradigm that BLiMP lacks."""
    return next((name for name, beginnings in _BEGINNINGS.items() if uid.startswith(beginnings)), None)
