"""Rows: later ones replace earlier ones, and every mistake is one line."""

import re

import numpy as np
import pytest

from megatron_ddrp.lab.compare.page import by_phenomenon, missing_samples
from megatron_ddrp.lab.compare.rows import as_run, last_tenth, read_run_rows, samples_file, write_samples
from megatron_ddrp.lab.compare.tables import ExperimentValues, check_places, gains, model_claims, score_table
from megatron_ddrp.tasks.statistics import LIKE_LOSS, MINIMAL_PAIRS, OTHER_LOSS, TRAINING_LOSS
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


def test_wrong_values_runs_that_claim_one_place_changed_or_cut_lines_and_a_missing_file_are_refused_in_one_line(
    write_rows, tmp_path
):
    for change, message in (
        ({"model": None}, "not a row of a run: model is missing; delete this line"),
        ({"seed": float("inf")}, "seed: got inf, expected a whole number of at least 0; delete this line"),
        ({"seed": 1.5}, "seed: got 1.5, expected a whole number"),
        ({"seed": True}, "seed: got True, expected a whole number"),
        ({"planned_tokens": -1}, "planned_tokens: got -1, expected a whole number of at least 0"),
        ({"tokens": 10**400}, "tokens: got too long a number, expected a whole number"),
        ({"seconds": float("nan")}, "seconds: got nan, expected a number of at least 0"),
        ({"values": {LOSS: float("nan")}}, "values: got .*nan.*, expected an object of finite numbers, with null for"),
        ({"values": {LOSS: "5"}}, "values: got .*, expected an object of finite numbers"),
        ({"values": [1]}, r"values: got \[1\], expected an object"),
        ({"steps": [1]}, r"steps: got \[1\], expected a whole number"),
        ({"flags": ["lr"]}, r"flags: got \['lr'\], expected an object of flags"),
        ({"flags": {"lr": float("inf")}}, "flags: got .*inf.*, expected an object of flags"),
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
    own, other = (samples_file(tmp_path, one) for one in rows)
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
        assert (OTHER_LOSS in measures) == ("validation_gap" not in own)
        table = score_table(results, results.runs[0].budget)
        cells = {cell[0]: dict(zip(table.header, cell, strict=True)) for cell in table.rows}
        assert cells["absolute"][LIKE_LOSS] and bool(cells.get("ddrp", {}).get(LIKE_LOSS)) == compares, own


def test_a_run_rested_up_to_its_onset_or_all_of_its_tokens_also_if_its_row_does_not_tell_them():
    curve = {TRAINING_LOSS: [[1e6, 7.0], [4e6, 7.0]]}
    told, untold = (as_run(row(curves=curve, unigram_loss=7.0) | {"tokens": tokens}) for tokens in (4_194_304, None))
    assert (told.rested, untold.rested, told.onset) == (4_194_304, 4e6, None)
    left = as_run(row(curves={TRAINING_LOSS: [*curve[TRAINING_LOSS], [4.1e6, 1.0]]}, unigram_loss=7.0))
    assert left.rested == left.onset == 4.1e6
    assert as_run(row(curves=curve)).rested is None  # written by an earlier version
    assert as_run(row(curves=curve, unigram_loss=7.0, half=True)).rested is None
    assert as_run(row(curves=curve, unigram_loss=11.0)).rested is None  # trained weights, which were never there
