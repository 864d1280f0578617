"""Bounds on a pickle before it is unpickled: a few bytes of it can cost gigabytes or hours.

C's unpickler keeps its memo in an array: nine bytes that store something at index 2**27 make it write 2 GiB. And to hash a dict's key
that is a tuple of shared tuples, forty levels deep, takes 2**40 steps. So this file first runs the opcodes with numbers in place of
objects: for each object the number of its parts, shared parts counted as often as they occur. ``check_made`` checks the result.

Note: attributes. The opcode BUILD sets attributes on any object that a pickle can name, classes and functions of the running program
included, and these outlive the refusal of the file. So ``BoundedUnpickler`` replaces each BUILD by a call of its own ``build``, which
knows what it has made.

Worked example: ``(x, x)`` where x is ``(1, 2)`` has 7 parts: itself, twice x, and four numbers.

Time: linear in the bytes.
"""

from __future__ import annotations

import collections
import io
import pickle
import pickletools
from abc import abstractmethod
from typing import Any

MAX_KEY_PARTS = 100
"""How many parts a dict's key may have: a checkpoint's keys are names, numbers, and small tuples of these."""

MAX_DEPTH = 100
"""How deep containers may lie in one another. Readers descend into them by recursion."""

_LONG_KEY_NBYTES = 8
"""Integers of more bytes can be chosen so that their hashes are equal, and then a dict of n of them takes n**2 steps: no keys."""

(
    _PUSH, _NOTHING, _MARK, _POP, _POP_MARK, _DUP, _JOIN, _JOIN_MARK, _KEYS_MARK, _DICT_MARK, _ADD, _ADD_MARK, _ADD_KEYS_MARK, _ITEM,
    _ITEMS_MARK, _PUT, _PUT_TEXT, _MEMOIZE, _GET, _GET_TEXT, _STOP, _LONG, _LINES, _BUILD, _FRAME,
) = range(25)  # fmt: skip

_KINDS = {
    "PROTO": _NOTHING, "FRAME": _FRAME, "NEXT_BUFFER": _PUSH, "READONLY_BUFFER": _NOTHING,
    "MARK": _MARK, "POP": _POP, "POP_MARK": _POP_MARK, "DUP": _DUP, "STOP": _STOP,
    "TUPLE": _JOIN_MARK, "LIST": _JOIN_MARK, "OBJ": _JOIN_MARK, "INST": _JOIN_MARK, "DICT": _DICT_MARK, "FROZENSET": _KEYS_MARK,
    "APPEND": _ADD, "BUILD": _BUILD, "APPENDS": _ADD_MARK, "ADDITEMS": _ADD_KEYS_MARK, "SETITEM": _ITEM, "SETITEMS": _ITEMS_MARK,
    "BINPUT": _PUT, "LONG_BINPUT": _PUT, "PUT": _PUT_TEXT, "MEMOIZE": _MEMOIZE,
    "BINGET": _GET, "LONG_BINGET": _GET, "GET": _GET_TEXT,
    "LONG1": _LONG, "LONG4": _LONG, "LONG": _LINES, "INT": _LINES,
}  # fmt: skip


def _table() -> list[tuple[int, int, int] | None]:
    """By opcode: its kind; how its argument's length is told, as in pickletools; for _JOIN how many objects it takes."""
    table: list[tuple[int, int, int] | None] = [None] * 256
    for opcode in pickletools.opcodes:
        length = 0 if opcode.arg is None else opcode.arg.n
        if opcode.name in ("GLOBAL", "INST"):
            length = -10  # two lines
        takes = len(opcode.stack_before)
        kind = _KINDS.get(opcode.name, _JOIN if takes else _PUSH)
        table[ord(opcode.code)] = kind, length, takes
    return table


_OPCODES = _table()
_LENGTH_NBYTES = {pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT4: 4, pickletools.TAKEN_FROM_ARGUMENT4U: 4,
                  pickletools.TAKEN_FROM_ARGUMENT8U: 8}  # fmt: skip


