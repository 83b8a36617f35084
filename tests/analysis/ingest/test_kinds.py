# ruff: noqa: E501, a row a kind
"""Tables as people and tools write them, from one generator whose runs are known.

A kind writes `RUNS` and returns its path; `KINDS` has its options and the answer that is right.
"""

import json
import os
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from mup_tpu import cli
from mup_tpu.analysis import load_table
from mup_tpu.analysis.ingest.files import read_file
from mup_tpu.analysis.ingest.readers import find_reader, metrics_of
from mup_tpu.cli.console import OPTIONS
from mup_tpu.cli.table import TableOptions
from mup_tpu.errors import MupTpuError, TableError, fields_as_options
from mup_tpu.words.reasons import notes

WIDTHS, EXPONENTS = (64, 128, 256), range(-10, -5)
RUNS = pd.DataFrame(
    [(w, 2.0**x, round(3 - w / 640 + 0.05 * (x + 8) ** 2, 4)) for w in WIDTHS for x in EXPONENTS],
    columns=["width", "lr", "loss"],
)
TWICE = pd.concat([RUNS.assign(seed=seed, loss=RUNS["loss"] + 0.01 * seed) for seed in (0, 1)])
SIZES = {64: "15M", 128: "130M", 256: "1.3B"}
PARAMS = {64: 15e6, 128: 130e6, 256: 1.3e9}


@dataclass(frozen=True)
class Kind:
    """A way to write the runs, and what is right."""

    write: Callable[[Path], Path]
    options: Mapping[str, object] = field(default_factory=dict)
    """Options of `TableOptions`; none where the table is read as it is."""
    scale: Mapping[int, float] = field(default_factory=dict)
    """Scale by width, where it is another."""
    rates: float = 1.0
    """Factor on the learning rates."""
    losses: Callable[[pd.Series], pd.Series] = lambda loss: loss
    note: str = ""
    """Part of a note that must be printed."""
    error: str = ""
    """Part of the sentence with which the table must be refused."""


KINDS: dict[str, Kind] = {}


def kind(name, **right):
    """Enter a function that writes a table under a name."""

    def enter(write):
        KINDS[name] = Kind(write, **right)
        return write

    return enter


def text(name, content, file="runs.csv", **right):
    """Enter a table by its text, or a frame that is written as CSV."""

    def write(folder):
        made = content() if callable(content) else content
        made = made.to_csv(index=False) if isinstance(made, pd.DataFrame) else made
        (folder / file).write_bytes(made if isinstance(made, bytes) else made.encode())
        return folder / file

    KINDS[name] = Kind(write, **right)


def renamed(column="loss", change=lambda loss: loss, table=RUNS, **more):
    frame = table.assign(loss=change(table["loss"])).rename(columns={"loss": column})
    return frame.assign(**more)


def wide(by, heading, rows="width"):
    """A column for each value of one axis, with a heading for each."""
    table = RUNS.pivot_table("loss", rows, by)
    return table.rename(columns=heading).reset_index().rename_axis(columns=None)


def markdown(table):
    rows = [[str(value) for value in row] for row in table.itertuples(index=False)]
    head, *others = [f"| {' | '.join(row)} |" for row in [[*map(str, table)], *rows]]
    return "\n".join([head, "|" + "---:|" * len(table.columns), *others]) + "\n"


def cells(column, change, table=RUNS):
    return table.assign(**{column: table[column].map(change)})


def german(table, digits=6):
    table = table.assign(
        loss=[comma(v, digits) for v in table["loss"]], lr=[f"{v:.9f}".replace(".", ",") for v in table["lr"]]
    )
    return table.to_csv(index=False, sep=";")


comma = lambda value, digits=6: f"{value:.{digits}f}".replace(".", ",")  # noqa: E731
raised = lambda x: f"2{str(x).translate(str.maketrans('0123456789-', '⁰¹²³⁴⁵⁶⁷⁸⁹⁻'))}"  # noqa: E731
log2 = lambda value: int(np.log2(value))  # noqa: E731

CSV, ROWS = RUNS.to_csv(index=False), RUNS.to_dict("records")
NESTED = [{"config": {"model": {"width": r["width"]}, "lr": r["lr"]}, "loss": r["loss"]} for r in ROWS]


def packed(content, how):
    with pa.BufferOutputStream() as sink:
        with pa.CompressedOutputStream(sink, how) as file:
            file.write(content.encode())
        return sink.getvalue().to_pybytes()


# fmt: off
# Values that are easily read as others
thousands = {w: 16 * w for w in WIDTHS}
points = lambda w: f"{16 * w:,}".replace(",", ".")  # noqa: E731
text("1.024 beside decimal commas", german(cells("width", points)), scale=thousands)
text("1.024 beside decimal commas in quotes", cells("width", points, cells("lr", lambda lr: comma(lr, 9), cells("loss",
     comma))), scale=thousands)
for failed, less in ((0.0, 0.0), (-1.0, 1.5)):
    text(f"failed runs with loss {failed:g}",
         pd.concat([RUNS.assign(loss=RUNS["loss"] - less), RUNS[::5].assign(lr=2.0**-5, loss=failed)]),
         losses=lambda loss, less=less: loss - less, note=f"3 runs with loss {failed:g} left out")
text("failed runs with one loss", pd.concat([RUNS, *(RUNS[::5].assign(lr=2.0**x, loss=2.97) for x in (-5, -4, -3))]),
     note="9 runs with loss 2.97 left out")
for failed in (999.0, 1e9):
    text(f"failed runs with loss {failed:g}", RUNS.assign(loss=RUNS["loss"].where(RUNS["lr"] < 2**-6, failed)),
         losses=lambda loss: loss.where(RUNS["lr"] < 2**-6, np.inf), note="runs that count as diverged: 3")
for flag, lost in (("diverged", True), ("converged", "no")):
    text(f"a column {flag}", RUNS.assign(**{flag: np.where(RUNS["lr"] > 2**-7, lost, {True: False}.get(lost, "yes"))}),
         losses=lambda loss: loss.where(RUNS["lr"] < 2**-6, np.inf))
