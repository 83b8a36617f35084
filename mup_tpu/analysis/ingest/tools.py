"""Files of other tools, one run each: Ray Tune, Lightning, Trainer, W&B, Hydra, MLflow, nanoGPT.

`readers.READERS` says which file each function reads. Settings become columns `config/NAME`.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pandas as pd

from mup_tpu.analysis.ingest.table_files import read_file

# Columns of Ray Tune that say nothing of a trial
_BOOKKEEPING = (
    "time_this_iter_s", "time_total_s", "time_since_restore", "iterations_since_restore", "timestamp", "date",
    "pid", "hostname", "node_ip", "done", "trial_id", "experiment_tag", "checkpoint_dir_name",
    "should_checkpoint",
)  # fmt: skip
# Lines of training logs, as train.py of nanoGPT, modded-nanogpt and build-nanogpt write them
_LINES = (
    re.compile(r"step (?P<step>\d+): train loss (?P<train_loss>\S+), val loss (?P<val_loss>\S+)"),
    re.compile(r"step[: ](?P<step>\d+)(?:/\d+)?,? val[_ ]loss[: ](?P<val_loss>\S+)"),
    re.compile(r"(?P<step>\d+) val (?P<val_loss>\S+)"),
    re.compile(r"iter (?P<step>\d+): loss (?P<train_loss>[^\s,]+)"),
    re.compile(r"(?P<step>\d+) train (?P<train_loss>\S+)"),
)


def tune_result(file: Path) -> pd.DataFrame:
    """Read Ray Tune's result.json: a line a report, each with the configuration."""
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    return pd.json_normalize(rows, sep="/").drop(columns=[*_BOOKKEEPING], errors="ignore")


def tune_progress(file: Path) -> pd.DataFrame:
    """Read Ray Tune's progress.csv, or any logger's; settings that it lacks are in params.json."""
    rows = pd.read_csv(file) if file.stat().st_size else pd.DataFrame()
    params = file.parent / "params.json"
    if params.exists() and not any(str(name).startswith("config/") for name in rows):
        known = pd.json_normalize({"config": json.loads(params.read_text())}, sep="/").iloc[0]
        rows = rows.assign(**{str(name): value for name, value in known.items()})
    return rows.drop(columns=[*_BOOKKEEPING], errors="ignore")


def lightning(file: Path) -> pd.DataFrame:
    """Read Lightning's metrics.csv: held-out losses have rows of their own; settings are in hparams.yaml."""
    rows = pd.read_csv(file)
    held_out = [name for name in rows if re.search(r"val|eval|test", str(name)) and "loss" in str(name)]
    if held_out:
        rows = rows.dropna(subset=held_out[:1])
    hparams = _yaml(file.parent / "hparams.yaml")
    settings = {f"config/{name}": v for name, v in hparams.items() if isinstance(v, str | int | float)}
    return rows.assign(**settings)


def trainer(file: Path) -> pd.DataFrame:
    """Read Trainer's trainer_state.json; the newest one of a run has its whole history."""
    run = file.parent.parent if file.parent.name.startswith("checkpoint-") else file.parent
    states = [*run.glob("trainer_state.json"), *run.glob("checkpoint-*/trainer_state.json")]
    newest = max(states, key=lambda state: (json.loads(state.read_text())["global_step"], state == file))
    if newest != file:
        return pd.DataFrame()
    rows = pd.DataFrame(json.loads(file.read_text())["log_history"])
    losses = [name for name in ("eval_loss", "loss") if name in rows]
    return rows.dropna(subset=losses[:1])[["step", *losses[:1]]] if losses else pd.DataFrame()


def training_log(file: Path) -> pd.DataFrame:
    """Read a log of training, a line a step; held-out losses if it has any."""
    rows = []
    for line in file.read_text(errors="replace").splitlines():
        if match := next((m for pattern in _LINES if (m := pattern.match(line.strip()))), None):
            rows.append({name: float(value) for name, value in match.groupdict().items()})
    table = pd.DataFrame(rows)
    return table.dropna(subset=["val_loss"]) if "val_loss" in table else table


