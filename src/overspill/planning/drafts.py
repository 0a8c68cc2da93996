"""Drafts: tokens that vLLM guesses from the text so far, and the model checks several at a time."""

import json

from overspill.kv.errors import OverspillError

# vLLM's methods that need no second model. `ngram` looks the last tokens up in the prompt and the answer, on the CPU
# and without asynchronous scheduling; `ngram_gpu` does so on the GPU; `suffix` keeps trees of earlier answers, and
# needs the package arctic-inference.
METHODS = ("ngram", "ngram_gpu", "suffix")
_NUM_DRAFTS, _MOST_DRAFTS = 4, 16
_LOOKED_UP = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}  # tokens


def parse_drafts(text: object) -> str:
    """`off`, a method, or a method with its number of drafts: `ngram:8`."""
    method, colon, number = str(text).partition(":")
    is_number = number.isdecimal() and 1 <= int(number) <= _MOST_DRAFTS
    if text != "off" and (method not in METHODS or (colon and not is_number)):
        raise OverspillError(
            f"{text!r:.40} is none of off, {', '.join(METHODS)}, nor one of these with 1 to {_MOST_DRAFTS} drafts; "
            "write for example ngram:8"
        )
    return str(text)


def num_drafts(drafts: str) -> int:
    """That a step checks of each request, at most."""
    return 0 if drafts == "off" else int(drafts.partition(":")[2] or _NUM_DRAFTS)


def speculative_config(drafts: str) -> str | None:
    """vLLM's, as JSON."""
    if drafts == "off":
        return None
    method = drafts.partition(":")[0]
    looked_up = _LOOKED_UP if method != "suffix" else {}
    return json.dumps({"method": method, "num_speculative_tokens": num_drafts(drafts), **looked_up})
