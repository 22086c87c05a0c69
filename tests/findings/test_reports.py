"""What every finding writes."""

from __future__ import annotations

import importlib
import json
import math

import matplotlib.pyplot as plt
import pytest

from ptq_dynamics.findings import style

FINDINGS = ("token_budgets", "peak_lr", "schedules", "weight_decay", "cooldowns")


@pytest.fixture
def quick(monkeypatch) -> None:
    """Pictures of few points: their look is not under test."""
    real = style.use

    def use() -> None:
        real()
        plt.rcParams["savefig.dpi"] = 30

    monkeypatch.setattr(style, "use", use)


@pytest.mark.parametrize("name", FINDINGS)
def test_a_toy_profile_writes_everything_and_judges_nothing(one_seed_root, quick, name) -> None:
    finding = importlib.import_module(f"ptq_dynamics.findings.{name}")
    figure, table, entries = finding.report(False)
    reports = one_seed_root / "reports"
    for ending in ("png", "pdf", "txt"):
        assert (reports / "figures" / f"{name}.{ending}").stat().st_size > 100
    assert len(table) and (reports / "tables" / f"{name}.csv").read_text().startswith(str(table.columns[0]))
    metrics = json.loads((reports / "metrics" / f"{name}.json").read_text())
    assert all(math.isfinite(v) for v in metrics.values())
    assert {e["verdict"] for e in entries} <= {"inconclusive"}
    if entries:
        assert json.loads((reports / "claims" / f"{name}.json").read_text()) == json.loads(
            json.dumps(entries)
        )
    letters = [ax.get_title(loc="left") for ax in figure.axes if ax.get_title(loc="left")]
    assert letters == [f"({c})" for c in "abcdefgh"[: len(letters)]] and len(letters) >= 4
    labelled = [ax for ax in figure.axes if ax.get_title(loc="left")]
    assert all(ax.get_xlabel() or name == "token_budgets" for ax in labelled)


def test_a_figure_is_the_same_bytes_every_time(rules_root) -> None:
    found = []
    for _ in range(2):
        style.use()
        figure, ax = plt.subplots(figsize=(1, 1))
        ax.plot([1, 2], [1, 4])
        png = style.save(figure, "x", "caption")
        found.append(
            (png.read_bytes(), png.with_suffix(".pdf").read_bytes(), png.with_suffix(".txt").read_text())
        )
    assert found[0] == found[1] and found[0][2] == "caption\n"


@pytest.mark.parametrize("low", [0.002, 0.95])
@pytest.mark.parametrize("ratio", [1.1, 1.5, 2, 3.9, 4.1, 30, 1000])
def test_a_logarithmic_axis_of_any_span_has_labels_that_do_not_overlap(low, ratio) -> None:
    style.use()
    figure, ax = plt.subplots(figsize=(style.WIDTH / 2, 2.5))
    ax.plot([low, low * ratio], [1, 2])
    ax.set_xscale("log")
    style.plain_log(ax.xaxis)
    figure.canvas.draw()
    left, right = ax.get_xlim()
    shown = [t.label1 for t in ax.xaxis.get_major_ticks() if left <= t.get_loc() <= right]
    boxes = sorted((label.get_window_extent() for label in shown), key=lambda b: b.x0)
    assert len(boxes) >= 2 and all(label.get_text() for label in shown)
    assert all(a.x1 < b.x0 for a, b in zip(boxes, boxes[1:], strict=False))
    assert not any(label.get_text() for label in ax.get_xticklabels(minor=True))
    plt.close(figure)
