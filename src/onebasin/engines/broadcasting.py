"""Values that many tasks need: packed once, known to tasks by their tokens."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from onebasin.engines.packing import pack


class Broadcasts:
    """The values that are sent to each worker once, as long as they are needed."""

    def __init__(self) -> None:
        self._tokens: dict[int, str] = {}
        self._values: dict[str, Any] = {}
        self._packed: dict[str, tuple[bytes, list[str]]] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def hold(self, values: Sequence[Any]) -> Iterator[list[str]]:
        """Inside, tasks have tokens in place of these values. Yields their tokens, of those that are new."""
        new = {uuid.uuid4().hex: value for value in values if id(value) not in self._tokens}
        self._tokens |= {id(value): token for token, value in new.items()}
        self._values |= new
        try:
            yield list(new)
        finally:
            for token, value in new.items():
                del self._tokens[id(value)], self._values[token]
                self._packed.pop(token, None)

    def __contains__(self, token: str) -> bool:
        return token in self._values

    def pack(self, value: Any) -> tuple[bytes, dict[str, bytes]]:
        """A value, and all held values that it needs, by their tokens."""
        with self._lock:
            content, used = pack(value, self._tokens)
            needed: dict[str, bytes] = {}
            while used:
                token = used.pop()
                if token not in needed:
                    if token not in self._packed:
                        self._packed[token] = pack(self._values[token], self._tokens)
                    needed[token], more = self._packed[token]
                    used += more
            return content, needed
