"""Rows, and what tables and figures show of them: against SciPy, loops from their definitions and by hand."""

import math
import re
import sys

import numpy as np
import pytest
from scipy import stats

from megatron_ddrp.lab.compare import rows as run_rows
from megatron_ddrp.lab.compare import tables
from megatron_ddrp.lab.compare.page import Page, by_phenomenon, draw_onsets, draw_over_tokens, missing_samples
from megatron_ddrp.lab.compare.rows import UNITS, as_run, last_tenth, read_run_rows, times_on_plateau, write_samples
from megatron_ddrp.lab.compare.tables import Claim, ExperimentValues, check_places, gains, model_claims, score_table
from megatron_ddrp.tasks import statistics
from megatron_ddrp.tasks.minimal_pairs.pairs import ParadigmScore, Result, difference, standard_error
from megatron_ddrp.tasks.statistics import LIKE_LOSS, MINIMAL_PAIRS, OTHER_LOSS, TRAINING_LOSS, Difference, log_rank
from tests.refusals import refused
from tests.unit.lab.compare.made_rows import LOSS, RUNGS, full_row, make_row, results_of


def row(model="absolute", seed=1, loss=6.0, **other):
    return make_row(model, seed, RUNGS[0], {LOSS: loss}, **other)


def test_a_later_row_replaces_an_earlier_one_and_values_that_are_missing_or_not_finite_are_left_out(write_rows):
    first = write_rows([row(loss=6.0), row(seed=2), row(loss=5.5)])
    second = write_rows([row(seed=2, loss=5.0)], "more.jsonl")
    assert {run.seed: run.values[LOSS] for run in read_run_rows([first, second])} == {1: 5.5, 2: 5.0}
    run = as_run(make_row("ddrp+tcd", 1, RUNGS[0], {LOSS: None, "f(S)": 0.4, "CoLA": None}))
    assert (run.values, run.undefined, run.paradigms, run.curves) == ({"f(S)": 0.4}, (LOSS, "CoLA"), {}, {})
    assert run.arm.flags == (("hcd_weight", "0"),) and run.arm.key == "ddrp mth hcd-weight=0"


def test_wrong_values_runs_of_one_place_changed_or_cut_lines_and_a_missing_file_are_refused(write_rows, tmp_path):
    for change, message in (
        ({"model": None}, "not a row of a run: model is missing; delete this line"),
        ({"seed": 1.5}, "seed: got 1.5, expected a whole number of at least 0; delete this line"),
        ({"seconds": float("nan")}, "seconds: got nan, expected a number of at least 0"),
        ({"values": {LOSS: float("nan")}}, "values: got .*nan.*, expected an object of finite numbers, with null for"),
        ({"flags": ["lr"]}, r"flags: got \['lr'\], expected an object of flags"),
        ({"half": 1}, "half: got 1, expected true or false"),
        ({"curves": {LOSS: [[1, float("inf")]]}}, "curves: got .*, expected an object of lists of points"),
        ({"paradigms": {"a": 1.5}}, "paradigms: got .*, expected an object of numbers from 0 to 1"),
        ({"pairs": {"a": -1}}, "pairs: got .*, expected a whole number of at least 0 or an object of whole numbers of"),
    ):
        path = write_rows([row(), row(seed=2) | change])
        refused(rf"rows.jsonl, line 2: {message}", read_run_rows, [path])
    sizes = [row(parameters=1_569_152), row(seed=2, parameters=0), row(seed=3, parameters=1_568_896)]
    for rows, message in (
        ([row(), row(run="again")], "two runs of absolute, seed 1, 4,194,304 tokens: .* and again; delete the row"),
        ([row(), row(run="again", common={"num_layers": 2})], "and again, which differ in .*hidden_size, bf16, lr;"),
        ([row(), row(seed=2, objective="mth", flags={"hcd_weight": 0})],
         "two models are called 'absolute': absolute mlm and absolute mth hcd-weight=0; give each"),
        (sizes, "absolute, 4,194,304 tokens, have 1,569,152 and 1,568,896 parameters: they are not one model; delete"),
    ):  # fmt: skip
        refused(message, check_places, read_run_rows([write_rows(rows)]))
    check_places(read_run_rows([write_rows([row(), row(check="rate", flags={"lr": 0.1})])]))  # in a check, another one
    path = write_rows([row(), row(seed=2)])
    text = path.read_text()
    for content, message in (
        (text.replace("6.0", "5.0"), "line 1: changed since it was written"),
        (text[:-9], "its last line is cut off"),
        ("", r"no row in .*rows.jsonl; train a run of the plan first"),
    ):
        path.write_text(content)
        refused(message, read_run_rows, [path])
    refused("no such file; give the rows", read_run_rows, [tmp_path / "none.jsonl"])


