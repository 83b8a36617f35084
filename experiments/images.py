"""Beyond language: an MLP and a small vision transformer on images of digits, as studies in SP and in μP.

python experiments/images.py                    all studies, each until its verdicts are settled
python experiments/images.py mlp_sgd            one of them
python experiments/images.py --check            coordinate checks of the models, and no study

The images are scikit-learn's (pip install '.[train,images]'): 1,797 of 8 × 8 pixels. Each time that one is
seen it is turned, scaled and shifted at random, with noise on its pixels, so that no batch comes twice. The
loss is that of fresh images of this kind, after the learning rate has fallen to 0: no model can learn them by
heart, and wider ones are better.

SP is as torch's modules come: their init, and one learning rate for all parameters. At the base width both
rules are one.
"""

import argparse
import math

from mup_tpu import Study, octaves

MLP = {"steps": 200, "batch_size": 64, "base": 64}
MODELS = {"mlp": MLP, "mlp_zero": MLP, "vit": {"steps": 200, "batch_size": 32, "base": 32}}
WIDTHS = {"mlp": [64, 128, 256, 512, 1024, 2048], "vit": [32, 64, 128, 256]}
STUDIES = {
    "mlp_sgd": ("mlp", "sgd", octaves(-8, -1), ["mup", "sp"]),
    "mlp_adam": ("mlp", "adam", octaves(-12, -5), ["mup", "sp"]),
    "vit_adam": ("vit", "adam", octaves(-11, -4), ["mup", "sp"]),
    # A readout that starts at 0, as the authors of μP advise
    "mlp_adam_zero": ("mlp_zero", "adam", octaves(-12, -5), ["mup"]),
    # Which part carries SP's drift? Each rule with the other's learning rate for hidden matrices.
    "mlp_hidden": ("mlp", "adam", octaves(-12, -5), ["mup_but_hidden", "sp_but_hidden"]),
}
SIDE, CLASSES = 8, 10  # pixels, digits


def study_of(name, results="results", widths=(), rates=(), rules=(), seeds=3):
    """Return a study; with widths, exponents of rates, or rules it is that part of the grid."""
    architecture, optimizer, all_rates, all_rules = STUDIES[name]
    return Study(
        f"{results}/{name}",
        scale={"width": widths or WIDTHS[architecture.removesuffix("_zero")]},
        tune={"learning_rate": [2**e for e in rates] or all_rates},
        compare={"parametrization": rules or all_rules},
        seeds=seeds,
        settings={"architecture": architecture, "optimizer": optimizer, "noise": 0.3} | MODELS[architecture],
    )


