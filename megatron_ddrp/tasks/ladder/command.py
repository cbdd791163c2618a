"""`megatron-ddrp ladder`: write one page from rows of runs with several budgets."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ddrp.pages.rendering import require_packages
from megatron_ddrp.tasks.ladder.arguments import parse_arguments


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the rows, write the page, and replace the tables of a Markdown file if one is given."""
    options = parse_arguments(arguments)
    require_packages("compare", "markdown", "matplotlib")
    from megatron_ddrp.tasks.ladder.page import LadderPage  # here, because --help must not import scipy
    from megatron_ddrp.tasks.ladder.rows import read_runs

    page = LadderPage(read_runs(options.rows), options.output_dir)
    if options.tables:
        print(page.replace_tables(options.tables))  # first, because it may refuse the file
    print(page.write())
    return 0
