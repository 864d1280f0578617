"""The class of a sharded module, ``FSDP<Name>``: our mixin, the user's class, torch's FSDPModule, in this order.

torch's class comes last: ``isinstance`` checks elsewhere hold, and the user's class stays right after ours, where the
compiler's guard pickler looks for it.

Note: layouts. CPython lets an instance change its class only if both classes lay out instances the same, judged by the
first base in C of each. For ``class A(ABC, nn.Linear)`` it finds ABC, for ``FSDPA(mixin, A, ...)`` the mixin: the same
in every byte, and still refused. Such a class becomes the *first* base of its sharded class, whose metaclass then puts
the mixin in front of it where methods are looked up.

Note: forward of torch's own modules. The compiler either skips a forward that torch itself defines, as that of
``nn.Linear``, or traces all of the module's call, hooks included, and then breaks the graph at each hook. It treats a
forward that is defined elsewhere as the user's: hooks run outside, and forward is one graph. So the sharded class
defines one, which calls torch's.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn

from .torch_names import torch_modules

_classes: dict[tuple[type, type, type], type] = {}
_originals: dict[type, type] = {}


def sharded_class(module: nn.Module, mixin: type, prefix: str = "FSDP") -> type:
    """The class ``FSDP<Name>`` for ``module``, which stays as it is, and for all modules of its class.

    prefix: of the name; the same for all classes of a mixin
    Raises: TypeError if ``module`` cannot become an instance; any error of the user's class or its metaclass about a
            subclass
    """
    cls: Any = type(module)
    torch_mixin = torch_modules.torch_mixin()
    new = _classes.get((mixin, cls, torch_mixin))
    if new is None:
        bases = (mixin, cls, torch_mixin)
        name, attributes = f"{prefix}{cls.__name__}", {"__module__": cls.__module__, **_own_forward(cls, mixin)}
        new = type(name, bases, attributes)
        try:
            _try(module, new)
        except TypeError:
            new = _mixin_first(type(new), bases)(name, (cls, mixin, torch_mixin), attributes)
            _try(module, new)
        _classes[(mixin, cls, torch_mixin)] = new
        _originals[new] = cls
    torch_modules.let_guard_pickler_find(cls, new)
    return new


def _own_forward(cls: Any, mixin: type) -> dict[str, Any]:
    """See Note: forward of torch's own modules. A mixin with a forward, a user's subclass of FSDP1, calls it itself."""
    theirs = getattr(cls, "forward", None)
    if hasattr(mixin, "forward") or not inspect.isfunction(theirs) or theirs is nn.Module.forward:
        return {}
    if not (theirs.__module__ or "").startswith("torch.nn."):  # None: of generated code, as torch.fx's
        return {}

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return cls.forward(self, *args, **kwargs)

    forward.__code__ = forward.__code__.replace()  # the compiler limits how often it compiles one code object
    forward.__signature__ = inspect.signature(theirs)  # type: ignore[attr-defined]  # getfullargspec ignores __wrapped__
    return {"forward": functools.wraps(theirs)(forward)}


def _try(module: nn.Module, new: type) -> None:
    before = type(module)
    set_class(module, new)
    set_class(module, before)


def _mixin_first(metaclass: type[type], bases: tuple[type, ...]) -> type[type]:
    """A ``metaclass`` whose classes look up methods in the order of ``bases``, if they have these in another order."""

    class MixinFirst(metaclass):  # type: ignore[misc, valid-type]
        def mro(self) -> list[type]:
            usual: list[type] = super().mro()
            if set(self.__bases__) != set(bases):  # a subclass: its bases have their order
                return usual
            mixins = [each for each in bases[0].__mro__ if each not in bases[1].__mro__]
            return [self, *mixins, *(each for each in usual[1:] if each not in mixins)]

    return MixinFirst


def set_class(module: nn.Module, cls: type) -> None:
    """Make ``module`` an instance of ``cls``, past the module's own ``__setattr__``."""
    object.__setattr__(module, "__class__", cls)


def swap_class(module: nn.Module, mixin: type, prefix: str = "FSDP") -> None:
    """Make ``module`` an instance of its ``sharded_class``."""
    set_class(module, sharded_class(module, mixin, prefix))


def original_class(cls: type) -> type:
    """The user's class from which ``sharded_class`` made ``cls``, or a class that ``cls`` descends from."""
    return next(_originals[each] for each in cls.__mro__ if each in _originals)


def unswap_class(module: nn.Module) -> None:
    set_class(module, original_class(type(module)))
