"""A plan from its YAML file, checked before anything runs.

Flags of `pretrain_bert.py` stand under `model`, `training` and a model's own `flags` as they do on a command line,
without the dashes in front; those that the plan decides itself (seed, steps, folders, data) are refused there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_ddrp.config import ENCODINGS, OBJECTIVES
from megatron_ddrp.tasks.compare.flags import TOKENIZERS, check_flags
from megatron_ddrp.tasks.compare.plan import NUM_SEEDS, Analyses, Budget, CorpusPlan, Expected, GluePlan, Model, Plan
from megatron_ddrp.tasks.compare.reading import (
    Section,
    above_zero,
    at_least,
    list_of,
    one_of,
    read_mapping,
    text,
    yes_or_no,
)
from megatron_ddrp.tasks.glue.runs import GRIDS
from megatron_ddrp.tasks.glue.tasks import PAPER_TASKS, TASKS

FIRST_SEED = 1234
BUDGETS = ("steps", "minutes", "tokens")
MTH_WEIGHTS = (1.0, 0.01)
"""Weights of TCD and HCD that `--objective mth` means."""

KEYS = (
    "models", "seeds", "budget", "corpus", "model", "training", "glue", "analyses", "half_budget", "alphas",
    "checkpoints", "launcher", "workers", "expected",
)  # fmt: skip


def read_plan(file: Path, given: Mapping[str, Any] | None = None) -> Plan:
    """Read and check a plan; `given` are values of the command line that replace the file's, see `_replaced`.

    Raises:
        UserError: one line with the file, the key and what is allowed.
    """
    top = Section(file, "", _replaced(read_mapping(file), given or {}), KEYS)
    models = _models(top)
    names = one_of(*(model.name for model in models))
    seeds = _seeds(top)
    plan = Plan(
        file=file,
        models=models,
        seeds=seeds,
        budget=_budget(top),
        corpus=_corpus(top),
        flags=check_flags(top, "model") + check_flags(top, "training"),
        glue=_glue(top, names),
        analyses=_analyses(top),
        half_budget=top.take("half_budget", list_of(names, 0), ()),
        grid=(),
        grid_seeds=(),
        checkpoints=top.take("checkpoints", at_least(1), 4),
        launcher=tuple(top.take("launcher", text, "python").split()),
        workers=top.take("workers", at_least(1), 1),
        expected=_expected(top),
    )
    if plan.workers > 1 and plan.launcher != ("python",):
        raise top.error("workers", f"{plan.workers} with a launcher of its own ranks: expected 1")
    return _with_grid(plan, top, names)


def _replaced(values: Any, given: Mapping[str, Any]) -> Any:
    """The file's values with those of the command line in their places."""
    if not isinstance(values, Mapping):
        return values
    values = dict(values)
    for path, value in given.items():
        if value is None:
            continue
        key, _, inner = path.partition(".")
        if value is REMOVED:
            values.pop(key, None)
        elif not inner:
            values[key] = value
        else:
            within = dict(values[key]) if isinstance(values.get(key), Mapping) else {}
            values[key] = within | {inner: value}
    if given.get("corpus.data_path"):
        values["corpus"].pop("input", None)
        values["corpus"].pop("vocab_size", None)
    if given.get("corpus.input"):
        values["corpus"].pop("data_path", None)
    return values


REMOVED = object()
"""In place of a value of the command line: the whole section is left out."""


def _models(top: Section) -> tuple[Model, ...]:
    models: list[Model] = []
    for number, value in enumerate(top.take("models", _mappings)):
        entry = Section(top.file, f"models[{number + 1}]", value, ("name", "encoding", "objective", "flags"))
        model = Model(
            entry.take("name", text),
            entry.take("encoding", one_of(*ENCODINGS)),
            entry.take("objective", one_of(*OBJECTIVES)),
            check_flags(entry, "flags"),
        )
        if any(model.name == other.name for other in models):
            raise entry.error("name", f"{model.name!r} is the name of two models: expected names that differ")
        if any(replace(model, name="") == replace(other, name="") for other in models):
            raise entry.error("", f"{model.name!r} is the same as a model before it")
        models.append(model)
    return tuple(models)