def test_samples_that_are_missing_damaged_or_of_another_run(write_rows, tmp_path):
    rows = [row(), row(seed=2)]
    path = write_rows(rows)
    assert missing_samples(read_run_rows([path])) == []
    write_samples(tmp_path, rows[0], {LOSS: np.arange(3.0)})
    first, second = read_run_rows([path])
    assert [*first.samples] == [LOSS] and first.samples[LOSS].tolist() == [0, 1, 2] and second.samples == {}
    own, other = (run_rows.samples_file(tmp_path, one) for one in rows)
    (line,) = missing_samples([first, second])
    assert line.startswith(f"items/{other.name}: missing")
    for content in (own.read_bytes(), own.read_bytes()[:-9], b"junk", b""):
        other.write_bytes(content)
        refused(rf"{re.escape(other.name)}: damaged, or not the samples of its run", read_run_rows, [path])


def test_models_of_different_training_texts_are_refused_where_they_are_compared():
    first, like, other = {"unigram_loss": 7.01}, {"unigram_loss": 7.012}, {"unigram_loss": 6.5}
    runs = [row(**first), row("ddrp", **like), row("rope", **other), row("nope", run="older"), row("t5", **other)]
    groups = r"absolute, ddrp \(unigram level 7.01\) and rope, t5 \(unigram level 6.50\)"
    words = f"^seed 1, 4,194,304 tokens: {groups} were trained on different texts or vocabularies"
    refused(words, check_places, [as_run(run) for run in runs])
    in_check = row("ddrp", check="novels", **other)
    for second in (row("ddrp", **like), row("ddrp", seed=2, **other), in_check, row("ddrp")):
        check_places([as_run(row(**first)), as_run(second)])
    for level, joined in ((other, ["absolute", "ddrp"]), (first, ["ddrp"])):
        runs = [as_run(one) for one in (row(**level), in_check)]
        check_places(runs)
        assert [run.model for run in ExperimentValues(runs, "novels").runs] == joined


def test_arms_stand_in_the_order_of_tables_those_at_half_the_budget_last_and_budgets_are_groups_by_their_words():
    """The rows have the half arms first, and other objectives before MTH; the tables do not."""
    for names, halves, order in (
        ("ddrp+contrast absolute+mth ddrp+free zz ddrp absolute", ["absolute+mth"],
         "absolute ddrp zz ddrp+free absolute+mth ddrp+contrast"),
        ("rope+contrast absolute+tcd absolute+mth rope absolute+free absolute", ["rope", "absolute+mth"],
         "absolute rope absolute+free absolute+mth absolute+tcd rope+contrast"),
    ):  # fmt: skip
        results = results_of(
            [row(name, half=True) for name in reversed(halves)] + [row(name) for name in names.split()]
        )
        assert [arm.label for arm in results.arms] == order.split() + [f"{name}, half the budget" for name in halves]
        assert results.baseline.label == "absolute"
    assert results_of([row("ddrp"), row("rope")]).baseline.name == "ddrp"  # the first, without the named one
    # with minutes, in rows of earlier versions, the models of a group differ in tokens
    rows = [row(budget="5 minutes"), row("ddrp", budget="5 minutes") | {"planned_tokens": 7}, row(seed=2)]
    assert results_of(rows).budgets == {"5 minutes": RUNGS[0], "4,194,304 tokens": RUNGS[0]}


