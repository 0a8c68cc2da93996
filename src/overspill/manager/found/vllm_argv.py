"""Command lines of vLLM's processes: which are, what they serve, and where."""

import re
from collections.abc import Sequence
from pathlib import PurePath

# As vLLM names its processes below the server (VLLM_PROCESS_NAME_PREFIX).
_TITLE = re.compile(r"VLLM::\w+")
_MODULE = re.compile(r"vllm\.entrypoints\.(openai\.)?(api_server|cli\.main)")
_PYTHON = re.compile(r"python[0-9.]*")
_MAX_NAME = 120


def serve_arguments(argv: Sequence[str]) -> list[str] | None:
    """What follows `vllm serve`; None for another command. A shell that was given it as a text is one of those."""
    words = list(argv)
    if words and _PYTHON.fullmatch(PurePath(words[0]).name):
        words = words[1:]
        while words and words[0].startswith("-") and words[0] != "-m":
            words = words[1:]
        if words[:1] == ["-m"]:
            is_ours = len(words) > 1 and (_MODULE.fullmatch(words[1]) or words[1] == "vllm")
            words = [words[1], *words[2:]] if is_ours else []
    if not words:
        return None
    program, rest = PurePath(words[0]).name, words[1:]
    if _MODULE.fullmatch(program) and not program.endswith("main"):
        return rest
    if (program == "vllm" or _MODULE.fullmatch(program)) and rest[:1] == ["serve"]:
        return rest[1:]
    return rest if words[0].endswith("vllm/entrypoints/openai/api_server.py") else None


def is_vllm(argv: Sequence[str]) -> bool:
    return serve_arguments(argv) is not None or is_titled(argv)


def is_titled(argv: Sequence[str]) -> bool:
    """One of vLLM's own, below a server: it has overwritten its command line with a title."""
    return bool(argv) and _TITLE.match(argv[0]) is not None


def flag(arguments: Sequence[str], *names: str) -> str | None:
    """The last value, as vLLM takes it."""
    value = None
    for at, word in enumerate(arguments):
        given, equals, rest = word.partition("=")
        if given.replace("_", "-") in names:
            value = rest if equals else next(iter(arguments[at + 1 : at + 2]), None)
    return value


def served_name(argv: Sequence[str]) -> str:
    """What a process is called on a page, and what must be typed to stop it: the model's name, or vLLM's title."""
    arguments = serve_arguments(argv)
    if arguments is None:
        title = _TITLE.match(argv[0]) if argv else None
        return title[0] if title is not None else "vllm"
    positional = arguments[0] if arguments and not arguments[0].startswith("-") else None
    name = flag(arguments, "--served-model-name") or flag(arguments, "--model", "--model-tag") or positional or "vllm"
    return "".join(one if one.isprintable() else "?" for one in name)[:_MAX_NAME]


def stated_port(argv: Sequence[str]) -> int:
    port = flag(serve_arguments(argv) or (), "--port") or ""
    return int(port) if port.isdecimal() and int(port) < 65536 else 8000


def has_tls(argv: Sequence[str]) -> bool:
    return flag(serve_arguments(argv) or (), "--ssl-keyfile") is not None
