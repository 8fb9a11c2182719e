"""Selection rules: which rows stay on which layer. One file a rule."""

from cacheblend_rag.fusor.selection.all import SelectAll
from cacheblend_rag.fusor.selection.base import LayerView, SelectionRule, budget
from cacheblend_rag.fusor.selection.hkvd import SelectHKVD
from cacheblend_rag.fusor.selection.none import SelectNone

__all__ = ["LayerView", "SelectAll", "SelectHKVD", "SelectNone", "SelectionRule", "budget"]
