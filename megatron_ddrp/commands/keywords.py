"""Keywords of Python functions from the options of commands, so that `help()` and editors list them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import MISSING
from typing import Any, TypeVar

from megatron_ddrp.commands import COMMANDS
from megatron_ddrp.config.reading import options_of

Function = TypeVar("Function", bound=Callable[..., Any])


def takes_flags_of(name: str) -> Callable[[Function], Function]:
    """Return a decorator that gives a function the signature of a command's flags, and its docstring their help.

    The command's module lists its dataclasses of options as `SECTIONS`.
    """
    options = options_of(*importlib.import_module(COMMANDS[name].module).SECTIONS)

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        flags = [
            inspect.Parameter(
                keyword,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if option.default is MISSING else option.default,
                annotation=option.hint,
            )
            for keyword, option in options.items()
            if keyword not in signature.parameters
        ]
        function.__signature__ = signature.replace(parameters=[*own, *flags])  # type: ignore[attr-defined]
        words = "\n".join(f"    {flag.name}: {options[flag.name].rules['help']}" for flag in flags)
        function.__doc__ = f"{inspect.getdoc(function)}\n\nKeywords, the flags of `megatron-ddrp {name}`:\n{words}\n"
        return function

    return decorate
