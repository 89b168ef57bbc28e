"""YAML of settings and hardware profiles: plain data only, numbers as in JSON, no duplicate keys."""

import re
from typing import Any

import yaml


class SafeLoader(yaml.SafeLoader):
    """Safe YAML in which `3e-4` is a number, as in YAML 1.2, and a key given twice is refused rather than overwritten."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


SafeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