def test_phenomena_and_fields():
    rows = [full_row("absolute", seed, 0) for seed in (1, 2)]
    found = by_phenomenon([as_run(row) for row in rows])
    assert list(found)[:3] == ["all", "anaphor agreement", "argument structure"] and len(found) == 13
    assert found["argument structure"] == pytest.approx(0.5 + 0.02 * 1.5 / 3)  # the mean of its two paradigms
    for other in rows:
        other["paradigms"]["not_blimp"] = 0.5
    found = by_phenomenon([as_run(row) for row in rows])
    assert found == {"all": rows[0]["values"]["minimal pairs"], "morphology": 0.55}
    assert by_phenomenon([as_run(row())]) == {}


def test_a_check_borrows_its_baseline_at_its_rungs_and_seeds_from_the_ladder_or_a_check_with_the_same_flags(write_rows):
    rows = [row(seed=seed) for seed in (1, 2, 3)]
    rows += [row("absolute", seed=1, half=True), row("ddrp", seed=2, check="warm-up", baseline="absolute")]
    check = ExperimentValues(read_run_rows([write_rows(rows)]), "warm-up")
    found = [(run.arm.name, run.seed, run.check) for run in check.runs]
    assert found == [("absolute", 2, "warm-up"), ("ddrp", 2, "warm-up")] and check.baseline.name == "absolute"
    in_fp32 = {"common": row()["common"] | {"bf16": False}}
    rows = [row(), row(loss=5.0, check="rate", **in_fp32), row("ddrp", check="rate", baseline="absolute", **in_fp32)]
    rows.append(row("t5", check="warm-up", baseline="absolute", **in_fp32))
    for name, other in (("rate", "ddrp"), ("warm-up", "t5")):
        found = ExperimentValues(read_run_rows([write_rows(rows)]), name).runs
        assert [(run.arm.name, run.values[LOSS]) for run in found] == [("absolute", 5.0), (other, 6.0)]


TRAINED = {TRAINING_LOSS: [[10, 9.0], [50, 8.0], [90, 7.0], [92, 6.0], [100, 5.0]]}


def test_a_loss_has_the_name_of_its_text_if_its_kind_is_told_and_without_tokens_there_is_no_last_tenth():
    both = {LOSS: 6.0, OTHER_LOSS: 6.5}
    for told, stored, expected in (
        ({}, {LOSS: 6.0}, {LOSS: 6.0}),
        ({"validation_gap": -0.01}, {LOSS: 6.0}, {LIKE_LOSS: 6.0}),
        ({"validation_gap": 0.19}, both, {LIKE_LOSS: 6.0, OTHER_LOSS: 6.5}),
        ({"validation_gap": 0.2}, {LOSS: 6.0}, {OTHER_LOSS: 6.0, LIKE_LOSS: (2 * 6.0 + 8 * 5.0) / 10}),
        ({"validation_gap": 0.47}, both, both | {LIKE_LOSS: 5.2}),
        ({"validation_gap": 0.47}, {LOSS: None}, {LIKE_LOSS: 5.2}),
    ):
        made = make_row("ddrp", 1, RUNGS[0], stored, curves=TRAINED, **told)
        assert as_run(made).values == pytest.approx(expected), told
    assert last_tenth([]) is last_tenth([(0.0, 9.0)]) is None
    after = [(point * 1e5, 7.0 - (point - 91) * 0.1) for point in range(91, 101)]  # a causal phase had no masked loss
    assert last_tenth(after) == pytest.approx(6.55)


def test_scores_compare_if_they_are_of_the_same_pairs_or_rows():
    pairs, task = {"paradigms": {"x": 0.5, "y": 0.7}, "pairs": {"x": 200, "y": 100}}, {"train_examples": 100}
    for measure, told, other, same in (
        (MINIMAL_PAIRS, pairs, pairs, True),
        (MINIMAL_PAIRS, pairs, pairs | {"paradigms": {"y": 0.7}}, False),
        (MINIMAL_PAIRS, pairs, pairs | {"pairs": {"x": 20, "y": 100}}, False),
        (MINIMAL_PAIRS, pairs, pairs | {"pairs": {}}, True),  # not told
        ("CoLA", {"tasks": {"CoLA": task}}, {"tasks": {"CoLA": task | {"undefined": 1}}}, True),
        ("CoLA", {"tasks": {"CoLA": task}}, {"tasks": {"CoLA": {"train_examples": 99}}}, False),
        ("CoLA", {"tasks": {"CoLA": task}}, {}, True),
        (LOSS, {"tasks": {"CoLA": task}}, pairs, True),
    ):
        one, two = (
            as_run(make_row(model, 1, RUNGS[0], {measure: 0.6}) | own)
            for model, own in (("ddrp", told), ("absolute", other))
        )
        assert one.compares(two, measure) is two.compares(one, measure) is same, (measure, told, other)
        values = ExperimentValues([one, two]).of(measure, one.arm, one.budget, two.arm)
        assert values == ({1: 0.6} if same else {})


