"""The Sinkhorn operator with an implicit gradient."""

from onebasin.operator.entry import SinkhornInfo, sinkhorn

__all__ = ["SinkhornInfo", "sinkhorn"]