for heading, factor in (("LR (x1e-4)", 1e-4), ("lr [1e-3]", 1e-3), ("lr (×10⁻³)", 1e-3), ("lr x 1e3", 1e-3)):
    text(f"rates in a column {heading}", RUNS.assign(**{heading: RUNS["lr"] / factor}).drop(columns="lr"),
         note=f"are multiplied by {factor:g}")
for heading, log in (("log10(lr)", np.log10), ("ln_lr", np.log), ("-log2(lr)", lambda lr: -np.log2(lr))):
    text(f"rates as {heading}", RUNS.assign(**{heading: log(RUNS["lr"])}).drop(columns="lr"))
text("rates as log_lr", RUNS.assign(log_lr=np.log2(RUNS["lr"])).drop(columns="lr"), error="of an unknown base")
text("parameters (M)", RUNS.rename(columns={"width": "Params (M)"}), scale={w: w * 1e6 for w in WIDTHS})
for word in ("mean", "avg", "std", "Average"):
    text(f"rows of seed {word}", pd.concat([RUNS.assign(seed="0"), RUNS.assign(seed=word, loss=RUNS["loss"] / 2)]),
         note=f"15 rows left out that summarise others, with seed {word}")
text("rows of averages", pd.concat([RUNS.astype({"lr": object}), RUNS[::5].assign(lr="average", loss=1.0)]),
     note="3 rows left out")
for counter in ("training_iteration", "_step", "global_step", "epoch", "tokens_seen"):
    end = RUNS["lr"].map({2.0**-10: 1, 2.0**-9: 4, 2.0**-6: 1}).fillna(16)
    text(f"runs stopped early, by {counter}", RUNS.assign(loss=RUNS["loss"] + 1 - end / 16, **{counter: end}),
         losses=lambda loss: loss.where(~RUNS["lr"].isin([2.0**-10, 2.0**-9, 2.0**-6]), np.inf),
         note="9 runs ended before their peers")
short = pd.DataFrame({"width": WIDTHS, "lr": 2.0**-5, "loss": 4.0, "_step": (320, 410, 570)})
text("runs that were cut", pd.concat([RUNS.assign(_step=1000), short]),
     note="3 runs left out, since they did not end with their peers")
text("a run that went on", pd.concat([RUNS.assign(_step=100), short[:1].assign(_step=200, loss=2.0)]),
     note="1 runs left out")
text("steps that follow the width", RUNS.assign(step=RUNS["width"] * 4))
for name, shares in (
    ("linear", {250: 0.75, 500: 0.5, 1000: 0.0}),
    ("cosine", {250: 0.8682, 500: 0.55, 1000: 0.1}),
):
    text(f"rates of a {name} schedule", pd.concat([RUNS.assign(
        run=[f"run {i}" for i in range(15)], step=step, lr=RUNS["lr"] * share, loss=RUNS["loss"] + 1 - step / 1000)
        for step, share in shares.items()]), note="peak of the schedule")
text("rates of a schedule whose warm-up ends before the first step", pd.concat([RUNS.assign(
    run=[f"run {i}" for i in range(15)], step=step, lr=RUNS["lr"] * (1000 - step) / 850, loss=RUNS["loss"] + 1 - step / 1000)
    for step in (250, 500, 1000)]), error="name the runs such as")
text("rates of an unknown schedule", pd.concat([RUNS.assign(
    run=[f"run {i}" for i in range(15)], step=step, lr=RUNS["lr"] * share, loss=RUNS["loss"] + 1 - step / 1000)
    for step, share in ((500, 0.7), (750, 0.1), (1000, 0.05))]), error="name the runs such as")

# What anybody in the field reads at a glance
for column, names in {
    "lr": ("peak_base_lr", "Matrix LR", "η", "muon_lr"),
    "loss": ("final_validation_loss", "paloma/macro_loss", "held-out loss", "eval/cross_entropy"),
    "width": ("Hidden Size", "embed dim"),
}.items():
    for heading in names:
        text(f"a heading {heading}", RUNS.rename(columns={column: heading}))
text("2e-4 (best)", cells("lr", lambda lr: f"{lr} (best)" if lr == 2**-8 else str(lr)))
text("about 2^-7", cells("lr", lambda lr: f"~2^{log2(lr)}"))
text("powers in TeX", cells("lr", lambda lr: f"$2^{{{log2(lr)}}}$"))
text("fractions as 1/256", cells("lr", lambda lr: f"1/{round(1 / lr)}"))
text("errors in brackets", cells("loss", "{} (0.02)".format),
     note="numbers after ± in loss are read as standard errors")
for written in ("—", "n/a", "NaN (diverged)", "> 10"):
    text(f"a diverged run as {written}", RUNS.assign(loss=[*map(str, RUNS["loss"][:-1]), written]),
         losses=lambda loss: loss.where(RUNS.index < 14, np.inf))
for remark in ("3.4 (crashed)", "5.13 [killed at step 300]", "4.9 (running)", "OOM"):
    text(f"a failed run as {remark}", pd.concat([RUNS.astype({"loss": object}), RUNS[:1].assign(lr=2.0**-5, loss=remark)]),
         note=f"1 {remark} runs left out")
for remark in ("7.2 (diverged)", "7.2 - diverged"):
    text(f"a diverged run as {remark}", RUNS.assign(loss=[*map(str, RUNS["loss"][:-1]), remark]),
         losses=lambda loss: loss.where(RUNS.index < 14, np.inf))
text("losses and rates with words", cells("lr", "{} (peak)".format, cells("loss", "{} nats".format)))
text("a remark that is not known", cells("loss", "{} (other data)".format), error="must be numbers")
for flag, lost in (("exit_code", 137), ("crashed", True), ("success", False)):
    text(f"failed runs by a column {flag}", pd.concat([RUNS.assign(**{flag: {137: 0}.get(lost, not lost)}),
         RUNS[:1].assign(lr=2.0**-5, **{flag: lost})]), note=f"1 {flag}={lost} runs left out")