def test_training_losses_compare_where_training_makes_the_same_of_a_text():
    told = {"curves": TRAINED, "validation_gap": 0.47}
    for own, compares in (
        ({"flags": {"layernorm-position": "pre", "lr": 0.1}}, True),
        ({"flags": {"mask-prob": 0.15, "packing": False}}, True),  # the defaults
        ({"flags": {"mask-prob": "0.4:0.25"}}, False),
        ({"flags": {"hidden-dropout": 0}}, False),
        ({"flags": {"seq_length_phases": ["32:0.5"]}}, False),
        ({"flags": {"packing": True}}, False),
        ({"flags": {"masking": "ngram"}}, False),
        ({"objective": "mth"}, True),
        ({"objective": "electra"}, False),  # its loss is the generator's
        ({"objective": "of-a-plug-in"}, False),
        ({"validation_gap": 0.1}, False),  # held-out text beside training text
    ):
        rows = [row(seed=seed, **told) for seed in (1, 2)] + [row("ddrp", seed=seed, **told | own) for seed in (1, 2)]
        results = results_of(rows)
        measures = {gain.measure for gain in gains(results, model_claims(results))}
        assert (LIKE_LOSS in measures) == compares, own
        held_out = own.get("objective", "mth") == "mth" and "masking" not in own.get("flags", {})
        assert (OTHER_LOSS in measures) == (held_out and "validation_gap" not in own)
        table = score_table(results, results.runs[0].budget)
        cells = {cell[0]: dict(zip(table.header, cell, strict=True)) for cell in table.rows}
        assert cells["absolute"][LIKE_LOSS] and bool(cells.get("ddrp", {}).get(LIKE_LOSS)) == compares, own


def test_held_out_losses_compare_where_head_rows_and_masks_are_alike():
    of_training = {"mask-prob": "0.4:0.25", "hidden-dropout": 0, "packing": True, "seq_length_phases": ["32:0.5"]}
    for own, compares in (
        ({"flags": of_training}, True),
        ({"flags": {"seq_length_phases": ["64:1"]}}, False),  # rows of the last step
        ({"flags": {"seq-length": 64}}, False),
        ({"flags": {"masking": "ngram"}}, False),
        ({"flags": {"eval-mask-prob": 0.05}}, False),
        ({"flags": {"split": "50,50,0"}}, False),
        ({"flags": {"global-batch-size": 128}}, False),  # half the rows
        ({"flags": {"global-batch-size": 128, "eval_iters": 40}}, True),
        ({"objective": "electra"}, False),
        ({"objective": "own", "generates": False}, True),
        ({"objective": "mlm", "generates": True}, False),
    ):
        for gap, measure in ((0.1, LIKE_LOSS), (0.47, OTHER_LOSS), (None, LOSS)):
            one, other = as_run(row(validation_gap=gap)), as_run(row("ddrp", **own, validation_gap=gap))
            assert one.compares(other, measure) == compares, (own, measure)
    of_other = row("ddrp", validation_gap=0.1, curves={OTHER_LOSS: [[1e6, 7.0]]})
    assert not as_run(row(validation_gap=0.47)).compares(as_run(of_other), OTHER_LOSS), "another text"


