"""μP in a LightningModule: the init where the model is built, the groups in `configure_optimizers`.

    python examples/lightning_module.py [WIDTH] [LEARNING_RATE]

Needs `pip install lightning`. Where torch_xla finds a TPU, accelerator="auto" takes it: name "cpu" or "gpu".
"""

import sys

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from mup_tpu.parametrize import parametrize


def build(width: int) -> nn.Module:
    """A network of any width."""
    return nn.Sequential(
        nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
    )


class Regression(lightning.LightningModule):
    """A network that learns a sine; `base_width` is the width at which its learning rate was found."""

    def __init__(self, width: int, lr: float, base_width: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.mup = parametrize(build, width=width, base_width=base_width)  # μP
        self.model = self.mup.init_(build(width))  # μP

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW with the groups of μP."""
        return torch.optim.AdamW(self.mup.param_groups(self.model, lr=self.hparams["lr"]))  # μP

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Mean squared error of a batch."""
        (inputs,) = batch
        loss = (self.model(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean()
        self.log("loss", loss)
        return loss


def train(width: int = 256, lr: float = 2**-7, steps: int = 20) -> float:
    """Train with Lightning's Trainer; the last batch's error."""
    torch.manual_seed(0)
    module = Regression(width, lr)
    inputs = torch.randn(steps * 64, 8, generator=torch.Generator().manual_seed(1))
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(inputs), batch_size=64))
    return trainer.callback_metrics["loss"].item()


if __name__ == "__main__":
    print(train(*(kind(word) for kind, word in zip((int, float), sys.argv[1:], strict=False))))
