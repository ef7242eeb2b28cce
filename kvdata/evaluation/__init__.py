"""How much a compressed cache costs, and what it gains: against the full cache, offline and on a live engine."""

from kvdata.evaluation.decoding import Arm, decode_arms, decoding_report, score_continuations
from kvdata.evaluation.dropping import PolicyCaches, evaluate_caches
from kvdata.evaluation.live_scoring import LiveResult, LiveScorer, decode_live, live_results, score_live
from kvdata.evaluation.methods import Dropping, Method, methods_named
from kvdata.evaluation.offline import evaluate
from kvdata.evaluation.passkey import evaluate_passkey, passkey_prompts
from kvdata.evaluation.report import (
    print_costs,
    print_decoding,
    print_live,
    print_results,
    save_csv,
    save_gain_plot,
    save_html,
    save_json,
    save_plot,
)
from kvdata.evaluation.results import Comparison, Result, comparisons, summarise
from kvdata.evaluation.runs import LiveRow, PasskeyRow, Row, Rows, open_run

__all__ = [
    "Arm",
    "Comparison",
    "Dropping",
    "LiveResult",
    "LiveRow",
    "LiveScorer",
    "Method",
    "PasskeyRow",
    "PolicyCaches",
    "Result",
    "Row",
    "Rows",
    "comparisons",
    "decode_arms",
    "decode_live",
    "decoding_report",
    "evaluate",
    "evaluate_caches",
    "evaluate_passkey",
    "live_results",
    "methods_named",
    "open_run",
    "passkey_prompts",
    "print_costs",
    "print_decoding",
    "print_live",
    "print_results",
    "save_csv",
    "save_gain_plot",
    "save_html",
    "save_json",
    "save_plot",
    "score_continuations",
    "score_live",
    "summarise",
]
