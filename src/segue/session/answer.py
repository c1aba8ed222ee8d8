"""An answer while it is given: what has come of it, and what of that was delivered."""

from collections.abc import Callable, Sequence

from segue.answers.outputs import CompletionOutput, Delta
from segue.answers.processor import OutputProcessor
from segue.contract.reports import EngineOutput, FinishReason
from segue.errors import EngineDead, RequestFailed, describe
from segue.sample.params import SamplingParams
from segue.tokens import Tokenizer


class AnswerSoFar:
    """The engine's outputs go in, deltas come out. A delta is delivered when it was taken."""

    def __init__(
        self, name: str, tokenizer: Tokenizer, params: SamplingParams, on_news: Callable[[], object]
    ) -> None:
        """`name` is what the deltas have for a request id; `on_news` is called when there is more to take."""
        self.params = params
        self.error: EngineDead | RequestFailed | None = None
        """Why it does not go on; what came before it can still be taken."""
        self.is_over = False
        """Nothing is left to take."""
        self._name = name
        self._processor = OutputProcessor(tokenizer)
        self._processor.add(name, prompt=None, prompt_token_ids=(), params=params)
        self._on_news = on_news
        self._waiting: list[Delta] = []
        self._delivered: list[Delta] = []

    def receive(self, output: EngineOutput) -> bool:
        """Takes in news. Returns whether the answer ends with it and the engine does not know: at a stop string, or
        because this cannot be read."""
        output.request_id = self._name
        try:
            processed = self._processor.process([output])
        except Exception as error:
            self.fail(RequestFailed(f"the answer could not be read: {describe(error)}"))
            return output.finish_reason is None
        self._waiting += processed.deltas
        self._on_news()
        return bool(processed.aborts) and output.finish_reason is None

    def fail(self, error: EngineDead | RequestFailed) -> None:
        """Nothing more will come."""
        self.error = error
        self._on_news()

    def take(self) -> Delta | None:
        """All that waits, as one delta; None: nothing."""
        if self.is_over or not self._waiting:
            return None
        delta = _joined(self._waiting)
        self._waiting = []
        self._delivered.append(delta)
        self.is_over = delta.finish_reason is not None
        return delta

    def end(self) -> None:
        """Nobody takes more of it."""
        self.is_over = True
        self._waiting.clear()
        self._on_news()

    def delivered(self, reason: FinishReason | None = None) -> CompletionOutput:
        """What was delivered, as one answer. `reason`: why it ends there, if not by itself.

        The last of its `token_ids` may have no text yet, because a stop string could come of it, or are the begin of a
        character.
        """
        if not self._delivered:
            whole = Delta(request_id=self._name, index=0, token_ids=[])
            whole.logprobs = None if self.params.logprobs is None else []
        else:
            whole = _joined(self._delivered)
            self._delivered = [whole]
        answer = CompletionOutput(
            index=0,
            text=whole.text,
            token_ids=list(whole.token_ids),
            finish_reason=whole.finish_reason,
            stop_reason=whole.stop_reason,
        )
        if whole.logprobs is not None:
            answer.logprobs = list(whole.logprobs)
            drawn = zip(whole.token_ids, whole.logprobs, strict=True)
            answer.cumulative_logprob = sum((entry[token].logprob for token, entry in drawn), 0.0)
        if reason is not None:
            answer.finish_reason, answer.stop_reason = reason, None
        elif whole.finish_reason is None and self.error is not None:
            answer.finish_reason, answer.error = FinishReason.ERROR, str(self.error)
        return answer


def _joined(deltas: Sequence[Delta]) -> Delta:
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
    return Delta(
        request_id=last.request_id,
        index=last.index,
        text="".join(delta.text for delta in deltas),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        logprobs=logprobs if last.logprobs is not None else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error=last.error,
    )
