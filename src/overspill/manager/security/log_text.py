"""Text of clients in logs: one line, nothing that a terminal obeys."""

import logging
import re

_MAX_LENGTH = 2000
# Controls, separators of lines, marks that change the direction of text, halves of surrogate pairs.
_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def one_line(text: str, max_length: int = _MAX_LENGTH) -> str:
    shown = _UNSAFE.sub(lambda match: ascii(match[0])[1:-1], text)
    return shown if len(shown) <= max_length else f"{shown[:max_length]}… ({len(shown)} characters)"


class OneLine(logging.Filter):
    """For handlers of access logs, whose lines hold paths and headers as clients sent them."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        shown = one_line(message)
        if shown != message:
            record.msg, record.args = shown, None
        return True
