"""Run by test_torchtpu.py in an environment with torch_tpu: a sweep on a Ray cluster. Prints JSON.

One host has two chips and one has one; each is XLA's CPU plugin.

CORPUS RESULTS
"""

import json
import os
import sys
from pathlib import Path

from rich.console import Console
from tpu_trials import trials

import mup_tpu.jobs  # noqa: F401  (before ray: it chooses how Ray's processes know each other)
from mup_tpu.config import RunOptions, Sweep, SweepOptions
from mup_tpu.store import load_runs
from mup_tpu.tpu import hosts
from mup_tpu.tuning.sweep import run_sweep

RATES = (0.003, 0.01, 0.02)
take_chips = hosts.take_chips


def on_a_chip() -> None:
    """Give a worker the chip that Ray names; the plugin stands in for it."""
    import ray

    take_chips()
    import tpu_on_cpu  # noqa: F401  (before torch)

    seen = {name: value for name, value in os.environ.items() if name.startswith("TPU_")}
    seen["node"] = ray.get_runtime_context().get_node_id()
    Path(os.environ["SEEN"], str(os.getpid())).write_text(json.dumps(seen))


def main(corpus: str, results: str) -> None:
    import ray
    import tpu_ray_program  # workers import `on_a_chip` by this name
    from ray.cluster_utils import Cluster

    os.environ["SEEN"] = f"{results}/seen"
    Path(os.environ["SEEN"]).mkdir(parents=True)
    lean = {"num_cpus": 0, "no_monitor": True, "include_log_monitor": False}
    cluster = Cluster(initialize_head=True, head_node_args=lean)
    for chips in (2, 1):
        cluster.add_node(num_cpus=chips, resources={"TPU": chips})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    hosts.take_chips = tpu_ray_program.on_a_chip
    base = trials(corpus, "gpt2", "float32")[1]
    axes = {"scale": {"width": (32,)}, "tune": {"learning_rate": RATES}}
    sweep = Sweep("chips", base, **axes, compare={"parametrization": ("mup",)})
    options = SweepOptions(address="local", pack_size=1)
    outcome = run_sweep(sweep, results, options, RunOptions(device="tpu", threads=1), Console(quiet=True))
    runs = load_runs(results).sort_values("lr")
    seen = [json.loads(path.read_text()) for path in Path(os.environ["SEEN"]).iterdir()]
    rows = {"losses": runs["loss"].tolist(), "devices": runs["device"].tolist()}
    print(json.dumps({"outcome": outcome, "seen": seen, **rows}))
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
