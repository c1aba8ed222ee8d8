"""What whoever runs a server needs, whichever door clients come through.

listen.py            sockets and certificates, before a model is loaded
access.py            who may come in, and the log of who did
info.py              models, health, version, metrics
saved_sessions.py    sessions on disk
"""
