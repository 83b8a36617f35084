"""Recipes, read by the programs that they are written for: options by their parsers, groups on their models.

    python benchmarks/recipes.py CLONES [PROGRAM=PYTHON ...]

CLONES holds clones of nanochat, torchtitan, OLMo-core and Megatron-LM at the commits below; PYTHON is an
interpreter with what a program imports, this one by default. Nothing of these programs is part of this
repository. The recipe for transformers is run by tests/words/test_recipes.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from mup_tpu.words.recipes import write_recipe

# Program -> folder of its clone, commit, words before the recipe's options, and what reads the recipe: the
# Python in `code`, and `arguments`
READ = {
    "nanochat": ("nanochat", "92d63d4", "base_train --", """
source = open("scripts/base_train.py").read()
sys.argv = ["", *arguments]
parsing = source[source.index("parser = argparse") : source.index("user_config =")]
exec(parsing, names := {"argparse": argparse})
args = names["args"]
width = -(-args.depth * args.aspect_ratio // args.head_dim) * args.head_dim
assert (width, args.matrix_lr, args.num_iterations) == (2112, 0.01562, 1000)
"""),
    "torchtitan": ("torchtitan", "b5bcd76", "./run_train.sh", """
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config.manager import ConfigManager
exec(code, names := {})
config = ConfigManager().parse_args(["--module", "llama3", "--config", "llama3_debugmodel", *arguments])
assert (config.training.steps, config.lr_scheduler.warmup_steps) == (1000, 40)
with torch.device("meta"):
    model = config.model_spec.model.build()
groups, _ = OptimizersContainer._build_param_groups(model, names["optimizer"].param_groups, {})
rates = {name: group["lr"] for group in groups["AdamW"] for name in group["param_names"]}
"""),
    "olmo-core": ("OLMo-core", "fa6c501", "command line:", """
sys.path[:0] = ["src", "src/examples/llm"]
import train
exec(code, names := {})
of_script = types.SimpleNamespace(save_folder="/tmp/a", work_dir="/tmp/a", model_factory="llama2_271M",
                                  run_name="a", sequence_length=1024)
config = train.build_config(of_script, arguments)
assert (config.data_loader.global_batch_size, config.trainer.max_duration.value) == (524288, 1000)
model = config.model.build(init_device="meta")
name_of = {id(p): name for name, p in model.named_parameters()}
optim = names["optim"]
rates = {name_of[id(p)]: g.get("lr", optim.lr) for g in optim.build_groups(model) for p in g["params"]}
"""),
    "megatron": ("Megatron-LM", "d98e8a6", "pretrain_gpt.py", """
import typing, typing_extensions
typing.override = typing_extensions.override  # Python 3.11
from megatron.training.arguments import add_megatron_arguments
add_megatron_arguments(parser := argparse.ArgumentParser(allow_abbrev=False))
args = parser.parse_args(arguments)
assert (args.lr, args.use_mup, args.mup_base_hidden_size, args.train_iters) == (0.01562, True, 64, 1000)
assert (args.hidden_size, args.global_batch_size, args.lr_warmup_iters) == (2112, 256, 40)
"""),
}  # fmt: skip

TOP = """
import argparse, shlex, sys, types
import torch
sys.path.insert(0, ".")
code, _, words = sys.stdin.read().partition(sys.argv.pop())
arguments = shlex.split(words.replace("\\\\", " ").replace("#", " "))
rates = {}
"""
END = """
inside = {name for name in rates if ("layers." in name or "blocks." in name) and "norm" not in name}
hidden, others = {rates[name] for name in inside}, {rates[name] for name in {*rates} - inside}
assert not rates or (hidden, others) == ({0.0004733}, {0.01562}), (hidden, others)
print(f"parsed: {' '.join(arguments)}", *([f"{len(rates)} parameters have their rates"] if rates else []))
"""


def main() -> None:
    clones = Path(sys.argv[1])
    pythons = dict(argument.split("=", 1) for argument in sys.argv[2:])
    run = {"width": 2112, "depth": 24, "steps": 1000, "batch": 2**19, "warmup": 0.04, "sequence_length": 2048}
    mup = {"parametrization": "mup", "base_width": 64, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95,
           "schedule": "cosine", "final_lr_fraction": 0.1, "grad_clip": 1.0, "head_size": 64}  # fmt: skip
    for program, (folder, commit, before, reads) in READ.items():
        is_nanochat = program == "nanochat"
        tuned = {"matrix_lr" if is_nanochat else "lr": (-6.0, -7.0, -5.0)}
        recipe = write_recipe(program, tuned, run, "", {} if is_nanochat else mup)
        python = pythons.get(program, sys.executable)
        made = subprocess.run(
            [python, "-c", f"{TOP}{reads}{END}", before],
            input=recipe, cwd=clones / folder, text=True, capture_output=True,
        )  # fmt: skip
        outcome = made.stdout.strip().splitlines()[-1:] or made.stderr.strip().splitlines()[-1:]
        print(f"{program} at {commit}: {outcome[0]}")


if __name__ == "__main__":
    main()
