"""Refusals: a call that ends in one line for its user."""

from collections.abc import Callable
from typing import Any

import pytest

from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError


def refused(words: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> UserError:
    """Check that a call raises a `UserError` of one line that matches `words`, if any, and return the error."""
    with pytest.raises(UserError, match=words or None) as caught:
        call(*arguments, **named)
    assert "\n" not in str(caught.value)
    return caught.value


def wrong_arguments(words: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> UserError:
    """Check that a call is `refused` with the exit code of wrong arguments, and return the error."""
    error = refused(words, call, *arguments, **named)
    assert error.exit_code == WRONG_ARGUMENTS
    return error
