"""Reader of YAML that refuses a key that stands twice in a mapping, of which YAML keeps the last without a word."""

from __future__ import annotations

from typing import Any

import yaml

__all__ = ["read_yaml"]


def read_yaml(text: str) -> Any:
    """Return what a YAML text holds, as ``yaml.safe_load`` does.

    Raises:
        yaml.YAMLError: It is not valid, or has a key twice.
    """
    return yaml.load(text, _StrictLoader)  # noqa: S506 - it is a safe one.


class _StrictLoader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and not key.tag.endswith(":merge"):
                if (key.tag, key.value) in seen:
                    raise yaml.composer.ComposerError(
                        problem=f"{key.value} is there a second time", problem_mark=key.start_mark
                    )
                seen.add((key.tag, key.value))
        return node
