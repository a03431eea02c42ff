"""Where in the source code an instruction was traced: the tables at the head of a module's text.

JAX writes the stack of each operation there; that of a gradient is the line it is the gradient of.
"""

import re
from collections.abc import Iterator
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_OWN_MODELS = _PACKAGE / "recipes"
_LIBRARIES = ("site-packages", "dist-packages", "<frozen", "<string>")
_FILE = re.compile(r'^(\d+) "(.*)"$')
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+).* line=(\d+)")
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)\}")
_FRAME_OF = re.compile(r"\bstack_frame_id=(\d+)")


class Frames:
    """The stacks of a compiled module.

    Args:
        text: of the module.
    """

    def __init__(self, text: str) -> None:
        self._files: dict[int, str] = {}
        self._locations: dict[int, tuple[int, int]] = {}
        self._frames: dict[int, tuple[int, int]] = {}
        table = ""
        for line in text.splitlines():
            if line.endswith("{"):  # computations follow
                break
            if line[:1].isalpha():
                table = line
            elif table == "FileNames" and (found := _FILE.match(line)):
                self._files[int(found[1])] = found[2]
            elif table == "FileLocations" and (found := _LOCATION.match(line)):
                self._locations[int(found[1])] = int(found[2]), int(found[3])
            elif table == "StackFrames" and (found := _FRAME.match(line)):
                self._frames[int(found[1])] = int(found[2]), int(found[3])
        # XLA counts parents from 1 on, and 1 stands for none: the first frame has no other.
        self._first = self._frames.get(1, (0, 0))[1]

    def source(self, frame: int) -> str:
        """Return `train.py:12`, the innermost line that is of no library; empty if unknown."""
        stack = [place for place in self._stack(frame) if place[0]]
        own = (place for place in stack if _is_users(place[0]))
        found = next(own, stack[0] if stack else None)
        return f"{_shown(found[0])}:{found[1]}" if found else ""

    def _stack(self, frame: int) -> Iterator[tuple[str, int]]:
        while frame in self._frames:
            location, parent = self._frames[frame]
            file, line = self._locations.get(location, (0, 0))
            yield self._files.get(file, ""), line
            above = parent - self._first
            frame = above if above < frame else 0  # a stack ends


def frame_of(attributes: str) -> int:
    """Return the number of an instruction's innermost frame, by its attributes; 0 for none."""
    found = _FRAME_OF.search(attributes)
    return int(found[1]) if found else 0


def _is_users(file: str) -> bool:
    """Whether a file is neither of a library nor of the step around a model."""
    path = Path(file)
    if path.is_relative_to(_PACKAGE):
        return path.is_relative_to(_OWN_MODELS)
    return not any(each in file for each in _LIBRARIES)


def _shown(file: str) -> str:
    """A path from here on where it is below, and else its name."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name