def test_a_run_rested_up_to_its_onset_or_all_of_its_tokens_also_if_its_row_does_not_tell_them():
    curve = {TRAINING_LOSS: [[1e6, 7.0], [4e6, 7.0]]}
    told, untold = (as_run(row(curves=curve, unigram_loss=7.0) | {"tokens": tokens}) for tokens in (4_194_304, None))
    assert (told.rested, untold.rested, told.onset) == (4_194_304, 4e6, None)
    left = as_run(row(curves={TRAINING_LOSS: [*curve[TRAINING_LOSS], [4.1e6, 1.0]]}, unigram_loss=7.0))
    assert left.rested == left.onset == 4.1e6
    assert as_run(row(curves=curve)).rested is None  # written by an earlier version
    assert as_run(row(curves=curve, unigram_loss=7.0, half=True)).rested is None
    # The first point lies past the plateau: the run left before, unless a causal phase had trained it.
    assert as_run(row(curves=curve, unigram_loss=11.0)).rested == 1e6
    assert as_run(row(curves=curve, unigram_loss=11.0, common={"objective-phases": "clm:0.5"})).rested is None
    short = as_run(row(curves=curve, unigram_loss=7.0, steps=10, common={"seq-length-phases": ["128:0.9"]}))
    assert short.spent["steps"] == 10  # rows of 512 by default


def test_spreads_and_differences_by_hand_and_as_in_scipy(monkeypatch):
    for by_seed, text in (({1: 1.0, 2: 2.0, 3: 6.0}, f"3.0000 ± {7**0.5:.4f}"), ({1: 2.0}, "2.0000"), ({}, "")):
        assert tables.format_spread(LOSS, by_seed) == text
    first, second = {1: 0.61, 2: 0.58, 3: 0.66, 4: 0.60}, {1: 0.52, 2: 0.55, 3: 0.57, 9: 0.90}
    found, common = statistics.pair_by_seed(first, second), sorted(first.keys() & second.keys())
    expected = stats.ttest_rel([first[s] for s in common], [second[s] for s in common])
    assert len(found.values) == 3 and found.mean == pytest.approx((0.09 + 0.03 + 0.09) / 3)
    assert found.interval == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert found.p_value == pytest.approx(expected.pvalue, rel=1e-12)
    assert found.by_seed == {seed: first[seed] - second[seed] for seed in common}
    assert statistics.pair_by_seed({1: 1.0}, {2: 1.0}) is None
    relative = statistics.pair_by_seed({1: 1.1, 2: 2.4}, {1: 1.0, 2: 2.0}, relative=True)
    assert relative.values == pytest.approx((0.1, 0.2))
    assert statistics.percentile_interval(np.arange(201.0)) == pytest.approx((5, 195))  # the central 95 %
    monkeypatch.setitem(sys.modules, "scipy", None)
    words = "a 95 % interval needs scipy, not installed here: pip install scipy"
    refused(words, statistics.student_interval, [1.0, 2.0])


def test_seeds_that_agree_have_an_interval_only_at_0_and_rounding_is_no_difference_and_no_spread():
    agreeing = {(0.0, 0.0, 0.0): True, (5.0,): False, (0.3, 0.3): False, (0.1 + 0.2, 0.3): False}
    for values, has_interval in (agreeing | {(1.0, 1.1, 0.9): True}).items():
        assert (Difference(values).interval is not None) == has_interval, values
    found = statistics.pair_by_seed({1: 0.1 + 0.2, 2: 0.5}, {1: 0.3, 2: 0.5})
    assert found.values[0] > 0 and (found.mean, found.deviation, found.interval) == (0.0, 0.0, (0.0, 0.0))
    found = statistics.pair_by_seed({1: 6.05, 2: 6.35}, {1: 6.02, 2: 6.32})
    assert len(set(found.values)) == 2 and (found.deviation, found.interval) == (0.0, None)
    assert found.mean == pytest.approx(0.03)
    assert Difference((0.3,)).p_value is None
    assert Difference((0.3, 0.3)).p_value is None, "equal gains: no spread to test against"
    assert Difference((0.0, 0.0)).p_value == 1.0


