"""How much a compressed cache costs: quality of the continuation against the full cache."""

from kvdata.evaluation.dropping import PolicyCaches, Result, evaluate_caches
from kvdata.evaluation.report import print_table, save_json, save_plot

__all__ = ["PolicyCaches", "Result", "evaluate_caches", "print_table", "save_json", "save_plot"]
