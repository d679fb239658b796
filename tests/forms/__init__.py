"""Attention as people write it: `FORMS` by name."""

from forms import biases, layouts, masks, parts, softmaxes, surroundings, traps, unordered
from forms.registry import FORMS, Form, check, make

__all__ = [
    "FORMS",
    "Form",
    "biases",
    "check",
    "layouts",
    "make",
    "masks",
    "parts",
    "softmaxes",
    "surroundings",
    "traps",
    "unordered",
]
