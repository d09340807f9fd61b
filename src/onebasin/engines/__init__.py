"""Where work on files is done: in this process, in worker processes, or on a Ray cluster. The results are the same bits.

Functions are mapped over items, with a bounded number of them under way, and results are summed in a tree of a fixed shape.
Workers are sent the paths of files, and read them where they lie.
"""

from onebasin.engines.choice import EngineName, make_engine, opened
from onebasin.engines.engine import LOCAL, Engine, LocalEngine
from onebasin.engines.journal import Journal

__all__ = ["LOCAL", "Engine", "EngineName", "Journal", "LocalEngine", "make_engine", "opened"]
