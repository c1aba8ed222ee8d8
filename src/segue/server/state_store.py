"""Sessions on disk: one SQLite file, from which they are taken up again when the server is started anew."""

import contextlib
import sqlite3
import threading
import time
from pathlib import Path

import msgspec

from segue.errors import ParameterError
from segue.server.realtime.session import SessionState

FILE_NAME = "sessions.sqlite3"
BUSY_TIMEOUT_S = 5.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS session (
    id TEXT PRIMARY KEY,
    model TEXT NOT NULL,
    changed_s REAL NOT NULL,
    state BLOB NOT NULL
) WITHOUT ROWID
"""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SessionState).decode


class StateStore:
    """The sessions of one model. Any thread may call."""

    def __init__(self, directory: Path, model: str) -> None:
        """`model` says whose token ids they are. Raises ParameterError when the directory cannot be used."""
        self._model = model
        self._lock = threading.Lock()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(
                directory / FILE_NAME,
                timeout=BUSY_TIMEOUT_S,
                check_same_thread=False,
                isolation_level=None,
            )
            # A power cut may lose the last moments, but damages nothing.
            for statement in ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=NORMAL", _SCHEMA):
                self._database.execute(statement)
        except (OSError, sqlite3.Error) as error:
            raise ParameterError("state_dir", str(directory), f"cannot be used: {error}") from None

    def save(self, session_id: str, state: SessionState) -> None:
        """Keep this in place of what was kept of the session."""
        row = (session_id, self._model, time.time(), _encode(state))
        with self._lock:
            self._database.execute("INSERT OR REPLACE INTO session VALUES (?, ?, ?, ?)", row)

    def load(self, session_id: str) -> SessionState | None:
        """What is kept of a session; None if nothing is, or if it is another model's."""
        query = "SELECT state FROM session WHERE id = ? AND model = ?"
        with self._lock:
            row = self._database.execute(query, (session_id, self._model)).fetchone()
        if row is None:
            return None
        # A file of another version is no reason to fail.
        with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError):
            return _decode(row[0])
        return None

    def delete(self, session_id: str) -> None:
        with self._lock:
            self._database.execute("DELETE FROM session WHERE id = ?", (session_id,))

    def close(self) -> None:
        with self._lock:
            self._database.close()
