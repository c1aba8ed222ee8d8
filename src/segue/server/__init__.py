"""The HTTP server: OpenAI's API, as vLLM serves it.

    app.py           the routes, and what every request passes through
    completions.py   one module an endpoint: body → SamplingParams and prompts → Answers → JSON or events
    chat.py
    responses.py, response_objects.py
    tokens.py        tokenize, detokenize
    info.py          models, health, version, metrics, documentation
    body.py          a request's JSON, checked          sampling.py   its sampling fields
    answers/prompts.py       text, messages, ids → ids          answers.py    the engine's stream
    events.py        server-sent events, disconnects    errors.py     every error object
    usage.py, logprobs.py, tools/                       parts of answers
    serving.py       what the endpoints share           metrics.py    for Prometheus
    run.py           sockets, signals, the end          options.py    what `segue serve` takes

Needs the extra: pip install "segue[server]".
"""