text("two diverged runs of a cell", pd.concat([RUNS.assign(loss=RUNS["loss"].where(RUNS.index < 14)), RUNS[14:].assign(
    loss=np.nan)]), losses=lambda loss: loss.where(RUNS.index < 14, np.inf))
text("a config beside names that round", RUNS.assign(trial_name=[f"train_{i}_lr={lr:.4f}" for i, lr in enumerate(
    RUNS["lr"])]).rename(columns={"lr": "config/lr"}))
text("names that a tracker made", TWICE.drop(columns="seed").assign(Name=[f"lively-sun-{i}" for i in range(30)]),
     losses=lambda loss: pd.concat([loss, loss + 0.01]), note="repeats of a cell are read as its seeds")
text("columns that are empty beside settings in names", pd.DataFrame({"Name": [f"w{w}-lr{lr}" for w, lr in zip(
    RUNS["width"], RUNS["lr"], strict=True)], "width": np.nan, "lr": np.nan, "val/loss": RUNS["loss"]}))
text("sizes in names of models", RUNS.assign(model=RUNS["width"].map(lambda w: f"pythia-{w}m")).drop(columns="width"),
     scale={w: w * 1e6 for w in WIDTHS})
text("bits beside a perplexity", RUNS.assign(valid_loss=RUNS["loss"] / np.log(2), ppl=np.exp(RUNS["loss"])).drop(
    columns="loss"), note="bits per token")
text("bits per token in brackets", renamed("val_loss [bits/token]", lambda loss: loss / np.log(2)),
     note="bits per token")
text("groups of columns", f"config,config,metrics\n{CSV}")
text("units below the names", CSV.replace("loss\n", "loss\n(dim),(peak),(nats)\n", 1))
text("a title and a source", f"Sweep of March,,\n{CSV}\nSource: own runs, 8xA100\n")
text("a comma at the end of each row", CSV.replace("\n", ",\n").replace(",\n", "\n", 1))
text("names of rows, as R writes them", re.sub("^", lambda at: f"run{at.start()}," * (at.start() > 0), CSV, flags=re.M))
text("more cells than names", re.sub(r"$", ",7,8", CSV, flags=re.M).replace(",7,8", "", 1), error="2 more cells than")
text("a cell more than names", re.sub(r"$", ",7", CSV, flags=re.M).replace(",7", "", 1), error="1 more cells than")
text("comments between rows", CSV.replace("128,", "# wider, now\n128,", 1))

# Shapes
text("merged cells", RUNS.astype({"width": object}).assign(width=RUNS["width"].where(RUNS.index % 5 == 0)))
text("a column for each seed", TWICE.pivot(index=["width", "lr"], columns="seed", values="loss").add_prefix(
    "loss_seed").reset_index(), losses=lambda loss: pd.concat([loss, loss + 0.01]))
text("a row a metric", pd.concat([RUNS.assign(metric=m, value=RUNS["loss"] + d) for m, d in (("train/loss", -0.5),
     ("val/loss", 0))]).drop(columns="loss"))
text("JSON of widths and rates", json.dumps({w: dict(zip(of["lr"], of["loss"], strict=True)) for w, of in
     RUNS.groupby("width")}), "runs.json")
text("JSON with histories", json.dumps([{"config": {"width": r["width"], "lr": r["lr"]}, "history": [
    {"step": s, "loss": r["loss"] + 1 - s / 10} for s in (5, 10)]} for r in RUNS.to_dict("records")]), "r.json")
text("YAML", "".join(f"- width: {r['width']}\n  lr: {r['lr']}\n  loss: {r['loss']}\n" for r in RUNS.to_dict(
    "records")), "runs.yaml")
text("LaTeX", "\\begin{tabular}{lll}\n\\toprule\n" + CSV.replace(",", " & ").replace("\n",
     " \\\\\n") + "\\end{tabular}", "t.txt")
text("a table in a frame", "+---+\n" + "".join(f"| {line.replace(',', ' | ')} |\n+---+\n" for line in CSV.split()),
     "t.txt")
# Files of a run each: name, and text of (width, rate, loss)
STEPS = "".join(f"step {s} loss {{loss:.4f}}\n" for s in (50, 100))
FOLDERS = {
     "logs that begin with the command": ("{i}.log", "$ python train.py --width {w} --lr {lr}\n" + STEPS),
     "logs that begin with the configuration": ("{i}.out", "Namespace(d_model={w}, lr={lr}, seed=0)\n" + STEPS),
     "CSV files": ("w{w}_lr{lr}/history.csv", "epoch,loss,val_loss\n1,9.1,9.2\n2,2.1,{loss}\n"),
     "JSON files": ("{i}/summary.json", '{{"d_model": {w}, "lr": {lr}, "final": {{"val_loss": {loss}}}}}'),
     "logs of ranks": ("w{w}_lr{lr}/rank{r}.log", STEPS.replace("{loss:.4f}", "{loss:.4f} of rank {r}")),
}
for name, (path, content) in FOLDERS.items():

    def write(folder, path=path, content=content):
        for i, (w, lr, loss) in enumerate(RUNS.itertuples(index=False)):
            for r in (0, 1):
                file = folder / "runs" / path.format(w=w, lr=lr, i=i, r=r)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(content.format(w=w, lr=lr, loss=loss, r=r))
        return folder / "runs"

    KINDS[f"a folder of {name}"] = Kind(write)

text("a log alone", STEPS.format(loss=2.5) * 2, "train.log", error="the log of one run, which has no optimum")

