"""Showing results: tables on the terminal, JSON and CSV for programs, a plot, and one HTML file to open."""

from kvdata.evaluation.report.files import save_csv, save_json
from kvdata.evaluation.report.html import save_html
from kvdata.evaluation.report.plots import save_gain_plot, save_plot
from kvdata.evaluation.report.tables import print_costs, print_decoding, print_live, print_results

__all__ = [
    "print_costs",
    "print_decoding",
    "print_live",
    "print_results",
    "save_csv",
    "save_gain_plot",
    "save_html",
    "save_json",
    "save_plot",
]
