"""Texts that hosts leave for one another, in the memory of one process."""

from __future__ import annotations

from paceline.comm.control.store import SideChannel


class MemoryChannel(SideChannel):
    """Texts in memory."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def publish(self, key: str, text: str) -> None:
        self.texts[key] = text

    def read(self, key: str) -> str:
        return self.texts.get(key, "")
