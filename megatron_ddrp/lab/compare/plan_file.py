"""Reading of plans from YAML files. A file with `rungs` has several plans, one per rung, that is per budget.

An entry of `rungs` holds the keys in which its plan differs from the rest of the file: at least `budget`, usually
`seeds`, and under `models` the names of the models that it trains (default: all).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_ddrp.config.reading import Place, load_plugins, load_values, make_section, options_of, read_settings
from megatron_ddrp.lab.compare.plan import Plan

RUNGS = "rungs"
_GONE = {"expected": "the key is gone, leave it out: the time left comes from finished jobs"}
"""Key that plans had in earlier versions → what to do."""


def read_plans(file: Path, given: Mapping[str, Any] | None = None) -> list[Plan]:
    """Read and check the plans of a file: one without `rungs`, otherwise one per entry.

    `given` has values of the command line by dotted key; they replace the file's values.

    Raises:
        UserError: one line with the file, the key and the allowed values.
    """
    place = Place(str(file))
    if not file.is_file():
        raise place.error("no such file; give a YAML plan: a clone of the repository has some in examples/compare/")
    values = load_values(file, place)
    if not isinstance(values, Mapping) or RUNGS not in values:
        plan = _plan(_replaced(values, given or {}), place, file)
        if plan.check:
            raise place.at("check").error(f"only for an entry of {RUNGS}; leave it out")
        return [replace(plan, file=file)]
    rungs, common = values[RUNGS], {key: value for key, value in values.items() if key != RUNGS}
    if not isinstance(rungs, list) or not rungs:
        raise place.at(RUNGS).error("expected a list of rungs, such as [{budget: {tokens: 4000000}, seeds: 4}]")
    plans = []
    for number, rung in enumerate(rungs, 1):
        at = place.at(f"{RUNGS}[{number}]")
        plans.append(replace(_plan(_replaced(_rung(common, rung, at), given or {}), at, file), file=file))
    return plans


def _plan(values: Any, place: Place, file: Path) -> Plan:
    """Return a plan from its values, after loading its plug-ins, whose names its models may have."""
    if isinstance(values, Mapping) and "plugins" in values:
        load_plugins(values["plugins"], place.at("plugins"), file)
    return make_section(Plan, read_settings(options_of(Plan), values, place, _GONE), place)


def _rung(common: Mapping[str, Any], rung: Any, place: Place) -> dict[str, Any]:
    """Return the values of a rung's plan: the common ones with the rung's own in their place."""
    if not isinstance(rung, Mapping):
        raise place.error(f"got {rung!r}, expected keys of a plan, such as {{budget: {{tokens: 4000000}}}}")
    settings = {str(key).replace("-", "_"): value for key, value in (*common.items(), *rung.items())}
    models = settings.get("models")
    if "models" in rung and isinstance(models, list) and isinstance(common.get("models"), Sequence):
        settings["models"] = _named(models, common["models"], place.at("models"))
    return settings


def _named(names: list[Any], models: Sequence[Any], place: Place) -> list[Any]:
    """Return the models with these names."""
    by_name = {model.get("name"): model for model in models if isinstance(model, Mapping)}
    for name in names:
        if isinstance(name, (Mapping, list)) or name not in by_name:
            raise place.error(f"got {name!r}, expected names of models: {', '.join(map(str, by_name))}")
    return [by_name[name] for name in names]


def _replaced(values: Any, given: Mapping[str, Any]) -> Any:
    """Return the file's values with those of `given` replaced; None removes a value."""
    if not isinstance(values, Mapping):
        return values
    found = {key: dict(value) if isinstance(value, Mapping) else value for key, value in values.items()}
    for path, value in given.items():
        key, _, inner = path.partition(".")
        key = next((name for name in found if str(name).replace("-", "_") == key), key)
        if not inner:
            found[key] = value
        elif isinstance(found.setdefault(key, {}), dict):
            found[key][inner] = value
    for section in found.values():
        for key in [key for key, value in section.items() if value is None] if isinstance(section, dict) else ():
            del section[key]
    return {key: value for key, value in found.items() if value is not None}
