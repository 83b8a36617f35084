"""Meaning of a table's loss: nat or bits per token, bits per byte, perplexity, or a score.

An analysis is in nat per token.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import pandas as pd

from mup_tpu.analysis.ingest.table_columns import means, plain_name
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.run_table import require_above_zero
from mup_tpu.errors import TableError

UnitName = Literal["auto", "nat", "bit", "bpb"]
_WORDS = {"nat": "nat per token", "bit": "bits per token", "bpb": "bits per byte"}
_BITS_PER_BYTE = re.compile(r"(^|_)(bpb|bits_per_byte)(_|$)")
_PERPLEXITY = re.compile(r"(^|_)(ppl|perplexity)(_|$)")
_SCORE = re.compile(
    r"(^|_)(acc|accuracy|top1|top5|psnr|ssim|score|bleu|rouge|f1|auc|map|iou|reward|return|r2|win_rate|elo)(_|$)"
)
"""Metrics of which more is better."""
_CROSS_ENTROPY = re.compile(r"(^|_)(loss|ce|xent|nll|cross_entropy|nats?)(_|$)")
_BITS = re.compile(r"(^|_)(bpt|bits|bits_per_token)(_|$)")


@dataclass(frozen=True)
class LossUnit:
    """Unit of a table's loss."""

    name: UnitName = "auto"
    """"auto" takes it from the column's name: perplexity, bits per byte (bpb), bits per token, else nat."""
    bytes_per_token: float | None = None
    """Bytes of text in a token, which bits per byte need."""

    def __post_init__(self) -> None:
        if self.name not in get_args(UnitName):
            raise TableError(f"loss_unit {self.name!r} is not one of {', '.join(get_args(UnitName))}")
        if self.bytes_per_token is not None:
            require_above_zero("bytes_per_token", self.bytes_per_token)

    def convert(self, rows: pd.DataFrame, column: str) -> tuple[pd.DataFrame, Reason | None]:
        """Convert loss and loss_error to nat per token; return a note where they were in another unit.

        Raises:
            TableError: it is a score, of which more is better; or in bits per byte, and the bytes of a token
                are not known.
        """
        name = self._of(column)
        if name == "nat":
            is_known = (
                self.name == "nat" or means(column) == "loss" or _CROSS_ENTROPY.search(plain_name(column))
            )
            return rows, None if is_known else Reason.of("unit unknown", name=column)
        if name == "score":
            raise TableError(
                f"{column} is a score, of which more is better, and the analysis needs a loss: give it "
                "by --columns loss=COLUMN, or --loss-unit nat if it is one"
            )
        if name == "perplexity":
            if (bad := rows.index[~(rows["loss"].isna() | (rows["loss"] > 0))]).size:
                first = rows["loss"][bad[0]]
                raise TableError(f"perplexity {column} must be above 0, but row {bad[0]} has {first:g}")
            nat = rows.assign(loss=np.log(rows["loss"]), loss_error=rows["loss_error"] / rows["loss"])
            return nat, Reason.of("perplexity converted", name=column)
        factor = math.log(2)
        if name == "bpb":
            if self.bytes_per_token is None:
                raise TableError(
                    f"{column} is in bits per byte, and the analysis in nat per token: "
                    "give --bytes-per-token, the bytes of text in a token, or --loss-unit nat if it is not"
                )
            factor *= self.bytes_per_token
        nat = rows.assign(loss=rows["loss"] * factor, loss_error=rows["loss_error"] * factor)
        return nat, Reason.of("loss converted", name=column, unit=_WORDS[name], factor=factor)

    def _of(self, column: str) -> str:
        if self.name != "auto":
            return self.name
        plain = plain_name(column)
        if _PERPLEXITY.search(plain):
            return "perplexity"
        if _SCORE.search(plain):
            return "score"
        if _BITS_PER_BYTE.search(plain):
            return "bpb"
        return "bit" if _BITS.search(plain) or re.search(r"[(\[]\s*bits?\s*[)\]]", column) else "nat"


AUTO = LossUnit()
