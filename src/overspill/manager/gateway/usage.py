"""Tokens as answers tell them, found without reading the rest."""

import re
from typing import Protocol

_PROMPT = re.compile(rb'"(?:prompt|input)_tokens":\s*(\d+)')
_COMPLETION = re.compile(rb'"(?:completion|output)_tokens":\s*(\d+)')


class Counted(Protocol):
    prompt_tokens: int
    completion_tokens: int


def read_usage(answer: bytes, counted: Counted) -> None:
    """Of the last `usage` in it."""
    usage = answer[answer.rfind(b'"usage":') :]
    if match := _PROMPT.search(usage):
        counted.prompt_tokens += int(match[1])
    if match := _COMPLETION.search(usage):
        counted.completion_tokens += int(match[1])