# Files and texts
text("CSV", CSV)
text("a mark of UTF-8", CSV.encode("utf-8-sig"))
text("UTF-16", RUNS.to_csv(index=False, sep="\t").encode("utf-16"))
text("Windows-1252", RUNS.assign(note="grün").to_csv(index=False).encode("cp1252"))
text("TSV", RUNS.to_csv(index=False, sep="\t"), "runs.tsv")
text("columns by blanks", RUNS.to_csv(index=False, sep=" "), "runs.txt")
text("comments above the head", "# made by hand\n\nsep=,\n" + CSV)
text("blanks around the names", CSV.replace("width,lr,loss", " width , lr ,loss "))
text("decimal commas", "sep=;\n" + german(RUNS))
text("decimal commas of three digits", lambda: german(RUNS.assign(loss=RUNS["loss"].round(3)), 3),
     losses=lambda loss: loss.round(3))
for how, file in (("gzip", "PACKED.CSV.GZ"), ("bz2", "star*.csv.bz2")):
    text(f"CSV in {how}", packed(CSV, how), file)
text("JSON of rows", json.dumps(ROWS), "runs.json")
text("JSON under a key", json.dumps({"runs": ROWS}), "runs.json")
text("JSON by run", json.dumps({f"run-{i}": row for i, row in enumerate(ROWS)}), "runs.json")
for orient in ("columns", "split", "table"):
    text(f"pandas' JSON, {orient}", RUNS.to_json(orient=orient, index=orient == "columns", double_precision=15),
         "runs.json")
text("JSON lines", "\n".join(map(json.dumps, NESTED)), "runs.ndjson")
text("JSON by size", lambda: json.dumps({size.lower().replace(".", "_"): RUNS[RUNS["width"] == w].drop(columns="width")
     .to_dict("records") for w, size in SIZES.items()}), "runs.json", scale=PARAMS)
text("Markdown with text around", "# Runs\n\nLower is better.\n\n" + markdown(RUNS) + "\nDone.\n", "runs.md")
text("Markdown with bold and code", markdown(cells("loss", "**{}**".format)).replace("| 64 |", "| `64` |"), "runs.txt")
text("wide Markdown, parameters in brackets", lambda: markdown(
     cells("width", lambda w: f"{w} ({w / 100:.1f}M)", wide("lr", lambda lr: f"{lr:.4e}"))), "runs.md")


text("Parquet", RUNS.to_parquet(), "runs.parquet")


@kind("CSV in an archive")
def archive(folder):
    RUNS.to_csv(folder / "runs.csv.zip", index=False)
    return folder / "runs.csv.zip"


@kind("several files of one width each")
def several(folder):
    for width, runs in RUNS.groupby("width"):
        runs.drop(columns="width").to_csv(folder / f"w{width}.csv", index=False)
    return sorted(folder.glob("*.csv"))


# Cells as people write them
text("widths as d512", cells("width", "d{}".format))
text("sizes as 130M", cells("width", SIZES.get).rename(columns={"width": "model_size"}), scale=PARAMS)
text("thousands as 1,024", cells("width", lambda w: f"{16 * w:,}"), scale={w: 16 * w for w in WIDTHS})
text("multipliers as 0.7x", cells("lr", lambda lr: f"{lr * 256:g}x"), rates=256)
text("footnotes as 3e-3*", cells("lr", lambda lr: f"{lr}*" if lr > 0.01 else str(lr)))
text("powers as 2^-8", cells("lr", lambda lr: f"2^{log2(lr)}"))
text("powers as 2⁻⁸", cells("lr", lambda lr: raised(log2(lr))))
text("powers as 3·10^-3", cells("lr", lambda lr: f"{lr * 1e3}·10^-3"))
text("minus signs of typesetting", cells("lr", lambda lr: f"{lr:.12e}".replace("-", "−")))
text("log2 of the rate", RUNS.assign(log2_lr=np.log2(RUNS["lr"])).drop(columns="lr"), note="lr is 2^log2_lr")
text("log10 of the rate", RUNS.assign(log10_lr=np.log10(RUNS["lr"])).drop(columns="lr"), note="10^log10_lr")
text("a word where a run diverged", cells("loss", lambda loss: "diverged" if loss == RUNS["loss"][14] else str(loss)),
     losses=lambda loss: loss.replace(RUNS["loss"][14], np.inf), note="diverged runs, kept as +inf: 3")
text("repeats without a seed", TWICE.drop(columns="seed"), losses=lambda loss: pd.concat([loss, loss + 0.01]),
     note="repeats of a cell are read as its seeds")
text("a thousand that may be a decimal", cells("loss", "{:.3f}".format).replace(r"\.", ",", regex=True),
     error="write it with a point")

# Shapes
for by, names in (
    ("width", ("{}", "width {}", "d_model={}", "loss_w{}", "d{}")),
    ("lr", ("{}", "lr={}", "lr {:.9e}")),
):
    for heading in names:
        text(f"a column for each {by}, as {heading}", wide(by, heading.format, "lr" if by == "width" else "width"),
             note="are read as losses, one column for each")
text("a column for each power", wide("lr", lambda lr: f"2^{log2(lr)}"))
text("a column for each rate with a comma", lambda: wide("lr", lambda lr: f"{lr:.10f}".replace(".",
     ",")).to_csv(index=False, sep=";"))
text("a column a size", wide("width", SIZES.get, "lr"), options={"scale": "params"}, scale=PARAMS)
for name in ("w{}-lr{}", "d_model: {}, lr: {}", "sp_width={}_learning_rate={:.6e}"):
    text(f"curves of a panel, named {name}", lambda name=name: pd.DataFrame({"Step": [50, 100]} | {
         f"{name.format(w, lr)} - val/loss{end}": [loss + 1, loss] for w, lr, loss in RUNS.itertuples(index=False)
         for end in ("", "__MIN", "__MAX")}), note="15 columns are read as curves of val/loss")
text("a row a step", pd.concat([RUNS.assign(step=s, loss=RUNS["loss"] + 1 - s / 100) for s in (50, 100)]))
text("settings in names", lambda: pd.DataFrame({"run": [f"mup_w{w}_lr{lr:.6e}_s0" for w, lr in
     zip(RUNS["width"], RUNS["lr"], strict=True)], "val_loss": RUNS["loss"]}), note="read from the names")
