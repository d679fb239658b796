"""Of which programs a row that keeps no key is even: all its scores are one huge negative number (even.py)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from torchflash import score as sc
from torchflash.kernels.forms import Form, magnitude
from torchflash.kernels.program import G, S
from torchflash.score import Expr

LOW = -1e30  # adding a moderate score to this or less does not change it
MODERATE = 2.0**40


@dataclass(frozen=True)
class Shape:
    """What even rows of a program are made of."""

    slope: float  # of the score, at what is masked
    value: Expr | None  # what is added where nothing is kept, if that is data and has to be looked at

    @property
    def added(self) -> bool:
        return self.slope != 0.0


@functools.lru_cache(maxsize=4096)
def shape(form: Form) -> Shape | None:
    """None where a row without kept keys need not be even."""
    program = form.program
    keep, e = program.keep, program.score
    if keep is None or program.post is not None or not sc.loads(keep):
        return None
    if e.op == "where":
        return Shape(0.0, None) if _filled(e) is keep else None
    slope = _slope(program.score_vjp.get(S))
    if e.op != "+" or not slope:
        return None
    for mask, other in (e.args, e.args[::-1]):
        if not magnitude(other) <= MODERATE:
            continue
        if mask.op == "load" and sc.kind(mask, program.kind_map) == "f":
            low = sc.build("~", sc.build("<=", mask, sc.const(LOW)))
            return Shape(slope, mask) if keep is low else None
        if mask.op == "where" and _added(mask) is keep:
            return Shape(slope, None)
    return None


def _filled(e: Expr) -> Expr | None:
    """The condition under which `e` is not one and the same finite number, which it is everywhere else."""
    condition, a, b = e.args
    if a.op == "const" and (b.op != "const" or a.value < b.value):
        condition, a, b = sc.build("~", condition), b, a
    if b.op != "const" or not -math.inf < b.value < 0:
        return None
    inner = _filled(a) if a.op == "where" and b in a.args else None
    return condition if inner is None else sc.build("&", condition, inner)


def _added(e: Expr) -> Expr | None:
    """The condition under which where(…) is 0, if it is so low a number everywhere else that what it is added to is
    lost."""
    condition, a, b = e.args
    if a.op != "const" or b.op != "const":
        return None
    if a.value < b.value:
        condition, a, b = sc.build("~", condition), b, a
    return condition if a.value == 0 and -torch.finfo(torch.float32).max <= b.value <= LOW else None


def _slope(e: Expr | None) -> float:
    """c of a gradient c · g, else 0."""
    if e is None:
        return 0.0
    if e is G:
        return 1.0
    if e.op == "neg":
        return -_slope(e.args[0])
    if e.op == "*":
        for number, other in (e.args, e.args[::-1]):
            if number.op == "const":
                return float(number.value) * _slope(other)
    if e.op == "/" and e.args[1].op == "const" and e.args[1].value:
        return _slope(e.args[0]) / float(e.args[1].value)
    return 0.0
