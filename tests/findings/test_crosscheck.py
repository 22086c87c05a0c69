"""The cross-check's rule, on tables made by hand."""

from __future__ import annotations

import pandas as pd
import pytest

from ptq_dynamics.core import paths
from ptq_dynamics.core.errors import UserError
from ptq_dynamics.findings import crosscheck


def table(block_size: int = 64, **changes) -> pd.DataFrame:
    """Two checkpoints, two widths, three quantizers; ``changes`` for the last checkpoint at 3 bit, by quantizer."""
    rows = []
    for checkpoint in ("constant LR", "decayed"):
        for bits in (4, 3):
            for method, value, off in (
                ("gptq", 0.010, 0.0),
                ("gptqmodel", 0.0102, 0.0002),
                ("rtn", 0.015, 0.005),
            ):
                row = {"checkpoint": checkpoint, "tokens": 1, "method": method, "bits": bits, "group_size": 64,
                       "block_size": block_size, "ce_fp": 3.0, "ce": 3.0 * (1 + value), "seconds": 1.0, "versions": "v",
                       "relative_error": value, "relative_error_low": value - 0.0005, "relative_error_high": value + 0.0005,
                       "difference": off, "difference_low": off - 0.0004, "difference_high": off + 0.0004}  # fmt: skip
                if (checkpoint, bits) == ("decayed", 3):
                    row |= changes.get(method, {})
                rows.append(row)
    return pd.DataFrame(rows)


ABOVE = {"relative_error_low": 0.0101}  # gptqmodel's interval lies above ours
BETTER = {
    "relative_error": 0.009,
    "difference": -0.001,
    "difference_low": -0.0014,
    "difference_high": -0.0006,
}


def test_green():
    assert crosscheck.faults(table()) == [] and crosscheck.check(table()) == "green"
    # the bounds belong to the interval
    assert crosscheck.faults(table(gptqmodel={"relative_error_low": 0.010})) == []
    assert crosscheck.faults(table(rtn={"difference": -0.0003, "difference_high": 0.0})) == []


@pytest.mark.parametrize(
    ("low", "high"), [(0.0101, 0.0107), (0.0090, 0.0099)], ids=["ours too small", "ours too large"]
)
def test_red_outside_gptqmodels_interval_on_either_side(low, high):
    with pytest.raises(UserError) as e:
        crosscheck.check(table(gptqmodel={"relative_error_low": low, "relative_error_high": high}))
    assert str(e.value) == (
        "cross-check red: decayed, 3 bit: our error 1.000 % is outside gptqmodel's interval "
        f"{100 * low:.3f} to {100 * high:.3f} %"
    )


def test_red_where_round_to_nearest_is_better():
    (line,) = crosscheck.faults(table(rtn=BETTER))
    assert line.startswith("decayed, 3 bit: our error 1.000 % is above round to nearest's 0.900 %")


def test_both_faults_are_one_line():
    with pytest.raises(UserError) as e:
        crosscheck.check(table(gptqmodel=ABOVE, rtn=BETTER))
    assert str(e.value).count("decayed, 3 bit") == 2 and "\n" not in str(e.value)


def test_wider_blocks_are_another_algorithm_told_but_not_judged():
    both = pd.concat([table(), table(128, gptqmodel=ABOVE)])
    assert crosscheck.check(both) == "green"
    assert "not judged. Red by its rule: decayed, 3 bit" in crosscheck.caption(both)
    assert "Green by its rule. Hollow: blocks of 128" in crosscheck.caption(both)
    with pytest.raises(UserError, match="^cross-check red: decayed, 3 bit"):
        crosscheck.check(pd.concat([table(gptqmodel=ABOVE), table(128)]))
    with pytest.raises(UserError, match="give one a block_size that divides"):
        crosscheck.check(table(128))
    assert (
        crosscheck.check(table(128).assign(group_size=-1)) == "green"
    )  # one group: no block starts inside it


def test_a_missing_row_is_no_green():
    rows = table()
    with pytest.raises(UserError, match="crosscheck: constant LR, 4 bit: no row of gptqmodel"):
        crosscheck.check(rows[rows["method"] != "gptqmodel"])


def test_figure_caption_and_files(tmp_path, monkeypatch):
    monkeypatch.setenv("PTQ_DYNAMICS_ROOT", str(tmp_path))
    paths.tables().mkdir(parents=True)
    pd.concat([table(), table(128)]).to_csv(paths.tables() / "crosscheck.csv", index=False)
    weights = pd.DataFrame([{"method": "gptqmodel", "bits": 3, "switch": "equal options", "distance": 0.5}])
    weights.to_csv(paths.tables() / "crosscheck-weights.csv", index=False)
    fig, found, told = crosscheck.report()
    assert len(found) == 24 and len(told) == 1
    assert [t.get_text() for t in fig.legends[0].get_texts()] == ["ours", "gptqmodel", "RTN (ours)"]
    assert (paths.figures() / "crosscheck.png").is_file() and (paths.figures() / "crosscheck.pdf").is_file()
    caption = (paths.figures() / "crosscheck.txt").read_text()
    assert "Green by its rule" in caption and "groups of 64, blocks of 64" in caption