def model_of(architecture):
    """Return the function that builds a model at a width."""
    import torch.nn.functional as F
    from torch import nn

    class ViT(nn.Module):
        """Two blocks on 16 patches of 2 × 2 pixels; heads of size 16."""

        def __init__(self, width):
            super().__init__()
            self.patches = nn.Linear(4, width)
            self.positions = nn.Embedding(16, width)
            options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
            blocks = [nn.TransformerEncoderLayer(width, width // 16, 2 * width, **options) for _ in range(2)]
            self.blocks = nn.Sequential(*blocks)
            self.norm = nn.LayerNorm(width)
            self.readout = nn.Linear(width, CLASSES)

        def forward(self, images_BP):
            patches_BT4 = F.unfold(images_BP.view(-1, 1, SIDE, SIDE), kernel_size=2, stride=2).mT
            tokens_BTW = self.patches(patches_BT4) + self.positions.weight
            return self.readout(self.norm(self.blocks(tokens_BTW)).mean(1))

    def mlp(width):
        """Two hidden layers, as the first figure of Yang et al. 2022 has them."""
        inner = [nn.Linear(SIDE**2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        return nn.Sequential(*inner, nn.Linear(width, CLASSES))

    def mlp_zero(width):
        model = mlp(width)
        nn.init.zeros_(model[-1].weight)
        return model

    return {"mlp": mlp, "mlp_zero": mlp_zero, "vit": ViT}[architecture]


def batches(size, noise, seed):
    """Yield images and labels; images are turned by up to 15°, scaled by up to 15 %, shifted by a pixel."""
    import torch
    import torch.nn.functional as F
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images_N1HW, labels_N = torch.tensor(pixels).float().view(-1, 1, SIDE, SIDE), torch.tensor(labels)
    images_N1HW = (images_N1HW - images_N1HW.mean()) / images_N1HW.std()
    black = images_N1HW.min()  # pixels beyond the border
    generator = torch.Generator().manual_seed(seed)
    while True:
        chosen = torch.randint(len(labels_N), (size,), generator=generator)
        turn, zoom, x, y = torch.rand(4, size, generator=generator) * 2 - 1
        turn, zoom = turn * math.pi / 12, 1 + 0.15 * zoom
        # Positions go from -1 to 1, so that a pixel is 2 / SIDE.
        first = torch.stack([zoom * turn.cos(), -zoom * turn.sin(), x * 2 / SIDE])
        second = torch.stack([zoom * turn.sin(), zoom * turn.cos(), y * 2 / SIDE])
        map_B23 = torch.stack([first, second]).permute(2, 0, 1)
        grid = F.affine_grid(map_B23, (size, 1, SIDE, SIDE), align_corners=False)
        images_B1HW = F.grid_sample(images_N1HW[chosen] - black, grid, align_corners=False) + black
        noise_BP = noise * torch.randn(size, SIDE**2, generator=generator)
        yield images_B1HW.flatten(1) + noise_BP, labels_N[chosen]


def loss(model, examples):
    import torch.nn.functional as F

    images_BP, labels_B = examples
    return F.cross_entropy(model(images_BP), labels_B)


def train(trial, report):
    """Train one model by a warm-up of a tenth, then a linear fall to 0; return its loss on fresh images."""
    import torch

    from mup_tpu.parametrize import parametrize

    build = model_of(trial.architecture)
    rule, _, role = trial.parametrization.partition("_but_")
    mup, sp = (
        parametrize(build, width=trial.width, base_width=trial.base, rule=rule, optimizer=trial.optimizer)
        for rule in ("mup", "sp")
    )
    this, other = (mup, sp) if rule == "mup" else (sp, mup)
    torch.manual_seed(trial.seed)
    model = this.init_(build(trial.width))
    groups = this.param_groups(model, lr=trial.learning_rate)
    if role:  # parameters of this role learn as in the other rule
        groups = [
            {"params": [values], "lr": trial.learning_rate * factors.scalings[name].learning_rate}
            for name, values in model.named_parameters()
            for factors in [other if this.parameters[name].role == role else this]
        ]
    if trial.optimizer == "sgd":
        optimizer = torch.optim.SGD(groups, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(groups, fused=True)
    warmup = trial.steps / 10
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: min((done + 1) / warmup, (trial.steps - done) / (trial.steps - warmup))
    )
    examples = batches(trial.batch_size, trial.noise, 1000 + trial.seed)
    for step in range(1, trial.steps + 1):
        value = loss(model, next(examples))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        schedule.step()
        if step % 10 == 0:
            report(step=step, steps=trial.steps, loss=value.item())
    with torch.no_grad():
        return loss(model, next(batches(2048, trial.noise, 0))).item()


def check(architecture, optimizer, lr, widths):
    """Print for each rule whether the effect of updates keeps its size as the model widens."""
    from mup_tpu.parametrize import coord_check

    examples = next(batches(256, 0.3, 0))
    checked = coord_check(
        model_of(architecture), examples, loss, widths=widths, lr=lr, optimizer=optimizer, rules=["mup", "sp"]
    )
    for rule, report in checked.reports.items():
        print(f"\n{architecture}, {optimizer}, {rule}: {report}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=f"of {', '.join(STUDIES)}; by default all")
    parser.add_argument("--results", default="results", help="folder of the studies' folders")
    parser.add_argument("--workers", type=int, help="trials at once; by default one a core")
    parser.add_argument("--check", action="store_true", help="check the models and run no study")
    grid = parser.add_argument_group("a part of the grid, in place of what settles the verdicts")
    grid.add_argument("--widths", type=int, nargs="+", default=[])
    grid.add_argument("--rates", type=float, nargs="+", default=[], help="log2 of learning rates")
    grid.add_argument("--rules", nargs="+", default=[])
    grid.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    if unknown := set(options.names) - set(STUDIES):
        parser.error(f"names: {', '.join(unknown)} is not one of {', '.join(STUDIES)}")
    if options.check:
        check("mlp", "sgd", 2**-4, WIDTHS["mlp"][:4])
        check("mlp", "adam", 2**-7, WIDTHS["mlp"][:4])
        check("vit", "adam", 2**-8, WIDTHS["vit"])
    else:
        is_part = bool(options.widths or options.rates or options.rules)
        for name in options.names or STUDIES:
            part = study_of(
                name, options.results, options.widths, options.rates, options.rules, options.seeds
            )
            part.run(train, until_settled=not is_part, workers=options.workers)
            print(part.verdict())
