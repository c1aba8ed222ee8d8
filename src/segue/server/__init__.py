"""The HTTP server: OpenAI's API as vLLM serves it, live sessions over a WebSocket, and a page. Arrows point down only:

    run.py       a server from its socket to its last answer: signals, shutdown, the log
    app.py       every path, and what all requests pass through
    api/  realtime/  page/     the doors: what clients send, and what they are answered
    ops/         what whoever runs a server needs
    shared/      what the doors have in common

Needs the extra: pip install "segue[server]".
"""