def _mappings(value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError("a list of models, each with name, encoding and objective")
    return value


def _seeds(top: Section) -> tuple[int, ...]:
    def check(value: Any) -> tuple[int, ...]:
        if isinstance(value, list):
            return list_of(at_least(0))(value)
        return tuple(range(FIRST_SEED, FIRST_SEED + at_least(1)(value)))

    try:
        return top.take("seeds", check, tuple(range(FIRST_SEED, FIRST_SEED + NUM_SEEDS)))
    except ValueError:
        raise top.error("seeds", "expected how many, or a list of different seeds") from None


def _budget(top: Section) -> Budget:
    section = top.section("budget", BUDGETS)
    kinds = [kind for kind in BUDGETS if kind in section]
    if len(kinds) != 1:
        raise top.error("budget", f"{len(kinds)} of {', '.join(BUDGETS)} given: expected exactly one")
    check: Any = above_zero if kinds[0] == "minutes" else at_least(2)
    return Budget(kinds[0], float(section.take(kinds[0], check)))


def _corpus(top: Section) -> CorpusPlan:
    keys = ("input", "data_path", "vocab_file", "vocab_size", "tokenizer_type", "workers")
    section = top.section("corpus", keys)
    if ("input" in section) == ("data_path" in section):
        raise section.error("", "expected either input (texts) or data_path (prefixes of indexed datasets)")
    if "data_path" in section and "vocab_file" not in section:
        raise section.error("vocab_file", "missing: data_path needs the vocabulary that it was made with")
    if ("vocab_size" in section) == ("vocab_file" in section):
        raise section.error("", "expected either vocab_file or vocab_size (of a vocabulary that is built)")
    return CorpusPlan(
        section.take("input", list_of(text), ()),
        section.take("data_path", list_of(text), ()),
        section.take("vocab_file", text, None),
        section.take("vocab_size", at_least(100), None),
        section.take("tokenizer_type", one_of(*TOKENIZERS), TOKENIZERS[0]),
        section.take("workers", at_least(1), 1),
    )


def _glue(top: Section, names: Any) -> GluePlan | None:
    if "glue" not in top:
        return None
    checks: dict[str, Any] = {
        "grid": one_of(*GRIDS),
        "batch_size": list_of(at_least(1)),
        "lr": list_of(above_zero),
        "epochs": list_of(at_least(1)),
        "seeds": at_least(1),
        "max_train_examples": at_least(1),
        "max_seq_length": at_least(8),
        "micro_batch_size": at_least(1),
        "bf16": yes_or_no,
    }
    section = top.section("glue", ("data_dir", "tasks", "checkpoints_of", *checks))
    flags: list[tuple[str, tuple[str, ...]]] = []
    for key, check in checks.items():
        value = section.take(key, check, {"grid": "quick", "seeds": 1}.get(key))
        if value is None or value is False:
            continue
        words = () if value is True else tuple(f"{v:g}" if isinstance(v, float) else str(v) for v in _several(value))
        flags.append((key.replace("_", "-"), words))
    return GluePlan(
        section.take("data_dir", text),
        section.take("tasks", list_of(one_of(*TASKS)), PAPER_TASKS),
        tuple(flags),
        section.take("checkpoints_of", list_of(names, 0), ()),
    )


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _analyses(top: Section) -> Analyses:
    names = ("self-similarity", "triangle", "attention-maps")
    section = top.section("analyses", names)
    return Analyses(*(section.take(name, at_least(0), 0) for name in names))


def _expected(top: Section) -> Expected:
    names = ("step_seconds", "glue_minutes")
    section = top.section("expected", names)
    return Expected(*(section.take(name, above_zero, None) for name in names))


def _with_grid(plan: Plan, top: Section, names: Any) -> Plan:
    """The plan with the models of its alpha grid; a point that is a model of the plan already is not repeated."""
    section = top.section("alphas", ("models", "values", "seeds"))
    if "models" not in section and "values" not in section:
        return plan
    chosen = [plan.model(name) for name in section.take("models", list_of(names))]
    values = section.take("values", list_of(above_zero))
    count = section.take("seeds", at_least(1), len(plan.seeds))
    grid = []
    for model in chosen:
        if model.objective != "mth":
            raise section.error("models", f"{model.name!r} is not of objective mth: it has no weights")
        for tcd in values:
            for hcd in values:
                if (tcd, hcd) == MTH_WEIGHTS and not model.flags:
                    continue
                flags = (*model.flags, ("tcd-weight", (f"{tcd:g}",)), ("hcd-weight", (f"{hcd:g}",)))
                grid.append(replace(model, name=f"{model.name} α1={tcd:g} α2={hcd:g}", flags=flags, weights=(tcd, hcd)))
    return replace(plan, grid=tuple(grid), grid_seeds=plan.seeds[:count])