def check_pickle(data: bytes) -> bytes:
    """The same pickle without frames, whose every BUILD is a call of ``persistent_load`` with (object, attributes).

    Raises: UnpicklingError if it is broken, or would take more than its length suggests
    """
    pieces: list[bytes] = []
    copied = 0
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[int, int] = {}
    at, end = 0, len(data)
    try:
        while True:
            code = data[at]
            at += 1
            opcode = _OPCODES[code]
            if opcode is None:
                raise pickle.UnpicklingError(f"it has an unknown opcode {code:#x} at byte {at - 1}")
            kind, length, takes = opcode
            begin = at
            if length >= 0:
                at += length
            elif length == pickletools.UP_TO_NEWLINE:
                at = data.index(b"\n", at) + 1
            elif length == -10:
                at = data.index(b"\n", data.index(b"\n", at) + 1) + 1
            else:
                size = _LENGTH_NBYTES[length]
                at += size + int.from_bytes(data[at : at + size], "little")
            if at > end:
                raise pickle.UnpicklingError(f"it is cut short within an object of {at - begin} bytes")
            if kind == _PUSH:
                stack.append(1)
            elif kind in (_PUT, _PUT_TEXT):
                index = int.from_bytes(data[begin:at], "little") if kind == _PUT else int(data[begin : at - 1])
                if not 0 <= index <= end:
                    raise pickle.UnpicklingError(f"it stores something at place {index} of its memo, and has {end} bytes")
                memo[index] = stack[-1]
            elif kind == _MEMOIZE:
                memo[len(memo)] = stack[-1]
            elif kind == _GET:
                stack.append(memo[int.from_bytes(data[begin:at], "little")])
            elif kind == _JOIN:
                parts = 1 + sum(stack[len(stack) - takes :]) if len(stack) >= takes else _underflow()
                del stack[len(stack) - takes :]
                stack.append(_bounded(parts))
            elif kind == _MARK:
                marks.append(len(stack))
            elif kind == _JOIN_MARK:
                mark = marks.pop()
                stack[mark:] = [_bounded(1 + sum(stack[mark:]))]
            elif kind == _ITEM:
                value, key = stack.pop(), stack.pop()
                _check_keys((key,))
                stack[-1] = _bounded(stack[-1] + key + value)
            elif kind in (_ITEMS_MARK, _ADD_KEYS_MARK, _ADD_MARK):
                mark = marks.pop()
                if kind != _ADD_MARK:
                    _check_keys(stack[mark :: 2 if kind == _ITEMS_MARK else 1])
                parts = sum(stack[mark:])
                del stack[mark:]
                stack[-1] = _bounded(stack[-1] + parts)
            elif kind in (_ADD, _BUILD):
                if kind == _BUILD:
                    pieces += [data[copied : begin - 1], pickle.TUPLE2 + pickle.BINPERSID]
                    copied = at
                parts = stack.pop()
                stack[-1] = _bounded(stack[-1] + parts)
            elif kind in (_LONG, _LINES):
                stack.append(1 if at - begin <= _LONG_KEY_NBYTES + (1 if kind == _LONG else 10) else MAX_KEY_PARTS + 1)
            elif kind in (_DICT_MARK, _KEYS_MARK):
                mark = marks.pop()
                _check_keys(stack[mark :: 2 if kind == _DICT_MARK else 1])
                stack[mark:] = [_bounded(1 + sum(stack[mark:]))]
            elif kind == _GET_TEXT:
                stack.append(memo[int(data[begin : at - 1])])
            elif kind == _POP:
                if marks and marks[-1] == len(stack):
                    marks.pop()
                else:
                    stack.pop()
            elif kind == _POP_MARK:
                del stack[marks.pop() :]
            elif kind == _DUP:
                stack.append(stack[-1])
            elif kind == _FRAME:
                pieces.append(data[copied : begin - 1])
                copied = at
            elif kind == _STOP:
                return b"".join([*pieces, data[copied:at]])
    except (IndexError, KeyError, ValueError) as error:
        raise pickle.UnpicklingError(f"it is not a whole pickle: {type(error).__name__} at byte {at} of {end}") from error


