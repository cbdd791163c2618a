"""Damage files of every kind in every way, and compare what every command makes of them with the healthy file.

    python -m tests.endurance.damage [--repeats 3] [--only TEXT …] [--write]
    python -m tests.endurance.damage --cases 60 --seed 3
    python -m tests.endurance.damage --case "run: latest, latest | blank | training | 0"

Nothing may be wrong in silence, end in a traceback or hang. Exits 1 where something does, and names the cases; a case's
name decides its damage. `--write` puts the table between the markers of docs/foreign-files.md.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from benchmarks.pages import write_table
from megatron_ddrp.pages.markdown import Table
from tests.endurance.damage.kinds import Case, all_cases, some_cases
from tests.endurance.damage.readers import READERS, SAVED, Command, result_of, run_all
from tests.endurance.damage.sample import make_sample
from tests.endurance.damage.verdict import FAULTS, VERDICTS, Healthy, Outcome, judge, plain_lines

DOCUMENT = "foreign-files.md"


class Bench:
    """A healthy sample, copies of it to damage, and what each reader makes of the healthy one."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.folder, self.workers = folder, workers
        self.sample = make_sample(folder / "sample")

    def healthy(self, readers: Sequence[str]) -> dict[str, Healthy]:
        """Run the readers on the undamaged sample, and on one whose newest checkpoint is the one before."""
        plans = [(name, older) for name in readers for older in (False, True) if READERS[name].takes_run or not older]
        commands = []
        for number, (name, older) in enumerate(plans):
            command = self._command(f"healthy{number}", name)
            if older:
                shutil.rmtree(command.folder / "run" / f"iter_{SAVED:07d}")
                (command.folder / "run" / "latest").write_text("iter_0000002\n", encoding="utf-8")
            commands.append(((name, older), command))
        results, lines = {}, {}
        for (name, older), ended in run_all(commands, self.workers):
            if ended.exit_code:
                raise RuntimeError(f"{name} fails on healthy files\n{ended.stdout}\n{ended.stderr}")
            command = dict(commands)[name, older]
            results[name, older] = result_of(READERS[name], command.folder, ended.stdout)
            lines[name, older] = plain_lines(ended.stdout + "\n" + ended.stderr)
            shutil.rmtree(command.folder)
        return {name: Healthy(lines[name, False], results[name, False], results.get((name, True))) for name in readers}

    def outcomes(self, cases: Sequence[Case], keep: bool = False) -> Iterator[Outcome]:
        """Run the cases; yield what became of each, as they end."""
        healthy = self.healthy(list(dict.fromkeys(case.reader for case in cases)))

        def commands() -> Iterator[tuple[tuple[Case, Path, str, Command], Command]]:
            for number, case in enumerate(cases):
                command = self._command(f"case{number}", case.reader)
                path, done = case.damage(command.folder, self.sample)
                yield (case, path, done, command), command

        for (case, path, done, command), ended in run_all(commands(), self.workers):
            yield judge(case, path, done, ended, command.folder, healthy[case.reader])
            if keep:
                print(f"{command.folder}\n{ended.stdout}\n{ended.stderr}")
                continue
            shutil.rmtree(command.folder)
            command.stdout.unlink()
            command.stderr.unlink()

    def _command(self, name: str, reader: str) -> Command:
        """A reader's command in a fresh copy of the sample."""
        folder = shutil.copytree(self.sample, self.folder / name)
        return Command(READERS[reader].words, folder, self.folder / f"{name}.stdout", self.folder / f"{name}.stderr")


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the counts in Markdown: by what was damaged, and by how."""
    columns = [verdict for verdict in VERDICTS if verdict not in FAULTS[3:] or _count(outcomes, verdict)]
    parts = []
    for head, of in (("what is damaged", lambda o: o.label), ("how", lambda o: o.harm)):
        groups = {name: [o for o in outcomes if of(o) == name] for name in dict.fromkeys(map(of, outcomes))}
        groups["all"] = list(outcomes)
        rows = [[name, len(group), *(_count(group, column) for column in columns)] for name, group in groups.items()]
        parts.append(str(Table([head, "files", *columns], [list(map(str, row)) for row in rows])))
    readers = ", ".join(f"`{name}`" for name in READERS if any(o.reader == name for o in outcomes))
    meanings = "; ".join(f"*{column}*: {VERDICTS[column]}" for column in columns)
    return "\n\n".join([*parts, f"{meanings}.", f"Read by {readers}."])


def _count(outcomes: Sequence[Outcome], verdict: str) -> int:
    return sum(outcome.verdict == verdict for outcome in outcomes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="cases of each damage that chance has a part in")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="cases whose name has one of them")
    parser.add_argument("--case", metavar="NAME", help="one case; its folder is kept, and its output shown")
    parser.add_argument("--cases", type=int, metavar="N", help="so many, drawn by chance evenly over the kinds")
    parser.add_argument("--seed", type=int, default=0, help="of the drawing")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--outcomes", type=Path, metavar="FILE", help="write each outcome as a line of JSON")
    parser.add_argument("--write", action="store_true", help=f"replace the table in {DOCUMENT}")
    given = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    cases = [case for case in all_cases(given.repeats) if any(text in case.name for text in given.only)]
    cases = [case for case in cases if given.case in (None, case.name)]
    if given.cases:
        cases = some_cases(cases, given.cases, given.seed)
    if not cases:
        parser.error("no case has this name")
    folder = Path(tempfile.mkdtemp(prefix="damage-"))
    outcomes = []
    for outcome in tqdm(Bench(folder, given.workers).outcomes(cases, given.case is not None), total=len(cases)):
        outcomes.append(outcome)
        if outcome.is_fault:
            tqdm.write(f"{outcome.verdict}: {outcome.name}\n    {outcome.done}\n    {outcome.words}", file=sys.stderr)
    if given.case is None:
        shutil.rmtree(folder)
    order = {case.name: number for number, case in enumerate(cases)}
    outcomes.sort(key=lambda outcome: order[outcome.name])
    if given.outcomes:
        rows = [json.dumps(outcome._asdict()) + "\n" for outcome in outcomes]
        given.outcomes.write_text("".join(rows), encoding="utf-8")
    print(table(outcomes))
    if given.write:
        write_table(DOCUMENT, "damage", table(outcomes))
    faults = Counter(outcome.verdict for outcome in outcomes if outcome.is_fault)
    print(", ".join(f"{faults[verdict]} {verdict}" for verdict in FAULTS), file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
