"""What the tasks say, on tables where every accuracy is known."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from ptq_dynamics.core.errors import UserError
from ptq_dynamics.findings import downstream


def rows(tasks, seeds=(0, 1, 2)) -> pd.DataFrame:
    """Degradations by task: at constant LR, and by how much more after the decay, each seed a little apart."""
    found = []
    for task, (lost, more, guessing) in tasks.items():
        for seed in seeds:
            for branch, up in ((0, 0.0), (1_000_000, more)):  # as ``Run.labels`` has them
                like = {
                    "task": task,
                    "seed": seed,
                    "branch_tokens": branch,
                    "items": 100,
                    "n_shot": 0,
                    "bos": "not added",
                    "chance": 0.25,
                    "acc": 0.5 + 0.01 * seed,
                    "at_chance": guessing and seed == 1,
                }
                found.append(like | {"method": "none", "bits": np.nan, "degradation": np.nan})
                for bits in (4, 3):
                    value = lost + up * (1 + 0.1 * seed) + 0.02 * seed
                    found.append(like | {"method": "gptq", "bits": bits, "degradation": value})
    return pd.DataFrame(found)


TASKS = {
    "up": (0.05, 0.1, False),
    "down": (0.05, -0.1, False),
    "flat": (0.05, 0.0, False),
    "guess": (0.0, 0.5, True),
}


@pytest.fixture
def write(rules_root):
    def to(table: pd.DataFrame) -> None:
        folder = rules_root / "reports" / "tables"
        folder.mkdir(parents=True, exist_ok=True)
        table.to_csv(folder / "measurements-downstream.csv", index=False)

    return to


def test_what_each_task_says(write):
    table = rows(TASKS)
    # at "flat" the change differs in sign by seed
    flat = (table["task"] == "flat") & (table["branch_tokens"] > 0) & (table["method"] == "gptq")
    table.loc[flat, "degradation"] += table.loc[flat, "seed"].map({0: -0.05, 1: 0.0, 2: 0.05})
    write(table)
    found = downstream.summary(downstream.read()).set_index(["task", "bits"])
    assert found["says"].xs(4, level="bits").to_dict() == {
        "up": "more is lost after the decay",
        "down": "less is lost after the decay",
        "flat": "no change shown",
        "guess": "at chance: no verdict",
    }
    # by hand: changes 0.1, 0.11, 0.12; t of 2 degrees of freedom
    up = found.loc[("up", 3)]
    assert up["change"] == pytest.approx(0.11)
    assert up["change, high"] - up["change"] == pytest.approx(4.302653 * 0.01 / 3**0.5, rel=1e-5)
    assert up["degradation, constant LR"] == pytest.approx(0.07)
    assert up["accuracy, after the decay"] == pytest.approx(0.51)


def test_everything_is_written_and_chance_is_told(write, rules_root):
    write(rows(TASKS))
    figure, table = downstream.report()
    reports = rules_root / "reports"
    caption = (reports / "figures" / "downstream.txt").read_text()
    assert "nothing can be said (guess)" in caption and "100 items of up" in caption
    metrics = json.loads((reports / "metrics" / "downstream.json").read_text())
    assert metrics and not any("guess" in k for k in metrics)
    assert len(pd.read_csv(reports / "tables" / "downstream.csv")) == len(table) == 8
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["(a)", "(b)", "(c)"]


def test_one_seed_has_no_interval(write):
    write(rows({"up": (0.05, 0.1, False)}, seeds=(0,)))
    _, table = downstream.report()
    assert set(table["says"]) == {"one seed"}


def test_a_missing_table_names_the_stage(rules_root):
    with pytest.raises(
        UserError, match="measurements-downstream.csv: no such file; run `dvc repro downstream`"
    ):
        downstream.read()
