"""The file of `--config`: flat YAML, YAML nested by concern, or the config.json that a run wrote."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ddrp.config.option import flag
from megatron_ddrp.config.reading import Place, load_plugins, load_values, options_of, read_settings
from megatron_ddrp.config.run import Config, concerns
from megatron_ddrp.config.translation import HINTS
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import parse_json

PLUGINS = "plugin"
"""Key with the files of `--plugin`."""
OF_THE_RUN = ("save", "load", "tensorboard_dir")
"""Settings of a run's config.json that belong to that run: another one has folders of its own."""
OPTIONS = "objective_options"
"""Setting whose meaning depends on the objective; a run stores the numbers that its objective declares."""

WARMUP_STEPS, WARMUP_SHARE = "lr_warmup_iters", "lr_warmup_fraction"
_OTHER_WARMUP = {WARMUP_STEPS: WARMUP_SHARE, WARMUP_SHARE: WARMUP_STEPS}
"""Length of the warm-up → the other setting of it; the steps win where a run stores both."""


class FromFile(NamedTuple):
    """Settings of a `--config` file."""

    values: dict[str, Any]
    """Setting → checked value."""
    remark: str = ""
    """A line for the user, if any."""


def read_config(path: str) -> FromFile:
    """Return the settings of a file, after loading its plug-ins.

    Raises `UserError` for what cannot be read, by file and key.
    """
    place = Place(f"--config {path}")
    content = _load(Path(path), place)
    if isinstance(content, Mapping) and PLUGINS in content:
        load_plugins(content[PLUGINS], place.at(PLUGINS), Path(path), _is_of_a_run(content))
        content = {key: value for key, value in content.items() if key != PLUGINS}
    if not _is_nested(content):
        values = read_settings(options_of(*concerns().values()), content, place, HINTS)
        _refuse_two_warmups(values, place)
        return FromFile(values)
    is_of_a_run = _is_of_a_run(content)
    values = {}
    for concern, given in content.items():
        if concern not in concerns():
            raise place.error(f"unknown section {concern!r}; expected {', '.join(concerns())}")
        values |= _read_concern(concern, given or {}, place.at(concern), is_of_a_run)
    if not is_of_a_run:
        _refuse_two_warmups(values, place)
        return FromFile(values)
    if WARMUP_STEPS in values:
        values.pop(WARMUP_SHARE, None)  # stored beside the steps, without effect
    left_out = [flag(name) for name in OF_THE_RUN if values.pop(name, None) is not None]
    remark = f"--config {path}: {', '.join(left_out)} of that run not taken; give your own" if left_out else ""
    return FromFile(drop_derived(values), remark)


def _load(path: Path, place: Place) -> Any:
    """Return the content of a file; JSON by its name, since YAML reads 1e-06 as text."""
    if path.suffix == ".json":
        return load_values(path, place, parse_json)
    content = load_values(path, place)
    if content is None and not path.stat().st_size:  # cut off; comments alone are a choice
        raise place.error("empty; write settings, or leave --config out")
    return content or {}


def _is_nested(content: Any) -> bool:
    """Return whether a file has its settings by concern."""
    return isinstance(content, Mapping) and any(isinstance(value, Mapping) for value in content.values())


def _is_of_a_run(content: Mapping[str, Any]) -> bool:
    """Return whether a run wrote the settings: it stores the size of the vocabulary, which no flag sets."""
    model = content.get("model")
    return isinstance(model, Mapping) and "vocab_size" in model


def _read_concern(concern: str, given: Any, place: Place, is_of_a_run: bool) -> dict[str, Any]:
    """Return the settings of one section; those without a flag are left out."""
    section = concerns()[concern]
    options = options_of(section)
    if is_of_a_run and isinstance(given, Mapping):
        without_flag = {f.name for f in dataclasses.fields(section)} - set(options)
        given = {name: value for name, value in given.items() if name not in without_flag and value is not None}
    return read_settings(options, given, place, HINTS)


def _refuse_two_warmups(values: Mapping[str, Any], place: Place) -> None:
    """Refuse a file with both lengths of the warm-up, as on the command line."""
    if WARMUP_SHARE in values and values.get(WARMUP_STEPS) is not None:
        raise place.error(f"{WARMUP_STEPS} and {WARMUP_SHARE} exclude each other: give one of them")


def drop_derived(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that decide all of `values`: those that follow from the others go.

    A run stores every setting resolved. Defaults that follow from another setting, such as the weights of the
    objective, must follow again where a flag changes that one. A fixed default stays, as if it had been given: nothing
    that decides after `--config` may replace it.
    """
    whole, left, options = config_of(values), dict(values), options_of(*concerns().values())
    for name in (name for name in values if options[name].default is None or name == OPTIONS):
        rest = {other: value for other, value in left.items() if other != name}
        with contextlib.suppress(UserError):  # the others do not stand without it
            left = rest if config_of(rest) == whole else left
    return left


def under_flags(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a file and of the flags.

    Flags win; a warm-up in steps also wins over the file's share, and a share over its steps. The file's options of
    another objective are left out.
    """
    left_out = {other for name, other in _OTHER_WARMUP.items() if name in given}
    if "objective" in values and given.get("objective", values["objective"]) != values["objective"]:
        left_out.add(OPTIONS)
    return {name: value for name, value in values.items() if name not in left_out} | dict(given)


def config_of(values: Mapping[str, Any]) -> Config:
    """Return the configuration with these settings, by name; the others have their defaults."""
    return Config(
        **{
            concern: section(**{f.name: values[f.name] for f in dataclasses.fields(section) if f.name in values})
            for concern, section in concerns().items()
        }
    )
