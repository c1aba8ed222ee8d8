"""OpenAI's Realtime API for text, over WebSockets, with input that is still arriving.

route.py               the WebSocket: attach to a session, read events, send events
registry.py            sessions by id, also while nobody is connected, and on disk
session.py             what each event does
response.py            the answer that runs
input_progress.py      how much of the input is computed
live_conversation.py   a conversation as one live session of the engine
conversation.py        items and open input, and what a live session is to know of them: values
settings.py            how answers are sampled
client_events.py       the events that clients send
server_events.py       the events that they are sent
event_log.py           those of one session: numbered, bounded, kept for a while
saver.py               writes sessions to disk behind their events
"""
