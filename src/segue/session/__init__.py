"""Live sessions: input is computed while it arrives, and may be revised, committed, interrupted and forked.

turns.py     text of turns → token ids
state.py     what a session's text is and what the engine has of it; no I/O
live.py      `Session` on an `AsyncLLM`
blocking.py  `BlockingSession` on an `LLM`
"""