text("Comet's table of experiments", lambda: pd.DataFrame([{"Experiment Key": f"k{i}", "Name": f"brave_fox_{i}",
     "Tags": "", "hidden_size": w, "learning_rate": lr, "val_loss [max]": loss + 2, "val_loss": loss,
     "Duration": "00:01:02"} for i, (w, lr, loss) in enumerate(RUNS.itertuples(index=False))]))

# Meaning of the columns
RATE = RUNS.rename(columns={"width": "n_embd", "lr": "learning_rate", "loss": "val/loss"})
OTHER_LENGTHS = RUNS["lr"] * np.where(RUNS["width"] > 64, 0.1, 0.3)
text("the schedule's value beside the rate", RATE.assign(lr=RUNS["lr"] / 10),
     note="the learning rate is learning_rate, not lr (--tune chooses another)")
text("a schedule's value of runs of other lengths", RATE.assign(**{"train/lr": OTHER_LENGTHS}))
text("a copy of the rate", RATE.assign(lr=RUNS["lr"], **{"optim.lr": RUNS["lr"] * 1.0000001}))
for name in ("max_lr", "peak_lr", "config/lr"):
    text(f"{name} beside another rate", RATE.rename(columns={"learning_rate": name}).assign(lr=OTHER_LENGTHS))
for what, rate in (("a schedule's value", 0.1), ("the rate", 1.0), ("another rate", 3.0)):
    text(f"{what} beside names of the runs", RATE.drop(columns="learning_rate").assign(lr=RUNS["lr"] * rate,
         name=[f"w{w}_lr{lr:.{1 if rate == 1 else 6}e}" for w, lr in zip(RUNS["width"], RUNS["lr"], strict=True)]),
         error="column lr and the names of the runs" if rate > 1 else "")
text("a history of the schedule", lambda: pd.concat([
     RATE.drop(columns="learning_rate").assign(name=[f"run {i}" for i in range(15)], step=step, lr=RUNS["lr"] * share,
     **{"val/loss": RUNS["loss"] + 1 - step / 100}) for step, share in ((0, 0.0), (50, 1.0), (100, 0.1))]),
     note="peak of the schedule that lr logs")
text("two rates", RATE.assign(lr=RUNS["lr"] * np.where(RUNS["width"] > 64, 2, 0.5)),
     error="columns learning_rate and lr may both be the learning rate (row 0: 0.000976562 and 0.000488281, "
     "row 1: 0.00195312 and 0.000976562, row 2: 0.00390625 and 0.00195312): give --tune ")
text("perplexity", renamed("val_ppl", np.exp), note="val_ppl is a perplexity")
text("bits per byte", renamed("val_bpb", lambda loss: loss / np.log(2) / 4), options={"bytes_per_token": 4.0})
text("bits per byte of unknown tokens", renamed("val_bpb"), note="--bytes-per-token")
text("a loss behind a path", renamed("scaling/global_loss"))
text("bits per token", renamed("val_bits", lambda loss: loss / np.log(2)), note="bits per token")
text("accuracy, maximized", renamed("val_acc", lambda loss: 1 - loss / 4), options={"maximize": True,
     "columns": ("loss=val_acc",)}, losses=lambda loss: loss / 4 - 1, note="val_acc is maximized")
text("accuracy in percent", renamed("accuracy", lambda loss: (100 * (1 - loss / 4)).map("{:.6f}%".format)),
     options={"maximize": True, "columns": ("loss=accuracy",)}, losses=lambda loss: loss / 4 - 1)
text("PSNR, maximized", renamed("psnr", lambda loss: 30 - loss), losses=lambda loss: loss - 30,
     options={"maximize": True, "columns": ("loss=psnr",)})
text("accuracy", renamed("val_acc"), options={"columns": ("loss=val_acc",)}, error="give --maximize")
text("a loss, maximized", renamed("val_loss"), options={"maximize": True}, error="leave out --maximize")
text("MSE", renamed("mse"), options={"columns": ("loss=mse",)}, note="regrets and ε are in its unit")
text("a setting that is called loss", renamed("val/loss", **{"config/loss": "cross_entropy", "params.loss": 0.5}))
text("no loss", renamed("my_metric"), error="--columns loss=my_metric takes it for the loss")
text("a training loss beside the held-out one",
     RUNS.rename(columns={"loss": "val/loss"}).assign(**{"train/loss": RUNS["loss"] - 0.1}),
     note="the loss is val/loss, not train/loss")
text("two held-out losses",
     RUNS.rename(columns={"loss": "c4/val_loss"}).assign(**{"wiki/val_loss": RUNS["loss"] + 1 / RUNS["width"]}),
     error="may both be the loss: give --columns loss=c4/val_loss")
text("two units", RUNS.assign(unit=["bits"] * 5 + ["nats"] * 10), error="several units")
text("crashed runs", lambda: pd.concat([RUNS.assign(State="finished"), RUNS.head(1).assign(State="crashed", loss=9.0)]),
     note="--states crashed=diverged if they diverged")
text("batch sizes as the scale", RUNS.rename(columns={"width": "batch_size"}))
text("parameters and tokens", RUNS.rename(columns={"width": "N"}).assign(D=RUNS["width"] * 20), note="D changes with N")
text("parameters and tokens on a grid", lambda: pd.concat([RUNS.rename(columns={"width": "N"}).assign(D=d, loss=
     RUNS["loss"] - d / 1e4) for d in (1000, 2000)]), error="a prediction with --scale N,D fits both")
text("two update rules", lambda: pd.concat([RUNS.assign(optimizer=o, loss=RUNS["loss"] + m) for o, m in
     (("adamw", 0), ("muon", -0.1))]), error="give --compare optimizer to compare them")
text("two update rules, compared", lambda: pd.concat([RUNS.assign(optimizer=o, loss=RUNS["loss"] + m) for o, m in
     (("adamw", 0), ("muon", -0.1))]), options={"compare": "optimizer"},
     losses=lambda loss: pd.concat([loss, loss - 0.1]))
