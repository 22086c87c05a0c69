"""Tables of averages, of the runs that they are made of and of soups' ingredients, given by formulas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import synthetic

from ptq_dynamics.findings.averaging import Tables

END, BRANCH, LENGTH, DENSE = 24_576_000, 8_192_000, 2_048_000, 512_000
BASE = {4: 0.01, 3: 0.05, 2: 0.3}


def average(run: str, kind: str, purpose: str, seed: int, at: Iterable[int], **labels: Any) -> dict[str, Any]:
    """Labels of a series of averages, measured ``at`` these tokens."""
    plain = {
        "window": 8,
        "interval": 1,
        "interval_tokens": DENSE,
        "ema_decay": None,
        "study": "token_budgets",
    }
    plain |= {"member": "trunk", "source": f"trunk-seed{seed}", "branch_tokens": 0, "run_tokens": END}
    return {
        "run": f"{run}-seed{seed}",
        "kind": kind,
        "purpose": purpose,
        "seed": seed,
        "ingredients": 8,
        "at": list(at),
        **plain,
        **labels,
        "parameters": 231_000,
        "evaluation_set": "validation",
        "evaluation_tokens": 204_800,
        "shape": "constant",
        "decay_tokens": 0,
        "peak_lr": 0.01,
        "final_fraction": 0.0,
    }


def tables(
    seeds: Iterable[int] = (0, 1, 2),
    budgets: Iterable[int] = (2_048_000, 4_096_000, 8_192_000, 14_336_000, 24_576_000),
    lawa_loss: float = 3.1,
    lawa_error: Mapping[int, float] = {4: 0.004, 3: 0.01, 2: 0.1},  # noqa: B006 (read only)
    soup_factor: float = 0.8,
    over_decay: float = 0.01,
    spread: float = 0.01,
    orders: Iterable[int] = (0, 1, 2),
) -> Tables:
    """Cooldowns end at 3.0 nats in full precision and about 3.15 at 3 bit, the LAWA at ``lawa_loss`` with
    ``lawa_error``, the soup at ``soup_factor`` of the ingredients' mean error, the LAWA over a decay ``over_decay``
    nats above the decay's end."""
    seeds, orders = list(seeds), list(orders)
    runs, _ = synthetic.token_budgets(seeds, budgets, spread=spread)
    branches = runs["member"] == "cooldown"
    runs.loc[branches, "parent"] = [f"trunk-seed{s}" for s in runs.loc[branches, "seed"]]
    ends = [
        synthetic.run(
            f"trunk-cooldown-order{o}", s, BRANCH + LENGTH, decay=0.2, member="cooldown", branch_tokens=BRANCH,
            parent=f"trunk-seed{s}", data_seed=o,
        )
        for s in seeds for o in orders
    ]  # fmt: skip

    def wobble(*key: int) -> float:
        return float(np.exp(synthetic.noise(*key, size=spread)))

    ingredients = synthetic.measured(
        ends,
        lambda at: 3.0 * wobble(1, at["seed"], at["data_seed"]) ** 0.02,
        lambda at, bits: BASE[bits] * wobble(2, at["seed"], at["data_seed"], bits),
    )
    series = []
    last = max(b for b in budgets)
    for s in seeds:
        series.append(average("lawa-w8-i1", "lawa", "trajectory", s, range(4_096_000, END + 1, 2_048_000)))
        for w, i in ((4, 1), (4, 2), (8, 2), (16, 1)):
            where = dict(window=w, interval=i, interval_tokens=i * DENSE)
            series.append(average(f"lawa-w{w}-i{i}", "lawa", "ablation", s, [END], **where))
        series.append(average("ema-0.8", "ema", "ablation", s, [END], window=None, ema_decay=0.8))
        end = last + LENGTH
        series.append(
            average("lawa-w2-i1-cooldown", "lawa", "decay", s, [end], window=2, member="cooldown",
                    source=f"cooldown-{last}-seed{s}", branch_tokens=last, run_tokens=end)
        )  # fmt: skip
        for kind, window in (("soup", 1), ("soup_of_lawas", 2)):
            where = dict(window=window, member="cooldown", study="soups", branch_tokens=BRANCH)
            series.append(
                average(kind, kind, "soup", s, [BRANCH + LENGTH], run_tokens=BRANCH + LENGTH, **where)
            )

    def loss(at: Mapping[str, Any]) -> float:
        if at["purpose"] == "decay":
            return 3.0 + over_decay
        if at["purpose"] == "soup":
            return 2.99
        return lawa_loss + 0.2 / (at["window"] or 9) - 0.2 / 8

    def error(at: Mapping[str, Any], bits: int) -> float:
        if at["purpose"] == "soup":
            base = BASE[bits] * soup_factor
        elif at["purpose"] == "decay":
            base = BASE[bits]
        else:
            base = lawa_error[bits]
        return base * wobble(3, at["seed"], at["tokens"] // 1000, bits, len(at["run"]))

    averages = synthetic.measured(series, loss, error, lambda r: r["at"], bits=(4, 3, 2)).drop(columns="at")
    return Tables(averages, runs, ingredients)


def write(root: Path, t: Tables) -> None:
    """A root with these tables, this repository's rules and the paper's numbers."""
    curve = pd.DataFrame({"run": [], "step": []})
    synthetic.write(root, token_budgets=(t.runs, curve), soups=(t.soups, curve))
    t.averages.to_csv(root / "reports" / "tables" / "measurements-averages.csv", index=False)