def test_p_values_are_adjusted_as_in_scipy_and_a_gain_is_judged_with_the_others_of_its_table():
    for count in (0, 1, 2, 7, 40):
        generator = np.random.default_rng(count)
        for scale in (1.0, 0.1, 0.01):
            p_values = [float(value) for value in scale * generator.random(count) ** 2]
            expected = list(stats.false_discovery_control(p_values) <= 0.05) if count else []
            assert statistics.benjamini_hochberg(p_values) == expected
    better, worse, apart, few = statistics.BETTER, statistics.WORSE, statistics.NOT_TOLD_APART, statistics.EXPLORATORY
    clear, lost, weak = map(Difference, ((1.0, 1.1, 0.9), (-1.0, -1.1, -0.9), (0.1, 0.16, 0.21)))
    assert weak.interval[0] > 0 and weak.p_value < 0.05
    nothing = [Difference((-1.0, 1.0 + 0.1 * number, 0.2)) for number in range(20)]
    beside = [Difference((1.0, 1.001 + number / 1e6)) for number in range(20)]
    middle = Difference((0.1, 0.16, 0.31))  # p is 0.095
    assert middle.p_value > 0.05 > max(gain.p_value for gain in beside)
    for seeds_of_gains, words in (
        ([weak], [better]),
        ([clear, Difference((1.0,)), lost], [better, few, worse]),
        ([weak, *nothing], [apart] * 21),  # one of 21 looks like this by chance
        ([Difference((0.3, 0.3, 0.3))], [""]),  # equal gains: no spread to test against
        ([], []),
        ([middle, *beside], [apart, *[few] * 20]),  # two seeds help no other gain to pass
    ):
        found = [statistics.Gain("a", "b", "score", seeds, None) for seeds in seeds_of_gains]
        assert [gain.word for gain in statistics.judge(found)] == words


def pairs_row(model, seed, accuracies, pairs=4):
    paradigms = {f"p{place}": accuracy for place, accuracy in enumerate(accuracies)}
    values = {"minimal pairs": sum(accuracies) / len(accuracies)}
    return make_row(model, seed, RUNGS[0], values, paradigms=paradigms, pairs=pairs)


def result_of(paradigms):
    """The result of minimal pairs, given for each paradigm which of its pairs are right."""
    cells = {f"p{place}": ParadigmScore(np.array(right, bool), 0, 0, 0.5) for place, right in enumerate(paradigms)}
    return Result("", cells)


def error_of_mean(paradigms):
    """Square root of the sum of s²/n over paradigms, divided by their number; s² is the variance of the 0s and 1s."""
    return np.sqrt(sum(np.var(right, ddof=1) / len(right) for right in paradigms)) / len(paradigms)


def test_the_distance_from_chance_takes_an_upper_bound_of_the_standard_error_of_a_mean_over_seeds():
    """Seeds score the same pairs: the error of the mean of their results per pair is at most the mean of the errors."""
    paradigms = [[1, 1, 0, 1], [0, 1], [1, 1, 1, 1]]
    accuracies, pairs = [sum(right) / len(right) for right in paradigms], [len(right) for right in paradigms]
    row = pairs_row("absolute", 1, accuracies, pairs={f"p{place}": count for place, count in enumerate(pairs)})
    assert tables.above_chance(results_of([row]).runs) == pytest.approx(
        (sum(accuracies) / 3 - 0.5) / error_of_mean(paradigms)
    )
    assert standard_error([], []) is standard_error([0.5], [1]) is standard_error([0.5, 1.0], [0, 9]) is None
    first, second = [[1, 1, 0, 1], [0, 1, 0, 0]], [[1, 0, 0, 1], [0, 1, 1, 0]]
    rows = [pairs_row("absolute", seed, [sum(r) / 4 for r in runs]) for seed, runs in enumerate((first, second))]
    mean = sum(row["values"]["minimal pairs"] for row in rows) / 2
    error = (error_of_mean(first) + error_of_mean(second)) / 2
    assert tables.above_chance(results_of(rows).runs) == pytest.approx((mean - 0.5) / error)


def test_the_interval_over_paradigms_is_that_of_the_command_minimal_pairs_also_if_a_seed_has_none():
    """It may have diverged, or be scored later."""
    base, ddrp = ([1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 1]), ([1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1])
    shares = {"absolute": [sum(right) / 4 for right in base], "ddrp": [sum(right) / 4 for right in ddrp]}
    rows = [pairs_row(model, seed, found) for seed in (1, 2) for model, found in shares.items()]
    more = [make_row(model, 3, RUNGS[0], {"minimal pairs": None}) for model in shares]
    found = []
    for several in (rows[:2], rows, rows + more):
        results = results_of(several)
        found += gains(results, [Claim("", "minimal pairs", *results.arms[::-1])])
    one_seed, two_seeds, with_none = found
    assert one_seed.items == difference(result_of(ddrp), result_of(base)).items
    assert two_seeds == with_none and two_seeds.items is not None