text("longer runs of the wide", RUNS.assign(max_steps=RUNS["width"] * 10), note="max_steps changes with width (64: 640")
text("other commits of the wide", RUNS.assign(git_commit=RUNS["width"].map({64: "a1", 128: "a1", 256: "b2"})),
     note="git_commit changes with width")
text("two tokenizers at one width", RUNS.assign(tokenizer=["gpt2", "llama"] + ["gpt2"] * 13),
     note="tokenizer differs among the runs of one width")
text("an optimum under a constraint", RUNS.assign(max_grad_norm=np.where(RUNS["lr"] > 0.01, 9.0, 1.0)),
     options={"only": ("max_grad_norm < 5",)}, note="3 runs refused by max_grad_norm<5",
     losses=lambda loss: loss.mask(RUNS["lr"] > 0.01, np.inf))
# fmt: on


# Tools
def each_run():
    """Number, width, learning rate and loss of each run."""
    return enumerate(RUNS.itertuples(index=False, name=None))


@kind("Trainer, settings in names")
def trainer(folder, name="w{w}_lr{lr:.6e}"):
    """trainer_state.json of transformers' TrainerState, in two checkpoints of each run."""
    for number, (width, lr, loss) in each_run():
        history = [{"step": s, "loss": loss + 0.3, "learning_rate": lr * share} for s, share in
                   ((10, 0.9), (50, 0.5), (90, 0.1))]  # fmt: skip
        for step in (50, 100):
            history.append({"step": step, "eval_loss": loss + 0.01 * (100 - step)})
            place = folder / "out" / name.format(w=width, lr=lr, i=number) / f"checkpoint-{step}"
            place.mkdir(parents=True)
            state = {"global_step": step, "log_history": [*history]}
            (place / "trainer_state.json").write_text(json.dumps(state))
            (place / "config.json").write_text(json.dumps({"hidden_size": width, "model_type": "llama"}))
    return folder / "out"


@kind(
    "Trainer, a diverged run", losses=lambda loss: loss.where(loss.index != 14, np.inf), note="diverged runs"
)
def trainer_diverged(folder):
    run = trainer(folder) / f"w{RUNS['width'][14]}_lr{RUNS['lr'][14]:.6e}"
    for file in run.rglob("trainer_state.json"):
        state = json.loads(file.read_text())
        state["log_history"] = [of | {"eval_loss": np.nan, "loss": np.nan} for of in state["log_history"]]
        file.write_text(json.dumps(state))
    return folder / "out"


KINDS["Trainer, default names"] = Kind(lambda folder: trainer(folder, "tmp_trainer{i}"))


@kind("Lightning")
def lightning(folder):
    """metrics.csv and hparams.yaml as Lightning's CSVLogger writes them."""
    for number, (width, lr, loss) in each_run():
        run = folder / "lightning_logs" / f"version_{number}"
        run.mkdir(parents=True)
        tags = "betas: !!python/tuple\n- 0.9\n- 0.95\nmode: !!python/object/apply:os.system\n- exit 1\n"
        (run / "hparams.yaml").write_text(f"model:\n  d_model: {width}\nlr: {lr}\nname: null\n{tags}")
        rows = [f"0,{s},{loss + 0.2},\n0,{s},,{loss + 0.01 * (100 - s)}\n" for s in (50, 100)]
        (run / "metrics.csv").write_text("epoch,step,train_loss,val_loss\n" + "".join(rows))
    return folder / "lightning_logs"


LOGS = {
    "nanoGPT": (
        "w{w}_lr{lr:.6e}/log.txt",
        "number of parameters: 0.80M\n",
        "step {s}: train loss 9.1, val loss {loss}\niter {s}: loss 9.2, time 12.34ms, mfu 1.00%\n",
    ),
    "Megatron": (
        "w{w}_lr{lr:.6e}.out",
        " iteration 50/ 100 | learning rate: 1.0E-06 | lm loss: 9.1E+00 | loss scale: 1.0 |\n",
        " validation loss at iteration {s} on validation set | lm loss value: {loss} | lm loss PPL: 9.9E+01 |\n",
    ),
    "torchtitan": (
        "width={w},lr={lr:.6e}/train.log",
        "[rank0]:2026-11-01 10:00:00,001 - root - INFO - Starting job\n",
        "[rank0]:2026-11-01 10:00:01,101 - root - INFO - \x1b[31mstep: {s}  \x1b[32mloss:  {loss}  \x1b[33mmemory:  9.02GiB(1.29%)\x1b[0m\n",
    ),
    "a Trainer": (
        "d{w}-lr{lr:.6e}-s0/stdout.txt",
        "Running with n_embd = 64\n{{'loss': 9.1, 'grad_norm': 1.2, 'learning_rate': 1e-06, 'epoch': 0.5}}\n",
        "{{'eval_loss': {loss}, 'eval_runtime': 1.83, 'epoch': 1.0}}\n",
    ),
    "JSON lines": (
        "w{w}_lr{lr:.6e}_s0/metrics.jsonl",
        '{{"step": 1, "train/loss": 9.1, "lr": 1e-06}}\n',
        '{{"step": {s}, "val": {{"loss": {loss}, "ppl": 9.9}}}}\n',
    ),
}


def logs(program):
    def write(folder):
        """Output of a program; its last line has the loss."""
        name, head, line = LOGS[program]
        for _, (width, lr, loss) in each_run():
            file = folder / "out" / name.format(w=width, lr=lr)
            file.parent.mkdir(parents=True, exist_ok=True)
            lines = [line.format(s=s, loss=f"{loss + 0.01 * (100 - s):.6f}") for s in (0, 50, 100)]
            file.write_text(head.format() + "".join(lines))
        return folder / "out"

    return write


KINDS |= {f"logs of {program}": Kind(logs(program)) for program in LOGS}


