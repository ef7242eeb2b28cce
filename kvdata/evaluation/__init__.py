"""How much a compressed cache costs, and what it gains: against the full cache, offline and on a live engine."""

from kvdata.evaluation.decoding import Arm, decode_arms, decoding_report, score_continuations
from kvdata.evaluation.dropping import PolicyCaches, Result, evaluate_caches
from kvdata.evaluation.report import print_decoding, print_table, save_gain_plot, save_json, save_plot

__all__ = [
    "Arm",
    "PolicyCaches",
    "Result",
    "decode_arms",
    "decoding_report",
    "evaluate_caches",
    "print_decoding",
    "print_table",
    "save_gain_plot",
    "save_json",
    "save_plot",
    "score_continuations",
]