def test_a_cost_is_in_seconds_and_as_often_the_baselines():
    seconds = {("absolute", 1): 0.1, ("absolute", 2): 0.2, ("rope", 1): 0.15, ("rope", 2): 0.3}
    rows = [make_row(model, seed, RUNGS[0], {"seconds of a step": s}) for (model, seed), s in seconds.items()]
    table = tables.cost_table(results_of(rows))
    assert table.header == ["model", "seconds per step", "÷ absolute"]
    assert table.rows == [["absolute", "0.1500", ""], ["rope", "0.2250", "1.500"]]


def test_curves_of_differences_leave_out_the_steep_beginning_and_count_tokens_in_their_unit():
    size = RUNGS[0] // 40
    curve = [(size * part, 6.0) for part in range(1, 41)]
    steep = [(tokens, 90.0 if part < 3 else 5.5) for part, (tokens, _) in enumerate(curve)]
    both = {"absolute": curve, "rope": steep}
    rows = [make_row(name, 1, RUNGS[0], {}, curves={TRAINING_LOSS: points}) for name, points in both.items()]
    figure = draw_over_tokens(results_of(rows), TRAINING_LOSS)
    _, differences = figure.axes
    (line,) = [line for line in differences.lines if len(line.get_xdata()) > 2]
    assert len(line.get_xdata()) == 36 and line.get_xdata()[0] == 5 * size
    assert differences.get_xlabel() == "million tokens"
    assert differences.xaxis.get_major_formatter()(2_500_000, 0) == "2.5"


GRID = 200_000
"""Tokens between two points of a curve: as many as the loss is averaged over."""


def onset_row(model, seed, onset, end=20, **other):
    """Return a row that leaves at the `onset`-th of `end` points of its curve, or never for None."""
    losses = [5.0 if onset and point >= onset else 7.0 for point in range(1, end + 1)]
    curve = [[GRID * point, loss] for point, loss in enumerate(losses, 1)]
    about = {"curves": {TRAINING_LOSS: curve}, "unigram_loss": 7.0, "tokens": GRID * end, "steps": 100 * end}
    return make_row(model, seed, RUNGS[0], {LOSS: losses[-1], statistics.STEP_SECONDS: 0.25}, **about | other)


