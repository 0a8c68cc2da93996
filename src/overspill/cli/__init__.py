"""The `overspill` command. Handlers hold no logic: they read settings, call a function, and print."""

import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

import overspill
from overspill.cli.caches import cache
from overspill.cli.chatting import run
from overspill.cli.engines import logs, park, ps, stop, wake
from overspill.cli.flags import group
from overspill.cli.launching import PASS_ON, config, plan, serve
from overspill.cli.managing import manager
from overspill.cli.measuring import ab, bench, tune, verify
from overspill.cli.models import models
from overspill.cli.results import results
from overspill.cli.services import service
from overspill.kv.errors import OverspillError

_NEXT = """\
Overspill runs models on stock vLLM, with the machine's RAM added to the GPU's memory.

  overspill run MODEL     plan it, start it and chat with it here, as in: overspill run Qwen/Qwen3-8B
  overspill plan MODEL    what fits, what goes to RAM, and how fast that is; nothing is started
  overspill serve MODEL   a server that speaks OpenAI's API, on http://127.0.0.1:8000
  overspill manager       a page and a gateway for several models, on http://127.0.0.1:7999

MODEL is a folder, a Hugging Face repository, or a name from `overspill models`.
All commands: overspill --help; the flags of one: overspill run --help"""

app = group(
    "Makes a GPU behave as if it had the machine's RAM, on stock vLLM.",
    is_command=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(epilog="Example: overspill run Qwen/Qwen3-8B", context_settings=PASS_ON)(run)
app.command(
    epilog="Example: overspill plan meta-llama/Llama-3.1-8B-Instruct --max-model-len 128k --gpu rtx4090 --ram 64GiB",
    context_settings=PASS_ON,
)(plan)
app.command(
    epilog="Example: overspill serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 128k --served-model-name llama",
    context_settings=PASS_ON,
)(serve)
app.command(epilog="Example: overspill verify meta-llama/Llama-3.1-8B-Instruct --max-model-len 128k")(verify)
app.command(epilog="Example: overspill bench --workload multi-turn:conversations=32 --expect offload")(bench)
app.command(epilog='Example: overspill ab Qwen/Qwen3-8B --a none --b native:8GiB --c "--ram 8GiB"')(ab)
app.command(epilog="Example: overspill tune Qwen/Qwen3-8B --goal throughput --max-model-len 32k --budget 20m")(tune)
app.command(epilog="Example: overspill config --json")(config)
app.command(epilog="Example: overspill ps --json")(ps)
app.command(epilog="Example: overspill stop Qwen/Qwen3-8B")(stop)
app.command(epilog="Example: overspill park Qwen/Qwen3-8B")(park)
app.command(epilog="Example: overspill wake Qwen/Qwen3-8B")(wake)
app.command(epilog="Example: overspill logs Qwen/Qwen3-8B --follow")(logs)
app.add_typer(cache, name="cache")
app.add_typer(manager, name="manager")
app.add_typer(models, name="models")
app.add_typer(results, name="results")
app.add_typer(service, name="service")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"overspill {overspill.__version__}")
        raise typer.Exit


@app.callback()
def _commands(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(_NEXT)
        if sys.stdin.isatty() and sys.stdout.isatty():
            _lead_to_page()


def _lead_to_page() -> None:
    """Point a user in a terminal to the running manager's page, or start a manager here."""
    from overspill.manager.web.client import find

    found = find(None)
    if found is not None:
        print(f"\nThe page, to find, start and try models: {found.url}")
        return
    print("\nThe page, to find, start and try models, is being opened; Ctrl-C ends it.", flush=True)
    raise typer.Exit(app(["manager"], standalone_mode=False) or 0)


def main(call: Callable[[], Any] = app) -> None:
    """Run the command; exits with 0 on success, 1 if the request cannot be met, 2 for a mistake in the request."""
    try:
        call()
    except OverspillError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:  # no permission, a full disk
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
