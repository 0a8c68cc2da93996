"""Prometheus' text form, of several engines on one page: every series with its model's name, every family once."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

LABEL = "model"
# One line of a page; others, whatever an engine wrote there, would make the whole page unreadable for Prometheus.
_SAMPLE = re.compile(
    rb'([a-zA-Z_:][\w:]*)(?:\{((?:[a-zA-Z_]\w*="(?:[^"\\\n]|\\.)*",? ?)*)\})?[ \t]+(\S+(?:[ \t]+-?\d+)?)\s*'
)
_ABOUT = re.compile(rb"# (HELP|TYPE) ([a-zA-Z_:][\w:]*)(?: (.*))?")
_TAKEN = re.compile(rb'((?:"(?:[^"\\]|\\.)*"|[^"])*?)\b' + LABEL.encode() + rb'="')
_PARTS = (b"_bucket", b"_sum", b"_count")


@dataclass(slots=True)
class _Family:
    help: bytes = b""
    kind: bytes = b""
    lines: list[bytes] = field(default_factory=list)

    def text(self, name: bytes) -> Iterator[bytes]:
        if self.help:
            yield b"# HELP %s %s" % (name, self.help)
        yield b"# TYPE %s %s" % (name, self.kind or b"untyped")
        yield from self.lines


def merged(pages: Mapping[str, bytes]) -> bytes:
    """By the engines' models. A family's lines stand together, as the form asks for, and families are sorted."""
    families: dict[bytes, _Family] = {}
    for model, page in pages.items():
        _add(families, _label(model), page)
    lines = [line for name in sorted(families) if families[name].lines for line in families[name].text(name)]
    return b"\n".join([*lines, b""])


def _add(families: dict[bytes, _Family], label: bytes, page: bytes) -> None:
    current = b""
    for line in page.splitlines():
        if about := _ABOUT.fullmatch(line):
            what, current, text = about.groups(default=b"")
            family = families.setdefault(current, _Family())
            if what == b"HELP":
                family.help = family.help or text
            elif family.kind not in (b"", text):  # engines of two versions
                family.kind = b"untyped"
            else:
                family.kind = text
        elif (sample := _SAMPLE.fullmatch(line)) and _is_number(sample[3].split()[0]):
            name, labels, value = sample.groups(default=b"")
            is_part = name != current and name.startswith(current) and name.removeprefix(current) in _PARTS
            family = families.setdefault(current if current and is_part else name, _Family())
            family.lines.append(b"%s{%s} %s" % (name, _with(label, labels), value))


def _label(model: str) -> bytes:
    escaped = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{LABEL}="{escaped}"'.encode()


def _with(label: bytes, labels: bytes) -> bytes:
    if taken := _TAKEN.match(labels):
        # As Prometheus itself does with a label that is its own.
        labels = b'%sexported_%s="%s' % (taken[1], LABEL.encode(), labels[taken.end() :])
    return b"%s,%s" % (label, labels) if labels else label


def _is_number(text: bytes) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