def test_shares_and_tests_by_hand_and_the_median_is_where_half_of_the_runs_have_left():
    """Kaplan and Meier's shares, and Mantel's observed minus expected departures, by their deviation."""
    first, second = [(1.0, True), (3.0, False)], [(2.0, True), (2.0, False), (3.0, True)]
    shares = [(0.0, 1.0), (1.0, 4 / 5), (2.0, 4 / 5 * 3 / 4), (3.0, 4 / 5 * 3 / 4 * 1 / 2)]
    assert statistics.share_resting([*first, *second]) == [pytest.approx(point) for point in shares]
    expected, variance = 2 / 5 + 1 / 4 + 1 / 2, 2 / 5 * 3 / 5 + 1 / 4 * 3 / 4 + 1 / 2 * 1 / 2  # at 1, 2 and 3
    found = log_rank(first, second)
    assert found.side == pytest.approx((1 - expected) / math.sqrt(variance), rel=1e-9) and found.seeds == 2
    assert found.p_value == pytest.approx(2 * stats.norm.sf(abs(found.side)))
    for left, ended, median in (
        ([1, 2, 2.4], [], "2.0"),
        ([1, 2], [4, 4], "2.0"),
        ([1], [4, 4.5], "> 4.5"),
        ([2, 3], [1], "2.0"),  # a run that was cut off early does not count as one that rested longer
        (range(1, 13), [20] * 12, "12.0"),  # the share is 0.5000000000000001
        ([], [], ""),
    ):
        times = [*((float(time), True) for time in left), *((float(time), False) for time in ended)]
        assert statistics.format_median(times, 1) == median, (left, ended)

    def told(unit, **about):
        found = times_on_plateau({1: as_run(onset_row("ddrp", 1, 10, **about))}, unit=unit)
        return statistics.format_median(found, UNITS[unit])

    predictions = "million predictions"
    rates = sum(GRID / 100 * (0.4 - 0.2 * step / 2000) for step in range(1000))  # 1,000 of 2,000 steps
    expected = {"million tokens": "2.00", "steps": "1,000", predictions: f"{rates / 1e6:.2f}", "seconds": "250"}
    for unit, median in expected.items():
        assert told(unit, common={"lr": 0.1}, flags={"mask-prob": "0.4:0.2"}) == median
        assert told(unit, common={}, steps=0) == ("2.00" if unit == "million tokens" else "")
    assert (told(predictions), told(predictions, common={"mask_prob": 0.3})) == ("0.30", "0.60")
    short = {"common": {"seq_length": 128, "seq_length_phases": ["32:0.5"]}, "flags": {"mask-prob": "0.4:0.2"}}
    lengths = [32] * 1000 + [128] * 1000  # of the steps; half of the tokens are spent after 1,375
    rates = sum(length * (0.4 - 0.2 * step / 2000) for step, length in enumerate(lengths[:1375]))
    spent = f"{rates * 20 * GRID / sum(lengths) / 1e6:.2f}"
    assert [told(unit, **short) for unit in UNITS] == ["2.00", "1,375", spent, "344"]
    phased = told(predictions, common={}, flags={"objective-phases": "clm:0.25"})
    assert phased == "1.15"  # half of the tokens, and 15 % of the rest


def onsets_page(folder, **arms):
    """The page of models, given the onsets of each."""
    rows = [onset_row(model, seed, onset) for model, onsets in arms.items() for seed, onset in enumerate(onsets)]
    return Page(list(map(as_run, rows)), folder)


def test_onsets_are_judged_together_have_no_gains_and_their_figure_goes_to_the_end_of_the_runs(tmp_path):
    arms = {"absolute": [None] * 6, "ddrp": [10, 11, 12, 13, 14, 15], "t5": [None] * 6, "rope": [5, 6]}
    found = onsets_page(tmp_path, **arms, **{"ddrp+mth": [2, 3, 4, 5, 6, 7]})
    rows = {one["model"]: one for one in found.numbers()["onsets"]}
    assert {model: one["against absolute"].partition(",")[0] for model, one in rows.items()} == {
        "absolute": "", "ddrp": "sooner", "ddrp+mth": "sooner", "t5": "", "rope": "exploratory",
    }  # fmt: skip
    times = [[(time / 5, True) for time in onsets] for onsets in ([2, 3, 4, 5, 6, 7], arms["ddrp"])]
    assert rows["ddrp+mth"]["against ddrp"] == f"sooner, p = {log_rank(*times).p_value:.2g}"
    (line,) = [line for line in found.blocks["plateau"].splitlines() if line.startswith("| 4.19 M tokens | ddrp+mth")]
    assert "| 6 | 6 | 0.80 | 400 | 0.12 | 100 | sooner, p =" in line
    assert {gain["measure"] for gain in found.numbers()["gains"]} == {LOSS}
    assert "| 2.40 (6/6) |" in found.blocks["scores"] and "| &gt; 4.00 (0/6) |" in found.blocks["scores"]
    later = onsets_page(tmp_path, absolute=[2, 3, 4, 5], ddrp=[10, 11, 12, 13]).numbers()["onsets"][1]
    assert later["against absolute"].startswith("later, p = ")
    (axis,) = draw_onsets(onsets_page(tmp_path, absolute=[None, 10, 15]).results).axes
    (line,) = axis.lines
    assert line.get_xydata().ravel() == pytest.approx([0, 100, 2e6, 200 / 3, 3e6, 100 / 3, 4e6, 100 / 3])
    assert line.get_drawstyle() == "steps-post" and axis.get_ylabel() == "runs on the plateau [%]"
    assert draw_onsets(onsets_page(tmp_path, absolute=[None, None, None]).results) is None
