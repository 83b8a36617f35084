"""Axes that are expressions of a table's columns: lr*weight_decay, tokens/params, 1/(lr*weight_decay*steps).

An expression has names of columns, numbers, + - * / ** (or ^), parentheses, log2 and sqrt. Its nodes are
looked up in tables of allowed ones, and nothing is executed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from mup_tpu.analysis.ingest.table_columns import Columns, means, plain_name, short_name
from mup_tpu.analysis.ingest.table_values import numbers, plain_sizes
from mup_tpu.analysis.run_table import no_column
from mup_tpu.errors import TableError

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: np.add, ast.Sub: np.subtract, ast.Mult: np.multiply, ast.Div: np.divide, ast.Pow: np.power,
    ast.USub: np.negative, ast.UAdd: np.positive,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = {"log2": np.log2, "sqrt": np.sqrt}
_LONGEST = 200  # characters; a deeply nested text would exhaust Python's stack


def canonical(text: str) -> str:
    """Write an expression in one way, with spaces about its operators; other texts are returned as they are.

    Examples:
        >>> canonical("lr*weight_decay"), canonical("peak lr")
        ('lr * weight_decay', 'peak lr')
    """
    tree = _parsed(text)
    return text if tree is None else ast.unparse(tree)


def with_derived(table: pd.DataFrame, columns: Columns) -> tuple[pd.DataFrame, Columns]:
    """Add the scales and tuned values that are expressions as columns; return their names in `columns` too.

    Columns that an expression uses change along with it.

    Raises:
        TableError: an expression has a name that is no column, or more than columns, numbers and operators.
    """
    used = list[str]()

    def named(text: str) -> str:
        nonlocal table
        tree = None if text in table else _parsed(text)
        if tree is None and text not in table and _is_cut(text):
            raise TableError(
                f"{text} is no whole expression: an operator or a parenthesis lacks its other side"
            )
        if tree is None or not any(_column(table, name) for name in _names(tree)):
            return text  # a name such as optim/lr; the caller reports that the table lacks it
        name = ast.unparse(tree)
        with np.errstate(all="ignore"):  # a result that is not finite is reported later, with its row
            table = table.assign(**{name: _value(tree, table, text, used)})
        return name

    scale, *scales = (named(name) for name in columns.scales)
    tuned, *others = (named(name) for name in columns.tuned)
    if not used:
        return table, columns
    columns = replace(
        columns, scale=scale, scales_beside=tuple(scales), hyperparameter=tuned, tuned_beside=tuple(others)
    )
    return table, replace(columns, along=(*columns.along, *used))


def _parsed(text: str) -> ast.expr | None:
    if not any(sign in text for sign in "+-*/^(") or len(text) > _LONGEST:
        return None
    try:
        tree = ast.parse(" ".join(text.split()).replace("^", "**"), mode="eval").body
    except (SyntaxError, ValueError):
        return None
    return tree if isinstance(tree, ast.BinOp | ast.UnaryOp | ast.Call) else None


def _is_cut(text: str) -> bool:
    # A column whose name is alike would be taken: width for "1/width)".
    is_open = text.count("(") != text.count(")")
    return is_open or re.search(r"^\s*[*/^]|[-+*/^]\s*$", text) is not None


def _names(tree: ast.expr) -> Iterator[str]:
    return (node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id not in _FUNCTIONS)


def _column(table: pd.DataFrame, name: str) -> str | None:
    """Return the column that a name means: itself, one behind a tracker's prefix, or the only one alike."""
    if name in table:
        return name
    for key in (short_name, plain_name, means):
        alike = [str(column) for column in table if key(str(column)) == key(name) != ""]
        if len(alike) == 1:
            return alike[0]
    return None


def _value(node: ast.expr, table: pd.DataFrame, text: str, used: list[str]) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return float(number)
        case ast.Name(id=name) if name not in _FUNCTIONS:
            if (column := _column(table, name)) is None:
                raise TableError(f"{text}: {no_column(table, name)}")
            used.append(column)
            return numbers(plain_sizes(table[column]), column)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand, table, text, used))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left, table, text, used), _value(right, table, text, used))
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](_value(argument, table, text, used))
    raise TableError(
        f"{text} has {ast.unparse(node)!r}, and an axis has columns, numbers, + - * / ** ( ), log2 and sqrt"
    )
