"""Writes t5bench/costmodel/transformers_defaults.py from the transformers that is installed.

python tests/costmodel/make_transformers_defaults.py > t5bench/costmodel/transformers_defaults.py
"""

import inspect
import pprint
from typing import Any

KINDS = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gpt_neox", "gpt2", "phi", "t5", "mt5",
)  # fmt: skip
HEAD = '''"""What Transformers' configuration classes do where a config.json leaves a key out.

Made from transformers {release} by tests/costmodel/make_transformers_defaults.py; a test compares it with the one that
is installed.
"""

from collections.abc import Mapping
from typing import Any

RELEASE = "{release}"
'''


def defaults_of(cls: Any) -> dict[str, Any]:
    """The keys that a configuration class names, with their defaults."""
    parameters = inspect.signature(cls.__init__).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not inspect.Parameter.empty}


def text() -> str:
    import transformers
    from transformers import CONFIG_MAPPING, PretrainedConfig

    of_every_kind = PretrainedConfig().to_dict()
    del of_every_kind["transformers_version"]
    tables = {
        "OF_EVERY_KIND: Mapping[str, Any]": of_every_kind,
        "DEFAULTS: Mapping[str, Mapping[str, Any]]": {kind: defaults_of(CONFIG_MAPPING[kind]) for kind in KINDS},
        "OTHER_NAMES: Mapping[str, Mapping[str, str]]": {kind: CONFIG_MAPPING[kind].attribute_map for kind in KINDS},
    }
    meanings = {
        "OF_EVERY_KIND: Mapping[str, Any]": "Of PretrainedConfig, for every kind.",
        "DEFAULTS: Mapping[str, Mapping[str, Any]]": "By model_type.",
        "OTHER_NAMES: Mapping[str, Mapping[str, str]]": "By model_type, other names of keys; they win.",
    }
    written = [HEAD.format(release=transformers.__version__)]
    for name, table in tables.items():
        written.append(f'{name} = {pprint.pformat(table, sort_dicts=False, width=118)}\n"""{meanings[name]}"""\n')
    return "\n".join(written)


if __name__ == "__main__":
    print(text(), end="")
