"""Families: every schedule against its source, and a sample of revisions against facts compiled independently."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ptq_dynamics.core.errors import UserError
from ptq_dynamics.trajectories.families import (
    caveats,
    check_transformers,
    load_families,
    lr_at,
    phase_at,
    row,
    rows,
    tokens_at,
)

FILE = Path(__file__).parents[2] / "data" / "reference" / "families.yaml"
FAMILIES = load_families(FILE)
STAGES = [(f, s) for f, family in FAMILIES.items() for s in family.stages]

# (family, revision, step, tokens, LR, certainty): from a table that was computed with each project's own
# scheduler formula, not with ours; LRs are given there to 6 digits
SAMPLE = [
    ("olmo2_1b", "stage1-step40000-tokens84B", 40000, 83886080000, 0.000399797, "certain"),
    ("olmo2_1b", "stage1-step1890000-tokens3964B", 1890000, 3963617280000, 7.69529e-05, "certain"),
    ("olmo2_1b", "stage2-ingredient3-step19000-tokens40B", 19000, 4039867629568, 1.51273e-05, "certain"),
    ("olmo2_7b", "stage1-step438000-tokens1838B", 438000, 1837105152000, 0.000220029, "certain"),
    ("olmo2_7b", "stage2-ingredient2-step11931-tokens50B", 11931, 3945065873408, 0.0, "certain"),
    ("olmo2_7b", "stage2-ingredient1-step11000-tokens47B", 11000, 3941160976384, 4.75133e-06, "certain"),
    ("olmo2_13b", "stage1-step320700-tokens2691B", 320700, 2690226585600, 0.000447689, "certain"),
    ("olmo2_13b", "stage1-step596057-tokens5001B", 596057, 5000088518656, 9.0e-05, "certain"),
    ("olmo2_13b", "stage2-ingredient4-step31000-tokens261B", 31000, 5260135366656, 1.19864e-05, "certain"),
    ("olmo2_32b", "stage1-step17000-tokens143B", 17000, 142606336000, 0.000599498, "certain"),
    ("olmo2_32b", "stage2-ingredient3-step35500-tokens298B", 35500, 6353540087808, 4.8707e-07, "certain"),
    ("olmo2_32b", "stage2-ingredient4-step11921-tokens101B", 11921, 6155745099776, 0.0, "unverified"),
    ("olmo1_1b", "step1000-tokens4B", 1000, 4194304000, 0.00022, "certain"),
    ("olmo1_1b", "step640000-tokens2683B", 640000, 2684354560000, 5.58808e-05, "certain"),
    ("olmo1_7b", "step1000-tokens4B", 1000, 4423680000, 8.4e-05, "certain"),
    ("olmo1_7b", "step475000-tokens2101B", 475000, 2101248000000, 3.10512e-05, "certain"),
    ("olmo1_7b", "step550000-tokens2433B", 550000, 2433024000000, 2.33518e-05, "certain"),
    ("olmo1_7b", "step557000-tokens2464B", 557000, 2463989760000, 2.3e-08, "certain"),
    ("smollm3_3b", "stage1-step-40000", 40000, 94371840000, 0.0002, "certain"),
    ("smollm3_3b", "stage2-step-4200000", 4200000, 9909043200000, 0.000199234, "certain"),
    ("smollm3_3b", "stage3-step-4720000", 4720000, 11135877120000, 3.83142e-10, "certain"),
    ("smollm3_3b", "lc-4k-to-32k-step-12000", 12000, 11164188672000, 7.54515e-06, "certain"),
    ("smollm3_3b", "lc-32k-to-64k-step-20000", 20000, 11230248960000, 4.44272e-07, "certain"),
    ("apertus_8b", "step1194000-tokens5014B", 1194000, 5007998976000, 0.00011, "certain"),
    ("apertus_8b", "step1800000-tokens8072B", 1800000, 8061452288000, 0.00011, "inferred"),
    ("apertus_8b", "step2550000-tokens14372B", 2550000, 14352908288000, 3.27504e-05, "certain"),
    ("apertus_8b", "step2627139-tokens15T", 2627139, 14999997120512, 1.10001e-05, "certain"),
    ("opensci_1p7b", "iter_0194000", 194000, 800980992000, 0.00398051, "inferred"),
    ("opensci_1p7b", "iter_0242000", 242000, 999161856000, 1.68456e-05, "inferred"),
    ("amber_7b", "ckpt_000", 762, 3495690240, 0.0001143, "certain"),
    ("amber_7b", "ckpt_200", 153162, 702633738240, 0.000141752, "certain"),
    ("amber_7b", "main", 274320, 1258448486400, 3.0e-05, "certain"),
    ("pythia_70m", "step512", 512, 1073741824, 0.000358042, "certain"),
    ("pythia_70m", "step128000", 128000, 268435456000, 0.000124701, "certain"),
    ("pythia_160m", "step64000", 64000, 134217728000, 0.000378949, "certain"),
]


@pytest.mark.parametrize(("family", "name", "step", "tokens", "lr", "certainty"), SAMPLE)
def test_sampled_revisions_have_the_facts_of_the_independent_table(family, name, step, tokens, lr, certainty):
    found = row(FAMILIES[family], name)
    assert (found.step, found.tokens, found.certainty) == (step, tokens, certainty)
    assert found.lr == pytest.approx(lr, rel=1e-5, abs=1e-13)
    assert name in [r.name for r in rows(FAMILIES[family])]


def test_every_family_of_the_study_is_there():
    wanted = "olmo1_1b olmo1_7b olmo2_1b olmo2_7b olmo2_13b olmo2_32b smollm3_3b apertus_8b opensci_1p3b opensci_1p7b"
    assert set(wanted.split()) | {"amber_7b", "pythia_70m", "pythia_160m", "mini"} == set(FAMILIES)


@pytest.mark.parametrize(("key", "stage"), STAGES)
def test_learning_rates_are_finite_non_negative_and_end_where_the_source_says(key, stage):
    family = FAMILIES[key]
    part = family.stages[stage]
    steps = {0, 1, part.last_step, 2 * part.last_step} | {part.last_step * k // 997 for k in range(997)}
    values = [lr_at(family, s, stage) for s in sorted(steps)]
    assert all(math.isfinite(v) and v >= 0 for v in values)
    assert max(values) <= max(max(p.from_lr, p.to_lr) for p in part.lr)
    assert lr_at(family, 10**9, stage) == part.lr[-1].to_lr
    if part.published_end is not None:
        end = lr_at(family, part.last_step, stage)
        assert end == pytest.approx(part.published_end, rel=part.published_rtol, abs=1e-9)


@pytest.mark.parametrize("key", FAMILIES)
def test_rows_are_ordered_unique_and_name_their_repository(key):
    family = FAMILIES[key]
    found = rows(family)
    tokens = [r.tokens for r in found if r.stage and r.tokens is not None and r.name != family.final.name]
    assert tokens == sorted(tokens)
    assert len({r.name for r in found}) == len(found)
    assert all("/" in r.repo and r.phase in ("warmup", "stable", "decay", "average", "other") for r in found)
    assert set(family.final.of) <= {r.name for r in found}


def test_phases_of_a_wsd_family():
    family = FAMILIES["smollm3_3b"]
    assert [phase_at(family, s) for s in (1000, 4_198_001, 4_198_002)] == ["warmup", "stable", "decay"]
    assert row(family, "main").phase == "average"
    assert row(family, "main").repo == "HuggingFaceTB/SmolLM3-3B"
    assert row(family, "it-SFT").lr is None


def test_a_revision_that_is_not_listed_gets_its_facts_from_the_rule():
    found = row(FAMILIES["pythia_70m"], "step77000")
    assert (found.step, found.tokens) == (77000, 77000 * 2097152)
    assert row(FAMILIES["amber_7b"], "ckpt_001").step == 2 * 762


def test_tokens_follow_a_batch_that_changes():
    family = FAMILIES["apertus_8b"]
    assert tokens_at(family, 1_678_001) == 1_678_000 * 4194304 + 8388608


def test_caveats_tell_every_uncertain_fact_and_nothing_for_certain_families():
    assert caveats(FAMILIES["pythia_70m"]) == []
    told = " ".join(caveats(FAMILIES["olmo2_13b"]))
    assert "LR of stage1 inferred" in told and "3e-4" in told
    assert "10 of 27 revision names inferred" in " ".join(caveats(FAMILIES["apertus_8b"]))
    assert "unknown" in " ".join(caveats(FAMILIES["opensci_1p3b"]))


def test_a_family_for_other_transformers_is_refused_in_one_line():
    check_transformers(FAMILIES["smollm3_3b"], "5.24.0")
    with pytest.raises(UserError, match=r"open-sci.*needs transformers.*<5.*this is 5\.24\.0") as e:
        check_transformers(FAMILIES["opensci_1p7b"], "5.24.0")
    assert "\n" not in str(e.value)


def test_unknown_names_offer_the_nearest():
    with pytest.raises(UserError, match="stage1-step-40000"):
        row(FAMILIES["smollm3_3b"], "stage1-stp-40000")
    with pytest.raises(UserError, match="stage of .*'stage3'.*'stage2'"):
        lr_at(FAMILIES["olmo2_1b"], 1, "stage3")
    with pytest.raises(ValueError, match="negative"):
        lr_at(FAMILIES["olmo2_1b"], -1)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("display: Pythia 70M", "displai: Pythia 70M", "unknown key.*displai.*display"),
        ("to: 1430,", "to: 150000,", "increasing"),
        ("source: [pythia_code]", "source: [pythia]", "unknown source 'pythia'"),
        ("certainty: certain", "certainty: sure", "certainty"),
        (
            'stage: pretrain\n        name: "step{step}"',
            'stage: train\n        name: "step{step}"',
            "stage 'train'",
        ),
    ],
)
def test_a_broken_file_is_told_by_key(tmp_path, old, new, message):
    text = FILE.read_text()
    head, tail = text.split("  pythia_70m:")
    assert old in tail
    broken = tmp_path / "families.yaml"
    broken.write_text(head + "  pythia_70m:" + tail.replace(old, new))
    with pytest.raises(UserError, match=message) as e:
        load_families(broken)
    assert str(broken) in str(e.value) and "\n" not in str(e.value)
