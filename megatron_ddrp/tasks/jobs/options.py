"""Options of the commands that share out their jobs."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ddrp.config.option import COUNT, Section, option


@dataclass(frozen=True)
class Machine(Section):
    """machine"""

    workers: int | None = option(None, "processes that share the sweep (default: one per GPU, else 1)", within=COUNT)
    wait: bool = option(
        True,
        "wait for jobs that other commands on the same OUT are doing; --no-wait exits instead, and the command that "
        "finishes last writes the tables (for job arrays)",
    )
    dry_run: bool = option(False, "check the files, print the plan and stop; write nothing")
