"""Plan of a comparison: its sections, and the reading of a YAML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ddrp.arguments import Settings, decide_by_deepspeed
from megatron_ddrp.config import ENCODINGS, OBJECTIVES, Config, concerns
from megatron_ddrp.config.reading import (
    COUNT,
    SEED,
    Option,
    Place,
    load_plugins,
    load_values,
    make_section,
    option,
    options_of,
    read_settings,
    read_value,
    refuse,
)
from megatron_ddrp.config.run import config_of
from megatron_ddrp.config.translation import HINTS
from megatron_ddrp.errors import UserError
from megatron_ddrp.lab.compare.rows import Arm
from megatron_ddrp.tasks.finetune.options import Search, TaskFiles, Training, read_task_file
from megatron_ddrp.tasks.glue import PAPER_TASKS, TASKS
from megatron_ddrp.tasks.minimal_pairs.pairs import SCORES

Flags = tuple[tuple[str, Any], ...]
"""Pairs (name of a setting, value)."""

DECIDED = {
    "models": ("position_encoding", "objective"),
    "budget": ("train_iters", "exit_interval", "exit_duration_in_mins"),
    "seeds": ("seed",),
    "--output-dir": ("save", "load"),
    "checkpoints": ("save_interval", "keep_last"),
    "corpus": ("data_path", "train_data_path", "valid_data_path", "other_data_path", "vocab_file", "tokenizer_type"),
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
        return [str(path) for path in (self.task.train, self.task.valid, *self.task.tests.values()) if path is not None]

    @property
    def epochs(self) -> int:
        """Total number of epochs of all fine-tuning runs on one checkpoint."""
        known = options_of(Search)
        search = Search(**{name: value for name, value in self.flags if name in known})
        return search.seeds * sum(point.epochs for point in search.points)


def read_tasks(values: Any, place: Place) -> tuple[TaskPlan, ...]:
    """Read the section `tasks`, a list of entries with a task file and flags of `megatron-ddrp finetune`."""
    entries = values if isinstance(values, list) else [values]
    found: list[TaskPlan] = []
    for number, entry in enumerate(entries, 1):
        at = place._replace(key=f"{place.key}[{number}]")
        plan: TaskPlan = _with_flags(TaskPlan, entry, at)
        try:
            task = read_task_file(Path(plan.file))
            task.require()
        except UserError as error:
            raise at.error(str(error)) from None
        if task.task_name in [*TASKS, *(other.name for other in found)]:
            raise place.error(f"{task.task_name!r} names two tasks: give {plan.file} another `name`")
        found.append(replace(plan, task=task))
    return tuple(found)


def _with_flags(section: type[Any], values: Any, place: Place) -> Any:
    """Read a section whose further keys are flags of a fine-tuning command."""
    flags = options_of(Search, Training)
    settings = read_settings(options_of(section) | flags, values, place)
    given = {"grid": "quick", "seeds": 1} | {name: settings.pop(name) for name in flags if name in settings}
    chosen = tuple((name, given[name]) for name in flags if given.get(name) not in (None, False))
    return make_section(section, settings | {"flags": chosen}, place)


FIRST_SEED = 1234
NUM_SEEDS = 3
"""Default number of seeds; with fewer, the spread over seeds is unreliable."""


@dataclass(frozen=True)
class Model:
    """Model to compare."""

    name: str = option(MISSING, "name in tables")
    encoding: str = option(MISSING, "--position-encoding", choices=ENCODINGS)
    objective: str = option(MISSING, "--objective", choices=OBJECTIVES)
    flags: Flags = option((), "further flags of this model", read=read_flags)

    @property
    def system(self) -> dict[str, str]:
        """The encoding and the objective, as settings of a run."""
        return {"position_encoding": self.encoding, "objective": self.objective}

    def arm(self, half: bool = False) -> Arm:
        """Return the model at the full or half budget."""
        return Arm.of(self.name, self.encoding, self.objective, dict(self.flags), half)


@dataclass(frozen=True)
class Budget:
    """Budget of every run: either steps or tokens."""

    steps: int | None = option(None, "training steps", within="[2, 2147483648)")
    tokens: int | None = option(None, "batch x sequence length", within="[2, 9223372036854775808)")

    def __post_init__(self) -> None:
        if bool(self.steps) == bool(self.tokens):
            refuse("expected either steps or tokens")

    def __str__(self) -> str:
        return f"{self.steps:,} steps" if self.steps else f"{self.tokens:,} tokens"


@dataclass(frozen=True)
class CorpusPlan:
    """Corpus: indexed datasets, or texts to build a dataset from."""

    input: tuple[str, ...] = option((), "texts", distinct=True)
    data_path: tuple[str, ...] = option((), "prefixes of indexed datasets")
    vocab_file: str | None = option(None, "vocabulary")
    vocab_size: int | None = option(None, "number of pieces of a vocabulary to build", within="[100, 2147483648)")
    tokenizer_type: str = option(
        "BertWordPieceLowerCase", "tokenizer", choices=("BertWordPieceLowerCase", "BertWordPieceCase")
    )
    workers: int = option(1, "processes of megatron-ddrp preprocess", within=COUNT)
    shuffle: bool | None = option(None, "documents of the texts in a random order (default: true, with texts)")
    other: tuple[str, ...] = option((), "texts of another kind, on which each run is evaluated too", distinct=True)
    other_data_path: tuple[str, ...] = option((), "prefixes of indexed datasets of such text")

    def __post_init__(self) -> None:
        if self.shuffle is None and self.input:
            object.__setattr__(self, "shuffle", True)
        if self.other and self.other_data_path:
            refuse("expected other (texts) or other_data_path (prefixes of indexed datasets), not both")
        if self.shuffle and not self.input:
            refuse("shuffle needs input (texts); shuffle datasets by megatron-ddrp dataset shuffle")
        if bool(self.input) == bool(self.data_path):
            refuse("expected either input (texts) or data_path (prefixes of indexed datasets)")
        if self.data_path and not self.vocab_file:
            refuse("vocab_file is missing: data_path needs the vocabulary that made the datasets")
        if bool(self.vocab_size) == bool(self.vocab_file):
            refuse("expected either vocab_file or vocab_size (of a vocabulary to build)")


@dataclass(frozen=True)
class Analyses:
    """Number of validation sentences per analysis, and row lengths of throughput. 0 or none leaves an analysis out."""

    self_similarity: int = option(0, "f(S) and f(H)", within="[0, 2147483648)")
    triangle: int = option(0, "up-down triangles", within="[0, 2147483648)")
    attention_maps: int = option(0, "mean attention maps", within="[0, 2147483648)")
    space: int = option(0, "cosines, IsoScore and effective rank", within="[0, 2147483648)")
    direction: int = option(0, "left and right", within="[0, 2147483648)")
    throughput: tuple[int, ...] = option((), "lengths of rows at inference", within="[3, 2147483648)", distinct=True)


def _read_seeds(values: Any, place: Place) -> tuple[int, ...]:
    """Read a list of seeds, or a number N of seeds, which means `FIRST_SEED` and the N − 1 numbers after it."""
    if isinstance(values, list):
        rules = {"within": SEED, "distinct": True}
        return read_value(values, Option(tuple[int, ...], rules, MISSING), place)
    count = read_value(values, Option(int, {"within": COUNT}, MISSING), place)
    return tuple(range(FIRST_SEED, FIRST_SEED + count))


@dataclass(frozen=True)
class ComparisonPlan:
    """Plan of a comparison: models, seeds, one budget, one corpus, checked before anything runs.

    The keys `model` and `training` and a model's `flags` take flags of `megatron-ddrp pretrain` without the leading
    dashes. Flags that the plan itself determines (seed, steps, folders, data) are refused there. docs/compare.md
    explains the keys.
    """

    models: tuple[Model, ...] = option(MISSING, "models to compare")
    budget: Budget = option(MISSING, "budget of every run")
    corpus: CorpusPlan = option(MISSING, "data of every run")
    seeds: tuple[int, ...] = option(
        tuple(range(FIRST_SEED, FIRST_SEED + NUM_SEEDS)), "number of seeds, or a list of seeds", read=_read_seeds
    )
    model: Flags = option((), "flags of every run", read=read_flags)
    training: Flags = option((), "further flags of every run", read=read_flags)
    plugins: tuple[str, ...] = option((), "plug-ins, as for --plugin; every run and score loads them")
    glue: GluePlan | None = option(None, "fine-tuning", read=partial(_with_flags, GluePlan))
    minimal_pairs: MinimalPairsPlan | None = option(None, "pairs of sentences, without fine-tuning")
    tasks: tuple[TaskPlan, ...] = option((), "fine-tuning on your own tasks", read=read_tasks)
    baseline: str | None = option(None, "model to compare the others with (default: the first)")
    analyses: Analyses = option(Analyses(), "analyses of the models")
    half_budget: tuple[str, ...] = option((), "models to train at half the budget too", distinct=True)
    checkpoints: int = option(4, "checkpoints per run", within=COUNT)
    launcher: str = option("python", "python, or a launcher of megatron-ddrp pretrain")
    workers: int = option(1, "jobs at once", within=COUNT)
    check: str = option("", "side experiment that these runs are")
    file: Path = Path()

    def __post_init__(self) -> None:
        for number, model in enumerate(self.models):
            for other in self.models[:number]:
                if model.name == other.name:
                    refuse(f"models[{number + 1}].name: {model.name!r} names two models: choose another name")
                if replace(model, name="") == replace(other, name=""):
                    refuse(f"models[{number + 1}]: {model.name!r} is the same as a model before it")
        names = [model.name for model in self.models]
        curves = self.glue.checkpoints_of if self.glue else ()
        for key, chosen in (
            ("half_budget", self.half_budget),
            ("glue.checkpoints_of", curves),
            ("baseline", (self.baseline,) if self.baseline else ()),
        ):
            for name in chosen:
                if name not in names:
                    refuse(f"{key}: got {name!r}, expected one of {', '.join(names)}")
        if self.workers > 1 and self.launcher != "python":
            refuse(f"workers: {self.workers} with a launcher that starts several ranks: expected 1")

    @property
    def plugin_words(self) -> tuple[str, ...]:
        """Words `--plugin FILE.py …` of every command about a model; empty without plug-ins."""
        return ("--plugin", *(str(Path(file).resolve()) for file in self.plugins)) if self.plugins else ()

    @property
    def flags(self) -> Flags:
        """Flags of every run."""
        return self.model + self.training

    def model_of(self, name: str) -> Model:
        """Return the model with this name."""
        return next(model for model in self.models if model.name == name)


RUNGS = "rungs"
_GONE = {"expected": "the key is gone, leave it out: the time left comes from finished jobs"}
"""Key that plans had in earlier versions → what to do."""


def read_plans(file: Path, given: Mapping[str, Any] | None = None) -> list[ComparisonPlan]:
    """Read and check the plans of a file: one without `rungs`, otherwise one per entry.

    `given` has values of the command line by dotted key; they replace the file's values.

    An entry of `rungs` stands for one budget and holds the keys in which its plan differs from the rest of the file: at
    least `budget`, usually `seeds`, and under `models` the names of the models that it trains (default: all).

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


def _plan(values: Any, place: Place, file: Path) -> ComparisonPlan:
    """Return a plan from its values, after loading its plug-ins, whose names its models may have."""
    if isinstance(values, Mapping) and "plugins" in values:
        load_plugins(values["plugins"], place.at("plugins"), file)
    return make_section(ComparisonPlan, read_settings(options_of(ComparisonPlan), values, place, _GONE), place)


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
        elif isinstance(section := found.setdefault(key, {}), dict):
            section[next((name for name in section if str(name).replace("-", "_") == inner), inner)] = value
    for section in found.values():
        for key in [key for key, value in section.items() if value is None] if isinstance(section, dict) else ():
            del section[key]
    return {key: value for key, value in found.items() if value is not None}
