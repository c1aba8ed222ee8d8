"""What `segue chat` consists of.

backend.py        what a conversation needs of the place that answers
local.py          ... this process: a live session, whose turns stay computed
remote.py         ... a server: its realtime WebSocket
conversation.py   turns and `/` commands
terminal.py       what the user types: lines, blocks, the history of the lines
"""
