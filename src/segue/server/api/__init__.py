"""OpenAI's HTTP API, with vLLM's fields: a module for each endpoint, and what only endpoints need.

    body ──▶ checked fields ──▶ SamplingParams, prompts ──▶ Generation ──▶ deltas ──▶ chunks or events ──▶ a stream
                                                                                          └──▶ joined: one JSON

completions.py, chat.py     over chunks.py, which makes what is streamed; a whole answer is the sum of it
responses.py                over its events: response_request.py what it is asked, response_objects.py what it says,
                            response_items.py how that grows; stored_items.py keeps what a later request may name
tokenize.py                 texts and conversations as ids, and back
openapi.py, docs.py         the document of all endpoints, and a page that shows it
"""
