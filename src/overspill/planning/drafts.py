"""Drafts: tokens that vLLM guesses from the text so far, and that the model checks several at a time."""

import json

from overspill.kv.errors import OverspillError

# vLLM's methods that need no second model. `ngram` looks up the last tokens in the prompt and the answer, on the CPU
# and without asynchronous scheduling; `ngram_gpu` does so on the GPU; `suffix` keeps trees of earlier answers, and
# needs the package arctic-inference.
METHODS = ("ngram", "ngram_gpu", "suffix")
_NUM_DRAFTS, _MOST_DRAFTS = 4, 16
_LOOKED_UP = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}  # tokens


def parse_drafts(text: object) -> str:
    """Check the text: `off`, a method, or a method with its number of drafts such as `ngram:8`."""
    text = "off" if text is False else text  # which YAML makes of it
    method, colon, number = str(text).partition(":")
    is_number = number.isdecimal() and 1 <= int(number) <= _MOST_DRAFTS
    if text != "off" and (method not in METHODS or (colon and not is_number)):
        raise OverspillError(
            f"{text!r:.40} is none of off, {', '.join(METHODS)}, nor one of these with 1 to {_MOST_DRAFTS} drafts; "
            "write for example ngram:8"
        )
    return str(text)


def num_drafts(drafts: str) -> int:
    """Most drafts of a request that a step checks."""
    return 0 if drafts == "off" else int(drafts.partition(":")[2] or _NUM_DRAFTS)


def speculative_config(drafts: str) -> str | None:
    """vLLM's --speculative-config as JSON; None without drafts."""
    if drafts == "off":
        return None
    method = drafts.partition(":")[0]
    looked_up = _LOOKED_UP if method != "suffix" else {}
    return json.dumps({"method": method, "num_speculative_tokens": num_drafts(drafts), **looked_up})