def logs_with(file, text):
    """Enter logs whose settings lie in a file beside each."""

    @kind(f"logs with {file}")
    def write(folder):
        for number, (width, lr, loss) in each_run():
            (place := folder / "runs" / str(number) / file).parent.mkdir(parents=True)
            place.write_text(text.format(width=width, lr=lr))
            log = folder / "runs" / str(number) / "train.log"
            log.write_text("".join(f"step {s} val_loss {loss + (1000 - s) / 500}\n" for s in (500, 1000)))
        return folder / "runs"


logs_with("config.yaml", "model:\n  d_model: {width}\noptim:\n  lr: {lr!r}\n")
logs_with(".hydra/overrides.yaml", "- model.width={width}\n- +optim.lr={lr!r}\n")
logs_with("args.json", '{{"d_model": {width}, "lr": {lr!r}}}')


@kind("W&B's local runs")
def wandb_folder(folder):
    """config.yaml, and wandb-summary.json with the decayed learning rate."""
    for number, (width, lr, loss) in each_run():
        files = folder / "wandb" / f"run-20260101_{number:06}-abc" / "files"
        files.mkdir(parents=True)
        config = f"wandb_version: 1\n_wandb:\n  value: {{}}\nmodel:\n  value:\n    n_embd: {width}\n"
        (files / "config.yaml").write_text(f"{config}optim:\n  value:\n    lr: {lr}\n")
        (files / "wandb-summary.json").write_text(json.dumps({"val/loss": loss, "lr": lr / 10, "_step": 9}))
    return folder / "wandb"


text(
    "W&B's export",
    lambda: pd.DataFrame(
        [
            {
                "Name": f"r{i}",
                "State": "finished",
                "config/optim.lr": lr,
                "config/nEmbd": w,
                "val/loss": loss,
                "train/loss": loss - 0.1,
                "lr": lr / 10,
            }
            for i, (w, lr, loss) in each_run()
        ]
    ),
)


text("JSON of a tracker's API", lambda: json.dumps({"runs": [{"name": f"r{w}", "config": {"width": w, "lr": lr},
     "val_loss": loss} for _, (w, lr, loss) in each_run()]}), "runs.json")  # fmt: skip


def optuna(storage, studies=("widths",)):
    """Write studies with Optuna; of several, each has one width in its name."""
    import optuna as package

    package.logging.set_verbosity(package.logging.ERROR)
    for name in studies:
        study = package.create_study(storage=storage, study_name=name)
        for _, (width, lr, loss) in each_run():
            if len(studies) > 1 and not name.endswith(f"w{width}"):
                continue
            study.enqueue_trial({"width": width, "lr": lr})
            trial = study.ask()
            if len(studies) == 1:
                trial.suggest_categorical("width", [*WIDTHS])
            trial.suggest_float("lr", 1e-5, 1, log=True)
            trial.set_user_attr("seed", trial.number % 3)
            study.tell(trial, loss)
        study.tell(study.ask(), state=package.trial.TrialState.FAIL)


def optuna_database(*studies):
    def write(folder):
        optuna(f"sqlite:///{folder}/study.db", studies)
        return folder / "study.db"

    return write


KINDS["Optuna's database"] = Kind(optuna_database("widths"), note="1 FAIL runs left out")
KINDS["several studies of Optuna"] = Kind(optuna_database(*(f"sweep_w{w}" for w in WIDTHS)))
KINDS["several studies without a width"] = Kind(
    optuna_database("one", "other"), error="their names hold no width"
)


@kind("Optuna's journal")
def optuna_journal(folder):
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna(JournalStorage(JournalFileBackend(str(folder / "journal.log"))))
    return folder / "journal.log"


@kind("Optuna's trials as a frame", note="1 FAIL runs left out")
def optuna_frame(folder):
    from optuna import load_study
    from optuna.storages import InMemoryStorage

    optuna(storage := InMemoryStorage())
    trials = load_study(study_name="widths", storage=storage).trials_dataframe()
    trials.to_csv(folder / "trials.csv", index=False)
    return folder / "trials.csv"


