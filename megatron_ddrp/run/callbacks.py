"""Callbacks of a training run: code that sees its rows and checkpoints, and may add numbers to a row or stop the run.

TensorBoard and Weights & Biases are callbacks. Callbacks act on rank 0 only, so they make no collective calls.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ddrp.config import Config, LoggingConfig
from megatron_ddrp.config.reading import as_number
from megatron_ddrp.config.registry import CALLBACKS
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError, code_of_others, need_packages, refusals_as_user_errors
from megatron_ddrp.run.launch import BY_CALLBACK, StopRequests

if TYPE_CHECKING:
    from torch import nn


class StopTraining(Exception):
    """Raised by a callback: the run saves a checkpoint and stops, as after a signal."""


class Callback:
    """Base of callbacks. Any other error than `StopTraining` ends the run and reaches the caller unchanged."""

    def on_start(self, config: Config, iteration: int, model: nn.Module) -> None:
        """Called before the first step, with the steps done so far.

        The model is for reading. With ZeRO 3, tensor or pipeline parallelism it has this rank's part of the weights.
        """

    def columns(self) -> Mapping[str, float]:
        """Return numbers by name that the row of a logged step gets beside its own."""
        return {}

    def on_step(self, row: Mapping[str, Any]) -> None:
        """Called after every logged step, with the row that metrics.jsonl gets."""

    def on_validation(self, row: Mapping[str, Any]) -> None:
        """Called after every validation, with the row that metrics.jsonl gets."""

    def on_checkpoint(self, path: Path) -> None:
        """Called after a checkpoint was saved, with its folder."""

    def on_end(self) -> None:
        """Called at the end, also after an error, if `on_start` was called."""


class Callbacks:
    """The callbacks of one run; an empty list on other ranks than rank 0."""

    def __init__(self, members: Sequence[Callback] = (), requests: StopRequests | None = None) -> None:
        self._members, self._requests = members, requests
        self._started: list[Callback] = []

    def start(self, config: Config, iteration: int, model: nn.Module) -> None:
        """Start every callback."""
        for callback in self._members:
            self._started.append(callback)
            self._tell(callback, "on_start", config, iteration, model)

    def tell(self, event: str, *given: Any) -> None:
        """Call one method of every callback; each gets a copy of a row, which it may change."""
        for callback in self._started:
            self._tell(callback, event, *(dict(each) if isinstance(each, dict) else each for each in given))

    def columns(self, row: Mapping[str, Any]) -> dict[str, float]:
        """Return the columns of all callbacks for a row. Raises `UserError` for a name that the row has already."""
        own: dict[str, float] = {}
        for callback in self._started:
            given = self._tell(callback, "columns")
            for name, value in given.items() if isinstance(given, Mapping) else [(given, None)] * (given is not None):
                number = as_number(value)
                if not isinstance(name, str) or name in row or name in own or number is None:
                    raise UserError(
                        f"{type(callback).__name__}.columns() gave {name!r}: {value!r:.60}; expected a name of its "
                        "own, which no other column has, and a number"
                    )
                own[name] = number
        return own

    def end(self) -> None:
        """End every callback that was started, the first one last, also if others fail; its own failure is raised."""
        with ExitStack() as stack:
            for callback in self._started:
                stack.callback(self._tell, callback, "on_end")

    def _tell(self, callback: Callback, event: str, *given: Any) -> Any:
        try:
            with nullcontext() if type(callback).__module__.startswith("megatron_ddrp.") else code_of_others():
                return getattr(callback, event)(*given)
        except StopTraining:
            if self._requests is not None:
                self._requests.received = BY_CALLBACK
            return None


class RowList(Callback):
    """The rows of this process, as a list."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_step(self, row: Mapping[str, Any]) -> None:
        self.rows.append(dict(row))

    on_validation = on_step


class TensorBoard(Callback):
    """Rows as scalars of TensorBoard."""

    def __init__(self, folder: str) -> None:
        """Raise `UserError` for a folder that cannot be made or written, before a run begins its own."""
        self.folder = folder
        self._writer: Any = None
        for path in (Path(folder), *Path(folder).absolute().parents):
            try:
                os.scandir(path).close()
                if not os.access(path, os.W_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
                return
            except FileNotFoundError:
                continue
            except OSError as error:
                line = f"--tensorboard-dir {folder}: cannot be written: {error.strerror}; give a folder that can be"
                raise UserError(line, WRONG_ARGUMENTS) from None

    def on_start(self, config: Config, iteration: int, model: nn.Module) -> None:
        from torch.utils.tensorboard import SummaryWriter

        with refusals_as_user_errors(self.folder):
            self._writer = SummaryWriter(self.folder, purge_step=iteration + 1)

    def on_step(self, row: Mapping[str, Any]) -> None:
        for name, value in numbers_of(row).items():
            self._writer.add_scalar(name, value, row["iteration"])

    on_validation = on_step

    def on_end(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Tracker(Callback):
    """Rows as a run of Weights & Biases, or of a package with the same functions, such as trackio."""

    def __init__(self, project: str, package: str = "wandb") -> None:
        self.project, self.package = project, package
        self._run: Any = None

    def on_start(self, config: Config, iteration: int, model: nn.Module) -> None:
        try:
            self._run = __import__(self.package).init(project=self.project, config=config.to_dict())
        except Exception as error:  # such as nobody logged in
            raise UserError(f"--wandb-project {self.project}: {str(error).splitlines()[0]}; log in first") from error

    def on_step(self, row: Mapping[str, Any]) -> None:
        self._run.log(numbers_of(row), step=row["iteration"])

    on_validation = on_step

    def on_end(self) -> None:
        if self._run is not None:
            self._run.finish()


def checked_callbacks(given: Any) -> list[Callback]:
    """Return the callbacks that a caller gives. Raises `UserError` for anything but objects of `Callback`'s classes."""
    members: list[Any] = list(given) if isinstance(given, Iterable) else [None]
    if not all(isinstance(member, Callback) for member in members):
        expected = "expected a list of objects of classes derived from Callback, as in callbacks=[Mine()]"
        raise UserError(f"callbacks={given!r:.60}: {expected}", WRONG_ARGUMENTS)
    return members


def numbers_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a row without its step."""
    return {name: value for name, value in row.items() if name != "iteration"}


def callbacks_of(logging: LoggingConfig) -> list[Callback]:
    """Return the callbacks that flags and plug-ins name. Raises `UserError` for a missing package."""
    with code_of_others():
        found: list[Callback] = [CALLBACKS.find(name)() for name in CALLBACKS]
    if logging.tensorboard_dir:
        need_packages("--tensorboard-dir", "tensorboard", exit_code=WRONG_ARGUMENTS)
        found.append(TensorBoard(logging.tensorboard_dir))
    if logging.wandb_project:
        need_packages("--wandb-project", "wandb", exit_code=WRONG_ARGUMENTS)
        found.append(Tracker(logging.wandb_project))
    return found
