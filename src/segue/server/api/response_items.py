"""The items of a response while they grow, and the events that tell it."""

from collections.abc import Iterator

from segue.server.api.response_objects import (
    ArgumentsDelta,
    ArgumentsDone,
    Event,
    FunctionCallItem,
    ItemAdded,
    ItemDone,
    MessageItem,
    OutputItem,
    OutputText,
    PartAdded,
    PartDone,
    Status,
    TextDelta,
    TextDone,
)
from segue.server.shared.logprobs import TokenLogprob
from segue.server.shared.serving import new_id
from segue.server.shared.tools.calls import ToolCallDelta
from segue.server.shared.tools.reader import Content


class GrowingItems:
    """Grows the items of a response, the last of which is open, and tells by which events."""

    def __init__(self, items: list[OutputItem]) -> None:
        self._items = items
        self._is_open = False

    def add(self, added: Content | ToolCallDelta, logprobs: list[TokenLogprob]) -> Iterator[Event]:
        match added:
            case Content():
                if not self._is_open or not isinstance(self._items[-1], MessageItem):
                    yield from self._open(MessageItem(id=new_id("msg_")))
                if added.text or logprobs:
                    yield self._add_text(added.text, logprobs)
            case ToolCallDelta():
                function = added.function
                if isinstance(added.id, str) and isinstance(function.name, str):
                    item = FunctionCallItem(id=new_id("fc_"), call_id=added.id, name=function.name)
                    yield from self._open(item)
                if isinstance(function.arguments, str) and function.arguments:
                    yield self._add_arguments(function.arguments)

    def finish(self, status: Status, logprobs: list[TokenLogprob]) -> Iterator[Event]:
        """Closes the last item; an answer without any becomes an empty message. `logprobs`: of tokens without text."""
        if not self._items or (logprobs and isinstance(self._items[-1], MessageItem)):
            yield from self.add(Content(""), logprobs)
        yield from self._close(status)

    def _open(self, item: OutputItem) -> Iterator[Event]:
        yield from self._close("completed")
        self._items.append(item)
        self._is_open = True
        yield ItemAdded(output_index=self._index, item=item)
        if isinstance(item, MessageItem):
            part = OutputText()
            item.content.append(part)
            yield PartAdded(item_id=item.id, output_index=self._index, part=part)

    def _close(self, status: Status) -> Iterator[Event]:
        if not self._is_open:
            return
        self._is_open = False
        item, index = self._items[-1], self._index
        item.status = status
        match item:
            case MessageItem():
                (part,) = item.content
                yield TextDone(item_id=item.id, output_index=index, text=part.text, logprobs=part.logprobs)
                yield PartDone(item_id=item.id, output_index=index, part=part)
            case FunctionCallItem():
                yield ArgumentsDone(
                    item_id=item.id, output_index=index, name=item.name, arguments=item.arguments
                )
        yield ItemDone(output_index=index, item=item)

    @property
    def _index(self) -> int:
        return len(self._items) - 1

    def _add_text(self, text: str, logprobs: list[TokenLogprob]) -> Event:
        item = self._items[-1]
        assert isinstance(item, MessageItem)
        (part,) = item.content
        part.text += text
        part.logprobs += logprobs
        return TextDelta(item_id=item.id, output_index=self._index, delta=text, logprobs=logprobs)

    def _add_arguments(self, text: str) -> Event:
        item = self._items[-1]
        assert isinstance(item, FunctionCallItem)
        item.arguments += text
        return ArgumentsDelta(item_id=item.id, output_index=self._index, delta=text)
