"""An engine with a disk that is killed: asks prompts, prints what is journaled, and ends without any farewell."""

import json
import os
import signal
import sys
from pathlib import Path

from tests.engine import engine, random_prompt
from tests.test_disk import on_disk


def main(model: str, folder: str, when: str) -> None:
    from overspill.kv.disk import tier

    tier._FLUSH_BLOCKS = 8
    with engine(Path(model), on_disk(Path(folder))) as running:
        disk = running.scheduler.disk
        assert disk is not None and disk.wait_until_open(60)
        for seed in range(2):
            running.ask_one(random_prompt(seed, 300))
        running.drain()
        complete = disk.complete

        def die(report: object) -> None:
            if when == "before the journal":
                os.kill(os.getpid(), signal.SIGKILL)
            complete(report)  # type: ignore[arg-type]
            print(json.dumps(len(disk.index or ())), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

        disk.complete = die  # type: ignore[method-assign]
    raise AssertionError("it should have been killed in its flush")


if __name__ == "__main__":
    main(*sys.argv[1:])
