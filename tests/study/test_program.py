"""Training programs that run as in the user's shell, and whose output is their report."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import psutil
import pytest
import ruamel.yaml
from rich.console import Console

from mup_tpu import Study, plots
from mup_tpu.cli import main
from mup_tpu.errors import ConfigError, TrialsFailed
from mup_tpu.store import load_curves, load_runs

QUIET = Console(quiet=True)
COMMAND = shutil.which("mup-tpu", path=str(Path(sys.executable).parent))


def study_of(folder, scale=(64,), rates=(0.5,), **more):
    return Study(folder, scale={"width": list(scale)}, tune={"lr": list(rates)}, **more)


def run(folder, program, *words, workers=1, timeout=None, price=None, console=QUIET, **more):
    """Run a program of Python code; return its rows."""
    (Path(folder) / "train.py").write_text(program)
    study = study_of(Path(folder) / "results", **more)
    study.run(
        " ".join([sys.executable, f"{folder}/train.py", "{width}", "{lr}", *words]),
        workers=workers, timeout=timeout, price=price, console=console,
    )  # fmt: skip
    return load_runs(study.folder)


def output(folder):
    (file,) = (Path(folder) / "results" / "output").glob("*.txt")
    return file.read_text(errors="replace")


STUDY = """
scale = {width = [32, 64]}
tune = {rate = ["2^-2", "2^-1"]}
compare = {optim = ["sgd"]}
"""


def test_axes_of_the_command_line_take_the_place_of_a_study_s(tmp_path, monkeypatch, capsys):
    """Trials that the file has keep their ids: numbers have the types of those in the file.

    The program imports the file beside it.
    """
    monkeypatch.chdir(tmp_path)
    Path("helper.py").write_text("loss = 2.0\n")
    Path("train.py").write_text("from helper import loss\nprint('loss', loss)\n")
    Path("study.toml").write_text(STUDY)
    trainer = f"{sys.executable} train.py {{width}} {{rate}} {{optim}} {{seed}}"
    seen = set()
    for options, added in (
        ([], 4),
        (["--scale", "64", "--tune", "2^-3,0.5"], 1),
        (["--scale", "width=128", "--compare", "optim=adam"], 2),
        (["--tune", "rate=0.5", "--num-seeds", "2"], 2),
    ):
        main(["sweep", "study.toml", "--trainer", trainer, *options])
        runs = load_runs("results/study")
        assert len({*runs["trial_id"]} - seen) == added and {*runs["status"]} == {"finished"}
        seen = {*runs["trial_id"]}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tune", "lr=0.1"], "tune: .*lr.*rate"),
        (["--compare", "adam", "--scale", "fast"], "compare adam: .*|width 'fast' is not a number"),
        (["--tune", "fast"], "rate 'fast' is not a number"),
        (["--continue-to", "9"], "continue_to"),
    ],
)
def test_axes_that_a_study_lacks_are_refused(options, words, tmp_path, outcome):
    (tmp_path / "study.toml").write_text('trainer = "true"' + STUDY)
    code, _, err = outcome("sweep", tmp_path / "study.toml", *options)
    assert code == 2 and re.search(words, err)


LOOK = """
import json, os, resource, signal, sys
json.dump({
    "environment": dict(os.environ), "folder": os.getcwd(), "umask": os.umask(0),
    "input": os.read(0, 1).decode(), "open": sorted(os.listdir("/proc/self/fd"))[:-1],
    "limits": [resource.getrlimit(limit) for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
    "ignored": [s for s in (1, 2, 15) if signal.getsignal(s) is signal.SIG_IGN],
    "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, [])],
}, open(sys.argv[1], "w"))
print("val loss 2.5")
"""


@pytest.mark.skipif(COMMAND is None, reason="the package is not installed")
def test_a_program_finds_the_shell_of_its_user(tmp_path):
    """A program sees the same, environment and all else, whether a shell runs it or a sweep of that shell."""
    (tmp_path / "look.py").write_text(LOOK)
    (tmp_path / "study.toml").write_text("scale = {width = [1]}\ntune = {lr = [1.0]}\n[settings]\n")
    threads = {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"}
    added = {*threads, "PYTHONUNBUFFERED", "CUDA_VISIBLE_DEVICES"}
    environment = {k: v for k, v in os.environ.items() if k not in {*added, "LC_ALL", "LC_CTYPE", "LANG"}}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2]), "ODD": "a\nb=c", "HTTP_PROXY": "x"}
    look = f"{sys.executable} look.py"
    script = f"""umask 027; ulimit -n 500; ulimit -c 0
{look} by_shell </dev/null && {COMMAND} sweep study.toml --trainer '{look} by_sweep'"""
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    by_shell, by_sweep = (json.loads((tmp_path / name).read_text()) for name in ("by_shell", "by_sweep"))
    shell, sweep = by_shell.pop("environment"), by_sweep.pop("environment")
    assert by_sweep == by_shell, done.stderr
    more = {name for name, value in sweep.items() if shell.get(name) != value} - {"_", "SHLVL"}
    assert more <= added and {*shell} - {*sweep} == set()
    (text,) = (tmp_path / "results" / "study" / "output").glob("*.txt")
    title = text.read_text().splitlines()[0]
    assert title.startswith("$ ") and title.endswith("look.py by_sweep")
    assert all(f"{name}={sweep[name]}" in title for name in more), "what is added stands in the output"


def test_a_thread_count_of_the_user_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    code = "import os; assert 'MKL_NUM_THREADS' not in os.environ; print(os.environ['OMP_NUM_THREADS'])"
    assert run(tmp_path, code)["loss"].tolist() == [3.0]


NANOGPT = """
import sys
width, lr = float(sys.argv[1]), float(sys.argv[2])
final = 3 + (lr - 0.5) ** 2 - width / 1000
for step in range(0, 101, 50):
    print(f"step {step}: train loss {final + 1 - step / 100:.4f}, val loss {final + 2 - step / 50:.4f}")
    print(f"iter {step}: loss {final + 1:.4f}, time 586.53ms, mfu -100.00%")
"""


def test_the_loss_of_a_log_is_taken_and_said_once(tmp_path, capsys):
    rows = run(tmp_path, NANOGPT, scale=(64, 128), rates=(0.25, 0.5, 1.0), console=Console(width=200))
    assert rows["loss"].tolist() == pytest.approx(
        [3 + (r - 0.5) ** 2 - w / 1000 for w in (64, 128) for r in (0.25, 0.5, 1)]
    )
    printed = capsys.readouterr().out
    assert printed.count("loss: `val loss` of lines like `step 100: train loss ") == 1
    assert printed.index("loss: `val loss`") < printed.index("2 of 6 trials stored")
    assert rows["steps_done"].tolist() == [100] * 6
    curve = load_curves(tmp_path / "results").query("trial_id == @rows.trial_id[0]")
    assert curve["step"].tolist() == [0, 50, 100] and curve["loss"].iloc[-1] == pytest.approx(rows["loss"][0])


@pytest.mark.parametrize("how", ["file", "option"])
def test_a_named_loss_is_taken(how, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(NANOGPT)
    loss = "loss = 'train loss ([\\d.]+)'\n" if how == "file" else ""
    Path("s.toml").write_text(f"{loss}scale = {{width = [64]}}\ntune = {{lr = [0.5]}}\n")
    option = ["--loss", "train loss"] if how == "option" else []
    main(["sweep", "s.toml", "--trainer", f"{sys.executable} train.py {{width}} {{lr}}", *option])
    assert load_runs("results/s")["loss"].tolist() == pytest.approx([2.936])


@pytest.mark.parametrize(
    "code, words",
    [
        ("print('ready')", "loss"),
        ("print('step 9: val/c4/loss 2.0, val/wiki/loss 3.0')", "val/c4/loss.*val/wiki/loss"),
    ],
)
def test_a_log_that_tells_no_loss_ends_the_sweep_after_the_first_trial(code, words, tmp_path):
    counted = f"open({str(tmp_path / 'runs')!r}, 'a').write('x'); {code}"
    with pytest.raises(ConfigError, match=words):
        run(tmp_path, counted, rates=(0.5, 1.0, 2.0))
    assert (tmp_path / "runs").read_text() == "x"
    assert output(tmp_path).endswith(code[7:-2] + "\n"), "the log is kept"


@pytest.mark.parametrize(
    ("printed", "loss", "unit"), [("Validation bpb", None, "bpb"), ("val mse", "val mse", "val mse")]
)
def test_a_loss_has_the_name_and_unit_that_the_program_prints(printed, loss, unit, tmp_path, capsys):
    code = (
        "import math, sys; width, lr = map(float, sys.argv[1:])\n"
        "loss = 1 + (math.log2(lr) + 2) ** 2 / 20 - width / 1e3\n"
        f"print('Step 00100 | {printed}:', loss)"
    )
    grid = {"scale": (64, 128), "rates": (0.0625, 0.125, 0.25, 0.5, 1.0)}
    run(tmp_path, code, **grid, loss=loss, console=Console(width=200))
    assert f"loss: `{printed}` of lines like `Step 00100 | {printed}" in capsys.readouterr().out
    verdict = study_of(tmp_path / "results", *grid.values(), loss=loss).verdict()
    assert f" {unit}" in str(verdict) and verdict.epsilon != 0.01
    assert plots.transfer_figure(verdict).axes[0].get_ylabel() == printed


def test_a_sweep_says_what_it_costs_and_a_reason_once(tmp_path, capsys, monkeypatch):
    code, console = "import sys; print('loss', 2 + float(sys.argv[2]))", Console(width=200)
    run(tmp_path, code, rates=(0.5, 1.0), console=console)
    out = capsys.readouterr().out
    assert "2 to run; Ctrl-C stops" in out, "nothing is known before the first trial"
    assert "all trials take" not in out, "the rest is short"
    run(tmp_path, code, rates=(0.5, 1.0, 2.0), console=console)
    out = capsys.readouterr().out
    assert re.search(r"2 stored, 1 to run, about .* of training; Ctrl-C", out)
    assert re.search(r"ran 1 trials in .* of training\): 1 finished; stored in", out)
    run(tmp_path, code, rates=(0.5, 1.0, 2.0, 4.0), console=console, price="3600/h")
    assert re.search(r"about .* s, [\d.]+ at 3600/h of training", capsys.readouterr().out)
    monkeypatch.setattr("mup_tpu.tuning.runner._LONG_S", -math.inf)
    run(tmp_path, code, rates=(0.5, 1.0, 2.0, 4.0, 8.0), console=console)
    assert "all trials take" not in capsys.readouterr().out, "stored trials gave the time at the start"
    (tmp_path / "new").mkdir()
    outcome = run(tmp_path / "new", code, rates=(0.5, 1.0, 2.0, 4.0), console=console, price="3600/h")
    out = capsys.readouterr().out
    (whole,) = re.findall(r"all trials take about ([\d.]+) s, .* at 3600/h of training", out)
    assert float(whole) == pytest.approx(4 * outcome["wall_time_s"].mean(), rel=0.9)
    (tmp_path / "two").mkdir()
    rates = [2.0**-k for k in range(9)]
    with pytest.raises(TrialsFailed, match="the first 5 trials failed"):
        run(tmp_path / "two", "import sys; open(sys.argv[3])", "{folder}/none", rates=rates, console=console)
    out = " ".join(capsys.readouterr().out.split())  # a long path breaks the line
    assert out.count("No such file") == 1, "each path has the id of its trial"


def test_a_trial_without_the_loss_of_the_others_has_failed(tmp_path):
    """The number in a name such as w64/val_loss makes no other loss."""
    code = (
        "import sys; print('train loss 3.0'); sys.argv[2] == '2.0' or print(f'w{sys.argv[2]}/val_loss 2.5')"
    )
    rows = run(tmp_path, code, rates=(0.5, 1.0, 2.0))
    assert rows["status"].tolist() == ["finished", "finished", "failed"]
    assert re.search(r"`train loss` and no `w[\d.]+/val_loss`", rows["reason"][2])


FILES = {
    "metrics.csv": "epoch,step,train_loss,val_loss\n0,9,3.0,\n0,10,,2.5\n",
    "logs/metrics.jsonl": '{"step": 10, "train/loss": 3.0}\n{"step": 10, "eval/loss": 2.5}\n',
    "checkpoint-10/trainer_state.json": json.dumps(
        {"global_step": 10, "log_history": [{"loss": 3.0, "step": 9}, {"eval_loss": 2.5, "step": 10}]}
    ),
}


@pytest.mark.parametrize(
    ("name", "printed"), [*((name, "") for name in FILES), ("metrics.csv", "step 10: loss 3.0")]
)
def test_a_loss_is_read_from_a_file_of_the_trials_folder(name, printed, tmp_path):
    code = (
        f"import sys, pathlib\nprint({printed!r})\npath = pathlib.Path(sys.argv[3], {name!r})\n"
        f"path.parent.mkdir(parents=True, exist_ok=True)\npath.write_text({FILES[name]!r})\n"
    )
    rows = run(tmp_path, code, "{folder}")
    assert rows["loss"].tolist() == [2.5] and rows["steps_done"].tolist() == [10]


@pytest.mark.parametrize("factor", [1, 10])
def test_notes_on_what_the_output_shows_are_printed_once(factor, tmp_path, capsys):
    """A learning rate that the program does not take, and a loss that is a sum over tokens."""
    code = f"import sys; rate = {factor} * float(sys.argv[2]); print('lr:', rate / 2, 'lr:', rate, 'loss: "
    run(tmp_path, code + "149001.2')", rates=(0.5, 1.0), console=Console(width=300))
    printed = capsys.readouterr().out
    rate = "note: the output shows a learning rate of at most 5, and the trial has lr 0.5"
    assert printed.count(rate) == (factor == 10)
    assert printed.count("note: loss 149001 is a sum over tokens, and not their mean") == 1


SLEEP = "time.sleep(1000)"
PROGRAMS = {
    "stays nan": (
        "diverged", f"[print(f'step {{k}} loss', 3 if k < 2 else math.nan) for k in range(10**6)]; {SLEEP}",
    ),
    "is nan before two losses": (
        "diverged",
        f"[print(f'step {{k}} loss nan') for k in range(5)]; print('step 5 a/loss 1 b/loss 2'); {SLEEP}",
    ),
    "fails over nan": ("diverged", "print('step 1: loss 3.0'); print('step 2: loss nan'); sys.exit(1)"),
    "killed by signal 9, the last of 3 attempts": ("failed", "os.kill(os.getpid(), 9)"),
    "ended with exit code 3; output: last words": ("failed", "print('last words'); sys.exit(3)"),
    "no result within the time-out": ("failed", SLEEP),
    "writes bytes": ("finished", "os.write(1, b'\\xff\\xc3\\nloss: 2.5\\n')"),
    "leaves a child": ("finished", f"os.fork() or {SLEEP}; print('loss: 2.5')"),
    "returns the carriage": ("finished", "print('\\r'.join(f'{k}%| loss=2.{k}' for k in range(6)))"),
    "long": ("finished", "print('x' * 10**7); print('loss: 2.5')"),
}  # fmt: skip
"""Status and code of each program; reasons of failures are their names."""


def test_programs_that_misbehave(tmp_path, patience):
    codes = {how: code for how, (_, code) in PROGRAMS.items()}
    program = f"import math, os, sys, time; exec({codes!r}[sys.argv[3]])"
    more = {"workers": 4, "timeout": f"{6 * patience}s", "compare": {"how": [*PROGRAMS]}}
    rows = run(tmp_path, program, "{how}", **more).set_index("how")
    for how, (status, _) in PROGRAMS.items():
        row = rows.loc[how]
        assert row["status"] == status, (how, row["reason"])
        assert how in row["reason"] if status == "failed" else math.isinf(row["loss"]) or row["loss"] == 2.5
        text = tmp_path / "results" / "output" / f"{row['trial_id']}.txt"
        assert text.stat().st_size < 2**20 + 1000, "the end of a long output is kept"


CHILDREN = """
import os, subprocess, sys, time
code = "import os, sys, time; open(sys.argv[1], 'a').write(f'{os.getpid()} '); time.sleep(1000)"
for k in range(2):  # one in the group of this program, and one in a session of its own
    subprocess.Popen([sys.executable, "-c", code, sys.argv[3]], start_new_session=bool(k))
print("step 1: loss 3.0")
while len(open(sys.argv[3], "a+").seek(0) or open(sys.argv[3]).read().split()) < 2:
    time.sleep(0.01)
open(sys.argv[3], "a").write(f"{os.getpid()} ready")
"""
ENDS = {
    "returns": "", "kill -9": "", "SIGTERM": "the same command goes on", "timeout": "",
    "Ctrl-C": "stopped; finished trials are stored",
}  # fmt: skip
NIGHTLY = [pytest.param(how, marks=pytest.mark.nightly) for how in [*ENDS][3:]]


@pytest.mark.slow
@pytest.mark.parametrize("how", [*[*ENDS][:3], *NIGHTLY])
def test_nothing_that_a_program_has_started_outlives_it(how, tmp_path, patience):
    left = tmp_path / "left"
    code = CHILDREN + ("" if how == "returns" else "time.sleep(1000)\n")
    if how in ("returns", "timeout"):
        run(tmp_path, code, str(left), timeout=f"{5 * patience}s")
    else:
        (tmp_path / "train.py").write_text(code)
        (tmp_path / "s.toml").write_text('experiment = "e"\nscale = {width = [1]}\ntune = {lr = [1.0]}\n')
        trainer = f"sh -c '{sys.executable} train.py a b {left}; true'"
        driver = subprocess.Popen(
            [COMMAND, "sweep", "s.toml", "--trainer", trainer], cwd=tmp_path, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        while not left.exists() or "ready" not in left.read_text():
            assert driver.poll() is None
            time.sleep(0.05)
        sent = {"kill -9": signal.SIGKILL, "Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM}
        driver.send_signal(sent[how])
        said = driver.communicate(timeout=60 * patience)[0]
        assert driver.returncode and ENDS[how] in said and "Traceback" not in said, said
    deadline = time.monotonic() + 20 * patience
    numbers = [int(word) for word in left.read_text().split()[:3]]
    assert len(numbers) == 3
    while any(psutil.pid_exists(n) and psutil.Process(n).status() != "zombie" for n in numbers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_launcher_gets_sigterm_to_end_what_it_runs_elsewhere(tmp_path):
    launcher = tmp_path / "srun"
    launcher.write_text(
        f"#!/bin/sh\ntrap 'touch {tmp_path}/ended; exit' TERM\nwhile :; do sleep 0.05; done\n"
    )
    launcher.chmod(0o755)
    study_of(tmp_path / "results").run(f"{launcher} {{width}} {{lr}}", workers=1, timeout="1s", console=QUIET)
    assert (tmp_path / "ended").exists()


CONFIGS = {
    "base.yaml": "optim: {lr: 1e-3, betas: [0.9, 0.95]}  # kept\nmodel:\n  width: 8\nseed: 1\nout: here\n",
    "base.toml": "seed = 1\nout = 'here'\n[optim]\nlr = 1e-3\nbetas = [0.9, 0.95]\n[model]\nwidth = 8\n",
    "base.json": '{"optim": {"lr": 1e-3, "betas": [0.9, 0.95]}, "model": {"width": 8}, "seed": 1, "out": ""}',
}
READ = {
    ".yaml": lambda text: ruamel.yaml.YAML(typ="safe", pure=True).load(text),
    ".toml": tomllib.loads,
    ".json": json.loads,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_is_copied_with_a_trials_values(name, tmp_path):
    (tmp_path / name).write_text(CONFIGS[name])
    study = Study(
        tmp_path / "r", scale=[{"flops": 1.0, "model.width": 64}], tune={"optim.lr": [2.0**-17]}, seeds=2,
        settings={"out": "{folder}/x", "model.style": "{bold}", "optim.betas.1": 0.99, "optim.new.eps": 1e-8},
        config=str(tmp_path / name),
    )  # fmt: skip
    shown = "import sys; print(open(sys.argv[1]).read()); print('loss:', 2.5)"
    study.run(f'{sys.executable} -c "{shown}" {{config}}', workers=1, console=QUIET)
    for trial in study.trials():
        path = tmp_path / "r" / "output" / f"{trial.id}{Path(name).suffix}"
        assert READ[path.suffix](path.read_text()) == {
            "optim": {"lr": 2.0**-17, "betas": [0.9, 0.99], "new": {"eps": 1e-8}},
            "model": {"width": 64, "style": "{bold}"},
            "seed": trial.seed, "out": f"{tmp_path}/r/work/{trial.id}/x",
        }  # fmt: skip
    assert (tmp_path / name).read_text() == CONFIGS[name]
    assert name != "base.yaml" or ("# kept" in path.read_text() and "7.62939453125e-06" in path.read_text())
    assert load_runs(tmp_path / "r")["optim.lr"].tolist() == [2.0**-17] * 2


@pytest.mark.parametrize("name", ["optim.betas.2", "optim.betas.2.x", "optim.betas.last", "seed.x"])
def test_a_name_that_a_configuration_has_no_place_for_is_one_sentence(name, tmp_path):
    (tmp_path / "base.json").write_text(CONFIGS["base.json"])
    study = Study(tmp_path / "r", scale={"w": [1]}, tune={name: [0.5]}, config=str(tmp_path / "base.json"))
    with pytest.raises(ConfigError, match=rf"base\.json: {name} cannot be set in "):
        study.run(f"{sys.executable} x.py {{config}} {{w}}", workers=1, console=QUIET)


def test_a_configuration_lies_beside_its_study(tmp_path, capsys):
    (tmp_path / "base.json").write_text('{"seed": 1}')
    (tmp_path / "s.toml").write_text(
        'experiment = "e"\nconfig = "base.json"\nscale = {"model.dim" = [32, 64, 128]}\n'
        "tune = {lr = [0.0625, 0.125, 0.25, 0.5, 1]}\n"
    )
    code = (
        "import json, math, sys; v = json.load(open(sys.argv[1])); dim = v['model']['dim']\n"
        "print('loss', 3 + (math.log2(v['lr']) + 2) ** 2 / 20 - dim / 1e3)"
    )
    (tmp_path / "train.py").write_text(code)
    trainer = f"{sys.executable} {tmp_path}/train.py {{config}}"
    main(["sweep", str(tmp_path / "s.toml"), "--trainer", trainer, "--results", str(tmp_path / "r")])
    capsys.readouterr()
    main(["predict", str(tmp_path / "r"), "--at", "model.dim=256"])
    assert " at dim 256 (1 octave beyond dim 128)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "train, changes, sentence",
    [
        (lambda trial: 1.0, {}, "cannot be called with a trial and its report"),
        (3, {}, "trainer 3 is not a function"),
        ("no_such_module:train", {}, "cannot be imported: ModuleNotFoundError"),
        ("trainers:no_such", {}, "module trainers has no no_such"),
        ("trainers:valley", {"loss": "x"}, "loss is for a command line; a function returns its loss"),
        ("PYTHON x {lr} {width} {seed}", {"timeout": "long"}, "timeout 'long' is not a time"),
        ("PYTHON x {lr} {width} {seed}", {"budget": "0s"}, "budget '0s' is not a time"),
        ("PYTHON x {lr} {width} {seed}", {"heartbeat": 0}, "heartbeat 0 is not allowed"),
        ("PYTHON x {lr} {width} {seed}", {"workers": 0}, "workers 0 is not allowed"),
        ("", {}, "trainer is empty"),
        ("PYTHON 'x", {}, "is not a command line"),
        ("no_such_program {width}", {}, "there is no program 'no_such_program' here"),
        ("PYTHON x {depth}", {}, "{depth} is not one of config, folder, id, lr, seed, width"),
        *(("PYTHON x {width}", {"loss": loss}, "loss ") for loss in ("(a.)(b)", "a.*", "(.*", "")),
        ("PYTHON x {width}", {}, "has no {lr}, by which trials differ"),
        ("PYTHON x {lr} {seed}", {}, "has no {width}: all sizes would be one"),
        ("PYTHON x {lr} {width}", {}, "has no {seed}, by which trials differ"),
        ("PYTHON x {config}", {}, "config is missing"),
        ("PYTHON x {config}", {"config": "base.ini"}, "config 'base.ini' is not a file"),
        ("PYTHON x {config}", {"config": "none.yaml"}, "config none.yaml cannot be read"),
        ("PYTHON x {config}", {"config": "list.yaml"}, "holds no names with values"),
        ("PYTHON x {config}", {"config": "bad.json"}, "config bad.json cannot be read"),
        ("PYTHON x {config}", {"config": "base.yaml"}, "has no {seed}"),
        ("PYTHON x {lr} {width}", {"config": "base.yaml"}, "the command line has no {config}"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_runs(train, changes, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {"base.yaml": "lr: 1\n", "list.yaml": "- 1\n", "bad.json": "{"}.items():
        Path(name).write_text(text)
    of_study = {name: changes.pop(name) for name in ("loss", "config") if name in changes}
    train = train.replace("PYTHON", sys.executable) if isinstance(train, str) else train
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        study_of("r", (1, 2), (0.5, 1.0), seeds=2, **of_study).run(train, console=QUIET, **changes)
    assert not Path("r", "runs").exists()


CONFIGURED = """
import json, math, sys
values = json.load(open(sys.argv[1]))
width, steps, rate = values["model"]["dim"], values["steps"], values["optim"]["lr"]
for step in range(0, steps + 1, max(1, steps // 5)):
    loss = 3 + 0.05 * (math.log2(rate) + 8) ** 2 - 0.1 * math.log2(width) + 1 / (1 + step)
    print(f"step {step} loss/main {loss:.6f} loss/other {2 * loss:.6f}")
"""


@pytest.mark.slow
def test_a_configured_program_goes_from_its_plan_to_its_target(tmp_path, monkeypatch, capsys):
    """Plan by timed runs, sweep, prediction and target, all with one loss and one configuration."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(CONFIGURED)
    Path("base.json").write_text('{"model": {"dim": 8}, "optim": {}, "steps": 100, "seed": 0}')
    Path("study.toml").write_text(
        'experiment = "mine"\nconfig = "base.json"\nloss = "loss/main"\n'
        f'trainer = "{sys.executable} train.py {{config}}"\nscale = {{"model.dim" = [16, 32, 64]}}\n'
        'tune = {"optim.lr" = ["2^-10", "2^-9", "2^-8", "2^-7", "2^-6"]}\n[settings]\nsteps = 100\n'
    )
    main(["plan", "study.toml", "--at", "model.dim=1024", "--budget", "1m", "--probe", "20s"])
    planned = tomllib.loads(Path("plan.toml").read_text())
    assert planned["loss"] == "loss/main" and planned["config"] == "base.json"
    main(["sweep", "plan.toml"])
    runs = load_runs("results/mine_plan")
    log_rates, log_widths = (runs[name].map(math.log2) for name in ("optim.lr", "model.dim"))
    expected = 3 + 0.05 * (log_rates + 8) ** 2 - 0.1 * log_widths + 1 / 101
    assert runs["loss"].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    main(["transfer", "results/mine_plan", "--trainer", planned["trainer"]])
    (target,) = load_runs("results/mine_plan_transfer").to_dict("records")
    assert target["model.dim"] == 1024 and abs(math.log2(target["optim.lr"]) + 8) < 0.3
    assert "loss/main" in capsys.readouterr().out