def read(one, paths, **options):
    """Read the files of a kind as a command does; return the table and its notes."""
    with fields_as_options(OPTIONS):
        paths = map(str, paths if isinstance(paths, list) else [paths])
        table = TableOptions(**one.options | options).load(*paths)
        return table, notes(table)


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_of_table_is_read_rightly_or_refused_with_a_remedy(name, tmp_path):
    if "Optuna" in name or "studies" in name:
        pytest.importorskip("optuna")
    one = KINDS[name]
    paths = one.write(tmp_path)
    if one.error:
        require_remedies(one, paths)
        return
    table, told = read(one, paths)
    losses = one.losses(RUNS["loss"]).to_numpy()
    expected = pd.concat([RUNS] * (len(losses) // len(RUNS)), ignore_index=True)
    scale = expected["width"].map(lambda w: one.scale.get(w, w))
    expected = expected.assign(scale=scale, x=np.log2(expected["lr"] * one.rates), loss=losses.round(9))
    order = ["scale", "x", "loss"]
    runs, expected = (t[order].sort_values(order).to_numpy(float) for t in (table.runs, expected))
    np.testing.assert_allclose(runs, expected, atol=2e-5)
    assert any(one.note in note for note in ["", *told]), told


def require_remedies(one, paths):
    """Check the sentence with which a kind is refused, and that each option in it mends what it says."""
    with pytest.raises(MupTpuError, match=re.escape(one.error)) as refused:
        read(one, paths)
    for option, value in re.findall(r"--([a-z-]+)(?: ('[^']+'|[^ ;)]+))?", str(refused.value)):
        value = value.strip("',")
        name, several = option.replace("-", "_"), option in ("columns", "where", "states", "along")
        if option == "scale" and "," in value:  # of a prediction
            at = ",".join(f"{scale}=5000" for scale in value.split(","))
            assert cli.main(["predict", str(paths), "--scale", value, "--at", at]) is None
            continue
        mended: object = option == "maximize" and one.options.get(name) is None
        if option == "bytes-per-token":
            mended = 4.2
        elif value and "COLUMN" not in value:
            mended = (value,) if several else value
        try:
            read(one, paths, **{name: mended})
        except MupTpuError as error:
            assert str(error) != str(refused.value)


def tune(folder, local_ray):
    """Ray Tune's own folder: result.json, progress.csv and params.json of each trial."""
    from ray import tune

    def train(config):
        for done in (1, 2):
            width, lr = config["shape"]["width"], config["lr"]
            loss = next(loss for _, (w, r, loss) in each_run() if (w, r) == (width, lr))
            tune.report({"loss": loss + 2 - done})

    space = [{"shape": {"width": w}, "lr": lr} for _, (w, lr, _) in each_run()]
    config = tune.RunConfig(storage_path=str(folder), name="sweep", verbose=0)
    tune.Tuner(
        tune.with_resources(lambda config: train(config["point"] | {}), {"cpu": 1}),
        param_space={"point": tune.grid_search(space)},
        tune_config=tune.TuneConfig(reuse_actors=True, max_concurrent_trials=2),  # a process has many trials
        run_config=config,
    ).fit()


def found_in(path):
    runs = load_table(path).runs
    return sorted(zip(runs["scale"], runs["x"].round(3), runs["loss"].round(4), strict=True))


EXPECTED = sorted((w, float(np.log2(lr)), loss) for _, (w, lr, loss) in each_run())


def test_runs_of_a_second_tool_in_a_folder_are_warned_of(tmp_path):
    lightning(tmp_path)
    trainer(tmp_path / "lightning_logs" / "version_0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found_in(tmp_path) == EXPECTED
    trainer(tmp_path / "trainer")
    with pytest.warns(UserWarning, match="15 files metrics.csv are read, and 30 others are not, such as"):
        assert found_in(tmp_path) == EXPECTED


@pytest.mark.nightly
def test_a_folder_of_ray_tune_is_read_as_it_is(tmp_path, local_ray):
    tune(tmp_path, local_ray)
    assert found_in(tmp_path / "sweep") == EXPECTED
    files = sorted((tmp_path / "sweep").rglob("result.json"))
    assert found_in(files) == EXPECTED, "single files are read too"
    for file in files:
        file.unlink()
    assert found_in(tmp_path / "sweep") == EXPECTED, "progress.csv and params.json say the same"


@pytest.mark.parametrize(
    ("torn", "warning"),
    [
        ("", "a/result.json holds no report: its trial is left out"),
        ('{"loss": 1.0, "con', "a/result.json: the last line is incomplete"),
        (
            '{"loss": 1.0, "training_iteration": 1, "config": {"width": 64, "lr": 1.0}}\n{"lo',
            "a/result.json: the last line is incomplete",
        ),
    ],
)
def test_trials_of_ray_tune_that_were_killed_are_named_and_the_others_read(torn, warning, tmp_path):
    for number, (width, lr, loss) in each_run():
        file = tmp_path / "sweep" / str(number) / "result.json"
        file.parent.mkdir(parents=True)
        rows = [{"loss": loss + 2 - k, "training_iteration": k} for k in (1, 2)]
        file.write_text("".join(json.dumps({**r, "config": {"width": width, "lr": lr}}) + "\n" for r in rows))
    (tmp_path / "sweep" / "a").mkdir()
    (tmp_path / "sweep" / "a" / "result.json").write_text(torn)
    (tmp_path / "sweep" / "b").mkdir()
    os.mkfifo(tmp_path / "sweep" / "b" / "result.json")
    with pytest.warns(UserWarning, match=warning):
        runs = found_in(tmp_path / "sweep")
    assert runs == EXPECTED, "a trial that ended early is none"


def test_a_file_that_cannot_be_looked_into_is_left_to_the_reader_of_tables(tmp_path, monkeypatch):
    file = KINDS["CSV"].write(tmp_path)

    def refuse(self, *arguments, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert find_reader(file) is read_file
    assert found_in(file) == EXPECTED


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("Lightning", "version_0"),
        ("Trainer, default names", "tmp_trainer0"),
        ("logs of JSON lines", f"w64_lr{2**-10:.6e}_s0"),
    ],
)
def test_metrics_in_the_folder_of_a_run_have_its_loss(tmp_path, name, run):
    KINDS[name].write(tmp_path)
    (folder,) = tmp_path.rglob(run)
    assert metrics_of(folder).result().loss == RUNS["loss"][0]
    assert metrics_of(folder, "paloma") is None


def test_metrics_of_tensorboard_and_of_nothing(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    (tmp_path / "data.csv").write_text("text,label\nloss,1\n")
    os.mkfifo(tmp_path / "trainer_state.json")
    assert metrics_of(tmp_path) is None
    with tensorboard.SummaryWriter(str(tmp_path / "runs" / "a")) as writer:
        for step, loss in ((10, 3.5), (20, 3.25), (30, float("nan"))):
            writer.add_scalar("Loss/train", loss + 1, step)
            writer.add_scalar("Loss/val", loss, step)
    log = metrics_of(tmp_path)
    assert (log.result().name, log.is_diverged, log.steps_done) == ("Loss/val", True, 30)
    assert log.curve()[:2] == [(10, 3.5), (20, 3.25)]


def test_a_file_that_cannot_be_read_is_named_where_no_other_has_a_loss(tmp_path):
    (tmp_path / "trainer_state.json").write_text("{}")
    with pytest.raises(TableError, match="trainer_state.json cannot be read: 'log_history'"):
        metrics_of(tmp_path)
    (tmp_path / "eval_results.json").write_text('{\n  "eval_loss": 2.75,\n  "acc": 0.1\n}')
    assert metrics_of(tmp_path).result().loss == 2.75
    (tmp_path / "metrics.csv").write_text("step,val_loss\n1,\n2,2.5\n")
    assert metrics_of(tmp_path).result().loss == 2.5