def wandb_dump(file: Path) -> pd.DataFrame:
    """Read a run of W&B as JSON: `config`, and `summary` (whose numbers are no settings) or `history`."""
    run = json.loads(file.read_text())
    if not isinstance(run, dict) or not isinstance(run.get("config"), dict):
        return pd.DataFrame()
    plain = {key: value["value"] if isinstance(value, dict) and "value" in value else value
             for key, value in run["config"].items()}  # fmt: skip
    history, summary = run.get("history"), run.get("summary") or {}
    metrics = history if isinstance(history, list) and history else [summary]
    if summary.get("_step", 0) > metrics[-1].get("_step", math.inf):  # a sampled history lacks the end
        metrics = [*metrics, summary]
    state = {"State": run["state"]} if "state" in run else {}
    return pd.json_normalize([{"config": plain, **state, **row} for row in metrics], sep="/")


def is_json_object(head: bytes) -> bool:
    return head.startswith(b"{") and head.rstrip().endswith(b"}")


def is_optuna_journal(head: bytes) -> bool:
    return head.startswith(b"{") and b'"op_code"' in head


def wandb_run(file: Path) -> pd.DataFrame:
    """Read a local run of W&B: wandb-summary.json with config.yaml beside it."""
    summary = json.loads(file.read_text())
    config = {
        name: value["value"] if isinstance(value, dict) and "value" in value else value
        for name, value in _yaml(file.parent / "config.yaml").items()
        if name not in ("_wandb", "wandb_version")
    }
    return pd.json_normalize([{"config": config, **summary}], sep="/")


def hydra_run(file: Path) -> pd.DataFrame:
    """Read metrics.json of a job of Hydra's multirun, with the configuration in .hydra beside it."""
    metrics = json.loads(file.read_text())
    rows = metrics if isinstance(metrics, list) else [metrics]
    config = _yaml(file.parent / ".hydra" / "config.yaml")
    return pd.json_normalize([{"config": config, **row} for row in rows], sep="/")


def is_mlflow_run(head: bytes) -> bool:
    """Return whether meta.yaml is a run's: an experiment's begins with its artifact_location."""
    return head.startswith(b"artifact_uri")


def mlflow_run(file: Path) -> pd.DataFrame:
    """Read a run in MLflow's folder: a file for each parameter, and one with all values for each metric."""
    folder, meta = file.parent, _yaml(file)
    # MLflow's numbers of states, in its RunStatus.
    states = {1: "running", 2: "scheduled", 3: "finished", 4: "failed", 5: "killed"}
    row = {f"params.{param.name}": param.read_text().strip() for param in sorted(folder.glob("params/*"))}
    for metric in sorted(path for path in folder.glob("metrics/**/*") if path.is_file()):
        lines = metric.read_text().split("\n")
        values = [line.split() for line in lines if line.strip()]  # time, value, step
        if values:
            name = metric.relative_to(folder / "metrics").as_posix()
            row[f"metrics.{name}"] = float(values[-1][1])  # type: ignore[assignment]
    return pd.DataFrame([{"status": states.get(int(meta.get("status", 0)), "unknown"), **row}])


def _yaml(file: Path) -> dict[str, Any]:
    import yaml

    content = yaml.safe_load(file.read_text()) if file.exists() else None
    return content if isinstance(content, dict) else {}


def is_aim_export(head: bytes) -> bool:
    return b"run.hash" in head


def aim_export(file: Path) -> pd.DataFrame:
    """Read Aim's CSV of runs (a column a metric) or of metrics (a row a step of each metric)."""
    table = read_file(file)
    if "metric.name" in table:
        subset = table.get("metric.context.subset", pd.Series("", table.index)).fillna("")
        table = table.assign(metric=(subset + "/" + table["metric.name"]).str.strip("/"))
        keys = [*(name for name in map(str, table) if name.startswith(("run.", "hparams."))), "step"]
        values = table.groupby([*keys, "metric"], dropna=False)["value"].last()
        table = values.unstack("metric").reset_index()
    # A context stands behind the metric: loss subset="val" is val/loss.
    return table.rename(columns=lambda name: _CONTEXT.sub(r"\2/\1", str(name)))


_CONTEXT = re.compile(r"^(\S+) \{?\"?subset\"?\s*[=:]\s*\"?(\w+)\"?\}?$")
