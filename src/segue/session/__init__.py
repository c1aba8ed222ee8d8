"""Live sessions: input is computed while it arrives, and may be revised, committed, interrupted and forked.

turns.py     text of turns → token ids, and what of an answer is history
state.py     what a session says: a value for each moment
answer.py    an answer while it is given
link.py      what the engine holds of a session, made equal to what it says
core.py      the operations: next state, tell the engine, then it counts
live.py      `Session` on an `AsyncLLM`
blocking.py  `BlockingSession` on an `LLM`
"""
