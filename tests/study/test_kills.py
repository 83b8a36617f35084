"""Kills at random moments: MUP_TPU_KILLS of them (36 if it is not set), drawn from MUP_TPU_SEED."""

import os
import random
import signal
import time
from collections import Counter

import pandas as pd
import pytest
from killing import alive, start, starts, table, wait_for_functions

from mup_tpu.files import Folder
from mup_tpu.store import load_curves, tables

RUNNING = ["function", "worker"]
KILLS, SEED = int(os.environ.get("MUP_TPU_KILLS", "36")), int(os.environ.get("MUP_TPU_SEED", "0"))


def kill_one(generator, driver, folder):
    """Kill the driver, or a process of a trial that runs; return which, or None if it had just ended."""
    whom = generator.choices(["driver", *RUNNING], [1, 2, 2])[0]
    running = alive(folder)
    if whom != "driver" and not running:
        return None
    target = driver.pid if whom == "driver" else generator.choice(running)[RUNNING.index(whom)]
    try:
        os.kill(target, signal.SIGKILL)
    except ProcessLookupError:
        return None
    return whom


def run_killed(generator, folder, killed, most, **options):
    """Run the study to its end, killing until `most` are killed; a killed driver is started again."""
    while True:
        begun = len(starts(folder))
        driver = start(folder, **options)
        if generator.random() < 0.15 and killed.total() < most:  # before it has begun anything, perhaps
            time.sleep(generator.uniform(0, 5))
            driver.kill()
            killed["driver"] += 1
        while driver.poll() is None and killed.total() < most:
            if len(starts(folder)) == begun:
                time.sleep(0.05)
                continue
            time.sleep(generator.expovariate(1 / 0.6))
            if driver.poll() is None and (whom := kill_one(generator, driver, folder)):
                killed[whom] += 1
        said = driver.communicate(timeout=300)[0]
        if driver.returncode == 0:
            return
        assert driver.returncode == -signal.SIGKILL, said


@pytest.mark.nightly
@pytest.mark.parametrize("where", ["pool", "ray"])
def test_random_kills_leave_the_table_of_a_run_that_was_left_alone(where, tmp_path):
    most = KILLS if where == "pool" else KILLS // 9
    options = {"ray": True, "resources": {"CPU": 1}} if where == "ray" else {}
    generator, killed, rounds = random.Random(f"{where} {SEED}"), Counter(), 0
    alone = tmp_path / "alone" / "killed"
    driver = start(alone)
    said = driver.communicate(timeout=300)[0]
    assert driver.returncode == 0, said
    while killed.total() < most:
        rounds += 1
        folder = tmp_path / str(rounds) / "killed"
        run_killed(generator, folder, killed, most, **options)
        while (failed := table(folder)["status"] == "failed").any():  # thrice killed: tried again
            finished = table(folder)[~failed]
            run_killed(generator, folder, killed, most, **options)
            again = table(folder).set_index("trial_id").loc[finished["trial_id"]].reset_index()
            pd.testing.assert_frame_equal(again[finished.columns], finished.reset_index(drop=True))
        pd.testing.assert_frame_equal(table(folder), table(alone))
        pd.testing.assert_frame_equal(load_curves(folder), load_curves(alone))
        stored = tables.read_parts(Folder(folder), "runs", tables.part_names(Folder(folder), "runs"), None)
        parts = pd.concat(part.to_pandas() for part in stored)
        counts = parts.loc[parts["status"] == "finished", "trial_id"].value_counts()
        assert (counts == 1).all(), "a trial has one row with a result"
        assert not list((folder / "work").iterdir())
        wait_for_functions(driver, folder, False)
        print(f"{where}, seed {SEED}, round {rounds}: {dict(killed)}", flush=True)
