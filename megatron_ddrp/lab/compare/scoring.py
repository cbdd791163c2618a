"""Sections of a plan: flags of pre-training, and what scores checkpoints: GLUE, minimal pairs, the user's tasks."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ddrp.arguments import Settings, decide_by_deepspeed
from megatron_ddrp.config import Config, concerns
from megatron_ddrp.config.config_file import config_of
from megatron_ddrp.config.option import COUNT, option
from megatron_ddrp.config.reading import Place, make_section, options_of, read_settings
from megatron_ddrp.config.translation import HINTS
from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks.finetune.options import Search, TaskFiles, Training, read_task_file
from megatron_ddrp.tasks.glue.tasks import PAPER_TASKS, TASKS
from megatron_ddrp.tasks.minimal_pairs.rows import SCORES

Flags = tuple[tuple[str, Any], ...]
"""Pairs (name of a setting, value)."""

DECIDED = {
    "models": ("position_encoding", "objective"),
    "budget": ("train_iters", "exit_interval", "exit_duration_in_mins"),
    "seeds": ("seed",),
    "--output-dir": ("save", "load"),
    "checkpoints": ("save_interval", "keep_last"),
    "corpus": ("data_path", "train_data_path", "valid_data_path", "vocab_file", "tokenizer_type"),
}
"""Key of a plan → the flags of `megatron-ddrp pretrain` that it determines and that a plan must not have."""


def read_flags(values: Any, place: Place) -> Flags:
    """Return the flags of `megatron-ddrp pretrain` in a mapping. Raises `UserError` for one that others decide."""
    options = options_of(*concerns().values())
    settings = read_settings(options, values or {}, place, HINTS)
    for key, names in DECIDED.items():
        for name in names:
            if name in settings:
                raise place.at(name.replace("_", "-")).error(f"not allowed here: {key} determines it")
    return tuple((name, settings[name]) for name in options if settings.get(name) is not None)


def make_config(settings: dict[str, Any], blame: str) -> Config:
    """Return the configuration with these settings. Raises `UserError` that begins with `blame` for invalid ones."""
    resolved = Settings(settings)
    try:
        decide_by_deepspeed(resolved, None)
        return config_of(resolved)
    except UserError as error:
        raise UserError(f"{blame}: {error}", error.exit_code) from None


@dataclass(frozen=True)
class GluePlan:
    """Settings of `megatron-ddrp glue` for every checkpoint."""

    data_dir: str = option(MISSING, "GLUE's folder")
    tasks: tuple[str, ...] = option(PAPER_TASKS, "tasks", choices=tuple(TASKS), distinct=True)
    checkpoints_of: tuple[str, ...] = option(
        (), "models with a score of every checkpoint (the paper's figure 3b)", distinct=True
    )
    flags: Flags = ()
    """Further flags of `megatron-ddrp glue`."""


@dataclass(frozen=True)
class MinimalPairsPlan:
    """Settings of `megatron-ddrp minimal-pairs` for every checkpoint."""

    data_dir: str = option(MISSING, "folder of paradigms, one .jsonl each")
    max_pairs: int | None = option(None, "pairs per paradigm (default: all)", within=COUNT)
    score: str | None = option(None, "choice of the pieces that are masked together", choices=tuple(SCORES))

    @property
    def flags(self) -> Flags:
        """Further flags of `megatron-ddrp minimal-pairs`."""
        given = (("max_pairs", self.max_pairs), ("score", self.score))
        return tuple((name, value) for name, value in given if value is not None)


@dataclass(frozen=True)
class TaskPlan:
    """Settings of `megatron-ddrp finetune` for every checkpoint and one task."""

    file: str = option(MISSING, "task file")
    flags: Flags = ()
    """Further flags of `megatron-ddrp finetune`."""
    task: TaskFiles = TaskFiles()
    """Content of the task file."""

    @property
    def name(self) -> str:
        """Name of the task in tables."""
        return self.task.task_name

    @property
    def data(self) -> list[str]:
        """Data files of the task."""
        return [str(path) for path in (self.task.train, self.task.valid, self.task.test) if path is not None]

    @property
    def epochs(self) -> int:
        """Total number of epochs of all fine-tuning runs on one checkpoint."""
        known = options_of(Search)
        search = Search(**{name: value for name, value in self.flags if name in known})
        return search.seeds * sum(point.epochs for point in search.points)


def read_glue(values: Any, place: Place) -> GluePlan:
    """Read the section `glue`. Its further keys are flags of `megatron-ddrp glue`."""
    return _with_flags(GluePlan, values, place)


def read_tasks(values: Any, place: Place) -> tuple[TaskPlan, ...]:
    """Read the section `tasks`, a list of entries with a task file and flags of `megatron-ddrp finetune`."""
    entries = values if isinstance(values, list) else [values]
    found = [_read_task(entry, place._replace(key=f"{place.key}[{number}]")) for number, entry in enumerate(entries, 1)]
    for number, task in enumerate(found):
        if task.name in [*TASKS, *(other.name for other in found[:number])]:
            raise place.error(f"{task.name!r} names two tasks: give {task.file} another `name`")
    return tuple(found)


def _read_task(values: Any, place: Place) -> TaskPlan:
    plan: TaskPlan = _with_flags(TaskPlan, values, place)
    try:
        task = read_task_file(Path(plan.file))
        task.require()
    except UserError as error:
        raise place.error(str(error)) from None
    return replace(plan, task=task)


def _with_flags(section: type[Any], values: Any, place: Place) -> Any:
    """Read a section whose further keys are flags of a fine-tuning command."""
    flags = options_of(Search, Training)
    settings = read_settings(options_of(section) | flags, values, place)
    given = {"grid": "quick", "seeds": 1} | {name: settings.pop(name) for name in flags if name in settings}
    chosen = tuple((name, given[name]) for name in flags if given.get(name) not in (None, False))
    return make_section(section, settings | {"flags": chosen}, place)
