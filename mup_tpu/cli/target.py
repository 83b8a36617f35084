"""Commands about a large model: plan the runs that predict its values, and train it with them, transfer."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Annotated, Any

import tyro

from mup_tpu.cli.analysis import folder_of_plan, show
from mup_tpu.cli.console import Console, to_json, write_new
from mup_tpu.cli.study import StudyOptions, refuse_options_of_networks
from mup_tpu.cli.sweep import show_and_judge
from mup_tpu.config import RunOptions, Sweep, SweepOptions, Trial
from mup_tpu.config.options import File, FolderName, Repeated, TransferOptions, Where
from mup_tpu.config.toml import kind_of, load_sweep, read_toml, split_axis
from mup_tpu.config.values import as_number, parse_number, parse_price, parse_seconds
from mup_tpu.errors import ConfigError, StoreError


def transfer(
    path: Where,
    target: TransferOptions = TransferOptions(),
    results: FolderName | None = None,
    run: RunOptions = RunOptions(),
    address: str | None = None,
    study: StudyOptions = StudyOptions(),
) -> None:
    """Train a larger model with the hyperparameters of a search or sweep.

    A search gives its best trials. A sweep gives its rule's predicted optimum at the target (mup's by
    default), a plan its target's; the prediction is kept (predictions.json) and scored.

    Args:
        path: Results folder of the search, sweep, study or plan.
        target: Scale of the transfer, and its trials there.
        results: Results folder; by default PATH_transfer.
        run: Options of each trial.
        address: Run on Ray: "local", or a cluster's address, "auto" or host:port.
        study: Options of a study. Without its trainer the folder is made for mup-tpu ask and tell.
    """
    from mup_tpu.store import load_axes
    from mup_tpu.tuning.transfer import Transfer, tuned_words
    from mup_tpu.words.names import rule_name

    console, path, where = Console(), folder_of_plan(path), SweepOptions(address)
    if load_axes(path).is_study:
        from mup_tpu.study.target import target_study

        refuse_options_of_networks(run, where)
        if study.trainer is None and (study != StudyOptions() or where != SweepOptions()):
            raise ConfigError("options of a study's training need --trainer")
        made, sentences = target_study(path, target, results)
        for sentence in sentences:
            console.print(sentence)
        if study.trainer is None:
            console.print(
                "train it with these values, or give --trainer; "
                f"mup-tpu ask {made.folder} gives its id, mup-tpu tell {made.folder} ID LOSS its loss"
            )
            return
        ended = study.run(made, study.trainer, where, run.price)
        show_and_judge(ended, made.folder, lambda: show(made.folder))
        return
    moved = Transfer(path, target)
    if study != StudyOptions():
        raise ConfigError("trainer, workers, timeout and resources need a folder of a study")
    for warning in moved.warnings:
        console.print(f"warning: {warning}", style="yellow")
    for origin in moved.origin:
        console.print(origin)
    try:
        moved.keep(path)
    except StoreError as error:  # one may transfer from a folder that others own
        console.print(f"warning: the prediction could not be stored: {error}", style="yellow")
    folder = results or f"{path.rstrip('/')}_transfer"
    outcome = moved.run(folder, where, run, console)
    moved.keep(folder)
    runs, at = moved.reached(folder), moved.size
    for row in runs.to_dict("records"):
        console.print(
            f"{at}, {rule_name(row['parametrization'])}, {tuned_words(moved.tuned, row)}, "
            f"seed {row['seed']}: {row['status']}, loss {row['loss']:.4f} nat/token"
        )
    for sentence in moved.outcomes(runs):
        console.print(sentence, style="bold")
    show_and_judge(outcome, folder, lambda: None)


def plan(
    file: Annotated[File | None, tyro.conf.Positional] = None,
    at: Repeated = (),
    budget: str | None = None,
    trainer: str | None = None,
    probe: str | None = None,
    tune: Repeated = (),
    fix: Repeated = (),
    rule: str | None = None,
    table: Annotated[str | None, tyro.conf.arg(name="from")] = None,
    on: str | None = None,
    mfu: float = 0.3,
    price: str | None = None,
    out: File | None = None,
    json: bool = False,
) -> None:
    """Plan the runs, within a budget, that predict a large model's hyperparameters.

    Writes the plan as a sweep of our networks, or as a study of your own training. `mup-tpu sweep FILE` runs
    it, and `mup-tpu predict` then answers for the target.

    Args:
        file: TOML file of a sweep of our networks, whose parametrizations are the choices, or of a study of
            your own training, whose names are taken. Without a file the target is a transformer of yours:
            sizes that are not given are derived by published laws, which the plan names.
        at: Sizes of the target: params=1.3B, or width=2048 depth=24 tokens=26e9 batch=0.5M (tokens), or the
            config.json of transformers.
        budget: FLOP (1e20), or a time on this machine or --on (200h); by default a tenth of the target's run.
        trainer: Your training, as for sweep: my_package.my_module:train, or a command line with {names}.
        probe: Time the --trainer at the sizes of the plan, each for at most this time: 60s.
        tune: Further hyperparameters of your transformer, with values to start from:
            weight_decay=0.025,0.1,0.4; a file names its own.
        fix: Exponents that you know: width=0 if your rule keeps the optimum along the width.
        rule: Rule that your training follows, such as mup; its claims narrow the priors.
        table: Results folder or table of runs, whose drift, scatter, valleys and optimum are assumed in place
            of typical ones.
        on: Machine of the budget and the costs: a TPU type (v4-8), or GPUs (8xH100), by their FLOP/s where
            the name is not known (8x312T). By default this one.
        mfu: Share of the machine's peak that training is assumed to reach at most, between 0 and 1.
        price: Price of each device, as 2.5/h; costs are then money too.
        out: File for the plan; by default plan.toml. An existing file is never overwritten.
        json: Print JSON only, for machines; --out alone writes the file.
    """
    import mup_tpu
    from mup_tpu.tuning.plan import Speed
    from mup_tpu.words.plans import plan_lines, plan_table, plan_target

    is_time = budget is not None and as_number(budget) is None  # 200h, not 1e20
    if price is not None and on is None and not is_time:
        raise ConfigError(f"price {price} is of a machine: name it with --on, as --on 8xNAME")
    if not 0 < mfu <= 1:
        raise ConfigError(f"mfu {mfu:g} is not allowed: a share above 0, at most 1")
    base: Any = None
    if file is not None and kind_of(read_toml(file)) == "study":
        from mup_tpu.study.study import load_study

        base, named = load_study(file)
        trainer = trainer or named
    elif file is not None:
        if trainer is not None:
            raise ConfigError(f"trainer is for a study: {file} is a sweep of our networks")
        base = load_sweep(file)
    written = out or (None if json else File("plan.toml"))
    if written is not None and written.exists():
        raise ConfigError(f"out {str(written)!r} exists already: give another --out")
    console = Console(stderr=json)
    arguments: dict[str, Any] = {"target": at, "base": base, "table": table, "rule": rule, "fix": fix}
    arguments["tune"] = dict(split_axis(text, "tune") for text in tune)
    if probe is not None:
        if trainer is None:
            raise ConfigError(f"probe {probe} times a --trainer: give one")
        from mup_tpu.study.target import probed_plan

        limit_s = parse_seconds("probe", probe)
        planned = probed_plan(trainer, limit_s, console, budget=budget, **arguments)
    else:
        machine = None
        if is_time or on:
            trial = base.base if isinstance(base, Sweep) else Trial().replace(precision="auto")
            count = int(match[1]) if (match := re.match(r"(\d+)x", on or "")) else 1
            whole = _peak(on, trial)
            machine = Speed(mfu * whole, count, peak=whole, price=parse_price(price))
        with console.status("choosing runs: some seconds"):
            planned = mup_tpu.plan(budget=budget, flops_per_second=machine, **arguments)
    if trainer is not None:
        of_file = {} if base is None else {"loss": base.loss, "config": base.config}
        given = {name: text for name, text in of_file.items() if text is not None}
        planned = replace(planned, program={"trainer": trainer, **given})
    if written is not None:
        write_new(written, planned.toml())
    if json:
        Console().write(to_json(planned.to_dict()))
        return
    console.print(plan_target(planned), style="bold")
    console.print(plan_table(planned))
    first, *lines = plan_lines(planned)
    console.print(first, style="bold")
    for line in lines:
        console.print(line)
    results, options = f"results/{planned.experiment}", ""
    if is_time and on is None:
        options = f" --until-settled --budget {budget}"
    if planned.checkpoint_every:
        options += f" --checkpoint-every {planned.checkpoint_every}"
    if planned.sweep is None and trainer is None:
        options = ' --trainer "python train.py ..."' + options
    console.print(f"wrote {written}; next:", wrap=False)
    console.print(f"  mup-tpu sweep {written}{options}", wrap=False)
    console.print(f"  mup-tpu predict {results}", wrap=False)


def _peak(on: str | None, base: Trial) -> float:
    """Return the peak FLOP/s of a machine, all of its devices together."""
    is_auto = base.train.precision == "auto"
    if on is None:
        from mup_tpu.tuning.runner import precision_of
        from mup_tpu.tuning.sweep import machine_here

        base = base.replace(precision=precision_of(RunOptions())[0]) if is_auto else base
        machine = machine_here([base] * 8, RunOptions())
        if math.isnan(machine.flops):
            raise ConfigError(
                f"the peak of {machine.name} in {base.train.precision} is not known: give --budget as FLOP "
                "(1e20), or --on with a known machine, as H100"
            )
        return machine.flops
    from mup_tpu.devices.peak import gpu_peak_flops, tpu_type

    count, _, name = on.rpartition("x")  # 8xH100
    if re.fullmatch(r"0*[1-9]\d{0,5}", count) or not count:
        peak = gpu_peak_flops(name, "bf16" if is_auto else base.train.precision)
        if re.fullmatch(r"[\d.]+T", name):
            peak = 1e12 * parse_number(name[:-1], "on")
        if peak is not None:
            return int(count or 1) * peak
    if not re.match(r"v\d", on):
        raise ConfigError(f"on {on!r} is not a known machine: give its peak FLOP/s, as --on 8x312T")
    from mup_tpu.tuning.sweep import tpu

    return tpu(tpu_type(on)).flops
