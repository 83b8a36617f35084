"""What several of these files run."""

import contextlib
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from mup_tpu.config import Sweep, Trial
from mup_tpu.config.columns import configured
from mup_tpu.tuning.sequence import buy


@pytest.fixture(scope="session")
def one_width() -> Callable[..., Sweep]:
    """Function that returns a sweep of some rates at one width, in μP."""
    axes: dict[str, Any] = {"scale": {"width": (32,)}, "compare": {"parametrization": ("mup",)}}

    def one_width(base: Trial, *rates: float) -> Sweep:
        return Sweep("x", base, tune={"learning_rate": rates}, **axes)

    return one_width


@pytest.fixture(scope="session")
def bought() -> Callable[..., pd.DataFrame]:
    """Function that buys trials, without training, until the end or some number of rows.

    `result_of(trial, row)` gives what the trial's row has beside its configuration.
    """

    def bought(
        buyer: Any, store: Any, result_of: Callable[..., dict[str, Any]], stop: float = math.inf
    ) -> Any:
        def run(trials: dict[Any, int]) -> Counter[str]:
            done, rows = store.done(), []
            for trial in trials:
                if (name := buyer._trial_id(trial)) not in done:
                    row = configured(trial) | {"trial_id": name, "purchase": trials[trial]}
                    rows.append(row | {"status": "finished"} | result_of(trial, row))
            left = int(min(stop - len(store.results()), len(rows)))
            store.append(rows[:left])
            if left < len(rows):
                raise KeyboardInterrupt
            return Counter(finished=len(rows))

        with contextlib.suppress(KeyboardInterrupt):
            buy(buyer, run, math.inf, Console(quiet=True))
        return store.results()

    return bought
