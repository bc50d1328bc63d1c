"""The variables that a model's forward reads outside of its blocks, to detect changes.

A graph contains numbers, lists and objects with their values at the time of recording, but the plain model would read them in
each call. So all reads are recorded, and checked before each step:

    self.alpha, self.config.alpha     an attribute of a module, or of its class
    ALPHA, settings.ALPHA             a global name of a function that ran, or an attribute of a Python module
    alpha of an enclosing function    a closure's cell

`sys.setprofile` reports the functions that ran, and `nn.Module.__getattribute__` the attributes. For an object that is
not a module, all attributes are recorded. Functions of torch, Paceline and the standard library are excluded. The code
in blocks is excluded too, because each stage runs its blocks itself.
"""

from __future__ import annotations

import contextlib
import dis
import gc
import sys
import types
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

from torch import Tensor, nn

from paceline.parallel.tracing.fingerprint import Fingerprint
from paceline.parallel.tracing.source import is_users, put_back
from paceline.torch_private import is_torchs_attribute

_ABSENT = object()
#: Attributes that every nn.Module has.
OWN_NAMES = frozenset({*vars(nn.Module()), *vars(nn.Module), "__dict__", "__class__"})
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


@dataclass(frozen=True, kw_only=True)
class Read:
    """A variable or attribute that the model's code outside blocks has read.

    Attributes:
        text: A description for messages, such as "self.alpha".
        look: A function that returns the current value.
        module: The module whose attribute `name` was read, or None for another variable.
    """

    text: str
    look: Callable[[], object]
    module: nn.Module | None = None
    name: str = ""


class Reads:
    """The variables and attributes that a forward pass has read, with their values."""

    def __init__(self) -> None:
        self.found: dict[Hashable, Read] = {}
        self._before: dict[Hashable, Hashable] = {}
        self._fingerprint = Fingerprint()

    def note(self, key: Hashable, read: Read) -> None:
        """Record a read and its current value, unless `key` is already recorded."""
        if key not in self.found:
            self.found[key] = read
            self._before[key] = self._fingerprint.of(read.look())

    def changed(self) -> list[Read]:
        """Return the recorded variables and attributes whose values have changed."""
        now = Fingerprint()
        return [read for key, read in self.found.items() if now.of(read.look()) != self._before[key]]

    @property
    def digest(self) -> int:
        """A 32-bit hash of the current values, which ranks can compare."""
        taken = Fingerprint(by_content=True)
        return zlib.crc32(
            repr(sorted(repr((read.text, taken.of(read.look()))) for read in self.found.values())).encode()
        )

    def moved(self, other_of: Callable[[nn.Module], nn.Module]) -> Reads:
        """Return the same reads, but of a copy of the model (`other_of`: module -> copy)."""
        moved = Reads()
        for key, read in self.found.items():
            own = (key, read)
            if read.module is not None:
                own = attribute_read(other_of(read.module), read.name, read.text)
            moved.note(*own)
        return moved


@contextlib.contextmanager
def noting(reads: Reads, is_outer: Callable[[], bool], name_of: Callable[[nn.Module], str | None]) -> Iterator[None]:
    """Within the block, record the variables and attributes that the user's functions read.

    Args:
        reads: The object to which the reads are added.
        is_outer: Returns whether code outside of the model's blocks runs now.
        name_of: A module -> the module's name in the model, or None.
    """
    plain = nn.Module.__dict__.get("__getattribute__")
    get = nn.Module.__getattribute__

    def look_up(module: nn.Module, name: str) -> object:
        if name not in OWN_NAMES and is_outer():
            _note_attribute(reads, module, name, name_of)
        return get(module, name)

    seen: set[Hashable] = set()

    def see(frame: types.FrameType, event: str, _: object) -> None:
        if event == "call" and is_users(frame.f_code.co_filename) and is_outer():
            key = (frame.f_code, id(frame.f_globals))
            if key not in seen:
                seen.add(key)
                _note_names(reads, frame.f_globals, _globals_of(frame.f_code), frame.f_code.co_names)
                if frame.f_code.co_freevars:
                    # A frame does not name its function, so `_note_cells` searches all functions for the frame's code.
                    _note_cells(reads, frame)

    before, collects = sys.getprofile(), gc.isenabled()
    # Disable garbage collection during the forward: it runs finalizers, whose reads would be recorded, too.
    gc.disable()
    nn.Module.__getattribute__ = look_up  # type: ignore[method-assign, assignment]
    sys.setprofile(see)
    try:
        yield
    finally:
        put_back(before)
        if collects:
            gc.enable()
        # Remove the recorder's `__getattribute__`. If another library had set its own before, restore that method.
        del nn.Module.__getattribute__
        if plain is not None:
            nn.Module.__getattribute__ = plain  # type: ignore[method-assign]


