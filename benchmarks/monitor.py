"""What the monitor costs: training with it at its default interval and without it, in turns.

Our update on the mini profile's model and batch, one thread. A round is as many updates as lie between two readings, once
with the monitor called after each (one of the calls is a reading) and once without, the order alternating. The cost is
the time of the monitor's own calls over that of the updates around them, median over the rounds; beside it stands that
of the rounds as wholes, which also shows what a reading does to caches, and the noise of the machine. Prints and records
milliseconds per update; fails above 2 %.

    python benchmarks/monitor.py [--rounds 5]
"""

from __future__ import annotations

import statistics
import time

import common
import torch

from ptq_dynamics.evaluation.monitor import RTN, QuantizationMonitor
from ptq_dynamics.models import neox
from ptq_dynamics.quantization.spec import QuantSpec
from ptq_dynamics.training.step import Learner, OptimizerConfig

LR = 1e-3
SEQUENCES = 32  # as `QuantizationMonitor.of` takes
MOST = 0.02


def ids(vocab_size: int, sequences: int, length: int, seed: int) -> torch.Tensor:
    """Random ids: speed does not depend on the text."""
    return torch.randint(vocab_size, (sequences, length), generator=torch.Generator().manual_seed(seed))


def main() -> None:
    rounds = common.rounds(__doc__, 5)
    params = common.mini()
    study, vocab_size = params.studies["token_budgets"], params.corpus.vocab_size
    context = study.model.context
    tokens = ids(vocab_size, study.sequences, context + 1, 0)
    held_out, calibration = ids(vocab_size, SEQUENCES, context + 1, 1), ids(vocab_size, SEQUENCES, context, 2)
    model = neox.build(study.model, vocab_size, seed=0)
    learner = Learner(model, OptimizerConfig(), common.PRECISION, compiled=neox.can_compile())

    def updates(monitor: QuantizationMonitor | None, count: int) -> tuple[float, float]:
        """Seconds of ``count`` updates with all around them, and of the monitor's calls among these."""
        watching, start = 0.0, time.perf_counter()
        for step in range(1, count + 1):
            loss, _ = learner.update(tokens, LR, study.sequences)
            if monitor is not None:
                before = time.perf_counter()
                monitor(model, step, loss)
                watching += time.perf_counter() - before
        return time.perf_counter() - start, watching

    costs = {}
    for what, quantizers in (("RTN at 4 and 3 bit", RTN), ("GPTQ at 3 bit", (QuantSpec(bits=3),))):
        monitor = QuantizationMonitor(held_out, quantizers, calibration)
        every = monitor.every
        updates(None, 20)
        monitor(model, every)
        plain, own, whole = [], [], []
        for i in range(rounds):
            took = {}
            for watched in (True, False) if i % 2 == 0 else (False, True):
                took[watched] = updates(monitor if watched else None, every)
            total, watching = took[True]
            plain.append((total - watching) / every)
            own.append(watching / (total - watching))
            whole.append(total / took[False][0] - 1)
        cost, update = statistics.median(own), statistics.median(plain)
        name = f"training with the monitor, ms/update, {what}, every {every} updates"
        print(
            f"{name}: {1000 * update * (1 + cost):.2f} against {1000 * update:.2f}, cost {100 * cost:.2f} % "
            f"({100 * min(own):.2f} to {100 * max(own):.2f}; of whole rounds {100 * statistics.median(whole):.2f}, "
            f"{100 * min(whole):.2f} to {100 * max(whole):.2f})",
            flush=True,
        )
        common.record(
            name, 1000 * update * (1 + cost), 1000 * update, 1 / (1 + cost), "the same training without it"
        )
        costs[what] = cost
    if over := [w for w, c in costs.items() if c > MOST]:
        raise SystemExit(f"the monitor costs more than {100 * MOST:g} % of training: {', '.join(over)}")


if __name__ == "__main__":
    main()
