"""Sessions on disk: one SQLite file, from which they are taken up again when the server is started anew.

Only its owner can read it: it holds what people said.
"""

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from segue.errors import FailedError, ParameterError

FILE_NAME = "sessions.sqlite3"
BUSY_TIMEOUT_S = 5.0
SECONDS_OF_A_DAY = 86400.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS session (
    id TEXT PRIMARY KEY,
    model TEXT NOT NULL,
    changed_s REAL NOT NULL,
    state BLOB NOT NULL
) WITHOUT ROWID
"""
_INDEX = "CREATE INDEX IF NOT EXISTS session_by_age ON session (changed_s)"


class StateStoreError(FailedError):
    """Sessions cannot be read or written now."""


class Store(Protocol):
    """What keeps encoded sessions. Any thread may call; all raise StateStoreError."""

    def save(self, sessions: Sequence[tuple[str, bytes]]) -> None:
        """Keep these in place of what was kept of them: all or none."""
        ...

    def load(self, session_id: str) -> bytes | None: ...


class StateStore:
    """The sessions of one model. Implements `Store`."""

    def __init__(
        self,
        directory: Path,
        model: str,
        *,
        max_sessions: int,
        max_age_days: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`model` says whose token ids they are. Those that have not changed for so long, and the oldest beyond so
        many, are deleted. Raises ParameterError when the directory cannot be used."""
        self._model = model
        self._max_sessions = max_sessions
        self._max_age_s = max_age_days * SECONDS_OF_A_DAY
        self._clock = clock
        self._lock = threading.Lock()
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._database = sqlite3.connect(
                _private(directory / FILE_NAME),
                timeout=BUSY_TIMEOUT_S,
                check_same_thread=False,
                isolation_level=None,
            )
            # A power cut may lose the last moments, but damages nothing.
            for statement in ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=NORMAL", _SCHEMA, _INDEX):
                self._database.execute(statement)
            self._delete_old()
        except (OSError, sqlite3.Error) as error:
            raise ParameterError("state_dir", str(directory), f"cannot be used: {error}") from None

    def save(self, sessions: Sequence[tuple[str, bytes]]) -> None:
        now_s = self._clock()
        rows = [(session_id, self._model, now_s, state) for session_id, state in sessions]
        with self._lock:
            try:
                self._database.execute("BEGIN IMMEDIATE")
                self._database.executemany("INSERT OR REPLACE INTO session VALUES (?, ?, ?, ?)", rows)
                self._delete_old()
                self._database.execute("COMMIT")
            except sqlite3.Error as error:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise StateStoreError(f"sessions cannot be saved: {error}") from None

    def load(self, session_id: str) -> bytes | None:
        """What is kept of a session; None if nothing is, or if it is another model's."""
        query = "SELECT state FROM session WHERE id = ? AND model = ?"
        with self._lock:
            try:
                row = self._database.execute(query, (session_id, self._model)).fetchone()
            except sqlite3.Error as error:
                raise StateStoreError(f"sessions cannot be read: {error}") from None
        return None if row is None else bytes(row[0])

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def _delete_old(self) -> None:
        oldest_s = self._clock() - self._max_age_s
        self._database.execute("DELETE FROM session WHERE changed_s < ?", (oldest_s,))
        surplus = "SELECT id FROM session ORDER BY changed_s DESC LIMIT -1 OFFSET ?"
        self._database.execute(f"DELETE FROM session WHERE id IN ({surplus})", (self._max_sessions,))


def _private(path: Path) -> Path:
    """A file that only its owner can read, made if it is not there; SQLite gives its other files the same mode."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(descriptor).st_mode & 0o077:
            os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)
    return path
