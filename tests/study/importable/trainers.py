"""Training functions that workers import."""

import json
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path


def valley(trial, report=None):
    """Loss with its optimum at 2^-6 under the rule "stays"; under "moves" at 2^-6 · 256 / width."""
    optimum = -6.0 - (math.log2(trial.width / 256) if trial.rule == "moves" else 0.0)
    noise = random.Random(trial.id).gauss(0, 0.003)
    return 3 + 0.05 * (math.log2(trial.lr) - optimum) ** 2 - 0.1 * math.log2(trial.width / 256) + noise


def misbehave(trial, report):
    """Do what the trial's setting says."""
    match trial.how:
        case "raises" | "floods":
            print("\x1b[31mthe last words", flush=True)
            if trial.how == "floods":  # a child prints without end
                subprocess.Popen(["yes", "flood"])
                time.sleep(0.2)
            raise ValueError("no such layer\nsecond line")
        case "nan":
            return math.nan
        case "inf":
            return -math.inf
        case "text":
            return "2.5"
        case "many":
            import numpy as np

            return np.zeros(3)
        case "exits":
            os._exit(7)
        case "sysexit":
            sys.exit(3)
        case "killed":
            with open(report.folder / "attempts", "a") as file:
                file.write("x")
            os.kill(os.getpid(), signal.SIGKILL)
        case "hangs":
            report(step=1, loss=3.0)
            time.sleep(1000)
        case "slow":
            time.sleep(1000)
        case "loud":
            for _ in range(300):
                print("x" * 10_000)
            return 2.5
        case "parent":
            child = subprocess.Popen(["sleep", "1000"])
            process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
            process.start()
            (report.folder.parent.parent / "children").write_text(f"{child.pid} {process.pid}")
            return 2.5
        case "bad report":
            report(step="two", loss=1.0)
        case "kills its group":
            os.killpg(0, signal.SIGKILL)
        case "terminates its group":
            os.killpg(0, signal.SIGTERM)
            report(step=1)
            report(step=2)
        case "tears a message":
            os.write(message_pipe(report), b'{"report": {"st')
            time.sleep(1000)
        case "writes into the pipe":
            os.write(message_pipe(report), b"no message\n")
            time.sleep(1000)
        case "floods the pipe":
            while True:
                os.write(message_pipe(report), b"x" * 65536)
        case "closes all":
            os.closerange(3, 1000)
        case "kills its parent":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(1000)
        case "closes its output":
            sys.stdout.close()
            sys.stderr = None
            return 2.5
        case "closes file 1":
            sys.stdout.write("x")
            os.close(1)
            return 2.5
        case "bad text":
            raise ValueError("\udc80")
        case "steps as text":
            report(step=1, loss=1.0, steps="10")
        case "step of 64 bits":
            report(step=2**63, loss=1.0)
        case "loss of many digits":
            report(step=1, loss=10**400)
        case "many digits":
            return 10**400
        case "leaves a session":
            command = (
                f"import os, time; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); {WRITE}"
            )
            left = report.folder.parent.parent / "left"
            subprocess.run([sys.executable, "-c", command, left])
            while not left.exists() or not left.read_text():  # the process that stays writes its number
                time.sleep(0.01)
            return 2.5
    return 2.5


WRITE = "import sys; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(1000)"


def message_pipe(report):
    """Descriptor of the pipe that reports go through."""
    (send,) = (cell.cell_contents for cell in report._send.__closure__)
    return next(cell.cell_contents for cell in send.__closure__)


def resumable(trial, report):
    """Forty steps, with a checkpoint every ten; each start is written down with its processes."""
    path = Path(report.folder, "state.json")
    state = json.loads(path.read_text())[: report.resume_step] if report.resume_step else []
    with open(report.folder.parent.parent / f"starts-{trial.id}", "a") as file:
        file.write(f"{report.resume_step} {os.getpid()} {os.getppid()}\n")
    for step in range(report.resume_step + 1, 41):
        state.append(step)
        time.sleep(trial.pause)
        if step % 10 == 0:
            path.with_suffix(".new").write_text(json.dumps(state))
            path.with_suffix(".new").rename(path)  # a kill leaves the old file or the new one
        report(step=step, steps=40, loss=10 / step, saved=step % 10 == 0)
    assert state == list(range(1, 41))
    return valley(trial)


def imports(trial, report):
    """2 in a process that has to import a module, 1 in one that has it."""
    loss = 1.0 if "this" in sys.modules else 2.0
    import this  # noqa: F401

    return loss


def gpu(trial, report):
    """Number of the GPU that a trial may see."""
    time.sleep(0.5)
    return float(os.environ["CUDA_VISIBLE_DEVICES"])


def sleepy(trial, report):
    """A function that saves once more when its machine is taken away, and then takes its time."""
    for step in range(report.resume_step + 1, 10_000):
        time.sleep(0.05)
        (report.folder / "step").write_text(str(step))
        report(step=step, loss=1.0, saved=report.ending)
    return 1.0


def constant_rate(trial, report):
    """Descend a parabola by gradient steps at a constant rate; goes on from what its folder holds."""
    file, x = report.folder / "x", 10.0
    if report.resume_step:
        x = float(file.read_text())
    for step in range(report.resume_step + 1, trial.steps + 1):
        x -= trial.rate * x
        with open(report.folder.parent.parent / "steps_done", "a") as done:
            done.write(f"{trial.rate} {step}\n")
    file.write_text(repr(x))
    report(step=trial.steps, steps=trial.steps, loss=x * x, saved=True)
    return x * x


def constant_rate_program():
    """The same as a program, which looks into its folder itself."""
    folder, steps, rate = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    step, x = json.loads(file.read_text()) if (file := folder / "state").exists() else (0, 10.0)
    for _ in range(step, steps):
        x -= rate * x
    (folder.parent.parent / "steps_done").open("a").write(f"{rate} {steps - step}\n")
    file.write_text(json.dumps([steps, x]))
    print(x * x)


if __name__ == "__main__":
    constant_rate_program()
