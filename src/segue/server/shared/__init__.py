"""What the doors have in common. Knows no endpoint and no path; what only one door needs is in that door's room.

serving.py, options.py                 the model as it is served; what `segue serve` takes
body.py, sampling.py, structured.py    what clients send: JSON within bounds, fields of sampling, grammars
encoding.py                            texts, ids and messages → the ids that are computed
generation.py                          the engine's streams for one request as one, counted and measured
logprobs.py, usage.py, tools/          parts of answers, in OpenAI's and vLLM's forms
sse.py, http_errors.py, request_id.py  how answers are sent, errors told, requests named
metrics.py                             numbers for Prometheus
"""
