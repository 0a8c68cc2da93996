"""Build of the attention library, by `python -m overspill.kv.attention.build` or when Overspill is installed.

One library holds a kernel for every instruction set of its architecture; the CPU decides at run time. The interface
is C, so the library serves every Python. Only the standard library is imported: setup.py loads this file alone.
"""

import argparse
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = FOLDER / "native"
COMMON = ("cpu", "plan", "pool")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-w")
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_BF16 = (*_AVX512, "-mavx512bf16", "-mavx512vbmi")
# Kernel files of each architecture, and their flags. All but the first may be missing: not every compiler knows them.
KERNELS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "avx2": _AVX2,
        "avx512": _AVX512,
        "avx512bf16": _BF16,
        "amx": (*_BF16, "-mamx-tile", "-mamx-bf16"),
    },
    "aarch64": {"neon": ()},
}


class BuildError(Exception):
    """No compiler could build the library; the message quotes each compiler's error."""


def library_path(machine: str | None = None) -> Path:
    return FOLDER / f"libattention-{machine or platform.machine()}.so"


def digest() -> str:
    """SHA-256 of flags and sources; a library built from other sources is not loaded."""
    content = hashlib.sha256(repr((FLAGS, KERNELS)).encode())
    for path in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        content.update(path.name.encode() + b"\0" + path.read_bytes())
    return content.hexdigest()


def compilers() -> Iterator[list[str]]:
    """Compiler commands to try, in order; $CXX alone if it is set."""
    if named := os.environ.get("CXX"):
        yield shlex.split(named)
        return
    yield from ([path] for name in ("c++", "g++", "clang++") if (path := shutil.which(name)))
    if importlib.util.find_spec("ziglang"):
        yield [sys.executable, "-m", "ziglang", "c++"]


def build(target: Path, machine: str | None = None) -> list[str]:
    """Compile the library with the first compiler that succeeds; return the names of its kernels."""
    machine = machine or platform.machine()
    if machine not in KERNELS:
        raise BuildError(f"there is no attention kernel for {machine}; there are some for {', '.join(KERNELS)}")
    errors = []
    for compiler in compilers():
        try:
            return _build_with(compiler, target, machine)
        except (BuildError, OSError) as error:
            errors.append(f"{shlex.join(compiler)}: {error}")
    raise BuildError("\n".join(errors) or "no C++ compiler: neither $CXX, c++, g++, clang++ nor the package ziglang")


def _build_with(compiler: Sequence[str], target: Path, machine: str) -> list[str]:
    kernels = KERNELS[machine]
    first = next(iter(kernels))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as workers:

        def compile_file(name: str, flags: Sequence[str]) -> str | None:
            """Compile one file; return the error, if any."""
            command = [*compiler, *FLAGS, *flags, "-c", str(SOURCES / f"{name}.cpp"), "-o", f"{folder}/{name}.o"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            return done.stderr[-2000:] or f"exit status {done.returncode}" if done.returncode else None

        errors = dict(zip(kernels, workers.map(compile_file, kernels, kernels.values())))
        if errors[first]:
            raise BuildError(errors[first])
        built = [name for name, error in errors.items() if not error]
        macros = [f'-DOVERSPILL_DIGEST="{digest()}"', *(f"-DOVERSPILL_HAS_{name.upper()}" for name in built)]
        for error in workers.map(lambda name: compile_file(name, macros), COMMON):
            if error:
                raise BuildError(error)
        objects = [f"{folder}/{name}.o" for name in (*built, *COMMON)]
        linked = Path(folder, target.name)
        # With a static C++ runtime where the compiler has one, so that the machine's need not match.
        for static in (["-static-libstdc++", "-static-libgcc"], []):
            command = [*compiler, "-shared", "-s", *static, "-o", str(linked), *objects, "-lpthread", "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if not done.returncode:
                break
        else:
            raise BuildError(done.stderr[-2000:])
        target.parent.mkdir(parents=True, exist_ok=True)
        # Replaced in one move: a process that has the old library mapped keeps it.
        staged = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copyfile(linked, staged)
        staged.replace(target)
    return built


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the attention library.")
    parser.add_argument("--machine", choices=sorted(KERNELS), default=platform.machine(), help="with $CXX: another one")
    parser.add_argument("--out", type=Path, help="default: where Overspill looks for it")
    arguments = parser.parse_args()
    target = arguments.out or library_path(arguments.machine)
    try:
        built = build(target, arguments.machine)
    except BuildError as error:
        sys.exit(f"error: {error}")
    print(f"{target}: {', '.join(built)}")


if __name__ == "__main__":
    main()
