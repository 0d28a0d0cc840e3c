"""Layouts: rules that read where the heads of an attention are from its modules and parameters."""

from headwise.heads.layouts.known import LAYOUTS
from headwise.heads.layouts.parameters import FusedParameter, SeparateParameters
from headwise.heads.layouts.rows import (
    AdditiveQueries,
    FusedLinear,
    HeadList,
    LatentLinears,
    Layout,
    SeparateLinears,
    TorchMultihead,
)

__all__ = [
    "LAYOUTS",
    "AdditiveQueries",
    "FusedLinear",
    "FusedParameter",
    "HeadList",
    "LatentLinears",
    "Layout",
    "SeparateLinears",
    "SeparateParameters",
    "TorchMultihead",
]
