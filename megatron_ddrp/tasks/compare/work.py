"""Everything that a plan asks for, as jobs: data, probes, courses, and what is measured on their checkpoints."""

from __future__ import annotations

from pathlib import Path

from megatron_ddrp.tasks.compare.corpus import open_corpus
from megatron_ddrp.tasks.compare.courses import Course, all_courses, count_steps, probe_jobs, probed_seconds
from megatron_ddrp.tasks.compare.jobs import Job
from megatron_ddrp.tasks.compare.measures import Analysis, Score, analyses, glue_scores
from megatron_ddrp.tasks.compare.plan import Plan
from megatron_ddrp.tasks.store import Store


class Work:
    """The jobs of a plan in an output folder."""

    def __init__(self, plan: Plan, folder: Path, store: Store[str]):
        """Raises `UserError` for inputs that are missing and for flags that `pretrain_bert.py` would refuse."""
        self.plan, self.folder, self.store = plan, folder, store
        self.corpus = open_corpus(plan, folder)
        self.probes = probe_jobs(plan, self.corpus, folder)
        self._planned: tuple[dict[str, int], list[Course], list[Score], list[Analysis]] | None = None
        self._plan_all()  # refuses wrong settings before anything runs

    def steps(self) -> dict[str, int]:
        """Model's name → steps of the full budget, where they are known by now."""
        finished = {name: job for name, job in self.probes.items() if job.name in self.store}
        return count_steps(self.plan, {name: probed_seconds(job) for name, job in finished.items()})

    def courses(self) -> list[Course]:
        """Every training."""
        return self._plan_all()[1]

    def first_jobs(self) -> list[Job]:
        """What must be done before the others can be told."""
        return [*self.corpus.jobs, *self.probes.values()]

    def scores(self) -> list[Score]:
        """Every checkpoint that GLUE is to score."""
        return self._plan_all()[2]

    def analyses(self) -> list[Analysis]:
        """Every look into a course."""
        return self._plan_all()[3]

    def _plan_all(self) -> tuple[dict[str, int], list[Course], list[Score], list[Analysis]]:
        """Planned once, and anew when a probe has told a model's steps."""
        steps = self.steps()
        if self._planned is None or self._planned[0] != steps:
            courses = all_courses(self.plan, self.corpus, self.folder, steps)
            scores = glue_scores(self.plan, courses, self.folder)
            self._planned = steps, courses, scores, analyses(self.plan, courses, self.corpus, self.folder)
        return self._planned

    def jobs(self) -> list[Job]:
        """All of them, in the order in which they are wanted: a seed after the other, figure 3b at the end."""
        courses = self.courses()
        measured = [(a.course, a.job) for a in self.analyses()]
        measured += [(score.course, score.job) for score in self.scores() if score.step == score.course.steps]
        jobs = self.first_jobs()
        for seed in self.plan.seeds:
            jobs += [course.job for course in courses if course.seed == seed]
            jobs += [job for course, job in measured if course.seed == seed]
        return jobs + [score.job for score in self.scores() if score.step != score.course.steps]

    def describe(self) -> str:
        """The plan, some lines."""
        plan = self.plan
        few = f" (fewer than {3}: their spread says little)" if len(plan.seeds) < 3 else ""
        lines = [
            f"plan {plan.file}: {len(plan.models)} models x {len(plan.seeds)} seeds ({', '.join(map(str, plan.seeds))})"
            f"{few}, {plan.budget} each, into {self.folder}"
        ]
        steps = self.steps()
        for model in plan.rows:
            count = (
                f"{steps[model.name]:,} steps" if model.name in steps else f"as many steps as fit into {plan.budget}"
            )
            half = ", and half of it" if model.name in plan.half_budget else ""
            lines.append(f"  {model.name}: {model.encoding}, {model.objective}, {count}{half}")
        if not plan.glue:
            lines.append("  no GLUE in this plan")
        return "\n".join(lines)
