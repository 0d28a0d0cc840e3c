"""Which key each query may attend to. True = may attend."""

from headwise.masks.flex import FlexMask
from headwise.masks.head_mask import HeadMask

__all__ = ["FlexMask", "HeadMask"]
