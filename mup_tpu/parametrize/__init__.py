"""Rules of scaling for a module of your own: any `torch.nn.Module` that a function builds at any width.

Factors are kept by parameter name, outside of the module, so that deepcopy, `.to()`, `torch.compile`, FSDP
and a round trip of the state dict lose none:

    mup = parametrize(build, width=1024, base_width=128)
    module = mup.init_(build(1024))
    optimizer = torch.optim.AdamW(mup.param_groups(module, lr=2**-8, weight_decay=0.1))

`docs/your_own_model.md` lists the facts that a module tells by itself, and those that the caller must give.
"""

import importlib.util

from mup_tpu.errors import not_installed

if missing := [name for name in ("torch", "mup") if importlib.util.find_spec(name) is None]:
    raise ModuleNotFoundError(f"mup_tpu.parametrize {not_installed(missing[0])}", name=missing[0])

from mup_tpu.parametrize.check import CoordinateCheck, LintReport, assert_mup, coord_check, lint
from mup_tpu.parametrize.module import ForwardFactor, ModuleParametrization
from mup_tpu.parametrize.rules import GrownModel, from_config, parametrize

__all__ = [
    "CoordinateCheck", "ForwardFactor", "GrownModel", "ModuleParametrization", "LintReport", "assert_mup",
    "coord_check", "from_config", "lint", "parametrize",
]  # fmt: skip
