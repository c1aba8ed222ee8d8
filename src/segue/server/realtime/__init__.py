"""OpenAI's Realtime API for text, over WebSockets, with input that is still arriving.

route.py            the WebSocket: attach to a session, read events, send events
registry.py         sessions by id, also while nobody is connected, and on disk
session.py          what each event does, and the answer that runs
conversation.py     items and open input as one live session of the engine
client_events.py    the events that clients send
server_events.py    the events that they are sent
event_log.py        those of one session: numbered, bounded, kept for a while
"""