def attribute_read(module: nn.Module, name: str, text: str) -> tuple[Hashable, Read]:
    """Return an attribute's key and `Read` object. `text` describes the attribute in messages."""
    return ("attribute", id(module), name), Read(
        text=text, look=lambda: _attribute(module, name), module=module, name=name
    )


def plain_attributes(module: nn.Module) -> dict[str, object]:
    """Return a module's attributes, without those that every nn.Module has."""
    # Leave out attributes that Paceline or FSDP has set, such as a normalisation's process group: the user did not set them.
    return {
        name: value
        for name, value in vars(module).items()
        if name not in OWN_NAMES and not name.startswith("_paceline") and not is_torchs_attribute(name)
    }


def _attribute(module: nn.Module, name: str) -> object:
    if name in vars(module):
        return vars(module)[name]
    value = next((vars(kind)[name] for kind in type(module).__mro__ if name in vars(kind)), _ABSENT)
    # Don't run a property here. If the model's forward runs it, the recorder sees the reads of the property's code anyway.
    return _ABSENT if hasattr(type(value), "__get__") else value


def _note_attribute(reads: Reads, module: nn.Module, name: str, name_of: Callable[[nn.Module], str | None]) -> None:
    if ("attribute", id(module), name) in reads.found or (path := name_of(module)) is None:
        return
    is_registered = any(name in vars(module)[table] for table in ("_parameters", "_buffers", "_modules"))
    is_computed = hasattr(type(module), name) and _attribute(module, name) is _ABSENT  # a method or a property
    if not is_registered and not is_computed:
        reads.note(*attribute_read(module, name, f"{path or type(module).__name__}.{name}"))


def _note_names(
    reads: Reads, own: dict[str, object], names: Iterable[str], attributes: tuple[str, ...], depth: int = 3
) -> None:
    """Record the variables `names` of `own`. For a Python module, record its `attributes`.

    `own` has the globals of a function or module. `depth` limits how many levels of modules within modules are followed.
    """
    for name in names:
        match own.get(name, _ABSENT):
            case types.ModuleType() as module:
                if depth and _may_have_settings(module):
                    _note_names(reads, vars(module), attributes, attributes, depth - 1)
            case value if value is not _ABSENT and not _is_fixed(value):
                text = f"{own.get('__name__', '?')}.{name}"
                reads.note(("global", id(own), name), Read(text=text, look=partial(own.get, name, _ABSENT)))


def _may_have_settings(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and is_users(file) and module.__name__.partition(".")[0] not in ("numpy", "scipy")


def _note_cells(reads: Reads, frame: types.FrameType) -> None:
    code = frame.f_code
    if code.co_name in _COMPREHENSIONS:
        return
    local = frame.f_locals
    wanted = [
        name
        for name in code.co_freevars
        if name in local
        and name != "__class__"
        and not _is_fixed(local[name])
        and not isinstance(local[name], (nn.Module, Tensor))
    ]
    if wanted and gc.get_freeze_count():
        # `gc.freeze` hides objects from `gc.get_referrers`, so unfreeze. Don't freeze again, which would hide newer objects too.
        gc.unfreeze()
    # Find the function for its closure and defaults: a frame refers only to the function's code.
    referrers = gc.get_referrers(code) if wanted else []
    for function in (referrer for referrer in referrers if isinstance(referrer, types.FunctionType)):
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            if name in wanted:
                text = f"{name} of {function.__qualname__}"
                reads.note(("cell", id(cell)), Read(text=text, look=partial(_content, cell)))


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT


def _is_fixed(value: object) -> bool:
    if isinstance(value, type):
        file = getattr(sys.modules.get(value.__module__), "__file__", None)
        own = value.__module__ == "__main__" or (file is not None and is_users(file))
        return not own or issubclass(value, (nn.Module, Tensor))
    return isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.ModuleType))


@lru_cache(maxsize=4096)
def _globals_of(code: types.CodeType) -> tuple[str, ...]:
    found = (step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return tuple(dict.fromkeys(found))
