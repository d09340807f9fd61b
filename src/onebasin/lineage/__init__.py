"""Does one network come from another? Tests with p-values on their weights."""

from onebasin.lineage.kinship import Evidence
from onebasin.lineage.relation import Provenance, provenance

__all__ = ["Evidence", "Provenance", "provenance"]
