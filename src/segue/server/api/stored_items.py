"""Items of the answers of POST /v1/responses, to which a later request may refer by their ids.

In memory, and so many bytes at most: a client whose item is not kept any more sends the item itself.
"""

from collections import OrderedDict
from typing import Any

import msgspec
from starlette.requests import Request

from segue.server.api.response_objects import OutputItem

MAX_BYTES = 64 << 20


class StoredItems:
    """Of one server. For its event loop."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._items: OrderedDict[str, bytes] = OrderedDict()
        """The one that was of use longest ago first."""

    def keep(self, item: OutputItem) -> None:
        data = msgspec.json.encode(item)
        self._items[item.id] = data
        self._num_bytes += len(data)
        while self._num_bytes > self._max_bytes:
            _, oldest = self._items.popitem(last=False)
            self._num_bytes -= len(oldest)

    def find(self, item_id: str) -> dict[str, Any] | None:
        """As it would be sent as input."""
        data = self._items.get(item_id)
        if data is None:
            return None
        self._items.move_to_end(item_id)
        return msgspec.json.decode(data, type=dict[str, Any])


def stored_items_of(request: Request) -> StoredItems:
    """Of the application that a request belongs to."""
    stored = request.app.state.stored_items
    assert isinstance(stored, StoredItems)
    return stored