def _underflow() -> int:
    raise IndexError


def _bounded(parts: int) -> int:
    return min(parts, 1 << 40)  # doubled a million times it would be a long number


def _check_keys(keys: Any) -> None:
    if keys and max(keys) > MAX_KEY_PARTS:
        raise pickle.UnpicklingError("it has a dict's key or a set's member of more than 100 parts, or a number of more than 8 bytes")


def check_key(key: Any) -> None:
    """Bound an object that is a key. Raises: UnpicklingError"""
    todo, parts = [key], 0
    while todo:
        each = todo.pop()
        parts += 1
        if parts > MAX_KEY_PARTS or (type(each) is int and each.bit_length() > 8 * _LONG_KEY_NBYTES):
            _check_keys((MAX_KEY_PARTS + 1,))
        if isinstance(each, (tuple, frozenset)):
            todo.extend(list(each)[: MAX_KEY_PARTS + 1])


class BoundedUnpickler(pickle.Unpickler):
    """C's unpickler, after ``check_pickle``. Subclasses say what names mean, what is stored elsewhere, and what gets attributes."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(check_pickle(data)), encoding="utf-8")

    def persistent_load(self, pid: Any) -> Any:
        if not isinstance(pid, tuple) or len(pid) != 2:
            return self.stored(pid)
        made, state = pid
        if not self.build(made, state):
            raise pickle.UnpicklingError(f"it changes {str(made)[:100]}, which it has not made")
        return made

    def stored(self, pid: Any) -> Any:
        """The object that ``pid`` refers to."""
        raise pickle.UnpicklingError(f"it refers to {str(pid)[:100]}, which is no storage")

    @abstractmethod
    def build(self, made: Any, state: Any) -> bool:
        """Give ``made`` its attributes. False if it is nothing that this unpickler makes: a class, a function, ..."""


# The containers that a pickle may call: their keys cost no more than those that an opcode puts in.


def checked_set(items: Any = ()) -> set[Any]:
    return set(_checked_keys(items))


def checked_frozenset(items: Any = ()) -> frozenset[Any]:
    return frozenset(_checked_keys(items))


def checked_dict(items: Any = ()) -> dict[Any, Any]:
    pairs = list(items.items() if isinstance(items, dict) else items)
    for key, _ in pairs:
        check_key(key)
    return dict(pairs)


def checked_ordered_dict(items: Any = ()) -> collections.OrderedDict[Any, Any]:
    return collections.OrderedDict(checked_dict(items))


def _checked_keys(items: Any) -> list[Any]:
    keys = list(items)
    for each in keys:
        check_key(each)
    return keys


def check_made(root: Any, max_parts: int) -> None:
    """Bound the cost of a walk through nested dicts, lists and tuples, which meets shared ones as often as they occur.

    Raises: UnpicklingError if that is more than ``max_parts`` objects, deeper than MAX_DEPTH, or endless
    """
    known: dict[int, tuple[int, int]] = {}
    under_way: set[int] = set()

    def measure(node: Any, depth: int) -> tuple[int, int]:
        """Parts and height."""
        if not isinstance(node, (dict, list, tuple, set, frozenset)):
            return 1, 0
        if id(node) in under_way:
            raise pickle.UnpicklingError("it has a container that contains itself")
        if id(node) not in known:
            under_way.add(id(node))
            parts, height = 1 + (len(node) if isinstance(node, dict) else 0), 1
            for each in (node.values() if isinstance(node, dict) else node) if depth <= MAX_DEPTH else ():
                below = measure(each, depth + 1)
                parts, height = parts + below[0], max(height, below[1] + 1)
            under_way.discard(id(node))
            known[id(node)] = parts, height
        parts, height = known[id(node)]
        if depth + height > MAX_DEPTH:
            raise pickle.UnpicklingError(f"its containers are nested more than {MAX_DEPTH} deep")
        if parts > max_parts:
            raise pickle.UnpicklingError(f"it describes more than {max_parts} objects in containers that are shared again and again")
        return parts, height

    measure(root, 0)
