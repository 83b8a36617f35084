"""YAML of users and of other tools, without code and without the bombs that aliases can be."""

from __future__ import annotations

import math
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from mup_tpu.files import MOST_BYTES_OF_CONFIG, require_size

# Most values of a file with each alias written out; the largest tables of labels have 88 000
MOST_VALUES = 200_000


def yaml_format(**options: Any) -> YAML:
    """Return a reader and writer of YAML, by default one that keeps comments and order.

    `load` raises ValueError or YAMLError.
    """
    yaml = YAML(pure=True, **options)
    yaml.Composer = _Bounded
    return yaml


def read_yaml(text: str) -> Any:
    """Return the plain values of YAML; what has a tag of a program is read without the tag.

    Raises:
        ValueError: the text is no YAML, or holds too many values.
        OSError: the text is too long.
    """
    yaml = yaml_format(typ="safe")
    yaml.Constructor = _Untagged
    try:
        require_size(len(text), MOST_BYTES_OF_CONFIG)
        return yaml.load(text)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
    except YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


class _Untagged(SafeConstructor):
    def construct_undefined(self, node: Node) -> Any:
        if isinstance(node, ScalarNode):
            return self.construct_scalar(node)
        is_list = isinstance(node, SequenceNode)
        return (
            self.construct_sequence(node, deep=True) if is_list else self.construct_mapping(node, deep=True)
        )


# Lightning writes tuples and objects under tags of Python: their contents are read, nothing is called.
_Untagged.add_constructor(None, _Untagged.construct_undefined)


class _Bounded(Composer):
    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if _values(node, {}) > MOST_VALUES:
            raise ValueError(f"it holds more than {MOST_VALUES:,} values once its aliases are written out")
        return node


def _values(node: Node | None, known: dict[int, float]) -> float:
    """Count the values below a node, each alias in full; a node that contains itself has infinitely many."""
    if not isinstance(node, SequenceNode | MappingNode):
        return 1
    if id(node) not in known:
        known[id(node)] = math.inf
        is_list = isinstance(node, SequenceNode)
        parts = node.value if is_list else [part for pair in node.value for part in pair]
        known[id(node)] = 1 + sum(_values(part, known) for part in parts)
    return known[id(node)]
