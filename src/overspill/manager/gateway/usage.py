"""Tokens as answers tell them, found without reading the rest."""

import re
from dataclasses import dataclass

_USAGE = b'"usage":{'
_PROMPT = re.compile(rb'"(?:prompt|input)_tokens":\s*(\d+)')
_COMPLETION = re.compile(rb'"(?:completion|output)_tokens":\s*(\d+)')


@dataclass(slots=True)
class Usage:
    """Of one answer, as far as it has come: each `usage` holds all so far, and the last one counts.

    With `continuous_usage_stats` vLLM tells it with every token.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0

    def read(self, answer: bytes) -> None:
        """A part of it, in whole events."""
        begin = answer.rfind(_USAGE)
        if begin < 0:
            return
        if match := _PROMPT.search(answer, begin):
            self.prompt_tokens = int(match[1])
        if match := _COMPLETION.search(answer, begin):
            self.completion_tokens = int(match[1])
