"""What a cell leaves, gathered within bounds: its text in order, its error without colours, its images. Pure."""

from __future__ import annotations

import binascii
import re

from sandbox.marker import BoundedOutput

IMAGES = 8
"""Most images of a cell."""
IMAGES_CHARACTERS = 8 * 1024 * 1024
"""Most base64 of a cell's images together."""
ERROR_BYTES = 16 * 1024
_MAGIC = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")
_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


class CellOutput:
    """One cell's output; what came since the cell before belongs to it.

    Args:
        output_bytes: most bytes of text.
    """

    def __init__(self, output_bytes: int) -> None:
        self._text = BoundedOutput(output_bytes)
        self._at_line_start = True
        self.images: list[str] = []
        self.error: str | None = None
        self._image_characters = self._dropped = 0

    def printed(self, text: str) -> None:
        """Take what was written to stdout or stderr."""
        if text:
            self._text.add(text.encode("utf-8", "replace"))
            self._at_line_start = text.endswith("\n")

    def shown(self, plain: str, images: tuple[str, ...]) -> None:
        """Take a result or a displayed value: its text on lines of its own, and its images in base64."""
        if plain:
            self.printed(("" if self._at_line_start else "\n") + plain + "\n")
        for image in filter(None, images):
            self._take_image(image)

    def failed(self, name: str, value: str, traceback: list[str]) -> None:
        """Take the exception that ended the cell."""
        text = _ANSI.sub("", "\n".join(traceback)) if traceback else f"{name}: {value}"
        bounded = BoundedOutput(ERROR_BYTES)
        bounded.add(text.encode("utf-8", "replace"))
        self.error = bounded.text()

    @property
    def truncated(self) -> bool:
        """Text was left out in the middle."""
        return self._text.truncated

    def text(self) -> str:
        """The text, with a line for images that were left out."""
        text = self._text.text()
        if not self._dropped:
            return text
        gap = "" if self._at_line_start else "\n"
        return f"{text}{gap}[{self._dropped} images left out: too many, too large, or neither PNG nor JPEG]\n"

    def _take_image(self, image: str) -> None:
        fits = len(self.images) < IMAGES and self._image_characters + len(image) <= IMAGES_CHARACTERS
        if not fits or not _is_image(image := image.replace("\n", "")):
            self._dropped += 1
            return
        self._image_characters += len(image)
        self.images.append(image)


def _is_image(image: str) -> bool:
    if len(image) % 4 or image.endswith("==="):  # which binascii lets pass
        return False
    try:
        return binascii.a2b_base64(image, strict_mode=True).startswith(_MAGIC)
    except ValueError:  # also of characters beyond ASCII
        return False
