"""How a session's answers are sampled, in OpenAI's words."""

from typing import Any

import msgspec

from segue.errors import ParameterError
from segue.sample.params import SamplingParams
from segue.server.realtime import client_events as events
from segue.server.realtime.server_events import TEXT_ONLY
from segue.server.shared.http_errors import HttpError


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    max_output_tokens: int | str = "inf"
    sampling: dict[str, Any] = msgspec.field(default_factory=dict)
    """Those of `SamplingSettings` that were set."""

    def changed(self, fields: events.SessionFields) -> "Settings":
        """With what is given there. Raises ParameterError, HttpError."""
        _refuse_what_is_not_here(fields)
        longest = self.max_output_tokens if fields.max_output_tokens is None else fields.max_output_tokens
        settings = Settings(max_output_tokens=longest, sampling={**self.sampling, **fields.sampling()})
        settings.params()
        return settings

    def params(self) -> SamplingParams:
        longest = None if isinstance(self.max_output_tokens, str) else self.max_output_tokens
        try:
            return SamplingParams(max_tokens=longest, **self.sampling)
        except ParameterError as error:
            if error.parameter != "max_tokens":
                raise
            raise ParameterError("max_output_tokens", error.value, error.why) from None


def _refuse_what_is_not_here(fields: events.SessionFields) -> None:
    """Raises HttpError for settings that ask for more than text."""
    where = "response" if isinstance(fields, events.ResponseFields) else "session"
    for name, new in (
        ("modalities", "output_modalities"),
        ("max_response_output_tokens", "max_output_tokens"),
    ):
        if getattr(fields, name) is not None:
            raise HttpError(
                f"{where}.{name}: is of the beta interface, which this server does not have; use {new}",
                param=f"{where}.{name}",
                code="beta_api_shape_disabled",
            )
    if fields.type not in (None, "realtime"):
        raise HttpError('session.type: this server has "realtime" only', param="session.type")
    if fields.output_modalities not in (None, [*TEXT_ONLY]):
        raise HttpError(
            f'{where}.output_modalities: this server gives text; set it to ["text"]',
            param=f"{where}.output_modalities",
        )
    if fields.tools:
        raise HttpError("tools: not in a realtime session; use /v1/chat/completions", param="tools")
