"""systemd's ways to write names, words and assignments (systemd.unit(5), systemd.service(5), systemd-escape(1))."""

import re

from overspill.kv.errors import OverspillError

# Nothing in it means anything to systemd, so that most command lines stay as people write them.
_PLAIN_WORD = re.compile(r"[A-Za-z0-9_./:=,@+-]+")
_KEPT = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789:_.")


def escape_instance(name: str) -> str:
    """As systemd-escape does, so that %I gives the name back. No character is left that could leave a folder."""
    escaped = ""
    for index, byte in enumerate(_utf8(name)):
        if byte == ord("/"):
            escaped += "-"
        elif byte in _KEPT and not (index == 0 and byte == ord(".")):
            escaped += chr(byte)
        else:
            escaped += f"\\x{byte:02x}"
    return escaped


def quote_word(word: str) -> str:
    """One word of ExecStart=, after the program's own."""
    return word if _PLAIN_WORD.fullmatch(word) else f'"{_escaped(word).replace("$", "$$")}"'


def quote_program(path: str) -> str:
    """The first word of ExecStart=, where systemd takes no quotes and no backslashes, and takes a `$` for itself in one
    of the two places it passes the path on, and not in the other."""
    if strange := sorted({each for each in path if each in "$\\\"'" or not each.isprintable()}):
        raise OverspillError(
            f"systemd cannot start {path!r}: its path holds {' '.join(strange)!r}; install the unit with a Python "
            "whose path is without it"
        )
    return path if _PLAIN_WORD.fullmatch(path) else f'"{_escaped(path)}"'


def quote_assignment(name: str, value: str) -> str:
    """One of Environment=, where a `$` is only a `$`."""
    return f'"{_escaped(f"{name}={value}")}"'


def quote_environment(value: str) -> str:
    """A value in the file of EnvironmentFile=, where a `%` is only a `%` and one line holds one variable."""
    _utf8(value)
    if not value.isprintable():
        raise OverspillError("a secret holds a line break or another control character; use one without")
    return '"' + re.sub(r'(["\\`$])', r"\\\1", value) + '"'


def quote_path(path: str) -> str:
    """The path of EnvironmentFile=, which is the rest of the line."""
    if not path.isprintable() or path != path.strip():
        raise OverspillError(f"systemd cannot read {path!r}; give another --folder or --name")
    return path.replace("%", "%%")


def _escaped(text: str) -> str:
    _utf8(text)
    for character, written in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%")):
        text = text.replace(character, written)
    return "".join(each if each.isprintable() else _hexadecimal(each) for each in text)


def _hexadecimal(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in character.encode())


def _utf8(text: str) -> bytes:
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        raise OverspillError(
            f"{text!r} is not valid UTF-8, and systemd reads nothing else; rename the folder"
        ) from error
    if b"\0" in content:
        raise OverspillError(f"{text!r} holds a zero byte, and no name can; remove it")
    return content
