"""Results for programs: JSON with everything, CSV with one line per policy and budget."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvdata.evaluation.results import Result


def save_json(report: Mapping[str, Any], path: Path) -> None:
    """Write a report; `Result` and whatever else has ``to_dict`` become plain objects."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2, default=lambda value: value.to_dict(), allow_nan=False) + "\n")


def save_csv(results: Sequence[Result], path: Path) -> None:
    """Write one line per policy and budget; columns that a result lacks are empty."""
    lines = [_line(result) for result in results]
    columns = list(dict.fromkeys(name for line in lines for name in line))
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def _line(result: Result) -> dict[str, Any]:
    line = result.to_dict()
    recall, passkey, seconds = line.pop("recall"), line.pop("passkey"), line.pop("seconds")
    line["ci90_low"], line["ci90_high"] = line.pop("ci90")
    for kind, increase in recall.items():
        line[f"{kind}: nll"], line[f"{kind}: delta_nll"] = increase["nll"], increase["delta_nll"]
    if passkey:
        line["passkey_found"], line["passkey_prompts"] = passkey["found"], passkey["prompts"]
    return {**line, **{f"{name}_seconds": value for name, value in seconds.items()}}
