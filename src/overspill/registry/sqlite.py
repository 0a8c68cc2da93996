"""SQLite made safe for several processes and for crashes."""

import sqlite3
import time
from typing import Any

from sqlalchemy import Connection, Engine, event

# Execution options of an engine whose transactions write.
WRITES = {"overspill_writes": True}


def set_up_sqlite(engine: Engine) -> None:
    event.listen(engine, "connect", _set_up_connection)
    event.listen(engine, "begin", _begin)


def _set_up_connection(connection: sqlite3.Connection, record: Any) -> None:
    # Python's driver would begin transactions late, and commit before DDL; `_begin` does it instead.
    connection.isolation_level = None
    connection.execute("PRAGMA foreign_keys = ON")
    # In WAL mode, less than FULL acknowledges what a power cut can take back.
    connection.execute("PRAGMA synchronous = FULL")


def _begin(connection: Connection) -> None:
    # A transaction that reads first and writes later fails at once when another one wrote in between: waiting helps
    # only those that ask for the lock from the beginning.
    writes = connection.get_execution_options().get("overspill_writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def use_wal(engine: Engine, wait_seconds: float) -> None:
    """Readers then do not wait for writers. The file remembers it, so this is needed once."""
    connection = engine.raw_connection()
    # SQLite does not always wait here: of two processes that switch at once, each may hold what the other needs.
    deadline = time.monotonic() + wait_seconds
    try:
        while True:
            try:
                _switch_to_wal(connection.driver_connection)
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
    finally:
        connection.close()


def _switch_to_wal(connection: Any) -> None:
    if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        connection.execute("PRAGMA journal_mode = WAL")
