"""Units of a table's loss: nat or bits a token, or bits a byte. An analysis is in nat per token."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, get_args

from mup_tpu.analysis.ingest.table_columns import plain_name
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.run_table import require_above_zero
from mup_tpu.errors import TableError

UnitName = Literal["auto", "nat", "bit", "bpb"]
_WORDS = {"nat": "nat per token", "bit": "bits per token", "bpb": "bits per byte"}
_BITS_PER_BYTE = re.compile(r"(^|_)(bpb|bits_per_byte)(_|$)")
_BITS = re.compile(r"(^|_)(bpt|bits|bits_per_token)(_|$)")


@dataclass(frozen=True)
class LossUnit:
    """Unit of a table's loss."""

    name: UnitName = "auto"
    """"auto" tells it from the column's name: bits per byte (bpb), bits per token (bits), or else nat."""
    bytes_per_token: float | None = None
    """Bytes of text in a token, which bits per byte need."""

    def __post_init__(self) -> None:
        if self.name not in get_args(UnitName):
            raise TableError(f"loss_unit {self.name!r} is not one of {', '.join(get_args(UnitName))}")
        if self.bytes_per_token is not None:
            require_above_zero("bytes_per_token", self.bytes_per_token)

    def factor(self, column: str) -> tuple[float, Reason | None]:
        """Nat per token in one unit of a column, and a note where that is not 1.

        Raises:
            TableError: it is in bits per byte, and the bytes of a token are not known.
        """
        name = self._of(column)
        if name == "nat":
            return 1.0, None
        if name == "bit":
            return math.log(2), Reason.of(
                "loss converted", name=column, unit=_WORDS[name], factor=math.log(2)
            )
        if self.bytes_per_token is None:
            raise TableError(
                f"{column} is in bits per byte, and the analysis in nat per token: give --bytes-per-token, "
                "the bytes of text in a token of its tokenizer, or --loss-unit nat if it is not"
            )
        factor = math.log(2) * self.bytes_per_token
        return factor, Reason.of("loss converted", name=column, unit=_WORDS[name], factor=factor)

    def _of(self, column: str) -> UnitName:
        if self.name != "auto":
            return self.name
        plain = plain_name(column)
        if _BITS_PER_BYTE.search(plain):
            return "bpb"
        return "bit" if _BITS.search(plain) or re.search(r"[(\[]\s*bits?\s*[)\]]", column) else "nat"


AUTO = LossUnit()
