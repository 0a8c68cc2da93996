"""config.json, read key by key: a missing or impossible value is an error that names the key."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TypeVar

from overspill.model import ModelError
from overspill.model.defaults import DEFAULTS, SHAPE_KEYS

# Where multimodal models keep the config of their language model.
TEXT_CONFIG_KEYS = ("text_config", "llm_config", "language_config")

# Routed experts per layer, under the names that vLLM knows.
EXPERT_KEYS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")

# Beyond any model: numbers in a stranger's file must not keep us counting for hours.
_MAXIMUM = {"num_hidden_layers": 500, **dict.fromkeys(EXPERT_KEYS, 4096)}
_MISSING = object()
_T = TypeVar("_T")


class Config:
    """A model's config.json. Keys of the language model are looked up in its nested config where there is one.

    An absent key takes the default of transformers' config class, as in vLLM. The shape keys of a config that is not
    nested are the exception: nobody leaves them out, so a file without them is broken.
    """

    def __init__(self, raw: Mapping[str, object], *, where: str) -> None:
        self.raw = raw
        self.where = where
        nested = next((raw[key] for key in TEXT_CONFIG_KEYS if isinstance(raw.get(key), dict)), None)
        self.text: Mapping[str, object] = nested if isinstance(nested, dict) else raw
        self.model_type = self._model_type()
        defaults = DEFAULTS.get(self.model_type, {})
        self._defaults = defaults if nested is not None else {k: defaults[k] for k in defaults.keys() - SHAPE_KEYS}

    @classmethod
    def parse(cls, content: bytes, *, where: str) -> "Config":
        return cls(parse_object(content, where), where=where)

    @property
    def architecture(self) -> str:
        names = self.raw.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise ModelError(
                f"{self.where} gives {_show(names)} for architectures, and a list with the model's class was expected, "
                'such as ["LlamaForCausalLM"]; add it'
            )
        return names[0]

    def section(self, key: str) -> "Config":
        """A nested config, such as vision_config."""
        value = self.raw.get(key)
        if not isinstance(value, dict):
            raise self._bad(key, value, "a nested config")
        return Config(value, where=f"{key} of {self.where}")

    def get(self, key: str, default: object = _MISSING) -> object:
        """The value as written, else the class default, else `default`."""
        if key in self.text:
            return self.text[key]
        value = self._defaults.get(key, default)
        if value is _MISSING:
            raise ModelError(
                f"{self.where} has no {key}, without which the model cannot be sized; fetch the file again"
            )
        return value

    def integer(self, key: str, default: object = _MISSING, *, minimum: int = 1) -> int:
        value = self.get(key, default)
        maximum = _MAXIMUM.get(key, sys.maxsize)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            most = f" and at most {maximum}" if key in _MAXIMUM else ""
            raise self._bad(key, value, f"an integer of at least {minimum}{most}")
        return value

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        return None if self.get(key, default) is None else self.integer(key, default, minimum=0)

    def boolean(self, key: str, default: object = _MISSING) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self._bad(key, value, "true or false")
        return value

    def first_integer(self, keys: Sequence[str], default: int) -> int:
        """Value of the first key that is set in the file, else in the class defaults, else `default`."""
        for source in (self.text, self._defaults):
            for key in keys:
                if source.get(key) is not None:
                    return self.integer(key, minimum=0)
        return default

    def strings(self, key: str) -> tuple[str, ...] | None:
        return self._list(key, str, "strings")

    def integers(self, key: str) -> tuple[int, ...] | None:
        return self._list(key, int, "integers")

    def _list(self, key: str, kind: type[_T], expected: str) -> tuple[_T, ...] | None:
        value = self.get(key, None)
        if value is None:
            return None
        # A bool is an int to isinstance.
        if not isinstance(value, list) or any(type(item) is not kind for item in value):
            raise self._bad(key, value, f"a list of {expected}")
        return tuple(value)

    def _model_type(self) -> str:
        value = self.text.get("model_type", "")
        if not isinstance(value, str):
            raise self._bad("model_type", value, "a string")
        return value

    def _bad(self, key: str, value: object, expected: str) -> ModelError:
        return ModelError(f"{self.where} gives {_show(value)} for {key}, and {expected} was expected; correct it")


def parse_object(content: bytes, where: str) -> dict[str, object]:
    """Parse a JSON file that must hold one object."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{where} is not JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{where} holds {_show(value)}, and a JSON object was expected; fetch it again")
    return value


def _show(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
